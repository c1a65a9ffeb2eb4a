"""Serve a node's remote console: `python -m engine.node.remote_console FOLDER [AGENT COMMAND]`.

The launcher starts the console over SSH.

files of FOLDER -> JSON lines on stdout        JSON lines on stdin -> the agent, and files of FOLDER

The messages are in engine/protocol/console.py. The launcher first sends the state of its copies of appended files. Each
order is safe to repeat. Both sides send a heartbeat each second.

file_watch.py sends the files, and agent_keeper.py runs the agent. Standard library only: the console must open on a
node where nothing else works.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, assert_never

from engine.node.agent_keeper import AgentKeeper, read_json, write_json
from engine.node.alone import LAST_CONTACT, touch
from engine.node.file_watch import FileWatch
from engine.protocol.console import (
    AnnouncePreemption,
    Have,
    Heartbeat,
    Report,
    RunAgent,
    SetTimeLeft,
    Trouble,
    decode_order,
    encode_report,
)

LOOK_SECONDS = 0.1
HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 15.0
"""Seconds of silence after which the launcher counts as gone, whatever TCP reports. A returning launcher opens a new
console."""


class Lines:
    """The lines to the launcher. A line is sent whole, even if several threads send lines at the same time."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._sending = out, threading.Lock()

    def send(self, report: Report) -> None:
        line = memoryview(json.dumps(encode_report(report)).encode() + b"\n")
        with self._sending:
            self._out.write(line)
            self._out.flush()


class RemoteConsole:
    """Remote console of one folder: the messages in both directions."""

    def __init__(self, folder: Path, agent: Sequence[str], out: BinaryIO) -> None:
        """Create the console. `agent`: command that starts the agent of node.json."""
        self._folder = folder
        self._last_line = time.monotonic()
        self._lines = Lines(out)
        self.files = FileWatch(folder, self._lines.send)
        self.agent = AgentKeeper(folder, agent)

    def show(self) -> None:
        """Send changes and heartbeats, for ever."""
        last_heartbeat = 0.0
        while True:
            more = self.files.look()
            if time.monotonic() - last_heartbeat >= HEARTBEAT_SECONDS:
                last_heartbeat = time.monotonic()
                self._lines.send(Heartbeat())
            with contextlib.suppress(OSError):  # a full disk: try again at the next look
                self.agent.record_end()
            if not more:
                time.sleep(LOOK_SECONDS)

    def receive(self, line: bytes) -> None:
        """Apply one line from the launcher."""
        order = decode_order(json.loads(line))
        try:
            match order:
                case Have():
                    self.files.continue_from(order.files)
                case RunAgent():
                    self.agent.run(order.spec, order.number, order.secrets)
                case SetTimeLeft():
                    note = read_json(self._folder / "money.json")
                    if note is None or int(note.get("told", 0)) < order.number:
                        write_json(self._folder / "money.json", {"left_ms": order.left_ms, "told": order.number})
                case AnnouncePreemption():
                    note = read_json(self._folder / "notice.json")
                    if note is None or int(note["deadline_ms"]) > order.deadline_ms:
                        notice = {"deadline_ms": order.deadline_ms, "source": order.source}
                        write_json(self._folder / "notice.json", notice)
                case Heartbeat() | None:
                    pass
                case _:
                    assert_never(order)
        except OSError as error:  # a full disk: the launcher repeats the order on the next connection
            self._lines.send(Trouble(text=f"{type(order).__name__}: {error}"))
        self._last_line = time.monotonic()
        touch(self._folder / LAST_CONTACT)

    def silence(self) -> float:
        """Return the seconds since the launcher's last line."""
        return time.monotonic() - self._last_line


def main() -> None:
    """Serve until the launcher disconnects."""
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    agent = sys.argv[2:] or [sys.executable, "-P", "-m", "engine.node.agent"]
    orders = sys.stdin.buffer
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # stray prints go to stderr, not into the protocol
    console = RemoteConsole(folder, agent, out)
    have = orders.readline()
    if have:
        console.receive(have)

    def receive() -> None:
        try:
            for line in orders:
                console.receive(line)
        except Exception:
            traceback.print_exc()
        os._exit(0)

    def watch() -> None:
        while console.silence() < SILENCE_SECONDS:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    threading.Thread(target=watch, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        console.show()
    os._exit(0)


if __name__ == "__main__":
    main()
