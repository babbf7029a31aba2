"""What an EAGLE-3 head away from here is sent: the states that it reads, of every token that is committed.

They are fused here in every step, and kept of the last :data:`KEPT` tokens of each session (docs/adr/0023). A router
that has joined the session to a drafter with this very head subscribes: then what is kept is sent, and what each step
brings, right behind its verification. So a drafter that comes late, or after another one, gets as much as one that was
there before the prompt was computed. A session that is taken over from another target has what this one computes of it.

Tensor legend: N rows, D hidden size of the head.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.eagle.cached import packed
from engine.eagle.head import EagleHead
from engine.interface import FATAL, Chunk, StepEngine
from speculation.messages import FeatureFormat, Features, Subscribe
from target_service.drafting.state_reader import StateReader, fused_states, kept_rows
from target_service.sequence import BatchEntry, TargetSequence
from target_service.step_account import TargetCounters
from target_service.verdicts import Verdict
from transport.codec_parts import MAX_FEATURE_BYTES
from transport.worker import Outgoing

log = logging.getLogger(__name__)

KEPT = 256
"""Tokens of a session whose features are kept, and sent to a drafter that comes: 2 MiB of 4096 numbers in bf16."""
SENT_AT_ONCE = 64
"""Tokens in a message, or fewer of a wide head: a peer reads no more than :data:`.MAX_FEATURE_BYTES` of values."""


@dataclass(slots=True, eq=False)
class _SentSession:
    """What is known of a session's features."""

    subscribed: Subscribe | None = None
    kept: deque[Tensor] = field(default_factory=lambda: deque(maxlen=KEPT))
    """``[D]`` each, of tokens that follow each other."""
    end: int = 0


class FeatureSender(StateReader):
    """For all sessions of a worker."""

    def __init__(self, head: EagleHead, counters: TargetCounters) -> None:
        """Of the head only what fuses states is used."""
        self._head, self._fingerprint, self._counters = head, head.fingerprint, counters
        self._sessions: dict[TargetSequence, _SentSession] = {}
        self._outgoing: Outgoing = []
        self._failed = 0
        """How often states could not be fused or packed."""

    def subscribe(self, sequence: TargetSequence | None, message: Subscribe) -> Outgoing:
        """Send a session's features from now on, or no more; what is sent at once."""
        if sequence is None or message.epoch != sequence.session.opened.epoch:
            self._counters.features_refused += 1
            return []
        session = self._sessions.setdefault(sequence, _SentSession())
        session.subscribed = message if message.head == self._fingerprint else None
        self._counters.features_refused += message.head not in (0, self._fingerprint)
        if session.subscribed is None or not session.kept:
            return []
        with self._spared():
            self._send(message.format, [(sequence, session.end - len(session.kept), torch.stack(list(session.kept)))])
        return self.features()

    def features(self) -> Outgoing:
        """What is to be sent of the last step."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def draft(self, *_: Sequence[TargetSequence]) -> bool:
        """Nothing: what is drafted elsewhere comes as proposals."""
        return True

    @torch.inference_mode()
    def note(
        self, engine: StepEngine, chunks: Sequence[Chunk], entries: Sequence[BatchEntry], decided: Sequence[Verdict]
    ) -> None:
        """Fuse the states of what stays of the step just computed."""
        with self._spared():
            self._note(fused_states(self._head, engine, kept_rows(chunks, entries, decided), self._known))

    @contextmanager
    def _spared(self) -> Iterator[None]:
        """A failure in the block costs drafts, never a session."""
        try:
            yield
        except FATAL:
            raise
        except Exception:
            self._failed += 1
            if self._failed.bit_count() == 1:  # the 1st, 2nd, 4th ...
                log.exception("features were not sent %d times", self._failed)

    def _note(self, states: Iterable[tuple[TargetSequence, int, Tensor]]) -> None:
        """Keep, and send who wants them, states of sessions from a position on."""
        wanted: defaultdict[FeatureFormat, list[tuple[TargetSequence, int, Tensor]]] = defaultdict(list)
        for sequence, first, part_ND in states:
            session, position = self._sessions[sequence], first + 1  # of the token that was drawn from the first state
            if position != session.end:
                session.kept.clear()
            session.kept.extend(part_ND)
            session.end = position + len(part_ND)
            if session.subscribed is not None:
                wanted[session.subscribed.format].append((sequence, position, part_ND))
        for how, parts in wanted.items():
            self._send(how, parts)

    def _known(self, sequence: TargetSequence, count: int) -> int | None:
        """How many of the first of ``count`` states to come are not kept; None: none is."""
        if not sequence.session.opened.speculation.enabled:
            return None
        session = self._sessions.setdefault(sequence, _SentSession())
        return max(session.end - 1 - sequence.cached.length, count - KEPT, 0)

    def _send(self, how: FeatureFormat, parts: Sequence[tuple[TargetSequence, int, Tensor]]) -> None:
        """Send the features of sessions, each from a position on, which are rounded and fetched together."""
        states_ND = torch.cat([part_ND for *_, part_ND in parts])
        values, scales = packed(states_ND, how)
        (count, width), first = states_ND.shape, 0
        value_bytes, scale_bytes = len(values) // count, len(scales) // count  # of a row
        at_once = max(1, min(SENT_AT_ONCE, MAX_FEATURE_BYTES // value_bytes))
        for sequence, position, part_ND in parts:
            opened, end = sequence.session.opened, first + len(part_ND)
            for start in range(first, end, at_once):
                stop, at = min(start + at_once, end), position + start - first
                mine = values[start * value_bytes : stop * value_bytes]
                scaled = scales[start * scale_bytes : stop * scale_bytes]
                message = Features(opened.session, opened.epoch, at, self._fingerprint, width, mine, how, scaled)
                self._outgoing.append((sequence.link, message))
            first = end
        self._counters.features += count

    def drop(self, sequence: TargetSequence) -> None:
        """A session has ended."""
        if self._sessions.pop(sequence, None) is not None:
            about = sequence.link, sequence.session.opened.session
            self._outgoing = [sent for sent in self._outgoing if (sent[0], getattr(sent[1], "session", 0)) != about]

    def validate(self) -> None:
        """Raise AssertionError where its books contradict each other."""
        assert not self._outgoing, "features of a step were not sent"
