"""The ranking monitor: measure how closely stale and fresh rewards agree, and pause exploration if it gains little.

Exploration keeps the seeds whose *stale* rewards (weights v) differ most, and trains the kept seeds with *fresh*
rewards (v + 1). The correlation among the trained seeds alone is biased, because extremes were selected (range
restriction): the value is too high, unless the correlation is nearly 1. A random control slice of the unselected seeds
is therefore rolled out afresh too, and represents the unselected seeds:

- A trained seed has weight 1. The m controls are a simple random sample of the batch's U unselected seeds. A set of
  one, two or three controls represents U/m, U(U-1)/(m(m-1)), U(U-1)(U-2)/(m(m-1)(m-2)) sets: the inverse of the
  probability to draw the set (Horvitz and Thompson 1952, JASA 47:663). Every sum below runs over seeds, pairs or
  triples of a prompt, and the expectation of the sum is exactly the sum over all candidates.
- Spearman: with a_i the centred mid-rank of a stale reward (known for every candidate) and b_i of a fresh reward,
  b_i = sum_j sgn(y_i - y_j) / 2. Hence sum_i a_i b_i = sum_{i<j} (a_i - a_j) sgn(y_i - y_j) / 2, a sum over pairs. The
  same formula with x for y gives sum_i a_i^2. And sum_i b_i^2 = (n^3 - sum_ties t^3) / 12
  = (pairs + triples that are not all equal) / 2. Mid-ranks follow from weighted pairs. No rank is guessed from few
  controls, because the error of a guess would not average out over prompts.
- Kendall's tau-b: concordant minus discordant pairs over the root of the pairs not tied on either side.

Sums are added over the prompts (every candidate has equal weight), then divided: a within-prompt correlation. Prompts
with equal known rewards on either side carry no information and are left out. If high rewards are rare, a few
prompts too many are left out, and the error favours exploring. The interval is a jackknife over prompts on Fisher's
scale, because pairs of a prompt are not independent.

The promise: equal results give equal verdicts, and without controls exploration is never switched off.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.exploration.value import variance_gain

WORTH = 0.1
"""Exploration stops if rho^2 (V - 1) is surely below this value: then a tenth of the variance is gained at most."""
MEASURE_BATCHES = 3
"""Batches with control results needed for a verdict. A new trial after a pause lasts as many batches."""
LEAST_CONTROLS = 3
"""Fewest controls of a batch to count its unselected triples. Fewer are enough if no further unselected seed exists."""
LEAST_PROMPTS = 6
"""Fewest prompts for an interval: with fewer, a jackknife misjudges its own error, and the interval is [-1, 1]."""
ALMOST_ONE = 1 - 1e-9
"""Upper limit of a correlation, because Fisher's scale is infinite at 1."""

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The reward of an image, with the weight version and the sampler."""

    prompt: str
    seed: int
    reward: float
    version: int
    sampler: str
    """Signature of the sampler plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """A prompt of a batch: rewards by seed. A non-finite reward excludes its seed."""

    prompt: str
    stale: Mapping[int, float]
    """Rewards of every explored candidate."""
    fresh: Mapping[int, float]
    """Rewards of the selected seeds. Unexplored seeds are ignored here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingRules:
    """The monitor's window, retry interval and staleness limit."""

    window: int = 8
    """Explored batches evaluated together."""
    retry_after: int = 8
    """Batches without exploration before the next trial."""
    max_staleness: int = 1
    """Weight versions by which a candidate may be older than the weights that train the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingReport:
    """Quality of the ranking of a prompt's seeds by stale rewards, and the gain in variance from that selection.

    A figure that is not known yet is None.
    """

    spearman: float | None
    kendall: float | None
    low: float
    high: float
    """95 % interval of Spearman."""
    corrected: bool
    """True if corrected for range restriction. False: the correlations of the trained seeds alone, mostly too high."""
    batches: int
    prompts: int
    """Distinct prompts whose stale rewards differ and whose fresh rewards differ."""
    left_out: int
    """Visits left out, because their known stale rewards or their known fresh rewards are all equal."""
    pairs: int
    """Seeds with a stale and a fresh reward."""
    selection_gain: float | None
    """V: variance of the stale rewards of the selected seeds over the variance of all candidates."""
    predicted_gain: float | None
    """1 + rho^2 (V - 1), rho being `spearman`."""
    realised_gain: float | None
    """Estimated variance of the fresh rewards of the selected seeds over the variance of all; None without controls."""
    refused_stale: int
    refused_sampler: int
    """Results refused since the start of the run: weights too old, or another sampler."""

    @property
    def most_that_selection_adds(self) -> float:
        """Return rho^2 (V - 1) at the end of the interval farther from 0, or infinity if nothing is known."""
        if self.selection_gain is None:
            return math.inf
        return max(self.low**2, self.high**2) * (self.selection_gain - 1)


class RankingMonitor:
    """Measures the ranking by stale rewards, and selects the batches that explore. Its state is in the checkpoint."""

    def __init__(self, rules: RankingRules = RankingRules()) -> None:
        self.rules = rules
        self._batches: dict[int, ExploredBatch] = {}
        self._off: range | None = None
        self._refused = {"stale": 0, "sampler": 0}

    def admit(self, results: Iterable[Scored], *, version: int, sampler: str) -> dict[tuple[str, int], float]:
        """Return the stale rewards by (prompt, seed) that may choose the seeds of a batch.

        `version`: the weights that train the batch. `sampler`: the sampler requested for the candidates. Results of
        another sampler, or with too old weights, are refused and counted. Non-finite rewards are left out.
        """
        admitted = {}
        for result in results:
            if result.sampler != sampler:
                self._refused["sampler"] += 1
            elif not 0 <= version - result.version <= self.rules.max_staleness:
                self._refused["stale"] += 1
            elif math.isfinite(result.reward):
                admitted[result.prompt, result.seed] = result.reward
        return admitted

    def add(self, batch: int, visits: Sequence[Visit], *, version: int, sampler: str) -> None:
        """Record the candidates of an explored batch and the fresh rewards of its trained seeds.

        A repeated batch replaces its earlier record. A batch without unselected candidates made no choice and is not
        recorded. `version`, `sampler`: the weight version and the sampler of the fresh rollouts. Control results of the
        batch with another version or sampler are refused.
        """
        if self._off is not None and batch >= self._off.stop:
            # Measurements from before the pause are outdated: the new trial decides alone.
            self._batches, self._off = {}, None
        self._batches.pop(batch, None)
        known_visits = tuple(KnownVisit.of(visit) for visit in visits)
        if any(visit.unselected for visit in known_visits):
            self._batches[batch] = ExploredBatch(version=version, sampler=sampler, visits=known_visits)
        for old in sorted(self._batches)[: -self.rules.window]:
            del self._batches[old]
        self._judge()

    def add_control(self, batch: int, results: Iterable[Scored]) -> None:
        """Record fresh rewards of a batch's control slice: all at once or in parts. Repeats are allowed.

        A batch outside the window is ignored. Results of another version or sampler are refused and counted.
        Raises ValueError for a seed that is not an unselected candidate of the batch.
        """
        if batch not in self._batches:
            return
        explored = self._batches[batch]
        control: dict[str, dict[int, float]] = defaultdict(dict)
        for result in results:
            if result.sampler != explored.sampler:
                self._refused["sampler"] += 1
            elif result.version != explored.version:
                self._refused["stale"] += 1
            else:
                control[result.prompt][result.seed] = result.reward
        visits = tuple(visit.with_control(control.pop(visit.prompt, {})) for visit in explored.visits)
        if control:
            raise ValueError(f"control results of batch {batch} for prompts it does not have: {', '.join(control)}")
        self._batches[batch] = replace(explored, visits=visits)
        self._judge()

    def report(self, only: Collection[int] | None = None) -> RankingReport:
        """Return figures over the window, or over the window's batches in `only` (for example a profile's batches).

        The figures are corrected if any of these batches has enough control results; batches without enough are then
        left out.
        """
        chosen = [self._batches[batch] for batch in sorted(self._batches) if only is None or batch in only]
        corrected = any(batch.is_represented for batch in chosen)
        if corrected:
            chosen = [batch for batch in chosen if batch.is_represented]
        by_prompt: dict[str, list[Array]] = defaultdict(list)
        left_out = 0
        for batch in chosen:
            for visit in batch.visits:
                sums = visit.sums(batch.weights if corrected else None)
                if sums is None:
                    left_out += 1
                else:
                    by_prompt[visit.prompt].append(sums)
        of_prompts = np.array([np.sum(rows, axis=0) for rows in by_prompt.values()])
        total = Sums(*of_prompts.sum(axis=0)) if by_prompt else None
        low, high = interval(of_prompts)
        rho = float(spearman(total)) if total else None
        selection = float(total.stale_kept / total.stale_all) if total else None
        return RankingReport(
            spearman=rho,
            kendall=float(kendall(total)) if total else None,
            low=low,
            high=high,
            corrected=corrected,
            batches=len(chosen),
            prompts=len(by_prompt),
            left_out=left_out,
            pairs=int(total.pairs) if total else 0,
            selection_gain=selection,
            predicted_gain=None if rho is None or selection is None else variance_gain(rho, selection),
            realised_gain=float(total.fresh_kept / total.fresh_all) if total and corrected else None,
            refused_stale=self._refused["stale"],
            refused_sampler=self._refused["sampler"],
        )

    def explores(self, batch: int) -> bool:
        """Return True if candidates of this batch are worth trying."""
        return self._off is None or batch not in self._off

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values, without the rules."""
        batches = [
            {
                "batch": batch,
                "version": explored.version,
                "sampler": explored.sampler,
                "visits": [visit.to_dict() for visit in explored.visits],
            }
            for batch, explored in self._batches.items()
        ]
        off = None if self._off is None else [self._off.start, self._off.stop]
        return {"batches": batches, "off": off, "refused": dict(self._refused)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], rules: RankingRules = RankingRules()) -> "RankingMonitor":
        monitor = cls(rules)
        for raw_batch in raw["batches"]:
            visits = tuple(KnownVisit.from_dict(visit) for visit in raw_batch["visits"])
            monitor._batches[raw_batch["batch"]] = ExploredBatch(
                version=raw_batch["version"], sampler=raw_batch["sampler"], visits=visits
            )
        monitor._off = None if raw["off"] is None else range(*raw["off"])
        monitor._refused = dict(raw["refused"])
        return monitor

    def _judge(self) -> None:
        """Switch exploration off if even the better end of the interval is not worth its GPU time."""
        if (
            self._off is not None
            or sum(explored.is_represented for explored in self._batches.values()) < MEASURE_BATCHES
        ):
            return
        if self.report().most_that_selection_adds < WORTH:
            first = max(self._batches) + 1
            self._off = range(first, first + self.rules.retry_after)


# --- observations of a batch ------------------------------------------------------------------------


class Sums(NamedTuple):
    """The sums from which the figures are computed, over the seeds, pairs and triples of one prompt or of many prompts.

    Each field is an array of the same shape, written [...] below. Sums of ranks and pairs are divided by the number of
    candidates, or its square, to give every candidate equal weight. Variances are summed over visits.
    """

    agreement: Array
    """(a_i - a_j) sgn(y_i - y_j) over pairs."""
    spread: Array
    """|a_i - a_j| over pairs: `agreement` of a perfect ranking."""
    stale_ranks: Array
    fresh_ranks: Array
    """Sum of the squared centred mid-ranks."""
    concordance: Array
    """Concordant minus discordant pairs."""
    stale_untied: Array
    fresh_untied: Array
    stale_kept: Array
    stale_all: Array
    fresh_kept: Array
    fresh_all: Array
    """Sample variances of the selected candidates (`_kept`) and of all candidates (`_all`). For a random selection,
    both have the same expectation."""
    pairs: Array
    """Seeds with both rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownVisit:
    """A visit's finite rewards by seed, in order of the seeds."""

    prompt: str
    stale: Mapping[int, float]
    selected: Mapping[int, float]
    control: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, visit: Visit) -> "KnownVisit":
        out = {seed for seed, reward in [*visit.stale.items(), *visit.fresh.items()] if not math.isfinite(reward)}
        return cls(
            prompt=visit.prompt,
            stale={seed: visit.stale[seed] for seed in sorted(visit.stale) if seed not in out},
            selected={
                seed: visit.fresh[seed] for seed in sorted(visit.fresh) if seed in visit.stale and seed not in out
            },
        )

    @property
    def unselected(self) -> int:
        return len(self.stale) - len(self.selected)

    def with_control(self, rewards: Mapping[int, float]) -> "KnownVisit":
        for seed in rewards:
            if seed not in self.stale or seed in self.selected:
                raise ValueError(
                    f"seed {seed} of prompt {self.prompt!r} has a control result but is not one of its "
                    f"{self.unselected} unselected candidates; draw controls with `control_slice`"
                )
        finite = {seed: reward for seed, reward in rewards.items() if math.isfinite(reward)}
        return replace(self, control=dict(sorted({**self.control, **finite}.items())))

    def sums(self, weights: Array | None) -> Array | None:
        """Return the 12 fields of `Sums`, [12].

        Return None if fewer than 2 seeds are selected, or if the known stale or the known fresh rewards are all equal.

        `weights` [4]: the number of sets of 0 to 3 unselected seeds represented by a set of controls (`set_weights`).
        Without `weights`, use the selected seeds alone, as if no other candidate existed.
        """
        control = self.control if weights is not None else {}
        among = self.stale if weights is not None else {seed: self.stale[seed] for seed in self.selected}
        weights = np.ones(4) if weights is None else weights
        seeds = [*self.selected, *control]
        x = np.array([self.stale[seed] for seed in seeds])
        y = np.array([*self.selected.values(), *control.values()])
        if len(self.selected) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
            return None
        every = np.array(list(among.values()))
        ranks = np.sign(x[:, None] - every).sum(axis=1) / 2
        is_control = (np.arange(len(seeds)) >= len(self.selected)).astype(int)
        pair = weights[is_control[:, None] + is_control]
        rank, stale, fresh = (values[:, None] - values for values in (ranks, x, y))
        stale_sign, fresh_sign = np.sign(stale), np.sign(fresh)
        n, kept = len(every), len(self.selected)
        return np.array(
            [
                (rank * fresh_sign * pair).sum() / n**2,
                (np.abs(rank) * pair).sum() / n**2,
                squared_ranks(x, is_control, weights) / n**2,
                squared_ranks(y, is_control, weights) / n**2,
                (stale_sign * fresh_sign * pair).sum() / n,
                (np.abs(stale_sign) * pair).sum() / n,
                (np.abs(fresh_sign) * pair).sum() / n,
                np.var(x[:kept], ddof=1),
                np.var(list(self.stale.values()), ddof=1),
                np.var(y[:kept], ddof=1),
                (fresh**2 * pair).sum() / (2 * n * (n - 1)),
                len(seeds),
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values. Rewards are [seed, reward] pairs, because a key of a JSON object is text."""
        parts = {"stale": self.stale, "selected": self.selected, "control": self.control}
        return {"prompt": self.prompt, **{name: [list(pair) for pair in part.items()] for name, part in parts.items()}}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "KnownVisit":
        stale, selected, control = (dict(raw[name]) for name in ("stale", "selected", "control"))
        return cls(prompt=raw["prompt"], stale=stale, selected=selected, control=control)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExploredBatch:
    version: int
    sampler: str
    visits: tuple[KnownVisit, ...]

    @property
    def is_represented(self) -> bool:
        """Return True if the batch has enough controls to represent all of its unselected candidates."""
        unselected, control = self._counts()
        return control >= min(LEAST_CONTROLS, unselected)

    @property
    def weights(self) -> Array:
        return set_weights(*self._counts())

    def _counts(self) -> tuple[int, int]:
        return sum(visit.unselected for visit in self.visits), sum(len(visit.control) for visit in self.visits)


# --- figures ---------------------------------------------------------------------------------------


def set_weights(unselected: int, control: int) -> Array:
    """Return the weights [4] of sets of 0, 1, 2 and 3 controls: 1 / the probability to draw a given set.

    A weight is the number of sets of unselected seeds that one set of controls represents. The weight is 0 if there are
    fewer controls than the set has.
    """
    weights = [1.0]
    for drawn in range(3):
        weights.append(weights[-1] * (unselected - drawn) / (control - drawn) if drawn < control else 0.0)
    return np.array(weights)


def squared_ranks(values: Array, is_control: NDArray[np.int_], weights: Array) -> float:
    """Estimate the sum over all candidates of the squared centred mid-ranks of their values.

    The sum equals half the number of pairs and triples whose values are not all equal (see the module docstring).

    values      [known]  stale or fresh rewards of the selected seeds and of the controls
    is_control  [known]  1 for a control, 0 for a selected seed
    weights     [4]      from `set_weights`
    """

    def sets(size: int, selected: int, control: int) -> float:
        """Return the estimated number of sets with `size` candidates."""
        return sum(
            math.comb(selected, size - drawn) * math.comb(control, drawn) * float(weights[drawn])
            for drawn in range(size + 1)
        )

    _, group = np.unique(values, return_inverse=True)
    control = np.bincount(group, weights=is_control).astype(int).tolist()
    selected = np.bincount(group, weights=1 - is_control).astype(int).tolist()
    differ = 0.0
    for size in (2, 3):
        equal = sum(sets(size, s, c) for s, c in zip(selected, control, strict=True) if s + c >= size)
        differ += sets(size, sum(selected), sum(control)) - equal
    return differ / 2


def spearman(sums: Sums) -> Array:
    """Return Spearman's rank correlation within prompts, in the shape of each field of `sums`.

    `spread` and `stale_ranks` are known exactly. The function estimates both from the same seeds as the compared sums:
    a prompt's random number of controls then cancels out, and a perfect ranking gives exactly 1.
    """
    ratio = sums.agreement / sums.spread * np.sqrt(sums.stale_ranks / sums.fresh_ranks)
    return np.asarray(np.clip(ratio, -1, 1))


def kendall(sums: Sums) -> Array:
    """Return Kendall's tau-b within prompts, in the shape of each field of `sums`."""
    return np.asarray(np.clip(sums.concordance / np.sqrt(sums.stale_untied * sums.fresh_untied), -1, 1))


def interval(of_prompts: Array) -> tuple[float, float]:
    """Return the 95 % interval of Spearman: a jackknife over prompts on Fisher's scale, with Student's quantile.

    In simulations with normally distributed rewards and an eighth of the unselected seeds as controls, the interval
    contains the true value in 92 to 95 of 100 cases for three or more batches of 12 prompts. For a single batch, the
    interval contains the true value in 85 to 91 of 100 cases, because a dozen controls are too few.

    of_prompts  [prompts, 12]  the `Sums` of each prompt
    """
    prompts = len(of_prompts)
    if prompts < LEAST_PROMPTS:
        return -1.0, 1.0

    def fisher(sums: Array) -> Array:
        return np.arctanh(np.clip(spearman(Sums(*sums.T)), -ALMOST_ONE, ALMOST_ONE))

    total = of_prompts.sum(axis=0)
    without = fisher(total - of_prompts)
    error = math.sqrt((prompts - 1) / prompts * float(((without - without.mean()) ** 2).sum()))
    centre, reach = float(fisher(total)), student_quantile(0.975, prompts - 1) * error
    return math.tanh(centre - reach), math.tanh(centre + reach)


def student_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t: Abramowitz and Stegun 26.7.5, within 0.3 % from 5 degrees of freedom on."""
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
