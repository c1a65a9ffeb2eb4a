"""What came of the schedule, in the report."""

from launcher.report.schedule import schedule_of, schedule_words

DONE = {"seconds": 12.0, "waited_seconds": 3.0, "helped_seconds": 2.0, "switch_seconds": 0.5}


def test_iterations_with_a_forecast_are_compared_with_it():
    expected = {"expected_seconds": 10.0, "expected_waiting": 2.5}
    events = [{"schedule": DONE}, {"schedule": DONE | expected}, {"schedule": DONE | expected | {"seconds": 14.0}}, {}]
    result = schedule_of(events)
    assert (result.iterations, result.expected_seconds, result.measured_seconds) == (2, 10.0, 13.0)
    assert schedule_words(result) == (
        "Schedule: an iteration took 13.0 s, expected 10.0 s (medians of 2); the trainer waited 3.0 s for rollouts, "
        "expected 2.5 s, sampled 2.0 s and switched 0.5 s."
    )


def test_early_groups_are_compared_with_the_share_that_was_expected():
    expected = {"expected_seconds": 10.0, "expected_waiting": 2.5, "expected_stale_share": 0.25}
    health = [{"stale_share": 0.5, "early_outside_share": 0.125}, {}]
    result = schedule_of([{"schedule": DONE | expected, "health": one} for one in health])
    assert (result.expected_stale_share, result.stale_share, result.early_outside_share) == (0.25, 0.25, 0.125)
    assert schedule_words(result).endswith(
        "Early groups: 25% of the groups, expected 25%; 12% of their training rows were outside the clip range."
    )


def test_a_run_without_a_forecast_says_nothing():
    assert schedule_of([{"schedule": DONE}, {}]) is None
    assert schedule_words(None) == ""
