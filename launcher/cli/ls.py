"""`spotrl ls`: list all runs, newest first."""

import json
from dataclasses import asdict

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.layout import print_table, print_text
from launcher.money import dollars, hourly
from launcher.runs.views import RunView, run_views


@click.command()
@click.option("--all", "show_all", is_flag=True, help="Include runs removed with `spotrl rm`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def ls(sessions: sessionmaker[Session], show_all: bool, as_json: bool) -> None:
    """List all runs with their status, score and cost.

    \b
    Example:
      spotrl ls
      spotrl ls --all
    """
    every = run_views(sessions)
    views = [view for view in every if show_all or not view.is_removed]
    hidden = len(every) - len(views)
    if as_json:
        click.echo(json.dumps([asdict(view) for view in views]))
        return
    if not every:
        click.echo("No runs yet; `spotrl launch JOB` starts one.")
        return
    if views:
        print_table([("run", "status", "iteration", "score", "spent", "rate", "nodes"), *map(_row, views)])
    if hidden:
        click.echo(f"{hidden} removed {'run is' if hidden == 1 else 'runs are'} hidden; see `spotrl ls --all`")
    lonely = [view.name for view in views if view.lacks_controller]
    print_text(f"{name} has no controller; start one: spotrl resume {name}" for name in lonely)


def _status(view: RunView) -> str:
    if view.lacks_controller:
        return f"{view.status} (no controller)"
    if view.trouble:
        return f"{view.status} (in trouble)"
    if view.learning:
        return f"{view.status} (learns nothing)"
    return f"{view.status} (removed)" if view.is_removed else view.status


def _row(view: RunView) -> tuple[str, ...]:
    score = "-" if view.score is None else f"{view.score:.3f} {view.metric}"
    if view.score is None and view.reward is not None:
        score = f"{view.reward:.3f} reward, in training"
    return (
        view.name,
        _status(view),
        f"{view.iteration}/{view.iterations}",
        score,
        dollars(view.spent_micro_usd),
        hourly(view.micro_usd_per_hour),
        str(sum(node.is_live for node in view.nodes)),
    )
