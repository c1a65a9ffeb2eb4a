"""The algorithms benchmark's figures, calculated by hand."""

from dataclasses import replace

import pytest

from engine.prompts import held_out_digits, prompt_source
from tests.benchmarks.algorithm_runs import CAP, Arm, Run, Tuning, config_of, crossing, from_json, passes_of, to_json
from tests.benchmarks.algorithms import (
    ALL_LEVELS,
    ARMS,
    SETTINGS,
    TRIED,
    chosen,
    guard,
    iterations_to_target,
    largest_difference,
    orders,
    passes_to_target,
    ratio,
)

RUN = Run(
    arm="diffusion-nft",
    seed=101,
    commit="abc",
    config_digest="0",
    config={},
    curve={0: 0.5, 3: 0.7, 6: 0.8, 9: 0.7},
    passes=[100] * 9,
    explored=[0] * 9,
    quality={"readers": {"reward": 0.8}, "drift": 0.1, "border": 0.1, "diversity": 0.4},
    seconds=1.0,
    where={},
)
MISSED = replace(RUN, curve={0: 0.5, 3: 0.6})


def test_the_target_is_crossed_on_a_straight_line_between_two_evaluations():
    assert crossing(RUN.curve) == pytest.approx(4.5)
    assert crossing({0: 0.8, 3: 0.9}) == 0.0
    assert crossing(MISSED.curve) is None


def test_a_run_that_misses_the_target_counts_as_the_cap():
    assert iterations_to_target(MISSED) == CAP
    assert passes_to_target(MISSED) == CAP * 100
    assert passes_to_target(RUN) == pytest.approx(450)


def test_the_ratio_is_the_geometric_mean_over_paired_seeds():
    slower = [replace(RUN, seed=seed, curve={0: 0.5, 12: 0.75}) for seed in (101, 102)]
    faster = [replace(RUN, seed=101, curve={0: 0.5, 6: 0.75}), replace(RUN, seed=102, curve={0: 0.5, 3: 0.75})]
    found = ratio(slower, faster)
    assert found["mean"] == pytest.approx((2 * 4) ** 0.5)
    assert (found["low"], found["high"], found["pairs"]) == (pytest.approx(2), pytest.approx(4), 2)
    assert ratio(slower, [replace(RUN, seed=999)]) == {}


def test_a_raw_file_holds_the_whole_run():
    assert from_json(to_json(RUN)) == RUN


def test_network_passes_count_rollouts_candidates_controls_and_gradients():
    all_levels = {"name": "diffusion-nft", "diffusion_nft": ALL_LEVELS}
    flow, nft = (config_of(Arm(algorithm=algorithm), 1, 10) for algorithm in ({"name": "flow-grpo"}, all_levels))
    assert passes_of(flow, explored=0) == 48 * 8 + 48 * 7 * 3
    assert passes_of(nft, explored=0) == 48 * 8 + 48 * 8 * 4
    assert passes_of(nft, explored=144) == (48 + 144 + 4) * 8 + 48 * 8 * 4
    half = config_of(Arm(algorithm={"name": "diffusion-nft"}), 1, 10)
    assert passes_of(half, explored=0) == 48 * 8 + 48 * 4 * 4
    in_path = config_of(Arm(algorithm=all_levels, mode="in-path"), 1, 10)
    assert passes_of(in_path, explored=0) == 144 * 8 + 48 * 8 * 4


def test_tuning_evaluates_strings_that_are_neither_reported_nor_trained():
    config = config_of(ARMS["diffusion-nft"], 901, CAP)
    tuning = Tuning(prompt_source(config, None))
    strings = set(tuning.held_out())
    assert len(strings) == 512
    assert not strings & set(held_out_digits())
    assert not strings & {string for number in range(CAP) for string in tuning.batch(number)}


def test_every_algorithm_was_tuned_with_equal_effort_and_every_arm_is_a_job():
    assert len({len(tried) for tried in TRIED.values()}) == 1
    for arm in ARMS.values():
        assert config_of(arm, 101, CAP).iterations == CAP


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_are_the_best_of_those_that_were_tried(name):
    assert SETTINGS[name] == chosen(name)


def test_runs_are_compared_where_both_were_evaluated():
    assert largest_difference(RUN, replace(RUN, curve={0: 0.5, 6: 0.7, 12: 0.1})) == pytest.approx(0.1)


def test_quality_is_compared_at_the_target():
    def at_target(**values):
        return replace(RUN, at_target={"exact_match": 0.8, "drift": 0.1, "border": 0.2, "diversity": 0.4, **values})

    found = guard({"flow-grpo": [at_target()], "diffusion-nft": [at_target(drift=0.2), at_target(drift=0.1), RUN]})
    assert found["diffusion-nft"]["drift_ratio"] == pytest.approx(1.5)
    assert found["diffusion-nft"]["diversity_ratio"] == pytest.approx(1.0)
    assert found["diffusion-nft"]["seeds"] == 2


def test_every_reader_orders_the_algorithms():
    def read(reward, tesseract):
        return [replace(RUN, quality={"readers": {"reward": reward, "tesseract": tesseract}})]

    runs = {"flow-grpo": read(0.5, 0.5), "grpo-guard": read(0.6, 0.4), "diffusion-nft": read(0.9, 0.9)}
    assert orders(runs) == {
        "reward": ["diffusion-nft", "grpo-guard", "flow-grpo"],
        "tesseract": ["diffusion-nft", "flow-grpo", "grpo-guard"],
    }
