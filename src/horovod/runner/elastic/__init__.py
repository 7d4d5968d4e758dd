"""What of Horovod's elastic launcher scripts import."""
