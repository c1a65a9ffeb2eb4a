"""Prices of a run's nodes are refreshed during the whole run, despite errors."""

import pytest
from sqlalchemy.exc import OperationalError

from launcher.controller import price_watch
from launcher.controller.price_watch import watch_prices as _watch_prices
from launcher.job.schema import Job
from tests.launcher.cluster.stage import ledger
from tests.launcher.cluster.test_moving import Stage


class Refreshes:
    """An Event that is set after some refreshes."""

    def __init__(self, times):
        self.left = times

    def wait(self, seconds):
        self.left -= 1
        return self.left < 0


@pytest.fixture
def refreshed(monkeypatch):
    """Replace the refresh, and return the list of its calls."""
    calls = []

    def refresh(sources, sessions, now_ms):
        calls.append([source.cloud for source in sources])
        return type("Refreshed", (), {"answers": ()})

    monkeypatch.setattr("launcher.services.refresh.refresh", refresh)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble", [OperationalError("select", {}, Exception("database is locked")), RuntimeError("a source broke")]
)
def test_a_failed_refresh_does_not_end_the_price_watch(home, monkeypatch, refreshed, trouble):
    """A bug ended all refreshes of a run after one locked ledger."""
    stage = Stage(ledger(home))
    stage.passes(3)
    plain, fails = price_watch.node_records, [trouble]

    def records(session, run):
        if fails:
            raise fails.pop()
        return plain(session, run)

    monkeypatch.setattr(price_watch, "node_records", records)
    monkeypatch.setattr(price_watch, "GCP_PRICE_SECONDS", 0.0)
    _watch_prices(stage.sessions, stage.run, Job.model_validate(stage.run.job), Refreshes(3))
    assert refreshed == [["gcp"], ["gcp"]]


def test_googles_prices_are_refreshed_some_hours_apart(home, monkeypatch, refreshed):
    stage = Stage(ledger(home))
    stage.passes(3)
    job = Job.model_validate(stage.run.job)
    _watch_prices(stage.sessions, stage.run, job, Refreshes(3))
    assert refreshed == []
    hours = iter(range(100))
    monkeypatch.setattr("launcher.controller.price_watch.time.monotonic", lambda: next(hours) * 3600.0)
    _watch_prices(stage.sessions, stage.run, job, Refreshes(30))
    assert 3 <= len(refreshed) <= 6
