"""What a run is: who takes part, what is sent, how, and how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.harness.options import Options, flag

Json = dict[str, Any]
MOST_OPEN = 4096
"""Requests under way at once; those beyond are not sent, and counted."""
BUNDLED_PROMPTS = "bundled"
PLAIN_SUFFIX = " plain"
"""What is added to the name of a contender whose speculation is off."""


class Make(StrEnum):
    """Whose server it is, as far as it says so in its list of models; what it offers depends on it."""

    PACELINE = "Paceline"
    VLLM = "vLLM"
    LLAMA_CPP = "llama.cpp"
    OTHER = "not known"


@dataclass(frozen=True, slots=True)
class ServerContender:
    """A server, and how it is asked."""

    name: str
    url: str
    """Without the path ``/v1`` and a slash at the end."""
    model: str = ""
    """Empty: the only one that the server has."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields over those of the body; None takes a field away."""
    api_key: str = field(default="", repr=False)
    plain: bool = False
    """Speculation is switched off, request by request; Paceline only."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Requests a second, whatever becomes of them, or so many at any time. Exactly one is set."""

    rate: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        assert (self.rate is None) != (self.concurrency is None)

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s"
        return f"{self.concurrency} at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(Options):
    """One run."""

    contenders: tuple[ServerContender, ...] = ()
    pace: Pace = Pace(concurrency=1)
    rounds: int = 5
    chat: bool = False
    typed: str = "paceline bench serve"
    """The command, as it was typed."""
    prompts: str = flag(
        BUNDLED_PROMPTS,
        "a prompt a line: text, or JSON in *.jsonl; bundled (default): some beginnings of code",
        metavar="FILE",
    )
    requests: int = flag(40, "of each contender, in all rounds together", least=1, most=100_000)
    warmup: int = flag(2, "requests of each that do not count", least=0, most=10_000, metavar="W")
    max_tokens: int = flag(64, "of an answer, at most", least=1, most=1_000_000)
    temperature: float = flag(0.0, "0 (default): the likeliest text", least=0, most=100, metavar="X")
    against_plain: bool = flag(False, "measure Paceline also without speculation")
    timeout: float = flag(120.0, "of a request", least=0.001, most=86_400, metavar="S")
    """Seconds after which a request counts as failed."""
    seed: int = flag(0, "of requests, arrivals and resampling", least=0, most=2**31 - 1)
    json: Path | None = flag(None, "write figures and requests there")
    out: Path | None = flag(None, "write figures and a page there", metavar="DIR")

    @property
    def command(self) -> str:
        """See :class:`benchmarks.harness.options.Options`."""
        return self.typed
