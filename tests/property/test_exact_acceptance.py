"""Both acceptance rules are lossless: exact enumeration on tiny vocabularies, no sampling, no tolerance.

A program decodes a few tokens with drafts, drawing all it needs from keyed noise. It is run once for every outcome of
that noise, which gives the exact distribution of its text; plain decoding gives the one to compare with. Probabilities
of the models are whole quarters, so few outcomes are enough for every draw. Each planted error changes one method of a
program that is exact without it, and must change the distribution.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from random import Random

import pytest

from speculation import acceptance
from speculation import digest as digests
from speculation.acceptance import AcceptanceResult, Chosen, Draft, Sampled, keep_chain, residual, walk
from speculation.messages import ANCHOR, SUPPORT_TOTAL, Support, Token
from speculation.noise import Stream
from speculation.sources.prediction import PredictionSource
from tests.thorough import mostly_thorough

Text = tuple[Token, ...]
Model = Callable[[Text], tuple[int, ...]]
"""From a text to the probabilities of the next token, in quarters."""

VOCABULARY = 3
QUARTERS = 4
ANY_GRAIN = 12
"""Outcomes enough for every draw here: probabilities and their ratios are multiples of 1/1 to 1/4."""
LENGTH = 3
"""Tokens of the texts compared."""


class Noise:
    """One outcome of all the noise a program asks for; asked again under the same key, it answers the same."""

    def __init__(self, tape: Sequence[int]) -> None:
        self._tape = tape
        self._known: dict[tuple[Stream, int], tuple[int, int]] = {}
        self.path: list[tuple[int, int]] = []
        """What was drawn, and out of how many outcomes."""

    def __call__(self, stream: Stream, position: int, outcomes: int) -> int:
        """Uniform in ``range(outcomes)``."""
        key = (stream, position)
        if key not in self._known:
            value = self._tape[len(self.path)] if len(self.path) < len(self._tape) else 0
            self._known[key] = value, outcomes
            self.path.append((value, outcomes))
        value, expected = self._known[key]
        assert outcomes == expected, "the same noise, asked for in another way"
        return value


def law(program: Callable[[Noise], Text]) -> dict[Text, Fraction]:
    """The exact distribution of what ``program`` returns."""
    result: defaultdict[Text, Fraction] = defaultdict(Fraction)
    tapes: list[list[int]] = [[]]
    while tapes:
        tape = tapes.pop()
        noise = Noise(tape)
        text = program(noise)
        result[text] += Fraction(1, math.prod(outcomes for _, outcomes in noise.path))
        values = [value for value, _ in noise.path]
        for depth in range(len(tape), len(values)):
            tapes += [[*values[:depth], other] for other in range(1, noise.path[depth][1])]
    assert sum(result.values()) == 1
    return dict(result)


def pick(weights: Sequence[int], noise: Noise, stream: Stream, position: int) -> Token:
    """Inverse transform: token v for ``weights[v]`` of the outcomes."""
    outcomes = sum(weights)
    point = 0 if outcomes in weights else noise(stream, position, outcomes)
    return next(token for token in range(len(weights)) if point < sum(weights[: token + 1]))


def random_model(name: str) -> Model:
    """A random distribution after every text; certain and impossible tokens are common."""

    @cache
    def model(text: Text) -> tuple[int, ...]:
        rng = Random(f"{name} {text}")
        drawn = [rng.randrange(VOCABULARY) for _ in range(QUARTERS)]
        return tuple(drawn.count(token) for token in range(VOCABULARY))

    return model


def contrary(model: Model) -> Model:
    """All on the token that ``model`` finds least likely."""
    return lambda text: tuple(QUARTERS * (token == _least_likely(model(text))) for token in range(VOCABULARY))


def _least_likely(weights: Sequence[int]) -> Token:
    return min(range(len(weights)), key=weights.__getitem__)


def likeliest(weights: Sequence[int]) -> Token:
    return max(range(len(weights)), key=weights.__getitem__)


def plain(target: Model) -> Callable[[Noise], Text]:
    """Decoding without drafts."""

    def program(noise: Noise) -> Text:
        text: Text = ()
        while len(text) < LENGTH:
            text += (pick(target(text), noise, Stream.SAMPLE, len(text)),)
        return text

    return program


# -- the rejection rule ------------------------------------------------------------------------------------------------


def support(weights: Sequence[int]) -> Support:
    """A drafter's q as it is shipped: tokens it would never draw are left out."""
    kept = [(token, weight * SUPPORT_TOTAL // QUARTERS) for token, weight in enumerate(weights) if weight]
    return Support(tuple(token for token, _ in kept), tuple(weight for _, weight in kept))


def tokens_of(drafts: Sequence[Draft]) -> Text:
    return tuple(draft.token for draft in drafts)


class Rejection:
    """Decoding in steps: draft ahead, verify a first part of the drafts, keep what hangs below the committed text."""

    lead = 2
    """Drafts held."""
    budget = 2
    """Drafts offered in one step."""

    def __init__(self, target: Model, drafter: Model) -> None:
        self.target, self.drafter = target, drafter
        self.survivals = 0

    def __call__(self, noise: Noise) -> Text:
        text: Text = ()
        chain: list[Draft] = []
        while len(text) < LENGTH:
            while len(chain) < min(self.lead, LENGTH - len(text)):
                chain.append(self.draft(text + tokens_of(chain), noise))
            committed = self.step(text, chain[: self.offered(chain)], noise)
            followed = tokens_of(chain[: len(committed)]) == committed
            self.survivals += followed
            chain = chain[len(committed) :] if followed else []
            text += committed
        return text

    def draft(self, text: Text, noise: Noise) -> Draft:
        q = self.drafter(text)
        return Sampled(pick(q, noise, Stream.DRAFT, len(text)), support(q))

    def offered(self, chain: Sequence[Draft]) -> int:
        return self.budget

    def step(self, text: Text, offered: Sequence[Draft], noise: Noise) -> Text:
        """The tokens committed: a bonus token beyond ``LENGTH`` is left out."""
        kept = self.kept(text, offered, noise)
        here = text + tokens_of(offered[:kept])
        if len(here) == LENGTH:
            return tokens_of(offered)
        if kept == len(offered):
            own = pick(self.target(here), noise, Stream.SAMPLE, len(here))
        else:
            own = self.replacement(self.target(here), offered[kept], len(here), noise)
        return (*tokens_of(offered[:kept]), own)

    def kept(self, text: Text, offered: Sequence[Draft], noise: Noise) -> int:
        laws = [self.target(text + tokens_of(offered[:i])) for i in range(len(offered))]
        p = [Fraction(weights[draft.token], QUARTERS) for weights, draft in zip(laws, offered, strict=True)]
        coins = (self.coin(p[i], draft, len(text) + i, noise) for i, draft in enumerate(offered))
        return keep_chain(offered, p, coins)

    def coin(self, p: Fraction, draft: Draft, position: int, noise: Noise) -> Fraction:
        """Multiples of 1/n, 0 among them: as good as a continuous coin for a threshold p/q that is a multiple too."""
        ratio = p * SUPPORT_TOTAL / draft.q.weights[draft.q.tokens.index(draft.token)]
        return Fraction(noise(Stream.ACCEPT, position, ratio.denominator), ratio.denominator)

    def replacement(self, p: Sequence[int], draft: Draft, position: int, noise: Noise) -> Token:
        return self.drawn(self.residual([Fraction(weight, QUARTERS) for weight in p], draft), position, noise)

    def residual(self, p: Sequence[Fraction], draft: Draft) -> list[Fraction]:
        return residual(p, draft.q)

    def drawn(self, probabilities: Sequence[Fraction], position: int, noise: Noise) -> Token:
        outcomes = math.lcm(*(probability.denominator for probability in probabilities))
        weights = [int(probability * outcomes) for probability in probabilities]
        return pick(weights, noise, Stream.RESIDUAL, position)


class SurvivingTail(Rejection):
    """More is drafted than offered: a bonus token may equal the next draft, and what follows that one is verified."""

    lead, budget = 3, 1


class OneDraft(Rejection):
    lead, budget = 1, 1


class AllChosen(Rejection):
    def draft(self, text: Text, noise: Noise) -> Draft:
        return Chosen(likeliest(self.drafter(text)))


class Mixed(Rejection):
    """Chosen and sampled tokens in one chain, in an order that depends on the text."""

    def draft(self, text: Text, noise: Noise) -> Draft:
        drawn = super().draft(text, noise)
        return Chosen(likeliest(self.drafter(text))) if (len(text) + sum(text)) % 2 else drawn


class Predicted(Rejection):
    """A caller's prediction where the text follows or has rejoined it, drawn tokens elsewhere."""

    prediction = (1, 0, 2, 1, 0, 0)

    def draft(self, text: Text, noise: Noise) -> Draft:
        source = PredictionSource(self.prediction, 0)
        source.extend(text)
        found = source.propose(1).tokens
        return Chosen(found[0]) if found else super().draft(text, noise)


class EndsAfterAToken(Rejection):
    """What is offered depends on the drafts offered, as after a stop token."""

    lead, budget = 3, 2

    def offered(self, chain: Sequence[Draft]) -> int:
        return 1 if chain[0].token == 0 else self.budget


class EndsByConfidence(SurvivingTail):
    """A draft whose q is too flat is left out, with all behind it."""

    def offered(self, chain: Sequence[Draft]) -> int:
        sure = [isinstance(draft, Sampled) and draft.confidence > 0.5 for draft in chain]
        return sure.index(False) if False in sure else len(chain)


class LateAfterSomeDrafts(Rejection):
    """When drafts come after a refusal depends on what was drafted behind the refused one, as after a stop token."""

    def __call__(self, noise: Noise) -> Text:
        self.before: Sequence[Draft] = ()
        return super().__call__(noise)

    def offered(self, chain: Sequence[Draft]) -> int:
        before, self.before = self.before[-1:], chain
        dropped = [draft for draft in before if not any(draft is standing for standing in chain)]
        return 0 if any(draft.token == 0 for draft in dropped) else self.budget

    def draft(self, text: Text, noise: Noise) -> Draft:
        q = self.drafter(text)
        return Sampled(pick(q, noise, Stream.DRAFT, digests.of(text)), support(q))


class DrawnButCalledChosen(Rejection):
    """Without its q a drawn token is verified as a chosen one: fewer are kept, and even choosing among them is free."""

    def draft(self, text: Text, noise: Noise) -> Draft:
        return Chosen(super().draft(text, noise).token)

    def offered(self, chain: Sequence[Draft]) -> int:
        return 0 if chain[0].token == 0 else 1 if chain[-1].token == 1 else 2


REJECTION = [
    OneDraft,
    Rejection,
    SurvivingTail,
    AllChosen,
    Predicted,
    Mixed,
    EndsAfterAToken,
    EndsByConfidence,
    LateAfterSomeDrafts,
    DrawnButCalledChosen,
]


@pytest.mark.parametrize("seed", mostly_thorough(range(4), quick=[0, 1]))
@pytest.mark.parametrize("program", REJECTION)
def test_rejection_commits_exactly_the_targets_distribution(program: type[Rejection], seed: int) -> None:
    target = random_model(f"target {seed}")
    assert law(program(target, random_model(f"drafter {seed}"))) == law(plain(target))


@pytest.mark.parametrize("program", [Rejection, SurvivingTail, Mixed])
def test_drafters_that_agree_always_or_never(program: type[Rejection]) -> None:
    for seed in range(3):
        target = random_model(f"target {seed}")
        for drafter in (target, contrary(target)):
            assert law(program(target, drafter)) == law(plain(target)), f"replay with seed {seed}"


def test_drafts_below_a_bonus_token_are_verified_in_these_cases() -> None:
    decoding = SurvivingTail(random_model("target 0"), random_model("drafter 0"))
    law(decoding)
    assert decoding.survivals > 100


class KeepsAtEquality(Rejection):
    """``r <= p/q`` keeps what the target excludes when r is 0."""

    def kept(self, text: Text, offered: Sequence[Draft], noise: Noise) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(acceptance, "keep", lambda p, weight, coin: coin * weight <= p * SUPPORT_TOTAL)
            return super().kept(text, offered, noise)


class IgnoresQ(Rejection):
    """Keeps with p(d), but replaces as if with p(d)/q(d)."""

    def kept(self, text: Text, offered: Sequence[Draft], noise: Noise) -> int:
        return super().kept(text, [Chosen(draft.token) for draft in offered], noise)


class ReplacesFromTheTarget(Rejection):
    def residual(self, p: Sequence[Fraction], draft: Draft) -> list[Fraction]:
        return list(p)


class ResidualOfTheWrongSign(Rejection):
    def residual(self, p: Sequence[Fraction], draft: Draft) -> list[Fraction]:
        q = dict(zip(draft.q.tokens, draft.q.weights, strict=True))
        excess = [max(Fraction(q.get(token, 0), SUPPORT_TOTAL) - value, Fraction(0)) for token, value in enumerate(p)]
        return [value / sum(excess) for value in excess]


class ResidualNotNormalised(Rejection):
    """A cumulative sum that does not reach 1 gives what is missing to the last token."""

    def residual(self, p: Sequence[Fraction], draft: Draft) -> list[Fraction]:
        q = dict(zip(draft.q.tokens, draft.q.weights, strict=True))
        excess = [max(value - Fraction(q.get(token, 0), SUPPORT_TOTAL), Fraction(0)) for token, value in enumerate(p)]
        return [*excess[:-1], 1 - sum(excess[:-1], Fraction(0))]


class ChosenPassedOffAsSampled(Rejection):
    def draft(self, text: Text, noise: Noise) -> Draft:
        q = self.drafter(text)
        return Sampled(likeliest(q), support(q))


class DraftAndReplacementShareNoise(OneDraft):
    def draft(self, text: Text, noise: Noise) -> Draft:
        q = self.drafter(text)
        weights = [weight * ANY_GRAIN // QUARTERS for weight in q]
        return Sampled(pick(weights, noise, Stream.DRAFT, len(text)), support(q))

    def drawn(self, probabilities: Sequence[Fraction], position: int, noise: Noise) -> Token:
        weights = [int(probability * ANY_GRAIN) for probability in probabilities]
        return pick(weights, noise, Stream.DRAFT, position)


class OneCoinForAllPositions(Rejection):
    def coin(self, p: Fraction, draft: Draft, position: int, noise: Noise) -> Fraction:
        return Fraction(noise(Stream.ACCEPT, 0, ANY_GRAIN), ANY_GRAIN)


class LeavesOutByValue(Rejection):
    """A draft of one token is dropped before it is offered."""

    def offered(self, chain: Sequence[Draft]) -> int:
        return 0 if chain[0].token == 0 else 1


class LeavesOutTheUnlikely(Rejection):
    """Confidence taken from the token drawn instead of from q."""

    def offered(self, chain: Sequence[Draft]) -> int:
        first = chain[0].q
        return 1 if first.weights[first.tokens.index(chain[0].token)] * 2 > SUPPORT_TOTAL else 0


class DrawsAgainWithTheSameNoise(LateAfterSomeDrafts):
    """What was drawn at a position on the refused branch decides when the next draft there comes."""

    def draft(self, text: Text, noise: Noise) -> Draft:
        return Rejection.draft(self, text, noise)


class ShipsAnotherQ(Rejection):
    """Drawn before rounding, shipped after it."""

    def draft(self, text: Text, noise: Noise) -> Draft:
        drawn = super().draft(text, noise)
        weights = list(drawn.q.weights)
        if len(weights) > 1:
            likeliest_token = likeliest(weights)
            weights[likeliest_token] -= SUPPORT_TOTAL // 8
            weights[likeliest_token - 1] += SUPPORT_TOTAL // 8
        return Sampled(drawn.token, Support(drawn.q.tokens, tuple(weights)))


class ChoosesWithTheBonusNoise(LeavesOutByValue):
    """A coupled drafter's tokens, some left out: then the bonus token is drawn with noise that was looked at."""

    def draft(self, text: Text, noise: Noise) -> Draft:
        return Chosen(pick(self.drafter(text), noise, Stream.SAMPLE, len(text)))


REJECTION_ERRORS = [
    KeepsAtEquality,
    IgnoresQ,
    ReplacesFromTheTarget,
    ResidualOfTheWrongSign,
    ResidualNotNormalised,
    ChosenPassedOffAsSampled,
    DraftAndReplacementShareNoise,
    OneCoinForAllPositions,
    LeavesOutByValue,
    LeavesOutTheUnlikely,
    DrawsAgainWithTheSameNoise,
    ShipsAnotherQ,
    ChoosesWithTheBonusNoise,
]


@pytest.mark.parametrize("program", REJECTION_ERRORS)
def test_an_error_planted_in_rejection_is_found(program: type[Rejection]) -> None:
    targets = [(random_model(f"target {seed}"), random_model(f"drafter {seed}")) for seed in range(5)]
    assert any(law(program(target, drafter)) != law(plain(target)) for target, drafter in targets)


# -- the coupled rule --------------------------------------------------------------------------------------------------


class Coupled:
    """Decoding in steps that offer any tree. The drafter knows all the noise, which the rule allows."""

    nodes, siblings = 6, VOCABULARY

    def __init__(self, target: Model, seed: int) -> None:
        self.target, self.seed = target, seed

    def __call__(self, noise: Noise) -> Text:
        text: Text = ()
        while len(text) < LENGTH:
            tokens, parents = self.offer(text, noise)
            prefixes = [text, *(text + self.path(i, tokens, parents) for i in range(len(tokens)))]
            drawn = [self.draw(prefix, noise) for prefix in prefixes]
            outcome = self.verdict(tokens, parents, drawn)
            text += (*(tokens[i] for i in outcome.kept), outcome.own)
        return text[:LENGTH]

    def offer(self, text: Text, noise: Noise) -> tuple[list[Token], list[int]]:
        ahead = [noise(Stream.SAMPLE, position, QUARTERS) for position in range(len(text), LENGTH)]
        rng = Random(f"{self.seed} {text} {ahead}")
        tokens: list[Token] = []
        parents: list[int] = []
        for _ in range(self.nodes):
            # Deep where there are few siblings; the target's own path is among the parents often enough.
            parent = rng.randrange(ANCHOR, len(tokens)) if self.siblings > 1 else len(tokens) - 1
            token = rng.randrange(VOCABULARY)
            taken = [other for other, above in zip(tokens, parents, strict=True) if above == parent]
            if token not in taken and len(taken) < self.siblings:
                tokens.append(token)
                parents.append(parent)
        return tokens, parents

    def path(self, node: int, tokens: Sequence[Token], parents: Sequence[int]) -> Text:
        return () if node == ANCHOR else (*self.path(parents[node], tokens, parents), tokens[node])

    def draw(self, prefix: Text, noise: Noise) -> Token:
        return pick(self.target(prefix), noise, Stream.SAMPLE, len(prefix))

    def verdict(self, tokens: Sequence[Token], parents: Sequence[int], drawn: Sequence[Token]) -> AcceptanceResult:
        return walk(tokens, parents, drawn)


class Chains(Coupled):
    nodes, siblings = 3, 1


class Siblings(Coupled):
    nodes, siblings = 8, 2


class AnyOrder(Coupled):
    """Offers whose order says nothing: not even that parents come first."""

    def offer(self, text: Text, noise: Noise) -> tuple[list[Token], list[int]]:
        tokens, parents = super().offer(text, noise)
        order = list(range(len(tokens)))
        Random(f"{self.seed} {tokens}").shuffle(order)
        return [tokens[i] for i in order], [ANCHOR if parents[i] == ANCHOR else order.index(parents[i]) for i in order]


@pytest.mark.parametrize("seed", mostly_thorough(range(4), quick=[0, 1]))
@pytest.mark.parametrize("program", [Chains, Siblings, Coupled, AnyOrder])
def test_coupled_commits_exactly_the_targets_text(program: type[Coupled], seed: int) -> None:
    target = random_model(f"target {seed}")
    decoding, undisturbed = program(target, seed), plain(target)

    def both(noise: Noise) -> Text:
        text = decoding(noise)
        assert text == undisturbed(noise), f"seed {seed}, noise {noise.path}"
        return text

    assert law(both) == law(undisturbed)


class KeepsAnyFirstDraft(Coupled):
    def verdict(self, tokens: Sequence[Token], parents: Sequence[int], drawn: Sequence[Token]) -> AcceptanceResult:
        outcome = walk(tokens, parents, drawn)
        return outcome if outcome.kept or not tokens else AcceptanceResult((0,), drawn[1])


class RefusesSomeLeaves(Coupled):
    """A leaf that the target drew is not kept, and its row's token committed in its place."""

    def verdict(self, tokens: Sequence[Token], parents: Sequence[int], drawn: Sequence[Token]) -> AcceptanceResult:
        outcome = walk(tokens, parents, drawn)
        return AcceptanceResult((), drawn[-1]) if len(outcome.kept) == 1 and drawn[0] == 0 else outcome


class RecoversFromTheWrongRow(Coupled):
    def verdict(self, tokens: Sequence[Token], parents: Sequence[int], drawn: Sequence[Token]) -> AcceptanceResult:
        return AcceptanceResult(walk(tokens, parents, drawn).kept, drawn[-1])


class DrawsAgainAfterARefusal(Coupled):
    """The draft gets a second chance, with other noise."""

    def __call__(self, noise: Noise) -> Text:
        text: Text = ()
        while len(text) < LENGTH:
            draft = likeliest(self.target(text))
            drawn = self.draw(text, noise)
            again = pick(self.target(text), noise, Stream.RESIDUAL, len(text))
            text += (drawn if drawn == draft else again,)
        return text


class OneNoiseForAllPositions(Coupled):
    def draw(self, prefix: Text, noise: Noise) -> Token:
        return pick(self.target(prefix), noise, Stream.SAMPLE, 0)


COUPLED_ERRORS = [
    KeepsAnyFirstDraft,
    RefusesSomeLeaves,
    RecoversFromTheWrongRow,
    DrawsAgainAfterARefusal,
    OneNoiseForAllPositions,
]


@pytest.mark.parametrize("program", COUPLED_ERRORS)
def test_an_error_planted_in_coupled_acceptance_is_found(program: type[Coupled]) -> None:
    targets = [(random_model(f"target {seed}"), seed) for seed in range(5)]
    assert any(law(program(target, seed)) != law(plain(target)) for target, seed in targets)
