"""Data written by released versions stays readable (tests/data/released)."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engine.protocol.request import WeightsKey
from engine.storage.checkpoint import CheckpointStore
from tests.engine.test_checkpoint import FIRST
from tests.engine.test_coordinator import BYTES, V0, V1, Bench, seeds

RELEASED = Path(__file__).parent.parent / "data/released"
VERSIONS = sorted(path.name for path in RELEASED.iterdir() if path.is_dir())


@pytest.fixture(params=VERSIONS)
def release(request):
    return RELEASED / request.param


@pytest.fixture
def restored(release, tmp_path):
    """Open a coordinator on a copy of the released folder."""
    shutil.copytree(release / "coordinator", tmp_path / "coordinator")
    return Bench(tmp_path / "coordinator")


def test_there_is_a_released_version():
    assert VERSIONS


def test_a_released_journal_keeps_results_and_their_trajectories(restored):
    answer, blobs = restored.call("collect", kind="train", batch=1, have=0)
    assert [result["request"][4] for result in answer["results"]] == [0, 1, 4]
    assert [result["node"] for result in answer["results"]] == ["spot", "spot", "other"]
    assert answer["results"][2]["reward"] is None
    assert blobs["t1-0"] == b"trajectory t1-0 of 0"
    finished = restored.coordinator.queue.finished
    assert sorted(r.score.reward for r in finished.values() if not math.isnan(r.score.reward)) == [1.0, 1.0]


def test_a_released_journal_keeps_the_lease_and_the_committed_state_of_a_worker(restored):
    held = restored.coordinator.queue.held("keeps/0", 1000002)
    assert sorted(request.seed for request in held) == [2, 3]
    assert restored.call("states", names=["s2-3"])[1] == {"s2-3": b"state s2-3"}
    work = restored.pull("keeps/0", boot=2)
    assert [(a.request.seed, a.step, a.state) for a in work.attempts] == [(2, 3, "s2-3"), (3, 3, "s3-3")]


def test_a_released_journal_keeps_weights_lineage_and_the_newest_order(restored):
    assert restored.call("peek")[0] == {"do": "known", "lineage": 1, "version": 0}
    for weights, data in ((V0, BYTES[V0]), (WeightsKey(version=1, average=True), BYTES[V1])):
        answer = restored.call("weights", weights=[weights.version, weights.average])
        assert answer[1] == {"weights": data}
    assert restored.call("hello", lineage=2, boot=5, seq=2)[0] == {"do": "late"}


def test_a_released_journal_keeps_exploration_and_poisoned_requests(restored):
    answer, _ = restored.call("collect", kind="explore", batch=2, have=0)
    assert answer["poisoned"] == ["boom"]
    assert answer["to_come"] == 11


def test_a_released_journal_issues_no_lease_number_twice(restored):
    work = restored.pull("keeps/0", boot=2)
    assert work.lease > 1000006
    assert seeds(work) == [2, 3]


def test_a_released_checkpoint_loads(release, tmp_path):
    shutil.copytree(release / "store", tmp_path / "store")
    # Later versions also keep the rows of a training pass that fit into memory.
    assert CheckpointStore(f"file://{tmp_path}/store").newest() == replace(FIRST, fits=None)
