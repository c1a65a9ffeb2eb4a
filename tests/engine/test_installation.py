"""The command that installs an extra works where the user is, and never asks an index for our name."""

import json
import shlex
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from engine.installation import InstallSource, install_command, packages_of, source

REQUIRES = (
    "click>=8.1",
    'numpy; extra == "engine"',
    'torch<2.14,>=2.11; python_version >= "3.11" and extra == "engine"',
    "ray==2.60.0; extra == 'ray'",
    'spotrl[engine,ray]; extra == "node"',
    'uvicorn; extra == "node"',
)


class Installed(Distribution):
    """An installed package with a record of its origin."""

    def __init__(self, record: object) -> None:
        self._record = record

    def read_text(self, filename: str) -> str | None:
        return None if self._record is None or filename != "direct_url.json" else json.dumps(self._record)

    def locate_file(self, path: object) -> Path:
        return Path(str(path))


def command_of(origin: InstallSource, extra: str = "engine") -> list[str]:
    """Return the words behind `install`."""
    words = shlex.split(install_command(extra, origin))
    return words[words.index("install") + 1 :]


def test_each_origin_has_a_command_that_works_there(tmp_path):
    (tmp_path / "my clone").mkdir()
    clone = (tmp_path / "my clone").as_uri()
    (tmp_path / "spotrl-0.1.0-py3-none-any.whl").touch()
    wheel = (tmp_path / "spotrl-0.1.0-py3-none-any.whl").as_uri()
    cases = [
        ({"url": clone, "dir_info": {}}, [f"{tmp_path}/my clone[engine]"]),
        ({"url": wheel, "archive_info": {}}, [f"{tmp_path}/spotrl-0.1.0-py3-none-any.whl[engine]"]),
        (
            {"url": "https://forge.example/spotrl.git", "vcs_info": {"vcs": "git", "commit_id": "0a1b"}},
            ["spotrl[engine] @ git+https://forge.example/spotrl.git@0a1b"],
        ),
        ({"url": "https://example.org/s.whl", "archive_info": {}}, ["spotrl[engine] @ https://example.org/s.whl"]),
    ]
    for record, words in cases:
        assert command_of(source(tmp_path, Installed(record))) == words
    (tmp_path / "pyproject.toml").touch()
    assert command_of(source(tmp_path, Installed(None))) == ["-e", f"{tmp_path}[engine]"], "a clone comes first"


@pytest.mark.parametrize("record", [None, {"url": "file:///gone/spotrl-0.1.0.whl", "archive_info": {}}])
def test_an_unknown_origin_names_the_extras_packages_and_never_our_name(tmp_path, record):
    origin = source(tmp_path, Installed(record))
    assert origin.kind == "unknown"
    words = command_of(origin)
    assert "numpy" in words
    assert not any(word.startswith("spotrl") for word in words)
    assert packages_of("node", REQUIRES) == ["numpy", "torch<2.14,>=2.11", "ray==2.60.0", "uvicorn"]


def test_the_command_uses_the_pip_of_this_python(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install_command("ui").startswith(f"{sys.executable} -m pip install ")
    (tmp_path / "pip").touch()
    (tmp_path / "pip").chmod(0o755)
    assert install_command("ui").startswith(f"{sys.executable} -m pip install "), "another environment's pip"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert install_command("ui").startswith("pip install ")
