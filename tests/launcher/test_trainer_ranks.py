"""The ranks of a trainer: as many as the engine starts, refused before buying where they cannot train."""

from dataclasses import replace

import pytest

from engine.memory.budget import denoising_bytes, trainer_budget
from engine.memory.job import setting_of, sized_model
from engine.trainer_ranks import RankLimits, sampling_ranks
from launcher.controller.node_specs import node_spec
from launcher.job.checked import JobError
from launcher.job.gpu_checks import check_ranks
from launcher.job.load import load_job
from launcher.job.resolved import resolve
from launcher.placement.ranks import ranks_of_nodes
from launcher.placement.requirements import cloud_requirements
from tests.launcher.made_ledger import HOUR_MS, a_run, a_session

EVERY_GPU = RankLimits(most=64)


@pytest.fixture
def checked(tmp_path):
    """Return a checked job with `runtime.trainer_ranks`, `prompts` groups in two steps, and a trainer's GPUs."""

    def checked(asked: int | str, accelerators: str = "H100:4", *, prompts: int = 16, infra: str = "aws"):
        path = tmp_path / "job.yaml"
        path.write_text(
            f"infra: {infra}\nalgorithm: {{prompts_per_batch: {prompts}, updates_per_batch: 2}}\n"
            f"resources:\n  trainer: {{accelerators: {accelerators}}}\n"
        )
        found = load_job(path)
        runtime = found.job.runtime.model_copy(update={"trainer_ranks": asked})
        return replace(found, job=found.job.model_copy(update={"runtime": runtime}))

    return checked


@pytest.mark.parametrize(("asked", "gpus", "groups", "ranks"), [
    ("auto", 8, 16, 8), ("auto", 8, 5, 5), ("auto", 1, 16, 1), (2, 8, 16, 2), (4, 4, 4, 4),
])  # fmt: skip
def test_auto_is_every_gpu_and_never_more_ranks_than_groups(asked, gpus, groups, ranks):
    assert EVERY_GPU.ranks(asked, gpus=gpus, groups=groups) == ranks
    assert RankLimits(most=1).ranks("auto", gpus=gpus, groups=groups) == 1


@pytest.mark.parametrize(("asked", "gpus", "groups", "most"), [(5, 8, 4, 64), (5, 4, 8, 64), (2, 8, 8, 1)])
def test_more_ranks_than_can_train_are_never_started(asked, gpus, groups, most):
    with pytest.raises(ValueError, match=r"runtime.trainer_ranks is \d, and at most \d can train.* use \d or auto"):
        RankLimits(most=most).ranks(asked, gpus=gpus, groups=groups)


@pytest.mark.parametrize(("asked", "fields", "words"), [
    (4, {"prompts": 6}, ["runtime.trainer_ranks is 4, and an optimiser step has 3 groups", "prompts_per_batch 6",
                         "use 3 or fewer, or auto", "algorithm.prompts_per_batch: 8"]),
    (8, {}, ["is 8, and a trainer node with H100:4", "has 4 GPUs", "use 4 or fewer", "accelerators: H100:8"]),
    (2, {"accelerators": "H100:1"}, ["has 1 GPU,", "use 1 or fewer", "accelerators: H100:2"]),
])  # fmt: skip
def test_ranks_that_cannot_train_are_refused_with_what_is_allowed(checked, asked, fields, words):
    with pytest.raises(JobError) as caught:
        check_ranks(checked(asked, **fields), EVERY_GPU)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.field == "runtime.trainer_ranks"


@pytest.mark.parametrize(("trainer", "has"), [
    ("H100:4, instance_type: p5.4xlarge", "H100:1"), ("H100:4, instance_type: g6.12xlarge", "L4:4"),
])  # fmt: skip
def test_an_instance_type_without_the_named_gpus_is_refused(checked, trainer, has):
    with pytest.raises(JobError, match=rf"is H100:4, and .* has {has}; use accelerators: {has}, or leave"):
        check_ranks(checked("auto", trainer))
    check_ranks(checked("auto", "H100:4, instance_type: p5.48xlarge"))
    check_ranks(checked("auto", "H100:4, instance_type: a-new-type"))


def test_ranks_that_can_train_are_accepted(checked):
    for asked, fields in (("auto", {}), (4, {}), (1, {}), (8, {"accelerators": "H100:8"})):
        check_ranks(checked(asked, **fields), EVERY_GPU)
    check_ranks(checked(2, "L4:1", infra="local"), EVERY_GPU)  # ranks of this machine, whatever is named


def test_ranks_that_this_version_does_not_start_are_refused(checked):
    with pytest.raises(
        JobError, match=r"is 2, and this version trains model.weights \w+ with 1 rank at most; use 1 or auto"
    ):
        check_ranks(checked(2), RankLimits(most=1))


@pytest.mark.parametrize("value", ["{H100: 4, A100: 4}", "['H100:4', 'A100:4']", "'H100:4,A100:4'"])
def test_several_kinds_of_gpus_are_to_choose_from(checked, value):
    trainer = checked("auto", value).job.resources.trainer
    assert (trainer.kinds, trainer.is_open) == (("H100:4", "A100:4"), True)


@pytest.mark.parametrize("value", ["H100:4+L4:1", "['H100:4', 8]", "{}", "[]"])
def test_what_names_no_gpus_is_refused(checked, value):
    with pytest.raises(JobError, match=r"write the GPU and how many a node has, like L4:1 or H100:8"):
        checked("auto", value)


def test_the_plan_counts_the_ranks_of_the_engine_alone(checked):
    job = checked("auto").job
    assert {most: resolve(job, limits=RankLimits(most=most)).ranks for most in (1, 2, 64)} == {1: 1, 2: 2, 64: 4}
    assert cloud_requirements(resolve(job)).trainer.gpus == resolve(job).ranks


QWEN = {"model.name": "qwen-image", "model.path": "there", "model.weights": "lora", "algorithm.name": "flow-grpo"}


def test_a_step_has_the_groups_the_seconds_and_the_bytes_of_the_job(tmp_path):
    """Of 16 prompts in 2 steps: 8 groups, and rank 32 has half of the 1.70 GB of rank 64."""
    path = tmp_path / "job.yaml"
    path.write_text("infra: aws\nresources: {trainer: {accelerators: H100:4}}\n")
    job = load_job(path, QWEN | {"model.lora_rank": "32", "algorithm.prompts_per_batch": "16"}).job
    recipe = resolve(job, limits=EVERY_GPU).recipe
    assert recipe.step.groups == 8
    assert recipe.step.trained_bytes == 1_698_693_120 // 2
    assert recipe.step.group_seconds * 16 == pytest.approx(recipe.train_seconds)
    four, alone = recipe.on(4), recipe.on(1)
    assert ranks_of_nodes(recipe, 4).rounds == 2
    # Three quarters of the gradients, twice, and the weights, at half of NVLink's 450 GB/s.
    both_steps = 2 * (2 * 3 / 4 + 1) * 0.849346560 / 225
    assert four.train_seconds == pytest.approx(alone.train_seconds / 4 + both_steps)
    assert four.sampling_gpus == alone.sampling_gpus == 1, "one rank samples"


SHIPPED = {"model.name": "digits-ocr"}
FLUX = QWEN | {"model.name": "flux"}


@pytest.mark.parametrize(("model", "gpu", "weights", "sampling"), [
    (QWEN, "H100", "lora", 8), (QWEN, "H200", "full", 8), (FLUX, "H200", "full", 8), (SHIPPED, "L4", "full", 8),
    (FLUX, "H100", "full", 8), (FLUX | {"runtime.shape": "48"}, "H100", "full", 1),
])  # fmt: skip
def test_every_rank_samples_unless_full_weights_leave_no_room(tmp_path, model, gpu, weights, sampling):
    """FLUX.1 on H100s: a rank has 76 GiB, holds 40, and would hold 37 more to sample 48 images at once."""
    path = tmp_path / "job.yaml"
    path.write_text(f"infra: aws,gcp\nresources: {{trainer: {{accelerators: '{gpu}:8'}}}}\n")
    more = {"model.weights": weights, "runtime.trainer_ranks": "8", "algorithm.prompts_per_batch": "16"}
    job = load_job(path, model | more).job
    resolved = resolve(job)
    recipe = resolved.recipe
    ranks = ranks_of_nodes(recipe, 8)
    assert (ranks.ranks, ranks.sampling, ranks.waiting) == (8, sampling, 8 - sampling)
    assert recipe.on(8).sampling_gpus == sampling, "they share the rollouts, the trainer alone too"
    assert resolved.have_room == (sampling == 8)
    assert sampling_ranks(job, have_room=resolved.have_room) == sampling, "the engine agrees"


@pytest.mark.parametrize(
    ("plan", "sampling"), [({"ranks_have_room": True}, 2), ({"ranks_have_room": False}, 1), ({}, 1)]
)
def test_every_node_of_a_trainer_is_told_the_ranks_of_the_plan_that_sample(tmp_path, plan, sampling):
    """A plan of an older version says nothing: rank 0 samples alone, as before."""
    path = tmp_path / "job.yaml"
    path.write_text("infra: local\nresources: {trainer: {num_nodes: 2}}\n")
    job = load_job(path, SHIPPED | {"model.weights": "full", "runtime.trainer_ranks": "2"}).job
    with a_session() as session:
        made = a_run(session, folder="/nowhere")
        made.run.plan = plan
        nodes = [made.node(slot, up=0, end=HOUR_MS) for slot in ("trainer", "trainer-1")]
        nodes[1].role = "ranks"
        for node in nodes:
            spec = node_spec(made.run, job, node, is_cloud=False, money_deadline_ms=None, money_longest_ms=None)
            assert spec.sampling_ranks == sampling


def test_a_rank_that_samples_has_room_for_all_weights_its_images_and_their_decoding(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("infra: gcp\nresources: {trainer: {accelerators: H200:8}}\n")
    more = {"model.weights": "full", "runtime.trainer_ranks": "8", "algorithm.prompts_per_batch": "16"}
    job = load_job(path, QWEN | more).job
    setting = setting_of(job, ranks=8)
    sized = sized_model(job.model)
    alone, all_sample = (trainer_budget(sized, replace(setting, sampled=images)) for images in (0, job.runtime.shape))
    decoding = all_sample.parts["decoding beside training"]
    assert {**alone.parts, "decoding beside training": decoding} == all_sample.parts
    images = job.runtime.shape * denoising_bytes(sized, setting)
    gathered, shard = 2 * 20_430_401_088, alone.parts["optimiser"] // 2
    assert all_sample.least_beside == pytest.approx(gathered + images - shard), "a set of gradients less"
    assert resolve(job).memory.trainer.least_beside == all_sample.least_beside
    assert resolve(load_job(path, FLUX | more).job).have_room
    too_many = load_job(path, QWEN | more | {"runtime.shape": "192"}).job
    assert not resolve(too_many).have_room, "rollouts of 192 images at once"
    assert "decoding beside training" not in resolve(too_many).memory.trainer.parts


def test_lora_ranks_hold_all_weights_and_full_weights_are_sharded(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("infra: aws\nresources: {trainer: {accelerators: H100:8}}\n")
    lora = load_job(path, QWEN).job
    one, eight = (resolve(lora).memory_of(ranks).trainer for ranks in (1, 8))
    beside = eight.parts["decoding beside training"]
    assert beside == 8 * 512 * 512 * 2048, "a rank decodes at most so many pixels of what it sampled, in bf16"
    assert {**one.parts, "decoding beside training": beside} == eight.parts
    assert (one.bytes_each, one.asked) == (eight.bytes_each, eight.asked)
    full = load_job(path, QWEN | {"model.weights": "full"}).job
    one, eight = (resolve(full).memory_of(ranks).trainer for ranks in (1, 8))
    assert eight.parts["optimiser"] == pytest.approx(one.parts["optimiser"] / 8)
    assert eight.parts["transformer"] == pytest.approx(20_430_401_088 * 4 / 8, rel=0.001)
    assert eight.asked == one.asked, "a pass of a rank has as many rows as a pass of a lone GPU"
    assert eight.needed(1) < one.needed(1) / 6
