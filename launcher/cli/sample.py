"""`spotrl sample`: generate images with a run's trained weights for your own prompts."""

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from sqlalchemy.orm import Session, sessionmaker

from engine.config import EvaluationConfig
from launcher.cli.run_argument import run_argument
from launcher.engine_process import engine_command, engine_failure
from launcher.ledger.store import check_kept, find_run
from launcher.report.weights import pull_weights
from launcher.runs.run_buckets import buckets_of
from launcher.runs.start import copy_start
from launcher.storage.stores import run_stores


@click.command()
@run_argument
@click.argument("prompts", metavar="PROMPT...", nargs=-1, required=True)
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), help="Output folder (default: ./RUN-samples).")
@click.option(
    "--seed", type=click.IntRange(0, 2**62), default=0, show_default=True, help="First noise seed of each prompt."
)
@click.option(
    "--count",
    type=click.IntRange(1, 10_000),
    default=1,
    show_default=True,
    help="Images per prompt, with consecutive seeds.",
)
@click.option(
    "--steps", type=click.IntRange(1, 1000), help="Denoising steps per image (default: the job's evaluation.steps)."
)
@click.option("--base", is_flag=True, help="Use the model before training: the base model, or the run's start weights.")
@click.option(
    "--model",
    "model_folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the base model on this machine (default: the job's model.path, from any folder).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def sample(
    sessions: sessionmaker[Session],
    run_name: str,
    prompts: tuple[str, ...],
    to: Path | None,
    seed: int,
    count: int,
    steps: int | None,
    base: bool,
    model_folder: Path | None,
    as_json: bool,
) -> None:
    """Generate images with the trained weights of RUN.

    The weights are the EMA weights of the newest complete checkpoint, as used by evaluations. Images are generated on
    this machine with the sampler of evaluations: equal prompts, seeds and weights give equal images.

    A file is named after the prompt's number and the seed: 001-seed0.png, or 001-seed0-base.png with --base. Videos
    become animated PNG files.

    \b
    Example:
      spotrl sample digits-ocr 1234 0077 --count 4 --to images
      spotrl sample digits-ocr 1234 0077 --count 4 --to images --base
    """
    command = engine_command("engine.entrypoints.sample")
    with sessions() as session:
        run = find_run(session, run_name)
        if not buckets_of(run) and not base:
            check_kept(session, run)
    folder = (to or Path(f"{run.name}-samples")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    job = run.job
    model = run.model.model_dump(mode="json")
    if model_folder is not None:
        model["path"] = str(model_folder.absolute())
    wanted = [
        {
            "prompt": prompt,
            "seed": seed + more,
            "file": str(folder / f"{number:03}-seed{seed + more}{'-base' * base}.png"),
        }
        for number, prompt in enumerate(prompts, 1)
        for more in range(count)
    ]
    with tempfile.TemporaryDirectory(prefix=".weights-", dir=folder) as place:
        pulled, weights, what = None, None, "the base model"
        stores = run_stores(run.infra, job.get("store") or {}, run.name, Path(run.folder))
        if not base:
            pulled = pull_weights(run.name, stores, Path(place), ["ema.safetensors"])
            weights = pulled.files[0].path
            what = f"iteration {pulled.iteration}, checkpoint {pulled.checkpoint}"
        elif model.get("from"):
            weights = copy_start(stores, Path(place) / "start.safetensors")
            what = f"the start weights ({model['from']})"
        request = {
            "model": model,
            "sampler": job.get("sampler") or {},
            "steps": steps or EvaluationConfig.model_validate(job.get("evaluation") or {}).steps,
            "weights": weights and str(weights),
            "images": wanted,
        }
        if not as_json:
            click.echo(f"{what}; loading it", err=True)
        for number, _ in enumerate(drawn(command, request)):
            if not as_json:
                image = wanted[number]
                click.echo(f"{image['file']}  {image['prompt']}")
    if as_json:
        checkpoint = {"checkpoint": pulled and pulled.checkpoint, "iteration": pulled and pulled.iteration}
        click.echo(json.dumps({"run": run.name, **checkpoint, "steps": request["steps"], "pictures": wanted}))


def drawn(command: list[str], request: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each written image. Raises Failure with the engine's error message."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # the engine ended early; stderr has the error
                process.stdin.write(json.dumps(request))
                process.stdin.close()
            yield from process.stdout
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
        if process.returncode:
            errors.seek(0)
            raise engine_failure(errors.read(), process.returncode)
