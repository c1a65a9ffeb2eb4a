"""Value of a node: the rules that placement decides by, each a function with its inequality. Pure.

price + hazards by age + launch odds + cold start -> dollars per useful hour, share of time at work

The rules are ours (docs/cost-model.md). A slot is kept filled in cycles: the slot requests a node until there is
one, pays for the cold start c and the life of the node, up to a horizon H, and begins again.

The nodes of a spot slot follow the spells of its region (market/spells.py). When a zone loses its capacity, another
zone has some with the chance q. Its spell is met at a moment picked at random: the node lives for the rest R of it.
Else the slot waits until the outage ends, and the next node has a new spell L before it. Times are in hours in this
module, money in micro-dollars; expectations are floats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, sqrt

from engine.events import Market
from launcher.market.hazard import HazardCurve, bursts
from launcher.market.pools import SAME_REGION, SAME_ZONE
from launcher.money import HOUR_MS

RETRY_HOURS = 12.5 / 60
"""Hours between two attempts on demand: the middle of 10 to 15 minutes (cost 4.2)."""

SWITCH_HOURS, FIND_HOURS = 2 / 60, 6 / 60
"""Hours until a node is up in a zone that has capacity: the answer to the launch, and a pass. The same after an
outage: half of the time between two attempts comes first."""

DEAR = 1.25
"""A spot offer above this many times the lowest price, or the plan's, is a stand-in: it replaces missing spot by the
price of waiting, as a node on demand does. Prices of spot in one region differ by a factor of 4, and the dearest is the
price on demand. Assumed."""

COOL_MS = 10 * 60_000
"""First cool-down of a zone without capacity, in milliseconds: 10 to 15 minutes with jitter. The cool-down doubles
after each further refusal."""

COOL_MOST_MS = HOUR_MS // 2
"""Longest cool-down in milliseconds. GPU pools of recorded traces sometimes have capacity for only 20 minutes; a
cool-down of two hours would miss most of the capacity."""

FREE_FIRST_HOUR = 1.0
"""Length of the free period in hours. AWS does not bill a Linux spot instance that EC2 preempts in its first hour
(cost 0.5)."""


# --- one node ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTerms:
    """Terms on which one slot is kept filled from one pool."""

    micro_usd_per_hour: int
    hazards: HazardCurve
    launch_odds: float
    """Share of time in which the pool has capacity."""
    cold_start_hours: float
    horizon_hours: float
    """H: the hours for which a node is wanted. All values are computed over this horizon."""
    lost_work_hours: float
    """Node-hours of work lost by a preemption: uncommitted steps, and the time to form new groups."""
    first_hour_free: bool
    elsewhere: float | None = None
    """q: the chance that another zone of the region has capacity when this zone has lost its own. None: on demand,
    where capacity never ends, and attempts fail by chance."""


def is_first_hour_free(cloud: str, market: Market) -> bool:
    """Return True only for spot on AWS, and only EC2 itself may end the instance.

    After a notice the launcher therefore drains the node and lets EC2 terminate the instance.
    """
    return cloud == "aws" and market is Market.SPOT


def useful_hours(terms: NodeTerms) -> float:
    """Return U: the hours of one life, up to H, after the cold start.

    On demand, H = 2 h, c = 1/2 h: 1.5 h. Hazard 1/h throughout: (1 - e^-2) - (1 - e^-.5) = .471 h.
    """
    return life_hours(terms, terms.horizon_hours) - life_hours(terms, terms.cold_start_hours)


def life_hours(terms: NodeTerms, until_hours: float) -> float:
    """Return E[min(life of the slot's next node, `until_hours`)], at most to the horizon.

    Capacity of a spell shorter than the time to an answer gives no node: a life of 0.
    """
    until, hazards = min(until_hours, terms.horizon_hours), terms.hazards
    if terms.elsewhere is None:
        return hazards.mean_life(until)
    rest = hazards.mean_rest(SWITCH_HOURS + until) - hazards.mean_rest(SWITCH_HOURS)
    whole = hazards.mean_life(FIND_HOURS + until) - hazards.mean_life(FIND_HOURS)
    return terms.elsewhere * rest + (1 - terms.elsewhere) * whole


def chance_to_live(terms: NodeTerms, hours: float) -> float:
    """Return P(the slot's next node lives for more than `hours`). 0 hours: the chance that there is one."""
    if terms.elsewhere is None:
        return terms.hazards.survives(hours)
    rest = terms.hazards.rests(SWITCH_HOURS + hours)
    return terms.elsewhere * rest + (1 - terms.elsewhere) * terms.hazards.survives(FIND_HOURS + hours)


def billed_hours(terms: NodeTerms) -> float:
    """Return the hours of one life, up to H, without lives that the cloud ends in a free first hour.

    The free lives have the expectation E[L; L < x] = E[min(L, x)] - x P(L > x) with x = min(H, 1 h). On demand with a
    hazard of 1/h, H = 2 h: .865 - (.632 - .368) = .600 h.
    """
    hours = life_hours(terms, terms.horizon_hours)
    if not terms.first_hour_free:
        return hours
    young = min(terms.horizon_hours, FREE_FIRST_HOUR)
    return hours - (life_hours(terms, young) - young * chance_to_live(terms, young))


def taken(terms: NodeTerms) -> float:
    """Return the chance that the slot's next node comes, and is preempted before H."""
    return chance_to_live(terms, 0.0) - chance_to_live(terms, terms.horizon_hours)


def micro_usd_per_life(terms: NodeTerms) -> float:
    """Return B = p E[min(L, H) 1{billed}] + w P(L < H): the cost of one life.

    p: the node's price per hour. w: the price of the work that a preemption loses.
    """
    return terms.micro_usd_per_hour * (billed_hours(terms) + terms.lost_work_hours * taken(terms))


def micro_usd_per_useful_hour(terms: NodeTerms) -> float:
    """Return P^ = p (E[min(L, H)] + w P(L < H)) / U: the price of an hour of work, and the index that ranks types.

    A free first hour is not credited: a zone that preempts every node at once would look cheap. Launch odds do not
    count either: a failed launch costs no money, and the share of time at work includes the wait. $3 an hour, no
    preemptions, H = 2 h, c = 1/2 h: 6 / 1.5 = $4.
    """
    useful = useful_hours(terms)
    paid = life_hours(terms, terms.horizon_hours) + terms.lost_work_hours * taken(terms)
    return terms.micro_usd_per_hour * paid / useful if useful > 0 else inf


def cycle_hours(terms: NodeTerms) -> float:
    """Return the hours from one node of a slot to the next.

    On demand: E[min(L, H)] + (1 - q) / q `RETRY_HOURS`, as attempts fail by chance. On spot: the hours with capacity of
    one cycle, over the share of time with capacity in any zone, 1 - (1 - uptime) (1 - `elsewhere`).
    """
    odds, hazards, until = terms.launch_odds, terms.hazards, terms.horizon_hours
    if terms.elsewhere is None:
        return hazards.mean_life(until) + RETRY_HOURS * (1 - odds) / odds
    there = terms.elsewhere * hazards.mean_rest(SWITCH_HOURS + until)
    there += (1 - terms.elsewhere) * hazards.mean_life(FIND_HOURS + until)
    return there / (1 - (1 - odds) * (1 - terms.elsewhere))


def useful_share(terms: NodeTerms) -> float:
    """Return `useful_hours` / `cycle_hours`: the share of time that a slot has a node at work."""
    return useful_hours(terms) / cycle_hours(terms)


def micro_usd_per_slot_hour(terms: NodeTerms) -> float:
    """Return `micro_usd_per_life` / `cycle_hours`: a slot's average cost per hour.

    Hours without a node or a bill count.
    """
    return micro_usd_per_life(terms) / cycle_hours(terms)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotValue:
    """Expected work and cost of a slot that is kept filled."""

    useful_share: float
    micro_usd_per_hour: float
    micro_usd_per_useful_hour: float

    @property
    def spread(self) -> float:
        """Standard deviation of being at work or not: sqrt(u (1 - u))."""
        return sqrt(self.useful_share * (1 - self.useful_share))


@lru_cache(maxsize=4096)  # a search of fleets asks for each of a few thousand often
def value_of(terms: NodeTerms) -> SlotValue:
    return SlotValue(
        useful_share=useful_share(terms),
        micro_usd_per_hour=micro_usd_per_slot_hour(terms),
        micro_usd_per_useful_hour=micro_usd_per_useful_hour(terms),
    )


# --- number of nodes -----------------------------------------------------------------------------------


def square_root_rule(
    rollout_node_hours: float,
    train_hours: float,
    trainer_micro_usd_per_hour: float,
    node_micro_usd_per_hour: float,
    assist_nodes: float = 0.0,
) -> float:
    """Return n* = max(0, sqrt(a (P_T - s P^) / (b P^)) - s): the number of nodes with the cheapest iteration.

    a: `rollout_node_hours`. b: `train_hours`. P_T: the trainer's price. P^: the price of a rollout node. From d/dn (a /
    (n + s) + b) (P_T + n P^) = 0, for a single zone and no saving by exploration. s is the trainer's own part in
    rollouts, in nodes. a = 6 node-hours, b = 1 h, P_T / P^ = 3.5, s = 0: 4.6. A saving by exploration raises n*. In the
    reference recipe (428 GPU-s, 253 s, s = 4) n* is 0 for spot at 69 % off.
    """
    rest = trainer_micro_usd_per_hour - assist_nodes * node_micro_usd_per_hour
    if rest <= 0:
        return 0.0
    return max(0.0, sqrt(rollout_node_hours * rest / (train_hours * node_micro_usd_per_hour)) - assist_nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Marginal:
    """Effect of one more node on the cost of finishing, in micro-dollars.

    With n nodes the run takes h_n hours and costs r_n an hour.
    """

    saved: int
    """(h_n - h_n+1) r_n: everything else is paid for fewer hours."""
    paid: int
    """h_n+1 (r_n+1 - r_n): the price of the node until the end of the run."""

    @property
    def pays(self) -> bool:
        """Return whether saved > paid, which is h_n+1 r_n+1 < h_n r_n."""
        return self.saved > self.paid


def marginal_node(hours_now: float, hours_then: float, rate_now: float, rate_then: float) -> Marginal:
    """Return the effect of one more node. Rates are in micro-dollars an hour.

    Example: from 100 h at $10/h to 80 h at $12/h, the node saves $200 and costs $160.
    """
    return Marginal(saved=round((hours_now - hours_then) * rate_now), paid=round(hours_then * (rate_then - rate_now)))


# --- zones ---------------------------------------------------------------------------------------------


def most_in_one_zone(nodes: int, zones: int) -> int:
    """Return the limit of nodes in one zone: ceil(n / 2) with two zones or more.

    A zone may preempt all of its nodes at once, so no zone holds more than half.

    Example: 3 of 5 nodes with two zones or more; all 5 with a single zone.
    """
    return nodes if zones < 2 else ceil(nodes / 2)


def gpu_variance(
    nodes: Sequence[float],
    spreads: Sequence[float],
    same_zone: float = SAME_ZONE.mean,
    other: float = SAME_REGION.mean,
) -> float:
    """Return V = 1' Sigma 1: the variance of the number of GPUs at work, in GPUs squared.

    The correlation penalty uses V. `nodes` is the count by zone. `spreads` is the standard deviation of the GPUs of one
    node of each zone: GPUs x sqrt(u (1 - u)). Nodes of one zone are correlated by `same_zone`, nodes of two zones of a
    region less (`other`), so spreading lowers V. Two nodes with spread 1/2: 2/4 + 2 (.59) / 4 = .795 in one zone, .71
    in two.
    """
    whole = single = within = 0.0
    for count, spread in zip(nodes, spreads, strict=True):
        zone = count * spread
        whole += zone
        within += zone * zone
        single += zone * spread
    return single + same_zone * (within - single) + other * (whole**2 - within)


def cools_until_ms(stock_outs_ms: Sequence[int], since_ms: int | None = None, jitter: float = 0.0) -> int | None:
    """Return the end of a pool's cool-down, or None if the last launch succeeded or no node of the pool was ever
    requested.

    t + min(30 min, 10 min (1 + jitter / 2) 2^(k - 1)) for k bursts of refusals in a row after `since_ms`, the last
    successful launch. `jitter` in [0, 1) keeps controllers from retrying at the same time. Example: after a second
    burst at noon, the end is 12:20.
    """
    refusals = [at for at in stock_outs_ms if since_ms is None or at > since_ms]
    if not refusals:
        return None
    doublings = min(bursts((at, at) for at in refusals) - 1, 10)
    wait_ms = round(COOL_MS * (1 + jitter / 2) * float(2**doublings))
    return max(refusals) + min(COOL_MOST_MS, wait_ms)


# --- weight traffic ------------------------------------------------------------------------------------

GB = 10**9

ZONE_MICRO_USD_PER_GB = 20_000
"""Traffic between zones of one region, both directions: $.01 each (cost 4.2, rate articles of 2026; verify)."""


def copies_micro_usd(copy_bytes: int, copies: int, micro_usd_per_gb: int = ZONE_MICRO_USD_PER_GB) -> float:
    """Return e G m: the cost of sending G GB of new weights to m zones, at a traffic price of e per GB.

    The weights are sent once to each zone; the nodes of a zone pass the weights on.

    40 GB to another cloud, one copy: $4.00. Adapters of .85 GB to two zones: 3.4 cents.
    """
    return copy_bytes * copies * micro_usd_per_gb / GB
