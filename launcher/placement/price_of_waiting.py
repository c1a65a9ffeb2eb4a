"""The price of waiting for spot: when a node on demand earns its price during an outage. Pure.

An iteration made later costs V: the trainer waits out the rest of the outage and later outages, and spot does the work.

V = (P_T (rest + F / share) + n P_s F) / left

A stand-in beside k nodes pays if V (r(k + 1) - r(k)) x its useful share of the rest > its hourly price. F: hours of the
`left` iterations with all n nodes at work. r(k): iterations an hour with k. share: share of time with spot. P_T, P_s:
hourly prices of the trainer and of a spot node. Outages are heavy-tailed: the longer one has lasted, the longer it will
last. A live run decides by this rule (`launcher/decide/waiting.py`), and a plan counts the stand-ins that it will bring
(`stand_ins.py`).
"""

from dataclasses import dataclass
from math import inf, sqrt

from launcher.market.hazard import COLD_START_MS
from launcher.money import HOUR_MS

CHANGE_MS = COLD_START_MS + 240_000
"""Time that a slot is out after a loss: the answer to a launch, and the cold start. Milliseconds."""

CHANGE_HOURS = CHANGE_MS / HOUR_MS

RESTART_MS = 90_000
"""Time from the end of a lost trainer until the node that takes its role trains, in milliseconds: processes and CUDA
10 s, base weights from the page cache 15 to 30 s, a checkpoint of 7 GB from the bucket 15 to 25 s. A sum of parts,
assumed; measured on no GPU."""

SPARE_CHANGES = 2
"""Changes of every node at once for which a deadline needs room, beside the expected churn: one to go on demand, and
one for spot nodes that are all lost after that."""

REST_HOURS, REST_GROWTH = 0.5, 1.0
"""Expected rest of an outage of x hours: `REST_HOURS` + `REST_GROWTH` x."""

PRIOR_SHARE, PRIOR_SHARE_HOURS = 0.7, 6.0
"""Share of time with spot before a run has seen any, and the hours that it weighs."""

MOST_OVER = 0.01
"""Share of the price of all on demand that waiting may cost before it has saved anything."""


def expected_rest_hours(out_hours: float) -> float:
    """Return the expected rest of an outage that has lasted so long."""
    return REST_HOURS + REST_GROWTH * out_hours


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Hourly prices in micro-dollars, with disks and addresses."""

    trainer: float
    spot: float
    on_demand: float
    trainer_on_demand: float | None = None
    """None: the trainer is on demand."""

    def all_on_demand(self, nodes: int) -> float:
        """Return the price of the trainer and so many rollout nodes, all on demand."""
        trainer = self.trainer if self.trainer_on_demand is None else self.trainer_on_demand
        return trainer + nodes * self.on_demand


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """What a slot without spot waits for: the work that is left, and the prices."""

    left: float
    """Iterations left, above 0."""
    full_hours: float
    """F: hours of them with every node at work."""
    nodes: int
    gained: float
    """Iterations an hour that the stand-in adds."""
    prices: Prices

    def earns(self, out_hours: float, share: float) -> float:
        """Return the micro-dollars an hour that a stand-in saves until the outage is expected to end."""
        rest = expected_rest_hours(out_hours)
        useful = max(0.0, rest - CHANGE_HOURS) / rest
        return self._later(rest, share) / self.left * self.gained * useful

    def _later(self, rest: float, share: float) -> float:
        prices = self.prices
        return prices.trainer * (rest + self.full_hours / share) + self.nodes * prices.spot * self.full_hours

    def hours_until_it_pays(self, spot_hours: float, hours: float) -> float:
        """Return the age of an outage at which a stand-in begins to earn its price on demand. inf: never.

        `spot_hours` of the `hours` before the outage had spot, with the prior. The share of time with spot falls while
        the outage lasts: spot_hours / (hours + x). With it `earns(x)` > price is a quadratic inequality in x.
        """
        prices, spread = self.prices, self.full_hours / spot_hours
        fixed = prices.trainer * (REST_HOURS + spread * hours) + self.nodes * prices.spot * self.full_hours
        slope = prices.trainer * (REST_GROWTH + spread)
        worth, lag = self.gained / self.left, REST_HOURS - CHANGE_HOURS
        a = slope * worth * REST_GROWTH
        b = worth * (fixed * REST_GROWTH + slope * lag) - prices.on_demand * REST_GROWTH
        c = worth * fixed * lag - prices.on_demand * REST_HOURS
        if c > 0:
            return 0.0
        return (-b + sqrt(b * b - 4 * a * c)) / (2 * a) if a > 0 else inf


def trainer_earns(idle: float, later: float, work_an_hour: float, out_hours: float) -> float:
    """Return the micro-dollars an hour that a stand-in for a lost spot trainer saves until spot is expected back.

    Without a trainer nothing is made: earns = (idle x rest / work + later) x work an hour x useful share of the rest.
    `idle`: hourly price of the nodes that wait, for each iteration that is left. `later`: price of an iteration made
    later. `work_an_hour`: iterations an hour with the stand-in and the nodes that are up.
    """
    rest = expected_rest_hours(out_hours)
    useful = max(0.0, rest - CHANGE_HOURS) / rest
    return (idle * rest + later) * work_an_hour * useful


def prior_share_after(spot_hours: float, hours: float) -> float:
    """Return the share of time with spot after `spot_hours` of `hours`, with the prior; between 1 % and 100 %."""
    share = (spot_hours + PRIOR_SHARE * PRIOR_SHARE_HOURS) / (hours + PRIOR_SHARE_HOURS)
    return min(1.0, max(share, 0.01))
