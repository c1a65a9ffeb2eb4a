"""The schedule in a plan on clouds: what is forecast, the setting that is better, and what is left out."""

from dataclasses import replace

import pytest

from engine.timing.figures import LINK_SHARE
from launcher.job.resolved import resolve
from launcher.job.schema import Job
from launcher.placement.ranks import ranks_of_nodes
from launcher.placement.schedule import MOST_IMAGES, plan_schedule


def job(rows=168, prompts=8, images=8, early=0.0):
    return Job(
        reward={"name": "ocr"},
        model={"name": "qwen-image", "path": "there", "weights": "lora", "lora_rank": 64},
        algorithm={
            "name": "flow-grpo",
            "prompts_per_batch": prompts,
            "images_per_prompt": images,
            "rows_per_forward": rows,
            "updates_per_batch": 1,
        },
        sampler={"steps": 10, "window": {"size": 2}},
        runtime={"shape": 8},
        early={"share": early},
    )


def schedule_of(made, rollout=4):
    resolved = resolve(made)
    return plan_schedule(resolved, ranks_of_nodes(resolved.recipe, 1), rollout=rollout)


def test_a_unit_is_as_many_groups_as_the_rows_of_a_pass_hold():
    assert schedule_of(job(rows=16)).unit == 1, "8 images x 2 trained steps"
    assert schedule_of(job(rows=32)).unit == 2
    assert schedule_of(job(rows=1)).unit == 1, "a unit is at least a group"
    assert schedule_of(job(rows=10_000)).unit == 8, "and at most an optimiser step"


def test_a_unit_of_the_whole_step_is_named_with_the_rows_that_would_be_better():
    found = schedule_of(job(rows=10_000))
    assert found.better_unit < found.unit
    assert found.better_seconds < found.seconds * 0.98
    assert found.better_rows == found.better_unit * 16
    assert f"algorithm.unit: {found.better_unit} would make it" in found.text()
    better = schedule_of(job(rows=found.better_rows))
    assert better.seconds == pytest.approx(found.better_seconds)
    assert "would make it" not in better.text()


def test_a_plan_prints_the_share_of_early_groups_that_auto_means():
    off, auto = schedule_of(job()), schedule_of(job(early="auto"))
    assert (off.early_share, off.stale_share) == (0.0, 0.0)
    assert "one version early" not in off.text()
    assert auto.early_share > 0
    assert auto.seconds < 0.98 * off.seconds
    assert f"early.share {auto.early_share:g}: {auto.stale_share:.0%} of the groups one version early" in auto.text()
    assert schedule_of(job(early=0.25)).early_share == 0.25
    assert schedule_of(job(early="auto"), rollout=0).early_share == 0.0, "no rollout GPU is ever idle"


def full(rows, *, unit="rows", prompts=16, ranks=8):
    """Return the schedule and the recipe of full weights that ranks share. A group has 16 rows."""
    made = job(rows=rows, prompts=prompts)
    made = made.model_copy(
        update={
            "model": made.model.model_copy(update={"weights": "full"}),
            "algorithm": made.algorithm.model_copy(update={"unit": unit}),
            "runtime": made.runtime.model_copy(update={"trainer_ranks": ranks}),
            "resources": made.resources.model_copy(
                update={"trainer": made.resources.trainer.model_copy(update={"accelerators": f"H200:{ranks}"})}
            ),
        }
    )
    resolved = resolve(made)
    trainer = replace(ranks_of_nodes(resolved.recipe, ranks), sampling=1)
    return plan_schedule(resolved, trainer, rollout=0), resolved.recipe.on(ranks)


def test_a_unit_of_ranks_is_as_many_groups_as_fit_into_all_their_passes():
    assert full(16)[0].unit == 8, "a group for each rank"
    assert full(10_000)[0].unit == 16


def test_divided_weights_gather_in_every_pass_so_passes_with_fewer_rows_cost_more():
    """Without rollout GPUs nothing overlaps: the schedule takes as long as the price says."""
    (small, dear), (large, cheap) = full(8), full(16)
    assert dear.step.passes(8) == 4
    assert cheap.step.passes(8) == 2
    gather = cheap.step.collective_seconds_of_pass(8)
    assert gather == pytest.approx(7 / 8 * 20_430_401_088 * (2 * 2 + 4) / (450e9 * LINK_SHARE.value), rel=1e-3)
    assert small.seconds - large.seconds == pytest.approx(dear.train_seconds - cheap.train_seconds)
    assert dear.step.collective_seconds(8) - cheap.step.collective_seconds(8) == pytest.approx(2 * gather)
    rollouts = 16 * 8 * cheap.rollout_gpu_seconds
    assert large.seconds == pytest.approx(rollouts + cheap.train_seconds)


def test_a_smaller_unit_of_divided_weights_is_chosen_only_if_it_pays_for_its_collectives():
    assert full(10_000)[0].better_unit == 16
    assert full(10_000, unit=8)[1].step.passes(8) == 2


def test_a_trainer_alone_is_never_idle():
    alone = schedule_of(job(), rollout=0)
    assert alone.bubble_share == pytest.approx(0)
    assert alone.seconds == pytest.approx(alone.seconds_at_least)


def test_a_very_large_batch_has_no_schedule():
    assert schedule_of(job(prompts=MOST_IMAGES // 8 + 8)) is None
