"""A controller runs from a copy of the code, so that an upgrade does not change it. Unused copies are removed."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import launcher.runs.own_code as own_code
from launcher.ledger.models import ControllerLease, Removal
from launcher.runs.old_code import NOTE, code_for, remove_unused_code
from launcher.runs.own_code import copies_in, environment_for, keep_code
from tests.launcher.made_ledger import a_run, a_session

UNUSED = "5d41402abc4b2a76"
"""Name of a copy. No process of another test has it in its environment, as it may have a word."""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Create an installed spotrl that a test may upgrade: two small packages in place of ours."""
    root = tmp_path / "installed"
    for package in ("engine", "launcher"):
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text("")
        (root / package / "version.py").write_text("NAME = 'old'")
    monkeypatch.setattr(own_code, "PACKAGES", ("engine", "launcher"))
    monkeypatch.setattr(own_code, "_source", lambda package: root / package)
    return root


def test_imports_after_an_upgrade_still_use_the_old_version(installed, tmp_path):
    environ = environment_for(keep_code(tmp_path / "home"), {**os.environ, "PYTHONPATH": str(installed)})
    for package in ("engine", "launcher"):  # like an upgrade: one file is removed, the others change
        (installed / package / "version.py").unlink()
        (installed / package / "__init__.py").write_text("NEW = True")
    seen = "import launcher.version, engine.version, engine; print(launcher.version.NAME, hasattr(engine, 'NEW'))"
    # The controller and each agent are started like this.
    done = subprocess.run([sys.executable, "-S", "-P", "-c", seen], env=environ, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("old False\n", "")


def test_each_version_is_copied_once_beside_the_others(installed, tmp_path):
    first = keep_code(tmp_path / "home")
    assert keep_code(tmp_path / "home") == first
    (installed / "launcher" / "version.py").write_text("NAME = 'new'")
    second = keep_code(tmp_path / "home")
    assert second != first
    assert [(one / "launcher" / "version.py").read_text() for one in (first, second)] == [
        "NAME = 'old'",
        "NAME = 'new'",
    ]


def test_a_compiled_file_does_not_change_the_version(installed, tmp_path):
    first = keep_code(tmp_path / "home")
    (installed / "launcher" / "__pycache__").mkdir()
    (installed / "launcher" / "__pycache__" / "version.cpython-311.pyc").write_bytes(b"compiled")
    assert keep_code(tmp_path / "home") == first


def test_an_interrupted_copy_does_not_count(installed, tmp_path, monkeypatch):
    def cut_short(source, target):
        target.mkdir()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", cut_short)
        with pytest.raises(OSError, match="No space"):
            keep_code(tmp_path / "home")
    assert list((tmp_path / "home" / "code").iterdir()) == []
    assert (keep_code(tmp_path / "home") / "engine" / "version.py").exists()


def test_the_copied_code_precedes_the_users_own_path():
    code = Path("/state/code/1")
    assert environment_for(code, {"PYTHONPATH": "/mine:/state/code/1"}) == {"PYTHONPATH": "/state/code/1:/mine"}
    assert environment_for(code, {}) == {"PYTHONPATH": "/state/code/1"}


# --- copies that nothing uses ---------------------------------------------------------------------------


class Home:
    """A home with a ledger, and with copies of old versions that only have a name."""

    def __init__(self, folder):
        self.folder, self.session = folder, a_session()

    def copy(self, name):
        (self.folder / "code" / name / "engine").mkdir(parents=True)
        return name

    def run(self, name, status, code=None, held=False, removed=False):
        """Add a run. `code`: its controllers started from this copy. `held`: its controller has work left."""
        made = a_run(self.session, name, folder=str(self.folder / "runs" / name))
        made.status(status, 0)
        Path(made.run.folder).mkdir(parents=True)
        if code is not None:
            (Path(made.run.folder) / NOTE).write_text(f"{self.copy(code)}\n")
        if held:
            self.session.add(ControllerLease(run_id=made.run.id, holder="1@1", pid=1, epoch=1, expires_wall_ms=1))
        if removed:
            self.session.add(Removal(run_id=made.run.id, at_wall_ms=0))

    def remove_unused(self, current="now"):
        return remove_unused_code(self.session, self.folder, self.folder / "code" / current)

    def left(self):
        return {path.name for path in copies_in(self.folder)}


@pytest.fixture
def home(tmp_path):
    home = Home(tmp_path / "home")
    yield home
    home.session.close()


def test_only_copies_of_runs_that_are_done_are_removed(home):
    home.copy("now")
    home.copy("of-no-run")
    for status in ("planned", "running", "stopping", "draining", "stopped", "failed"):
        home.run(f"a-{status}-run", status, f"of-a-{status}-run")
    home.run("a-finished-run", "finished", "of-a-finished-run")
    home.run("a-removed-run", "stopped", "of-a-removed-run", removed=True)
    home.run("a-run-that-tidies-up", "finished", "of-a-run-that-tidies-up", held=True)
    before = home.left()
    assert home.remove_unused() == ["of-a-finished-run", "of-a-removed-run", "of-no-run"]
    assert home.left() == before - {"of-a-finished-run", "of-a-removed-run", "of-no-run"}
    assert home.remove_unused() == []


def test_no_copy_is_removed_while_a_live_run_names_none(home):
    home.copy("now")
    home.copy(UNUSED)
    home.run("stopped-by-an-older-version", "stopped", held=True)
    home.run("of-an-older-version", "running", held=True)
    assert home.remove_unused() == []
    assert home.left() == {"now", UNUSED}


def test_a_run_whose_launch_died_before_its_controller_keeps_no_copy(installed, home):
    """A launch that goes on holds the lock from the look for its copy until the controller runs."""
    home.copy("now")
    home.copy(UNUSED)
    home.run("whose-launch-died", "planned")
    home.run("whose-controller-never-came", "planned", "its-copy")
    with code_for(home.folder, home.folder / "runs" / "whose-launch-died") as code:
        assert home.remove_unused() == []
    assert home.remove_unused() == [UNUSED]
    assert home.left() == {"now", "its-copy", code.name}


def test_a_copy_in_the_environment_of_a_process_stays_until_the_process_ends(home):
    home.copy("now")
    code = home.folder / "code" / home.copy("0123456789abcdef")
    waits = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, env=environment_for(code, {})) as server:
        assert home.remove_unused() == []
        server.stdin.close()
    assert home.remove_unused() == ["0123456789abcdef"]


def test_rests_of_a_killed_copy_or_removal_go_too(home):
    home.copy("now")
    home.copy(".part-killed")
    home.copy(".old-killed")
    home.remove_unused()
    assert [path.name for path in (home.folder / "code").iterdir()] == ["now"]


def test_a_run_names_the_copy_of_each_start_once(installed, home):
    run_folder = home.folder / "runs" / "demo"
    names = set()
    for version in (UNUSED, "new", "new"):
        (installed / "launcher" / "version.py").write_text(f"NAME = '{version}'")
        with code_for(home.folder, run_folder) as code:
            names.add(code.name)
    assert (run_folder / NOTE).read_text().splitlines() == sorted(names)
    assert len(names) == 2


def test_a_copy_never_goes_while_a_controller_is_started_from_it(installed, home, tmp_path):
    """Another version removes copies all the time. Each start finds its copy whole until the start is done."""
    ended, removed = threading.Event(), []

    def remove():
        with a_session() as session:  # a ledger without runs: nothing but a start keeps the copy
            while not ended.is_set():
                removed.extend(remove_unused_code(session, home.folder, home.folder / "code" / "now"))
                time.sleep(0.001)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for _ in range(30):
            with code_for(home.folder, tmp_path / "run") as code:
                time.sleep(0.005)
                assert (code / "launcher" / "version.py").exists()
            time.sleep(0.005)
    finally:
        ended.set()
        thread.join()
    assert removed, "the copy was removed between two starts"
