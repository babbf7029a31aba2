"""What the draft model reads of a session, and how its logits are read: as they are, or through another vocabulary.

Sessions are in the target's tokens everywhere else. Here, and only here, they meet the draft model's.

Tensor legend: R rows, V vocabulary, S own tokens that begin with a shared one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from draft_service.translation.own_text import OwnText
from draft_service.translation.tokenizer import SharedVocabulary
from engine.host.upload import upload
from engine.model import Model
from speculation.messages import Token


class Text(Protocol):
    """The committed text of one session as the draft model reads it."""

    @property
    def tokens(self) -> Sequence[Token]:
        """In the draft model's tokens. Not a copy: read only."""

    @property
    def complete(self) -> bool:
        """Whether they are all of the text, so that drafts can hang from its end."""

    def own(self, token: Token) -> Token:
        """The draft model's token for a draft token."""

    def follow(self, count: int) -> None:
        """The next ``count`` tokens that were committed are drafts that the draft model has been fed."""

    def settle(self) -> int:
        """Take in all that is committed. How many of the tokens before, from the first on, are still the same."""


class Reader(Protocol):
    """The draft model, seen from the sessions."""

    @property
    def model(self) -> Model:
        """The draft model, with the vocabulary of the sessions."""

    def text(self, committed: Sequence[Token]) -> Text:
        """The text of a session. ``committed``: its tokens, a list that grows as they are."""

    def read(self, logits_RV: Tensor) -> Tensor:
        """What the draft model's logits say of the sessions' tokens, ``[R, V]`` of their vocabulary; -inf: nothing."""


class SameVocabulary:
    """The draft model's vocabulary is the target's: everything is read as it is. Implements :class:`Reader`."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def text(self, committed: Sequence[Token]) -> Text:
        """The committed tokens themselves."""
        return SameText(committed)

    def read(self, logits_RV: Tensor) -> Tensor:
        """The logits themselves."""
        return logits_RV


class SameText:
    """Committed tokens that need no translation. Implements :class:`Text`."""

    complete = True

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = tokens

    def own(self, token: Token) -> Token:
        """The same."""
        return token

    def follow(self, count: int) -> None:
        """Nothing to do: the list has grown by itself."""

    def settle(self) -> int:
        """All of them are the same."""
        return len(self.tokens)


class OtherVocabulary:
    """The draft model has another vocabulary than the target. Implements :class:`Reader`."""

    def __init__(self, model: Model, shared: SharedVocabulary) -> None:
        end = frozenset(token for token, names in shared.target.special.items() if "eos_token" in names)
        self.model = replace(model, name=shared.target.name, vocabulary=shared.size, stop_tokens=end)
        self.shared = shared
        self._own_S = upload(list(shared.begins), model.device)
        self._target_S = upload(list(shared.begins.values()), model.device)

    def text(self, committed: Sequence[Token]) -> OwnText:
        """Its own tokens of the text."""
        return OwnText(self.shared, committed)

    def read(self, logits_RV: Tensor) -> Tensor:
        """To each shared token, the probability of all own tokens that begin with it, on the scale of the logits."""
        scale_R1 = logits_RV.logsumexp(-1, keepdim=True)
        odds_RS = (logits_RV.index_select(1, self._own_S) - scale_R1).exp_()
        read_RV = logits_RV.new_zeros(len(logits_RV), self.shared.size)
        return read_RV.index_add_(1, self._target_S, odds_RS).log_().add_(scale_R1)
