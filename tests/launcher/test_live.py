"""The live view: frames that fit any terminal, keys, and `spotrl attach` on a real pseudo-terminal."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from dataclasses import replace
from io import StringIO

import pyte
import pytest
from rich.console import Console

from launcher.cli.keys import TerminalKeys
from launcher.cli.live import Frame, plain_line, still_running
from launcher.controller.lease import take_lease
from launcher.decide.facts import Stage
from launcher.ledger.store import append_status, find_run, writing
from launcher.runs.views import newest_log, run_view
from tests.launcher import test_cli
from tests.launcher.cluster.stage import ledger, made_run

VIEW = replace(
    test_cli.VIEW,
    nodes=tuple(test_cli.node(f"quickstart-spot-{n}-g0") for n in range(30)),
    on_demand_micro_usd=test_cli.VIEW.spent_micro_usd + 420_000,
    preemptions=2,
    iteration_ms=30_500,
    usual_iteration_ms=61_000,
)


def drawn(frame, width=80, height=24):
    console = Console(width=width, height=height, file=StringIO(), color_system=None)
    console.print(frame)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (140, 40), (40, 12), (20, 4)])
@pytest.mark.parametrize("note", [(), ("x" * 300,) * 300], ids=["nodes", "logs"])
def test_a_frame_fits_the_terminal(size, note):
    lines = drawn(Frame(view=VIEW, rewards=[0.1] * 99, events=["y" * 300] * 5, header="z" * 300, note=note), *size)
    assert len(lines) <= size[1]
    assert max(map(len, lines)) <= size[0]
    assert lines[0].startswith("quickstart: running"[: size[0] - 1])


def test_a_lost_node_is_shown_and_does_not_count_as_running():
    lost = replace(test_cli.node("quickstart-spot-1-g0"), status="lost")
    view = replace(VIEW, nodes=(test_cli.node("quickstart-spot-0-g0"), lost))
    assert plain_line(view).endswith(", 1 node")
    assert [node.name for node in still_running(view)] == ["quickstart-spot-0-g0"]
    assert any("spot-1-g0" in line and "lost" in line for line in drawn(Frame(view=view)))


def test_a_frame_shows_progress_savings_losses_and_events():
    lines = drawn(Frame(view=VIEW, events=["one", "two"], header="on aws"), height=60)
    text = "\n".join(lines)
    for words in ("▰▰▰▰▰▱▱▱▱▱ 30s of about 1m 1s", "$0.42 less than on demand", "2 preemptions so far", "one\ntwo"):
        assert words in text
    assert lines[-1].startswith("q leave  s stop  l logs  ? help   on aws")


def test_nodes_that_do_not_fit_are_counted():
    text = "\n".join(drawn(Frame(view=VIEW, events=["one"])))
    shown = text.count("use2-az3")
    assert shown > 5
    assert f"... and {30 - shown} more nodes" in text


def test_many_nodes_leave_room_for_five_events():
    lines = drawn(Frame(view=VIEW, events=[f"event {n}" for n in range(9)]))
    assert [line for line in lines if line.startswith("event")] == [f"event {n}" for n in range(4, 9)]
    assert any("more nodes" in line for line in lines)
    small = "\n".join(drawn(Frame(view=VIEW, events=["event"]), height=14))
    assert "event" not in small


def test_a_page_shows_its_title_and_its_end():
    text = "\n".join(drawn(Frame(view=VIEW, note=("==> agent.log <==", *(f"line {n}." for n in range(200))))))
    assert "==> agent.log <==" in text
    assert "line 199." in text
    assert "line 5." not in text
    assert "line 0." in "\n".join(drawn(Frame(view=VIEW, note=("title", "line 0."))))


def test_a_log_is_shown_from_its_end(tmp_path):
    old, new = tmp_path / "demo-spot-0-g0/logs/agent.log", tmp_path / "demo-spot-1-g0/logs/agent.log"
    for number, path in enumerate((old, new)):
        path.parent.mkdir(parents=True)
        path.write_text("".join(f"{path.parent.parent.name} {line}\n" for line in range(2000)))
        os.utime(path, (number, number))
    assert newest_log([new, old], 2) == (
        "==> demo-spot-1-g0/agent.log <==",
        "demo-spot-1-g0 1998",
        "demo-spot-1-g0 1999",
    )
    assert newest_log([], 2) == ("no log yet",)


def test_one_letter_is_a_key_and_an_arrow_is_none():
    reader, writer = os.pipe()
    keys = TerminalKeys(reader)
    assert keys.wait(0.01) == ""
    os.write(writer, b"Q")
    assert keys.wait(1.0) == "q"
    os.write(writer, b"\x1b[A")
    assert keys.wait(1.0) == ""
    os.close(writer)
    assert keys.wait(0.01) == ""
    os.close(reader)


class Terminal:
    """A process on a pseudo-terminal, with an emulator that draws what the process writes."""

    def __init__(self, command, environ, columns=80, lines=24):
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self._ours, theirs = pty.openpty()
        self._size(columns, lines)
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True
        )
        os.close(theirs)
        self.written = b""

    def _size(self, columns, lines):
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns, lines):
        self.screen.resize(lines, columns)
        self._size(columns, lines)
        os.kill(self.process.pid, signal.SIGWINCH)

    def press(self, keys):
        os.write(self._ours, keys.encode())

    def until(self, *words, seconds=120.0, absent=()):
        """Read until the screen shows all words and none of the absent ones. Return its lines."""
        ends = time.monotonic() + seconds
        while True:
            text = "\n".join(self.screen.display)
            if all(word in text for word in words) and not any(word in text for word in absent):
                return self.screen.display
            assert time.monotonic() < ends, f"not shown: {words}\n{text}"
            self.read(0.1)

    def until_once(self, words):
        """Read until exactly one line of the screen shows these words."""
        ends = time.monotonic() + 120.0
        while sum(words in line for line in self.screen.display) != 1:
            assert time.monotonic() < ends, "\n".join(self.screen.display)
            self.read(0.1)

    def read(self, seconds):
        ready, _, _ = select.select([self._ours], [], [], seconds)
        if ready:
            with suppress(OSError):  # the other side is closed
                data = os.read(self._ours, 65536)
                self.written += data
                self._stream.feed(data)

    def end(self, seconds=120.0):
        """Read until the process has ended. Return its exit code."""
        ends = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < ends, "\n".join(self.screen.display)
            self.read(0.1)
        self.read(0.2)
        return self.process.returncode

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)


@pytest.fixture
def sessions(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    return ledger(tmp_path)


@pytest.fixture
def terminal(sessions, tmp_path):
    """`spotrl attach demo` on a terminal. This test process holds the run's lease, so the run has a controller."""
    run = made_run(sessions)
    with writing(sessions) as session:
        append_status(session, find_run(session, run.name), Stage.RUNNING, "", run.created_ms + 1)
    take_lease(sessions, run, f"{os.getpid()}@", os.getpid(), time.time_ns() // 1_000_000)
    environ = {**os.environ, "TERM": "xterm-256color", "SPOTRL_HOME": str(tmp_path)}
    for name in ("COLUMNS", "LINES"):
        environ.pop(name, None)
    one = Terminal([sys.executable, "-P", "-m", "launcher.cli.main", "attach", "demo"], environ)
    yield one
    one.close()


def test_a_run_is_followed_on_one_screen_that_a_resize_does_not_tear(terminal):
    terminal.until("demo: running", "q leave")
    for columns, lines in ((50, 12), (120, 30), (80, 24)):
        terminal.resize(columns, lines)
        time.sleep(0.3)
        for _ in range(15):  # two frames at least, if the computer is not busy
            terminal.read(0.1)
        for words in ("demo: running", "q leave", "iteration"):
            terminal.until_once(words)
    terminal.press("?")
    terminal.until("leave the view; the run goes on")
    terminal.press("?")
    terminal.until("demo: running", absent=("leave the view",))
    terminal.press("l")
    terminal.until("no log yet")
    terminal.press("q")
    assert terminal.end() == 0
    assert b"\x1b[?1049l" in terminal.written  # the first screen is back
    assert b"\x1b[?25h" in terminal.written  # and the cursor


def test_a_key_stops_a_run_only_after_a_question(terminal, sessions):
    terminal.until("demo: running", "q leave")
    terminal.press("s")
    terminal.until("Stop demo, and end its 0 nodes?")
    terminal.press("n")
    terminal.until("demo: running", absent=("Stop demo",))
    assert run_view(sessions, "demo").status == "running"
    terminal.press("s")
    terminal.until("Stop demo")
    terminal.press("y")
    terminal.until("Stopping demo")
    assert run_view(sessions, "demo").reason == "stopped by a key of the live view"


def test_ctrl_c_offers_to_detach(terminal, sessions):
    terminal.until("demo: running", "q leave")
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.until("continue to follow it")
    terminal.press("continue\n")
    terminal.until("demo: running", "q leave", absent=("continue to follow it",))
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.until("continue to follow it")
    terminal.press("detach\n")
    assert terminal.end() == 0
    assert run_view(sessions, "demo").status == "running"
