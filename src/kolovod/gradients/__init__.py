"""The exchange of gradients: what all front ends plan, agree upon, compress, send and check alike.

Nothing here knows a framework. ``plan`` says which gradients travel together, ``spec`` how they are
combined, ``agreement`` whether the ranks mean the same ones; ``compression`` says what travels in
their place, ``exchange`` sends a bucket by the verbs of a framework, ``in_flight`` and ``stager``
hold what is on its way.
"""
