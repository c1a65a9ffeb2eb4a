"""The schedule by which the local cloud preempts nodes."""

from itertools import pairwise

from launcher.job.sections import PreemptionConfig
from launcher.provision.local.preemptions import APART_MS, MANNERS, distinct_first, lifetimes, preemption_schedule

MINUTE_MS = 60_000


def test_a_lifetime_is_from_add_to_remove_in_the_order_of_removal():
    trace = ["0,add,node1", "0,add,node2", "5000,remove,node2", "6000,add,node2", "7000,remove,node1"]
    assert lifetimes([*trace, "9000,remove,node2"]) == (5000, 7000, 3000)


def test_a_node_that_was_there_before_the_trace_has_no_lifetime():
    assert lifetimes(["7000,remove,node9", ""]) == ()


def test_distinct_lifetimes_come_first_and_none_is_lost():
    minutes = [33, 34, 51, 8, 48]
    assert distinct_first(m * MINUTE_MS for m in minutes) == tuple(m * MINUTE_MS for m in [33, 51, 8, 34, 48])


def test_the_bundled_trace_starts_with_these_lifetimes():
    rule = preemption_schedule(PreemptionConfig())
    assert rule is not None
    assert [ms // MINUTE_MS for ms in rule.lifetimes_ms[:6]] == [33, 51, 8, 40, 27, 59]
    assert all(abs(a - b) >= APART_MS for a, b in pairwise(rule.lifetimes_ms[:6]))


def test_the_preemption_manners_rotate_and_the_lifetimes_repeat():
    rule = preemption_schedule(PreemptionConfig())
    assert rule is not None
    assert [rule.preemption(n).manner for n in range(8)] == [*MANNERS, *MANNERS]
    length = len(rule.lifetimes_ms)
    assert rule.preemption(length).lifetime_ms == rule.preemption(0).lifetime_ms


def test_the_printed_schedule_names_the_trace_and_the_first_lifetimes():
    rule = preemption_schedule(PreemptionConfig())
    assert rule is not None
    assert "bamboo-p3" in rule.describe()
    assert "33m, 51m, 8m, 40m, 27m, 59m" in rule.describe()


def test_without_a_trace_there_is_no_preemption_schedule():
    assert preemption_schedule(PreemptionConfig(trace="none")) is None
