"""Buckets: checking that they are usable, and copying a checkpoint between clouds."""

import json
import socket

import boto3
import httpx
import obstore
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import MemoryStore

from engine.storage.checkpoint import CheckpointStore
from engine.storage.judge_fund import JudgeFund
from launcher.exit_codes import ExitCode
from launcher.storage.folder_sizes import count_folders
from launcher.storage.stores import (
    JUDGES,
    StoreDenied,
    StoreError,
    bucket_region,
    carry_over,
    check_no_checkpoint,
    check_writable,
    newest_checkpoint,
    open_store,
    read_object,
    run_store,
    run_stores,
)


@pytest.fixture
def s3(monkeypatch):
    """Serve a fake S3 (moto) over HTTP, configured only by environment variables like a real one."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    client = boto3.client("s3", region_name="us-west-2")
    client.create_bucket(Bucket="runs", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    yield client
    httpx.post(f"http://{host}:{port}/moto-api/reset")  # moto's buckets outlive the server
    server.stop()


def with_checkpoint(store, name, *, whole=True):
    for file in ("weights", "ema", "optimizer"):
        obstore.put(store, f"checkpoints/{name}/{file}.safetensors", f"{file} of {name}".encode())
    if whole:
        obstore.put(store, f"checkpoints/{name}/manifest.json", json.dumps({"name": name}).encode())


def paths(store):
    return {item["path"] for page in obstore.list(store) for item in page}


def test_a_run_has_a_folder_of_its_own_in_each_clouds_bucket():
    store = {"aws": "s3://runs/ours", "gcp": "gs://elsewhere"}
    assert run_store(store, "aws", "digits") == "s3://runs/ours/digits"
    assert run_store(store, "gcp", "digits") == "gs://elsewhere/digits"


def test_checking_a_usable_bucket_leaves_it_unchanged(s3):
    check_writable("s3://runs/ours/digits")
    assert s3.list_objects_v2(Bucket="runs").get("KeyCount") == 0
    assert bucket_region("s3://runs/ours") == "us-west-2"


def test_a_bucket_that_does_not_exist_is_named(s3):
    with pytest.raises(StoreError, match="no-such-runs"):
        check_writable("s3://no-such-runs/ours")


def test_a_bucket_without_credentials_gives_a_remedy(s3, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setattr("launcher.storage.stores.bucket_region", lambda url: "us-west-2")
    with pytest.raises(StoreDenied, match="no AWS credentials for runs") as caught:
        open_store("s3://runs/ours")
    assert caught.value.exit_code is ExitCode.CREDENTIALS


def test_an_unreachable_bucket_is_reported_in_time(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StoreError, match="in which region runs is"):
        check_writable("s3://runs/ours")


def test_the_newest_complete_checkpoint_is_copied_with_its_lineages():
    here, there = MemoryStore(), MemoryStore()
    obstore.put(here, "lineages/0001", b"claimed")
    obstore.put(here, "lineages/0002", b"claimed")
    with_checkpoint(here, "l0001-i000012")
    with_checkpoint(here, "l0002-i000006")
    with_checkpoint(here, "l0002-i000007", whole=False)
    assert carry_over(here, there) == "l0002-i000006" == newest_checkpoint(there)
    assert paths(there) == {
        *(f"lineages/000{number}" for number in (1, 2)),
        *(f"checkpoints/l0002-i000006/{file}.safetensors" for file in ("weights", "ema", "optimizer")),
        "checkpoints/l0002-i000006/manifest.json",
    }
    assert bytes(obstore.get(there, "checkpoints/l0002-i000006/ema.safetensors").bytes()) == b"ema of l0002-i000006"


def test_an_interrupted_copy_of_a_checkpoint_is_repeated():
    here, there = MemoryStore(), MemoryStore()
    with_checkpoint(here, "l0001-i000012")
    with_checkpoint(there, "l0001-i000012", whole=False)
    obstore.put(there, "checkpoints/l0001-i000012/ema.safetensors", b"hal")
    assert newest_checkpoint(there) is None
    carry_over(here, there)
    assert newest_checkpoint(there) == "l0001-i000012"
    assert bytes(obstore.get(there, "checkpoints/l0001-i000012/ema.safetensors").bytes()) == b"ema of l0001-i000012"


def test_a_truncated_manifest_is_not_copied():
    here, there = MemoryStore(), MemoryStore()
    with_checkpoint(here, "l0001-i000012")
    with_checkpoint(here, "l0001-i000015")
    obstore.put(here, "checkpoints/l0001-i000015/manifest.json", b'{"iteration": 1')
    assert carry_over(here, there) == "l0001-i000012" == newest_checkpoint(there)
    obstore.put(there, "checkpoints/l0001-i000012/manifest.json", b"{")  # nor in the other bucket
    assert newest_checkpoint(there) is None
    assert carry_over(here, there) == "l0001-i000012" == newest_checkpoint(there)


def test_a_run_without_a_checkpoint_copies_only_its_lineages():
    here, there = MemoryStore(), MemoryStore()
    obstore.put(here, "lineages/0001", b"claimed")
    assert carry_over(here, there) is None
    assert paths(there) == {"lineages/0001"}


@pytest.mark.parametrize("has_checkpoint", [True, False])
@pytest.mark.parametrize(
    ("here", "there", "then"),
    [
        (b'{"micro_usd": 700}', None, 700),
        (b'{"micro_usd": 700}', b'{"micro_usd": 300}', 700),
        (b'{"micro_usd": 700}', b'{"micro_usd": 900}', 900),
        (b"{", b'{"micro_usd": 300}', 1000),
        (b'{"micro_usd": 700}', b"{", 1000),
        (None, b'{"micro_usd": 300}', 300),
    ],
)
def test_judges_have_one_budget_on_both_clouds(tmp_path, here, there, then, has_checkpoint):
    """The next trainer takes from the bucket of its own cloud."""
    stores = []
    for name, content in (("here", here), ("there", there)):
        (tmp_path / name).mkdir()
        stores.append(open_store((tmp_path / name).as_uri()))
        if content is not None:
            obstore.put(stores[-1], JUDGES, content)
        if has_checkpoint:  # the run was there before, and has no newer checkpoint
            with_checkpoint(stores[-1], "l0001-i000003")
    for _ in range(2):
        carry_over(*stores)
    fund = JudgeFund((tmp_path / "there").as_uri(), 1000)
    assert fund.take(1000) == 1000 - then


def test_a_checkpoint_is_copied_over_the_s3_protocol(s3):
    here, there = MemoryStore(), open_store("s3://runs/ours/digits")
    with_checkpoint(here, "l0001-i000003")
    assert carry_over(here, there) == carry_over(here, there) == "l0001-i000003"
    assert newest_checkpoint(there) == "l0001-i000003"


def test_a_store_with_a_checkpoint_of_an_earlier_run_is_refused(tmp_path):
    url = tmp_path.as_uri()
    with_checkpoint(open_store(url), "l0001-i000004", whole=False)
    check_no_checkpoint(url)
    with_checkpoint(open_store(url), "l0001-i000003")
    with pytest.raises(StoreError, match=r"holds the checkpoint l0001-i000003 of an earlier run.*--name"):
        check_no_checkpoint(url)


def test_engine_and_launcher_mean_the_same_folder_whatever_its_name(tmp_path):
    """The engine wrote checkpoints into a folder with %20 in its name, and `spotrl pull` found none."""
    home = tmp_path / "Jürgen Müller #1 100%41"
    home.mkdir()
    url = (home / "store").as_uri()
    checkpoints = CheckpointStore(url, "demo-trainer-g0")
    assert checkpoints.claim_lineage() == 1
    checkpoints.put("evaluation/000001.png", b"image")
    assert [path.name for path in tmp_path.iterdir()] == [home.name]
    stores = run_stores("local", {}, "demo", home)
    assert (read_object(stores, "evaluation/000001.png"), read_object(stores, "lineages/0001")) == (
        b"image",
        b"demo-trainer-g0",
    )


def test_only_the_runs_own_folder_is_counted_over_the_s3_protocol(s3):
    for path, size in (("digits/a", 5), ("digits/checkpoints/b", 1 << 20), ("digits-2/a", 9), ("digit", 9)):
        obstore.put(open_store("s3://runs/ours"), path, b"x" * size)
    counted = count_folders(["s3://runs/ours/digits", "s3://runs/ours/empty"], bucket_region, seconds=60)
    assert [(one.bytes, one.is_whole, one.region) for one in counted] == [
        ((1 << 20) + 5, True, "us-west-2"),
        (0, True, "us-west-2"),
    ]


def test_a_folder_of_a_bucket_that_is_gone_has_an_unknown_size(s3):
    s3.delete_bucket(Bucket="runs")
    [counted] = count_folders(["s3://runs/ours/digits"], bucket_region, seconds=60)
    assert (counted.bytes, counted.is_whole) == (None, False)
    assert "in which region runs is" in counted.problem
