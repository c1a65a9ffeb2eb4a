"""The README's commands exist, and the tree of folders in docs/architecture.md is complete."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = [
    line.split("#")[0].strip() for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()
]
TREE = re.search(r"```text\n(launcher/.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.S)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c])
def test_a_command_of_the_readme_exists(command: str) -> None:
    words = command.replace(".venv/bin/", "").split()
    match words[0]:
        case "make":
            subprocess.run(["make", "--dry-run", words[1]], cwd=ROOT, check=True, capture_output=True)
        case "spotrl":
            assert (ROOT / "launcher" / "cli" / f"{words[1]}.py").is_file()
        case "python":
            assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file()
        case other:
            pytest.fail(f"nobody checks {other!r}")


def test_nothing_promises_spotrl_on_a_package_index() -> None:
    assert not re.search(r"pip install ['\"]?spotrl", README)
    assert "urls" not in PROJECT, "the repository has no public address"


def test_only_the_tested_python_is_claimed() -> None:
    claimed = re.findall(r"Python :: (\d\.\d+)", " ".join(PROJECT["classifiers"]))
    assert claimed == [PROJECT["requires-python"].removeprefix(">=")]


def test_the_tree_names_every_folder_and_no_other() -> None:
    assert TREE is not None
    folders, top_folder = set(), ""
    for line in TREE.group(1).splitlines():
        name = line.split()[0]
        top_folder = name if not line.startswith(" ") else top_folder
        folders.add(name if not line.startswith(" ") else top_folder + name)
    for name in folders:
        assert (ROOT / name).exists(), name
    there = {
        f"{top}/{folder.name}/"
        for top in ("launcher", "engine")
        for folder in (ROOT / top).iterdir()
        if folder.is_dir() and (folder / "__init__.py").exists()
    }
    assert there <= folders
