"""The law: which draft tokens are kept.

Coupled acceptance (greedy is its temperature-0 case). The target draws its own token after every offered prefix, with
noise that depends on nothing but (seed, position, token). Starting at the root, a draft token is kept exactly when it
*is* the token the target drew there:

    accepted   draft tokens on the path that the target's own draws follow
    recovered  the target's token where no offered draft was it
    bonus      the target's token after a leaf of the offer was kept

The committed tokens are therefore the target's draws, one after another, whatever was offered: the output does not
depend on the drafts, only the number of tokens decided per step does. This holds for chains and trees alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speculation.messages import ANCHOR, FinishReason, Limits, Token


@dataclass(frozen=True, slots=True)
class Walk:
    """The outcome of one verification: the offer indices kept, root first, and the target's token after them."""

    kept: tuple[int, ...]
    own: Token


def walk(tokens: Sequence[Token], parents: Sequence[int], drawn: Sequence[Token]) -> Walk:
    """Follow the target's draws through an offered tree.

    ``tokens[i]`` hangs from ``parents[i]`` (:data:`ANCHOR`: the committed prefix). ``drawn[0]`` is the target's token
    after the committed prefix, ``drawn[i + 1]`` its token after ``tokens[i]``.
    """
    assert len(drawn) == len(tokens) + 1 == len(parents) + 1
    child = {(parent, token): i for i, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    kept: list[int] = []
    at = ANCHOR
    while (at, drawn[at + 1]) in child:
        at = child[at, drawn[at + 1]]
        kept.append(at)
    return Walk(tuple(kept), drawn[at + 1])


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
