"""The values of a plan on real clouds. Money is in integer micro-dollars, time in integer milliseconds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.events import Market
from launcher.market.estimate import Estimate
from launcher.market.spells import ZoneSpells
from launcher.money import HOUR_MS
from launcher.placement.memory import GpuMemory
from launcher.placement.options import SiteOptions
from launcher.placement.plan import Plan, Slot
from launcher.placement.ranks import TrainerRanks
from launcher.placement.requirements import LeftOut
from launcher.placement.schedule import PlanSchedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """An expected integer with an interval: micro-dollars or milliseconds."""

    expected: int
    low: int
    high: int


THE_TRAINER_ALONE = "the trainer alone"
"""The baseline of a plan without its rollout nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Ratio of the plan to a baseline: iterations x hours per iteration x dollars per hour.

    The plan takes less if below 1.
    """

    against: str
    iterations: float
    hours_per_iteration: float
    micro_usd_per_hour: float
    their_micro_usd: int
    their_ms: int

    @property
    def micro_usd(self) -> float:
        """Return the product of the factors: the plan's dollars over the baseline's dollars."""
        return self.iterations * self.hours_per_iteration * self.micro_usd_per_hour


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorationShare:
    """Benefit of exploration, beside training, with the rollout nodes of the plan."""

    candidates_per_prompt: int
    """0: no exploration, because only the trained candidates fit, or because the job does not explore."""
    kept: int
    variance_gain: float
    rho: float
    iterations_share: Estimate
    """Share of the iterations that remains with exploration."""
    nodes_without: float
    """Rollout nodes that would pay without exploration, by the square-root rule at the price of a useful hour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhenSpotPays:
    """Prediction before the run: do rollout nodes beside the trainer pay?"""

    gpus: float
    """Rollout GPUs at work on average."""
    market: str
    """Capacity type of the rollout nodes: spot, on-demand, or both."""
    cost_ratio: float
    """c: dollars of an iteration over the dollars of an iteration with the trainer alone."""
    iterations_share: float
    """Expected share of the iterations that remains with exploration."""

    @property
    def costs_more(self) -> bool:
        """Return whether an iteration gets dearer: c > 1."""
        return self.cost_ratio > 1

    @property
    def pays_below(self) -> float:
        """Return 1 / c: spot pays if fewer than this share of the iterations are needed."""
        return 1 / self.cost_ratio

    @property
    def pays(self) -> bool:
        """Return whether K / K(0) < 1 / c."""
        return self.iterations_share < self.pays_below

    def statement(self) -> str:
        """Return the prediction for people.

        The figures come from the plan; only the run shows the saved iterations.
        """
        gpus = f"{self.gpus:.3g} {self.market} GPUs (there on average)"
        if not self.costs_more:
            return f"with {gpus} an iteration costs x{self.cost_ratio:.2f} of the trainer alone: it pays by itself"
        verdict = "expected" if self.pays else "not expected"
        return (
            f"adding {gpus} makes an iteration cost x{self.cost_ratio:.2f} of the trainer alone; it pays only if "
            f"exploration saves more than {1 - self.pays_below:.0%} of the iterations "
            f"({verdict}: {1 - self.iterations_share:.0%})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolShare:
    """A pool in which the plan buys nodes: the number of nodes, the price, and the estimates for the pool."""

    zone: str
    instance_type: str
    market: Market
    nodes: int
    micro_usd_per_hour: int
    micro_usd_per_useful_hour: int
    useful_share: Estimate
    """Share of the time that a slot has a node at work."""
    reclaimed_in_first_hour: Estimate | None
    """None: the cloud never preempts the pool."""
    launch_odds: Estimate
    cold_start_ms: Estimate
    price_source: str
    price_observed_at: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A plan that was not chosen. `micro_usd`, `ms`: to the target; None if unknown."""

    what: str
    why_not: str
    micro_usd: int | None = None
    ms: int | None = None
    is_at_least: bool = False
    """True if `micro_usd` is a lower bound of the cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStandIns:
    """Forecast of a plan with the nodes on demand that a run buys in spot slots, after long outages or when late."""

    hours: float
    """Node-hours of stand-ins."""
    micro_usd: int
    """Dollars of stand-ins, a part of `cost`."""
    cost: Span
    time: Span
    """Cost and time of the whole run, with the trainer's start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerOnSpot:
    """What the losses of a trainer on spot are expected to cost: means of the replays. Simulated."""

    losses: float
    promotions: float
    """Losses after which a node that was up took the role."""
    lost_iterations: float
    """Iterations made again."""
    lost_usd: float
    """Dollars of them."""
    without_trainer_seconds: float
    """Time in which nodes were paid and none trained."""
    without_trainer_usd: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherTrainer:
    """The same job with its trainer of the other capacity type."""

    market: Market
    why_not: str
    """Why the plan does not have it so. Empty: it could be had, and the job file does not ask for it."""
    usd: float
    hours: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReplays:
    """Replays of the plan on generated markets, with the decisions of a live run. Simulated."""

    market: str
    """The rule that makes the markets."""
    starts: int
    usd: float
    """Mean of the starts."""
    usd_low: float
    usd_high: float
    """The ends of the middle 90 % of the starts."""
    hours: float
    met: int | None
    """Starts that were done at the deadline. None: the job has no deadline."""
    probability_low: float | None
    probability_high: float | None
    """90 % interval of the probability of meeting the deadline (Wilson's score interval)."""
    enough_ms: int | None
    """Shortest deadline that enough of the starts would have met. None: too few were done."""
    trainer: TrainerOnSpot | None = None
    """None: the trainer is on demand, and its node is not lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudPlan:
    """The nodes that a run keeps running on a cloud, with the expected cost and time."""

    cloud: str
    region: str
    policy: str
    slots: tuple[Slot, ...]
    pools: tuple[PoolShare, ...]
    listed_micro_usd_per_hour: int
    """Rate with every node running, at the offered prices."""
    expected_micro_usd_per_hour: int
    """Average bill of an hour. Counts nodes that are away or not billed, and traffic."""
    maximum_micro_usd_per_hour: int
    """Rate with every node running, at on-demand prices."""
    cost: Span
    time: Span
    iterations: Span
    seconds_per_iteration: float
    seconds_per_iteration_alone: float
    """Seconds of an iteration with the trainer alone: the slowest speed of the run, during an outage of all rollout
    nodes."""
    basis: str
    """Evidence that the intervals rest on."""
    exploration: ExplorationShare
    spot_pays: WhenSpotPays | None
    """None: the site has no rollout node to buy."""
    factors: tuple[Factors, ...]
    alternatives: tuple[Alternative, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
    max_total_micro_usd: int | None
    max_hourly_micro_usd: int | None
    deadline_ms: int | None
    max_runtime_ms: int | None = None
    judge_micro_usd: int = 0
    """Most that paid judges may cost, a part of `max_total`."""
    sites: tuple[SiteOptions, ...] = ()
    """Regions where the run may be. The order of failover: the planned region, then regions of the same cloud, then
    the other cloud; cheapest first."""
    memory: tuple[GpuMemory, ...] = ()
    """Memory of each GPU by role. Empty for models that ship with spotrl, and for GPUs of unknown memory."""
    pace_ms: tuple[int, ...] = ()
    """Milliseconds of an iteration with 0, 1, 2, ... of the plan's rollout nodes at work."""
    checkpoint_every: int = 1
    """Iterations between two checkpoints: a lost trainer loses what it did since the last one."""
    zones: tuple[ZoneSpells, ...] = ()
    """Spells of capacity that the plan expects of every spot zone of its region."""
    trainer: TrainerRanks
    """Work of the GPUs of the trainer's node."""
    disk: Mapping[str, int] = field(default_factory=dict)
    """Bytes of what the boot disk of each node must hold (launcher/placement/disk.py)."""
    schedule: PlanSchedule | None = None
    """Forecast of an iteration, played forward. None: no rates, or too large a batch."""
    replays: PlanReplays | None = None
    """None: not replayed, or the plan predicts no iteration times."""
    other_trainer: OtherTrainer | None = None
    """None: the job file asks for the trainer on demand, or nothing could be compared."""
    stand_ins: PlanStandIns | None = None
    """None: the job has no stand-ins, or the plan no spot nodes. `cost`, `time`, `factors` and `alternatives` are of
    spot alone: choices are compared by that."""

    @property
    def longest_ms(self) -> int | None:
        """Return the time after which the run ends, done or not. None: no limit."""
        return self.deadline_ms if self.max_runtime_ms is None else self.max_runtime_ms

    @property
    def forecast_cost(self) -> Span:
        """Return the dollars of the closed form, with stand-ins if there are any."""
        return self.cost if self.stand_ins is None else self.stand_ins.cost

    @property
    def forecast_time(self) -> Span:
        """Return the time of the closed form, as `forecast_cost`."""
        return self.time if self.stand_ins is None else self.stand_ins.time

    @property
    def quoted_cost(self) -> Span:
        """Return the dollars to quote: the mean of the replays if there are any.

        The interval is that of the forecast, widened by the starts.
        """
        if self.replays is None:
            return self.forecast_cost
        usd, low, high = (round(1e6 * usd) for usd in (self.replays.usd, self.replays.usd_low, self.replays.usd_high))
        of_forecast = self.forecast_cost
        return Span(expected=usd, low=min(low, of_forecast.low), high=max(high, of_forecast.high))

    @property
    def quoted_time(self) -> Span:
        """Return the time to quote, as `quoted_cost`."""
        if self.replays is None:
            return self.forecast_time
        ms, of_forecast = round(self.replays.hours * HOUR_MS), self.forecast_time
        return Span(expected=ms, low=min(ms, of_forecast.low), high=max(ms, of_forecast.high))

    @property
    def _trainer_life_hours(self) -> float | None:
        """Return the mean life of the planned trainer's node on spot, in hours. None: on demand."""
        placement = self.slots[0].placement
        if placement.market is not Market.SPOT:
            return None
        spells = [zone.spells for zone in self.zones if zone.zone == placement.zone]
        return spells[0].hazards.mean_life() if spells else None

    def as_plan(self) -> Plan:
        """Return the plan in the form that the run's controller keeps."""
        return Plan(
            region=self.region,
            slots=self.slots,
            max_total_micro_usd=self.max_total_micro_usd,
            judge_micro_usd=self.judge_micro_usd,
            max_hourly_micro_usd=self.max_hourly_micro_usd,
            money_basis="metered",
            sites=self.sites,
            iteration_ms=round(self.seconds_per_iteration_alone * 1000),
            iterations=self.iterations.expected,
            pace_ms=self.pace_ms,
            checkpoint_every=self.checkpoint_every,
            # A checkpoint has four of the six copies of the trained weights that are on the disk.
            moved_bytes=2 * self.disk.get("trained weights", 0) // 3 + len(self.slots) * self.disk.get("model", 0),
            trainer_life_hours=self._trainer_life_hours,
            ranks_have_room=self.trainer.waiting == 0,
        )


def cloud_plan_json(plan: CloudPlan) -> dict[str, Any]:
    """Return the plan as JSON values for scripts; money in micro-dollars, times in milliseconds."""
    pays = plan.spot_pays
    memory = [asdict(gpu) | {"count": gpu.count, "busy": gpu.busy, "free": gpu.free} for gpu in plan.memory]
    return asdict(plan) | {
        "memory": memory,
        "trainer": asdict(plan.trainer) | {"waiting": plan.trainer.waiting, "idle": plan.trainer.idle},
        "factors": [asdict(factors) | {"micro_usd": factors.micro_usd} for factors in plan.factors],
        "spot_pays": None
        if pays is None
        else asdict(pays)
        | {
            "costs_more": pays.costs_more,
            "pays_below": pays.pays_below,
            "pays": pays.pays,
            "statement": pays.statement(),
        },
    }
