"""A run on spot whose trainer is cut off by the network: from a rollout node, from the controller, from its bucket.

Nothing of the nodes dies or freezes, and no packet passes between the two, not even of an open connection. The network
is that of the fake clouds' router.
"""

import json
import signal
from collections.abc import Iterator

import pytest

from tests.clouds.launched import BACK_SECONDS, Launched
from tests.clouds.test_spot_trainer import TRAINS_SECONDS, holds_checkpoint, launched_on, takes_over, trainer_of
from tests.fakes.clouds.world import World
from tests.mutants.process_plugin import planted_in

pytestmark = [pytest.mark.clouds, pytest.mark.long, pytest.mark.timeout(1800)]

AWAY_SECONDS = 60
"""Seconds without an answer of the bucket after which the trainer gives its role away; the product waits for 10 min."""

SHORT_WAIT = {
    "module": "launcher.decide.promotion",
    "old": "STORE_AWAY_MS = 10 * 60_000\n",
    "new": f"STORE_AWAY_MS = {AWAY_SECONDS} * 1000\n",
}


@pytest.fixture(scope="module")
def run(world: World) -> Iterator[Launched]:
    yield from launched_on(world, "gcp", "parts")


@pytest.fixture(autouse=True)
def _rejoins(world: World) -> Iterator[None]:
    yield
    world.rejoin()


def test_a_rollout_node_without_the_trainer_loses_its_steps_and_works_again_afterwards(world, run):
    trainer = trainer_of(run)
    rollouts = sorted(node.name for node in run.ready("rollout"))
    world.part(trainer, rollouts[0])
    run.trains_on(3, TRAINS_SECONDS)
    assert trainer_of(run) == trainer, "the other node and the trainer do the work"
    world.rejoin()
    before = run.view().iteration
    run.until("all its nodes work", lambda: len(run.ready()) == 3, BACK_SECONDS)
    run.trains_on(2, TRAINS_SECONDS)
    assert run.view().iteration > before
    assert run.every_batch_is_whole()


def test_a_trainer_without_the_controller_is_given_up_and_another_node_trains(world, run):
    run.until("a checkpoint is saved", lambda: holds_checkpoint(run), TRAINS_SECONDS)
    lost = trainer_of(run)
    world.part(lost, "client")
    takes_over(run, lost)
    assert lost not in {record.name for record in run.records().values() if record.is_live}
    assert not any(instance for node, instance in run.instances_by_node().items() if node == lost), "its VM is gone"


def test_a_trainer_without_its_bucket_gives_its_role_to_a_node_that_reaches_it(world, run):
    shorter = world.folder / "shorter.json"
    shorter.write_text(json.dumps([SHORT_WAIT]))
    run.signal(signal.SIGKILL)
    run.spotrl("resume", run.name, **planted_in({}, shorter))
    run.until("a checkpoint is saved", lambda: holds_checkpoint(run), TRAINS_SECONDS)
    lost = trainer_of(run)
    world.part(lost, "apis")
    takes_over(run, lost)
    assert "its bucket has not answered it for" in run.words()
    run.down()
    assert run.instances() == []
