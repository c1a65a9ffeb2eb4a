"""Workers that share images on both runtimes: members die, freeze and join, and the batches stay the same.

One fleet per runtime meets all disturbances, because groups must form repeatedly on the same nodes.
"""

import json
import signal
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from engine.algorithm_config import AlgorithmConfig
from engine.config import (
    CandidateBudget,
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    ProfileConfig,
    RuntimeConfig,
)
from tests.end_to_end.sharing import Sharing
from tests.engine.fleet import Fleet
from tests.engine.nursery import NurseryFleet

# tests/engine/test_elastic.py regroups workers without a run.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ITERATIONS = 40
"""Maximum batches. A disturbed run is stopped after all disturbances and at least `FEWEST` batches."""
FEWEST = 5
PACE_SECONDS = 0.2
"""Minimum seconds of a step in disturbed runs, because processes start at the same time, perhaps on few cores."""

WORKERS = 2
"""Workers of every spot node. They form one group while both live."""

BEGUN = ("spot-0", "spot-1")
LATE = "spot-2"

CONFIG = EngineConfig(
    iterations=ITERATIONS,
    algorithm=AlgorithmConfig(prompts_per_batch=2, images_per_prompt=4),
    exploration=ExplorationConfig(
        # A lost worker is waited for on a busy computer too; otherwise less would be explored than in other runs.
        budget=CandidateBudget(candidates=16, patience_seconds=200),
        wait="all",
        profiles=(ProfileConfig(shape=8),),
    ),
    evaluation=EvaluationConfig(prompts=16, every=100),
    runtime=RuntimeConfig(
        shape=8, lease_seconds=1.5, heartbeat_seconds=0.3, trainer_threads=1, sp_timeout_seconds=3.0, trace_steps=True
    ),
)


def shared_on(runtime: str) -> EngineConfig:
    more = {"name": runtime, "sp_degree": WORKERS, "step_seconds": PACE_SECONDS}
    return CONFIG.model_copy(update={"runtime": RuntimeConfig.model_validate({**CONFIG.runtime.model_dump(), **more})})


@dataclass(kw_only=True)
class Record:
    """Manifests of a run, and observations during it."""

    reason: str
    manifests: dict[int, str]
    formed: dict[str, int]
    """How often the workers of a node formed a group by the coordinator's events, by node."""
    logs: str


def formed(fleet: Fleet, node: str) -> int:
    """Return how often the coordinator reported that workers of this node began to share."""
    regroups = [event for event in fleet.events("regrouped", source="coordinator") if event.node == node]
    shared = [any(len(group) == WORKERS for group in event.groups) for event in regroups]
    return sum(now and not before for before, now in pairwise([False, *shared]))


def manifests_of_workers_that_share_nothing(folder: Path, batches: int) -> dict[int, str]:
    """Return the manifests of the first batches of an undisturbed run, by batch."""
    fleet = NurseryFleet(folder, CONFIG)
    try:
        for node in ("trainer", *BEGUN):
            fleet.start(node, workers=WORKERS)
        fleet.wait_for(lambda: len(fleet.manifests()) >= batches)
        return {batch: digest for batch, digest in fleet.manifests().items() if batch < batches}
    finally:
        fleet.close()


@pytest.fixture(scope="module", params=["local", "ray"])
def disturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Kill the first worker of one node and the second of another, then freeze the others, while a node joins."""
    if request.param == "ray":
        pytest.importorskip("ray")
    fleet = NurseryFleet(tmp_path_factory.mktemp(request.param), shared_on(request.param))
    sharing = Sharing(fleet.folder / "nodes", workers=WORKERS)
    took = {}
    try:
        for node in ("trainer", *BEGUN):
            fleet.start(node, workers=WORKERS)
        sharing.wait(dict.fromkeys(BEGUN, 0))
        took["killed"] = sharing.hurt({"spot-0": (1, signal.SIGKILL), "spot-1": (0, signal.SIGKILL)})
        began_ns = time.time_ns()
        fleet.start(LATE, workers=WORKERS)
        took["frozen"] = sharing.hurt({"spot-0": (0, signal.SIGSTOP), "spot-1": (1, signal.SIGSTOP)})
        took["joined"] = sharing.wait({LATE: 0}, began_ns)
        fleet.wait_for_iteration(max(FEWEST, len(fleet.manifests())))
        fleet.post("/stop", json.dumps({"reason": "all has happened"}))
        return Record(
            reason=fleet.wait_until_finished().reason,
            manifests=fleet.manifests(),
            formed={node: formed(fleet, node) for node in (*BEGUN, LATE)},
            logs=fleet.logs(),
        )
    finally:
        print(request.param, {what: f"shared after {seconds:.1f} s" for what, seconds in took.items()})
        fleet.close()


def test_lost_and_joining_group_members_do_not_change_the_batches(disturbed: Record, tmp_path: Path) -> None:
    """The record also shows that groups share images again after each disturbance."""
    assert disturbed.reason == "stopped", disturbed.logs
    assert len(disturbed.manifests) >= FEWEST
    assert disturbed.manifests == manifests_of_workers_that_share_nothing(tmp_path, len(disturbed.manifests))


def test_the_coordinator_reports_every_new_group(disturbed: Record) -> None:
    """Each node reports a group at the start, after the kill and after the freeze; the late node once."""
    assert all(disturbed.formed[node] >= 3 for node in BEGUN), disturbed.formed
    assert disturbed.formed[LATE] >= 1
