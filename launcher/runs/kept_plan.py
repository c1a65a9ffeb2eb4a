"""A plan in a file: `launch --dry-run --out FILE` writes it, and `launch --plan FILE` buys it or says what changed.

The file holds the job's path, its flags and all its values, the nodes, and the figures that the dry run showed. A later
launch reads the job again and looks up today's price of every node. The plan no longer holds if a value of the job is
another, if a node is no longer on offer, or if prices moved beyond the plan's own bounds. These bounds are the figures
of the dry run: the highest hourly price, the most that the run may cost, and the upper end of its expected dollars.
Prices that moved within them are shown, and paid.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from engine.events import Market
from launcher.decide.run_budget import bound_of_plan
from launcher.exit_codes import ExitCode, Failure
from launcher.job.checked import CheckedJob
from launcher.market.offers import Offer
from launcher.market.quality import USABLE
from launcher.money import dollars, hourly
from launcher.placement.options import Option, SiteOptions
from launcher.placement.placement import Placement
from launcher.placement.plan import Plan, Slot, zone_text
from launcher.report.comparison import flattened


class PlanChanged(Failure):
    """The kept plan no longer holds; nothing was started."""

    exit_code = ExitCode.PLAN_CHANGED


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedField:
    """A field of the job or of the plan that is no longer as in the file."""

    field: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.field}: {self.before} -> {self.now}"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPlan:
    """Contents of a plan file."""

    version: Literal[1] = 1
    made_at: str
    """Time of the dry run, ISO 8601 in UTC."""
    command: str
    """The command that wrote the file."""
    job: str
    """Path of the job file."""
    folder: str
    """Working folder of the dry run, for the paths in its flags."""
    flags: dict[str, Any]
    """Flags by dotted field of the job."""
    values: dict[str, Any]
    """The checked job, with every default filled in."""
    plan: Plan
    screen: tuple[str, ...]
    """The plan as the dry run showed it."""
    longest_ms: int | None
    """Time after which the run ends, in milliseconds. None: no limit."""
    expected_micro_usd: int | None
    """Expected dollars to the target, in micro-dollars. None on the local infra, where the time is not known."""
    high_micro_usd: int | None
    """Upper end of their interval."""

    @property
    def bound_micro_usd(self) -> int | None:
        """Return the most that the plan may cost, in micro-dollars. None: no limit."""
        return bound_of_plan(self.plan, self.longest_ms)


_ADAPTER = TypeAdapter(KeptPlan)


def kept_plan_text(kept: KeptPlan) -> str:
    """Return the contents of the plan's file."""
    return json.dumps(_ADAPTER.dump_python(kept, mode="json"), indent=1) + "\n"


def read_kept_plan(path: Path) -> KeptPlan:
    """Return the plan of a file. Raises Failure, OSError."""
    again = "write a new one with `spotrl launch JOB --dry-run --out FILE`"
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except FileNotFoundError:
        raise Failure(f"there is no plan {path}; {again}") from None
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"])) or "the file"
        raise Failure(f"{path} is no plan that this spotrl can read ({place}: {fault['msg']}); {again}") from None


def now_text() -> str:
    """Return the current time as in a plan file."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def job_changes(kept: KeptPlan, checked: CheckedJob) -> list[ChangedField]:
    """Return the values of the job that are not as in the plan's file."""
    before, now = dict(flattened(kept.values)), dict(flattened(checked.job.model_dump(mode="json")))
    pairs = {field: (before.get(field, "not there"), now.get(field, "not there")) for field in (before | now)}
    # The limits of the run are those of the plan: a file that was edited must not lift them.
    budget, plan = checked.job.budget, kept.plan
    pairs |= {
        "the plan's max_total": (_limit(plan.max_total_micro_usd), _limit(budget.max_total)),
        "the plan's max_hourly": (_limit(plan.max_hourly_micro_usd), _limit(budget.max_hourly)),
    }
    return [ChangedField(field=field, before=old, now=new) for field, (old, new) in pairs.items() if old != new]


def _limit(micro_usd: int | None) -> str:
    return "no limit" if micro_usd is None else dollars(micro_usd)


def at_todays_prices(kept: KeptPlan, offers: Sequence[Offer]) -> tuple[Plan, list[ChangedField]]:
    """Return the kept plan at the prices of `offers`, and what keeps it from being bought.

    Offers for failover that are gone are left out: they were no part of what is bought.
    """
    on_offer = {
        (offer.cloud, offer.region, zone, offer.instance_type, offer.market): offer
        for offer in offers
        if offer.quality in USABLE
        for zone in ((offer.zone_id,) if offer.zone_id else ()) + (zone_text(offer),)
    }
    on_demand: dict[tuple[str, str, str], int] = {}
    for offer in offers:
        if offer.market is Market.ON_DEMAND and offer.quality in USABLE:
            pool = offer.cloud, offer.region, offer.instance_type
            on_demand[pool] = min(offer.micro_usd_per_hour, on_demand.get(pool, offer.micro_usd_per_hour))

    def today(option: Option) -> Option | None:
        old = option.placement
        offer = on_offer.get(option.place)  # type: ignore[arg-type]
        if offer is None:
            return None
        steady = on_demand.get((old.cloud, old.region, old.instance_type), option.on_demand_micro_usd_per_hour)
        placement = replace(
            old,
            zone=zone_text(offer),
            micro_usd_per_hour=offer.micro_usd_per_hour,
            price_source=offer.source,
            price_observed_at=offer.observed_at,
        )
        return Option(placement=placement, on_demand_micro_usd_per_hour=max(steady, offer.micro_usd_per_hour))

    def slot_today(slot: Slot) -> Slot | None:
        option = today(slot.option)
        if option is None:
            return None
        price = option.on_demand_micro_usd_per_hour
        return replace(slot, placement=option.placement, on_demand_micro_usd_per_hour=price)

    def site_today(site: SiteOptions) -> SiteOptions:
        trainer, rollout = (tuple(filter(None, map(today, options))) for options in (site.trainer, site.rollout))
        return replace(site, trainer=trainer, rollout=rollout)

    pairs = [(slot, slot_today(slot)) for slot in kept.plan.slots]
    gone = [
        ChangedField(field=old.name, before=_node(old.placement), now="not on offer")
        for old, new in pairs
        if new is None
    ]
    if gone:
        return kept.plan, gone
    sites = tuple(site for site in map(site_today, kept.plan.sites) if site.trainer)
    plan = replace(kept.plan, slots=tuple(new for _, new in pairs if new is not None), sites=sites)
    return plan, list(_beyond_bounds(kept, plan))


def moved_prices(before: Plan, now: Plan) -> list[ChangedField]:
    """Return the nodes whose price is not as before, with both prices."""
    pairs = zip(before.slots, now.slots, strict=True)
    prices = [(old.name, old.placement.micro_usd_per_hour, new.placement.micro_usd_per_hour) for old, new in pairs]
    return [ChangedField(field=name, before=hourly(old), now=hourly(new)) for name, old, new in prices if old != new]


def _beyond_bounds(kept: KeptPlan, plan: Plan) -> Iterator[ChangedField]:
    """Yield the figures of today's prices that are above those that the dry run showed."""
    shown, now = kept.plan.maximum_micro_usd_per_hour, plan.maximum_micro_usd_per_hour
    if now > shown:
        yield ChangedField(field="all nodes on demand", before=f"at most {hourly(shown)}", now=hourly(now))
    most, may_cost = kept.bound_micro_usd, bound_of_plan(plan, kept.longest_ms)
    if most is not None and (may_cost is None or may_cost > most):
        yield ChangedField(
            field="cost", before=f"at most {dollars(most)}", now="no limit" if may_cost is None else dollars(may_cost)
        )
    if kept.expected_micro_usd is not None and kept.high_micro_usd is not None:
        # The same nodes for the same hours: dollars follow the price of all nodes.
        expected = kept.expected_micro_usd * plan.expected_micro_usd_per_hour // kept.plan.expected_micro_usd_per_hour
        if expected > kept.high_micro_usd:
            yield ChangedField(
                field="expected cost", before=f"up to {dollars(kept.high_micro_usd)}", now=dollars(expected)
            )


def _node(place: Placement) -> str:
    return f"{place.market.value} {place.cloud} {place.instance_type} in {place.zone}"


def refuse_changes(path: Path, kept: KeptPlan, changes: Sequence[ChangedField]) -> None:
    """Raise PlanChanged if anything changed, with every change and the command that plans again."""
    if not changes:
        return
    lines = "\n".join(f"  {change}" for change in changes)
    raise PlanChanged(
        f"the plan in {path}, made at {kept.made_at}, no longer holds; nothing was started:\n{lines}\n"
        f"Plan again: {kept.command}"
    )
