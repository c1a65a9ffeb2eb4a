"""The argument RUN of most commands, with shell completion. `_SPOTRL_COMPLETE=bash_source spotrl` prints the setup."""

import sqlite3
from contextlib import closing

import click

from launcher.settings import ledger_path


def names_of_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the runs whose name starts with `incomplete`, newest first; empty if no ledger can be read."""
    try:
        with closing(sqlite3.connect(f"{ledger_path().as_uri()}?mode=ro", uri=True, timeout=1.0)) as connection:
            names = [str(name) for (name,) in connection.execute("SELECT name FROM run ORDER BY id DESC")]
    except sqlite3.Error:
        return []
    return [name for name in names if name.startswith(incomplete)]


run_argument = click.argument("run_name", metavar="RUN", shell_complete=names_of_runs)
