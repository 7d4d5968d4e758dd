"""The check of a training script: what ``kolovod check`` sees of it, and what it finds.

In each rank ``startup/sitecustomize.py`` begins the check, before the script: ``recorder.py`` has
the facts of the process (``facts.py``), which the watchers note: ``watch_run.py`` (worlds,
operations, files), ``watch_torch.py``, ``watch_keras.py`` and ``watch_jax.py``. The launcher reads
the facts of all ranks, and pure functions compare them (``compare.py`` and the modules beside it).

Nothing here is imported where no check was asked for.
"""
