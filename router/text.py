"""Tokens to text while they arrive: detokenisation piece by piece, stop strings, and who proposed each piece.

The text handed out is final: it is never taken back, whatever follows. So two things are held back: bytes
that may still become a character, and characters that may still become a stop string. Not-streamed answers go
through the same code, which is why they equal streamed ones byte for byte.

``tokenizers.decoders.DecodeStream`` is not used: a long run of special tokens or of U+FFFD makes it hold
everything back at quadratic cost, and with byte-fallback tokenizers it raises on bytes that are no character.
``Detokenizer`` keeps a bounded window instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from router.tokenizer import Tokenizer
from speculation.messages import Token

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
UTF8_LONGEST = 4
"""Most bytes, hence most tokens, of one character."""
CONTEXT_TOKENS = 8
"""How many tokens before the first one the detokenizer looks at."""
WINDOW = 16
"""Undecided tokens after which the older ones are decided."""


class Detokenizer:
    """Text of a growing token sequence, given out as soon as it is certain.

    The pieces together equal ``Tokenizer.decode`` of all tokens, for every tokenizer that decodes a prefix of
    the tokens to a prefix of the text up to an incomplete character (all byte-level ones). A byte-fallback
    tokenizer decodes a run of bytes with one bad byte as nothing but U+FFFD; characters of such a run already
    given out stay.

    ``after`` are tokens whose text stands before the first piece, so that a decoder which strips the first
    space of a text keeps the space between ``after`` and the piece.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[Token] = ()) -> None:
        """Starts with nothing held back."""
        self._tokenizer = tokenizer
        self._context: list[Token] = [t for t in after[-CONTEXT_TOKENS:] if tokenizer.visible(t)]
        self._pending: list[Token] = []

    def push(self, token: Token) -> str:
        """The text that ``token`` makes certain; often its own, sometimes none."""
        if not self._tokenizer.visible(token):
            return ""
        self._pending.append(token)
        text = self._text(self._pending)
        if text and not text.endswith(REPLACEMENT):
            return self._release(len(self._pending), text)
        if len(self._pending) <= WINDOW:
            return ""
        # An incomplete character spans fewer tokens than these. Either they hold U+FFFD that the model meant,
        # or bytes that are no character: both are certain once what follows leaves their text as it is.
        certain = len(self._pending) - UTF8_LONGEST
        older = self._text(self._pending[:certain])
        return self._release(certain, older) if older and text.startswith(older) else ""

    def finish(self) -> str:
        """The text still held back, incomplete characters as U+FFFD. Nothing may be pushed afterwards."""
        return self._release(len(self._pending), self._text(self._pending))

    def _text(self, pending: Sequence[Token]) -> str:
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode([*self._context, *pending])
        return text[len(before) :] if text.startswith(before) else self._tokenizer.decode(pending)

    def _release(self, count: int, text: str) -> str:
        self._context, self._pending = self._pending[:count], self._pending[count:]
        return text


class StopMatcher:
    """Finds the first stop string to be completed, however the text is split.

    First means the earliest last character; of several that end there, the longest. This is what looking at
    the text after every character would find, so it does not depend on the split. The text before it is all
    that comes out. No more is held back than the longest end of the text that begins a stop string (Knuth,
    Morris and Pratt's automaton, one per stop string).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops`` are not empty strings."""
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """The text that is now certain to come before any stop string."""
        if not self._patterns:
            return text
        seen = self._held + text
        for index, character in enumerate(text):
            complete = [len(p.text) for p in self._patterns if p.push(character)]
            if complete:
                self.matched, self._held = True, ""
                return seen[: len(seen) - len(text) + index + 1 - max(complete)]
        certain = len(seen) - max(pattern.matched for pattern in self._patterns)
        self._held = seen[certain:]
        return seen[:certain]

    def finish(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """How many characters at the end of the text are the beginning of ``text``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)
        for i in range(1, len(text)):
            length = self._fallback[i - 1]
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            self._fallback[i] = length + (text[i] == text[length])

    def push(self, character: str) -> bool:
        """Take one more character; whether the text now ends with the pattern, after which no more may come."""
        while self.matched and character != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += character == self.text[self.matched]
        return self.matched == len(self.text)


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one token, or of the part of it that came out now."""

    text: str
    drafted: bool


@dataclass(frozen=True, slots=True)
class Delta:
    """What a commit adds. ``tokens`` counts those up to the one that completed a stop string, if one did."""

    pieces: tuple[Piece, ...]
    tokens: int = 0
    stopped: bool = False


class TextStream:
    """The text of one choice: detokenised, without its stop tokens, cut before its first stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        stop_tokens: frozenset[Token],
        after: Sequence[Token] = (),
    ) -> None:
        """``after`` as in :class:`Detokenizer`."""
        self._detokenizer = Detokenizer(tokenizer, after)
        self._stops = StopMatcher(stops)
        self._stop_tokens = stop_tokens
        self._spans: deque[Piece] = deque()

    def push(self, tokens: Sequence[Token], accepted: int) -> Delta:
        """Take committed tokens, the first ``accepted`` of them drafted. Not to be called once stopped."""
        pieces: list[Piece] = []
        for index, token in enumerate(tokens):
            text = "" if token in self._stop_tokens else self._detokenizer.push(token)
            pieces += self._add(Piece(text, drafted=index < accepted))
            if self._stops.matched:
                return Delta(tuple(pieces), index + 1, stopped=True)
        return Delta(tuple(pieces), len(tokens))

    def finish(self) -> Delta:
        """What was held back; it may complete a stop string."""
        pieces = self._add(Piece(self._detokenizer.finish(), drafted=False))
        if not self._stops.matched:
            pieces += self._take(len(self._stops.finish()))
        return Delta(tuple(pieces), stopped=self._stops.matched)

    def _add(self, piece: Piece) -> list[Piece]:
        self._spans.append(piece)
        return self._take(len(self._stops.push(piece.text)))

    def _take(self, count: int) -> list[Piece]:
        """The oldest ``count`` characters that have not come out, with who proposed them."""
        taken: list[Piece] = []
        while count:
            piece = self._spans.popleft()
            if len(piece.text) > count:
                self._spans.appendleft(Piece(piece.text[count:], piece.drafted))
                piece = Piece(piece.text[:count], piece.drafted)
            count -= len(piece.text)
            if piece.text:
                taken.append(piece)
        return taken
