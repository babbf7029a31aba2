"""What a session's text is held to, as far as speculation needs to know: what must follow, and where the text is over.

The core knows no grammar. A worker brings an implementation, and tells it every committed token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from speculation.settings import Token

MAX_GRAMMAR_BYTES = 1 << 18
"""Largest grammar that a router sends and a worker reads, in UTF-8."""


class Constraint(Protocol):
    """A grammar, and how far a session's text has come in it."""

    def forced(self, path: Sequence[Token]) -> Sequence[Token]:
        """Tokens of the only text that may follow the draft tokens of ``path``; none where there is a choice.

        The text may be tokenised otherwise as well: the tokens are a draft like any other.
        """

    def ending(self, tokens: Sequence[Token]) -> int | None:
        """After how many of ``tokens``, which are committed next, nothing may follow; None: something may."""
