"""The agent kills a stopped or deadlocked process, and never one that works while its heartbeat is silent."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest

from engine.node.agent import _Child
from engine.node.child import Deaths
from engine.node.frozen import LONGEST_SILENCE_SECONDS, WORKING_BYTES, Facts, Stillness, read_facts

SECONDS = 0.5
"""Seconds of stillness after which the tests' processes are frozen."""
FORK = multiprocessing.get_context("fork")


def beside_a_heartbeat(function, heartbeat):
    """Run a function beside a thread that gives signs of life, like a process of a node."""

    def beat():
        while True:
            heartbeat.value = time.monotonic()
            time.sleep(0.01)

    threading.Thread(target=beat, daemon=True).start()
    time.sleep(0.05)
    function()


def compute_with_gil():
    sum(range(10**10))  # one call of C, which holds the GIL as a serialisation does


def sleep_with_gil():
    ctypes.PyDLL(None).usleep(120_000_000)


def write_with_gil(path):
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    library, block = ctypes.PyDLL(None), bytes(WORKING_BYTES // 4)

    def write():
        library.pwrite(file, block, len(block), ctypes.c_long(0))
        library.usleep(20_000)

    sys.setswitchinterval(100.0)  # the heartbeat's thread never asks for the GIL
    while True:
        write()


class Watched:
    """A process of the test, and the agent's view of the process."""

    def __init__(self, function):
        self.heartbeat = FORK.Value("d", 0.0, lock=False)
        self.process = FORK.Process(target=beside_a_heartbeat, args=(function, self.heartbeat))
        self.process.start()
        self.child = _Child(
            name="trainer",
            start=lambda: None,
            heartbeat=self.heartbeat,
            past=Deaths(lambda: None),
            stillness=Stillness(SECONDS),
            process=self.process,
        )
        while not self.heartbeat.value:
            time.sleep(0.01)

    def silence_at_its_death(self):
        """Look every 20 ms, like the agent. Return the seconds since the last sign of life of the killed process."""
        until = time.monotonic() + 60.0
        while time.monotonic() < until:
            self.child.keep_alive()
            if not self.process.is_alive():
                return self.silence()
            time.sleep(0.02)
        return None

    def lives_in_silence(self):
        """Look every 20 ms, like the agent, until the process is silent for twice the limit."""
        until = time.monotonic() + 60.0
        while self.silence() < 2 * SECONDS:
            assert time.monotonic() < until, "it is not silent"
            self.child.keep_alive()
            if not self.process.is_alive():
                return False
            time.sleep(0.02)
        return True

    def silence(self):
        return time.monotonic() - self.heartbeat.value


@pytest.fixture
def watch():
    """Start a process that runs a function, and kill it at the end."""
    watched = []

    def start(function):
        watched.append(Watched(function))
        return watched[-1]

    yield start
    for one in watched:
        one.process.kill()
        one.process.join()


def test_a_stopped_process_is_killed_after_a_long_silence(watch):
    stopped = watch(lambda: time.sleep(120.0))
    os.kill(stopped.process.pid, signal.SIGSTOP)

    assert stopped.silence_at_its_death() > SECONDS


def test_a_process_that_computes_with_the_gil_is_not_killed(watch):
    assert watch(compute_with_gil).lives_in_silence()


def test_a_process_that_writes_with_the_gil_is_not_killed(watch, tmp_path):
    assert watch(lambda: write_with_gil(bytes(tmp_path / "weights"))).lives_in_silence()


def test_a_deadlock_that_holds_the_gil_is_killed(watch):
    assert watch(sleep_with_gil).silence_at_its_death() > SECONDS


class Scripted:
    """Facts and a clock that a test sets."""

    def __init__(self):
        self.now, self.facts = 100.0, Facts(False, False, {1: 0.0}, 0)
        self.stillness = Stillness(5.0, read=lambda pid: self.facts, clock=lambda: self.now)

    def frozen_after(self, seconds, step=0.5):
        began, frozen = self.now, False
        while self.now < began + seconds:
            self.now += step
            frozen = self.stillness.is_frozen(7, 100.0)
        return frozen


def test_a_process_that_waits_for_a_disk_is_not_frozen():
    script = Scripted()
    script.facts = Facts(False, True, {1: 0.0}, 0)

    assert not script.frozen_after(60.0)


def test_a_silent_process_that_works_for_ever_is_frozen_after_ten_minutes():
    script = Scripted()
    script.facts = Facts(False, True, {1: 0.0}, 0)

    assert not script.frozen_after(LONGEST_SILENCE_SECONDS)
    assert script.frozen_after(0.5)


def test_a_process_that_stops_working_is_frozen_five_seconds_after_its_last_work():
    script = Scripted()
    script.frozen_after(2.0)
    script.facts = Facts(False, False, {1: 3.0}, 0)
    script.frozen_after(0.5)

    assert not script.frozen_after(5.0)
    assert script.frozen_after(0.5)


def test_a_process_stopped_during_its_work_is_frozen_after_its_silence():
    script = Scripted()
    script.facts = Facts(False, False, {1: 3.0}, 0)
    script.frozen_after(4.0)
    script.facts = Facts(True, False, {1: 6.0}, 0)

    assert script.frozen_after(1.5)


def test_cpu_time_of_threads_that_only_wait_for_the_gil_is_no_work():
    script = Scripted()
    for second in range(8):
        script.facts = Facts(False, False, dict.fromkeys(range(50), 0.002 * second), 0)
        frozen = script.frozen_after(1.0)

    assert frozen


def test_without_facts_silence_alone_decides():
    script = Scripted()
    script.facts = None

    assert not script.frozen_after(5.0)
    assert script.frozen_after(0.5)


def test_facts_name_the_threads_of_a_process_and_are_none_without_one():
    ended = FORK.Process(target=int)
    ended.start()
    ended.join()

    assert os.getpid() in read_facts(os.getpid()).cpu_seconds
    assert read_facts(ended.pid) is None
