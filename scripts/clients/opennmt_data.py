r"""Writes what OpenNMT-tf's training reads: made-up sentences, their vocabulary, its options.

    python opennmt_data.py FOLDER
    onmt-main --model opennmt_model.py --config FOLDER/one.yml --seed 3 train
    horovodrun -np 2 onmt-main --model opennmt_model.py --config FOLDER/two.yml --seed 3 \
        train --horovod

Ranks take sentences in turn. Two with batches of 8 see what one sees in two batches of 8, whose
gradients it adds up.
"""

import sys
from pathlib import Path

import numpy
import yaml

WORDS, LENGTH, SENTENCES, STEPS = 20, 7, 960, 60

folder = Path(sys.argv[1])
draw = numpy.random.default_rng(4)
sentences = draw.integers(WORDS, size=(SENTENCES, LENGTH))
for name, words in {"source": sentences, "target": sentences[:, ::-1]}.items():
    text = "\n".join(" ".join(f"w{word}" for word in sentence) for sentence in words)
    (folder / f"{name}.txt").write_text(text + "\n")
vocabulary = ["<blank>", "<s>", "</s>", *(f"w{word}" for word in range(WORDS))]
(folder / "words.txt").write_text("\n".join(vocabulary) + "\n")
for name in ("one", "two"):
    options = {
        "model_dir": str(folder / name),
        "data": {
            "train_features_file": str(folder / "source.txt"),
            "train_labels_file": str(folder / "target.txt"),
            "source_vocabulary": str(folder / "words.txt"),
            "target_vocabulary": str(folder / "words.txt"),
        },
        # Biases of keys have no influence: their gradients are rounding errors, which a smaller
        # epsilon makes large.
        "params": {
            "optimizer": "Adam",
            "optimizer_params": {"epsilon": 1e-3},
            "learning_rate": 0.01,
        },
        "train": {
            "batch_size": 8,
            "batch_type": "examples",
            # Of two ranks nothing is asked: one that trained alone would come to something else.
            **({"effective_batch_size": 16} if name == "one" else {}),
            "length_bucket_width": None,
            "sample_buffer_size": None,  # in the order of the file
            "max_step": STEPS,
            "save_summary_steps": 20,
            "save_checkpoints_steps": STEPS,
        },
    }
    (folder / f"{name}.yml").write_text(yaml.safe_dump(options))
