"""The mirror of a node's files writes the names that a node may send, and nothing else."""

from pathlib import Path

import pytest

from engine.protocol.console import MIRRORED, AppendFile, PutFile, RemoveFile
from launcher.provision.sky.mirror import NodeMirror
from launcher.provision.sky.ssh_line import BrokenLine


@pytest.fixture
def mirror(tmp_path: Path) -> NodeMirror:
    mirror = NodeMirror(tmp_path / "nodes/mirror")
    mirror.folder.parent.mkdir()
    mirror.have()
    return mirror


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", MIRRORED)
def test_a_small_file_is_written_replaced_and_removed(mirror, name):
    mirror.take(PutFile(name=name, text="{}"))
    mirror.take(PutFile(name=name, text="[]"))
    assert (mirror.folder / name).read_bytes() == b"[]"
    mirror.take(RemoveFile(name=name))
    assert not (mirror.folder / name).exists()


@pytest.mark.parametrize("name", ["progress/trainer.jsonl", "logs/agent.log", "logs/worker-0.1.log"])
def test_a_growing_file_is_appended_to_and_begins_again_at_0(mirror, name):
    mirror.take(AppendFile(name=name, at=0, data=b"one "))
    mirror.take(AppendFile(name=name, at=4, data=b"two"))
    assert (mirror.folder / name).read_bytes() == b"one two"
    with pytest.raises(BrokenLine, match="has fewer bytes"):
        mirror.take(AppendFile(name=name, at=8, data=b"three"))
    mirror.take(AppendFile(name=name, at=0, data=b"new"))
    assert (mirror.folder / name).read_bytes() == b"new"


def test_only_its_owner_can_read_a_mirror(mirror):
    """The files of a node name addresses, and its logs may hold a user's prompts."""
    mirror.take(PutFile(name="ready.json", text="{}"))
    mirror.take(AppendFile(name="logs/agent.log", at=0, data=b"one"))
    mirror.take(AppendFile(name="logs/agent.log", at=3, data=b"two"))
    paths = {mirror.folder, *mirror.folder.rglob("*")}
    assert {path.name for path in paths} == {"mirror", "known_hosts", "ready.json", "logs", "agent.log"}
    assert not [path for path in paths if path.stat().st_mode & 0o077]


OWN_FILES = ("want.json", "ended.json", "known_hosts", "node.json")
"""Files of the mirror's folder that the launcher writes."""


@pytest.mark.parametrize(
    "name",
    [
        *OWN_FILES,
        "../x",
        "../../x.json",
        "../mirror/ready.json",
        "ABSOLUTE/x.log",
        "ready.json/../want.json",
        "ready.json\n",
        "logs/../../x.log",
        "logs/a.log/../../want.json",
        "logs/a.logs",
        "logs/a.log.py",
        "logs/a.log\n",
        "logs/.x.log",
        "logs/sub/a.log",
        "progress/.x.jsonl",
        "progress/a.jsonl.exe",
        "progress/../want.json",
    ],
)
def test_a_file_with_a_forbidden_name_is_neither_written_nor_removed(mirror, tmp_path, name):
    name = name.replace("ABSOLUTE", str(tmp_path))
    for folder in ("logs", "progress", "logs/sub", "logs/a.log", "ready.json"):
        (mirror.folder / folder).mkdir()
    for own in OWN_FILES:
        (mirror.folder / own).write_text("the launcher's")
    (tmp_path / "x.json").write_text("the user's")
    before = all_files(tmp_path)
    assert len(before) == len(OWN_FILES) + 1
    mirror.take(PutFile(name=name, text="from the node"))
    mirror.take(AppendFile(name=name, at=0, data=b"from the node"))
    mirror.take(AppendFile(name=name, at=1, data=b"from the node"))
    mirror.take(RemoveFile(name=name))
    assert all_files(tmp_path) == before
