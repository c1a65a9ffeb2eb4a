"""`spotrl logs`: show the logs of a run's controller and nodes, including terminated nodes."""

import json
import time
from pathlib import Path

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.run_argument import run_argument
from launcher.harmless import harmless
from launcher.runs.runs import still_running
from launcher.runs.views import log_title, node_logs

LOOK_SECONDS = 0.5


@click.command()
@run_argument
@click.option(
    "--node",
    help="Name of a node, or a slot (trainer, spot-0, ...) for all nodes of the slot. Default: the "
    "controller and all nodes.",
)
@click.option("--tail", type=click.IntRange(min=1), metavar="N", help="Only the last N lines of each file.")
@click.option("--follow", "-f", is_flag=True, help="Print new lines until the run has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per log line, one per line.")
@click.pass_obj
def logs(
    sessions: sessionmaker[Session], run_name: str, node: str | None, tail: int | None, follow: bool, as_json: bool
) -> None:
    """Show the logs of RUN's controller and nodes, file by file.

    With --follow, the successor of a replaced node is followed too, if you name its slot or no node.

    \b
    Example:
      spotrl logs digits --node trainer --tail 50 --follow
    """
    offsets: dict[Path, int] = {}
    shown: Path | None = None
    while True:
        is_over = not follow or not still_running(sessions, run_name)
        for path in node_logs(sessions, run_name, node):
            lines = _fresh(path, offsets, is_over)
            lines = lines[-tail:] if tail is not None else lines
            if lines and not as_json and path != shown:
                click.echo(f"==> {log_title(path)} <==")
            for line in lines:
                click.echo(json.dumps({"file": log_title(path), "line": line}) if as_json else harmless(line))
            shown = path if lines else shown
        tail = None
        if is_over:
            return
        time.sleep(LOOK_SECONDS)


def _fresh(path: Path, offsets: dict[Path, int], is_over: bool) -> list[str]:
    """Return the lines since the last call. While the run goes on, a line without its end is left for later."""
    with path.open("rb") as file:
        file.seek(offsets.get(path, 0))
        text = file.read()
    text = text if is_over else text[: text.rfind(b"\n") + 1]
    offsets[path] = offsets.get(path, 0) + len(text)
    return text.decode(errors="replace").splitlines()
