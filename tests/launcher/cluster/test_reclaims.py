"""The schedule by which the local cloud preempts nodes."""

from itertools import pairwise

import pytest
from pydantic import ValidationError

from launcher.job.sections import PreemptionConfig
from launcher.provision.local.node_records import NodeRecords
from launcher.provision.local.preempting import ORDERED, order_planned, planned_for
from launcher.provision.local.preemptions import APART_MS, MANNERS, distinct_first, lifetimes, preemption_schedule
from tests.launcher.cluster.stage import HandClock

MINUTE_MS = 60_000


def test_a_lifetime_is_from_add_to_remove_in_the_order_of_removal():
    trace = ["0,add,node1", "0,add,node2", "5000,remove,node2", "6000,add,node2", "7000,remove,node1"]
    assert lifetimes([*trace, "9000,remove,node2"]) == (5000, 7000, 3000)


def test_a_node_that_was_there_before_the_trace_has_no_lifetime():
    assert lifetimes(["7000,remove,node9", ""]) == ()


def test_distinct_lifetimes_come_first_and_none_is_lost():
    minutes = [33, 34, 51, 8, 48]
    assert distinct_first(m * MINUTE_MS for m in minutes) == tuple(m * MINUTE_MS for m in [33, 51, 8, 34, 48])


def test_the_bundled_trace_starts_with_these_lifetimes():
    rule = preemption_schedule(PreemptionConfig())
    assert rule is not None
    assert [ms // MINUTE_MS for ms in rule.lifetimes_ms[:6]] == [33, 51, 8, 40, 27, 59]
    assert all(abs(a - b) >= APART_MS for a, b in pairwise(rule.lifetimes_ms[:6]))


def test_the_preemption_manners_rotate_and_the_lifetimes_repeat():
    rule = preemption_schedule(PreemptionConfig())
    assert rule is not None
    assert [rule.preemption(n).manner for n in range(8)] == [*MANNERS, *MANNERS]
    length = len(rule.lifetimes_ms)
    assert rule.preemption(length).lifetime_ms == rule.preemption(0).lifetime_ms


def test_the_printed_schedule_names_the_trace_and_the_first_lifetimes():
    rule = preemption_schedule(PreemptionConfig())
    assert rule is not None
    assert "bamboo-p3" in rule.describe()
    assert "33m, 51m, 8m, 40m, 27m, 59m" in rule.describe()


def test_without_a_trace_there_is_no_preemption_schedule():
    assert preemption_schedule(PreemptionConfig(trace="none")) is None


PLANNED = {
    "trace": "none",
    "at": [
        {"iteration": 3, "slots": ["spot-0"], "notice": True},
        {"iteration": 5, "slots": ["trainer", "spot-1"], "signal": "SIGSTOP"},
    ],
}


def test_preemptions_at_iterations_are_printed_and_need_no_trace():
    rule = preemption_schedule(PreemptionConfig.model_validate(PLANNED))
    assert rule is not None
    assert rule.preemption(0) is None
    assert rule.describe() == (
        "Spot nodes are preempted after iteration 3 spot-0: notice + SIGKILL; after iteration 5 trainer, spot-1: "
        "silent SIGSTOP. A notice comes 2m ahead, on the run's clock."
    )
    both = preemption_schedule(PreemptionConfig.model_validate(PLANNED | {"trace": "bamboo-p3"}))
    assert both is not None
    assert both.preemption(0).lifetime_ms == 33 * MINUTE_MS
    assert "after iteration 3 spot-0" in both.describe()


@pytest.mark.parametrize(
    ("at", "place"),
    [({"iteration": 0, "slots": ["spot-0"]}, "at.0.iteration"), ({"iteration": 1, "slots": []}, "at.0.slots")],
)
def test_a_preemption_needs_a_finished_iteration_and_a_slot(at, place):
    with pytest.raises(ValidationError, match=place):
        PreemptionConfig.model_validate({"at": [at]})


def node(folder, name, clock, *, role="rollout", generation=0, ordinal: int | None = 0, ready=True) -> NodeRecords:
    records = NodeRecords(folder / name, clock)
    records.folder.mkdir(parents=True)
    records.write("node.json", {"role": role, "generation": generation})
    records.write("request.json", {"ordinal": ordinal})
    if ready:
        records.write("ready.json", {"at_ms": clock.now_ms()})
    return records


def test_planned_preemptions_take_the_nodes_that_hold_their_slots_once(tmp_path):
    clock = HandClock()
    rule = preemption_schedule(PreemptionConfig.model_validate(PLANNED))
    trainer = node(tmp_path, "demo-trainer-g0", clock, role="trainer")
    first, second = (node(tmp_path, f"demo-spot-{n}-g0", clock) for n in (0, 1))
    nodes = [trainer, first, second]
    assert order_planned(rule, nodes, lambda: 2)
    assert [record.read(ORDERED) for record in nodes] == [None, None, None]
    assert order_planned(rule, nodes, lambda: 3)
    assert [record.read(ORDERED) for record in nodes] == [
        None,
        {"plan": 0, "slot": "spot-0", "at_ms": clock.at_ms},
        None,
    ]
    # The successor of spot-0 is left alone, and all nodes of the next plan are taken at the same moment.
    second.folder.joinpath("ready.json").unlink()
    nodes.append(node(tmp_path, "demo-spot-0-g1", clock, generation=1))
    assert order_planned(rule, nodes, lambda: 9)
    assert trainer.read(ORDERED) is None
    second.write("ready.json", {"at_ms": clock.now_ms()})
    assert order_planned(rule, nodes, lambda: 9)
    assert [bool(record.read(ORDERED)) for record in nodes] == [True, True, True, False]
    assert not order_planned(rule, nodes, lambda: pytest.fail("nothing is left"))


def test_a_promoted_node_holds_the_slot_of_the_trainer_and_a_node_on_demand_is_left_alone(tmp_path):
    clock = HandClock()
    rule = preemption_schedule(PreemptionConfig.model_validate(PLANNED | {"at": PLANNED["at"][1:]}))
    lost = node(tmp_path, "demo-trainer-g0", clock, role="trainer")
    lost.write("ended.json", {})
    promoted = node(tmp_path, "demo-spot-0-g0", clock, role="trainer", generation=1)
    other = node(tmp_path, "demo-spot-1-g0", clock, ordinal=None)
    order_planned(rule, [lost, promoted, other], lambda: 5)
    assert promoted.read(ORDERED) == {"plan": 0, "slot": "trainer", "at_ms": clock.at_ms}
    assert other.read(ORDERED) is None


@pytest.mark.parametrize("plan", [0, 1])
def test_a_planned_preemption_comes_at_once_or_after_its_notice(tmp_path, plan):
    clock = HandClock()
    rule = preemption_schedule(PreemptionConfig.model_validate(PLANNED))
    record = node(tmp_path, "demo-spot-0-g0", clock)
    clock.pass_ms(10 * MINUTE_MS)
    record.write(ORDERED, {"plan": plan, "slot": "spot-0", "at_ms": clock.at_ms})
    fact = record.fact_of_running({"requested_ms": 0})
    due = planned_for(record, rule, fact)
    ahead_ms = (2 * MINUTE_MS, 0)[plan]
    assert fact.ready_ms + due.lifetime_ms == clock.at_ms + ahead_ms
    assert (due.manner.with_notice, due.manner.signal) == ((True, "SIGKILL"), (False, "SIGSTOP"))[plan]
