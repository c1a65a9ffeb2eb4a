"""A full disk makes a run wait with a warning; nothing ends and nothing is lost."""

import errno
import resource
import subprocess
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from engine.clock import ScaledClock
from engine.events import Progress, StoreAway, Warned
from engine.storage import disk
from engine.storage.checkpoint import CheckpointStore
from engine.storage.disk import AWAY
from engine.storage.progress import ProgressLog
from engine.storage.tensor_files import Stored
from engine.trainer.checkpoints import Checkpoints
from engine.trainer.state import TrainerState
from tests.engine.test_checkpoint import FIRST, at
from tests.engine.test_loop import TINY, build, progress

pytestmark = pytest.mark.usefixtures("one_layer")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(disk, "ASK_AGAIN_SECONDS", 0.01)


@contextmanager
def files_no_larger_than(size):
    """Limit file sizes: a write beyond the limit is truncated and the next one fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def texts(path):
    return [Progress.from_json(line).event.text for line in path.read_text().splitlines()]


def test_progress_lines_on_a_full_disk_are_written_later_in_order(tmp_path):
    path = tmp_path / "trainer.jsonl"
    log = ProgressLog(path, run="run", source="trainer", clock=ScaledClock(origin_ms=0))
    log.write(1, Warned(text="a"))
    with files_no_larger_than(path.stat().st_size + 20):
        log.write(1, Warned(text="b"))
        log.write(1, Warned(text="c"))
        assert not log.flush()
        assert texts(path) == ["a"]
    log.write(1, Warned(text="d"))
    assert texts(path) == ["a", "b", "c", "d"]
    assert [Progress.from_json(line).seq for line in path.read_text().splitlines()] == [0, 1, 2, 3]


@pytest.fixture
def small(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_checkpoint_on_a_full_disk_raises_oserror_and_does_not_count(small):
    store = CheckpointStore(f"file://{small}/store")
    store.save(FIRST, keep=3)
    rest = small / "rest"
    rest.write_bytes(b"x" * 40_000)
    large = at(2).__class__(**{**vars(at(2)), "files": {"weights": Stored.of_bytes(b"w" * 40_000)}})
    with pytest.raises(OSError) as full:
        store.save(large, keep=3)
    assert full.value.errno == errno.ENOSPC
    assert store.newest() == FIRST
    rest.unlink()
    store.save(large, keep=3)
    assert store.newest() == large


class FullAtFirst(CheckpointStore):
    """A store that refuses some objects for lack of space, `refusals` times."""

    refused, refusals = "", 0

    def put(self, path, data):
        if self.refusals and path.endswith(self.refused):
            self.refusals -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        super().put(path, data)

    def take_over(self, path, file):
        if self.refusals and path.endswith(self.refused):
            self.refusals -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        super().take_over(path, file)


@pytest.mark.slow
@pytest.mark.parametrize("refused", ["optimizer.safetensors", "manifest.json"])
def test_the_trainer_waits_for_disk_space_with_one_warning(tmp_path, refused):
    run = build(TINY, tmp_path)
    store = FullAtFirst(f"file://{tmp_path}/store")
    store.refused, store.refusals = refused, 3
    object.__setattr__(run.loop.context, "store", store)
    assert run.loop.run().reason == "iterations"
    assert store.refusals == 0
    warned = [event.text for event in progress(tmp_path, "warned") if "checkpoint store" in event.text]
    assert len(warned) == 2
    assert f"{tmp_path}/store" in warned[0]
    assert "No space left" in warned[0]
    assert "going on" in warned[1]
    assert len(progress(tmp_path, "checkpoint_saved")) == TINY.iterations


class AwayAtFirst:
    """A store in a bucket that does not answer the first calls."""

    url = "s3://runs/a"

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def newest(self) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError(AWAY, "the bucket does not answer")


@pytest.mark.parametrize(("failures", "reported"), [(2, [True, False]), (0, [])])
def test_the_trainer_reports_once_that_its_bucket_is_away_and_once_that_it_answers(failures, reported):
    events, warned = [], []
    reporter = SimpleNamespace(warn=warned.append, write=events.append)
    Checkpoints(SimpleNamespace(store=AwayAtFirst(failures)), TrainerState(config_digest="d"), reporter).newest()
    assert events == [StoreAway(is_away=is_away) for is_away in reported]
    assert len(warned) == len(reported)
