"""Check an output file before work that takes time or money, so that a mistyped path is found before and not after."""

import os
from pathlib import Path

from launcher.exit_codes import Failure


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
