"""Prices of a run's nodes are refreshed for as long as it goes on, whatever goes wrong in between."""

import pytest
from sqlalchemy.exc import OperationalError

from launcher.controller import price_watch
from launcher.controller.price_watch import watch_prices as _watch_prices
from launcher.job.schema import Job
from tests.launcher.cluster.stage import ledger
from tests.launcher.cluster.test_moving import Stage


class Looks:
    """An Event that is set after some looks."""

    def __init__(self, times):
        self.left = times

    def wait(self, seconds):
        self.left -= 1
        return self.left < 0


@pytest.fixture
def asked(monkeypatch):
    """What was asked for, instead of asking for it."""
    said = []

    def refresh(sources, sessions, now_ms):
        said.append([source.cloud for source in sources])
        return type("Refreshed", (), {"answers": ()})

    monkeypatch.setattr("launcher.services.refresh.refresh", refresh)
    return said


@pytest.mark.parametrize(
    "trouble", [OperationalError("select", {}, Exception("database is locked")), RuntimeError("a source broke")]
)
def test_a_failed_refresh_does_not_end_the_price_watch(home, monkeypatch, asked, trouble):
    """One locked ledger, and no price was refreshed for the rest of the run."""
    stage = Stage(ledger(home))
    stage.passes(3)
    plain, fails = price_watch.node_records, [trouble]

    def records(session, run):
        if fails:
            raise fails.pop()
        return plain(session, run)

    monkeypatch.setattr(price_watch, "node_records", records)
    monkeypatch.setattr(price_watch, "GCP_PRICE_SECONDS", 0.0)
    _watch_prices(stage.sessions, stage.run, Job.model_validate(stage.run.job), Looks(3))
    assert asked == [["gcp"], ["gcp"]]


def test_googles_prices_are_refreshed_some_hours_apart(home, monkeypatch, asked):
    stage = Stage(ledger(home))
    stage.passes(3)
    job = Job.model_validate(stage.run.job)
    _watch_prices(stage.sessions, stage.run, job, Looks(3))
    assert asked == []
    hours = iter(range(100))
    monkeypatch.setattr("launcher.controller.price_watch.time.monotonic", lambda: next(hours) * 3600.0)
    _watch_prices(stage.sessions, stage.run, job, Looks(30))
    assert 3 <= len(asked) <= 6
