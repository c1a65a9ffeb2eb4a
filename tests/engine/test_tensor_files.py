"""Tensor files: the bytes of safetensors, written and read in pieces, whole or absent."""

import hashlib
import os

import pytest
import torch
from safetensors.torch import load, save

from engine.models import weights
from engine.models.weights import fill_tensors, read_tensors, write_tensors
from engine.storage import tensor_files

GENERATOR = torch.Generator().manual_seed(1)
TENSORS = {
    "b.weight": torch.randn(7, 5, generator=GENERATOR),
    "a": torch.randn(3, generator=GENERATOR).to(torch.bfloat16),
    "ü|step": torch.tensor(3.0),
    "turned": torch.randn(4, 6, generator=GENERATOR).T,
    "empty": torch.zeros(0, 4),
    "double": torch.randn(2, generator=GENERATOR, dtype=torch.float64),
    "count": torch.arange(5),
}


@pytest.fixture(params=[16, 4 << 20], ids=["many pieces", "one piece"])
def piece(request, monkeypatch):
    """Pieces far smaller than a tensor, and pieces larger than all."""
    for module in (tensor_files, weights):
        monkeypatch.setattr(module, "PIECE_BYTES", request.param)


@pytest.mark.usefixtures("piece")
def test_a_file_has_the_bytes_that_safetensors_writes(tmp_path):
    written = write_tensors(tmp_path / "file", TENSORS)
    expected = save({name: one.contiguous() for name, one in TENSORS.items()})
    assert written.path.read_bytes() == expected
    assert (written.digest, written.size) == (hashlib.sha256(expected).hexdigest(), len(expected))
    assert written.open().digest() == written.digest


@pytest.mark.usefixtures("piece")
def test_tensors_come_back_bit_for_bit_into_any_layout(tmp_path):
    stored = write_tensors(tmp_path / "file", TENSORS).open()
    found = read_tensors(stored)
    assert all(torch.equal(found[name], one) for name, one in TENSORS.items())
    assert all(found[name].dtype == one.dtype for name, one in TENSORS.items())
    target = {"turned": torch.empty(4, 6).T, "a": torch.empty(3)}
    fill_tensors(target, stored)
    assert torch.equal(target["turned"], TENSORS["turned"])
    assert torch.equal(target["a"], TENSORS["a"].float())


def test_an_open_file_outlives_its_name(tmp_path):
    written = write_tensors(tmp_path / "file", TENSORS)
    stored = written.open()
    written.path.unlink()
    assert load(stored.to_bytes()).keys() == TENSORS.keys()


@pytest.mark.parametrize("kept", [0, 5, 9, 300, -1])
def test_a_cut_file_is_refused(tmp_path, kept):
    data = write_tensors(tmp_path / "file", TENSORS).path.read_bytes()[:kept]
    with pytest.raises(ValueError, match="tensors"):
        read_tensors(data)


def test_another_shape_or_a_missing_tensor_is_refused(tmp_path):
    stored = write_tensors(tmp_path / "file", TENSORS).open()
    with pytest.raises(KeyError, match="lack"):
        fill_tensors({"missing": torch.empty(1)}, stored)
    with pytest.raises(ValueError, match=r"\[3\] does not fit into \[4\]"):
        fill_tensors({"a": torch.empty(4)}, stored)


def test_a_full_disk_leaves_the_older_file_and_nothing_else(tmp_path, monkeypatch):
    before = write_tensors(tmp_path / "file", {"a": torch.zeros(3)})

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_tensors(tmp_path / "file", TENSORS)
    assert before.open().digest() == before.digest
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
