"""A draft model in the target's own process: for which sessions it drafts, and what its time is worth.

It works in turn with the target: before each step it drafts for the sessions that verify something in it
(:mod:`draft_service.in_turn`), and what it proposes takes the way of every proposal. Decided here: which sessions it
reads (those that run; a preempted one makes room), when one that had no room in its cache is tried again, and what a
second is worth. Now and then a few steps are computed without drafts, so that it is known what such steps take, and
where drafting has cost more than it brought it rests (:mod:`speculation.verifying.payoff`). No failure of it ends a
session, and none changes a text: it is counted, and the session goes on without.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from draft_service.in_turn import InTurn
from engine.interface import FATAL, StepEngine
from engine.model import ModelError
from speculation.messages import Close, Proposal, RefusalCode, Refused, Source, Verification, Welcome
from speculation.verifying.payoff import DraftTurn, Payoff
from speculation.verifying.planner import Planner
from target_service.drafting.state_reader import StateReader
from target_service.sequence import TargetSequence
from target_service.step_account import TargetCounters
from transport.tracing import SessionLog
from transport.worker import Key, Outgoing

log = logging.getLogger(__name__)

RETRY_AFTER = 64
"""Steps after which a session that the draft model had no room for is tried again."""

USUAL_DRAFTS = 8
"""Drafts of a session over which the time of one more is averaged: of neighbouring sizes, it would be mostly noise."""


def check_drafter(drafter: Welcome, target: StepEngine) -> None:
    """Whether it may draft for this target. Raises :class:`engine.model.ModelError`."""
    model = target.model
    if not target.speculates:
        raise ModelError(
            f"{model.name} cannot use the draft model {drafter.model}: {model.no_speculation}; "
            "leave the draft model out, or set draft.placement to own"
        )
    if drafter.tokenizer and model.tokenizer_digest:
        same = drafter.tokenizer == model.tokenizer_digest
    else:
        same = drafter.vocabulary == model.vocabulary
    if not same:
        raise ModelError(
            f"the draft model {drafter.model} ({drafter.vocabulary} tokens) has not the tokenizer of the target "
            f"{model.name} ({model.vocabulary} tokens), so it cannot draft in the target's process; choose one that "
            "has, or set draft.placement to own: a draft worker translates"
        )


class DraftModel(StateReader):
    """The sessions of a target that its own draft model drafts for."""

    source: Source = Source.DRAFT
    """As which requests allow it, and its drafts count."""
    name = "draft model"
    """What people call it."""

    def __init__(self, drafter: InTurn, planner: Planner, counters: TargetCounters, *, adaptive: bool = True) -> None:
        """``planner``: knows what steps of the target take. ``adaptive``: whether it drafts only where that pays."""
        self._drafter, self._planner, self._counters, self._adaptive = drafter, planner, counters, adaptive
        self._open: dict[Key, TargetSequence] = {}
        self._unheard: dict[TargetSequence, Verification] = {}
        """The last commit of each session of which the drafter has not heard."""
        self._heard: dict[Key, int] = {}
        """How much of each text it knows."""
        self._again: dict[Key, int] = {}
        """The turn from which on a session that was refused is tried again; never, if it failed."""
        self._turn = 0
        self._payoffs: defaultdict[int, Payoff] = defaultdict(Payoff)  # by size class of the batch
        self._judged: Payoff | None = None
        """What learns from the step at hand, if it is for nothing but sessions that may verify drafts."""

    def draft(
        self, running: Sequence[TargetSequence], part: Sequence[TargetSequence], wanting: Sequence[TargetSequence]
    ) -> bool:
        """Let it draft for those ``wanting``, which may verify drafts in this step; False: none is to be verified.

        ``running``: all that are not preempted; ``part``: those that take part in the step. They are read meanwhile.
        """
        started = time.perf_counter()
        self._turn += 1
        payoff = self._payoffs[len(wanting).bit_length()]
        self._judged = payoff if len(part) == len(wanting) else None
        is_plain = payoff.probing and self._judged is not None and self._adaptive
        rests = self._adaptive and (is_plain or not (payoff.drafting or payoff.probing))
        with self._spared(log):
            self._follow(running, part)
            if self._open and not rests and not self._ask(part, wanting):
                self._judged = None  # a step without drafts, which is no probe
        self.seconds = time.perf_counter() - started
        self._counters.draft_microseconds += round(self.seconds * 1e6)
        return not (is_plain and self._open)  # where nothing is open, nothing would end the probe

    def _ask(self, part: Sequence[TargetSequence], drawing: Sequence[TargetSequence]) -> bool:
        """Let it draft; False: nothing was worth it."""
        if self._adaptive and self._drafter.rests():
            return False
        wanted = {
            key: sequence.session.lookahead_policy.agreement
            for sequence in drawing
            if (key := key_of(sequence)) in self._open
        }
        plain = self._plain_step(len(drawing))
        if self._adaptive and self._drafter.passes(wanted, plain):
            return False
        self._catch_up()
        running = [key_of(sequence) for sequence in part]
        outgoing = self._drafter.draft(running, wanted, plain, probe=not self._adaptive)
        self._take(outgoing)
        return bool(outgoing)

    def _catch_up(self) -> None:
        """Have the drafter know all that was committed."""
        for sequence in list(self._unheard):
            self._hear(sequence)

    def validate(self) -> None:
        """Raise AssertionError where its books contradict each other."""
        self._drafter.validate()

    def settled(self, sequence: TargetSequence, verification: Verification) -> None:
        """A step has committed tokens of a session."""
        self._unheard[sequence] = verification

    def drop(self, sequence: TargetSequence) -> None:
        """A session is over."""
        with self._spared(sequence.log):
            self._hear(sequence)
        self._close(sequence)
        self._again.pop(key_of(sequence), None)  # last: whatever it was refused for now is over with it

    def _hear(self, sequence: TargetSequence) -> None:
        """Have the drafter follow a session: all at once, where it has rested."""
        verification, key = self._unheard.pop(sequence, None), key_of(sequence)
        if verification is None or key not in self._open:
            return
        start, self._heard[key] = self._heard[key], verification.end
        tokens = tuple(sequence.session.tokens[start : verification.end])
        # What drafting takes here is known, so it is not told how far to go: policies for drafters elsewhere would have
        # it rest for long where it has rested for a moment.
        verification = replace(verification, position=start, tokens=tokens, lead=None)
        self._take(self._drafter.receive(key[0], verification))

    def unjudged(self) -> None:
        """Learn nothing from the step at hand, whose drafts were withdrawn."""
        self._judged = None

    def observe(self, sessions: int, tokens: int, seconds: float) -> None:
        """A step over ``sessions``, all past their prompts, brought ``tokens``, drafting included."""
        payoff = self._judged
        if payoff is None or not self._open:
            return
        if payoff.drafting or payoff.probing:
            payoff.observe(sessions, seconds, quiet=payoff.probing)
        if payoff.drafting:
            payoff.drafted(sessions, tokens, seconds)
        else:
            payoff.rested()

    def _plain_step(self, sessions: int) -> DraftTurn:
        """Of so many sessions."""
        cost, drafts = self._planner.cost(sessions), USUAL_DRAFTS * sessions
        plain = cost(sessions)
        return DraftTurn(sessions, plain, (cost(sessions + drafts) - plain) / max(drafts, 1))

    def _follow(self, running: Sequence[TargetSequence], part: Sequence[TargetSequence]) -> None:
        """Have those open that take part, and no preempted one."""
        for key in self._open.keys() - {key_of(sequence) for sequence in running}:
            self._close(self._open[key])
        for sequence in part:
            self._begin(sequence)

    def _begin(self, sequence: TargetSequence) -> None:
        """Have the drafter open a session, if it is not and may be."""
        key, opened = key_of(sequence), sequence.session.opened
        allowed = opened.speculation.allows(self.source)
        if key not in self._open and self._again.get(key, 0) <= self._turn and allowed:
            self._open[key], tokens = sequence, tuple(sequence.session.tokens)
            self._heard[key] = len(tokens)
            self._unheard.pop(sequence, None)
            options = replace(opened.request_options, grammar="")  # the target's own masks are at hand
            prompt = opened.prompt_length
            digest = sequence.session.trie.digest
            again = replace(opened, tokens=tokens, prompt=prompt, request_options=options, digest=digest)
            self._take(self._drafter.receive(sequence.link, again))
            self._drafter.shape(key, sequence.shaping)

    def _take(self, outgoing: Outgoing) -> None:
        for link, message in outgoing:
            sequence = self._open.get((link, message.session)) if isinstance(message, Proposal | Refused) else None
            if sequence is None:
                continue
            if isinstance(message, Proposal):
                result = sequence.session.propose(replace(message, source=self.source))
                self._counters.proposals[result] += 1
            elif isinstance(message, Refused):
                self._refused(sequence, message)

    def _refused(self, sequence: TargetSequence, refused: Refused) -> None:
        key = key_of(sequence)
        self._forget(key)
        match refused.code:
            case RefusalCode.UNKNOWN_SESSION:
                return  # it lost the thread, and gets the whole text
            case RefusalCode.OVERLOADED:
                self._counters.draft_left_out += 1
                self._again[key] = self._turn + RETRY_AFTER
                return
            case RefusalCode.INVALID:
                self._counters.draft_left_out += 1
            case _:
                self._counters.draft_faults += 1
        self._again[key] = _NEVER
        sequence.log.warning("goes on without the %s: %s", self.name, refused.message)

    @contextmanager
    def _spared(self, told: logging.Logger | SessionLog) -> Iterator[None]:
        """Whatever a model may raise in the block: the text does not need it."""
        try:
            yield
        except FATAL:
            raise
        except Exception:
            told.exception("the %s failed; its sessions go on without drafts", self.name)
            self._give_up()

    def _give_up(self) -> None:
        """Something is wrong beyond one session: drop all that it has."""
        for key, sequence in list(self._open.items()):
            self._counters.draft_faults += 1
            self._close(sequence)
            self._again[key] = _NEVER

    def _close(self, sequence: TargetSequence) -> None:
        if self._forget(key_of(sequence)):
            self._drafter.receive(sequence.link, Close(sequence.session.opened.session, sequence.session.opened.epoch))

    def _forget(self, key: Key) -> bool:
        """Whether it was open."""
        self._heard.pop(key, None)
        return self._open.pop(key, None) is not None


_NEVER = 1 << 62


def key_of(sequence: TargetSequence) -> Key:
    """What its drafter knows it by."""
    return sequence.link, sequence.session.opened.session
