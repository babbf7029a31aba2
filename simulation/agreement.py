"""How a drafter and a target agree along a text: recorded from a real pair, or made up from two figures.

For the simulator. A text is a sequence of :class:`~speculation.drafting.draft_session.Outcome`: what the drafter thinks
of its candidates at each place, and which of them the target takes. Easy and hard stretches of a real text are long,
and how much a drafter gets done before the next refusal depends on that; so what was recorded is replayed in its order,
and what is made up comes in such stretches too. Once a path has left the text, nothing on it is right any more.

Where sources that read the text take part, its words matter: a :class:`AgreementPassage` has those that the target
really said.

An EAGLE head goes on from its own states where it has no true ones, and says worse things the further it has gone so:
what it says at a place depends on its *age*, the tokens by which the place lies behind where its true states let it
guess. Age 0 is the place behind a text of which it has all there is. Off the text nothing is right at any age.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from speculation import digest as digests
from speculation import noise
from speculation.drafting.draft_session import NONE_RIGHT, Candidate, Outcome
from speculation.messages import Token

VOCABULARY = 4096
CANDIDATES = 3
HARD_SHARE = 0.3
"""Share of a made-up text that is hard: there the first candidate is right with the acceptance squared."""
STRETCH = 8.0
"""Mean length of an easy stretch, in tokens."""
SPREAD = 1.0
"""How evenly confidences are spread within a stretch (a and b of their beta distribution add up to this)."""
BLUR = 0.3
"""Share of a confidence that means nothing."""
LIKEWISE = 0.6
"""A further candidate is right, where those before it are not, with this much of the acceptance unless told."""


def made_up(rng: Random, acceptance: float, coverage: float | None = None, length: int = 4000) -> list[Outcome]:
    """A text whose first candidate is right with probability ``acceptance``.

    ``coverage`` is the chance of the second to be right where the first is not, and of the third where neither is. A
    confidence is what such a place deserves on average, so it is calibrated; :data:`BLUR` of it is noise.
    """
    coverage = LIKEWISE * acceptance if coverage is None else coverage
    hard_chance = acceptance**2
    easy_chance = (acceptance - HARD_SHARE * hard_chance) / (1 - HARD_SHARE)
    ends_easy = 1 / STRETCH
    ends_hard = ends_easy * (1 - HARD_SHARE) / HARD_SHARE
    outcomes: list[Outcome] = []
    hard = rng.random() < HARD_SHARE
    for _ in range(length):
        hard ^= rng.random() < (ends_hard if hard else ends_easy)
        mean = hard_chance if hard else easy_chance
        stated = rng.betavariate(SPREAD * mean, SPREAD * (1 - mean)) if 0 < mean < 1 else mean
        first = BLUR * mean + (1 - BLUR) * stated
        chances = [first, *(coverage for _ in range(CANDIDATES - 1))]
        right = next((rank for rank, chance in enumerate(chances) if rng.random() < chance), NONE_RIGHT)
        rest = 1 - stated
        outcomes.append(Outcome((stated, rest * coverage, rest * (1 - coverage) * coverage), right))
    return outcomes


class ReplayedText(ABC):
    """What both models say at every place that a session can get to. Places are named as everywhere, by digest."""

    def __init__(self, vocabulary: int) -> None:
        """Tokens are below ``vocabulary``."""
        self.vocabulary = vocabulary
        self._digests = [digests.EMPTY]

    @abstractmethod
    def token(self, position: int) -> Token:
        """The token of the true text at ``position``."""

    @abstractmethod
    def _said(self, end: int, age: int) -> list[Candidate]:
        """What the drafter says after the first ``end`` tokens of the true text."""

    @abstractmethod
    def _anywhere(self, at: int) -> tuple[float, ...]:
        """The confidences at a place of some text that ``at``, any number, picks."""

    def drawn(self, end: int, digest: int) -> Token:
        """What the target says after the prefix of length ``end`` that ``digest`` names."""
        return self.token(end) if self.digest(end) == digest else noise.splitmix64(digest) % self.vocabulary

    def candidates(self, end: int, digest: int, age: int = 0) -> list[Candidate]:
        """What the drafter says there; ``age``: that of a head, by which no draft model changes what it says."""
        if self.digest(end) == digest:
            return self._said(end, age)
        wrong = noise.splitmix64(digest)
        confidences = self._anywhere(wrong)
        return [Candidate((wrong + rank) % self.vocabulary, sure) for rank, sure in enumerate(confidences)]

    def digest(self, end: int) -> int:
        """Of the first ``end`` tokens of the true text."""
        while len(self._digests) <= end:
            self._digests.append(digests.extend(self._digests[-1], self.token(len(self._digests) - 1)))
        return self._digests[end]


class Replayed(ReplayedText):
    """Made-up words that the models agree on as in ``outcomes``, from index ``first`` on, round and round."""

    def __init__(self, outcomes: Sequence[Outcome], first: int, seed: int, retention: float = 1.0) -> None:
        """``seed`` sets the words. ``retention``: the share of what is right that stays so with each token of age."""
        super().__init__(VOCABULARY)
        self._outcomes, self._first, self._seed, self._retention = outcomes, first, seed, retention

    def token(self, position: int) -> Token:
        """The token of the true text at ``position``."""
        return noise.splitmix64(self._seed ^ position) % VOCABULARY

    def _said(self, end: int, age: int) -> list[Candidate]:
        outcome = self._outcomes[(self._first + end) % len(self._outcomes)]
        right, kept = self.token(end), self._retention**age
        luck = noise.splitmix64(noise.splitmix64(self._seed ^ end)) / 2**64  # what is right is so at lower ages too
        rank_right = outcome.right if luck < kept else NONE_RIGHT
        return [
            Candidate((right if rank == rank_right else right + 1 + rank) % VOCABULARY, kept * confidence)
            for rank, confidence in enumerate(outcome.confidences)
        ]

    def _anywhere(self, at: int) -> tuple[float, ...]:
        return self._outcomes[at % len(self._outcomes)].confidences


ByAge = tuple[tuple[tuple[Candidate, ...], ...], ...]
"""Candidates by place, as of a draft model, at ages 0, 1, ...; older, a head says what it does at the last of these."""


@dataclass(frozen=True, slots=True)
class AgreementPassage:
    """A prompt, what the target really says after it, and what drafters would say at each place along the way."""

    prompt: tuple[Token, ...]
    tokens: tuple[Token, ...]
    places: tuple[tuple[Candidate, ...], ...] = ()
    """Best first; ``places[i]`` stands for ``tokens[i]``. Empty: no drafter was asked."""
    by_age: ByAge = ()
    """What an EAGLE head would say. Empty: there is none."""

    def __post_init__(self) -> None:
        assert self.prompt and len(self.tokens) > 1, "a text without a prompt, or of one token, has no pace"
        assert len(self.places) in (0, len(self.tokens))
        assert all(len(places) == len(self.tokens) for places in self.by_age)

    def said(self, age: int) -> tuple[tuple[Candidate, ...], ...]:
        """What the drafter says at each place: a draft model, or a head of that age where there is none."""
        return self.places if self.places or not self.by_age else self.by_age[min(age, len(self.by_age) - 1)]

    def kept(self, place: int, depth: int) -> int:
        """Tokens of a draft of so many, from a place on, that are right: of first choices; a head ages on the way."""
        ahead = self.tokens[place : place + depth]
        for age, token in enumerate(ahead):
            said = self.said(age)[place + age]
            if not said or said[0].token != token:
                return age
        return len(ahead)


class Spoken(ReplayedText):
    """The very words of a passage, so that sources which read the text find in it what they would find."""

    def __init__(self, passage: AgreementPassage, vocabulary: int, seed: int) -> None:
        """``seed`` sets what stands beyond its end, which drafters may ask about."""
        super().__init__(vocabulary)
        self._passage, self._seed = passage, seed
        self._words = passage.prompt + passage.tokens

    def token(self, position: int) -> Token:
        """The token of the true text at ``position``."""
        if position < len(self._words):
            return self._words[position]
        return noise.splitmix64(self._seed ^ position) % self.vocabulary

    def _said(self, end: int, age: int) -> list[Candidate]:
        at, places = end - len(self._passage.prompt), self._passage.said(age)
        return list(places[at]) if 0 <= at < len(places) else []

    def _anywhere(self, at: int) -> tuple[float, ...]:
        places = self._passage.said(0)
        return tuple(candidate.confidence for candidate in places[at % len(places)])


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """A text as a request for it: what it opens with, and where it ends."""

    text: ReplayedText
    prompt: tuple[Token, ...]
    end: int
    head: ReplayedText | None = None
    """What an EAGLE head says at the target, if there is one."""
    scope: str = ""
    """Requests of one scope may draft from each other's outputs."""


@dataclass(frozen=True, slots=True)
class Replays:
    """Requests of ``tokens`` tokens, each of which goes on in ``outcomes`` where the one before it ends."""

    outcomes: Sequence[Outcome]
    tokens: int
    start: int = 0
    retention: float = 1.0
    """See :class:`Replayed`."""

    def __post_init__(self) -> None:
        assert self.tokens > 1, "a request of one token has no pace"

    def request(self, number: int, seed: int) -> ReplayedRequest:
        """The one that is opened after ``number`` others; ``seed`` for what in it is left to chance."""
        text = Replayed(self.outcomes, (self.start + number * self.tokens) % len(self.outcomes), seed, self.retention)
        return ReplayedRequest(text, (text.token(0),), 1 + self.tokens, head=text)


@dataclass(frozen=True, slots=True)
class Passages:
    """Passages one after another, round and round. A round knows nothing of the outputs of the one before."""

    passages: Sequence[AgreementPassage]
    vocabulary: int

    def request(self, number: int, seed: int) -> ReplayedRequest:
        """The one that is opened after ``number`` others; ``seed`` for what in it is left to chance."""
        lap, index = divmod(number, len(self.passages))
        passage = self.passages[index]
        end = len(passage.prompt) + len(passage.tokens)
        text = Spoken(passage, self.vocabulary, seed)
        head = Spoken(replace(passage, places=()), self.vocabulary, seed) if passage.by_age else None
        return ReplayedRequest(text, passage.prompt, end, head, scope=str(lap))


Texts = Replays | Passages
"""The requests of a simulated run."""
