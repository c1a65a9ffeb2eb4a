"""A controller runs from a copy of the code, so that an upgrade does not change it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import launcher.runs.own_code as own_code
from launcher.runs.own_code import environment_for, keep_code


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
