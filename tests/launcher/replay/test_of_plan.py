"""Replays of a plan before a launch: dollars, the share that is in time, and a refusal that names a deadline."""

from dataclasses import replace

import pytest

from launcher.decide.launch_history import MoveRules
from launcher.exit_codes import BudgetError
from launcher.money import HOUR_MS
from launcher.placement.plan_cloud import plan_cloud
from launcher.replay import of_plan
from launcher.replay.of_plan import check_deadline, replays_of, wilson
from launcher.replay.simulate import simulate
from tests.launcher.test_cloud_plan import EAST, requirements, view


def planned(**limits):
    found = plan_cloud(requirements(min_rollout_nodes=2, max_rollout_nodes=2, **limits), view(*EAST))
    return replace(found, pace_ms=found.pace_ms)


def replayed(plan, confidence=0.9):
    return replace(plan, replays=replays_of(plan, MoveRules(), confidence))


@pytest.mark.slow
def test_a_deadline_with_room_is_met_and_one_without_is_refused_with_one_that_would_do():
    calm = planned()
    roomy = replayed(replace(calm, deadline_ms=3 * calm.time.expected))
    assert roomy.replays.met == roomy.replays.starts
    check_deadline(roomy, 0.9)
    tight = replayed(replace(calm, deadline_ms=HOUR_MS))
    assert tight.replays.met == 0
    with pytest.raises(BudgetError, match=r"0 of \d+ replays of the plan meet the deadline of 1h.*use --deadline \d+"):
        check_deadline(tight, 0.9)
    check_deadline(tight, 0.0)
    enough = replayed(replace(calm, deadline_ms=3 * tight.replays.enough_ms))
    assert enough.replays.met == enough.replays.starts


@pytest.mark.slow
def test_a_plan_that_seems_late_is_replayed_more_often_before_it_is_refused(monkeypatch):
    asked = []

    def with_one_miss(*arguments, starts, **named):
        asked.append(starts)
        found = simulate(*arguments, starts=starts, **named)
        return replace(found, policies=(replace(found.policies[0], misses=1),))

    monkeypatch.setattr(of_plan, "simulate", with_one_miss)
    calm = planned()
    once = replayed(replace(calm, deadline_ms=3 * calm.time.expected), confidence=0.5)
    assert len(asked) == 1
    asked.clear()
    doubtful = replayed(replace(calm, deadline_ms=3 * calm.time.expected), confidence=0.99)
    assert asked == [once.replays.starts, min(30, 4 * once.replays.starts)]
    assert doubtful.replays.met == doubtful.replays.starts - 1


def test_without_a_deadline_only_dollars_are_replayed():
    found = replayed(planned()).replays
    assert (found.met, found.probability_low) == (None, None)
    assert 0 < found.usd_low <= found.usd <= found.usd_high
    check_deadline(replayed(planned()), 0.9)


def test_equal_plans_get_equal_replays_and_long_ones_none():
    plan = planned()
    assert replayed(plan).replays == replayed(plan).replays
    assert replayed(replace(plan, pace_ms=tuple(ms * 20 for ms in plan.pace_ms))).replays is None


def test_a_plan_without_times_is_not_replayed():
    assert replays_of(replace(planned(), pace_ms=()), MoveRules(), 0.9) is None


def test_the_interval_is_wilsons():
    """Wilson's interval for 9 of 10 at 90 %, by its formula with z = 1.6449."""
    assert wilson(9, 10) == pytest.approx((0.6523, 0.9772), abs=1e-3)
    assert wilson(10, 10) == pytest.approx((0.7871, 1.0), abs=1e-3)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2129), abs=1e-3)
