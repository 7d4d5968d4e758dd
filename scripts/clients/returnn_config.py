"""A configuration of RETURNN: a recurrent tagger, on one rank or on several by Horovod.

    horovodrun -np 2 python -m returnn returnn_config.py ++model FOLDER/model ++use_horovod 1
    python -m returnn returnn_config.py ++model FOLDER/model ++max_seqs 8

Ranks take batches in turn, so two ranks with batches of 4 sequences do what one does with 8.
"""

import numpy

_LENGTH, _CLASSES = 12, 5


def _made_up(seed, count):
    """Sequences in which the class of each place is the one that was strongest before."""
    draw = numpy.random.default_rng(seed)
    for _ in range(count):
        inputs = draw.normal(size=(_LENGTH, _CLASSES)).astype("float32")
        classes = numpy.roll(inputs.argmax(1), 1).astype("int32")
        yield {"data": inputs, "classes": classes}


def _dataset(seed, count):
    dims = {"data": (_CLASSES, 2), "classes": (_CLASSES, 1)}
    made = list(_made_up(seed, count))
    return {"class": "StaticDataset", "data": made, "output_dim": dims, "input_dim": _CLASSES}


task = "train"
backend = "tensorflow-net-dict"
device = "cpu"
train = _dataset(1, 128)
dev = _dataset(2, 32)
extern_data = {
    "data": {"dim": _CLASSES},
    "classes": {"dim": _CLASSES, "sparse": True},
}
network = {
    "memory": {"class": "rec", "unit": "standardlstm", "n_out": 24, "from": "data"},
    "hidden": {"class": "linear", "activation": "tanh", "n_out": 24, "from": "memory"},
    "output": {"class": "softmax", "loss": "ce", "target": "classes", "from": "hidden"},
}
batching = "default"
batch_size = 10000
max_seqs = 4
num_epochs = 3
save_interval = 1
optimizer = {"class": "adam"}
learning_rate = 0.01
gradient_clip_global_norm = 5.0
random_seed = 1
log_verbosity = 4
tf_log_memory_usage = False
use_horovod = False
horovod_dataset_distribution = "shard"
horovod_reduce_type = "grad"
