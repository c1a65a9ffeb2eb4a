"""The remote console of a node's folder: mirrored files, accepted orders, and exactly one agent after any crash."""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.mark import MARK
from engine.node import agent_keeper
from engine.node.alone import LAST_CONTACT
from engine.node.remote_console import RemoteConsole
from engine.protocol.console import MIRRORED

AGENT = (
    sys.executable,
    "-c",
    "import json, os, sys, time; spec = json.load(open(sys.argv[1]));"
    "open('agent.json', 'w').write(json.dumps({'pid': os.getpid(), 'coordinator': spec['coordinator_host']}));"
    "print('began', flush=True); time.sleep(spec.get('seconds', 300))",
)


class Mirror:
    """The launcher's mirror, built from the console's lines."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.gone: set[str] = set()
        self.trouble: list[str] = []

    def take(self, line: bytes) -> None:
        match json.loads(line):
            case {"put": name, "text": text}:
                self.files[name] = text.encode()
                self.gone.discard(name)
            case {"gone": name}:
                self.files.pop(name, None)
                self.gone.add(name)
            case {"append": name, "at": at, "data": data}:
                have = self.files.get(name, b"") if at else b""
                assert at == len(have), name
                self.files[name] = have + base64.b64decode(data)
            case {"trouble": words}:
                self.trouble.append(words)
            case {"beat": _}:
                pass
            case unknown:
                pytest.fail(f"a mirror would ignore {unknown}")

    def have(self) -> dict[str, Any]:
        sizes = {name: content for name, content in self.files.items() if "/" in name}
        return {name: (len(text), base64.b64encode(text[-64:]).decode()) for name, text in sizes.items()}


class Open:
    """A console in this process that the test drives."""

    told = 0

    def __init__(self, folder: Path, mirror: Mirror, agent: tuple[str, ...] = AGENT) -> None:
        folder.mkdir(exist_ok=True)
        self.out, self.mirror = io.BytesIO(), mirror
        self.window = RemoteConsole(folder, agent, self.out)
        self.order(have=mirror.have())

    def order(self, **order: Any) -> None:
        if "run" in order:
            Open.told += 1
            order = {"told": Open.told, **order}
        self.window.receive(json.dumps(order).encode())
        self._deliver()

    def look(self) -> Mirror:
        while self.window.files.look():
            pass
        self.window.agent.record_end()
        self.window.files.look()
        self._deliver()
        return self.mirror

    def _deliver(self) -> None:
        for line in self.out.getvalue().splitlines():
            self.mirror.take(line)
        self.out.seek(0)
        self.out.truncate()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "node"
    yield path
    for pid in psutil.pids():
        try:
            if psutil.Process(pid).environ().get(MARK) == str(path):
                os.kill(pid, signal.SIGKILL)
        except (psutil.Error, OSError):
            continue


@pytest.fixture
def mirror() -> Mirror:
    return Mirror()


def spec(folder: Path, **fields: Any) -> dict[str, Any]:
    return {"node": "n", "folder": str(folder), "coordinator_host": "10.0.0.1", "money_left_ms": 1, **fields}


def wait_until(true: Callable[[], object], seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


def agent_of(folder: Path) -> int:
    """Return the agent's pid once the agent has written it and while the agent runs; else 0."""
    try:
        pid = int(json.loads((folder / "agent.json").read_text())["pid"])
    except (OSError, ValueError):
        return 0
    return pid if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else 0


def started(folder: Path) -> int:
    wait_until(lambda: agent_of(folder))
    return agent_of(folder)


# --- mirroring ------------------------------------------------------------------------------------


def test_small_files_are_mirrored_and_deleted(folder, mirror):
    view = Open(folder, mirror)
    assert view.look().gone == set(MIRRORED)
    (folder / "ready.json").write_text('{"at_ms": 1}')
    assert view.look().files == {"ready.json": b'{"at_ms": 1}'}
    (folder / "ready.json").unlink()
    assert view.look().files == {}


def test_the_token_is_not_mirrored(folder, mirror):
    folder.mkdir()
    for name in ("node.json", "armed.json", "x.json", "logs/.hidden.log", "logs/core", "progress/x.log"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("the token")
    assert Open(folder, mirror).look().files == {}


def test_appended_bytes_arrive_once_over_any_number_of_consoles(folder, mirror):
    (folder / "progress").mkdir(parents=True)
    with (folder / "progress/trainer.jsonl").open("ab", buffering=0) as file:
        for number in range(40):
            file.write(b"x" * (number * 997) + b"\n")
            view = Open(folder, mirror) if number % 3 == 0 else view  # noqa: F821
            assert view.look().files["progress/trainer.jsonl"] == (folder / "progress/trainer.jsonl").read_bytes()


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("now", [b"", b"short\n", b"as long\n", b"much longer than before\n" * 9000])
def test_a_replaced_file_is_sent_from_the_start(folder, mirror, now, reopened):
    log = folder / "logs/agent.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"before!\n")
    view = Open(folder, mirror)
    view.look()
    log.write_bytes(now)
    assert (Open(folder, mirror) if reopened else view).look().files["logs/agent.log"] == now


def test_a_partial_line_removed_on_the_node_is_removed_in_the_mirror(folder, mirror):
    """A progress file after a crash: its partial line is removed and the next line written between two polls."""
    log = folder / "progress/trainer.jsonl"
    log.parent.mkdir(parents=True)
    log.write_bytes(b'{"whole": 1}\n{"ha')
    view = Open(folder, mirror)
    view.look()
    log.write_bytes(b'{"whole": 1}\n{"another": 2}\n')
    assert view.look().files["progress/trainer.jsonl"] == log.read_bytes()


# --- orders ---------------------------------------------------------------------------------------


def test_the_latest_spend_deadline_and_the_earliest_notice_count(folder, mirror):
    view = Open(folder, mirror)
    for told, left_ms in ((2, 500), (1, 900), (2, 400)):
        view.order(money={"told": told, "left_ms": left_ms})
    assert json.loads((folder / "money.json").read_text()) == {"told": 2, "left_ms": 500}
    for deadline_ms in (500, 400, 600):
        view.order(notice={"deadline_ms": deadline_ms, "source": "api"})
    assert json.loads((folder / "notice.json").read_text())["deadline_ms"] == 400


def test_a_spec_for_another_folder_is_refused_with_a_reason(folder, mirror):
    Open(folder, mirror).order(run=spec(folder.parent / "elsewhere"))
    assert "elsewhere" in mirror.trouble[0]
    assert not (folder / "node.json").exists()


def test_an_agent_that_cannot_start_is_reported_and_keeps_the_console(folder, mirror):
    view = Open(folder, mirror, agent=("/no/such/python",))
    view.order(run=spec(folder))
    assert "/no/such/python" in mirror.trouble[0]
    view.order(beat=1)


# --- one agent ------------------------------------------------------------------------------------


def test_a_repeated_order_keeps_the_agent_even_with_another_deadline(folder, mirror):
    view = Open(folder, mirror)
    view.order(run=spec(folder))
    agent = started(folder)
    view.order(run=spec(folder, money_left_ms=2))
    Open(folder, mirror).order(run=spec(folder, money_left_ms=3))
    assert agent_of(folder) == agent
    assert (folder / "node.json").stat().st_mode & 0o077 == 0


def test_secrets_reach_the_agent_and_no_file_and_its_files_are_private(folder, mirror):
    Open(folder, mirror).order(run=spec(folder), secrets={"TOKEN": "a planted secret"})
    agent = started(folder)
    assert psutil.Process(agent).environ()["TOKEN"] == "a planted secret"
    assert os.getsid(agent) == agent, "the end of the console's session does not end the agent"
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    written = ("node.json", "started.json", "logs/agent.log")
    assert files.keys() >= set(written)
    assert not [name for name, path in files.items() if b"planted" in path.read_bytes()]
    assert not [name for name in (*written, "logs") if (folder / name).stat().st_mode & 0o077]


def test_another_order_starts_another_agent(folder, mirror):
    view = Open(folder, mirror)
    view.order(run=spec(folder))
    agent = started(folder)
    for name in ("ready.json", "exit.json"):
        (folder / name).write_text("{}")
    view.order(run=spec(folder, coordinator_host="10.0.0.2"))
    wait_until(lambda: started(folder) != agent)
    assert not psutil.pid_exists(agent)
    assert not [name for name in ("ready.json", "exit.json") if (folder / name).exists()], "files of the former agent"
    assert json.loads((folder / "agent.json").read_text())["coordinator"] == "10.0.0.2"


POLITE = (
    sys.executable,
    "-c",
    "import json, os, signal, sys, time; spec = json.load(open(sys.argv[1]));"
    "wait = lambda: [time.sleep(0.01) for _ in iter(lambda: os.path.exists('seen'), True)];"
    "end = lambda *_: (open('exit.json', 'w').write('{}'), wait(), os._exit(1));"
    "signal.signal(signal.SIGTERM, end);"
    "open('agent.json', 'w').write(json.dumps({'pid': os.getpid()})); time.sleep(300)",
)


STUBBORN = (
    sys.executable,
    "-c",
    "import json, os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "child = subprocess.Popen(['sleep', '300'], env={}); open('child', 'w').write(str(child.pid));"
    "open('agent.json', 'w').write(json.dumps({'pid': os.getpid()})); time.sleep(300)",
)
"""Ignores SIGTERM, and has a process without the node's mark."""


def test_an_agent_that_does_not_end_is_killed_with_its_whole_session(folder, mirror, monkeypatch):
    monkeypatch.setattr(agent_keeper, "PATIENCE_SECONDS", 0.1)
    view = Open(folder, mirror, agent=STUBBORN)
    view.order(run=spec(folder))
    agent, child = started(folder), int((folder / "child").read_text())
    view.order(run=spec(folder, coordinator_host="10.0.0.2"))
    assert not psutil.pid_exists(agent)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_stopped_agent_ends_by_itself_before_the_next_one(folder, mirror, monkeypatch):
    """It continues for the order to end, so it can write down its end and end its processes."""
    monkeypatch.setattr(agent_keeper, "PATIENCE_SECONDS", 600.0)
    (folder / "seen").parent.mkdir()
    (folder / "seen").touch()
    view = Open(folder, mirror, agent=POLITE)
    view.order(run=spec(folder))
    os.kill(first := started(folder), signal.SIGSTOP)
    view.order(run=spec(folder, coordinator_host="10.0.0.2"))
    assert not psutil.pid_exists(first)


def test_the_exit_of_a_replaced_agent_is_not_the_end_of_the_node(folder, mirror):
    """Otherwise the exit report of the old agent would make the launcher release the instance."""
    view = Open(folder, mirror, agent=POLITE)
    view.order(run=spec(folder))
    first = started(folder)
    order = json.dumps({"run": spec(folder, coordinator_host="10.0.0.2"), "told": 10**15}).encode()
    replacing = threading.Thread(target=view.window.receive, args=(order,))
    replacing.start()
    wait_until((folder / "exit.json").exists)
    assert "exit.json" not in view.look().files
    (folder / "seen").touch()
    replacing.join()
    assert "exit.json" not in view.look().files
    assert started(folder) != first


def test_an_order_older_than_the_last_one_is_ignored(folder, mirror):
    """The order comes from a launcher that was frozen while another one took over."""
    view = Open(folder, mirror)
    view.order(run=spec(folder), told=1_000)
    view.order(run=spec(folder, coordinator_host="10.0.0.2"), told=1_001)
    wait_until(lambda: '"10.0.0.2"' in (folder / "agent.json").read_text() if agent_of(folder) else False)
    agent = agent_of(folder)
    view.order(run=spec(folder, coordinator_host="10.0.0.2"), told=2_000)  # from the successor of the other launcher
    view.order(run=spec(folder), told=1_999)
    assert agent_of(folder) == agent
    assert json.loads((folder / "node.json").read_text())["coordinator_host"] == "10.0.0.2"


def test_a_finished_agent_is_started_again_only_after_a_reboot(folder, mirror):
    view = Open(folder, mirror)
    view.order(run=spec(folder, seconds=0))
    wait_until(lambda: "exit.json" in view.look().files)
    assert json.loads(mirror.files["exit.json"])["code"] == 0
    view.order(run=spec(folder, seconds=0))
    assert view.look().files["logs/agent.log"] == b"began\n"
    record = json.loads((folder / "started.json").read_text())
    (folder / "started.json").write_text(json.dumps(record | {"boot_id": "the boot before"}))
    (folder / "exit.json").unlink()
    assert "exit.json" not in view.look().files, "a reboot is no end of the node"
    view.order(run=spec(folder, seconds=0))
    wait_until(lambda: view.look().files["logs/agent.log"] == b"began\nbegan\n")


def test_an_agents_own_exit_report_is_not_overwritten(folder, mirror):
    view = Open(folder, mirror)
    view.order(run=spec(folder))
    agent = started(folder)
    (folder / "exit.json").write_text('{"code": 7}')
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(agent) or view.window.agent._child.poll() is not None)
    assert view.look().files["exit.json"] == b'{"code": 7}'


def test_a_process_with_a_dead_agents_pid_is_not_taken_for_the_agent(folder, mirror):
    view = Open(folder, mirror)
    view.order(run=spec(folder, seconds=0))
    wait_until(lambda: "exit.json" in view.look().files)
    (folder / "exit.json").unlink()
    record = json.loads((folder / "started.json").read_text())
    (folder / "started.json").write_text(json.dumps(record | {"pid": os.getpid()}))
    assert json.loads(Open(folder, mirror).look().files["exit.json"])["code"] == -signal.SIGKILL


@pytest.mark.parametrize("lost", ["started.json", "node.json", "window.lock"])
def test_a_console_killed_while_starting_leaves_one_agent_to_the_next(folder, mirror, lost):
    Open(folder, mirror).order(run=spec(folder))
    first = started(folder)
    (folder / lost).unlink()
    (folder / "agent.json").unlink()
    again = Open(folder, mirror)
    again.order(run=spec(folder))
    if lost != "started.json":
        assert psutil.pid_exists(first)
        return
    assert started(folder) != first
    again.window.agent._stop(None)
    assert not psutil.pid_exists(first)


@pytest.mark.parametrize("launcher", ["goes away", "falls silent"])
def test_the_console_exits_after_its_launcher(folder, launcher):
    code = (
        "import sys, engine.node.remote_console as w; w.SILENCE_SECONDS = 1.5; "
        f"sys.argv = ['w', {str(folder)!r}]; w.main()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b'{"have": {}}\n')
        process.stdin.flush()
        assert b"gone" in process.stdout.readline()
        if launcher == "goes away":
            process.stdin.close()
        assert process.wait(timeout=240) == 0


def test_the_console_needs_only_the_standard_library():
    code = "import sys, engine.node.remote_console; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) - set(sys.stdlib_module_names) <= {"engine", "__main__"} | plain()


def plain() -> set[str]:
    """Return the modules that an interpreter of this environment has loaded at its start."""
    code = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_a_call_of_the_controller_is_recorded_on_the_node(tmp_path: Path) -> None:
    window = Open(tmp_path / "node", Mirror())
    contact = tmp_path / "node" / LAST_CONTACT
    before = contact.stat().st_mtime_ns
    os.utime(contact, ns=(0, 0))
    window.order(beat=1)
    assert contact.stat().st_mtime_ns >= before
