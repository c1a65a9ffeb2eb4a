"""The checkpoint store in an S3 bucket (moto), with only the credentials of an instance role."""

import dataclasses
import errno
import json
from concurrent.futures import ThreadPoolExecutor

import boto3
import obstore
import pytest
from moto.server import ThreadedMotoServer
from obstore.exceptions import AlreadyExistsError, BaseError

from engine.models.fetch import fetched
from engine.storage.bucket import region_of
from engine.storage.checkpoint import CheckpointStore
from engine.storage.ship import StoreCopy
from launcher.storage.stores import check_writable
from tests.engine.fake_metadata import FakeImds
from tests.engine.fleet import free_port
from tests.engine.regional_s3 import RegionalS3
from tests.engine.test_checkpoint import FIRST, at
from tests.engine.test_node_agent_on_cloud import spec_of

REGION_NAMES = ("AWS_REGION", "AWS_DEFAULT_REGION")

URL = "s3://runs/pre/a-run"
FAR_URL = "s3://far-runs/pre/a-run"


class Bucket:
    """One S3 server on one port that can be taken down and up; its objects stay."""

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
    bucket.client.delete_bucket(Bucket="runs")  # moto shares buckets between all servers of this process
    bucket.away()


@pytest.fixture
def bucket(s3, monkeypatch):
    """A bucket as a node sees it: credentials come from an instance role, and no key is configured."""
    imds = FakeImds()
    imds.is_instance("i-1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", *REGION_NAMES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", imds.url)
    yield s3
    imds.close()
    for key in s3.content():
        s3.client.delete_object(Bucket="runs", Key=key)


def test_a_checkpoint_loads_from_the_bucket_and_the_newest_three_are_kept(bucket):
    store = CheckpointStore(URL)
    for iteration in range(1, 6):
        store.save(at(iteration), keep=3)
    assert CheckpointStore(URL).newest() == at(5)
    assert store.names() == [f"l0001-i00000{iteration}" for iteration in (3, 4, 5)]
    assert all(key.startswith("pre/a-run/checkpoints/") for key in bucket.content())
    assert len(bucket.content()) == 3 * 4


def test_a_checkpoint_without_a_manifest_does_not_count_and_is_deleted_later(bucket):
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


def test_the_region_of_a_bucket_is_looked_up_in_s3(bucket):
    assert region_of("runs") == "us-west-2"


def test_an_unreachable_s3_is_a_retryable_error(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr("engine.storage.bucket.GAP_SECONDS", 0.0)
    with pytest.raises(OSError, match="in which region the bucket runs is") as trouble:
        CheckpointStore(URL)
    assert trouble.value.errno == errno.EHOSTUNREACH


@pytest.fixture(params=[None, "us-east-1"], ids=["no region named", "the node's region named"])
def far_bucket(request, bucket, monkeypatch):
    """A bucket in Frankfurt as a node in another region sees it."""
    s3 = RegionalS3("eu-central-1", "far-runs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    if request.param is not None:
        monkeypatch.setenv("AWS_REGION", request.param)
    yield s3
    s3.close()


def test_a_checkpoint_is_signed_for_the_region_of_its_bucket(far_bucket):
    CheckpointStore(FAR_URL).save(FIRST, keep=3)
    assert CheckpointStore(FAR_URL).newest() == FIRST
    assert far_bucket.signed_for == {"eu-central-1"}


def test_weights_are_fetched_with_requests_signed_for_the_region_of_their_bucket(far_bucket, tmp_path):
    store = CheckpointStore("s3://far-runs/_weights/digest")
    store.put("config.json", b"{}")
    store.put(".manifest.json", json.dumps({"files": {"config.json": 2}}).encode())
    assert (fetched("s3://far-runs/_weights/digest", tmp_path) / "config.json").read_bytes() == b"{}"
    assert far_bucket.signed_for == {"eu-central-1"}


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_logs_of_both_roles_are_signed_for_the_region_of_the_bucket(far_bucket, tmp_path, role):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/agent.log").write_text("last words")
    StoreCopy(spec_of(tmp_path, store=FAR_URL, role=role), every_seconds=3600).end()
    assert far_bucket.read("pre/a-run/logs/spot-0/agent.log") == b"last words"
    assert far_bucket.signed_for == {"eu-central-1"}


def test_the_launcher_signs_for_the_region_of_the_bucket(far_bucket, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")
    check_writable(FAR_URL)
    assert far_bucket.signed_for == {"eu-central-1"}


def test_a_bucket_that_was_unreachable_can_be_used_again(bucket):
    store = CheckpointStore(URL)
    store.save(FIRST, keep=3)
    bucket.away()
    try:
        with ThreadPoolExecutor(3) as at_once:  # each call retries for some seconds
            calls = [
                at_once.submit(call) for call in (store.newest, store.claim_lineage, lambda: store.save(at(2), keep=3))
            ]
        for one in calls:
            with pytest.raises(OSError) as trouble:
                one.result()
            assert trouble.value.errno == errno.EHOSTUNREACH
    finally:
        bucket.back()
    store.save(at(2), keep=3)
    assert store.newest() == dataclasses.replace(FIRST, iteration=2)


def test_a_missing_bucket_is_not_a_retryable_error(bucket):
    with pytest.raises(BaseError, match="404"):
        CheckpointStore("s3://no-such-bucket/a-run").claim_lineage()
