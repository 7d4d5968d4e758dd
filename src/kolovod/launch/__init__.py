"""How ranks are started and how they meet.

``cli`` reads the command line, ``spawn`` starts a job and sees it through: ``ranks`` has the ranks
of this host (``guard``, ``output``), ``remote`` those of another one, where ``agent`` is at work.
``store`` is where ranks meet, ``network`` at which address, ``bootstrap`` hands the shared segment
round, ``mesh`` connects hosts, and ``auth`` comes before every one of these conversations.
``mpirun`` starts ranks by an MPI library; ``launchers`` knows who else may have started them, and
``started`` lets those meet. ``function`` calls a function on ranks, ``doctor`` looks at hosts.
"""
