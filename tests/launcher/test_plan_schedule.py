"""The schedule in a plan on clouds: what is forecast, the setting that is better, and what is left out."""

import pytest

from launcher.job.schema import Job
from launcher.placement.from_job import recipe_of
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
    return plan_schedule(made, recipe_of(made).on(1), trainer=1, rollout=rollout)


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


def test_a_trainer_alone_is_never_idle():
    alone = schedule_of(job(), rollout=0)
    assert alone.bubble_share == pytest.approx(0)
    assert alone.seconds == pytest.approx(alone.seconds_at_least)


def test_a_very_large_batch_has_no_schedule():
    assert schedule_of(job(prompts=MOST_IMAGES // 8 + 8)) is None
