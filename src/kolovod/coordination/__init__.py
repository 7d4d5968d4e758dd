"""Who is in the worlds of an elastic job: what its launcher and its ranks decide by.

Nothing here knows of tensors, steps or processes: launchers use it without NumPy. What a rank does
with it is in ``elastic``.
"""
