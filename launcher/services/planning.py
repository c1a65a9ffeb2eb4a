"""Plan a job on real clouds from all current data: catalog, observed prices, preemptions, the user's discounts.

The only place where the ledger and the tables meet the pure planner; `spotrl launch` and `spotrl check` plan alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
from launcher.placement.cloud_plan import CloudPlan, OtherTrainer
from launcher.placement.disk import boot_disk
from launcher.placement.memory import check_memory, check_pool, gpu_memory
from launcher.placement.plan import PlacementError
from launcher.placement.plan_cloud import plan_cloud
from launcher.placement.requirements import LeftOut, cloud_requirements, market_view
from launcher.placement.schedule import plan_schedule
from launcher.replay.of_plan import replays_of
from launcher.services.on_offer import on_offer
from launcher.services.own_prices import as_you_pay
from launcher.storage.weights import bytes_of


def with_replays(plan: CloudPlan, job: Job, other: CloudPlan | None = None) -> CloudPlan:
    """Return the plan of a job with its replays on generated markets: dollars, hours, and how often it is in time.

    `other`: the plan with the trainer of the other capacity type, to compare with.
    """
    confidence, rules = job.budget.deadline_confidence, MoveRules.of(job)
    plan = replace(plan, replays=replays_of(plan, rules, confidence))
    theirs = None if other is None else replays_of(other, rules, confidence)
    if other is None or theirs is None or plan.replays is None:
        return plan
    market = other.slots[0].placement.market
    compared = OtherTrainer(market=market, why_not=job.why_trainer_on_demand, usd=theirs.usd, hours=theirs.hours)
    return replace(plan, other_trainer=compared)


def cloud_plan(
    sessions: sessionmaker[Session],
    resolved: Resolved,
    catalog: Catalog,
    now_ms: int,
    closed: Mapping[tuple[str, str], str] | None = None,
) -> CloudPlan:
    """Return the plan of a job at the catalog's prices, and later ones of the ledger.

    `closed`: (cloud, region) in which no node may be bought, with the reason.

    Raises PlacementError if no offer fits the job, its model does not fit the GPUs, or the run does not fit the disk
    that the job names; BudgetError if no offer fits the limits.
    """
    job, folder = resolved.job, resolved.folder
    check_memory(resolved)
    check_pool(resolved)
    disk = boot_disk(resolved, bytes_of(folder) if folder is not None and folder.is_dir() else None)
    with sessions() as session:
        histories = pool_histories(session, now_ms)
        advice = cloud_priors(capacity_advice(session, since_ms=now_ms - STALE_MS), now_ms)
    offers, unknown = cloud_offers(sessions, job, catalog, now_ms, closed)
    market = market_view(offers, histories.values(), now_ms=now_ms, priors=advice.priors, believed_odds=advice.odds)
    try:
        plan = plan_cloud(cloud_requirements(resolved, disk), market)
    except PlacementError as error:
        named = [f"{cloud} {region}" for cloud in job.clouds for region in job.network.regions(cloud)]
        if not named:
            raise
        raise PlacementError(
            f"{error}; the job's network is in {', '.join(named)}, so no other region counts"
        ) from None
    forbidden = [LeftOut(what=f"{cloud} {region}", why=why) for (cloud, region), why in sorted((closed or {}).items())]
    useful = plan.spot_pays.gpus if plan.pools and plan.spot_pays is not None else 0.0
    schedule = plan_schedule(resolved, plan.trainer, rollout=round(useful))
    left_out = (*plan.left_out, *forbidden, *_unknown_to_sky(unknown))
    return replace(plan, left_out=left_out, schedule=schedule, memory=gpu_memory(resolved, plan.trainer.ranks))


def cloud_offers(
    sessions: sessionmaker[Session],
    job: Job,
    catalog: Catalog,
    now_ms: int,
    closed: Mapping[tuple[str, str], str] | None = None,
) -> tuple[tuple[Offer, ...], list[Offer]]:
    """Return the offers that a job on clouds may buy, at current prices, and those that SkyPilot does not know.

    `closed`: as in `cloud_plan`.
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
