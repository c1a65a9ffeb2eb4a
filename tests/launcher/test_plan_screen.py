"""The plan on one screen: at most 20 lines of 80 columns, with what stops a purchase above the nodes."""

import pytest

from launcher.cli.plan_screen import saving
from launcher.placement.cloud_plan import Factors

CLOUD_JOBS = ("flux", "flux_pickscore", "qwen_image_ocr", "sd3_5", "sd3_5_geneval", "wan_video", "wan_video_http")
LINES, COLUMNS = 20, 80


def is_one_screen(lines: list[str]) -> bool:
    return len(lines) <= LINES and max(map(len, lines)) <= COLUMNS


@pytest.mark.parametrize("name", CLOUD_JOBS)
def test_every_cloud_job_is_planned_on_one_screen(dry_run, name):
    lines = dry_run(name)
    assert is_one_screen(lines)
    assert " to $" in lines[0], "dollars with their interval"
    assert lines[1].startswith("  at most $")
    assert sum(line.startswith(("  saves ", "  costs ")) for line in lines) == 2, (
        "against on demand, and the trainer alone"
    )
    assert "--explain" in lines[-2]


def test_a_local_job_is_planned_on_one_screen(dry_run, forked_engine):
    lines = dry_run("template")
    assert is_one_screen(lines)
    assert "nothing was bought" in lines[0]
    assert any("47% less than the same nodes on demand, $5.58/h; the trainer alone $1.86/h" in line for line in lines)


def test_what_stops_a_purchase_comes_before_the_nodes(dry_run):
    lines = dry_run("sd3_5")
    stops = [number for number, line in enumerate(lines) if line.startswith("  !! ")]
    nodes = next(number for number, line in enumerate(lines) if line.startswith("  nodes "))
    assert stops == list(range(2, nodes))
    assert ["no bucket on aws" in lines[2], "model.path" in lines[3], "TOO OLD" in lines[4]] == [True] * 3
    assert "spotrl check sd3_5.yaml" in lines[5]


def test_more_stops_than_fit_are_counted(dry_run):
    long = "a-name-that-no-node-can-carry-anywhere"
    lines = dry_run("sd3_5", "--name", long)
    assert is_one_screen(lines)
    assert [line for line in lines if line.startswith("  !! ")][-1] == "  !! and 2 more"


def test_a_bucket_that_is_named_stops_nothing(dry_run):
    assert not any("no bucket" in line for line in dry_run("sd3_5", "--set", "store.aws=s3://a-bucket/runs"))


def test_many_pools_leave_the_screen_in_order(dry_run):
    lines = dry_run("qwen_image_ocr", "--infra", "aws,gcp", "--set", "resources.rollout.num_nodes=12")
    assert is_one_screen(lines)


def test_explain_prints_the_screen_first_and_then_the_rest(dry_run):
    short, long = dry_run("sd3_5"), dry_run("sd3_5", "--explain")
    assert long[: len(short) - 1] == short[:-1]
    assert any("what else there is, and why not:" in line for line in long)


@pytest.mark.parametrize(
    ("micro_usd", "text"),
    [(75_000_000, "saves $25.00 (25%) against"), (150_000_000, "costs $50.00 (50%) more than"), (100_000_000, "as mu")],
)
def test_a_saving_is_the_difference_to_the_baseline(micro_usd, text):
    factors = Factors(
        against="the trainer alone",
        iterations=1.0,
        hours_per_iteration=1.0,
        micro_usd_per_hour=1.0,
        their_micro_usd=100_000_000,
        their_ms=3_600_000,
    )
    assert text in saving(micro_usd, factors)
