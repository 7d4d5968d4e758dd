"""The parts that Horovod's front ends share."""
