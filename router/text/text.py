"""Tokens to text while they arrive: detokenisation, stop strings, who proposed each piece, where each token stands.

The text handed out is final: it is never taken back, whatever follows. So two things are held back: bytes
that may still become a character, and characters that may still become a stop string. Not-streamed answers go
through the same code, which is why they equal streamed ones byte for byte.

docs/adr/0007-own-detokeniser.md says why ``tokenizers.decoders.DecodeStream`` is not used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from router.text.tokenizer import REPLACEMENT, Tokenizer
from router.text.tool_calls import THINK, overlap
from speculation.events import Origin, Own
from speculation.frozen import frozen
from speculation.messages import Token

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
    space of a text keeps the space between ``after`` and the piece. ``hidden`` as in :meth:`Tokenizer.decode`.
    """

    def __init__(
        self, tokenizer: Tokenizer, after: Sequence[Token] = (), hidden: frozenset[Token] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.hidden if hidden is None else hidden
        self._context: list[Token] = [t for t in after[-CONTEXT_TOKENS:] if self.visible(t)]
        self._pending: list[Token] = []

    @property
    def pending(self) -> int:
        """How many of the last visible tokens have text that is not certain."""
        return len(self._pending)

    def visible(self, token: Token) -> bool:
        """Whether it has any text."""
        return self._tokenizer.visible(token, self._hidden)

    def push(self, token: Token) -> str:
        """The text that ``token`` makes certain; often its own, sometimes none."""
        if not self._pending and token not in self._hidden and (text := self._tokenizer.whole(token)):
            self._context = [token]
            return text
        if not self.visible(token):
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
        before = self._decode(self._context)
        text = self._decode([*self._context, *pending])
        return text[len(before) :] if text.startswith(before) else self._decode(pending)

    def _decode(self, tokens: Sequence[Token]) -> str:
        return self._tokenizer.decode(tokens, self._hidden)

    def _release(self, count: int, text: str) -> str:
        self._context, self._pending = self._pending[:count], self._pending[count:]
        return text


def opens_reasoning(tokenizer: Tokenizer, prompt: Sequence[Token], hidden: frozenset[Token] | None) -> bool:
    """Whether a prompt ends with the mark that reasoning begins with. Where that is hidden no text shows the other."""
    return tokenizer.decode(prompt[-WINDOW:], hidden).rstrip().endswith(THINK)


class StopMatcher:
    """Finds the first stop string to be completed, however the text is split.

    First means the earliest last character; of several that end there, the longest. This is what looking at
    the text after every character would find, so it does not depend on the split. The text before it is all
    that comes out, or the text with it if it is to be ``kept``. No more is held back than the longest end of the
    text that begins a stop string.
    """

    def __init__(self, stops: Sequence[str], *, kept: bool = False) -> None:
        """``stops`` are not empty strings."""
        self._stops, self._kept = stops, kept
        self.idle = not stops
        self._held = ""
        self.matched = False

    def push(self, text: str, *, counts: bool = True) -> str:
        """The text that is now certain to come before any stop string. ``counts``: whether one may end in ``text``."""
        if self.idle:
            return text
        before, seen = len(self._held), self._held + text
        complete = [  # not what stands whole in the text that was held: it ended where none counted
            (start + len(stop), start)
            for stop in self._stops
            if counts and (start := seen.find(stop, max(before + 1 - len(stop), 0))) >= 0
        ]
        if complete:
            self.matched, self._held = True, ""
            end, start = min(complete)
            return seen[: end if self._kept else start]
        certain = len(seen) - max([overlap(seen, stop) for stop in self._stops])
        self._held = seen[certain:]
        return seen[:certain]

    def finish(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


@frozen
class Piece:
    """Text of one token, or of the part of it that came out now."""

    text: str
    origin: Origin


@frozen
class Delta:
    """What a commit adds. ``tokens`` counts those up to the one that completed a stop string, if one did."""

    pieces: tuple[Piece, ...]
    tokens: int = 0
    stopped: bool = False
    starts: tuple[int, ...] = ()
    """Of the tokens, in order, whose text is out now and was not before: the character where it starts. A token
    without text is out with what stands before it; one behind a stop string never is."""

    def then(self, later: Delta) -> Delta:
        """Both together."""
        return Delta(
            self.pieces + later.pieces,
            self.tokens + later.tokens,
            self.stopped or later.stopped,
            self.starts + later.starts,
        )


@dataclass(frozen=True, slots=True)
class TextRules:
    """What of the tokens is text, and where that ends."""

    stops: tuple[str, ...] = ()
    stop_tokens: frozenset[Token] = frozenset()
    stop_kept: bool = False
    """Stop strings and stop tokens are part of the text."""
    unsearched: int = 0
    """Stop strings that end in the text of so many first tokens do not count."""
    hidden: frozenset[Token] | None = None
    """Tokens without text; None: the special ones."""


class TextStream:
    """The text of one choice: detokenised, without its stop tokens, cut before its first stop string."""

    def __init__(
        self, tokenizer: Tokenizer, rules: TextRules, after: Sequence[Token] = (), *, placed: bool = True
    ) -> None:
        """``after`` as in :class:`Detokenizer`. ``placed``: whether ``Delta.starts`` are wanted."""
        self._detokenizer = Detokenizer(tokenizer, after, rules.hidden)
        self._stops = StopMatcher(rules.stops, kept=rules.stop_kept)
        self._rules = rules
        self._spans: deque[Piece] = deque()
        self._latest: Origin = Own.TARGET
        self._places = _Places() if placed else None
        self._seen = 0

    def push(self, tokens: Sequence[Token], origins: Sequence[Origin]) -> Delta:
        """Take committed tokens and where each came from. Not to be called once stopped."""
        pieces: list[Piece] = []
        for index, (token, self._latest) in enumerate(zip(tokens, origins, strict=True)):
            self._seen += 1
            shown = self._rules.stop_kept or token not in self._rules.stop_tokens
            text = self._detokenizer.push(token) if shown else ""
            if self._places is not None:
                self._places.token(visible=shown and self._detokenizer.visible(token))
            elif not text:
                continue
            self._add(text, pieces)
            if self._stops.matched:
                return self._delta(pieces, index + 1, stopped=True)
        return self._delta(pieces, len(tokens), stopped=False)

    def finish(self) -> Delta:
        """What was held back; it may complete a stop string."""
        pieces: list[Piece] = []
        self._add(self._detokenizer.finish(), pieces)
        if not self._stops.matched:
            self._take(len(self._stops.finish()), pieces)
        return self._delta(pieces, 0, stopped=self._stops.matched)

    def cut(self) -> Delta:
        """The end of the text, where whoever reads it has found one: what was held back is dropped."""
        return self._delta([], 0, stopped=True)

    def _delta(self, pieces: list[Piece], tokens: int, *, stopped: bool) -> Delta:
        starts = () if self._places is None else tuple(self._places.out(cut=stopped))
        return Delta(tuple(pieces), tokens, stopped, starts)

    def _add(self, text: str, pieces: list[Piece]) -> None:
        """What becomes certain with this text is one of the ``pieces``, or several."""
        if self._places is not None:
            self._places.decided(len(text), self._detokenizer.pending)
        if self._stops.idle and self._places is None and text:
            pieces.append(Piece(text, self._latest))
        elif text:
            self._spans.append(Piece(text, self._latest))
            counts = self._seen > self._rules.unsearched
            self._take(len(self._stops.push(text, counts=counts)), pieces)

    def _take(self, count: int, pieces: list[Piece]) -> None:
        """The oldest ``count`` characters that have not come out, with who proposed them."""
        if self._places is not None:
            self._places.shown += count
        while count:
            piece = self._spans.popleft()
            if len(piece.text) > count:
                self._spans.appendleft(Piece(piece.text[count:], piece.origin))
                piece = Piece(piece.text[:count], piece.origin)
            count -= len(piece.text)
            pieces.append(piece)


class _Places:
    """From which character to which each token's text goes. Tokens that share a character share its place."""

    def __init__(self) -> None:
        self.shown = 0
        self._end = 0
        self._undecided: list[bool] = []
        """Tokens whose text is not certain: which of them have any."""
        self._decided: deque[tuple[int, int]] = deque()

    def token(self, *, visible: bool) -> None:
        """One more token."""
        self._undecided.append(visible)

    def decided(self, characters: int, pending: int) -> None:
        """So much more text is certain; the last ``pending`` visible tokens are not part of it."""
        place = self._end, self._end + characters
        self._end += characters
        keep = len(self._undecided)
        while pending:
            keep -= 1
            pending -= self._undecided[keep]
        self._decided.extend([place] * keep)
        del self._undecided[:keep]

    def out(self, *, cut: bool) -> Iterator[int]:
        """Where the tokens start that are out now. At a ``cut`` also the one it goes through."""
        while self._decided:
            start, end = self._decided[0]
            if end > self.shown and not (cut and start < self.shown):
                return
            self._decided.popleft()
            yield start
