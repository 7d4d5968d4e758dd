"""Names of Horovod's that others import from here."""
