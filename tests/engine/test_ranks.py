"""Several ranks train what one rank trains: real processes and gloo."""

from dataclasses import replace

import pytest
import torch

from engine.algorithm_config import AlgorithmConfig, DiffusionNftConfig
from engine.config import EngineConfig, ModelConfig, RuntimeConfig
from engine.node.child import MOST_TORN, Deaths
from engine.trainer.state import config_digest
from engine.trainer_ranks import ranks_of
from tests.rank_training import Job, Trainings

FLOW_GRPO = AlgorithmConfig(
    name="flow-grpo", kl_beta=0.01, rows_per_forward=8, order="fixed", learning_rate=1e-3, gradient_clip=1.0
)
NFT = AlgorithmConfig(
    name="diffusion-nft",
    rows_per_forward=8,
    order="fixed",
    learning_rate=1e-3,
    diffusion_nft=DiffusionNftConfig(old_policy_decay="gradual"),
)
FAMILIES = ("qwen-image", "sd3", "wan")


@pytest.fixture(scope="module")
def trainings():
    trainings = Trainings(4)
    yield trainings
    trainings.close()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def difference(these, those):
    """Return the largest difference of a tensor, relative to its largest value.

    The first gradient of half of the adapters is zero, because the other half begins as zero.
    """
    assert these.keys() == those.keys()
    largest = {name: float(value.abs().max()) for name, value in those.items()}
    assert all(not these[name].any() for name, value in largest.items() if value == 0)
    return max(float((these[name] - those[name]).abs().max()) / value for name, value in largest.items() if value)


def bits(trained):
    tensors = trained.weights | trained.moments
    return {name: value.numpy().tobytes() for name, value in tensors.items()}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("algorithm", [FLOW_GRPO, NFT], ids=["flow-grpo", "diffusion-nft"])
def test_in_fp64_two_and_four_ranks_train_the_weights_of_one_rank(trainings, family, algorithm):
    job = Job(family=family, double=True, algorithm=algorithm)
    alone = trainings.run(job, 1)
    for ranks in (2, 4):
        shared = trainings.run(job, ranks)
        assert difference(shared.first_gradients, alone.first_gradients) < 1e-10
        assert difference(shared.weights, alone.weights) < 1e-10
        for one, other in zip(shared.health, alone.health, strict=True):
            assert one == pytest.approx(other, rel=1e-6, abs=1e-12)
        assert shared.collective_ms > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", [FAMILIES[0], *(pytest.param(one, marks=pytest.mark.long) for one in FAMILIES[1:])])
def test_in_fp32_gradients_are_those_of_one_rank_and_a_repetition_has_equal_bits(trainings, family):
    job = Job(family=family, double=False, algorithm=FLOW_GRPO)
    alone, shared = trainings.run(job, 1), trainings.run(job, 2)
    assert difference(shared.first_gradients, alone.first_gradients) < 1e-5
    other_order = replace(job, order=(7, 2, 5, 0, 3, 6, 1, 4))
    assert bits(trainings.run(other_order, 2)) == bits(shared), "fixed order: arrival does not matter"


@pytest.mark.long
def test_in_exact_order_two_ranks_give_the_same_bits_for_every_order_of_arrival(trainings):
    job = Job(family=FAMILIES[0], double=False, algorithm=FLOW_GRPO.model_copy(update={"order": "exact"}), batches=1)
    other_order = replace(job, order=(7, 2, 5, 0, 3, 6, 1, 4))
    assert bits(trainings.run(other_order, 2)) == bits(trainings.run(job, 2))


@pytest.mark.long
def test_two_ranks_compare_early_groups_with_the_weights_that_made_them(trainings):
    """Groups of both ranks are early. A comparison with the weights one version later would be off."""
    job = Job(family=FAMILIES[0], double=False, algorithm=FLOW_GRPO, early=(0, 1, 4, 5))
    alone, shared = trainings.run(job, 1), trainings.run(job, 2)
    assert len(alone.health) == 4
    for one, other in zip(shared.health, alone.health, strict=True):
        assert one["dlogp_abs_mean"] == pytest.approx(other["dlogp_abs_mean"], rel=0.02)
    assert alone.health[2]["dlogp_abs_mean"] > 10 * alone.health[0]["dlogp_abs_mean"]


@pytest.mark.slow
def test_a_rank_is_not_blamed_for_the_loss_of_another():
    progress = iter([None] * (MOST_TORN + 2))
    deaths = Deaths(lambda: next(progress))
    for _ in range(MOST_TORN - 1):
        deaths.add_torn()
    deaths.add("exit code 1")
    assert deaths.give_up() is None
    deaths.add_torn()
    assert deaths.give_up() == f"lost another rank of the trainer {MOST_TORN} times without progress"


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "asked", "ranks"), [("lora", 2, 2), ("lora", "auto", 1), ("full", "auto", 1)])
def test_a_node_starts_the_ranks_that_its_job_names(weights, asked, ranks):
    assert ranks_of(job_with(weights, asked)) == ranks


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "asked"), [("full", 9), ("lora", 7), ("lora", 9)])
def test_more_ranks_than_weights_or_groups_allow_are_refused(weights, asked):
    with pytest.raises(ValueError, match=rf"trainer_ranks is {asked}, and at most [16] can train"):
        ranks_of(job_with(weights, asked))


@pytest.mark.slow
def test_a_run_in_one_process_has_one_rank():
    with pytest.raises(ValueError, match=r"trainer_ranks is 2, and runtime.name inproc is one process: use 1 or auto"):
        RuntimeConfig(name="inproc", trainer_ranks=2)


@pytest.mark.slow
def test_another_number_of_ranks_is_the_same_job():
    assert config_digest(job_with("lora", 2)) == config_digest(job_with("lora", "auto"))


def job_with(weights, asked):
    """Return a job with 6 groups in a step."""
    return EngineConfig(
        model=ModelConfig(weights=weights),
        algorithm=AlgorithmConfig(prompts_per_batch=12, updates_per_batch=2),
        runtime=RuntimeConfig(trainer_ranks=asked),
    )
