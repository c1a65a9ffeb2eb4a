"""The clock of a local run moves with the work, and by the wall while nobody works."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from engine.work_clock import HOLD_SECONDS, LEAD_SECONDS, WATCHED_SECONDS, ProcessMeter, WorkClock

ORIGIN_MS, FACTOR = 1_000_000, 60.0
HOLD_MS = round(HOLD_SECONDS * 1000)


class Boot:
    """This machine's boot clock, moved by hand."""

    def __init__(self) -> None:
        self.ms = 5_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def boot() -> Boot:
    return Boot()


@pytest.fixture
def clock(tmp_path, boot) -> WorkClock:
    clock = WorkClock(path=tmp_path / "clock", origin_ms=ORIGIN_MS, factor=FACTOR, boot=boot)
    clock.begin(0)
    return clock


def passed_ms(clock: WorkClock) -> int:
    return clock.now_ms() - ORIGIN_MS


def unwatched(clock: WorkClock, boot: Boot) -> None:
    """Let the controller be gone, so that no work waits for it."""
    clock.hold()
    boot.ms += round((WATCHED_SECONDS + 1) * 1000)


def test_work_moves_the_clock_by_its_seconds_on_the_reference_machine(clock, boot):
    unwatched(clock, boot)
    ProcessMeter(clock).done(0.5)
    assert passed_ms(clock) == 30_000


@pytest.mark.parametrize("wall_ms", [1, 500, HOLD_MS - 1])
def test_the_time_that_this_machine_takes_for_the_work_does_not_count(clock, boot, wall_ms):
    unwatched(clock, boot)
    meter = ProcessMeter(clock)
    for _ in range(10):
        meter.done(0.1)
        boot.ms += wall_ms
    assert passed_ms(clock) == 60_000


def test_processes_that_work_at_the_same_time_move_the_clock_once(clock, boot):
    unwatched(clock, boot)
    first, second = ProcessMeter(clock), ProcessMeter(clock)
    first.waited()
    second.waited()
    for _ in range(5):
        first.done(0.1)
        second.done(0.1)
    assert passed_ms(clock) == 5 * 6_000


def test_a_process_that_waited_begins_at_the_present_time(clock, boot):
    unwatched(clock, boot)
    first, second = ProcessMeter(clock), ProcessMeter(clock)
    second.done(0.1)
    first.waited()
    first.done(1.0)
    second.waited()
    second.done(0.1)
    assert passed_ms(clock) == 6_000 + 60_000 + 6_000


def test_without_work_the_clock_runs_by_the_wall(clock, boot):
    boot.ms += HOLD_MS
    assert passed_ms(clock) == 0, "the start of the controller is no work"
    boot.ms += 1_000
    assert passed_ms(clock) == 60_000
    unwatched(clock, boot)
    ProcessMeter(clock).done(0.1)
    boot.ms += HOLD_MS + 1_000
    assert passed_ms(clock) == 60_000 + 6_000 + 60_000


def test_a_node_that_starts_or_ends_holds_the_clock(clock, boot):
    for _ in range(5):
        clock.hold()
        boot.ms += HOLD_MS
    assert passed_ms(clock) == 0
    boot.ms += 1_000
    assert passed_ms(clock) == 60_000


def began_now(tmp_path) -> WorkClock:
    clock = WorkClock(path=tmp_path / "clock", origin_ms=ORIGIN_MS, factor=FACTOR)
    clock.begin(0)
    clock.hold()
    clock.watched(clock.now_ms())
    return clock


def test_new_work_waits_for_the_controllers_pass(tmp_path):
    clock = began_now(tmp_path)
    meter = ProcessMeter(clock)
    meter.done(0.9 * LEAD_SECONDS)
    meter.keep_pace()
    meter.done(LEAD_SECONDS)
    waiting = threading.Thread(target=meter.keep_pace)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    clock.watched(clock.now_ms())
    waiting.join(10.0)
    assert not waiting.is_alive()


def test_new_work_does_not_wait_for_a_controller_that_is_gone(tmp_path):
    meter = ProcessMeter(began_now(tmp_path))
    meter.done(2 * LEAD_SECONDS)
    waiting = threading.Thread(target=meter.keep_pace)
    waiting.start()
    waiting.join(10 * WATCHED_SECONDS)
    assert not waiting.is_alive()


def test_the_clock_goes_on_with_the_next_controller_and_after_a_reboot(clock, boot, tmp_path):
    unwatched(clock, boot)
    ProcessMeter(clock).done(1.0)
    clock.begin(0)
    assert passed_ms(clock) == 60_000
    boot.ms = 10
    clock.begin(0)
    assert passed_ms(clock) == 60_000
    boot.ms += HOLD_MS + 1_000
    assert passed_ms(clock) == 120_000


@pytest.mark.parametrize("damage", [b"", b"too short", bytes(40), b"x" * 100])
def test_a_damaged_file_is_made_again_from_the_newest_time_of_the_ledger(clock, damage):
    clock.path.write_bytes(damage)
    clock.begin(ORIGIN_MS + 7_000)
    assert passed_ms(clock) == 7_000


def test_a_run_of_an_older_version_has_a_scaled_wall_clock(tmp_path):
    clock = WorkClock(path=tmp_path / "none", origin_ms=ORIGIN_MS, factor=FACTOR)
    assert clock.now_ms() > ORIGIN_MS
    ProcessMeter(clock).done(1.0)
    assert not clock.path.exists()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_lost_while_it_holds_the_lock_stops_no_other(tmp_path, number):
    clock = began_now(tmp_path)
    code = (
        f"import fcntl, time; file = open({str(clock.path)!r}); fcntl.flock(file, fcntl.LOCK_EX); print(1, flush=True)"
    )
    holder = subprocess.Popen([sys.executable, "-c", f"{code}; time.sleep(60)"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.send_signal(number)
        begun = time.monotonic()
        ProcessMeter(clock).done(0.5)
        assert passed_ms(clock) >= 30_000
        assert time.monotonic() - begun < 5.0
    finally:
        holder.kill()
        holder.communicate()


def test_a_process_that_was_frozen_at_a_change_does_not_turn_the_clock_back(clock, boot):
    unwatched(clock, boot)
    others = iter([lambda: ProcessMeter(clock).done(1.0)])

    def frozen_here(record, now):
        next(others, lambda: None)()
        return record

    clock._change(frozen_here)
    assert passed_ms(clock) == 60_000
