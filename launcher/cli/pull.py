"""`spotrl pull`: the trained weights of a run, copied out of its checkpoint store."""

import json
from pathlib import Path

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.ledger.store import find_run
from launcher.report.weights import pull_weights


@click.command()
@click.argument("run_name", metavar="RUN")
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), help="Folder; without it, ./RUN-weights.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def pull(sessions: sessionmaker[Session], run_name: str, to: Path | None, as_json: bool) -> None:
    """Copy the trained weights of RUN's newest complete checkpoint to a folder.

    weights.safetensors is what training goes on from; ema.safetensors is their average, which evaluations use.

    \b
    Example:
      spotrl pull digits-ocr --to weights
    """
    with sessions() as session:
        run = find_run(session, run_name)
        name, store = run.name, Path(run.folder) / "store"
    pulled = pull_weights(name, store, to or Path(f"{name}-weights"))
    if as_json:
        files = [{"path": str(file.path), "sha256": file.sha256} for file in pulled.files]
        click.echo(
            json.dumps({"run": name, "checkpoint": pulled.checkpoint, "iteration": pulled.iteration, "files": files})
        )
        return
    click.echo(f"iteration {pulled.iteration}, checkpoint {pulled.checkpoint}")
    for file in pulled.files:
        click.echo(f"{file.sha256}  {file.path}")
