"""The ranking monitor: do stale rewards still tell which seeds will differ under the new weights?

Exploration keeps the seeds whose *stale* rewards (weights v) differ most, and trains them with *fresh* ones (v + 1).
Among the trained seeds alone their correlation is biased, because extremes were selected (range restriction): too high,
unless it is nearly 1. So a random control slice of the unselected seeds is rolled out afresh too, and stands for them:

- A trained seed has weight 1. The m controls are a simple random sample of the batch's U unselected seeds, so one, two
  or three of them stand for U/m, U(U-1)/(m(m-1)), U(U-1)(U-2)/(m(m-1)(m-2)) such sets: the inverse of the probability
  that all are drawn (Horvitz and Thompson 1952, JASA 47:663). Every sum below runs over seeds, pairs or triples of one
  prompt, so its expectation is exactly the sum over all candidates.
- Spearman: with a_i the centred mid-rank of a stale reward (known for every candidate) and b_i of a fresh one,
  b_i = sum_j sgn(y_i - y_j) / 2. Hence sum_i a_i b_i = sum_{i<j} (a_i - a_j) sgn(y_i - y_j) / 2, a sum over pairs, of
  which the same with x for y gives sum_i a_i^2. And sum_i b_i^2 = (n^3 - sum_ties t^3) / 12
  = (pairs + triples that are not all equal) / 2. Mid-ranks follow from weighted pairs; no rank is guessed from few
  controls, whose error would not average out over prompts.
- Kendall's tau-b: concordant minus discordant pairs over the root of the pairs not tied on either side.

Sums are added over the prompts (every candidate weighs the same), then divided: a within-prompt correlation. Prompts
that are all equal on either side, as far as known, tell nothing and are left out; where high rewards are rare this
leaves out a few too many, which errs towards exploring. The interval is a jackknife over prompts on Fisher's scale,
because pairs of one prompt are not independent.

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
"""Exploration stops where rho^2 (V - 1) is surely below this (research notes papers 6.3)."""
MEASURE_BATCHES = 3
"""Batches with control results that a verdict needs: so long is exploration tried again after it was switched off."""
LEAST_CONTROLS = 3
"""Controls of a batch from which its unselected triples can be counted; fewer do if they are all there are."""
LEAST_PROMPTS = 6
"""With fewer prompts a jackknife says too little about its own error: the interval is then [-1, 1]."""
ALMOST_ONE = 1 - 1e-9
"""Fisher's scale has no 1."""

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One picture's reward, and what it was made with."""

    prompt: str
    seed: int
    reward: float
    version: int
    sampler: str
    """Signature of the sampler plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One prompt of a batch: rewards by seed. Rewards that are not finite take their seed out."""

    prompt: str
    stale: Mapping[int, float]
    """Of every explored candidate."""
    fresh: Mapping[int, float]
    """Of the selected seeds. Those that were not explored count for nothing here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingRules:
    """How far back the monitor looks, when it tries again and what it refuses."""

    window: int = 8
    """Explored batches that are looked at together."""
    retry_after: int = 8
    """Batches without exploration, before it is tried again."""
    max_staleness: int = 1
    """Candidates may be this many weight versions older than what the batch is trained with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingReport:
    """How well stale rewards rank the seeds of a prompt, and what selecting by them gained. None: nothing known yet."""

    spearman: float | None
    kendall: float | None
    low: float
    high: float
    """95 % interval of Spearman."""
    corrected: bool
    """For range restriction. If not, the correlations are those of the trained seeds alone, mostly too high."""
    batches: int
    prompts: int
    """Different prompts with a difference on both sides."""
    left_out: int
    """Visits of prompts whose rewards are all equal on a side, as far as known."""
    pairs: int
    """Seeds with a stale and a fresh reward."""
    selection_gain: float | None
    """V: variance of the stale rewards of the selected seeds over that of all candidates."""
    predicted_gain: float | None
    """1 + rho^2 (V - 1), rho being `spearman`."""
    realised_gain: float | None
    """Variance of the fresh rewards of the selected over that of all candidates, estimated; None without controls."""
    refused_stale: int
    refused_sampler: int
    """Results refused since the run began: made with weights too old, or with another sampler."""

    @property
    def most_that_selection_adds(self) -> float:
        """rho^2 (V - 1) at the end of the interval that is farther from 0; infinite while nothing is known."""
        if self.selection_gain is None:
            return math.inf
        return max(self.low**2, self.high**2) * (self.selection_gain - 1)


class RankingMonitor:
    """Says how good the stale ranking is and whether a batch should explore. Its state goes into the checkpoint."""

    def __init__(self, rules: RankingRules = RankingRules()) -> None:
        self.rules = rules
        self._batches: dict[int, ExploredBatch] = {}
        self._off: range | None = None
        self._refused = {"stale": 0, "sampler": 0}

    def admit(self, results: Iterable[Scored], *, version: int, sampler: str) -> dict[tuple[str, int], float]:
        """Stale rewards by (prompt, seed) that may choose the seeds of a batch; the others are refused and counted.

        `version`: what the batch is trained with; `sampler`: what its candidates were asked for with. A reward that is
        not finite is left out.
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
        """What an explored batch was chosen from and trained with. The same batch again replaces what was said of it.

        A batch that left no candidate unselected chose nothing, and says nothing about choosing.
        `version`, `sampler`: of the fresh rollouts; its control results must have the same.
        """
        if self._off is not None and batch >= self._off.stop:
            # What was measured before the pause is old by now: the new trial decides alone.
            self._batches, self._off = {}, None
        self._batches.pop(batch, None)
        known = tuple(KnownVisit.of(visit) for visit in visits)
        if any(visit.unselected for visit in known):
            self._batches[batch] = ExploredBatch(version=version, sampler=sampler, visits=known)
        for old in sorted(self._batches)[: -self.rules.window]:
            del self._batches[old]
        self._judge()

    def add_control(self, batch: int, results: Iterable[Scored]) -> None:
        """Fresh rewards of a batch's control slice: all at once or in parts, and again if in doubt.

        A batch that the window has left is ignored. Results of another version or sampler are refused and counted.
        Raises ValueError for a seed that is not an unselected candidate of the batch.
        """
        if batch not in self._batches:
            return
        known = self._batches[batch]
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for result in results:
            if result.sampler != known.sampler:
                self._refused["sampler"] += 1
            elif result.version != known.version:
                self._refused["stale"] += 1
            else:
                found[result.prompt][result.seed] = result.reward
        visits = tuple(visit.with_control(found.pop(visit.prompt, {})) for visit in known.visits)
        if found:
            raise ValueError(f"control results of batch {batch} for prompts it does not have: {', '.join(found)}")
        self._batches[batch] = replace(known, visits=visits)
        self._judge()

    def report(self, only: Collection[int] | None = None) -> RankingReport:
        """Figures over the window, or over those of its batches that are in `only` (say, of one profile).

        Corrected if any of these batches has enough control results; then the others are left out.
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
        """Whether candidates of this batch are worth trying."""
        return self._off is None or batch not in self._off

    def to_dict(self) -> dict[str, Any]:
        """Everything but the rules, as JSON values."""
        batches = [
            {
                "batch": batch,
                "version": known.version,
                "sampler": known.sampler,
                "visits": [visit.to_dict() for visit in known.visits],
            }
            for batch, known in self._batches.items()
        ]
        off = None if self._off is None else [self._off.start, self._off.stop]
        return {"batches": batches, "off": off, "refused": dict(self._refused)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], rules: RankingRules = RankingRules()) -> "RankingMonitor":
        monitor = cls(rules)
        for known in raw["batches"]:
            visits = tuple(KnownVisit.from_dict(visit) for visit in known["visits"])
            monitor._batches[known["batch"]] = ExploredBatch(
                version=known["version"], sampler=known["sampler"], visits=visits
            )
        monitor._off = None if raw["off"] is None else range(*raw["off"])
        monitor._refused = dict(raw["refused"])
        return monitor

    def _judge(self) -> None:
        """Switch exploration off where even the better end of the interval is not worth its GPU time."""
        if self._off is not None or sum(known.is_represented for known in self._batches.values()) < MEASURE_BATCHES:
            return
        if self.report().most_that_selection_adds < WORTH:
            first = max(self._batches) + 1
            self._off = range(first, first + self.rules.retry_after)


# --- what is known of a batch -----------------------------------------------------------------------


class Sums(NamedTuple):
    """What the figures are made of: sums over seeds, pairs and triples, of one prompt or of many; each an [...] array.

    Of ranks and pairs divided so that every candidate weighs the same; of variances one for each visit.
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
    """Sample variances, of the selected and of all candidates: a random choice has the same expectation as all."""
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
        """[12] as in `Sums`, or None if the known rewards are all equal on a side.

        `weights` [4]: how many sets of 0 to 3 unselected seeds a set of controls stands for (`set_weights`). None: of
        the selected alone, as if they were all candidates.
        """
        control = self.control if weights is not None else {}
        among = self.stale if weights is not None else {seed: self.stale[seed] for seed in self.selected}
        weights = np.ones(4) if weights is None else weights
        known = [*self.selected, *control]
        x = np.array([self.stale[seed] for seed in known])
        y = np.array([*self.selected.values(), *control.values()])
        if len(self.selected) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
            return None
        every = np.array(list(among.values()))
        ranks = np.sign(x[:, None] - every).sum(axis=1) / 2
        is_control = (np.arange(len(known)) >= len(self.selected)).astype(int)
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
                len(known),
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Rewards as [seed, reward], because a key of a JSON object is text."""
        parts = {"stale": self.stale, "selected": self.selected, "control": self.control}
        return {"prompt": self.prompt, **{name: [list(item) for item in part.items()] for name, part in parts.items()}}

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
        """Whether its controls can stand for all of its unselected candidates."""
        unselected, control = self._counts()
        return control >= min(LEAST_CONTROLS, unselected)

    @property
    def weights(self) -> Array:
        return set_weights(*self._counts())

    def _counts(self) -> tuple[int, int]:
        return sum(visit.unselected for visit in self.visits), sum(len(visit.control) for visit in self.visits)


# --- the figures -----------------------------------------------------------------------------------


def set_weights(unselected: int, control: int) -> Array:
    """[4]: how many sets of 0, 1, 2, 3 unselected seeds a drawn set stands for: 1 / the probability to draw it."""
    weights = [1.0]
    for drawn in range(3):
        weights.append(weights[-1] * (unselected - drawn) / (control - drawn) if drawn < control else 0.0)
    return np.array(weights)


def squared_ranks(values: Array, is_control: NDArray[np.int_], weights: Array) -> float:
    """Estimated sum of the squared centred mid-ranks: half of the pairs and triples that are not all equal.

    values [known]; is_control [known], 0 or 1; weights [4] (`set_weights`).
    """

    def sets(size: int, selected: int, control: int) -> float:
        """Estimated sets of so many candidates."""
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
    """Rank correlation within prompts, [...] as the sums.

    `spread` and `stale_ranks` are known exactly, but are estimated from the same seeds as what they are compared with:
    how many controls a prompt happened to get cancels out, and a perfect ranking gives exactly 1.
    """
    ratio = sums.agreement / sums.spread * np.sqrt(sums.stale_ranks / sums.fresh_ranks)
    return np.asarray(np.clip(ratio, -1, 1))


def kendall(sums: Sums) -> Array:
    """Kendall's tau-b within prompts, [...] as the sums."""
    return np.asarray(np.clip(sums.concordance / np.sqrt(sums.stale_untied * sums.fresh_untied), -1, 1))


def interval(of_prompts: Array) -> tuple[float, float]:
    """95 % interval of Spearman: a jackknife over prompts on Fisher's scale, with Student's quantile.

    Simulated with normal rewards and an eighth as controls: it holds the truth in 92 to 95 of 100 cases from three
    batches of 12 prompts on, in 85 to 91 for a single batch, whose dozen controls are too few.

    of_prompts  [prompts, 12]  `Sums` of each
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
    """Quantile of Student's t: Abramowitz and Stegun 26.7.5, within 0.3 % of it from 5 degrees of freedom on."""
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
