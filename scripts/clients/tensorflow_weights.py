"""Copies the weights in a checkpoint of TensorFlow, but not the optimizer's state, to a .npz file.

    python tensorflow_weights.py CHECKPOINT FOLDER/rank0.npz

A folder stands for its latest checkpoint.
"""

import sys

import numpy
import tensorflow

source, target = sys.argv[1:]
checkpoint = tensorflow.train.load_checkpoint(source)
shapes = checkpoint.get_variable_to_shape_map()
names = [
    name
    for name in sorted(shapes)
    if shapes[name] and "optimize" not in name.lower() and "Adam" not in name
]
numpy.savez(target, **{f"weights.{name}": checkpoint.get_tensor(name) for name in names})
