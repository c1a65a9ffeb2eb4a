"""Settings of all tiers: threads of torch, and which tests stay together when pytest-xdist spreads them."""

import contextlib
import copy
import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.tiers import LoadWatch, load_file

# Read by torch when it is imported, here and in every process that a test starts. Two workers with two threads each
# would fight for two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Examples of property tests follow from each test's code, so that a run of the suite depends on the code alone.
# `make test-properties` draws new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("new", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("fixed")

MEMORY_DISK = Path("/dev/shm")
MEMORY_DISK_BYTES = 6 << 30
"""Free space that the temporary files of a run may need."""

# Ledgers, journals and checkpoints wait for the disk at every commit. In memory the same calls do not wait.
# tests/simulation and tests/conformance check durability.
if MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > MEMORY_DISK_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_DISK))

# A process has one forkserver, and its preloads are fixed when the first test uses it. Without this, every process
# that a later test starts would import torch and diffusers by itself: six seconds of a core.
multiprocessing.get_context("forkserver").set_forkserver_preload(["engine.models.digits", "engine.parallel.ulysses"])

FORKED_PYTHON = "SPOTRL_FORKED_PYTHON"
"""Environment variable of a worker of pytest-xdist: the program of the nursery that forked the worker. No process of a
test inherits it, because a test may plant a bug in all its processes."""

if FORKED_PYTHON in os.environ:
    multiprocessing.set_executable(os.environ.pop(FORKED_PYTHON))

with contextlib.suppress(ImportError):
    from botocore.loaders import JSONFileLoader

    # Each session of boto3 reads its clouds' API from JSON again: a second for EC2. The files never change.
    _load_file = JSONFileLoader._load_file
    _loaded: dict[str, Any] = {}

    def _load_once(self: JSONFileLoader, full_path: str, open_method: Any) -> Any:
        if full_path not in _loaded:
            _loaded[full_path] = _load_file(self, full_path, open_method)
        return _loaded[full_path]

    JSONFileLoader._load_file = _load_once

DIVIDED = {"tests/end_to_end/test_launch.py"}
"""Files whose tests share nothing that takes long to make: each test may run in another worker."""

DIVIDED_BY_PARAMETER = {"tests/conformance/test_conformance.py"}
"""Files whose tests share a fixture for each first parameter."""

STARTED_FIRST = (
    "tests/conformance/test_conformance.py::ray",
    "tests/end_to_end",
    "tests/engine/test_ray_runtime.py",
    "tests/conformance",
    "tests/engine/test_node_agent_on_cloud.py",
    "tests/engine/test_loop.py",
    "tests/launcher/cluster/test_node_link.py",
    "tests/reports",
)
"""Beginnings of groups, in the order in which workers take them: the longest first, so that no worker is left alone
with a long one at the end. Seconds of each test: `python -m tests.tiers`."""


def group_of(nodeid: str) -> str:
    """Return the group that a test belongs to. The tests of a group run in one worker, in their order.

    A file is a group, because its tests share fixtures.
    """
    file, _, test = nodeid.partition("::")
    if file in DIVIDED:
        return nodeid
    if file in DIVIDED_BY_PARAMETER and "[" in test:
        return f"{file}::{test.partition('[')[2].rstrip(']').partition('-')[0]}"
    return file


def rank(nodeid: str) -> int:
    """Return the place of a test's group in the order in which groups are taken."""
    group = group_of(nodeid)
    return next((at for at, first in enumerate(STARTED_FIRST) if group.startswith(first)), len(STARTED_FIRST))


GARBAGE = 50_000
"""New objects until Python looks for cycles among them, usually 700. Most are in use, and looking took a third of the
seconds of some files."""

LOAD = pytest.StashKey[LoadWatch]()
FORKS = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
"""Folder of the program that forks workers."""


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Fork the workers of pytest-xdist from one process that has imported the product, and measure the machine beside.

    A worker that imports by itself takes 14 seconds of a core until its first test, and a forked one 4. A worker writes
    no JUnit file.
    """
    if hasattr(session.config, "workerinput"):
        return
    if workers := getattr(session.config.option, "tx", None):
        from tests.engine.nursery import forked_python

        session.stash[FORKS] = tempfile.TemporaryDirectory(prefix="workers")
        program = forked_python(Path(session.stash[FORKS].name), "engine", "launcher")
        os.environ[FORKED_PYTHON] = program
        session.config.option.tx = [f"{worker}//python={program}" for worker in workers]
    if session.config.option.xmlpath:
        session.stash[LOAD] = LoadWatch(load_file(Path(session.config.option.xmlpath)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the garbage collector ignore modules and tests, whose visit takes half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(GARBAGE, 20, 20)
        gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (watch := session.stash.get(LOAD, None)) is not None:
        watch.end()
    if (folder := session.stash.get(FORKS, None)) is not None:
        folder.cleanup()


BEGAN = pytest.StashKey[os.times_result]()
PROCESSOR_SECONDS = "processor_s"
"""Property of each test in JUnit files: CPU seconds of pytest's process and its ended children for the test."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    item.stash[BEGAN] = os.times()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    try:
        return (yield)
    finally:
        taken = sum(os.times()[:4]) - sum(item.stash[BEGAN][:4])
        item.user_properties.append((PROCESSOR_SECONDS, round(taken, 2)))


class GroupScheduling(LoadScopeScheduling):
    """Gives each group of tests to one worker. pytest-xdist's own `loadgroup` does not work with pytest 9."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> GroupScheduling:
    """Called by pytest-xdist in its main process, when `-n` is given."""
    config.option.loadscopereorder = False  # the order below, not the number of tests
    return GroupScheduling(config, log)  # type: ignore[arg-type]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest groups first in a worker of pytest-xdist."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank(item.nodeid))


@pytest.fixture
def forked_engine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the engine's processes that launcher commands start, to save the six seconds of importing torch."""
    from tests.engine.nursery import forked_python

    monkeypatch.setattr(sys, "executable", forked_python(tmp_path_factory.mktemp("python")))


@pytest.fixture(scope="module")
def one_layer() -> Generator[None, None, None]:
    """Load the model of digits with the first of its four layers, in this process: a pass takes a third.

    For tests of what happens to any weights, not of what the model draws.
    """
    from engine.models import digits

    adapters: dict[tuple[object, ...], digits.DigitsAdapter] = {}
    load = digits.load_digits

    def load_digits(*words: Any) -> digits.DigitsAdapter:
        if words not in adapters:
            adapters[words] = load(*words)
            del adapters[words].transformer.transformer_blocks[1:]
        return copy.deepcopy(adapters[words])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "load_digits", load_digits)
        yield
