"""Trained weights: find a run's newest complete checkpoint, check it against its manifest, copy it out.

A checkpoint counts when its manifest is there, because that is written last (engine/training/checkpoint.py). Its
name, `l0002-i000012`, sorts by lineage and then by iteration. What is copied is byte for byte what the manifest
names, and a file appears in the target folder whole or not at all.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from launcher.exit_codes import Failure

WANTED = ("weights.safetensors", "ema.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class PulledFile:
    path: Path
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    checkpoint: str
    iteration: int
    files: tuple[PulledFile, ...]


def pull_weights(run_name: str, store: Path, to: Path) -> Pulled:
    """Copy weights and EMA weights of the newest complete checkpoint in `store` to the folder `to`."""
    complete = sorted(path.parent for path in (store / "checkpoints").glob("*/manifest.json"))
    if not complete:
        raise Failure(f"{run_name} has no complete checkpoint yet; `spotrl status {run_name}` shows how far it is")
    newest = complete[-1]
    manifest = json.loads((newest / "manifest.json").read_text("utf-8"))
    to.mkdir(parents=True, exist_ok=True)
    files = tuple(_copy(newest / name, to / name, manifest["files"][name]) for name in WANTED)
    return Pulled(checkpoint=newest.name, iteration=int(manifest["iteration"]), files=files)


def _copy(source: Path, target: Path, digest: str) -> PulledFile:
    data = source.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise Failure(
            f"{source} is damaged: its sha256 is {found}, its manifest names {digest}; "
            f"move {source.parent} away to pull the checkpoint before it"
        )
    unfinished = target.with_name(f"{target.name}.part")
    unfinished.write_bytes(data)
    os.replace(unfinished, target)
    return PulledFile(path=target, sha256=found)
