"""Full weights divided over several ranks train what one rank trains: real processes, gloo and FSDP2."""

from dataclasses import replace

import pytest
import torch

from engine.algorithm_config import AlgorithmConfig, DiffusionNftConfig
from tests.rank_training import Job
from tests.shard_training import ShardTrainings, Task, largest_difference

pytestmark = pytest.mark.long

FLOW_GRPO = AlgorithmConfig(
    name="flow-grpo", kl_beta=0.01, rows_per_forward=12, order="fixed", learning_rate=1e-3, gradient_clip=1.0
)
NFT = AlgorithmConfig(
    name="diffusion-nft",
    rows_per_forward=8,
    order="arrival",
    learning_rate=1e-3,
    diffusion_nft=DiffusionNftConfig(old_policy_decay="gradual"),
)
ONE_GROUP_A_PASS = FLOW_GRPO.model_copy(update={"rows_per_forward": 4})
"""Both sides make equal passes: Wan's norms compute in fp32, and their gradients are rounded to the sum of a pass."""

OTHER_ORDER = (7, 2, 5, 0, 3, 6, 1, 4)


@pytest.fixture(scope="module")
def trainings():
    trainings = ShardTrainings(3)
    yield trainings
    trainings.close()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def furthest(these, those):
    """Return the largest difference of a tensor of two checkpoints: weights, average, old policy and moments."""
    assert these.files.keys() == those.files.keys()
    return max(largest_difference(these.files[name], those.files[name]) for name in those.files)


@pytest.mark.parametrize("family", ["qwen-image", "wan"])
def test_in_fp64_divided_weights_train_as_one_rank_does(trainings, tmp_path, family):
    job = Job(family=family, double=True, algorithm=ONE_GROUP_A_PASS, weights="full")
    one = trainings.run(Task(job=job, folder=tmp_path / "one"), 1)
    three = trainings.run(Task(job=replace(job, order=OTHER_ORDER), folder=tmp_path / "three"), 3)
    assert furthest(three, one) <= 1e-10
    assert largest_difference(three.first_gradients, one.first_gradients) <= 1e-10
    for these, those in zip(three.health, one.health, strict=True):
        assert these == pytest.approx(those, rel=1e-6)
    for these, those in zip(three.sampled, one.sampled, strict=True):
        torch.testing.assert_close(these, those, rtol=1e-6, atol=1e-6)  # rank 0 alone, with the weights of all ranks
    assert three.collective_ms > 0


def test_divided_weights_repeat_bit_for_bit_in_any_order_and_after_a_full_disk(trainings, tmp_path):
    job = Job(family="sd3", double=False, algorithm=FLOW_GRPO, weights="full")
    first = trainings.run(Task(job=job, folder=tmp_path / "first"), 2)
    other = replace(job, order=OTHER_ORDER)
    again = trainings.run(Task(job=other, folder=tmp_path / "again", disk_fills=True), 2)
    one = trainings.run(Task(job=job, folder=tmp_path / "one"), 1)
    assert again.bits == first.bits
    before, last = "l0001-i000001", "l0001-i000002"
    assert again.newest == (before, before, last), "while the disk was full, when it had room again, and at the end"
    assert largest_difference(first.first_gradients, one.first_gradients) <= 1e-5


def test_a_checkpoint_continues_with_another_number_of_ranks(trainings, tmp_path):
    job = Job(family="sd3", double=True, algorithm=NFT, weights="full")
    whole = trainings.run(Task(job=job, folder=tmp_path / "whole"), 1)
    ranks = tmp_path / "start"
    trainings.run(Task(job=replace(job, batches=1), folder=ranks), 3)
    for number in (1, 2):
        task = Task(job=replace(job, batches=2), folder=tmp_path / f"then {number}", start=ranks, first_batch=1)
        assert furthest(trainings.run(task, number), whole) <= 1e-10


@pytest.mark.parametrize("bad", [(1,), (0, 1, 2, 3)])
def test_a_group_without_a_finite_loss_is_skipped_by_all_ranks(trainings, tmp_path, bad):
    job = Job(family="sd3", double=True, algorithm=FLOW_GRPO, weights="full", batches=1)
    one = trainings.run(Task(job=job, folder=tmp_path / "one", bad=bad), 1)
    two = trainings.run(Task(job=job, folder=tmp_path / "two", bad=bad), 2)
    assert one.health[0]["skipped_groups"] == two.health[0]["skipped_groups"] > 0
    assert furthest(two, one) <= 1e-10


def test_divided_weights_compute_in_bfloat16_with_fp32_masters(trainings, tmp_path):
    job = Job(family="qwen-image", double=False, algorithm=FLOW_GRPO, weights="full", batches=1)
    fp32 = trainings.run(Task(job=job, folder=tmp_path / "fp32"), 1)
    one = trainings.run(Task(job=job, folder=tmp_path / "one", in_bfloat16=True), 1)
    two = trainings.run(Task(job=job, folder=tmp_path / "two", in_bfloat16=True), 2)
    assert {value.dtype for value in two.files["weights"].values()} == {torch.float32}
    apart = [cosine_distance(bf16.first_gradients, fp32.first_gradients) for bf16 in (one, two)]
    assert 0 < apart[1] < max(0.02, 2 * apart[0])


def cosine_distance(these, those):
    mine, its = (torch.cat([value.flatten() for _, value in sorted(one.items())]) for one in (these, those))
    return 1 - float(torch.nn.functional.cosine_similarity(mine, its, dim=0))
