"""A home with many runs: lists and passes read all runs in a few queries, and say what whole views and sums say."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select
from sqlalchemy.orm import Session, sessionmaker

from engine.clock import ScaledClock
from engine.events import Judged
from launcher.cli.main import run
from launcher.controller.facts_reader import FactsReader
from launcher.job.schema import Job
from launcher.ledger.accounting import judge_micro_usd, spent_micro_usd
from launcher.ledger.billing import side_costs
from launcher.ledger.models import LOCAL, NodeEvent, Removal, Run, SpentMark
from launcher.ledger.settled import settled_micro_usd
from launcher.ledger.store import find_run, open_ledger, writing
from launcher.placement.plan import Plan
from launcher.runs.run_list import all_rows
from launcher.runs.views import run_documents, view_of
from tests.launcher.made_ledger import MINUTE_MS, START_MS, MadeLedger, a_run

END = 60 * MINUTE_MS
JOB = {"iterations": 50}


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sessionmaker[Session]:
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    return open_ledger(tmp_path / "ledger.sqlite")


def finished(session: Session, name: str, infra: str = "aws", *, beside: bool = True) -> MadeLedger:
    """Add a run that is over, with two nodes that ended, and their bills."""
    made = a_run(session, name, job=JOB, factor=1.0)
    made.run.infra = infra
    made.status("running", 0)
    made.started()
    for slot in ("trainer", "spot-0"):
        node = made.node(slot, up=0, end=END, seen=MINUTE_MS)
        session.add(NodeEvent(node_id=node.id, at_ms=START_MS + END, kind="released"))
        if beside:
            session.add_all(side_costs(made.run, node, START_MS, START_MS + END))
    for iteration in range(5):
        made.trained(iteration, (iteration + 2) * MINUTE_MS)
        made.evaluated(iteration, 0.1 * iteration, (iteration + 2) * MINUTE_MS + 1)
    made.status("finished", END, "iterations")
    return made


def judged(made: MadeLedger, micro_usd: int, at: int = END) -> None:
    made.record(Judged(worker="0", calls=((10, 5, micro_usd),), unaccounted=7), at)


def all_kinds(session: Session) -> set[str]:
    """Add runs of every kind; return the names of those that cost no more, as the ledger can tell at a glance."""
    finished(session, "plain")
    judged(finished(session, "local-judged", LOCAL), 1_234)
    judged(finished(session, "judged"), 500_000)
    finished(session, "local", LOCAL)
    a_run(session, "refused", job=JOB, factor=1.0).status("failed", 0)
    finished(session, "unpriced", beside=False)
    live = finished(session, "lives")
    session.add(NodeEvent(node_id=live.nodes["lives-spot-0-g1"].id, at_ms=START_MS + END + 1, kind="up"))
    again = finished(session, "twice")
    for kind, at in (("up", END + MINUTE_MS), ("gone", END + 2 * MINUTE_MS)):
        node = again.nodes["twice-trainer-g1"]
        session.add(NodeEvent(node_id=node.id, at_ms=START_MS + at, kind=kind))
    restored = finished(session, "restored")
    session.add(SpentMark(run_id=restored.run.id, at_ms=START_MS + END, micro_usd=99_000_000))
    resumed = finished(session, "resumed")
    resumed.status("running", END + 1, "resumed")
    session.flush()
    return {"plain", "local-judged", "judged", "local", "refused"}


def whole_micro_usd(session: Session, run: Run, now_ms: int) -> int:
    nodes = 0 if run.infra == LOCAL else spent_micro_usd(session, run, now_ms)
    return nodes + judge_micro_usd(session, run)


def test_the_cost_of_settled_runs_is_the_sum_of_the_accounts(sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        expected = all_kinds(session)
        settled = settled_micro_usd(session)
        assert {session.get_one(Run, run_id).name for run_id in settled} == expected
        for run_id, micro_usd in settled.items():
            assert micro_usd == whole_micro_usd(session, session.get_one(Run, run_id), START_MS + 10 * END)
        assert min(settled[find_run(session, name).id] for name in expected - {"local", "refused"}) > 0


def reader_of(run: Run) -> FactsReader:
    job = Job.model_validate({"name": "own", "infra": "local", "target": None, "iterations": 50})
    plan = Plan(region="us-east-1", slots=(), max_total_micro_usd=None, max_hourly_micro_usd=None)
    return FactsReader(run, job, plan, ScaledClock(origin_ms=START_MS, factor=1.0))


def test_a_pass_counts_every_other_run_and_what_changes_of_them(sessions: sessionmaker[Session]) -> None:
    with sessions() as session, session.begin():
        all_kinds(session)
        own = a_run(session, "own", job=JOB, factor=1.0).run
        session.get_one(Run, own.id).infra = "aws"
        for row in session.scalars(select(Run)):
            row.plan = asdict(Plan(region="", slots=(), max_total_micro_usd=None, max_hourly_micro_usd=None))
    with sessions() as session:
        own = find_run(session, "own")
        session.expunge(own)
    reader = reader_of(own)

    def metered(now_ms: int) -> tuple[int, int]:
        with sessions() as session:
            others = reader._others(session, now_ms)
            wanted = (row for row in session.scalars(select(Run)) if row.name != "own")
            return others.metered, sum(whole_micro_usd(session, row, now_ms) for row in wanted)

    for hours in (2, 3):
        found, expected = metered(START_MS + hours * END)
        assert found == expected > 0
    with writing(sessions) as session:  # a VM of a run that is over is found alive
        node = select(NodeEvent.node_id).order_by(NodeEvent.id).limit(1)
        session.add(NodeEvent(node_id=session.scalars(node).one(), at_ms=START_MS + 3 * END, kind="up"))
    found, alive = metered(START_MS + 5 * END)
    assert found == alive > expected
    with writing(sessions) as session:  # a late bill of a judge, and a run that begins and ends between two passes
        judged(MadeLedger(session=session, run=find_run(session, "judged"), seq=500), 40_000_000)
        finished(session, "newcomer")
    found, more = metered(START_MS + 5 * END)
    assert found == more > alive + 40_000_000
    with writing(sessions) as session:
        MadeLedger(session=session, run=find_run(session, "plain"), seq=500).status("running", 5 * END, "resumed")
    found, same = metered(START_MS + 5 * END)
    assert found == same == more


def test_the_table_of_runs_says_what_each_view_says(sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        all_kinds(session)
        back = finished(session, "went-back")
        back.started(END, iteration=2, lineage=1)  # the evaluations of versions 3 and 4 are void
        rows = {row.name: row for row in all_rows(session)}
        assert [row.name for row in rows.values()] == [
            row.name for row in session.scalars(select(Run).order_by(Run.id.desc()))
        ]
        for name, row in rows.items():
            view = view_of(session, find_run(session, name))
            assert (row.status, row.iterations, row.is_removed) == (view.status, view.iterations, view.is_removed), name
            assert row.score == view.score, name
            assert row.is_open or row.micro_usd == view.spent_micro_usd, name  # an open run spends while this test runs
            is_open = view.status == "running" or any(node.is_live for node in view.nodes)
            assert row.is_open == (is_open or name == "twice"), "its second life has no bill yet"
        assert rows["went-back"].score == pytest.approx(0.1)
        assert rows["plain"].score == pytest.approx(0.3)


@contextmanager
def counted(sessions: sessionmaker[Session]) -> Iterator[list[str]]:
    statements: list[str] = []

    def listen(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        statements.append(statement)

    engine = sessions.kw["bind"]
    event.listen(engine, "before_cursor_execute", listen)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", listen)


def test_the_number_of_queries_does_not_grow_with_the_number_of_runs(sessions: sessionmaker[Session]) -> None:
    with sessions() as session, session.begin():
        made = a_run(session, "own", job=JOB, factor=1.0)
        made.status("running", 0)
        own = made.run
        own.plan = asdict(Plan(region="", slots=(), max_total_micro_usd=None, max_hourly_micro_usd=None))
        own.infra = "aws"
        finished(session, "run-0")
    counts = []
    for first in (1, 9):
        with sessions() as session, session.begin():
            for number in range(first, 4 * first):
                finished(session, f"run-{number + 10 * first}")
        run_documents(sessions)
        with sessions() as session:
            reader = reader_of(find_run(session, "own"))
        with counted(sessions) as statements:
            with sessions() as session:
                all_rows(session)
                reader._others(session, START_MS)
            run_documents(sessions)
        counts.append(len(statements))
        with counted(sessions) as statements, sessions() as session:
            reader._others(session, START_MS)
        assert len(statements) <= 6
    assert counts[0] == counts[1]


def test_kept_views_are_made_again_when_their_run_changed(
    sessions: sessionmaker[Session], capsys: pytest.CaptureFixture[str]
) -> None:
    def listed() -> dict[str, dict[str, Any]]:
        assert run(["ls", "--all", "--json"]) == 0
        return {view["name"]: view for view in json.loads(capsys.readouterr().out)}

    with sessions() as session, session.begin():
        all_kinds(session)
    first = listed()
    assert listed().keys() == first.keys()
    assert listed()["plain"] == first["plain"]
    with writing(sessions) as session:
        MadeLedger(session=session, run=find_run(session, "plain"), seq=500).evaluated(9, 1.0, END)
        judged(MadeLedger(session=session, run=find_run(session, "judged"), seq=500), 1_000)
        find_run(session, "local").max_total_micro_usd = 5
        session.add(Removal(run_id=find_run(session, "refused").id, at_wall_ms=START_MS))
        MadeLedger(session=session, run=find_run(session, "local-judged"), seq=500).status("running", 2 * END)
    later = listed()
    assert later["plain"]["best_score"] > first["plain"]["best_score"]
    assert later["judged"]["spent_micro_usd"] == first["judged"]["spent_micro_usd"] + 1_007
    assert later["local"]["max_total_micro_usd"] == 5
    assert [listing["refused"]["is_removed"] for listing in (first, later)] == [False, True]
    assert later["local-judged"]["status"] == "running"
    with sessions() as session:
        assert later["judged"] == json.loads(json.dumps(asdict(view_of(session, find_run(session, "judged")))))
