"""The web server of `spotrl ui`: pages and JSON over the ledger, on loopback, for one user.

browser -> guard (host, origin, token) -> reader (read-only ledger) -> JSON, or server-sent events

A read takes a connection of its own and closes it. The only change that a request can make is the stop of a run, which
goes through the run's controller like `spotrl down`.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launcher.exit_codes import Failure
from launcher.harmless import harmless
from launcher.ledger.store import Stamp, find_run, stamp_of
from launcher.report.comparison import compare_runs
from launcher.report.comparison_html import GroupForm, render_comparison
from launcher.runs.event_lines import Seen
from launcher.runs.run_list import COUNT, newest_of_all, run_list, run_row
from launcher.runs.views import log_title, node_logs
from launcher.storage.stores import read_object, run_stores
from launcher.web.guard import FROZEN, HEADERS, is_token, refusal
from launcher.web.market import pool_rows
from launcher.web.page import list_page, list_part, notice_page, prices_page, run_shell, simulations_page
from launcher.web.reader import events_after, run_page, run_state, sheet_path
from launcher.web.simulations import simulations

STATIC = {
    "app.css": "text/css",
    "app.js": "text/javascript",
    "charts.js": "text/javascript",
    "dom.js": "text/javascript",
    "list.js": "text/javascript",
    "run.js": "text/javascript",
    "server.js": "text/javascript",
}
"""Files of the page, with their types. They hold no data of the user, so they need no token."""

LOOK_SECONDS = 0.25
"""Seconds between two looks at the ledger for new events: an event is on the page within a second."""

UNREAD_SECONDS = 0.75
"""Longest time without a read of the ledger, although its files look unchanged: their times are coarse, so a change in
the same few milliseconds as the last read may not show."""

ALIVE_SECONDS = 15.0
"""Seconds of silence after which a stream sends a comment, so that both ends notice a broken connection."""

STREAMS = 32
"""Most open streams. A browser tab needs one."""

LOG_BYTES = 64 * 1024
"""Bytes of the end of a log file that a page shows."""

BODY_BYTES = 64 * 1024
"""Most bytes of a request's body, which holds the name of a run."""

COMPARED = 12
"""Most runs of a comparison on a page."""

GROUPED_BY = 8
"""Most fields of the job that make the groups of a comparison."""

PNG = b"\x89PNG\r\n\x1a\n"

Value = TypeVar("Value")


class Look(Protocol):
    """A look at the ledger: the events since the ids in `after`, and the ids to go on from."""

    def __call__(self, session: Session, after: Seen) -> tuple[Seen, list[dict[str, Any]]]: ...


class Guarded:
    """The application behind the guard: refused requests never reach a route. Adds the headers of every answer."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope)
        request_token = request.headers.get("authorization", "").removeprefix("Bearer ") or request.query_params.get(
            "token", ""
        )
        needs_token = request.url.path.startswith("/api/")
        why = refusal(request.method, request.headers, request_token, self._token, needs_token)
        app = self._app if why is None else JSONResponse({"error": why}, status_code=403)
        await app(scope, receive, send_with_headers)


class Pages:
    """The routes. `reading`: sessions that only read. `stop`: stops a run, and returns what is still there.

    `token`: goes into the links of the pages. `kept`: folder of the simulations.
    """

    def __init__(
        self, reading: sessionmaker[Session], stop: Callable[[str], list[str]], token: str, kept: Path
    ) -> None:
        self._reading, self._stop_run, self._token, self._kept = reading, stop, token, kept
        self._streams = 0
        self._long_reading = asyncio.Semaphore(1)

    def routes(self) -> list[Route]:
        return [
            Route("/", self._page),
            Route("/compare", self._compare),
            *(Route(f"/{name}", _static(name)) for name in STATIC),
            Route("/api/list", self._list),
            Route("/api/changes", self._changes),
            Route("/api/runs/{name}", self._run),
            Route("/api/runs/{name}/state", self._state),
            Route("/api/runs/{name}/changes", self._run_changes),
            Route("/api/runs/{name}/sheets/{iteration:int}", self._sheet),
            Route("/api/runs/{name}/logs", self._logs),
            Route("/api/runs/{name}/stop", self._stop, methods=["POST"]),
        ]

    async def _page(self, request: Request) -> Response:
        """Answer with the page, drawn as far as it can be without a long read. A locked ledger delays no page."""
        name, view = request.query_params.get("run", ""), request.query_params.get("view", "")
        if not is_token(request.query_params.get("token", ""), self._token):
            return _refused()
        if view == "simulations":
            return HTMLResponse(simulations_page(self._token, await run_in_threadpool(simulations, self._kept)))
        try:
            if view == "prices":
                at_ms = time.time_ns() // 1_000_000
                pools, total = await self._read(lambda session: pool_rows(session, at_ms))
                return HTMLResponse(prices_page(self._token, pools, total, at_ms))
            if name:
                row = await self._read(lambda session: run_row(session, name))
                return HTMLResponse(run_shell(self._token, name, row))
            ids, runs = await self._read(lambda session: (newest_of_all(session), run_list(session)))
        except (SQLAlchemyError, OSError) as error:
            if view:
                return HTMLResponse(notice_page(self._token, "Trouble", sentence(error)), status_code=503)
            return HTMLResponse(run_shell(self._token, name, None) if name else list_page(self._token, Seen(), None))
        return HTMLResponse(list_page(self._token, ids, runs))

    async def _compare(self, request: Request) -> Response:
        """Answer with the page that `spotrl compare --html` writes, and a form for its `--group-by`."""
        if not is_token(request.query_params.get("token", ""), self._token):
            return _refused()
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        fields = tuple(dict.fromkeys(request.query_params.getlist("group_by")))[:GROUPED_BY]
        if not 2 <= len(names) <= COMPARED:
            text = f"Pick 2 to {COMPARED} runs in the list; {len(names)} were picked."
            return HTMLResponse(notice_page(self._token, "Not compared", text), status_code=400)
        try:
            compared = await self._read(
                lambda session: compare_runs(session, [find_run(session, name) for name in names], fields)
            )
        except (LookupError, Failure) as error:
            return HTMLResponse(notice_page(self._token, "Not compared", str(error.args[0])), status_code=404)
        except (SQLAlchemyError, OSError) as error:
            return HTMLResponse(notice_page(self._token, "Trouble", sentence(error)), status_code=503)
        page = render_comparison(compared, GroupForm(token=self._token, chosen=fields))
        return HTMLResponse(page, headers={"Content-Security-Policy": FROZEN})

    async def _list(self, request: Request) -> Response:
        """Answer with the rows of the list as HTML, and the ids of the ledger that they show."""
        word, count = request.query_params.get("contains", ""), request.query_params.get("count", "")
        limit = int(count) if count.isdecimal() and len(count) < 6 else COUNT
        ids, runs = await self._read(lambda session: (newest_of_all(session), run_list(session, word, limit)))
        return _json({"ids": ids, "html": list_part(self._token, runs)})

    async def _run(self, request: Request) -> Response:
        """Answer with everything on a run's page. One long reading at a time, so that other answers stay quick."""
        async with self._long_reading:
            if await request.is_disconnected():  # the page was left while this waited
                return Response(status_code=204)
            return _json(await run_in_threadpool(_timed, run_page, self._reading, request.path_params["name"]))

    async def _state(self, request: Request) -> Response:
        """Answer with the figures at the top of a run's page, also while a whole page is read."""
        return _json(await run_in_threadpool(_timed, run_state, self._reading, request.path_params["name"]))

    async def _sheet(self, request: Request) -> Response:
        name, iteration = request.path_params["name"], request.path_params["iteration"]

        def read() -> bytes | None:
            with self._reading() as session:
                run, path = sheet_path(session, name, iteration)
            stores = run_stores(run.infra, run.job.get("store") or {}, run.name, Path(run.folder))
            return read_object(stores, path)

        data = await run_in_threadpool(read)
        if data is None or not data.startswith(PNG):
            raise LookupError(f"no store of {name} has the image sheet of iteration {iteration} any more")
        return Response(data, media_type="image/png")

    async def _logs(self, request: Request) -> Response:
        name, title = request.path_params["name"], request.query_params.get("file", "")

        def read() -> dict[str, Any]:
            paths = {log_title(path): path for path in node_logs(self._reading, name)}
            path = paths.get(title) or next(iter(paths.values()), None)
            return {"files": list(paths), "file": log_title(path) if path else "", "text": tail(path) if path else ""}

        return _json(await run_in_threadpool(read))

    async def _stop(self, request: Request) -> Response:
        """Stop a run. The body must repeat the run's name, so that a stray click stops nothing."""
        name = request.path_params["name"]
        try:
            confirmed = json.loads(await body_of(request))["confirm"] == name
        except (ValueError, KeyError, TypeError, RecursionError):
            confirmed = False
        if not confirmed:
            return JSONResponse({"error": f'send {{"confirm": "{name}"}} to stop {name}'}, status_code=400)
        running = await run_in_threadpool(self._stop_run, name)
        return _json({"run": name, "left": running})

    async def _changes(self, request: Request) -> Response:
        return self._stream(request, lambda session, after: (newest_of_all(session), []))

    async def _run_changes(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._read(lambda session: find_run(session, name))  # an unknown run is a 404, not an empty stream
        return self._stream(request, lambda session, after: events_after(session, name, after))

    def _stream(self, request: Request, look: Look) -> Response:
        """Answer with server-sent events: one message with the ids and the new events after every change.

        `after`, from the query, are the ids of the page that the browser shows. So nothing is lost between a page and
        its stream, and a browser that comes back after an hour gets what it missed.
        """
        if self._streams >= STREAMS:
            return JSONResponse({"error": f"{STREAMS} pages are open already; close one"}, status_code=503)
        first = parse_ids(request.query_params.get("after", ""))

        async def messages() -> AsyncIterator[str]:
            stamp: Stamp = ()
            shown_ids, quiet, unread, is_troubled = first, 0.0, 0.0, False
            self._streams += 1
            try:
                yield "retry: 1000\n\n"
                while True:
                    before, stamp = stamp, stamp_of(self._reading)
                    if stamp != before or unread >= UNREAD_SECONDS:
                        try:
                            ids, news = await self._read(partial(look, after=shown_ids))
                        except (SQLAlchemyError, LookupError) as error:  # locked or replaced: the next look may succeed
                            text = str(error.args[0]) if isinstance(error, LookupError) else sentence(error)
                            stamp, is_troubled = (), True
                            yield f"event: trouble\ndata: {json.dumps({'error': text})}\n\n"
                            await asyncio.sleep(ALIVE_SECONDS / 5)
                            continue
                        unread = 0.0
                        if ids != shown_ids or is_troubled:  # without news too: the page stops to tell the trouble
                            shown_ids, quiet, is_troubled = ids, 0.0, False
                            yield f"data: {json.dumps({'ids': ids, 'events': news})}\n\n"
                    if quiet >= ALIVE_SECONDS:
                        quiet = 0.0
                        yield ": alive\n\n"
                    await asyncio.sleep(LOOK_SECONDS)
                    quiet, unread = quiet + LOOK_SECONDS, unread + LOOK_SECONDS
            finally:
                self._streams -= 1

        return StreamingResponse(messages(), media_type="text/event-stream")

    async def _read(self, read: Callable[[Session], Value]) -> Value:
        def with_session() -> Value:
            with self._reading() as session:
                return read(session)

        return await run_in_threadpool(with_session)


def build_app(reading: sessionmaker[Session], stop: Callable[[str], list[str]], token: str, kept: Path) -> ASGIApp:
    """Return the application.

    `reading`: a ledger opened read-only. `stop`: stops a run, and returns what is still there. `kept`: folder of the
    simulations.
    """
    app = Starlette(
        routes=Pages(reading, stop, token, kept).routes(),
        exception_handlers={LookupError: _missing, Failure: _failed, SQLAlchemyError: _no_ledger, OSError: _no_ledger},
    )
    return Guarded(app, token)


def warm(reading: sessionmaker[Session], token: str) -> None:
    """Draw the list once, so that the first page does not wait for compiled queries and templates."""
    with suppress(SQLAlchemyError), reading() as session:
        list_page(token, newest_of_all(session), run_list(session))


def tail(path: Path) -> str:
    """Return the end of a log file, at most `LOG_BYTES`, from the start of a line."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LOG_BYTES))
        text = file.read(LOG_BYTES).decode(errors="replace")
    return harmless(text if size <= LOG_BYTES else text.partition("\n")[2])


def parse_ids(text: str) -> Seen:
    """Parse `1,2,3,4`. Anything else counts as nothing seen."""
    parts = text.split(",")
    if len(parts) != len(Seen._fields) or not all(part.isdecimal() and len(part) < 19 for part in parts):
        return Seen()
    return Seen(*map(int, parts))


def sentence(error: Exception) -> str:
    """Return an error of the ledger as one sentence for the page."""
    first_line = str(getattr(error, "orig", None) or error).splitlines()[0]
    return f"the ledger cannot be read now ({first_line}); the page tries again"


def _static(name: str) -> Callable[[Request], Awaitable[Response]]:
    body = files("launcher.web").joinpath("static", name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(body, media_type=STATIC[name])

    return answer


async def body_of(request: Request) -> bytes:
    """Return the body of a request. Raises ValueError as soon as it has more than BODY_BYTES."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES:
            raise ValueError(f"a body has at most {BODY_BYTES} bytes")
    return bytes(body)


def _refused() -> Response:
    text = "The token is missing or wrong. Open the address that `spotrl ui` printed."
    return HTMLResponse(notice_page("", "Refused", text), status_code=403)


def _timed(read: Callable[[sessionmaker[Session], str], dict[str, Any]], *words: Any) -> dict[str, Any]:
    """Return what is read, with the processor time of the reading, by which the page chooses its pauses.

    Wall time would grow with the machine's load, and the page beside a busy trainer would stand still.
    """
    begun = time.thread_time()
    page = read(*words)
    return page | {"cpu_ms": 1000 * (time.thread_time() - begun)}


def _json(value: object) -> Response:
    return Response(json.dumps(value, separators=(",", ":"), allow_nan=False), media_type="application/json")


async def _missing(_: Request, error: Exception) -> Response:
    if type(error) is not LookupError:  # a KeyError is a bug of spotrl
        raise error
    return JSONResponse({"error": str(error.args[0])}, status_code=404)


async def _failed(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=409)


async def _no_ledger(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": sentence(error)}, status_code=503)
