"""`spotrl init`: a job file to start from."""

from importlib.resources import files
from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), default=Path("job.yaml"))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def init(file: Path, force: bool) -> None:
    """Write a commented job file to FILE (job.yaml).

    \b
    Example:
      spotrl init my-job.yaml
    """
    if file.exists() and not force:
        raise click.ClickException(f"{file} exists; choose another name, or replace it with --force")
    try:
        file.write_text((files("sky_yamls") / "template.yaml").read_text("utf-8"), "utf-8")
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written ({error.strerror}); choose another place") from None
    click.echo(f"Wrote {file}. Next: spotrl launch {file} --dry-run")
