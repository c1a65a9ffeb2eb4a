"""`spotrl rm`: delete the local files of a finished, stopped or failed run."""

import json
from dataclasses import asdict

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cleanup.removal import count_buckets, look_at_remains, remove_run
from launcher.cli.confirm import confirm
from launcher.cli.leftovers import is_a_person
from launcher.cli.run_argument import run_argument
from launcher.ledger.left_in_buckets import left_words
from launcher.money import dollars
from launcher.runs.views import run_view
from launcher.sizes import size_text


@click.command()
@run_argument
@click.option("-y", "--yes", is_flag=True, help="Skip the confirmation before the deletion.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def rm(sessions: sessionmaker[Session], run_name: str, yes: bool, as_json: bool) -> None:
    """Delete the local files of RUN after the run's end.

    The command deletes the run's folder: logs, journals, and local checkpoints and weights. To keep the weights, copy
    them before with `spotrl pull RUN`. The records in the ledger stay: `spotrl report RUN` still works, `spotrl ls
    --all` shows the run, and the run's costs count in every limit across all runs. The run's name cannot be used
    again, and the run cannot be resumed.

    Files in buckets are not deleted; the command counts them, and prints their size, their price a month and a command
    to delete them. After that deletion, repeat `spotrl rm RUN` to count again. The command refuses a live run, and a
    run with nodes that may still cost money. After an interruption, repeat the command.

    \b
    Example:
      spotrl rm digits
      spotrl rm digits --yes --json
    """
    remains = look_at_remains(sessions, run_name)
    spent = run_view(sessions, run_name).spent_micro_usd
    if not yes and remains.folder.exists():
        if not is_a_person():
            raise click.UsageError(f"nobody can be asked here; add --yes to delete {remains.folder}")
        question = f"Delete {remains.folder} ({size_text(remains.bytes)})?"
        confirm(question, default=False, declined="Nothing was deleted.")
    is_there = remains.folder.exists()
    remove_run(sessions, run_name)
    left_in_buckets = count_buckets(sessions, run_name)
    if as_json:
        document = asdict(remains) | {"run": run_name, "folder": str(remains.folder), "spent_micro_usd": spent}
        click.echo(json.dumps(document | {"left_in_buckets": [asdict(left) for left in left_in_buckets]}))
        return
    if remains.was_removed and not is_there:
        click.echo(f"{run_name} was removed before; none of its files are here.")
    else:
        click.echo(f"Deleted {remains.folder} ({size_text(remains.bytes)}).")
    click.echo(f"The {dollars(spent)} that {run_name} cost stay in the ledger: spotrl report {run_name}")
    for left in left_in_buckets:
        click.echo(f"Left in its bucket: {left_words(left)}")
        if left.bytes != 0:
            click.echo(f"Delete it: {deletion(left.url)}")


def deletion(url: str) -> str:
    """Return the command that deletes a run's folder in a bucket."""
    tool = "aws s3 rm --recursive" if url.startswith("s3://") else "gcloud storage rm --recursive"
    return f"{tool} {url}/"
