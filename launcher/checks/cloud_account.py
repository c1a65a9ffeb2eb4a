"""Check a cloud account: credentials, gcloud, clock and permissions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from launcher.checks.check import Check, Verdict, failed, run_checks, some
from launcher.checks.gcloud import check_gcloud
from launcher.clouds.base import CloudApi, CloudRefused
from launcher.clouds.limits import CloudLimits, Permissions
from launcher.exit_codes import ExitCode, Failure
from launcher.job.company import NOTHING_NAMED, Named
from launcher.money import duration

SKEW_WARN_MS, SKEW_FAIL_MS = 60_000, 300_000
"""Clock differences in ms that warn and fail. AWS accepts no signature more than five minutes off."""

FROM_OURS = "away from ours"


def cloud_lines(
    api: CloudApi, limits: CloudLimits, now_ms: Callable[[], int], named: Named = NOTHING_NAMED
) -> list[Check]:
    """Check credentials, clock and permissions. Permissions are checked only with valid credentials."""
    login = credentials(api)
    time_is = _as_lines(f"{api.cloud} clock", partial(clock, limits, now_ms))
    if login.verdict is Verdict.FAIL:
        # A wrong clock makes the cloud refuse signatures. So print the clock line if a wrong clock was found. Any other
        # result of the clock query would repeat the error of the credentials line.
        return [login, *(line for line in time_is if line.found.endswith(FROM_OURS))]
    return [login, *time_is, *_as_lines(f"{api.cloud} permissions", partial(permissions, limits, named))]


def _as_lines(subject: str, ask: Callable[[], Check]) -> list[Check]:
    return run_checks([(subject, lambda: [ask()])])


def credentials(api: CloudApi) -> Check:
    subject = f"{api.cloud} credentials"
    try:
        caller = api.caller()
    except CloudRefused as refused:
        return replace(failed(subject, refused), code=ExitCode.CREDENTIALS)
    except Failure as failure:
        return failed(subject, failure)
    text = f"{caller.identity} in {caller.account}; its things are labelled {caller.owner}"
    return Check(what=subject, verdict=Verdict.OK, found=text)


def gcloud(environ: Mapping[str, str], folder: Path) -> list[Check]:
    """Check the program and the login that SkyPilot needs on Google Cloud, beside the credentials used by spotrl."""
    return [Check(what="gcp gcloud", verdict=Verdict.OK, found=check_gcloud(environ, folder))]


def clock(limits: CloudLimits, now_ms: Callable[[], int]) -> Check:
    subject = f"{limits.cloud} clock"
    off = abs(limits.clock_ms() - now_ms())
    if off <= SKEW_WARN_MS:
        return Check(what=subject, verdict=Verdict.OK, found="agrees with ours")
    verdict = Verdict.FAIL if off > SKEW_FAIL_MS else Verdict.WARN
    remedy = "set this machine's clock (`timedatectl set-ntp true`)"
    return Check(what=subject, verdict=verdict, found=f"{duration(off)} {FROM_OURS}", remedy=remedy)


def permissions(limits: CloudLimits, named: Named = NOTHING_NAMED) -> Check:
    remedy = f"`spotrl check --print-policy {limits.cloud}` prints what is needed"
    return of_permissions(f"{limits.cloud} permissions", limits.permissions(named), "launching", remedy)


def of_permissions(subject: str, result: Permissions, purpose: str, remedy: str) -> Check:
    """Convert the result of a permission check to a line. `purpose`: what the permissions are for."""
    if result.missing:
        text = f"not allowed: {some(result.missing)}"
        return Check(what=subject, verdict=Verdict.FAIL, found=text, remedy=remedy, code=ExitCode.CREDENTIALS)
    if result.unchecked:
        text = f"what could be tried is allowed; {len(result.unchecked)} could not be asked about ({result.why})"
        return Check(what=subject, verdict=Verdict.WARN, found=text, remedy=remedy)
    return Check(what=subject, verdict=Verdict.OK, found=f"everything that {purpose} needs is allowed")
