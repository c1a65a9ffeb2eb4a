"""The environment of a node in the run's bucket: sent by the node that built, fetched by later nodes."""

import json
import os
import sys
from pathlib import Path

import pytest

from engine.node import environment
from engine.node.environment import MANIFEST, NoArchive, begin_sending, environment_key, fetch, main, send
from engine.storage import packed_files
from engine.storage.packed_files import Damaged, Unpacking, packed

DIGEST = "d1"


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(packed_files, "PART_BYTES", 4096)
    monkeypatch.setattr(environment, "_compile_our_code", lambda env: None)


@pytest.fixture
def env(tmp_path: Path) -> Path:
    """An environment with small and large files, an empty file, bytecode and links."""
    site = tmp_path / "env/lib/python3.11/site-packages"
    (site / "torch/__pycache__").mkdir(parents=True)
    (site / "torch/__init__.py").write_text("x = 1\n")
    (site / "torch/__pycache__/__init__.cpython-311.pyc").write_bytes(b"compiled")
    (site / "torch/__pycache__/__init__.cpython-311.pyc.140123").write_bytes(b"half")
    (site / "torch/large.so").write_bytes(bytes(range(256)) * 50)
    (site / "torch/py.typed").touch()
    (site / "linked.py").symlink_to(site / "torch/__init__.py")
    os.utime(site / "torch/__init__.py", (1_700_000_000, 1_700_000_000))
    (tmp_path / "env/bin").mkdir()
    (tmp_path / "env/bin/tool").write_text("#!/bin/sh\n")
    (tmp_path / "env/bin/tool").chmod(0o755)
    (tmp_path / "env/pyvenv.cfg").write_text("home = /usr/bin\n")
    (tmp_path / "env/.environment").write_text(DIGEST)
    return tmp_path / "env"


@pytest.fixture
def store(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


def renew(env: Path) -> None:
    """Replace the environment by one without packages, as uv makes on the next node."""
    env.rename(env.with_name(f"built-{len(list(env.parent.iterdir()))}"))
    (env / "bin").mkdir(parents=True)
    (env / "pyvenv.cfg").write_text("home = /elsewhere\n")


def content(env: Path) -> dict[str, object]:
    return {
        path.relative_to(env).as_posix(): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in env.rglob("*")
        if (path.is_file() or path.is_symlink()) and not path.name.startswith(".") and path.name != "pyvenv.cfg"
    }


def archive(store: str, env: Path) -> Path:
    return Path(store.removeprefix("file://")) / "environments" / environment_key(env, DIGEST)


def test_a_later_node_gets_the_files_of_the_node_that_built(env, store):
    before = content(env)
    before.pop("lib/python3.11/site-packages/torch/__pycache__/__init__.cpython-311.pyc.140123")
    assert "MiB in" in send(store, env, DIGEST)
    renew(env)
    assert fetch(store, env, DIGEST).startswith(f"{len(before)} files")
    assert content(env) == before
    assert os.access(env / "bin/tool", os.X_OK)
    source = env / "lib/python3.11/site-packages/torch/__init__.py"
    assert source.stat().st_mtime == 1_700_000_000, "Python ignores bytecode of a source with another time"
    assert (env / "pyvenv.cfg").read_text() == "home = /elsewhere\n", "the interpreter is this machine's"
    assert not (env / ".environment").exists()


def test_another_digest_or_folder_is_another_archive(env, store):
    send(store, env, DIGEST)
    with pytest.raises(NoArchive, match="no archive of this environment yet"):
        fetch(store, env, "d2")
    assert environment_key(env, DIGEST) != environment_key(env / "elsewhere", DIGEST)


def test_an_interrupted_send_does_not_count_and_is_continued(env, store, monkeypatch):
    import obstore

    put = obstore.put

    def dies(store, name, *rest, **more):
        if name == MANIFEST:
            raise KeyboardInterrupt
        put(store, name, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(obstore, "put", dies)
        with pytest.raises(KeyboardInterrupt):
            send(store, env, DIGEST)
    sent = {path.name: path.stat().st_mtime_ns for path in archive(store, env).iterdir()}
    assert sent
    before = content(env)
    renew(env)
    with pytest.raises(NoArchive):
        fetch(store, env, DIGEST)
    built = next(path for path in env.parent.iterdir() if path.name.startswith("built-"))
    env.rename(env.with_name("empty"))
    built.rename(env)
    send(store, env, DIGEST)
    assert {name: (archive(store, env) / name).stat().st_mtime_ns for name in sent} == sent, "no part is sent twice"
    renew(env)
    fetch(store, env, DIGEST)
    assert len(content(env)) == len(before) - 1


@pytest.mark.parametrize("damage", ["changed part", "missing part", "short part", "manifest"])
def test_a_damaged_archive_is_removed_and_sent_anew_by_the_node_that_builds(env, store, damage):
    send(store, env, DIGEST)
    place = archive(store, env)
    part = next(path for path in place.iterdir() if path.name != MANIFEST)
    match damage:
        case "changed part":
            part.write_bytes(part.read_bytes()[:-1] + b"?")
        case "missing part":
            part.unlink()
        case "short part":
            part.write_bytes(part.read_bytes()[:100])
        case "manifest":
            (place / MANIFEST).write_bytes((place / MANIFEST).read_bytes()[:20])
    built = env.rename(env.with_name("first"))
    env.mkdir()
    with pytest.raises(NoArchive, match="damaged"):
        fetch(store, env, DIGEST)
    assert not (place / MANIFEST).exists()
    env.rename(env.with_name("half"))
    built.rename(env)
    send(store, env, DIGEST)
    before = content(env)
    renew(env)
    fetch(store, env, DIGEST)
    assert len(content(env)) == len(before) - 1  # all but the half-written bytecode


def test_the_manifest_of_the_quicker_of_two_nodes_stays(env, store, monkeypatch):
    send(store, env, DIGEST)
    first = (archive(store, env) / MANIFEST).read_bytes()
    (env / "bin/tool").write_text("#!/bin/sh\necho of the other node\n")
    monkeypatch.setattr(environment, "_exists", lambda *_: False)
    assert send(store, env, DIGEST) == "another node was quicker"
    assert (archive(store, env) / MANIFEST).read_bytes() == first


def test_a_link_that_this_machine_lacks_leaves_the_archive_to_others(env, store):
    (env / "bin/cached").symlink_to(env.parent / "cache")
    (env.parent / "cache").touch()
    send(store, env, DIGEST)
    renew(env)
    (env.parent / "cache").unlink()
    with pytest.raises(NoArchive, match=r"of another machine image.*cache"):
        fetch(store, env, DIGEST)
    assert (archive(store, env) / MANIFEST).exists()


def test_a_part_that_leaves_the_folder_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/file").write_text("x")
    (part,) = packed(tmp_path / "in")
    (tmp_path / "out").mkdir()
    for path in ("../a", "/etc/b"):
        index = json.dumps([[path, "", 0o600, 0, 0, 1]]).encode()
        with pytest.raises(Damaged, match="outside its folder"):
            Unpacking(tmp_path / "out").add(len(index).to_bytes(8, "big") + index + b"x")
    Unpacking(tmp_path / "out").add(part)
    assert (tmp_path / "out/file").read_text() == "x"


def test_a_bucket_that_cannot_be_used_is_reported_and_harms_nothing(env, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(os, "nice", lambda _: 0)
    for action in ("fetch", "send"):
        monkeypatch.setattr(environment, "FETCH_SECONDS", 0)  # no alarm in the process of the tests
        monkeypatch.setattr(sys, "argv", ["environment", action, f"file://{tmp_path}/file", str(env), DIGEST])
        assert main() == 1
        assert f"environment: no {action}: " in capsys.readouterr().out


def test_only_a_node_that_built_sends(env, store, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(env))
    assert begin_sending(store) is None
    (env / environment.BUILT).touch()
    process = begin_sending(store)
    assert process is not None
    assert process.args[-3:] == [store, str(env), DIGEST]
    process.kill()
    process.wait()
