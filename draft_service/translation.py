"""Whether a draft worker has to translate, and how it does: it then speaks the target's tokens only.

The committed text of a session is kept in the draft model's own tokens while it grows (:class:`OwnText`). As long as it
follows the drafts, each of its tokens is a shared one, and so an own one. Where it leaves them, its end is encoded
anew: what came since the last time, and a few own tokens before, as how a text is cut into tokens depends on what
follows. The first place where old and new tokens both have a boundary is where the new ones take over. So no token is
encoded more than once but for those few, and the own tokens always spell the text. A character of which only a part
is there is spelt in tokens for single bytes; where the own vocabulary has none, own tokens wait for the rest of it.

How much two vocabularies share is found out by letting the draft model write: tokens that are rarely said hardly
matter. That tells both what it would rather say in tokens of its own alone, and what the target would.

Tensor legend: R rows, V vocabulary, S own tokens that are shared, or begin with a shared one.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from draft_service.sequence import Reader, Text
from draft_service.tokenizer import DraftTokenizer, SharedVocabulary
from engine.host.upload import upload
from engine.interface import Chunk
from engine.loading.checkpoint import read_config
from engine.model import Model, ModelError
from engine.sampling.sampling import Draw, drawn
from engine.step import Engine
from speculation.messages import Loading, Progress, Sampling, Token

LOOKBACK = 8
"""Own tokens before what is new that are encoded again."""
INSIDE = -1
"""The end of an own token that ends inside a character."""


class OwnText(Text):
    """The own tokens of one session.

    A *run* is the text behind the last special token: special tokens stand between texts that are encoded alone.
    """

    def __init__(self, vocabulary: SharedVocabulary, committed: Sequence[Token]) -> None:
        """``committed``: the target's tokens, a list that grows as they are."""
        self._vocabulary, self._committed = vocabulary, committed
        self.tokens: list[Token] = list(vocabulary.own.beginning)
        self.encoded = 0
        """Own tokens that encoding has produced so far: the work done."""
        self._read = 0  # committed tokens
        self._run = len(self.tokens)  # where its own tokens begin
        self._text = bytearray()  # of the run
        self._ends: list[int] = []  # of the run's own tokens: how much of the run is over with each
        self._covered = 0  # bytes of the run that they spell
        self._settled = 0  # of the run's own tokens: those that come from encoding
        self._unchanged = 0
        self.settle()

    @property
    def complete(self) -> bool:
        """Whether there are own tokens, and they are all of the text: no bytes of a character wait for the rest."""
        return bool(self.tokens) and self._covered == len(self._text)

    def own(self, token: Token) -> Token:
        """The own token that a draft token is."""
        return self._vocabulary.own_of[token]

    def follow(self, count: int) -> None:
        """The ``count`` tokens committed next were drafted."""
        for token in self._committed[self._read : self._read + count]:
            self.tokens.append(self.own(token))
            spelt = self._vocabulary.target.bytes_of[token]
            if spelt is None:
                self._begin_run()
            else:
                self._text += spelt
                self._ends.append(INSIDE if _incomplete(self._text) else len(self._text))
                self._covered = len(self._text)
        self._read += count

    def settle(self) -> int:
        """Take in all that is committed; return how many own tokens, from the first on, are still the same."""
        self._unchanged = len(self.tokens)
        target = self._vocabulary.target
        for token in self._committed[self._read :]:
            spelt = target.bytes_of[token] if token < target.size else b""
            if spelt is None:
                self._encode()
                own = self._vocabulary.special.get(token)
                if own is not None and (self.tokens != [own] or self._text):  # else it began with that one by itself
                    self.tokens.append(own)
                self._begin_run()
            else:
                self._text += spelt.removeprefix(b" ") if target.prefixes and not self._text else spelt
        self._read = len(self._committed)
        self._encode()
        return self._unchanged

    def _begin_run(self) -> None:
        self._run, self._settled, self._covered = len(self.tokens), 0, 0
        self._text.clear()
        self._ends.clear()

    # -- encoding ------------------------------------------------------------------------------------------------------

    def _encode(self) -> None:
        """Encode what of the run does not come from encoding yet, and a little before."""
        if self._settled == len(self._ends) and self._covered == len(self._text):
            return
        first = max(0, self._settled - LOOKBACK)
        while first and self._ends[first - 1] == INSIDE:
            first -= 1
        if not self._encode_from(first):
            self._encode_from(0)
        self._settled = len(self._ends)

    def _encode_from(self, first: int) -> bool:
        """Encode from the run's own token ``first`` on; False if the old tokens there do not go with the new ones."""
        start = self._ends[first - 1] if first else 0
        text, places = _characters(self._text[start:])
        tokens, spans = self._vocabulary.own.encode(text)
        self.encoded += len(tokens)
        follows = [*(begin for begin, _ in spans), len(text)][1:]
        ends = [start + places[end] if end <= begin else INSIDE for (_, end), begin in zip(spans, follows, strict=True)]
        old = {end: index for index, end in enumerate(self._ends[first:], first) if end != INSIDE}
        kept, skipped = 0, 0
        if first:
            meet = next(((old[end] + 1, new + 1) for new, end in enumerate(ends) if end in old), None)
            if meet is None and self._vocabulary.own.prefixes:
                return False
            kept, skipped = meet or (first, 0)
        covered = start + places[-1]
        tail = self._text[covered:]
        single = self._vocabulary.own_bytes
        fresh, self._ends[kept:] = tokens[skipped:], ends[skipped:]
        if single is not None:
            fresh += [single[byte] for byte in tail]
            self._ends += [INSIDE] * len(tail)
            covered = len(self._text)
        at = self._run + kept
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens[at:], fresh, strict=False))
        self._unchanged = min(self._unchanged, at + len(list(alike)))
        self.tokens[at:], self._covered = fresh, covered
        return True


def _characters(raw: bytes | bytearray) -> tuple[str, list[int]]:
    """The characters of a text without an incomplete one at its end, and how many bytes are before each and in all.

    A byte that is part of no character counts as U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    places = [0]
    characters = decoder.decode(bytes(raw))
    for character in characters:
        places.append(places[-1] + (1 if _escaped(character) else len(character.encode())))
    return "".join("\ufffd" if _escaped(character) else character for character in characters), places


def _escaped(character: str) -> bool:
    return "\udc80" <= character <= "\udcff"


def _incomplete(text: bytearray) -> bool:
    """Whether a text ends inside a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    decoder.decode(bytes(text[-4:]))
    return bool(decoder.getstate()[0])


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
        spoken = replace(model, name=shared.target.name, vocabulary=shared.size, stop_tokens=end)
        super().__init__(spoken, partial(OwnText, shared))
        self.shared = shared
        self._own_S = upload(list(shared.begins), model.device)
        self._target_S = upload(list(shared.begins.values()), model.device)

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
