"""Durable writes: the bytes of a file reach the disk before its name, so it survives a power cut."""

import os
import stat
from pathlib import Path

import pytest
import torch

from engine.coordinator.weight_book import WeightBook
from engine.durable import write_durably
from engine.models.weights import write_tensors
from engine.protocol.messages import WeightsFile
from engine.protocol.request import WeightsKey
from launcher.provision.sky.node_files import NodeFiles
from launcher.provision.sky.records import ReleaseRecord


@pytest.fixture
def steps(monkeypatch):
    """Record the fsync and rename calls in order."""
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(handle):
        done.append("sync folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "sync file")
        fsync(handle)

    def noted_replace(self, target):
        done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    return done


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_durably(folder / "a", b"x"),
        lambda folder: NodeFiles(folder).write(ReleaseRecord(at_ms=1)),
        lambda folder: NodeFiles(folder).write_key("KEY"),
        lambda folder: WeightBook(folder).write(WeightsKey(version=2), b"weights"),
        lambda folder: write_tensors(folder / "weights", {"a": torch.ones(3)}),
    ],
    ids=["any file", "a node's file", "a node's key", "weights", "tensors"],
)
def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, steps, write):
    write(tmp_path)
    assert steps == ["sync file", "rename", "sync folder"]


def test_a_file_is_private_and_either_complete_or_unchanged(tmp_path, monkeypatch):
    write_durably(tmp_path / "a", b"before")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(tmp_path / "a", b"after")
    assert (tmp_path / "a").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_weights_in_a_durable_file_are_adopted_without_a_copy(tmp_path, steps):
    book = WeightBook(tmp_path / "book")
    written = write_tensors(tmp_path / "weights", {"a": torch.ones(3)})
    steps.clear()
    for _ in range(2):  # the answer may be lost, and the order repeated
        book.adopt(WeightsKey(version=2), WeightsFile(path=str(written.path), digest="d", size=written.size))
    assert steps == ["rename", "sync folder"] * 2
    assert book.path(WeightsKey(version=2)).stat().st_ino == written.path.stat().st_ino
    assert [path.name for path in (tmp_path / "book").iterdir()] == ["2.safetensors"]


def test_an_adopted_file_must_be_whole(tmp_path):
    (tmp_path / "cut").write_bytes(b"cut")
    book = WeightBook(tmp_path / "book")
    with pytest.raises(ValueError, match="has 3 bytes; the publish names 4"):
        book.adopt(WeightsKey(version=2), WeightsFile(path=str(tmp_path / "cut"), digest="d", size=4))
    with pytest.raises(ValueError, match="is gone"):
        book.adopt(WeightsKey(version=2), WeightsFile(path=str(tmp_path / "gone"), digest="d", size=4))
