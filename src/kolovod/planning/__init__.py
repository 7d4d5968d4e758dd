"""Predictions of a training on other hosts, links and codecs, from a timeline of a short run.

``measured.py`` reads what a timeline shows. ``model.py`` models a step and ``costs.py`` a bucket;
``changes.py`` has the changes that can be tried and ``asked.py`` what flags ask for; ``plan.py``
compares and advises; all of that is pure. ``words.py`` and ``drawing.py`` show a plan. docs/plan.md
explains the model.
"""
