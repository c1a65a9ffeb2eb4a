"""Clocks of a run: one follows the system clock, the steady one ignores its jumps."""

import time

import pytest

from engine.clock import ScaledClock, SteadyClock, boot_ms


@pytest.mark.parametrize("jump_ms", [3_600_000, -3_600_000])
def test_a_steady_clock_ignores_jumps_of_the_system_clock(monkeypatch, jump_ms):
    wall, steady = ScaledClock(origin_ms=0), SteadyClock(origin_ms=0)
    true_ns, before_ms = time.time_ns, wall.now_ms()
    assert abs(steady.now_ms() - before_ms) < 60_000
    monkeypatch.setattr(time, "time_ns", lambda: true_ns() + jump_ms * 1_000_000)
    assert abs(wall.now_ms() - before_ms - jump_ms) < 60_000
    assert abs(steady.now_ms() - before_ms) < 60_000
    time.sleep(0.05)
    assert 40 <= steady.now_ms() - before_ms < 60_000  # two clocks, each rounded to a millisecond


def test_a_steady_clock_runs_at_the_given_speed():
    clock, boot = SteadyClock(origin_ms=time.time_ns() // 1_000_000, factor=60.0), boot_ms()
    before = clock.now_ms()
    time.sleep(0.1)
    assert 6_000 <= clock.now_ms() - before <= (boot_ms() - boot + 2) * 60
