"""Fetch a model's weights from the run's bucket to the node's disk, before any process loads the model.

    URL (written by launcher/storage/weights.py): .manifest.json, files -> BELOW/DIGEST.part -> BELOW/DIGEST

Several processes of a node need the same folder at once: the first process fetches the files, and all later processes
wait. A folder under its final name is complete. An interrupted fetch is resumed, file by file.
"""

import fcntl
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore

from engine.storage.bucket import open_store
from engine.storage.disk import when_there_is_room

MANIFEST = ".manifest.json"
"""{"files": {NAME: BYTES}}: the files of the model. The manifest is written last."""

AT_ONCE = 8
"""Files fetched in parallel: a connection to a bucket gives about 100 MB/s, and a node's network ten times as much."""

REPORT_SECONDS = 10.0

PIECE_BYTES = 16 << 20


def fetched(url: str, below: Path, report: Callable[[str], None] = print) -> Path:
    """Return the model's folder on this disk, and fetch the files first if needed.

    Raises OSError if the bucket has no such model. `url`: an obstore URL that ends in the model's digest.
    """
    folder = below / url.rstrip("/").rpartition("/")[2]
    below.mkdir(parents=True, exist_ok=True)
    with (below / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            part = folder.with_name(f"{folder.name}.part")
            _bring(url, part, report)
            part.rename(folder)
    return folder


def _bring(url: str, to: Path, report: Callable[[str], None]) -> None:
    store = when_there_is_room(lambda: open_store(url), report)
    try:
        sizes: dict[str, int] = json.loads(bytes(obstore.get(store, MANIFEST).bytes()))["files"]
    except FileNotFoundError:
        raise OSError(f"{url} has no {MANIFEST}: the weights were not sent whole; launch the run again") from None
    missing = [name for name, size in sizes.items() if not _is_whole(to / name, size)]
    began, whole, done = time.monotonic(), sum(sizes[name] for name in missing), 0
    reported_at = began
    free = shutil.disk_usage(to.parent).free
    if free < whole:
        raise OSError(
            f"{to.parent} has {free >> 20} MiB free, and the model needs {whole >> 20} MiB; set a larger "
            "resources.disk_gb, or use a smaller model"
        )
    report(f"weights: {len(missing)} of {len(sizes)} files, {whole >> 20} MiB, from {url}")

    def bring(name: str) -> None:
        nonlocal done, reported_at
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        with (to / name).open("wb") as file:
            for piece in obstore.get(store, name).stream(min_chunk_size=PIECE_BYTES):
                file.write(piece)
                done += len(piece)
                if time.monotonic() - reported_at > REPORT_SECONDS:
                    reported_at = time.monotonic()
                    report(f"weights: {done >> 20} of {whole >> 20} MiB after {reported_at - began:.0f} s")
        if not _is_whole(to / name, sizes[name]):
            raise OSError(f"{url}/{name} is {(to / name).stat().st_size} bytes, and its manifest says {sizes[name]}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(bring, missing))
    report(f"weights: here after {time.monotonic() - began:.0f} s")


def _is_whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
