"""A controller's time: the clouds' clock if known, and never before the newest time in the ledger."""

import time

import pytest
from sqlalchemy import select

from engine.clock import boot_ms
from engine.events import Progress, Warned
from launcher.controller.cloud_time import CloudTime
from launcher.controller.run_process import _clock_of
from launcher.decide.clock_doubt import Doubt
from launcher.exit_codes import Failure
from launcher.ledger.models import NodeEvent, ProgressRow, RunStatus
from launcher.ledger.store import writing
from tests.launcher.cluster.stage import HandClock, cloud_run, ledger
from tests.launcher.cluster.test_moving import MINUTE, Stage

HOUR = 60 * MINUTE


class Cloud:
    """A cloud that returns its time, or None."""

    def __init__(self, at_ms):
        self.at_ms = at_ms

    def clock_ms(self):
        if self.at_ms is None:
            raise Failure("no route to host")
        return self.at_ms


@pytest.fixture
def sessions(home):
    return ledger(home)


def test_agreeing_clocks_raise_no_doubt():
    cloud_time = CloudTime({"aws": Cloud(1_000_000), "gcp": Cloud(None)}, wall_ms=lambda: 1_060_000)
    cloud_time.ask()
    assert (cloud_time.doubt, cloud_time.now_ms()) == (None, 1_060_000)


@pytest.mark.parametrize(("off_ms", "side"), [(5 * HOUR, "behind"), (-5 * HOUR, "ahead of")])
def test_a_clock_unlike_the_clouds_is_reported_and_the_clouds_time_counts(off_ms, side):
    now_ms = 10 * HOUR
    cloud_time = CloudTime({"gcp": Cloud(now_ms + off_ms)}, wall_ms=lambda: now_ms)
    cloud_time.ask()
    assert f"this machine's clock is 5h {side} the clock of gcp" in cloud_time.doubt.text
    assert "timedatectl set-ntp true" in cloud_time.doubt.text
    assert cloud_time.now_ms() == now_ms + off_ms


def test_a_corrected_clock_ends_the_doubt():
    wall = HandClock()
    cloud = Cloud(wall.now_ms())
    cloud_time = CloudTime({"gcp": cloud}, wall_ms=wall.now_ms)
    wall.pass_ms(2 * MINUTE)
    cloud_time.ask()
    assert cloud_time.doubt is not None
    cloud.at_ms = wall.now_ms()
    cloud_time.ask()
    assert cloud_time.doubt is None


def test_ledger_times_ahead_of_the_clouds_raise_doubt():
    run_clock = HandClock()
    run_clock.at_ms = 100 * HOUR
    cloud_time = CloudTime({"aws": Cloud(95 * HOUR)}, wall_ms=lambda: 95 * HOUR)
    cloud_time.ask(run_clock)
    assert cloud_time.doubt.is_ahead
    assert "the newest times in the ledger are 5h ahead of the clock of aws" in cloud_time.doubt.text


def test_a_controller_with_a_late_clock_continues_from_the_ledgers_newest_time(sessions):
    """A bug computed $3.04 instead of $8.13 of spend when the clock was 5 h back."""
    run = cloud_run(sessions)
    wall_ms = time.time_ns() // 1_000_000
    with writing(sessions) as session:
        session.add(RunStatus(run_id=run.id, at_ms=wall_ms + 5 * HOUR, status="running", reason=""))
    clock = _clock_of(sessions, run, CloudTime({"aws": Cloud(None)}))
    assert 0 <= clock.now_ms() - (wall_ms + 5 * HOUR) < MINUTE
    # The cloud's clock counts, not the clock of this computer.
    clock = _clock_of(sessions, run, CloudTime({"aws": Cloud(wall_ms + 6 * HOUR)}))
    assert 0 <= clock.now_ms() - (wall_ms + 6 * HOUR) < MINUTE
    assert abs(clock.began_ms + boot_ms() - clock.now_ms()) < MINUTE


def test_no_node_is_bought_while_the_time_is_in_doubt_and_the_reason_is_given(sessions):
    stage = Stage(sessions)
    stage.passes(3)
    cloud_time = CloudTime({"gcp": Cloud(stage.clock.now_ms() + 5 * HOUR)}, wall_ms=stage.clock.now_ms)
    stage.controller._cloud_time = cloud_time
    cloud_time.ask(stage.clock)
    stage.cloud.preempt("demo-spot-0-g0")
    before = set(stage.records())
    stage.passes(30)
    assert set(stage.records()) == before
    assert stage.reason()[0] == "running"
    assert "5h behind the clock of gcp: nothing is bought" in stage.reason()[1]
    with sessions() as session:
        assert len(session.scalars(select(RunStatus)).all()) < 6, "recorded once, not in every pass"
    cloud_time.doubt = None
    stage.passes(3)
    assert len(stage.live()) == 3
    assert stage.reason() == ("running", "")


def test_a_clock_that_is_ahead_ends_no_run(sessions):
    stage = Stage(sessions, max_total=10_000_000)
    stage.passes(3)
    stage.clock.pass_ms(100 * HOUR)
    stage.controller._cloud_time = CloudTime({})
    stage.controller._cloud_time.doubt = Doubt("ahead", is_ahead=True)
    stage.passes(3)
    assert stage.reason() == ("running", "ahead")
    stage.controller._cloud_time.doubt = Doubt("this machine's clock is behind")
    stage.passes(1)
    assert stage.reason()[0] == "draining"


def test_a_fact_with_a_far_wrong_time_ends_no_run(sessions):
    """Times reported by a cloud or a node are clamped between the node's request and now."""
    stage = Stage(sessions, max_total=10_000_000)
    plain = stage.cloud._up_ms

    def mad(name):
        up_ms = plain(name)
        return None if up_ms is None else up_ms + (1000 * HOUR if "spot" in name else -1000 * HOUR)

    stage.cloud._up_ms = mad
    stage.passes(5)
    assert stage.reason() == ("running", "")
    assert 0 < stage.spent() < 1_000_000
    with sessions() as session:
        times = [event.at_ms for event in session.scalars(select(NodeEvent))]
    assert stage.run.created_ms <= min(times)
    assert max(times) <= stage.clock.now_ms()


def test_progress_of_a_node_whose_clock_is_ahead_is_dated_now(sessions, monkeypatch):
    """Otherwise no later loss of a trainer would come after the newest iteration."""
    stage = Stage(sessions)
    stage.passes(3)
    event = Warned(text="this node's clock is ahead")
    line = Progress(
        run=stage.run.name, source="trainer", lineage=0, seq=0, at_ms=stage.clock.now_ms() + 900 * HOUR, event=event
    )
    batches = [[line], []]
    monkeypatch.setattr(
        stage.controller.recorder.progress_files, "read", lambda folder: batches.pop(0) if batches else []
    )
    stage.passes(0.3)
    with sessions() as session:
        assert session.scalars(select(ProgressRow)).one().at_ms <= stage.clock.now_ms()


def test_no_order_lets_a_node_live_beyond_the_runs_whole_budget(sessions):
    stage = Stage(sessions, max_total=10_000_000)
    stage.passes(3)
    hours = {name: request[1].money_longest_ms / HOUR for name, request in stage.cloud.requested.items()}
    assert hours["demo-trainer-g0"] == pytest.approx(10, abs=0.5)  # $10 at $1 an hour plus the disk
    assert 25 < hours["demo-spot-0-g0"] < 34  # at $0.30


def test_no_deadline_is_moved_while_the_time_is_in_doubt(sessions, monkeypatch):
    stage = Stage(sessions, max_total=10_000_000)
    stage.passes(3)
    moved = []
    monkeypatch.setattr(stage.cloud, "rearm", lambda name, deadline_ms: moved.append(name))
    stage.controller._cloud_time = CloudTime({})
    stage.controller._cloud_time.doubt = Doubt("behind")
    stage.controller.deadlines._armed.clear()
    stage.passes(2)
    assert moved == []
    stage.controller._cloud_time.doubt = None
    stage.passes(1)
    assert set(moved) == set(stage.live())
