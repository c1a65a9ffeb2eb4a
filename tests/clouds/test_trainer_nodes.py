"""A trainer of two nodes on both fake clouds: its ranks meet over the private network, and it survives its losses.

The run on Google Cloud loses its further node, which freezes, and then its first node while the zone has no capacity.
"""

from collections.abc import Iterator

import pytest

from tests.clouds.launched import BACK_SECONDS, Launched, job, node_of
from tests.fakes.clouds.world import World

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(1500)]

UP_SECONDS = 1000.0
TRAINS_SECONDS = 240.0
"""Time limit for iterations. Three nodes share two cores, and each step waits for a connection between hosts."""


def of_two_nodes(name: str, cloud: str) -> str:
    """Return the text of a job with a trainer of two nodes, one rank on each, and one spot node."""
    text = job(name, cloud, deadline="14h")
    for before, after in (("trainer: {", "trainer: {num_nodes: 2, "), ("runtime: {", "runtime: {trainer_ranks: 2, ")):
        assert text.count(before) == 1
        text = text.replace(before, after)
    return text


@pytest.fixture(scope="module")
def run(world: World) -> Iterator[Launched]:
    launched = launched_on(world, "gcp")
    yield launched
    world.clear()
    launched.spotrl("down", launched.name, check=False)


def launched_on(world: World, cloud: str) -> Launched:
    """Launch a run, and wait until all of its nodes work."""
    run = Launched(world=world, name=f"both-{cloud}", home=world.folder / "home" / f"both-{cloud}")
    run.spotrl("catalog", "refresh")
    run.launch(of_two_nodes(run.name, cloud))
    run.until("all its nodes work", lambda: len(run.ready()) == 3, UP_SECONDS)
    return run


def trainer_zones(run: Launched) -> dict[str, str]:
    """Return the zones of the trainer's nodes that work, as the ledger has them."""
    records = run.records()
    return {node.name: records[node.name].zone for node in run.ready() if node.role != "rollout"}


def in_the_cloud(run: Launched) -> dict[str, str]:
    """Return the zones of the run's instances, by the cloud's inventory."""
    return {node_of(one): str(one["zone"]) for one in run.instances()}


def both_train(run: Launched) -> None:
    found = trainer_zones(run)
    assert set(found) == {f"{run.name}-trainer-g0", f"{run.name}-trainer-1-g0"}
    assert len(set(found.values())) == 1, "one zone"
    assert found == {name: zone for name, zone in in_the_cloud(run).items() if name in found}
    run.trains_on(2, TRAINS_SECONDS)
    assert run.every_batch_is_whole()


def test_both_nodes_are_in_one_zone_and_train_together(run):
    both_train(run)


def test_a_frozen_further_node_is_replaced_in_the_zone_of_the_first(run):
    (zone,) = set(trainer_zones(run).values())
    run.world.freeze(f"{run.name}-trainer-1-g0")
    successor = f"{run.name}-trainer-1-g1"
    run.until("its successor works", lambda: successor in trainer_zones(run), BACK_SECONDS)
    assert trainer_zones(run)[successor] == zone
    run.trains_on(2, TRAINS_SECONDS)
    assert run.every_batch_is_whole()


def test_a_trainer_whose_zone_has_no_capacity_moves_to_another_zone_as_a_whole(run):
    before = trainer_zones(run)
    (zone,) = set(before.values())
    run.world.fault("capacity", f"gcp/{zone.rpartition('-')[0]}/{zone}", market="on_demand")
    run.world.reclaim(next(name for name in before if "trainer-1" not in name))

    def has_moved() -> bool:
        after = trainer_zones(run)
        return len(after) == 2 and not set(after) & set(before)

    run.until("both nodes work elsewhere", has_moved, 2 * BACK_SECONDS)
    (elsewhere,) = set(trainer_zones(run).values())
    assert elsewhere != zone
    run.trains_on(2, TRAINS_SECONDS)
    assert run.every_batch_is_whole()


def test_down_leaves_nothing_of_either_node(run):
    run.world.clear()
    run.down()
    assert run.instances() == []


def test_both_nodes_train_together_on_aws(world):
    try:
        run = launched_on(world, "aws")
        both_train(run)
        run.down()
        assert run.instances() == []
    finally:
        world.clear()
