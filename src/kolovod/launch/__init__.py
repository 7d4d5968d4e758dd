"""How ranks are started and how they meet.

``cli`` reads the command line, ``spawn`` starts and supervises the ranks with the help of ``guard``
and ``output``, ``store`` is where they meet, ``bootstrap`` hands the shared segment round, and
``auth`` comes before every one of these conversations. ``mpirun`` starts ranks by an MPI library.
"""
