"""One rank of a world: ``rank.py WORK RESULT`` calls the pickled function of the file WORK.

The file RESULT gets ``{"result": value}`` or ``{"traceback": text}``, or nothing if it never ends.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import cloudpickle


def main() -> int:
    """Call the function; return 1 if it raised."""
    faulthandler.enable()
    work, result = map(Path, sys.argv[1:])
    record: dict[str, Any]
    with work.open("rb") as file:
        sys.path[:] = pickle.load(file)
        try:
            function, arguments = pickle.load(file)
            record = {"result": function(int(os.environ["KOLOVOD_RANK"]), *arguments)}
        except Exception as error:
            sys.last_value = error  # so that leaving the world says why
            record = {"traceback": traceback.format_exc()}
    fresh = result.with_suffix(".fresh")
    fresh.write_bytes(cloudpickle.dumps(record))
    fresh.replace(result)
    return 0 if "result" in record else 1


if __name__ == "__main__":
    sys.exit(main())
