"""Decide what to buy for a job: a trainer on demand and rollout nodes on spot, all in one region.

Pure: no I/O, no clock.

The region with the cheapest whole cluster wins. All nodes are in one region, because nodes talk to the trainer all the
time, and a copy of the weights across regions can cost more than the GPU. Within the region, spot nodes are spread over
the cheapest zones, at most half of the nodes in one zone, because a zone may preempt all of its nodes at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import TypeAdapter

from engine.events import Market
from launcher.exit_codes import ExitCode, Failure
from launcher.job.schema import Job
from launcher.job.sections import NodeResources
from launcher.market.offers import Offer
from launcher.market.quality import USABLE
from launcher.market.side_prices import DISK_GIB
from launcher.money import HOUR_MS
from launcher.placement.front import ParetoFront
from launcher.placement.options import Option, SiteOptions
from launcher.placement.placement import Placement

SlotRole = Literal["trainer", "ranks", "rollout"]
"""Work of a slot's node. `ranks`: a further node of the trainer; the first one has the role `trainer`."""


class PlacementError(Failure):
    """No offer fits the job's resources."""

    exit_code = ExitCode.INVALID_JOB


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A place in the cluster that is kept filled: `trainer`, `trainer-1`, `spot-0`, ...

    The successor of a lost node takes the node's slot.
    """

    name: str
    role: SlotRole
    placement: Placement
    on_demand_micro_usd_per_hour: int
    """Price of the same instance on demand, the reference of the price effect."""

    @property
    def option(self) -> Option:
        """Return the option that the plan prefers for the slot."""
        return Option(placement=self.placement, on_demand_micro_usd_per_hour=self.on_demand_micro_usd_per_hour)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Nodes that a run keeps running, with their cost. Rates are sums of catalog prices: estimates, not bills."""

    region: str
    slots: tuple[Slot, ...]
    max_total_micro_usd: int | None
    max_hourly_micro_usd: int | None
    judge_micro_usd: int = 0
    """Most that paid judges may cost, a part of `max_total`."""
    money_basis: str = "assumed"
    sites: tuple[SiteOptions, ...] = ()
    """Sites where the run may be, in order of preference. Empty on the local infra, which has one place."""
    iteration_ms: int | None = None
    """Predicted time of an iteration with the trainer alone. None on the local infra, which costs nothing."""
    iterations: float = 0.0
    """Iterations that the target is expected to take. 0 on the local infra."""
    pace_ms: tuple[int, ...] = ()
    """Predicted time of one of these iterations with 0, 1, 2, ... rollout nodes at work; never rises. Empty on the
    local infra and in plans of older versions: then waiting for spot has no price, only a fixed end."""
    checkpoint_every: int = 1
    """Iterations between two checkpoints. 1 in plans of older versions."""
    moved_bytes: int = 0
    """Bytes that a move to another region carries along: a model for each node, and a checkpoint. 0 in older plans."""
    trainer_life_hours: float | None = None
    """Mean life that the plan expects of a trainer's node on spot, in hours. None: on demand, or not known."""
    ranks_have_room: bool = False
    """True if the GPU of every rank of the trainer has room to sample. Every node of the trainer is told."""
    fleets: ParetoFront | None = None
    """The fleets that the plan was chosen from. None: the job names its nodes. Plans of older versions have none."""

    @property
    def expected_micro_usd_per_hour(self) -> int:
        """Return the rate with every node running, at the offered prices."""
        return sum(slot.placement.micro_usd_per_hour for slot in self.slots)

    @property
    def maximum_micro_usd_per_hour(self) -> int:
        """Return the rate with every node running, at on-demand prices. Spot never costs more."""
        return sum(slot.on_demand_micro_usd_per_hour for slot in self.slots)

    @property
    def lasts_ms(self) -> int | None:
        """Return the time that `max_total` pays for at the expected rate; None without a limit or a rate.

        The judges' budget is set aside. The time to a target is not known beforehand.
        """
        if self.max_total_micro_usd is None or not self.expected_micro_usd_per_hour:
            return None
        return (self.max_total_micro_usd - self.judge_micro_usd) * HOUR_MS // self.expected_micro_usd_per_hour


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as stored in the ledger; `slots_from` and `sites_from` read the plan back."""
    return asdict(plan)


def front_from(raw: Mapping[str, Any]) -> ParetoFront | None:
    """Return the fleets that a plan stored in the ledger was chosen from. None: the job named its nodes."""
    return TypeAdapter(ParetoFront | None).validate_python(raw.get("fleets"))


def slots_from(raw: Mapping[str, Any]) -> tuple[Slot, ...]:
    """Return the slots of a plan stored in the ledger."""
    return tuple(Slot(**slot | {"placement": _placement_from(slot["placement"])}) for slot in raw["slots"])


def sites_from(raw: Mapping[str, Any]) -> tuple[SiteOptions, ...]:
    """Return the sites of a plan stored in the ledger; empty for a plan from before plans had sites."""
    return tuple(
        SiteOptions(
            cloud=site["cloud"],
            region=site["region"],
            trainer=tuple(_option_from(option) for option in site["trainer"]),
            rollout=tuple(_option_from(option) for option in site["rollout"]),
        )
        for site in raw.get("sites", ())
    )


def _option_from(raw: Mapping[str, Any]) -> Option:
    return Option(**dict(raw) | {"placement": _placement_from(raw["placement"])})


def _placement_from(raw: Mapping[str, Any]) -> Placement:
    return Placement(**dict(raw) | {"market": Market(raw["market"])})


def plan_local(job: Job, offers: Sequence[Offer]) -> Plan:
    """Return the plan of the cheapest region. The local infra buys nothing, but prices its nodes by these offers.

    Raises PlacementError if no region offers the requested nodes; the error names the offered accelerators.
    """
    trainer, rollout = job.resources.trainer, job.resources.rollout
    offers = [offer for offer in offers if offer.quality in USABLE]
    for role, resources in (("trainer", trainer), ("rollout", rollout)):
        _check_known(role, resources, offers)
    regions = sorted({(offer.cloud, offer.region) for offer in offers})
    market = Market.SPOT if job.rolls_out_on_spot else Market.ON_DEMAND
    of_trainer = Market.SPOT if job.trains_on_spot else Market.ON_DEMAND
    plans = [slots for region in regions if (slots := _slots_in(region, trainer, rollout, of_trainer, market, offers))]
    if not plans:
        raise PlacementError(
            f"no region of the catalog offers {trainer.accelerators} "
            f"{'on spot' if of_trainer is Market.SPOT else 'on demand'} together with {rollout.accelerators} "
            f"{'on spot' if market is Market.SPOT else 'on demand'}; loosen resources.*.infra or take another "
            "accelerator"
        )
    slots = min(plans, key=lambda slots: sum(slot.placement.micro_usd_per_hour for slot in slots))
    return Plan(
        region=slots[0].placement.region,
        slots=slots,
        max_total_micro_usd=job.budget.max_total,
        max_hourly_micro_usd=job.budget.max_hourly,
        judge_micro_usd=job.reward.judge_micro_usd,
    )


def _slots_in(
    region: tuple[str, str],
    trainer: NodeResources,
    rollout: NodeResources,
    of_trainer: Market,
    market: Market,
    offers: Sequence[Offer],
) -> tuple[Slot, ...] | None:
    """Return the slots of the cheapest cluster in this region.

    None: the region has no fitting offer for the trainer, or none for the rollout nodes. An offer for rollout nodes
    counts only if the region also sells the instance type on demand, because a slot records the on-demand price.
    """
    in_region = [offer for offer in offers if (offer.cloud, offer.region) == region]
    steady = {offer.instance_type: offer for offer in reversed(_fitting(trainer, Market.ON_DEMAND, in_region))}
    of_market = _fitting(trainer, of_trainer, in_region)
    trainer_offers = [offer for offer in of_market if offer.instance_type in steady]
    if not trainer_offers:
        return None
    offer = trainer_offers[0]
    slots = [
        slot_of(
            trainer_slot(number),
            "ranks" if number else "trainer",
            offer,
            steady[offer.instance_type].micro_usd_per_hour,
        )
        for number in range(trainer.num_nodes)
    ]
    if rollout.num_nodes == 0:
        return tuple(slots)
    on_demand = {offer.instance_type: offer for offer in reversed(_fitting(rollout, Market.ON_DEMAND, in_region))}
    priced = [offer for offer in _fitting(rollout, market, in_region) if offer.instance_type in on_demand]
    if not priced:
        return None
    for number, offer in enumerate(_spread(priced, rollout.num_nodes)):
        name = f"{'spot' if market is Market.SPOT else 'on-demand'}-{number}"
        slots.append(slot_of(name, "rollout", offer, on_demand[offer.instance_type].micro_usd_per_hour))
    return tuple(slots)


def _spread(offers: Sequence[Offer], count: int) -> list[Offer]:
    """Return `count` offers that alternate between the two cheapest zones. `offers`: cheapest first.

    At most half of the nodes, rounded up, are then in one zone. A third zone would only cost more. If only one zone has
    an offer, all nodes are in that zone.
    """
    cheapest: dict[str, Offer] = {}
    for offer in offers:
        cheapest.setdefault(offer.zone, offer)
    zones = list(cheapest.values())[:2]
    return [zones[number % len(zones)] for number in range(count)]


def _fitting(resources: NodeResources, market: Market, offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers that the resources allow, cheapest first; the name of the zone breaks a tie."""
    cloud, region, zone = [*(resources.infra or "*").split("/"), "*", "*"][:3]
    fitting = [
        offer
        for offer in offers
        if offer.market is market
        and offer.accelerator.lower() == resources.accelerator.lower()
        and offer.gpus == resources.gpus
        and resources.instance_type in (None, offer.instance_type)
        and cloud in ("*", offer.cloud)
        and region in ("*", offer.region)
        and (zone in ("*", offer.zone) or not offer.zone)
    ]
    return sorted(fitting, key=lambda offer: (offer.micro_usd_per_hour, offer.zone, offer.instance_type))


def trainer_slot(number: int) -> str:
    """Return the slot of a trainer node: `trainer`, `trainer-1`, `trainer-2`, ..."""
    return f"trainer-{number}" if number else "trainer"


def number_of_trainer_slot(slot: str) -> int:
    """Return the number of a trainer node by its slot. The first node is 0."""
    return int(slot.removeprefix("trainer").removeprefix("-") or 0)


def slot_of(
    name: str, role: SlotRole, offer: Offer, on_demand_micro_usd_per_hour: int, disk_gib: int = DISK_GIB
) -> Slot:
    """Return a slot filled from an offer."""
    return Slot(
        name=name,
        role=role,
        placement=placement_of(offer, disk_gib),
        on_demand_micro_usd_per_hour=on_demand_micro_usd_per_hour,
    )


def placement_of(offer: Offer, disk_gib: int = DISK_GIB) -> Placement:
    return Placement(
        cloud=offer.cloud,
        region=offer.region,
        zone=zone_text(offer),
        instance_type=offer.instance_type,
        gpus=offer.gpus,
        accelerator=offer.accelerator,
        market=offer.market,
        micro_usd_per_hour=offer.micro_usd_per_hour,
        price_source=offer.source,
        price_observed_at=offer.observed_at,
        disk_gib=disk_gib,
    )


def zone_text(offer: Offer) -> str:
    return offer.zone or f"{offer.region}, any zone"


def _check_known(role: str, resources: NodeResources, offers: Sequence[Offer]) -> None:
    offered = sorted({f"{offer.accelerator}:{offer.gpus}" for offer in offers})
    accelerators = resources.accelerators
    if accelerators.lower() in (name.lower() for name in offered):
        return
    same_gpu = [name for name in offered if name.lower().startswith(f"{resources.accelerator.lower()}:")]
    near = same_gpu or get_close_matches(accelerators.upper(), offered, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "there is no such GPU in it:"
    raise PlacementError(
        f"resources.{role}.accelerators is {accelerators}, which the price catalog does not have; {hint} "
        f"(it has {', '.join(offered)})"
    )
