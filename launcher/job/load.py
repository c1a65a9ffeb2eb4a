"""Load and check a job file.

All checks run before any purchase. A job that does not load raises a single `JobError`. The error names the place, the
value found and the allowed values. Nothing has been started by then, and the error repeats no secret.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import (
    ValidationError,
)

from engine.lora_file import check_digest, read_lora
from engine.memory.job import check_named
from engine.model_folder import FolderError, check_folder
from engine.prompt_set import Metadata, PromptFileError, add_tested, prompt_paths, read_prompts
from launcher.job.checked import CheckedJob, JobError, digest_of
from launcher.job.hub import NotFromHub, cached_model, download_command, hub_id
from launcher.job.layers import Layer, environment_layer, flag_layer, merged, read
from launcher.job.paths import paths_seen_from
from launcher.job.problem import explain
from launcher.job.schema import PROMPTS, Job
from launcher.job.sections import AllRuns
from launcher.job.yaml_file import Field as FieldPath
from launcher.job.yaml_file import YamlFile
from launcher.market.instance_types import COMPUTE_CAPABILITY, LEAST_CAPABILITY, instance_types, is_too_old


def load_job(
    path: Path | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    user_config: Path | None = None,
    fetch: Callable[[str], Path] | None = None,
    working_folder: Path | None = None,
) -> CheckedJob:
    """Read and check a job. Raises JobError. Without a path: the defaults of every job.

    `overrides` are flags, by dotted field (`budget.max_total`); text values are parsed as YAML. Commands pass `environ`
    and `user_config`. Without both, only the file and the flags count. `fetch` gives the folder of a model of the hub,
    or raises NotFromHub; without it the hub's cache on this machine counts. `working_folder`: of the paths in flags
    and in `environ`; None: the current one.
    """
    workdir = path.absolute().parent if path else Path.cwd()
    here = working_folder or Path.cwd()
    layers = [read(path) if path else Layer(values={}, labels={})]
    job_file = layers[0].yaml or YamlFile(text="", values={}, lines={})

    def with_paths_from(layer: Layer, folder: Path) -> Layer:
        return replace(layer, values=paths_seen_from(workdir, layer.values, folder))

    if user_config and user_config.exists():
        layers.append(with_paths_from(read(user_config), user_config.absolute().parent))
    if environ is not None:
        layers.insert(0, with_paths_from(environment_layer(environ), here))
    layers.insert(0, with_paths_from(flag_layer(overrides or {}), here))

    values: dict[str, Any] = {}
    for layer in reversed(layers):
        values = merged(values, layer.values)
    if "name" not in values and path:
        values["name"] = _name_from(path)
    try:
        # Validate as JSON: strict JSON mode rejects `true` for a 1 and "12" for a 12, but accepts a list for a tuple.
        job = Job.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise _job_error(error, values, layers) from None
    checked = CheckedJob(
        job=job,
        origins=_origins(job, layers),
        digest=digest_of(job),
        text=job_file.text,
        path=path or Path("job.yaml"),
        workdir=workdir,
        lines=job_file.lines,
    )
    _check_gpus(checked)
    _check_judges(checked)
    _check_prompt_files(checked)
    checked = _with_model_of_hub(checked, fetch)
    _check_files(checked)
    return _with_lora(checked)


def all_runs_of(user_config: Path, at_launch: AllRuns) -> AllRuns:
    """Return the limits over all runs from the user's current configuration, else the limits at launch.

    Raises JobError if the file cannot be read, or holds anything but amounts.
    """
    values = read(user_config).values.get("all_runs") if user_config.exists() else None
    if values is None:
        return at_launch
    try:
        today = AllRuns.model_validate_json(json.dumps(values), strict=True)
    except (ValidationError, TypeError):
        raise JobError(
            f"all_runs is {values!r}", "use amounts, such as all_runs: {max_total: 100}", file=user_config
        ) from None
    return at_launch.model_copy(update={name: getattr(today, name) for name in today.model_fields_set})


def _name_from(path: Path) -> str:
    """Turn a file name into a run name: `My job.yaml` -> my-job."""
    return re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:40].strip("-") or "run"


def _job_error(error: ValidationError, values: dict[str, Any], layers: Sequence[Layer]) -> JobError:
    problems = explain(error, values, Job)
    first = problems[0]
    layer = next((layer for layer in layers if layer.has(first.place)), None)
    if layer is None:  # a missing field: report the line of its section
        parents = [first.place[:n] for n in range(len(first.place) - 1, 0, -1)]
        found_in = (layer for parent in parents for layer in layers if layer.has(parent))
        layer = next(found_in, layers[-1])
    more = f" ({len(problems) - 1} more after this one)" if len(problems) > 1 else ""
    return JobError(
        first.found,
        first.remedy + more,
        file=layer.file or layer.origin(first.place),
        line=layer.line(first.place),
        field=".".join(map(str, first.place)),
    )


def _origins(job: Job, layers: Sequence[Layer]) -> dict[str, str]:
    def leaves(value: Any, place: FieldPath) -> list[FieldPath]:
        if isinstance(value, dict) and value:
            return [leaf for key, child in value.items() for leaf in leaves(child, (*place, key))]
        return [place]

    return {
        ".".join(map(str, place)): next((layer.origin(place) for layer in layers if layer.has(place)), "default")
        for place in leaves(job.model_dump(mode="json"), ())
    }


def _check_gpus(checked: CheckedJob) -> None:
    """Raise JobError for GPUs of cloud nodes that nobody sells, or that are too old for torch.

    On the local infra a GPU is only a row of the price tables.
    """
    job = checked.job
    sold = {machine.accelerator for machine in instance_types(job.clouds)}
    usable = sorted(name for name in sold if not is_too_old(name))
    kinds = [
        (role, kind)
        for role, resources in (("trainer", job.resources.trainer), ("rollout", job.resources.rollout))
        for kind in resources.kinds
        if job.clouds
    ]
    for role, kind in kinds:
        field, gpu = f"resources.{role}.accelerators", kind.partition(":")[0]
        if gpu.lower() not in {name.lower() for name in (*sold, *COMPUTE_CAPABILITY)}:
            raise checked.error(
                field,
                f"{field} is {kind}, and spotrl knows no such GPU on {' or '.join(job.clouds)}",
                f"use one of {', '.join(usable)}",
            )
        if is_too_old(gpu):
            major, minor = LEAST_CAPABILITY
            raise checked.error(
                field,
                f"{field} is {kind}, a GPU older than compute capability {major}.{minor}: the torch of nodes is built "
                "for CUDA 13 and has no code for it, nor does SkyPilot's image for it have the driver (535, and CUDA "
                "13 needs 580)",
                f"use one of {', '.join(usable)}",
            )


def _check_judges(checked: CheckedJob) -> None:
    """Raise JobError if the judges' budget does not bear the images of one lease: the run would stop at its first.

    A worker holds money for all images of a lease before it asks a judge.
    """
    job = checked.job
    evaluated = min(job.evaluation.shape, job.evaluation.prompts)
    rolled_out = min(job.runtime.shape, job.algorithm.prompts_per_batch * job.algorithm.images_per_prompt)
    explored = [profile.shape for profile in job.exploration.profiles] if job.exploration.mode == "stale" else []
    images = max(evaluated, rolled_out, *explored) * (job.reward.frames or 1)
    most = images * max(
        (reward.vlm.most_micro_usd for reward in job.reward.loaded if reward.vlm is not None), default=0
    )
    if most > job.reward.judge_micro_usd:
        raise checked.error(
            "reward",
            f"reward.vlm.max_usd is ${job.reward.judge_micro_usd / 1e6:.2f} in all, and the {images} images that a "
            f"worker scores at a time may cost ${most / 1e6:.2f}",
            "use more, fewer most_input_tokens, or smaller shapes (runtime, evaluation, exploration.profiles)",
        )


def _check_prompt_files(checked: CheckedJob) -> None:
    """Raise JobError if a prompt file is missing, is no text or JSONL, or is empty."""
    job, field = checked.job, "prompts"
    if job.prompts in PROMPTS:
        return
    try:
        train, test = prompt_paths(checked.workdir, job.prompts, None)
        prompts = _prompts_of(checked, field, train, f"use {' or '.join(PROMPTS)}")
        if job.test_prompts is not None:
            field = "test_prompts"
            _, test = prompt_paths(checked.workdir, job.prompts, job.test_prompts)
        if test is not None:
            add_tested(prompts, _prompts_of(checked, field, test, "leave test_prompts out"), test)
    except PromptFileError as error:
        text, _, remedy = str(error).rpartition("; ")
        raise checked.error(field, text, remedy) from None


def _prompts_of(checked: CheckedJob, field: str, path: Path, instead: str) -> dict[str, Metadata]:
    prompts = read_prompts(path)
    if not prompts:
        raise checked.error(field, f"{path.name} has no prompts", f"write one prompt a line, or {instead}")
    return prompts


def _with_model_of_hub(checked: CheckedJob, fetch: Callable[[str], Path] | None) -> CheckedJob:
    """Return the job with the folder of its model, if `model.path` is a hub id and no folder beside the job file.

    Without a copy in the cache, and without `fetch`, the job stays as it is. Raises JobError if `fetch` cannot give it.
    """
    model = checked.job.model
    name = None if model.path is None else hub_id(model.path)
    if name is None or (checked.workdir / name).exists():
        return checked
    try:
        folder = cached_model(name) if fetch is None else fetch(name)
    except NotFromHub as error:
        raise checked.error(
            "model.path",
            f"model.path is {name!r}, and there is no such folder ({checked.workdir / name}), and {error}",
            f"download the model where the hub can be reached, `{download_command(name)}`, and give its folder",
        ) from None
    if folder is None:
        return checked
    job = checked.job.model_copy(update={"model": model.model_copy(update={"path": str(folder)})})
    return checked.with_job(job)


def _with_lora(checked: CheckedJob) -> CheckedJob:
    """Return the job with the digest of its LoRA file, and with the file's rank if `continue` leaves the rank open.

    Raises JobError if the file cannot be used, or is not the one of `model.lora_sha256`.
    """
    model = checked.job.model
    if model.lora is None:
        return checked
    try:
        file = read_lora(checked.workdir / model.lora)
        check_digest(file.path, model.lora_sha256)
    except FolderError as error:
        raise checked.error(error.field, error.found, error.remedy) from None
    known: dict[str, Any] = {"lora_sha256": file.sha256}
    if model.lora_use == "continue":
        if "lora_rank" not in model.model_fields_set:
            known["lora_rank"] = file.rank
        elif file.rank > model.lora_rank:
            raise checked.error(
                "model.lora_rank",
                f"model.lora_rank is {model.lora_rank}, and model.lora is {file.text}: its adapters would lose a part",
                f"use model.lora_rank: {file.rank} or more, leave it out, or use lora_use: merge",
            )
    return checked.with_job(checked.job.model_copy(update={"model": model.model_copy(update=known)}))


def _check_files(checked: CheckedJob) -> None:
    """Raise JobError if a file that the job names is missing here, before the first node misses the file."""
    job, folder = checked.job, checked.workdir
    models = [("model", reward.model) for reward in job.reward.loaded] + [
        ("colours", reward.colours) for reward in job.reward.loaded
    ]
    for field, scorer in ((field, model.path) for field, model in models if model is not None):
        # On clouds, an absolute folder is a folder of the nodes.
        if not (job.clouds and Path(scorer).is_absolute()) and not (folder / scorer).is_dir():
            raise checked.error(
                f"reward.{field}.path",
                f"reward.{field}.path is {scorer!r}, and there is no such folder ({folder / scorer})",
                "give the folder of the scorer's model, relative to the job file",
            )
    # On clouds the plan reports a missing model folder, and only `launch` needs the folder.
    if job.model.path is not None and not job.clouds and not (folder / job.model.path).is_dir():
        raise checked.error(
            "model.path",
            f"model.path is {job.model.path!r}, and there is no such folder ({folder / job.model.path})",
            "give the folder of a diffusers model, relative to the job file"
            + (", or download it: `" + download_command(model) + "`" if (model := hub_id(job.model.path)) else ""),
        )
    if job.model.path is not None:
        try:
            if (folder / job.model.path).is_dir():
                check_folder(job.model, job.sampler, folder / job.model.path)
            else:
                check_named(job.model, job.sampler)
        except FolderError as error:
            raise checked.error(error.field, error.found, error.remedy) from None
