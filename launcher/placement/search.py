"""Find the cheapest choice: every number of nodes in every zone of every site, by branch and bound. Pure.

part: a number of spot nodes and of on-demand nodes at a site, with a quick lower bound on the cost of its choices
order: cheapest bound first; fill zone after zone, and turn back if the bound of the rest exceeds the best so far

Exact: the result equals the result of trying every choice (a test does). Ties are broken by time, then by fewer nodes,
then by name. More money or time only adds choices and therefore never makes the result worse. If the rate is not the
limit, the node-hours bought from a zone never rise with the zone's price (`forecast.cost` is linear in each price).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from launcher.money import HOUR_MS
from launcher.placement.forecast import Caps, Choice, GpusAtWork, Progress, cost, paid, quickest
from launcher.placement.requirements import CloudRequirements, Site, Spot
from launcher.placement.value import most_in_one_zone

SLACK = 1 + 1e-9
"""Tolerance of the bounds: a bound is a float, summed in a different order than the cost below it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    choice: Choice
    micro_usd: int
    at_least_micro_usd: tuple[int | None, ...]
    """Lower bound of the cost at every site, in the order of `sites`. None: no choice at the site keeps the caps."""


def cheapest_choice(needs: CloudRequirements, sites: Sequence[Site], caps: Caps) -> Found | None:
    """Return the choice of least expected cost within the caps and above the floor; None if no choice fits."""
    search = _Search(needs, sites, caps)
    return search.cheapest(part for part in search.parts() if part[2] + part[3] >= needs.min_rollout_nodes)


def cheapest_by_nodes(
    needs: CloudRequirements, sites: Sequence[Site], caps: Caps, numbers: Iterable[int]
) -> Iterator[tuple[int, Choice]]:
    """Yield the choice of least expected cost for each of these numbers of rollout nodes, where there is one."""
    search = _Search(needs, sites, caps)
    parts: defaultdict[int, list[Part]] = defaultdict(list)
    for part in search.parts():
        parts[part[2] + part[3]].append(part)
    for nodes in numbers:
        if (found := search.cheapest(parts[nodes])) is not None:
            yield nodes, found.choice


def is_spread(choice: Choice) -> bool:
    """Return whether each zone has at most half of the spot nodes, rounded up.

    True for a site with a single zone.
    """
    return max(choice.spot, default=0) <= most_in_one_zone(sum(choice.spot), len(choice.site.zones))


def is_above_floor(needs: CloudRequirements, choice: Choice) -> bool:
    """Return whether the sum of n_z u_z, plus one for each on-demand node, is at least `floor_nodes`."""
    at_work = sum(count * pool.value.useful_share for pool, count in zip(choice.site.zones, choice.spot, strict=True))
    return at_work + choice.on_demand >= needs.floor_nodes


Part = tuple[int, int, int, int]
"""A part: lower bound of its cost in micro-dollars, index of the site, spot nodes, on-demand nodes."""


class _Search:
    def __init__(self, needs: CloudRequirements, sites: Sequence[Site], caps: Caps) -> None:
        self.needs, self.caps = needs, caps
        known: defaultdict[int, dict[GpusAtWork, Progress]] = defaultdict(dict)
        self.sites = [_Columns(site, known[site.trainer.gpus]) for site in sites]
        self.best: tuple[int, int, int, int, tuple[int, ...]] | None = None
        self.choice: Choice
        self._least_ms: dict[tuple[int, float], list[int]] = {}

    def cheapest(self, parts: Iterable[Part]) -> Found | None:
        """Return the choice of least expected cost within these parts."""
        self.best = None
        ordered = sorted(parts)
        for part in ordered:
            if self.best is not None and part[0] > self.best[0]:
                break
            self.fill(part)
        if self.best is None:
            return None
        micro_usd = self.best[0]
        least: dict[int, int] = {}
        for bound, number, _, _ in ordered:
            least.setdefault(number, max(bound, micro_usd))
        at_least = tuple(map(least.get, range(len(self.sites))))
        return Found(choice=self.choice, micro_usd=micro_usd, at_least_micro_usd=at_least)

    def parts(self) -> Iterator[Part]:
        """Yield every part that may keep the caps.

        The bound of a part takes every node to be as useful as the best node.
        """
        most, spot_kinds = self.needs.max_rollout_nodes, self.needs.spot
        for number, columns in enumerate(self.sites):
            steady = columns.site.on_demand if spot_kinds is not Spot.ONLY else None
            more_paid, more_listed, steady_share = (
                (steady.value.micro_usd_per_hour, steady.offer.micro_usd_per_hour, steady.value.useful_share)
                if steady
                else (0.0, 0, 0.0)
            )
            trainer = columns.site.trainer_micro_usd_per_hour
            on_spot = self._fastest_ms(columns, columns.best_share)
            with_steady = self._fastest_ms(columns, max(columns.best_share, steady_share))
            for spot in range(most + 1 if columns.zones and spot_kinds is not Spot.NEVER else 1):
                paid = (trainer + columns.rates.least(0, spot, columns.cap(spot))) / SLACK
                listed = (trainer + columns.prices.least(0, spot, columns.cap(spot))) / SLACK
                for on_demand in range(most - spot + 1 if steady else 1):
                    ms = with_steady[spot + on_demand] if on_demand else on_spot[spot]
                    bound = int((paid + on_demand * more_paid) * ms / HOUR_MS)
                    if self.caps.keep(listed + on_demand * more_listed, bound, ms):
                        yield bound, number, spot, on_demand

    def fill(self, part: Part) -> None:
        """Try every distribution of the part's spot nodes over the zones of the site."""
        _, number, spot, on_demand = part
        columns, steady = self.sites[number], self.sites[number].site.on_demand
        placed = _Placed(0.0, float(columns.site.trainer_micro_usd_per_hour), 0.0, 0.0, 0.0)
        if on_demand and steady is not None:
            placed = _Placed(
                rate=on_demand * steady.value.micro_usd_per_hour,
                listed=placed.listed + on_demand * steady.offer.micro_usd_per_hour,
                there=float(on_demand),
                gpus=on_demand * steady.workers * steady.value.useful_share,
                steady=on_demand * steady.workers * steady.value.useful_share,
            )
        self._fill(part, placed, [], spot)

    def _fill(self, part: Part, placed: "_Placed", counts: list[int], left: int) -> None:
        """Try every way to put `left` spot nodes into the zones after the first `len(counts)`, cheapest hour first."""
        _, number, spot, on_demand = part
        columns, zone, cap = self.sites[number], len(counts), self.sites[number].cap(spot)
        bound = self._bound(columns, spot, placed, zone, left)
        if bound is None or (self.best is not None and bound > self.best[0]):
            return
        if left == 0:
            self._consider(number, counts, on_demand)
            return
        most = min(left, cap)
        if columns.is_like_before[zone]:
            most = min(most, counts[-1])  # of two equal zones, the first gets as many nodes or more
        for count in range(most, max(0, left - cap * (columns.zones - zone - 1)) - 1, -1):
            counts.append(count)
            self._fill(part, columns.more(placed, zone, count), counts, left - count)
            counts.pop()

    def _consider(self, number: int, counts: Sequence[int], on_demand: int) -> None:
        columns = self.sites[number]
        choice = Choice(site=columns.site, spot=(*counts, *(0,) * (columns.zones - len(counts))), on_demand=on_demand)
        if not is_above_floor(self.needs, choice):
            return
        micro_usd, ms = cost(choice)
        if not self.caps.keep(choice.listed_micro_usd_per_hour, micro_usd, ms):
            return
        key = (micro_usd, ms, choice.nodes, number, tuple(-count for count in choice.spot))
        if self.best is None or key < self.best:
            self.best, self.choice = key, choice

    def _bound(self, columns: "_Columns", spot: int, placed: "_Placed", zone: int, left: int) -> int | None:
        """Return a lower bound in micro-dollars for all choices that begin like `placed`; None if none is allowed.

        The bound prices the remaining nodes like the cheapest zones from `zone` on, and takes their usefulness from the
        most useful zones. Spot nodes come and go as is best. Traffic is not counted.
        """
        cap = columns.cap(spot)
        useful = -columns.useless.least(zone, left, cap)
        if (placed.there + useful) * SLACK < self.needs.floor_nodes:
            return None
        spot_gpus = spot * self.needs.rollout.workers
        gpus = GpusAtWork(
            mean=min(placed.steady + spot_gpus, (placed.gpus + useful * self.needs.rollout.workers) * SLACK),
            fewest=placed.steady,
            most=placed.steady + spot_gpus,
        )
        micro_usd, ms = paid(
            columns.recipe,
            columns.quickest(gpus),
            (columns.site.trainer_micro_usd_per_hour + placed.rate + columns.rates.least(zone, left, cap)) / SLACK,
            0,
        )
        listed = (placed.listed + columns.prices.least(zone, left, cap)) / SLACK
        return micro_usd if self.caps.keep(listed, micro_usd - 1, ms - 1) else None

    def _fastest_ms(self, columns: "_Columns", share: float) -> list[int]:
        """Return the shortest time to the target in ms: item n is the time with n rollout nodes.

        Each node is at work for `share` of the time.

        The result is cached, because many sites have the same values.
        """
        key = (columns.site.trainer.gpus, share)
        if key not in self._least_ms:
            self._least_ms[key] = [
                paid(columns.recipe, columns.quickest(self._up_to(nodes, share)), 0.0, 0)[1] - 1
                for nodes in range(self.needs.max_rollout_nodes + 1)
            ]
        return self._least_ms[key]

    def _up_to(self, nodes: int, share: float) -> GpusAtWork:
        most = nodes * self.needs.rollout.workers
        return GpusAtWork(mean=min(float(most), most * share * SLACK), most=most)


@dataclass(frozen=True, slots=True)
class _Placed:
    """Sums over the nodes placed so far."""

    rate: float
    listed: float
    """Listed rate in micro-dollars an hour, including the trainer."""
    there: float
    """Average number of nodes at work. An on-demand node counts as a whole node, as for the floor."""
    gpus: float
    steady: float
    """GPUs at work of the on-demand nodes."""


class _Columns:
    """Figures of the spot zones of a site, a column for each figure, in the site's order."""

    def __init__(self, site: Site, known: dict[GpusAtWork, Progress]) -> None:
        """Prepare a site. `known`: bounds on the progress, which sites with trainers of equal size share."""
        pools = site.zones
        self.site, self.zones = site, len(pools)
        self.recipe = site.recipe
        self.rates = _Column([pool.value.micro_usd_per_hour for pool in pools])
        self.prices = _Column([float(pool.offer.micro_usd_per_hour) for pool in pools])
        self.useless = _Column([-pool.value.useful_share for pool in pools])
        self.best_share = max((pool.value.useful_share for pool in pools), default=0.0)
        limits = [pool.on_demand_micro_usd_per_hour for pool in pools]
        figures = list(zip(self.rates.each, self.prices.each, self.useless.each, limits, strict=True))
        self.is_like_before = [zone > 0 and figures[zone] == figures[zone - 1] for zone in range(self.zones)]
        self._quickest = known

    def cap(self, spot: int) -> int:
        return most_in_one_zone(spot, self.zones)

    def more(self, placed: _Placed, zone: int, count: int) -> _Placed:
        """Return the sums with `count` more nodes in a zone."""
        if not count:
            return placed
        at_work = -count * self.useless.each[zone]
        return _Placed(
            placed.rate + count * self.rates.each[zone],
            placed.listed + count * self.prices.each[zone],
            placed.there + at_work,
            placed.gpus + at_work * self.site.zones[zone].workers,
            placed.steady,
        )

    def quickest(self, gpus: GpusAtWork) -> Progress:
        """Return the bound on the progress of these GPUs. Equal sums come again and again in a search."""
        if gpus not in self._quickest:
            self._quickest[gpus] = quickest(self.recipe, gpus, self.recipe.gain_exponent.mean)
        return self._quickest[gpus]


class _Column:
    """A figure of each zone, with the sums of the smallest values of the later zones."""

    def __init__(self, each: Sequence[float]) -> None:
        self.each = each
        self._least = [sorted(each[placed:]) for placed in range(len(each) + 1)]
        self._sums = [list(accumulate(least, initial=0.0)) for least in self._least]

    def least(self, zone: int, left: int, cap: int) -> float:
        """Return the least sum for `left` nodes in the zones from `zone` on, with at most `cap` nodes in each."""
        if not left:
            return 0.0
        full, remainder = divmod(left, cap)
        total = self._sums[zone][full] * cap
        return total + remainder * self._least[zone][full] if remainder else total
