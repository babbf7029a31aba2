"""The design: in which settings contenders are compared.

The main settings are the stretched pair at acceptance 0.8, temperature 0, batch 1, at a round trip to the drafter of 0
and of 20 ms. The full design varies one factor at a time around the first of them (round trip, temperature, batch,
acceptance, the trained pair), and the round trip at every acceptance. Faults and transformers are measured on the main
pair only.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from benchmarks.harness.options import Options, check_stretched, flag
from cluster.console import BadInput

MAIN_ACCEPTANCE = 0.8


@dataclass(frozen=True, slots=True)
class ComparisonSetting:
    """What the contenders of one comparison have in common."""

    name: str
    rtt_ms: float = 0.0
    """Injected round trip between router and drafter, on top of the real one."""
    temperature: float = 0.0
    batch: int = 1


NEAR = ComparisonSetting("0 ms")
FAR = ComparisonSetting("20 ms", rtt_ms=20.0)
BATCH_16 = ComparisonSetting("batch 16", batch=16)
TRANSFORMERS = ComparisonSetting("transformers")
"""Beside another library; ours is idle while it runs."""
DEAD = ComparisonSetting("dead drafter")
"""The drafter of a server in use was killed; requests still ask for drafts."""
WRONG_COLD = ComparisonSetting("wrong drafter, cold")
"""A drafter whose every draft is wrong has just come to a server that trusted the last one."""
WRONG = ComparisonSetting("wrong drafter")
"""The same later: the target has seen what its drafts are worth."""
EXTRAS = (TRANSFORMERS, DEAD, WRONG_COLD, WRONG)
SHARED = ComparisonSetting("cores shared")
"""Both workers compute with all cores, instead of one each."""


@dataclass(frozen=True, slots=True)
class PairPlan:
    """The settings one pair is measured in, by the same processes."""

    acceptance: float | None
    """Of a stretched pair; None: the pair as trained."""
    settings: tuple[ComparisonSetting, ...]
    extras: bool = False
    """Whether those of ``EXTRAS`` are measured as well, and in a full run how workers do that share all cores."""


QUICK = (PairPlan(MAIN_ACCEPTANCE, (NEAR, FAR, BATCH_16), extras=True),)

ROUND_TRIPS = (NEAR, ComparisonSetting("5 ms", rtt_ms=5.0), FAR)
_OTHERS = (
    ComparisonSetting("temperature 0.7", temperature=0.7),
    ComparisonSetting("temperature 1", temperature=1.0),
    ComparisonSetting("batch 4", batch=4),
    BATCH_16,
)
FULL = (
    PairPlan(MAIN_ACCEPTANCE, (*ROUND_TRIPS, *_OTHERS), extras=True),
    PairPlan(0.6, ROUND_TRIPS),
    PairPlan(0.9, ROUND_TRIPS),
    PairPlan(None, (NEAR,)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions(Options):
    """How large the benchmark is."""

    BENCH = "speculation"
    ABOUT = "speculative against plain decoding, other ways to draft, and transformers"
    DETAILS = (
        "The full run takes an hour or more, the quick one less than ten minutes; building the pairs adds minutes the "
        "first time."
    )
    MODULE = "benchmarks.speculation.run"
    FOLDER = ""
    quick: bool = flag(False, "only the settings for which there are goals; writes no folder")
    out: Path | None = flag(None, "folder of a full run (default: benchmarks/results/DATE)", metavar="DIR")
    prompts: int = flag(10, "prompts a setting", least=1, quick=8)
    bursts: int = flag(3, "rounds with several requests at once", least=1, quick=2)
    tokens: int = flag(96, "new tokens a prompt", least=40)
    """The first do not count, and those are as many as one step may commit where drafts were there before it."""
    dtype: str = flag("bfloat16", "number format")
    hidden: int = flag(1024, "hidden size of the stretched target")
    layers: int = flag(24, "layers of the stretched target")

    def checked(self) -> Self:
        """See :class:`benchmarks.harness.options.Options`."""
        if not self.quick and not find_spec("matplotlib"):
            raise BadInput("a full run draws plots, for which matplotlib is needed: pip install matplotlib")
        check_stretched(self.hidden, self.layers)
        return self

    @property
    def plans(self) -> tuple[PairPlan, ...]:
        """The pairs and settings that are measured; the main pair comes first."""
        return QUICK if self.quick else FULL
