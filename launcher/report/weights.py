"""Find a run's newest complete checkpoint, and copy its weights and metrics to a folder.

Checkpoints lie in the run's stores: a folder on the local infra, a bucket on each cloud used by the run. A checkpoint
counts when its manifest exists, because the manifest is written last (engine/storage/checkpoint.py). A checkpoint's
name, `l0002-i000012`, sorts by lineage and then by iteration. The copied bytes match the digests in the manifest. A
file appears in the target folder complete or not at all.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.store import ObjectStore

from engine.durable import write_durably
from launcher.exit_codes import Failure
from launcher.storage.stores import bucket_errors, newest_checkpoint, paths_in

WANTED = ("weights.safetensors", "ema.safetensors")

PULLED_MANIFEST = "manifest.json"
"""File in the folder written by `spotrl pull`, with the run, the checkpoint and the digests of the weights. Another
run can start from the weights (launcher/runs/start.py)."""

METRICS = "metrics/"
"""Folder in a store with `metrics/NODE/metrics.jsonl` and TensorBoard's event files (engine/storage/ship.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PulledFile:
    path: Path
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    checkpoint: str
    iteration: int
    files: tuple[PulledFile, ...]


def pull_weights(run_name: str, stores: Sequence[ObjectStore], to: Path, wanted: Sequence[str] = WANTED) -> Pulled:
    """Copy the weights and EMA weights of the newest complete checkpoint in any of `stores` to the folder `to`.

    `wanted`: the files to copy, a subset of `WANTED`.

    Raises Failure if no complete checkpoint exists or the checkpoint is damaged, StoreError if a store cannot be read.
    """
    with bucket_errors(f"the checkpoints of {run_name}"):
        found = [(name, store) for store in stores if (name := newest_checkpoint(store)) is not None]
        if not found:
            raise Failure(f"{run_name} has no complete checkpoint yet; `spotrl status {run_name}` shows how far it is")
        newest, store = max(found, key=lambda one: one[0])
        manifest = json.loads(bytes(obstore.get(store, f"checkpoints/{newest}/manifest.json").bytes()))
        try:
            iteration, digests = int(manifest["iteration"]), {name: str(manifest["files"][name]) for name in wanted}
        except (KeyError, TypeError, ValueError):
            raise Failure(
                f"the manifest of checkpoint {newest} of {run_name} is damaged; move checkpoints/{newest} away in its "
                "store to pull the checkpoint before it"
            ) from None
        to.mkdir(parents=True, exist_ok=True)
        files = tuple(
            PulledFile(path=to / name, sha256=_copy(store, f"checkpoints/{newest}/{name}", to / name, digest))
            for name, digest in digests.items()
        )
    return Pulled(checkpoint=newest, iteration=iteration, files=files)


def check_folder(to: Path, run_name: str, others: Sequence[str]) -> None:
    """Refuse a folder with files that are not of an earlier pull of this run, and would be replaced. Raises Failure.

    `others`: names of files that are written beside the weights.
    """
    remedy = "name another folder with --to, or move it away"
    try:
        manifest = json.loads((to / PULLED_MANIFEST).read_text("utf-8"))
        before = manifest["run"] if "checkpoint" in manifest else None
    except (ValueError, KeyError, TypeError, OSError):
        before = None
    if before is None and (found := [name for name in (PULLED_MANIFEST, *others) if (to / name).exists()]):
        raise Failure(f"{to} holds {found[0]}, which no `spotrl pull` wrote; {remedy}")
    if before not in (None, run_name):
        raise Failure(f"{to} holds the weights of {before}; {remedy}")


def write_pulled_manifest(folder: Path, run_name: str, model: Mapping[str, Any], pulled: Pulled) -> Path:
    """Write the manifest of the pulled weights in `folder`, and return its path. `model`: the job's model section."""
    file = folder / PULLED_MANIFEST
    content = {
        "run": run_name,
        "checkpoint": pulled.checkpoint,
        "iteration": pulled.iteration,
        "model": dict(model),
        "files": {one.path.name: one.sha256 for one in pulled.files},
    }
    write_durably(file, (json.dumps(content, indent=1) + "\n").encode())
    return file


def pull_metrics(run_name: str, stores: Sequence[ObjectStore], to: Path) -> tuple[Path, ...]:
    """Copy metrics.jsonl and TensorBoard's files of every trainer node to `to`/metrics/NODE. Return the copied files.

    Raises StoreError if a store cannot be read.
    """
    copied = []
    with bucket_errors(f"the metrics of {run_name}"):
        for store in stores:
            for path in paths_in(store, METRICS):
                (to / path).parent.mkdir(parents=True, exist_ok=True)
                _copy(store, path, to / path)
                copied.append(to / path)
    return tuple(copied)


def _copy(store: ObjectStore, source: str, target: Path, digest: str | None = None) -> str:
    """Copy an object piece by piece and return its sha256. Raises Failure if the sha256 differs from `digest`."""
    unfinished, found = target.with_name(f"{target.name}.part"), hashlib.sha256()
    try:
        with unfinished.open("wb") as file:
            for piece in obstore.get(store, source).stream():
                found.update(piece)
                file.write(piece)
        if digest is not None and found.hexdigest() != digest:
            raise Failure(
                f"{source} is damaged: its sha256 is {found.hexdigest()}, its manifest names {digest}; "
                f"move {source.rpartition('/')[0]} away in its store to pull the checkpoint before it"
            )
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return found.hexdigest()
