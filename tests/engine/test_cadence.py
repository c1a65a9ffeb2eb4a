"""After which batches there is a checkpoint (engine/trainer/cadence.py)."""

import math

import pytest

from engine.config import CheckpointConfig, EngineConfig, ModelConfig
from engine.trainer.cadence import LONGEST_BATCHES, Cadence, batches_between

HOUR_MS = 3_600_000


def config_of(every, weights="full", iterations=1000):
    return EngineConfig(
        iterations=iterations, model=ModelConfig(weights=weights), checkpoint=CheckpointConfig(every=every)
    )


def saved(cadence, batches, *, work_ms, cost_ms, first=1):
    """Return the batches after which the cadence has a checkpoint."""
    made = []
    for batch in range(first, first + batches):
        is_due = cadence.is_due(batch)
        cadence.trained(batch, work_ms, cost_ms if is_due else None)
        made += [batch] if is_due else []
    return made


def test_a_number_is_kept_whatever_it_costs():
    assert saved(Cadence(config_of(3), life_hours=1), 10, work_ms=1, cost_ms=1e9) == [3, 6, 9]
    assert Cadence(config_of(3), life_hours=1).longest == 3


def test_the_last_batch_always_has_a_checkpoint():
    assert saved(Cadence(config_of(4, iterations=6), life_hours=1), 6, work_ms=1, cost_ms=1) == [4, 6]
    assert saved(Cadence(config_of("auto", iterations=6), life_hours=1e9), 6, work_ms=1e3, cost_ms=1e6) == [1, 6]


def test_lora_has_a_checkpoint_after_each_batch_with_auto():
    assert saved(Cadence(config_of("auto", "lora"), life_hours=1000), 5, work_ms=1, cost_ms=1e6) == [1, 2, 3, 4, 5]


def test_full_weights_have_youngs_interval_after_the_first_batch_was_measured():
    """110 s a checkpoint, batches of 233 s and a loss in ten hours: sqrt(2 * 110 * 36000) / 233 = 12.08 batches."""
    made = saved(Cadence(config_of("auto"), life_hours=10), 60, work_ms=233_000, cost_ms=110_000)
    assert math.sqrt(2 * 110 * 36_000) / 233 == pytest.approx(12.08, abs=0.01)
    assert made == [1, 13, 25, 37, 49]


def test_a_start_from_a_checkpoint_is_measured_anew():
    made = saved(Cadence(config_of("auto"), life_hours=10), 30, work_ms=233_000, cost_ms=110_000, first=50)
    assert made == [50, 62, 74]


def test_the_interval_follows_what_is_measured():
    cadence = Cadence(config_of("auto"), life_hours=10)
    saved(cadence, 1, work_ms=233_000, cost_ms=0)
    assert cadence.is_due(2), "a checkpoint that costs nothing"
    cadence.trained(2, 233_000, 110_000)
    assert next(batch for batch in range(3, 30) if cadence.is_due(batch)) == 2 + batches_between(
        55_000, 10 * HOUR_MS, 233_000
    )


def test_no_interval_is_longer_than_the_longest():
    assert batches_between(1e9, 1e12, 1.0) == LONGEST_BATCHES == Cadence(config_of("auto"), life_hours=1).longest
    assert batches_between(0.0, 1e12, 1.0) == 1
    assert batches_between(1e3, 1e6, 0.0) >= 1, "a batch that took no time"
