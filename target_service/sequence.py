"""A session that a target worker holds: whether it can be, what is decided and cached of it, and its part of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from torch import Tensor

from engine.cache.kv_cache import CachedSequence, KVCache
from engine.interface import Chunk
from engine.sampling.sampling import Draw, is_plain, token_logprobs
from engine.shaping.grammar import GrammarConstraint, MaskBudget
from engine.shaping.shaping import RowShaping, Shaping
from speculation.acceptance import AcceptanceResult, Chosen, Draft, Sampled
from speculation.messages import ANCHOR, Open, RefusalCode, Refused, Rule, Sampling, Token, TokenLogprobs, Verification
from speculation.trie import NO_DRAFTS, VerificationTree
from speculation.verifying.target_session import Commit, TargetSession
from target_service.scheduler import Rank, Share, rank
from transport.tracing import SequenceTimings, SessionLog

NO_ROWS, FIRST_ROW, FROM_THE_END = range(0), (0,), (ANCHOR,)
JUDGED = Draw(Sampling(temperature=0.0), 0)
"""Of a row that is computed only to be judged: as if greedy."""


@dataclass(eq=False, slots=True)
class TargetSequence:
    """Implements :class:`target_service.scheduler.Job`. Nothing of it is cached while it waits."""

    link: Hashable
    session: TargetSession
    cache: KVCache
    arrived: tuple[float, int]
    """When it came, in seconds, and how many had come before."""
    log: SessionLog
    timings: SequenceTimings
    shaping: Shaping | None = None
    constraint: GrammarConstraint | None = None
    """Its grammar, if it has one: known from when it is compiled."""
    cached: CachedSequence = field(init=False)
    reusable: Callable[[int], int] | None = None
    """How much of a cached prefix of so many tokens may be taken over, if what drafts here has a say in it."""
    computed: int = 0
    """Committed tokens that were computed for it since it was opened."""
    by_rejection: bool = field(init=False)
    """Whether drafts are accepted by the rejection rule. Without randomness both rules come to the same."""
    is_plain: bool = field(init=False)
    """Whether its tokens are drawn by nothing but a temperature and noise, if nothing shapes their logits."""
    tells_prompt: bool = field(init=False)
    """Whether log-probabilities of the prompt's tokens are asked for; with a text begun elsewhere they were told there.
    """
    _prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    waits_since: float | None = None

    def __post_init__(self) -> None:
        self.cached = self._empty()
        opened = self.session.opened
        self.by_rejection = opened.speculation.rule is Rule.REJECTION and not opened.sampling.greedy
        begun = len(opened.tokens) > opened.prompt_length
        self.tells_prompt = opened.request_options.prompt_logprobs is not None and not begun
        self.is_plain = is_plain(opened.sampling) and not self.by_rejection

    def _empty(self) -> CachedSequence:
        return self.cache.sequence(self.session.tokens, self.session.opened.request_options.cache_scope)

    @property
    def rank(self) -> Rank:
        """Its place in the order of all sessions."""
        return rank(*self.arrived, self.priority)

    @property
    def priority(self) -> int:
        """As the request has it."""
        return self.session.opened.priority

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens that the cache does not hold: always at least the last one."""
        return len(self.session.tokens) - self.cached.length

    @property
    def caller(self) -> Hashable:
        """Who pays for what its grammar takes: the API key it came with; without one it is by itself."""
        return self.session.opened.request_options.scope or self

    def blocks_needed(self, count: int) -> int:
        """Blocks to be taken from the cache before ``count`` more tokens fit."""
        return self.cached.blocks_needed(count)

    def constrain(self, constraint: GrammarConstraint, vocabulary: int) -> str:
        """Hold the text, as far as it has come too, to a grammar; returns why that cannot be, if so."""
        self.constraint = self.session.constraint = constraint
        self.shaping = Shaping(self.session.opened, self.session.tokens, vocabulary, constraint)
        return self.follow()

    def follow(self) -> str:
        """Take in what was committed; returns why the grammar lets the text not go on, if so."""
        if self.constraint is None or self.shaping is None:
            return ""
        self.shaping.follow()
        return self.constraint.error

    def charge(self, budget: MaskBudget, now: float) -> bool:
        """Have its caller pay for what its grammar took since it last did; whether it has a grammar."""
        if self.constraint is None:
            return False
        budget.charge(self.caller, self.constraint.excess_seconds, now)
        self.constraint.excess_seconds = 0.0
        return True

    def reuse(self) -> int:
        """Take over from the cache what others have computed of it, as long as it does not decode.

        A prompt that is to be told about is computed wholly.
        """
        if self.num_uncomputed_tokens <= 1 or self.missing_prompt_logprobs:
            return 0
        before = self.cached.length
        if self.cached.reuse() and self.reusable is not None:
            self.cached.truncate(max(before, self.reusable(self.cached.length)))
        return self.cached.length - before

    def preempt(self) -> None:
        """Give all blocks back; what was cached is computed again later."""
        self.cached.free()
        self.cached = self._empty()

    @property
    def missing_prompt_logprobs(self) -> range:
        """Positions of the prompt's tokens whose log-probabilities are asked for and not known yet."""
        if not self.tells_prompt or len(self.session.tokens) > (prompt := len(self.session.opened.tokens)):
            return NO_ROWS
        return range(1 + len(self._prompt_logprobs), prompt)

    def note_prompt(self, logits_PV: Tensor) -> None:
        """Take in the rows that say how likely the next untold tokens were; P of them, V the vocabulary."""
        opened, first, count = self.session.opened, self.missing_prompt_logprobs.start, len(logits_PV)
        if not count:
            return
        top_logprobs = [opened.request_options.prompt_logprobs or 0] * count
        self._prompt_logprobs += token_logprobs(logits_PV, opened.tokens[first : first + count], top_logprobs)

    def settle(self, outcome: AcceptanceResult, started: float, ended: float) -> Commit:
        """Decide a step, of which the target also tells when it began and ended."""
        waited_us = 0 if self.waits_since is None else _microseconds(started - self.waits_since)
        self.waits_since = None
        return self.session.settle(outcome, ended, took_us=_microseconds(ended - started), waited_us=waited_us)

    def said(self, verification: Verification) -> Verification:
        """What is sent of it: the first one also speaks of the cache and of the prompt."""
        opened = len(self.session.opened.tokens)
        if verification.position > opened:
            return verification
        prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return replace(verification, cached=max(opened - self.computed, 0), prompt_logprobs=prompt_logprobs)

    def refused(self, code: RefusalCode, message: str) -> tuple[Hashable, Refused]:
        """What tells the router that this session is given up."""
        opened = self.session.opened
        return self.link, Refused(opened.session, opened.epoch, code, message)


def _microseconds(seconds: float) -> int:
    return max(round(seconds * 1e6), 0)


@dataclass(slots=True)
class BatchEntry:
    """Tokens to feed, then the drafts offered behind them."""

    sequence: TargetSequence
    num_scheduled_tokens: int
    drafts: int | None
    """Room for drafts; None while the prompt is not complete: then nothing is drawn."""
    tree: VerificationTree | None = None
    outcome: dict[str, object] | None = None
    """For the record."""

    @classmethod
    def of(cls, sequence: TargetSequence, share: Share) -> BatchEntry:
        """What a session does with its share of a step."""
        ends = share.num_scheduled_tokens == sequence.num_uncomputed_tokens
        return cls(sequence, share.num_scheduled_tokens, share.drafts if ends else None)

    @property
    def tokens(self) -> int:
        """How many are computed."""
        return self.num_scheduled_tokens if self.tree is None else self.num_scheduled_tokens + len(self.tree.nodes)

    @property
    def rows(self) -> int:
        """How many rows are judged: one for every token to draw.

        Of a part of a prompt it is the last one, which sees all others, if others might read across them.
        """
        return int(self.sequence.cached.among_others) if self.tree is None else len(self.tree.nodes) + 1

    @property
    def prompt_logprob_rows(self) -> range:
        """Which of the tokens to feed have rows that say how likely the prompt's next token was, and are asked for."""
        if not (missing := self.sequence.missing_prompt_logprobs):
            return NO_ROWS
        start = self.sequence.cached.length
        return range(max(missing.start - 1 - start, 0), min(missing.stop - 1 - start, self.num_scheduled_tokens))

    @property
    def decodes(self) -> bool:
        """Whether the session is past its prompt, so that the entry computes nothing but its next tokens."""
        return self.num_scheduled_tokens == 1 and self.tree is not None

    @property
    def is_plain(self) -> bool:
        """Whether all its rows are drawn by nothing but a temperature and noise, and none tells of the prompt."""
        sequence = self.sequence
        return sequence.is_plain and sequence.shaping is None and not self.prompt_logprob_rows

    def chunk(self, *, draws: bool = False) -> Chunk:
        """What the engine computes: a chain of scheduled tokens, the offered tree hanging from its end.

        The rows that tell of the prompt come first. ``draws``: let the step draw; the entry has to be plain.
        """
        cached, count = self.sequence.cached, self.num_scheduled_tokens
        last, tree, prompt_rows = count - 1, self.tree or NO_DRAFTS, self.prompt_logprob_rows
        if self.decodes and not tree.nodes and not prompt_rows:
            last_token = self.sequence.session.tokens[-1:]
            return Chunk(cached, last_token, FROM_THE_END, FIRST_ROW, self.draws() if draws else ())
        tokens = [*self.sequence.session.tokens[cached.length : cached.length + count], *tree.tokens]
        parents = [*range(ANCHOR, last), *(last if parent == ANCHOR else count + parent for parent in tree.parents)]
        judged = [last] * self.rows if self.tree is None else range(last, last + self.rows)
        drawn: Sequence[Draw] = ()
        if draws:
            drawn = [JUDGED] * self.rows if self.tree is None else self.draws()
        return Chunk(cached, tokens, parents, [*prompt_rows, *judged], drawn)

    def verifies(self, tree: VerificationTree | None, now: float) -> None:
        """These drafts; None: it waits for some, and sits this step out."""
        self.tree = tree
        if tree is None and self.sequence.waits_since is None:
            self.sequence.waits_since = now

    def withdraw(self) -> bool:
        """Verify no drafts after all; whether there were any."""
        if self.tree is None or not self.tree.nodes:
            return False
        self.tree = self.sequence.session.withdraw()
        return True

    def draws(self) -> list[Draw]:
        """How each wanted row is drawn: after the last scheduled token, then after each draft."""
        if self.tree is None:
            return []
        session = self.sequence.session
        sampling, position = session.opened.sampling, len(session.tokens)
        return [Draw(sampling, position), *[Draw(sampling, node.end) for node in self.tree.nodes]]

    def shapes(self) -> list[RowShaping | None]:
        """How each wanted row is shaped before it is drawn from; None: not at all."""
        shaping = self.sequence.shaping
        if self.tree is None or shaping is None:
            return [None] * self.rows
        paths: list[tuple[Token, ...]] = [()]
        for token, parent in zip(self.tree.tokens, self.tree.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        return [shaping.after(path) for path in paths]

    def drafts_with_q(self) -> list[Draft]:
        """The tree, a chain, as the rejection rule takes it."""
        assert self.tree is not None
        return [Chosen(node.token) if node.q is None else Sampled(node.token, node.q) for node in self.tree.nodes]

    def record(self, commit: Commit) -> None:
        """Note for the recorder what came of it."""
        assert self.tree is not None
        verification = commit.verification
        self.outcome = {
            "session": verification.session,
            "position": verification.position,
            "feed": self.num_scheduled_tokens,
            "offered": verification.offered,
            "accepted": verification.accepted,
            "committed": len(verification.tokens),
            "depths": [node.end - verification.position for node in self.tree.nodes],
            "parents": list(self.tree.parents),
            "odds": [round(node.weight, 4) for node in self.tree.nodes],
            "kept": list(commit.kept),
        }


MAX_PROMPT_LOGPROBS = 1 << 20
"""Most log-probabilities told of one prompt: they go out in one message."""


def reason_to_refuse(opened: Open, vocabulary: int, context: int) -> str | None:
    """Why a session cannot be served, one line; None if it can. Fields are called as in a request.

    ``vocabulary``: token ids are below; ``context``: the longest text of the model, or what its cache holds of one.
    """
    sampling, told = opened.sampling, opened.request_options.prompt_logprobs
    for what, tokens in (
        ("token", opened.tokens),
        ("logit_bias token", [token for token, _ in sampling.bias]),
        ("allowed_token_ids token", sampling.allowed),
        ("bad_words token", chain.from_iterable(sampling.banned)),
        ("prediction token", opened.request_options.prediction),
    ):
        worst = max(tokens, default=0)
        if worst >= vocabulary:
            return f"{what} {worst} is outside the vocabulary of {vocabulary}"
    if opened.limits.end > context:
        return f"{opened.limits.end} tokens exceed the context of {context}"
    prompt = opened.prompt_length
    if told is not None and prompt * (1 + told) > MAX_PROMPT_LOGPROBS:
        most = f"the {MAX_PROMPT_LOGPROBS} log-probabilities told of one prompt"
        return f"prompt_logprobs {told} for {prompt} tokens exceed {most}"
    return None
