"""A controller records what its run left in buckets, and a bucket in trouble neither fails nor delays the run's end."""

import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import select

from launcher.controller.bucket_sizes import BucketSizes
from launcher.controller.lease import is_given_up
from launcher.controller.run_process import run_controller
from launcher.ledger.models import BucketSize, ControllerLease
from launcher.ledger.store import find_run, writing
from launcher.provision.local.provisioner import LocalProvisioner
from launcher.runs.runs import request_stop
from launcher.runs.views import run_view
from launcher.storage.folder_sizes import FolderSize, count_folders
from launcher.storage.stores import StoreDenied
from tests.launcher.cluster.stage import FAKE_AGENT, ledger, made_run


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def sessions(home):
    return ledger(home)


def run_with_bucket(sessions):
    """Return a run on this machine whose row says that it was on AWS."""
    run = made_run(sessions, spot=0, iterations=1000)
    with writing(sessions) as session:
        found = find_run(session, run.name)
        found.infra, found.job = "aws", {**found.job, "store": {"aws": "s3://runs/ours"}}
    with sessions() as session:
        return find_run(session, run.name)


def end(sessions, run, nodes=LocalProvisioner, **arguments) -> None:
    request_stop(sessions, run.name)
    nodes = nodes(Path(run.folder), run.clock, None, FAKE_AGENT)
    run_controller(sessions, run.name, provisioner=nodes, **arguments)
    assert run_view(sessions, run.name).status == "stopped"


def recorded(sessions) -> list[BucketSize]:
    with sessions() as session:
        return list(session.scalars(select(BucketSize)))


def test_the_end_of_a_run_records_what_is_left_in_its_bucket(sessions):
    def count(urls):
        return count_folders(urls, lambda url: "us-west-2", pages_of=lambda url: iter([[700], [42]]))

    before_ms = time.time_ns() // 1_000_000
    end(sessions, run_with_bucket(sessions), count=count)
    [row] = recorded(sessions)
    assert (row.url, row.bytes, row.is_whole, row.region, row.problem) == (
        "s3://runs/ours/demo",
        742,
        True,
        "us-west-2",
        "",
    )
    assert before_ms <= row.at_wall_ms <= time.time_ns() // 1_000_000


def test_a_bucket_that_cannot_be_listed_leaves_an_unknown_size(sessions):
    def pages_of(url):
        raise StoreDenied(f"{url} may not be read")

    end(sessions, run_with_bucket(sessions), count=lambda urls: count_folders(urls, lambda url: "", pages_of=pages_of))
    [row] = recorded(sessions)
    assert (row.bytes, row.is_whole, row.problem) == (None, False, "s3://runs/ours/demo may not be read")


def test_a_silent_bucket_does_not_delay_the_end_of_a_run(sessions):
    run = run_with_bucket(sessions)
    ended = threading.Event()

    def count(urls):
        for _ in range(500):
            with sessions() as session:
                if is_given_up(session.get(ControllerLease, run.id)):
                    ended.set()
                    break
            time.sleep(0.01)
        return [FolderSize(url=url, bytes=1, is_whole=True, region="", problem="") for url in urls]

    end(sessions, run, count=count)
    assert ended.is_set(), "`spotrl down` and `launch` wait until the lease is given up"
    assert [row.bytes for row in recorded(sessions)] == [1]


def test_buckets_are_counted_while_the_runs_other_resources_are_removed(sessions):
    counted = threading.Event()

    class SlowToTidy(LocalProvisioner):
        def tidy(self):
            return counted.wait(0.05)

    def count(urls):
        counted.set()
        return []

    end(sessions, run_with_bucket(sessions), SlowToTidy, count=count)


def test_a_run_without_buckets_counts_nothing(sessions):
    def count(urls):
        raise AssertionError("this run has no bucket")

    end(sessions, made_run(sessions, spot=0, iterations=1000), count=count)
    assert recorded(sessions) == []


def test_a_run_is_counted_once(sessions):
    calls = []

    def count(urls):
        calls.append(urls)
        return []

    sizes = BucketSizes(sessions, run_with_bucket(sessions), count)
    sizes.end()
    for _ in range(3):
        sizes.begin()
    sizes.end()
    assert calls == [["s3://runs/ours/demo"]]
