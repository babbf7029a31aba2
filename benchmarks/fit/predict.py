"""What to expect of each way to draft: the simulator, fed with measured costs and the target's own text.

Decided here: what the best depth is, how many drafters are enough, and from where on drafting is not worth its
machines. The speed of a request hardly changes with the depth allowed once that is large enough, since the budget
decides how much is verified; so the best depth is the smallest whose speed is within
:data:`~simulation.simulate.WITHIN` of the best, in what is predicted and in what is measured alike.

How far a way would have followed the target's text is counted from every place, by depth and by kind. A draft is what a
source says first, and then first again, as long as it is right, without the branches that stand beside it. Of several
sources at a place the one that gets furthest counts, as in the trie. Earlier outputs are those of the passages before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from random import Random

from benchmarks.fit.command import DEPTH, PLAIN, Way
from benchmarks.speculation.figures import Depth
from simulation.agreement import AgreementPassage, Passages, ReplayedRequest
from simulation.costs import Costs, Curve
from simulation.simulate import WITHIN, Bounds, Report, SimulationSettings, simulate_texts
from simulation.simulated_world import OwnSources
from speculation.messages import ANCHOR, Limits, Open, Sampling, Schedule, SessionId, Source, Token
from speculation.sources.registry import LocalSource, Suggestion, local_sources
from speculation.verifying.budget import rising

SUFFIX_TOKENS = Bounds().suffix_tokens
"""Of earlier outputs that a target keeps, if they are drafted from; as it does unless told otherwise."""


@dataclass(frozen=True, slots=True)
class DraftRun:
    """A draft from one place of the text."""

    offered: int
    """Tokens drafted, none beyond the end of the text."""
    right: int
    """Tokens that agree, from the first on."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """A way's drafts over many places."""

    runs: tuple[DraftRun, ...]

    @property
    def first(self) -> float:
        """Share of the places at which the first token is right; the textbook's acceptance. None proposed is wrong."""
        return sum(run.right > 0 for run in self.runs) / len(self.runs)

    @property
    def depths(self) -> tuple[Depth, ...]:
        """Of drafts that were right so far and went on: how many were right at the next depth too."""
        found = []
        for depth in range(1, DEPTH + 1):
            tried = sum(run.offered >= depth and run.right >= depth - 1 for run in self.runs)
            kept = sum(run.right >= depth for run in self.runs)
            if tried:
                found.append(Depth(depth, tried, kept))
        return tuple(found)


def agreement(way: Way, passages: Sequence[AgreementPassage]) -> Agreement:
    """Count; the passages hold what the way's draft model says, if it has one."""
    runs: list[DraftRun] = []
    sources = OwnSources(way.local, SUFFIX_TOKENS)
    requests = Passages(passages, vocabulary=1)
    for number, passage in enumerate(passages):
        request = requests.request(number, seed=0)
        offers = [_drafted(passage)] if way.draft is not None else []
        offers += [_followed(source, passage) for source in _local(way, request, sources)]
        sources.keep(request, passage.prompt + passage.tokens)
        runs += [max(at, key=lambda run: (run.right, run.offered)) for at in zip(*offers, strict=True)]
    return Agreement(tuple(runs))


def _drafted(passage: AgreementPassage) -> list[DraftRun]:
    """What comes of following the first choice of a draft model, or of a head, which ages on the way."""
    most = len(passage.tokens)
    return [
        DraftRun(min(most - place, DEPTH) if said else 0, passage.kept(place, DEPTH))
        for place, said in enumerate(passage.said(0))
    ]


def _local(way: Way, request: ReplayedRequest, sources: OwnSources) -> list[LocalSource]:
    """The way's sources at the target."""
    opened = Open(SessionId(1), 1, request.prompt, Sampling(), Limits(request.end))
    found = (*local_sources(opened), sources.head(request), sources.outputs(request))
    return [one for one in found if one is not None and one.source in way.local]


def _followed(source: LocalSource, passage: AgreementPassage) -> list[DraftRun]:
    """What comes of following a source at the target."""
    source.extend(passage.prompt)
    runs = []
    for place, token in enumerate(passage.tokens):
        ahead = passage.tokens[place:]
        chain = _chain(source.propose(min(source.depth, len(ahead))))
        right = next((i for i, (a, b) in enumerate(zip(chain, ahead, strict=False)) if a != b), len(chain))
        runs.append(DraftRun(len(chain), right))
        source.extend([token])
    return runs


def _chain(said: Suggestion) -> list[Token]:
    """The first of what is said, what is said first after it, and so on."""
    chain: list[Token] = []
    end = ANCHOR
    for index, (token, parent) in enumerate(zip(said.tokens, said.parents, strict=True)):
        if parent == end:
            chain.append(token)
            end = index
    return chain


PAYS = 1.05
"""Below this speed-up drafting is not worth its machines."""
DEPTHS = (*range(1, 13), DEPTH)
DRAFTERS = (1, 2, 4, 8)
ENOUGH = 0.1
"""Drafters this close to the speed of the most are enough: the last tenth is not worth twice the machines."""
ROUGH, FINE = 600, 3000
"""Tokens simulated to compare ways, and to know one well: a core simulates about a thousand a second."""
WARM_UP = 1 / 2
"""As many tokens again before anything counts: a service has been running for long."""
MOST_REMEMBERED = 8000
"""Tokens of texts, each of which can know those before it: a simulation of earlier outputs goes through all of them."""
LEAST_TOKENS, LEAST_WARM_UP = 40, 16
"""Of a session, where there are many: what one learns helps all."""
ROUGH_DEPTHS = (1, 2, 3, 4, 6, 8, 12, DEPTH)


def best_depth(speeds: Mapping[int, float]) -> int:
    """The smallest depth that is as good as the best; ``speeds`` by depth.

    That a greater depth is slower is taken for chance: the speeds are those of the closest curve that never falls.
    """
    depths = sorted(speeds)
    smooth = rising([speeds[depth] for depth in depths], [1.0] * len(depths))
    return min(depth for depth, speed in zip(depths, smooth, strict=True) if speed >= (1 - WITHIN) * smooth[-1])


@dataclass(frozen=True, slots=True)
class Known:
    """What was measured."""

    costs: Mapping[str | None, Costs]
    """By draft model; under None, those of the target alone."""
    passages: Mapping[str | None, Sequence[AgreementPassage]]
    """The same texts in the same order, with what each draft model says along them."""
    kinds: Sequence[str]
    vocabulary: int
    translated: frozenset[str] = frozenset()
    """Draft models with another tokenizer than the target."""
    heads: Mapping[int, Curve] = field(default_factory=dict)
    """A step of the target in which a head of its own guesses, by sessions and tokens; empty: it has none."""
    away: str = ""
    """The EAGLE head among the draft models, if one is."""

    def of(self, way: Way, kind: str | None = None) -> list[AgreementPassage]:
        """The texts as a way meets them; of one kind, or all."""
        pairs = zip(self.passages[way.draft], self.kinds, strict=True)
        return [passage for passage, its in pairs if kind in (None, its)]


@dataclass(frozen=True, slots=True)
class TargetLoad:
    """What one target has to do, and who drafts for it."""

    sessions: int = 1
    rtt: float = 0.0
    """Seconds."""
    drafters: int = 1


@dataclass(slots=True)
class Predictor:
    """Simulates one target under all ways; the same case is computed once."""

    known: Known
    seed: int
    tokens: int
    """Simulated of all requests together, round and round the texts, besides those before anything counts."""
    most_drafters: int = DRAFTERS[-1]
    """That there is room for."""
    _reports: dict[tuple[Way, TargetLoad, int, str | None], Report] = field(default_factory=dict)

    def report(self, way: Way, load: TargetLoad = TargetLoad(), depth: int = DEPTH, kind: str | None = None) -> Report:
        """Of the way's requests; ``kind``: for texts of that kind only."""
        key = (way, load, depth, kind)
        if key not in self._reports:
            passages = self.known.of(way, kind)
            tokens = self.tokens
            if way.remembers:  # all are simulated as often: the later, the more is known
                ends = accumulate(len(passage.tokens) for passage in passages)
                passages = passages[: max(sum(end <= MOST_REMEMBERED for end in ends), 1)]
                once = sum(len(passage.tokens) for passage in passages)
                tokens = once * math.ceil(tokens / once)
            self._reports[key] = simulate_texts(
                self._setting(way, load, depth),
                replace(self.known.costs[way.draft], heads=self.known.heads),
                Passages(passages, self.known.vocabulary),
                Random(self.seed),
                tokens=max(math.ceil(tokens / load.sessions), LEAST_TOKENS),
                warm_up=max(math.ceil(WARM_UP * self.tokens / load.sessions), LEAST_WARM_UP),
            )
        return self._reports[key]

    def plain(self, way: Way, sessions: int) -> float:
        """Tokens a second of all requests that nobody drafts for, by the costs that the way is measured against."""
        costs = self.known.costs[way.draft]
        return sessions / (costs.verify_seconds(sessions, sessions) + costs.verify_pause)

    def speedup(self, way: Way, load: TargetLoad = TargetLoad(), depth: int = DEPTH, kind: str | None = None) -> float:
        """Over plain decoding of as many requests."""
        return self.report(way, load, depth, kind).rate / self.plain(way, load.sessions)

    def forgetful(self, way: Way, load: TargetLoad = TargetLoad(), depth: int = DEPTH) -> float:
        """The speed-up of a way if nothing of earlier answers were known."""
        without = replace(way, local=way.local - {Source.SUFFIX})
        return self.speedup(without, load, depth) if without != PLAIN else 1.0

    def drafters(self, way: Way, sessions: int, rtt: float, depth: int) -> int:
        """The fewest drafters that are enough, of as many as have room; none for a way without a draft model."""
        if way.draft is None:
            return 0
        counts = [count for count in DRAFTERS if count <= min(sessions, self.most_drafters)]
        rates = {count: self.report(way, TargetLoad(sessions, rtt, count), depth).rate for count in counts}
        return min(count for count, rate in rates.items() if rate >= (1 - ENOUGH) * max(rates.values()))

    def _setting(self, way: Way, load: TargetLoad, depth: int) -> SimulationSettings:
        """With the second level of draft workers as they are started unless told otherwise."""
        return SimulationSettings(
            Schedule.TRIE if way != PLAIN else None,
            rtt=load.rtt,
            sessions=load.sessions,
            drafters=load.drafters if way.draft is not None else 0,
            max_depth=depth,
            sources=way.sources,
            guesses=way.draft not in (self.known.away, *self.known.translated),
            features=way.draft == self.known.away,
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """What to expect of one way, for one request at a time unless it says otherwise."""

    way: Way
    agreement: Agreement
    by_kind: Mapping[str, Agreement]
    depths: Mapping[int, float]
    """Speed-up by depth, at the first round trip."""
    trips: Mapping[float, float]
    """Speed-up by round trip, in seconds, at the best depth."""
    kinds: Mapping[str, float]
    """Speed-up by kind of text, there too."""
    rate: float
    """Tokens a second at the best depth and the first round trip."""

    @property
    def depth(self) -> int:
        """The best one."""
        return best_depth(self.depths)

    @property
    def speedup(self) -> float:
        """At the best depth."""
        return self.depths[self.depth]

    @property
    def workers(self) -> int:
        """Of one target and its drafter, if it has one."""
        return 1 + (self.way.draft is not None)


def forecast(
    predictor: Predictor, way: Way, round_trips: Sequence[float], tried: Sequence[int] = ROUGH_DEPTHS
) -> Forecast:
    """Simulate a way at the depths ``tried``, then at the best of them for every distance and kind of text."""
    known, near = predictor.known, TargetLoad(rtt=round_trips[0])
    depths = {depth: predictor.speedup(way, near, depth) for depth in tried}
    depth = best_depth(depths)
    kinds = list(dict.fromkeys(known.kinds))
    return Forecast(
        way,
        agreement(way, known.of(way)),
        {kind: agreement(way, known.of(way, kind)) for kind in kinds},
        depths,
        {rtt: predictor.speedup(way, TargetLoad(rtt=rtt), depth) for rtt in round_trips},
        {kind: predictor.speedup(way, near, depth, kind) for kind in kinds},
        predictor.report(way, near, depth).rate,
    )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A way with many requests at a time."""

    sessions: int
    drafters: int
    """As many as are enough for one target."""
    rate: float
    """Tokens a second of all requests."""
    plain: float
    """The same without drafts."""

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.rate / self.plain


def loads(predictor: Predictor, chosen: Forecast, rtt: float, sessions: Sequence[int]) -> list[Loaded]:
    """The way of a forecast at its best depth, with so many requests at a time as steps were measured with."""
    way, depth = chosen.way, chosen.depth
    found = []
    for count in sessions:
        drafters = predictor.drafters(way, count, rtt, depth)
        rate = predictor.report(way, TargetLoad(count, rtt, max(drafters, 1)), depth).rate
        found.append(Loaded(count, drafters, rate, predictor.plain(way, count)))
    return found


def pays_until(found: Sequence[Loaded]) -> int | None:
    """How many requests at a time drafting pays up to; None: it does for as many as were looked at.

    Between two numbers looked at, the speed-up is taken to fall with the logarithm of the number.
    """
    for before, after in pairwise(found):
        if after.speedup < PAYS <= before.speedup:
            share = (before.speedup - PAYS) / (before.speedup - after.speedup)
            return round(before.sessions * math.pow(after.sessions / before.sessions, share))
    return None if found[0].speedup >= PAYS else 0


def recommended(forecasts: Sequence[Forecast]) -> Forecast | None:
    """The fastest; of those about as fast, the one with the fewest parts, as they are ordered. None: none pays."""
    fastest = max((one.speedup for one in forecasts), default=0.0)
    if fastest < PAYS:
        return None
    return next(one for one in forecasts if one.speedup >= (1 - WITHIN) * fastest)
