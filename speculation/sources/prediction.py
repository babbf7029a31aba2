"""A caller's prediction as a draft source: what the text will mostly be (OpenAI's ``prediction``).

Decided here: which place of the prediction the text has come to. While they agree, the next tokens of the prediction
are the drafts. Where they part, one of two things helps:

* One token was replaced, as a name that is changed everywhere: the prediction is good again one token further on. That
  is tried at once, with little confidence, after a long agreement only.
* Something was inserted, left out or moved: the prediction is good again where its last two tokens are those of the
  text. Of such places the one that agrees the longest is taken, among equals the nearest after the place where the two
  parted; only if there is none after it, one before.

A token costs a bounded number of steps, however long the prediction is: it is indexed little by little, and few places
are compared. Under the rejection rule its tokens are *chosen* (:class:`speculation.acceptance.Chosen`); that leaves the
law of the text alone as long as the prediction was not itself drawn with the session's seed. So a router sends none
where a request names its seed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from speculation.messages import Source, Token
from speculation.sources.lookup import COUNTED, Continuation, common_end

TRUSTED = 16
"""Equal tokens that the caller's word for the beginning counts for."""
SOLID = 8
"""Equal tokens from which on the prediction was really followed, so that the text left it *here*."""
REPLACED = 1
"""Equal tokens that the guess counts for that one token was replaced."""
COMPARED = 8
"""Most places compared to find where the text has rejoined the prediction."""
INDEXED = 64
"""Most tokens of the prediction indexed with each token of the text."""


class PredictionSource:
    """Where in its prediction a session's text is. A :class:`speculation.sources.registry.LocalSource`."""

    source = Source.PREDICTION
    depth = 48

    def __init__(self, tokens: Sequence[Token], prompt: int) -> None:
        """``tokens`` are expected after the first ``prompt`` tokens of the session."""
        self._tokens = tuple(tokens)
        self._prompt = prompt  # tokens of the prompt that were not read yet
        self._recent: deque[Token] = deque(maxlen=COUNTED)
        self._next = 0  # which of the prediction's tokens should come next; past its end: nobody knows
        self._agreed = TRUSTED  # how many tokens before that one are those of the text
        self._left = 0  # where the text left the prediction last after really following it
        self._ends: dict[tuple[Token, Token], list[int]] = {}
        """Two tokens, and the places in the prediction that follow them, ascending."""
        self._indexed = 1

    def extend(self, tokens: Sequence[Token]) -> None:
        """Follow committed tokens, those of the prompt first."""
        skipped = min(self._prompt, len(tokens))
        self._prompt -= skipped
        for token in tokens[skipped:]:
            self._index()
            self._follow(token)

    def propose(self, depth: int) -> Continuation:
        """At most ``depth`` tokens from the place where the text is; none if that is not known."""
        return Continuation(self._tokens[self._next : self._next + depth], self._agreed)

    def _follow(self, token: Token) -> None:
        self._recent.append(token)
        if self._next < len(self._tokens) and self._tokens[self._next] == token:
            self._next += 1
            self._agreed = min(self._agreed + 1, COUNTED)
            return
        followed = self._agreed >= SOLID
        if followed:
            self._left = self._next
        if rejoined := self._rejoined():
            self._next, self._agreed = rejoined
        elif followed:
            self._next, self._agreed = self._next + 1, REPLACED
        else:
            self._next, self._agreed = len(self._tokens), 0

    def _rejoined(self) -> tuple[int, int] | None:
        """The place that the end of the text leads to, and how many tokens before it are equal."""
        recent = list(self._recent)
        if len(recent) < 2:
            return None
        ends = self._ends.get((recent[-2], recent[-1]), [])
        after = bisect_right(ends, self._left)
        places = ends[after : after + COMPARED] or ends[max(after - COMPARED, 0) : after][::-1]
        if not places:
            return None
        equal = ((end, common_end(self._tokens[max(end - COUNTED, 0) : end], recent)) for end in places)
        return max(equal, key=lambda found: found[1])

    def _index(self) -> None:
        until = min(self._indexed + INDEXED, len(self._tokens))
        for last in range(self._indexed, until):
            pair = self._tokens[last - 1], self._tokens[last]
            self._ends.setdefault(pair, []).append(last + 1)
        self._indexed = max(until, self._indexed)
