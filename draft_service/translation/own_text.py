"""The committed text of a session in the draft model's own tokens, kept up to date while it grows.

As long as the text follows the drafts, each of its tokens is a shared one, and so an own one. Where it leaves them, its
end is encoded anew: what came since the last time, and a few own tokens before, as how a text is cut into tokens
depends on what follows. The first place where old and new tokens both have a boundary is where the new ones take over.
So no token is encoded more than once but for those few, and the own tokens always spell the text.

A character of which only some bytes are there is spelt in tokens for single bytes. Where the own vocabulary has none,
the own tokens wait for the rest of it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from draft_service.sequence import Text
from draft_service.translation.tokenizer import SharedVocabulary
from speculation.messages import Token

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
                self._read_special(token)
            else:
                self._text += spelt.removeprefix(b" ") if target.prefixes and not self._text else spelt
        self._read = len(self._committed)
        self._encode()
        return self._unchanged

    def _read_special(self, token: Token) -> None:
        own = self._vocabulary.special.get(token)
        if own is not None and (self.tokens != [own] or self._text):  # else it began with that one by itself
            self.tokens.append(own)
        self._begin_run()

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
        if not first:
            kept, skipped = 0, 0
        else:
            meet = next(((old[end] + 1, new + 1) for new, end in enumerate(ends) if end in old), None)
            if meet is None and self._vocabulary.own.prefixes:
                return False
            kept, skipped = meet or (first, 0)
        covered = start + places[-1]
        tail = self._text[covered:]
        single = self._vocabulary.own_bytes
        fresh, fresh_ends = tokens[skipped:], ends[skipped:]
        if single is not None:
            fresh += [single[byte] for byte in tail]
            fresh_ends += [INSIDE] * len(tail)
            covered = len(self._text)
        self._replace(kept, fresh, fresh_ends, covered)
        return True

    def _replace(self, kept: int, tokens: list[Token], ends: list[int], covered: int) -> None:
        """Put ``tokens`` behind the first ``kept`` ones of the run."""
        at = self._run + kept
        before = self.tokens[at:]
        same = next((i for i, (one, other) in enumerate(zip(before, tokens, strict=False)) if one != other), None)
        same = min(len(before), len(tokens)) if same is None else same
        self._unchanged = min(self._unchanged, at + same)
        self.tokens[at:] = tokens
        self._ends[kept:] = ends
        self._covered = covered


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
