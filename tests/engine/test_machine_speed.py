"""The measured speed of this computer, which sets the clock of a local run."""

import pytest

from engine import machine_speed
from launcher.job.schema import FASTEST_CLOCK, SLOWEST_CLOCK, auto_clock_factor


def test_the_measured_time_grows_with_the_work(monkeypatch):
    once = min(machine_speed.work_seconds() for _ in range(2))
    monkeypatch.setattr(machine_speed, "REPEATS", 4 * machine_speed.REPEATS)
    assert machine_speed.work_seconds() > once > 0


@pytest.mark.parametrize(("seconds", "slowness"), [(0.1, 1.0), (0.75, 1.0), (3.0, 4.0)])
def test_a_computer_never_counts_as_faster_than_the_reference(monkeypatch, seconds, slowness):
    monkeypatch.setattr(machine_speed, "work_seconds", lambda: seconds)
    assert machine_speed.slowness() == pytest.approx(slowness)


def test_the_clock_slows_down_with_the_square_root_of_the_slowness_to_a_lower_limit():
    assert [auto_clock_factor(slowness) for slowness in (0.5, 1.0, 2.0, 4.0)] == [FASTEST_CLOCK, 60, 42, 30]
    assert auto_clock_factor(1e9) == SLOWEST_CLOCK
