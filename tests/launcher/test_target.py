"""When a curve has reached its target, and the cost of each gain; curves made by hand."""

from dataclasses import replace

import pytest

from launcher.report.target import best, crossing, dollars_per_gain, smoothed
from tests.launcher.a_curve import a_curve


def test_a_score_is_smoothed_over_its_last_three_evaluations():
    assert [point.smoothed for point in smoothed(a_curve(0, 2, 4, 6))] == [0, 1, 2, 4]


def test_the_target_is_confirmed_when_the_smoothed_score_has_held_for_three_evaluations():
    curve = a_curve(0.5, 0.8, 0.8, 0.8, 0.8, 0.8)  # smoothed: .5 .65 .7 .8 .8 .8
    found = crossing(curve, 0.8)
    assert found.first.iteration == 1
    assert found.confirmed.iteration == 5


def test_one_lucky_evaluation_touches_the_target_but_does_not_reach_it():
    found = crossing(a_curve(0.5, 0.9, 0.5, 0.5, 0.5), 0.8)
    assert found.first.iteration == 1
    assert found.confirmed is None


def test_a_dip_restarts_the_count():
    curve = a_curve(0.9, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9)  # smoothed at .9 for two, then low until iteration 5
    assert crossing(curve, 0.9).confirmed.iteration == 7


def test_a_score_equal_to_the_target_counts_despite_rounding():
    assert sum([0.7] * 3) / 3 < 0.7  # the plain mean
    assert crossing(a_curve(0.7, 0.7, 0.7), 0.7).confirmed.iteration == 2


def test_the_number_of_confirming_evaluations_can_be_set():
    curve = a_curve(0.9, 0.9, 0.9, 0.9)
    assert [crossing(curve, 0.9, hold=hold).confirmed.iteration for hold in (1, 2, 4)] == [0, 1, 3]
    assert crossing(curve, 0.9, hold=5).confirmed is None


def test_without_evaluations_no_target_is_reached():
    assert crossing([], 0.1).first is None
    assert best([]) is None
    assert dollars_per_gain([]) == ()


def test_the_best_is_the_earliest_of_the_highest_smoothed_scores():
    assert best(a_curve(0.2, 0.5, 0.5, 0.5, 0.5)).iteration == 3


def test_a_gains_cost_includes_the_flat_time_before_it():
    gains = dollars_per_gain(a_curve(0.0, 0.0, 0.0, 0.3))  # smoothed: 0 0 0 .1
    assert [(gain.from_iteration, gain.to_iteration, gain.micro_usd) for gain in gains] == [(0, 3, 3_000_000)]
    assert gains[0].micro_usd_per_hundredth == 300_000


def test_gains_add_up_to_the_spend_from_first_to_best_evaluation():
    curve = a_curve(0.1, 0.2, 0.3, 0.25, 0.4, 0.405, 0.41, 0.2)
    for step in (0.001, 0.01, 0.1, 0.9):
        gains = dollars_per_gain(curve, step)
        assert sum(gain.micro_usd for gain in gains) == best(curve).micro_usd
        assert sum(gain.to_score - gain.from_score for gain in gains) == pytest.approx(best(curve).smoothed - 0.1)


def test_a_curve_that_only_falls_has_no_gain():
    assert dollars_per_gain(a_curve(0.5, 0.4, 0.3)) == ()


def test_engine_and_report_confirm_the_target_at_the_same_evaluation():
    from engine.config import TargetConfig
    from engine.trainer.evaluation import held

    scores = [number / 512 for number in (240, 300, 420, 380, 410, 415, 409, 420, 430, 300, 440, 440, 440)]
    for value in (0.5, 0.75, 0.79, 0.8, 409 / 512):
        target = TargetConfig(value=value)
        evaluations = [{"exact_match": score} for score in scores]
        stopped = next((n for n in range(len(scores)) if held(evaluations[: n + 1], target)), None)
        confirmed = crossing(a_curve(*scores), value, target.evaluations).confirmed
        assert stopped == (confirmed.iteration if confirmed else None)


def test_an_evaluation_with_a_violated_guard_restarts_the_count():
    good = a_curve(*[0.9] * 6)
    curve = [replace(one, guards_hold=one.iteration != 2) for one in good]
    assert crossing(good, 0.8).confirmed.iteration == 2
    assert crossing(curve, 0.8).confirmed.iteration == 5
    assert crossing([replace(one, guards_hold=False) for one in good], 0.8).first is None


@pytest.mark.parametrize(
    ("drifts", "stopped"),
    [([0.01, 0.02, 0.03, 0.01], 2), ([0.01, 0.06, 0.01, 0.01, 0.01], 4), ([0.06] * 6, None), ([None] * 6, None)],
)
def test_engine_and_report_apply_a_guard_at_the_same_evaluation(drifts, stopped):
    from engine.config import GuardConfig, TargetConfig
    from engine.trainer import evaluation

    target = TargetConfig(value=0.8, guards=(GuardConfig(metric="drift", max=0.05),))
    metrics = [{"exact_match": 0.9} | ({} if drift is None else {"drift": drift}) for drift in drifts]
    assert next((n for n in range(len(drifts)) if evaluation.held(metrics[: n + 1], target)), None) == stopped
    held = [evaluation.guards_hold(one, target.guards) for one in metrics]
    curve = [replace(one, guards_hold=guarded) for one, guarded in zip(a_curve(*[0.9] * 6), held, strict=False)]
    confirmed = crossing(curve, 0.8).confirmed
    assert (confirmed.iteration if confirmed else None) == stopped
