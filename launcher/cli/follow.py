"""Follow a run from `spotrl launch` or `spotrl attach` until its end, or until an interruption.

A key, Ctrl-C, a lost terminal or an error ends the following. In each case the last lines name the nodes that still
run, and the command that stops the run.
"""

import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from sqlalchemy.orm import Session, sessionmaker

from engine.events import IterationDone, Regrouped
from launcher.cli.keys import Keys, NoKeys, keys_of_terminal
from launcher.cli.live import ENDED, HELP, Frame, money_text, plain_line, score_text
from launcher.cli.live import still_running as still_running_nodes
from launcher.cli.plan_text import header, plan_dict
from launcher.cli.status import event_text
from launcher.exit_codes import ExitCode, Failure
from launcher.job.checked import CheckedJob
from launcher.job.schema import Job
from launcher.ledger.left_in_buckets import left_words
from launcher.ledger.store import find_run
from launcher.money import dollars
from launcher.placement.plan import Plan
from launcher.runs.event_lines import EventLine, Seen, new_events
from launcher.runs.runs import (
    bring_down,
    create_run,
    release_seconds,
    request_stop,
    running_processes,
    start_controller,
    still_running,
    wait_released,
)
from launcher.runs.views import RunView, newest_log, node_logs, run_view

LOOK_SECONDS = 0.5
"""Seconds between reads of the ledger. A read is one short query on this machine."""

QUIET_SECONDS = 30.0
"""Longest time without a line in a log. A log also gets a line after every change."""

ALONE_SECONDS = 10.0
"""Seconds without a controller until `launch` starts a new controller: the lease has expired without a successor."""

SETTLE_SECONDS = 5.0

CHOICES = ("d", "c", "s", "detach", "continue", "stop")

CHOICES_TEXT = "d: detach, and let it run; c: continue to follow it; s: stop it.\nCtrl-C again detaches."

RECENT_EVENTS = 5
"""Events that the screen shows at most, and events before the start of following that a log begins with."""

LOG_LINES = 200
"""Lines read from the end of a log; the screen shows as many as fit."""


def exit_code(view: RunView) -> ExitCode:
    """Return the exit code for the final status and reason of a run."""
    match view.status, view.reason.partition(":")[0].strip():
        case "finished", _:
            return ExitCode.DEADLINE_MISSED if view.missed_deadline else ExitCode.OK
        case "stopped", "budget":
            return ExitCode.STOPPED_BY_BUDGET
        case "stopped", "deadline" | "max_runtime":
            return ExitCode.DEADLINE_MISSED
        case _:
            return ExitCode.FAILURE


class Hangup(Exception):
    """The terminal was closed (SIGHUP)."""


class Terminated(Exception):
    """This command received SIGTERM."""


class NoController(Failure):
    """The followed run has no controller, so nothing happens in it."""


class Left(Exception):
    """The user left the view with a key; the run goes on."""


class StopAsked(Exception):
    """The user stopped the run with a key, and confirmed it."""


@dataclass(kw_only=True)
class Follow:
    """State of following a run: the output, the answer to an interruption, and what is shown so far."""

    name: str
    out: Console
    on_exit: str
    release_seconds: float
    restarts_controller: bool = True
    rewards: list[float] = field(default_factory=list)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT_EVENTS))
    seen: Seen = field(default_factory=Seen)
    keys: Keys = field(default_factory=NoKeys)
    shows: str = ""
    """The pressed key whose page is shown in place of nodes and events: `l`, `?`, `s`; "" for none."""
    interrupt_pending: bool = False
    """True from a Ctrl-C until it is answered. Python drops an exception that comes while an object is deleted."""

    def until_it_ends(self, sessions: sessionmaker[Session], header: str) -> RunView:
        """Show the run until its end. Raises Left and StopAsked for keys.

        Without a terminal, print a line for each event and for each iteration.
        """
        if self.out.is_terminal:
            return self._on_screen(sessions, header)
        last: tuple[str, int] | None = None
        printed = 0.0
        for view in self._views(sessions):
            lines, self.seen = events_after(sessions, self.name, self.seen)
            for line in lines if last is not None else lines[-RECENT_EVENTS:]:
                if line.kind != IterationDone.KIND:  # the line of the iteration says more
                    self.say(event_text(line, self.name))
            news = (view.status, view.iteration)
            if news != last or time.monotonic() - printed > QUIET_SECONDS:
                self.say(plain_line(view))
                last, printed = news, time.monotonic()
        return view

    def _on_screen(self, sessions: sessionmaker[Session], header: str) -> RunView:
        """Draw on the terminal's second screen, which a resize cannot tear, and leave the last view on the first."""
        with keys_of_terminal() as self.keys:
            try:
                with Live(console=self.out, auto_refresh=False, screen=True) as live:
                    for view in self._views(sessions):
                        self._read_events(sessions)
                        frame = Frame(
                            view=view,
                            rewards=self.rewards,
                            events=tuple(self.events),
                            header=header,
                            note=self._page(sessions, view),
                        )
                        live.update(frame, refresh=True)
            finally:
                self.keys = NoKeys()
        self.say(plain_line(view))
        return view

    def _read_events(self, sessions: sessionmaker[Session]) -> None:
        lines, self.seen = events_after(sessions, self.name, self.seen)
        self.events.extend(event_text(line, self.name) for line in lines)

    def _page(self, sessions: sessionmaker[Session], view: RunView) -> tuple[str, ...]:
        match self.shows:
            case "?":
                return HELP
            case "l":
                return newest_log(node_logs(sessions, self.name), LOG_LINES)
            case "s":
                count = len(still_running_nodes(view))
                return ("", f"Stop {self.name}, and end its {count} nodes? y stops the run; any other key goes on.")
            case _:
                return ()

    def _press(self, key: str) -> None:
        """Act on a key. Raises Left and StopAsked."""
        if self.shows == "s":
            self.shows = ""
            if key == "y":
                raise StopAsked
        elif key == "q":
            raise Left
        elif key in ("s", "l", "?"):
            self.shows = "" if key == self.shows else key

    def _views(self, sessions: sessionmaker[Session]) -> Iterator[RunView]:
        """Yield views of the run until the run has ended; the last view shows the end. Restart a dead controller."""
        iteration, alone_since = -1, None
        while True:
            view = run_view(sessions, self.name)
            if view.reward is not None and view.iteration != iteration:
                self.rewards.append(view.reward)
                iteration = view.iteration
            yield view
            if view.status in ENDED:
                return
            alone_since = None if view.controlled else alone_since or time.monotonic()
            if alone_since is not None and time.monotonic() - alone_since > ALONE_SECONDS:
                if not self.restarts_controller:
                    raise NoController(f"{self.name} has no controller; start one: spotrl resume {self.name}")
                self.say(f"{self.name} has lost its controller; starting another")
                start_controller(sessions, self.name)
                alone_since = None
            if key := self.keys.wait(LOOK_SECONDS):
                self._press(key)
            if self.interrupt_pending:
                raise KeyboardInterrupt

    def say(self, text: str) -> None:
        """Print a line. After the first failed write to a lost terminal, discard all output."""
        try:
            self.out.print(text, highlight=False, markup=False, soft_wrap=True)
        except OSError:
            self.out = Console(file=open(os.devnull, "w"))  # noqa: SIM115


def events_after(sessions: sessionmaker[Session], name: str, seen: Seen) -> tuple[list[EventLine], Seen]:
    """Return the new events, without changes of groups, and what to pass as `seen` next time."""
    with sessions() as session:
        lines, seen = new_events(session, find_run(session, name), seen)
    return [line for line in lines if line.kind != Regrouped.KIND], seen


def start_and_follow(
    sessions: sessionmaker[Session],
    checked: CheckedJob,
    plan: Plan,
    follow: Follow,
    detach: bool,
    files: Mapping[str, Path | None],
    start: Callable[[sessionmaker[Session], str], object],
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Create the run, start its controller and follow the run. Return the object printed by `--json`."""
    name = create_run(sessions, checked, plan, follow.name, command)
    code = ExitCode.FAILURE
    try:
        with signals():
            started = start(sessions, name)
            if isinstance(started, Path):
                follow.say(f"{started} restarts its controller; past your logout only with `loginctl enable-linger`.")
            if detach:
                follow.say(f"{name} has started. See it: spotrl attach {name}, spotrl status {name}")
                code = ExitCode.OK
            else:
                code = watch(sessions, follow, header(checked.job, plan))
    except KeyboardInterrupt:  # during the start
        code = interrupted(sessions, follow) or ExitCode.OK
    except Terminated:
        code = interrupted(sessions, follow, may_ask=False) or ExitCode.OK
    except Hangup:
        code = ExitCode.OK  # the run continues; only following ended
    except BaseException:
        if follow.on_exit == "down":
            stop(sessions, follow, "launch failed")
        raise
    finally:
        view = run_view(sessions, name)
        if view.status in ENDED:
            _settle(sessions, follow, checked.job)
        left = still_running(sessions, name)
        for line in last_words(view, left):
            follow.say(line)
        _write_files(sessions, name, **files)
    if view.status in ENDED and left:
        code = ExitCode.TEARDOWN_INCOMPLETE
    return {"started": True, "exit_code": int(code), "still_running": left, "plan": plan_dict(plan), **asdict(view)}


def _settle(sessions: sessionmaker[Session], follow: Follow, job: Job) -> None:
    """Wait for the cleanup after the run's end: the last local process, or the resources made for cloud nodes.

    The cleanup takes minutes at worst. Ctrl-C ends the waiting; the cleanup continues.
    """
    if not job.clouds:
        wait_released(sessions, follow.name, SETTLE_SECONDS)
    elif left := still_running(sessions, follow.name):
        follow.say(f"{follow.name} is over; waiting until these are gone: {', '.join(left)}")
        with suppress(KeyboardInterrupt):
            bring_down(sessions, follow.name, release_seconds(job.infra))


def watch(sessions: sessionmaker[Session], follow: Follow, header: str) -> ExitCode:
    """Follow the run until it ends or the user leaves or stops it. Return the command's exit code."""
    while True:
        try:
            with interrupts(follow):
                return exit_code(follow.until_it_ends(sessions, header))
        except KeyboardInterrupt:
            code = interrupted(sessions, follow)
            if code is not None:
                return code
        except Left:
            return ExitCode.OK
        except StopAsked:
            return _stopped(stop(sessions, follow, "stopped by a key of the live view"))


def interrupted(sessions: sessionmaker[Session], follow: Follow, may_ask: bool = True) -> ExitCode | None:
    """Keep or stop the run after an interruption. Return None if the user wants to go on following.

    A second Ctrl-C, or the end of input, detaches: what was trained is never lost by a habit. Without a user to ask,
    stop the run, because a stopped run costs nothing more.
    """
    choice = follow.on_exit
    if choice == "ask":
        choice = "down"
        if may_ask and can_ask():
            click.echo(f"\n{follow.name} is running. {CHOICES_TEXT}", err=True)
            try:
                answer = click.prompt("d, c or s", type=click.Choice(CHOICES), show_choices=False, err=True)
                choice = {"d": "keep", "c": "continue", "s": "down"}[answer[0]]
            except (click.Abort, KeyboardInterrupt):
                choice = "keep"
    if choice == "continue":
        return None
    if choice == "keep":
        return ExitCode.OK
    return _stopped(stop(sessions, follow, "stopped by Ctrl-C" if may_ask else "launch was terminated"))


def _stopped(is_complete: bool) -> ExitCode:
    return ExitCode.INTERRUPTED if is_complete else ExitCode.TEARDOWN_INCOMPLETE


def stop(sessions: sessionmaker[Session], follow: Follow, reason: str) -> bool:
    """Stop the run. Return True if every node was released in time."""
    request_stop(sessions, follow.name, reason)
    follow.say(f"Stopping {follow.name} (Ctrl-C again: do not wait) ...")
    try:
        return not bring_down(sessions, follow.name, follow.release_seconds)
    except KeyboardInterrupt:
        return False


def last_words(view: RunView, left: Sequence[str]) -> Iterator[str]:
    """Yield the last lines of every `launch`: the run's status, the running nodes, and the command to stop the run."""
    if view.status in ENDED:
        why = f" ({view.reason})" if view.reason else ""
        at = f" at {view.prices}" if view.prices else ""
        yield f"{view.name} {view.status}{why}: {score_text(view)}; {dollars(view.spent_micro_usd)} spent{at}."
    for folder in view.left_in_buckets:
        if folder.bytes != 0:
            yield f"Left in buckets: {left_words(folder)}."
    if view.resume_with:
        yield f"Go on with more money: {view.resume_with}"
    if left:
        yield f"Still running: {', '.join(left)}; {money_text(view)}."
        yield f"Stop it: spotrl down {view.name}"
    else:
        yield f"Nothing of it runs any more. See it: spotrl report {view.name}"


@contextmanager
def interrupts(follow: Follow) -> Iterator[None]:
    """Keep each Ctrl-C in `follow` too, so that none is lost."""

    def interrupt(number: int, frame: Any) -> None:
        follow.interrupt_pending = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        follow.interrupt_pending = False
        signal.signal(signal.SIGINT, before)


@contextmanager
def signals() -> Iterator[None]:
    """Turn SIGHUP and SIGTERM into exceptions while following the run."""

    def hang_up(number: int, frame: Any) -> None:
        silence = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # a write to the lost terminal would raise an error
            os.dup2(silence, stream)
        raise Hangup

    def terminate(number: int, frame: Any) -> None:
        raise Terminated

    before = {
        signal.SIGHUP: signal.signal(signal.SIGHUP, hang_up),
        signal.SIGTERM: signal.signal(signal.SIGTERM, terminate),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def can_ask() -> bool:
    """Return True if a user at a terminal can answer questions."""
    return sys.stdin.isatty()


def _write_files(sessions: sessionmaker[Session], name: str, *, result: Path | None, html: Path | None) -> None:
    """Write result.json and the HTML report, also for a failed run: users need both files most after a failure."""
    if not (result or html):
        return
    from launcher.cli.report import image_reader
    from launcher.report.build import build_report
    from launcher.report.html import render_html
    from launcher.report.result import result_dict

    with sessions() as session:
        run = find_run(session, name)
        if result:
            _write(result, json.dumps(result_dict(session, name, running_processes(run)), indent=2) + "\n")
        if html:
            report = build_report(session, run, run.clock.now_ms())
            _write(html, render_html(report, image_reader(run)))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise Failure(f"{path} cannot be written ({error.strerror}); the run's facts are in the ledger") from None
