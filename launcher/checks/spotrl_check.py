"""`spotrl check`: find the usual causes of a failed first launch on a real account, before any purchase.

this machine -> each cloud (credentials, clock, permissions) -> the job -> prices, buckets, quotas in every candidate
region

Each check is one line with the finding and the remedy. Nothing is bought and nothing is left behind. A check that
cannot run prints its error, and the remaining checks still run.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from launcher.checks.buckets import bucket
from launcher.checks.check import Check, CheckGroup, Verdict
from launcher.checks.cloud_account import cloud_lines, gcloud
from launcher.checks.job_and_prices import job_lines, prices
from launcher.checks.named import identity, networks
from launcher.checks.quotas import quotas
from launcher.checks.selftest_needs import selftest_lines
from launcher.checks.this_machine import address, programs, skypilot, skypilot_config
from launcher.clouds.base import CloudApi
from launcher.clouds.limits import CloudLimits
from launcher.clouds.preempting import Preempter
from launcher.exit_codes import ExitCode
from launcher.job.checked import CheckedJob
from launcher.job.company import NOTHING_NAMED, Named
from launcher.placement.plan import Plan
from launcher.storage.stores import check_writable

LOGINS = ("credentials", "gcloud")
"""Checks of a cloud that tell whether the user is logged in."""


def without_a_job(environ: Mapping[str, str] = os.environ) -> list[tuple[str, CheckGroup]]:
    """Return the checks of this machine that every cloud job needs."""
    return [
        ("programs", programs),
        ("skypilot", skypilot),
        ("skypilot config", lambda: skypilot_config(environ, Path.cwd())),
    ]


def of_clouds(
    apis: Mapping[str, CloudApi],
    limits: Mapping[str, CloudLimits],
    now_ms: Callable[[], int],
    environ: Mapping[str, str] = os.environ,
    named: Mapping[str, Named] | None = None,
) -> list[tuple[str, CheckGroup]]:
    """Return the checks of logins, clocks and permissions. `named`: identities and networks in the job, by cloud."""
    named = named or {}
    groups: list[tuple[str, CheckGroup]] = []
    for cloud, api in apis.items():
        groups.append((cloud, partial(cloud_lines, api, limits[cloud], now_ms, named.get(cloud, NOTHING_NAMED))))
        if cloud == "gcp":
            groups.append(("gcp gcloud", partial(gcloud, environ, Path.cwd())))
    return groups


def of_selftest(preempters: Iterable[Preempter]) -> list[tuple[str, CheckGroup]]:
    """Return the checks of what `spotrl selftest` needs beside a launch."""
    return [(f"{preempter.cloud} selftest", partial(selftest_lines, preempter)) for preempter in preempters]


def one_will_do(checks: Sequence[Check]) -> list[Check]:
    """Turn a missing login into a warning if the user named no cloud and another cloud has a valid login."""
    logins = [check for check in checks if check.what.partition(" ")[2] in LOGINS]
    lacking = {check.what.partition(" ")[0] for check in logins if check.verdict is not Verdict.OK}
    if not {check.what.partition(" ")[0] for check in logins} - lacking:
        return list(checks)
    unknown = [check for check in logins if check.code is ExitCode.CREDENTIALS]
    return [replace(check, verdict=Verdict.WARN) if check in unknown else check for check in checks]


def of_job(
    checked: CheckedJob,
    plan: Plan,
    limits: Mapping[str, CloudLimits],
    *,
    apis: Mapping[str, CloudApi],
    runs: Path,
    now_ms: Callable[[], int],
    ssh_from: Callable[[], str],
    environ: Mapping[str, str] = os.environ,
    try_bucket: Callable[[str], None] = check_writable,
) -> list[tuple[str, CheckGroup]]:
    """Return the checks of one job on this machine and on its candidate clouds."""
    groups: list[tuple[str, CheckGroup]] = [
        ("job", partial(job_lines, checked, plan, environ, runs)),
        ("prices", lambda: prices(plan, now_ms())),
        ("ssh from", partial(address, ssh_from)),
    ]
    for cloud, api in apis.items():
        groups.append((f"{cloud} identity", partial(identity, api, checked.job.named_on(cloud))))
    groups.append(("networks", partial(networks, checked.job, plan, apis, ssh_from)))
    for cloud, url in checked.job.store.items():
        if cloud in limits:
            groups.append((f"{cloud} bucket", partial(bucket, cloud, url, plan, limits[cloud], try_bucket)))
    return [*groups, ("quotas", partial(quotas, plan, limits, checked.job.named))]
