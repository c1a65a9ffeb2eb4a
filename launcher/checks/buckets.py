"""Check the buckets of a run."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from launcher.checks.check import Check, Verdict
from launcher.clouds.limits import CloudLimits
from launcher.exit_codes import Failure
from launcher.placement.plan import Plan
from launcher.storage.stores import check_writable


def bucket(
    cloud: str, url: str, plan: Plan, limits: CloudLimits, try_it: Callable[[str], None] = check_writable
) -> list[Check]:
    """Check that the bucket is usable and near the run's first region: cross-region checkpoint traffic is billed."""
    subject = f"{cloud} bucket"
    try_it(url)
    usable = Check(what=subject, verdict=Verdict.OK, found=f"{url} can be written, read and deleted in")
    doubts = [Check(what=subject, verdict=Verdict.WARN, found=doubt) for doubt in _doubts(url, limits)]
    try:
        region = limits.bucket_region(url)
    except Failure as failure:
        unknown = Check(what=subject, verdict=Verdict.WARN, found=f"nobody says where it is ({failure})")
        return [usable, *doubts, unknown]
    nearest = next((site.region for site in plan.sites if site.cloud == cloud), "")
    if not nearest or nearest == region or is_around(region, nearest):
        return [replace(usable, found=f"{usable.found}; it is in {region}"), *doubts]
    text = f"{url} is in {region}, and the run would begin in {nearest}: every checkpoint is paid for as traffic"
    far = Check(what=subject, verdict=Verdict.WARN, found=text, remedy=f"use a bucket in {nearest}")
    return [usable, *doubts, far]


def _doubts(url: str, limits: CloudLimits) -> Sequence[str]:
    """Return what may keep nodes out of the bucket. Its object was written with the user's credentials."""
    try:
        return limits.bucket_doubts(url)
    except Failure as failure:
        return [f"whether nodes can use {url} too was not tried ({failure})"]


CONTINENTS = {"us": "us-", "eu": "europe-", "asia": "asia-"}


def is_around(location: str, region: str) -> bool:
    """Return whether a multi-region bucket covers the region."""
    return location in CONTINENTS and bool(re.match(CONTINENTS[location], region))
