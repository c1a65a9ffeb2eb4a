"""`spotrl events` on the stored ledger of a quickstart run with three preemptions, and `spotrl logs --tail`."""

import gzip
import json
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import select

from launcher.cli import logs as logs_module
from launcher.cli.events import events
from launcher.cli.logs import logs
from launcher.decide.facts import Stage
from launcher.ledger.models import Node
from launcher.ledger.store import append_status, find_run, open_ledger, writing
from launcher.provision.local.provisioner import node_folder
from launcher.runs.event_lines import KINDS, Seen, event_lines, new_events

STORED = Path(__file__).parents[1] / "data/quickstart/ledger.sql.gz"


@pytest.fixture
def sessions(tmp_path):
    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        database.executescript(gzip.decompress(STORED.read_bytes()).decode())
    return open_ledger(tmp_path / "ledger.sqlite")


def shown(sessions, *arguments):
    result = CliRunner().invoke(events, ["quickstart", "--json", *arguments], obj=sessions, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


def test_a_lost_node_has_one_event(sessions):
    lines = shown(sessions)
    about = [line for line in lines if "spot-0-g1" in line["source"] + line["text"]]
    assert [line["kind"] for line in about] == ["requested", "up", "ready", "gone"]
    disconnections = shown(sessions, "--kind", "node_missed")
    assert len([line for line in disconnections if "spot-0-g1" in line["text"]]) == 2
    assert len(lines) + len(disconnections) == len(shown(sessions, *(f"--kind={kind}" for kind in KINDS)))


def test_a_disconnection_that_costs_work_is_shown(sessions):
    with writing(sessions) as session:
        session.connection().exec_driver_sql(
            "update progress set event = json_set(event, '$.lost_steps', 7) where kind = 'node_missed' "
            "and json_extract(event, '$.node') = 'quickstart-spot-0-g0'"
        )
    (line,) = [line for line in shown(sessions) if line["kind"] == "node_missed"]
    assert "7 steps to do again" in line["text"]


def test_events_are_chosen_by_kind_node_time_and_number(sessions):
    every = shown(sessions)
    assert {line["kind"] for line in shown(sessions, "--kind", "gone", "--kind", "notice")} == {"gone", "notice"}
    assert {line["source"] for line in shown(sessions, "--node", "spot-0")} == {
        f"quickstart-spot-0-g{number}" for number in range(3)
    }
    assert shown(sessions, "--node", "spot-1-g1") == [line for line in every if line["source"].endswith("spot-1-g1")]
    ended_ms = every[-1]["at_ms"]
    late = shown(sessions, "--since", "10m")
    assert late == [line for line in every if line["at_ms"] >= ended_ms - 600_000]
    assert 0 < len(late) < len(every)
    assert shown(sessions, "--tail", "3") == every[-3:]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--kind", "lost"), "'gone'"),
        (("--since", "soon"), "soon"),
        (("--tail", "0"), "--tail"),
        (("--node", "spot-9"), "quickstart-spot-0-g0"),
    ],
)
def test_a_choice_that_fits_nothing_names_what_is_allowed(sessions, arguments, found):
    result = CliRunner().invoke(events, ["quickstart", *arguments], obj=sessions)
    assert result.exit_code != 0
    assert found in result.output + str(result.exception)


def test_new_events_are_read_once(sessions):
    with sessions() as session:
        run = find_run(session, "quickstart")
        first, seen = new_events(session, run, Seen())
        assert first == event_lines(session, run)
        assert new_events(session, run, seen) == ([], seen)
    with writing(sessions) as session:
        append_status(session, find_run(session, "quickstart"), Stage.PLANNED, "resumed", first[-1].at_ms + 1)
    with sessions() as session:
        fresh, seen = new_events(session, find_run(session, "quickstart"), seen)
        assert [(line.kind, line.text) for line in fresh] == [("planned", "resumed")]


def test_logs_end_with_the_last_lines_of_each_file(sessions, tmp_path):
    with writing(sessions) as session:
        run = find_run(session, "quickstart")
        run.folder = str(tmp_path / "runs" / "quickstart")
        for node in ("quickstart-trainer-g0", "quickstart-spot-0-g0"):
            folder = node_folder(Path(run.folder), node) / "logs"
            folder.mkdir(parents=True)
            (folder / "agent.log").write_text("".join(f"{node} {number}\n" for number in range(9)))
    result = CliRunner().invoke(logs, ["quickstart", "--tail", "2"], obj=sessions, catch_exceptions=False)
    assert result.output.splitlines() == [
        *("==> quickstart-trainer-g0/agent.log <==", "quickstart-trainer-g0 7", "quickstart-trainer-g0 8"),
        *("==> quickstart-spot-0-g0/agent.log <==", "quickstart-spot-0-g0 7", "quickstart-spot-0-g0 8"),
    ]


def test_a_followed_slot_goes_on_with_the_log_of_the_successor(sessions, tmp_path, monkeypatch):
    """Without --follow a line that is being written is printed as it is; with it, once and whole."""
    with writing(sessions) as session:
        run = find_run(session, "quickstart")
        run.folder = str(tmp_path / "runs" / "quickstart")

    def write(node: str, text: str) -> None:
        folder = node_folder(Path(run.folder), node) / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "worker.log").open("a") as file:
            file.write(text)

    def replaced() -> None:
        with writing(sessions) as session:
            first = session.scalars(select(Node).where(Node.name == "quickstart-spot-0-g0")).one()
            columns = {column.name: getattr(first, column.name) for column in Node.__table__.columns}
            session.add(Node(**columns | {"id": None, "name": "quickstart-spot-0-g9", "generation": 9}))
        write("quickstart-spot-0-g0", "and last\n")
        write("quickstart-spot-0-g9", "successor\n")

    write("quickstart-spot-0-g0", "first\nsecond ")
    looks = [lambda: None, replaced, lambda: None]

    def still_running(*_: object) -> list[str]:
        looks.pop(0)()
        return ["quickstart-spot-0-g9"] if looks else []

    monkeypatch.setattr(logs_module, "still_running", still_running)
    monkeypatch.setattr(logs_module, "LOOK_SECONDS", 0)
    words = ["quickstart", "--node", "spot-0", "--follow"]
    result = CliRunner().invoke(logs, words, obj=sessions, catch_exceptions=False)
    assert result.output.splitlines() == [
        *("==> quickstart-spot-0-g0/worker.log <==", "first", "second and last"),
        *("==> quickstart-spot-0-g9/worker.log <==", "successor"),
    ]
