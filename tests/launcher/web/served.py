"""A ledger with runs, and the web server of `spotrl ui` over it in a thread of the test."""

import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import uvicorn
from alembic import command
from alembic.config import Config
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from launcher.ledger.models import NodeEvent, PriceRow, Run
from launcher.ledger.store import open_ledger, open_read_only
from launcher.replay.simulate import PolicyResult, Range, Simulated
from launcher.runs.runs import request_stop
from launcher.web.server import build_app
from launcher.web.simulations import Kept, keep
from tests.launcher.a_front import a_front
from tests.launcher.made_ledger import HOUR_MS, JOB, MINUTE_MS, START_MS, MadeLedger, a_run

TOKEN = "a-token-of-the-tests"
NASTY = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@dataclass
class Served:
    """A running server. `stopped`: the runs that a request has stopped."""

    url: str
    path: Path
    sessions: sessionmaker[Session]
    stopped: list[str] = field(default_factory=list)

    @property
    def page(self) -> str:
        """Return the address that `spotrl ui` would print."""
        return f"{self.url}/?token={TOKEN}"

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers={"Authorization": f"Bearer {TOKEN}", **headers}, timeout=60)

    def add(self, name: str = "live") -> "Adding":
        return Adding(self.sessions, name)


class Adding:
    """Adds facts to a run in one transaction: `with served.add() as made: made.trained(3, at=...)`."""

    def __init__(self, sessions: sessionmaker[Session], name: str) -> None:
        self._session, self._name = sessions(), name

    def __enter__(self) -> MadeLedger:
        run = self._session.scalars(select(Run).where(Run.name == self._name)).one()
        return MadeLedger(session=self._session, run=run, seq=100_000)

    def __exit__(self, *_: object) -> None:
        self._session.commit()
        self._session.close()


@contextmanager
def serving(path: Path, sessions: sessionmaker[Session], port: int = 0) -> Iterator[Served]:
    """Serve the ledger until the block ends."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen()  # the first request may come before the server has started
    served = Served(url=f"http://127.0.0.1:{listening.getsockname()[1]}", path=path, sessions=sessions)

    def stop(name: str) -> list[str]:
        request_stop(sessions, name)
        served.stopped.append(name)
        return [f"{name}-trainer-g1"]

    app = build_app(open_read_only(path), stop, TOKEN, path.parent / "simulations")
    config = uvicorn.Config(
        app, log_level="error", access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield served
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        listening.close()


HOLD = """
import sqlite3, sys
ledger = sqlite3.connect(sys.argv[1], isolation_level=None)
ledger.execute("PRAGMA locking_mode=EXCLUSIVE")
ledger.execute("BEGIN EXCLUSIVE")
ledger.execute("UPDATE run SET name = name")
print("locked", flush=True)
sys.stdin.read()
"""
"""Holds the ledger so that not even a reader may look, as a VACUUM or a copy by another program does."""


@contextmanager
def locked(served: Served) -> Iterator[None]:
    """Lock the ledger from another process until the block ends."""
    served.sessions.kw["bind"].dispose()  # a connection that rests would keep the other process out
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(served.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "locked\n"
            yield
        finally:
            holder.stdin.close()
            holder.wait(timeout=60)


def migrate_back(served: Served, revision: str) -> None:
    """Give the ledger the tables of an older version. `open_ledger` migrates it again."""
    config = Config()
    config.set_main_option("script_location", "launcher.ledger:migrations")
    with served.sessions.kw["bind"].begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
    served.sessions.kw["bind"].dispose()


def two_runs(folder: Path) -> tuple[Path, sessionmaker[Session]]:
    """Make a ledger with a finished run `done` and a running one `live`, with image sheets, a log and nasty text.

    The ledger has spot prices of one zone, and the folder a kept simulation.
    """
    path = folder / "ledger.sqlite"
    sessions = open_ledger(path)
    store = folder / "runs" / "live" / "store"
    store.mkdir(parents=True)
    (folder / "runs" / "live" / "controller.log").write_text(f"first line\n{NASTY}\x1b[31m\n")
    (store / "sheet-0.png").write_bytes(a_png())
    (store / "sheet-6.png").write_bytes(a_png())
    job = {**JOB, "iterations": 45}
    keep(folder / "simulations", a_simulation())
    with sessions() as session, session.begin():
        session.add_all(a_price(market, zone) for market, zone in (("spot", "us-east-1a"), ("on_demand", "")))
        done = a_run(session, "done", job=job)
        done.status("running", 0)
        trainer = done.node("trainer", market="on_demand", rate=2_000_000, up=0, end=HOUR_MS)
        session.add(NodeEvent(node_id=trainer.id, at_ms=START_MS + HOUR_MS, kind="gone", evidence="finished"))
        done.evaluated(0, 0.5, MINUTE_MS)
        done.status("finished", HOUR_MS, "target")
        live = a_run(session, "live", job=job, folder=str(folder / "runs" / "live"), factor=1.0)
        live.run.max_total_micro_usd = 9_000_000_000_000
        live.run.plan = {
            "slots": [
                {
                    "name": "spot-0",
                    "placement": {
                        "market": "spot",
                        "instance_type": "g6.xlarge",
                        "zone": "us-east-1a",
                        "micro_usd_per_hour": 300_000,
                    },
                }
            ],
            "fleets": asdict(a_front()),
        }
        live.status("running", 0)
        live.started(MINUTE_MS)
        live.node("trainer", market="on_demand", rate=800_000, on_demand=800_000, up=0, seen=MINUTE_MS)
        lost = live.node("spot-0", rate=300_000, on_demand=800_000, up=0, end=30 * MINUTE_MS, zone=NASTY)
        live.preempted(lost, 30 * MINUTE_MS)
        for iteration in range(8):
            at = (iteration + 1) * 10 * MINUTE_MS
            live.trained(iteration, at)
            if iteration % 2 == 0:
                pictures = f"sheet-{iteration}.png" if iteration in (0, 4, 6) else None
                live.evaluated(iteration, 0.4 + iteration / 20, at, pictures=pictures)
    return path, sessions


def a_price(market: str, zone: str) -> PriceRow:
    return PriceRow(
        cloud="aws",
        region="us-east-1",
        zone=zone,
        zone_id="",
        instance_type="g6.xlarge",
        market=market,
        micro_usd_per_hour=350_000 if market == "spot" else 800_000,
        currency="USD",
        source="test",
        source_id="",
        effective_ms=START_MS,
        observed_ms=START_MS,
        last_seen_ms=START_MS,
    )


def a_simulation() -> Kept:
    """Return a simulation of four hours in which a stand-in works for an hour."""
    ours = PolicyResult(
        policy="ours",
        starts=3,
        dollars=Range(mean=4.0, low=3.5, high=4.5),
        hours=Range(mean=4.0, low=3.8, high=4.3),
        finished=3,
        misses=1,
        preemptions=1.7,
        on_demand_dollars=0.8,
    )
    example = ((0, 2, 0), (HOUR_MS, 1, 1), (2 * HOUR_MS, 2, 0))
    result = Simulated(
        market=f"recorded {NASTY}",
        starts=3,
        asked_starts=3,
        ideal_ms=4 * HOUR_MS,
        deadline_ms=5 * HOUR_MS,
        policies=(ours,),
        example=example,
        example_ms=4 * HOUR_MS,
    )
    return Kept(job="ocr", at_ms=START_MS, result=result, prices="prices of 2026-07-20", fleets=a_front())


def a_png() -> bytes:
    """Return a grey PNG of 8 x 8 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    rows = b"".join(b"\0" + b"\x80" * 8 for _ in range(8))
    head = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
