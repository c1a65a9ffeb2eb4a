"""A run whose nodes are all on spot, on each fake cloud: a node that is up takes the role of each lost trainer.

On Google Cloud the trainer is lost with notice, then without notice to a controller that dies between the event and the
order; then the run reaches its target. On AWS it is lost without notice, then it freezes; at last it is lost with
nobody to replace it, and the nodes end themselves.
"""

import json
import shutil
import signal
from collections.abc import Iterator

import pytest

from engine.events import CheckpointSaved, EngineStarted
from launcher.decide.facts import PROMOTED, NodeRecord
from launcher.ledger.store import find_run, progress_of
from launcher.provision.local.processes import is_alive
from tests.clouds import demo_reward
from tests.clouds.billed import check_bill
from tests.clouds.launched import BACK_SECONDS, Launched, job, wait_for
from tests.clouds.planted import holds_token
from tests.fakes.clouds.world import World
from tests.mutants.process_plugin import planted_in

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(1500)]

UP_SECONDS = 1000.0
TRAINS_SECONDS = 240.0
ALONE_SECONDS = 40.0
"""Seconds of silence after which a node without controller and coordinator ends itself; the default is 600."""

DIES_BEFORE_THE_ORDER = {
    "module": "launcher.controller.controller",
    "old": "        # The promotion is durable. After a crash here the next pass orders it again.\n",
    "new": "        os.kill(os.getpid(), 9)\n",
}


def on_spot(name: str, cloud: str) -> str:
    """Return the text of a job with a trainer and two rollout nodes, all on spot and alike."""
    text = job(
        name,
        cloud,
        deadline="14h",
        evaluate_every="2",
        secrets="SPOTRL_ALONE_SECONDS",
        also="reward: demo_reward:score\ntarget: {metric: after_story, value: 0.3, evaluations: 1}",
    )
    for before, after in (
        ("trainer: {", "trainer: {use_spot: true, "),
        ("num_nodes: 1, min_nodes: 1}", "num_nodes: 2, min_nodes: 2}"),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    return text


def launched_on(world: World, cloud: str, what: str = "role") -> Iterator[Launched]:
    """Launch a run, and wait until all of its nodes work."""
    name = f"{what}-{cloud}"
    env = {"SPOTRL_ALONE_SECONDS": f"{ALONE_SECONDS:.0f}"}
    run = Launched(world=world, name=name, home=world.folder / "home" / name, env=env)
    (world.folder / "jobs").mkdir(exist_ok=True)
    shutil.copy(demo_reward.__file__, world.folder / "jobs")
    try:
        run.spotrl("catalog", "refresh")
        run.launch(on_spot(name, cloud))
        run.until("all its nodes work", lambda: len(run.ready()) == 3, UP_SECONDS)
        run.trains_on(1, TRAINS_SECONDS)
        yield run
    finally:
        world.clear()
        run.spotrl("down", name, check=False)


@pytest.fixture(scope="module")
def gcp(world: World) -> Iterator[Launched]:
    yield from launched_on(world, "gcp")


@pytest.fixture(scope="module")
def aws(world: World) -> Iterator[Launched]:
    yield from launched_on(world, "aws")


def trainer_of(run: Launched) -> str:
    (trainer,) = run.ready("trainer")
    return trainer.name


def with_token(run: Launched) -> set[str]:
    """Return the nodes at work that have the run's own token."""
    with run.sessions() as session:
        token = find_run(session, run.name).token
    return {node.name for node in run.ready() if holds_token(run.world, node.name, token)}


def trainers(run: Launched) -> list[NodeRecord]:
    """Return the records of all nodes that ever were the trainer, the newest last."""
    return sorted((one for one in run.records().values() if one.role == "trainer"), key=lambda one: one.generation)


def holds_checkpoint(run: Launched) -> bool:
    """Return whether the trainer has saved a checkpoint since it started."""
    with run.sessions() as session:
        row = find_run(session, run.name)
        saved, started = progress_of(session, row, CheckpointSaved.KIND), progress_of(session, row, EngineStarted.KIND)
        return bool(saved) and saved[-1].lineage == started[-1].lineage


def takes_over(run: Launched, lost: str) -> NodeRecord:
    """Wait until a node that was up trains in the place of a lost one, and its own slot is filled again."""
    run.until("another node trains", lambda: {node.name for node in run.ready("trainer")} - {lost}, BACK_SECONDS)
    run.trains_on(2, TRAINS_SECONDS)
    new = trainers(run)[-1]
    assert PROMOTED in new.happened
    assert new.happened[PROMOTED] >= (run.records()[lost].ended_ms or 0), "no promotion before the end is on record"
    assert new.name.startswith(f"{run.name}-spot-"), "no trainer was bought"
    run.until("all its nodes work", lambda: len(run.ready()) == 3, BACK_SECONDS)
    assert run.every_batch_is_whole()
    return new


def test_only_the_trainers_node_has_the_runs_token(gcp):
    assert with_token(gcp) == {trainer_of(gcp)}


def test_a_node_takes_the_role_of_a_trainer_that_is_lost_with_notice(world, gcp):
    gcp.until("a checkpoint is saved", lambda: holds_checkpoint(gcp), TRAINS_SECONDS)
    lost = trainer_of(gcp)
    world.reclaim(lost, seconds=10, notice=True)
    new = takes_over(gcp, lost)
    assert "notice" in gcp.records()[lost].happened
    assert with_token(gcp) == {new.name}
    assert f"{new.name} promoted" in gcp.words(new.name)


def test_a_controller_that_dies_between_event_and_order_is_followed_by_one_that_orders(world, gcp):
    gcp.until("a checkpoint is saved", lambda: holds_checkpoint(gcp), TRAINS_SECONDS)
    bugs = world.folder / "dies.json"
    bugs.write_text(json.dumps([DIES_BEFORE_THE_ORDER]))
    gcp.signal(signal.SIGKILL)
    gcp.spotrl("resume", gcp.name, **planted_in({}, bugs))
    lost, controller = trainer_of(gcp), gcp.controller()
    world.reclaim(lost)
    wait_for(lambda: not is_alive(controller, None), 180)
    promoted = trainers(gcp)[-1]
    assert PROMOTED in promoted.happened
    spec = gcp.home / "runs" / gcp.name / "nodes" / promoted.name / "spec.json"
    assert json.loads(spec.read_text())["role"] == "rollout"
    assert promoted.name not in with_token(gcp), "the run's token comes with the order"
    gcp.spotrl("resume", gcp.name)
    assert takes_over(gcp, lost).name == promoted.name


def test_the_run_reaches_its_target_and_the_clouds_bill_agrees(world, gcp, tmp_path):
    for node in gcp.ready():
        world.on(node.name, ["touch", str(demo_reward.GATE)])
    wait_for(lambda: gcp.view().status == "finished", 600)
    assert gcp.view().reason == "target"
    gcp.down()
    assert gcp.instances() == []
    assert check_bill(gcp, tmp_path)["basis"] == "billed"
    report = gcp.spotrl("report", gcp.name).stdout
    assert "The trainer was lost 2 times" in report


@pytest.mark.parametrize("how", ["without notice", "frozen"])
def test_a_node_takes_the_role_of_a_trainer_that_is_lost(world, aws, how):
    aws.until("a checkpoint is saved", lambda: holds_checkpoint(aws), TRAINS_SECONDS)
    lost = trainer_of(aws)
    if how == "frozen":
        world.freeze(lost)
    else:
        world.reclaim(lost)
    takes_over(aws, lost)
    assert aws.records()[lost].reclaimed == (how != "frozen")


def test_nodes_whose_trainer_is_lost_without_a_controller_end_themselves(world, aws, tmp_path):
    aws.signal(signal.SIGKILL)
    lost = trainer_of(aws)
    world.reclaim(lost)
    wait_for(lambda: not aws.instances(), ALONE_SECONDS + 120)
    aws.down()
    assert check_bill(aws, tmp_path)["basis"] == "billed"
