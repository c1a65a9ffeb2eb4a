"""Fleets of a job that leaves its GPUs open: which could run it, and a quick forecast of each. Pure.

offers -> fleets (trainer: GPUs, capacity type; rollout nodes: GPUs, number) -> sites of each -> forecast -> shortlist

A fleet is the job with its resources filled in. So the memory, seconds and rules of a given job hold for each fleet,
and a chosen fleet is a job like any other. The forecast only ranks: replays decide which of the shortlist is cheapest,
in time or quickest (launcher/services/fleets.py). Searched are every GPU that the offers have, on spot and on demand, 0
to `MOST_NODES` rollout nodes, and every region. Not searched: a trainer of several nodes, rollout nodes of two kinds
or of two regions, and other algorithms.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.events import Market
from engine.memory.published import EMBEDDED
from engine.trainer_ranks import LIMITS, groups_of_step
from launcher.job.agreement import why_never_on_spot
from launcher.job.checked import JobError
from launcher.job.resolved import Resolved, resolve
from launcher.job.schema import Job
from launcher.job.sections import NodeResources
from launcher.market.instance_types import is_too_old
from launcher.market.offers import Offer
from launcher.money import HOUR_MS, MICRO
from launcher.placement.forecast import Caps, Choice, on_demand_outlook, outlook, progress, sums
from launcher.placement.memory import TooSmall, check_memory, check_pool
from launcher.placement.plan import PlacementError
from launcher.placement.price_of_waiting import CHANGE_HOURS
from launcher.placement.requirements import MarketNodes, MarketView, Site, cloud_requirements, sites_of
from launcher.placement.search import cheapest_by_nodes

MOST_NODES = 4
"""Most rollout nodes of a fleet, for a job that names no number."""

CHEAP, QUICK, TIMELY, ALIKE = 7, 2, 3, 2
"""Fleets of a shortlist: those with the lowest forecast of dollars, those with the lowest of hours within the budget,
and, with a deadline, the cheapest whose forecast is within it. Of the cheap ones, `ALIKE` with the same GPUs at most:
replays would not tell three of them apart."""

NEAR = 1.2
"""Forecast of dollars, over the lowest, up to which a fleet counts as cheap. Ten replays of a fleet that is dearer by
forecast are more often too cheap by luck than the forecast is too dear."""

LATE = 0.85
"""Share of the deadline that the forecast of a fleet may take to count as in time: replays are later than it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Nodes of a job, before a region is chosen."""

    trainer: str
    """`NAME:COUNT` of the trainer's node."""
    trainer_on_spot: bool
    rollout: str | None
    """`NAME:COUNT` of a rollout node. None: the trainer alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A fleet in its cheapest region, with its forecast."""

    fleet: Fleet
    resolved: Resolved
    """The job with the fleet's resources, and just as many rollout nodes."""
    choice: Choice
    usd: float
    hours: float
    least_hours: float
    """Hours with every node at work, all the time."""

    @property
    def key(self) -> tuple[object, ...]:
        """Return what tells two candidates apart."""
        return (self.fleet.trainer, self.fleet.trainer_on_spot, self.fleet.rollout, self.choice.nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfit:
    """A fleet that cannot run the job, with the reason."""

    fleet: Fleet
    why: str


def chooses_fleet(job: Job) -> bool:
    """Return whether the plan chooses GPUs: on clouds, of a job that names several kinds, or none.

    Nobody timed the models that ship with spotrl, so a job with one of them that names none gets the default.
    """
    roles = (job.resources.trainer, job.resources.rollout)
    return bool(job.clouds) and any(role.is_open and _may_choose(job, role) for role in roles)


def _may_choose(job: Job, role: NodeResources) -> bool:
    """Return whether a plan may choose a role's GPUs beyond the default, or among those that the job names."""
    return len(role.kinds) > 1 or job.model.name not in EMBEDDED


def fleets_of(job: Job, offers: Iterable[Offer]) -> Iterator[Fleet]:
    """Yield the fleets that a job on clouds leaves open, of the GPUs on offer there. A given field is kept."""
    offered = sorted({(offer.accelerator, offer.gpus) for offer in offers if offer.cloud in job.clouds})
    offered = [(accelerator, gpus) for accelerator, gpus in offered if not is_too_old(accelerator)]
    sold = tuple(f"{accelerator}:{gpus}" for accelerator, gpus in offered)
    trainer, rollout = job.resources.trainer, job.resources.rollout
    may_be_on_spot = why_never_on_spot(job) is None
    if not is_spot_open(job):
        on_spot: tuple[bool, ...] = (bool(trainer.use_spot),)
    else:
        on_spot = (False, True) if may_be_on_spot and job.recovery.controller_stays_up else (False,)
    rollouts: list[str | None] = []
    if not rollout.num_nodes or not rollout.min_nodes:
        rollouts.append(None)
    if rollout.num_nodes:
        rollouts += _kinds(job, rollout, sold)
    for kind in _kinds(job, trainer, sold):
        for is_on_spot in on_spot:
            for rollout_kind in rollouts:
                yield Fleet(trainer=kind, trainer_on_spot=is_on_spot, rollout=rollout_kind)


def is_spot_open(job: Job) -> bool:
    """Return whether the job leaves open how its trainer is bought."""
    trainer = job.resources.trainer
    return trainer.use_spot == "auto" or "use_spot" not in trainer.model_fields_set


def _kinds(job: Job, role: NodeResources, sold: Sequence[str]) -> Sequence[str]:
    is_given = "accelerators" in role.model_fields_set or role.instance_type is not None
    return role.kinds if is_given or not _may_choose(job, role) else sold


def most_nodes(job: Job) -> int:
    """Return the most rollout nodes of a fleet of this job."""
    rollout = job.resources.rollout
    is_given = "rollout" in job.resources.model_fields_set and "num_nodes" in rollout.model_fields_set
    if is_given or job.model.name in EMBEDDED:
        return rollout.num_nodes
    return max(MOST_NODES, rollout.min_nodes or 0)


def with_fleet(job: Job, fleet: Fleet, nodes: int) -> Job:
    """Return the job with the resources of a fleet and just so many rollout nodes. Every GPU of the trainer trains."""
    use_spot: bool | str = fleet.trainer_on_spot
    if not use_spot and is_spot_open(job) and not job.recovery.controller_stays_up:
        use_spot = "auto"  # on demand, as long as nobody would replace a lost trainer
    trainer = job.resources.trainer.model_copy(update={"accelerators": fleet.trainer, "use_spot": use_spot})
    rollout = job.resources.rollout.model_copy(
        update={
            "accelerators": fleet.rollout or fleet.trainer,
            "num_nodes": nodes if fleet.rollout else 0,
            "min_nodes": nodes if fleet.rollout else None,
        }
    )
    runtime = job.runtime
    if runtime.trainer_ranks == "auto" and trainer.num_nodes == 1:
        algorithm = job.algorithm
        groups = groups_of_step(algorithm.prompts_per_batch, algorithm.updates_per_batch)
        ranks = min(trainer.gpus, groups, LIMITS[job.model.weights].most)
        runtime = runtime.model_copy(update={"trainer_ranks": ranks})
    resources = job.resources.model_copy(update={"trainer": trainer, "rollout": rollout})
    return job.model_copy(update={"resources": resources, "runtime": runtime})


def with_kept_fleet(job: Job, values: Mapping[str, Any]) -> Job:
    """Return a job that leaves its GPUs open with the fleet of a kept plan. `values`: those of the kept job."""
    if not chooses_fleet(job):
        return job
    kept, resources = values["resources"], job.resources
    trainer = {name: kept["trainer"][name] for name in ("accelerators", "use_spot")}
    rollout = {name: kept["rollout"][name] for name in ("accelerators", "num_nodes", "min_nodes")}
    roles = {
        "trainer": resources.trainer.model_copy(update=trainer),
        "rollout": resources.rollout.model_copy(update=rollout),
    }
    runtime = job.runtime.model_copy(update={"trainer_ranks": values["runtime"]["trainer_ranks"]})
    return job.model_copy(update={"resources": resources.model_copy(update=roles), "runtime": runtime})


def candidates(
    job: Job, workdir: Path | None, offers: Sequence[Offer], market: MarketView
) -> tuple[list[Candidate], list[Unfit]]:
    """Return every fleet with each number of rollout nodes in its cheapest region, and the fleets that cannot be.

    Budget and deadline are left to the replays: a run that is late buys nodes on demand, which no closed form knows.
    """
    by_kind: dict[str, list[Offer]] = {}
    for offer in offers:
        by_kind.setdefault(offer.accelerator, []).append(offer)
    fitting: list[Candidate] = []
    unfit: list[Unfit] = []
    too_small: dict[tuple[str, str | None], TooSmall] = {}
    known = MarketNodes()
    for fleet in fleets_of(job, offers):
        most = most_nodes(job) if fleet.rollout else 0
        kind_of = {"trainer": fleet.trainer, "rollout": fleet.rollout}
        try:
            for refusal in filter(None, map(too_small.get, kind_of.items())):
                raise refusal
            resolved = resolve(with_fleet(job, fleet, most), workdir)
            check_memory(resolved)
            check_pool(resolved)
        except (JobError, PlacementError, ValueError) as error:
            unfit.append(Unfit(fleet=fleet, why=str(error)))
            if isinstance(error, TooSmall):
                too_small[error.role, kind_of[error.role]] = error
            continue
        kinds = dict.fromkeys(kind.partition(":")[0] for kind in (fleet.trainer, fleet.rollout) if kind)
        in_view = replace(market, offers=tuple(offer for kind in kinds for offer in by_kind.get(kind, ())))
        fitting += _in_regions(job, fleet, resolved, most, in_view, known)
    if any(candidate.resolved.seconds is not None for candidate in fitting):
        fitting = [candidate for candidate in fitting if candidate.resolved.seconds is not None]
    return fitting, unfit


def _in_regions(
    job: Job, fleet: Fleet, resolved: Resolved, most: int, market: MarketView, known: MarketNodes
) -> Iterator[Candidate]:
    needs = replace(cloud_requirements(resolved), min_rollout_nodes=0)
    sites: Sequence[Site] = sites_of(needs, market, known)[0]
    if "accelerators" not in job.resources.trainer.model_fields_set:  # a larger node is a fleet of its own
        sites = [site for site in sites if site.trainer.gpus == resolved.job.resources.trainer.gpus]
    caps = Caps(max_hourly_micro_usd=needs.max_hourly_micro_usd)
    least = 1 if fleet.rollout else 0
    if resolved.seconds is None:
        least = most  # nobody knows how many nodes pay
    numbers = range(max(least, job.resources.rollout.min_nodes or 0), most + 1)
    for nodes, choice in cheapest_by_nodes(needs, sites, caps, numbers):
        expected, least_hours = outlook(choice), on_demand_outlook(choice).ms / HOUR_MS
        late_usd = 0.0 if job.budget.deadline is None else _late_usd(choice, least_hours, job.budget.deadline / HOUR_MS)
        yield Candidate(
            fleet=fleet,
            resolved=replace(resolved, job=with_fleet(job, fleet, nodes)),
            choice=choice,
            usd=expected.micro_usd / MICRO + late_usd,
            hours=expected.ms / HOUR_MS + CHANGE_HOURS,
            least_hours=least_hours,
        )


def _late_usd(choice: Choice, least_hours: float, deadline_hours: float) -> float:
    """Return the dollars of rollout nodes on demand that a run buys in place of missing spot, to be in time.

    H: hours with the trainer always there and rollout nodes on spot alone. Of the time without spot nodes, the share
    (H - D) / (H - `least_hours`) is filled, so that the run takes D = `LATE` x the deadline.
    """
    recipe, limit_hours = choice.site.recipe, LATE * deadline_hours
    hours = recipe.iterations.mean * progress(recipe, sums(choice)[0], recipe.gain_exponent.mean).seconds / 3600
    if hours <= max(limit_hours, least_hours):
        return 0.0
    missing = sum(
        count * (1 - pool.value.useful_share) * pool.on_demand_micro_usd_per_hour
        for pool, count in choice.pools
        if pool.offer.market is Market.SPOT
    )
    filled = min(1.0, (hours - limit_hours) / (hours - least_hours))
    return filled * missing * max(limit_hours, least_hours) / MICRO


def shortlist(fleets: Sequence[Candidate], max_usd: float | None, deadline_hours: float | None) -> list[Candidate]:
    """Return the candidates to replay: the cheapest, the cheapest in time, and the quickest within the budget.

    A fleet that would be late with every node at work is left out, unless each one would be.
    """
    may_be = [c for c in fleets if deadline_hours is None or c.least_hours <= deadline_hours]
    by_dollars = sorted(may_be or fleets, key=lambda candidate: (candidate.usd, candidate.hours))
    by_hours = sorted(
        (candidate for candidate in by_dollars if max_usd is None or candidate.usd <= max_usd),
        key=lambda candidate: (candidate.hours, candidate.usd),
    )
    of_kinds: Counter[Fleet] = Counter()
    cheap = []
    for candidate in by_dollars:
        of_kinds[candidate.fleet] += 1
        if of_kinds[candidate.fleet] <= ALIKE and candidate.usd <= NEAR * by_dollars[0].usd:
            cheap.append(candidate)
    timely = [c for c in by_dollars if deadline_hours is not None and c.hours <= LATE * deadline_hours]
    chosen = [*cheap[:CHEAP], *by_hours[:QUICK], *timely[:TIMELY]]
    return list({candidate.key: candidate for candidate in chosen}.values())


def text_of(fleet: Fleet, nodes: int) -> str:
    """Return a fleet as text, like `H100:8 on spot + 2 x L4:1`. The first node trains and samples."""
    trainer = f"{fleet.trainer} {'on spot' if fleet.trainer_on_spot else 'on demand'}"
    if not nodes:
        return f"{trainer} alone"
    return f"{trainer} + {nodes} x {fleet.rollout}"
