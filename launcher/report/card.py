"""The model card of pulled weights: their origin, loading instructions, results and cost."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.config import SHIPPED, VIDEO, ModelConfig
from engine.memory.job import named_model
from engine.model_parts import PIPELINES
from launcher.job.hub import hub_name
from launcher.money import dollars
from launcher.report.diffusers_files import LORA_FILE
from launcher.report.values import Moment, Report
from launcher.report.weights import Pulled
from launcher.report.words import headline, hours, score
from launcher.without_secrets import job_without_secrets

CARD = "README.md"
CURVE = "curve.svg"

ROWS = 12
"""Number of evaluations in the card's table, including the first and the last. The curve shows every evaluation."""

LOAD_LORA = """\
pipeline.load_lora_weights("{folder}", weight_name="{lora_file}")
"""

LOAD_FULL = """\
from diffusers import {model_class}

pipeline.transformer = {model_class}.from_pretrained("{folder}/transformer")
"""

SHIPPED_CLASS = "QwenImageTransformer2DModel"
"""Transformer of the shipped models."""


def model_card(report: Report, job: Mapping[str, Any], pulled: Pulled, folder: str, has_diffusers_files: bool) -> str:
    """Return the card as Markdown, with the job without secrets: a card is published beside the weights.

    `folder`: path of the weights, as the reader will write the path.
    """
    model = ModelConfig.model_validate(job.get("model") or {})
    if named := hub_name(model.path or ""):  # the folder is in a cache of one user
        job = {**job, "model": {**job["model"], "path": named[0]}}
    run, metric = report.run, report.target.metric
    parts = [
        _front(model),
        f"# {run.name}",
        f"{_kind(model)} of {_base(model)}, trained with reinforcement learning by spotrl: "
        f"iteration {pulled.iteration}, checkpoint {pulled.checkpoint}.",
        *([f"Training started from the weights of {run.started_from}."] if run.started_from else []),
        f"{headline(report)} Money is {report.money_note}.",
        *_licence(model),
        "## Use",
    ]
    if has_diffusers_files:
        model_class = SHIPPED_CLASS if model.name in SHIPPED else PIPELINES[model.name].parts["transformer"]
        load = LOAD_LORA if model.weights == "lora" else LOAD_FULL
        parts.append(f"```python\n{load.format(folder=folder, lora_file=LORA_FILE, model_class=model_class)}```")
    parts += [
        f"`spotrl sample {run.name} PROMPT` draws images with them. `ema.safetensors` is the average of the weights "
        "that evaluations use, and what the files for diffusers hold; training goes on from `weights.safetensors`.",
        "## Results",
        f"{metric} on held-out prompts. Smoothed: the mean of the last three evaluations.",
        _table(report.curve),
    ]
    if report.curve:
        parts.append(f"![{metric} against dollars; circles: one evaluation; line: smoothed]({CURVE})")
    parts += [
        "## Cost",
        f"{dollars(report.costs.total)} in {hours(report.run.hours)} on the run's clock, {run.iterations} iterations.",
        "## Job",
        f"Job {run.job_digest}, code {run.code_version}, seeds {', '.join(map(str, run.seeds))}.",
        f"```json\n{json.dumps(job_without_secrets(job), indent=2)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _front(model: ModelConfig) -> str:
    """Return the metadata block read by model hubs."""
    kind = "text-to-video" if model.name in VIDEO else "text-to-image"
    lines = ["library_name: diffusers", f"pipeline_tag: {kind}", "tags: [reinforcement-learning, spotrl"]
    if named := hub_name(model.path or ""):
        lines.insert(0, f"base_model: {named[0]}")
    return "\n".join(["---", *lines[:-1], lines[-1] + (", lora]" if model.weights == "lora" else "]"), "---"])


def _licence(model: ModelConfig) -> list[str]:
    """Return a sentence on the base model's licence, if its folder is called like a published model."""
    named = None if model.name in SHIPPED else named_model(model)
    return [] if named is None else [f"The base model, {named.name}, has its own licence: {named.licence}."]


def _kind(model: ModelConfig) -> str:
    if model.weights == "full":
        return "All weights of the transformer"
    joined = f", joined with {model.lora_text}" if model.merged_lora else ""
    return f"Low-rank adapters (rank {model.lora_rank}{joined})"


def _base(model: ModelConfig) -> str:
    if named := hub_name(model.path or ""):
        return f"{model.name} ({named[0]}, commit {named[1]})"
    return model.name if model.path is None else f"{model.name} ({model.path})"


def _table(curve: Sequence[Moment]) -> str:
    if not curve:
        return "Nothing has been evaluated yet."
    last = len(curve) - 1
    shown = sorted({round(last * number / (ROWS - 1)) for number in range(ROWS)}) if last >= ROWS else range(last + 1)
    rows = [
        f"| {curve[one].iteration} | {score(curve[one].score)} | {score(curve[one].smoothed)} | "
        f"{dollars(curve[one].micro_usd)} | {hours(curve[one].hours)} |"
        for one in shown
    ]
    return "\n".join(["| iteration | score | smoothed | spent | after |", "|---:|---:|---:|---:|---:|", *rows])
