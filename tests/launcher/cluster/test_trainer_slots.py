"""Decisions on the nodes of a trainer of several nodes: all are bought, or none; each lost one is bought again."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.events import EngineFinished
from launcher.decide.actions import Enter, Release, StopEngine
from launcher.decide.budget_guard import Limits
from launcher.decide.facts import FAILING, Stage
from launcher.decide.reconcile import decide
from tests.launcher.cluster.test_reconcile import BROKEN, NOW, bought, ended, facts, up, wanted


def test_all_nodes_of_a_trainer_are_bought_first_and_each_lost_one_again():
    three = wanted(spot=1, trainers=3)
    empty = facts(stage=Stage.PLANNED)
    names = ["demo-trainer-g0", "demo-trainer-1-g0", "demo-trainer-2-g0", "demo-spot-0-g0"]
    assert bought(decide(empty, three)) == names
    whole = [up("trainer"), up("trainer-1"), up("trainer-2"), up("spot-0")]
    assert decide(facts(*whole), three) == []
    lost = [whole[0], up("trainer-1", gone=NOW - 1), *whole[2:]]
    [buy] = decide(facts(*lost), three)
    assert buy.name == "demo-trainer-1-g1"
    assert buy.option.placement == three.slots[0].placement, "in the zone of the trainer's first node"


def test_no_node_of_a_trainer_is_bought_if_the_hourly_limit_does_not_bear_all():
    """Beside two spot nodes at $0.30 an hour, $2.40 bear one trainer node at $1, but not two."""
    two, spot = wanted(spot=2, trainers=2, max_hourly=2_400_000), [up("spot-0"), up("spot-1")]
    [enter] = decide(facts(*spot), two)
    assert enter.stage is Stage.RUNNING
    assert "trainer is not bought without trainer-1: budget.max_hourly" in enter.reason
    assert "trainer-1 is not bought without trainer: budget.max_hourly" in enter.reason
    assert bought(decide(facts(*spot), wanted(spot=2, max_hourly=2_400_000))) == ["demo-trainer-g0"]
    assert bought(decide(facts(*spot), replace(two, limits=Limits(max_total=None, max_hourly=2_600_000)))) == [
        "demo-trainer-g0",
        "demo-trainer-1-g0",
    ]


@pytest.mark.parametrize("limit", [{"max_hourly": 1_900_000}, {"max_total": 60_000}])
def test_a_limit_that_never_bears_the_whole_trainer_ends_the_run(limit):
    """Two nodes at $1 an hour cost $0.0334 for the minimum, and as much again for a stop of a minute."""
    assert bought(decide(facts(stage=Stage.PLANNED), wanted(spot=0, **limit))) == ["demo-trainer-g0"]
    assert decide(facts(stage=Stage.PLANNED), wanted(spot=0, trainers=2, **limit)) == [
        Enter(stage=Stage.DRAINING, reason="budget")
    ]


def test_a_run_ends_if_its_money_will_never_bear_a_lost_node_of_the_trainer_again():
    """A node costs $0.033334 for the minimum and a stop of a minute; the node that is left holds half of that."""
    lost = up("trainer"), up("trainer-1", gone=NOW - 1), up("spot-0")
    two = wanted(trainers=2, max_total=1_000_000)
    assert bought(decide(facts(*lost, metered=900_000), two)) == ["demo-trainer-1-g1"]
    assert decide(facts(*lost, metered=970_000), two) == [Enter(stage=Stage.DRAINING, reason="budget")]


@pytest.mark.parametrize("leaves", ["releasing", "notice"])
def test_a_node_of_the_trainer_has_no_successor_before_it_has_ended(leaves):
    """On one machine too: two processes of a rank would both join the trainer."""
    two, leaving = wanted(trainers=2), up("trainer-1", **{leaves: NOW - 1})
    assert bought(decide(facts(up("trainer"), leaving, up("spot-0")), two)) == []
    ended_node = replace(leaving, happened={**leaving.happened, "gone": NOW - 1})
    assert bought(decide(facts(up("trainer"), ended_node, up("spot-0")), two)) == ["demo-trainer-1-g1"]


@given(
    live=st.sets(st.sampled_from(["trainer", "trainer-1", "trainer-2", "spot-0", "spot-1"])),
    max_hourly=st.one_of(st.none(), st.integers(0, 5_000_000)),
    max_total=st.one_of(st.none(), st.integers(0, 200_000)),
)
@example(live=set(), max_hourly=None, max_total=100_001)  # three at once: $.100001, in turn: $.100002
def test_of_the_missing_nodes_of_a_trainer_all_are_bought_or_none(live, max_hourly, max_total):
    three = wanted(spot=2, trainers=3, max_hourly=max_hourly, max_total=max_total)
    missing = {f"demo-{slot.name}-g0" for slot in three.slots if slot.role != "rollout" and slot.name not in live}
    found = {name for name in bought(decide(facts(*map(up, sorted(live))), three)) if "trainer" in name}
    assert found in (missing, set())
    if max_hourly is None and max_total is None:
        assert found == missing


def test_a_node_of_the_trainer_that_fails_three_times_alike_ends_the_run():
    bad = [ended("trainer-1", n, BROKEN.format(n)) for n in range(3)]
    [enter] = decide(facts(up("trainer"), *bad, up("spot-0")), wanted(trainers=2))
    assert isinstance(enter, Enter)
    assert enter.reason.startswith(f"{FAILING}the trainer's node trainer-1 was lost 3 times in the same way")
    assert enter.log_of == "demo-trainer-1-g2"
    at_once = [ended(slot, 0, "its agent was killed by SIGKILL") for slot in ("trainer", "trainer-1", "trainer-2")]
    assert len(bought(decide(facts(*at_once, up("spot-0")), wanted(trainers=3)))) == 3, "one loss of each node"


def test_the_end_of_a_run_releases_the_further_nodes_of_the_trainer_at_once():
    live = [up("trainer"), up("trainer-1"), up("spot-0")]
    done = facts(*live, finished=EngineFinished(reason="iterations", iteration=3), finished_ms=NOW)
    assert decide(done, wanted(trainers=2)) == [Release(nodes=("demo-trainer-1-g0", "demo-spot-0-g0"))]
    stopping = facts(*live, stage=Stage.STOPPING)
    assert decide(stopping, wanted(trainers=2)) == [StopEngine(reason="")], "the trainer needs its ranks to stop"
