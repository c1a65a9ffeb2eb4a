"""A preemption notice of a metadata service reaches the node's folder despite errors of the service."""

import contextlib
import json
import threading
import time

import pytest

from engine.clock import ScaledClock
from engine.node import preemption_notice
from engine.node.preemption_notice import GCE_NOTICE_MS, watch_notice, write_notice
from engine.storage.metadata import GCE_HOST, IMDS_URL
from tests.engine.fake_metadata import FakeGceMetadata, FakeImds

CLOCK = ScaledClock(origin_ms=0)


@pytest.fixture(autouse=True)
def _end_watchers(monkeypatch):
    """End the watcher threads with their test; on a node they end with the agent."""
    over, keep_asking = threading.Event(), preemption_notice._keep_asking

    def until_over(ask):
        def once():
            if over.is_set():
                raise SystemExit
            try:
                ask()
            except Exception:
                if over.is_set():  # the folder of the test is gone by now
                    raise SystemExit from None
                raise

        with contextlib.suppress(SystemExit):
            keep_asking(once)

    monkeypatch.setattr(preemption_notice, "_keep_asking", until_over)
    yield
    over.set()


@pytest.fixture
def imds(monkeypatch):
    service = FakeImds()
    monkeypatch.setenv(IMDS_URL, service.url)
    yield service
    service.close()


@pytest.fixture
def gce(monkeypatch):
    service = FakeGceMetadata()
    service.is_instance("a-machine")
    monkeypatch.setenv(GCE_HOST, service.address)
    yield service
    service.close()


def note(folder, name="notice.json"):
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else None


def wait_for(what, seconds=240.0):
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
    return found


def test_an_aws_notice_gives_the_deadline(imds, tmp_path):
    watch_notice("aws", tmp_path, CLOCK)
    wait_for(lambda: any("instance-action" in path for _, path in imds.requests))
    assert note(tmp_path) is None
    imds.set_text("meta-data/spot/instance-action", '{"action": "terminate", "time": "2030-01-01T00:02:00Z"}')
    notice = wait_for(lambda: note(tmp_path))
    assert notice == {"deadline_ms": 1_893_456_120_000, "source": "aws spot/instance-action: terminate"}


def test_a_rebalance_recommendation_is_recorded_and_does_not_drain(imds, tmp_path):
    imds.set_text("meta-data/events/recommendations/rebalance", '{"noticeTime": "2030-01-01T00:00:00Z"}')
    watch_notice("aws", tmp_path, CLOCK)
    assert "rebalance" in wait_for(lambda: note(tmp_path, "hint.json"))["source"]
    assert note(tmp_path) is None


def test_an_expired_token_and_a_failing_service_are_retried(imds, tmp_path):
    imds.refusing = 2
    watch_notice("aws", tmp_path, CLOCK)
    wait_for(lambda: imds.tokens == 1)
    imds.tokens = 5  # the current token is no longer valid
    imds.set_text("meta-data/spot/instance-action", '{"action": "stop", "time": "2030-01-01T00:02:00Z"}')
    assert wait_for(lambda: note(tmp_path))["source"].endswith("stop")


def test_a_google_notice_gives_30_seconds(gce, tmp_path):
    watch_notice("gcp", tmp_path, CLOCK)
    wait_for(lambda: any("wait_for_change" in path and "preempted" in path for _, path in gce.requests))
    assert note(tmp_path) is None
    began = CLOCK.now_ms()
    gce.set_text("instance/preempted", "TRUE")
    notice = wait_for(lambda: note(tmp_path))
    assert 0 <= notice["deadline_ms"] - began - GCE_NOTICE_MS < 15_000
    assert notice["source"] == "gcp instance/preempted"


def test_a_google_notice_gives_what_was_granted(gce, tmp_path):
    began = CLOCK.now_ms()
    gce.set_text("instance/preempted", "TRUE")
    watch_notice("gcp", tmp_path, CLOCK, notice_ms=120_000)
    assert 0 <= wait_for(lambda: note(tmp_path))["deadline_ms"] - began - 120_000 < 15_000


def test_a_google_preemption_before_the_first_poll_is_noticed(gce, tmp_path):
    gce.set_text("instance/preempted", "TRUE")
    watch_notice("gcp", tmp_path, CLOCK)
    assert wait_for(lambda: note(tmp_path))


def test_google_maintenance_is_a_hint_and_no_notice(gce, tmp_path):
    watch_notice("gcp", tmp_path, CLOCK)
    gce.set_text("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    assert "TERMINATE_ON_HOST_MAINTENANCE" in wait_for(lambda: note(tmp_path, "hint.json"))["source"]
    assert note(tmp_path) is None


def test_the_earliest_deadline_is_kept(tmp_path):
    write_notice(tmp_path, 2000, "the controller")
    write_notice(tmp_path, 1000, "the cloud")
    write_notice(tmp_path, 1500, "the controller again")
    assert note(tmp_path) == {"deadline_ms": 1000, "source": "the cloud"}


def test_without_a_metadata_service_no_notice_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(IMDS_URL, "http://127.0.0.1:1")
    watch_notice("aws", tmp_path, CLOCK)
    wait_for(lambda: "asking on" in capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []
