"""Start weights: find and check the weights named in `model.from` before a purchase, then copy them to the run's
stores.

    a run, or a folder of `spotrl pull` -> weights.safetensors, copied and checked by digest -> check the fit to the job
    -> STORE/start/weights.safetensors, then manifest.json    (engine/storage/checkpoint.py reads both)

Only the trainer reads the start weights: rollout nodes get the published weights. The start weights stay in every store
of the run, so that a trainer on another node or cloud still knows the baseline of the run.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore
from pydantic import ValidationError
from sqlalchemy.orm import Session, sessionmaker

from engine.config import ModelConfig
from engine.lora_file import LoraFile, read_lora
from engine.model_parts import FolderError
from launcher.exit_codes import Failure
from launcher.job.checked import CheckedJob, JobError
from launcher.job.schema import Job
from launcher.ledger.store import check_kept, find_run
from launcher.report.weights import PULLED_MANIFEST, pull_weights
from launcher.runs.run_buckets import buckets_of
from launcher.storage.stores import StoreError, open_store, run_store, run_stores

WEIGHTS = "weights.safetensors"

START_WEIGHTS, START_MANIFEST = "start/weights.safetensors", "start/manifest.json"
"""Paths in a store, as engine/storage/checkpoint.py reads; the manifest is {"sha256", "text"}."""

MOST_HEADER_BYTES = 100_000_000
"""Largest header of a file, safetensors' own limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartWeights:
    """Start weights, copied to this machine. `text`: the origin, as text."""

    file: Path
    sha256: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    name: str
    model: ModelConfig
    checkpoint: str
    sha256: str


def find_start(sessions: sessionmaker[Session], checked: CheckedJob, place: Path) -> StartWeights:
    """Copy the start weights that a job names (model.from) into the folder `place`.

    Raises JobError if the weights are missing, damaged or do not fit; StoreError if a bucket cannot be read.
    """
    source, file = checked.job.model.start or "", place / WEIGHTS
    try:
        origin = _from_folder(checked.workdir / source, file) if "/" in source else _from_run(sessions, source, place)
    except StoreError:
        raise
    except (Failure, LookupError) as error:
        raise _refused(
            checked, str(error.args[0]), "name a run of `spotrl ls`, or a folder that `spotrl pull` wrote"
        ) from None
    _check_fits(checked, origin, file)
    return StartWeights(
        file=file,
        sha256=origin.sha256,
        text=f"{origin.name}, checkpoint {origin.checkpoint}, sha256 {origin.sha256[:12]}",
    )


def send_start(start: StartWeights, job: Job, folder: Path) -> None:
    """Copy start weights into every store of the run. May be killed anywhere and repeated. Raises StoreError.

    `folder`: the run's folder, which holds the store on the local infra.
    """
    urls = [run_store(job.store, cloud, job.name) for cloud in job.clouds]
    if not urls:
        (folder / "store").mkdir(parents=True, exist_ok=True, mode=0o700)
        urls = [(folder / "store").as_uri()]
    manifest = json.dumps({"sha256": start.sha256, "text": start.text}).encode()
    for url in urls:
        store = open_store(url)
        try:
            obstore.put(store, START_WEIGHTS, start.file)
            obstore.put(store, START_MANIFEST, manifest)
        except (BaseError, OSError) as error:
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            raise StoreError(f"the start weights cannot be sent to {url} ({first_line}); launch again") from None


def copy_start(stores: Sequence[ObjectStore], to: Path) -> Path:
    """Copy the start weights of a run out of its stores. Raises Failure if no store has the weights."""
    for store in stores:
        try:
            to.write_bytes(bytes(obstore.get(store, START_WEIGHTS).bytes()))
            return to
        except FileNotFoundError:
            continue
    raise Failure("the start weights of this run are in none of its stores")


def _from_run(sessions: sessionmaker[Session], name: str, place: Path) -> _Source:
    with sessions() as session:
        run = find_run(session, name)
        if not buckets_of(run):
            check_kept(session, run)
        infra, job, folder = run.infra, run.job, Path(run.folder)
    pulled = pull_weights(name, run_stores(infra, job.get("store") or {}, name, folder), place, [WEIGHTS])
    return _Source(
        name=name,
        model=ModelConfig.model_validate(job.get("model") or {}),
        checkpoint=pulled.checkpoint,
        sha256=pulled.files[0].sha256,
    )


def _from_folder(folder: Path, to: Path) -> _Source:
    """Copy the weights from a folder of `spotrl pull`. Raises Failure with the folder's name in every message."""
    again = "pull the weights again: `spotrl pull RUN --to FOLDER`"
    if not (folder / PULLED_MANIFEST).is_file() and (lora := _lora_in(folder)) is not None:
        raise Failure(f"{folder} is no folder of `spotrl pull`, but a LoRA: {lora.text}; name it as model.lora")
    try:
        manifest: dict[str, Any] = json.loads((folder / PULLED_MANIFEST).read_text())
        source = _Source(
            name=str(manifest["run"]),
            model=ModelConfig.model_validate(manifest["model"]),
            checkpoint=str(manifest["checkpoint"]),
            sha256=str(manifest["files"][WEIGHTS]),
        )
    except FileNotFoundError:
        missing = "it" if not folder.is_dir() else PULLED_MANIFEST
        raise Failure(f"{folder} cannot be started from: {missing} is not there; {again}") from None
    except (ValueError, KeyError, TypeError, ValidationError, OSError) as error:
        error_type = type(error).__name__
        raise Failure(f"{folder / PULLED_MANIFEST} is damaged ({error_type}); {again}") from None
    try:
        shutil.copyfile(folder / WEIGHTS, to)
    except OSError as error:
        raise Failure(f"{folder / WEIGHTS} cannot be read ({error.strerror}); {again}") from None
    with to.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source.sha256:
        raise Failure(f"{folder / WEIGHTS} is not what {PULLED_MANIFEST} names: its sha256 is {digest}; {again}")
    return source


def _lora_in(path: Path) -> LoraFile | None:
    try:
        return read_lora(path)
    except FolderError:
        return None


def _check_fits(checked: CheckedJob, source: _Source, file: Path) -> None:
    """Refuse weights of another model. Raises JobError.

    The base's own weights are not compared: adapters of one base can be put on another, at the user's own risk.
    """
    ours, theirs = checked.job.model, source.model
    fields = ["name", "weights", *(["lora_rank", "lora_alpha"] if ours.weights == "lora" else [])]
    if ours.merged_lora != theirs.merged_lora:
        words = "without a merged LoRA" if theirs.lora is None else f"with {theirs.lora} ({theirs.lora_use})"
        raise _refused(
            checked,
            f"model.from is {ours.start}, which was trained {words}, and this job's base has "
            f"{'none' if ours.merged_lora is None else ours.lora}",
            "give both the same model.lora with lora_use: merge, or none",
        )
    for field in fields:
        mine, trained = getattr(ours, field), getattr(theirs, field)
        if mine != trained:
            raise _refused(
                checked,
                f"model.from is {ours.start}, which was trained with model.{field} {trained}, and this job has {mine}",
                f"use model.{field}: {trained}, or start from another run",
            )
    if (ours.path is None) != (theirs.path is None):
        raise _refused(
            checked,
            f"model.from is {ours.start}, which was trained on {theirs.path or 'the model that ships with spotrl'}, "
            f"and this job on {ours.path or 'that one'}",
            "give both the same model.path",
        )
    if not _is_whole(file):
        raise _refused(checked, f"model.from is {ours.start}, whose weights are no safetensors file", "pull them again")


def _is_whole(file: Path) -> bool:
    """Return whether a safetensors file has a readable header that matches the file's size."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= min(size - 8, MOST_HEADER_BYTES):
            return False
        try:
            header = json.loads(opened.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return False
    return bool(ends) and max(ends) == size - 8 - length


def _refused(checked: CheckedJob, text: str, remedy: str) -> JobError:
    head, _, own_remedy = text.partition("; ")
    return checked.error("model.from", head, own_remedy or remedy)
