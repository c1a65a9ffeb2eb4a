"""What a node is worth: the rules that placement decides by, each a function with its inequality. Pure.

price + hazards by age + odds of a launch + cold start -> dollars per useful hour, share of time at work

All of research notes cost 4.2. A slot is kept filled: it asks until a node comes (q), pays for its cold start c and its
life L, at most a horizon H, and begins again. Times are in hours here, money in micro-dollars; expectations are floats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, inf, sqrt

from engine.events import Market
from launcher.market.hazard import COLD_START_MS, POOLED, SAME_REGION, SAME_ZONE, TRACE_UPTIME, HazardCurve, bursts
from launcher.money import HOUR_MS

RETRY_HOURS = 12.5 / 60
"""Between two attempts in a zone that had no capacity: the middle of 10 to 15 minutes (cost 4.2)."""

COOL_MS = 10 * 60_000
"""A zone without capacity is left alone for 10 to 15 minutes, and twice as long after each further refusal."""

COOL_MOST_MS = HOUR_MS // 2
"""GPU pools of recorded traces come back for 20 minutes at times: two hours would miss most of that."""

FREE_FIRST_HOUR = 1.0
"""AWS does not bill a Linux spot instance that EC2 takes back in its first hour (cost 0.5)."""


# --- one node ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTerms:
    """On what terms one slot is kept filled from one pool."""

    micro_usd_per_hour: int
    hazards: HazardCurve
    launch_odds: float
    """q: a launch that is tried succeeds."""
    cold_start_hours: float
    horizon_hours: float
    """H: how long a node is wanted; it is judged over this."""
    lost_work_hours: float
    """Node-hours that a reclaim makes worthless: steps that were not committed, groups to be formed anew."""
    first_hour_free: bool
    outage_hours: float = 0.0
    """Hours that a slot waits for capacity after a preemption, beside attempts that fail by chance (`outage_hours`)."""


def is_first_hour_free(cloud: str, market: Market) -> bool:
    """Only on AWS, only on spot, only if EC2 ends it: so after a notice we drain and let EC2 terminate."""
    return cloud == "aws" and market is Market.SPOT


def useful_hours(terms: NodeTerms) -> float:
    """U = E[(min(L, H) - c)+]: of one life, the hours after its cold start.

    No reclaims, H = 2 h, c = 1/2 h: 1.5 h. Hazard 1/h throughout: (1 - e^-2) - (1 - e^-.5) = .471 h.
    """
    cold = min(terms.cold_start_hours, terms.horizon_hours)
    return terms.hazards.mean_life(terms.horizon_hours) - terms.hazards.mean_life(cold)


def billed_hours(terms: NodeTerms) -> float:
    """E[min(L, H) 1{billed}]: without the lives that a cloud ends in a free first hour.

    Their expectation is E[L; L < x] = E[min(L, x)] - x S(x) with x = min(H, 1 h).
    Hazard 1/h, H = 2 h: .865 - (.632 - .368) = .600 h.
    """
    hours = terms.hazards.mean_life(terms.horizon_hours)
    if not terms.first_hour_free:
        return hours
    young = min(terms.horizon_hours, FREE_FIRST_HOUR)
    return hours - (terms.hazards.mean_life(young) - young * terms.hazards.survives(young))


def micro_usd_per_life(terms: NodeTerms) -> float:
    """B = p E[min(L, H) 1{billed}] + w P(L < H), where w is the price of the work that a reclaim loses."""
    taken = terms.hazards.taken_within(terms.horizon_hours)
    return terms.micro_usd_per_hour * (billed_hours(terms) + terms.lost_work_hours * taken)


def micro_usd_per_useful_hour(terms: NodeTerms) -> float:
    """P^ = p (E[min(L, H)] + w P(L < H)) / U: what an hour of work costs, and the index that types are ranked by.

    A free first hour is not credited: a zone that takes every node back at once would look cheap. Launch odds do not
    count either: a launch that fails costs no money, and the share of time at work has its wait.
    $3 an hour, no reclaims, H = 2 h, c = 1/2 h: 6 / 1.5 = $4.
    """
    useful, horizon = useful_hours(terms), terms.horizon_hours
    paid = terms.hazards.mean_life(horizon) + terms.lost_work_hours * terms.hazards.taken_within(horizon)
    return terms.micro_usd_per_hour * paid / useful if useful > 0 else inf


def cycle_hours(terms: NodeTerms) -> float:
    """From one node's `up` to its successor's: E[min(L, H)] + (1 - q) / q `RETRY_HOURS` + P(L < H) `outage_hours`.

    Attempts fail by chance, and after a preemption they fail together, for as long as capacity is gone.
    """
    odds, hazards = terms.launch_odds, terms.hazards
    waits = RETRY_HOURS * (1 - odds) / odds + terms.outage_hours * hazards.taken_within(terms.horizon_hours)
    return hazards.mean_life(terms.horizon_hours) + waits


@cache
def outage_hours(share_at_work: float) -> float:
    """Return how long a slot waits after a preemption if it is at work for this share of the time.

    For the nodes that the prior was made of, over a day. A share of .53: 2.1 h; .91: 0.
    """
    terms = NodeTerms(
        micro_usd_per_hour=0,
        hazards=POOLED.curve,
        launch_odds=TRACE_UPTIME,
        cold_start_hours=COLD_START_MS / HOUR_MS,
        horizon_hours=24.0,
        lost_work_hours=0.0,
        first_hour_free=False,
    )
    waits = useful_hours(terms) / share_at_work - cycle_hours(terms)
    return max(0.0, waits / terms.hazards.taken_within(terms.horizon_hours))


def useful_share(terms: NodeTerms) -> float:
    """U over the cycle: the share of time that a slot has a node at work."""
    return useful_hours(terms) / cycle_hours(terms)


def micro_usd_per_slot_hour(terms: NodeTerms) -> float:
    """B over the cycle: what a slot costs in an hour by the clock, with the hours in which it is empty or free."""
    return micro_usd_per_life(terms) / cycle_hours(terms)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotValue:
    """What a slot that is kept filled is expected to give and to cost."""

    useful_share: float
    micro_usd_per_hour: float
    micro_usd_per_useful_hour: float

    @property
    def spread(self) -> float:
        """Standard deviation of being at work or not: sqrt(u (1 - u))."""
        return sqrt(self.useful_share * (1 - self.useful_share))


def value_of(terms: NodeTerms) -> SlotValue:
    return SlotValue(
        useful_share=useful_share(terms),
        micro_usd_per_hour=micro_usd_per_slot_hour(terms),
        micro_usd_per_useful_hour=micro_usd_per_useful_hour(terms),
    )


# --- how many ------------------------------------------------------------------------------------------


def square_root_rule(
    rollout_node_hours: float,
    train_hours: float,
    trainer_micro_usd_per_hour: float,
    node_micro_usd_per_hour: float,
    assist_nodes: float = 0.0,
) -> float:
    """n* = max(0, sqrt(a (P_T - s P^) / (b P^)) - s): the number of nodes that makes an iteration cheapest.

    From d/dn (a / (n + s) + b) (P_T + n P^) = 0, where exploration saves nothing and there is one zone; s is the
    trainer's own part in rollouts, in nodes. a = 6 node-hours, b = 1 h, P_T / P^ = 3.5, s = 0: 4.6. What exploration
    saves raises it; in the reference recipe (428 GPU-s, 253 s, s = 4) it is 0 for spot at 69 % off.
    """
    rest = trainer_micro_usd_per_hour - assist_nodes * node_micro_usd_per_hour
    if rest <= 0:
        return 0.0
    return max(0.0, sqrt(rollout_node_hours * rest / (train_hours * node_micro_usd_per_hour)) - assist_nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Marginal:
    """What another node does to the cost of finishing, in micro-dollars."""

    saved: int
    """(h_n - h_n+1) r_n: everything else is paid for fewer hours."""
    paid: int
    """h_n+1 (r_n+1 - r_n): the node, until then."""

    @property
    def pays(self) -> bool:
        """saved > paid, which is h_n+1 r_n+1 < h_n r_n."""
        return self.saved > self.paid


def marginal_node(hours_now: float, hours_then: float, rate_now: float, rate_then: float) -> Marginal:
    """Rates in micro-dollars an hour. 100 h at $10/h, 80 h at $12/h: saves $200, costs $160."""
    return Marginal(saved=round((hours_now - hours_then) * rate_now), paid=round(hours_then * (rate_then - rate_now)))


def on_demand_fallback(ready: int, floor: int, most: int) -> int:
    """max(0, floor - ready), at most `most`: nodes to buy on demand while fewer rollout nodes are there than `floor`.

    2 of 5 there, floor 4: 2. Floor 0, the default, buys none: zero spot is a normal state.
    """
    return min(most, max(0, floor - ready))


# --- where ---------------------------------------------------------------------------------------------


def most_in_one_zone(nodes: int, zones: int) -> int:
    """n_z <= ceil(n / 2) where there is a choice, so that no zone takes all of them: 3 of 5; all 5 of a sole zone."""
    return nodes if zones < 2 else ceil(nodes / 2)


def gpu_variance(
    nodes: Sequence[float],
    spreads: Sequence[float],
    same_zone: float = SAME_ZONE.mean,
    other: float = SAME_REGION.mean,
) -> float:
    """V = 1' Sigma 1: the variance of the number of GPUs at work, in GPUs squared; the correlation penalty's cause.

    `nodes` by zone, and `spreads`, the standard deviation of the GPUs of one node of each: GPUs x sqrt(u (1 - u)).
    Nodes of one zone go together (correlation `same_zone`), those of two zones of a region less (`other`), so
    spreading lowers V. Two nodes with spread 1/2: 2/4 + 2 (.59) / 4 = .795 in one zone, .71 in two.
    """
    whole = single = within = 0.0
    for count, spread in zip(nodes, spreads, strict=True):
        zone = count * spread
        whole += zone
        within += zone * zone
        single += zone * spread
    return single + same_zone * (within - single) + other * (whole**2 - within)


def cools_until_ms(stock_outs_ms: Sequence[int], since_ms: int | None = None, jitter: float = 0.0) -> int | None:
    """Until when a pool is left alone; None if it had capacity the last time, or was never asked.

    t + min(30 min, 10 min (1 + jitter / 2) 2^(k - 1)), k bursts of refusals in a row after `since_ms`, the last launch
    that came, and `jitter` in [0, 1), so that controllers do not come back together. Second burst at noon: 12:20.
    """
    refusals = [at for at in stock_outs_ms if since_ms is None or at > since_ms]
    if not refusals:
        return None
    doublings = min(bursts((at, at) for at in refusals) - 1, 10)
    wait_ms = round(COOL_MS * (1 + jitter / 2) * float(2**doublings))
    return max(refusals) + min(COOL_MOST_MS, wait_ms)


# --- what moves ----------------------------------------------------------------------------------------

GB = 10**9

ZONE_MICRO_USD_PER_GB = 20_000
"""Between zones of one region, both directions: $.01 each (cost 4.2, rate articles of 2026; verify)."""


def copies_micro_usd(copy_bytes: int, copies: int, micro_usd_per_gb: int = ZONE_MICRO_USD_PER_GB) -> float:
    """e G m: what sending new weights costs, once to each zone, whose nodes pass it on.

    40 GB to another cloud, one copy: $4.00. A LoRA of .38 GB to two zones: 1.5 cents.
    """
    return copy_bytes * copies * micro_usd_per_gb / GB
