"""`spotrl check`: find the usual causes of a failed first launch on a real account, before any purchase.

this machine -> each cloud (credentials, clock, permissions) -> the job -> prices, buckets, quotas in every candidate
region

Each check is one line with the finding and the remedy. Nothing is bought and nothing is left behind. A check that
cannot run says so and hides no other check.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from launcher.checks.gcloud import check_gcloud
from launcher.checks.preflight import check_disk, check_secrets
from launcher.checks.ready import PROGRAMS, check_job
from launcher.clouds.base import CloudApi, CloudRefused, CloudUnreachable, Finding, Look
from launcher.clouds.limits import CloudLimits, Permissions, Quota
from launcher.decide.failover import SiteOptions
from launcher.exit_codes import ExitCode, Failure
from launcher.job.company import NOTHING_NAMED, Named
from launcher.job.schema import CheckedJob, Job
from launcher.market.offers import Age, age_of, age_text
from launcher.money import duration
from launcher.placement.placement import Placement
from launcher.placement.plan import Plan
from launcher.provision.sky.sky_settings import configuration_files, read_configuration, value_at
from launcher.storage.stores import check_writable

SKYPILOT = "0.14.1"
"""The SkyPilot version used by the tests."""

SKEW_WARN_MS, SKEW_FAIL_MS = 60_000, 300_000
"""Clock differences in ms that warn and fail. AWS accepts no signature more than five minutes off."""

AT_ONCE = 16

FROM_OURS = "away from ours"

LOGINS = ("credentials", "gcloud")
"""Checks of a cloud that tell whether the user is logged in."""

SHOWN = 6
"""Number of names printed from a long list."""

IN_THE_WAY: Mapping[tuple[str, ...], str] = {
    ("admin_policy",): "may change what is bought",
    ("allowed_clouds",): "the job's clouds have to be among them",
    ("api_server", "endpoint"): "that server buys, with its own credentials and its own environment",
    ("aws", "vpc_name"): "nodes are in that network, and our group is in the default one, so no node starts",
    ("aws", "vpc_names"): "nodes are in one of those networks, and our group is in the default one, so no node starts",
    ("aws", "subnet_names"): "nodes are in those subnets; they need public addresses",
    ("aws", "use_internal_ips"): "nodes get no public address, and this machine has to reach them without",
    ("aws", "ssh_proxy_command"): "only SkyPilot would use it; we log in to a node's public address",
    ("aws", "remote_identity"): "ours is used instead, with the request",
    ("aws", "security_group_name"): "ours is used instead, with the request",
    ("gcp", "subnet_names"): "nodes are in those subnets and not in the run's own network, so no node starts",
    ("gcp", "use_internal_ips"): "nodes get no public address, and this machine has to reach them without",
    ("gcp", "ssh_proxy_command"): "only SkyPilot would use it; we log in to a node's public address",
    ("gcp", "remote_identity"): "ours is used instead, with the request",
    ("gcp", "vpc_name"): "ours is used instead, with the request",
}
"""Keys of the user's own SkyPilot configuration, with their effect on our nodes."""

OF_NETWORKS = ("vpc_name", "vpc_names", "subnet_names", "use_internal_ips", "ssh_proxy_command")
"""Keys that a job's `network` sets for its nodes, overriding the user's configuration."""


class Verdict(StrEnum):
    """The result of a check. WARN: the launch may still succeed."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of output. `code`: exit code of the command if the check failed."""

    what: str
    verdict: Verdict
    found: str
    remedy: str = ""
    code: ExitCode = ExitCode.FAILURE


Ask = Callable[[], Iterable[Check]]


def run_checks(asks: Sequence[tuple[str, Ask]]) -> list[Check]:
    """Run all checks at the same time and return their lines in order. A Failure becomes a line too."""

    def answer(named: tuple[str, Ask]) -> list[Check]:
        what, ask = named
        try:
            return list(ask())
        except Failure as failure:
            return [failed(what, failure)]
        except Exception as error:  # a broken check must not hide the results of the rest
            found = f"this check itself failed ({type(error).__name__}: {error})"
            return [Check(what=what, verdict=Verdict.FAIL, found=found)]

    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        return [check for checks in pool.map(answer, asks) for check in checks]


def failed(what: str, failure: Failure) -> Check:
    """Convert an error to a line. Our errors have the form `found; remedy`."""
    found, _, remedy = str(failure).partition("; ")
    if isinstance(failure, CloudUnreachable):
        remedy = "see that it can be reached from here, then check again"
    return Check(what=what, verdict=Verdict.FAIL, found=found, remedy=remedy, code=failure.exit_code)


def ending(checks: Iterable[Check]) -> ExitCode:
    """Return the exit code.

    Credentials come before the job, and the job before everything else: without credentials no other result is
    reliable.
    """
    codes = {check.code for check in checks if check.verdict is Verdict.FAIL}
    known = (ExitCode.CREDENTIALS, ExitCode.INVALID_JOB)
    return next((code for code in known if code in codes), ExitCode.FAILURE if codes else ExitCode.OK)


# --- this machine ------------------------------------------------------------------------------------


def programs() -> list[Check]:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        remedy = "install it (Debian: `apt-get install openssh-client rsync`)"
        return [
            Check(what="programs", verdict=Verdict.FAIL, found=f"no {' and no '.join(missing)} here", remedy=remedy)
        ]
    return [Check(what="programs", verdict=Verdict.OK, found=", ".join(PROGRAMS))]


def skypilot(installed: Callable[[str], str] = version) -> list[Check]:
    try:
        found = installed("skypilot")
    except PackageNotFoundError:
        remedy = "`pip install 'spotrl[sky]'`"
        return [Check(what="skypilot", verdict=Verdict.FAIL, found="SkyPilot is not installed here", remedy=remedy)]
    if found != SKYPILOT:
        remedy = f"`pip install 'skypilot[aws,gcp]=={SKYPILOT}'`, or watch the first launch"
        return [
            Check(what="skypilot", verdict=Verdict.WARN, found=f"{found}; tested with {SKYPILOT}", remedy=remedy),
        ]
    return [Check(what="skypilot", verdict=Verdict.OK, found=found)]


def skypilot_config(environ: Mapping[str, str], folder: Path) -> list[Check]:
    """Check the user's own SkyPilot configuration for keys that change our nodes. The file is read, never written."""
    there = configuration_files(environ, folder)
    found = [check for path in there for check in _keys_in_the_way(path)]
    return found or [Check(what="skypilot config", verdict=Verdict.OK, found="nothing in it is in the way")]


def _keys_in_the_way(path: Path) -> Iterable[Check]:
    from ruamel.yaml.error import YAMLError

    try:
        values = read_configuration(path)
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        first = next(iter(str(error).splitlines()), "")
        yield Check(what="skypilot config", verdict=Verdict.WARN, found=f"{path} cannot be read ({first})")
        return
    for key, means in IN_THE_WAY.items():
        if (value := value_at(values, key)) is not None:
            in_job = ", or name the network in the job (`network:`)" if key[1:] and key[1] in OF_NETWORKS else ""
            remedy = f"take it out of {path} if that is not what you mean{in_job}"
            remedy = "" if means.startswith("ours is used") else remedy
            yield Check(
                what="skypilot config",
                verdict=Verdict.WARN,
                found=f"{'.'.join(key)} is {value!r}: {means}",
                remedy=remedy,
            )


def address(ask: Callable[[], str]) -> list[Check]:
    """Check that the SSH source address is known. Nodes let in nothing else."""
    source = ask()
    found = f"{source} may reach nodes by SSH, and nothing else" if source else "the network that the job names decides"
    return [Check(what="ssh from", verdict=Verdict.OK, found=found)]


# --- a cloud -----------------------------------------------------------------------------------------


def cloud_lines(
    api: CloudApi, limits: CloudLimits, now_ms: Callable[[], int], named: Named = NOTHING_NAMED
) -> list[Check]:
    """Check credentials, clock and permissions. Permissions are checked only with valid credentials."""
    known = credentials(api)
    time_is = _as_lines(f"{api.cloud} clock", partial(clock, limits, now_ms))
    if known.verdict is Verdict.FAIL:
        # A wrong clock makes the cloud refuse signatures. The credentials line already covers the remaining clock
        # results.
        return [known, *(line for line in time_is if line.found.endswith(FROM_OURS))]
    return [known, *time_is, *_as_lines(f"{api.cloud} permissions", partial(permissions, limits, named))]


def _as_lines(what: str, ask: Callable[[], Check]) -> list[Check]:
    return run_checks([(what, lambda: [ask()])])


def credentials(api: CloudApi) -> Check:
    what = f"{api.cloud} credentials"
    try:
        caller = api.caller()
    except CloudRefused as refused:
        return replace(failed(what, refused), code=ExitCode.CREDENTIALS)
    except Failure as failure:
        return failed(what, failure)
    found = f"{caller.identity} in {caller.account}; its things are labelled {caller.owner}"
    return Check(what=what, verdict=Verdict.OK, found=found)


def gcloud(environ: Mapping[str, str], folder: Path) -> list[Check]:
    """Check the program and the login that SkyPilot needs on Google Cloud, beside the credentials used by spotrl."""
    return [Check(what="gcp gcloud", verdict=Verdict.OK, found=check_gcloud(environ, folder))]


def clock(limits: CloudLimits, now_ms: Callable[[], int]) -> Check:
    what = f"{limits.cloud} clock"
    off = abs(limits.clock_ms() - now_ms())
    if off <= SKEW_WARN_MS:
        return Check(what=what, verdict=Verdict.OK, found="agrees with ours")
    verdict = Verdict.FAIL if off > SKEW_FAIL_MS else Verdict.WARN
    remedy = "set this machine's clock (`timedatectl set-ntp true`)"
    return Check(what=what, verdict=verdict, found=f"{duration(off)} {FROM_OURS}", remedy=remedy)


def permissions(limits: CloudLimits, named: Named = NOTHING_NAMED) -> Check:
    what, remedy = f"{limits.cloud} permissions", f"`spotrl check --print-policy {limits.cloud}` prints what is needed"
    said: Permissions = limits.permissions(named)
    if said.missing:
        found = f"not allowed: {_some(said.missing)}"
        return Check(what=what, verdict=Verdict.FAIL, found=found, remedy=remedy, code=ExitCode.CREDENTIALS)
    if said.unsaid:
        found = f"what could be tried is allowed; {len(said.unsaid)} could not be asked about ({said.why})"
        return Check(what=what, verdict=Verdict.WARN, found=found, remedy=remedy)
    return Check(what=what, verdict=Verdict.OK, found="everything that launching needs is allowed")


# --- the job -----------------------------------------------------------------------------------------


def job_lines(checked: CheckedJob, plan: Plan, environ: Mapping[str, str], runs: Path) -> list[Check]:
    """Return the job's problems, found by the same checks as `launch` runs before a purchase."""
    looks: list[Callable[[], None]] = [
        partial(check_job, checked, plan.slots),
        partial(check_secrets, checked, environ),
        partial(check_disk, runs),
    ]
    found = []
    for look in looks:
        try:
            look()
        except Failure as failure:
            found.append(failed("job", failure))
    names = f", secrets {', '.join(checked.job.secrets)} set" if checked.job.secrets else ""
    return found or [
        Check(what="job", verdict=Verdict.OK, found=f"{checked.job.name}: limits and buckets named{names}")
    ]


def prices(plan: Plan, now_ms: int) -> list[Check]:
    """Check the oldest price used by the plan."""
    order = [Age.FRESH, Age.OLD, Age.EXPIRED, Age.UNKNOWN]
    worst = max(
        (slot.placement for slot in plan.slots),
        key=lambda place: order.index(age_of(place.price_observed_at, place.market, now_ms)),
    )
    age = age_of(worst.price_observed_at, worst.market, now_ms)
    seen = age_text(worst.price_observed_at, now_ms)
    found = f"{worst.market.value} price of {worst.instance_type} in {worst.zone}: {seen}"
    verdict = {Age.FRESH: Verdict.OK, Age.OLD: Verdict.WARN}.get(age, Verdict.FAIL)
    remedy = "" if verdict is Verdict.OK else "`spotrl catalog refresh`, or launch with --allow-old-prices"
    return [Check(what="prices", verdict=verdict, found=found, remedy=remedy, code=ExitCode.STALE_CATALOG)]


# --- quotas ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The quotas that a plan's cluster uses in one region. `unknown`: instance types with an unknown quota."""

    trainer: Mapping[str, int]
    whole: Mapping[str, int]
    unknown: tuple[str, ...] = ()


def need_of(site: SiteOptions, rollouts: int, draws_on: Callable[[Placement], Mapping[str, int]]) -> Need:
    """Return the quota use of the cluster at a site, with the first choice of each role."""
    trainer = site.trainer[0].placement
    bought = [trainer, *(site.rollout[0].placement for _ in range(rollouts if site.rollout else 0))]
    whole: Counter[str] = Counter()
    for want in bought:
        whole.update(draws_on(want))
    unknown = dict.fromkeys(f"{want.market.value} {want.instance_type}" for want in bought if not draws_on(want))
    return Need(trainer=dict(draws_on(trainer)), whole=dict(whole), unknown=tuple(unknown))


def quotas(plan: Plan, limits: Mapping[str, CloudLimits]) -> list[Check]:
    """Compare quota and need in each candidate region.

    A run fails over when a quota refuses a node, so the check fails only if the trainer fits in no region.
    """
    sites = [site for site in plan.sites if site.trainer and site.cloud in limits]
    rollouts = sum(1 for slot in plan.slots if slot.role == "rollout")
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        lines = list(pool.map(lambda site: _of_site(site, rollouts, limits[site.cloud]), sites))
    fits = any(trainer_fits for _, trainer_fits in lines)
    checks = [check for check, _ in lines]
    if lines and not fits:
        remedy = "ask for more where you want to be: the lines of the regions say of what"
        found = f"the trainer fits into no quota of {len(lines)} regions"
        checks.append(Check(what="quotas", verdict=Verdict.FAIL, found=found, remedy=remedy))
    return checks


def _of_site(site: SiteOptions, rollouts: int, limits: CloudLimits) -> tuple[Check, bool]:
    """Return the line of a region, and whether the trainer may fit."""
    what = f"quota {site.cloud}/{site.region}"
    need = need_of(site, rollouts, limits.draws_on)
    try:
        found = limits.quotas(site.region, need.whole.keys()) if need.whole else {}
    except Failure as failure:
        return Check(what=what, verdict=Verdict.WARN, found=str(failure)), True
    short = [text for name, count in need.whole.items() if (text := _short_of(found.get(name), count))]
    unsaid = [name for name in need.whole if name not in found]
    trainer_fits = not any(_short_of(found.get(name), count) for name, count in need.trainer.items())
    if short:
        what_then = "spot nodes would be missing" if trainer_fits else "no trainer can start"
        return Check(
            what=what, verdict=Verdict.WARN, found=f"{', '.join(short)}: {what_then}", remedy=_where_to_ask(site)
        ), trainer_fits
    if unsaid or need.unknown:
        names = _some([*unsaid, *need.unknown])
        return Check(what=what, verdict=Verdict.WARN, found=f"not told for {names}", remedy=_where_to_ask(site)), True
    enough = ", ".join(
        f"{found[name].title or name}: {count} of {found[name].free}" for name, count in need.whole.items()
    )
    return Check(what=what, verdict=Verdict.OK, found=enough), True


def _short_of(quota: Quota | None, count: int) -> str:
    """Return the shortage as text; empty if the quota is sufficient or unknown."""
    if quota is None or count <= quota.free:
        return ""
    title = quota.title if quota.title == quota.name else f"{quota.title} ({quota.name})"
    return f"{title} needs {count}, has {quota.free} free of {quota.limit}"


def _where_to_ask(site: SiteOptions) -> str:
    if site.cloud == "aws":
        return f"https://console.aws.amazon.com/servicequotas/home/services/ec2/quotas?region={site.region}"
    return "https://console.cloud.google.com/iam-admin/quotas (filter by the quota's name and region)"


# --- named resources ---------------------------------------------------------------------------------


def identity(api: CloudApi, named: Named) -> list[Check]:
    """Check the identity that an administrator made for nodes."""
    return [_of_finding(f"{api.cloud} identity", one) for one in api.check_identity(named)]


def networks(job: Job, plan: Plan, apis: Mapping[str, CloudApi], ssh_from: Callable[[], str]) -> list[Check]:
    """Check in each candidate region that nodes can use the network named in the job.

    A run fails over from a region with an unsuitable network, so the check fails only if no region has a suitable
    network.
    """
    places = [site.place for site in plan.sites if site.cloud in apis and job.named(*site.place).network]
    source = ssh_from() if places else ""

    def look(place: tuple[str, str]) -> list[Check]:
        cloud, region = place
        what = f"network {cloud}/{region}"
        return run_checks([(what, lambda: _in_region(what, apis[cloud], region, job.named(*place), source))])

    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        by_place = list(pool.map(look, places))
    is_failed = [any(check.verdict is Verdict.FAIL for check in checks) for checks in by_place]
    bearable = Verdict.FAIL if all(is_failed) else Verdict.WARN
    return [
        replace(check, verdict=bearable) if check.verdict is Verdict.FAIL else check
        for checks in by_place
        for check in checks
    ]


def _in_region(what: str, api: CloudApi, region: str, named: Named, ssh_from: str) -> list[Check]:
    return [_of_finding(what, one) for one in api.check_network(region, named, ssh_from)]


VERDICTS = {Look.OK: Verdict.OK, Look.WRONG: Verdict.FAIL, Look.UNSURE: Verdict.WARN}


def _of_finding(what: str, finding: Finding) -> Check:
    found, _, remedy = finding.text.partition("; ")
    return Check(what=what, verdict=VERDICTS[finding.look], found=found, remedy=remedy)


# --- buckets -----------------------------------------------------------------------------------------


def bucket(
    cloud: str, url: str, plan: Plan, limits: CloudLimits, try_it: Callable[[str], None] = check_writable
) -> list[Check]:
    """Check that the bucket is usable and near the run's first region: cross-region checkpoint traffic is billed."""
    what = f"{cloud} bucket"
    try_it(url)
    usable = Check(what=what, verdict=Verdict.OK, found=f"{url} can be written, read and deleted in")
    try:
        region = limits.bucket_region(url)
    except Failure as failure:
        return [usable, Check(what=what, verdict=Verdict.WARN, found=f"nobody says where it is ({failure})")]
    nearest = next((site.region for site in plan.sites if site.cloud == cloud), "")
    if not nearest or nearest == region or is_around(region, nearest):
        return [replace(usable, found=f"{usable.found}; it is in {region}")]
    found = f"{url} is in {region}, and the run would begin in {nearest}: every checkpoint is paid for as traffic"
    return [usable, Check(what=what, verdict=Verdict.WARN, found=found, remedy=f"use a bucket in {nearest}")]


CONTINENTS = {"us": "us-", "eu": "europe-", "asia": "asia-"}


def is_around(location: str, region: str) -> bool:
    """Return whether a multi-region bucket covers the region."""
    return location in CONTINENTS and bool(re.match(CONTINENTS[location], region))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


# --- everything --------------------------------------------------------------------------------------


def without_a_job(environ: Mapping[str, str] = os.environ) -> list[tuple[str, Ask]]:
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
) -> list[tuple[str, Ask]]:
    """Return the checks of logins, clocks and permissions. `named`: identities and networks in the job, by cloud."""
    named = named or {}
    asks: list[tuple[str, Ask]] = []
    for cloud, api in apis.items():
        asks.append((cloud, partial(cloud_lines, api, limits[cloud], now_ms, named.get(cloud, NOTHING_NAMED))))
        if cloud == "gcp":
            asks.append(("gcp gcloud", partial(gcloud, environ, Path.cwd())))
    return asks


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
) -> list[tuple[str, Ask]]:
    """Return the checks of one job on this machine and on its candidate clouds."""
    asks: list[tuple[str, Ask]] = [
        ("job", partial(job_lines, checked, plan, environ, runs)),
        ("prices", lambda: prices(plan, now_ms())),
        ("ssh from", partial(address, ssh_from)),
    ]
    for cloud, api in apis.items():
        asks.append((f"{cloud} identity", partial(identity, api, checked.job.named_on(cloud))))
    asks.append(("networks", partial(networks, checked.job, plan, apis, ssh_from)))
    for cloud, url in checked.job.store.items():
        if cloud in limits:
            asks.append((f"{cloud} bucket", partial(bucket, cloud, url, plan, limits[cloud], try_bucket)))
    return [*asks, ("quotas", partial(quotas, plan, limits))]
