"""Check identities and networks that the job names."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from launcher.checks.check import AT_ONCE, Check, Verdict, run_checks
from launcher.clouds.base import CloudApi, Finding, Look
from launcher.job.company import Named
from launcher.job.schema import Job
from launcher.placement.plan import Plan


def identity(api: CloudApi, named: Named) -> list[Check]:
    """Check the identity that an administrator made for nodes."""
    return [of_finding(f"{api.cloud} identity", finding) for finding in api.check_identity(named)]


def networks(job: Job, plan: Plan, apis: Mapping[str, CloudApi], ssh_from: Callable[[], str]) -> list[Check]:
    """Check in each candidate region that nodes can use the network named in the job.

    A run fails over from a region with an unsuitable network, so the check fails only if no region has a suitable
    network.
    """
    places = [site.place for site in plan.sites if site.cloud in apis and job.named(*site.place).network]
    source = ssh_from() if places else ""

    def look(place: tuple[str, str]) -> list[Check]:
        cloud, region = place
        subject = f"network {cloud}/{region}"
        return run_checks([(subject, lambda: _in_region(subject, apis[cloud], region, job.named(*place), source))])

    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        by_place = list(pool.map(look, places))
    is_failed = [any(check.verdict is Verdict.FAIL for check in checks) for checks in by_place]
    bearable = Verdict.FAIL if all(is_failed) else Verdict.WARN
    return [
        replace(check, verdict=bearable) if check.verdict is Verdict.FAIL else check
        for checks in by_place
        for check in checks
    ]


def _in_region(subject: str, api: CloudApi, region: str, named: Named, ssh_from: str) -> list[Check]:
    return [of_finding(subject, finding) for finding in api.check_network(region, named, ssh_from)]


VERDICTS = {Look.OK: Verdict.OK, Look.WRONG: Verdict.FAIL, Look.UNSURE: Verdict.WARN}


def of_finding(subject: str, finding: Finding) -> Check:
    """Convert a finding about a resource that an administrator made to a line."""
    text, _, remedy = finding.text.partition("; ")
    return Check(what=subject, verdict=VERDICTS[finding.look], found=text, remedy=remedy)
