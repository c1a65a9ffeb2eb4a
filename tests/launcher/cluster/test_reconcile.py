"""The controller's decisions: a pure function of facts."""

from dataclasses import replace

import pytest

from engine.events import EngineFinished, Market
from launcher.decide.actions import Buy, Enter, Release, RepeatRequest, StopEngine
from launcher.decide.budget_guard import Limits, worst_case
from launcher.decide.current_prices import Price, PriceNow
from launcher.decide.facts import FAILING, FINISHING, Facts, NodeRecord, Stage, Wanted
from launcher.decide.node_events import HARDWARE_CHARACTERS, UNKNOWN_MS, news
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.decide.price_events import paid
from launcher.decide.reconcile import decide
from launcher.decide.replacing import wait_ms
from launcher.decide.stopping import TRAINER_TRIES
from launcher.market.side_prices import side_micro_usd_per_hour
from tests.launcher.a_curve import points
from tests.launcher.cluster.stage import SPOT_RATE, TRAINER_RATE, cloud_option, cloud_site, cloud_slots, slots

NOW = 10_000_000


def node(slot="spot-0", generation=0, **happened) -> NodeRecord:
    is_trainer = slot.startswith("trainer")
    return NodeRecord(
        name=f"demo-{slot}-g{generation}",
        slot=slot,
        generation=generation,
        role="trainer" if slot == "trainer" else "ranks" if is_trainer else "rollout",
        market=Market.ON_DEMAND if is_trainer else Market.SPOT,
        micro_usd_per_hour=TRAINER_RATE if is_trainer else SPOT_RATE,
        requested_ms=happened.get("up", 0),
        reserved_micro_usd=1000,
        happened=happened,
    )


def up(slot, generation=0, **more) -> NodeRecord:
    return node(slot, generation, requested=0, up=0, ready=0, **more)


def facts(*nodes, stage=Stage.RUNNING, **more) -> Facts:
    plain = {"now_ms": NOW, "stage": stage, "reason": "", "stage_ms": NOW, "planned_ms": 0, "metered": 0}
    return Facts(nodes=nodes, **(plain | more))


def wanted(spot=1, max_total=None, max_hourly=None, trainers=1, **more) -> Wanted:
    limits = Limits(max_total=max_total, max_hourly=max_hourly)
    plain = {"deadline_ms": None, "allowance_ms": 60_000, "settle_ms": 4000}
    return Wanted(run="demo", slots=slots(spot, trainers), limits=limits, **(plain | more))


def bought(actions) -> list[str]:
    return [action.name for action in actions if isinstance(action, Buy)]


def test_an_empty_run_buys_its_plan_and_runs():
    actions = decide(facts(stage=Stage.PLANNED), wanted(spot=2))
    assert bought(actions) == ["demo-trainer-g0", "demo-spot-0-g0", "demo-spot-1-g0"]
    assert actions[-1] == Enter(stage=Stage.RUNNING)


def test_a_complete_run_needs_no_action():
    assert decide(facts(up("trainer"), up("spot-0")), wanted()) == []


def test_an_intent_without_a_request_is_requested_again():
    assert decide(facts(up("trainer"), node("spot-0")), wanted()) == [RepeatRequest(node="demo-spot-0-g0")]


def test_a_notice_buys_the_successor_at_once():
    noticed = up("spot-0", notice=NOW - 10)
    assert bought(decide(facts(up("trainer"), noticed), wanted())) == ["demo-spot-0-g1"]
    assert decide(facts(up("trainer"), noticed, up("spot-0", 1)), wanted()) == []


def test_a_lost_node_is_replaced_by_the_next_generation():
    lost = up("spot-0", gone=NOW - 1)
    assert bought(decide(facts(up("trainer"), lost), wanted())) == ["demo-spot-0-g1"]
    lost = up("trainer", gone=NOW - 1)
    assert bought(decide(facts(lost, up("spot-0")), wanted())) == ["demo-trainer-g1"]


def test_a_slot_waits_longer_after_each_node_that_died_young():
    young = [node("spot-0", n, requested=0, gone=100) for n in range(10)]
    waits = [wait_ms(young[:n], planned_ms=0) for n in (0, 1, 2, 3, 10)]
    assert waits == [0, 10_000, 20_000, 40_000, 600_000]
    assert wait_ms([*young, up("spot-0", 10, gone=NOW)], planned_ms=0) == 0
    refused = on_cloud("spot-0", SPOT_OPTION, 2, requested=0, no_capacity=100)
    assert wait_ms([*young[:2], refused, *young[3:4]], planned_ms=0) == 40_000, "a refusal says nothing about the slot"
    assert wait_ms(young, planned_ms=1) == 0, "a resumed run begins anew"


def test_a_preempted_node_that_worked_is_replaced_at_once_even_if_young():
    at = NOW - 9000
    preempted = replace(node("spot-0", requested=at, up=at, ready=at + 5000, gone=NOW - 1), reclaimed=True)
    assert bought(decide(facts(up("trainer"), preempted), wanted())) == ["demo-spot-0-g1"]
    assert decide(facts(up("trainer"), replace(preempted, reclaimed=False)), wanted()) == []
    never_ready = replace(node("spot-0", requested=at, up=at, gone=NOW - 1), reclaimed=True)
    assert decide(facts(up("trainer"), never_ready), wanted()) == []


def test_a_node_that_this_machine_denies_is_not_asked_for_again_in_this_run():
    denied = node("spot-0", requested=0, denied=NOW - 3_600_000)
    assert bought(decide(facts(up("trainer"), denied), wanted())) == []
    assert bought(decide(facts(up("trainer"), denied, planned_ms=NOW - 1), wanted())) == ["demo-spot-0-g1"], "resumed"


def ended(slot, generation, evidence, *, ready=None, gone=None, **more) -> NodeRecord:
    """Return a node that ended at `gone`, and was ready at `ready` if given."""
    at = 1_000_000 * generation
    happened = {"requested": at, "up": at} | ({} if ready is None else {"ready": at + ready})
    record = node(slot, generation, **happened, gone=at + (100 if gone is None else gone))
    return replace(record, requested_ms=at, evidence=evidence, **more)


def test_a_node_that_took_long_to_boot_and_died_at_once_died_young():
    """The node was ready 8 minutes after its request and lived 25 s, so it did not work for 8 minutes."""
    assert ended("spot-0", 0, "x", ready=480_000, gone=505_000).died_young
    assert not ended("spot-0", 0, "x", ready=480_000, gone=1_080_000).died_young


BROKEN = (
    "its agent exited with code 1: worker-{} ended with exit code 1 3 times without progress; its log ends: no model"
)


def test_a_slot_with_three_equal_failures_stays_empty_and_gives_the_reason():
    bad = [ended("spot-0", n, BROKEN.format(n)) for n in range(3)]
    actions = decide(facts(up("trainer"), *bad, up("spot-1")), wanted(spot=2))
    assert bought(actions) == []
    [action] = actions
    assert isinstance(action, Enter)
    assert action.reason == f"spot-0 is left empty, its last 3 nodes ended in the same way: {BROKEN.format(2)}"
    again = facts(up("trainer"), *bad, up("spot-1"), reason=action.reason)
    assert decide(again, wanted(spot=2)) == []  # recorded once


@pytest.mark.parametrize(
    "nodes",
    [
        [ended("spot-0", n, BROKEN.format(n)) for n in range(2)],
        [ended("spot-0", 0, "another"), *(ended("spot-0", n, BROKEN.format(n)) for n in (1, 2))],
        [ended("spot-0", n, "taken back", reclaimed=True) for n in range(3)],
        [ended("spot-0", n, BROKEN.format(n), ready=0, gone=400_000) for n in range(3)],
    ],
    ids=["two", "another way", "preempted", "they worked"],
)
def test_a_slot_whose_nodes_may_still_work_is_filled_again(nodes):
    actions = decide(facts(up("trainer"), *nodes, up("spot-1")), wanted(spot=2))
    assert bought(actions) == [f"demo-spot-0-g{len(nodes)}"]


def test_a_run_without_any_working_rollout_node_ends_with_the_evidence():
    bad = [ended(slot, n, BROKEN.format(n)) for slot in ("spot-0", "spot-1") for n in range(3)]
    [enter] = decide(facts(up("trainer"), *bad), wanted(spot=2))
    assert isinstance(enter, Enter)
    assert enter.stage is Stage.DRAINING
    assert enter.reason.startswith(f"{FAILING}no rollout node works")
    assert "no model" in enter.reason
    resumed = facts(up("trainer"), *bad, planned_ms=2_000_001)
    assert len(bought(decide(resumed, wanted(spot=2)))) == 2


def test_three_equal_failures_of_the_trainer_end_the_run():
    why = "its agent exited with code 1: trainer ended with exit code 1 3 times without progress; its log ends: {}"
    bad = [ended("trainer", n, why.format(f"pid {n}")) for n in range(3)]
    [enter] = decide(facts(*bad, up("spot-0")), wanted())
    assert isinstance(enter, Enter)
    assert enter.stage is Stage.DRAINING
    assert f"lost 3 times in the same way without a new iteration: {why.format('pid 2')}" in enter.reason
    assert "\n" not in enter.reason
    mixed = [ended("trainer", 0, "it stopped answering"), *bad[1:]]
    assert bought(decide(facts(*mixed, up("spot-0")), wanted())) == ["demo-trainer-g3"]


ITERATION_MS = 20 * 60_000


@pytest.mark.parametrize(("iteration_ms", "hours"), [(ITERATION_MS, 200 / 60), (60_000, 2.0)])
def test_a_run_without_an_iteration_in_ten_times_the_predicted_time_ends(iteration_ms, hours):
    job = wanted(iteration_ms=iteration_ms)
    still = facts(up("trainer"), up("spot-0"), still_since_ms=NOW - round(hours * 3_600_000))
    [enter] = decide(still, job)
    assert isinstance(enter, Enter)
    assert (enter.stage, enter.reason.startswith(f"{FAILING}no new iteration for ")) == (Stage.DRAINING, True)
    assert decide(replace(still, now_ms=NOW - 1), job) == []
    assert decide(still, wanted()) == []  # there is no prediction


def test_a_waiting_slot_buys_nothing():
    young = node("spot-0", requested=NOW - 5000, up=NOW - 5000, gone=NOW - 5000)
    assert decide(facts(up("trainer"), young), wanted()) == []
    assert bought(decide(facts(up("trainer"), young, now_ms=NOW + 5000), wanted())) == ["demo-spot-0-g1"]


def test_a_denied_spot_slot_stays_empty_for_the_run():
    assert decide(facts(up("trainer"), node("spot-0", requested=0, denied=NOW)), wanted()) == []


def test_a_denied_trainer_ends_the_run():
    [enter] = decide(facts(node("trainer", requested=0, denied=NOW)), wanted())
    assert isinstance(enter, Enter)
    assert (enter.stage, enter.reason.startswith(FAILING)) == (Stage.DRAINING, True)


def test_the_hourly_limit_delays_a_successor_until_its_predecessor_is_gone():
    limit = wanted(max_hourly=TRAINER_RATE + SPOT_RATE)
    [enter] = decide(facts(up("trainer"), up("spot-0", notice=NOW)), limit)
    assert isinstance(enter, Enter)
    assert "spot-0 is not bought" in enter.reason
    again = facts(up("trainer"), up("spot-0", notice=NOW), reason=enter.reason)
    assert decide(again, limit) == []  # recorded once
    gone = facts(up("trainer"), up("spot-0", notice=NOW, gone=NOW), reason=enter.reason)
    assert bought(decide(gone, limit)) == ["demo-spot-0-g1"]


def test_a_run_without_spot_nodes_goes_on():
    actions = decide(facts(up("trainer")), wanted(max_hourly=TRAINER_RATE))
    assert bought(actions) == []
    assert actions[0].stage is Stage.RUNNING


def test_the_budget_stops_a_run_at_the_last_moment_that_stays_in_it():
    held = (TRAINER_RATE + SPOT_RATE) * 60_000 // 3_600_000 + 1
    limit = wanted(max_total=1_000_000)
    running = facts(up("trainer"), up("spot-0"))
    assert decide(replace(running, metered=1_000_000 - held - 1), limit) == []
    assert decide(replace(running, metered=1_000_000 - held), limit) == [Enter(stage=Stage.DRAINING, reason="budget")]


def test_the_time_since_a_request_is_reserved_before_the_agent_appears():
    """A local node is billed from its request on. A bug spent $5.14 of $4 while an agent was slow to start."""
    pending = facts(node("trainer", requested=0))
    held = worst_case(TRAINER_RATE, NOW) + worst_case(TRAINER_RATE, 60_000)
    limit = wanted(spot=0, max_total=held + 1000)
    assert decide(replace(pending, metered=999), limit) == []
    assert decide(replace(pending, metered=1000), limit) == [Enter(stage=Stage.DRAINING, reason="budget")]


def test_a_trainer_that_exceeds_the_budget_ends_the_run():
    assert decide(facts(stage=Stage.PLANNED), wanted(max_total=100)) == [Enter(stage=Stage.DRAINING, reason="budget")]


def test_the_deadline_ends_the_run():
    assert decide(facts(up("trainer"), up("spot-0")), wanted(deadline_ms=NOW)) == [
        Enter(stage=Stage.DRAINING, reason="deadline")
    ]


def test_with_a_maximum_runtime_the_deadline_is_a_goal():
    """The run goes on after its deadline, and ends at the maximum runtime. That is the time to be done by then."""
    nodes = facts(up("trainer"), up("spot-0"))
    longer = wanted(deadline_ms=NOW - 1, ends_ms=NOW + 1)
    assert decide(nodes, longer) == []
    assert (longer.goal_ms(NOW - 2), longer.goal_ms(NOW)) == (NOW - 1, NOW + 1)
    assert decide(nodes, wanted(deadline_ms=NOW - 1, ends_ms=NOW)) == [
        Enter(stage=Stage.DRAINING, reason="max_runtime")
    ]


def test_a_run_whose_point_costs_too_much_finishes():
    limit = {"micro_usd_per_point": 50_000_000, "metric": "exact_match"}
    flat = points(*[0.5] * 12, dollars=10)
    nodes = facts(up("trainer"), up("spot-0"), scores=flat)
    assert decide(nodes, wanted()) == []
    assert decide(replace(nodes, scores=flat[:8]), wanted(**limit)) == []  # the first $50, three times, are needed
    [drain] = decide(nodes, wanted(**limit))
    words = "a point (+.01 of exact_match) costs $110.00, above stop.usd_per_point $50.00, at 3 evaluations in a row"
    assert drain == Enter(stage=Stage.DRAINING, reason=FINISHING + words)
    assert decide(facts(up("trainer"), stage=Stage.DRAINING, reason=drain.reason), wanted()) == [
        StopEngine(reason=drain.reason)
    ]
    finished = EngineFinished(reason="stopped", iteration=3, text=drain.reason)
    gone = facts(up("trainer", gone=NOW), stage=Stage.DRAINING, reason=drain.reason)
    for ended in (gone, replace(gone, finished=finished, finished_ms=NOW)):
        assert decide(ended, wanted()) == [Enter(stage=Stage.FINISHED, reason=words)]


@pytest.mark.parametrize("stage", [Stage.STOPPING, Stage.DRAINING])
def test_a_stop_is_sent_then_carried_out_then_final(stage):
    stopping = facts(up("trainer"), up("spot-0"), stage=stage, reason="budget")
    assert decide(stopping, wanted()) == [StopEngine(reason="budget")]
    assert decide(replace(stopping, now_ms=NOW + 4000), wanted()) == [
        Release(nodes=("demo-trainer-g0", "demo-spot-0-g0"))
    ]
    ended = facts(up("trainer", released=NOW), up("spot-0", released=NOW), stage=stage, reason="budget")
    assert decide(ended, wanted()) == [Enter(stage=Stage.STOPPED, reason="budget")]


def test_no_node_is_bought_while_stopping():
    stopping = facts(up("trainer", gone=NOW), up("spot-0", notice=NOW), stage=Stage.STOPPING)
    assert decide(stopping, wanted()) == [Release(nodes=("demo-spot-0-g0",))]


def test_a_finished_engine_releases_spot_nodes_and_lets_the_trainer_exit():
    finished = EngineFinished(reason="target", iteration=3)
    running = facts(up("trainer"), up("spot-0"), finished=finished, finished_ms=NOW)
    assert decide(running, wanted()) == [Release(nodes=("demo-spot-0-g0",))]
    exiting = facts(up("trainer"), up("spot-0", released=NOW), finished=finished, finished_ms=NOW)
    assert decide(exiting, wanted()) == []
    hanging = replace(exiting, now_ms=NOW + 4000)
    assert decide(hanging, wanted()) == [Release(nodes=("demo-trainer-g0",))]
    ended = facts(up("trainer", gone=NOW), finished=finished, finished_ms=NOW)
    assert decide(ended, wanted()) == [Enter(stage=Stage.FINISHED, reason="target")]


def test_an_unhealthy_engine_fails_the_run():
    ended = facts(finished=EngineFinished(reason="unhealthy", iteration=3, text="NaN"), finished_ms=NOW)
    assert decide(ended, wanted()) == [Enter(stage=Stage.FAILED, reason="unhealthy: NaN")]


def test_a_trainer_lost_repeatedly_without_progress_fails_the_run():
    lost = [up("trainer", n, gone=1000 + n) for n in range(TRAINER_TRIES)]
    [enter] = decide(facts(*lost, up("spot-0")), wanted())
    assert isinstance(enter, Enter)
    assert enter.log_of == f"demo-trainer-g{TRAINER_TRIES - 1}"
    assert isinstance(decide(facts(*lost, up("spot-0"), advances_ms=(1002,)), wanted())[0], Buy)
    assert isinstance(decide(facts(*lost, up("spot-0"), planned_ms=1002), wanted())[0], Buy)
    failing = facts(*lost, stage=Stage.DRAINING, reason=enter.reason)
    assert decide(failing, wanted()) == [Enter(stage=Stage.FAILED, reason=enter.reason.removeprefix(FAILING))]


def test_a_run_that_is_over_leaves_nothing_running():
    assert decide(facts(up("spot-0"), stage=Stage.FAILED), wanted()) == [Release(nodes=("demo-spot-0-g0",))]
    assert decide(facts(up("spot-0", gone=1), stage=Stage.FAILED), wanted()) == []


# --- new facts ----------------------------------------------------------------------------------------


def fact(status=NodeStatus.UP, **more) -> NodeFact:
    return NodeFact(name="demo-spot-0-g0", status=status, **more)


def kinds(record, seen, now_ms=NOW) -> list[tuple[str, int]]:
    cloud = {seen.name: seen} if seen else {}
    return [(note.kind, note.at_ms) for note in news([record], cloud, now_ms)]


def test_a_node_that_lived_between_two_passes_gets_all_its_events():
    seen = fact(NodeStatus.GONE, started_ms=10, ready_ms=20, ended_ms=50)
    assert kinds(node(requested=5), seen) == [("up", 10), ("ready", 20), ("gone", 50)]


def test_the_hardware_of_a_node_is_kept_with_its_ready_event_and_bounded():
    seen = fact(started_ms=10, ready_ms=20, hardware="8 CPU cores" * 99)
    *_, ready = news([node(requested=5)], {seen.name: seen}, NOW)
    assert (ready.kind, len(ready.evidence)) == ("ready", HARDWARE_CHARACTERS)
    assert ready.evidence.startswith("8 CPU cores")


def test_known_facts_are_not_recorded_again():
    assert kinds(up("spot-0"), fact(started_ms=0, ready_ms=0)) == []
    assert kinds(up("spot-0", gone=5), fact(NodeStatus.GONE, ended_ms=5)) == []


def test_only_an_end_that_we_requested_is_a_release():
    assert kinds(up("spot-0", releasing=5), fact(NodeStatus.GONE, ended_ms=7)) == [("released", 7)]
    assert kinds(up("spot-0", releasing=5), fact(NodeStatus.GONE, ended_ms=7, reclaimed=True)) == [("gone", 7)]


def test_an_unknown_status_does_not_count_as_gone():
    assert kinds(up("spot-0"), fact(NodeStatus.UNKNOWN)) == []


def test_a_node_unknown_to_the_provisioner_is_given_up_after_a_while():
    assert kinds(node(requested=0), None, now_ms=UNKNOWN_MS) == []
    assert kinds(node(requested=0), None, now_ms=UNKNOWN_MS + 1) == [("gone", UNKNOWN_MS + 1)]
    assert kinds(node(), None) == []  # the node is not requested yet


def test_an_engine_waiting_for_its_user_is_recorded_once_and_when_it_resumes():
    nodes = [up("trainer"), up("spot-0")]
    full = facts(*nodes, trouble="the coordinator's disk: No space left on device")
    (entered,) = decide(full, wanted())
    assert entered == Enter(stage=Stage.RUNNING, reason="waits: the coordinator's disk: No space left on device")
    assert decide(replace(full, reason=entered.reason), wanted()) == []
    assert decide(facts(*nodes, reason=entered.reason), wanted()) == [Enter(stage=Stage.RUNNING, reason="")]


# --- actual prices ------------------------------------------------------------------------------------


def spot_in(zone: str, rate: int, **more) -> NodeRecord:
    option = cloud_option("aws", "e1", "e1-a", Market.SPOT, SPOT_RATE)
    plain = replace(up("spot-0"), wanted=option, zone=zone, instance_type="g6.xlarge", micro_usd_per_hour=rate)
    return replace(plain, **more)


def price_now(
    rate: int, zone: str = "e1-a", at: str = "2026-02-02T00:00:00+00:00", kind: str = "g6.xlarge"
) -> PriceNow:
    price = Price(micro_usd_per_hour=rate, source="aws spot", observed_at=at)
    return PriceNow({("aws", "e1", zone, kind, Market.SPOT): price})


def rates(record: NodeRecord, prices: PriceNow, **seen) -> list[tuple[str, int]]:
    notes = paid([record], {record.name: fact(**({"zone": "e1-a", "instance_type": "g6.xlarge"} | seen))}, prices, NOW)
    return [(note.zone, note.price.micro_usd_per_hour) for note in notes]


def test_a_changed_price_is_recorded_once():
    assert rates(spot_in("e1-a", SPOT_RATE), price_now(2 * SPOT_RATE)) == [("e1-a", 2 * SPOT_RATE)]
    assert rates(spot_in("e1-a", 2 * SPOT_RATE), price_now(2 * SPOT_RATE)) == []
    assert rates(spot_in("e1-a", SPOT_RATE), price_now(SPOT_RATE + 1)) == []  # below 1 %


def test_a_price_holds_until_a_newer_one_is_observed():
    assert rates(spot_in("e1-a", 2 * SPOT_RATE), PriceNow()) == []
    assert rates(spot_in("e1-a", SPOT_RATE), price_now(2 * SPOT_RATE, at="2025-01-01")) == []


def test_another_zone_or_type_costs_its_own_price_or_the_on_demand_price():
    requested = spot_in("e1-a", SPOT_RATE)
    assert rates(requested, price_now(400_000, "e1-b"), zone="e1-b") == [("e1-b", 400_000)]
    assert rates(requested, PriceNow(), zone="e1-b") == [("e1-b", TRAINER_RATE)]
    assert rates(requested, PriceNow(), instance_type="g6.2xlarge") == [("e1-a", TRAINER_RATE)]
    assert rates(requested, PriceNow()) == []


# --- stand-ins and limits on clouds ---------------------------------------------------------------------

SITE = cloud_site("gcp", "g1")
SPOT_OPTION, STEADY_OPTION = SITE.rollout[0], SITE.trainer[0]
SIDE = {market: side_micro_usd_per_hour("gcp", market) for market in Market}
HOUR = 3_600_000


def on_cloud(slot: str, option, generation=0, **happened) -> NodeRecord:
    return replace(
        node(slot, generation, **happened),
        requested_ms=happened["requested"],
        market=option.placement.market,
        micro_usd_per_hour=option.placement.micro_usd_per_hour,
        wanted=option,
        zone=option.placement.zone,
    )


def on_cloud_up(slot: str, option, generation=0, **more) -> NodeRecord:
    return on_cloud(slot, option, generation, requested=0, up=0, ready=0, **more)


def cloud_facts(*nodes, **more) -> Facts:
    return facts(*nodes, now_ms=2 * HOUR, sites=(SITE,), **more)


def cloud_wanted(spot=1, **more) -> Wanted:
    return replace(wanted(spot, **more), slots=cloud_slots(spot, (SITE,)))


@pytest.mark.parametrize("starts", [False, True], ids=["all work", "a spot node starts"])
def test_over_the_hourly_limit_a_stand_in_is_released_before_a_spot_node(starts):
    """While a spot node starts, a stand-in is released only because of the hourly limit."""
    last = on_cloud("spot-2", SPOT_OPTION, requested=0, up=0) if starts else on_cloud_up("spot-2", SPOT_OPTION)
    running = (
        on_cloud_up("trainer", STEADY_OPTION),
        on_cloud_up("spot-0", STEADY_OPTION),
        on_cloud_up("spot-1", SPOT_OPTION),
        last,
    )
    limit = 2 * TRAINER_RATE + 2 * SPOT_RATE
    actions = decide(cloud_facts(*running), cloud_wanted(3, max_hourly=limit))
    assert [action.nodes for action in actions if isinstance(action, Release)] == [("demo-spot-0-g0",)]


def test_a_stand_in_works_until_its_spot_node_has_settled():
    trainer, stand_in = on_cloud_up("trainer", STEADY_OPTION), on_cloud_up("spot-0", STEADY_OPTION)
    assert bought(decide(cloud_facts(trainer, stand_in), cloud_wanted())) == ["demo-spot-0-g1"]
    at = 2 * HOUR - 9 * 60_000
    starting = on_cloud("spot-0", SPOT_OPTION, 1, requested=at, up=at)
    assert decide(cloud_facts(trainer, stand_in, starting), cloud_wanted()) == []
    young = on_cloud("spot-0", SPOT_OPTION, 1, requested=at, up=at, ready=at)
    assert decide(cloud_facts(trainer, stand_in, young), cloud_wanted()) == []
    settled = on_cloud_up("spot-0", SPOT_OPTION, 1)
    [release] = decide(cloud_facts(trainer, stand_in, settled), cloud_wanted())
    assert release == Release(nodes=("demo-spot-0-g0",))


def test_after_a_give_back_the_next_stand_in_is_kept_for_half_an_hour():
    trainer = on_cloud_up("trainer", STEADY_OPTION)
    given_back = on_cloud_up("spot-0", STEADY_OPTION, releasing=2 * HOUR - 20 * 60_000, released=2 * HOUR - 19 * 60_000)
    again = on_cloud_up("spot-0", STEADY_OPTION, 1)
    assert decide(cloud_facts(trainer, given_back, again), cloud_wanted()) == []
    later = replace(cloud_facts(trainer, given_back, again), now_ms=2 * HOUR + 10 * 60_000)
    assert bought(decide(later, cloud_wanted())) == ["demo-spot-0-g2"]


def test_a_refused_successor_of_a_stand_in_buys_no_second_stand_in():
    trainer, stand_in = on_cloud_up("trainer", STEADY_OPTION), on_cloud_up("spot-0", STEADY_OPTION)
    refused = [
        on_cloud("spot-0", option, 1 + n, requested=HOUR, no_capacity=HOUR + 60_000)
        for n, option in enumerate(SITE.rollout[:2] * 2)
    ]
    markets = []
    for now_ms in range(HOUR + 60_000, 3 * HOUR, 600_000):
        actions = decide(replace(cloud_facts(trainer, stand_in, *refused), now_ms=now_ms), cloud_wanted())
        markets += [action.option.placement.market for action in actions if isinstance(action, Buy)]
    assert set(markets) == {Market.SPOT}


def test_a_trainer_is_not_bought_while_its_predecessor_is_still_ending():
    leaving = on_cloud_up("trainer", STEADY_OPTION, releasing=HOUR)
    assert bought(decide(cloud_facts(leaving), cloud_wanted(0))) == []
    gone = on_cloud_up("trainer", STEADY_OPTION, releasing=HOUR, released=HOUR + 60_000)
    assert bought(decide(cloud_facts(gone), cloud_wanted(0))) == ["demo-trainer-g1"]


def test_purchases_of_one_pass_share_the_hourly_limit():
    limit = TRAINER_RATE + SIDE[Market.ON_DEMAND] + 2 * (SPOT_RATE + SIDE[Market.SPOT])
    actions = decide(cloud_facts(stage=Stage.PLANNED), cloud_wanted(3, max_hourly=limit))
    assert bought(actions) == ["demo-trainer-g0", "demo-spot-0-g0", "demo-spot-1-g0"]


def test_disks_and_addresses_count_against_the_hourly_limit():
    running = on_cloud_up("trainer", STEADY_OPTION)
    limit = TRAINER_RATE + SIDE[Market.ON_DEMAND] + SPOT_RATE + SIDE[Market.SPOT]
    assert bought(decide(cloud_facts(running), cloud_wanted(1, max_hourly=limit))) == ["demo-spot-0-g0"]
    assert bought(decide(cloud_facts(running), cloud_wanted(1, max_hourly=limit - 1))) == []


def test_a_pending_launch_keeps_its_reserve_until_it_is_billed():
    running = on_cloud_up("trainer", STEADY_OPTION)
    pending = replace(on_cloud("spot-0", SPOT_OPTION, requested=2 * HOUR), reserved_micro_usd=400_000)
    held = (TRAINER_RATE + SIDE[Market.ON_DEMAND] + SPOT_RATE + SIDE[Market.SPOT]) * 60_000 / HOUR
    limit = cloud_wanted(max_total=10_000_000)
    spent = round(10_000_000 - held - 400_000 - 1000)
    assert decide(cloud_facts(running, pending, metered=spent), limit) == []
    assert decide(cloud_facts(running, pending, metered=spent + 2000), limit) == [
        Enter(stage=Stage.DRAINING, reason="budget")
    ]


def test_a_spot_node_preempted_at_a_tight_quota_is_requested_again():
    trainer = on_cloud_up("trainer", STEADY_OPTION)
    end = 2 * HOUR - 120_000
    preempted = replace(on_cloud_up("spot-0", SPOT_OPTION, notice=end, gone=end), reclaimed=True)
    words = "(MaxSpotInstanceCountExceeded): Max spot instance count exceeded"
    refused = replace(on_cloud("spot-0", SITE.rollout[1], 1, requested=end, denied=end + 30_000), evidence=words)
    [buy, *_] = decide(cloud_facts(trainer, preempted, refused), cloud_wanted())
    assert isinstance(buy, Buy)
    assert buy.option.placement.market is Market.SPOT
    none = replace(refused, evidence="QUOTA_EXCEEDED: Quota 'PREEMPTIBLE_NVIDIA_L4_GPUS' exceeded.  Limit: 0.0")
    [buy, *_] = decide(cloud_facts(trainer, preempted, none), cloud_wanted())
    assert buy.option.placement.market is Market.ON_DEMAND  # there is no quota at all
