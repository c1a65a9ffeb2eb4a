"""Check quotas against the plan in every candidate region."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from launcher.checks.check import AT_ONCE, Check, Verdict, some
from launcher.clouds.limits import CloudLimits, Quota
from launcher.exit_codes import Failure
from launcher.job.company import NOTHING_NAMED, Named
from launcher.placement.options import SiteOptions
from launcher.placement.placement import Placement
from launcher.placement.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The use of each quota in one region: by the plan's trainer alone, and by the whole cluster.

    `unknown`: instance types with an unknown quota.
    """

    trainer: Mapping[str, int]
    whole: Mapping[str, int]
    unknown: tuple[str, ...] = ()


def need_of(
    site: SiteOptions,
    rollouts: int,
    draws_on: Callable[[Placement], Mapping[str, int]],
    trainers: int = 1,
    once: Mapping[str, int] = MappingProxyType({}),
) -> Need:
    """Return the quotas used by a trainer and `rollouts` rollout nodes at a site, each bought as its first option.

    `trainers`: nodes of the trainer. `draws_on`: returns the use of each quota by one node, by quota name. `once`: what
    the run itself uses.
    """
    trainer = [site.trainer[0].placement] * trainers
    bought = [*trainer, *(site.rollout[0].placement for _ in range(rollouts if site.rollout else 0))]
    unknown = dict.fromkeys(f"{want.market.value} {want.instance_type}" for want in bought if not draws_on(want))
    return Need(
        trainer={**_used(trainer, draws_on), **once}, whole={**_used(bought, draws_on), **once}, unknown=tuple(unknown)
    )


def _used(nodes: Iterable[Placement], draws_on: Callable[[Placement], Mapping[str, int]]) -> dict[str, int]:
    used: Counter[str] = Counter()
    for node in nodes:
        used.update(draws_on(node))
    return dict(used)


def quotas(
    plan: Plan,
    limits: Mapping[str, CloudLimits],
    named: Callable[[str, str], Named] = lambda cloud, region: NOTHING_NAMED,
) -> list[Check]:
    """Compare quota and need in each candidate region. `named`: what the job names there (cloud, region).

    A run fails over when a quota refuses a node, so the check fails only if the trainer, with all its nodes, fits in no
    region.
    """
    sites = [site for site in plan.sites if site.trainer and site.cloud in limits]
    rollouts = sum(1 for slot in plan.slots if slot.role == "rollout")
    trainers = len(plan.slots) - rollouts
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        lines = list(
            pool.map(
                lambda site: _of_site(site, trainers, rollouts, limits[site.cloud], named(site.cloud, site.region)),
                sites,
            )
        )
    fits = any(trainer_fits for _, trainer_fits in lines)
    checks = [check for check, _ in lines]
    if lines and not fits:
        remedy = "ask for more where you want to be: the lines of the regions say of what"
        text = f"the trainer fits into no quota of {len(lines)} regions"
        checks.append(Check(what="quotas", verdict=Verdict.FAIL, found=text, remedy=remedy))
    return checks


def _of_site(site: SiteOptions, trainers: int, rollouts: int, limits: CloudLimits, named: Named) -> tuple[Check, bool]:
    """Return the line of a region, and whether the trainer may fit."""
    subject = f"quota {site.cloud}/{site.region}"
    need = need_of(site, rollouts, partial(limits.draws_on, named=named), trainers, limits.draws_on_once(named))
    try:
        region_quotas = limits.quotas(site.region, need.whole.keys()) if need.whole else {}
    except Failure as failure:
        return Check(what=subject, verdict=Verdict.WARN, found=str(failure)), True
    short = [text for name, count in need.whole.items() if (text := _short_of(region_quotas.get(name), count))]
    unchecked = [name for name in need.whole if name not in region_quotas]
    trainer_fits = not any(_short_of(region_quotas.get(name), count) for name, count in need.trainer.items())
    if short:
        what_then = "spot nodes would be missing" if trainer_fits else "no trainer can start"
        return Check(
            what=subject, verdict=Verdict.WARN, found=f"{', '.join(short)}: {what_then}", remedy=_where_to_ask(site)
        ), trainer_fits
    if unchecked or need.unknown:
        names = some([*unchecked, *need.unknown])
        return Check(
            what=subject, verdict=Verdict.WARN, found=f"not told for {names}", remedy=_where_to_ask(site)
        ), True
    enough = ", ".join(
        f"{region_quotas[name].title or name}: {count} of {region_quotas[name].free}"
        for name, count in need.whole.items()
    )
    return Check(what=subject, verdict=Verdict.OK, found=enough), True


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
