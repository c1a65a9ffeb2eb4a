"""Serve the coordinator: long polling, durable answers and wake-ups, and HTTP over all three.

Every carrier uses `Front` (HTTP here, Ray in ray_coordinator.py). Answers leave only after the journal is durable.
Callers that arrive during an fsync share the next fsync. `CoordinatorServer` speaks HTTP on loopback or a private
address, with the token of a role on every call (engine/coordinator/rights.py), JSON and raw bytes:

    POST /call       workers and trainer (engine/protocol/codec.py frames)
    GET  /weights    ?version=&average=&digest=, with a Range: a part of published weights; 404 if they are replaced
    GET  /presence   ?worker=&node=&boot=: open while the worker lives; its end reports the worker's death
    POST /capacity   the launcher's snapshot (engine/events.py, JSON)
    POST /stop       {"reason": ...}
    GET  /health     lineage, and the disk's trouble if any
    GET  /ray        {"address": ...} of this run's Ray cluster; 404 without a cluster
    GET  /ranks      ?number=&generation=: where the trainer's ranks meet; a sign of life of a node (rank_nodes.py)
    POST /ranks      ?node=&rank=&of=: times of a rank on a further node of the trainer, [[phase, begin, end], ...]
    POST /ship       ?node=&file=&offset=: a piece of a spot node's log; {"offset": ...}: bytes of the file received

A body may have as many bytes as a call of this job (bodies.py). A larger one gets 413, and JSON that is nested too
deeply gets 400. A full disk gets the answer 507: the caller repeats the call until the disk has room. A disk that fails
to *keep* written data ends this process. Memory would be ahead of the journal, and the next process starts from the
journal.
"""

import asyncio
import contextlib
import json
import os
import socket
import time
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.coordinator.bodies import LEAST_CALL_BYTES, SMALL_BYTES, BodyTooLarge, body_of
from engine.coordinator.coordinator import Answered, Coordinator
from engine.coordinator.rank_nodes import RankNodes
from engine.coordinator.rights import NotAllowed, Rights, WrongToken
from engine.coordinator.weights_part import WeightsPart
from engine.events import Capacity, Phase
from engine.protocol.codec import Blobs, decode_call, encode, pack, unpack
from engine.protocol.messages import Call, WorkerDied, has_news, without_usage
from engine.protocol.request import WeightsKey
from engine.storage.ship import PIECE_BYTES, keep_piece

TICK_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 2.0
BIND_SECONDS = 20.0
"""Seconds a coordinator waits for its port, because the previous coordinator may still be ending."""

PULSE_SECONDS = 5.0
"""Interval of bytes on a presence connection, so no device on the way drops the connection as idle."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket on the coordinator's port. Raises OSError if another process keeps the port."""
    until = time.monotonic() + BIND_SECONDS
    while True:
        # With the protocol named, asyncio turns off Nagle's algorithm. Otherwise every answer takes 40 ms.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            return listener
        except OSError:
            listener.close()
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def end_process(reason: str) -> None:
    """End this process without acknowledging anything more, because its memory is not trusted.

    The next process reads the journal.
    """
    print(f"the coordinator ends itself: {reason}", flush=True)
    os._exit(1)


class Front:
    """Call handler of one coordinator. Only the thread of one event loop touches the state."""

    def __init__(self, coordinator: Coordinator, *, end: Callable[[str], None] = end_process) -> None:
        self.coordinator = coordinator
        self._end = end
        self._changed = asyncio.Event()
        self._last_changes = 0
        self._sync_lock = asyncio.Lock()
        self._durable = 0
        self._call_trouble: str | None = None
        self._tick_trouble: str | None = None

    @property
    def trouble(self) -> str | None:
        """Return the reason why the run stands still (a full disk), in words, or None."""
        return self._call_trouble or self._tick_trouble

    async def answer(self, call: Call, blobs: Blobs) -> Answered:
        """Answer one call. Raises KeyError if a blob is missing, OSError if the disk is full."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(call.wait_ms / 1000, LONGEST_WAIT_SECONDS)
        while True:
            changed = self._changed
            try:
                answer, answer_blobs = self.coordinator.handle(call, blobs)
            except OSError as error:
                self._call_trouble = f"the coordinator's disk: {error}"
                raise
            call = without_usage(call)  # count usage once, however long the caller waits
            self.wake()
            seconds_left = until - loop.time()
            if has_news(answer) or seconds_left <= 0:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), seconds_left)
        await self._sync()
        return answer, answer_blobs

    async def keep_ticking(self) -> None:
        """Tick for ever, with or without calls: leases expire and events reach the launcher."""
        while True:
            try:
                self.coordinator.tick()
                self._tick_trouble = None
            except OSError as error:
                # The disk of the progress file is full. Leases must still expire; the next tick tries again.
                if self._tick_trouble is None:
                    print(f"the coordinator's disk: {error}", flush=True)
                self._tick_trouble = f"the coordinator's disk: {error}"
            except Exception as error:
                traceback.print_exc()
                self._end(f"leases would never expire again: {error!r}")
                raise
            self.wake()
            await asyncio.sleep(TICK_SECONDS)

    def wake(self) -> None:
        """Let waiting callers repeat their calls if anything changed."""
        if self.coordinator.changes != self._last_changes:
            self._last_changes = self.coordinator.changes
            self._changed.set()
            self._changed = asyncio.Event()

    async def _sync(self) -> None:
        position = self.coordinator.journal.position()
        async with self._sync_lock:
            if self._durable < position:
                reached = self.coordinator.journal.position()
                try:
                    await asyncio.to_thread(self.coordinator.journal.sync)
                except OSError as error:
                    self._end(f"the journal is not durable: {error}")
                    raise
                self._durable = reached
                self._call_trouble = None


async def _left(_request: Request, _error: Exception) -> Response:
    """Answer a caller that disconnected during its own call, such as a killed worker. The answer avoids a traceback."""
    return Response(status_code=499)


async def _too_large(_request: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), status_code=413)


async def _too_deep(_request: Request, _error: Exception) -> Response:
    return PlainTextResponse("the JSON of this call is nested too deeply", status_code=400)


class CoordinatorServer:
    """HTTP server for a front. `ray_address`: address of this run's Ray cluster, or None.

    `shipped`: folder of the other nodes' logs; None keeps no logs. `ranks`: the trainer's further nodes, if it may have
    any.
    """

    def __init__(
        self,
        front: Front,
        rights: Rights,
        *,
        shipped: Path | None = None,
        ray_address: str | None = None,
        ranks: RankNodes | None = None,
        most_bytes: int = LEAST_CALL_BYTES,
    ) -> None:
        """`most_bytes`: of the body of a call."""
        self._front = front
        self._most_bytes = most_bytes
        self._rights = rights
        self._shipped = shipped
        self._shipping = asyncio.Lock()
        self._ray_address = ray_address
        self._ranks = ranks
        routes = [
            Route("/call", self._call, methods=["POST"]),
            Route("/weights", self._weights),
            Route("/presence", self._presence),
            Route("/capacity", self._capacity, methods=["POST"]),
            Route("/stop", self._stop, methods=["POST"]),
            Route("/health", self._health),
            Route("/ray", self._ray),
            Route("/ranks", self._meeting),
            Route("/ranks", self._rank_worked, methods=["POST"]),
            Route("/ship", self._ship, methods=["POST"]),
        ]
        handlers = {ClientDisconnect: _left, BodyTooLarge: _too_large, RecursionError: _too_deep}
        self.app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers)

    async def serve(self, listener: socket.socket) -> None:
        config = uvicorn.Config(self.app, log_level="warning", access_log=False, timeout_keep_alive=120, ws="none")
        await uvicorn.Server(config).serve(sockets=[listener])

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        ticking = asyncio.create_task(self._front.keep_ticking())
        yield
        ticking.cancel()

    def _refuse(self, request: Request) -> Response | None:
        try:
            self._rights.check(_token_of(request), request.url.path)
        except WrongToken as error:
            return PlainTextResponse(str(error), status_code=401)
        except NotAllowed as error:
            return PlainTextResponse(str(error), status_code=403)
        return None

    async def _call(self, request: Request) -> Response:
        if refused := self._refuse(request):
            return refused
        try:
            head, sent = unpack(await body_of(request, self._most_bytes))
            self._rights.check_call(_token_of(request), head)
            answer, blobs = await self._front.answer(decode_call(head), sent)
        except NotAllowed as error:
            return PlainTextResponse(str(error), status_code=403)
        except (ValueError, KeyError) as error:
            return PlainTextResponse(f"{type(error).__name__}: {error}", status_code=400)
        except OSError as error:
            return PlainTextResponse(f"the coordinator's disk: {error}", status_code=507)
        return Response(pack(encode(answer), blobs), media_type="application/octet-stream")

    async def _weights(self, request: Request) -> Response:
        if refused := self._refuse(request):
            return refused
        try:
            query = request.query_params
            weights = WeightsKey(version=int(query["version"]), average=query["average"] == "1")
            file = self._front.coordinator.weights_file(weights, query["digest"])
            return WeightsPart(file, request.headers.get("range", ""))
        except (FileNotFoundError, KeyError) as error:
            return PlainTextResponse(f"{type(error).__name__}: {error}", status_code=404)
        except ValueError as error:
            return PlainTextResponse(f"{type(error).__name__}: {error}", status_code=400)

    async def _presence(self, request: Request) -> Response:
        if refused := self._refuse(request):
            return refused
        try:
            query = request.query_params
            died = WorkerDied(
                worker=query["worker"], node=query["node"], boot=int(query["boot"]), reason="its connection closed"
            )
        except (KeyError, ValueError) as error:
            return PlainTextResponse(f"{type(error).__name__}: {error}", status_code=400)
        return _Presence(self._front, died)

    async def _capacity(self, request: Request) -> Response:
        if refused := self._refuse(request):
            return refused
        try:
            self._front.coordinator.set_capacity(Capacity.from_json((await body_of(request, SMALL_BYTES)).decode()))
        except ValueError as error:
            return PlainTextResponse(str(error), status_code=400)
        except OSError as error:
            return PlainTextResponse(f"the coordinator's disk: {error}", status_code=507)
        self._front.wake()
        return JSONResponse({"ok": True, "trouble": self._front.trouble})

    async def _stop(self, request: Request) -> Response:
        if refused := self._refuse(request):
            return refused
        try:
            order = json.loads(await body_of(request, SMALL_BYTES) or b"{}")
            reason = str(order.get("reason", "stopped"))
        except (ValueError, AttributeError) as error:
            return PlainTextResponse(f"not a stop order: {error}", status_code=400)
        self._front.coordinator.stop(reason)
        self._front.wake()
        return JSONResponse({"ok": True})

    async def _health(self, request: Request) -> Response:
        health = {"lineage": self._front.coordinator.lineage, "trouble": self._front.trouble}
        return self._refuse(request) or JSONResponse(health)

    async def _ray(self, request: Request) -> Response:
        if refused := self._refuse(request):
            return refused
        if self._ray_address is None:
            return PlainTextResponse("this run has no Ray cluster", status_code=404)
        return JSONResponse({"address": self._ray_address})

    async def _meeting(self, request: Request) -> Response:
        if refused := self._refuse(request):
            return refused
        if self._ranks is None:
            return PlainTextResponse("no ranks of other nodes meet here", status_code=404)
        live = self._front.coordinator.queue.weights.live
        iteration = 0 if live is None else live.version
        if self._rights.check(_token_of(request), "/ranks") == "trainer":
            return Response(msgspec.json.encode(self._ranks.found(iteration)), media_type="application/json")
        try:
            number, generation = int(request.query_params["number"]), int(request.query_params["generation"])
        except (KeyError, ValueError) as error:
            return PlainTextResponse(f"{type(error).__name__}: {error}", status_code=400)
        answer = self._ranks.answer(number, generation, iteration)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def _rank_worked(self, request: Request) -> Response:
        if refused := self._refuse(request):
            return refused
        query = request.query_params
        try:
            spans = msgspec.json.decode(await body_of(request, SMALL_BYTES), type=list[tuple[Phase, float, float]])
            node, worker, of = query["node"], f"trainer-rank-{int(query['rank'])}", int(query["of"])
            self._front.coordinator.add_usage(node, f"{node}/{worker}", spans, max(1, of))
        except (KeyError, ValueError) as error:
            return PlainTextResponse(f"{type(error).__name__}: {error}", status_code=400)
        except OSError as error:
            return PlainTextResponse(f"the coordinator's disk: {error}", status_code=507)
        return JSONResponse({"ok": True})

    async def _ship(self, request: Request) -> Response:
        if refused := self._refuse(request):
            return refused
        if self._shipped is None:
            return PlainTextResponse("no logs are kept here", status_code=404)
        try:
            query, piece = request.query_params, await body_of(request, PIECE_BYTES)
            async with self._shipping:  # an agent and its successor may send pieces at the same time
                size = await asyncio.to_thread(
                    keep_piece, self._shipped, query["node"], query["file"], int(query["offset"]), piece
                )
        except (ValueError, KeyError) as error:
            return PlainTextResponse(f"{type(error).__name__}: {error}", status_code=400)
        except OSError as error:
            return PlainTextResponse(f"the coordinator's disk: {error}", status_code=507)
        return JSONResponse({"offset": size})


def _token_of(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


class _Presence(Response):
    """Response held open while the worker lives.

    The kernel closes a killed process's connection, whatever killed the process.
    """

    def __init__(self, front: Front, died: WorkerDied) -> None:
        super().__init__()
        self._front, self._died = front, died

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/octet-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while True:
                await send({"type": "http.response.body", "body": b".", "more_body": True})
                if await self._is_gone(receive):
                    return
        finally:
            await self._front.answer(self._died, {})

    async def _is_gone(self, receive: Receive) -> bool:
        try:
            async with asyncio.timeout(PULSE_SECONDS):
                while (await receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            return False
        return True
