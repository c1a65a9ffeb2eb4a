"""Checkpoints: the full state for a new machine to continue the run exactly from the last iteration.

    checkpoints/l0001-i000012/{weights,ema,optimizer}.safetensors, then manifest.json
    lineages/0001                                                  one per lineage, created once
    start/weights.safetensors, then manifest.json                  start weights, written by the launcher (model.from)

A checkpoint counts once its manifest exists, and the manifest is written last. The files may be written earlier, while
parts of the manifest are still unknown. The checkpoint also contains the manifest of the *next* batch: exploration for
the next batch used weights that no longer exist, and a new choice of seeds could differ. The newest checkpoint is the
highest lineage, then the highest iteration. A trainer whose node was given up, and which goes on all the same, writes
under an old lineage. It deletes nothing and saves nothing once a newer lineage is claimed. A new trainer claims its
lineage before it looks for the newest checkpoint, so the old trainer cannot delete that checkpoint.

Writing raises OSError if the store is a full disk. Every call raises OSError if the store is a bucket that does not
answer. The caller may then retry: nothing counts yet.
"""

import errno
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError
from obstore.store import LocalStore, ObjectStore

from engine.drift import Look
from engine.durable import sync_folder, write_durably
from engine.protocol.draft import Draft
from engine.protocol.request import Manifest
from engine.storage.bucket import folder_of, open_store
from engine.storage.disk import AWAY, FULL
from engine.storage.tensor_files import Stored, TensorFile, copy_durably, link_durably, write_all

SCHEMA = 1

START_WEIGHTS, START_MANIFEST = "start/weights.safetensors", "start/manifest.json"
"""launcher/runs/start.py writes both; the manifest is {"sha256", "text"}."""

READ_BYTES, READ_AT_ONCE = 16 << 20, 4
"""Bytes of a part of a file that a bucket sends, and parts under way at once. A part that breaks is asked for again."""


class CheckpointDamaged(Exception):
    """The files of a checkpoint do not match its manifest."""


class Superseded(Exception):
    """Another trainer has claimed a newer lineage of the run: what this one does no longer counts."""


@dataclass(frozen=True, kw_only=True)
class RowsThatFit:
    """Most rows of a training pass, found after memory errors on a device. `device`: the device's name in torch."""

    device: str
    rows: int


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state after `iteration` trained batches.

    `files`: stored tensors by name: weights, ema, optimizer. Empty while the checkpoint is made. `evaluations`: all
    (iteration, metrics) until now.
    `std`: the running reward std (std: ema), or None. `config_digest`: of the engine's config. `exploration`: the
    explorer's state as JSON values (engine/exploration/explorer.py); empty: no state yet. `base`: the look of the base
    model's evaluation images (engine/drift.py); None in checkpoints of earlier versions. `fits`: None also in
    checkpoints of earlier versions.
    """

    iteration: int
    lineage: int
    next_batch: Manifest
    files: Mapping[str, Stored]
    evaluations: tuple[tuple[int, dict[str, float]], ...]
    std: float | None
    skipped_in_a_row: int
    config_digest: str
    exploration: Mapping[str, Any]
    base: Look | None = None
    fits: RowsThatFit | None = None
    early_off_until: int = 0
    """First batch that may have early groups; 0 also in checkpoints of earlier versions."""
    unlearned: int = 0
    """Batches in a row that taught nothing; 0 also in checkpoints of earlier versions."""
    has_learned: bool = True
    """False: no batch changed the weights. True also in checkpoints of earlier versions, which do not say it."""

    @property
    def name(self) -> str:
        return checkpoint_name(self.lineage, self.iteration)


def _draft_path(lineage: int, batch: int) -> str:
    return f"drafts/{checkpoint_name(lineage, batch)}.json"


def checkpoint_name(lineage: int, iteration: int) -> str:
    return f"l{lineage:04d}-i{iteration:06d}"


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start weights of a run. `text`: the origin of the weights, in words."""

    text: str
    weights: Stored


class CheckpointStore:
    """The checkpoints of a run, in a bucket or a folder (obstore URL).

    `node`: name of the node whose trainer writes; empty for a reader. Creating a store raises OSError if S3 does not
    return the region of the bucket.
    """

    def __init__(self, url: str, node: str = "") -> None:
        self.url, self.node = url, node
        self._store: ObjectStore = open_store(url)
        self._folder = folder_of(url)
        """The store as a folder; None: a bucket."""

    def claim_lineage(self) -> int:
        """Claim and return a new lineage number for the trainer of this node. The first lineage is 1."""
        lineage = 1 + self.newest_lineage()
        while True:
            try:
                with self._trouble_is_an_oserror():
                    obstore.put(self._store, f"lineages/{lineage:04d}", self.node.encode(), mode="create")
                return lineage
            except AlreadyExistsError:
                lineage += 1

    def newest_lineage(self) -> int:
        """Return the newest claimed lineage; 0 before the first."""
        return max((int(path.rsplit("/", 1)[1]) for path in self._paths("lineages/")), default=0)

    def check_lineage(self, lineage: int) -> None:
        """Raise Superseded if another node has claimed a newer lineage than this one.

        This node may have claimed one itself: its trainer then died before the coordinator began that lineage.
        """
        newest = self.newest_lineage()
        if newest > lineage and (claimed_by := self.get(f"lineages/{newest:04d}").decode()) != self.node:
            raise Superseded(f"lineage {newest} of the run is claimed by {claimed_by}, which is the trainer's node now")

    def write_files(self, name: str, files: Mapping[str, TensorFile | Stored]) -> dict[str, str]:
        """Write the files of a checkpoint and return their digests for `save`.

        The checkpoint counts only after `save`.
        """

        def put(entry: tuple[str, TensorFile | Stored]) -> tuple[str, str]:
            file, data = entry
            path = f"checkpoints/{name}/{file}.safetensors"
            if isinstance(data, TensorFile):
                self.take_over(path, data)
                return file, data.digest
            self.put(path, data.to_bytes())
            return file, data.digest()

        # In parallel: the trainer only waits for them.
        with ThreadPoolExecutor() as pool:
            return dict(pool.map(put, files.items()))

    def take_over(self, path: str, file: TensorFile) -> None:
        """Put a file into the store: by a second name on the same disk, else in pieces."""
        if self._folder is not None:
            try:
                self._make_folder(self._folder / path)
                link_durably(file.path, self._folder / path)
                return
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                    raise
            copy_durably(file, self._folder / path)
            return
        with self._trouble_is_an_oserror():
            obstore.put(self._store, path, file.path)

    def _make_folder(self, path: Path) -> None:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            sync_folder(path.parent.parent)

    def save(self, checkpoint: Checkpoint, *, keep: int, digests: Mapping[str, str] | None = None) -> str:
        """Write a checkpoint, the manifest last, and return the digest of its weights.

        After the write, delete all older checkpoints except the newest `keep`. Raises Superseded, and deletes nothing,
        if another node has claimed a newer lineage.

        digests: of the checkpoint's files, if the files are written already
        """
        self.check_lineage(checkpoint.lineage)
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
            "fits": asdict(checkpoint.fits) if checkpoint.fits is not None else None,
            "early_off_until": checkpoint.early_off_until,
            "unlearned": checkpoint.unlearned,
            "has_learned": checkpoint.has_learned,
            "files": {f"{name}.safetensors": digest for name, digest in digests.items()},
        }
        self.put(f"{folder}/manifest.json", json.dumps(manifest, indent=1).encode())
        # A trainer that claims a lineage from here on finds this checkpoint, which is kept, and not an older one.
        self.check_lineage(checkpoint.lineage)
        kept = self.names()[-keep:]
        # Also delete folders without a manifest: the trainer or its machine stopped during the write.
        for old in sorted({path.split("/")[1] for path in self._paths("checkpoints/")}.difference(kept)):
            if old > checkpoint.name:
                continue  # our lineage is old by now: leave the checkpoints of the new lineage alone
            # Delete the manifest first: a half-deleted checkpoint then does not count.
            for path in sorted(self._paths(f"checkpoints/{old}/"), key=lambda path: not path.endswith(".json")):
                with self._trouble_is_an_oserror():
                    obstore.delete(self._store, path)
        return digests["weights"]

    def names(self) -> list[str]:
        """Return the names of complete checkpoints, oldest first."""
        paths = self._paths("checkpoints/")
        return sorted(path.split("/")[1] for path in paths if path.endswith("/manifest.json"))

    def newest_place(self) -> tuple[int, int] | None:
        """Return lineage and iteration of the newest checkpoint by its name, or None."""
        names = self.names()
        return None if not names else (int(names[-1][1:5]), int(names[-1].partition("-i")[2]))

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint with a complete manifest, or None. Print the name of each skipped checkpoint.

        Raises CheckpointDamaged if a file does not match its digest.
        """
        for name in reversed(self.names()):
            try:
                return self.load(name)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                print(f"checkpoint {name} does not count: its manifest was cut short ({error})", flush=True)
        return None

    def load(self, name: str) -> Checkpoint:
        folder = f"checkpoints/{name}"
        raw = json.loads(self.get(f"{folder}/manifest.json"))
        files = {}
        for file, digest in raw["files"].items():
            data = self._open(f"{folder}/{file}")
            if data.digest() != digest:
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
            exploration=raw.get("exploration", {}),  # missing in checkpoints of earlier versions
            base=Look.from_dict(raw["base"]) if raw.get("base") is not None else None,
            fits=RowsThatFit(**raw["fits"]) if raw.get("fits") is not None else None,
            early_off_until=raw.get("early_off_until", 0),
            unlearned=raw.get("unlearned", 0),
            has_learned=raw.get("has_learned", True),
        )

    def start(self) -> Start:
        """Return the start weights of the run. Raises CheckpointDamaged if the weights are missing or incomplete."""
        try:
            raw = json.loads(self.get(START_MANIFEST))
            data, digest, text = self._open(START_WEIGHTS), str(raw["sha256"]), str(raw["text"])
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise CheckpointDamaged(
                f"the start weights (model.from) are not in {self.url} ({error}); launch the run again under a new name"
            ) from None
        if data.digest() != digest:
            raise CheckpointDamaged(
                f"{START_WEIGHTS} in {self.url} is not what its manifest names; launch the run again under a new name"
            )
        return Start(text=text, weights=data)

    def put(self, path: str, data: bytes) -> None:
        """Write an object, for example an image to view beside the checkpoints: evaluation/000012.png."""
        if self._folder is not None:
            self._make_folder(self._folder / path)
            write_durably(self._folder / path, data)
            return
        with self._trouble_is_an_oserror():
            obstore.put(self._store, path, data)

    def put_draft(self, draft: Draft) -> None:
        """Write a draft of early groups, and delete drafts of earlier batches."""
        path = _draft_path(draft.lineage, draft.batch)
        self.put(path, draft.to_bytes())
        for old in self._paths("drafts/"):
            if old < _draft_path(draft.lineage, draft.batch - 1):
                with self._trouble_is_an_oserror():
                    obstore.delete(self._store, old)

    def draft(self, lineage: int, batch: int) -> Draft | None:
        """Return a batch's draft, or None. A draft that cannot be read counts as absent."""
        try:
            return Draft.from_bytes(self.get(_draft_path(lineage, batch)))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def size(self, path: str) -> int:
        """Return an object's size in bytes, or 0 if the object does not exist."""
        with self._trouble_is_an_oserror():
            try:
                return int(obstore.head(self._store, path)["size"])
            except FileNotFoundError:
                return 0

    def _open(self, path: str) -> Stored:
        """Return a large object for reading in pieces: in place, or copied from the bucket to a file without a name.

        Raises FileNotFoundError, or OSError if the bucket does not answer or the disk is full.
        """
        if self._folder is not None:
            return Stored.of_path(self._folder / path)
        with self._trouble_is_an_oserror():
            size = int(obstore.head(self._store, path)["size"])
            with tempfile.TemporaryFile(buffering=0) as file:
                for at in range(0, size, READ_AT_ONCE * READ_BYTES):
                    starts = range(at, min(size, at + READ_AT_ONCE * READ_BYTES), READ_BYTES)
                    ends = [min(size, start + READ_BYTES) for start in starts]
                    for piece in obstore.get_ranges(self._store, path, starts=list(starts), ends=ends):
                        write_all(file, memoryview(piece))
                return Stored.of_file(file)

    def get(self, path: str) -> bytes:
        with self._trouble_is_an_oserror():
            return bytes(obstore.get(self._store, path).bytes())

    def _paths(self, prefix: str) -> list[str]:
        with self._trouble_is_an_oserror():
            return [entry["path"] for page in obstore.list(self._store, prefix=prefix) for entry in page]

    @contextmanager
    def _trouble_is_an_oserror(self) -> Iterator[None]:
        """Raise OSError for a full disk or a bucket that does not answer.

        obstore has a single error type for both cases; a disk's error number is in the error's text. Permanent errors
        of a bucket (no permission, no such bucket) have their own types and pass through unchanged.
        """
        try:
            yield
        except BaseError as error:
            text = str(error).split("\n")[0]
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is not None and int(number[1]) in FULL:
                raise OSError(int(number[1]), text) from error
            refused = re.search(r"status code: 4(?!08|29)\d\d", text)
            if isinstance(error, GenericError) and not refused and not isinstance(self._store, LocalStore):
                raise OSError(AWAY, text) from error
            raise
