"""``python -m cluster.processes.run_rank PID``: a rank of the tensor-parallel worker with this process id.

Reads its task from standard input, which the worker holds open for as long as it lives.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading

from cluster.config.flags import BAD_INPUT, FAILED
from cluster.console import complain
from cluster.processes.imports import uncollected
from cluster.processes.parent import exit_with


def main() -> int:
    """Compute until the worker says that it is over, or ends."""
    exit_with(int(sys.argv[1]))
    task = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_input, daemon=True, name="lifeline").start()
    with uncollected():
        from engine.model import ModelError
        from engine.rank import serve_rank

    try:
        serve_rank(task)
    except ModelError as error:
        complain(f"paceline: {error}")
        return BAD_INPUT
    return 0


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(FAILED)


if __name__ == "__main__":
    os._exit(main())  # taking torch down takes seconds, and there is nothing to keep
