"""The two workers of a session, joined: what one says of it is passed on to the other at once.

And the target is told whether the drafter it is joined to has an EAGLE head, for which it then sends features. Each of
these tells that; no drafter can ask for features of a session that is not open at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from speculation.messages import SessionId, Subscribe, Welcome
from transport.client import WorkerConnection
from transport.incoming import Route


class JoinedEnd(NamedTuple):
    """A session as it is open at one worker."""

    connection: WorkerConnection
    epoch: int
    welcome: Welcome | None

    @property
    def head(self) -> int:
        """Fingerprint of the EAGLE head there; 0: none."""
        return self.welcome.head if self.welcome is not None else 0


class _Pair(NamedTuple):
    target: JoinedEnd | None
    draft: JoinedEnd | None

    @property
    def subscribes(self) -> bool:
        """Whether features are wanted."""
        return self.target is not None and self.draft is not None and self.draft.head != 0


@dataclass(slots=True)
class JoinedWorkers:
    """Of all sessions of a router."""

    _pairs: dict[SessionId, _Pair] = field(default_factory=dict)

    def join(
        self, session: SessionId, target: JoinedEnd | None, draft: JoinedEnd | None
    ) -> Iterator[tuple[WorkerConnection, Subscribe]]:
        """From now on, have what these two say passed on to each other, and nobody else's word.

        What has to be said to targets for that.
        """
        before, pair = self._pairs.pop(session, _Pair(None, None)), _Pair(target, draft)
        for end in before:
            if end is not None:
                end.connection.routes.pop(session, None)
        if target is not None or draft is not None:
            self._pairs[session] = pair
        if target is not None and draft is not None:
            target.connection.routes[session] = Route(target.epoch, draft.connection, draft.epoch)
            draft.connection.routes[session] = Route(draft.epoch, target.connection, target.epoch)
        if pair == before or target is None:
            return
        if pair.subscribes and draft is not None and draft.welcome is not None:
            # For another drafter too: what the target has kept of the text is sent again.
            yield target.connection, Subscribe(session, target.epoch, draft.head, draft.welcome.features)
        elif before.subscribes and before.target == target:
            yield target.connection, Subscribe(session, target.epoch, 0)
