"""Whether a draft worker has to translate, and what it needs for that: it then speaks the target's tokens only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draft_service.translation.overlap import check, overlap
from draft_service.translation.reading import OtherVocabulary
from draft_service.translation.tokenizer import DraftTokenizer
from draft_service.translation.vocabulary import SharedVocabulary
from engine.loading.loader import read_config
from engine.step import Engine
from speculation.messages import Loading, Progress


@dataclass(frozen=True, slots=True)
class Vocabularies:
    """Two tokenizers that differ."""

    target: DraftTokenizer
    own: DraftTokenizer
    target_size: int
    """The target's token ids are below this."""
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
