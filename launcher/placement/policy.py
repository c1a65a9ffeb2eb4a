"""Choose the nodes that a plan begins with, given the offers. Pure; one protocol.

all-on-demand, one-zone, spread: baselines, for comparison
ours: the choice of least expected cost (launcher/placement/search.py)

The baselines take as many nodes as the job allows and the caps bear. `ours` also decides the number of nodes. What a
run does after a loss is decided by `launcher/decide`, live and in a replay; `launcher/replay` compares that with other
policies over time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from launcher.placement.forecast import Caps, Choice, cost
from launcher.placement.requirements import CloudRequirements, Site
from launcher.placement.search import Found, cheapest_choice

POLICIES = ("all-on-demand", "one-zone", "spread", "ours")


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """Facts that a policy may use before a run."""

    needs: CloudRequirements
    sites: tuple[Site, ...]
    """Sorted by cloud, region and trainer."""


class Policy(Protocol):
    """Choose the nodes to keep running. The same situation gives the same answer."""

    def choose(self, situation: Situation) -> Choice | None:
        """Return the choice within the caps of the needs; None if no choice keeps the caps."""


def build_policy(name: str) -> Policy:
    """Return the policy of this name. Raises ValueError for a name that is not in `POLICIES`."""
    match name:
        case "all-on-demand":
            return AllOnDemand()
        case "one-zone":
            return OneZone()
        case "spread":
            return Spread()
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


class OneZone:
    """All spot nodes in the zone with the lowest price: where SkyPilot's managed jobs start."""

    def choose(self, situation: Situation) -> Choice | None:
        return _most_that_fits(situation, lambda nodes: _in_one_zone(situation.sites, nodes))


class Spread:
    """Spot nodes over every zone of a region in turn: where SkyServe's SpotHedge starts (arXiv 2411.01438)."""

    def choose(self, situation: Situation) -> Choice | None:
        def choices(nodes: int) -> Iterator[Choice]:
            for site in situation.sites:
                if site.zones or not nodes:
                    spot = [0] * len(site.zones)
                    for node in range(nodes):
                        spot[node % len(spot)] += 1
                    yield Choice(site=site, spot=tuple(spot))

        return _most_that_fits(situation, choices)


class Ours:
    """Least expected cost over every number of nodes in every zone."""

    def choose(self, situation: Situation) -> Choice | None:
        cheapest = self.search(situation)
        return None if cheapest is None else cheapest.choice

    def search(self, situation: Situation) -> Found | None:
        """Return the best choice with every node running, and the lower bound of each site."""
        return cheapest_choice(situation.needs, situation.sites, Caps.of(situation.needs))


def _in_one_zone(sites: tuple[Site, ...], nodes: int) -> Iterator[Choice]:
    """Yield a choice for every zone, with all nodes in the zone."""
    for site in sites:
        for index in range(len(site.zones)):
            yield Choice(site=site, spot=tuple(nodes if zone == index else 0 for zone in range(len(site.zones))))
    if not nodes:
        yield from (Choice(site=site, spot=(0,) * len(site.zones)) for site in sites)


def _most_that_fits(situation: Situation, choices: Callable[[int], Iterator[Choice]]) -> Choice | None:
    """Return the choice with as many nodes as the caps bear, then the cheapest by listed price.

    Policies without hazards go by the listed price.
    """
    needs, caps = situation.needs, Caps.of(situation.needs)

    def fits(choice: Choice) -> bool:
        return caps.keep(choice.listed_micro_usd_per_hour, *cost(choice))

    for nodes in range(needs.max_rollout_nodes, -1, -1):
        choice = next(filter(fits, sorted(choices(nodes), key=_listed)), None)
        if choice is not None:
            return choice
    return None


def _listed(choice: Choice) -> tuple[int, str, tuple[int, ...]]:
    """Return the sort key of a choice. The name of the site, then the first zone, settle a tie."""
    trainer = choice.site.trainer
    site = f"{trainer.cloud} {trainer.region} {trainer.instance_type}"
    return (choice.listed_micro_usd_per_hour, site, tuple(-count for count in choice.spot))
