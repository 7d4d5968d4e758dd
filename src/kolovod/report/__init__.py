"""A timeline as one HTML page, for `kolovod report`: everything it needs is inside of it.

``lanes.py`` has who did what when, ``anatomy.py`` what a step is made of, ``tables.py`` operations
and buckets, ``advice.py`` what to do first; ``sections.py`` and ``charts.py`` compute from these
what the page shows. All of that is pure. The markup is in ``templates``, which ``page.py`` fills by
Jinja, together with ``page.css`` and the scripts. docs/report.md explains the page.
"""
