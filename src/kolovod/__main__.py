"""``python -m kolovod`` is the ``kolovod`` command."""

from kolovod.launch.cli import command

if __name__ == "__main__":
    raise SystemExit(command())
