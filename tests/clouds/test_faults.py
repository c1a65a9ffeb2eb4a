"""Faults of running runs on both fake clouds: three runs of `spotrl launch`, with tests in a fixed order.

`steady` trains on Google Cloud and must survive every fault; `priced` meets rising prices on AWS; `abandoned` loses its
controller for good. They share a ledger on a small disk that is filled. The AWS bucket is in another region, as a
user's may be. Preemptions are in test_run.py.
"""

import json
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from engine.models.digits import BASE
from engine.node_spec import role_token
from launcher.decide.budget_guard import RELEASE_ALLOWANCE_MS
from launcher.decide.facts import NodeRecord
from launcher.ledger.store import find_run
from launcher.provision.local.processes import is_alive
from launcher.storage.stores import newest_checkpoint, open_store
from tests.clouds.launched import BACK_SECONDS, BUCKETS, Launched, job, node_of, wait_for
from tests.clouds.planted import below, on_host, plant, planted_in
from tests.clouds.story import left_in_the_clouds
from tests.fakes.clouds.world import World

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(1500)]

OUTAGE_SECONDS = 300.0
ALONE_SECONDS = 30.0
"""Seconds that an instance of `steady` or `abandoned` without an agent waits for a controller; the default is 600."""
ALONE = {"SPOTRL_ALONE_SECONDS": f"{ALONE_SECONDS:.0f}"}
DEADLINE_MINUTES = 25
ABANDONED_ROLLOUT = "abandoned-spot-0-g0"
"""The node whose agent is killed once it has no controller."""
BUDGET = 0.60
"""Budget of `priced` in dollars: about 26 minutes of its nodes, or 13 at the doubled price."""
STOPPED_SECONDS = 1200.0
"""Time limit for `priced` to use up its budget. AWS refunds the lost spot node, which adds minutes."""
SPOT_QUOTA = "PREEMPTIBLE_NVIDIA_L4_GPUS"
UP_SECONDS = 1000.0
"""Time limit for the nodes of all three runs to work."""


@dataclass
class Runs:
    steady: Launched
    priced: Launched
    abandoned: Launched
    planted: dict[str, str]
    """Secrets of the client that no host may have."""
    launched_at: float
    outage: tuple[float, set[str]] = (0.0, set())
    """Start of the outage, and the nodes at that time."""
    used_up: "Future[tuple[int, str]]" = field(default_factory=Future)
    """Result of `use_up`, which runs in parallel with the tests of `steady`."""


@pytest.fixture(autouse=True)
def _no_fault_outlives_its_test() -> None:
    """Override the fixture: an outage here lasts over several tests and ends by itself."""


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Start all three runs and wait for their nodes; `abandoned` then loses its controller and one agent."""
    before = {json.dumps(one, sort_keys=True) for one in world.inventory()}
    home, ended = world.folder / "home" / "faults", tmp_path_factory.mktemp("ended")
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1300m", "tmpfs", home], check=True)
    world.quota("aws", "L-DB2E81BA", 256)
    planted = plant(world)
    token = {"HF_TOKEN": planted["hugging face token"]}
    env = {"steady": ALONE, "priced": {}, "abandoned": ALONE | token}
    launched = (Launched(world=world, name=name, home=home, env=more) for name, more in env.items())
    runs = Runs(*launched, planted, time.time())
    try:
        runs.steady.spotrl("catalog", "refresh")
        secrets = ", ".join(env["abandoned"])
        alone = job("abandoned", "aws", iterations=24, step=6.0, deadline=f"{DEADLINE_MINUTES}m", secrets=secrets)
        runs.abandoned.launch(alone)
        runs.steady.launch(job("steady", "gcp", deadline="14h", secrets=", ".join(ALONE)))
        (world.folder / "jobs" / "base").mkdir()
        shutil.copy(BASE, world.folder / "jobs" / "base")
        runs.priced.launch(job("priced", "aws", iterations=8, total=BUDGET, step=6.0, model="base"))
        runs.abandoned.until("both its nodes work", lambda: len(runs.abandoned.ready()) == 2, UP_SECONDS)
        runs.abandoned.signal(signal.SIGKILL)
        world.on(ABANDONED_ROLLOUT, ["pkill", "-KILL", "-f", "engine.node.agent"])
        for run in (runs.steady, runs.priced):
            run.until("all its nodes work", lambda run=run: len(run.ready()) == 2, UP_SECONDS)
        runs.steady.trains_on()
        yield runs
    finally:
        world.clear()
        for run in (runs.steady, runs.priced, runs.abandoned):
            run.spotrl("down", run.name, check=False)
        shutil.copytree(home, ended, dirs_exist_ok=True)
        subprocess.run(["umount", "--lazy", home], check=True)
        assert {json.dumps(one, sort_keys=True) for one in world.inventory() if one["id"] != "spotrlNode"} <= before


def test_no_secret_is_on_a_host_unless_the_job_names_it(world, runs):
    for run in (runs.steady, runs.priced):
        for node in run.ready():
            assert on_host(world, node.name, runs.planted.values()) == []
    token = runs.planted["hugging face token"]
    others = [secret for secret in runs.planted.values() if secret != token]
    assert on_host(world, "abandoned-trainer-g0", others) == []
    found = on_host(world, "abandoned-trainer-g0", [token])
    assert found
    assert all(place.startswith("/proc/") for place in found), "in its processes' environment, and in no file"


def test_a_users_weights_reach_every_node_through_the_bucket(world, runs):
    """Like a large model: weights beside the job file are uploaded once, and each node reads them with its identity."""
    sent = [path for path in bucket_of(world, BUCKETS["aws"]) if path.startswith("_weights/")]
    digest = sent[0].split("/")[1]
    assert sorted(sent) == [f"_weights/{digest}/{name}" for name in (".manifest.json", BASE.name)]
    for node in runs.priced.ready():
        path = f"/home/ubuntu/spotrl/weights/{digest}/{BASE.name}"
        assert world.on(node.name, ["sha256sum", path]).split()[0] == sha256(BASE.read_bytes()).hexdigest()
    (bundled,) = (runs.priced.home / "runs" / "priced" / "bundles").iterdir()
    assert not list(bundled.rglob(BASE.name))


def test_a_controller_waits_for_a_locked_database(runs):
    steady = runs.steady
    pid = steady.controller()
    with sqlite3.connect(steady.home / "ledger.sqlite", timeout=30) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        time.sleep(6)
        connection.rollback()
    connection.close()
    steady.trains_on()
    assert steady.controller() == pid
    assert is_alive(pid, None)


def test_an_api_outage_begins(world, runs):
    """Google Cloud's API and buckets are unreachable for five minutes, during the tests that follow."""
    world.fault("down", "gcp", seconds=OUTAGE_SECONDS)
    world.fault("store_down", "gcp", seconds=OUTAGE_SECONDS)
    runs.outage = (time.monotonic(), set(runs.steady.records()))


def test_a_doubled_price_is_billed(world, runs):
    priced = runs.priced
    before = {node.name: node.micro_usd_per_hour for node in priced.ready("rollout")}
    assert before
    world.price("aws", 2)
    priced.until(
        "the double price is on record",
        lambda: all(node.micro_usd_per_hour == 2 * before.get(node.name, 0) for node in priced.ready("rollout")),
        200,
    )
    assert {node.name for node in priced.ready("rollout")} == set(before), "that price was within the limits"
    runs.used_up = ThreadPoolExecutor(1).submit(use_up, world, priced)


def test_logs_of_every_node_reach_a_bucket_in_another_region(world, runs):
    priced = runs.priced
    for node in priced.ready():
        path = f"priced/logs/{node.name}/agent.log"
        priced.until(f"{path} is in the bucket", lambda path=path: path in bucket_of(world, BUCKETS["aws"]), 120)


def test_a_broken_node_without_a_controller_uploads_its_logs_and_ends(world, runs):
    """Its trainer continues without it, until the deadline."""
    wait_for(lambda: ABANDONED_ROLLOUT not in nodes_there(runs.abandoned), ALONE_SECONDS + 120)
    agent_log = object_of(world, BUCKETS["aws"], f"abandoned/logs/{ABANDONED_ROLLOUT}/agent.log")
    assert "the agent has ended, and no controller has called" in agent_log
    assert nodes_there(runs.abandoned) == ["abandoned-trainer-g0"]


def test_the_run_continued_through_the_outage(world, runs):
    steady = runs.steady
    began, nodes = runs.outage
    time.sleep(max(0.0, began + OUTAGE_SECONDS + 5 - time.monotonic()))
    steady.trains_on(3)
    assert set(steady.records()) == nodes, "no node was replaced"
    assert len(steady.ready()) == 2
    assert "compute" in steady.log()  # the log names the cloud that did not answer


def test_a_clock_jump_changes_neither_spend_nor_deadline(runs):
    """The clock of the controller's computer jumps fifteen hours ahead, past the run's deadline, and fifteen back."""
    steady = runs.steady
    jump = (
        steady.home / "jump"
    )  # the controller reads the file as long as it lives, so the file is not in a folder of this test
    nodes, spent, jumping = (
        set(steady.records()),
        steady.view().spent_micro_usd,
        Path(__file__).parent / "jumping_clock",
    )
    jump.write_text("0")
    steady.signal(signal.SIGKILL)
    steady.spotrl("resume", "steady", PYTHONPATH=str(jumping), CLOCK_JUMP=str(jump))
    steady.trains_on()
    for hours in (15, -15):
        jump.write_text(str(hours * 3600))
        time.sleep(15)
        steady.trains_on()
        assert (steady.view().status, set(steady.records())) == ("running", nodes)
    assert steady.view().spent_micro_usd < spent + 200_000  # minutes, at less than two dollars an hour
    jump.write_text("0")


def test_a_spot_quota_still_used_by_the_lost_node_is_waited_for(world, runs):
    """The quota allows one node. Google counts a node for a while after its end, so a successor is refused first."""
    steady = runs.steady
    (lost,) = steady.ready("rollout")
    world.quota("gcp/us-central1", SPOT_QUOTA, 1)
    world.quota_lag(3600)
    world.reclaim(lost.name)
    steady.until("the quota refuses a spot node", lambda: over_quota(steady), 120)
    for refused in over_quota(steady):
        assert "QUOTA_EXCEEDED" in refused.evidence
        assert f"Quota '{SPOT_QUOTA}' exceeded.  Limit: 1.0 in region us-central1" in refused.evidence
    world.quota_lag(0)
    steady.until("a spot node is bought again", lambda: spot_instances(steady), 120)
    assert len(spot_instances(steady)) == 1
    assert "denied" not in steady.records()[node_of(spot_instances(steady)[0])].happened
    world.quota("gcp/us-central1", SPOT_QUOTA, 16)


def test_node_files_emptied_by_a_crash_lose_or_double_no_node(world, runs):
    """One node works, one is in its setup and one has ended. The spec of the second is lost, so it is replaced."""
    steady = runs.steady
    (trainer,), (starting,) = steady.ready("trainer"), spot_instances(steady)
    new, over = node_of(starting), "steady-spot-0-g0"
    before, spent = steady.instances_by_node()[trainer.name], steady.view().spent_micro_usd
    ended_ms = steady.records()[over].ended_ms
    steady.signal(signal.SIGKILL)
    for node, files in {
        trainer.name: ("want", "login", "machine"),
        new: ("spec", "want", "login", "machine"),
        over: ("spec", "want", "login", "machine", "ended"),
    }.items():
        for file in files:
            path = steady.home / "runs" / "steady" / "nodes" / node / f"{file}.json"
            if path.exists():
                path.write_bytes(b"")
    steady.spotrl("resume", "steady")
    steady.until("the node whose spec is lost has ended", lambda: not steady.records()[new].is_live, 120)
    steady.until("it has a successor", lambda: {node_of(one) for one in spot_instances(steady)} - {new}, 120)
    steady.trains_on()
    assert steady.instances_by_node()[trainer.name] == before
    assert len(steady.instances()) == 2, "the trainer and one spot node"
    assert steady.records()[over].ended_ms == ended_ms
    assert steady.view().spent_micro_usd < spent + 200_000  # minutes, at less than two dollars an hour


def test_a_budget_used_up_during_a_launch_ends_the_run(runs):
    priced = runs.priced
    spent, successor = runs.used_up.result(1400)
    assert priced.view().reason == "budget"
    assert priced.instances() == []
    launched = priced.records()[successor]
    assert launched.ended_ms is not None
    assert "ready" not in launched.happened, "it ended before it was of any use"
    assert spent < priced.view().spent_micro_usd <= round(BUDGET * 1e6)
    priced.down()


def test_a_full_disk_loses_no_node(runs):
    """A controller continues without writing for a while; a user restarts one that gave up."""
    steady = runs.steady
    steady.until("its nodes work", lambda: len(steady.ready()) == 2, BACK_SECONDS)
    nodes, filler = {node.name for node in steady.ready()}, steady.home / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=1M"], stderr=subprocess.DEVNULL)
    assert shutil.disk_usage(steady.home).free == 0
    time.sleep(30)
    filler.unlink()
    if not is_alive(steady.controller(), None):
        steady.spotrl("resume", "steady")
    steady.trains_on()
    assert nodes == {node.name for node in steady.ready()}, "they were kept"


def test_a_lack_of_capacity_everywhere_is_reported_and_waited_for(world, runs):
    world.fault("capacity")
    nowhere = Launched(world=world, name="nowhere", home=runs.steady.home)
    try:
        nowhere.launch(job("nowhere", "aws,gcp", recovery="trainer_wait: 1s"))
        nowhere.until("every region has refused", lambda: len(refusals(nowhere)) == 4, 600)
        assert nowhere.view().status == "running"
        assert nowhere.view().spent_micro_usd == 0
        assert "no_capacity" in nowhere.words("nowhere-trainer-g0")
    finally:
        world.clear("capacity")
        nowhere.down()


def test_no_node_outlives_its_deadline_without_a_controller(runs):
    abandoned = runs.abandoned
    assert not is_alive(abandoned.controller(), None)
    late_ms = 2 * 60_000
    deadline = runs.launched_at + DEADLINE_MINUTES * 60 + 300 + late_ms / 1000
    wait_for(lambda: not abandoned.instances(), max(5.0, deadline - time.time()))
    assert len(abandoned.ready()) == 2, "the ledger does not have it yet"
    abandoned.down()


def test_a_run_that_finished_without_a_controller_ends_its_nodes(world, runs):
    """The run gets a stop order as at its end; its last checkpoint and both nodes' logs are then in the bucket."""
    steady = runs.steady
    steady.until("its nodes work", lambda: len(steady.ready()) == 2, BACK_SECONDS)
    (trainer,), (rollout,) = steady.ready("trainer"), steady.ready("rollout")
    steady.signal(signal.SIGKILL)
    send_stop_order(steady, trainer.name)
    wait_for(lambda: not steady.instances(), ALONE_SECONDS + 180)
    progress = object_of(world, BUCKETS["gcp"], f"steady/logs/{trainer.name}/trainer.jsonl")
    last = [json.loads(line) for line in progress.splitlines()][-1]
    assert last["kind"] == "engine_finished"
    newest = world.call(lambda: newest_checkpoint(open_store(f"{BUCKETS['gcp']}/steady")))
    assert newest is not None
    assert newest.endswith(f"-i{last['event']['iteration']:06d}")
    for node in (trainer.name, rollout.name):
        agent_log = object_of(world, BUCKETS["gcp"], f"steady/logs/{node}/agent.log")
        assert "the agent has ended, and no controller has called" in agent_log


def test_no_secret_is_in_the_local_files_of_runs(world, runs):
    home = runs.steady.home
    for words in (("report", "steady", "--html", home / "report.html"), ("events", "steady"), ("status", "steady")):
        (home / f"{words[0]}.txt").write_text(runs.steady.spotrl(*words).stdout)
    assert below(world.folder / "home", runs.planted.values(), but=planted_in(world)) == []
    private = [
        *home.glob("ledger.sqlite*"),
        *home.glob("runs/*/nodes/*/ssh.key"),
        *home.glob("runs/*/nodes/*/spec.json"),
    ]
    assert len(private) > 5
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}


def test_down_leaves_no_resource_of_any_run(world, runs):
    runs.steady.down()
    left = left_in_the_clouds(world)
    assert (left["instances"], left["disks"], left["processes"], left["namespaces"]) == (0, 0, 0, 0)


def use_up(world: World, priced: Launched) -> tuple[int, str]:
    """Lose the spot node when the budget is just enough for a successor, which never boots.

    AWS does not bill the first hour of an interrupted spot instance, so the loss refunds money.

    Returns the spend at the purchase of the successor in micro-dollars, and the successor, once the run has
    stopped.
    """
    (trainer,), (lost,) = priced.ready("trainer"), priced.ready("rollout")
    total, minutes = (
        round(BUDGET * 1e6),
        RELEASE_ALLOWANCE_MS / 60_000 + 1,
    )  # the reserve of both nodes, and the price of one
    both = trainer.micro_usd_per_hour + lost.micro_usd_per_hour
    late = total - round((both * minutes + trainer.micro_usd_per_hour * 0.25) / 60)
    priced.until("little is left", lambda: priced.view().spent_micro_usd >= late, 900)
    world.fault("no_boot", "aws", times=1)
    try:
        world.reclaim(lost.name)
        successor = lost.name.replace("-g0", "-g1")
        priced.until("its successor is asked for", lambda: successor in priced.records(), 60)
        spent = priced.view().spent_micro_usd
        wait_for(lambda: priced.view().status == "stopped", STOPPED_SECONDS)
    finally:
        world.clear("no_boot")
    return spent, successor


# --- observing ----------------------------------------------------------------------------------------


def bucket_of(world: World, url: str) -> list[str]:
    """Return the names of all objects."""
    import obstore

    return world.call(lambda: [str(one["path"]) for page in obstore.list(open_store(url)) for one in page])


def object_of(world: World, url: str, path: str) -> str:
    import obstore

    return world.call(lambda: bytes(obstore.get(open_store(url), path).bytes()).decode())


def nodes_there(run: Launched) -> list[str]:
    """Return the node name of each instance of the clouds."""
    return sorted(node_of(instance) for instance in run.instances())


def spot_instances(run: Launched) -> list[dict[str, Any]]:
    return [instance for instance in run.instances() if instance["market"] == "spot"]


def over_quota(run: Launched) -> list[NodeRecord]:
    return [record for record in run.records().values() if "denied" in record.happened]


def send_stop_order(run: Launched, trainer: str) -> None:
    """Send the stop order of a controller from the trainer's own host."""
    with run.sessions() as session:
        row = find_run(session, run.name)
        token, port = role_token(row.token, "controller"), row.coordinator_port
    (address,) = (str(one["private"]) for one in run.instances() if node_of(one) == trainer)
    headers = ["-H", f"Authorization: Bearer {token}", "-H", "Content-Type: application/json"]
    run.world.on(
        trainer, ["curl", "-sf", "-X", "POST", *headers, "-d", '{"reason": "drill"}', f"http://{address}:{port}/stop"]
    )


def refusals(run: Launched) -> set[str]:
    """Return the regions in which a launch was refused for lack of capacity."""
    return {
        record.wanted.placement.region
        for record in run.records().values()
        if "no_capacity" in record.happened and record.wanted is not None
    }
