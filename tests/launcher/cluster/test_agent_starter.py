"""The process that starts local agents: no node is lost if it dies, freezes or is late."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engine.mark import ENDING, MARK, read_exits
from launcher.provision.local.agent_starter import AgentStarter
from launcher.provision.local.processes import is_alive, is_stopped, kill_all, processes_of
from tests.launcher.cluster.stage import wait_until

AGENT = """
import json, os, sys, time
folder = os.path.dirname(sys.argv[1])
with open(os.path.join(folder, "began"), "a") as file:
    file.write(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:], "mark": os.environ["SPOTRL_NODE_FOLDER"]}) + "\\n")
time.sleep(300)
"""


@pytest.fixture
def agent(tmp_path) -> str:
    """Write the program of an agent that records its pid and keeps running."""
    file = tmp_path / "agent.py"
    file.write_text(AGENT)
    return str(file)


@pytest.fixture
def starter(tmp_path, agent):
    made = AgentStarter(tmp_path / "starter.log", agent)
    yield made
    made.close()
    for folder in tmp_path.glob("nodes/*"):
        kill_all(folder, None)


def node_of(tmp_path: Path, name: str = "a node") -> Path:
    """Create a node's folder with a space in its name."""
    folder = tmp_path / "nodes" / name
    (folder / "logs").mkdir(parents=True)
    (folder / "node.json").write_text("{}")
    return folder


def pids_of(folder: Path) -> list[int]:
    """Return the pids of the agents that started in the folder."""
    try:
        return [json.loads(line)["pid"] for line in (folder / "began").read_text().splitlines()]
    except FileNotFoundError:
        return []


def test_an_agent_is_found_by_its_mark_and_so_is_what_it_starts(tmp_path, starter):
    folder = node_of(tmp_path)
    starter.start(folder / "node.json")
    wait_until(lambda: pids_of(folder))
    (pid,) = pids_of(folder)
    assert processes_of(folder) == [pid]
    assert os.getsid(pid) == pid
    began = json.loads((folder / "began").read_text())
    assert (began["argv"], began["mark"]) == ([str(folder / "node.json")], str(folder))
    assert " ".join(psutil.Process(pid).cmdline()).split()[:2] == ["spotrl-node", "agent"]


def test_an_agent_whose_title_cannot_be_set_carries_the_mark_in_its_environment(tmp_path, agent):
    folder = node_of(tmp_path)
    (tmp_path / "setproctitle.py").write_text("def setproctitle(title): ...\ndef getproctitle(): return ''\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    made = subprocess.Popen(
        [sys.executable, "-m", "engine.node.starter", agent],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert made.stdin is not None
    made.stdin.write(os.fsencode(folder / "node.json") + b"\n")
    made.stdin.flush()
    wait_until(lambda: pids_of(folder))
    (pid,) = pids_of(folder)
    assert processes_of(folder) == [pid]
    assert psutil.Process(pid).environ()[MARK] == str(folder)
    made.stdin.close()
    assert made.wait(timeout=240) == 0
    kill_all(folder, None)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, 3])
def test_the_exit_of_an_agent_is_recorded(tmp_path, starter, agent, end):
    folder = node_of(tmp_path)
    if end == 3:
        Path(agent).write_text(AGENT.replace("time.sleep(300)", "sys.exit(3)"))
    starter.start(folder / "node.json")
    wait_until(lambda: pids_of(folder))
    (pid,) = pids_of(folder)
    if end != 3:
        os.kill(pid, end)
    wait_until(lambda: read_exits(folder))
    assert read_exits(folder) == {pid: 3 if end == 3 else -end}
    assert not psutil.pid_exists(pid)


def test_the_error_of_a_failing_agent_is_in_its_log(tmp_path, starter, agent):
    folder = node_of(tmp_path)
    Path(agent).write_text("raise RuntimeError('no such model')")
    starter.start(folder / "node.json")
    wait_until(lambda: list(read_exits(folder).values()) == [1])
    assert "no such model" in (folder / "logs" / "agent.log").read_text()


def test_a_released_node_is_not_started(tmp_path, starter):
    given_up, wanted = node_of(tmp_path, "x"), node_of(tmp_path, "y")
    (given_up / ENDING).touch()
    starter.start(given_up / "node.json")
    starter.start(wanted / "node.json")
    wait_until(lambda: pids_of(wanted))
    assert pids_of(given_up) == []


def test_agents_outlive_the_starter_and_a_new_starter_begins(tmp_path, starter):
    folder, other = node_of(tmp_path, "x"), node_of(tmp_path, "y")
    first = starter.start(folder / "node.json")
    wait_until(lambda: pids_of(folder))
    os.kill(first["pid"], signal.SIGKILL)
    wait_until(lambda: not is_alive(first["pid"], None))
    second = starter.start(other / "node.json")
    wait_until(lambda: pids_of(other))
    assert second["pid"] != first["pid"]
    assert is_alive(pids_of(folder)[0], None)


def test_without_a_controller_no_agent_is_started(tmp_path, starter):
    """The order arrived, but the controller that could end the node died before the start."""
    running, late = node_of(tmp_path, "x"), node_of(tmp_path, "y")
    begun = starter.start(running / "node.json")
    wait_until(lambda: pids_of(running))
    os.kill(begun["pid"], signal.SIGSTOP)
    wait_until(lambda: is_stopped(begun["pid"]))  # the starter may be busy when the order comes
    starter._process.stdin.write(os.fsencode(late / "node.json") + b"\n")
    starter._process.stdin.close()
    os.kill(begun["pid"], signal.SIGCONT)
    assert starter._process.wait(timeout=240) == 0
    assert pids_of(late) == []
    assert is_alive(pids_of(running)[0], None)


@pytest.mark.parametrize("frozen", [False, True], ids=["running", "SIGSTOP"])
def test_agents_keep_running_when_the_starter_ends(tmp_path, starter, frozen):
    folder = node_of(tmp_path)
    begun = starter.start(folder / "node.json")
    wait_until(lambda: pids_of(folder))
    if frozen:
        os.kill(begun["pid"], signal.SIGSTOP)
    starter.close()
    assert not psutil.pid_exists(begun["pid"])
    assert is_alive(pids_of(folder)[0], None)


def test_a_frozen_starter_is_replaced(tmp_path, starter):
    folder, other = node_of(tmp_path, "x"), node_of(tmp_path, "y")
    first = starter.start(folder / "node.json")
    wait_until(lambda: pids_of(folder))
    os.kill(first["pid"], signal.SIGSTOP)
    wait_until(lambda: is_stopped(first["pid"]))
    starter.start(other / "node.json")
    wait_until(lambda: pids_of(other))
    assert not psutil.pid_exists(first["pid"])
    assert is_alive(pids_of(folder)[0], None)


def test_a_process_that_cannot_become_an_agent_starts_nothing_else(tmp_path, starter):
    """The agent's log cannot be opened, as on a full disk."""
    folder, other = node_of(tmp_path, "x"), node_of(tmp_path, "y")
    (folder / "logs").rmdir()
    starter.start(folder / "node.json")
    starter.start(other / "node.json")
    wait_until(lambda: read_exits(folder) and pids_of(other))
    assert list(read_exits(folder).values()) == [1]
    assert len(pids_of(other)) == 1
