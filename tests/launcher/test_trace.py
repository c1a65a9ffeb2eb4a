"""The trace shows phases of workers and nodes in real time, for every valid ledger."""

import json

import pytest
from click.testing import CliRunner
from sqlalchemy.orm import sessionmaker

from launcher.cli.trace import trace
from launcher.ledger.models import NodeEvent
from launcher.report.trace import chrome_trace
from tests.launcher.made_ledger import MINUTE_MS, START_MS, a_run, a_session
from tests.launcher.printed import printed


@pytest.fixture
def made():
    """Create a run with a trainer and one preempted spot node; its clock runs 60 times faster."""
    run = a_run(a_session())
    trainer = run.node("trainer", market="on_demand", up=0)
    spot = run.node("spot-0", up=MINUTE_MS)
    run.worked(
        trainer, f"{trainer.name}/trainer", ("rollout", 0, 2 * MINUTE_MS), ("training", 2 * MINUTE_MS, 4 * MINUTE_MS)
    )
    run.worked(spot, f"{spot.name}/0", ("exploration", 2 * MINUTE_MS, 3 * MINUTE_MS))
    run.trained(0, 4 * MINUTE_MS)
    run.session.add(
        NodeEvent(node_id=spot.id, at_ms=START_MS + 3 * MINUTE_MS, kind="notice", evidence="the trace says so")
    )
    run.session.add(NodeEvent(node_id=spot.id, at_ms=START_MS + 5 * MINUTE_MS, kind="gone", evidence="SIGKILL"))
    run.session.flush()
    return run


def events(made, **wanted):
    found = chrome_trace(made.session, made.run)["traceEvents"]
    return [event for event in found if all(event.get(name) == value for name, value in wanted.items())]


def test_phases_are_complete_events_in_real_microseconds(made):
    (training,) = events(made, ph="X", name="training")
    assert (training["ts"], training["dur"]) == (2e6, 2e6)
    (exploring,) = events(made, ph="X", name="exploration")
    assert (exploring["ts"], exploring["dur"]) == (2e6, 1e6)
    assert exploring["pid"] != training["pid"]


def test_exploration_is_shown_beside_training(made):
    (training,), (exploring,) = events(made, name="training"), events(made, name="exploration")
    assert training["ts"] <= exploring["ts"]
    assert exploring["ts"] + exploring["dur"] <= training["ts"] + training["dur"]


def test_every_used_thread_has_a_name(made):
    names = {(event["pid"], event["tid"]) for event in events(made, ph="M", name="thread_name")}
    assert {(event["pid"], event["tid"]) for event in events(made, ph="X")} <= names
    assert [event["args"]["name"] for event in events(made, ph="M", name="process_name")] == [
        "demo-trainer-g1 (on_demand, aws us-east-1a)",
        "demo-spot-0-g1 (spot, aws us-east-1a)",
    ]


def test_a_node_ends_at_its_preemption_and_others_at_the_last_event(made):
    lives = {(event["pid"], event["name"]): event for event in events(made, ph="X", tid=0)}
    assert lives[2, "up"]["ts"] + lives[2, "up"]["dur"] == 5e6
    assert lives[1, "up"]["ts"] + lives[1, "up"]["dur"] == 5e6
    assert [event["name"] for event in events(made, ph="i")] == ["notice: the trace says so", "gone: SIGKILL"]


def test_regroups_are_marked_on_their_node_with_the_reason(made):
    spot = made.nodes["demo-spot-0-g1"]
    made.regrouped(spot, (0, 1), (2,), at=2 * MINUTE_MS)
    made.regrouped(spot, (0,), (2,), at=3 * MINUTE_MS, reason="worker 1 is gone")
    marks = [event for event in events(made, ph="i") if event["name"].startswith("groups")]
    assert [(mark["name"], mark["ts"], mark["pid"], mark["tid"]) for mark in marks] == [
        ("groups 0+1 2", 2e6, 2, 0),
        ("groups 0 2", 3e6, 2, 0),
    ]
    assert marks[1]["args"] == {
        "groups": [["demo-spot-0-g1/0"], ["demo-spot-0-g1/2"]],
        "reason": "worker 1 is gone",
    }


def test_iterations_end_at_the_time_of_their_event(made):
    (iteration,) = events(made, name="iteration 0")
    assert (iteration["ts"], iteration["dur"]) == (3e6, 1e6)
    assert iteration["args"] == {"reward": 0.5, "explored": 0}


def test_a_run_that_never_had_a_node_has_an_empty_trace():
    run = a_run(a_session())
    trace = chrome_trace(run.session, run.run)
    assert trace["traceEvents"] == []
    assert trace["otherData"]["clock_factor"] == 60.0


def test_the_trace_command_writes_a_complete_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session = a_session(tmp_path / "ledger.sqlite")
    a_run(session)
    session.commit()
    sessions = sessionmaker(session.get_bind())
    result = CliRunner().invoke(trace, ["demo"], obj=sessions, catch_exceptions=False)
    assert "perfetto" in result.output
    assert json.loads((tmp_path / "demo.trace.json").read_text())["otherData"]["run"] == "demo"
    assert list(tmp_path.glob("*.part")) == []
    assert printed("trace", CliRunner().invoke(trace, ["demo", "--json"], obj=sessions).output)["traceEvents"] == []
    assert "did you mean demo" in str(CliRunner().invoke(trace, ["demp"], obj=sessions).exception)
