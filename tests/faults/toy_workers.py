"""Workers with toy models, for the simulation of faults: the sessions that serve, without engines.

The language model is a hash of the last few tokens; the drafter's differs from the target's as often as it is told to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from speculation import digest as digests
from speculation import noise
from speculation.drafting.draft_session import Candidate, DraftLimits, DraftSession, Sync
from speculation.messages import (
    Close,
    FromWorker,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    SessionId,
    Token,
    ToWorker,
    Verification,
)
from speculation.verifying.target_session import TargetSession

VOCABULARY = 24


def toy_model(context: Sequence[Token], seed: int, position: int, agreement: float | None = None) -> Token:
    """The coupled draw of a toy language model; with ``agreement`` set, that of a drafter that often says the same."""
    state = noise.splitmix64(hash(tuple(context[-3:])) & noise.MASK64)
    token = noise.bits(noise.key(seed ^ state, position), 0) % VOCABULARY
    if agreement is not None and noise.uniform(noise.bits(noise.key(state, position), 1)) > agreement:
        return (token + 1) % VOCABULARY
    return token


def target_only(prompt: Sequence[Token], seed: int, end: int, revision: int = 0) -> tuple[Token, ...]:
    """What the session must produce: the target alone, one token after another."""
    tokens = list(prompt)
    while len(tokens) < end:
        tokens.append(toy_model(tokens, seed + revision, len(tokens)))
    return tuple(tokens[len(prompt) :])


class ToyTargetWorker:
    """A target, as far as one router uses it: verifies every open session once a step."""

    step_seconds = 0.02

    def __init__(self, capacity: int = 1 << 30, revision: int = 0) -> None:
        """``capacity``: sessions at once; more are refused. Each ``revision`` of the model says something else."""
        self.capacity, self.revision = capacity, revision
        self.sessions: dict[SessionId, TargetSession] = {}

    def receive(self, message: ToWorker) -> list[FromWorker]:
        """Take one message."""
        session = self.sessions.get(message.session)
        match message:
            case Open() if session is None and len(self.sessions) >= self.capacity:
                return [Refused(message.session, message.epoch, RefusalCode.OVERLOADED)]
            case Open():
                if session is None or session.opened.epoch < message.epoch:
                    self.sessions[message.session] = TargetSession(message, vocabulary=VOCABULARY)
            case Proposal() if session is not None:
                session.propose(message)
            case Close() if session is not None and session.opened.epoch <= message.epoch:
                del self.sessions[message.session]
        return []

    def give_up(self, session: SessionId) -> FromWorker:
        """A session cannot be computed."""
        epoch = self.sessions.pop(session).opened.epoch
        return Refused(session, epoch, RefusalCode.INTERNAL, "this cannot be computed")

    def step(self) -> list[FromWorker] | None:
        """One forward over all sessions; None if there is nothing to do."""
        if not self.sessions:
            return None
        sent: list[FromWorker] = []
        for session in list(self.sessions.values()):
            tree = session.begin_verification(session.candidates(8))
            contexts = [list(session.tokens)]
            for node in tree.nodes:
                path = [above.token for above in node.path_from(session.trie.root)]
                contexts.append([*session.tokens, *path])
            seed = session.opened.sampling.seed
            drawn = [toy_model(context, seed + self.revision, len(context)) for context in contexts]
            sent.append(session.commit(drawn).verification)
            if session.finished:
                del self.sessions[session.opened.session]
        return sent


class ToyDraftWorker:
    """A drafter, as far as one router uses it: expands two places of every session a step."""

    step_seconds = 0.008

    def __init__(self, agreement: float) -> None:
        self.agreement = agreement
        self.sessions: dict[SessionId, DraftSession] = {}

    def receive(self, message: ToWorker) -> list[FromWorker]:
        """Take one message."""
        session = self.sessions.get(message.session)
        match message:
            case Open():
                if session is None or session.opened.epoch < message.epoch:
                    self.sessions[message.session] = DraftSession(
                        message, vocabulary=VOCABULARY, limits=DraftLimits(lead=8)
                    )
            case Verification() if session is not None:
                return self._verified(session, message)
            case Verification():
                return [Refused(message.session, message.epoch, RefusalCode.UNKNOWN_SESSION)]
            case Close() if session is not None and session.opened.epoch <= message.epoch:
                del self.sessions[message.session]
        return []

    def _verified(self, session: DraftSession, message: Verification) -> list[FromWorker]:
        match session.verified(message):
            case Sync.LOST:
                del self.sessions[message.session]
                return [Refused(message.session, message.epoch, RefusalCode.UNKNOWN_SESSION)]
            case Sync.FINISHED:
                del self.sessions[message.session]
        return []

    def step(self) -> list[FromWorker] | None:
        """One forward over all sessions; None if there is nothing to do."""
        sent: list[FromWorker] = []
        idle = True
        for session in self.sessions.values():
            seed = session.opened.sampling.seed
            for node in session.frontier()[:2]:
                idle = False
                context = [*session.tokens, *(above.token for above in node.path_from(session.trie.root))]
                first = toy_model(context, seed, len(context), self.agreement)
                others = [Candidate((first + step) % VOCABULARY, 0.1) for step in (VOCABULARY - 1, 1)]
                session.expand(node, [Candidate(first, 0.8), *others])
            sent += session.pushes()
        return None if idle and not sent else sent


class LyingDraftWorker(ToyDraftWorker):
    """A drafter that also says what only targets say, as if it were its session's target or ahead of it, or nothing."""

    def __init__(self, agreement: float) -> None:
        super().__init__(agreement)
        self._lies = 0

    def step(self) -> list[FromWorker] | None:
        """One forward over all sessions, and a lie about each; None if there is nothing to do."""
        sent = super().step()
        return None if sent is None else sent + [self._lie(session) for session in self.sessions.values()]

    def _lie(self, session: DraftSession) -> FromWorker:
        opened, end, digest = session.opened, session.trie.position, session.trie.digest
        self._lies += 1
        lie = Verification(opened.session, opened.epoch, end, (0,), digests.extend(digest, 0), accepted=0, offered=0)
        match self._lies % 4:
            case 0:
                return lie
            case 3:
                return Proposal(opened.session, opened.epoch, end, digest, (), ())
            case 1:
                return replace(lie, epoch=opened.epoch - 1)  # mostly the target's
            case _:
                return replace(lie, position=end + 10**6)
