"""Scoring processes of real nodes: whichever process is killed or frozen, each image is scored and finished once.

Each case ends like those of test_conformance.py (`Drill.assert_whole`): every request finished exactly once, and its
trajectory and its reward are bit for bit those of an undisturbed run in one process without scoring processes.
"""

import time
from collections.abc import Iterator

import pytest
import torch

from engine.config import RewardConfig
from engine.reward_config import PoolConfig
from tests.conformance.cluster import ClusterStage
from tests.conformance.drill import Drill
from tests.conformance.stage import SHAPE, engine_config

NODES = 2
IMAGES = 4 * NODES * SHAPE

KILLED = ("scorer-0", pytest.param("worker-0", marks=pytest.mark.slow), pytest.param("agent", marks=pytest.mark.slow))
FROZEN = ("scorer-0", "worker-0")


@pytest.fixture(scope="module")
def whole_drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    threads = torch.get_num_threads()
    pooled = RewardConfig(name="brightness:slow", placed="pool", pool=PoolConfig(batch=2 * SHAPE))
    stage = ClusterStage(tmp_path_factory.mktemp("pool"), engine_config("local").model_copy(update={"reward": pooled}))
    try:
        yield Drill(stage)
    finally:
        stage.close()
        torch.set_num_threads(threads)


@pytest.fixture
def drill(whole_drill: Drill) -> Drill:
    whole_drill.need(NODES, spare=0)
    return whole_drill


@pytest.mark.slow
@pytest.mark.parametrize("part", KILLED)
def test_a_killed_process_loses_and_doubles_no_score(drill: Drill, part: str) -> None:
    batch = drill.submit(IMAGES)
    hit = drill.in_the_middle(batch, step=3)
    drill.stage.kill(f"{hit.node}/{part}")
    drill.assert_whole(batch)
    if part == "agent":
        drill.lose(hit.node)


@pytest.mark.slow
def test_a_killed_coordinator_loses_and_doubles_no_score(drill: Drill) -> None:
    batch = drill.submit(IMAGES)
    drill.in_the_middle(batch, step=3)
    drill.stage.kill("coordinator")
    drill.assert_whole(batch)


@pytest.mark.slow
@pytest.mark.parametrize("part", FROZEN)
def test_a_frozen_process_loses_and_doubles_no_score(drill: Drill, part: str) -> None:
    """The agent kills a frozen process after five seconds, or the process goes on before that."""
    batch = drill.submit(IMAGES)
    hit = drill.in_the_middle(batch, step=3)
    drill.stage.freeze(f"{hit.node}/{part}")
    time.sleep(2 * drill.lease_seconds)
    drill.collect_all(batch)
    drill.stage.thaw(f"{hit.node}/{part}")
    drill.assert_whole(batch)
    drill.works(hit.node)


@pytest.mark.slow
def test_a_frozen_coordinator_loses_and_doubles_no_score(drill: Drill) -> None:
    batch = drill.submit(IMAGES)
    drill.in_the_middle(batch, step=3)
    drill.stage.freeze("coordinator")
    time.sleep(2 * drill.lease_seconds)
    drill.stage.thaw("coordinator")
    drill.assert_whole(batch)
