"""The process that forks local agents, started as its controller starts it."""

import os
import subprocess
import sys
import time

from engine.mark import MARK

AGENT = "import pathlib, sys; pathlib.Path(sys.argv[1]).with_name('began').touch()"

LATE_SECONDS = 1.0
"""A forked agent has written its file by then."""


def test_an_order_of_a_controller_that_is_gone_starts_no_agent(tmp_path):
    """The order and the end of the pipe arrive together, so the starter sees both in one look."""
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    node = tmp_path / "node"
    (node / "logs").mkdir(parents=True)
    (node / "node.json").write_text("{}")
    command = [sys.executable, "-m", "engine.node.starter", str(agent)]
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as starter:
        assert starter.stdin is not None
        starter.stdin.write(os.fsencode(node / "node.json") + b"\n")
        starter.stdin.close()
        assert starter.wait(240) == 0
    time.sleep(LATE_SECONDS)
    assert not (node / "began").exists()
