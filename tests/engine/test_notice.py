"""The metadata services' notice reaches the node's folder, whatever else they do."""

import contextlib
import json
import threading
import time

import pytest

from engine.clock import ScaledClock
from engine.node import preemption_notice
from engine.node.preemption_notice import GCE_NOTICE_MS, watch_notice, write_notice
from engine.storage.metadata import GCE_HOST, IMDS_URL
from tests.engine.metadata_faces import FakeGceMetadata, FakeImds

CLOCK = ScaledClock(origin_ms=0)


@pytest.fixture(autouse=True)
def _nobody_asks_on(monkeypatch):
    """Watchers end with their test; on a node they end with its agent."""
    over, keep_asking = threading.Event(), preemption_notice._keep_asking

    def until_over(ask):
        def once():
            if over.is_set():
                raise SystemExit
            ask()

        with contextlib.suppress(SystemExit):
            keep_asking(once)

    monkeypatch.setattr(preemption_notice, "_keep_asking", until_over)
    yield
    over.set()


@pytest.fixture
def imds(monkeypatch):
    face = FakeImds()
    monkeypatch.setenv(IMDS_URL, face.url)
    yield face
    face.close()


@pytest.fixture
def gce(monkeypatch):
    face = FakeGceMetadata()
    face.is_instance("a-machine")
    monkeypatch.setenv(GCE_HOST, face.address)
    yield face
    face.close()


def note(folder, name="notice.json"):
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else None


def wait_for(what, seconds=10.0):
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
    return found


def test_what_aws_announces_is_the_deadline(imds, tmp_path):
    watch_notice("aws", tmp_path, CLOCK)
    wait_for(lambda: any("instance-action" in path for _, path in imds.asked))
    assert note(tmp_path) is None
    imds.says("meta-data/spot/instance-action", '{"action": "terminate", "time": "2030-01-01T00:02:00Z"}')
    said = wait_for(lambda: note(tmp_path), seconds=3.0)
    assert said == {"deadline_ms": 1_893_456_120_000, "source": "aws spot/instance-action: terminate"}


def test_a_rebalance_recommendation_is_written_down_and_nothing_drains(imds, tmp_path):
    imds.says("meta-data/events/recommendations/rebalance", '{"noticeTime": "2030-01-01T00:00:00Z"}')
    watch_notice("aws", tmp_path, CLOCK)
    assert "rebalance" in wait_for(lambda: note(tmp_path, "hint.json"))["source"]
    assert note(tmp_path) is None


def test_a_token_that_ran_out_and_a_service_in_trouble_are_got_over(imds, tmp_path):
    imds.refusing = 2
    watch_notice("aws", tmp_path, CLOCK)
    wait_for(lambda: imds.tokens == 1)
    imds.tokens = 5  # the token in use counts no more
    imds.says("meta-data/spot/instance-action", '{"action": "stop", "time": "2030-01-01T00:02:00Z"}')
    assert wait_for(lambda: note(tmp_path))["source"].endswith("stop")


def test_google_gives_half_a_minute_from_the_moment_that_it_says_so(gce, tmp_path):
    watch_notice("gcp", tmp_path, CLOCK)
    wait_for(lambda: any("wait_for_change" in path and "preempted" in path for _, path in gce.asked))
    assert note(tmp_path) is None
    began = CLOCK.now_ms()
    gce.says("instance/preempted", "TRUE")
    said = wait_for(lambda: note(tmp_path))
    assert 0 <= said["deadline_ms"] - began - GCE_NOTICE_MS < 1000
    assert said["source"] == "gcp instance/preempted"


def test_a_machine_that_google_took_back_before_anyone_asked_is_noticed_too(gce, tmp_path):
    gce.says("instance/preempted", "TRUE")
    watch_notice("gcp", tmp_path, CLOCK)
    assert wait_for(lambda: note(tmp_path))


def test_maintenance_is_a_hint(gce, tmp_path):
    watch_notice("gcp", tmp_path, CLOCK)
    gce.says("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    assert "TERMINATE_ON_HOST_MAINTENANCE" in wait_for(lambda: note(tmp_path, "hint.json"))["source"]
    assert note(tmp_path) is None


def test_the_earliest_deadline_stays(tmp_path):
    write_notice(tmp_path, 2000, "the controller")
    write_notice(tmp_path, 1000, "the cloud")
    write_notice(tmp_path, 1500, "the controller again")
    assert note(tmp_path) == {"deadline_ms": 1000, "source": "the cloud"}


def test_where_no_service_answers_nothing_happens(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(IMDS_URL, "http://127.0.0.1:1")
    watch_notice("aws", tmp_path, CLOCK)
    wait_for(lambda: "asking on" in capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []
