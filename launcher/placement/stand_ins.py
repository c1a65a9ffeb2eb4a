"""Forecast the stand-ins of a plan: on-demand hours after long outages, and near a deadline. Pure.

choice + spells of its pools + the run's own rules -> node-hours on demand, dollars and hours with them

The search compares choices by spot alone (forecast.py). What a run then buys on demand follows from the rule that the
controller itself follows (price_of_waiting.py), put over the log-normal outages of the pools (market/spells.py):

    x            age of an outage at which a stand-in beside k nodes pays, at three moments of the run, for each slot
    E[(D - x)+]  hours of an outage D that are left then, of the part of D within the run
    luck         share of time with spot over a whole run, at three points: what a deadline needs depends on it
    late         from the moment at which the slack is used up, every outage is filled at once

Replays of the same spells check the result (tests/launcher/replay/test_stand_ins.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import erf, exp, inf, log, sqrt

from launcher.job.recipe import End
from launcher.market.hazard import COLD_START_MS
from launcher.market.spells import OUTAGE_SIGMA
from launcher.money import HOUR_MS
from launcher.placement.forecast import Choice, GpusAtWork, moved_site, paid, progress, sums
from launcher.placement.price_of_waiting import (
    CHANGE_HOURS,
    MOST_OVER,
    PRIOR_SHARE,
    PRIOR_SHARE_HOURS,
    SPARE_CHANGES,
    Prices,
    Waiting,
)
from launcher.placement.requirements import CloudRequirements, Spot
from launcher.placement.value import FIND_HOURS, cycle_hours

ANSWER_HOURS = 5 / 60
"""From the moment at which a stand-in pays until it is up: a pass, and the answer to the launch."""

COLD_HOURS = COLD_START_MS / HOUR_MS

GIVE_BACK_HOURS = 0.45
"""From the end of an outage until a stand-in is given back: half a cool-down of the zone (a quarter of an hour), the
answer, and ten minutes in which the spot node proves itself."""

START_HOURS = ANSWER_HOURS / 2 + COLD_HOURS
"""From the request for the trainer until it trains."""

MOMENTS = (1 / 6, 1 / 2, 5 / 6)
"""Shares of the work done at which the rule is evaluated."""

LUCK = ((-sqrt(3), 1 / 6), (0.0, 2 / 3), (sqrt(3), 1 / 6))
"""(standard deviations, weight): Gauss-Hermite quadrature of a normal distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Expected result of a run with its stand-ins."""

    micro_usd: float
    hours: float
    stand_in_hours: float
    """Node-hours on demand in spot slots."""
    stand_in_micro_usd: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slots:
    """Spot slots of a choice: means over its slots. Shares are of time."""

    number: int
    at_work: float
    waits: float
    """Share of time without capacity."""
    up_hours: float
    out_hours: float
    """Mean length of an outage, and of the time with capacity before it."""
    micro_usd_per_hour: float
    """Average bill of a slot by the clock."""
    price: float
    """Listed hourly price of a spot node."""

    @property
    def luck(self) -> float:
        """Return the standard deviation of `at_work` over one hour of a run; over T hours it is this / sqrt(T).

        Renewal theory: (s_up^2 out^2 + s_out^2 up^2) / (up + out)^3, with log-normal outages, and s_up = up.
        """
        up, out = self.up_hours, self.out_hours
        if not out:
            return 0.0
        of_outs = out * sqrt(exp(OUTAGE_SIGMA**2) - 1)
        return sqrt(((up * out) ** 2 + (of_outs * up) ** 2) / (up + out) ** 3)


def with_stand_ins(needs: CloudRequirements, choice: Choice, end: End | None = None) -> Forecast | None:
    """Return the forecast of a choice with its stand-ins. None: the job has none, or the plan no spot nodes.

    `end`: with every uncertain figure at its good, or its bad end. None: at its mean.
    """
    if needs.spot is not Spot.AUTO or not sum(choice.spot) or choice.site.on_demand is None:
        return None
    if end is not None:
        choice = replace(choice, site=moved_site(choice.site, end))
    return _Run(needs, choice).forecast()


class _Run:
    """One choice on its way to the target. Iterations are those without exploration, as in `forecast.paid`."""

    def __init__(self, needs: CloudRequirements, choice: Choice) -> None:
        self.needs, self.choice, self.recipe = needs, choice, choice.site.recipe
        self.iterations, self.exponent = self.recipe.iterations.mean, self.recipe.gain_exponent.mean
        self.slots = _slots_of(choice)
        self.gpus, _, self.copies = sums(choice)
        self.workers = max(pool.workers for pool, _ in choice.pools)
        self.pace = [self._per_hour(nodes) for nodes in range(choice.nodes + 1)]
        steady = choice.site.on_demand
        assert steady is not None
        self.on_demand = float(steady.offer.micro_usd_per_hour)
        self.always = choice.on_demand * steady.value.micro_usd_per_hour
        self.trainer = float(choice.site.trainer_micro_usd_per_hour)
        self.full_hours = self.iterations / self.pace[-1]
        last_ms = needs.deadline_ms if needs.max_runtime_ms is None else needs.max_runtime_ms
        self.longest = None if last_ms is None else last_ms / HOUR_MS
        """Hours after which the run ends, done or not."""

    def forecast(self) -> Forecast:
        alone = self._seconds(self.slots.at_work, self.gpus.mean) * self.iterations / 3600
        hours = self._mean(self._lucky(alone)).hours
        return self._mean(self._lucky(hours))

    def _mean(self, found: Sequence[tuple[float, Forecast]]) -> Forecast:
        """Return the mean. The budget guard buys no stand-in that the budget does not pay."""
        micro_usd = sum(weight * forecast.micro_usd for weight, forecast in found)
        hours = sum(weight * forecast.stand_in_hours for weight, forecast in found)
        most = self.needs.max_total_micro_usd
        above = 0.0 if most is None else min(max(0.0, micro_usd - most), hours * self.on_demand)
        return Forecast(
            micro_usd=micro_usd - above,
            hours=sum(weight * forecast.hours for weight, forecast in found),
            stand_in_hours=hours - above / self.on_demand,
            stand_in_micro_usd=hours * self.on_demand - above,
        )

    def _lucky(self, hours: float) -> list[tuple[float, Forecast]]:
        """Return (weight, forecast) of each luck of a run that takes about `hours`.

        The time for a given work varies about its mean, not the work of a given time: an unlucky run is a longer one.
        """
        u = self.slots.at_work
        spread = min(self.slots.luck / sqrt(hours) / u, (1 - u) / sqrt(3)) if u else 0.0
        filled = self._filled(hours)
        return [(weight, self._with(u / (1 - deviations * spread), *filled)) for deviations, weight in LUCK]

    def _with(self, at_work: float, bought: float, useful: float) -> Forecast:
        """Return the forecast if spot slots work for this share of the time.

        `bought`, `useful`: stand-ins in an hour of an outage, paid and at work.
        """
        slots = self.slots
        waits = min(1.0, slots.waits * (1 - at_work) / (1 - slots.at_work)) if slots.at_work < 1 else 0.0
        rate = slots.micro_usd_per_hour * at_work / slots.at_work if slots.at_work else 0.0
        stands = waits * useful / slots.number
        gpus = self.gpus.fewest + slots.number * self.workers * min(1.0, at_work + stands)
        base = self.trainer + self.always + slots.number * rate
        whole = self.iterations * self._seconds(min(1.0, at_work + stands), gpus) / 3600
        late_from = self._late_from(whole)
        churn = CHANGE_HOURS / slots.up_hours
        early = min(whole, late_from)
        late = (1 - early / whole) * self.full_hours * (1 + churn)
        if self.longest is not None:
            early = min(early, self.longest)
            late = min(late, self.longest - early)
        took = early + late
        on_demand = early * waits * bought + late * slots.number * min(1.0, waits + churn)
        traffic = paid(self.recipe, progress(self.recipe, self.gpus, self.exponent), 0.0, self.copies)
        return Forecast(
            micro_usd=took * base + on_demand * self.on_demand + traffic[0] + START_HOURS * self.trainer,
            hours=took + START_HOURS,
            stand_in_hours=on_demand,
            stand_in_micro_usd=on_demand * self.on_demand,
        )

    def _filled(self, hours: float) -> tuple[float, float]:
        """Return the node-hours of stand-ins in an hour of an outage, paid and at work, over a run of `hours`."""
        out = self.slots.out_hours
        if not out:
            return 0.0, 0.0
        within = out - hours_beyond(out, hours)
        shares = [
            self._shares(self._age(self.choice.on_demand + slot, moment, hours) + ANSWER_HOURS, hours)
            for slot in range(self._most_stand_ins())
            for moment in MOMENTS
        ]
        hours_of_moments = len(MOMENTS) * within
        return sum(paid_hours for paid_hours, _ in shares) / hours_of_moments, sum(
            works for _, works in shares
        ) / hours_of_moments

    def _shares(self, age: float, hours: float) -> tuple[float, float]:
        """Return the hours of an outage, within a run of `hours`, for which a stand-in of this age is paid and works.

        A stand-in works until the spot node does, and so fills the time in which that node is found and starts.
        """
        out = self.slots.out_hours
        longest = hours_beyond(out, hours)
        ready = age + COLD_HOURS
        paid_hours = max(0.0, hours_beyond(out, age) - longest) + GIVE_BACK_HOURS * lasts_beyond(out, age)
        works = max(0.0, hours_beyond(out, ready) - longest) + (FIND_HOURS + COLD_HOURS) * lasts_beyond(out, ready)
        return paid_hours, works

    def _age(self, working: int, moment: float, hours: float) -> float:
        """Return the hours of an outage after which a stand-in beside `working` nodes is bought."""
        slots, before = self.slots, moment * hours
        prices = Prices(trainer=self.trainer, spot=slots.price, on_demand=self.on_demand)
        waiting = Waiting(
            left=(1 - moment) * self.iterations,
            full_hours=(1 - moment) * self.full_hours,
            nodes=self.choice.nodes,
            gained=self.pace[working + 1] - self.pace[working],
            prices=prices,
        )
        spot_hours = PRIOR_SHARE * PRIOR_SHARE_HOURS + (1 - slots.waits) * before
        return min(
            waiting.hours_until_it_pays(spot_hours, PRIOR_SHARE_HOURS + before), self._money_hours(working, before)
        )

    def _money_hours(self, working: int, before: float) -> float:
        """Return the hours of waiting after which all on demand would cost less. inf: waiting alone makes money."""
        slots, nodes = self.slots, self.choice.nodes
        whole = self.trainer + nodes * self.on_demand
        loses = self.trainer + working * self.on_demand - whole * self.pace[working] / self.pace[-1]
        now, then = self.pace[working], self.pace[working + 1]
        priced = self.trainer + working * self.on_demand
        if loses <= 0 or then * priced <= now * (priced + self.on_demand):
            return inf
        saved = slots.number * (self.on_demand - slots.price) * slots.at_work - slots.waits * loses
        return max(0.0, MOST_OVER * self.full_hours * whole + before * saved) / loses

    def _late_from(self, hours: float) -> float:
        """Return the time at which the slack is used up, in a run that would take `hours`. inf: never.

        Slack is used up at t with D - t - F (1 - t / T) = c (2 + h F (1 - t / T)): waiting.py `is_late`. F: hours with
        every node at work. c: a change. h: preemptions per node-hour.
        """
        if self.needs.deadline_ms is None:
            return inf
        deadline = self.needs.deadline_ms / HOUR_MS - START_HOURS
        full = self.full_hours * (1 + CHANGE_HOURS / self.slots.up_hours)
        slack = deadline - full - SPARE_CHANGES * CHANGE_HOURS
        if slack <= 0:
            return 0.0
        return slack / (1 - full / hours) if hours > full else inf

    def _most_stand_ins(self) -> int:
        """Return how many stand-ins at once the hourly limit allows."""
        most = self.needs.max_hourly_micro_usd
        if most is None:
            return self.slots.number
        return max(0, min(self.slots.number, int((most - self.trainer - self.always) // self.on_demand)))

    def _per_hour(self, nodes: int) -> float:
        gpus = nodes * self.workers
        share = self.recipe.iterations_share(self.recipe.candidates_per_prompt(gpus), self.exponent)
        return 3600 / (self.recipe.seconds(gpus) * share)

    def _seconds(self, at_work: float, gpus: float) -> float:
        """Return the seconds of an iteration, with the variance that is left if slots work for this share of time."""
        before = self.slots.at_work * (1 - self.slots.at_work)
        share_left = at_work * (1 - at_work) / before if before else 0.0
        at_work_gpus = GpusAtWork(
            mean=gpus, variance=self.gpus.variance * share_left, fewest=self.gpus.fewest, most=self.gpus.most
        )
        return progress(self.recipe, at_work_gpus, self.exponent).seconds


def _slots_of(choice: Choice) -> _Slots:
    spot = [(pool, count) for pool, count in zip(choice.site.zones, choice.spot, strict=True) if count]
    number = sum(count for _, count in spot)

    def mean(values: Sequence[float]) -> float:
        return sum(value * count for value, (_, count) in zip(values, spot, strict=True)) / number

    elsewhere = [pool.terms.elsewhere or 0.0 for pool, _ in spot]
    waits = [(1 - pool.terms.launch_odds) * (1 - q) for (pool, _), q in zip(spot, elsewhere, strict=True)]
    outs = [(1 - pool.terms.launch_odds) * cycle_hours(pool.terms) for pool, _ in spot]
    ups = [cycle_hours(pool.terms) * (1 - out) for (pool, _), out in zip(spot, waits, strict=True)]
    return _Slots(
        number=number,
        at_work=mean([pool.value.useful_share for pool, _ in spot]),
        waits=mean(waits),
        up_hours=mean(ups),
        out_hours=mean(outs),
        micro_usd_per_hour=mean([pool.value.micro_usd_per_hour for pool, _ in spot]),
        price=mean([float(pool.offer.micro_usd_per_hour) for pool, _ in spot]),
    )


def hours_beyond(mean: float, hours: float) -> float:
    """Return E[(D - x)+] of a log-normal outage D with this mean, sigma = `OUTAGE_SIGMA`, and x = `hours`.

    mean N((m + s^2 - ln x) / s) - x N((m - ln x) / s), with m = ln(mean) - s^2 / 2: the formula of Black and Scholes.
    """
    if hours <= 0:
        return mean - hours
    if hours == inf or mean <= 0:
        return 0.0
    middle = log(mean) - OUTAGE_SIGMA**2 / 2 - log(hours)
    return mean * _normal((middle + OUTAGE_SIGMA**2) / OUTAGE_SIGMA) - hours * _normal(middle / OUTAGE_SIGMA)


def lasts_beyond(mean: float, hours: float) -> float:
    """Return P(D > hours) of such an outage."""
    if hours <= 0 or hours == inf or mean <= 0:
        return float(hours <= 0 < mean)
    return _normal((log(mean) - OUTAGE_SIGMA**2 / 2 - log(hours)) / OUTAGE_SIGMA)


def _normal(z: float) -> float:
    return (1 + erf(z / sqrt(2))) / 2
