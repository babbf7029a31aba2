"""What a grammar leaves open: which tokens may come next, what comes next without any choice, and where a text is over.

Grammars are those of llguidance: a Lark grammar, or JSON that holds grammars. :class:`Grammars` compiles them for the
tokenizer of one model, in a thread of its own, so that whoever computes steps does not wait; a
:class:`GrammarConstraint` follows one session's text, and looks ahead along drafts by taking tokens in and giving them
back. What that takes is counted, and :class:`MaskBudget` says who has taken more than others should wait for.

A text is over as soon as its grammar lets nothing follow; no stop token is needed then. Where the grammar could end but
need not, the session's stop tokens are open too. Nothing here decides what is drawn.

Tensor legend: W words of a mask, 32 tokens each.
"""

from __future__ import annotations

import itertools
import logging
import queue
import re
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from functools import cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.model import Model, first_line
from speculation.messages import Token
from speculation.settings import MAX_GRAMMAR_BYTES

log = logging.getLogger(__name__)

COMPILE_SECONDS = 10.0
"""A grammar that takes longer is refused. A router has tried it before, for a shorter time."""
KEPT = 64
"""Compiled grammars kept for the next session that has the same one."""
MAX_FORCED = 64
"""Tokens proposed at once because nothing else may be said."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # some 20 ms
    step_lexer_fuel=200_000,  # some 15 ms
    step_max_items=50_000,  # some 3 ms
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""What a grammar may cost to compile, and to go one token further."""
FREE_SECONDS = 0.0005
"""Of the processor's time, that every question to a grammar may take: some ten times what an ordinary one does."""
MASK_SHARE = 0.1
"""Part of the time that one caller's grammars may take beyond that, while others are served ..."""
MASK_BURST = 0.5
"""... once they have taken so many seconds of it."""


Jobs = queue.SimpleQueue["tuple[str, Future[Compiled]] | None"]
"""Grammars to compile, one after the other; None: there will be no more."""


class GrammarError(Exception):
    """A grammar cannot be used here. One line that says why."""


class PassingError(GrammarError):
    """For a reason that may have gone when it is asked for again, or that another worker may not have."""


class Grammars:
    """The grammars of one model's tokenizer. All methods may be called from one thread only, whichever that is."""

    def __init__(self, model: Model) -> None:
        """Reads and starts nothing yet."""
        self._vocabulary = cache(lambda: Vocabulary(model))
        self._known: OrderedDict[str, Future[Compiled]] = OrderedDict()
        self._jobs: Jobs | None = None
        self._open: deque[Future[Compiled]] = deque()
        """Posted to the thread that compiles now, in this order; some of them may be done."""

    def compiled(self, grammar: str) -> Future[Compiled]:
        """The grammar, ready at once if it was used lately. The future fails with :class:`GrammarError` only."""
        future = self._known.pop(grammar, None)
        if future is None or (future.done() and isinstance(future.exception(), PassingError)):
            future = Future()
            if (size := len(grammar.encode("utf-8", "replace"))) > MAX_GRAMMAR_BYTES:
                future.set_exception(
                    GrammarError(f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken")
                )
                return future
            self._post(grammar, future)
        self._known[grammar] = future
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return future

    @property
    def at_work(self) -> Future[Compiled] | None:
        """What is being compiled, if anything."""
        while self._open and self._open[0].done():
            self._open.popleft()
        return self._open[0] if self._open else None

    def give_up(self) -> frozenset[Future[Compiled]]:
        """What is being compiled takes too long: leave its thread alone with it, and have another go on with the rest.

        Returns what was left: nobody should wait for it, and whoever asks for it again gets another try.
        """
        stuck, waiting = self.at_work, list[tuple[str, Future[Compiled]]]()
        if self._jobs is not None:
            with suppress(queue.Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    waiting.append(job)
            self._jobs.put(None)
        self._jobs = None
        waiting = [job for job in waiting if job[1] is not stuck]
        begun = frozenset(self._open) - {future for _, future in waiting}
        left = frozenset(future for future in begun if not future.done())
        self._known = OrderedDict(known for known in self._known.items() if known[1] not in left)
        self._open.clear()
        for grammar, future in waiting:
            self._post(grammar, future)
        return left

    def _post(self, grammar: str, future: Future[Compiled]) -> None:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_compile, args=(self._jobs, self._vocabulary), name="grammars", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        self._open.append(future)
        self._jobs.put((grammar, future))


def _compile(jobs: Jobs, vocabulary: Callable[[], Vocabulary]) -> None:
    """The thread: one grammar after the other, until there will be no more."""
    while (job := jobs.get()) is not None:
        grammar, future = job
        try:
            future.set_result(Compiled(grammar, vocabulary()))
        except GrammarError as error:
            future.set_exception(error)
        except BaseException as error:  # the compiler panics over a grammar, but there may have been no memory either
            log.exception("a grammar could not be compiled")
            future.set_exception(PassingError(f"the grammar cannot be compiled: {type(error).__name__}"))


class Vocabulary:
    """A model's tokens as grammars see them: what bytes they stand for."""

    def __init__(self, model: Model) -> None:
        """Reads the tokenizer, in about 0.05 s for 4 thousand tokens, 1.2 s for 128 thousand.

        Raises :class:`GrammarError`.
        """
        self.tokenizer = _tokenizer(model)
        self.size = model.vocabulary
        self.words = -(-self.size // 32)
        self.ends = frozenset(self.tokenizer.eos_tokens)
        """Tokens by which llguidance says that a text may end."""
        beyond = range(self.size, self.words * 32)
        self.never_W = self.bits([*(token for token in self.ends if token < self.size), *beyond])

    def bits(self, tokens: Iterable[Token]) -> Tensor:
        """A mask of these tokens, int32 ``[W]``."""
        words = [0] * self.words
        for token in tokens:
            words[token // 32] |= 1 << token % 32
        return torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32)

    def open(self, matcher: LLMatcher) -> Tensor:
        """Tokens, no end among them, by which the text of a matcher may go on, int32 ``[W]``."""
        words = -(-self.tokenizer.vocab_size // 32)
        open_W = torch.zeros(max(words, self.words), dtype=torch.int32)
        matcher.unsafe_compute_mask_ptr(open_W.data_ptr(), words * open_W.element_size())
        return open_W[: self.words] & ~self.never_W


class Compiled:
    """A grammar that texts can begin to follow."""

    def __init__(self, grammar: str, vocabulary: Vocabulary) -> None:
        """Raises :class:`GrammarError`."""
        self.vocabulary = vocabulary
        self._start = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
        # The first mask is the dearest one: what it finds out is shared by the copies.
        opens = not self._start.is_error() and bool(vocabulary.open(self._start).any())
        if self._start.is_error() and not self._start.get_error().startswith("NoExtension"):
            # The other lines quote the grammar.
            raise GrammarError(f"the grammar cannot be used: {first_line(self._start.get_error())}")
        if not opens:
            raise GrammarError("the grammar allows no text at all")

    def start(self) -> LLMatcher:
        """Before the first token."""
        return self._start.deep_copy()


TOO_COMPLEX = "the grammar is too complex for the text so far"


class MaskBudget:
    """Which callers' grammars have taken so long that others go first. Seconds on any clock."""

    def __init__(self) -> None:
        """Nobody has taken anything."""
        self._paid: dict[Hashable, float] = {}
        """When a caller will have paid for all that was taken, by :data:`MASK_SHARE` of the time; who has is left out.
        """

    def charge(self, caller: Hashable, seconds: float, now: float) -> None:
        """A caller's grammars have taken so much beyond what is free."""
        if seconds <= 0.0:
            return
        self._paid = {known: paid for known, paid in self._paid.items() if paid > now}
        self._paid[caller] = max(self._paid.get(caller, now), now) + seconds / MASK_SHARE

    def is_spent(self, caller: Hashable, now: float) -> bool:
        """Whether others go first."""
        return self._paid.get(caller, now) - now > MASK_BURST / MASK_SHARE


P = ParamSpec("P")
T = TypeVar("T")


def _counted(ask: Callable[Concatenate[GrammarConstraint, P], T], /) -> Callable[Concatenate[GrammarConstraint, P], T]:
    """The same question, with what it takes beyond :data:`FREE_SECONDS` noted."""

    @wraps(ask)
    def counted(self: GrammarConstraint, /, *args: P.args, **kwargs: P.kwargs) -> T:
        began = time.thread_time()
        try:
            return ask(self, *args, **kwargs)
        finally:
            self.excess_seconds += max(time.thread_time() - began - FREE_SECONDS, 0.0)

    return counted


class GrammarConstraint:
    """The grammar of one session, and how far its text has come.

    Implements :class:`speculation.settings.Constraint`. The matcher stands at the end of the path that was asked about
    last, so that asking along a tree, branch by branch, costs one token a node.
    """

    def __init__(self, compiled: Compiled, stop_tokens: frozenset[Token]) -> None:
        """No token has been told. ``stop_tokens``: what ends the session's text, where the grammar lets it end."""
        self.error = ""
        """Why the text cannot go on, if it cannot: it broke the grammar, or the grammar got too complex."""
        self.excess_seconds = 0.0
        """What questions took of the processor's time beyond what is free. Whoever charges for it sets it to zero."""
        self._compiled, self._vocabulary = compiled, compiled.vocabulary
        self._stop_tokens = stop_tokens
        self._stop_W = self._vocabulary.bits(token for token in stop_tokens if token < self._vocabulary.size)
        self._matcher = compiled.start()
        self._consumed: list[Token] = []
        self._ahead: list[Token] = []
        """What the matcher has taken in beyond what it was told."""
        self._failed = False
        """Whether the path that was asked about last got too complex: the grammar may allow it."""

    @_counted
    def advance(self, tokens: Sequence[Token]) -> None:
        """``tokens`` were committed. If they break the grammar, ``error`` says so, and anything may follow."""
        if self.error:
            return
        if self._descend(tokens):
            self._consumed += tokens
            del self._ahead[: len(tokens)]
        else:
            self.error = TOO_COMPLEX if self._failed else "the text so far is none of the grammar's"

    @_counted
    def bits(self, path: Sequence[Token]) -> Tensor | None:
        """What may follow once the draft tokens of ``path`` were committed too: int32 ``[W]`` on the CPU.

        Token t may follow if bit ``t % 32`` of word ``t // 32`` is set. None: anything may, or the answer does not
        matter, as drafts broke the grammar or ended the text. All zero: nothing may, so the text cannot go on.
        """
        if self.error:
            return None
        if not self._descend(path):  # where it got too complex for a text that it allows, that is the end
            return torch.zeros_like(self._stop_W) if self._failed else None
        open_W = self._vocabulary.open(self._matcher)
        if self._matcher.is_error():
            self._restart()
            return torch.zeros_like(open_W)
        if self._matcher.is_accepting():
            if not (self._stop_tokens or open_W.any()):
                return None  # the text is over here
            open_W |= self._stop_W
        return open_W

    @_counted
    def forced(self, path: Sequence[Token]) -> Sequence[Token]:
        """Tokens of the only text that may follow ``path``, tokenised as usual; none where there is a choice."""
        if self.error or not self._descend(path):
            return ()
        forced = self._matcher.compute_ff_tokens()[:MAX_FORCED]
        if self._matcher.is_error():
            self._restart()
        return tuple(itertools.takewhile(lambda token: token < self._vocabulary.size, forced))

    @_counted
    def ending(self, tokens: Sequence[Token]) -> int | None:
        """After how many of ``tokens``, to be committed next, the text is over; None: it can go on after them."""
        for count in range(1, len(tokens) + 1):
            if self.error or not self._descend(tokens[:count]):
                return None
            if self._matcher.is_accepting() and not self._vocabulary.open(self._matcher).any():
                if not self._matcher.is_error():
                    return count
                self._restart()
                return None
        return None

    def _descend(self, path: Sequence[Token]) -> bool:
        """Have the matcher stand at the end of ``path``; False if the grammar does not go there, or fails there."""
        self._failed, shared = False, 0
        while shared < min(len(path), len(self._ahead)) and path[shared] == self._ahead[shared]:
            shared += 1
        back = len(self._ahead) - shared
        if back and not self._matcher.rollback(back):
            self._restart()
            shared = 0
        del self._ahead[shared:]
        for token in path[shared:]:
            if token in self._stop_tokens or token in self._vocabulary.ends or token >= self._vocabulary.size:
                return False
            taken = self._matcher.try_consume_tokens([token])
            if self._matcher.is_error():
                self._failed = True
                self._restart()
                return False
            if not taken:
                return False
            self._ahead.append(token)
        return True

    def _restart(self) -> None:
        """An error has made the matcher useless: take another to the end of the text."""
        self._matcher = self._compiled.start()
        self._ahead = []
        if self._matcher.try_consume_tokens(self._consumed) < len(self._consumed):
            self.error = TOO_COMPLEX


def _tokenizer(model: Model) -> LLTokenizer:
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.name, trust_remote_code=False)
    except Exception as error:
        raise PassingError(f"{model.name}: no tokenizer, so no grammars: {first_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise GrammarError(f"{model.name}: its tokenizer has no tokenizer.json, which grammars need")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    stops = sorted(model.stop_tokens) or tokenizer.eos_token_id
    try:
        whole = LLTokenizer(backend.to_str(), eos_token=stops, slices=[])  # asked for no mask
        return LLTokenizer(_Letters(whole), eos_token=whole.eos_tokens)  # type: ignore[arg-type]  # by its attributes
    except Exception as error:
        raise GrammarError(f"{model.name}: its tokenizer cannot do grammars: {first_line(error)}") from error


class _Letters:
    """The same tokenizer, as llguidance takes one, but that finds no special token in a text.

    What a grammar forces in letters is tokenised, and no special token that is spelt alike may stand for it.
    """

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, whole: LLTokenizer) -> None:
        self._whole = whole
        self.eos_token_id = whole.eos_token
        spelt_as = [(token, whole.decode_bytes([token])) for token in range(whole.vocab_size)]
        self.tokens = [b"" if said == b"<[%d]>" % token else said for token, said in spelt_as]  # of an id that is none
        self.special_token_ids = [token for token in range(whole.vocab_size) if whole.is_special_token(token)]
        spelt = sorted({whole.decode_str([token]) for token in self.special_token_ids}, key=len, reverse=True)
        self._spelt = re.compile(f"({'|'.join(map(re.escape, filter(None, spelt))) or '(?!)'})")

    def __call__(self, text: str) -> list[Token]:
        tokens: list[Token] = []
        for index, part in enumerate(self._spelt.split(text)):  # every other one is a special token's letters
            tokens += (self._whole.greedy_tokenize if index % 2 else self._whole.tokenize_str)(part)
        return tokens
