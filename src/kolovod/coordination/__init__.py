"""The rules by which an elastic job's launcher and ranks decide who is in its worlds.

Nothing here knows of tensors, steps or processes: launchers use it without NumPy. What a rank does
with it is in ``elastic``.
"""
