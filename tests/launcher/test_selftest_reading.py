"""The facts of a selftest come from the ledger as it is written, and from the cloud's own list."""

from dataclasses import replace

from sqlalchemy import select
from sqlalchemy.orm import sessionmaker

from engine.events import CheckpointSaved, IterationDone, Market, NodeMissed, NodeServed
from launcher.clouds.base import Instance, InstanceState, Resource
from launcher.clouds.preempting import OrderState, Progress
from launcher.ledger.accounting import side_costs_of_run
from launcher.ledger.models import BillingInterval, NodeEvent
from launcher.selftest.facts import Batch, Facts, Preempted, Saved, Start
from launcher.selftest.reading import Seen, instance_of_node, left_in_cloud, read_facts, regions_of
from launcher.selftest.steps import Step, Verdict, judge
from tests.launcher.cluster.fake_cloud import FakeCloud
from tests.launcher.made_ledger import JOB, MINUTE_MS, START_MS, MadeLedger, a_run, a_session

RUN = "selftest"


def a_preempted_run(path):
    """Make a ledger of a run with a trainer, a preempted spot node and its successor, stopped after 30 minutes."""
    session = a_session(path)
    made = a_run(session, RUN, job=JOB | {"iterations": 200}, factor=1.0)
    made.run.max_total_micro_usd = 4_500_000
    made.status("running", 0)
    made.started(2 * MINUTE_MS)
    ends = {"trainer": 30, "spot-0": 12}
    for slot, end in ends.items():
        market = "on_demand" if slot == "trainer" else "spot"
        node = made.node(slot, 0, market=market, up=MINUTE_MS, end=end * MINUTE_MS, rate=360_000)
        events(made, node, ready=3, **({"notice": 10} if slot == "spot-0" else {}), gone=end)
    lost = made.nodes[f"{RUN}-spot-0-g0"]
    made.preempted(lost, 12 * MINUTE_MS, noticed=10 * MINUTE_MS)
    other = made.node("spot-0", 1, up=12 * MINUTE_MS, end=30 * MINUTE_MS, rate=360_000)
    events(made, other, ready=14, gone=30)
    for node, at in ((lost, 4), (other, 15)):
        made.record(NodeServed(node=node.name, worker="0"), at * MINUTE_MS)
    for iteration, at in enumerate((5, 6, 13, 16)):
        maker = lost if at < 12 else other
        made.record(batch(iteration, {f"{RUN}-trainer-g0": 6, maker.name: 4}), at * MINUTE_MS)
    made.record(CheckpointSaved(iteration=4, path="checkpoints/l0000-i000004", digest="d"), 17 * MINUTE_MS)
    made.status("stopped", 30 * MINUTE_MS, "asked for by a person")
    session.commit()
    return sessionmaker(session.get_bind())


def events(made: MadeLedger, node, **minutes):
    for kind, at in minutes.items():
        made.session.add(NodeEvent(node_id=node.id, at_ms=START_MS + at * MINUTE_MS, kind=kind, evidence="the cloud"))


def batch(iteration, made_by):
    return IterationDone(
        iteration=iteration,
        reward_mean=0.5,
        reward_std=0.1,
        group_std_mean=0.1,
        explored=0,
        manifest_digest="m",
        phase_ms={},
        wall_seconds=1.0,
        health={},
        made_by=made_by,
    )


def test_the_steps_pass_by_the_facts_of_a_ledger(tmp_path):
    sessions = a_preempted_run(tmp_path / "ledger.sqlite")
    state = OrderState(progress=Progress.DONE, text="completed")
    order = Preempted(
        node=f"{RUN}-spot-0-g0", at_ms=START_MS + 9 * MINUTE_MS, means="FIS", notice_ms=120_000, state=state
    )
    seen = Seen(order=order, stored="l0000-i000004", stopped_ms=START_MS + 30 * MINUTE_MS, in_cloud=())
    facts = read_facts(sessions, RUN, seen)
    found = {step: judge(step, facts) for step in Step if step is not Step.RESUME}
    assert {step: one.text for step, one in found.items() if one.verdict is not Verdict.PASSED} == {}
    # 29, 11 and 18 minutes at $0.36/h
    assert (facts.spent_micro_usd, [paid.micro_usd for paid in facts.paid]) == (348_000, [174_000, 66_000, 108_000])
    assert facts.spot is not None
    assert facts.spot.name == order.node
    assert regions_of(sessions, RUN) == ["us-east-1"]


def test_only_the_clouds_own_list_tells_what_is_left():
    cloud = FakeCloud()
    assert left_in_cloud(cloud, RUN, ["us-east-1"]) == ()
    assert instance_of_node(cloud, "us-east-1", RUN, f"{RUN}-spot-0-g0") is None
    disk = Resource(cloud="aws", region="us-east-1", kind="disk", id="vol-1", run=RUN)
    cloud.resources = lambda region, **_: [disk] if region == "us-east-1" else []
    assert left_in_cloud(cloud, RUN, ["us-east-1"]) == ("disk in us-east-1",)


def test_what_is_left_counts_in_the_regions_of_nodes_and_beyond_all_regions():
    """A role has no region, and is listed at the cloud's home, where a run may have had no node."""
    cloud, other = FakeCloud(home="us-east-1"), "us-west-2"
    running = an_instance(other)
    cloud.has = {
        "i-1": running,
        "i-2": replace(running, name=f"{RUN}-spot-1-g0", state=InstanceState.GONE),
        "i-3": replace(running, name=f"{RUN}-spot-2-g0", region="eu-west-1"),
    }
    role = Resource(cloud="aws", region="", kind="role", id="spotrl-selftest", run=RUN)
    group = replace(role, region=other, kind="group", id="sg-1")
    cloud.other = {one.id: one for one in (role, group)}
    left = ("role in all regions", f"machine {running.name}", f"group in {other}")
    assert left_in_cloud(cloud, RUN, [other]) == left
    assert instance_of_node(cloud, other, RUN, running.name) == running
    assert instance_of_node(cloud, other, RUN, f"{RUN}-spot-1-g0") is None, "it is gone"


def test_every_machine_that_has_not_ended_and_only_this_runs_is_left():
    cloud, region = FakeCloud(home="us-east-1"), "us-west-2"
    states = [state for state in InstanceState if state is not InstanceState.GONE]
    instances = [replace(an_instance(region), name=f"{RUN}-{state}", state=state) for state in states]
    others = replace(an_instance(region), name="other-spot-0-g0", run="other")
    disk = Resource(cloud="aws", region=region, kind="disk", id="vol-1", run="other")
    cloud.has = {one.name: one for one in (*instances, others)}
    cloud.other = {disk.id: disk}
    assert left_in_cloud(cloud, RUN, [region]) == tuple(f"machine {one.name}" for one in instances)
    ordered = {state: instance_of_node(cloud, region, RUN, f"{RUN}-{state}") is not None for state in states}
    assert [state for state, is_found in ordered.items() if is_found] == [InstanceState.RUNNING]
    assert instance_of_node(cloud, region, RUN, others.name) is None


# --- facts of the ledger ------------------------------------------------------------------------------------

AT = START_MS + MINUTE_MS
ORDER = Preempted(
    node=f"{RUN}-spot-0-g0",
    at_ms=START_MS + 9 * MINUTE_MS,
    means="FIS",
    notice_ms=None,
    state=OrderState(progress=Progress.RUNNING),
)


def a_running_run(path) -> MadeLedger:
    made = a_run(a_session(path), RUN, job=JOB | {"iterations": 200}, factor=1.0)
    made.status("running", 0)
    return made


def facts_of(made: MadeLedger, **seen) -> Facts:
    made.session.commit()
    return read_facts(sessionmaker(made.session.get_bind()), RUN, Seen(**seen))


def test_the_stage_of_a_run_and_what_the_selftest_saw_are_facts(tmp_path):
    facts = read_facts(a_preempted_run(tmp_path / "ledger.sqlite"), RUN, Seen())
    assert (facts.stage, facts.reason, facts.max_total_micro_usd) == ("stopped", "asked for by a person", 4_500_000)
    assert (facts.stopped_ms, facts.resumed_ms, facts.in_cloud, facts.order, facts.stored) == (None,) * 5
    seen = Seen(order=ORDER, stored="l0001-i000004", stopped_ms=1, resumed_ms=2, in_cloud=("disk in us-east-1",))
    facts = read_facts(a_preempted_run(tmp_path / "another.sqlite"), RUN, seen)
    assert (facts.stopped_ms, facts.resumed_ms, facts.in_cloud) == (1, 2, seen.in_cloud)
    assert (facts.order, facts.stored) == (ORDER, "l0001-i000004")


def test_batches_starts_and_checkpoints_keep_their_lineage_and_time(tmp_path):
    made = a_running_run(tmp_path / "ledger.sqlite")
    made.started(MINUTE_MS)
    made.started(3 * MINUTE_MS, iteration=2, lineage=1)
    made.record(batch(1, {"a": 6, "b": 4}), 2 * MINUTE_MS)
    made.record(batch(2, {"a": 10}), 4 * MINUTE_MS, lineage=1)
    made.record(CheckpointSaved(iteration=3, path="checkpoints/l0001-i000003", digest="d"), 5 * MINUTE_MS, lineage=1)
    facts = facts_of(made)
    assert facts.starts == [
        Start(iteration=0, lineage=0, at_ms=AT),
        Start(iteration=2, lineage=1, at_ms=AT + 2 * MINUTE_MS),
    ]
    assert facts.batches == [
        Batch(iteration=1, lineage=0, at_ms=AT + MINUTE_MS, made_by={"a": 6, "b": 4}),
        Batch(iteration=2, lineage=1, at_ms=AT + 3 * MINUTE_MS, made_by={"a": 10}),
    ]
    assert facts.saved == [Saved(iteration=3, name="l0001-i000003")]
    assert facts.batch_size == 10


def test_a_nodes_facts_are_those_of_its_record(tmp_path):
    made = a_running_run(tmp_path / "ledger.sqlite")
    lost = made.node("spot-0", 0, up=MINUTE_MS, end=12 * MINUTE_MS, rate=360_000, zone="us-west-2b")
    events(made, lost, ready=3, notice=10, gone=12)
    made.preempted(lost, 12 * MINUTE_MS)
    ended = made.node("spot-1", 3, up=MINUTE_MS, end=12 * MINUTE_MS, rate=360_000)
    events(made, ended, ready=2, gone=12)
    alive = made.node("trainer", 1, market="on_demand", up=MINUTE_MS, zone="us-east-1a")
    for minutes in (5, 6):
        made.record(NodeServed(node=lost.name, worker=f"{minutes}"), minutes * MINUTE_MS)
    facts = facts_of(made)
    node = facts.node(lost.name)
    assert node is not None
    assert (node.slot, node.generation, node.role, node.market) == ("spot-0", 0, "rollout", "spot")
    assert (node.zone, node.instance_type, node.micro_usd_per_hour) == ("us-west-2b", "g6.xlarge", 360_000)
    minutes = {kind: (at_ms - START_MS) // MINUTE_MS for kind, at_ms in node.happened.items()}
    assert minutes == {"up": 1, "ready": 3, "notice": 10, "gone": 12}
    assert (node.requested_ms, node.ended_ms) == (START_MS, START_MS + 12 * MINUTE_MS)
    assert (node.evidence, node.reclaimed, node.served_ms) == ("the cloud", True, START_MS + 5 * MINUTE_MS)
    other, trainer = facts.node(ended.name), facts.node(alive.name)
    assert other is not None
    assert trainer is not None
    assert (other.generation, other.reclaimed, other.served_ms) == (3, False, None)
    assert (trainer.role, trainer.market, trainer.ended_ms) == ("trainer", "on_demand", None)
    assert list(facts.still_running) == [alive.name]
    assert regions_of(sessionmaker(made.session.get_bind()), RUN) == ["us-east-1", "us-west-2"]


def test_lost_steps_of_the_ordered_node_count_from_the_order_on(tmp_path):
    made = a_running_run(tmp_path / "ledger.sqlite")
    for slot in ("spot-0", "spot-1", "spot-2", "spot-3"):
        made.node(slot, 0, up=MINUTE_MS)
    losses = [("spot-0", 8, 100), ("spot-0", 9, 1), ("spot-0", 10, 2), ("spot-1", 8, 40), ("spot-2", 10, 0)]
    for slot, minutes, steps in losses:
        missed = NodeMissed(node=f"{RUN}-{slot}-g0", reason="reclaimed", lost_steps=steps, fenced_requests=1)
        made.record(missed, minutes * MINUTE_MS)
    ordered = {node.slot: node.lost_steps for node in facts_of(made, order=ORDER).nodes}
    assert ordered == {"spot-0": 3, "spot-1": 40, "spot-2": 0, "spot-3": None}
    assert {node.slot: node.lost_steps for node in facts_of(made).nodes}["spot-0"] == 103, "no order yet"


def test_each_billed_stretch_has_its_rate_and_the_last_what_is_missing_of_the_minimum(tmp_path):
    """A node that changed its zone's price twice within its first minute, a free node, and one that still runs."""
    made = a_running_run(tmp_path / "ledger.sqlite")
    made.run.infra = "aws"
    short = made.node("spot-0", 0, rate=360_000, up=0, end=20_000)
    made.bill(short, 20_000, 50_000)
    long = made.node("spot-1", 0, rate=720_000, up=0, end=90_000)
    made.bill(long, 90_000, 100_000)
    free = made.node("spot-2", 0, rate=360_000, up=0, end=MINUTE_MS)
    made.bill(free, MINUTE_MS, 2 * MINUTE_MS)
    made.session.flush()
    first = made.session.scalars(select(BillingInterval).where(BillingInterval.node_id == free.id)).first()
    first.basis = "metered; not billed: AWS interrupted it in its first hour"
    for node, minutes in ((short, 1), (long, 2), (free, 2)):
        events(made, node, gone=minutes)
    made.node("trainer", 0, rate=360_000, up=0)
    made.status("stopped", 3 * MINUTE_MS)
    paid = {name: [one for one in facts_of(made).paid if one.node == f"{RUN}-{name}-g0"] for name in SLOTS}
    assert [(one.ms, one.minimum_ms) for one in paid["spot-0"]] == [(20_000, 0), (30_000, 40_000)]
    assert [(one.ms, one.minimum_ms) for one in paid["spot-1"]] == [(90_000, 0), (10_000, 0)]
    assert [one.is_free for one in paid["spot-2"]] == [True, False]
    assert {one.micro_usd_per_hour for one in paid["spot-1"]} == {720_000}
    assert [one.is_closed for one in paid["trainer"]] == [False]
    assert {one.is_closed for one in (*paid["spot-0"], *paid["spot-1"], *paid["spot-2"])} == {True}
    facts = facts_of(made)
    assert facts.beside_micro_usd == sum(cost.micro_usd for cost in side_costs_of_run(made.session, made.run, NOW)) > 0


SLOTS = ("spot-0", "spot-1", "spot-2", "trainer")
NOW = START_MS + 3 * MINUTE_MS


def an_instance(region):
    return Instance(
        cloud="aws",
        region=region,
        zone=f"{region}a",
        id="i-1",
        name=f"{RUN}-spot-0-g0",
        run=RUN,
        owner="me",
        state=InstanceState.RUNNING,
        market=Market.SPOT,
        instance_type="g6.xlarge",
        address="10.0.0.1",
        public_address="198.51.100.1",
        launched_ms=0,
    )
