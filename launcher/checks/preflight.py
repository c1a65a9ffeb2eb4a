"""Test on this machine, within seconds, the steps that would otherwise fail on the first paid node.

platform -> disk -> secrets -> the engine's checks (user's reward called once on one image, prompts, weights)

The engine runs in its own process. The launcher stays free of torch, and a reward that crashes the interpreter becomes
an ordinary failure.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any

from engine.installation import install_command
from launcher.engine_process import killed_words
from launcher.exit_codes import Failure
from launcher.job.checked import CheckedJob
from launcher.job.schema import PROMPTS
from launcher.notifications.webhook import url_problem

FREE_BYTES = 1 << 30
"""Free bytes required for a local run. A few checkpoints of a small model and the nodes' logs need far less."""

ENGINE_SECONDS = 300
"""Time limit of the engine's checks, in seconds. Importing torch and loading a recogniser takes seconds; on a busy
machine, a minute."""


def preflight(
    checked: CheckedJob,
    folder: Path,
    environ: Mapping[str, str] = os.environ,
    start: Path | None = None,
    say: Callable[[str], None] = lambda news: None,
) -> dict[str, Any]:
    """Run all checks and return the engine's report on the job. `folder` is the folder of all runs.

    `start`: the file with the start weights, if the job has any. `say` gets words on the progress. Raises JobError or
    Failure.
    """
    check_platform()
    check_disk(folder)
    check_secrets(checked, environ)
    check_sinks(checked)
    return ask_engine(checked, start, say)


def check_platform(platform: str = sys.platform) -> None:
    """Raise Failure if nodes cannot run on this machine.

    Called for local runs only: nodes on clouds are Linux machines.
    """
    if platform != "linux":
        raise Failure(
            f"a run on this machine needs Linux, and this is {platform}: nodes share weights by memfd_create and find "
            "their processes in /proc; use a Linux machine, or clouds with --infra aws,gcp"
        )


def check_disk(folder: Path) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < FREE_BYTES:
        raise Failure(
            f"{existing} has {free >> 20} MiB free, and a run needs {FREE_BYTES >> 20}; "
            "make room, or set SPOTRL_HOME to a folder on another disk"
        )


def check_secrets(checked: CheckedJob, environ: Mapping[str, str]) -> None:
    for name in checked.job.secrets:
        if not environ.get(name):
            raise checked.error(
                "secrets", f"secrets names {name}, which is not set here", f"export {name}=..., or leave it out"
            )
    webhook = checked.job.notifications.webhook
    if webhook is not None:
        problem = url_problem(environ[webhook]) if environ.get(webhook) else "is not set here"
        if problem:
            raise checked.error(
                "notifications.webhook",
                f"notifications.webhook names {webhook}, which {problem}",
                f"export {webhook}=https://..., or leave it out",
            )
    wandb = checked.job.logging.wandb
    if wandb is not None and wandb.mode == "online" and not environ.get(wandb.key):
        raise checked.error(
            "logging.wandb.mode",
            f"logging.wandb.mode is online, and {wandb.key} is not set here",
            f"export {wandb.key}=..., or write offline, and `wandb sync` later",
        )


def _is_installed(package: str) -> bool:
    """Return whether Python finds the package. A plain folder, like the `wandb` that W&B makes, is no package."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def check_sinks(checked: CheckedJob, is_installed: Callable[[str], bool] = _is_installed) -> None:
    """Raise JobError if the client of a sink is not installed. During a run, a missing client only leaves a warning."""
    for sink in checked.job.logging.model_dump(exclude_none=True):
        if not is_installed(sink):
            raise checked.error(
                f"logging.{sink}",
                f"logging.{sink} needs the package {sink}, which is not installed here",
                f"`{install_command(sink)}`, or leave it out",
            )


def ask_prompt_warnings(checked: CheckedJob) -> list[str]:
    """Return the sentences of `python -m engine.entrypoints.prompt_warnings` about a job with a model folder.

    Loads tokenizers, and no model. Empty without the engine, without the folder here, and for generated prompts. Raises
    JobError or Failure like `ask_engine`.
    """
    model = checked.job.model.path
    is_here = model is not None and (checked.workdir / model).is_dir() and find_spec("torch") is not None
    if not is_here or checked.job.prompts in PROMPTS:
        return []
    config = checked.job.engine().model_dump_json()
    warnings: list[str] = _answer(checked, "engine.entrypoints.prompt_warnings", config, str(checked.workdir))[
        "warnings"
    ]
    return warnings


def check_lora(checked: CheckedJob) -> None:
    """Compare every name and shape of `model.lora` with the model. Loads no weights of a model folder.

    Does nothing without `model.lora`, or without the model's folder here. Raises JobError or Failure like `ask_engine`.
    """
    model = checked.job.model
    if model.lora is None or not (model.path is None or (checked.workdir / model.path).is_dir()):
        return
    if find_spec("torch") is None:
        raise Failure(
            f"the engine is not installed here, and model.lora is compared with the model by it; "
            f"`{install_command('engine')}`"
        )
    _answer(checked, "engine.entrypoints.lora", "check", model.model_dump_json())


def _answer(checked: CheckedJob, module: str, *words: str) -> dict[str, Any]:
    """Run a module of the engine in the job's folder, and return its answer. Raises as `answer_of_engine`."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *words],
        cwd=checked.workdir,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return answer_of_engine(checked, done)


def ask_engine(
    checked: CheckedJob, start: Path | None = None, say: Callable[[str], None] = lambda news: None
) -> dict[str, Any]:
    """Run `python -m engine.entrypoints.preflight CONFIG WORKDIR [START]` and return the last JSON line of the engine.

    `say` gets the words of lines like {"progress": WORDS}. Exit code 0 is a report. Exit code 3 is a JSON line with
    field, found and remedy, and raises JobError. Any other exit code raises Failure.
    """
    if find_spec("torch") is None:
        raise Failure(f"the engine is not installed here, and the job is tried with it; `{install_command('engine')}`")
    config = checked.job.engine().model_dump_json()
    # -P: a `torch.py` in the user's folder must not shadow the real torch, but spotrl's own package must be found.
    command = [sys.executable, "-P", "-m", "engine.entrypoints.preflight", config, str(checked.workdir)]
    command += [] if start is None else [str(start)]
    # A reward may print any bytes.
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(
            command, cwd=checked.workdir, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace"
        )
        assert process.stdout is not None
        late = Timer(ENGINE_SECONDS, process.kill)
        late.start()
        try:
            lines = []
            for line in process.stdout:
                news = _last_json(line) if line.startswith('{"progress": ') else None
                if news is None:
                    lines.append(line)
                else:
                    say(str(news["progress"]))
            returncode = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            is_late = late.finished.is_set()
            late.cancel()
            process.stdout.close()
        stderr.seek(0)
        done = subprocess.CompletedProcess(command, returncode, "".join(lines), stderr.read())
    if is_late:
        raise checked.error(
            "reward",
            f"the engine took more than {ENGINE_SECONDS} s to start, load the model and call the reward "
            f"{checked.job.reward.name} once",
            "if this machine is busy, try again later; else make the reward faster: it is called for every image",
        )
    return answer_of_engine(checked, done)


def answer_of_engine(checked: CheckedJob, done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """Return the JSON line of an engine process that has ended. Raises JobError or Failure like `ask_engine`."""
    answer = _last_json(done.stdout)
    if done.returncode == 0 and answer is not None:
        return answer
    if done.returncode == 3 and answer is not None and {"field", "found", "remedy"} <= answer.keys():
        raise checked.error(answer["field"], answer["found"], answer["remedy"])
    last_words = "\n".join(done.stderr.strip().splitlines()[-5:]) or "it said nothing"
    if killed := killed_words(done.returncode):
        raise Failure(f"the job could not be checked: {killed}. Its last words:\n{last_words}")
    installed = "No module named 'engine" not in last_words and "No module named 'torch'" not in last_words
    remedy = "mend what its last words name" if installed else f"is it installed? `{install_command('engine')}`"
    raise Failure(
        f"the engine could not check the job (exit code {done.returncode}); {remedy}. Its last words:\n{last_words}"
    )


def _last_json(output: str) -> dict[str, Any] | None:
    """Return the JSON object in the last line of the engine's output.

    None: the output is empty, or the last line is not a JSON object. Earlier lines are ignored, because the user's
    reward may print.
    """
    try:
        answer = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None
