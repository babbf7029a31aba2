"""What a session is: its request, its text, where it is open, and what it has counted.

Others read it here; only :class:`speculation.request.session.Session` changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from speculation import digest as digests
from speculation.events import Emit, PeerId, StepMetadata
from speculation.messages import Limits, Open, RequestOptions, Sampling, SessionId, Speculation, Token, Verification
from speculation.request.drafting import Drafting, Opening
from speculation.request.retry_state import RetryState, SessionLimits
from speculation.request.states import Lifecycle, Phase, SessionState


class CommittedText:
    """All tokens of a session that are decided, the prompt included, and what of a verification is new to it.

    Only what connects is committed: a verification that starts beyond the end, or whose digest is not that of the text
    with its tokens, says of another text. So nothing is ever retracted or doubled.
    """

    def __init__(self, prompt: tuple[Token, ...]) -> None:
        """Nothing was generated yet."""
        assert prompt, "a session has at least one token"
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        self._digest = digests.of(prompt)

    @property
    def begun(self) -> bool:
        """Whether anything was generated."""
        return len(self.tokens) > self.prompt_length

    @property
    def output(self) -> tuple[Token, ...]:
        """Tokens after the prompt."""
        return tuple(self.tokens[self.prompt_length :])

    def has(self, verification: Verification) -> bool:
        """Whether nothing that it says is new."""
        return len(self.tokens) - verification.position >= len(verification.tokens)

    def commit(self, verification: Verification) -> Emit | None:
        """Take over what is new and return what to say of it; None, and nothing is taken, if it does not connect."""
        known = len(self.tokens) - verification.position
        fresh = verification.tokens[max(known, 0) :]
        digest = self._digest
        for token in fresh:
            digest = digests.extend(digest, token)
        if known < 0 or digest != verification.digest:
            return None
        first = not self.begun
        self.tokens.extend(fresh)
        self._digest = digest
        accepted, cached = max(verification.accepted - known, 0), verification.cached if first else 0
        offered = verification.offered - verification.accepted + accepted
        return Emit(fresh, accepted, offered, cached, _metadata_of(verification, known, first=first))

    def validate(self) -> None:
        """Assert that the digest is that of the tokens."""
        assert len(self.tokens) >= self.prompt_length, "a part of the prompt is missing"
        assert self._digest == digests.of(self.tokens), f"the digest is not that of the {len(self.tokens)} tokens"


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


MAX_AGE_MS = (1 << 32) - 1


class Workers(NamedTuple):
    """Where a session is open."""

    target: PeerId | None
    """The one whose word counts, not one that it will move to."""
    draft: PeerId | None


class SessionRecord:
    """What is known of one choice of one request, and nothing of what becomes of it."""

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
        self.session = session
        self.prompt_length = len(prompt)
        self.reopened = 0
        """How often the target side was opened again after a fault: the number of failovers."""
        self.moved = 0
        """How often it was opened elsewhere without one: a target went, or had no room."""
        self.stale = 0
        """Messages dropped because they came too late to matter."""
        self._text = CommittedText(prompt)
        self._tokens = self._text.tokens
        self._sampling, self._limits, self._speculation = sampling, limits, speculation
        self._priority, self._request_options = priority, request_options
        self._bounds = session_limits
        self._life = Lifecycle(session)
        self._epoch = 0
        self._target: Opening | None = None
        self._migration_target: Opening | None = None
        """Opened where the session will move, and not yet prefilled. What it says is not used."""
        self._prefills = 0
        self._drafting = Drafting(session, speculation, session_limits)
        self._lead: int | None = None
        self._draining: frozenset[PeerId] = frozenset()
        self._retries = RetryState(session_limits, session)
        self._wake_at: float | None = None
        self._began = self._now = 0.0

    @property
    def phase(self) -> Phase:
        """Where the session is in its life."""
        return self._life.state.phase

    @property
    def output(self) -> tuple[Token, ...]:
        """Committed tokens after the prompt."""
        return self._text.output

    @property
    def position(self) -> int:
        """How many tokens it has, the prompt included."""
        return len(self._tokens)

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
        return self.phase is Phase.RUNNING and self._drafting.opening is None and self._drafting.wanted

    @property
    def resting(self) -> bool:
        """Whether its target has no use for its drafter at present."""
        return self._drafting.opening is not None and self._lead == 0

    def validate(self) -> None:
        """Raise AssertionError where this contradicts itself."""
        state, target, draft = self._life.state, self._target, self._drafting.opening
        running = self.phase is Phase.RUNNING
        assert running is (target is not None), f"{state.label}, with the target {target}"
        leaving = target is not None and target.peer in self._draining
        moving = state in (SessionState.LEAVING, SessionState.MIGRATING)
        assert leaving is moving, f"{state.label}, while the target {'drains' if leaving else 'stays'}"
        migrating = self._migration_target
        assert (state is SessionState.MIGRATING) is (migrating is not None), (
            f"{state.label}, with {migrating} to move to"
        )
        assert migrating is None or migrating.peer not in self._draining, f"it is to move to {migrating}, which drains"
        assert running or draft is None, f"{state.label}, with the drafter {draft}"
        assert draft is None or draft.peer not in self.quarantined, f"it is done with its drafter {draft}"
        epochs = [opening.epoch for opening in (target, migrating, draft) if opening is not None]
        assert len(set(epochs)) == len(epochs), f"two openings have one epoch: {epochs}"
        assert max(epochs, default=0) <= self._epoch, f"epochs {epochs}, of {self._epoch} that were given out"
        self._text.validate()

    def _at_target(self, peer: PeerId) -> bool:
        return self._target is not None and self._target.peer == peer

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
