"""Model weights: uploaded to the bucket once, and downloaded to a node's disk."""

import json
from types import SimpleNamespace

import pytest
from obstore.store import MemoryStore

from engine.models import fetch
from engine.models.fetch import fetched
from launcher.storage import weights
from launcher.storage.stores import StoreError, open_store
from launcher.storage.weights import digest_of, send, weights_of

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", "FluxTransformer2DModel"]}))
    (folder / "transformer" / WEIGHTS).write_bytes(b"weights" * 100_000)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "token").write_text("hf_secret")
    return folder


@pytest.fixture
def url(tmp_path, model):
    (tmp_path / "bucket").mkdir()
    url = weights_of(f"file://{tmp_path}/bucket", digest_of(model))
    (tmp_path / "bucket" / "_weights" / digest_of(model)).mkdir(parents=True)
    return url


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_node_gets_all_sent_files_without_hidden_ones(model, url, tmp_path):
    send(model, url, print)
    there = fetched(url, tmp_path / "node" / "weights")
    assert there.name == digest_of(model)
    assert contents(there) == {name: data for name, data in contents(model).items() if not name.startswith(".")}
    assert fetched(url, tmp_path / "node" / "weights") == there


def test_a_disk_without_room_for_the_model_is_named_before_a_byte_is_fetched(model, url, tmp_path, monkeypatch):
    send(model, url, print)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: SimpleNamespace(free=600_000))
    with pytest.raises(OSError, match=r"has 0 MiB free, and the model needs 0 MiB; set a larger resources\.disk_gb"):
        fetched(url, tmp_path / "node")
    assert not list((tmp_path / "node").rglob("*.safetensors"))


def test_only_the_parts_that_the_pipelines_index_names_are_sent(model, url, tmp_path):
    index = {
        "_class_name": "FluxPipeline",
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "safety": [None, None],
    }
    (model / "model_index.json").write_text(json.dumps(index))
    for name in ("flux1-dev.safetensors", "safety/model.safetensors", "README.md"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(b"again" * 1000)
    assert weights.bytes_of(model) == 700_000 + len(json.dumps(index))
    (model / "transformer/deep").mkdir()
    (model / "transformer/deep/config.json").write_text("{}")
    send(model, url, print)
    names = {"model_index.json", f"transformer/{WEIGHTS}", "transformer/deep/config.json"}
    assert set(contents(fetched(url, tmp_path / "node"))) == names


def test_the_digest_covers_names_and_contents(model):
    before = digest_of(model)
    (model / ".cache" / "token").write_text("hf_other")
    assert digest_of(model) == before
    (model / "model_index.json").rename(model / "other.json")
    renamed = digest_of(model)
    (model / "other.json").write_text("[]")
    assert len({before, renamed, digest_of(model)}) == 3


def test_existing_weights_are_not_sent_again(model, url):
    log = []
    send(model, url, log.append)
    assert "2 of 2 files" in log[0]
    send(model, url, log.append)
    assert len(log) == 3, "nothing more was logged or done"


def test_an_interrupted_upload_does_not_count_and_is_resumed(model, url, tmp_path, monkeypatch):
    put, done = weights.obstore.put, []

    def cut(store, path, data, **more):
        if done:
            raise OSError("the line is cut")
        done.append(path)
        return put(store, path, data, **more)

    monkeypatch.setattr(weights.obstore, "put", cut)
    monkeypatch.setattr(weights, "AT_ONCE", 1)
    with pytest.raises(StoreError, match="launch again, and it goes on"):
        send(model, url, print)
    with pytest.raises(OSError, match="not sent whole"):
        fetched(url, tmp_path / "node")
    monkeypatch.setattr(weights.obstore, "put", put)
    log = []
    send(model, url, log.append)
    assert "1 of 2 files" in log[0]
    assert contents(fetched(url, tmp_path / "node")).keys() == {"model_index.json", f"transformer/{WEIGHTS}"}


def test_a_node_resumes_its_download_and_keeps_only_complete_files(model, url, tmp_path):
    send(model, url, print)
    part = tmp_path / "node" / f"{digest_of(model)}.part"
    (part / "transformer").mkdir(parents=True)
    size = (model / "model_index.json").stat().st_size
    (part / "model_index.json").write_text("?" * size)  # the right length, so it is not downloaded again
    (part / "transformer" / WEIGHTS).write_bytes(b"half")
    log = []
    there = fetched(url, tmp_path / "node", log.append)
    assert "1 of 2 files" in log[0]
    assert (there / "transformer" / WEIGHTS).stat().st_size == 700_000


def test_a_file_unlike_its_manifest_is_refused(model, url, tmp_path):
    send(model, url, print)
    store = open_store(url)
    weights.obstore.put(store, ".manifest.json", json.dumps({"files": {"model_index.json": 3}}).encode())
    with pytest.raises(OSError, match=r"\d\d bytes, and its manifest says 3"):
        fetched(url, tmp_path / "node")
    assert not (tmp_path / "node" / digest_of(model)).exists()


def test_a_bucket_that_cannot_be_used_is_named(model, monkeypatch):
    def refuse(*_, **__):
        raise OSError("403")

    monkeypatch.setattr(weights, "open_store", lambda url: MemoryStore())
    monkeypatch.setattr(weights.obstore, "put", refuse)
    with pytest.raises(StoreError, match=r"cannot be sent to s3://bucket/weights/x \(403\)"):
        send(model, "s3://bucket/weights/x", print)
