"""The ranks of a tensor-parallel worker as its child processes, on its machine.

They end when the worker ends, however it does: the kernel ends them (:func:`cluster.processes.starting.exit_with`), and
where it does not, the end of their input tells them.

``python -m cluster.processes.rank_processes PID`` is such a rank, of the worker with this process id: it reads its task
from standard input, which the worker holds open for as long as it lives.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from cluster.console import BAD_INPUT, FAILED, complain
from cluster.processes.child import ours, spawn
from cluster.processes.imports import uncollected
from cluster.processes.starting import exit_with

if TYPE_CHECKING:
    from engine.leader import Loss
    from engine.parallel.group import RankTask

REMEMBERED_LINES = 40


@dataclass(eq=False)
class _Rank:
    process: subprocess.Popen[str]
    said: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_LINES))


class RankProcesses:
    """All ranks of one worker but its own. Implements :class:`engine.leader.Ranks`."""

    own_gpus = False
    module = "cluster.processes.rank_processes"
    """What a rank runs: :func:`main`."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def start(self, tasks: Sequence[RankTask]) -> None:
        """Start them all; the kernel ends them with the thread that calls this. Raises OSError."""
        for task in tasks:
            process = self.spawned()
            rank = self._ranks[task.rank] = _Rank(process)
            assert process.stdin and process.stdout
            follow = task.rank, rank, process.stdout
            threading.Thread(target=self._follow, args=follow, daemon=True, name=f"rank {task.rank}").start()
            with open(process.stdin.fileno(), "wb", closefd=False) as pipe:
                pipe.write(pickle.dumps(task))  # left open: its end is the worker's end

    def spawned(self) -> subprocess.Popen[str]:
        """A process that waits for its task."""
        return spawn(ours(self.module, str(os.getpid())), {}, held=True, merged=True)

    def wait(self) -> Loss:
        """Block until one has ended."""
        from engine.leader import Loss

        number = self._ended.get()
        return Loss(number, self.about(number), refused=self._ranks[number].process.returncode == BAD_INPUT)

    def about(self, rank: int) -> str:
        """How it ended, or the last it said."""
        known = self._ranks.get(rank)
        if known is None:
            return "was not started"
        code = known.process.poll()
        said = known.said[-1].removeprefix("paceline: ") if known.said else ""
        if code is None:
            return f"runs, and said last: {said}" if said else "runs, and has said nothing"
        if code < 0:
            return f"was killed by signal {-code}"
        return said or f"ended with exit code {code}"

    def stop(self, seconds: float) -> None:
        """Let them end by themselves for so long, then kill them."""
        deadline = time.monotonic() + seconds
        for rank in self._ranks.values():
            try:
                rank.process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()

    def end_worker(self, loss: Loss, reason: str) -> None:
        """End this process at once, with what the rank said and one line of the reason."""
        rank = self._ranks.get(loss.rank)
        if rank is not None and (rank.process.returncode or 0) > 0:  # the traceback of an exception
            for line in rank.said:
                complain(f"[rank {loss.rank}] {line}")
        complain(f"paceline: the worker ends, it has lost a rank: {reason}")
        os._exit(FAILED)

    def _follow(self, number: int, rank: _Rank, output: IO[str]) -> None:
        with output:
            for line in output:
                if text := line.rstrip():
                    rank.said.append(text)
        rank.process.wait()
        self._ended.put(number)


def main() -> int:
    """Compute until the worker says that it is over, or ends."""
    exit_with(int(sys.argv[1]))
    task = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_input, daemon=True, name="lifeline").start()
    with uncollected():
        from engine.build import serve_rank
        from engine.model import ModelError

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
