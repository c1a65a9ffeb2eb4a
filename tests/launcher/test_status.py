"""`spotrl status` and `spotrl events` of a run whose workers share images."""

import pytest
from click.testing import CliRunner
from sqlalchemy.orm import sessionmaker

from engine.events import ExplorationRests
from launcher.cli.events import events
from launcher.cli.status import status
from launcher.ledger.models import NodeEvent
from tests.launcher.made_ledger import HOUR_MS, JOB, MINUTE_MS, START_MS, a_run, a_session
from tests.launcher.printed import printed


@pytest.fixture
def made(tmp_path):
    """Create a run with a trainer and a spot node that are up."""
    run = a_run(a_session(tmp_path / "ledger.sqlite"), job={**JOB, "iterations": 10})
    run.status("running", 0)
    run.node("trainer", market="on_demand", up=0)
    run.node("spot-0", up=0)
    return run


def show(made, command, *arguments):
    made.session.commit()
    result = CliRunner().invoke(command, ["demo", *arguments], obj=sessionmaker(made.session.get_bind()))
    assert result.exit_code == 0, result.output
    return result.output


def groups_of(made):
    return {node["name"]: node["groups"] for node in printed("status", show(made, status, "--json"))["nodes"]}


def test_a_node_shows_its_newest_groups(made):
    spot = made.nodes["demo-spot-0-g1"]
    made.regrouped(spot, (0, 1, 2, 3), at=MINUTE_MS)
    made.regrouped(spot, (0, 1), (3, 2), at=2 * MINUTE_MS)
    assert "0+1 3+2" in show(made, status)
    named = [[f"demo-spot-0-g1/{place}" for place in group] for group in ((0, 1), (3, 2))]
    assert groups_of(made) == {"demo-trainer-g1": [], "demo-spot-0-g1": named}


def test_the_status_fits_80_columns_and_lists_a_node_once(made):
    made.status("running", MINUTE_MS, reason="the trainer's zone had no capacity, so the run went on in another region")
    shown = show(made, status)
    assert max(map(len, (line.rstrip() for line in shown.splitlines()))) <= 80
    assert [line.split()[:2] for line in shown.splitlines() if line.startswith("spot-0")] == [["spot-0-g1", "spot"]]
    assert "rollout" not in shown
    assert "\ndemo has no controller; start one: spotrl resume demo\n" in shown
    words = " ".join(shown.split())
    assert "on the run's clock (60x; " in words
    assert "by the wall), as are times below" in words


def test_groups_of_a_newer_lineage_count_although_its_numbers_restart(made):
    spot = made.nodes["demo-spot-0-g1"]
    made.seq = 10
    made.regrouped(spot, (0, 1), at=MINUTE_MS)
    made.seq = 0
    made.regrouped(spot, (0,), (1,), at=2 * MINUTE_MS, lineage=1)
    assert groups_of(made)["demo-spot-0-g1"] == [["demo-spot-0-g1/0"], ["demo-spot-0-g1/1"]]


def test_a_run_without_image_sharing_shows_no_groups(made):
    assert "groups" not in show(made, status)
    assert set(map(len, groups_of(made).values())) == {0}


def test_an_ended_node_has_no_groups_and_its_successor_has_its_own(made):
    lost = made.nodes["demo-spot-0-g1"]
    made.regrouped(lost, (0, 1), at=MINUTE_MS)
    made.session.add(NodeEvent(node_id=lost.id, at_ms=START_MS + 2 * MINUTE_MS, kind="gone", evidence="SIGKILL"))
    assert groups_of(made)["demo-spot-0-g1"] == []
    assert "0+1" not in show(made, status)
    made.regrouped(made.node("spot-0", 2, up=3 * MINUTE_MS), (0,), (1,), at=4 * MINUTE_MS)
    assert groups_of(made)["demo-spot-0-g2"] == [["demo-spot-0-g2/0"], ["demo-spot-0-g2/1"]]


def test_a_rest_of_exploration_is_one_short_line_that_asks_for_nothing(made):
    made.record(ExplorationRests(iteration=9, short_batches=3, trained=4, batches=10), at=HOUR_MS)
    (line,) = [line for line in show(made, events).splitlines() if "exploration" in line]
    assert line.split(maxsplit=2)[1:] == ["trainer", "exploration_rests for 10 batches; no action needed"]


def test_regroups_are_listed_as_events_without_hiding_others(made):
    for minute in range(20):
        made.regrouped(made.nodes["demo-spot-0-g1"], (0, 1), (2,), at=minute * MINUTE_MS, reason="a worker came")
    assert "regrouped demo-spot-0-g1: groups 0+1 2 (a worker came)" in show(made, events)
    shown = printed("status", show(made, status, "--json"))
    assert "regrouped" not in {event["kind"] for event in shown["events"]}
    assert "running" in {event["kind"] for event in shown["events"]}
    assert not shown["last_event"].startswith("trainer: regrouped")


def test_dollars_of_a_run_without_a_controller_are_an_upper_bound(made):
    text = show(made, status)
    assert "has no controller" in text
    assert "\nspent at most $" in text
