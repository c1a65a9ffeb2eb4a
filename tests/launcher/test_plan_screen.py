"""The plan on one screen: at most 20 lines of 80 columns. Below it, the whole warnings."""

import pytest

from launcher.cli.plan_screen import saving
from launcher.placement.cloud_plan import Factors

ALIKE = ("flux_pickscore", "sd3_5_geneval", "wan_video_http")
"""Jobs whose plan differs from another one's by the scorer alone."""
CLOUD_JOBS = (
    "flux",
    "qwen_image_ocr",
    "sd3_5",
    "wan_video",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ALIKE),
)
LINES, COLUMNS = 20, 80


def screen_of(lines: list[str]) -> list[str]:
    """Return the plan without the warnings below it."""
    return lines[: next(number for number, line in enumerate(lines) if "--explain" in line) + 1]


def is_one_screen(lines: list[str]) -> bool:
    return len(screen_of(lines)) <= LINES and max(map(len, lines)) <= COLUMNS


@pytest.mark.parametrize("name", CLOUD_JOBS)
def test_every_cloud_job_is_planned_on_one_screen(dry_run, name):
    lines = dry_run(name)
    assert is_one_screen(lines)
    assert " to $" in lines[0], "dollars with their interval"
    assert lines[1].startswith("  at most $")
    assert sum(line.startswith(("  saves ", "  costs ")) for line in lines) == 2, (
        "against on demand, and the trainer alone"
    )


def test_a_local_job_is_planned_on_one_screen(dry_run, forked_engine):
    lines = dry_run("template")
    assert is_one_screen(lines)
    assert "nothing was bought" in lines[0]
    assert any("47% less than the same nodes on demand, $5.58/h; the trainer alone $1.86/h" in line for line in lines)


def test_warnings_are_counted_above_the_nodes_and_whole_below_the_plan(dry_run):
    lines = dry_run("sd3_5", "--name", "a-name-that-no-node-can-carry-anywhere")
    nodes = next(number for number, line in enumerate(lines) if line.startswith("  nodes "))
    assert lines[nodes - 1].startswith("  !! 4 warnings below")
    warnings = " ".join(" ".join(lines[len(screen_of(lines)) :]).split())
    for remedy in (
        "or leave aws out of infra !!",
        "use a name of up to",
        "--local-dir sd3.5-medium` !!",
        "catalog refr",
    ):
        assert remedy in warnings
    assert lines[-2] == "  Quotas and credentials were not asked for: spotrl check sd3_5.yaml"


def test_an_upper_end_that_a_limit_makes_says_so(dry_run):
    assert "  upper ends: stopped by the budget ($300.00) and by the deadline (5d)" in dry_run("sd3_5")
    free = dry_run("sd3_5", "--max-total", "3000", "--max-runtime", "20d")
    assert not any("upper ends" in line for line in free)


def test_an_alternative_that_is_late_says_so(dry_run):
    late = [line for line in dry_run("qwen_image_ocr", "--deadline", "3d") if "past the deadline" in line]
    assert [line.split("  ")[1] for line in late] == ["one node fewer: the trainer alone, past the deadline"]


def test_a_bucket_that_is_named_stops_nothing(dry_run):
    assert not any("no bucket" in line for line in dry_run("sd3_5", "--set", "store.aws=s3://a-bucket/runs"))


def test_many_pools_leave_the_screen_in_order(dry_run):
    lines = dry_run("qwen_image_ocr", "--infra", "aws,gcp", "--set", "resources.rollout.num_nodes=12")
    assert is_one_screen(lines)


def test_explain_prints_the_screen_first_and_then_the_rest(dry_run):
    short, long = screen_of(dry_run("sd3_5")), dry_run("sd3_5", "--explain")
    assert long[: len(short)] == short
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
