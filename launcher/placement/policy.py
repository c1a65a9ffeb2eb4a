"""Policies: choose the nodes to keep running, given the offers and the recent losses. Pure; one protocol.

all-on-demand, cheapest-failover, skypilot-like, spothedge: baselines, for comparison
ours: the choice of least expected cost (launcher/placement/search.py)

A plan asks a policy before the run. The live cluster and a replay over traces can ask the same policy again with the
losses so far. The baselines take as many nodes as the job allows and the caps bear. `ours` also decides the number of
nodes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from launcher.market.hazard import Pool
from launcher.placement.forecast import Caps, Choice, cost, sums
from launcher.placement.requirements import CloudRequirements, Site, Spot, pool_of_offer
from launcher.placement.search import Found, cheapest_choice
from launcher.placement.value import on_demand_fallback

POLICIES = ("all-on-demand", "cheapest-failover", "skypilot-like", "spothedge", "ours")

SPOTHEDGE_EXTRA = 1
"""Nodes above the target that SpotHedge keeps, if the job allows the extra nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """Facts that a policy may use. Before a run, only the needs and the sites are known."""

    needs: CloudRequirements
    sites: tuple[Site, ...]
    """Sorted by cloud, region and trainer."""
    lost: tuple[Pool, ...] = ()
    """Pools of recent preemptions or refusals, oldest first."""
    missing: int = 0
    """Number of spot nodes that are wanted but not running."""


class Policy(Protocol):
    """Choose the nodes to keep running. The same situation gives the same answer."""

    def choose(self, situation: Situation) -> Choice | None:
        """Return the choice within the caps of the needs; None if no choice keeps the caps."""


def build_policy(name: str) -> Policy:
    """Return the policy of this name. Raises ValueError for a name that is not in `POLICIES`."""
    match name:
        case "all-on-demand":
            return AllOnDemand()
        case "cheapest-failover":
            return CheapestFailover()
        case "skypilot-like":
            return SkyPilotLike()
        case "spothedge":
            return SpotHedge()
        case "ours":
            return Ours()
        case _:
            raise ValueError(f"there is no policy {name!r}; use {', '.join(POLICIES)}")


class AllOnDemand:
    """All nodes on demand, at the cheapest site: the baseline of all savings."""

    def choose(self, situation: Situation) -> Choice | None:
        def choices(nodes: int) -> Iterator[Choice]:
            for site in situation.sites:
                if site.on_demand is not None or not nodes:
                    yield Choice(site=site, spot=(0,) * len(site.zones), on_demand=nodes)

        return _most_that_fits(situation, choices)


class CheapestFailover:
    """All spot nodes in the zone with the lowest price. After a loss, all nodes go to the next zone of any region."""

    def choose(self, situation: Situation) -> Choice | None:
        return _most_that_fits(situation, lambda nodes: _in_one_zone(situation.sites, nodes, set(situation.lost)))


class SkyPilotLike:
    """The strategy of SkyPilot's managed jobs: start in the cheapest zone.

    After a loss the whole cluster goes to another region at once.
    """

    def choose(self, situation: Situation) -> Choice | None:
        lost = {(pool.cloud, pool.region) for pool in situation.lost}
        there = [site for site in situation.sites if (site.trainer.cloud, site.trainer.region) not in lost]
        sites = tuple(there) or situation.sites
        return _most_that_fits(situation, lambda nodes: _in_one_zone(sites, nodes, set()))


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotHedge:
    """SkyServe's rule (arXiv 2411.01438).

    Spread the nodes over zones without recent losses, keep some extra nodes, and bridge with min(N, N + extra - ready)
    nodes on demand. N is the job's nodes less the extra.
    """

    extra: int = SPOTHEDGE_EXTRA

    def choose(self, situation: Situation) -> Choice | None:
        def choices(nodes: int) -> Iterator[Choice]:
            for site in situation.sites:
                zones = [index for index, pool in enumerate(site.zones) if pool_of_offer(pool.offer) not in lost]
                zones = zones or list(range(len(site.zones)))
                if zones or not nodes:
                    spot = [0] * len(site.zones)
                    for node in range(nodes):
                        spot[zones[node % len(zones)]] += 1
                    bridge = min(max(0, nodes - self.extra), situation.missing) if site.on_demand else 0
                    yield Choice(site=site, spot=tuple(spot), on_demand=bridge)

        lost = set(situation.lost)
        return _most_that_fits(situation, choices)


class Ours:
    """Least expected cost over every number of nodes in every zone.

    On-demand nodes fill in if spot falls below the floor.
    """

    def choose(self, situation: Situation) -> Choice | None:
        needs, found = situation.needs, self.search(situation)
        if found is None or not situation.missing or found.choice.site.on_demand is None or needs.spot is Spot.ONLY:
            return None if found is None else found.choice
        choice = found.choice
        ready = max(0, choice.nodes - situation.missing)
        bridge = on_demand_fallback(ready, needs.floor_nodes, situation.missing)
        return replace(choice, on_demand=choice.on_demand + bridge)

    def search(self, situation: Situation) -> Found | None:
        """Return the best choice with every node running, and the lower bound of each site."""
        lost, sites = set(situation.lost), situation.sites
        if lost:
            sites = tuple(
                replace(site, zones=tuple(pool for pool in site.zones if pool_of_offer(pool.offer) not in lost))
                for site in sites
            )
        return cheapest_choice(situation.needs, sites, Caps.of(situation.needs))


def _in_one_zone(sites: tuple[Site, ...], nodes: int, lost: set[Pool]) -> Iterator[Choice]:
    """Yield a choice for every zone, with all nodes in the zone.

    Zones with a recent loss are used only if every zone had a recent loss.
    """
    pairs = [(site, index) for site in sites for index in range(len(site.zones))]
    good = [(site, index) for site, index in pairs if pool_of_offer(site.zones[index].offer) not in lost]
    for site, index in good or pairs:
        yield Choice(site=site, spot=tuple(nodes if zone == index else 0 for zone in range(len(site.zones))))
    if not nodes:
        yield from (Choice(site=site, spot=(0,) * len(site.zones)) for site in sites)


def _most_that_fits(situation: Situation, choices: Callable[[int], Iterator[Choice]]) -> Choice | None:
    """Return the choice with as many nodes as the caps bear, then the cheapest by listed price.

    Policies without hazards go by the listed price.
    """
    needs, caps = situation.needs, Caps.of(situation.needs)
    recipes = {gpus: needs.recipe.on(gpus) for gpus in {site.trainer.gpus for site in situation.sites}}

    def fits(choice: Choice) -> bool:
        trainer = choice.site.trainer
        return caps.keep(
            choice.listed_micro_usd_per_hour, *cost(recipes[trainer.gpus], trainer.micro_usd_per_hour, *sums(choice))
        )

    for nodes in range(needs.max_rollout_nodes, -1, -1):
        found = next(filter(fits, sorted(choices(nodes), key=_listed)), None)
        if found is not None:
            return found
    return None


def _listed(choice: Choice) -> tuple[int, str, tuple[int, ...]]:
    """Return the sort key of a choice. The name of the site, then the first zone, settle a tie."""
    trainer = choice.site.trainer
    site = f"{trainer.cloud} {trainer.region} {trainer.instance_type}"
    return (choice.listed_micro_usd_per_hour, site, tuple(-count for count in choice.spot))
