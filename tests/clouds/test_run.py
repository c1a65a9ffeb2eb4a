"""A run of `spotrl launch` on a fake cloud from launch to `spotrl down`, with tests in a fixed order.

It is preempted with notice, then without notice while its controller is frozen, and at last loses its trainer with a
half-written newest checkpoint. Rarer faults are in test_faults.py.
"""

import json
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from engine.models.digits import load_digits
from engine.models.weights import set_weights
from engine.node.environment import MANIFEST
from launcher.storage.stores import newest_checkpoint, open_store
from tests.clouds.billed import check_bill
from tests.clouds.launched import BACK_SECONDS, BUCKETS, Launched, job, wait_for
from tests.clouds.planted import on_host, plant
from tests.clouds.story import left_in_the_clouds
from tests.fakes.clouds.world import World

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(1500)]

NAME = "preempted"
UP_SECONDS = 1000.0


@pytest.fixture(scope="module")
def planted(world: World) -> dict[str, str]:
    """Plant secrets in the client; a host may have only the token that the job names."""
    return plant(world)


@pytest.fixture(scope="module")
def run(world: World, planted: dict[str, str]) -> Iterator[Launched]:
    """Launch the run, and wait until both nodes work."""
    token = {"HF_TOKEN": planted["hugging face token"]}
    launched = Launched(world=world, name=NAME, home=world.folder / "home" / NAME, env=token)
    try:
        launched.spotrl("catalog", "refresh")
        launched.launch(job(NAME, "gcp", deadline="14h", secrets=", ".join(token)))
        launched.until("both its nodes work", lambda: len(launched.ready()) == 2, UP_SECONDS)
        launched.trains_on()
        yield launched
    finally:
        world.clear()
        launched.spotrl("down", NAME, check=False)


def test_no_secret_is_on_a_host_unless_the_job_names_it(world, run, planted):
    token = planted["hugging face token"]
    others = [secret for secret in planted.values() if secret != token]
    for node in run.ready():
        assert on_host(world, node.name, others) == []
        found = on_host(world, node.name, [token])
        assert found
        assert all(place.startswith("/proc/") for place in found), "in its processes' environment, and in no file"


def test_weights_and_metrics_are_pulled_from_the_bucket_and_load(run, tmp_path):
    def pulled():
        return json.loads(run.spotrl("pull", NAME, "--to", tmp_path / "out", "--json").stdout)

    (trainer,) = (node.name for node in run.ready() if node.role == "trainer")
    metrics = tmp_path / "out" / "metrics" / trainer / "metrics.jsonl"
    # The file is copied every 30 s, empty at first.
    run.until(
        "its metrics are in the bucket", lambda: pulled()["metrics"] and metrics.exists() and metrics.read_text(), 120
    )
    result = pulled()
    assert result["iteration"] > 0
    parameters = dict(load_digits().transformer.named_parameters())
    base = {name: value.detach().clone() for name, value in parameters.items()}
    set_weights(parameters, (tmp_path / "out" / "weights.safetensors").read_bytes())
    assert any(not torch.equal(parameters[name], base[name]) for name in base)
    assert json.loads(metrics.read_text().splitlines()[0])["kind"] in ("iteration_done", "evaluated")


def test_the_first_nodes_build_their_environment_and_put_it_into_the_bucket(world, run):
    assert all("installing what node.lock names" in set_up_log(world, node.name) for node in run.ready())
    wait_for(lambda: world.call(environments), 300)


def test_a_second_controller_is_refused_on_any_computer(world, run):
    here = run.spotrl("controller", NAME, check=False)
    assert (here.returncode, "has a controller already" in here.stderr + here.stdout) == (1, True)
    # Another computer has its own ledger with another token for the run.
    elsewhere = Launched(world=world, name=NAME, home=world.folder / "home" / "elsewhere")
    elsewhere.spotrl("catalog", "refresh")
    count = len(run.instances())
    with pytest.raises(RuntimeError, match=f"machines of a run called {NAME} are in gcp us-central1 already"):
        elsewhere.launch(job(NAME, "gcp"))
    # Without a shared ledger, the lease in the bucket decides.
    with pytest.raises(RuntimeError, match="is controlled from another machine"):
        elsewhere.launch(job(NAME, "gcp", region="/us-east4"))
    assert len(run.instances()) == count
    assert run.spotrl("status", NAME).returncode == 0


def test_a_frozen_controller_catches_up(world, run):
    """The controller is frozen for longer than its lease; the run continues with its nodes."""
    (lost,) = run.ready("rollout")
    run.signal(signal.SIGSTOP)
    try:
        time.sleep(2)
        world.reclaim(lost.name)
        reached, began = run.trained(), time.monotonic()
        wait_for(lambda: run.trained() >= reached + 2, 180)
        time.sleep(max(0.0, began + 20 - time.monotonic()))  # its lease lasts 15 s
        assert not run.records()[lost.name].reclaimed
    finally:
        run.signal(signal.SIGCONT)
    run.until("it is missed", lambda: run.records()[lost.name].reclaimed, 60)
    run.until("it is replaced", lambda: run.ready("rollout"), BACK_SECONDS)
    assert run.every_batch_is_whole()
    (successor,) = run.ready("rollout")
    assert f"the environment was fetched from {BUCKETS['gcp']}/{NAME}" in set_up_log(world, successor.name)


def test_a_notice_shorter_than_the_drain_loses_no_rollout(world, run):
    (lost,) = run.ready("rollout")
    world.reclaim(lost.name, seconds=1, notice=True)
    run.until("it is gone", lambda: run.records()[lost.name].reclaimed, 60)
    run.trains_on(3)
    assert run.every_batch_is_whole()


def test_a_half_written_checkpoint_does_not_count(world, run):
    """The newest manifest is truncated, and the trainer is lost."""
    name = world.call(cut_the_newest_manifest_short)
    (trainer,) = run.ready("trainer")
    world.reclaim(trainer.name)
    run.until(
        "another trainer works", lambda: {node.name for node in run.ready("trainer")} - {trainer.name}, BACK_SECONDS
    )
    run.trains_on()
    logs = "\n".join(path.read_text() for path in (run.home / "runs").glob(f"{NAME}/nodes/*/logs/*.log"))
    assert f"checkpoint {name} does not count" in logs
    assert run.every_batch_is_whole()


def test_down_leaves_no_resource_of_the_run(world, run):
    run.down()
    left = left_in_the_clouds(world)
    assert (left["instances"], left["disks"], left["processes"], left["namespaces"]) == (0, 0, 0, 0)


def test_the_clouds_bill_has_every_node_and_explains_each_difference(run, tmp_path):
    assert check_bill(run, tmp_path)["basis"] == "billed"


def set_up_log(world: World, node: str) -> str:
    return world.on(node, ["cat", "/home/ubuntu/spotrl/set-up.log"])


def environments() -> list[str]:
    """Return the manifests of environments in the run's bucket."""
    import obstore

    listed = obstore.list(open_store(f"{BUCKETS['gcp']}/{NAME}"), "environments")
    return [one["path"] for part in listed for one in part if one["path"].endswith(MANIFEST)]


def cut_the_newest_manifest_short() -> str:
    import obstore

    store = open_store(f"{BUCKETS['gcp']}/{NAME}")
    name = newest_checkpoint(store)
    assert name is not None
    path = f"checkpoints/{name}/manifest.json"
    obstore.put(store, path, bytes(obstore.get(store, path).bytes())[:100])
    return name
