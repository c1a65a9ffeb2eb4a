"""The words of the command that runs now, as typed. `main` keeps them; `launch` and `resume` record them."""

from typing import Any

import click

_KEY = "spotrl.typed"


def keep_typed(ctx: click.Context, words: list[str]) -> None:
    """Keep the words after `spotrl` for the commands below this context."""
    ctx.meta[_KEY] = ("spotrl", *words)


def typed() -> tuple[str, ...]:
    """Return the words of this command; empty if a test or a program called the command itself."""
    found: Any = click.get_current_context().meta.get(_KEY, ())
    return tuple(found)
