"""How far each way to draft would have followed the target's text: counted from every place, by depth and by kind.

A draft is what a source says first, and then first again, as long as it is right, without the branches that stand
beside it. Of several sources at a place the one that gets furthest counts, as in the trie. Earlier outputs are those of
the passages before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.fit.command import DEPTH, Way
from benchmarks.speculation.figures import Depth
from simulation.agreement import AgreementPassage, Passages, ReplayedRequest
from simulation.simulate import Bounds
from simulation.simulated_world import OwnSources
from speculation.messages import ANCHOR, Limits, Open, Sampling, SessionId, Token
from speculation.sources.registry import LocalSource, Suggestion, local_sources

SUFFIX_TOKENS = Bounds().suffix_tokens
"""Of earlier outputs that a target keeps, if they are drafted from; as it does unless told otherwise."""


@dataclass(frozen=True, slots=True)
class DraftRun:
    """A draft from one place of the text."""

    offered: int
    """Tokens drafted, none beyond the end of the text."""
    right: int
    """Tokens that agree, from the first on."""
    among: bool = False
    """Whether the first token is among what is proposed, first or not."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """A way's drafts over many places."""

    runs: tuple[DraftRun, ...]
    among: float
    """Share of the places at which the target's token is among what is proposed, first or not."""

    @property
    def first(self) -> float:
        """Share of the places at which the first token is right; the textbook's acceptance. None proposed is wrong."""
        return sum(run.right > 0 for run in self.runs) / len(self.runs)

    @property
    def rights(self) -> list[int]:
        """Tokens that agree, by place."""
        return [run.right for run in self.runs]

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
    among = 0
    sources = OwnSources(way.local, SUFFIX_TOKENS)
    requests = Passages(passages, vocabulary=1)
    for number, passage in enumerate(passages):
        request = requests.request(number, seed=0)
        offers = [_drafted(passage)] if way.draft is not None else []
        offers += [_followed(source, passage) for source in _local(way, request, sources)]
        sources.keep(request, passage.prompt + passage.tokens)
        among += sum(any(run.among for run in at) for at in zip(*offers, strict=True))
        runs += [max(at, key=lambda run: (run.right, run.offered)) for at in zip(*offers, strict=True)]
    return Agreement(tuple(runs), among / len(runs))


def _drafted(passage: AgreementPassage) -> list[DraftRun]:
    """What comes of following the first choice of a draft model, or of a head, which ages on the way."""
    found: list[DraftRun] = []
    for place, token in enumerate(passage.tokens):
        ahead = range(min(len(passage.tokens) - place, DEPTH))
        right = next((age for age in ahead if not _is_right(passage, place + age, age)), len(ahead))
        said = passage.said(0)[place]
        found.append(DraftRun(len(ahead) if said else 0, right, any(one.token == token for one in said)))
    return found


def _is_right(passage: AgreementPassage, place: int, age: int) -> bool:
    said = passage.said(age)[place]
    return bool(said) and said[0].token == passage.tokens[place]


def _local(way: Way, request: ReplayedRequest, sources: OwnSources) -> list[LocalSource]:
    """The way's sources at the target."""
    opened = Open(SessionId(1), 1, request.prompt, Sampling(), Limits(request.end))
    found = (*local_sources(opened), sources.heads(request), sources.outputs(request))
    return [one for one in found if one is not None and one.source in way.local]


def _followed(source: LocalSource, passage: AgreementPassage) -> list[DraftRun]:
    """What comes of following a source at the target."""
    source.extend(passage.prompt)
    runs = []
    for place, token in enumerate(passage.tokens):
        ahead = passage.tokens[place:]
        said = source.propose(min(source.depth, len(ahead)))
        chain = _chain(said)
        right = next((i for i, (a, b) in enumerate(zip(chain, ahead, strict=False)) if a != b), len(chain))
        among = any(one == token for one, parent in zip(said.tokens, said.parents, strict=True) if parent == ANCHOR)
        runs.append(DraftRun(len(chain), right, among))
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
