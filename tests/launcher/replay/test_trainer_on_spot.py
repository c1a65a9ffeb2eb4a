"""A trainer on spot, replayed on small markets: promotion, stand-in, give-back, and when it is on demand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.events import Market
from launcher.decide import giving_back, promotion
from launcher.decide.actions import Buy, Promote, Release
from launcher.decide.budget_guard import Limits
from launcher.decide.facts import PROMOTED, Facts, Stage, Wanted
from launcher.decide.failover import StandIn
from launcher.decide.launch_history import Attempt, MoveRules, Outcome, Tried
from launcher.decide.placing import place_of
from launcher.decide.reconcile import decide
from launcher.decide.work_left import WorkLeft
from launcher.money import HOUR_MS
from launcher.placement.plan import Plan
from launcher.placement.price_of_waiting import RESTART_MS
from launcher.replay import replay as replays
from launcher.replay.replay import Replayed, replay
from launcher.replay.simulate import POLICIES, simulate
from launcher.replay.world import RELEASE_MS
from tests.launcher.replay.markets import ON_DEMAND, SPOT, market, option, plan, work

ALWAYS = [9] * 6 * 60


def on_spot(zones: str = "a", nodes: int = 2, trainer_gpus: int = 8, max_hourly: int | None = None) -> Plan:
    """Return a plan with every node on spot; the trainer may also be bought on demand."""
    bought = plan(zones, nodes)
    trainers = [option(zone, Market.SPOT, SPOT) for zone in zones] + [option("", Market.ON_DEMAND, ON_DEMAND)]
    trainers = [replace(one, placement=replace(one.placement, gpus=trainer_gpus)) for one in trainers]
    slot = replace(bought.slots[0], placement=trainers[0].placement)
    site = replace(bought.sites[0], trainer=tuple(trainers))
    return replace(bought, slots=(slot, *bought.slots[1:]), sites=(site,), max_hourly_micro_usd=max_hourly)


def run(
    capacity: Sequence[int],
    nodes: int = 2,
    *,
    bought: Plan | None = None,
    rules: MoveRules | None = None,
    deadline_hours: float | None = None,
    works: WorkLeft | None = None,
    policy=decide,
) -> Replayed:
    return replay(
        bought or on_spot("a", nodes),
        rules or MoveRules(),
        works or work(nodes),
        market({"a": capacity}),
        0,
        1,
        deadline_ms=None if deadline_hours is None else round(deadline_hours * HOUR_MS),
        policy=policy,
    )


def trainers(result: Replayed, market: Market) -> list:
    return [n for n in result.nodes if n.role == "trainer" and n.market is market and "up" in n.happened]


def test_a_calm_market_costs_the_work_at_spot_prices():
    result = run(ALWAYS)
    assert result.reached
    assert (result.trainer.losses, result.trainer.promotions, result.trainer.lost_iterations) == (0, 0, 0)
    side = sum(slot.placement.side_micro_usd_per_hour for slot in on_spot().slots)
    assert result.micro_usd == pytest.approx((3 * SPOT + side) * result.ms / HOUR_MS, rel=0.03)
    assert result.ms / HOUR_MS < 10.3


def test_a_node_that_is_up_takes_the_role_and_only_the_batch_in_progress_is_lost():
    """Three nodes, then two: the dice take the trainer, and a rollout node trains 90 s after the next pass."""
    losses = []
    for seed in range(8):
        trace = market({"a": [3] * 9 + [2] * 3 + [3] * 6 * 60})
        result = replay(on_spot(), MoveRules(), work(2), trace, 0, seed)
        assert result.reached
        if result.trainer.losses:
            losses.append(result)
            (promoted,) = [node for node in result.nodes if PROMOTED in node.happened]
            (lost,) = [node for node in result.nodes if node.reclaimed and node.role == "trainer"]
            assert promoted.happened[PROMOTED] >= lost.happened["gone"], "its end is on record first"
            assert promoted.happened["ready"] == promoted.happened[PROMOTED] + RESTART_MS
            assert 0 < result.trainer.lost_iterations < 1
            assert result.trainer.without_trainer_ms < RESTART_MS + 60_000
    assert losses


OUTAGE = [9] * 18 + [0] * 12 + [9] * 6 * 60


def test_without_spot_a_trainer_is_bought_on_demand_and_given_back_right_after_a_checkpoint():
    """Spot is gone for two hours of a run that is late without it, then there for the rest."""
    result = run(OUTAGE, deadline_hours=12.6)
    (steady,) = trainers(result, Market.ON_DEMAND)
    assert "waiting costs more than it saves" in result.stand_ins[steady.name]
    promoted = next(node for node in result.nodes if PROMOTED in node.happened)
    assert promoted.market is Market.SPOT
    assert 0 <= promoted.happened[PROMOTED] - steady.happened["released"] < 60_000
    lost_ms = steady.happened["released"] - steady.happened["releasing"]
    assert lost_ms == RELEASE_MS
    assert result.ms <= 12.6 * HOUR_MS


def test_without_a_deadline_a_run_waits_for_spot_and_pays_nothing():
    result = run(OUTAGE)
    assert not trainers(result, Market.ON_DEMAND)
    assert result.reached
    assert result.ms / HOUR_MS == pytest.approx(12.3, abs=0.5)


def test_spot_only_never_buys_the_trainer_on_demand():
    result = run([9] * 6 + [0] * 60, rules=MoveRules(on_demand=False), deadline_hours=9)
    assert not trainers(result, Market.ON_DEMAND)
    assert not result.reached


def test_a_trainer_lost_three_times_without_an_iteration_is_on_demand_until_three_are_done():
    """Spot nodes live for 20 minutes at a time, and an iteration takes 40."""
    works = WorkLeft(iterations=40.0, done=0.0, iteration_ms=[2_400_000.0] * 3)
    result = run(([9, 9, 0] * 4 + [9] * 60) * 4, works=works, deadline_hours=60)
    why = "the trainer was preempted 3 times without a new iteration"
    first = next(node for node in trainers(result, Market.ON_DEMAND) if result.stand_ins[node.name] == why)
    lost = [n for n in result.nodes if n.role == "trainer" and n.reclaimed and n.ended_ms <= first.requested_ms]
    assert len(lost) == promotion.LOSSES
    assert first.happened["releasing"] - first.happened["ready"] >= 3 * 2_400_000, "three iterations first"
    assert result.reached


@pytest.mark.parametrize(("lost", "deadline_hours", "is_refused"), [(0, 20, False), (60, 99, False), (60, 13, True)])
def test_losses_that_cost_more_than_spot_saves_keep_the_trainer_on_demand(lost, deadline_hours, is_refused):
    """60 preemptions in 20 node-hours: (60 + 1.8) / (20 + 6) = 2.4 an hour.

    Each loses 5 min + 90 s of three nodes, and 12 min of one. On spot that is 2.4 ($45 x .108 + $15 x .2) = $19 an
    hour; near the deadline the same time is bought on demand: 2.4 ($165 x .108 + $55 x .2) = $69. Spot saves $40.
    """
    bought = on_spot()
    offered = bought.sites[0].trainer[0]
    attempts = [
        Attempt(
            name=f"n{n}",
            role="rollout",
            option=offered,
            requested_ms=n,
            up_ms=n,
            ended_ms=n + HOUR_MS // 3,
            outcome=Outcome.RECLAIMED,
        )
        for n in range(lost)
    ]
    facts = Facts(
        now_ms=HOUR_MS,
        stage=Stage.RUNNING,
        reason="",
        stage_ms=0,
        planned_ms=0,
        nodes=(),
        metered=0,
        sites=bought.sites,
        work=work(2),
    )
    wanted = Wanted(
        run="r",
        slots=bought.slots,
        limits=Limits(max_total=None, max_hourly=None),
        deadline_ms=deadline_hours * HOUR_MS,
        allowance_ms=0,
        settle_ms=0,
    )
    loss = promotion.LossOfTrainer.of(facts, wanted)
    assert loss is not None
    why = loss.why_not_on_spot(offered, Tried(attempts), facts.now_ms)
    assert bool(why) == is_refused
    if is_refused:
        assert why == "2.4 preemptions an hour in us-test-1a would cost $68.63 an hour, and spot saves $40.00"
        move = place_of(bought.slots[0], Tried(attempts), (), facts, wanted)
        assert isinstance(move, StandIn)
        assert (move.option.placement.market, move.why) == (Market.ON_DEMAND, why)


def test_a_trainer_that_no_rollout_node_can_replace_goes_back_by_a_node_bought_for_it():
    bought = on_spot(trainer_gpus=16)
    result = run([9] * 6 + [0] * 12 + [9] * 300, bought=bought, deadline_hours=12.0)
    assert trainers(result, Market.ON_DEMAND)
    successors = [node for node in result.nodes if node.name.startswith("replay-successor")]
    assert any(PROMOTED in node.happened for node in successors)
    assert all(node.market is Market.SPOT and node.role == "trainer" for node in successors if node.is_live)
    assert result.reached


@pytest.mark.parametrize("policy", ["trainer-on-demand", "all-on-demand"])
def test_a_policy_with_the_trainer_on_demand_never_loses_it(policy):
    result = run(OUTAGE, policy=POLICIES[policy])
    assert {node.market for node in result.nodes if node.role == "trainer"} == {Market.ON_DEMAND}
    assert result.trainer.losses == 0


def test_without_promotion_a_lost_trainer_is_a_new_node():
    capacity = [3] * 9 + [0] + [3] * 6 * 60
    assert run(capacity, policy=POLICIES["no-promotion"]).trainer.promotions == 0


def test_a_simulation_tells_what_the_trainers_losses_cost():
    bought = replace(on_spot(), pace_ms=tuple(map(round, work(2).iteration_ms)), iterations=work(2).iterations)
    markets = (lambda start: (market({"a": [3] * (9 + start) + [2] * 3 + [3] * 600}), 0)), "test"
    result = simulate(bought, MoveRules(), markets, starts=6, policies=("ours", "trainer-on-demand"))
    ours, steady = (policy.trainer for policy in result.policies)
    assert ours is not None
    assert steady is not None
    assert 0 < ours.losses <= ours.promotions
    assert 0 < ours.lost_iterations < 1
    price = result.policies[0].dollars.mean / bought.iterations
    assert ours.lost_dollars == pytest.approx(ours.lost_iterations * price, rel=0.05)
    assert ours.without_trainer_hours == pytest.approx(ours.losses * RESTART_MS / HOUR_MS, rel=0.1)
    assert (steady.losses, steady.lost_dollars) == (0, 0)


def test_the_hourly_limit_holds_with_a_trainer_on_spot():
    limit = ON_DEMAND + 2 * SPOT + 1_000_000
    bought = on_spot(max_hourly=limit)
    most = [0]

    def watched(facts, wanted):
        live = [node for node in facts.nodes if node.is_live]
        most.append(sum(node.running_micro_usd_per_hour for node in live))
        return decide(facts, wanted)

    result = run([9] * 18 + [0] * 12 + [9] * 6 * 60, bought=bought, deadline_hours=13, policy=watched)
    assert result.reached
    assert max(most) <= limit


def test_no_pass_promotes_beside_a_trainer_or_gives_back_without_a_checkpoint():
    """Over random markets: every promotion follows the end of all trainers, every give-back a fresh checkpoint."""
    assert watch_many() > 5


def watch_many() -> int:
    acts = 0
    for seed in range(6):
        capacity = [(9, 9, 1, 0, 2, 9)[(n * (seed + 3) + n // (2 + seed)) % 6] for n in range(120)]
        bought = on_spot(trainer_gpus=8 if seed % 3 else 16)
        works, trace = work(2, 8.0), market({"a": capacity})

        def watched(facts, wanted):
            nonlocal acts
            actions = decide(facts, wanted)
            acts += check(facts, actions)
            return actions

        replay(bought, MoveRules(), works, trace, 0, seed, deadline_ms=14 * HOUR_MS, policy=watched)
    return acts


class Broken(AssertionError):
    """A promise does not hold."""


def check(facts: Facts, actions: Sequence[object]) -> int:
    """Return the number of promotions and give-backs among the actions. Raises Broken."""
    known, acts = {node.name: node for node in facts.nodes}, 0
    trainers = [node for node in facts.nodes if node.role == "trainer" and node.is_live]
    for action in actions:
        if isinstance(action, Promote):
            acts += 1
            if trainers:
                raise Broken(f"{action.node} is promoted beside {trainers[0].name}")
            if not known[action.node].is_ready or known[action.node].is_leaving:
                raise Broken(f"{action.node} cannot take the role")
        if isinstance(action, Release):
            for node in (known[name] for name in action.nodes):
                if node.role == "trainer" and node.market is Market.ON_DEMAND:
                    acts += 1
                    if facts.saved_ms is None or facts.now_ms - facts.saved_ms > promotion.SAVED_MS:
                        raise Broken(f"{node.name} is given back without a checkpoint")
        if isinstance(action, Buy) and action.slot.role == "trainer" and trainers:
            raise Broken(f"{action.name} is bought beside {trainers[0].name}")
    return acts


def promotes_too_early(patch: pytest.MonkeyPatch) -> None:
    real = promotion.successor_among

    def early(slot, held, facts, wanted):
        return real(slot, [replace(node, happened={**node.happened, "gone": 1}) for node in held], facts, wanted)

    patch.setattr("launcher.decide.reconcile.successor_among", early)
    patch.setattr("launcher.decide.reconcile.needs_successor", lambda slot, *_: True)


def gives_back_at_any_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(giving_back, "SAVED_MS", 10**12)


@pytest.mark.parametrize("bug", [promotes_too_early, gives_back_at_any_time], ids=lambda bug: bug.__name__)
def test_a_planted_fault_is_found(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(Broken):
        watch_many()


def test_a_stand_in_that_is_never_given_back_costs_more(monkeypatch):
    paid = run(OUTAGE, deadline_hours=12.6).micro_usd
    monkeypatch.setattr(giving_back, "SAVED_MS", -1)
    assert run(OUTAGE, deadline_hours=12.6).micro_usd > 1.2 * paid


@pytest.mark.parametrize("capacity", [ALWAYS, [3] * 9 + [0] + [3] * 6 * 60, [9] * 6 + [0] * 12 + [9] * 300])
@pytest.mark.parametrize("deadline_hours", [None, 12.0])
def test_a_replay_without_decisions_while_every_slot_works_is_the_same(monkeypatch, capacity, deadline_hours):
    quick = run(capacity, deadline_hours=deadline_hours)
    monkeypatch.setattr(replays, "WHOLE_MS", replays.QUIET_MS)
    assert run(capacity, deadline_hours=deadline_hours) == quick
