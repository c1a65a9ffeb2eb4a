"""Words about what a command is doing, so that no command is silent for long."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

import click
from rich.console import Console

QUIET_SECONDS = 3.0
"""Seconds of a step before a log gets a line about it. Quick steps leave no line."""

AGAIN_SECONDS = 10.0
"""Least seconds between two lines of a log about one step."""


@contextmanager
def working(out: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done until the context ends. Yields a function that changes the text.

    With "" the function ends the showing, for a step that shows its own progress.
    On a terminal the text moves in one line, which then disappears. A log gets a line after `QUIET_SECONDS`, on stderr:
    a slow machine prints the same on stdout as a quick one.
    """
    if out.is_terminal:
        with out.status(f"{text} ...") as status:
            yield lambda news: status.update(f"{news} ...") if news else status.stop()
        return
    printed_at = time.monotonic() + QUIET_SECONDS - AGAIN_SECONDS

    def say(news: str) -> None:
        nonlocal printed_at
        if news and time.monotonic() - printed_at >= AGAIN_SECONDS:
            printed_at = time.monotonic()
            click.echo(f"{news} ...", err=True)

    timer = Timer(QUIET_SECONDS, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield say
    finally:
        timer.cancel()
