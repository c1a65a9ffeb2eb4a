"""CPU seconds are those of the reference computer."""

import subprocess
import sys

import pytest

from tests import cpu_seconds
from tests.cpu_seconds import reference_seconds, takes_less_than
from tests.tiers import ROUNDS, fixed_work


@pytest.mark.parametrize(("work_s", "slower"), [(0.05, 1), (0.1, 1), (0.3, 3)])
def test_seconds_on_a_slower_computer_count_less_and_on_a_faster_one_as_they_are(monkeypatch, work_s, slower):
    now = 100.0

    def work(rounds: int) -> None:
        nonlocal now
        now += work_s * rounds / cpu_seconds.MEASURED_ROUNDS

    def call() -> None:
        nonlocal now
        now += 6.0

    monkeypatch.setattr(cpu_seconds, "fixed_work", work)
    monkeypatch.setattr(cpu_seconds, "_spent", lambda: now)
    assert reference_seconds(call) == pytest.approx(6.0 / slower)
    assert takes_less_than(6.0 / slower + 0.1, call)
    assert not takes_less_than(6.0 / slower - 0.1, call)


def test_the_real_work_is_measured_and_so_is_a_child_process():
    code = f"from tests.tiers import fixed_work\nfixed_work({ROUNDS // 2})"
    assert takes_less_than(0.8, lambda: fixed_work(ROUNDS // 2), times=10)
    assert reference_seconds(lambda: subprocess.run([sys.executable, "-c", code], check=True)) > 0.1
