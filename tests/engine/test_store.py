"""The checkpoint store in a bucket: S3 as moto makes it, with a machine's own credentials and nothing else."""

import dataclasses
import errno
import os

import boto3
import obstore
import pytest
from moto.server import ThreadedMotoServer
from obstore.exceptions import AlreadyExistsError, BaseError

from engine.runtime.bucket import NAMED_BY, region_of, settle_region
from engine.training.checkpoint import CheckpointStore
from tests.engine.fleet import free_port
from tests.engine.metadata_faces import FakeImds
from tests.engine.test_checkpoint import FIRST, at

URL = "s3://runs/pre/a-run"


class Bucket:
    """One S3 on one port, which may be away for a while; what it keeps stays."""

    def __init__(self):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.back()
        self.client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-west-2",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        self.client.create_bucket(Bucket="runs", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})

    def content(self):
        return [item["Key"] for item in self.client.list_objects_v2(Bucket="runs").get("Contents", [])]

    def back(self):
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def away(self):
        self._server.stop()


@pytest.fixture(scope="module")
def s3():
    bucket = Bucket()
    yield bucket
    bucket.away()


@pytest.fixture
def bucket(s3, monkeypatch):
    """As a node sees it: an instance role, and no key anywhere."""
    imds = FakeImds()
    imds.is_instance("i-1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", *NAMED_BY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", imds.url)
    yield s3
    imds.close()
    for key in s3.content():
        s3.client.delete_object(Bucket="runs", Key=key)


def test_a_checkpoint_comes_back_and_the_newest_three_are_kept(bucket):
    store = CheckpointStore(URL)
    for iteration in range(1, 6):
        store.save(at(iteration), keep=3)
    assert CheckpointStore(URL).newest() == at(5)
    assert store.names() == [f"l0001-i00000{iteration}" for iteration in (3, 4, 5)]
    assert all(key.startswith("pre/a-run/checkpoints/") for key in bucket.content())
    assert len(bucket.content()) == 3 * 4


def test_a_checkpoint_without_its_manifest_does_not_count_and_goes_with_the_next(bucket):
    store = CheckpointStore(URL)
    store.save(FIRST, keep=3)
    store.write_files(at(2).name, at(2).files)
    assert store.newest() == FIRST
    store.save(at(3), keep=3)
    assert not [key for key in bucket.content() if "i000002" in key]


def test_a_lineage_is_claimed_once(bucket):
    one, other = CheckpointStore(URL), CheckpointStore(URL)
    assert [one.claim_lineage(), other.claim_lineage(), one.claim_lineage()] == [1, 2, 3]
    with pytest.raises(AlreadyExistsError):
        obstore.put(one._store, "lineages/0003", b"", mode="create")


def test_the_buckets_region_is_found_and_a_named_one_kept(bucket, monkeypatch):
    assert region_of("runs") == "us-west-2"
    monkeypatch.setenv("AWS_REGION", "")
    settle_region(URL)
    assert os.environ["AWS_REGION"] == "us-west-2"
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    settle_region(URL)
    assert os.environ["AWS_REGION"] == "eu-west-1"
    settle_region("gs://runs/a-run")


@pytest.mark.skipif(not hasattr(CheckpointStore, "_trouble_is_an_oserror"), reason="the store does not say it yet")
def test_a_bucket_that_is_away_can_be_asked_again(bucket):
    store = CheckpointStore(URL)
    store.save(FIRST, keep=3)
    bucket.away()
    try:
        for ask in (store.newest, store.claim_lineage, lambda: store.save(at(2), keep=3)):
            with pytest.raises(OSError) as trouble:
                ask()
            assert trouble.value.errno == errno.EHOSTUNREACH
    finally:
        bucket.back()
    store.save(at(2), keep=3)
    assert store.newest() == dataclasses.replace(FIRST, iteration=2)


def test_a_bucket_that_is_not_there_is_no_passing_trouble(bucket):
    with pytest.raises(BaseError, match="404"):
        CheckpointStore("s3://no-such-bucket/a-run").claim_lineage()
