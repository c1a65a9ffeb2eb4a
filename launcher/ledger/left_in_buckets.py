"""What runs left in their buckets, and its price a month.

spotrl never deletes a run's folder in a bucket, and the folder costs money after the run's end. The ledger has the size
of each folder as it was counted last, so its price needs no call to the cloud. Old versions of objects, unfinished
uploads and requests are not counted.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from launcher.harmless import harmless
from launcher.ledger.models import LOCAL, BucketSize, Run, wall_ms
from launcher.market.side_prices import storage_rate
from launcher.money import MICRO, dollars
from launcher.sizes import size_text
from launcher.storage.folder_sizes import FolderSize
from launcher.storage.stores import run_folders


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftInBucket:
    """The size and the price of a run's folder in one bucket, as counted last."""

    url: str
    bytes: int | None
    """None: unknown; `problem` says why, unless the folder was never counted."""
    is_whole: bool
    """False: `bytes` is a lower bound, because the listing ended early."""
    counted_ms: int | None
    """Wall time of the count (ms UTC). None: the folder was never counted."""
    problem: str
    region: str
    """Region of the bucket; empty: unknown."""
    micro_usd_per_month: int | None
    """Price of standard storage. None: the size is unknown."""
    is_us_price: bool
    """True: the region or its price is unknown, so the price is that of a US region."""
    price_source: str


def size_row(run: Run, size: FolderSize) -> BucketSize:
    return BucketSize(
        run_id=run.id,
        at_wall_ms=wall_ms(),
        url=size.url,
        bytes=size.bytes,
        is_whole=size.is_whole,
        region=size.region,
        problem=size.problem,
    )


def left_in_buckets(session: Session, run_ids: Collection[int] | None = None) -> dict[int, tuple[LeftInBucket, ...]]:
    """Return each run's folders in buckets, also of runs that go on. Runs without a bucket are absent.

    `run_ids`: look at these runs. Two queries for any number of runs.
    """
    facts = (BucketSize.bytes, BucketSize.is_whole, BucketSize.at_wall_ms, BucketSize.problem, BucketSize.region)
    newest = select(func.max(BucketSize.id)).group_by(BucketSize.run_id, BucketSize.url)
    store = func.json_extract(Run.job, "$.store")
    runs = select(Run.id, Run.name, Run.infra, store).where(Run.infra != LOCAL, store.is_not(None))
    if run_ids is not None:
        newest, runs = newest.where(BucketSize.run_id.in_(run_ids)), runs.where(Run.id.in_(run_ids))
    sizes = select(BucketSize.run_id, BucketSize.url, *facts).where(BucketSize.id.in_(newest))
    counted = {(run_id, url): of_folder for run_id, url, *of_folder in session.execute(sizes)}
    stores: dict[str, dict[str, str]] = {}
    left: dict[int, tuple[LeftInBucket, ...]] = {}
    for run_id, name, infra, text in session.execute(runs):
        if text not in stores:
            stores[text] = json.loads(text)
        left[run_id] = tuple(
            _left(cloud, url, *counted.get((run_id, url), NEVER_COUNTED))
            for cloud, url in run_folders(infra, stores[text], name).items()
        )
    return left


NEVER_COUNTED = (None, False, None, "", "")


def _left(
    cloud: str, url: str, count: int | None, is_whole: bool, counted_ms: int | None, problem: str, region: str
) -> LeftInBucket:
    rate = storage_rate(cloud, region)
    return LeftInBucket(
        url=url,
        bytes=count,
        is_whole=is_whole,
        counted_ms=counted_ms,
        problem=harmless(problem),  # an answer of the bucket
        region=region,
        micro_usd_per_month=None if count is None else rate.micro_usd_per_month(count),
        is_us_price=rate.is_us_price,
        price_source=rate.source,
    )


def left_words(left: LeftInBucket) -> str:
    """Return size, price, address and day: `41.3 GiB, $0.95 a month (s3://runs/digits), counted 2026-11-30`."""
    if left.counted_ms is None:
        return f"not counted ({left.url})"
    day = datetime.fromtimestamp(left.counted_ms / 1000, UTC).date()
    if left.bytes is None or left.micro_usd_per_month is None:
        return f"unknown ({left.url}), tried {day}: {left.problem}"
    price = monthly(left.micro_usd_per_month)
    if left.is_us_price:
        price += f" at the US price, as {f'that of {left.region}' if left.region else 'its region'} is unknown"
    size = f"{'' if left.is_whole else 'at least '}{size_text(left.bytes)}"
    return f"{size}, {price} ({left.url}), counted {day}"


def sum_words(folders: Collection[LeftInBucket]) -> str:
    """Return size and price of all folders together: `41.3 GiB, $0.95 a month`; empty if no size is known."""
    sizes = [folder.bytes for folder in folders if folder.bytes is not None]
    if not any(sizes):
        return ""
    least = "" if all(folder.is_whole for folder in folders) else "at least "
    return f"{least}{size_text(sum(sizes))}, {monthly(sum(folder.micro_usd_per_month or 0 for folder in folders))}"


def monthly(micro_usd_per_month: int) -> str:
    """Return a price as text: `$0.95 a month`. Less than a cent is not spelled out."""
    if 0 < micro_usd_per_month < MICRO // 100:
        return "less than $0.01 a month"
    return f"{dollars(micro_usd_per_month)} a month"
