"""A timeline as one HTML page, for `kolovod report`: everything it needs is inside of it.

``lanes.py`` has who did what when, ``anatomy.py`` what a step is made of, ``tables.py`` operations
and buckets, ``advice.py`` what to do first; all of that is pure. ``page.py`` puts it into
``page.html`` with ``page.css`` and the scripts, ``charts.py`` draws. docs/report.md explains it.
"""
