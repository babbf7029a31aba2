"""The router's side of one session: a state machine from events to effects.

``handle(now, event)`` returns what to do; it never waits, sends or looks at a clock. Which event can come in which
state, and where that may lead, is one table (:mod:`speculation.request.record`). docs/protocol.md tells its life; the
rules it keeps, whatever the events and their order:

* Only a verification of the current target epoch commits, and only where it connects to what is committed.
* After a loss or a doubt the session is opened again from its committed tokens, under a new epoch: how often, and for
  how long a target is looked for, says :mod:`speculation.request.placement`.
* Drafters are optional at every moment. Losing one delays the target by a short, bounded wait at most. One that breaks
  the protocol is closed and never asked again. What is merely late is counted and costs nobody anything.
* A worker that says it will go is left without haste: the session is opened on another one as well, and moves there
  once that has computed what is committed. Where there is no other, it stays for as long as the worker does.

Each opening, at either side, takes a fresh number from one epoch counter. Messages relayed between the two sides are
translated from one side's epoch to the other's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from speculation import events
from speculation.events import Effect, Event, Fail, FailureCode, Finish, PeerId, Place, Relay, Role, Send, Wake
from speculation.messages import MAX_PRIORITY, Proposal, RefusalCode, Refused, SessionMessage, Verification
from speculation.request.placement import Opening, closed
from speculation.request.placement import SessionLimits as SessionLimits
from speculation.request.record import TRANSITIONS, IllegalTransition, Kind, SessionRecord, SessionState
from speculation.request.record import Phase as Phase


class Session(SessionRecord):
    """The life of one choice of one request."""

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Take one event at time ``now`` (seconds, any origin) and return what to do, in order.

        Raises :class:`speculation.request.record.IllegalTransition` where it is at fault itself.
        """
        state = self._state
        if state is SessionState.ENDED:
            return []
        kind: Kind = type(event.message) if type(event) is events.Received else type(event)
        self._history.append((kind, state))
        allowed = TRANSITIONS[state].get(kind)
        if allowed is None:
            raise IllegalTransition(self.session, f"was told {kind.__name__} while {state.label}", self._history)
        self._now = now
        effects = self._react(event)
        if self._state not in allowed:
            what = f"went from {state.label} to {self._state.label} on {kind.__name__}"
            raise IllegalTransition(self.session, what, self._history)
        return effects

    def _react(self, event: Event) -> list[Effect]:
        match event:
            case events.Received(peer=peer, message=message):
                return self._receive(peer, message)
            case events.Start():
                self._began = self._now
                return self._place_target()
            case events.Placed(role=Role.TARGET, peer=peer, queued=queued):
                return self._target_found(peer, queued=queued)
            case events.Placed(peer=peer):
                return self._open_draft(peer)
            case events.PoisonRequest(deaths=deaths):
                return self._fail_as_poison(deaths)
            case events.Faulted(peer=peer, epoch=epoch, why=why):
                return self._fault(Opening(peer, epoch), why)
            case events.Lost(peer=peer):
                return self._lose(peer)
            case events.Draining(peer=peer):
                return self._prepare_to_leave(peer)
            case events.Stays(peer=peer):
                return self._stay(peer)
            case events.Available(role=Role.TARGET):
                return self._seek_target()
            case events.Available():
                self.drafting.came()
                return self._place_draft()
            case events.Stop():
                return self._end(Finish(None))
            case events.Tick():
                return self._tick()
            case _:
                assert_never(event)

    # -- the target side -----------------------------------------------------------------------------------------------

    def _place_target(self) -> list[Effect]:
        """Ask for a target; the drafter, if any, is opened again with it, since a new target holds no drafts."""
        effects = self._close_all()
        self._retries.begin_search(self._now)
        self._state = SessionState.PLACING
        return [*effects, Place(Role.TARGET, self._retries.avoid)]

    def _seek_target(self) -> list[Effect]:
        """Ask again where one is wanted, be it to move to."""
        placing = self._state is SessionState.PLACING
        return [Place(Role.TARGET, self._retries.avoid)] if placing else self._seek_migration_target()

    def _target_found(self, peer: PeerId | None, *, queued: bool) -> list[Effect]:
        """Open the session there; None: there is none at the moment, so ask again, but not for ever."""
        if self._state is SessionState.LEAVING:
            return self._ask_again() if peer is None or peer in self._draining else self._prefill(peer, again=False)
        if self._state is not SessionState.PLACING:
            return []
        if peer is not None:
            return self._open_target(peer)
        failure = self._retries.none_found(self._now, queued=queued, begun=self._text.begun)
        return self._end(failure) if failure else self._ask_again()

    def _open_target(self, peer: PeerId) -> list[Effect]:
        self._state = SessionState.LEAVING if peer in self._draining else SessionState.DECODING
        self._retries.opened(self._now)
        self._target = Opening(peer, self._next_epoch())
        opening = Send(peer, self._opening(self._target.epoch))
        return [opening, *self._wake(self._retries.stalled_at), *self._place_draft()]

    def _ask_again(self) -> list[Effect]:
        """In a while; then any will do."""
        return self._wake(self._now + self._retries.pause(moving=self._state is SessionState.LEAVING))

    def _fail_as_poison(self, deaths: int) -> list[Effect]:
        """No target takes it any more; where it runs on one that drains, it runs on until that goes."""
        if self._state is not SessionState.PLACING:
            return self._ask_again() if self._state is SessionState.LEAVING else []
        text = f"given up after {deaths} target workers in a row died when they computed it"
        return self._end(Fail(FailureCode.FAULTY, text))

    def _retry_target(self, peer: PeerId, why: str) -> list[Effect]:
        """The target failed at this session alone."""
        if failure := self._retries.fault(why):
            return self._end(failure)
        self.reopened += 1
        return self._move_target(peer)

    def _move_target(self, peer: PeerId) -> list[Effect]:
        """Open the session elsewhere. If there is no elsewhere, it waits and takes any."""
        self._retries.avoid |= {peer}
        return self._place_target()

    def _verified(self, verification: Verification) -> list[Effect]:
        assert self._target is not None
        if verification.epoch != self._target.epoch or self._text.has(verification):
            return self._too_late()
        first = not self._text.begun
        committed = self._text.commit(verification)
        if committed is None:
            return self._retry_target(self._target.peer, "a verification did not connect to the committed tokens")
        self._lead = verification.lead
        self._retries.progress(self._now)
        if verification.finish:
            return [committed, *self._end(Finish(verification.finish))]
        effects: list[Effect] = [committed, *self.drafting.relay(verification)]
        # chosen for a text that had not begun: perhaps of another revision
        if first and self._migration_target is not None:
            effects += self._drop_migration_target() + self._seek_migration_target()
        return effects

    # -- leaving a target that drains ----------------------------------------------------------------------------------

    def _prepare_to_leave(self, peer: PeerId) -> list[Effect]:
        self._draining |= {peer}
        effects: list[Effect] = []
        if self._migration_target is not None and self._migration_target.peer == peer:
            effects = self._drop_migration_target()
        elif self._state is SessionState.DECODING and self._at_target(peer):
            self._state = SessionState.LEAVING
        if self.drafting.at(peer):
            effects += self._place_draft()
        return effects + self._seek_migration_target()

    def _stay(self, peer: PeerId) -> list[Effect]:
        self._draining -= {peer}
        if not self._at_target(peer):
            return []
        effects = self._drop_migration_target()
        self._retries.end_move()
        self._state = SessionState.DECODING
        return effects

    def _seek_migration_target(self) -> list[Effect]:
        if self._state is not SessionState.LEAVING:
            return []
        return [Place(Role.TARGET, self._retries.avoid | self._retries.avoid_moving | self._draining)]

    def _prefill(self, peer: PeerId, *, again: bool) -> list[Effect]:
        """Let another target compute what is committed, while this one goes on."""
        self._prefills = self._prefills + 1 if again else 1
        self._state = SessionState.MIGRATING
        self._migration_target = Opening(peer, self._next_epoch())
        # Nobody waits for this: it comes behind those that have moved already, whose clients hear nothing meanwhile.
        behind = min(self._request.priority + 1, MAX_PRIORITY)
        return [Send(peer, replace(self._opening(self._migration_target.epoch), priority=behind))]

    def _prefilled(self, verification: Verification) -> list[Effect]:
        """The migration target has computed what was committed when it was asked to; if much has been since, that too.

        Each time there is less, so when the session moves at last, its client waits for a few tokens only.
        """
        assert self._migration_target is not None
        behind = len(self._tokens) - verification.position
        if behind > self._bounds.max_migration_lag and self._prefills < self._bounds.max_prefills:
            return self._prefill(self._migration_target.peer, again=True)
        return self._migrate()

    def _drop_migration_target(self) -> list[Effect]:
        effects = closed(self.session, self._migration_target)
        if self._migration_target is not None:
            self._migration_target, self._state = None, SessionState.LEAVING
        return effects

    def _lose_migration_target(self, peer: PeerId) -> list[Effect]:
        """It will not be this one; the next is looked for in a moment."""
        self._migration_target, self._state = None, SessionState.LEAVING
        return self._wake(self._now + self._retries.move_failed(peer))

    def _migrate(self) -> list[Effect]:
        """Go on at the migration target, from what is committed by now: nearly all of that is in its cache."""
        assert self._migration_target is not None
        peer = self._migration_target.peer
        effects = closed(self.session, self._target) + self.drafting.close()
        self._target = self._migration_target = None
        self.moved += 1
        return effects + self._open_target(peer)

    # -- the draft side ------------------------------------------------------------------------------------------------

    def _place_draft(self) -> list[Effect]:
        return [] if self._target is None else self.drafting.place(self._draining)

    def _open_draft(self, peer: PeerId | None) -> list[Effect]:
        if peer is None or self._target is None or not self.drafting.takes(peer, self._draining):
            return []
        effects = self.drafting.close()
        epoch = self._next_epoch()
        self.drafting.opened(Opening(peer, epoch))
        # Drafters go by what is said, not by what the caller expects.
        opening = replace(self._opening(epoch), request_options=replace(self._request.request_options, prediction=()))
        return [*effects, Send(peer, opening)]

    def _proposed(self, proposal: Proposal) -> list[Effect]:
        drafter = self.drafting.opening
        if drafter is None or proposal.epoch != drafter.epoch or self._target is None or not proposal.tokens:
            return self._too_late()  # one of nothing does no harm, and is no sign that the drafter follows the text
        if why := self.drafting.objection(proposal):
            return self._strike(why)
        self.drafting.proposed()
        return [Relay(self._target.peer, proposal, self._target.epoch)]

    def _strike(self, why: str) -> list[Effect]:
        return self.drafting.close() + self._place_draft() if self.drafting.struck(why) else []

    # -- both ----------------------------------------------------------------------------------------------------------

    def _receive(self, peer: PeerId, message: SessionMessage) -> list[Effect]:
        from_draft, migrating = self.drafting.at(peer), self._migration_target
        match message:
            case Verification() if migrating is not None and migrating == Opening(peer, message.epoch):
                return self._prefilled(message)
            case Verification() if self._at_target(peer):
                return self._verified(message)
            case Proposal() if from_draft:
                return self._proposed(message)
            case Verification() if from_draft:
                return self._fault(Opening(peer, message.epoch), "a verification from a drafter")
            case Refused():
                return self._refused(peer, message)
            case Verification() | Proposal():
                return self._too_late()
            case _:
                assert_never(message)

    def _fault(self, opening: Opening, why: str) -> list[Effect]:
        if opening == self.drafting.opening:
            return self._strike(why)
        if opening == self._target:
            return self._retry_target(opening.peer, why)
        if opening == self._migration_target:
            return closed(self.session, opening) + self._lose_migration_target(opening.peer)
        return self._too_late()

    def _too_late(self) -> list[Effect]:
        self.stale += 1
        return []

    def _refused(self, peer: PeerId, refused: Refused) -> list[Effect]:
        opening = Opening(peer, refused.epoch)
        if opening == self.drafting.opening:
            self.drafting.refused(self._now, refused.code)
            again = self.drafting.again_at
            return self._place_draft() + (self._wake(again) if again is not None else [])
        if opening == self._migration_target:
            return closed(self.session, opening) + self._lose_migration_target(peer)
        if opening != self._target:
            return self._too_late()
        match refused.code:
            case RefusalCode.INVALID:
                return self._end(Fail(FailureCode.INVALID, refused.message))
            case RefusalCode.INTERNAL | RefusalCode.UNKNOWN_SESSION:
                return self._retry_target(peer, refused.message)
            case RefusalCode.OVERLOADED | RefusalCode.DRAINING:
                self._retries.refused(full=refused.code is RefusalCode.OVERLOADED)
                self.moved += refused.code is RefusalCode.DRAINING
                return self._move_target(peer)
            case _:
                assert_never(refused.code)

    def _lose(self, peer: PeerId) -> list[Effect]:
        expected = peer in self._draining
        self._draining -= {peer}
        if self._migration_target is not None and self._migration_target.peer == peer:
            return self._lose_migration_target(peer)
        if self.drafting.at(peer):
            self.drafting.opening = None
            return self._place_draft()
        if not self._at_target(peer):
            return []
        self._target = None
        if self._migration_target is not None:
            return self._migrate()
        self._retries.end_search()
        self.moved += expected
        self.reopened += not expected
        return self._move_target(peer)

    def _tick(self) -> list[Effect]:
        if self._wake_at is not None and self._now >= self._wake_at:
            self._wake_at = None
        if self.phase is not Phase.RUNNING:
            return self._seek_target()
        due = self._retries.stalled_at
        if self._now < due:
            effects = self._place_draft() if self.drafting.due(self._now) else []
            return self._wake(min(due, self.drafting.again_at or due)) + effects + self._seek_migration_target()
        return self._stall()

    def _stall(self) -> list[Effect]:
        """The target has said nothing for too long: perhaps it computes a long prompt, but not twice in a row."""
        assert self._target is not None
        if failure := self._retries.silence():
            return self._end(failure)
        self.reopened += 1
        again = self._retries.stalls > 1
        return self._move_target(self._target.peer) if again else self._place_target()

    def _wake(self, at: float) -> list[Effect]:
        """Ask for a tick, unless one that comes no later is under way."""
        if self._wake_at is not None and self._wake_at <= at:
            return []
        self._wake_at = at
        return [Wake(at)]

    def _end(self, ending: Finish | Fail) -> list[Effect]:
        effects = self._close_all()
        self._state = SessionState.ENDED
        return [*effects, ending]

    def _close_all(self) -> list[Effect]:
        effects = (
            closed(self.session, self._target) + closed(self.session, self._migration_target) + self.drafting.close()
        )
        self._target = self._migration_target = None
        return effects
