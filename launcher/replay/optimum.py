"""The least that any policy could have paid on a trace: a linear program over ticks and zones. A lower bound.

minimise  sum over ticks of dt (trainer on_t + sum_z price_zt n_zt + price_od m_t)
where     n_zt <= capacity_zt                         nodes of zone z, on average over tick t
          s_zt >= n_zt - n_z,t-1                      nodes started; each loses its cold start
          u_t <= sum_z (n_zt dt - cold s_zt) + ...    hours of useful nodes
          p_t <= a_k on_t dt + b_k u_t                iterations: the concave hull of the planner's model
          sum p_t >= the work,  on_t <= 1,  all ticks within the deadline

The program knows the whole future, buys fractions of nodes, waits for no answer, takes the largest capacity and the
lowest price within each tick, and loses no work at a preemption. No policy in the same world can be cheaper.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from launcher.decide.work_left import WorkLeft
from launcher.market.hazard import COLD_START_MS
from launcher.money import HOUR_MS
from launcher.placement.options import Option, SiteOptions
from launcher.replay.trace import Trace

TICK_MS = 600_000
"""Length of a tick, in milliseconds: the step of most recordings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """A lower bound of the dollars of any policy, or None if the work cannot be done by the deadline."""

    micro_usd: int | None


@dataclass(frozen=True, slots=True)
class _Pool:
    price: np.ndarray
    """Micro-dollars an hour, by tick."""
    capacity: np.ndarray


def hull(per_hour: Sequence[float]) -> list[tuple[float, float]]:
    """Return (intercept, slope) of each line of the smallest concave function above iterations an hour by nodes.

    0, 2, 3 gives 0 + 2 n and 1 + n.
    """
    points: list[tuple[int, float]] = []
    for n, rate in enumerate(per_hour):
        while len(points) > 1:
            (n0, r0), (n1, r1) = points[-2], points[-1]
            if (r1 - r0) * (n - n0) > (rate - r0) * (n1 - n0):
                break
            points.pop()
        points.append((n, rate))
    lines = []
    for (n0, r0), (n1, r1) in pairwise(points):
        slope = (r1 - r0) / (n1 - n0)
        lines.append((r0 - slope * n0, slope))
    return [*lines, (points[-1][1], 0.0)]


def optimum(
    sites: Sequence[SiteOptions],
    slots: int,
    work: WorkLeft,
    trace: Trace,
    start_ms: int,
    deadline_ms: int,
    trainers: int = 1,
) -> Optimum:
    """Return the lower bound over the given sites; the cheapest site counts.

    `slots`: rollout nodes of the plan; `trainers`: nodes of the trainer.
    """
    found = [_at(site, slots, work, trace, start_ms, deadline_ms, trainers) for site in sites]
    return Optimum(micro_usd=min((bound for bound in found if bound is not None), default=None))


def _price(option: Option) -> float:
    return option.placement.micro_usd_per_hour + option.placement.side_micro_usd_per_hour


def _at(
    site: SiteOptions, slots: int, work: WorkLeft, trace: Trace, start_ms: int, deadline_ms: int, trainers: int
) -> int | None:
    ticks = -(-deadline_ms // TICK_MS)
    starts = [start_ms + t * TICK_MS for t in range(ticks)]
    pools = []
    for option in site.rollout:
        place = option.placement
        pool = trace.pool_of(place.cloud, place.region, place.zone)
        if place.market == "on_demand":
            pools.append(_Pool(np.full(ticks, _price(option)), np.full(ticks, float(slots))))
        elif pool is not None:
            side = place.side_micro_usd_per_hour
            cheapest = [pool.cheapest_between(at, at + TICK_MS) for at in starts]
            pools.append(
                _Pool(
                    np.array([side + (place.micro_usd_per_hour if p is None else p) for p in cheapest], float),
                    np.array([pool.most_between(at, at + TICK_MS) for at in starts], float),
                )
            )
    trainer = trainers * min(_price(option) for option in site.trainer)
    return _solve(pools, trainer, slots, work, ticks)


def _solve(pools: Sequence[_Pool], trainer: float, slots: int, work: WorkLeft, ticks: int) -> int | None:
    """Columns: n by pool and tick, s by pool and tick, then on, u and p by tick."""
    hours, cold = TICK_MS / HOUR_MS, COLD_START_MS / HOUR_MS
    width, lines = len(pools) * ticks, hull([work.per_hour(n) for n in range(work.nodes + 1)])
    on, useful, made = 2 * width, 2 * width + ticks, 2 * width + 2 * ticks
    every = np.arange(ticks)
    rows: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    values: list[np.ndarray] = []
    count = 0

    def add(*terms: tuple[np.ndarray, float]) -> None:
        nonlocal count
        for column, value in terms:
            rows.append(count + np.arange(ticks))
            columns.append(column)
            values.append(np.full(ticks, value))
        count += ticks

    for number in range(len(pools)):
        nodes, started = number * ticks + every, width + number * ticks + every
        add((nodes, 1.0), (started, -1.0))
        later = np.arange(1, ticks)
        rows.append(count - ticks + later)
        columns.append(nodes[:-1])
        values.append(np.full(ticks - 1, -1.0))
    terms = [(n * ticks + every, -hours) for n in range(len(pools))]
    terms += [(width + n * ticks + every, cold) for n in range(len(pools))]
    add((useful + every, 1.0), *terms)
    add((useful + every, 1.0), (on + every, -slots * hours))
    for intercept, slope in lines:
        add((made + every, 1.0), (on + every, -intercept * hours), (useful + every, -slope))
    rows.append(np.full(ticks, count))
    columns.append(made + every)
    values.append(np.full(ticks, -1.0))
    limits = np.zeros(count + 1)
    limits[count] = -work.left
    matrix = coo_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(count + 1, made + ticks)
    )
    price = np.concatenate(
        [*(p.price * hours for p in pools), np.zeros(width), np.full(ticks, trainer * hours), np.zeros(2 * ticks)]
    )
    most = np.full(made + ticks, np.inf)
    most[:width] = np.concatenate([p.capacity for p in pools]) if pools else 0
    most[on : on + ticks] = 1.0
    bounds = np.column_stack([np.zeros(made + ticks), most])
    answer = linprog(price / 1e6, A_ub=matrix.tocsr(), b_ub=limits, bounds=bounds, method="highs")
    return int(answer.fun * 1e6) if answer.status == 0 else None
