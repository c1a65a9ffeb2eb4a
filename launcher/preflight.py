"""Before anything is started: try here, for seconds, what would otherwise fail on the first node that is paid for.

platform -> disk -> secrets -> the engine's own look (user's reward called once on one picture, prompts, weights)

The engine looks in a process of its own, so that the launcher stays free of torch and a reward that crashes
the interpreter is only another answer.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launcher.exit_codes import Failure
from launcher.job import CheckedJob

FREE_BYTES = 1 << 30
"""A local run keeps a few checkpoints of a small model and its nodes' logs: far less than this."""

ENGINE_SECONDS = 300
"""Importing torch and loading a recogniser takes seconds; on a busy machine, a minute."""


def preflight(
    checked: CheckedJob, folder: Path, environ: Mapping[str, str] = os.environ, start: Path | None = None
) -> dict[str, Any]:
    """What the engine said of the job. `folder` is where runs are kept. Raises JobError, or Failure.

    `start`: the file with its start weights, if it has any
    """
    check_platform()
    check_disk(folder)
    check_secrets(checked, environ)
    return ask_engine(checked, start)


def check_platform(platform: str = sys.platform) -> None:
    """Raise Failure where nodes cannot run. Only local runs are concerned: nodes on clouds are Linux machines."""
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


def ask_engine(checked: CheckedJob, start: Path | None = None) -> dict[str, Any]:
    """Runs `python -m engine.preflight CONFIG WORKDIR [START]`: one JSON line, exit code 0, or 3 with field, found,
    remedy."""
    if find_spec("torch") is None:
        raise Failure("the engine is not installed here, and the job is tried with it; `pip install 'spotrl[engine]'`")
    config = checked.job.engine().model_dump_json()
    # -P: a `torch.py` in the user's folder must not shadow the real one while ours is found.
    command = [sys.executable, "-P", "-m", "engine.preflight", config, str(checked.workdir)]
    command += [] if start is None else [str(start)]
    try:
        done = subprocess.run(
            command, cwd=checked.workdir, capture_output=True, text=True, timeout=ENGINE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise checked.error(
            "reward",
            f"one call of the reward {checked.job.reward.name} took more than {ENGINE_SECONDS} s",
            "make it faster: it is called for every picture",
        ) from None
    answer = _last_json(done.stdout)
    if done.returncode == 0 and answer is not None:
        return answer
    if done.returncode == 3 and answer is not None and {"field", "found", "remedy"} <= answer.keys():
        raise checked.error(answer["field"], answer["found"], answer["remedy"])
    last_words = "\n".join(done.stderr.strip().splitlines()[-5:]) or "it said nothing"
    raise Failure(
        f"the engine could not check the job (exit code {done.returncode}); is it installed? "
        f"`pip install 'spotrl[engine]'`. Its last words:\n{last_words}"
    )


def _last_json(output: str) -> dict[str, Any] | None:
    """A reward may print; the answer is the last line."""
    try:
        answer = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None
