"""The coordinator's HTTP front: loopback or a private address, a token on every call, JSON and raw bytes.

    POST /call       workers and trainer (engine/rollout/wire.py frames)
    POST /capacity   the launcher's snapshot (engine/events.py, JSON)
    POST /stop       {"reason": ...}
    GET  /health     who is here

Answers leave only after the journal is durable; callers that arrive while one fsync runs share the next.
"""

import asyncio
import contextlib
import hmac
import json
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from engine.events import Capacity
from engine.rollout.wire import pack, unpack
from engine.runtime.coordinator import Coordinator, is_nothing

TICK_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 2.0


class CoordinatorServer:
    """Serves one coordinator. All state is touched from the event loop's thread only."""

    def __init__(self, coordinator: Coordinator, token: str) -> None:
        self._coordinator = coordinator
        self._token = token
        self._changed = asyncio.Event()
        self._seen_changes = 0
        self._sync_lock = asyncio.Lock()
        self._durable = 0
        routes = [
            Route("/call", self._call, methods=["POST"]),
            Route("/capacity", self._capacity, methods=["POST"]),
            Route("/stop", self._stop, methods=["POST"]),
            Route("/health", self._health),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    async def serve(self, listener: socket.socket) -> None:
        config = uvicorn.Config(self.app, log_level="warning", access_log=False, timeout_keep_alive=120, ws="none")
        await uvicorn.Server(config).serve(sockets=[listener])

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        ticking = asyncio.create_task(self._tick())
        yield
        ticking.cancel()

    async def _tick(self) -> None:
        while True:
            try:
                self._coordinator.tick()
            except OSError as error:
                # A full disk under the progress file: leases must expire all the same; the next tick tries again.
                print(f"the coordinator's disk: {error}", flush=True)
            self._wake()
            await asyncio.sleep(TICK_SECONDS)

    def _wake(self) -> None:
        if self._coordinator.changes != self._seen_changes:
            self._seen_changes = self._coordinator.changes
            self._changed.set()
            self._changed = asyncio.Event()

    async def _sync(self) -> None:
        wanted = self._coordinator.journal.position()
        async with self._sync_lock:
            if self._durable < wanted:
                reached = self._coordinator.journal.position()
                await asyncio.to_thread(self._coordinator.journal.sync)
                self._durable = reached

    def _refuse(self, request: Request) -> Response | None:
        given = request.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return None
        return PlainTextResponse("wrong token", status_code=401)

    async def _call(self, request: Request) -> Response:
        if refused := self._refuse(request):
            return refused
        loop = asyncio.get_running_loop()
        try:
            head, blobs = unpack(await request.body())
            until = loop.time() + min(head.pop("wait_ms", 0) / 1000, LONGEST_WAIT_SECONDS)
            while True:
                changed = self._changed
                answer, answer_blobs = self._coordinator.call(head, blobs)
                head.pop("usage", None)  # counted once, however long the caller is kept
                self._wake()
                left = until - loop.time()
                if not is_nothing(answer) or left <= 0:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), left)
            await self._sync()
        except (ValueError, KeyError) as error:
            return PlainTextResponse(f"{type(error).__name__}: {error}", status_code=400)
        except OSError as error:
            return PlainTextResponse(f"the coordinator's disk: {error}", status_code=507)
        return Response(pack(answer, answer_blobs), media_type="application/octet-stream")

    async def _capacity(self, request: Request) -> Response:
        if refused := self._refuse(request):
            return refused
        try:
            self._coordinator.set_capacity(Capacity.from_json((await request.body()).decode()))
        except ValueError as error:
            return PlainTextResponse(str(error), status_code=400)
        self._wake()
        return JSONResponse({"ok": True})

    async def _stop(self, request: Request) -> Response:
        if refused := self._refuse(request):
            return refused
        try:
            order = json.loads(await request.body() or b"{}")
            reason = str(order.get("reason", "stopped"))
        except (ValueError, AttributeError) as error:
            return PlainTextResponse(f"not a stop order: {error}", status_code=400)
        self._coordinator.stop(reason)
        self._wake()
        return JSONResponse({"ok": True})

    async def _health(self, request: Request) -> Response:
        return self._refuse(request) or JSONResponse({"lineage": self._coordinator.lineage})
