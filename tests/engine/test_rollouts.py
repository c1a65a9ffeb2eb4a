"""The rollouts of a batch: those whose steps were shared in several ways get log-probs that the trainer computes."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from engine.diffusion.trajectory import Trajectory
from engine.protocol.request import Finished, Group, Kind, Manifest, Score
from engine.trainer.coordinator_client import Collected
from engine.trainer.report import gpu_time, throughput
from engine.trainer.rollouts import Rollouts

MANIFEST = Manifest(
    run="run",
    lineage=1,
    batch=0,
    version=0,
    sampler="plan",
    groups=(Group(prompt="1234", seeds=(0, 1, 2)),),
    minibatches=((0,),),
)
DEGREES = ([1, 1], [2, 2], [2, 1])


def test_only_a_trajectory_whose_degree_changed_on_the_way_is_computed_again():
    blobs, results = {}, []
    for request, degrees in zip(MANIFEST.requests(), DEGREES, strict=True):
        assert request.kind is Kind.TRAIN
        made = replace(Trajectory.begin(torch.zeros(2)), step=2, degrees=torch.tensor(degrees, dtype=torch.uint8))
        blobs[str(request.seed)] = replace(made, log_probs=torch.full((2,), -1.0)).to_bytes()
        results.append(Finished(request=request, score=Score(reward=0.0, metrics={}), trajectory=str(request.seed)))
    asked = []

    def own(prompt, trajectory):
        asked.append(prompt)
        return replace(trajectory, log_probs=torch.full((2,), -2.0))

    def collect(batch, have, wait):
        return Collected(results=results[have:], blobs=blobs, to_come=False, poisoned=())

    rollouts = Rollouts(MANIFEST, collect, None, own_log_probs=own, old_policy=nullcontext)
    rollouts.wait()
    assert rollouts.are_complete()
    assert rollouts.count(0) == 3
    assert asked == ["1234"]
    assert [t.log_probs.tolist() for t in rollouts.group(0).trajectories] == [[-1.0] * 2, [-1.0] * 2, [-2.0] * 2]


def test_a_result_that_could_not_be_read_is_asked_for_again():
    """For example without memory for its log-probs while the trainer samples: the worker only gives its lease back."""
    made = replace(Trajectory.begin(torch.zeros(2)), step=2, degrees=torch.tensor([2, 1], dtype=torch.uint8))
    requests = MANIFEST.requests()
    results = [Finished(request=one, score=Score(reward=0.0, metrics={}), trajectory="t") for one in requests]
    errors = [MemoryError()]

    def own(prompt, trajectory):
        if errors:
            raise errors.pop()
        return trajectory

    def collect(batch, have, wait):
        return Collected(results=results[have:], blobs={"t": made.to_bytes()}, to_come=False, poisoned=())

    rollouts = Rollouts(MANIFEST, collect, None, own_log_probs=own, old_policy=nullcontext)
    with pytest.raises(MemoryError):
        rollouts.look()
    rollouts.look()
    assert rollouts.are_complete()
    assert sum(rollouts.made_by.values()) == 3


def test_the_idle_share_is_of_all_gpus_of_the_trainer():
    """Rank 0 worked 6 of 10 s and waited for ranks 1 s; another rank waited 2 of 10 s for work and 3 s for ranks."""
    own = {"training": 5000, "collective": 1000, "idle": 500}
    shares = gpu_time(own, 10_000, {"training": 5000, "idle": 2000, "collective": 3000})
    assert shares == pytest.approx({"idle_gpu_share": (4000 + 2000) / 20_000, "collective_gpu_share": 4000 / 20_000})
    assert gpu_time(own, 10_000, {}) == {}


def test_images_per_gpu_second_count_idle_gpus_and_mfu_is_left_out_where_it_is_not_known():
    assert throughput(24, 4 * 30.0, 0.5) == pytest.approx({"images_per_gpu_second": 0.2, "mfu": 0.4})
    assert throughput(24, 120.0, None) == pytest.approx({"images_per_gpu_second": 0.2})
    assert throughput(0, 0.0, None) == {"images_per_gpu_second": 0.0}
