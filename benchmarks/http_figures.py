"""From what client and server noted to figures: what a path adds to the first token, and to every other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from benchmarks.http_client import BadAnswer, Heard
from benchmarks.http_settings import ADDED_MS, BURST, COMMIT_TOKENS, ECHO, PACELINE, STEADY


@dataclass(frozen=True, slots=True)
class Round:
    """One contender under one pattern of requests, once."""

    contender: str
    pattern: str
    first: tuple[float, ...]
    """By request: seconds added to its first token."""
    before: tuple[float, ...]
    """By request: how much of that was spent before the generator was asked."""
    later: tuple[float, ...]
    """By commit but for the first ones: seconds from the commit to the client."""
    cpu: float
    """Processor seconds of the server."""
    client_cpu: float
    seconds: float
    tokens: int
    """That went through meanwhile."""

    @classmethod
    def of(
        cls,
        contender: str,
        pattern: str,
        heard: Sequence[Heard],
        times: Mapping[str, Sequence[float]],
        *,
        cpu: float,
        client_cpu: float,
        seconds: float,
    ) -> Round:
        """``times``: the server's account, by request: when it was begun, then each commit. Raises BadAnswer."""
        first, before, later = [], [], []
        tokens = COMMIT_TOKENS * sum(len(of_one) - 1 for of_one in times.values())
        for one in heard:
            begun, *commits = times[one.request_id]
            # An event more than commits there are says why the text ended.
            if not 0 <= len(one.events) - len(commits) <= 1:
                raise BadAnswer(f"{contender}: {len(one.events)} events for {len(commits)} commits")
            first.append((one.events[0] - one.sent) - (commits[0] - begun))
            before.append(begun - one.sent)
            later += [came - made for came, made in zip(one.events[1:], commits[1:], strict=False)]
        return cls(contender, pattern, tuple(first), tuple(before), tuple(later), cpu, client_cpu, seconds, tokens)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one contender under one pattern, all rounds together. Milliseconds, but for microseconds a token."""

    first_median: float
    first_p90: float
    before_median: float
    later_median: float
    later_p90: float
    cpu_us_per_token: float
    client_cpu_us_per_token: float


def figures(rounds: Iterable[Round], contender: str, pattern: str) -> Figures:
    """All rounds of one kind."""
    chosen = [one for one in rounds if (one.contender, one.pattern) == (contender, pattern)]
    first = [1e3 * value for one in chosen for value in one.first]
    later = [1e3 * value for one in chosen for value in one.later]
    tokens = sum(one.tokens for one in chosen)
    return Figures(
        first_median=median(first),
        first_p90=p90(first),
        before_median=median(1e3 * value for one in chosen for value in one.before),
        later_median=median(later),
        later_p90=p90(later),
        cpu_us_per_token=1e6 * sum(one.cpu for one in chosen) / tokens,
        client_cpu_us_per_token=1e6 * sum(one.client_cpu for one in chosen) / tokens,
    )


def p90(values: Sequence[float]) -> float:
    """Nine of ten are below."""
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def summary(rounds: Sequence[Round]) -> dict[str, float]:
    """What must be reached, and the ratios to the bare server."""
    ours, bare = figures(rounds, PACELINE, STEADY), figures(rounds, ECHO, STEADY)
    return {
        "first_token_added_ms": ours.first_median,
        "first_token_added_in_a_burst_ms": figures(rounds, PACELINE, BURST).first_median,
        "first_token_added_over_echo": ours.first_median / bare.first_median,
        "cpu_per_token_over_echo": ours.cpu_us_per_token / bare.cpu_us_per_token,
    }


WANTED = {"first_token_added_ms": ADDED_MS}
"""At most."""
