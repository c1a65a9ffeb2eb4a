"""`spotrl ls`: list all runs, newest first."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.layout import print_table, print_text
from launcher.cli.output_file import check_output, say_written
from launcher.ledger.left_in_buckets import left_words, sum_words
from launcher.ledger.models import Run
from launcher.ledger.store import find_run
from launcher.money import dollars, hourly
from launcher.report.focus import write_focus
from launcher.runs.run_list import RunRow, all_rows
from launcher.runs.views import RunView, run_documents, view_of

DEAREST = 5
"""Folders in buckets that the list names. Their sum has all of them."""

_HEADING = ("run", "status", "iteration", "score", "spent", "rate", "nodes")


@click.command()
@click.option("--all", "show_all", is_flag=True, help="Include runs removed with `spotrl rm`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.option(
    "--focus",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.csv",
    help="Only write the costs of all runs, removed ones too, to this file, as rows of FOCUS 1.2 by node and hour.",
)
@click.pass_obj
def ls(sessions: sessionmaker[Session], show_all: bool, as_json: bool, focus: Path | None) -> None:
    """List all runs with their status, score and cost.

    Below the list: what finished runs left in buckets, and its price a month.

    \b
    Example:
      spotrl ls
      spotrl ls --all
      spotrl ls --focus costs.csv
    """
    if focus is not None:
        check_output(focus)
        with sessions() as session:
            say_written(write_focus(session, session.scalars(select(Run).order_by(Run.id)).all(), focus))
        return
    if as_json:
        shown = [view for view in run_documents(sessions) if show_all or not view["is_removed"]]
        click.echo(json.dumps(shown))
        return
    with sessions() as session:
        every = all_rows(session)
        rows = [row for row in every if show_all or not row.is_removed]
        views = {row.name: view_of(session, find_run(session, row.name)) for row in rows if row.is_open}
    if not every:
        click.echo("No runs yet; `spotrl launch JOB` starts one.")
        return
    if rows:
        lines = [_HEADING, *(_open(views[row.name]) if row.is_open else _settled(row) for row in rows)]
        if any(row.billed_micro_usd is not None for row in rows):
            billed = ["-" if row.billed_micro_usd is None else dollars(row.billed_micro_usd) for row in rows]
            lines = [(*line, cell) for line, cell in zip(lines, ["billed", *billed], strict=True)]
        print_table(lines)
    hidden = len(every) - len(rows)
    if hidden:
        click.echo(f"{hidden} removed {'run is' if hidden == 1 else 'runs are'} hidden; see `spotrl ls --all`")
    lonely = [view.name for view in views.values() if view.lacks_controller]
    print_text(f"{name} has no controller; start one: spotrl resume {name}" for name in lonely)
    print_text(_left_in_buckets(every))


def _left_in_buckets(rows: Sequence[RunRow]) -> Iterator[str]:
    """Yield what all runs left in buckets, removed ones too, and the dearest folders; nothing if nothing is left."""
    left = [(row.name, folder) for row in rows for folder in row.left_in_buckets if folder.bytes != 0]
    unknown = [(name, folder) for name, folder in left if folder.bytes is None]
    known = sorted(
        ((name, folder) for name, folder in left if folder.bytes is not None),
        key=lambda one: -(one[1].micro_usd_per_month or 0),
    )
    if len(known) > 1:
        runs = len({name for name, _ in known})
        yield f"{runs} run{'s' if runs > 1 else ''} left in buckets: {sum_words([folder for _, folder in left])}"
    for name, folder in [*known[:DEAREST], *(unknown if len(unknown) == 1 else [])]:
        yield f"{name} left in buckets: {left_words(folder)}"
    if len(known) > DEAREST:
        yield f"{len(known) - DEAREST} more folders in buckets: `spotrl ls --all --json`"
    if len(unknown) > 1:
        yield f"{len(unknown)} folders in buckets have an unknown size: `spotrl ls --all --json`"
    if left:
        yield "`spotrl rm RUN` deletes its files here, and prints how to delete the rest."


def _status(view: RunView) -> str:
    if view.lacks_controller:
        return f"{view.status} (no controller)"
    if view.trouble:
        return f"{view.status} (in trouble)"
    if view.learning:
        return f"{view.status} (learns nothing)"
    return f"{view.status} (removed)" if view.is_removed else view.status


def _settled(row: RunRow) -> tuple[str, ...]:
    """Return the line of a run that is over and whose nodes have ended."""
    return (
        row.name,
        f"{row.status} (removed)" if row.is_removed else row.status,
        f"{row.iteration}/{row.iterations}",
        _score(row.score, row.metric, row.reward),
        dollars(row.micro_usd),
        hourly(0),
        "0",
    )


def _score(score: float | None, metric: str, reward: float | None) -> str:
    if score is None:
        return "-" if reward is None else f"{reward:.3f} reward, in training"
    return f"{score:.3f} {metric}"


def _open(view: RunView) -> tuple[str, ...]:
    return (
        view.name,
        _status(view),
        f"{view.iteration}/{view.iterations}",
        _score(view.score, view.metric, view.reward),
        dollars(view.spent_micro_usd),
        hourly(view.micro_usd_per_hour),
        str(sum(node.is_live for node in view.nodes)),
    )
