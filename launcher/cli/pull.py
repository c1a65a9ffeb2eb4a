"""`spotrl pull`: copy the trained weights and metrics of a run from its stores."""

import json
from pathlib import Path

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.run_argument import run_argument
from launcher.exit_codes import Failure
from launcher.ledger.store import check_kept, find_run
from launcher.report.build import build_report
from launcher.report.card import CARD, CURVE, model_card
from launcher.report.diffusers_files import FULL_FOLDER, LORA_FILE, write_for_diffusers
from launcher.report.values import Report
from launcher.report.weights import check_folder, pull_metrics, pull_weights, write_pulled_manifest
from launcher.runs.run_buckets import buckets_of
from launcher.storage.stores import run_stores


@click.command()
@run_argument
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), help="Output folder (default: ./RUN-weights).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def pull(sessions: sessionmaker[Session], run_name: str, to: Path | None, as_json: bool) -> None:
    """Copy the trained weights of RUN to a folder of their own.

    The weights come from the newest complete checkpoint. For a run on a cloud, the checkpoint is in the run's bucket.
    A second pull of the same run replaces the files of the first. A folder with a manifest.json or README.md of
    another origin is refused.

    weights.safetensors holds the weights for further training. ema.safetensors holds the moving average, used by
    evaluations. The average is also written for diffusers: as pytorch_lora_weights.safetensors (`load_lora_weights`),
    or, if the engine is installed, as the folder transformer (`from_pretrained`).

    manifest.json names the run and the checkpoint. A job with `model: {name: ..., from: ./FOLDER}` starts from the
    weights in FOLDER.

    README.md is a model card with the job, the curve of the metric, the cost and loading instructions.

    For a run on a cloud, metrics/NODE holds metrics.jsonl and TensorBoard's files of each trainer node.

    \b
    Example:
      spotrl pull digits-ocr --to weights
    """
    with sessions() as session:
        run = find_run(session, run_name)
        if not buckets_of(run):
            check_kept(session, run)
        report = build_report(session, run, run.clock.now_ms())
    name, folder = run.name, to or Path(f"{run.name}-weights")
    check_folder(folder, name, (CARD, CURVE, FULL_FOLDER, LORA_FILE))
    stores = run_stores(run.infra, run.job.get("store") or {}, name, Path(run.folder))
    pulled = pull_weights(name, stores, folder)
    write_pulled_manifest(folder, name, run.job.get("model") or {}, pulled)
    metrics = pull_metrics(name, stores, folder)
    for_diffusers = None
    try:
        for_diffusers = write_for_diffusers(folder / "ema.safetensors", run.model)
    except Failure as failure:
        click.echo(f"The weights are there, but not for diffusers: {failure}", err=True)
    card = write_card(folder, model_card(report, run.job, pulled, str(folder), for_diffusers is not None), report)
    if as_json:
        files = [{"path": str(file.path), "sha256": file.sha256} for file in pulled.files]
        about = {"run": name, "checkpoint": pulled.checkpoint, "iteration": pulled.iteration, "files": files}
        about |= {"diffusers": for_diffusers and str(for_diffusers), "card": str(card)}
        click.echo(json.dumps({**about, "metrics": [str(path) for path in metrics]}))
        return
    click.echo(f"iteration {pulled.iteration}, checkpoint {pulled.checkpoint}")
    for file in pulled.files:
        click.echo(f"{file.sha256}  {file.path}")
    if for_diffusers is not None:
        click.echo(f"for diffusers: {for_diffusers}")
    click.echo(f"what they reached, and how to load them: {card}")
    if metrics:
        click.echo(f"{len(metrics)} files of metrics in {folder / 'metrics'}")


def write_card(folder: Path, card: str, report: Report) -> Path:
    """Write the model card and an SVG chart of the reward, and return the path of the card.

    The card of a run without evaluations has no chart.
    """
    if report.curve:
        from launcher.report.charts import reward_chart  # the charts' libraries take a second to import

        (folder / CURVE).write_text(reward_chart(report).svg, encoding="utf-8")
    (folder / CARD).write_text(card, encoding="utf-8")
    return folder / CARD
