"""Write small files durably, safe against a power cut.

A rename without fsync may leave an empty file under the new name, because the file system writes the name before the
bytes. Standard library only: engine, launcher and the node's remote console all use this module.
"""

import os
import threading
from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """Replace the file's content atomically, also across a power cut. Only the owner can read the file.

    Raises OSError, e.g. if the disk is full. The old file then stays unchanged, and no other file is left.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with os.fdopen(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)  # a half-written copy would keep a full disk full
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in this folder durable: new files, renames, removals. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
