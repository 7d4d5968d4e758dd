"""The parts of Horovod's elastic launcher that scripts import."""
