"""Planner of candidate seeds for the prompts of the next batch. Our own rules, for the bandit that Spotlight
(arXiv 2606.19004) names without a formula.

The planner is a bandit. Arms are prompts, and a pull is a chunk of candidate seeds. The goal is the largest sum, over
the prompts, of the *kept variance*: the variance of the `keep` rewards chosen by `max_variance_subset`. Every prompt
first gets `keep` candidates. The next chunk then goes to the prompt with the largest expected growth of the kept
variance, by policy:

- `uniform`  no expectation: in turns
- `greedy`   new rewards repeat the prompt's rewards until now; a reward never observed is not expected
- `ucb`      growth of V times an upper quantile of the variance; for strict rewards, the headroom times an
             upper quantile of the chance to observe the missing class
- `bayes`    the posterior predictive of a Beta-Bernoulli (strict rewards) or of a Gaussian with normal-inverse-gamma
             prior (graded rewards), with the chance of the missing class, or the variance, at an upper quantile: a
             prompt with a class never observed may still be worth several chunks. Priors are fitted to the batch by
             moments and include each prompt's last visit

Candidates requested but without a reward count as expected draws. The promises: the module is pure, without clock, and
the only randomness is the caller's seed. The next candidates depend on the requests and rewards until now, not on the
order of the rewards, and `took` and `tell` therefore restore a planner. The planner may be stopped at any time.
"""

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain, pairwise
from math import isfinite
from operator import mul
from statistics import NormalDist
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from engine.exploration.selection import kept_variance
from engine.protocol.exploration_order import Belief, Policy

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
Curves = Callable[[Counts, Counts], Array]
"""(some prompts [N], draws ahead [D]) -> kept variance [N, D] after the pending draws and D further draws."""
Futures = Callable[[Counts, int], Array]
"""(some prompts [N], number) -> the first draws of each simulated future [N, PATHS, number]."""

DISCOUNT = 0.5
"""Weight of a reward of the prompt's last visit, in current rewards: the weights have changed since. Assumed."""

UPPER_Z = 1.2816
"""Optimism is the 0.9 quantile, in standard deviations. Chosen: .5 to 2 do about the same, and 0 a little worse."""

PATHS = 8
"""Simulated futures per prompt for graded rewards, stratified. With 16, the kept variance was equal within error."""

TOGETHER = 96
"""Prompts x chunks ahead computed in a single array. Arrays of 128 KiB and more would be fresh memory each time, and
the allocation takes longer than the sums."""

DIGITS = 9
"""Decimals of the largest possible gain used to compare gains: rounding errors must not rank equal prompts."""

_CERTAIN = 1e9
"""Weight of the observed rewards if nothing else counts: Polya's urn then draws with a fixed chance."""

_RHO = (1 / 33, 2 / 3)
"""Bounds on the correlation of a prompt's strict rewards: the prior weighs between 32 rewards and half a reward."""

_LEAST = 1e-3
"""Below this value, the prompts' variances count as equal: the prior then weighs 2,000 rewards."""

_NORMAL = NormalDist()


@dataclass(slots=True)
class _Arm:
    prompt: str
    prior: Belief
    asked: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    rewards: list[float] = field(default_factory=list)
    """The finite rewards received, ascending."""
    least: int = 0
    """All indices below `least` were requested."""

    def take(self) -> tuple[str, int]:
        while self.least in self.asked:
            self.least += 1
        self.asked.add(self.least)
        return self.prompt, self.least


class Planner:
    """The planner of a batch's candidate seeds."""

    def __init__(
        self,
        prompts: Sequence[str],
        *,
        keep: int,
        most: int,
        policy: Policy = "bayes",
        chunk: int = 2,
        strict: bool | None = None,
        priors: Mapping[str, Belief] | None = None,
        seed: int = 0,
    ) -> None:
        """Start without candidates. Raises ValueError for impossible settings.

        `keep`: rewards kept per prompt. `most`: limit of candidates per prompt. `chunk`: candidates per pull. `strict`:
        rewards have two values; None learns the answer from the rewards. `priors`: `beliefs()` of earlier batches, for
        any prompts.
        """
        if len(set(prompts)) != len(prompts):
            raise ValueError("a prompt is twice in this batch; give each prompt once, its candidates share one group")
        if not 1 <= keep <= most:
            raise ValueError(f"a prompt keeps {keep} of at most {most} candidates; use keep >= 1 and most >= keep")
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; a pull needs 1 candidate or more")
        if policy not in get_args(Policy):
            raise ValueError(f"no planner policy {policy!r}; use one of {', '.join(get_args(Policy))}")
        self.keep, self.most, self.policy, self.chunk, self.strict = keep, most, policy, chunk, strict
        self._arms = {prompt: _Arm(prompt, _discounted((priors or {}).get(prompt))) for prompt in prompts}
        self._draws = _draws(seed, 1 + 3 * (most + chunk))  # a mean, the pending draws, and twice the possible draws

    def ask(self, count: int) -> tuple[tuple[str, int], ...]:
        """Return the next (prompt, index) pairs, each once; fewer than `count` only if every prompt has `most`.

        First every prompt gets `keep`, in turns, because a budget cut short is then spread evenly.
        """
        pairs: list[tuple[str, int]] = []
        while len(pairs) < count and (arm := self._shortest()):
            if self.policy == "uniform" or len(arm.asked) < self.keep:
                pairs.append(arm.take())
            else:
                pairs += self._best(count - len(pairs))
        return tuple(pairs)

    def took(self, prompt: str, index: int) -> None:
        """Record an earlier process's candidate. Any order and index are allowed; a repeated call changes nothing."""
        if index < 0:
            raise ValueError(f"candidate {index} of {prompt!r} cannot be; indices count from 0")
        self._arm(prompt).asked.add(index)

    def take_back(self, prompt: str, index: int) -> None:
        """Undo the request of a candidate that was never submitted, so that the candidate is requested again."""
        arm = self._arm(prompt)
        arm.asked.discard(index)
        arm.least = min(arm.least, index)

    def tell(self, prompt: str, index: int, reward: float) -> None:
        """Record a candidate's reward, in any order. The first reward holds; a non-finite reward counts as tried."""
        arm = self._arm(prompt)
        if index not in arm.asked:
            raise ValueError(f"candidate {index} of {prompt!r} was not asked for; call took() for an earlier process's")
        if index not in arm.told and isfinite(reward):
            insort(arm.rewards, reward)
        arm.told.add(index)

    def kept_variance(self) -> dict[str, float]:
        """Return the known kept variance by prompt. Below `keep` rewards, all rewards count; without any, 0."""
        return {
            prompt: kept_variance(arm.rewards, min(self.keep, len(arm.rewards))) if arm.rewards else 0.0
            for prompt, arm in self._arms.items()
        }

    def beliefs(self) -> dict[str, Belief]:
        """Return the `priors` for a later planner, by prompt. Prompts without any known reward are left out."""
        moments = {prompt: _moments(arm.rewards, **arm.prior) for prompt, arm in self._arms.items()}
        return {
            prompt: Belief(count=count, mean=mean, variance=squares / count)
            for prompt, (count, mean, squares) in moments.items()
            if count
        }

    def _arm(self, prompt: str) -> _Arm:
        if prompt not in self._arms:
            raise ValueError(f"{prompt!r} is not in this batch; tell each planner of the prompts it was made with")
        return self._arms[prompt]

    def _shortest(self) -> _Arm | None:
        """Return the unfinished prompt with the fewest candidates, or None if every prompt has `most`."""
        arm = min(self._arms.values(), key=lambda arm: len(arm.asked), default=None)
        return arm if arm and len(arm.asked) < self.most else None

    def _best(self, count: int) -> list[tuple[str, int]]:
        """Return up to `count` candidates, each chunk for the largest gain; on a tie, the prompt with fewer wins."""
        arms = [arm for arm in self._arms.values() if len(arm.asked) < self.most]
        worth = self._worth(arms)
        gains = worth(range(len(arms)), 0, 1 + min(count // len(arms), self.most) // self.chunk)
        while True:
            pulls, unknown = self._pulls(arms, gains, count)
            if not unknown:
                return [arm.take() for arm, size in pulls for _ in range(size)]
            for length in {len(gains[number]) for number in unknown}:  # double the look-ahead of these prompts
                some = [number for number in unknown if len(gains[number]) == length]
                for number, more in zip(some, worth(some, length, 2 * length), strict=True):
                    gains[number] += more

    def _pulls(
        self, arms: Sequence[_Arm], gains: Sequence[Sequence[float]], count: int
    ) -> tuple[list[tuple[_Arm, int]], list[int]]:
        """Return the number of candidates per arm, in order, and the arms whose known gains were too few to decide."""
        pulls: list[tuple[_Arm, int]] = []
        used = [0] * len(arms)
        unknown = []
        heap = [(-gains[number][0], len(arm.asked), number) for number, arm in enumerate(arms)]
        heapify(heap)
        while heap and count:
            _, asked, number = heap[0]
            size = min(self.chunk, count, self.most - asked)
            pulls.append((arms[number], size))
            count -= size
            used[number] += 1
            if asked + size == self.most:
                heappop(heap)
            elif used[number] < len(gains[number]):
                heapreplace(heap, (-gains[number][used[number]], asked + size, number))
            else:
                heappop(heap)
                unknown += [number] if count else []
        return pulls, unknown

    def _worth(self, arms: Sequence[_Arm]) -> Callable[[Sequence[int], int, int], list[list[float]]]:
        """Return a function for the gains of chunks `begin` to `end` [prompts, chunks], after pending draws.

        The unit is the largest possible kept variance, a quarter of the squared range of the rewards until now. A
        prompt with non-finite rewards is worth less by their share.
        """
        all_rewards = set(chain.from_iterable(arm.rewards for arm in self._arms.values()))
        if not all_rewards:
            return lambda numbers, begin, end: [[0.0] * (end - begin) for _ in numbers]
        low, span = min(all_rewards), max(all_rewards) - min(all_rewards)
        span = span if span * span > 0 else 1.0
        strict = len(all_rewards) <= 2 if self.strict is None else self.strict
        data = _Observations(
            keep=self.keep,
            rewards=[[(reward - low) / span for reward in arm.rewards] for arm in arms],
            prior_count=np.array([arm.prior["count"] for arm in arms]),
            prior_mean=np.array([(arm.prior["mean"] - low) / span for arm in arms]).clip(0.0, 1.0),
            prior_variance=np.array([arm.prior["variance"] / span**2 for arm in arms]),
            pending=np.array([min(len(arm.asked) - len(arm.told), self.most) for arm in arms]),
        )
        expected = _expectation(data, self.policy, strict, self._draws)
        finite = np.array([(len(arm.rewards) + 1) / (len(arm.told) + 1) for arm in arms])

        def worth(numbers: Sequence[int], begin: int, end: int) -> list[list[float]]:
            some = np.array(numbers)
            ahead = self.chunk * np.arange(begin, end + 1)
            parts = np.array_split(some, -(-len(some) * len(ahead) // TOGETHER))
            growth = np.diff(np.concatenate([expected(part, ahead) for part in parts]))
            gains: list[list[float]] = (4 * growth * finite[some, None]).round(DIGITS).tolist()
            return gains

        return worth


@dataclass(frozen=True, kw_only=True, slots=True)
class _Observations:
    """The observations of P prompts, with all rewards of the batch scaled to [0, 1]."""

    keep: int
    rewards: list[list[float]]  # ascending
    prior_count: Array  # [P], like the next two fields
    prior_mean: Array
    prior_variance: Array
    pending: Counts  # [P]


def _expectation(data: _Observations, policy: Policy, strict: bool, draws: Array) -> Curves:
    """Return the kept variance expected by a policy."""
    if strict:
        high = np.array([float(sum(reward > 0.5 for reward in rewards)) for rewards in data.rewards])
        low = np.array([float(len(rewards)) for rewards in data.rewards]) - high
        if policy == "greedy":
            share = high / np.maximum(high + low, 1)
            return _strict_curves(data, high, low, _CERTAIN * share, _CERTAIN * (1 - share))
        a, b = _optimistic(high, low, *_beta(data, high, low))
        return (_strict_curves if policy == "bayes" else _strict_upper_curves)(data, high, low, a, b)
    if policy == "ucb":
        return _graded_upper_curves(data)
    return _graded_curves(data, _predicted(data, draws) if policy == "bayes" else _resampled(data, draws))


# --- strict rewards: two values, coded as 0 and 1


def _beta(data: _Observations, high: Array, low: Array) -> tuple[Array, Array]:
    """Return the parameters a, b [P] of each prompt's Beta posterior of the higher value.

    The prior's mean is the batch's mean. The prior's strength a + b fits the spread of the prompts: with rho the
    correlation of two rewards of a prompt, a + b = 1 / rho - 1 (method of moments for the Beta-binomial).
    """
    high_count = high + data.prior_count * data.prior_mean
    count = high + low + data.prior_count
    mean = (high_count.sum() + 0.5) / (count.sum() + 1)
    between = ((high_count - count * mean) ** 2 - count * mean * (1 - mean)).sum()
    pairs = (count * (count - 1)).clip(0).sum() * mean * (1 - mean)
    rho = np.clip(between / pairs if pairs else 0.5, *_RHO)
    strength = 1 / rho - 1
    return strength * mean + high_count, strength * (1 - mean) + count - high_count


def _optimistic(high: Array, low: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """Return the posterior with the rarer class's chance raised to an upper quantile, at equal total weight."""
    rate = np.where(high <= low, a, b) / (a + b)
    upper = np.minimum(1.0, rate + UPPER_Z * np.sqrt(rate * (1 - rate) / (a + b + 1)))
    mean = np.where(high <= low, upper, 1 - upper)
    return mean * (a + b), (1 - mean) * (a + b)


def _strict_curves(data: _Observations, high: Array, low: Array, a: Array, b: Array) -> Curves:
    """Return exact curves: the number of ones among new draws is Beta-binomial, computed as Polya's urn."""

    def curves(some: Counts, ahead: Counts) -> Array:
        at = data.pending[some, None] + ahead
        counts = np.arange(at.max() + 1)
        chance = np.zeros((len(counts), len(some), len(counts)))  # [draws, N, ones among the draws]
        chance[0, :, 0] = 1.0
        weight, total = a[some, None] + counts, (a + b)[some, None]
        for drawn in counts[:-1]:
            next_is_high = chance[drawn] * weight / (total + drawn)
            chance[drawn + 1] = chance[drawn] - next_is_high
            chance[drawn + 1, :, 1:] += next_is_high[:, :-1]
        low_then = low[some, None, None] + at[:, :, None] - counts
        kept = _kept_strict(high[some, None, None] + counts, low_then, data.keep)
        expected: Array = (chance[at, np.arange(len(some))[:, None]] * kept).sum(axis=2)
        return expected

    return curves


def _strict_upper_curves(data: _Observations, high: Array, low: Array, a: Array, b: Array) -> Curves:
    """Return the curves: headroom times the missing class's chance. `a`, `b` are already optimistic."""
    never = 1 - np.where(high <= low, a, b) / (a + b)
    enough = np.array(float(data.keep))
    headroom = _kept_strict(enough, enough, data.keep) - _kept_strict(high, low, data.keep)

    def curves(some: Counts, ahead: Counts) -> Array:
        chance: Array = 1 - never[some, None] ** (data.pending[some, None] + ahead)
        return headroom[some, None] * chance

    return curves


def _kept_strict(high: Array, low: Array, keep: int) -> Array:
    """Return the kept variance of these counts of ones and zeros. Below `keep`, missing rewards count as the mean."""
    kept = np.minimum(high + low, keep)
    high_kept = np.clip(kept // 2, kept - low, high)
    variance: Array = high_kept * (kept - high_kept) / (np.maximum(kept, 1) * keep)
    return variance


# --- graded rewards


def _normal_inverse_gamma(data: _Observations) -> tuple[Array, Array, Array]:
    """Return the posterior of each prompt: mean, count, and the variance at its upper quantile, each [P].

    The variance prior has the pooled variance as its mean, and degrees of freedom 4 + 2 / d. Here d is the squared
    coefficient of variation of the prompts' variances, less the part expected by chance (moments).
    """
    visits = zip(data.prior_count, data.prior_mean, data.prior_variance, strict=True)
    moments = [_moments(rewards, *visit) for rewards, visit in zip(data.rewards, visits, strict=True)]
    count, mean, squares = np.array(moments).T
    free = (count - 1).clip(0.0)
    total = max(free.sum(), 1.0)
    pooled = squares.sum() / total
    chance = 2 * np.count_nonzero(free) / total
    observed = (free * (squares / free.clip(1.0) / (pooled or 1.0) - 1) ** 2).sum() / total
    degrees = 4 + 2 / max((observed - chance) / (1 + chance), _LEAST)
    part = 2 / (9 * (degrees + free))  # the lower quantile of chi-square by Wilson and Hilferty (1931)
    chi_square = (degrees + free) * (1 - part - UPPER_Z * np.sqrt(part)) ** 3
    return np.where(count > 0, mean, 0.5), count.clip(1.0), ((degrees - 2) * pooled + squares) / chi_square


def _predicted(data: _Observations, draws: Array) -> Futures:
    """Return posterior predictive futures: a mean per path, and no reward outside the range of the batch."""
    mean, count, variance = _normal_inverse_gamma(data)
    deviation = np.sqrt(variance)[:, None]
    centre = mean[:, None] + deviation / np.sqrt(count[:, None]) * draws[:, 0]

    def futures(some: Counts, number: int) -> Array:
        new = draws[:, 1 : 1 + number]
        return (centre[some, :, None] + deviation[some, :, None] * new).clip(0.0, 1.0)

    return futures


def _resampled(data: _Observations, draws: Array) -> Futures:
    """Return futures drawn from each prompt's own rewards."""
    shown = [np.array(rewards or [0.5]) for rewards in data.rewards]

    def futures(some: Counts, number: int) -> Array:
        new = draws[:, 1 : 1 + number]
        quantile = np.array([_NORMAL.cdf(z) for z in new.flat]).reshape(new.shape)
        return np.stack([shown[number][(quantile * len(shown[number])).astype(int)] for number in some])

    return futures


def _graded_curves(data: _Observations, futures: Futures) -> Curves:
    """Return the mean over the futures. Only the `keep` lowest and the `keep` highest rewards of a prompt matter."""
    full = np.array([_ends(rewards, data.keep) for rewards in data.rewards]).swapaxes(0, 1)  # [2, P, keep]
    known_ends = np.repeat(full[:, :, None], PATHS, axis=2)
    first = int(data.pending.max())

    def curves(some: Counts, ahead: Counts) -> Array:
        new = futures(some, first + ahead[-1])
        new = np.stack([new, -new])  # [2, N, PATHS, draws]
        ends = [known_ends[:, some]]
        if at_once := first + ahead[0]:
            number = np.arange(at_once)
            is_drawn = (number >= first) | (number < data.pending[some, None, None])
            ends = [_lowest(ends[0], np.where(is_drawn, new[..., :at_once], np.inf))]
        for begin, end in pairwise(first + ahead):
            ends.append(_lowest(ends[-1], new[..., begin:end]))
        expected: Array = _kept_graded(np.stack(ends, axis=1)).mean(axis=2).T
        return expected

    return curves


def _ends(rewards: list[float], keep: int) -> tuple[list[float], list[float]]:
    """Return the `keep` lowest rewards, and the `keep` highest negated, both ascending.

    Missing rewards are set to the mean, where they add no variance.
    """
    mean = sum(rewards) / len(rewards) if rewards else 0.5
    full = rewards if len(rewards) >= keep else sorted([*rewards, *[mean] * (keep - len(rewards))])
    return full[:keep], [-reward for reward in full[: -keep - 1 : -1]]


def _lowest(ends: Array, new: Array) -> Array:
    """Return the lowest values after merging the new values [.., draws], as many as before."""
    return np.sort(np.concatenate([ends, new], axis=-1), axis=-1)[..., : ends.shape[-1]]


def _kept_graded(ends: Array) -> Array:
    """Return the largest variance of a prefix plus a suffix of `keep` rewards together, from `_ends` [2, .., keep]."""
    keep = ends.shape[-1]
    first = np.tri(keep + 1, keep, -1)  # row i takes the first i
    mask, signed = (np.concatenate([first, sign * first[::-1]], axis=1) for sign in (1, -1))
    rewards = np.concatenate(tuple(ends), axis=-1)
    columns = rewards.reshape(-1, 2 * keep).T  # a single large product instead of many small products
    variance = mask @ columns**2 / keep - (signed @ columns / keep) ** 2
    best: Array = variance.max(axis=0).reshape(rewards.shape[:-1])
    return best


def _graded_upper_curves(data: _Observations) -> Curves:
    """Return the curves: sigma^2 V(keep / candidates), the variance at an upper posterior quantile."""
    _, _, variance = _normal_inverse_gamma(data)
    candidates = np.array([len(rewards) for rewards in data.rewards]) + data.pending

    def curves(some: Counts, ahead: Counts) -> Array:
        number = np.maximum(candidates[some, None] + ahead, data.keep)
        different, where = np.unique(number, return_inverse=True)
        growth = np.array([_selected_variance(data.keep / n) for n in different])
        expected: Array = variance[some, None] * growth[where.reshape(number.shape)]
        return expected

    return curves


def _selected_variance(share: float) -> float:
    """Return V: the variance of the kept share of a standard normal, its two tails."""
    z = _NORMAL.inv_cdf(1 - share / 2)
    return 1 + 2 * z * _NORMAL.pdf(z) / share


# --- rewards and randomness


def _draws(seed: int, width: int) -> Array:
    """Return standard normal draws [PATHS, width]; each column has a draw in each of PATHS equal parts."""
    random = np.random.Generator(np.random.Philox(seed))
    part = random.permuted(np.tile(np.arange(PATHS)[:, None], (1, width)), axis=0) + random.random((PATHS, width))
    return np.array([[_NORMAL.inv_cdf(quantile) for quantile in path] for path in (part / PATHS).clip(1e-9, 1 - 1e-9)])


def _discounted(belief: Belief | None) -> Belief:
    if belief is None:
        return Belief(count=0.0, mean=0.0, variance=0.0)
    return Belief(count=DISCOUNT * belief["count"], mean=belief["mean"], variance=belief["variance"])


def _moments(rewards: Sequence[float], count: float, mean: float, variance: float) -> tuple[float, float, float]:
    """Return count, mean and sum of squares about the mean, of these rewards together with the last visit's."""
    if not rewards:
        return count, mean, count * variance
    total = count + len(rewards)
    own = sum(rewards) / len(rewards)
    centred = [reward - own for reward in rewards]
    squares = sum(map(mul, centred, centred))
    between = count * len(rewards) / total * (own - mean) ** 2
    return total, (count * mean + len(rewards) * own) / total, count * variance + squares + between
