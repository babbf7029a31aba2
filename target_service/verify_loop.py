"""The verify loop of a target worker: every step commits at least one token for every session in it that decodes.

A step takes the sessions' shares from the scheduler (:mod:`target_service.scheduler`) and, of the drafts at hand, those
that pay (:mod:`speculation.verifying.planner`), runs all in one forward, draws the target's token on every row
(:mod:`target_service.verdicts`), and lets each session decide what is kept
(:mod:`speculation.verifying.target_session`). With no drafts it is plain decoding.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from draft_service.in_turn import InTurn
from engine.interface import FATAL, StepEngine
from engine.recorder import Recorder
from engine.shaping.compiling import Compiling
from engine.shaping.grammar import GrammarConstraint, Grammars, MaskBudget, PassingError
from engine.shaping.shaping import Shaping
from speculation.acceptance import AcceptanceResult
from speculation.demand import TargetDemand
from speculation.messages import (
    Close,
    Load,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    Subscribe,
    TokenLogprobs,
    ToWorker,
    Welcome,
)
from speculation.sources.registry import LOOKUP, registered
from speculation.sources.suffix import IN_PAUSE, IN_STEP, SuffixSettings, SuffixStore
from speculation.verifying.planner import Asked, Planner
from target_service.drafting.eagle import own_drafters
from target_service.drafting.state_reader import draft_all
from target_service.scheduler import Budget, Scheduler
from target_service.sequence import BatchEntry, TargetSequence, reason_to_refuse
from target_service.step_account import StepAccount, TargetCounters
from target_service.verdicts import Fault, Verdict, apart, not_finite, of_committed, verdicts
from transport.tracing import SequenceTimings, SessionLog, Tracing
from transport.worker import Key, Outgoing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """Bounds on what one worker takes on."""

    running: int = 64
    """Sessions computed in one step."""
    waiting: int = 1024
    """Sessions queued behind them; more are refused as overload."""
    budget: Budget = Budget()
    adaptive: bool = True
    """Verify as many drafts as pay, by measured cost and acceptance; else as many as the budget allows."""
    lookup: tuple[int, int] = LOOKUP
    """See :data:`speculation.sources.registry.LOOKUP`."""
    suffix: SuffixSettings = SuffixSettings()


class VerifyLoop:
    """All sessions of a target worker. Implements :class:`transport.worker.Machine`."""

    def __init__(
        self,
        engine: StepEngine,
        welcome: Welcome,
        limits: TargetLimits = TargetLimits(),
        recorder: Recorder | None = None,
        tracing: Tracing | None = None,
        drafter: InTurn | None = None,
        step_seconds: Mapping[int, float] = {},
    ) -> None:
        """Nothing is open. The loop owns ``engine`` and its cache. ``drafter``: a draft model in this process.

        ``step_seconds``: what steps take by their tokens, until some are measured.
        """
        self._engine, self._limits = engine, limits
        # A text has to fit into the cache as well: routers allow, and tell, no longer ones.
        self._welcome = replace(welcome, context=min(welcome.context, engine.cache.capacity), sources=registered())
        self._sequences: dict[Key, TargetSequence] = {}
        verify = max((limits.budget.verify, *engine.row_classes))
        budget = replace(limits.budget, row_classes=engine.row_classes, verify=verify)
        self._scheduler = Scheduler[TargetSequence](limits.running, budget, lambda: engine.cache.ledger.free)
        self._compiling: Compiling[TargetSequence] = Compiling(lambda: Grammars(engine.model))
        self._mask_budget = MaskBudget()
        self._numbers = itertools.count()
        self._planner = Planner(
            adaptive=limits.adaptive, beside=drafter is None, lookup=limits.lookup, row_classes=engine.row_classes,
            believed=step_seconds,
        )  # fmt: skip
        self._suffix_store = SuffixStore(limits.suffix.tokens, limits.suffix.scope)
        self.counters = TargetCounters(suffix=self._suffix_store.counters)
        self._drafters = own_drafters(engine, welcome, drafter, self._planner, self.counters, limits.adaptive)
        self._account = StepAccount(self.counters, self._planner, recorder, step_seconds)
        self._recorder, self._tracing = recorder, tracing
        self._due: float | None = None
        self._last_committed = 0

    def welcome(self) -> Welcome:
        """How the worker introduces itself."""
        return self._welcome

    def longest_step(self) -> float | None:
        """Seconds after which the step under way must be stuck; None: unknown. May be asked from any thread."""
        return None if self._engine.model.whole_prompts else self._account.max_seconds

    def load(self) -> Load:
        """How busy it is."""
        return Load(
            sessions=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) + len(self._compiling),
            free_tokens=self._engine.cache.free_tokens,
            capacity_tokens=self._engine.cache.capacity,
            counters=self.counters.flat(),
        )

    def demand(self) -> TargetDemand:
        """What waits and runs, against what it can compute."""
        return self._account.demand(self._scheduler, self._engine.cache, self._limits.running, self._limits.budget)

    # -- messages ------------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """When to step although no message came: a session may have stopped waiting for drafts or grammar by then."""
        indexing = None if self._suffix_store.idle else 0.0
        return min((at for at in (self._due, self._compiling.due, indexing) if at is not None), default=None)

    def receive(self, link: Hashable, message: ToWorker, at: float = 0.0) -> Outgoing:
        """Take one message of a router."""
        sequence = self._sequences.get((link, message.session))
        match message:
            case Open():
                return self._open(link, message, sequence, at)
            case Proposal():
                if sequence is not None:
                    self.counters.proposals[sequence.session.propose(message, at)] += 1
            case Close():
                if sequence is not None and sequence.session.opened.epoch <= message.epoch:
                    self._suffix_store.keep(sequence.session.opened, sequence.session.tokens)
                    self._drop(sequence, "closed")
            case Subscribe():
                return [sent for drafter in self._drafters for sent in drafter.subscribe(sequence, message)]
            case _:
                log.warning("a router sent a %s to a target; ignored", type(message).__name__)
        return []

    def _open(self, link: Hashable, opened: Open, sequence: TargetSequence | None, at: float) -> Outgoing:
        if sequence is not None and sequence.session.opened.epoch >= opened.epoch:
            return []
        refusal = self._refusal(opened, replaces=sequence is not None)
        if sequence is not None:
            self._drop(sequence, "opened again")
        if refusal is not None:
            self.counters.refused += 1
            return [(link, refusal)]
        if not self._engine.speculates:
            opened = replace(opened, speculation=replace(opened.speculation, enabled=False))
        session = self._planner.session(opened, self._welcome.vocabulary, self._suffix_store.sources(opened))
        # A session that is opened again keeps its place.
        arrived = (at - opened.age_ms / 1000, next(self._numbers)) if sequence is None else sequence.arrived
        session_log = SessionLog(log, opened.session, opened.request_options.request)
        session_log.info("opened with %d tokens, epoch %d", len(opened.tokens), opened.epoch)
        shaping = Shaping.of(opened, session.tokens, self._welcome.vocabulary)
        taken = TargetSequence(link, session, self._engine.cache, arrived, session_log, SequenceTimings(at), shaping)
        for drafter in self._drafters:
            drafter.open(taken)
        self._sequences[link, opened.session] = taken
        if opened.request_options.grammar:
            self._compiling.add(taken, opened, time.perf_counter())
        else:
            self._scheduler.add(taken)
        return []

    def _constrain(self, now: float) -> Outgoing:
        """Start the sessions whose grammar is compiled; refuse those whose grammar, or text, is none."""
        outgoing: Outgoing = []
        for sequence, constraint in self._compiling.ready(now):
            self._scheduler.add(sequence)
            if isinstance(constraint, GrammarConstraint):
                why = sequence.constrain(constraint, self._welcome.vocabulary)
            else:
                why = str(constraint)
            if why:
                passing = isinstance(constraint, PassingError)
                outgoing += self._give_up(sequence, why, RefusalCode.INTERNAL if passing else RefusalCode.INVALID)
        return outgoing

    def _refusal(self, opened: Open, *, replaces: bool) -> Refused | None:
        """Why this session cannot be served, if so."""
        if (why := reason_to_refuse(opened, self._welcome.vocabulary, self._welcome.context)) is not None:
            return Refused(opened.session, opened.epoch, RefusalCode.INVALID, why)
        if not replaces and len(self._sequences) >= self._limits.running + self._limits.waiting:
            why = f"all places are taken: {self._limits.running} running and {self._limits.waiting} waiting sessions"
            return Refused(opened.session, opened.epoch, RefusalCode.OVERLOADED, why)
        return None

    def forget(self, link: Hashable) -> None:
        """Drop all sessions of a link."""
        for sequence in [sequence for (owner, _), sequence in self._sequences.items() if owner is link]:
            self._drop(sequence, "the router went")

    def _drop(self, sequence: TargetSequence, why: str) -> None:
        timings = sequence.timings
        sequence.log.info("ended (%s) after %d tokens in %d steps", why, timings.committed, timings.steps)
        for source, fault in sequence.session.faults.items():
            self.counters.source_faults += 1
            sequence.log.warning("draft source %s failed and was left out: %s", source, fault)
        if self._tracing is not None:
            self._tracing.session("target", sequence.session.opened, timings, why)
        sequence.charge(self._mask_budget, time.perf_counter())
        sequence.cached.free()
        for drafter in self._drafters:
            drafter.drop(sequence)
        del self._sequences[sequence.link, sequence.session.opened.session]
        if not self._compiling.remove(sequence):
            self._scheduler.remove(sequence)

    def validate(self) -> None:
        """Raise AssertionError where the books contradict each other: of the cache, the scheduler and each session."""
        self._engine.cache.validate()
        self._scheduler.validate()
        scheduled = {*self._scheduler.running, *self._scheduler.waiting}
        for sequence in self._sequences.values():
            sequence.session.trie.validate()
            waits = sequence in self._compiling
            assert waits is not (sequence in scheduled), f"session {sequence.session.opened.session} is lost or doubled"
        assert scheduled <= set(self._sequences.values()), "a session is scheduled that is not open"
        self._suffix_store.validate()
        for drafter in self._drafters:
            drafter.validate()

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self) -> Outgoing | None:
        """Compute once over all running sessions but those that wait for drafts; None if there is nothing to do."""
        started = time.perf_counter()
        self._due = None
        outgoing = self._constrain(started)
        entries = self._plan(started)
        self.counters.preempted, self.counters.reused = self._scheduler.preempted, self._scheduler.reused
        if not entries:
            self._suffix_store.work(IN_PAUSE)
            self._account.pause(started, waits=self._due is not None)
            return outgoing or None
        self._account.resume(started, entries)
        committed = self.counters.committed
        outgoing += self._compute(entries, started)
        outgoing += (sent for drafter in self._drafters for sent in drafter.features())
        committed = self._last_committed = self.counters.committed - committed
        ended, drafting = time.perf_counter(), sum(drafter.seconds for drafter in self._drafters)
        self._account.observe(entries, started, ended, committed, self._engine.forward_seconds, drafting)
        if self._drafters and all(entry.decodes for entry in entries):
            for drafter in self._drafters:
                drafter.observe(len(entries), committed, ended - started)
        return outgoing

    def _plan(self, now: float) -> list[BatchEntry]:
        """Divide the step and settle what each session verifies; those that wait for drafts sit it out."""
        parts, room = self._scheduler.step(partial(self._account.time.prefill_budget, budget=self._limits.budget))
        entries = self._within_budget([BatchEntry.of(sequence, share) for sequence, share in parts], now)
        drawing = [entry for entry in entries if entry.drafts is not None]
        if self._drafters:
            self._draft(entries, drawing)
        asked = [Asked(entry.sequence.session, entry.drafts or 0) for entry in drawing]
        prefilled = sum(entry.num_scheduled_tokens for entry in entries) - len(drawing)
        plan = self._planner.plan(asked, now, prefilled, room)
        for entry, tree in zip(drawing, plan.trees, strict=True):
            entry.verifies(tree, now)
        self._due = plan.wake
        return [entry for entry in entries if entry.drafts is None or entry.tree is not None]

    def _draft(self, entries: Sequence[BatchEntry], drawing: Sequence[BatchEntry]) -> None:
        """Have those that draft here propose for those of ``drawing`` that have room for drafts."""
        part, wanting = [entry.sequence for entry in entries], [entry.sequence for entry in drawing if entry.drafts]
        if not draft_all(self._drafters, self._scheduler.running, part, wanting):
            for entry in drawing:
                entry.drafts = 0

    def _within_budget(self, entries: list[BatchEntry], now: float) -> list[BatchEntry]:
        """Without the sessions whose grammars have taken too long lately, unless there are no others.

        No text depends on which steps a session takes part in.
        """
        constrained = {entry.sequence.caller for entry in entries if entry.sequence.charge(self._mask_budget, now)}
        spent = {caller for caller in constrained if self._mask_budget.is_spent(caller, now)}
        within = [entry for entry in entries if entry.sequence.constraint is None or entry.sequence.caller not in spent]
        self.counters.grammar_waits += len(entries) - len(within) if within else 0
        return within or entries

    def _compute(self, entries: Sequence[BatchEntry], started: float) -> Outgoing:
        """Run the entries in one forward and commit. If that fails, each alone, so that a fault hits only its session.

        The same goes for those whose logits are no numbers: they may have read across what another one wrote. No draft
        ends what plain decoding would have served: before a session is given up, it is computed without.
        """
        try:
            with self._account.forward():
                decided, logprobs_of = self._run(entries)
        except FATAL:
            raise
        except Exception as error:  # whatever a model may raise; the culprit is found below
            if len(entries) == 1 and not entries[0].withdraw():
                entries[0].sequence.log.exception("a step failed")
                return self._give_up(entries[0].sequence, f"{type(error).__name__}: {error}")
            for entry in entries:
                entry.sequence.cached.rollback()
            return [message for entry in entries for message in self._compute([entry], started)]
        times = started, time.perf_counter()
        outgoing: Outgoing = []
        again: list[BatchEntry] = []
        for entry, verdict, logprobs in zip(entries, decided, logprobs_of, strict=True):
            is_broken = not_finite(verdict)
            if is_broken:
                entry.sequence.cached.discard(entry.tokens)
            if is_broken and (entry.withdraw() or len(entries) > 1):
                again.append(entry)
            else:
                outgoing += self._settle(entry, verdict, logprobs, times)
        return outgoing + [message for entry in again for message in self._compute([entry], started)]

    def _run(self, entries: Sequence[BatchEntry]) -> tuple[list[Verdict], list[tuple[TokenLogprobs, ...]]]:
        """What one forward makes of each entry, and the log-probabilities its session asks for.

        What does not depend on the draws is done before they are asked for, while a device still computes.
        """
        plain = all(entry.is_plain for entry in entries)
        chunks = [entry.chunk(draws=plain) for entry in entries]
        prompts, logits_RV = apart(self._engine.run(chunks), entries)
        self._suffix_store.work(IN_STEP + 2 * self._last_committed)
        decided = verdicts(logits_RV, entries, self._engine.drawn if plain else None)
        for entry, prompt_PV, verdict in zip(entries, prompts, decided, strict=True):
            if entry.sequence.tells_prompt and not not_finite(verdict):
                entry.sequence.note_prompt(prompt_PV)
        for drafter in self._drafters:
            drafter.note(self._engine, chunks, entries, decided)
        return decided, of_committed(logits_RV, entries, decided)

    def _give_up(self, sequence: TargetSequence, why: str, code: RefusalCode = RefusalCode.INTERNAL) -> Outgoing:
        self._drop(sequence, why)
        self.counters.refused += 1
        return [sequence.refused(code, why)]

    def _settle(
        self, entry: BatchEntry, verdict: Verdict, logprobs: Sequence[TokenLogprobs], times: tuple[float, float]
    ) -> Outgoing:
        """Go on with a session as the step decided, or give it up."""
        sequence, scheduled = entry.sequence, entry.num_scheduled_tokens
        sequence.computed += scheduled
        if scheduled > 1:  # some of its prompt
            sequence.session.index(sequence.cached.length + scheduled, scheduled)
        match verdict:
            case Fault(why, code):
                sequence.log.log(logging.ERROR if code.retryable else logging.INFO, "given up: %s", why)
                return self._give_up(sequence, why, code)
            case AcceptanceResult():
                return self._commit(entry, verdict, logprobs, times)
            case None:
                sequence.cached.advance(range(scheduled))
                self.counters.prefilled += scheduled
                return []

    def _commit(
        self,
        entry: BatchEntry,
        accepted: AcceptanceResult,
        logprobs: Sequence[TokenLogprobs],
        times: tuple[float, float],
    ) -> Outgoing:
        """Commit what a session accepts, in its tokens and in its cache; ``logprobs``: what the model thinks of it."""
        assert entry.tree is not None
        sequence, scheduled = entry.sequence, entry.num_scheduled_tokens
        commit = sequence.settle(accepted, *times)
        verification = commit.verification
        sequence.cached.commit([*range(scheduled), *[scheduled + i for i in commit.kept]])
        self.counters.count(entry.tree, commit)
        self.counters.prefilled += scheduled - 1
        for drafter in self._drafters:
            drafter.settled(sequence, verification)
        sequence.timings.draws(times[1])
        sequence.timings.counts(verification)
        if self._recorder:
            entry.record(commit)
        if logprobs:
            verification = replace(verification, logprobs=tuple(logprobs[: len(verification.tokens)]))
        outgoing: Outgoing = [(sequence.link, sequence.said(verification))]
        if verification.finish:
            self._suffix_store.keep(sequence.session.opened, sequence.session.tokens)
            self._drop(sequence, verification.finish.value)
        elif why := sequence.follow():  # only at the last token: what is committed was allowed
            outgoing += self._give_up(sequence, why, RefusalCode.INVALID)
        return outgoing
