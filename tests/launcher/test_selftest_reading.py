"""The facts of a selftest come from the ledger as it is written, and from the cloud's own list."""

from dataclasses import replace

from sqlalchemy.orm import sessionmaker

from engine.events import CheckpointSaved, IterationDone, Market, NodeServed
from launcher.clouds.base import Instance, InstanceState, Resource
from launcher.clouds.preempting import OrderState, Progress
from launcher.ledger.models import NodeEvent
from launcher.selftest.facts import Preempted
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
