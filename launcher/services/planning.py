"""Plan a job on real clouds from all current data: catalog, observed prices, preemptions, the user's discounts.

The only place where the ledger and the tables meet the pure planner; `spotrl launch` and `spotrl check` plan alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy.orm import Session, sessionmaker

from launcher.decide.launch_history import MoveRules
from launcher.exit_codes import BudgetError
from launcher.job.agreement import why_never_on_spot
from launcher.job.resolved import Resolved
from launcher.job.schema import Job
from launcher.ledger.exposure import pool_histories
from launcher.ledger.prices import capacity_advice, latest_prices
from launcher.market.advice import STALE_MS, cloud_priors
from launcher.market.offers import Catalog, Offer
from launcher.market.sky_catalog import read_sky_catalog, sky_folder
from launcher.placement.cloud_plan import CloudPlan, OtherTrainer, PlanReplays
from launcher.placement.disk import boot_disk
from launcher.placement.memory import check_memory, check_pool, gpu_memory
from launcher.placement.plan import PlacementError
from launcher.placement.plan_cloud import plan_cloud
from launcher.placement.requirements import LeftOut, MarketView, cloud_requirements, market_view
from launcher.placement.schedule import plan_schedule
from launcher.replay.of_plan import replays_of
from launcher.replay.simulate import work_of
from launcher.services.on_offer import on_offer
from launcher.services.own_prices import as_you_pay
from launcher.storage.weights import bytes_of

LATE_PLANS = 2
"""Most plans that buy nodes on demand when late, beside the one that is in time by spot alone."""


def with_replays(
    plan: CloudPlan, job: Job, other: CloudPlan | None = None, tighter: Sequence[CloudPlan] = ()
) -> CloudPlan:
    """Return the plan of a job with its replays on generated markets: dollars, hours, and how often it is in time.

    other    the plan with the trainer of the other capacity type, to compare with
    tighter  plans that buy nodes on demand when late; the cheapest of all that are often enough in time is returned
    """
    rules, confidence = MoveRules.of(job), job.budget.deadline_confidence
    plan = replace(plan, replays=replays_of(plan, rules, confidence))
    for late in tighter:
        theirs = replays_of(late, rules, confidence)
        if theirs is None or not _is_in_time(theirs, confidence):
            continue
        if plan.replays is None or not _is_in_time(plan.replays, confidence) or theirs.usd < plan.replays.usd:
            plan = replace(late, replays=theirs)
    return plan if other is None else with_other_trainer(plan, job, other)


def _is_in_time(replays: PlanReplays, confidence: float) -> bool:
    return replays.met is None or replays.met >= confidence * replays.starts


def with_other_trainer(plan: CloudPlan, job: Job, other: CloudPlan, starts: int | None = None) -> CloudPlan:
    """Return a plan with its replays and those of the plan with the trainer of the other capacity type.

    `starts`: of the other plan's replays, as of `replays_of`.
    """
    theirs = replays_of(other, MoveRules.of(job), job.budget.deadline_confidence, starts)
    if theirs is None or plan.replays is None:
        return plan
    market = other.slots[0].placement.market
    compared = OtherTrainer(market=market, why_not=job.why_trainer_on_demand, usd=theirs.usd, hours=theirs.hours)
    return replace(plan, other_trainer=compared)


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentMarket:
    """All that a plan knows of the clouds now."""

    view: MarketView
    unknown: Sequence[Offer]
    """Offers that SkyPilot does not know."""
    closed: Mapping[tuple[str, str], str]
    """(cloud, region) in which no node may be bought, with the reason."""


def current_market(
    sessions: sessionmaker[Session],
    job: Job,
    catalog: Catalog,
    now_ms: int,
    closed: Mapping[tuple[str, str], str] | None = None,
) -> CurrentMarket:
    """Return the offers that a job may buy, and what the ledger has seen of their pools. `closed`: as of the result."""
    with sessions() as session:
        histories = pool_histories(session, now_ms)
        advice = cloud_priors(capacity_advice(session, since_ms=now_ms - STALE_MS), now_ms)
    offers, unknown = cloud_offers(sessions, job, catalog, now_ms, closed)
    view = market_view(offers, histories.values(), now_ms=now_ms, priors=advice.priors, believed_odds=advice.odds)
    return CurrentMarket(view=view, unknown=unknown, closed=closed or {})


def cloud_plan(
    sessions: sessionmaker[Session],
    resolved: Resolved,
    catalog: Catalog,
    now_ms: int,
    closed: Mapping[tuple[str, str], str] | None = None,
) -> CloudPlan:
    """Return the plan of a job at the catalog's prices, and later ones of the ledger.

    If no plan is in time by its spot nodes alone, the plan is one that buys nodes on demand when late
    (`plans_that_buy_when_late`). `closed`: as of `CurrentMarket`. Raises as `plan_in`.
    """
    market = current_market(sessions, resolved.job, catalog, now_ms, closed)
    try:
        return plan_in(market, resolved)
    except BudgetError:
        tighter = plans_that_buy_when_late(market, resolved)
        if not tighter:
            raise
        return tighter[0]


def plans_that_buy_when_late(market: CurrentMarket, resolved: Resolved) -> list[CloudPlan]:
    """Return plans that are in time if all their nodes work, with as few rollout nodes as that takes, and one more.

    A late run buys nodes on demand in place of spot: the replays tell whether it is in time, and for how much. Empty:
    no deadline, no stand-ins on demand, or no such plan.
    """
    job = resolved.job
    deadline_ms = job.budget.deadline
    plans: list[CloudPlan] = []
    if deadline_ms is None or job.spot != "auto":
        return plans
    for nodes in range(max(1, job.resources.rollout.min_nodes or 0), job.resources.rollout.num_nodes + 1):
        try:
            plan = plan_in(market, resolved, late_nodes=nodes)
        except (PlacementError, BudgetError):
            continue
        if plan.pace_ms and work_of(plan.as_plan()).left_ms(nodes) <= deadline_ms:
            plans.append(plan)
        if len(plans) == LATE_PLANS:
            break
    return plans


def plan_in(
    market: CurrentMarket,
    resolved: Resolved,
    *,
    replays_decide: bool = False,
    late_nodes: int | None = None,
    with_schedule: bool = True,
) -> CloudPlan:
    """Return the plan of a job in a market.

    replays_decide  as of `CloudRequirements`
    late_nodes      just so many rollout nodes, whatever the time by spot alone
    with_schedule   False leaves out the plan's schedule and memory, which take most of its time

    Raises PlacementError if no offer fits the job, its model does not fit the GPUs, or the run does not fit the disk
    that the job names; BudgetError if no offer fits the limits.
    """
    job, folder = resolved.job, resolved.folder
    check_memory(resolved)
    check_pool(resolved)
    model_bytes = bytes_of(folder) if folder is not None and folder.is_dir() else None
    disk = boot_disk(resolved, model_bytes, sum(file.stat().st_size for file in resolved.lora_files))
    try:
        needs = replace(cloud_requirements(resolved, disk), replays_decide=replays_decide)
        if late_nodes is not None:
            needs = replace(needs, replays_decide=True, min_rollout_nodes=late_nodes, max_rollout_nodes=late_nodes)
        plan = plan_cloud(needs, market.view)
    except PlacementError as error:
        named = [f"{cloud} {region}" for cloud in job.clouds for region in job.network.regions(cloud)]
        if not named:
            raise
        raise PlacementError(
            f"{error}; the job's network is in {', '.join(named)}, so no other region counts"
        ) from None
    forbidden = [LeftOut(what=f"{cloud} {region}", why=why) for (cloud, region), why in sorted(market.closed.items())]
    plan = replace(plan, left_out=(*plan.left_out, *forbidden, *_unknown_to_sky(market.unknown)))
    if not with_schedule:
        return plan
    useful = plan.spot_pays.gpus if plan.pools and plan.spot_pays is not None else 0.0
    schedule = plan_schedule(resolved, plan.trainer, rollout=round(useful))
    return replace(plan, schedule=schedule, memory=gpu_memory(resolved, plan.trainer.ranks))


def cloud_offers(
    sessions: sessionmaker[Session],
    job: Job,
    catalog: Catalog,
    now_ms: int,
    closed: Mapping[tuple[str, str], str] | None = None,
) -> tuple[tuple[Offer, ...], list[Offer]]:
    """Return the offers that a job on clouds may buy, at current prices, and those that SkyPilot does not know.

    `closed`: as of `CurrentMarket`.
    """
    with sessions() as session:
        latest = latest_prices(session, clouds=job.clouds)
    listed = on_offer(catalog.all_offers(), latest, now_ms)
    allowed = [offer for offer in listed if (offer.cloud, offer.region) not in (closed or {})]
    reached = [offer for offer in allowed if job.network.reaches(offer.cloud, offer.region)]
    sky = read_sky_catalog(sky_folder(), job.clouds, now_ms)
    unknown = [offer for offer in reached if sky.lacks(offer)]
    known = [offer for offer in reached if not sky.lacks(offer)]
    return as_you_pay(known, job.price_overrides, job.discounts, now_ms), unknown


def plan_with_other_trainer(
    sessions: sessionmaker[Session],
    resolved: Resolved,
    catalog: Catalog,
    now_ms: int,
    closed: Mapping[tuple[str, str], str] | None = None,
) -> CloudPlan | None:
    """Return the plan with the trainer of the other capacity type; the arguments are those of `cloud_plan`.

    None: the job asks for a trainer on demand, no node could take a lost trainer's role, or no such plan fits.
    """
    job = resolved.job
    if job.resources.trainer.use_spot is False or why_never_on_spot(job) is not None:
        return None
    trainer = job.resources.trainer.model_copy(update={"use_spot": not job.trains_on_spot})
    flipped = job.model_copy(update={"resources": job.resources.model_copy(update={"trainer": trainer})})
    try:
        return cloud_plan(sessions, replace(resolved, job=flipped), catalog, now_ms, closed)
    except (PlacementError, BudgetError):
        return None


def _unknown_to_sky(offers: Sequence[Offer]) -> list[LeftOut]:
    """Return the pools that SkyPilot's catalog does not know, for the reader of the plan: one note for each cloud."""
    notes = []
    for cloud in dict.fromkeys(offer.cloud for offer in offers):
        pools = list(dict.fromkeys(f"{o.instance_type} in {o.zone or o.region}" for o in offers if o.cloud == cloud))
        more = f" and {len(pools) - 3} more" if len(pools) > 3 else ""
        why = "SkyPilot's catalog does not know it, so SkyPilot would not launch it"
        notes.append(LeftOut(what=f"{cloud} {', '.join(pools[:3])}{more}", why=why))
    return notes
