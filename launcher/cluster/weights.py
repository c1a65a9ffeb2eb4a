"""A model's weights in the run's buckets: sent once, then every node of every run takes them from its own region.

    STORE/_weights/DIGEST/  the model's files, .manifest.json    (engine/models/fetch.py reads it)

The digest is of names and contents, so that a model that is there is not sent again, and another one never takes its
place. The manifest is written last: what was cut short does not count, and is gone on with file by file.
"""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
from obstore.exceptions import BaseError

from launcher.cluster.stores import StoreError, open_store

MANIFEST = ".manifest.json"
"""{"files": {NAME: BYTES}}: what belongs to the model, as engine/models/fetch.py reads it. No file that is sent begins
with a dot."""

AT_ONCE = 4
"""Files."""


def weights_of(store: str, digest: str) -> str:
    """Where a model's weights are in a bucket: an obstore URL. No run can be called `_weights`."""
    return f"{store.rstrip('/')}/_weights/{digest}"


def bytes_of(folder: Path) -> int:
    """Of all that is sent."""
    return sum(_files(folder).values())


def digest_of(folder: Path) -> str:
    """Of all that is sent of a model's folder. Reads it whole: about a second a gigabyte."""

    def entry(name: str) -> str:
        with (folder / name).open("rb") as file:
            return f"{name} {hashlib.file_digest(file, 'blake2b').hexdigest()}"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        entries = list(pool.map(entry, _files(folder)))
    return hashlib.blake2b("\n".join(entries).encode(), digest_size=12).hexdigest()


def send(folder: Path, url: str, say: Callable[[str], None]) -> None:
    """Put the model there, unless it is. May be killed anywhere, and done twice at once. Raises StoreError."""
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
    """Bytes by name. What begins with a dot stays here: caches of whatever brought it."""
    found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return {name: found[name] for name in sorted(found) if not any(part.startswith(".") for part in Path(name).parts)}


def _size(store: obstore.store.ObjectStore, path: str) -> int | None:
    try:
        return obstore.head(store, path)["size"]
    except FileNotFoundError:
        return None
