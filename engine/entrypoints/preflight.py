"""Check the job's own code before a purchase.

    python -m engine.entrypoints.preflight ENGINE_JSON WORKDIR [START]

The check reads the prompts, loads start weights (the file START) into the model and encodes some prompts with the
model. Next, the check imports the reward, calls the reward once on one image, measures this machine's speed and prints
the findings in one JSON line. Exit code 0: fine; 3: {"field", "found", "remedy"}. The check runs in a separate process,
so the launcher never loads torch.
"""

import importlib.util
import json
import math
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.config import DRIFT, SHIPPED, EngineConfig, TargetConfig
from engine.diffusion.sampler import evaluation_plan, initial
from engine.entrypoints.prompt_warnings import TokenizerError, prompt_warnings
from engine.installation import install_command
from engine.model_folder import FolderError, check_folder
from engine.models.adapter import DiTAdapter
from engine.models.load import load_adapter, load_start, trainable
from engine.parallel.ulysses import problem_with_degree
from engine.prompts import FilePrompts, PromptSource, prompt_source
from engine.protocol.request import Score
from engine.rewards.load import load_reward_of_job, load_student
from engine.rewards.scorable import scores_of, unsound
from engine.storage.tensor_files import Stored

READ_AT_ONCE = 512
"""Prompts per encode call of a shipped model, so a large file takes little memory."""

TOLD_EVERY = 100 * READ_AT_ONCE
"""Prompts between two words on the progress."""


def tell(news: str) -> None:
    """Print what is being done now, as a JSON line for `launcher.checks.preflight`."""
    print(json.dumps({"progress": news}), flush=True)


class JobUnfit(Exception):
    """Failure of a field of the job. `found` describes the failure, `remedy` the correction."""

    def __init__(self, field: str, found: str, remedy: str) -> None:
        super().__init__(found)
        self.field, self.found, self.remedy = field, found, remedy


def check(config: EngineConfig, workdir: str | None, start: Path | None = None) -> dict[str, object]:
    """Run all checks and return the findings to display. Raises JobUnfit."""
    if config.runtime.name == "ray" and importlib.util.find_spec("ray") is None:
        remedy = f"`{install_command('ray')}`, or use runtime: local"
        raise JobUnfit("runtime", "runtime is ray, which is not installed here", remedy)
    try:
        prompts = prompt_source(config, workdir)
        batch, held_out = prompts.batch(0), prompts.held_out()
        prompt = batch[0]
    except (ValueError, OSError) as error:
        shipped = ", ".join(f"`{name}`" for name in SHIPPED.values())
        raise JobUnfit("prompts", str(error), f"give {shipped}, or a text file with one prompt a line") from error
    tell(f"loading {config.model.name}")
    adapter = _load_model(config, start)
    tell("looking for prompts that are cut or cannot be read")
    warnings = _warnings(config, prompts)
    # A shipped model encodes prompts at once; a large model's text encoder may take seconds per prompt.
    trained = prompts.trained if isinstance(prompts, FilePrompts) else batch
    _encode(adapter, config, [*trained, *held_out] if config.model.name in SHIPPED else [prompt])
    tell(f"trying the reward {config.reward.name} on one image")
    steps = evaluation_plan(config.sampler, config.evaluation.steps, adapter.schedule).steps
    score = _score_once(config, workdir, adapter.decode(initial([0], adapter.latent_shape())), prompt)
    _score_by_student(config, workdir, adapter.decode(initial([0], adapter.latent_shape())), prompt)
    metrics = sorted({"reward", *score.metrics})
    _check_target(config.target, metrics)
    return {
        "prompt": prompt,
        "held_out": len(held_out),
        "reward": score.reward,
        "metrics": metrics,
        "steps": steps,
        "warnings": warnings,
    }


def _warnings(config: EngineConfig, prompts: PromptSource) -> list[str]:
    try:
        return prompt_warnings(config, prompts)
    except TokenizerError as error:
        raise JobUnfit("model.path", str(error), "download the model again") from error
    except ValueError as error:
        raise JobUnfit("prompts", str(error), "mend the prompt") from error


def _load_model(config: EngineConfig, start: Path | None) -> DiTAdapter:
    """Load the model with the start weights of the file `start`, if given."""
    try:
        if config.model.path is not None:
            check_folder(config.model, config.sampler, Path(config.model.path))
        adapter = load_adapter(config.model)
    except FolderError as error:
        raise JobUnfit(error.field, error.found, error.remedy) from error
    except Exception as error:  # diffusers and transformers raise errors of many kinds, and some name no file
        raise JobUnfit(
            "model.path" if config.model.path else "model",
            f"{config.model.name} cannot be loaded from {config.model.path or 'the shipped weights'} "
            f"({type(error).__name__}: {error})",
            "check model.name and model.path, or download the model again",
        ) from error
    if start is not None:
        try:
            load_start(trainable(adapter), Stored.of_path(start))
        except ValueError as error:
            fault, _, remedy = str(error).partition("; ")
            raise JobUnfit("model.from", fault, remedy) from error
    degree = config.runtime.sp_degree
    if degree != "auto" and (problem := problem_with_degree(adapter.transformer, degree)):
        fault, _, remedy = problem.partition("; ")
        raise JobUnfit("runtime.sp_degree", fault, remedy)
    return adapter


def _encode(adapter: DiTAdapter, config: EngineConfig, prompts: Sequence[str]) -> None:
    """Encode the prompts, to see that the model can read them."""
    try:
        for start_at in range(0, len(prompts), READ_AT_ONCE):
            if start_at % TOLD_EVERY == 0 and len(prompts) > TOLD_EVERY:
                tell(f"reading prompts: {start_at:,} of {len(prompts):,}")
            adapter.encode(prompts[start_at : start_at + READ_AT_ONCE])
    except (ValueError, KeyError) as error:
        made_for = SHIPPED.get(config.model.name)
        remedy = f"use prompts: {made_for}, or a file in its words" if made_for else "mend the prompt"
        raise JobUnfit("prompts", f"{config.model.name} cannot read a prompt: {error}", remedy) from error


def _score_once(config: EngineConfig, workdir: str | None, image: Tensor, prompt: str) -> Score:
    """Import the reward, and return its score of one image."""
    try:
        scores = scores_of(load_reward_of_job(config, workdir, must_answer=True), image, [prompt])
    except Exception as error:
        where = "; ".join(line.strip() for line in "".join(traceback.format_exception(error)[-2:]).splitlines())
        raise JobUnfit(
            "reward",
            f"{config.reward.name} on one image {list(image.shape)} and prompt {prompt!r}: {where}",
            "mend the function, and call it by hand with a tensor of that shape and a list of one prompt"
            if ":" in config.reward.name
            else "see docs/rewards.md for what this reward needs",
        ) from error
    if broken := unsound(image)[0]:
        fault = f"{config.model.name} on this machine: {broken}, for the first image of noise"
        raise JobUnfit("model", fault, "see that the model's files are whole, and that its decoder works in fp32")
    if not math.isfinite(scores[0].reward):
        raise JobUnfit(
            "reward",
            f"{config.reward.name} gives one image of noise {list(image.shape)} a reward that is not finite",
            "return a number for every image; groups with one that is not finite are not trained",
        )
    if DRIFT in scores[0].metrics:
        raise JobUnfit(
            "reward",
            f"{config.reward.name} reports a metric called {DRIFT!r}, which every evaluation has of its own",
            "give it another name",
        )
    return scores[0]


def _score_by_student(config: EngineConfig, workdir: str | None, image: Tensor, prompt: str) -> None:
    """Let the job's own student score one image, if it has one. Without a score, no candidate could be ranked."""
    if config.reward.student is None:
        return
    try:
        student = load_student(config, workdir, must_answer=True)
        assert student is not None
        (score,) = scores_of(student, image, [prompt])
    except Exception as error:  # a user's function may raise anything
        fault = f"{config.reward.student.name} on one image {list(image.shape)}: {type(error).__name__}: {error}"
        raise JobUnfit("reward.student", fault, "see docs/rewards.md for what this scorer needs") from error
    if not math.isfinite(score.reward):
        raise JobUnfit(
            "reward.student",
            f"{config.reward.student.name} gives one image of noise a reward that is not finite",
            "return a number for every image; a candidate without one is never chosen",
        )


def _check_target(target: TargetConfig | None, metrics: Sequence[str]) -> None:
    """Check that the target and its guards name metrics of the reward. `metrics`: all of the reward."""
    if target is None:
        return
    if target.metric not in metrics:
        raise JobUnfit(
            "target.metric",
            f"{target.metric!r}; the reward reports {', '.join(metrics)}",
            f"use one of {', '.join(metrics)}",
        )
    guarded = [*metrics, DRIFT]
    if strange := [guard.metric for guard in target.guards if guard.metric not in guarded]:
        raise JobUnfit(
            "target.guards",
            f"a guard on {strange[0]!r}; evaluations report {', '.join(guarded)}",
            f"use one of {', '.join(guarded)}",
        )


def main() -> int:
    torch.set_num_threads(1)
    config = EngineConfig.model_validate_json(sys.argv[1])
    try:
        workdir, start = ([*sys.argv[2:], None, None])[:2]
        result = check(config, workdir, None if start is None else Path(start))
    except JobUnfit as unfit:
        print(json.dumps({"field": unfit.field, "found": unfit.found, "remedy": unfit.remedy}))
        return 3
    print(json.dumps({"ok": True, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
