import functools
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from sqlalchemy.engine import Engine

from launcher.cli.main import run
from launcher.exit_codes import ExitCode
from launcher.ledger import store
from launcher.replay import of_plan


@functools.cache
def tables_of_a_ledger() -> str:
    """Return the SQL that makes the tables of a new ledger, written down after a real migration."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        store.open_ledger(path)
        return "\n".join(sqlite3.connect(path).iterdump())


@pytest.fixture(scope="module", autouse=True)
def migrated_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make the tables of each new ledger at once: the migrations one by one take 40 ms of a core.

    tests/launcher/ledger tests the migrations.
    """
    if request.path.parent.name == "ledger":
        yield
        return
    tables, migrate = tables_of_a_ledger(), store._migrate

    def make_tables(engine: Engine) -> None:
        raw = engine.raw_connection()
        try:
            ledger = raw.driver_connection
            if is_new := not ledger.execute("SELECT * FROM sqlite_master").fetchone():
                ledger.execute("PRAGMA journal_mode=WAL").fetchone()
                ledger.executescript(tables)
        finally:
            raw.close()
        if not is_new:
            migrate(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_migrate", make_tables)
        yield


@pytest.fixture
def few_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay each plan twice, and not up to 30 times, which takes most of the time of a dry run.

    tests/launcher/replay tests the replays.
    """
    monkeypatch.setattr(of_plan, "NODE_HOURS", 0)
    monkeypatch.setattr(of_plan, "LEAST_STARTS", 2)


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys, few_replays):
    """Call `spotrl launch --dry-run` on copies of the example jobs, in a temporary home."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.chdir(tmp_path)
    for file in files("sky_yamls").iterdir():
        if file.name.endswith((".yaml", ".txt", ".jsonl")):
            shutil.copy(str(file), tmp_path / file.name)

    def dry_run(name: str, *arguments: str) -> list[str]:
        assert run(["launch", f"{name}.yaml", "--dry-run", *arguments]) == ExitCode.OK
        return capsys.readouterr().out.splitlines()

    return dry_run
