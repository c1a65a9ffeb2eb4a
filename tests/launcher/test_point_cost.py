"""The cost of +.01 of score, the forecast for the next, and the end of a run in which a point costs too much."""

import random
from statistics import median

import pytest

from launcher.decide.point_cost import NOT_EVALUATED, point_cost, slope_of, too_dear
from launcher.report.words import point_words
from tests.launcher.a_curve import points

USD = 1_000_000


def test_a_steady_climb_costs_the_same_for_the_last_and_the_next_point():
    cost = point_cost(points(*(0.01 * number for number in range(10)), dollars=3))
    assert cost.evaluations == 10
    assert cost.last_micro_usd == 3 * USD
    assert cost.since_gain_micro_usd == 0
    assert (cost.next_low_micro_usd, cost.next_micro_usd, cost.next_high_micro_usd) == (3 * USD, 3 * USD, 3 * USD)
    words = "The last +.01 of similarity cost $3.00; the next: about $3.00 ($3.00 to $3.00)."
    assert point_words(cost, "similarity") == words


def test_a_steep_rise_between_two_evaluations_is_divided():
    cost = point_cost(points(0, 0, 0, 0, 0, 0, 0.3, dollars=10))  # the smoothed score rises by .1 for $10
    assert cost.last_micro_usd == 1 * USD


def test_a_plateau_adds_to_the_cost_of_the_last_point_and_has_no_forecast():
    cost = point_cost(points(*(0.01 * min(number, 5) for number in range(20)), dollars=3))
    # smoothed: .05 from evaluation 7 on, and .04 at 5; .0467 at 6
    assert cost.last_micro_usd == (19 - 5) * 3 * USD
    assert cost.since_gain_micro_usd == (19 - 7) * 3 * USD
    assert (cost.next_micro_usd, cost.next_low_micro_usd, cost.next_high_micro_usd) == (None, None, None)
    assert point_words(cost, "similarity") == (
        "The last +.01 of similarity cost $42.00, of it $36.00 since the best score; the next: -, "
        "the last 8 evaluations show no rise."
    )


def test_a_score_that_goes_up_and_down_gains_nothing():
    """Each rise of .03 is from a fall: the best score so far was reached once."""
    shaken = points(0, 0, 0, 0.1, 0.1, 0.1, *[0.0, 0.1, 0.1] * 4, dollars=3)
    cost = point_cost(shaken)
    assert shaken[-1].smoothed < 0.07
    assert cost.since_gain_micro_usd == (17 - 5) * 3 * USD
    assert cost.last_micro_usd > cost.since_gain_micro_usd


def test_too_few_evaluations_and_no_rise_are_said():
    assert point_cost([]) == NOT_EVALUATED
    assert point_words(NOT_EVALUATED, "reward") == ""
    few = point_cost(points(0, 0.1, 0.2))
    assert (few.last_micro_usd, few.next_micro_usd) == (None, None)
    assert point_words(few, "reward") == "The last +.01 of reward: -, 3 of the 6 evaluations that it takes."
    flat = point_cost(points(*[0.5] * 7))
    assert flat.last_micro_usd is None
    assert point_words(flat, "reward") == (
        "The last +.01 of reward: -, the score has not risen by 0.01 yet, $6.00 since the best score; the next: -, "
        "the last 7 evaluations show no rise."
    )
    free = point_cost(points(*(0.01 * number for number in range(8)), dollars=0))
    assert (free.last_micro_usd, free.why_no_next) == (0, "the last 8 evaluations cost nothing")


def test_the_forecast_has_an_open_end_where_the_noise_allows_no_rise():
    cost = point_cost(points(0.1, 0.13, 0.1, 0.14, 0.09, 0.15, 0.1, 0.14))
    assert cost.next_high_micro_usd is None
    assert cost.next_low_micro_usd < cost.next_micro_usd
    assert point_words(cost, "reward").endswith(" or more).")


def test_slope_and_standard_error_are_those_of_the_textbook():
    """The expected values are those of scipy.stats.linregress."""
    curve = points(0.10, 0.13, 0.11, 0.15, 0.14, 0.18, dollars=0.000001)
    slope = slope_of(curve)
    assert slope.per_micro_usd == pytest.approx(0.013428571428571427)
    assert slope.error == pytest.approx(0.0037688302737922605, rel=1e-6)


def test_a_run_ends_at_the_third_evaluation_in_a_row_above_the_limit():
    flat = points(*[0.5] * 20, dollars=10)
    assert [count for count in range(20) if too_dear(flat[:count], 50 * USD)] == list(range(9, 20))  # $60, $70, $80
    assert too_dear(flat[:9], 50 * USD) == 80 * USD
    assert too_dear(flat, 190 * USD) is None
    risen = points(*[0.5] * 8, 0.8, 0.8, dollars=10)
    assert too_dear(risen, 50 * USD) is None


def test_eight_evaluations_are_needed_however_dear():
    flat = points(*[0.5] * 8, dollars=1000)
    assert too_dear(flat[:7], USD) is None
    assert too_dear(flat, USD) == 7000 * USD


@pytest.mark.parametrize("dollars", [5, 30, 50])
def test_noise_ends_no_run_whose_points_cost_half_the_limit(dollars):
    """The score rises by .01 for $25, with a limit of $50 and a noise of .01 in each evaluation."""
    chance = random.Random(3)
    for _ in range(20):
        scores = [0.01 * number * dollars / 25 + chance.gauss(0, 0.01) for number in range(60)]
        curve = points(*scores, dollars=dollars)
        assert not any(too_dear(curve[:count], 50 * USD) for count in range(60))


@pytest.mark.parametrize("dollars", [5, 30, 50])
def test_a_noisy_run_that_gains_nothing_ends(dollars):
    chance = random.Random(3)
    ends = []
    for _ in range(20):
        curve = points(*(chance.gauss(0.5, 0.01) for _ in range(60)), dollars=dollars)
        ends.append(next(point.micro_usd for count, point in enumerate(curve, 1) if too_dear(curve[:count], 50 * USD)))
    assert median(ends) <= 450 * USD
