"""`spotrl check-reward`: sample some images of a job, score them, and say what scoring costs."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.checks.preflight import check_secrets
from launcher.checks.reward_check import RewardCheck, score_some
from launcher.cli.launch import overrides
from launcher.cli.layout import fitted, print_table
from launcher.cli.output_file import check_output
from launcher.exit_codes import ExitCode
from launcher.job.checked import CheckedJob
from launcher.job.load import load_job
from launcher.money import dollars
from launcher.runs.start import find_start
from launcher.settings import config_path, home


@click.command("check-reward")
@click.argument("job", type=click.Path(path_type=Path))
@click.option(
    "--images",
    type=click.IntRange(2, 1000),
    default=10,
    show_default=True,
    help="Number of images to sample and score.",
)
@click.option(
    "--sheet", type=click.Path(dir_okay=False, path_type=Path), help="PNG to write (default: ./NAME-reward.png)."
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Set a field of the job, like reward.placed=pool. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def check_reward(
    sessions: sessionmaker[Session],
    job: Path,
    images: int,
    sheet: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> ExitCode:
    """Score ten images of JOB on this machine, before a run.

    The images are sampled with the weights that training starts from, for prompts of the first batch. The command
    writes them to a sheet, each under its score, times sampling and scoring, and says which of both a worker waits
    for. A judge with a price is paid for these images. Exit code 1: no image has a score.

    \b
    Example:
      spotrl check-reward job.yaml
      spotrl check-reward job.yaml --images 4 --set reward=ocr_strict --json
    """
    checked = load_job(job, overrides({}, settings), environ=os.environ, user_config=config_path())
    check_secrets(checked, os.environ)
    file = (sheet or Path(f"{checked.job.name}-reward.png")).absolute()
    check_output(file)
    home().mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".start-", dir=home()) as place:
        start = None if checked.job.model.start is None else find_start(sessions, checked, Path(place)).file
        rate = _micro_usd_per_gpu_hour(sessions, checked) if checked.job.clouds else None
        found = score_some(checked, images=images, sheet=file, start=start, micro_usd_per_gpu_hour=rate)
    if as_json:
        click.echo(json.dumps({"name": checked.job.name, **asdict(found)}))
    else:
        _print(checked, found)
    return ExitCode.FAILURE if found.unscored == len(found.images) else ExitCode.OK


def _micro_usd_per_gpu_hour(sessions: sessionmaker[Session], checked: CheckedJob) -> float:
    """Return the price of a GPU of the plan's first rollout node; of the trainer, if there is none."""
    from launcher.job.resolved import resolve_checked
    from launcher.market.offers import current_catalog
    from launcher.services.fleets import with_fleet_chosen
    from launcher.services.planning import cloud_plan  # imports numpy and the planner

    catalog, now_ms = current_catalog(home() / "catalogs"), time.time_ns() // 1_000_000
    checked, _ = with_fleet_chosen(sessions, checked, catalog, now_ms)
    plan = cloud_plan(sessions, resolve_checked(checked), catalog, now_ms).as_plan()
    slots = [slot for slot in plan.slots if slot.role == "rollout"] or list(plan.slots)
    return slots[0].placement.micro_usd_per_hour / slots[0].placement.gpus


def _print(checked: CheckedJob, found: RewardCheck) -> None:
    names = sorted({name for image in found.images for name in image["metrics"]})
    rows = [
        (
            image["prompt"],
            str(image["seed"]),
            _number(image["reward"]),
            *(_number(image["metrics"].get(n)) for n in names),
        )
        for image in found.images
    ]
    print_table([("prompt", "seed", "reward", *names), *rows])
    for line in fitted(_sentences(checked, found)):
        click.echo(line)


def _sentences(checked: CheckedJob, found: RewardCheck) -> Iterator[str]:
    reward = checked.job.reward
    yield ""
    if found.unscored:
        yield (
            f"{found.unscored} of {len(found.images)} images have no score. The groups of such images are not trained, "
            "and three in a row stop a run."
        )
        yield from found.printed
    for warning in found.warnings:
        yield f"Warning: {warning}."
    yield f"Sampling an image takes {_ms(found.sampling_ms)} on {found.device}."
    yield f"Scoring an image takes {_ms(found.score_ms)}; the first took {_ms(found.first_score_ms)}."
    if found.bottleneck == "sampling":
        yield "Sampling is the bottleneck: a worker scores while it samples, so scoring costs no node time."
    else:
        yield (
            "Scoring is the bottleneck: workers wait for scores. "
            + (
                "Use reward.placed: pool with more reward.pool.processes."
                if all(one.http is None and one.vlm is None for one in reward.scorers)
                else "Use a faster server, or reward.placed: http if the server scores requests in parallel."
            )
        )
    if found.judge_micro_usd:
        yield (
            f"The judges cost {dollars(found.judge_micro_usd)} for these images. The {found.run_images:,} trained "
            f"images of the run would cost {dollars(found.run_judge_micro_usd)}, and more with exploration."
        )
    if found.run_node_micro_usd is not None:
        yield (
            f"Waiting for scores would cost {dollars(found.run_node_micro_usd)} of rollout nodes, if nodes are as fast "
            "as this machine."
        )
    yield f"Look at the images: {found.sheet}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _ms(value: float) -> str:
    return f"{value / 1000:.1f} s" if value >= 1000 else f"{value:.1f} ms"
