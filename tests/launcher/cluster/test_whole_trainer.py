"""A trainer of several nodes on simulated clouds: one zone, whole or given back, and never a node forgotten.

The controller, its ledger and every decision are real; the clouds and the clock are simulated.
"""

import contextlib
import random
from dataclasses import replace

import pytest
from sqlalchemy import select

from engine.events import Market
from engine.node_spec import role_token
from launcher.decide.facts import INCOMPLETE, Others
from launcher.decide.further_nodes import LACKING_MS
from launcher.ledger.models import Node, NodeEvent
from tests.launcher.cluster.stage import CLOUD_SITES, TRAINER_RATE, cloud_site, ledger
from tests.launcher.cluster.test_moving import MINUTE, Stage

TWO = {"trainers": 2, "max_hourly": 10_000_000}
LORA = {**TWO, "model": {"name": "digits-ocr", "weights": "lora"}}


@pytest.fixture
def sessions(home):
    return ledger(home)


def zones(stage: Stage) -> dict[str, str]:
    """Return the zone of each live node of the trainer."""
    return {name: record.zone for name, record in stage.records().items() if record.is_live and "trainer" in name}


def incomplete(stage: Stage, kind: str = INCOMPLETE) -> dict[str, str]:
    """Return why nodes were given back because their trainer never was whole, or what the event of a `kind` says."""
    with stage.sessions() as session:
        of_kind = select(Node.name, NodeEvent).join(Node, Node.id == NodeEvent.node_id)
        events = session.execute(of_kind.where(NodeEvent.kind == kind))
        return {name: event.evidence for name, event in events}


def test_the_further_node_is_bought_in_the_real_zone_of_the_first_and_rollouts_after_it(sessions):
    stage = Stage(sessions, **TWO)
    stage.cloud.room["gcp/g1/g1-a"] = 0
    stage.controller.one_pass()
    assert list(stage.records()) == ["demo-trainer-g0"], "its zone is not known yet"
    stage.passes(5)
    assert zones(stage) == {"demo-trainer-g0": "g1-b", "demo-trainer-1-g0": "g1-b"}
    want, spec, _ = stage.cloud.requested["demo-trainer-1-g0"]
    first = stage.cloud.requested["demo-trainer-g0"][0]
    assert want == replace(first, zone="g1-b"), "the same offer, in the zone of the first"
    assert (spec.role, spec.trainer_node, spec.trainer_nodes) == ("ranks", 1, 2)
    specs = {name: spec for name, (_, spec, _) in stage.cloud.requested.items()}
    tokens = {name: role_token(specs["demo-trainer-g0"].token, spec.role) for name, spec in specs.items()}
    assert {name: spec.own_token for name, spec in specs.items()} == tokens, "each node has the token of its role alone"
    assert specs["demo-trainer-1-g0"].token == tokens["demo-trainer-1-g0"]
    asked = {name: at_ms for name, (_, _, at_ms) in stage.cloud.requested.items()}
    assert min(asked["demo-spot-0-g0"], asked["demo-spot-1-g0"]) >= asked["demo-trainer-1-g0"]
    assert len(stage.live()) == 4


def test_a_trainer_that_is_not_whole_is_given_back_within_minutes_and_bought_elsewhere(sessions):
    """Zone a has room for one node only. Then zone b has no room, and after the wait another region is asked."""
    stage = Stage(sessions, spot=0, **TWO)
    stage.cloud.room |= {"gcp/g1/g1-a": 1, "gcp/g1/g1-b": 0}
    stage.passes(6)
    assert (
        incomplete(stage)["demo-trainer-g0"]
        == "the trainer lacks trainer-1: g1-a refused it: there is no capacity; tried gcp/g1/g1-a"
    )
    first = stage.records()["demo-trainer-g0"]
    assert first.happened["releasing"] - first.happened["up"] < LACKING_MS + MINUTE
    stage.passes(25)
    assert zones(stage) == dict.fromkeys(zones(stage), "g2-a")
    assert len(zones(stage)) == 2
    paid_ms = sum(
        record.ended_ms - record.happened["up"]
        for record in stage.records().values()
        if not record.is_live and "up" in record.happened
    )
    assert paid_ms < 10 * MINUTE, "a trainer that is not whole is paid for minutes, not for hours"


def test_another_zone_of_the_region_may_hold_the_whole_trainer(sessions):
    stage = Stage(sessions, spot=0, **TWO)
    stage.cloud.room |= {"gcp/g1/g1-a": 1}
    stage.passes(5)
    stage.cloud.room |= {"gcp/g1/g1-a": 0}
    stage.passes(10)
    assert set(zones(stage).values()) == {"g1-b"}
    assert len(zones(stage)) == 2


@pytest.mark.parametrize("lost", ["demo-trainer-g0", "demo-trainer-1-g0"])
def test_the_successor_of_a_lost_node_is_bought_beside_the_other(sessions, lost):
    stage = Stage(sessions, **TWO)
    stage.cloud.room["gcp/g1/g1-a"] = 0
    stage.passes(5)
    stage.cloud.room.clear()
    stage.cloud.end(lost, "it stopped answering")
    stage.passes(5)
    successor = lost.replace("-g0", "-g1")
    assert zones(stage)[successor] == "g1-b"
    assert len(stage.live()) == 4
    assert not incomplete(stage)


@pytest.mark.parametrize(
    ("lost", "job"), [("demo-trainer-g0", TWO), ("demo-trainer-1-g0", TWO), ("demo-trainer-g0", LORA)]
)
def test_a_whole_trainer_whose_zone_lacks_a_successor_moves_within_its_region(sessions, lost, job):
    """A trainer that may lack a node does so too, if that is its first."""
    stage = Stage(sessions, **job)
    stage.passes(30, step_ms=30_000)
    stage.cloud.room["gcp/g1/g1-a"] = 0
    stage.cloud.end(lost, "it stopped answering")
    stage.passes(10)
    assert set(zones(stage).values()) == {"g1-b"}
    assert len(zones(stage)) == 2
    assert {site for _, site in stage.live().items()} == {("gcp", "g1")}, "half an hour of training is no outage"
    assert sum("spot" in name for name in stage.live()) == 2, "rollout nodes stay"
    assert not incomplete(stage), "the trainer was whole"
    [why] = incomplete(stage, "releasing").values()
    assert why == f"the trainer lacks {lost[5:-3]}: g1-a refused it: there is no capacity; tried gcp/g1/g1-a"


def test_a_trainer_that_may_lack_a_node_stays_and_asks_for_it_again(sessions):
    """LoRA: for two hours the zone has no room for the lost node. Rollout nodes are replaced meanwhile."""
    stage = Stage(sessions, **LORA)
    stage.passes(30, step_ms=30_000)
    stage.cloud.room["gcp/g1/g1-a"] = 0
    stage.cloud.end("demo-trainer-1-g0", "it stopped answering")
    stage.passes(60, step_ms=30_000)
    assert zones(stage) == {"demo-trainer-g0": "g1-a"}, "the first node trains on"
    asked = [name for name in stage.cloud.requested if name.startswith("demo-trainer-1-")]
    assert 3 < len(asked) < 30, "asked again, at growing intervals"
    stage.cloud.end("demo-spot-0-g0", "it stopped answering")
    stage.passes(60, step_ms=30_000)
    assert sum("spot" in name for name in stage.live()) == 2
    stage.cloud.room.clear()
    stage.passes(60, step_ms=30_000)
    assert set(zones(stage).values()) == {"g1-a"}
    assert len(zones(stage)) == 2
    assert not incomplete(stage)


def test_a_trainer_that_may_lack_a_node_is_bought_whole_at_first(sessions):
    stage = Stage(sessions, spot=0, **LORA)
    stage.cloud.room |= {"gcp/g1/g1-a": 1, "gcp/g1/g1-b": 0}
    stage.passes(6)
    assert "demo-trainer-g0" in incomplete(stage)


def test_a_quota_that_never_holds_the_whole_trainer_sends_it_to_another_region(sessions):
    stage = Stage(sessions, spot=0, **TWO)
    stage.cloud.quota["gcp/g1"] = 1
    stage.passes(10)
    assert set(stage.live().values()) == {("gcp", "g2")}
    assert "VcpuLimitExceeded in gcp g1" in incomplete(stage)["demo-trainer-g0"]
    assert "demo-trainer-2-g0" not in stage.records()


def test_a_run_fails_if_no_quota_holds_the_whole_trainer(sessions):
    stage = Stage(sessions, spot=0, **TWO)
    stage.cloud.quota |= {"gcp/g1": 1, "gcp/g2": 1, "aws/e1": 1}
    stage.passes(40, step_ms=30_000)
    status, reason = stage.reason()
    assert status == "failed"
    assert "no trainer can be had" in reason
    assert "VcpuLimitExceeded in aws e1" in reason
    assert stage.cloud.live() == []


def test_a_quota_held_by_a_node_that_has_just_ended_is_no_denial(sessions):
    """A cloud may count a node for minutes after its end. The successor is refused for that time only."""
    stage = Stage(sessions, spot=0, **TWO)
    stage.passes(30)
    stage.cloud.end("demo-trainer-1-g0", "it stopped answering")
    stage.cloud.quota["gcp/g1"] = 1
    stage.passes(1)
    stage.cloud.quota["gcp/g1"] = 2
    stage.passes(5)
    assert len(zones(stage)) == 2
    assert set(stage.live().values()) == {("gcp", "g1")}


def test_the_first_node_is_not_bought_if_the_hourly_limit_does_not_bear_all(sessions):
    stage = Stage(sessions, spot=0, trainers=2, max_hourly=round(1.5 * TRAINER_RATE))
    stage.passes(1)
    assert stage.records() == {}
    assert stage.reason() == ("stopped", "budget")


def test_trainer_nodes_are_given_back_if_other_runs_took_the_money(sessions, monkeypatch):
    stage = Stage(sessions, spot=0, **TWO)
    stage.passes(0.5)
    assert list(stage.records()) == ["demo-trainer-g0"]
    facts_in = stage.controller._facts_in
    limits = replace(stage.controller.wanted.limits, max_hourly=10_000_000)
    monkeypatch.setattr(stage.controller, "wanted", replace(stage.controller.wanted, all_runs=limits))
    monkeypatch.setattr(
        stage.controller, "_facts_in", lambda session: replace(facts_in(session), others=Others(hourly=9_000_000))
    )
    stage.passes(3)
    assert "released" in stage.records()["demo-trainer-g0"].happened
    assert incomplete(stage, "releasing")["demo-trainer-g0"].startswith("trainer-1 is not bought: all_runs.max_hourly")
    assert not any("trainer-1" in name for name in stage.records())


@pytest.mark.parametrize(
    "stops_at", [1, 2, 4, *(pytest.param(passes, marks=pytest.mark.slow) for passes in (0, 3, 5, 6, 7))]
)
def test_a_controller_killed_at_any_pass_forgets_no_node(sessions, stops_at):
    """A new controller goes on after each number of passes; the nodes are those of a run without a break."""
    stage = Stage(sessions, **TWO)
    stage.cloud.room |= {"gcp/g1/g1-a": 1}
    for _ in range(stops_at):
        stage.passes(0.5)
    stage.controller = stage.another()
    stage.cloud.room |= {"gcp/g1/g1-a": 0}
    stage.passes(12)
    assert set(zones(stage).values()) == {"g1-b"}
    assert len(stage.live()) == 4
    assert set(stage.cloud.live()) == set(stage.live())


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_release_that_was_recorded_and_not_ordered_is_ordered_by_the_next_controller(sessions, monkeypatch, how):
    """The controller is killed between its record and its order, or frozen there until another one has taken over."""
    stage = Stage(sessions, spot=0, **TWO)
    stage.cloud.room |= {"gcp/g1/g1-a": 1}
    release, not_ordered = stage.cloud.release, []

    def interrupted(names) -> None:
        not_ordered.extend(names)
        stage.cloud.room |= {"gcp/g1/g1-a": 0}
        monkeypatch.setattr(stage.cloud, "release", release)
        stage.controller = stage.another()
        if how == "SIGKILL":
            raise KeyboardInterrupt

    monkeypatch.setattr(stage.cloud, "release", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        stage.passes(10)
    assert not_ordered == ["demo-trainer-g0"]
    stage.passes(10)
    assert "demo-trainer-g0" not in stage.cloud.live()
    assert set(zones(stage).values()) == {"g1-b"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_over_random_clouds_trainer_nodes_share_a_zone_and_money_stays_within_bounds(sessions, seed):
    """Rooms, quotas and losses at random, for 6 periods of 15 minutes. Seeds fixed beforehand."""
    chance = random.Random(seed)
    stage = Stage(sessions, trainers=3, spot=2, max_hourly=10_000_000, sites=(*CLOUD_SITES, cloud_site("aws", "e2")))
    for _ in range(6):
        for site in ("gcp/g1/g1", "gcp/g2/g2", "aws/e1/e1", "aws/e2/e2"):
            for zone in "ab":
                stage.cloud.room[f"{site}-{zone}"] = chance.choice([0, 1, 2, 3, 99])
        for name in stage.cloud.live():
            if chance.random() < 0.2:
                stage.cloud.end(name, f"lost {chance.random()}")
        for _ in range(30):
            stage.passes(0.5, step_ms=30_000)
            records = [record for record in stage.records().values() if record.is_live]
            known = {r.zone for r in records if r.role != "rollout" and not r.is_leaving and "up" in r.happened}
            assert len(known) <= 1, f"the trainer's nodes are in {known}"
            assert set(stage.cloud.live()) <= {record.name for record in records}, "a node was forgotten"
            assert sum(r.micro_usd_per_hour for r in records if not r.is_leaving) <= 10_000_000
        if stage.reason()[0] in ("failed", "stopped"):
            break
    stage.cloud.room.clear()
    for _ in range(4):
        stage.passes(15, step_ms=30_000)
        if len(zones(stage)) == 3:
            break
    assert len(zones(stage)) == 3 or stage.reason()[0] == "failed", stage.reason()
    on_demand = [r for r in stage.records().values() if r.market is Market.ON_DEMAND and r.role != "rollout"]
    assert on_demand
