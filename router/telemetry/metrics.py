"""Every metric of a router: its name, what it means, and its value at the moment somebody asks.

Names and shapes are vLLM's where vLLM has the same thing, under ``paceline_``. Two kinds are to be told apart:

* *Per router* (HELP says so): what this router did. Several routers each have their own; add them up.
* *Per worker*: what a worker says of itself, a quarter of a second ago at most; see
  :mod:`router.telemetry.worker_metrics`.

``/metrics`` has besides what endpoint pickers read; ``/metrics/picker`` has nothing else, and wants no key.

Labels are bounded: models that are served, workers that are listed, codes and reasons from fixed tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from router.limits import Account
from router.sessions.snapshot import Snapshot
from router.sessions.tally import RouterCounters
from router.telemetry.families import collect_certificates, counter, gauge, histogram
from router.telemetry.worker_metrics import collect_for_pickers, collect_workers

PER_ROUTER = " Per router: add routers up."


class RouterMetrics:
    """What one router tells of itself, in a registry of its own."""

    def __init__(self, tally: RouterCounters, snapshot: Callable[[], Snapshot]) -> None:
        self.tally, self.snapshot = tally, snapshot
        self.certificates: Sequence[Path] = ()
        """Files of the TLS certificates in use, whose end is told."""
        self.accounts: dict[str, Account] = {}
        """By the name of the API key; one without a name where there are no keys."""
        self._registry, self._for_pickers = CollectorRegistry(), CollectorRegistry()
        self._registry.register(self)
        for registry in (self._registry, self._for_pickers):
            registry.register(_Families(lambda: collect_for_pickers(self.snapshot())))

    def exposition(self, *, for_pickers: bool = False) -> tuple[bytes, str]:
        """The text for Prometheus, and its type. ``for_pickers``: what endpoint pickers read, which names nobody."""
        return generate_latest(self._for_pickers if for_pickers else self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Metric]:
        """All families, as of now, but for those whose names are not ours."""
        snapshot = self.snapshot()
        for target in snapshot.targets:
            if target.model:
                self.tally.model(target.model)  # so that its counters begin at 0, not with the first request
        yield gauge("build_info", "1, with the version as a label.", ("version",), {(own_version(),): 1})
        yield from self._of_models()
        yield from self._of_requests()
        yield from self._of_acceptance(snapshot)
        yield from _of_sessions(snapshot)
        yield from collect_workers(snapshot)
        yield from collect_certificates(self.certificates)
        yield from _of_accounts(self.accounts)

    def _of_models(self) -> Iterator[Metric]:
        models = self.tally.models
        for name, about, count in _MODEL_COUNTERS:
            yield counter(name, about + PER_ROUTER, ("model",), {(m,): getattr(c, count) for m, c in models.items()})
        yield counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted at each place of the draft, 0 first." + PER_ROUTER,
            ("model", "position"),
            {
                (m, str(place)): times
                for m, counts in models.items()
                for place, times in enumerate(counts.accepted_by_position())
            },
        )
        yield gauge(
            "spec_decode_mean_acceptance_length",
            "Tokens committed by a verification with drafts since the start: 1 + accepted / drafts. Over a time range "
            "divide the rates of the two counters.",
            ("model",),
            {(m,): 1 + c.accepted_tokens / c.drafts for m, c in models.items() if c.drafts},
        )
        for name, about, buckets in _MODEL_HISTOGRAMS:
            yield histogram(
                name, about + PER_ROUTER, ("model",), {(m,): getattr(c, buckets) for m, c in models.items()}
            )
        yield counter(
            "request_success",
            "Choices of requests that ended well, by reason; abort: the client went." + PER_ROUTER,
            ("model", "finished_reason"),
            {(m, reason): times for m, counts in models.items() for reason, times in counts.finished.items()},
        )

    def _of_requests(self) -> Iterator[Metric]:
        for name, about, codes in (
            ("requests_refused", "Requests refused before anything was started (HTTP 4xx)", self.tally.refused),
            ("request_failure", "Requests that failed on our side, at once or mid-stream", self.tally.failed),
        ):
            values = {(code,): times for code, times in codes.items()}
            yield counter(name, f"{about}, by the code of the error.{PER_ROUTER}", ("code",), values)

    def _of_acceptance(self, snapshot: Snapshot) -> Iterator[Metric]:
        record = snapshot.record
        yield counter(
            "acceptance_collapses",
            "Times that the acceptance of a pair of workers fell far below its usual value." + PER_ROUTER,
            (),
            {(): record.collapses},
        )
        yield gauge(
            "acceptance_collapsed",
            "1 while the acceptance of this pair of workers is far below its usual value. Take the maximum of routers.",
            ("target", "draft"),
            {pair: known.collapsed for pair, known in record.watched.items()},
        )
        yield gauge(
            "acceptance_ratio",
            "Accepted of the last 2000 or so draft tokens offered for this pair of workers. Per router.",
            ("target", "draft"),
            {pair: known.latest for pair, known in record.watched.items() if known.latest is not None},
        )


class _Families(NamedTuple):
    """A collector in the sense of ``prometheus_client``."""

    collect: Callable[[], Iterator[Metric]]


def _of_accounts(accounts: Mapping[str, Account]) -> Iterator[Metric]:
    """The keys themselves are nowhere; an empty name stands for all callers where there are no keys."""
    about, name = " by the name of its API key." + PER_ROUTER, ("api_key",)
    running = {(key,): account.running for key, account in accounts.items()}
    requests = {(key,): account.requests for key, account in accounts.items()}
    refusals = {(key, limit): times for key, account in accounts.items() for limit, times in account.refused.items()}
    tokens = {(key, "prompt"): account.prompt_tokens for key, account in accounts.items()}
    tokens |= {(key, "completion"): account.completion_tokens for key, account in accounts.items()}
    yield gauge("api_key_requests_running", "Requests under way," + about, name, running)
    yield counter("api_key_requests", "Requests let in," + about, name, requests)
    yield counter("api_key_refusals", "Requests refused because of a limit," + about, (*name, "limit"), refusals)
    yield counter("api_key_tokens", "Tokens of prompts and tokens generated," + about, (*name, "kind"), tokens)


def _of_sessions(snapshot: Snapshot) -> Iterator[Metric]:
    totals = snapshot.totals
    yield gauge(
        "router_sessions",
        "Sessions under way: open at a target worker, or waiting for one." + PER_ROUTER,
        ("state",),
        {("running",): snapshot.running, ("placing",): snapshot.placing},
    )
    for name, about, value in (
        ("failovers", "Times that a session was opened again at another target worker.", totals.reopened),
        ("moves", "Times that a session left a target worker that drains.", totals.moved),
        ("condemned_sessions", "Sessions failed because target workers died of them.", totals.condemned),
        ("malformed_messages", "Messages of workers that break the protocol; all were dropped.", totals.malformed),
        ("stale_messages", "Messages of workers that came too late to matter.", totals.stale),
        ("draft_strikes", "Malformed messages held against a drafter by its session.", totals.strikes),
        ("drafters_quarantined", "Drafters that a session was done with, per session.", totals.quarantined),
    ):
        yield counter(name, about + PER_ROUTER, (), {(): value})
    ready = snapshot.unready is None
    yield gauge("router_ready", "1 while a request can be served, as /ready says. Per router.", (), {(): ready})


_MODEL_COUNTERS = (
    ("prompt_tokens", "Tokens of prompts.", "prompt_tokens"),
    ("prompt_tokens_cached", "Tokens of prompts that the target found in its cache.", "cached_prompt_tokens"),
    ("generation_tokens", "Tokens committed.", "generated_tokens"),
    ("spec_decode_num_drafts", "Verifications of at least one draft token.", "drafts"),
    ("spec_decode_num_draft_tokens", "Draft tokens verified, all branches of a tree counted.", "draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", "accepted_tokens"),
)
_MODEL_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From the arrival of a request to its first token.", "first_token"),
    (
        "inter_token_latency_seconds",
        "Time between commits, divided among their tokens; each token counts once.",
        "inter_token",
    ),
    ("commit_interval_seconds", "Time between two commits of a session.", "commit_interval"),
    ("e2e_request_latency_seconds", "From the arrival of a request to the end of a choice.", "latency"),
    ("draft_lead_tokens", "How far ahead targets wanted drafters to run, at each verification; 0: rest.", "lead"),
)


def own_version() -> str:
    """Of Paceline."""
    try:
        return version("paceline")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "unknown"
