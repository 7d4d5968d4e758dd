"""The start of ranks: the launcher, and its agents on other hosts.

``cli`` reads the command line, ``job`` starts a job and sees it through: ``local`` has the ranks of
this host (``orphan_reaper``, ``output``), ``remote`` those of another one, where ``agent`` is at
work. ``rendezvous.server`` is where ranks meet, ``net.addresses`` knows at which address,
``rendezvous.segment_handover`` hands the shared segment round, ``rendezvous.mesh`` connects hosts,
and ``net.channel`` comes before every one of these conversations. ``mpirun`` starts ranks by an MPI
library; ``rendezvous.external.launchers`` knows who else may have started them, and
``rendezvous.external.meeting`` lets those meet. ``function`` calls a function on ranks, ``doctor``
looks at hosts.
"""
