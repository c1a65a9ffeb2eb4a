"""The launcher's side of engine/node/starter.py: one child process of a controller, which starts the agents of
nodes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from launcher.provision.local.processes import is_stopped

AGENT, PRELOADED = "engine.node.agent", "engine.entrypoints.processes"


class AgentStarter:
    """Starts agents without waiting. The starter process begins with the first agent.

    A dead or stopped (SIGSTOP) starter is replaced. A node that the old starter had not started yet is found without an
    agent, and counts as ended.
    `log`: file for the starter's errors.
    """

    def __init__(self, log: Path, agent: str = AGENT) -> None:
        self._log = log
        self._command = [sys.executable, "-P", "-m", "engine.node.starter", agent]
        if agent == AGENT:
            self._command.append(PRELOADED)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, node_file: Path) -> dict[str, Any]:
        """Order the agent of a node. Return the starter's process: {"pid", "create_time"}."""
        order = os.fsencode(node_file) + b"\n"
        if self._process is not None and is_stopped(self._process.pid):
            self._process.kill()
            self._process.wait()
        if self._process is None or self._process.poll() is not None:
            self._process = self._begin()
        try:
            self._send(self._process, order)
        except BrokenPipeError:  # the starter died just now
            self._process = self._begin()
            self._send(self._process, order)
        try:
            create_time = psutil.Process(self._process.pid).create_time()
        except psutil.NoSuchProcess:
            create_time = None
        return {"pid": self._process.pid, "create_time": create_time}

    def close(self) -> None:
        """End the starter. Started agents continue."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _begin(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is meant for the controller
            )

    def _send(self, process: subprocess.Popen[bytes], order: bytes) -> None:
        assert process.stdin is not None
        os.write(process.stdin.fileno(), order)
