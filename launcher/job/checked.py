"""A job that can run, and the error of a job that cannot."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.exit_codes import ExitCode, Failure
from launcher.job.schema import Job
from launcher.job.yaml_file import Field as FieldPath
from launcher.job.yaml_file import YamlFile


class JobError(Failure):
    """The job cannot run as written. The message is `place: found; remedy`."""

    exit_code = ExitCode.INVALID_JOB

    def __init__(
        self, found: str, remedy: str, *, file: Path | str = "", line: int | None = None, field: str = ""
    ) -> None:
        self.found, self.remedy, self.file, self.line, self.field = found, remedy, str(file), line, field
        place = f"{self.file}, line {line}: " if line else f"{self.file}: " if self.file else ""
        super().__init__(f"{place}{found}; {remedy}")


def digest_of(job: Job) -> str:
    """Return the digest of a job. Two files with the same meaning have the same digest."""
    canonical = json.dumps(job.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedJob:
    """A job that can run: every default filled in, and the origin of each value."""

    job: Job
    origins: Mapping[str, str]
    """Origin of each dotted field: `--max-total`, `SPOTRL_BUDGET__MAX_TOTAL`, `quickstart.yaml, line 12` or
    `default`."""
    digest: str
    """As of `digest_of`."""
    text: str
    path: Path
    workdir: Path
    """Folder of the job file. The user's reward module and prompt files are looked up here."""
    lines: Mapping[FieldPath, int]

    def with_job(self, job: Job) -> "CheckedJob":
        """Return the job with other values, which a plan has chosen."""
        return replace(self, job=job, digest=digest_of(job))

    def error(self, field: str, found: str, remedy: str) -> JobError:
        """Return a `JobError` for a fault found after loading, such as a reward that raises.

        The error names the line of the field in the job file.
        """
        line = YamlFile(text=self.text, values={}, lines=self.lines).line(tuple(field.split(".")))
        return JobError(found, remedy, file=self.path, line=line, field=field)
