"""The design: in which settings contenders are compared.

The main settings are the stretched pair at acceptance 0.8, temperature 0, batch 1, at a round trip to the drafter of 0
and of 20 ms. The full design varies one factor at a time around the first of them (round trip, temperature, batch,
acceptance, the trained pair), and the round trip at every acceptance. Faults and transformers are measured on the main
pair only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAIN_ACCEPTANCE = 0.8


@dataclass(frozen=True, slots=True)
class Setting:
    """What the contenders of one comparison have in common."""

    name: str
    rtt_ms: float = 0.0
    """Injected round trip between router and drafter, on top of the real one."""
    temperature: float = 0.0
    batch: int = 1
    """Requests at once."""


NEAR = Setting("0 ms")
FAR = Setting("20 ms", rtt_ms=20.0)
BATCH_16 = Setting("batch 16", batch=16)
TRANSFORMERS = Setting("transformers")
"""Beside another library; ours is idle while it runs."""
DEAD = Setting("dead drafter")
"""The drafter of a server in use was killed; requests still ask for drafts."""
WRONG_COLD = Setting("wrong drafter, cold")
"""A drafter whose every draft is wrong has just come to a server that trusted the last one."""
WRONG = Setting("wrong drafter")
"""The same later: the target has seen what its drafts are worth."""
EXTRAS = (TRANSFORMERS, DEAD, WRONG_COLD, WRONG)
SHARED = Setting("cores shared")
"""Both workers compute with all cores, instead of one each."""


@dataclass(frozen=True, slots=True)
class PairPlan:
    """The settings one pair is measured in, by the same processes."""

    acceptance: float | None
    """Of a stretched pair; None: the pair as trained."""
    settings: tuple[Setting, ...]
    lookup: bool = False
    """Whether the contenders with prompt lookup take part, at batch 1; there is no goal for them."""
    extras: bool = False
    """Whether the settings of ``EXTRAS`` are measured as well."""
    shared: bool = False
    """Whether it is measured too how the workers do that share all cores."""


QUICK = (PairPlan(MAIN_ACCEPTANCE, (NEAR, FAR, BATCH_16), extras=True),)

ROUND_TRIPS = (NEAR, Setting("5 ms", rtt_ms=5.0), FAR)
_OTHERS = (
    Setting("temperature 0.7", temperature=0.7),
    Setting("temperature 1", temperature=1.0),
    Setting("batch 4", batch=4),
    BATCH_16,
)
FULL = (
    PairPlan(MAIN_ACCEPTANCE, (*ROUND_TRIPS, *_OTHERS), lookup=True, extras=True, shared=True),
    PairPlan(0.6, ROUND_TRIPS, lookup=True),
    PairPlan(0.9, ROUND_TRIPS, lookup=True),
    PairPlan(None, (NEAR,), lookup=True),
)


@dataclass(frozen=True, slots=True)
class Options:
    """How large a benchmark is, and where its results go."""

    quick: bool
    json: Path | None
    out: Path
    prompts: int
    """Held-out prompts a setting."""
    bursts: int
    """Batches in a setting with several requests at once."""
    tokens: int
    """New tokens a prompt."""
    dtype: str
    hidden: int
    """Hidden size of the stretched target."""
    layers: int
    """Layers of the stretched target."""

    @property
    def plans(self) -> tuple[PairPlan, ...]:
        """The pairs and settings that are measured; the main pair comes first."""
        return QUICK if self.quick else FULL
