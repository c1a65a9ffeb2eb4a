"""`early.share: auto`: on where measured rates say that it makes an iteration shorter, and off before and elsewhere."""

from types import SimpleNamespace

import pytest

from engine.clock import ScaledClock
from engine.config import EarlyConfig, EngineConfig
from engine.early_config import AUTO_SHARES
from engine.protocol.request import Group, Manifest
from engine.trainer.batch_forecast import BatchForecast
from engine.trainer.batch_schedule import BatchSchedule
from tests.engine.test_early_groups import EARLY, stale_shares
from tests.engine.test_help import JOB, STEPS, Coordinator, Waits
from tests.engine.test_loop import build, one_thread  # noqa: F401  a fixture

pytestmark = pytest.mark.usefixtures("one_layer")

GROUPS = 8
AUTO = EarlyConfig(share="auto", patience_seconds=600)


def forecast_of(share="auto", *, image, row, workers=1, early=(), sp_degree=1):
    """Return the forecast of a run with these seconds of an image and of a training row, after a first decision."""
    groups = tuple(Group(prompt=str(number), seeds=(2 * number, 2 * number + 1)) for number in range(GROUPS))
    manifest = Manifest(
        run="r",
        lineage=1,
        batch=1,
        version=1,
        sampler="",
        groups=groups,
        minibatches=(tuple(range(GROUPS)),),
        unit=1,
        early=early,
    )
    runtime = JOB.runtime.model_copy(update={"help": "off", "sp_degree": sp_degree})
    config = JOB.model_copy(update={"runtime": runtime, "early": EarlyConfig(share=share)})
    clock = ScaledClock(origin_ms=0)
    forecast = BatchForecast(
        config,
        SimpleNamespace(rows_per_forward=168, objective=SimpleNamespace(rows_per_image=lambda plan: STEPS)),
        SimpleNamespace(warn=lambda text: None),
        clock,
    )
    coordinator = Coordinator(manifest, step_ms=image * 1000 * 2 / STEPS, workers=workers)
    schedule = BatchSchedule(config, coordinator, forecast, clock, own_worker="trainer/trainer")
    schedule.begin(manifest, SimpleNamespace(steps=STEPS))
    assert forecast.early_share() in (0.0, share), "no rate is known yet"
    if row:
        forecast.measured.training(row * STEPS * 2 * GROUPS, rows=STEPS * 2 * GROUPS, passes=GROUPS)
    schedule.fill_time(Waits())
    return forecast


def test_early_groups_are_on_where_rollout_gpus_would_wait_for_the_trainer():
    """An image takes 6 s and is trained in 6 s: without early groups, the rollout GPU waits for the last unit."""
    assert forecast_of(image=6.0, row=1.0).early_share() in AUTO_SHARES[1:]


@pytest.mark.parametrize(
    "more",
    [
        {"image": 10.0, "row": 0.001},  # nothing to wait for
        {"image": 6.0, "row": 0.0},  # training was not measured yet
        {"image": 0.0, "row": 1.0},
        {"image": 6.0, "row": 1.0, "sp_degree": 2},  # not played forward
    ],
    ids=["rollouts-only", "row-unknown", "image-unknown", "shared-images"],
)
def test_early_groups_are_off_where_they_gain_nothing_or_the_gain_is_unknown(more):
    assert forecast_of(**more).early_share() == 0.0


@pytest.mark.parametrize("share", [0.0, 0.125, 0.5])
def test_a_number_is_the_share_whatever_the_rates(share):
    assert forecast_of(share, image=6.0, row=1.0).early_share() == share
    assert forecast_of(share, image=0.0, row=0.0).early_share() == share


def test_the_forecast_of_a_batch_counts_its_early_groups():
    without, half = forecast_of(image=6.0, row=1.0), forecast_of(image=6.0, row=1.0, early=(0, 1, 2, 3))
    assert without.expected.stale_share == 0.0
    assert 0.0 < half.expected.stale_share <= 0.5
    assert half.expected.seconds < without.expected.seconds
    assert half.figures()["expected_stale_share"] == half.expected.stale_share
    assert "expected_stale_share" not in forecast_of(0.0, image=6.0, row=1.0).figures()


@pytest.mark.parametrize(
    ("change", "share"),
    [
        ({}, "auto"),
        ({"algorithm": {"name": "diffusion-nft"}}, 0.0),
        ({"exploration": {"mode": "in-path", "budget": {"candidates": 144}}}, 0.0),
        ({"model": {"compile": "on"}}, 0.0),
    ],
    ids=["flow-grpo", "diffusion-nft", "in-path", "compile"],
)
def test_auto_means_off_for_a_job_that_may_have_no_early_groups(change, share):
    job = {"algorithm": {"name": "flow-grpo"}, **change, "early": {"share": "auto"}}
    assert EngineConfig.model_validate(job).early.share == share


@pytest.mark.slow
def test_each_batch_has_the_share_that_was_best_before_it(tmp_path):
    """The share of batch 1 is chosen while batch 0 is open, and so on."""
    run = build(EARLY.model_copy(update={"early": AUTO, "iterations": 4}), tmp_path)
    best = {0: 0.0, 1: 0.5, 2: 0.25}  # a quarter of two groups is none
    run.loop.forecast.early_share = lambda: best[run.loop.state.iteration]
    assert run.loop.run().reason == "iterations"
    assert stale_shares(tmp_path) == [0.0, 0.0, 0.5, 0.0]
