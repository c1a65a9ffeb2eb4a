"""The buckets of a run: storage of checkpoints and logs on real clouds, one bucket per cloud.

Nodes write to the bucket of their own cloud, with their own identity. After a failover to another cloud, the newest
whole checkpoint is copied over before a trainer starts there: files first, the manifest last. So an interrupted copy
does not count and is repeated. The launcher uses the credentials of boto3 and Google's libraries, and takes endpoints
from the environment.
"""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import GCSStore, ObjectStore, S3Store, from_url

from launcher.exit_codes import ExitCode, Failure

if TYPE_CHECKING:
    from obstore.store import RetryConfig

PROBE = "spotrl-probe"

JUDGES = "judges/taken.json"
"""How much of the paid judges' budget is taken (engine/storage/judge_fund.py): {"micro_usd": ...}."""

RETRIES: "RetryConfig" = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
"""Retry limits: a bucket that does not answer is reported within half a minute, and later callers try again."""


class StoreError(Failure):
    """A bucket is unusable."""


class StoreDenied(StoreError):
    """A bucket refuses these credentials."""

    exit_code = ExitCode.CREDENTIALS


def run_store(store: Mapping[str, str], cloud: str, run: str) -> str:
    """Return the obstore URL of the run's checkpoints on a cloud. KeyError if the job names no bucket for the cloud."""
    return f"{store[cloud].rstrip('/')}/{run}"


def run_folders(infra: str, store: Mapping[str, str], run: str) -> dict[str, str]:
    """Return the URL of the run's folder in the bucket of each of its clouds, by cloud. Empty on the local infra."""
    return {cloud: run_store(store, cloud, run) for cloud in infra.split(",") if cloud in store}


def open_store(url: str) -> ObjectStore:
    """Return the store behind a URL, with this user's credentials. Raises StoreError."""
    bucket = url.partition("://")[2].partition("/")[0]
    try:
        if url.startswith("s3://"):
            return _s3(url, bucket)
        if url.startswith("gs://"):
            return GCSStore.from_url(url, retry_config=RETRIES)
        return from_url(url)
    except (BaseError, ValueError) as error:
        raise StoreError(
            f"{url} cannot be opened ({_first_line(error)}); check its name and your credentials"
        ) from None


def run_stores(infra: str, store: Mapping[str, str], run: str, folder: Path) -> list[ObjectStore]:
    """Open every store that a run may have written to: one bucket for each cloud, or the run's folder on this machine.

    Raises StoreError. A missing folder is no store.
    """
    if folders := run_folders(infra, store, run):
        return [open_store(url) for url in folders.values()]
    store_folder = folder / "store"
    return [open_store(store_folder.as_uri())] if store_folder.is_dir() else []


def read_object(stores: Sequence[ObjectStore], path: str) -> bytes | None:
    """Return an object from the first store that has the object; None if no store has it. Raises StoreError."""
    with bucket_errors(path):
        for store in stores:
            try:
                return bytes(obstore.get(store, path).bytes())
            except (FileNotFoundError, ValueError):  # ValueError: no path inside a store
                continue
    return None


@contextmanager
def bucket_errors(source: str) -> Iterator[None]:
    """Convert a bucket's errors while reading `source` to StoreError."""
    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise StoreDenied(
            f"{source} may not be read with these credentials ({_first_line(error)}); "
            "`spotrl check --print-policy aws` (or gcp) prints what they need"
        ) from None
    except BaseError as error:
        raise StoreError(f"{source} cannot be read ({_first_line(error)}); try again when the bucket answers") from None


def check_writable(url: str) -> None:
    """Write, read and delete a small object. Raises StoreError, which names the bucket and the remedy."""
    store = open_store(url)
    path, words = f"{PROBE}-{secrets.token_hex(8)}", b"may this run keep its checkpoints here?"
    try:
        obstore.put(store, path, words)
        whole = bytes(obstore.get(store, path).bytes()) == words
        obstore.delete(store, path)
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise StoreDenied(
            f"{url} may not be written, read and deleted in with these credentials ({_first_line(error)}); "
            "`spotrl check --print-policy aws` (or gcp) prints what they need"
        ) from None
    except (BaseError, OSError) as error:
        raise StoreError(
            f"{url} cannot be used ({_first_line(error)}); does the bucket exist, in this account?"
        ) from None
    if not whole:
        raise StoreError(f"{url} gave back other bytes than it was given; use another bucket")


def check_no_checkpoint(url: str) -> None:
    """Raise StoreError if the store of a new run holds a checkpoint of an earlier run.

    A trainer goes on from the newest checkpoint in its store. A run of this name that only another ledger knows, or a
    ledger that is lost, must not be continued by accident.
    """
    checkpoint = newest_checkpoint(open_store(url))
    if checkpoint is not None:
        raise StoreError(
            f"{url} holds the checkpoint {checkpoint} of an earlier run of this name, and a new run would go on from "
            "it; give this run another name (--name), or move that folder away"
        )


def bucket_region(url: str) -> str:
    """Return the region of an S3 bucket, in `us-east-1` style. Raises StoreError."""
    import boto3  # only for runs on AWS
    from botocore.exceptions import BotoCoreError, ClientError

    bucket = url.partition("://")[2].partition("/")[0]
    try:
        place = boto3.Session().client("s3").get_bucket_location(Bucket=bucket).get("LocationConstraint")
    except (BotoCoreError, ClientError) as error:
        raise StoreError(f"nobody says in which region {bucket} is ({_first_line(error)}); does it exist?") from None
    region: str = {None: "us-east-1", "": "us-east-1", "EU": "eu-west-1"}.get(place, place)
    return region


def newest_checkpoint(store: ObjectStore) -> str | None:
    """Return the name of the newest whole checkpoint (engine/storage/checkpoint.py).

    Whole means that the manifest can be read.
    """
    return next((name for name in sorted(_whole(store), reverse=True) if _is_manifest(store, name)), None)


def carry_over(source: ObjectStore, target: ObjectStore) -> str | None:
    """Copy the newest whole checkpoint and the list of lineages. Return the checkpoint's name; None: no checkpoint yet.

    The taken part of the judges' budget comes first: a trainer without it would spend the budget a second time. May be
    repeated, and interrupted anywhere: the manifest counts, and is copied last. Bytes pass through this machine,
    because no cloud copies from another cloud's buckets.
    """
    _carry_taken_part(source, target)
    for path in paths_in(source, "lineages/"):
        obstore.put(target, path, b"claimed")
    name = newest_checkpoint(source)
    if name is None or (name in _whole(target) and _is_manifest(target, name)):
        return name
    for path in sorted(paths_in(source, f"checkpoints/{name}/"), key=lambda path: path.endswith("/manifest.json")):
        with obstore.open_writer(target, path) as writer:  # in pieces: a checkpoint need not fit in memory
            for piece in obstore.get(source, path).stream():
                writer.write(piece)
    return name


def _carry_taken_part(source: ObjectStore, target: ObjectStore) -> None:
    """Copy the taken part of the judges' budget, unless the target knows of a larger part.

    An object that cannot be read counts as the whole budget, on either side.
    """
    try:
        source_part = bytes(obstore.get(source, JUDGES).bytes())
    except FileNotFoundError:
        return
    try:
        target_micro_usd = _taken_micro_usd(bytes(obstore.get(target, JUDGES).bytes()))
    except FileNotFoundError:
        target_micro_usd = -1.0
    if target_micro_usd < _taken_micro_usd(source_part):
        obstore.put(target, JUDGES, source_part)


def _taken_micro_usd(content: bytes) -> float:
    try:
        return float(json.loads(content)["micro_usd"])
    except (ValueError, KeyError, TypeError):
        return inf


def _s3(url: str, bucket: str) -> ObjectStore:
    import boto3  # only for runs on AWS
    from obstore.auth.boto3 import Boto3CredentialProvider

    region = bucket_region(url)
    session = boto3.Session(region_name=region)
    if session.get_credentials() is None:
        raise StoreDenied(f"there are no AWS credentials for {bucket}; `aws configure`, or AWS_PROFILE, then try again")
    credentials = Boto3CredentialProvider(session)
    return S3Store.from_url(url, region=region, credential_provider=credentials, retry_config=RETRIES)


def _whole(store: ObjectStore) -> set[str]:
    return {path.split("/")[1] for path in paths_in(store, "checkpoints/") if path.endswith("/manifest.json")}


def _is_manifest(store: ObjectStore, name: str) -> bool:
    """Return whether the manifest can be read. A store that writes in pieces may hold a partial manifest."""
    try:
        json.loads(bytes(obstore.get(store, f"checkpoints/{name}/manifest.json").bytes()))
    except ValueError:
        return False
    return True


def paths_in(store: ObjectStore, prefix: str) -> list[str]:
    """Return every object below `prefix`."""
    return [entry["path"] for page in obstore.list(store, prefix=prefix) for entry in page]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
