"""Time and cost of the arms to the target from modelled seconds and dollars, and the gain of `stale`. Pure.

A cell is a source of seconds, a number of spot GPUs, and a price. Every ratio is baseline over `stale`, seed by seed:
above 1, `stale` is faster or cheaper.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.exploration.value import IterationCost, iteration_seconds, relative_cost
from tests.benchmarks.exploration import ratio_interval
from tests.benchmarks.qwen_image import (
    ON_DEMAND_GPUS,
    Price,
    Times,
    affordable,
    in_path_seconds,
    iteration_cost,
    pool_of,
    waiting_seconds,
)

Iterations = Sequence[float]
"""Iterations to the target, seed by seed; the cap if it was not reached."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Results of the learning runs, by pool if there is one."""

    plain: Iterations
    in_path: Mapping[int, Iterations]
    stale: Mapping[int, Iterations]


@dataclass(frozen=True, kw_only=True)
class Use:
    """An arm in a cell."""

    iterations: Iterations
    seconds: float
    """Of an iteration."""
    on_demand: int
    """GPUs paid at the on-demand price."""
    spot: int
    """GPUs paid at the spot price."""
    pool: int | None = None

    @property
    def hours(self) -> list[float]:
        """Return the hours to the target, seed by seed."""
        return [count * self.seconds / 3600 for count in self.iterations]

    def rate(self, price: Price) -> float:
        """Return dollars an hour."""
        return self.on_demand * price.on_demand + self.spot * price.spot

    def dollars(self, price: Price) -> list[float]:
        """Return the dollars to the target, seed by seed."""
        return [spent * self.rate(price) for spent in self.hours]


BASELINES = ("on-demand", "plain", "in-path", "all on demand", "in-path all on demand", "in-path on demand")


def arms_of(cost: IterationCost, spot: int, learned: Learned) -> dict[str, Use]:
    """`stale` and every baseline.

    `on-demand`, `in-path on demand`: the reserved GPUs alone. `plain`, `in-path`: with the same spot GPUs, which idle
    while the trainer trains. `all on demand`, `in-path all on demand`: as these two, but every GPU is paid at the
    on-demand price.
    """
    alone = Use(iterations=learned.plain, seconds=iteration_seconds(cost, 0), on_demand=cost.reserved_gpus, spot=0)
    plain = replace(alone, seconds=iteration_seconds(cost, spot), spot=spot)
    pool = pool_of(affordable(cost, spot))
    in_path = fastest_in_path(cost, spot, learned)
    return {
        "on-demand": alone,
        "plain": plain,
        "in-path": in_path,
        "stale": plain if pool is None else replace(plain, iterations=learned.stale[pool], pool=pool),
        "all on demand": _paid_on_demand(plain),
        "in-path all on demand": _paid_on_demand(in_path),
        "in-path on demand": fastest_in_path(cost, 0, learned),
    }


def fastest_in_path(cost: IterationCost, spot: int, learned: Learned) -> Use:
    """Return the fastest pool that was run. All GPUs wait for the pool, so there is no budget. Choosing it on the
    reported seeds favours it. With the same GPUs it is also the cheapest."""
    return fastest(
        Use(
            iterations=iterations,
            seconds=in_path_seconds(cost, spot, pool),
            on_demand=cost.reserved_gpus,
            spot=spot,
            pool=pool,
        )
        for pool, iterations in learned.in_path.items()
    )


def fastest(options: Iterable[Use]) -> Use:
    return min(options, key=lambda use: geometric_mean(use.hours))


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def _paid_on_demand(use: Use) -> Use:
    return replace(use, on_demand=use.on_demand + use.spot, spot=0)


# --- ratios -----------------------------------------------------------------------------------------------------


def compare(base: Use, ours: Use, price: Price) -> dict[str, Any]:
    """iterations x seconds = time; x rate = cost. `time` and `cost` come from hours and dollars, not from factors."""
    return {
        "iterations": _paired(base.iterations, ours.iterations),
        "seconds": base.seconds / ours.seconds,
        "rate": base.rate(price) / ours.rate(price),
        "time": _paired(base.hours, ours.hours),
        "cost": _paired(base.dollars(price), ours.dollars(price)),
    }


def _paired(base: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    return ratio_interval([one / other for one, other in zip(base, ours, strict=True)])


def product_error(ratio: Mapping[str, Any]) -> float:
    """Return the relative error of iterations x seconds x rate against the cost ratio."""
    return abs(float(ratio["iterations"]["mean"] * ratio["seconds"] * ratio["rate"] / ratio["cost"]["mean"]) - 1)


@dataclass(frozen=True, kw_only=True)
class SpotCell:
    """`stale` against every baseline."""

    times: Times
    spot: int
    price: Price
    arms: Mapping[str, Use]
    over: Mapping[str, Mapping[str, Any]]
    """By baseline: see `compare`."""
    break_even: float
    """Spot pays if iterations fall to less than this share of the on-demand run's (value.relative_cost)."""

    @property
    def gpus(self) -> str:
        return f"{self.times.name}, {ON_DEMAND_GPUS}+{self.spot}"

    @property
    def name(self) -> str:
        return f"{self.gpus}, {self.price.name}"

    def mean(self, kind: str, baseline: str = "on-demand") -> float:
        return float(self.over[baseline][kind]["mean"])

    @property
    def verdict(self) -> str:
        """Return the verdict from the interval of the cost over the on-demand run."""
        cost = self.over["on-demand"]["cost"]
        if cost["low"] > 1:
            return "pays"
        return "costs more" if cost["high"] < 1 else "open"


def spot_cell(times: Times, spot: int, price: Price, learned: Learned, ours: Use | None = None) -> SpotCell:
    """Compare one cell. `ours`: the arm in place of the affordable `stale`."""
    arms = arms_of(times.cost, spot, learned)
    if ours is not None:
        arms["stale"] = ours
    return SpotCell(
        times=times,
        spot=spot,
        price=price,
        arms=arms,
        over={name: compare(arms[name], arms["stale"], price) for name in BASELINES},
        break_even=1 / relative_cost(times.cost, spot, price.discount),
    )


def ceiling(times: Times) -> float:
    """Return the largest speed-up of an iteration with any number of spot GPUs, which never train."""
    return iteration_seconds(times.cost, 0) / times.cost.train_seconds


# --- remedies, on the existing learning runs ----------------------------------------------------------------------


def waiting(cell: SpotCell, learned: Learned) -> SpotCell:
    """Return the cell with the fastest pool if the trainer waits for the whole pool."""
    options = (
        replace(
            cell.arms["plain"],
            iterations=iterations,
            seconds=waiting_seconds(cell.times.cost, cell.spot, pool),
            pool=pool,
        )
        for pool, iterations in learned.stale.items()
    )
    return spot_cell(cell.times, cell.spot, cell.price, learned, fastest([cell.arms["plain"], *options]))


def cheaper_candidates(cell: SpotCell, learned: Learned, *, candidate_share: float) -> SpotCell:
    """Return the cell if candidates cost only this share of a rollout and are ranked equally well."""
    cost = cell.times.cost
    cheap = iteration_cost(cost.rollout_gpu_seconds, cost.train_seconds, candidate_share=candidate_share)
    pool = pool_of(affordable(cheap, cell.spot), learned.stale)
    ours = cell.arms["plain"]
    if pool is not None:
        ours = replace(ours, iterations=learned.stale[pool], pool=pool)
    return spot_cell(cell.times, cell.spot, cell.price, learned, ours)
