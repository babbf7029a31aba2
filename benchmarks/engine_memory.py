"""What a target worker process holds in memory beyond its weights, its cache and the numbers of one step.

Taken from a real ``paceline worker target``, without Ray, after it has served one batch of requests: everything
resident (shared libraries in full, as if no other process used them), less what is known to be needed:

- weights: every parameter once;
- cache: all of its slots; the worker gets no more of them than the batch needs, so that none stays untouched;
- activations: the widest place of the largest step (see :func:`benchmarks.engine_model.activations`), a low estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine_model import activations, cached_values, parameters
from benchmarks.engine_settings import Shape
from cluster.config import Config

MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one worker process, in bytes."""

    resident: int
    """All its pages in memory."""
    private: int
    """Those that no other process shares at the moment."""
    weights: int
    cache: int
    activations: int

    @property
    def overhead(self) -> int:
        """What is left: interpreter, libraries, allocator, copies."""
        return self.resident - self.weights - self.cache - self.activations


def memory_of(process: int, shape: Shape, item: int, slots: int, rows: int) -> Memory:
    """Of the worker with this process id; ``item``: bytes of a number, ``rows``: of logits in its widest step."""
    fields = read_rollup(Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii"))
    return Memory(
        resident=fields["Rss"],
        private=fields["Private_Clean"] + fields["Private_Dirty"],
        weights=item * parameters(shape),
        cache=item * cached_values(shape) * slots,
        activations=item * activations(shape, Config().target.prompt_tokens, rows),
    )


def read_rollup(text: str) -> dict[str, int]:
    """The fields of ``/proc/PID/smaps_rollup`` (proc_pid_smaps(5)), in bytes."""
    lines = (line.split() for line in text.splitlines()[1:])
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
