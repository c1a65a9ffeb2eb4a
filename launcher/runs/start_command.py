"""The command that started or continued a run, without secrets, and the git commits of the code behind it."""

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from launcher.ledger.models import Run, StartCommand
from launcher.without_secrets import secret_values, words_without_secrets

GIT_SECONDS = 3.0
"""Longest time of one call of git. A large folder on a slow disk then has no commit in the report."""

LONGEST = 4000
"""Most characters of a command that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A command without secrets, and the commits of spotrl and of the job file's folder."""

    command: str
    code_commit: str
    workdir_commit: str

    def row(self, run: Run, at_ms: int) -> StartCommand:
        """Return the row for the ledger. `at_ms`: on the run's clock."""
        return StartCommand(run_id=run.id, at_ms=at_ms, **asdict(self))


def origin_of(
    words: Sequence[str], job: Mapping[str, Any], workdir: str | Path | None, environ: Mapping[str, str] | None = None
) -> Origin:
    """Return the origin of a run that starts or goes on now. Runs git, so call it outside of a transaction.

    `words`: the command as typed; empty if none was typed. `job`: the checked job, which names the variables with
    secrets. `workdir`: folder of the job file.
    """
    values = secret_values(os.environ if environ is None else environ, _secret_names(job))
    return Origin(
        command=shlex.join(words_without_secrets(words, values))[:LONGEST],
        code_commit=commit_of_code(Path(str(files("launcher"))).parent),
        workdir_commit=commit_of(Path(workdir)) if workdir else "",
    )


def commit_of_code(folder: Path) -> str:
    """Return the commit of a checkout of spotrl; empty for an installed package, whose version says enough.

    A package in a virtual environment may lie inside a checkout of the user's own, so `.git` must be in the folder.
    """
    return commit_of(folder) if (folder / ".git").exists() else ""


def commit_of(folder: Path) -> str:
    """Return the commit of the folder's checkout, with `-dirty` if its files differ; empty without a checkout or git.

    `git describe` of no tag gives the commit. File monitors, which a checkout may name as programs, stay off.
    """
    command = ("git", "-c", "core.fsmonitor=false", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _secret_names(job: Mapping[str, Any]) -> list[str]:
    """Return the environment variables that the job names for secrets."""
    wandb = (job.get("logging") or {}).get("wandb") or {}
    webhook = (job.get("notifications") or {}).get("webhook")
    return [*job.get("secrets", ()), *filter(None, [webhook, wandb.get("key")])]
