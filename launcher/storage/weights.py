"""A model's weights in the run's buckets: sent once, then fetched by every node of every run from its own region.

    STORE/_weights/DIGEST/  the model's files, .manifest.json    (engine/models/fetch.py reads the manifest)

The digest covers names and contents, so an existing model is not sent again, and another model never replaces it. The
manifest is written last: an interrupted upload does not count, and continues file by file.
"""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
from obstore.exceptions import BaseError

from engine.model_parts import INDEX, needed_files
from launcher.storage.stores import StoreError, open_store

MANIFEST = ".manifest.json"
"""Manifest file, {"files": {NAME: BYTES}}: the model's files, as engine/models/fetch.py reads. No sent file's name
begins with a dot."""

AT_ONCE = 4
"""Files sent in parallel."""


def weights_of(store: str, digest: str) -> str:
    """Return the URL of a model's weights in a bucket (obstore). No run can be called `_weights`."""
    return f"{store.rstrip('/')}/_weights/{digest}"


def bytes_of(folder: Path) -> int:
    """Return the total size of the model's sent files."""
    return sum(_files(folder).values())


def digest_of(folder: Path) -> str:
    """Return the digest of a model's sent files. Reads every file: about a second a gigabyte."""

    def entry(name: str) -> str:
        with (folder / name).open("rb") as file:
            return f"{name} {hashlib.file_digest(file, 'blake2b').hexdigest()}"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        entries = list(pool.map(entry, _files(folder)))
    return hashlib.blake2b("\n".join(entries).encode(), digest_size=12).hexdigest()


def send(folder: Path, url: str, say: Callable[[str], None]) -> None:
    """Send the model to the bucket, unless present.

    May be killed anywhere, and run twice at once. Raises StoreError.
    """
    store, sizes = open_store(url), _files(folder)
    manifest = json.dumps({"files": sizes}).encode()
    try:
        if _size(store, MANIFEST) == len(manifest):
            return
        missing = [name for name, size in sizes.items() if _size(store, name) != size]
        whole, done = sum(sizes[name] for name in missing), 0
        say(f"Sending the model to {url}: {len(missing)} of {len(sizes)} files, {whole >> 20} MiB")

        def put(name: str) -> int:
            obstore.put(store, name, folder / name)
            return sizes[name]

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for number, size in enumerate(pool.map(put, missing), start=1):
                done += size
                say(f"  {number} of {len(missing)} files, {done >> 20} of {whole >> 20} MiB")
        obstore.put(store, MANIFEST, manifest)
    except (BaseError, OSError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise StoreError(f"the model cannot be sent to {url} ({first_line}); launch again, and it goes on") from None


def _files(folder: Path) -> dict[str, int]:
    """Return the sizes of a model's files by name.

    Of a diffusers folder, only the files that a run loads count (`engine.model_parts.needed_files`). Of another folder,
    all files count whose names have no leading dot: caches of the download tool have one.
    """
    if (folder / INDEX).is_file():
        return needed_files(folder)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return {name: sizes[name] for name in sorted(sizes) if not any(part.startswith(".") for part in Path(name).parts)}


def _size(store: obstore.store.ObjectStore, path: str) -> int | None:
    try:
        return obstore.head(store, path)["size"]
    except FileNotFoundError:
        return None
