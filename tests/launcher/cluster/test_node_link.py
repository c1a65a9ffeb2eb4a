"""The connection to a node's instance, with a real sshd on loopback, a real remote console and a fake agent."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.config import EngineConfig
from engine.events import Market
from engine.node_spec import ClockConfig, NodeSpec
from launcher.provision.sky import ssh_line
from launcher.provision.sky.node_link import Login, NodeLink
from tests.engine.fleet import free_port
from tests.launcher.cluster.sshd import Sshd, through_proxy, why_no_sshd
from tests.launcher.cluster.stage import FAKE_AGENT, wait_until

pytestmark = pytest.mark.skipif(why_no_sshd() is not None, reason=str(why_no_sshd()))


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("machine") / "sshd", environment={"FAKE_SECONDS": "0.02"})
    yield server
    server.stop()


class Node:
    """A node: its folder on the "instance", its mirror here, and the connections between them."""

    def __init__(self, tmp_path: Path, sshd: Sshd) -> None:
        self.folder, self.mirror, self.sshd = tmp_path / "remote" / "node", tmp_path / "mirror", sshd
        self.links: list[NodeLink] = []
        self.port = free_port()

    def link(self, login: Login | None = None, **secrets: str) -> NodeLink:
        link = NodeLink(
            login or self.sshd.login,
            self.mirror,
            str(self.folder),
            sys.executable,
            secrets=secrets,
            agent_command=(sys.executable, FAKE_AGENT),
        )
        self.links.append(link)
        return link

    def spec(self, role: str = "trainer", **fields: Any) -> NodeSpec:
        whole: dict[str, Any] = {
            "run": "demo",
            "node": "demo-trainer-g0",
            "role": role,
            "market": Market.ON_DEMAND,
            "folder": str(self.folder),
            "store": (self.folder.parent / "store").as_uri(),
            "coordinator_port": self.port,
            "token": "the token",
            "clock": ClockConfig(origin_ms=0),
            "engine": EngineConfig(iterations=100_000),
            "cloud": "aws",
        }
        return NodeSpec(**{**whole, **fields})

    def here(self, name: str) -> Any:
        return self._read(self.mirror / name)

    def there(self, name: str) -> Any:
        return self._read(self.folder / name)

    def _read(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:  # an agent that is replaced takes its files away
            return None

    def agent(self) -> int | None:
        """Return the pid of the current agent."""
        record = self.there("agent.json")
        return int(record["pid"]) if record is not None and psutil.pid_exists(record["pid"]) else None

    def marked(self) -> list[int]:
        return [pid for pid in psutil.pids() if mark_of(pid) == str(self.folder)]

    def close(self) -> None:
        for link in self.links:
            link.close()
        for _ in range(5):
            for pid in self.marked():
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def mark_of(pid: int) -> str | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.environ().get("SPOTRL_NODE_FOLDER")
    except psutil.Error:
        return None


@pytest.fixture
def node(tmp_path: Path, sshd: Sshd) -> Iterator[Node]:
    made = Node(tmp_path, sshd)
    yield made
    made.close()


def equal(one: Path, other: Path) -> Callable[[], bool]:
    return lambda: one.exists() and one.read_bytes() == other.read_bytes()


def ssh_of(node: Node) -> int:
    """Return the pid of the ssh process of this node's connection once it exists."""

    found: list[int] = []

    def appears() -> bool:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # the previous process may be a zombie
                if child.name() == "ssh" and str(node.folder) in " ".join(child.cmdline()):
                    found.append(child.pid)
        return bool(found)

    wait_until(appears)
    return found[0]


# --- starting -------------------------------------------------------------------------------------


def test_the_agent_starts_and_its_files_are_mirrored(node):
    link = node.link()
    assert link.seconds_since_message is None
    link.run(node.spec())
    wait_until(lambda: node.here("ready.json"))
    assert node.here("agent.json") == node.there("agent.json")
    lines = node.mirror / "progress/trainer.jsonl"
    wait_until(lambda: lines.exists() and lines.read_text().count("\n") > 20)
    assert (node.folder / "progress/trainer.jsonl").read_bytes().startswith(lines.read_bytes())
    assert link.seconds_since_message is not None
    assert link.seconds_since_message < 2
    assert link.trouble == ""


def test_a_link_through_a_proxy_mirrors_the_agents_files(node, tmp_path):
    login, log = through_proxy(node.sshd.login, tmp_path)
    link = node.link(login)
    link.run(node.spec())
    wait_until(lambda: node.here("agent.json") is not None)
    assert log.read_text().startswith("node.invalid 22\n")


def test_files_on_node_and_mirror_are_readable_only_by_the_owner(node):
    node.link().run(node.spec())
    wait_until(lambda: (node.mirror / "progress/trainer.jsonl").exists() and node.here("ready.json"))
    for path in (node.folder / "node.json", node.folder, node.mirror, *node.mirror.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert not (node.mirror / "node.json").exists()  # the file holds the token


def test_the_agent_gets_the_secrets_by_environment_and_never_by_file(node):
    node.link(HF_TOKEN="hf_planted").run(node.spec(role="rollout"))
    wait_until(lambda: node.here("ready.json"))
    found = psutil.Process(node.agent()).environ()
    assert (found["HF_TOKEN"], found["FAKE_SECONDS"]) == ("hf_planted", "0.02")
    assert os.getsid(node.agent()) == node.agent()
    files = [path for root in (node.folder, node.mirror) for path in root.rglob("*") if path.is_file()]
    assert not [path for path in files if b"hf_planted" in path.read_bytes()]


def test_a_repeated_order_from_any_process_keeps_one_agent(node):
    node.link().run(node.spec())
    wait_until(lambda: node.here("ready.json"))
    agent = node.agent()
    other = node.link()
    other.run(node.spec(money_left_ms=5))  # a changed spend deadline does not restart the agent
    wait_until(lambda: other.seconds_since_message is not None)
    time.sleep(0.5)
    assert node.agent() == agent
    assert node.there("started.json")["pid"] == agent


def test_an_order_with_another_coordinator_replaces_the_agent(node):
    link = node.link()
    link.run(node.spec(role="rollout"))
    wait_until(lambda: node.here("ready.json"))
    old = set(node.marked())
    assert len(old) == 2  # the agent and its child
    link.run(node.spec(role="rollout", coordinator_host="10.0.0.7"))
    wait_until(lambda: node.agent() not in {*old, None} and node.here("agent.json") == node.there("agent.json"))
    assert node.there("node.json")["coordinator_host"] == "10.0.0.7"
    assert not old & set(node.marked())
    assert node.here("exit.json") is None


def test_a_frozen_agent_is_replaced_too(node):
    link = node.link()
    link.run(node.spec(role="rollout"))
    wait_until(lambda: node.here("ready.json"))
    old = node.agent()
    for pid in node.marked():
        os.kill(pid, signal.SIGSTOP)
    link.run(node.spec(role="rollout", coordinator_host="10.0.0.7"))
    wait_until(lambda: node.agent() not in (old, None))
    assert not psutil.pid_exists(old)


def test_an_ended_agent_stays_ended_and_its_exit_report_is_mirrored(node):
    link = node.link(FAKE_TROUBLE="crash")
    link.run(node.spec())
    wait_until(lambda: node.here("exit.json"))
    assert node.here("exit.json")["code"] == 1
    assert node.here("exit.json")["text"].endswith("no such model")
    assert (node.mirror / "logs/agent.log").read_text() == "no such model\n"
    node.link().run(node.spec())
    time.sleep(1.0)
    assert (node.mirror / "logs/agent.log").read_text() == "no such model\n"
    assert node.agent() is None


def test_a_killed_agent_is_reported_gone(node):
    node.link().run(node.spec(role="rollout"))
    wait_until(lambda: node.here("ready.json"))
    os.kill(node.agent(), signal.SIGKILL)
    wait_until(lambda: node.here("exit.json"))
    assert node.here("exit.json")["code"] == -signal.SIGKILL


# --- spend deadlines and notices ------------------------------------------------------------------


def test_the_spend_deadline_is_sent_and_can_be_shortened(node):
    link = node.link()
    link.run(node.spec(role="rollout"))
    link.rearm(60_000)
    wait_until(lambda: node.there("money.json"))
    first = node.there("money.json")
    assert 50_000 < first["left_ms"] <= 60_000
    os.kill(ssh_of(node), signal.SIGKILL)
    (node.folder / "money.json").unlink()
    wait_until(lambda: node.there("money.json"))
    assert node.there("money.json")["left_ms"] < first["left_ms"]
    assert node.there("money.json")["told"] == first["told"]
    link.rearm(90_000)
    wait_until(lambda: node.there("money.json")["told"] > first["told"])


def test_a_notice_reaches_the_node_and_the_earliest_one_counts(node):
    link = node.link()
    link.notice(2_000)
    wait_until(lambda: node.there("notice.json"))
    assert node.there("notice.json")["deadline_ms"] == 2_000
    (node.folder / "notice.json").write_text(json.dumps({"deadline_ms": 1_000, "source": "the node itself"}))
    wait_until(lambda: node.here("notice.json") == {"deadline_ms": 1_000, "source": "the node itself"})
    link.notice(3_000)
    time.sleep(0.5)
    assert node.there("notice.json")["deadline_ms"] == 1_000


# --- broken connections ---------------------------------------------------------------------------


class Writer:
    """Appends numbered lines to a log of the node until `close`."""

    def __init__(self, node: Node) -> None:
        self.path = node.folder / "logs/busy.log"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        number = 0
        with self.path.open("ab", buffering=0) as file:
            while not self._stop.wait(0.001):
                file.write(b"".join(f"line {number + n} of many\n".encode() for n in range(20)))
                number += 20

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    "who", ["ssh", pytest.param("window", marks=pytest.mark.slow), pytest.param("sshd", marks=pytest.mark.slow)]
)
def test_no_log_byte_is_lost_or_doubled_by_any_kill(node, sshd, who):
    link = node.link()
    link.run(node.spec())
    progress = "progress/trainer.jsonl"
    wait_until(lambda: (node.mirror / progress).exists())
    writer = Writer(node)
    copy = node.mirror / "logs/busy.log"
    try:
        for _ in range(4):
            size = copy.stat().st_size if copy.exists() else 0
            wait_until(lambda size=size: copy.exists() and copy.stat().st_size > size)
            match who:
                case "ssh":
                    os.kill(ssh_of(node), signal.SIGKILL)
                case "window":
                    for window in sshd.windows():
                        window.kill()
                case "sshd":
                    sshd.cut()
    finally:
        writer.close()
    wait_until(equal(copy, writer.path))
    assert (node.folder / progress).read_bytes().startswith((node.mirror / progress).read_bytes())
    agent = node.agent()
    assert agent is not None
    assert node.there("started.json")["pid"] == agent  # the agent did not notice


@pytest.mark.slow
@pytest.mark.parametrize(
    "who", [pytest.param("window", marks=pytest.mark.slow), "sshd", pytest.param("ssh", marks=pytest.mark.slow)]
)
def test_a_stalled_connection_is_replaced(node, sshd, who, monkeypatch):
    monkeypatch.setattr(ssh_line, "SILENCE_SECONDS", 3.0)
    link = node.link()
    link.run(node.spec(role="rollout"))
    wait_until(lambda: node.here("ready.json"))
    windows = sshd.windows()
    match who:
        case "window":
            for window in windows:
                window.suspend()
        case "sshd":
            sshd.cut(signal.SIGSTOP)
        case "ssh":
            os.kill(ssh_of(node), signal.SIGSTOP)
    (node.folder / "notice.json").write_text('{"deadline_ms": 7}')
    began = time.monotonic()
    wait_until(lambda: node.here("notice.json"), seconds=60)
    assert time.monotonic() - began > 1.5  # of patience, which counts from the last heartbeat
    for process in {*windows, *sshd.sessions()}:
        if process.is_running():
            process.resume()
    wait_until(lambda: not [window for window in windows if window.is_running()])  # no launcher reads them any more


@pytest.mark.slow
def test_an_unreachable_instance_is_retried_and_the_trouble_is_named(node, tmp_path, sshd):
    other = Sshd(tmp_path / "other")
    other.stop()
    link = node.link(other.login)
    link.run(node.spec(role="rollout"))
    wait_until(lambda: "Connection refused" in link.trouble)
    assert link.seconds_since_message is None
    other.start()
    try:
        wait_until(lambda: node.here("ready.json"))
        assert link.trouble == ""
        other.stop()
        wait_until(lambda: link.trouble)
        assert link.seconds_since_message is not None
    finally:
        other.stop()


@pytest.mark.slow
def test_an_instance_with_another_host_key_is_refused(node, tmp_path, sshd):
    link = node.link()
    wait_until(lambda: link.seconds_since_message is not None)
    link.close()
    known = node.mirror / "known_hosts"
    impostor = Sshd(tmp_path / "impostor")
    try:
        known.write_text(known.read_text().replace(f":{sshd.login.port} ", f":{impostor.login.port} "))
        link = node.link(impostor.login)
        wait_until(lambda: "Host key verification failed" in link.trouble)
    finally:
        impostor.stop()


def test_a_node_without_an_environment_is_reported(node):
    link = NodeLink(node.sshd.login, node.mirror, str(node.folder), "spotrl/no/such/python")
    node.links.append(link)
    wait_until(lambda: "spotrl/no/such/python" in link.trouble)


@pytest.mark.slow
def test_no_call_blocks_on_an_instance_that_does_not_answer(node, tmp_path):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        began = time.monotonic()
        link = node.link(Login(host="127.0.0.1", user="x", key=tmp_path / "none", port=deaf.getsockname()[1]))
        link.run(node.spec())
        link.rearm(1)
        link.notice(1)
        assert link.tunnel(node.port) is None
        link.close()
        assert time.monotonic() - began < 5.0  # ssh itself waits ten seconds for an answer


# --- replaced files -------------------------------------------------------------------------------


def test_a_replaced_file_is_mirrored_from_the_start_even_if_longer(node):
    log = node.folder / "logs/x.log"
    log.parent.mkdir(parents=True)
    copy = node.mirror / "logs/x.log"
    link = node.link()
    for content in (b"one\n" * 1000, b"two\n" * 10, b"three\n" * 5000, b""):
        part = log.with_name("part")
        part.write_bytes(content)
        part.replace(log)
        wait_until(equal(copy, log))
    link.close()
    log.write_bytes(b"four\n" * 9000)
    copy.write_bytes(b"fou5\n" * 9)
    node.link()
    wait_until(equal(copy, log))


# --- the tunnel -----------------------------------------------------------------------------------


def get(tunnel: tuple[str, int], path: str) -> int:
    with socket.create_connection(tunnel, timeout=60) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        return int(connection.recv(64).split()[1])


class Coordinator(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def coordinator_of(spec: NodeSpec) -> Iterator[None]:
    """Serve where the coordinator of this spec is."""
    server = HTTPServer((spec.coordinator_host, spec.coordinator_port), Coordinator)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_the_tunnel_leads_to_the_coordinator_once_it_answers(node):
    link = node.link(FAKE_TROUBLE="deaf")
    spec = node.spec(coordinator_host="127.0.0.9")
    link.run(spec)
    wait_until(lambda: node.here("agent.json"))
    time.sleep(1.0)
    assert link.tunnel(spec.coordinator_port) is None  # ssh accepts connections, but no coordinator listens behind it
    with coordinator_of(spec):
        wait_until(lambda: link.tunnel(spec.coordinator_port))
        assert get(link.tunnel(spec.coordinator_port), "/") == 204
        assert link.tunnel(spec.coordinator_port + 1) is None
        first = link.tunnel(spec.coordinator_port)
        os.kill(ssh_of(node), signal.SIGKILL)
        wait_until(lambda: link.tunnel(spec.coordinator_port) not in (first, None))
        assert get(link.tunnel(spec.coordinator_port), "/") == 204


def test_a_spot_node_has_no_tunnel(node):
    """A server answers where its coordinator would be, so that a tunnel would be found."""
    link = node.link()
    spec = node.spec(role="rollout", coordinator_host="127.0.0.9")
    with coordinator_of(spec):
        link.run(spec)
        wait_until(lambda: node.here("ready.json"))
        time.sleep(5 * ssh_line.TUNNEL_SECONDS)
        assert link.tunnel(spec.coordinator_port) is None


# --- the launcher's end ---------------------------------------------------------------------------


def test_a_greeting_of_the_login_shell_is_no_trouble(node, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "Welcome to your instance"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    link = NodeLink(
        node.sshd.login, node.mirror, str(node.folder), str(python), agent_command=(sys.executable, FAKE_AGENT)
    )
    node.links.append(link)
    link.run(node.spec(role="rollout"))
    wait_until(lambda: node.here("ready.json"))
    assert link.trouble == ""


LAUNCHER = """
import sys, time
from pathlib import Path
from engine.node_spec import NodeSpec
from launcher.provision.sky import ssh_line
from launcher.provision.sky.node_link import Login, NodeLink
ssh_line.SILENCE_SECONDS = 3.0
link = NodeLink(Login(host={host!r}, user={user!r}, key=Path({key!r}), port={port}), Path({mirror!r}), {folder!r},
    sys.executable, agent_command={agent!r})
link.run(NodeSpec.model_validate_json({spec!r}))
while True:
    before = time.monotonic()
    time.sleep(0.002)
    if time.monotonic() - before > 3:
        print(link.seconds_since_message, flush=True)
"""


def launcher_of(node: Node) -> "subprocess.Popen[str]":
    """Start a launcher process that prints the silence of its node after each suspension."""
    login = node.sshd.login
    code = LAUNCHER.format(
        host=login.host,
        user=login.user,
        key=str(login.key),
        port=login.port,
        mirror=str(node.mirror),
        folder=str(node.folder),
        agent=(sys.executable, FAKE_AGENT),
        spec=node.spec().model_dump_json(),
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_suspended_launcher_does_not_count_its_gap_as_node_silence(node, sshd):
    launcher = launcher_of(node)
    try:
        wait_until(lambda: node.here("ready.json"))
        (window,) = sshd.windows()
        launcher.send_signal(signal.SIGSTOP)
        time.sleep(4)
        launcher.send_signal(signal.SIGCONT)
        assert launcher.stdout is not None
        assert float(launcher.stdout.readline()) < 2
        time.sleep(1)
        assert sshd.windows() == [window]
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_console_and_a_running_agent(node, sshd):
    launcher = launcher_of(node)
    wait_until(lambda: node.here("ready.json"))
    assert sshd.windows()
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not sshd.windows())
    agent = node.agent()
    node.link().run(node.spec())
    progress = "progress/trainer.jsonl"
    wait_until(lambda: (node.mirror / progress).exists())
    size = (node.folder / progress).stat().st_size
    wait_until(lambda: (node.mirror / progress).stat().st_size > size)
    assert node.agent() == agent
    assert (node.folder / progress).read_bytes().startswith((node.mirror / progress).read_bytes())
