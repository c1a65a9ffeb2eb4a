"""A trainer that is killed while it writes large files loses nothing: what counted before counts after."""

import multiprocessing
import os
import signal

import pytest
import torch

from engine.models.weights import read_tensors, write_tensors
from engine.storage import tensor_files
from engine.storage.checkpoint import CheckpointStore
from engine.trainer.outbox import Outbox
from tests.engine.test_checkpoint import FIRST, at

TENSORS = {"a": torch.arange(1000.0), "b": torch.arange(2000.0)}
CONTEXT = multiprocessing.get_context("fork")


def outbox_of(folder):
    return Outbox(folder / "outbox", print)


def write_checkpoint(folder, dies_at):
    """Write the second checkpoint of a store, and die at this step of it."""
    steps = iter(range(1000))

    def dying(step):
        def call(*arguments):
            if next(steps) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments)

        return call

    tensor_files.write_all = dying(tensor_files.write_all)
    os.fsync = dying(os.fsync)
    os.link = dying(os.link)
    os.rename = dying(os.rename)
    outbox, store = outbox_of(folder), CheckpointStore(f"file://{folder}/store")
    files = {name: outbox.write(name, TENSORS) for name in ("weights", "ema", "optimizer")}
    second = at(2)
    store.save(second, keep=3, digests=store.write_files(second.name, files))


@pytest.mark.parametrize("dies_at", [0, 1, 3, 5, 9, 12, 17, 20])
def test_a_trainer_killed_during_a_checkpoint_goes_on_from_the_last_whole_one(tmp_path, dies_at):
    store = CheckpointStore(f"file://{tmp_path}/store")
    store.save(FIRST, keep=3)
    process = CONTEXT.Process(target=write_checkpoint, args=(tmp_path, dies_at))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert store.newest() == FIRST
    outbox = outbox_of(tmp_path)
    assert not list((tmp_path / "outbox").iterdir())  # half-written files do not fill the disk
    files = {name: outbox.write(name, TENSORS) for name in ("weights", "ema", "optimizer")}
    store.save(at(2), keep=3, digests=store.write_files(at(2).name, files))
    newest = store.newest()
    assert newest is not None
    assert newest.name == at(2).name
    assert torch.equal(read_tensors(newest.files["ema"])["b"], TENSORS["b"])


def test_a_checkpoint_and_a_publish_share_the_bytes_of_one_file(tmp_path):
    store = CheckpointStore(f"file://{tmp_path}/store")
    file = write_tensors(tmp_path / "weights", TENSORS)
    digests = store.write_files(at(1).name, {"weights": file})
    assert digests == {"weights": file.digest}
    kept = tmp_path / "store/checkpoints" / at(1).name / "weights.safetensors"
    assert kept.stat().st_ino == file.path.stat().st_ino
