"""Check an output file before work that takes time or money, so that a mistyped path is found before and not after.

Afterwards, say what was written.
"""

import os
from pathlib import Path

import click

from launcher.exit_codes import Failure
from launcher.money import dollars
from launcher.report.focus import FocusFile


def check_output(path: Path) -> None:
    """Make the folder of an output file. Raises Failure if the file could not be written later."""
    folder = path.absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"{folder} cannot be made for {path.name} ({error.strerror}); name another file") from None
    if path.is_dir():
        raise Failure(f"{path} is a folder; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise Failure(f"{path} cannot be written; name another file")


def say_written(file: FocusFile) -> None:
    """Print what a file of FOCUS rows holds, and what it cannot hold."""
    click.echo(f"wrote {file.path}: {file.rows} rows, {dollars(file.micro_usd)}", err=True)
    for note in file.notes:
        click.echo(note, err=True)
