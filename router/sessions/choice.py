"""Which models a router serves, and which worker takes a session: filter, then score, then pick.

Models are known by what targets say of themselves. One whose last target has left the list of workers is served for a
while yet: a target may come back, and until then its requests wait instead of being refused.

Pure: what is known of the workers and what the session needs come in, one worker goes out. No sockets, no clock;
randomness is passed in. :mod:`router.sessions.pool` gathers what is known.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from random import Random

from router.generation import ServedModel
from speculation.digest import empty_of, extend_block
from speculation.events import PeerId, Role
from speculation.messages import Load, Token, Welcome

BLOCK = 64
"""Tokens; a multiple of the blocks that engines share."""
MAX_BLOCKS = 512
"""Blocks of one prompt that are looked at: beyond, sharing the beginning decides."""
REMEMBERED_BLOCKS = 16_384
"""Blocks remembered of one target; the least recently used go first."""

FORGET_SECONDS = 300.0
"""How long a model is served on whose last target has left the list of workers: it may come back."""
FIRST_SECONDS = 1800.0
"""How long a router waits for a first target of every model that it was told of."""


def blocks_of(tokens: Sequence[Token], scope: str = "") -> tuple[int, ...]:
    """Digests of the first block, the first two, and so on, as sessions of one cache scope share them."""
    digest, found = empty_of(scope), list[int]()
    for end in range(BLOCK, min(len(tokens), BLOCK * MAX_BLOCKS) + 1, BLOCK):
        digest = extend_block(digest, tokens[end - BLOCK : end])
        found.append(digest)
    return tuple(found)


class Prefixes:
    """What is remembered of the prompts sent to one target: digests of their beginnings, by whole blocks.

    A guess of what it still has, never more: what was really found comes with the first verification.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, None] = OrderedDict()

    def note(self, blocks: Sequence[int]) -> None:
        """A prompt of these blocks is sent."""
        for block in reversed(blocks):  # so that a beginning outlives what follows it
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > REMEMBERED_BLOCKS:
            self._known.popitem(last=False)

    def known_tokens(self, blocks: Sequence[int]) -> int:
        """How many tokens of a prompt were sent before."""
        return BLOCK * sum(1 for _ in takewhile(self._known.__contains__, blocks))


def same_tokenizer(one: int, other: int) -> bool:
    """Whether two digests allow the same token ids; an unknown one does not object."""
    return one == other or 0 in (one, other)


def why_useless(drafter: Welcome, tokenizers: Sequence[int], heads: Collection[int]) -> str:
    """Why a drafter has nothing to do beside targets with these tokenizers and EAGLE heads, if so."""
    if tokenizers and not any(same_tokenizer(drafter.tokenizer, tokenizer) for tokenizer in tokenizers):
        return "its tokenizer is that of no served model; start it with --target-tokenizer"
    if heads and drafter.head not in {0, *heads}:
        return "no target makes features for its EAGLE head; give both the same head, of the same target"
    return ""


def revision_ages(welcomes: Iterable[Welcome]) -> dict[int, float]:
    """When the oldest worker of each revision came up, in seconds since 1970: starting one again makes none newer."""
    since: dict[int, float] = {}
    for welcome in welcomes:
        since[welcome.revision] = min(welcome.started, since.get(welcome.revision, welcome.started))
    return since


class ServedModels:
    """All models that have, or lately had, a target."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[Welcome, float]] = {}
        """By name: what its newest target said, and when a target of it was last on the list."""

    def served(self, listed: Sequence[Welcome], up: Sequence[Welcome], now: float) -> dict[str, ServedModel]:
        """By name, as the newest target of each says. ``listed``: targets on the list; ``up``: connected ones."""
        for welcome in listed:
            known, _ = self._newest.get(welcome.model, (welcome, now))
            self._newest[known.model] = known, now
        for name, (_, seen) in list(self._newest.items()):
            connected = [welcome for welcome in up if welcome.model == name]
            ages = revision_ages(connected)
            if connected:
                self._newest[name] = max(connected, key=lambda welcome: ages[welcome.revision]), seen
            if now - seen > FORGET_SECONDS:
                del self._newest[name]
        return {name: _served(welcome, listed) for name, (welcome, _) in sorted(self._newest.items())}


class FirstTargets:
    """Which models of a cluster that starts are still to have a first target before clients are led to it.

    None where a target was up before the router: clients are led there already, and a router that took none would only
    take the other models from them. Nor for ever: one that does not come up is not to hold up the others.
    """

    def __init__(self, expected: Iterable[str], now: float, wall: float) -> None:
        """``wall``: the same time in seconds since 1970."""
        self._awaited, self._until, self._began = dict.fromkeys(expected), now + FIRST_SECONDS, wall

    def seen(self, welcome: Welcome) -> None:
        """A worker is up."""
        if welcome.role == Role.TARGET.value:
            self._awaited.pop(welcome.model, None)
            if welcome.started < self._began:
                self._awaited.clear()

    def awaited(self, now: float) -> tuple[str, ...]:
        """Their names."""
        return tuple(self._awaited) if now < self._until else ()


def _served(newest: Welcome, listed: Iterable[Welcome]) -> ServedModel:
    alike = [newest, *(welcome for welcome in listed if welcome.model == newest.model)]
    return ServedModel(
        newest.model,
        newest.vocabulary,
        max(welcome.context for welcome in alike if welcome.revision == newest.revision),  # caches differ in size
        newest.tokenizer,
        newest.source,
        tuple(sorted({name for welcome in alike for name in welcome.sources})),
    )


SESSIONS = 16
"""Sessions there, running or waiting, that cost one unit, because they share its steps. So do as many tokens that run
or wait as it has room for, because beyond that they queue."""
PREFILL_TOKENS = 4096
"""Prompt tokens that a target does not have in its cache, and has to compute, that cost one unit: a known prefix of
1000 tokens is worth four sessions more, and a full cache as much as sixteen."""
TARGET_SECONDS, DRAFT_SECONDS = 0.2, 0.05
"""Round trips that cost one unit: a target's delays the first token and every switch, while drafts run ahead of it
otherwise; late drafts are lost drafts."""
REFUSED_COST = 4.0
"""Of a drafter all of whose drafts targets refuse. It outweighs the rest because it decides how many steps are saved: a
fifth more refused is worth about twelve sessions."""
AFFINITY_SLACK, AFFINITY_SPARE = 1.25, 2
"""A known prefix counts only where there are at most so many times the mean number of sessions, plus so many."""
TIE = 0.01
"""Costs that differ by less are equal: the pick among them is random, so that routers do not all pick the same."""
TYPICAL_TOKENS = 512
"""Of a session that waits at a worker whose running ones do not show how long they are."""


@dataclass(frozen=True, slots=True)
class WantedWorker:
    """What a session needs of a worker."""

    model: str = ""
    """Name of the model; empty: any."""
    tokenizer: int = 0
    """Digest of the tokenizer that its tokens come from; 0: unknown."""
    revision: int | None = None
    """The revision that its text began with; None: any, the newest first."""
    tokens: int = 0
    """To compute before the first one: prompt and what is committed."""
    end: int = 0
    """Tokens that it may have at last."""
    blocks: tuple[int, ...] = ()
    """Of the prompt; see :func:`blocks_of`."""
    head: int = 0
    """Of a drafter: fingerprint of the EAGLE head that its target makes features for; 0: for none."""


@dataclass(frozen=True, slots=True)
class WorkerCandidate:
    """A worker that is up, as far as the router knows it."""

    peer: PeerId
    welcome: Welcome
    load: Load = Load()
    sessions: int = 0
    """Sessions of this router's there; the load may not count all of them yet."""
    opening_tokens: int = 0
    """Tokens of this router's sessions there that have not been answered yet."""
    known_tokens: int = 0
    """How many of the session's tokens this router recently sent there."""
    round_trip: float | None = None
    """Seconds; None while unknown."""
    acceptance: float = 0.5
    """Share of a drafter's drafts that targets of the session's model are expected to keep."""
    idle: bool = False
    """Whether it is a target that stands by: see :func:`idle_targets`."""

    @property
    def busy(self) -> int:
        """Sessions there, running or waiting."""
        return max(self.sessions, self.load.sessions + self.load.waiting)

    @property
    def held_tokens(self) -> int:
        """Tokens that run or wait there."""
        load = self.load
        running = max(load.capacity_tokens - load.free_tokens, 0)
        typical = running / load.sessions if load.sessions else TYPICAL_TOKENS
        return running + max(self.opening_tokens, int(load.waiting * typical))

    def can_hold(self, tokens: int) -> bool:
        """Whether it takes a sequence of so many tokens at all: also before it has told its load."""
        longest = self.welcome.context
        return tokens <= min(longest, self.load.capacity_tokens or longest)

    def has_room(self, tokens: int) -> bool:
        """Whether so many tokens more would run at once; so it seems where nothing is known."""
        return not self.load.capacity_tokens or self.held_tokens + tokens <= self.load.capacity_tokens


def choose_target(
    candidates: Iterable[WorkerCandidate], wanted: WantedWorker, rng: Random, others: Iterable[Welcome] = ()
) -> PeerId | None:
    """The target for a session; None when none fits. ``others``: those that may be taken later, but not now.

    The newest revision that has room is preferred; see :func:`revision_ages`. One that cannot hold all the session may
    become is taken only where no target could, now or later: it says what is wrong. One that stands by is taken where
    no other one can be.
    """
    running = [target for target in candidates if not target.load.draining and _runs(target.welcome, wanted)]
    usable = _large_enough(running, wanted, others)
    usable = [candidate for candidate in usable if not candidate.idle] or usable
    best = _of_newest_revision(usable, wanted)
    mean = sum(candidate.busy for candidate in best) / len(best) if best else 0.0
    return _pick([(_target_cost(candidate, wanted, mean), candidate.peer) for candidate in best], rng)


def _large_enough(
    running: Sequence[WorkerCandidate], wanted: WantedWorker, others: Iterable[Welcome]
) -> Sequence[WorkerCandidate]:
    """Those that can hold all the session may become; none if only one of ``others`` can; all if no target can."""
    large = [candidate for candidate in running if candidate.can_hold(wanted.end)]
    if large or any(_runs(other, wanted) and wanted.end <= other.context for other in others):
        return large
    return running


def _of_newest_revision(usable: Sequence[WorkerCandidate], wanted: WantedWorker) -> list[WorkerCandidate]:
    """Those of the newest revision that has room, or, if none has, of the newest; with room if any has."""
    roomy = [candidate for candidate in usable if candidate.has_room(wanted.tokens - candidate.known_tokens)]
    ages = revision_ages(candidate.welcome for candidate in usable)
    newest = max((ages[candidate.welcome.revision] for candidate in roomy or usable), default=0.0)
    return [candidate for candidate in roomy or usable if ages[candidate.welcome.revision] == newest]


def choose_drafter(candidates: Iterable[WorkerCandidate], wanted: WantedWorker, rng: Random) -> PeerId | None:
    """The drafter for a session: with its tokenizer, and no EAGLE head but the target's own; None when none fits."""
    usable = [
        candidate
        for candidate in candidates
        if not candidate.load.draining
        and same_tokenizer(candidate.welcome.tokenizer, wanted.tokenizer)
        and candidate.welcome.head in (0, wanted.head)
    ]
    refusals = ((candidate, REFUSED_COST * (1.0 - candidate.acceptance)) for candidate in usable)
    return _pick([(_cost(candidate, DRAFT_SECONDS) + refused, candidate.peer) for candidate, refused in refusals], rng)


def _runs(welcome: Welcome, wanted: WantedWorker) -> bool:
    return (
        wanted.model in ("", welcome.model)
        and wanted.revision in (None, welcome.revision)
        and same_tokenizer(welcome.tokenizer, wanted.tokenizer)
    )


def _target_cost(candidate: WorkerCandidate, wanted: WantedWorker, mean: float) -> float:
    crowded = candidate.busy > AFFINITY_SLACK * mean + AFFINITY_SPARE
    missing = wanted.tokens - (0 if crowded else candidate.known_tokens)
    return _cost(candidate, TARGET_SECONDS) + missing / PREFILL_TOKENS


def _cost(candidate: WorkerCandidate, far: float) -> float:
    """How busy and how far a worker is. ``far``: the round trip that costs one unit, in seconds."""
    capacity = candidate.load.capacity_tokens
    fill = candidate.held_tokens / capacity if capacity else 0.0
    return candidate.busy / SESSIONS + fill + (candidate.round_trip or 0.0) / far


def _pick(costs: Sequence[tuple[float, PeerId]], rng: Random) -> PeerId | None:
    """The cheapest, at random among equals."""
    if not costs:
        return None
    min_cost = min(cost for cost, _ in costs)
    return rng.choice([peer for cost, peer in costs if cost <= min_cost + TIE])


@dataclass(frozen=True, slots=True)
class StandbyTargets:
    """How many targets one model is to have."""

    active: int
    """Those that take sessions."""
    idle: int
    """Those that take some only while others are missing."""


@dataclass(frozen=True, slots=True)
class KnownTarget:
    """A target as a router knows it."""

    peer: PeerId
    described: Welcome | None
    """As it last introduced itself; None: it never was up."""
    up: bool
    """Whether it is connected and stays."""
    listed: bool
    """Whether it is on the list of workers, which may lack those that are lost."""


def idle_targets(targets: Iterable[KnownTarget], wanted: Mapping[str, StandbyTargets]) -> set[PeerId]:
    """The targets that are to take no sessions now. ``wanted``: by the name of a model, or under no name for any.

    Those that started last, so that every router names the same ones without asking: who replaces a lost target is
    idle next, and nobody's sessions move for it.
    """
    by_model: defaultdict[str, list[KnownTarget]] = defaultdict(list)
    for target in targets:
        by_model[target.described.model if target.described else ""].append(target)
    unknown = by_model.pop("", [])  # may be of any model
    return {
        peer
        for model, own in by_model.items()
        if (numbers := wanted.get(model) or wanted.get(""))
        for peer in _latest([*own, *unknown], numbers)
    }


def _latest(targets: Sequence[KnownTarget], wanted: StandbyTargets) -> Sequence[PeerId]:
    """Of one model those that started last, as many as are to be idle, less those that are missing."""
    up = {target.peer: target.described for target in targets if target.up and target.described}
    missing = max(wanted.active + wanted.idle, sum(target.listed for target in targets)) - len(up)
    latest = sorted(up, key=lambda peer: (up[peer].started, up[peer].instance), reverse=True)
    return latest[: max(wanted.idle - missing, 0)]
