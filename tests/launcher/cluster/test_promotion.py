"""A node that is up takes the role of a lost spot trainer: the decision, the ledger, and the nodes of this machine."""

import errno
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import select

from engine.events import CheckpointSaved, Market, StoreAway
from engine.node_spec import NodeSpec, role_token
from launcher.cli.status import headline
from launcher.controller.controller import Controller
from launcher.decide.actions import Buy, Promote, RepeatPromotion
from launcher.decide.budget_guard import Limits
from launcher.decide.facts import PROMOTED, Facts, NodeRecord, Stage, Wanted, promotion_of, promotion_text
from launcher.decide.node_events import news
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.decide.promotion import STORE_AWAY_MS
from launcher.decide.reconcile import decide
from launcher.ledger.models import MOVE, Node, NodeEvent, ProgressRow
from launcher.ledger.node_history import last_trainer_cloud, node_records
from launcher.market.offers import CLOUDS
from launcher.money import HOUR_MS
from launcher.notifications.notices import due_notices
from launcher.notifications.notifier import facts_of
from launcher.placement.options import Option
from launcher.placement.plan import Slot
from launcher.provision.local.node_records import NodeRecords
from launcher.provision.local.processes import processes_of
from launcher.provision.local.provisioner import LocalProvisioner, node_folder
from launcher.runs.event_lines import event_lines
from launcher.runs.runs import request_stop
from launcher.runs.views import run_view
from tests.launcher.cluster.stage import CLOUD_SITES, SPOT_RATE, ledger, made_run, placement, slots
from tests.launcher.cluster.test_controller import controller_of, names_ready, passes, run_until_over, status_of
from tests.launcher.cluster.test_moving import MINUTE
from tests.launcher.cluster.test_moving import Stage as CloudRun

NOW = 10_000_000


def on_spot(spot: int = 2) -> tuple[Slot, ...]:
    trainer, *others = slots(spot)
    return (replace(trainer, placement=placement(Market.SPOT)), *others)


def node(slot: str, generation: int = 0, *, role: str = "", up: int = NOW - 3_600_000, **happened: int) -> NodeRecord:
    times = {"requested": up, "up": up, "ready": up, **happened}
    return NodeRecord(
        name=f"demo-{slot}-g{generation}",
        slot=slot,
        generation=generation,
        role=role or ("trainer" if slot.startswith("trainer") else "rollout"),
        market=Market.SPOT,
        micro_usd_per_hour=SPOT_RATE,
        requested_ms=up,
        reserved_micro_usd=0,
        happened={kind: at_ms for kind, at_ms in times.items() if at_ms >= 0},
        reclaimed="gone" in happened,
        evidence="preempted by the local cloud" if "gone" in happened else "",
    )


def wanted(*slots_of_run: Slot) -> Wanted:
    return Wanted(
        run="demo",
        slots=slots_of_run or on_spot(),
        limits=Limits(max_total=None, max_hourly=None),
        deadline_ms=None,
        allowance_ms=1000,
        settle_ms=1000,
    )


def actions(*nodes: NodeRecord, of: Wanted | None = None):
    facts = Facts(
        now_ms=NOW, stage=Stage.RUNNING, reason="", stage_ms=0, planned_ms=0, nodes=nodes, metered=0, advances_ms=(NOW,)
    )
    return decide(facts, of or wanted())


LOST = node("trainer", gone=NOW - 1)


def test_the_oldest_node_that_is_up_takes_the_role_and_its_slot_is_filled_again():
    found = actions(LOST, node("spot-0", up=NOW - 600_000), node("spot-1"))
    assert [action for action in found if isinstance(action, Promote)] == [
        Promote(
            node="demo-spot-1-g0",
            slot="trainer",
            generation=1,
            why="demo-trainer-g0 ended: preempted by the local cloud",
        )
    ]
    assert [action.name for action in found if isinstance(action, Buy)] == ["demo-spot-1-g1"]


@pytest.mark.parametrize(
    "candidate",
    [
        node("spot-0", notice=NOW - 1),
        node("spot-0", releasing=NOW - 1),
        node("spot-0", ready=-1),
        node("spot-0", up=-1, ready=-1),
        node("spot-0", gone=NOW - 1),
        replace(node("spot-0"), role="ranks"),
    ],
    ids=["notice", "leaving", "not ready", "not up", "gone", "ranks"],
)
def test_without_a_node_that_can_take_the_role_a_trainer_is_bought(candidate):
    found = actions(LOST, candidate, of=wanted(*on_spot(1)))
    assert not [action for action in found if isinstance(action, Promote)]
    assert "demo-trainer-g1" in [action.name for action in found if isinstance(action, Buy)]


def test_no_node_is_promoted_while_the_old_trainer_may_still_run():
    for happened in ({}, {"notice": NOW - 1}, {"releasing": NOW - 1}):
        found = actions(node("trainer", **happened), node("spot-0"), node("spot-1"))
        assert not [action for action in found if isinstance(action, Promote)]
    promoted = replace(node("spot-0"), slot="trainer", role="trainer", generation=1)
    assert not [action for action in actions(LOST, promoted, node("spot-1")) if isinstance(action, Promote)]


def test_the_first_trainer_is_bought_and_one_on_demand_is_replaced_by_one_on_demand():
    assert not [action for action in actions(node("spot-0")) if isinstance(action, Promote)]
    found = actions(LOST, node("spot-0"), of=wanted(*slots(1)))
    assert [action.name for action in found if isinstance(action, Buy)] == ["demo-trainer-g1"]


def test_a_node_with_other_gpus_cannot_take_the_role():
    trainer, small, equal = on_spot(2)
    small = replace(small, placement=replace(small.placement, accelerator="T4"))
    (found,) = [
        one
        for one in actions(LOST, node("spot-0"), node("spot-1"), of=wanted(trainer, small, equal))
        if isinstance(one, Promote)
    ]
    assert found.node == "demo-spot-1-g0"
    small = replace(small, placement=replace(small.placement, accelerator="L4", gpus=2))
    found = actions(LOST, node("spot-0"), of=wanted(trainer, small))
    assert not [action for action in found if isinstance(action, Promote)]


def test_the_order_is_repeated_until_the_promoted_node_has_called_in():
    promoted = replace(node("spot-0", ready=-1, promoted=NOW - 5), slot="trainer", role="trainer", generation=1)
    found = actions(LOST, promoted, node("spot-0", 1), node("spot-1"))
    assert [action for action in found if isinstance(action, RepeatPromotion)] == [
        RepeatPromotion(node="demo-spot-0-g0")
    ]
    ready = replace(promoted, happened={**promoted.happened, "ready": NOW - 1})
    assert not actions(LOST, ready, node("spot-0", 1), node("spot-1"))


@pytest.mark.parametrize(("node_says", "recorded"), [(-1, -1), (-60_000, -5), (+60_000, 0)])
def test_a_promoted_node_is_ready_when_its_new_processes_have_called_in(node_says, recorded):
    """The clock of a node on a cloud may be wrong, so the time alone does not tell old processes from new ones."""
    promoted = replace(node("spot-0", ready=-1, promoted=NOW - 5), slot="trainer", role="trainer", generation=1)
    fact = NodeFact(name=promoted.name, status=NodeStatus.UP, started_ms=NOW - 3_600_000, ready_ms=NOW + node_says)
    for role in ("", "rollout"):
        assert not news([promoted], {promoted.name: replace(fact, role=role)}, NOW)
    (note,) = news([promoted], {promoted.name: replace(fact, role="trainer")}, NOW)
    assert (note.kind, note.at_ms) == ("ready", NOW + recorded)


def test_the_checkpoint_is_taken_from_the_cloud_of_the_last_node_that_trained():
    """The second trainer was refused, the third was promoted on AWS, the fourth never called in after its promotion."""
    aws, gcp = (Option(placement=replace(placement(), cloud=cloud), on_demand_micro_usd_per_hour=1) for cloud in CLOUDS)
    first, refused = replace(node("trainer"), wanted=gcp), replace(node("trainer", 1, up=-1), wanted=aws)
    third, fourth, last = (
        replace(node(f"spot-{n}", ready=ready, promoted=NOW), slot="trainer", role="trainer", generation=n, wanted=at)
        for n, ready, at in ((2, NOW, aws), (3, -1, gcp), (4, -1, aws))
    )
    assert last_trainer_cloud([first, refused], refused) == "gcp"
    assert last_trainer_cloud([first, refused, third], third) == "gcp"
    assert last_trainer_cloud([last, fourth, third, refused, first], last) == "aws"
    assert last_trainer_cloud([first], first) is None


def test_the_event_names_slot_and_generation_whatever_the_evidence():
    assert promotion_of(promotion_text("trainer", 12, "demo-trainer-g11 ended: exit 1: a g3: b")) == ("trainer", 12)


# --- over real processes ------------------------------------------------------------------------------


@pytest.fixture
def sessions(home):
    return ledger(home)


def spot_trainer_run(sessions, **fields):
    return made_run(sessions, plan_slots=on_spot(), iterations=1000, **fields)


def spec_of(run, name: str) -> NodeSpec:
    return NodeSpec.model_validate_json((node_folder(Path(run.folder), name) / "node.json").read_text())


def record_of(sessions, run, name: str) -> NodeRecord:
    with sessions() as session:
        return next(record for record in node_records(session, run) if record.name == name)


def messages(sessions, run) -> list[str]:
    """Return the messages about promotions."""
    with sessions() as session:
        notices = due_notices(facts_of(session, run, run.clock.now_ms()), HOUR_MS)
        return [notice.text for notice in notices if notice.key.startswith("promoted")]


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_trainer_is_replaced_by_a_node_that_is_up(sessions, monkeypatch, signum):
    monkeypatch.setenv("FAKE_SECONDS", "0.1")
    monkeypatch.setattr("launcher.provision.local.node_end.STOPPED_SECONDS", 0.5)
    run = spot_trainer_run(sessions)
    controller = controller_of(sessions, run)
    passes(controller, lambda: len(names_ready(sessions, run)) == 3)
    assert spec_of(run, "demo-spot-0-g0").token == role_token(run.token, "rollout"), "no run's token before it trains"
    for pid in processes_of(node_folder(Path(run.folder), "demo-trainer-g0")):
        os.kill(pid, signum)
    passes(controller, lambda: record_of(sessions, run, "demo-spot-0-g0").role == "trainer")
    passes(controller, lambda: {"demo-spot-0-g0", "demo-spot-0-g1"} <= set(names_ready(sessions, run)))
    taken = record_of(sessions, run, "demo-spot-0-g0")
    assert (taken.slot, taken.generation, taken.market) == ("trainer", 1, Market.SPOT)
    spec = spec_of(run, "demo-spot-0-g0")
    assert (spec.role, spec.generation, spec.token) == ("trainer", 1, run.token)
    assert controller.engine.trainer == "demo-spot-0-g0"
    view = run_view(sessions, run.name)
    assert (view.trainer, 0 <= view.trainer_ms < view.elapsed_ms) == ("demo-spot-0-g0", True)
    assert [line for line in headline(view) if line.startswith("spot-0-g0 took the role of the trainer ")]
    (notice,) = messages(sessions, run)
    assert notice.startswith("demo: demo-spot-0-g0 trains now, from the newest checkpoint; demo-trainer-g0 ended: ")
    with sessions() as session:
        events = session.execute(select(Node.name, NodeEvent).join(NodeEvent).where(NodeEvent.kind == PROMOTED)).all()
        assert [(name, promotion_of(event.evidence)) for name, event in events] == [("demo-spot-0-g0", ("trainer", 1))]
        trainers = session.scalars(select(Node).where(Node.slot == "trainer")).all()
        assert [trainer.name for trainer in trainers] == ["demo-trainer-g0"], "no trainer was bought"
    request_stop(sessions, run.name)
    run_until_over(sessions, run, controller)
    assert status_of(sessions, run)[0] == "stopped"


class Stopped(BaseException):
    """The end of a controller, at a chosen step."""


@pytest.mark.slow
@pytest.mark.parametrize("step", ["assign", "kill_all", "spawn"])
def test_a_controller_that_dies_in_a_promotion_is_followed_by_one_that_ends_it(sessions, monkeypatch, step):
    monkeypatch.setenv("FAKE_SECONDS", "0.1")
    run = spot_trainer_run(sessions)
    controller = controller_of(sessions, run)
    passes(controller, lambda: len(names_ready(sessions, run)) == 3)

    def dies(*_: object, **__: object) -> None:
        raise Stopped

    for pid in processes_of(node_folder(Path(run.folder), "demo-trainer-g0")):
        os.kill(pid, signal.SIGKILL)
    with monkeypatch.context() as patch:
        if step == "assign":
            patch.setattr(LocalProvisioner, "assign", dies)
        elif step == "spawn":
            patch.setattr(LocalProvisioner, "_spawn", dies)
        else:
            passes(controller, lambda: record_of(sessions, run, "demo-trainer-g0").ended_ms is not None, 30)
            patch.setattr("launcher.provision.local.provisioner.processes.kill_all", dies)
        with pytest.raises(Stopped):
            passes(controller, lambda: False, 30)
    successor: Controller = controller_of(sessions, run)
    passes(successor, lambda: {"demo-spot-0-g0", "demo-spot-0-g1"} <= set(names_ready(sessions, run)))
    assert spec_of(run, "demo-spot-0-g0").role == "trainer"
    with sessions() as session:
        assert len(session.scalars(select(NodeEvent).where(NodeEvent.kind == PROMOTED)).all()) == 1
    request_stop(sessions, run.name)
    run_until_over(sessions, run, successor)


def test_a_node_about_to_be_preempted_gets_no_other_role(sessions):
    run = spot_trainer_run(sessions)
    controller = controller_of(sessions, run)
    passes(controller, lambda: len(names_ready(sessions, run)) == 3)
    folder, before = node_folder(Path(run.folder), "demo-spot-0-g0"), spec_of(run, "demo-spot-0-g0")
    provisioner = LocalProvisioner(Path(run.folder), run.clock, None)
    promoted = before.model_copy(update={"role": "trainer", "token": run.token})
    for name in ("reclaim.json", "ended.json"):
        (folder / name).write_text(json.dumps({"at_ms": 1, "evidence": "x", "ended_ms": 2}))
        provisioner.assign(promoted)
        assert spec_of(run, "demo-spot-0-g0") == before
        (folder / name).unlink()
    request_stop(sessions, run.name)
    run_until_over(sessions, run, controller)


def test_a_full_disk_ends_no_process_of_the_node_that_is_to_train(sessions, monkeypatch):
    run = spot_trainer_run(sessions)
    controller = controller_of(sessions, run)
    passes(controller, lambda: len(names_ready(sessions, run)) == 3)
    folder, before = node_folder(Path(run.folder), "demo-spot-0-g0"), spec_of(run, "demo-spot-0-g0")
    agents = processes_of(folder)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    promoted = before.model_copy(update={"role": "trainer", "token": run.token})
    with monkeypatch.context() as patch:
        patch.setattr(NodeRecords, "write", full)
        with pytest.raises(OSError, match="no space left"):
            LocalProvisioner(Path(run.folder), run.clock, None).assign(promoted)
    assert processes_of(folder) == agents
    assert spec_of(run, "demo-spot-0-g0") == before
    request_stop(sessions, run.name)
    run_until_over(sessions, run, controller)


# --- on simulated clouds -----------------------------------------------------------------------------


def cloud_stage(sessions, *, dear: int = 1, **fields) -> CloudRun:
    """Return a run on clouds whose slots are all on spot; the trainer may also be bought on demand.

    `dear`: prices of other regions over those of the first.
    """

    def priced(option: Option, factor: int) -> Option:
        rate = factor * option.placement.micro_usd_per_hour
        return replace(option, placement=replace(option.placement, micro_usd_per_hour=rate))

    sites = []
    for number, site in enumerate(CLOUD_SITES):
        rollout = tuple(priced(option, dear if number else 1) for option in site.rollout)
        sites.append(replace(site, rollout=rollout, trainer=(*rollout[:-1], *site.trainer)))
    stage = CloudRun(sessions, sites=sites, **fields)
    slots = [replace(slot, placement=sites[0].trainer[0].placement) if slot.role == "trainer" else slot
             for slot in stage.controller.wanted.slots]  # fmt: skip
    stage.controller.wanted = replace(stage.controller.wanted, slots=slots)
    return stage


def trainers(stage: CloudRun) -> list[NodeRecord]:
    return [record for record in stage.records().values() if record.role == "trainer" and record.is_live]


def saves(stage: CloudRun, iteration: int) -> None:
    """The trainer saves a checkpoint now."""
    with stage.sessions.begin() as session:
        (trainer,) = trainers(stage)
        event = {"iteration": iteration, "path": "", "digest": ""}
        session.add(
            ProgressRow(
                run_id=stage.run.id,
                source=trainer.name,
                lineage=99,
                seq=iteration,
                kind=CheckpointSaved.KIND,
                at_ms=stage.clock.now_ms(),
                event=event,
            )
        )


def test_on_clouds_a_node_that_is_up_takes_the_role_and_the_budget_guard_keeps_its_slot_empty(home):
    """The limit bears two of the three nodes by then. A promotion passes no guard; the purchase after it does."""
    stage = cloud_stage(ledger(home))
    stage.passes(8)
    (first,) = trainers(stage)
    assert (first.market, len(stage.live())) == (Market.SPOT, 3)
    two = 2 * first.running_micro_usd_per_hour
    stage.controller.wanted = replace(stage.controller.wanted, limits=Limits(max_total=None, max_hourly=two))
    bought = set(stage.cloud.requested)
    stage.cloud.preempt(first.name)
    stage.passes(4)
    (second,) = trainers(stage)
    assert PROMOTED in second.happened
    assert stage.cloud.requested[second.name][1].role == "trainer"
    assert set(stage.cloud.requested) == bought


def test_on_clouds_a_trainer_on_demand_is_given_back_after_a_checkpoint_and_not_before(home):
    stage = cloud_stage(ledger(home))
    stage.cloud.answers = {f"gcp/g1/g1-{zone}": "refuse" for zone in "ab"}
    stage.passes(40)
    (steady,) = trainers(stage)
    assert steady.market is Market.ON_DEMAND, "no spot for 30 minutes"
    stage.cloud.answers = {}
    stage.passes(60)
    spot = [record for record in stage.records().values() if record.is_ready and record.market is Market.SPOT]
    assert spot
    assert trainers(stage) == [stage.records()[steady.name]], "no checkpoint was saved"
    saves(stage, 1)
    stage.passes(4, step_ms=10_000)
    (promoted,) = trainers(stage)
    assert (promoted.market, steady.name in stage.cloud.released) == (Market.SPOT, True)
    assert promoted.happened[PROMOTED] >= stage.records()[steady.name].happened["released"]


class Bucket:
    """The lease in the bucket as a pass sees it: whether the bucket answers the controller."""

    spent = None
    answers = True

    def check(self) -> None:
        """The lease is ours."""


def says(stage: CloudRun, is_away: bool) -> None:
    """The trainer reports that its bucket does not answer it, or does again."""
    (trainer,) = trainers(stage)
    with stage.sessions.begin() as session:
        seq = stage.clock.now_ms()
        row = {"source": trainer.name, "lineage": 99, "seq": seq, "at_ms": seq}
        session.add(ProgressRow(run_id=stage.run.id, kind=StoreAway.KIND, event={"is_away": is_away}, **row))


def test_a_trainer_that_its_bucket_does_not_answer_gives_its_role_to_a_node_that_is_up(home):
    stage = cloud_stage(ledger(home))
    stage.controller.recorder.bucket_lease = bucket = Bucket()
    stage.passes(8)
    (first,) = trainers(stage)
    says(stage, is_away=True)
    stage.passes(STORE_AWAY_MS // MINUTE - 2)
    assert trainers(stage) == [stage.records()[first.name]], "the network may come back"
    bucket.answers = False
    stage.passes(5)
    assert trainers(stage) == [stage.records()[first.name]], "the bucket answers nobody"
    bucket.answers = True
    stage.passes(6)
    (second,) = trainers(stage)
    assert first.name in stage.cloud.released
    assert second.happened[PROMOTED] >= stage.records()[first.name].happened["released"]
    with stage.sessions() as session:
        told = [line.text for line in event_lines(session, stage.run) if line.kind == "releasing"]
    assert any("its bucket has not answered it for" in text for text in told), told
    says(stage, is_away=True)
    stage.passes(STORE_AWAY_MS // MINUTE + 4)
    assert trainers(stage) == [stage.records()[second.name]], "another one was tried, without a new iteration since"


def test_a_successor_is_not_released_for_the_wait_of_the_trainer_before_it(home):
    stage = cloud_stage(ledger(home))
    stage.controller.recorder.bucket_lease = Bucket()
    stage.passes(8)
    (first,) = trainers(stage)
    says(stage, is_away=True)
    stage.passes(STORE_AWAY_MS // MINUTE - 1)
    stage.cloud.preempt(first.name)
    stage.passes(6)
    (second,) = trainers(stage)
    assert PROMOTED in second.happened
    assert not stage.cloud.released


def test_a_bucket_that_answers_again_ends_the_wait(home):
    stage = cloud_stage(ledger(home))
    stage.controller.recorder.bucket_lease = Bucket()
    stage.passes(8)
    (first,) = trainers(stage)
    says(stage, is_away=True)
    stage.passes(4)
    assert stage.reason() == ("running", "waits: the bucket does not answer the trainer")
    says(stage, is_away=False)
    stage.passes(STORE_AWAY_MS // MINUTE + 4)
    assert trainers(stage) == [stage.records()[first.name]]
    assert stage.reason() == ("running", "")


def test_a_trainer_that_nobody_can_follow_waits_for_its_bucket(home):
    stage = cloud_stage(ledger(home))
    stage.controller.recorder.bucket_lease = Bucket()
    stage.passes(8)
    (first,) = trainers(stage)
    stage.cloud.answers = {f"gcp/g1/g1-{zone}": "refuse" for zone in "ab"}
    for record in stage.records().values():
        if record.role == "rollout":
            stage.cloud.preempt(record.name)
    says(stage, is_away=True)
    stage.passes(STORE_AWAY_MS // MINUTE + 4)
    assert trainers(stage) == [stage.records()[first.name]]


PACED = {"pace_ms": (120_000, 90_000, 60_000)}
"""Iterations of 2 minutes with the trainer alone, of 1 minute with both rollout nodes; 1,000 of them."""


def no_spot(*places: str) -> dict[str, str]:
    return {f"{place}-{zone}": "refuse" for place in places for zone in "ab"}


def moves(stage: CloudRun) -> list[str]:
    """Return the reasons of the run's moves, oldest first."""
    with stage.sessions() as session:
        rows = session.scalars(select(NodeEvent).where(NodeEvent.kind == MOVE).order_by(NodeEvent.id))
        return [event.evidence for event in rows]


def test_a_run_whose_region_has_no_spot_goes_where_spot_is_with_its_checkpoint(home):
    """To another region first, then to the other cloud. Nothing is bought on demand, and the way is written down."""
    stage = cloud_stage(ledger(home), **PACED)
    stage.passes(8)
    stage.cloud.answers = no_spot("gcp/g1/g1", "aws/e1/e1")
    for name in stage.live():
        stage.cloud.preempt(name)
    stage.passes(9)
    assert not moves(stage), "an outage of minutes is waited out"
    stage.passes(8)
    assert set(stage.live().values()) == {("gcp", "g2")}
    assert len(stage.live()) == 3
    assert re.fullmatch(
        r"no spot in gcp g1 for 1\dm( \d+s)?: the run moves to gcp g2, with about \$0.00 of traffic", moves(stage)[-1]
    )
    stage.carried.clear()
    stage.cloud.answers = no_spot("gcp/g1/g1", "gcp/g2/g2")
    for name in stage.live():
        stage.cloud.preempt(name)
    stage.passes(30)
    assert set(stage.live().values()) == {("aws", "e1")}
    assert stage.carried, "the checkpoint is copied to the bucket of the other cloud"
    assert {record.market for record in stage.records().values()} == {Market.SPOT}


@pytest.mark.parametrize(
    "reason", ["traffic", "price", "spot is back", "no spot anywhere", "a trainer on demand is planned"]
)
def test_a_move_that_does_not_pay_is_not_made(home, reason):
    stage = cloud_stage(
        ledger(home), dear=2 if reason == "price" else 1, moved_bytes=10**13 if reason == "traffic" else 0, **PACED
    )
    stage.passes(8)
    others = ("gcp/g2/g2", "aws/e1/e1") if reason == "no spot anywhere" else ()
    stage.cloud.answers = no_spot("gcp/g1/g1", *others)
    if reason == "a trainer on demand is planned":
        slots = [
            replace(slot, placement=replace(slot.placement, market=Market.ON_DEMAND))
            if slot.role == "trainer"
            else slot
            for slot in stage.controller.wanted.slots
        ]
        stage.controller.wanted = replace(stage.controller.wanted, slots=slots)
    for name in stage.live():
        stage.cloud.preempt(name)
    stage.passes(8)
    if reason == "spot is back":
        stage.cloud.answers = {}
    stage.passes(12)
    assert set(stage.live().values()) <= {("gcp", "g1")}, moves(stage)
