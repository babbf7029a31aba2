"""The law: which draft tokens are kept.

Two rules. Under both, the committed tokens have exactly the target's distribution, whatever was offered: drafts change
only how many tokens a step decides.

    accepted   draft tokens kept
    recovered  the target's token where a draft was refused
    bonus      the target's token after everything offered along the path was kept

**Coupled** (greedy is its temperature-0 case; chains and trees alike). The target draws its own token after every
offered prefix, with noise that depends on nothing but (seed, position, token). Starting at the root, a draft token is
kept exactly when it *is* the token the target drew there. The committed tokens are therefore the target's draws, one
after another: not only their distribution but the text itself is the same for every drafter.

**Rejection** (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318; chains only). With p the
target's distribution after a prefix and q the one the draft token d was drawn from, d is kept with probability
min(1, p(d) / q(d)). The first one refused is replaced by a draw from norm(max(0, p - q)), and what hangs below it is
dropped unseen. A token v is then committed

    by being kept       with q(v) min(1, p(v) / q(v)) = min(p(v), q(v)),
    as a replacement    with P(refused) max(0, p(v) - q(v)) / sum(max(0, p - q)) = max(0, p(v) - q(v)),

because P(refused) = 1 - sum(min(p, q)) = sum(max(0, p - q)). Together that is p(v). The argument needs three things of
every draft token, given the text and the drafts before it:

1. q is the very distribution it was drawn from, after truncation and rounding (:class:`Sampled`). A likely token that
   was picked as if it had been drawn is committed too often; it must say that it was picked (:class:`Chosen`).
2. Draft draw, coin, replacement and bonus token are independent: one noise stream each.
3. Whether it is offered does not depend on it. A draft may end *after* any token, for any reason found in the drafts up
   to that one; but where d is left out, the target draws from p, so to leave it out when it is, say, unlikely shifts
   the balance between tokens. Confidence is therefore a function of q alone (:attr:`Sampled.confidence`). To come too
   late is to be left out, and what follows d depends on d: so no token waits for those behind it.

A chosen token counts as drawn from a q that is all on it: kept with p(d), else replaced from p without d. That is exact
for every single d, so how it was picked and when it is left out is free, if only the target's noise has no part in it.

``tests/property/test_exact_acceptance.py`` proves all this by enumeration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TypeVar

from speculation.frozen import frozen
from speculation.messages import ANCHOR, SUPPORT_TOTAL, FinishReason, Limits, Support, Token

Number = TypeVar("Number", Fraction, float)
"""Workers compute with floats; the proofs run the same lines with fractions."""


@frozen
class AcceptanceResult:
    """The outcome of one verification: the offer indices kept, root first, and the target's token after them."""

    kept: tuple[int, ...]
    own: Token


def walk(tokens: Sequence[Token], parents: Sequence[int], drawn: Sequence[Token]) -> AcceptanceResult:
    """The coupled rule: follow the target's draws through an offered tree.

    ``tokens[i]`` hangs from ``parents[i]`` (:data:`ANCHOR`: the committed prefix). ``drawn[0]`` is the target's token
    after the committed prefix, ``drawn[i + 1]`` its token after ``tokens[i]``.
    """
    assert len(drawn) == len(tokens) + 1 == len(parents) + 1
    if not tokens:
        return AcceptanceResult((), drawn[0])
    child = {(parent, token): i for i, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    kept: list[int] = []
    at = ANCHOR
    while (at, drawn[at + 1]) in child:
        at = child[at, drawn[at + 1]]
        kept.append(at)
    return AcceptanceResult(tuple(kept), drawn[at + 1])


@frozen
class Chosen:
    """A draft token picked in whatever way (prompt lookup, a caller's prediction), but without the target's noise.

    A coupled drafter's token is not one: the noise it is picked with is that of the target's bonus token.
    """

    token: Token

    @property
    def q(self) -> Support:
        """All on the token."""
        return Support((self.token,), (SUPPORT_TOTAL,))


@frozen
class Sampled:
    """A draft token drawn from ``q``."""

    token: Token
    q: Support

    def __post_init__(self) -> None:
        assert self.token in self.q.tokens, f"token {self.token} cannot have been drawn from {self.q}"

    @property
    def confidence(self) -> float:
        """The largest probability in q, in (0, 1]: how sure the drafter was *before* it drew."""
        return self.q.peak


Draft = Chosen | Sampled


def keep(p: Number, weight: int, coin: Number) -> bool:
    """The rejection rule for one token: kept with probability min(1, p / q), where q = weight / SUPPORT_TOTAL.

    ``coin`` is uniform in (0, 1). Strictly less, so that a token the target excludes is never kept. Without a division,
    so that floats decide exactly: a coin of :func:`speculation.noise.uniform` times a weight fits into 53 bits.
    """
    return coin * weight < p * SUPPORT_TOTAL


def keep_chain(drafts: Sequence[Draft], p: Iterable[Number], coins: Iterable[Number]) -> int:
    """How many tokens of an offered chain are kept: those before the first refused.

    ``p[i]`` is the target's probability of ``drafts[i]`` after the drafts before it; ``coins[i]`` decides on it.
    """
    for kept, (draft, probability, coin) in enumerate(zip(drafts, p, coins, strict=True)):
        weight = draft.q.weights[draft.q.tokens.index(draft.token)]
        if not keep(probability, weight, coin):
            return kept
    return len(drafts)


def residual(p: Sequence[Number], q: Support) -> list[Number]:
    """What a refused token is replaced from: norm(max(0, p - q)). ``p[v]`` is the target's probability of token v.

    Nothing is left of p only where p = q; there a refusal has probability 0, so any answer would do: it is p.
    """
    weights = dict(zip(q.tokens, q.weights, strict=True))
    above = [probability * SUPPORT_TOTAL - weights.get(token, 0) for token, probability in enumerate(p)]
    excess = [max(value, value * 0) for value in above]
    total = sum(excess)
    return [value / total for value in excess] if total else list(p)


def finish_at(position: int, tokens: Sequence[Token], limits: Limits) -> tuple[int, FinishReason | None]:
    """How many of ``tokens``, committed from ``position`` on, a session may keep, and whether it ends there.

    A stop token is kept and is the last one.
    """
    for count, token in enumerate(tokens, start=1):
        if token in limits.stop_tokens:
            return count, FinishReason.STOP
        if position + count >= limits.end:
            return count, FinishReason.LENGTH
    return len(tokens), None
