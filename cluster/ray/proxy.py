"""What Serve's HTTP proxies answer while no router can: 503 with Retry-After and OpenAI's error object.

Left alone, a proxy ends a request whose router died before it answered with a bare 500, and holds a new one until some
router runs again, however long that takes. Serve lets in at two places whoever wants it otherwise: middleware round
each proxy (:data:`cluster.ray.parts.PROXY_SETTINGS`), and the class that chooses a replica for each request, which
knows whether there are any. Both work in the proxy's process, and talk to each other through this module. Where
HAProxy stands before the routers, ``haproxy.sh`` beside this has it say the same.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakSet

from ray.serve.request_router import FIFOMixin, LocalityMixin, PendingRequest, RequestRouter, RunningReplica
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import Response

from router.answers.responses import encode, error_body
from router.errors import CODES, ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

WAIT_SECONDS = 2.0
"""How long a request waits for a router where none runs: one that is replaced leaves no gap."""
RETRY_SECONDS = 5
"""After which a client shall ask again: a router starts in about as long."""
UNAVAILABLE = error_body(ApiError("unavailable", "no router runs now; try again soon"))
HEADERS = {"retry-after": str(RETRY_SECONDS), "x-should-retry": "true"}
REQUEST_ID = "x-request-id"
OWN_PATHS = "/-/"
"""What the proxy itself answers, without a router."""

_choices: WeakSet[RouterChoice] = WeakSet()
_unrouted: dict[str, list[_Request]] = {}
"""By id, the requests that no router has taken yet, in order of coming: clients may give several the same."""


class RouterChoice(FIFOMixin, LocalityMixin, RequestRouter):
    """Serve's choice of a router, in order of coming, which tells what it knows of them."""

    def initialize_state(self, **_settings: object) -> None:
        """Serve's call once it is made."""
        _choices.add(self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Serve's call: any two, of which it takes the one with the shorter queue; it asks again if both are full."""
        near = self.apply_locality_routing(pending_request=pending_request)
        routers = [router for router in candidate_replicas if router.replica_id in near]
        return [random.sample(routers, min(len(routers), 2))] if routers else []

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Serve's call when a replica has taken a request."""
        super().on_request_routed(pending_request, replica_id, result)
        for request in _unrouted.get(pending_request.metadata.request_id, ())[:1]:  # Serve goes by order of coming
            request.leave()


def middleware() -> list[Middleware]:
    """What Serve puts round each of its proxies."""
    return [Middleware(RouterWatch)]


class RouterWatch:
    """Answers what Serve leaves without an answer, and what no router takes in :data:`WAIT_SECONDS`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"].startswith(OWN_PATHS):
            await self._app(scope, receive, send)
            return
        name = Headers(scope=scope).get(REQUEST_ID, "")
        if not name:  # Serve would give it one behind this, and takes what there is
            name = str(uuid4())
            scope = dict(scope) | {"headers": [*scope["headers"], (REQUEST_ID.encode(), name.encode())]}
        request = _Request(name, receive, send)
        _unrouted.setdefault(name, []).append(request)
        request.watch()
        try:
            await self._app(scope, request.receive, request.send)
        finally:
            request.end()
        if not request.answered:
            await Response(encode(UNAVAILABLE), 503, HEADERS, "application/json")(scope, receive, send)


class _Request:
    def __init__(self, name: str, receive: Receive, send: Send) -> None:
        self.name, self.answered = name, False
        self._receive, self._send = receive, send
        self._hopeless = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Look whether a router has taken it, or may."""
        self._timer = asyncio.get_running_loop().call_later(WAIT_SECONDS, self._look)

    def _look(self) -> None:
        if self.answered or self not in _unrouted.get(self.name, ()) or not _choices:
            return
        if any(choice.curr_replicas for choice in _choices):
            self.watch()
        else:
            self._hopeless.set()

    async def receive(self) -> Message:
        """What the client sends; that it has gone, once no router can be had: Serve then gives the request up."""
        coming = asyncio.ensure_future(self._receive())
        hopeless = asyncio.ensure_future(self._hopeless.wait())
        try:
            await asyncio.wait({coming, hopeless}, return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if hopeless.done() else coming.result()
        finally:
            coming.cancel()
            hopeless.cancel()

    async def send(self, message: Message) -> None:
        """What is answered, but for Serve's own words for a deployment that cannot serve."""
        if message["type"] == "http.response.start":
            plain = not Headers(raw=message["headers"]).get("content-type", "").startswith("application/json")
            if message["status"] == CODES["unavailable"].status and plain:
                return
            self.answered = True
        if self.answered:
            await self._send(message)

    def leave(self) -> None:
        """A router has taken it, or it is over."""
        waiting = _unrouted.get(self.name, [])
        if self in waiting:
            waiting.remove(self)
        if not waiting:
            _unrouted.pop(self.name, None)

    def end(self) -> None:
        """It is over."""
        self.leave()
        if self._timer is not None:
            self._timer.cancel()
