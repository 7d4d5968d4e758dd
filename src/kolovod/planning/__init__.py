"""What a training would take on other hosts, links and codecs, from a timeline of a short run.

``measured.py`` reads what a timeline shows, ``model.py`` says what a step takes and ``costs.py``
what a bucket does, ``changes.py`` is what else would be and ``asked.py`` what flags ask for,
``plan.py`` compares and advises; all of that is pure. ``words.py`` and ``drawing.py`` show a plan.
docs/plan.md explains the model.
"""
