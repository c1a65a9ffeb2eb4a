"""Thousands of hostile schedules, and hypothesis as another driver of the same world."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.simulation.schedules import broken_by, kinds_of, play_all
from tests.simulation.world import World

SCHEDULES = (1_000, pytest.param(20_000, marks=pytest.mark.long))
"""The hardest of the planted bugs is found by schedule 712 (tests/benchmarks/results/schedules.md)."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedules", SCHEDULES)
def test_no_schedule_breaks_an_invariant(schedules):
    played = play_all(schedules)
    report = "\n".join(
        f"{len(seeds)} x {text}\n    python -m tests.simulation --seed {seeds[0]} --verbose"
        for text, seeds in kinds_of(played.broken).items()
    )
    assert not played.broken, report
    assert played.schedules == schedules
    assert played.fewest >= 200


def test_a_schedule_depends_only_on_its_seed():
    def lines_of(seed):
        lines = []
        World(seed, log=lines.append).run()
        return lines

    assert lines_of(11) == lines_of(11)
    assert lines_of(11) != lines_of(12)
    assert broken_by(11) == broken_by(11)


def test_the_schedules_contain_every_fault():
    """Every fault occurs in some schedule, and work is resumed from commits."""
    lines = []
    for seed in range(60):
        World(seed, log=lines.append).run()
    text = "\n".join(lines)
    for sign in (
        ": dies, boot",
        ": stands still",
        "coordinator: dies",
        "its disk is gone",
        "coordinator: stands still",
        "no room on the disk",
        ": taken",
        "says the cloud",
        "is said to have died",
        "-> fenced",
        "-> drain",
        "-> exit",
        "-> late",
        " give_back ",
        " states ",
        " fault ",
        "'poisoned': ('",
        " commit ",
        "'kind': 'early'",
    ):
        assert sign in text, sign


class Fates(RuleBasedStateMachine):
    """The same world and oracle; hypothesis chooses the faults and shrinks its findings."""

    @initialize(seed=st.integers(0, 50))
    def begin(self, seed):
        self.world = World(seed, quota=10**9, chaos=False)

    @rule(events=st.integers(1, 25))
    def time_passes(self, events):
        until = self.world.events + events
        while self.world.events < until and not self.world.done:
            self.world.happen()

    @rule(share=st.sampled_from([0.0, 0.05, 0.3]))
    def the_network_loses(self, share):
        self.world.loss = share

    @rule(share=st.sampled_from([0.0, 0.1, 0.5]))
    def the_network_repeats(self, share):
        self.world.repeat = share

    @rule()
    def a_node_is_bought(self):
        self.world.buy()

    @rule(data=st.data(), is_reported=st.booleans())
    def a_process_dies(self, data, is_reported):
        if found := self.world.workers():
            self.world.kill(data.draw(st.sampled_from(found)), report_odds=float(is_reported))

    @rule(data=st.data(), duration_ms=st.sampled_from([300, 1500, 4000]))
    def a_process_stands_still(self, data, duration_ms):
        if found := self.world.workers():
            self.world.freeze(data.draw(st.sampled_from(found)), duration_ms)

    @rule(data=st.data(), left_ms=st.sampled_from([50, 600, 2000]))
    def a_node_is_noticed(self, data, left_ms):
        if found := self.world.spot():
            self.world.notice(data.draw(st.sampled_from(found)), left_ms)

    @rule(data=st.data())
    def a_node_is_taken(self, data):
        if found := self.world.spot():
            self.world.preempt(data.draw(st.sampled_from(found)))

    @rule()
    def the_launcher_speaks(self):
        self.world.snapshot()

    @rule()
    def the_coordinator_dies(self):
        self.world.crash_coordinator()

    @rule(duration_ms=st.sampled_from([300, 1500, 4000]))
    def the_coordinator_stands_still(self, duration_ms):
        self.world.freeze_coordinator(duration_ms)

    @rule()
    def the_disk_fills(self):
        self.world.fate_disk_full()

    @rule()
    def the_batch_is_asked_for_at_the_next_version(self):
        self.world.fate_next_version()

    @precondition(lambda self: self.world.coordinator is not None)
    @invariant()
    def the_queue_is_of_one_mind(self):
        self.world.coordinator.queue.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.quota = 0
            self.world.run()


Fates.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestFates = Fates.TestCase
