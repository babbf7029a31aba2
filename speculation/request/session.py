"""The router's side of one session: a state machine from events to effects.

    NEW --start--> PLACING --placed--> RUNNING --finish, stop--> ENDED
                      ^                 |   ^
                      |                 |   +-- draining: a migration target is opened elsewhere, and takes over once
                      prefilled +---- lost, refused, doubt (epoch + 1)

``handle(now, event)`` returns what to do; it never waits, sends or looks at a clock. The rules it keeps, whatever the
events and their order:

* Only a verification of the current target epoch commits, and only where it connects to what is committed. So nothing
  is ever retracted or doubled, and a worker believed dead that speaks again is not heard.
* After a loss or a doubt the session is opened again from its committed tokens, under a new epoch. Since every token
  is a function of (seed, position, prefix), the text goes on as it would have.
* Drafters are optional at every moment. Losing one delays the target by a short, bounded wait at most.
* A drafter whose messages break the protocol is closed and never asked again (:mod:`speculation.request.drafting`).
  What is merely late (of an older epoch, known already) is counted and costs nobody anything.
* A worker that says it will go is left without haste: the session is opened on another one as well, which computes
  what is committed, and moves there once that has answered. So the text goes on without a pause, and nothing counts as
  a fault. Where there is no other, the session stays for as long as the worker does.
* A session that targets fail at is not retried for ever: :class:`SessionLimits`. Nor is one that ends them: whether it
  does is not known here, but across sessions (see :mod:`speculation.request.poison_detector`).

Each opening, at either side, takes a fresh number from one epoch counter. Messages relayed between the two sides are
translated from one side's epoch to the other's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple, assert_never

from speculation import digest as digests
from speculation.events import (
    Available,
    Draining,
    Effect,
    Emit,
    Event,
    Fail,
    FailureCode,
    Faulted,
    Finish,
    Lost,
    PeerId,
    Place,
    Placed,
    PoisonRequest,
    Received,
    Relay,
    Role,
    Send,
    Start,
    Stays,
    StepMetadata,
    Stop,
    Tick,
    Wake,
)
from speculation.messages import (
    MAX_PRIORITY,
    Close,
    FromWorker,
    Limits,
    Load,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    RequestOptions,
    Sampling,
    SessionId,
    Speculation,
    Token,
    Verification,
    Welcome,
)
from speculation.request.drafting import Drafting, Opening
from speculation.request.retry_state import RetryState
from speculation.request.retry_state import SessionLimits as SessionLimits

MAX_AGE_MS = (1 << 32) - 1


class Phase(Enum):
    """Where a session is in its life."""

    NEW = auto()
    PLACING = auto()
    RUNNING = auto()
    ENDED = auto()


class Workers(NamedTuple):
    """Where a session is open."""

    target: PeerId | None
    """The one whose word counts, not one that it will move to."""
    draft: PeerId | None


class Session:
    """The life of one choice of one request."""

    def __init__(
        self,
        session: SessionId,
        prompt: tuple[Token, ...],
        sampling: Sampling,
        limits: Limits,
        speculation: Speculation = Speculation(),
        session_limits: SessionLimits = SessionLimits(),
        priority: int = 0,
        request_options: RequestOptions = RequestOptions(),
    ) -> None:
        """Nothing happens before :class:`Start`."""
        assert prompt, "a session has at least one token"
        self.session = session
        self.prompt_length = len(prompt)
        self.reopened = 0
        """How often the target side was opened again after a fault: the number of failovers."""
        self.moved = 0
        """How often it was opened elsewhere without one: a target went, or had no room."""
        self.stale = 0
        """Messages dropped because they came too late to matter."""
        self._tokens = list(prompt)
        self._digest = digests.of(prompt)
        self._sampling, self._limits, self._speculation = sampling, limits, speculation
        self._priority, self._request_options = priority, request_options
        self._bounds = session_limits
        self._phase = Phase.NEW
        self._epoch = 0
        self._target: Opening | None = None
        self._migration_target: Opening | None = None
        """Opened where the session will move, and not yet prefilled. What it says is not used."""
        self._prefills = 0
        self._drafting = Drafting(session, speculation, session_limits)
        self._avoid: frozenset[PeerId] = frozenset()
        """Targets not to be asked now."""
        self._lead: int | None = None
        self._draining: frozenset[PeerId] = frozenset()
        self._retries = RetryState(session_limits, session)
        self._wake_at: float | None = None
        self._began = self._now = 0.0

    @property
    def phase(self) -> Phase:
        """Where the session is in its life."""
        return self._phase

    @property
    def output(self) -> tuple[Token, ...]:
        """Committed tokens after the prompt."""
        return tuple(self._tokens[self.prompt_length :])

    @property
    def position(self) -> int:
        """How many tokens it has, the prompt included."""
        return len(self._tokens)

    @property
    def _begun(self) -> bool:
        return len(self._tokens) > self.prompt_length

    @property
    def end(self) -> int:
        """How many tokens it may have at last, the prompt included."""
        return self._limits.end

    @property
    def openings(self) -> tuple[Opening | None, Opening | None]:
        """As what it is open at its target and its drafter."""
        return self._target, self._drafting.opening

    @property
    def workers(self) -> Workers:
        """Where it is open."""
        target, draft = self.openings
        return Workers(target.peer if target else None, draft.peer if draft else None)

    @property
    def strikes(self) -> Mapping[PeerId, Sequence[str]]:
        """What drafters did against the protocol."""
        return self._drafting.strikes

    @property
    def quarantined(self) -> frozenset[PeerId]:
        """Drafters this session is done with."""
        return self._drafting.quarantined

    @property
    def undrafted(self) -> bool:
        """Whether it is decoded without a drafter although it allows one."""
        return self._phase is Phase.RUNNING and self._drafting.opening is None and self._drafting.wanted

    @property
    def resting(self) -> bool:
        """Whether its target has no use for its drafter at present."""
        return self._drafting.opening is not None and self._lead == 0

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Take one event at time ``now`` (seconds, any origin) and return what to do, in order."""
        if self._phase is Phase.ENDED:
            return []
        self._now = now
        match event:
            case Start():
                self._began = now
                return self._place_target(now)
            case Placed(role=Role.TARGET, peer=chosen, queued=queued):
                return (
                    self._open_migration_target(now, chosen)
                    if self._needs_migration_target
                    else self._open_target(now, chosen, queued=queued)
                )
            case Placed(peer=chosen):
                return self._open_draft(chosen)
            case PoisonRequest(deaths=deaths):
                return self._fail_as_poison(now, deaths)
            case Received(peer=peer, message=message):
                return self._receive(now, peer, message)
            case Faulted(peer=peer, epoch=epoch, why=why):
                return self._fault(now, Opening(peer, epoch), why)
            case Lost(peer=peer):
                return self._lose(now, peer)
            case Draining(peer=peer):
                return self._prepare_to_leave(peer)
            case Stays(peer=peer):
                return self._stay(peer)
            case Available(role=role):
                return self._available(role)
            case Stop():
                return self._end(Finish(None))
            case Tick():
                return self._tick(now)
            case _:
                assert_never(event)

    # -- the target side -----------------------------------------------------------------------------------------------

    def _place_target(self, now: float) -> list[Effect]:
        """Ask for a target; the drafter, if any, is opened again with it, since a new target holds no drafts."""
        effects = self._close_all()
        self._retries.begin_search(now, begun=self._begun)
        self._phase = Phase.PLACING
        return [*effects, Place(Role.TARGET, self._avoid)]

    def _open_target(self, now: float, peer: PeerId | None, *, queued: bool = False) -> list[Effect]:
        if self._phase is not Phase.PLACING:
            return []
        if peer is None:
            return self._await_target(now, queued=queued)
        self._phase = Phase.RUNNING
        self._retries.opened(now)
        self._target = Opening(peer, self._next_epoch())
        opening = Send(peer, self._opening(self._target.epoch))
        return [opening, *self._wake(self._retries.stalled_at), *self._place_draft()]

    def _await_target(self, now: float, *, queued: bool) -> list[Effect]:
        """Nowhere to go at the moment: ask again, but not for ever. What was begun waits while targets are full."""
        if queued:
            self._retries.restart_search(now, begun=self._begun)
            return self._ask_again(now)
        if self._retries.crowded and self._begun and not self._avoid:
            self._retries.end_search()  # whoever was full is gone: that is another wait
            self._retries.begin_search(now, begun=self._begun)
        if self._retries.search_is_over(now):
            if not self._retries.crowded:
                return self._end(Fail(FailureCode.UNAVAILABLE, "no target worker is available"))
            if not self._begun:
                return self._end(Fail(FailureCode.OVERLOADED, "all target workers are full; try again later"))
        return self._ask_again(now)

    def _ask_again(self, now: float) -> list[Effect]:
        """In a moment, for any target."""
        self._avoid = frozenset()
        return self._wake(now + self._retries.pause())

    def _fail_as_poison(self, now: float, deaths: int) -> list[Effect]:
        """No target takes it any more; where it runs on one that drains, it runs on until that goes."""
        if self._phase is not Phase.PLACING:
            return self._ask_again(now) if self._needs_migration_target else []
        text = f"given up after {deaths} target workers in a row died when they computed it"
        return self._end(Fail(FailureCode.FAULTY, text))

    def _retry_target(self, now: float, peer: PeerId, why: str) -> list[Effect]:
        """The target failed at this session alone."""
        if openings := self._retries.count_fault():
            text = f"given up after {openings} openings in a row that ended without a token; the last: {why}"
            return self._end(Fail(FailureCode.FAULTY, text))
        self._retries.end_search()
        self.reopened += 1
        return self._move_target(now, peer)

    def _move_target(self, now: float, peer: PeerId) -> list[Effect]:
        """Open the session elsewhere. If there is no elsewhere, ``_open_target`` waits and takes any."""
        self._avoid |= {peer}
        return self._place_target(now)

    def _verified(self, now: float, verification: Verification) -> list[Effect]:
        assert self._target is not None
        known = len(self._tokens) - verification.position
        if verification.epoch != self._target.epoch or known >= len(verification.tokens):
            return self._too_late()
        fresh = verification.tokens[max(known, 0) :]
        digest = self._digest
        for token in fresh:
            digest = digests.extend(digest, token)
        if known < 0 or digest != verification.digest:
            return self._retry_target(now, self._target.peer, "a verification did not connect to the committed tokens")
        first = not self._begun
        self._tokens.extend(fresh)
        self._digest = digest
        self._lead = verification.lead
        self._retries.progress(now)
        self._avoid = frozenset()
        accepted, cached = max(verification.accepted - known, 0), verification.cached if first else 0
        offered = verification.offered - verification.accepted + accepted
        metadata = _metadata_of(verification, known, first=first)
        effects: list[Effect] = [Emit(fresh, accepted, offered, cached, metadata)]
        if verification.finish:
            return effects + self._end(Finish(verification.finish))
        if drafter := self._drafting.opening:
            effects.append(_for_drafter(verification, drafter))
        # chosen for a text that had not begun: perhaps of another revision
        if first and self._migration_target is not None:
            effects += self._drop_migration_target() + self._seek_migration_target()
        return effects

    # -- leaving a target that drains ----------------------------------------------------------------------------------

    @property
    def _needs_migration_target(self) -> bool:
        """Whether the session runs where it cannot stay, and does not yet know where to go."""
        return self._target is not None and self._target.peer in self._draining and self._migration_target is None

    def _prepare_to_leave(self, peer: PeerId) -> list[Effect]:
        self._draining |= {peer}
        effects: list[Effect] = []
        if self._migration_target is not None and self._migration_target.peer == peer:
            effects = self._drop_migration_target()
        if self._drafting.at(peer):
            effects += self._place_draft()
        return effects + self._seek_migration_target()

    def _stay(self, peer: PeerId) -> list[Effect]:
        self._draining -= {peer}
        return self._drop_migration_target() if self._target is not None and self._target.peer == peer else []

    def _seek_migration_target(self) -> list[Effect]:
        return [Place(Role.TARGET, self._avoid | self._draining)] if self._needs_migration_target else []

    def _open_migration_target(self, now: float, peer: PeerId | None) -> list[Effect]:
        """Let another target compute what is committed, while this one goes on."""
        if peer is None or peer in self._draining:
            return self._ask_again(now)
        self._prefills = 0
        return self._prefill(peer)

    def _prefill(self, peer: PeerId) -> list[Effect]:
        self._prefills += 1
        self._migration_target = Opening(peer, self._next_epoch())
        # Nobody waits for this: it comes behind those that have moved already, whose clients hear nothing meanwhile.
        behind = min(self._priority + 1, MAX_PRIORITY)
        return [Send(peer, replace(self._opening(self._migration_target.epoch), priority=behind))]

    def _prefilled(self, now: float, verification: Verification) -> list[Effect]:
        """The migration target has computed what was committed when it was asked to.

        If much has been since, it computes that too.

        Each time there is less, so when the session moves at last, its client waits for a few tokens only.
        """
        assert self._migration_target is not None
        behind = len(self._tokens) - verification.position
        if behind > self._bounds.max_migration_lag and self._prefills < self._bounds.max_prefills:
            return self._prefill(self._migration_target.peer)
        return self._migrate(now)

    def _drop_migration_target(self) -> list[Effect]:
        effects = self._close(self._migration_target)
        self._migration_target = None
        return effects

    def _lose_migration_target(self, now: float, peer: PeerId) -> list[Effect]:
        """It will not be this one; the next is looked for in a moment."""
        self._migration_target = None
        self._avoid |= {peer}
        return self._wake(now + self._retries.pause())

    def _migrate(self, now: float) -> list[Effect]:
        """Go on at the migration target, from what is committed by now: nearly all of that is in its cache."""
        assert self._migration_target is not None
        peer = self._migration_target.peer
        effects = self._close(self._target) + self._close_draft()
        self._target = self._migration_target = None
        self.moved += 1
        self._phase = Phase.PLACING
        return effects + self._open_target(now, peer)

    # -- the draft side ------------------------------------------------------------------------------------------------

    @property
    def _draft_stays(self) -> bool:
        drafter = self._drafting.opening
        return drafter is not None and drafter.peer not in self._draining

    def _place_draft(self) -> list[Effect]:
        if self._draft_stays or self._target is None or not self._drafting.wanted:
            return []
        return [Place(Role.DRAFT, self._drafting.unwanted | self._draining)]

    def _open_draft(self, peer: PeerId | None) -> list[Effect]:
        if peer is None or self._target is None or self._draft_stays:
            return []
        if peer in self._drafting.unwanted | self._draining:
            return []
        effects = self._close_draft()
        epoch = self._next_epoch()
        self._drafting.opened(Opening(peer, epoch))
        # Drafters go by what is said, not by what the caller expects.
        opening = replace(self._opening(epoch), request_options=replace(self._request_options, prediction=()))
        return [*effects, Send(peer, opening)]

    def _close_draft(self) -> list[Effect]:
        effects = self._close(self._drafting.opening)
        self._drafting.opening = None
        return effects

    def _proposed(self, proposal: Proposal) -> list[Effect]:
        drafter = self._drafting.opening
        if drafter is None or proposal.epoch != drafter.epoch or self._target is None:
            return self._too_late()
        if not proposal.tokens:  # no harm, and no sign that the drafter follows the text
            return self._too_late()
        if why := self._drafting.objection(proposal):
            return self._strike(why)
        self._drafting.proposed()
        return [Relay(self._target.peer, proposal, self._target.epoch)]

    def _strike(self, why: str) -> list[Effect]:
        return self._close_draft() + self._place_draft() if self._drafting.struck(why) else []

    def _draft_refused(self, now: float, code: RefusalCode) -> list[Effect]:
        self._drafting.refused(now, code)
        again = self._drafting.again_at
        return self._place_draft() + (self._wake(again) if again is not None else [])

    # -- both ----------------------------------------------------------------------------------------------------------

    def _receive(self, now: float, peer: PeerId, message: FromWorker) -> list[Effect]:
        from_target = self._target is not None and self._target.peer == peer
        from_draft = self._drafting.at(peer)
        match message:
            case Verification() if self._migration_target == Opening(peer, message.epoch):
                return self._prefilled(now, message)
            case Verification() if from_target:
                return self._verified(now, message)
            case Proposal() if from_draft:
                return self._proposed(message)
            case Verification() if from_draft:
                return self._fault(now, Opening(peer, message.epoch), "a verification from a drafter")
            case Refused():
                return self._refused(now, peer, message)
            case Verification() | Proposal():
                return self._too_late()
            case Load() | Welcome():
                return []
            case _:
                assert_never(message)

    def _fault(self, now: float, opening: Opening, why: str) -> list[Effect]:
        if opening == self._drafting.opening:
            return self._strike(why)
        if opening == self._target:
            return self._retry_target(now, opening.peer, why)
        if opening == self._migration_target:
            return self._close(opening) + self._lose_migration_target(now, opening.peer)
        return self._too_late()

    def _too_late(self) -> list[Effect]:
        self.stale += 1
        return []

    def _refused(self, now: float, peer: PeerId, refused: Refused) -> list[Effect]:
        opening = Opening(peer, refused.epoch)
        if opening == self._drafting.opening:
            return self._draft_refused(now, refused.code)
        if opening == self._migration_target:
            return self._close(opening) + self._lose_migration_target(now, peer)
        if opening != self._target:
            return self._too_late()
        match refused.code:
            case RefusalCode.INVALID:
                return self._end(Fail(FailureCode.INVALID, refused.message))
            case RefusalCode.INTERNAL | RefusalCode.UNKNOWN_SESSION:
                return self._retry_target(now, peer, refused.message)
            case RefusalCode.OVERLOADED | RefusalCode.DRAINING:
                self._retries.crowded = refused.code is RefusalCode.OVERLOADED
                self.moved += 1
                return self._move_target(now, peer)
            case _:
                assert_never(refused.code)

    def _lose(self, now: float, peer: PeerId) -> list[Effect]:
        expected = peer in self._draining
        self._draining -= {peer}
        if self._migration_target is not None and self._migration_target.peer == peer:
            return self._lose_migration_target(now, peer)
        if self._drafting.at(peer):
            self._drafting.opening = None
            return self._place_draft()
        if self._target is None or self._target.peer != peer:
            return []
        self._target = None
        if self._migration_target is not None:
            return self._migrate(now)
        self._retries.end_search()
        self.moved += expected
        self.reopened += not expected
        return self._move_target(now, peer)

    def _available(self, role: Role) -> list[Effect]:
        match role:
            case Role.TARGET:
                return [Place(role, self._avoid)] if self._phase is Phase.PLACING else self._seek_migration_target()
            case Role.DRAFT:
                self._drafting.came()
                return self._place_draft()
            case _:
                assert_never(role)

    def _tick(self, now: float) -> list[Effect]:
        if self._wake_at is not None and now >= self._wake_at:
            self._wake_at = None
        if self._phase is Phase.PLACING:
            return [Place(Role.TARGET, self._avoid)]
        due = self._retries.stalled_at
        if self._phase is not Phase.RUNNING:
            return []
        if now < due:
            effects = self._place_draft() if self._drafting.due(now) else []
            return self._wake(min(due, self._drafting.again_at or due)) + effects + self._seek_migration_target()
        return self._stall(now)

    def _stall(self, now: float) -> list[Effect]:
        """The target has said nothing for too long: perhaps it computes a long prompt, but not twice in a row."""
        assert self._target is not None
        silences = self._retries.stall()
        if silences >= self._bounds.silences:
            return self._end(Fail(FailureCode.FAULTY, f"given up after targets said nothing {silences} times in a row"))
        self._retries.end_search()
        self.reopened += 1
        return self._place_target(now) if silences == 1 else self._move_target(now, self._target.peer)

    def _wake(self, at: float) -> list[Effect]:
        """Ask for a tick, unless one that comes no later is under way."""
        if self._wake_at is not None and self._wake_at <= at:
            return []
        self._wake_at = at
        return [Wake(at)]

    def _end(self, ending: Finish | Fail) -> list[Effect]:
        effects = self._close_all()
        self._phase = Phase.ENDED
        return [*effects, ending]

    def _close_all(self) -> list[Effect]:
        effects = self._close(self._target) + self._close(self._migration_target) + self._close_draft()
        self._target = self._migration_target = None
        return effects

    def _close(self, opening: Opening | None) -> list[Effect]:
        return [] if opening is None else [Send(opening.peer, Close(self.session, opening.epoch))]

    def _opening(self, epoch: int) -> Open:
        return Open(
            session=self.session,
            epoch=epoch,
            tokens=tuple(self._tokens),
            sampling=self._sampling,
            limits=self._limits,
            speculation=self._speculation,
            priority=self._priority,
            age_ms=min(int(1000 * (self._now - self._began)), MAX_AGE_MS),
            prompt=self.prompt_length,
            request_options=self._request_options,
        )

    def _next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch


def _for_drafter(verification: Verification, drafter: Opening) -> Send | Relay:
    """The same, without logprobs, which are long and for clients only; or as it was passed on already."""
    if verification.passed == drafter.epoch or not (verification.logprobs or verification.prompt_logprobs):
        return Relay(drafter.peer, verification, drafter.epoch)
    return Send(drafter.peer, replace(verification, epoch=drafter.epoch, logprobs=(), prompt_logprobs=()))


def _metadata_of(verification: Verification, known: int, *, first: bool) -> StepMetadata:
    """What is said of all but the first ``known`` tokens. Only the first one of a session speaks of its prompt."""
    return StepMetadata(
        sources=verification.sources[known:],
        refused=verification.refused,
        recovered=verification.recovered,
        logprobs=verification.logprobs[known:],
        prompt_logprobs=verification.prompt_logprobs if first else (),
        took_us=verification.took_us,
        waited_us=verification.waited_us,
    )
