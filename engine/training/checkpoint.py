"""Checkpoints: everything a machine that never saw this run needs to go on exactly where it was.

    checkpoints/l0001-i000012/{weights,ema,optimizer}.safetensors, then manifest.json
    lineages/0001                                                  one per lineage, created once
    start/weights.safetensors, then manifest.json                  start weights, written by the launcher (model.from)

A checkpoint counts when its manifest is there, and the manifest is written last; the files may be written earlier,
while what the manifest says is not all known. It carries the manifest of the
*next* batch too: exploration for that batch used weights that are gone by then, so choosing again could choose
otherwise. The newest is the highest lineage, then the highest iteration: a zombie trainer that wakes after its
machine was given up writes under an old lineage, and nobody reads it.

What writes raises OSError when the store is a disk that is full; everything does, when it is a bucket that does not
answer. It may then be done again: nothing counts yet.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError
from obstore.store import LocalStore, ObjectStore

from engine.drift import Look
from engine.rollout.request import Manifest
from engine.runtime.bucket import open_store
from engine.runtime.disk import AWAY, FULL

SCHEMA = 1

START_WEIGHTS, START_MANIFEST = "start/weights.safetensors", "start/manifest.json"
"""launcher/cluster/start.py writes both; the manifest is {"sha256", "text"}."""


class CheckpointDamaged(Exception):
    """A checkpoint's files are not the ones its manifest names."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """State after `iteration` trained batches.

    `files`: safetensors bytes by name: weights, ema, optimizer. `evaluations`: (iteration, metrics) so far.
    `std`: the running reward std (std: ema), or None. `config_digest`: of the engine's config. `exploration`: what
    the explorer knows, as JSON values (engine/exploration/explorer.py); empty: nothing yet. `base`: the look of the
    base model's evaluation pictures (engine/drift.py); None in what an earlier version wrote.
    """

    iteration: int
    lineage: int
    next_batch: Manifest
    files: Mapping[str, bytes]
    evaluations: tuple[tuple[int, dict[str, float]], ...]
    std: float | None
    skipped_in_a_row: int
    config_digest: str
    exploration: Mapping[str, Any]
    base: Look | None = None

    @property
    def name(self) -> str:
        return checkpoint_name(self.lineage, self.iteration)


def checkpoint_name(lineage: int, iteration: int) -> str:
    return f"l{lineage:04d}-i{iteration:06d}"


@dataclass(frozen=True, kw_only=True)
class Start:
    """Weights that a run starts from. `text`: whose they are, in words."""

    text: str
    weights: bytes


class CheckpointStore:
    """Checkpoints of one run, in a bucket or a folder (obstore URL).

    Making one raises OSError when S3 does not say in which region the bucket is.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._store: ObjectStore = open_store(url)

    def claim_lineage(self) -> int:
        """A lineage that nobody had before, the first is 1."""
        lineage = 1 + max((int(path.rsplit("/", 1)[1]) for path in self._paths("lineages/")), default=0)
        while True:
            try:
                with self._trouble_is_an_oserror():
                    obstore.put(self._store, f"lineages/{lineage:04d}", b"claimed", mode="create")
                return lineage
            except AlreadyExistsError:
                lineage += 1

    def write_files(self, name: str, files: Mapping[str, bytes]) -> dict[str, str]:
        """The files of a checkpoint that counts only once it is saved. Returns their digests, for `save`."""

        def put(item: tuple[str, bytes]) -> tuple[str, str]:
            file, data = item
            self.put(f"checkpoints/{name}/{file}.safetensors", data)
            return file, hashlib.sha256(data).hexdigest()

        # Side by side: hashing and writing both let other threads run, and the trainer waits for nothing else.
        with ThreadPoolExecutor() as pool:
            return dict(pool.map(put, files.items()))

    def save(self, checkpoint: Checkpoint, *, keep: int, digests: Mapping[str, str] | None = None) -> str:
        """Write it, the manifest last; then drop what is older but the newest `keep`. Returns the weights' digest.

        digests: of its files, when they are written already
        """
        folder = f"checkpoints/{checkpoint.name}"
        if digests is None:
            digests = self.write_files(checkpoint.name, checkpoint.files)
        manifest: dict[str, Any] = {
            "schema": SCHEMA,
            "iteration": checkpoint.iteration,
            "lineage": checkpoint.lineage,
            "next_batch": checkpoint.next_batch.to_dict(),
            "evaluations": [[iteration, metrics] for iteration, metrics in checkpoint.evaluations],
            "std": checkpoint.std,
            "skipped_in_a_row": checkpoint.skipped_in_a_row,
            "config_digest": checkpoint.config_digest,
            "exploration": checkpoint.exploration,
            "base": checkpoint.base.to_dict() if checkpoint.base is not None else None,
            "files": {f"{name}.safetensors": digest for name, digest in digests.items()},
        }
        self.put(f"{folder}/manifest.json", json.dumps(manifest, indent=1).encode())
        kept = self.names()[-keep:]
        # Also what never got its manifest: a trainer ended in between, or its machine was lost.
        for old in sorted({path.split("/")[1] for path in self._paths("checkpoints/")}.difference(kept)):
            if old > checkpoint.name:
                continue  # ours is an old lineage by now: the new one's are none of our business
            # The manifest goes first, so that a half-deleted checkpoint does not count.
            for path in sorted(self._paths(f"checkpoints/{old}/"), key=lambda path: not path.endswith(".json")):
                with self._trouble_is_an_oserror():
                    obstore.delete(self._store, path)
        return digests["weights"]

    def names(self) -> list[str]:
        """Complete checkpoints, oldest first."""
        paths = self._paths("checkpoints/")
        return sorted(path.split("/")[1] for path in paths if path.endswith("/manifest.json"))

    def newest(self) -> Checkpoint | None:
        """The checkpoint to go on from; one whose manifest was cut short does not count, and is said.

        Raises CheckpointDamaged when a file does not match its digest.
        """
        for name in reversed(self.names()):
            try:
                return self.load(name)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                print(f"checkpoint {name} does not count: its manifest was cut short ({error})", flush=True)
        return None

    def load(self, name: str) -> Checkpoint:
        folder = f"checkpoints/{name}"
        raw = json.loads(self._get(f"{folder}/manifest.json"))
        files = {}
        for file, digest in raw["files"].items():
            data = self._get(f"{folder}/{file}")
            if hashlib.sha256(data).hexdigest() != digest:
                raise CheckpointDamaged(f"{folder}/{file} is not what its manifest names; delete {folder} to go back")
            files[file.removesuffix(".safetensors")] = data
        return Checkpoint(
            iteration=raw["iteration"],
            lineage=raw["lineage"],
            next_batch=Manifest.from_dict(raw["next_batch"]),
            files=files,
            evaluations=tuple((iteration, metrics) for iteration, metrics in raw["evaluations"]),
            std=raw["std"],
            skipped_in_a_row=raw["skipped_in_a_row"],
            config_digest=raw["config_digest"],
            exploration=raw.get("exploration", {}),  # none in what an earlier version wrote
            base=Look.from_dict(raw["base"]) if raw.get("base") is not None else None,
        )

    def start(self) -> Start:
        """Return the start weights of the run. Raises CheckpointDamaged when they are not there, or not whole."""
        try:
            raw = json.loads(self._get(START_MANIFEST))
            data, digest, text = self._get(START_WEIGHTS), str(raw["sha256"]), str(raw["text"])
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise CheckpointDamaged(
                f"the start weights (model.from) are not in {self.url} ({error}); launch the run again under a new name"
            ) from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise CheckpointDamaged(
                f"{START_WEIGHTS} in {self.url} is not what its manifest names; launch the run again under a new name"
            )
        return Start(text=text, weights=data)

    def put(self, path: str, data: bytes) -> None:
        """One object, e.g. something to look at beside the checkpoints: evaluation/000012.png."""
        with self._trouble_is_an_oserror():
            obstore.put(self._store, path, data)

    def size(self, path: str) -> int:
        """Return an object's size in bytes; 0 when there is none."""
        with self._trouble_is_an_oserror():
            try:
                return int(obstore.head(self._store, path)["size"])
            except FileNotFoundError:
                return 0

    def _get(self, path: str) -> bytes:
        with self._trouble_is_an_oserror():
            return bytes(obstore.get(self._store, path).bytes())

    def _paths(self, prefix: str) -> list[str]:
        with self._trouble_is_an_oserror():
            return [item["path"] for page in obstore.list(self._store, prefix=prefix) for item in page]

    @contextmanager
    def _trouble_is_an_oserror(self) -> Iterator[None]:
        """obstore has one error for everything a disk can say, the number is in its text, and for a bucket's silence.

        What a bucket means for good (no permission, no such bucket) has errors of its own, and they come through.
        """
        try:
            yield
        except BaseError as error:
            said = str(error).split("\n")[0]
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is not None and int(number[1]) in FULL:
                raise OSError(int(number[1]), said) from error
            refused = re.search(r"status code: 4(?!08|29)\d\d", said)
            if isinstance(error, GenericError) and not refused and not isinstance(self._store, LocalStore):
                raise OSError(AWAY, said) from error
            raise
