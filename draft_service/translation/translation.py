"""Whether a draft worker has to translate, and how it does: it then speaks the target's tokens only.

How much two vocabularies share is found out by letting the draft model write: tokens that are rarely said hardly
matter. That tells both what it would rather say in tokens of its own alone, and what the target would.

Tensor legend: R rows, V vocabulary, S own tokens that are shared, or begin with a shared one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from draft_service.sequence import Reader
from draft_service.translation.own_text import OwnText
from draft_service.translation.tokenizer import DraftTokenizer, SharedVocabulary
from engine.host.upload import upload
from engine.interface import Chunk
from engine.loading.checkpoint import read_config
from engine.model import Model, ModelError
from engine.sampling.sampling import Draw, drawn
from engine.step import Engine
from speculation.messages import Loading, Progress, Sampling, Token


@dataclass(frozen=True, slots=True)
class Vocabularies:
    """Two tokenizers that differ."""

    target: DraftTokenizer
    own: DraftTokenizer
    target_size: int
    digest: int
    """Of the target's tokenizer, as target workers give it."""


def read_vocabularies(model: str, target: str) -> Vocabularies | None:
    """The tokenizers of a draft model and of its target, folders or hub ids; None if there is nothing to translate.

    Raises :class:`engine.model.ModelError`, also where both share too little.
    """
    if not target:
        return None
    (own, own_digest), (theirs, digest) = DraftTokenizer.load(model), DraftTokenizer.load(target)
    if own_digest == digest:
        return None
    size = theirs.size
    folder = Path(target).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():  # else it is a tokenizer without a model
        size = min(size, read_config(target).get_text_config(decoder=True).vocab_size)
    found = Vocabularies(theirs, own, size, digest)
    SharedVocabulary(theirs, own, target_size=size, own_size=own.size)  # before the model is loaded
    return found


def translator(engine: Engine, known: Vocabularies, progress: Progress | None = None) -> OtherVocabulary:
    """What reads the draft model for sessions of the target. Raises :class:`engine.model.ModelError`."""
    shared = SharedVocabulary(known.target, known.own, target_size=known.target_size, own_size=engine.model.vocabulary)
    found = overlap(engine, shared)
    check(found, shared)
    if progress is not None:
        progress(Loading(f"translating: {shared.share:.0%} of the target's tokens are shared, {found}"))
    return OtherVocabulary(engine.model, shared)


class OtherVocabulary(Reader):
    """The draft model has another vocabulary than the target."""

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


TEXTS, TOKENS = 8, 24
"""How much it writes. From the same start, so with other noise each."""
MIN_HEARD = 0.25
"""Share of the target's tokens for a text that must be shared."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of what the draft model writes, as shares from 0 to 1."""

    said: float
    """The probability it gives to shared tokens; of the rest, only the beginning can be proposed."""
    heard: float
    """Of the target's tokens for the same text, those that are shared. No more drafts can be accepted."""

    def __str__(self) -> str:
        return f"{self.said:.0%} of what it says, and {self.heard:.0%} of the target's tokens for that"


def overlap(engine: Engine, shared: SharedVocabulary) -> Overlap:
    """Let the draft model write; its cache is left as it was."""
    own, model = shared.own, engine.model
    start = own.beginning or sorted(model.stop_tokens)[:1] or [0]
    written = [list(start) for _ in range(TEXTS)]
    cached = [engine.cache.sequence() for _ in written]
    own_S = upload(list(shared.own_of.values()), model.device)
    said = 0.0
    try:
        for place in range(TOKENS):
            fed = [tokens[sequence.length :] for tokens, sequence in zip(written, cached, strict=True)]
            chunks = [Chunk(sequence, new, rows=[len(new) - 1]) for sequence, new in zip(cached, fed, strict=True)]
            logits_RV = engine.run(chunks)
            for sequence, new in zip(cached, fed, strict=True):
                sequence.advance(range(len(new)))
            said += float(torch.softmax(logits_RV, -1).index_select(1, own_S).sum(-1).mean()) / TOKENS
            draws = [Draw(Sampling(temperature=1.0, seed=text), place) for text in range(TEXTS)]
            for tokens, token in zip(written, drawn(logits_RV, draws).tolist(), strict=True):
                tokens.append(token)
    finally:
        for sequence in cached:
            sequence.free()
    heard = [token for tokens in written for token in shared.target.encode(own.decode(tokens))[0]]
    return Overlap(said, sum(token in shared.own_of for token in heard) / max(len(heard), 1))


def check(found: Overlap, shared: SharedVocabulary) -> None:
    """Raises :class:`ModelError` if drafting could not pay."""
    if found.heard < MIN_HEARD:
        raise ModelError(
            f"{shared.own.name}: shares {shared.share:.0%} of the target's tokens, {found}; "
            f"at least {MIN_HEARD:.0%} of those are needed, choose a draft model with a tokenizer nearer to that"
        )
