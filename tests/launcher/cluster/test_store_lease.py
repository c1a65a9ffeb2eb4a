"""The controller lease in the bucket: one controller per run over all computers."""

import time

import boto3
import httpx
import obstore
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import MemoryStore, S3Store

from launcher.storage.store_lease import LEASE_OBJECT, LEASE_SECONDS, LeaseHeld, LeaseLost, StoreLease
from launcher.storage.stores import StoreError


@pytest.fixture(params=["memory", "s3"])
def store(request):
    if request.param == "memory":
        yield MemoryStore()
        return
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "AKIDEXAMPLE", "aws_secret_access_key": "example"}
    boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys).create_bucket(Bucket="lease-runs")
    yield S3Store(
        "lease-runs", prefix="digits", endpoint=url, region="us-east-1", client_options={"allow_http": True}, **keys
    )
    httpx.post(f"{url}/moto-api/reset")
    server.stop()


class Clock:
    """Wall time that the test moves."""

    def __init__(self):
        self.ms = 1_000_000

    def __call__(self):
        return self.ms


def test_a_second_computer_is_refused_with_the_name_of_the_first(store):
    clock = Clock()
    StoreLease(lambda: store, "digits", "ours", clock).take()
    with pytest.raises(LeaseHeld, match="digits is controlled from another machine"):
        StoreLease(lambda: store, "digits", "theirs", clock).take()


def test_reading_the_lease_does_not_take_it(store):
    clock = Clock()
    ours = StoreLease(lambda: store, "digits", "ours", clock)
    ours.check_free()
    theirs = StoreLease(lambda: store, "digits", "theirs", clock)
    theirs.take()
    with pytest.raises(LeaseHeld, match="digits is controlled from another machine"):
        ours.check_free()
    theirs.check_free()


def test_reading_the_lease_of_an_unreachable_bucket_is_an_error():
    def unreachable():
        raise OSError("no route to host")

    with pytest.raises(StoreError, match=r"nobody knows whether .*no route to host; try again"):
        StoreLease(unreachable, "digits", "ours").check_free()


def test_a_silent_holder_is_replaced_and_notices_it(store):
    clock = Clock()
    first, second = (
        StoreLease(lambda: store, "digits", "ours", clock),
        StoreLease(lambda: store, "digits", "theirs", clock),
    )
    first.take()
    clock.ms += round(LEASE_SECONDS * 1000) + 1
    second.take()
    first.renew()
    assert first.lost
    second.renew()
    assert second.lost is None


def test_the_successor_of_a_dead_controller_takes_over_at_once(store):
    clock = Clock()
    StoreLease(lambda: store, "digits", "ours", clock).take()
    successor = StoreLease(lambda: store, "digits", "ours", clock)
    successor.take()
    successor.renew()
    assert successor.lost is None


def test_a_lease_written_by_a_fast_clock_does_not_last_for_hours(store):
    now, ahead = Clock(), Clock()
    now.ms = time.time_ns() // 1_000_000
    ahead.ms = now.ms + 15 * 3_600_000
    StoreLease(lambda: store, "digits", "ours", ahead).take()
    with pytest.raises(LeaseHeld, match=r"another (8|9)\d s"):
        StoreLease(lambda: store, "digits", "theirs", now).take()
    now.ms += round(LEASE_SECONDS * 1000) + 2000
    StoreLease(lambda: store, "digits", "theirs", now).take()


def test_renewing_keeps_the_lease(store):
    clock = Clock()
    first = StoreLease(lambda: store, "digits", "ours", clock)
    first.take()
    for _ in range(3):
        clock.ms += round(LEASE_SECONDS * 900)
        first.renew()
        with pytest.raises(LeaseHeld):
            StoreLease(lambda: store, "digits", "theirs", clock).take()


def test_one_of_two_simultaneous_takers_of_an_old_lease_wins(store):
    clock = Clock()
    StoreLease(lambda: store, "digits", "ours", clock).take()
    clock.ms += round(LEASE_SECONDS * 1000) + 1
    one, other = (
        StoreLease(lambda: store, "digits", "one's", clock),
        StoreLease(lambda: store, "digits", "other's", clock),
    )
    seen = other._read()
    one.take()
    with pytest.raises(Exception, match="recondition"):
        other._write(seen)


def test_a_finished_run_frees_its_lease_at_once(store):
    clock = Clock()
    first = StoreLease(lambda: store, "digits", "ours", clock)
    first.take()
    first.give_up()
    StoreLease(lambda: store, "digits", "theirs", clock).take()
    first.give_up()
    assert obstore.head(store, LEASE_OBJECT), "what belongs to another is left alone"


def test_an_unreachable_bucket_does_not_end_a_lease(tmp_path):
    nowhere = S3Store(
        "runs",
        endpoint="http://127.0.0.1:9",
        region="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    lease = StoreLease(lambda: nowhere, "digits", "ours", Clock())
    lease.take()
    lease.renew()
    assert lease.lost is None
    lease.give_up()


def test_every_check_of_a_lease_lost_to_another_computer_fails(store):
    clock = Clock()
    first, second = (StoreLease(lambda: store, "digits", name, clock, Clock()) for name in ("ours", "theirs"))
    first.take()
    first.check()
    clock.ms += round(LEASE_SECONDS * 1000) + 1
    second.take()
    first.renew()
    for _ in range(2):
        with pytest.raises(LeaseLost, match="neither buys nor ends anything any more"):
            first.check()
    second.check()


def test_a_holder_that_was_frozen_reads_the_bucket_before_it_acts(store):
    """Its renewal thread has not run yet when its next pass begins."""
    wall, boot = Clock(), Clock()
    first, second = (StoreLease(lambda: store, "digits", name, wall, boot) for name in ("ours", "theirs"))
    first.take()
    for clock in (wall, boot):
        clock.ms += round(LEASE_SECONDS * 1000) + 1
    second.take()
    assert first.lost is None
    with pytest.raises(LeaseLost):
        first.check()


def test_a_check_against_an_unreachable_bucket_keeps_the_lease():
    boot, asked_at = Clock(), []

    def away():
        asked_at.append(boot.ms)
        raise OSError("no route to host")

    lease = StoreLease(away, "digits", "ours", Clock(), boot)
    lease.take()
    boot.ms += 3_600_000
    lease.check()
    assert asked_at[-1] == boot.ms, "the bucket was asked again, and did not answer"
    assert lease.lost is None


def test_a_lease_knows_whether_its_bucket_answers():
    boot, store = Clock(), MemoryStore()
    asked = [lambda: store]
    lease = StoreLease(lambda: asked[-1](), "digits", "ours", Clock(), boot)
    assert not lease.answers
    lease.take()
    lease.renew()
    assert lease.answers

    def away():
        raise OSError("no route to host")

    asked.append(away)
    lease._opened = None
    boot.ms += 30_000
    lease.renew()
    assert lease.answers, "one request may fail"
    boot.ms += 20_000
    lease.renew()
    assert not lease.answers


def test_an_unreadable_lease_object_is_written_again(store):
    lease = StoreLease(lambda: store, "digits", "ours", Clock(), Clock())
    lease.take()
    obstore.put(store, LEASE_OBJECT, b"")
    lease.renew()
    assert lease.lost is None
    with pytest.raises(LeaseHeld):
        StoreLease(lambda: store, "digits", "theirs", Clock(), Clock()).take()
