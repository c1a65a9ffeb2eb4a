"""What goes wrong with runs that are under way, on both fake clouds: three runs of `spotrl launch`, told in order.

`steady` trains on Google Cloud and must go on whatever happens to it; `priced` meets prices that rise on AWS;
`abandoned` loses its controller for good. They share a ledger, on a small disk that is made full.
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

import pytest

from engine.models.digits import BASE
from launcher.cluster.brakes import RELEASE_ALLOWANCE_MS
from launcher.cluster.processes import is_alive
from launcher.cluster.stores import newest_checkpoint, open_store
from tests.clouds.launched import Launched
from tests.clouds.planted import below, on_host, plant, planted_in
from tests.clouds.story import left_in_the_clouds
from tests.fakes.clouds.world import World

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(1200)]

JOB = """\
name: {name}
infra: {infra}
store: {{{store}}}
ssh_from: 192.0.2.1/32
iterations: {iterations}
evaluation: {{prompts: 16, every: 1000}}
algorithm: {{prompts_per_batch: 8, images_per_prompt: 4}}
exploration: {{mode: stale, budget: {{candidates: 64}}}}
model: {{name: digits-ocr{model}}}
runtime: {{device: cpu, name: local, shape: 8, step_seconds: {step}}}
recovery: {{launches_per_minute: 60{recovery}}}
resources:
  trainer: {{accelerators: L4:1{place}}}
  rollout: {{accelerators: L4:1, use_spot: true, num_nodes: {spot}}}
budget: {{max_total: ${total}, max_hourly: $90{deadline}}}
secrets: [{secrets}]
"""

OUTAGE_SECONDS = 300.0
DEADLINE_MINUTES = 8
BUDGET = 0.42
"""Dollars of `priced`: about 18 minutes of its nodes."""
UP_SECONDS = 700.0
BACK_SECONDS = 420.0
"""For a successor to be at work: a machine, its set-up, its engine; on two cores that all hosts share."""


def job(
    name: str, infra: str, *, iterations: int = 1000, spot: int = 1, total: float = 40, step: float = 0.3, **more: str
) -> str:
    """`more`: `deadline`, `recovery`, `secrets` and the `model`'s path as a job has them; the trainer's `region`."""
    buckets = {"aws": "aws: s3://spotrl-runs/faults", "gcp": "gcp: gs://spotrl-runs/faults"}
    return JOB.format(
        name=name,
        infra=infra,
        store=", ".join(buckets[cloud] for cloud in infra.split(",")),
        iterations=iterations,
        spot=spot,
        place=f", infra: {infra}{more['region']}" if "region" in more else "",
        total=total,
        step=step,
        deadline=f", deadline: {more['deadline']}" if "deadline" in more else "",
        secrets=more.get("secrets", ""),
        model=f", path: {more['model']}" if "model" in more else "",
        recovery=f", {more['recovery']}" if "recovery" in more else "",
    )


@dataclass
class Runs:
    steady: Launched
    priced: Launched
    abandoned: Launched
    planted: dict[str, str]
    """What the client has and no host may have."""
    launched_at: float
    outage: tuple[float, set[str]] = (0.0, set())
    """When it began, and which nodes there were."""
    used_up: "Future[tuple[int, str]]" = field(default_factory=Future)
    """What `use_up` returns: it goes on beside the tests of `steady`."""


@pytest.fixture(autouse=True)
def _no_fault_outlives_its_test() -> None:
    """Here one does: an outage goes on beside other tests, and ends by itself."""


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """All three, once their nodes are at work; `abandoned` has lost its controller by then."""
    before = {json.dumps(one, sort_keys=True) for one in world.inventory()}
    home, ended = world.folder / "home" / "faults", tmp_path_factory.mktemp("ended")
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1300m", "tmpfs", home], check=True)
    world.quota("aws", "L-DB2E81BA", 256)
    names = ("steady", "priced", "abandoned")
    runs = Runs(*(Launched(world=world, name=name, home=home) for name in names), plant(world), time.time())
    try:
        runs.steady.spotrl("catalog", "refresh")
        alone = job("abandoned", "aws", iterations=2, spot=0, deadline=f"{DEADLINE_MINUTES}m", secrets="HF_TOKEN")
        runs.abandoned.launch(alone, HF_TOKEN=runs.planted["hugging face token"])
        runs.steady.launch(job("steady", "gcp", deadline="14h"))
        (world.folder / "jobs" / "base").mkdir()
        shutil.copy(BASE, world.folder / "jobs" / "base")
        runs.priced.launch(job("priced", "aws", iterations=8, total=BUDGET, step=6.0, model="base"))
        runs.abandoned.until("its trainer works", runs.abandoned.ready, UP_SECONDS)
        runs.abandoned.signal(signal.SIGKILL)
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


def test_weights_that_are_not_ours_come_from_the_bucket_to_every_node(world, runs):
    """As large models do: what is beside the job file is sent once, and read by each node with its own identity."""
    sent = [path for path in bucket_of(world, "s3://spotrl-runs/faults") if path.startswith("_weights/")]
    digest = sent[0].split("/")[1]
    assert sorted(sent) == [f"_weights/{digest}/{name}" for name in (".manifest.json", BASE.name)]
    for node in runs.priced.ready():
        path = f"/home/ubuntu/spotrl/weights/{digest}/{BASE.name}"
        assert world.on(node.name, ["sha256sum", path]).split()[0] == sha256(BASE.read_bytes()).hexdigest()
    (bundled,) = (runs.priced.home / "runs" / "priced" / "bundles").iterdir()
    assert not list(bundled.rglob(BASE.name))


def test_a_second_controller_is_refused_also_from_another_machine(world, runs, tmp_path):
    steady = runs.steady
    here = steady.spotrl("controller", "steady", check=False)
    assert (here.returncode, "has a controller already" in here.stderr + here.stdout) == (1, True)
    # Another machine has a ledger of its own, in which the run's token is another one.
    elsewhere = Launched(world=world, name="steady", home=world.folder / "home" / "elsewhere")
    elsewhere.spotrl("catalog", "refresh")
    machines = len(steady.machines())
    with pytest.raises(RuntimeError, match="machines of a run called steady are in gcp us-central1 already"):
        elsewhere.launch(job("steady", "gcp"))
    # Where none of them is, the lease in the bucket tells.
    with pytest.raises(RuntimeError, match="is controlled from another machine"):
        elsewhere.launch(job("steady", "gcp", region="/us-east4"))
    assert len(steady.machines()) == machines
    assert steady.spotrl("status", "steady").returncode == 0


def test_a_locked_database_is_waited_for(runs):
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


def test_an_outage_begins(world, runs):
    """Google Cloud's API and its buckets are away for five minutes, beside the tests that follow."""
    world.fault("down", "gcp", seconds=OUTAGE_SECONDS)
    world.fault("store_down", "gcp", seconds=OUTAGE_SECONDS)
    runs.outage = (time.monotonic(), set(runs.steady.records()))


def test_a_price_that_doubles_is_what_is_paid(world, runs):
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


def test_the_run_went_on_through_the_outage(world, runs):
    steady = runs.steady
    began, nodes = runs.outage
    time.sleep(max(0.0, began + OUTAGE_SECONDS + 5 - time.monotonic()))
    steady.trains_on(3)
    assert set(steady.records()) == nodes, "nobody was replaced"
    assert len(steady.ready()) == 2
    assert "compute" in steady.log()  # it said who did not answer


def test_a_frozen_controller_misses_nothing(world, runs):
    """Longer than its lease; meanwhile the run goes on with what it has."""
    steady = runs.steady
    (lost,) = steady.ready("rollout")
    steady.signal(signal.SIGSTOP)
    try:
        time.sleep(2)
        world.reclaim(lost.name)
        reached, began = trained(steady), time.monotonic()
        wait_for(lambda: trained(steady) >= reached + 2, 180)
        time.sleep(max(0.0, began + 20 - time.monotonic()))  # 15 s is how long its lease lasts
        assert not steady.records()[lost.name].reclaimed
    finally:
        steady.signal(signal.SIGCONT)
    steady.until("it is missed", lambda: steady.records()[lost.name].reclaimed, 60)
    steady.until("it is replaced", lambda: steady.ready("rollout"), BACK_SECONDS)
    assert every_batch_is_whole(steady)


def test_a_clock_that_is_set_moves_neither_money_nor_deadline(runs, tmp_path):
    """Fifteen hours on, past the run's deadline, and fifteen back: of the machine that the controller runs on."""
    steady, jump = runs.steady, tmp_path / "jump"
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


def test_a_notice_shorter_than_the_drain_loses_no_rollout(world, runs):
    steady = runs.steady
    (lost,) = steady.ready("rollout")
    world.reclaim(lost.name, seconds=1, notice=True)
    steady.until("it is gone", lambda: steady.records()[lost.name].reclaimed, 60)
    steady.trains_on(3)
    assert every_batch_is_whole(steady)


def test_a_half_written_checkpoint_does_not_count(world, runs):
    """The newest manifest is cut short, and the trainer is gone."""
    steady = runs.steady
    name = world.call(cut_the_newest_manifest_short)
    (trainer,) = steady.ready("trainer")
    world.reclaim(trainer.name)
    steady.until(
        "another trainer works",
        lambda: {node.name for node in steady.ready("trainer")} - {trainer.name},
        BACK_SECONDS,
    )
    steady.trains_on()
    logs = "\n".join(path.read_text() for path in (steady.home / "runs").glob("steady/nodes/*/logs/*.log"))
    assert f"checkpoint {name} does not count" in logs
    assert every_batch_is_whole(steady)


def test_a_budget_that_is_used_up_in_the_midst_of_a_launch_ends_the_run(runs):
    priced = runs.priced
    late, successor = runs.used_up.result(900)
    assert priced.view().reason == "budget"
    assert priced.machines() == []
    launched = priced.records()[successor]
    assert launched.ended_ms is not None
    assert "ready" not in launched.happened, "it ended before it was of any use"
    assert late < priced.view().spent_micro_usd <= round(BUDGET * 1e6)
    priced.down()


def test_a_full_disk_loses_no_node(runs):
    """A controller goes on without writing for a while; one that gave up is started again by a person."""
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


def test_no_capacity_anywhere_is_said_and_waited_for(world, runs):
    world.fault("capacity")
    nowhere = Launched(world=world, name="nowhere", home=runs.steady.home)
    try:
        nowhere.launch(job("nowhere", "aws,gcp", recovery="trainer_wait: 1s"))
        nowhere.until("every region has refused", lambda: len(refusals(nowhere)) == 4, 300)
        assert nowhere.view().status == "running"
        assert nowhere.view().spent_micro_usd == 0
        assert "no_capacity" in nowhere.words("nowhere-trainer-g0")
    finally:
        world.clear("capacity")
        nowhere.down()


def test_nothing_lives_past_its_deadline_without_a_controller(runs):
    abandoned = runs.abandoned
    assert not is_alive(abandoned.controller(), None)
    late_ms = 2 * 60_000
    deadline = runs.launched_at + DEADLINE_MINUTES * 60 + 300 + late_ms / 1000
    wait_for(lambda: not abandoned.machines(), max(5.0, deadline - time.time()))
    assert [node.name for node in abandoned.ready()] == ["abandoned-trainer-g0"], "nobody has written that down yet"
    abandoned.down()


def test_no_secret_is_in_what_runs_leave_here(world, runs):
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


def test_down_leaves_nothing_of_any_of_them(world, runs):
    runs.steady.down()
    left = left_in_the_clouds(world)
    assert (left["instances"], left["disks"], left["processes"], left["namespaces"]) == (0, 0, 0, 0)


def use_up(world: World, priced: Launched) -> tuple[int, str]:
    """Its spot node is lost while there is just enough left to buy a successor, and that never boots.

    Returns how much was spent by then, in micro-dollars, and the successor; once the run has stopped.
    """
    (trainer,), (lost,) = priced.ready("trainer"), priced.ready("rollout")
    total, minutes = round(BUDGET * 1e6), RELEASE_ALLOWANCE_MS / 60_000 + 1  # what is held for both, and to buy one
    both = trainer.micro_usd_per_hour + lost.micro_usd_per_hour
    late = total - round((both * minutes + trainer.micro_usd_per_hour * 0.25) / 60)
    priced.until("little is left", lambda: priced.view().spent_micro_usd >= late, 900)
    world.fault("no_boot", "aws", times=1)
    try:
        world.reclaim(lost.name)
        successor = lost.name.replace("-g0", "-g1")
        priced.until("its successor is asked for", lambda: successor in priced.records(), 60)
        wait_for(lambda: priced.view().status == "stopped", 400)
    finally:
        world.clear("no_boot")
    return late, successor


# --- looking ------------------------------------------------------------------------------------------


def wait_for(holds, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not within {seconds:.0f} s"
        time.sleep(0.5)


def bucket_of(world: World, url: str) -> list[str]:
    """Names of all objects."""
    import obstore

    return world.call(lambda: [str(one["path"]) for page in obstore.list(open_store(url)) for one in page])


def refusals(run: Launched) -> set[str]:
    """Regions in which somebody said that there is no capacity."""
    return {
        record.wanted.placement.region
        for record in run.records().values()
        if "no_capacity" in record.happened and record.wanted is not None
    }


def trained(run: Launched) -> int:
    """Iterations, as the trainer's own log has them: the controller that would write them down may be frozen."""
    (trainer,) = run.ready("trainer")
    said = run.world.on(trainer.name, ["cat", "/home/ubuntu/spotrl/node/progress/trainer.jsonl"])
    return sum('"iteration_done"' in line for line in said.splitlines())


def every_batch_is_whole(run: Launched) -> bool:
    batches = list(run.made_by())
    return bool(batches) and all(sum(nodes.values()) == run.batch_size() for nodes in batches)


def cut_the_newest_manifest_short() -> str:
    import obstore

    store = open_store("gs://spotrl-runs/faults/steady")
    name = newest_checkpoint(store)
    assert name is not None
    path = f"checkpoints/{name}/manifest.json"
    obstore.put(store, path, bytes(obstore.get(store, path).bytes())[:100])
    return name
