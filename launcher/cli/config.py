"""`spotrl config`: show a job's final values from flags, environment, files and defaults, and the JSON schemas."""

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from launcher.job.load import load_job
from launcher.settings import config_path, home


@click.group()
def config() -> None:
    """Show a job's final values, or the JSON schema of the job file.

    \b
    Example:
      spotrl config show job.yaml --origin
      spotrl config schema > job.schema.json
    """


@config.command()
@click.argument("job", type=click.Path(path_type=Path), required=False)
@click.option("--origin", is_flag=True, help="Show the source of each value.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(job: Path | None, origin: bool, as_json: bool) -> None:
    """Print every field of JOB. Without JOB, print the values that every job starts from.

    Priority: flag > SPOTRL_* variable > job file > user's config file > default.

    \b
    Example:
      SPOTRL_BUDGET__MAX_TOTAL=40 spotrl config show job.yaml --origin
    """
    checked = load_job(job, environ=os.environ, user_config=config_path())
    values = flat(checked.job.model_dump(mode="json"))
    if as_json:
        rows = {field: {"value": value, "origin": checked.origins[field]} for field, value in values.items()}
        click.echo(json.dumps({"home": str(home()), "user_config": str(config_path()), "fields": rows}))
        return
    click.echo(f"# home: {home()}\n# user's config: {config_path()}{'' if config_path().exists() else ' (none)'}")
    for field, value in values.items():
        line = f"{field}: {_shown(value)}"
        click.echo(f"{line:<48} # {checked.origins[field]}" if origin else line)


SCHEMAS = sorted(
    file.name.removesuffix(".schema.json")
    for file in files("launcher.schemas").iterdir()
    if file.name.endswith(".schema.json")
)
"""Names of the shipped schemas (launcher/schemas/documents.py writes the files)."""


@config.command()
@click.argument("name", type=click.Choice(SCHEMAS), metavar="NAME", default="job")
def schema(name: str) -> None:
    """Print the JSON schema of the job file, or of the JSON output NAME.

    An editor that reads the schema of the job file completes fields and marks mistakes. The first line of a job file
    names the schema: `# yaml-language-server: $schema=job.schema.json`.

    NAME is a command, like `status` or `catalog-show`; `result` (the file of `launch --result`); `progress` and
    `capacity` (messages between engine and launcher); `cleanup` (reap and panic); or `error`. docs/json.md has the
    table.

    \b
    Example:
      spotrl config schema > job.schema.json
      spotrl config schema result > result.schema.json
    """
    click.echo((files("launcher.schemas") / f"{name}.schema.json").read_text("utf-8"), nl=False)


def flat(section: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return the leaf values by dotted field name."""
    leaves: dict[str, Any] = {}
    for key, value in section.items():
        leaves |= flat(value, f"{above}{key}.") if isinstance(value, dict) and value else {above + key: value}
    return leaves


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
