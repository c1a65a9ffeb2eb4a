"""planner: how much kept variance does each policy of the planner buy with the same number of candidates?

    python -m tests.benchmarks.planner --json

Matrices of rewards [prompt, seed], made by rule and recorded (tests/data/rewards/*.csv, by
tests/benchmarks/record_rewards.py). Recorded ones are graded and strict, of the same images.
A policy gets the rewards of its candidates; all policies see the same matrices, and each issues a few candidates at a
time, like for workers. Only the kept variance counts.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from engine.exploration.planner import Planner, Policy
from engine.exploration.selection import kept_variance
from tests.benchmarks.page import load_now, publish
from tests.benchmarks.record_rewards import JOBS, REWARDS, read_rewards

KEEP = 8
BUDGETS = (1.0, 1.5, 2.0, 3.0)
"""Budgets in multiples of keep x prompts."""
PROMPTS = 24
SEEDS = 64
"""Seeds of a prompt in the generated matrices; no prompt may get more."""
CHUNK = 2
AT_A_TIME = 16
"""Pending candidates: the next ones are issued when these have rewards."""
ROUNDS = 60
TRIES = 12
EXTREME = "bernoulli beta(.5,.5)"
LIKE_MEASURED = "bernoulli beta(2,4)"
"""Chances of success as rl 4.5 measured them: .10 to .52 in most prompts."""
Matrix = NDArray[np.float64]
Generator = np.random.Generator


@dataclass(frozen=True, kw_only=True)
class Data:
    """A source of matrices [prompts, seeds]; strict ones come with each prompt's chance of 1 [prompts]."""

    draw: Callable[[Generator], tuple[Matrix, Matrix | None]]
    strict: bool
    recorded: bool = False


def gaussian(draw: Generator) -> tuple[Matrix, Matrix | None]:
    """Yield normal rewards; sigma of a prompt is lognormal with spread 0.6."""
    sigma = np.exp(0.6 * draw.standard_normal((PROMPTS, 1)))
    return sigma * draw.standard_normal((PROMPTS, SEEDS)), None


def bernoulli(a: float, b: float) -> Callable[[Generator], tuple[Matrix, Matrix | None]]:
    def drawn(draw: Generator) -> tuple[Matrix, Matrix | None]:
        rates = draw.beta(a, b, (PROMPTS, 1))
        return (draw.random((PROMPTS, SEEDS)) < rates).astype(float), rates[:, 0]

    return drawn


def levels(draw: Generator) -> tuple[Matrix, Matrix | None]:
    """Yield rewards of five levels (right characters of four) with unequal prompts."""
    rates = draw.beta(3.0, 1.0, (PROMPTS, 1))
    return draw.binomial(4, np.broadcast_to(rates, (PROMPTS, SEEDS))) / 4, None


def equal_levels(draw: Generator) -> tuple[Matrix, Matrix | None]:
    """Yield rewards of five levels with equal prompts, where planning cannot gain anything."""
    return draw.binomial(4, 0.8, (PROMPTS, SEEDS)) / 4, None


def recorded(matrix: Matrix, strict: bool) -> Callable[[Generator], tuple[Matrix, Matrix | None]]:
    """Yield the recorded rewards with shuffled seeds of each prompt; the chance is the mean over all seeds."""
    rates = matrix.mean(axis=1) if strict else None
    return lambda draw: (draw.permuted(matrix, axis=1), rates)


def data_sets() -> dict[str, Data]:
    found = {
        "gaussian": Data(draw=gaussian, strict=False),
        "levels": Data(draw=levels, strict=False),
        "levels, prompts alike": Data(draw=equal_levels, strict=False),
        EXTREME: Data(draw=bernoulli(0.5, 0.5), strict=True),
        LIKE_MEASURED: Data(draw=bernoulli(2.0, 4.0), strict=True),
    }
    for path in sorted(REWARDS.glob("*.csv")):
        for column, matrix in read_rewards(path).items():
            strict = column == "strict"
            found[f"{path.stem} {column}"] = Data(draw=recorded(matrix, strict), strict=strict, recorded=True)
    return found


# --- kept variance of a budget


def spent(matrix: Matrix, policy: Policy, seed: int) -> list[float]:
    """Return the kept variance as a mean over the prompts, at each of BUDGETS."""
    planner = Planner(
        [str(i) for i in range(len(matrix))], keep=KEEP, most=matrix.shape[1], policy=policy, chunk=CHUNK, seed=seed
    )
    found, used = [], 0
    for budget in candidates_of(matrix):
        while used < budget and (issued := planner.ask(min(AT_A_TIME, budget - used))):
            used += len(issued)
            for prompt, index in issued:
                planner.tell(prompt, index, float(matrix[int(prompt), index]))
        found.append(statistics.fmean(planner.kept_variance().values()))
    return found


def candidates_of(matrix: Matrix) -> list[int]:
    return [round(budget * KEEP * len(matrix)) for budget in BUDGETS]


def best(matrix: Matrix) -> list[float]:
    """Return the upper bound: a policy that knows the whole matrix and chooses the number of seeds of each prompt.

    Every policy ends with the first n of each prompt's seeds, so none can have more in any round. Computed by dynamic
    programming over the prompts. No real policy can reach it, because it knows the rewards in advance.
    """
    most = candidates_of(matrix)[-1]
    total = np.full(most + 1, -np.inf)
    total[0] = 0.0
    for rewards in matrix:
        after = np.full(most + 1, -np.inf)
        for n in range(KEEP, min(len(rewards), most) + 1):
            np.maximum(after[n:], total[: most + 1 - n] + kept_variance(rewards[:n].tolist(), KEEP), out=after[n:])
        total = after
    return [float(total[: budget + 1].max()) / len(matrix) for budget in candidates_of(matrix)]


def knows_rates(matrix: Matrix, rates: Matrix) -> list[float]:
    """Return the tighter bound for strict rewards: a policy that knows each prompt's chance of 1 but no reward.

    It gives one candidate at a time to the largest expected gain. That is optimal: with `keep` seen, a prompt's
    expected gain stays the same after a useless candidate and falls after a useful one, so it never grows.
    """
    high = matrix[:, :KEEP].sum(axis=1)
    tried = np.full(len(matrix), KEEP)

    def gain(i: int) -> float:
        now, one, zero = (
            kept_of(high[i] + ones, tried[i] + more - high[i] - ones) for ones, more in ((0, 0), (1, 1), (0, 1))
        )
        return float(rates[i] * (one - now) + (1 - rates[i]) * (zero - now)) if tried[i] < matrix.shape[1] else -1.0

    gains = [gain(i) for i in range(len(matrix))]
    found = []
    for budget in candidates_of(matrix):
        while tried.sum() < budget:
            i = int(np.argmax(gains))
            high[i] += matrix[i, tried[i]]
            tried[i] += 1
            gains[i] = gain(i)
        found.append(float(np.mean([kept_of(h, n - h) for h, n in zip(high, tried, strict=True)])))
    return found


def kept_of(high: float, low: float) -> float:
    ones = min(max(KEEP // 2, KEEP - low), high)
    return ones * (KEEP - ones) / KEEP**2


def play(data: Data, rounds: int) -> dict[str, Matrix]:
    """Return the kept variance [rounds, budgets] by policy, on the same matrices."""
    found: dict[str, list[list[float]]] = {}
    for seed in range(rounds):
        matrix, rates = data.draw(np.random.default_rng(seed))
        for policy in get_args(Policy):
            found.setdefault(policy, []).append(spent(matrix, policy, seed))
        if rates is not None:
            found.setdefault("knows rates", []).append(knows_rates(matrix, rates))
        found.setdefault("oracle", []).append(best(matrix))
    return {policy: np.array(values) for policy, values in found.items()}


# --- figures


def standard_error(values: Matrix) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5)


def against_uniform(played: Mapping[str, Matrix]) -> float:
    """Return z of bayes minus uniform, paired by round: the mean over the budgets above 1."""
    difference = (played["bayes"] - played["uniform"])[:, 1:].mean(axis=1)
    return float(difference.mean() / max(standard_error(difference), 1e-12))


def two_for_three(played: Mapping[str, Matrix], policy: str = "bayes") -> float:
    two, three = (played[name].mean(axis=0)[BUDGETS.index(at)] for name, at in ((policy, 2.0), ("uniform", 3.0)))
    return float(two / three)


def plan_ms(strict: bool, times: int = 21) -> float:
    """Return the CPU milliseconds in which `bayes` issues 64 chunks to 64 prompts with 16 results each.

    Median over `times` matrices of the fastest of TRIES planners, because work on the other hyperthread slows it down.
    """
    return statistics.median(min(_deal_ms(strict, seed) for _ in range(TRIES)) for seed in range(times))


def _deal_ms(strict: bool, seed: int) -> float:
    draw = np.random.default_rng(seed)
    if strict:
        matrix = (draw.random((64, 16)) < draw.beta(0.5, 0.5, (64, 1))).astype(float)
    else:
        matrix = np.exp(0.6 * draw.standard_normal((64, 1))) * draw.standard_normal((64, 16))
    planner = Planner([str(i) for i in range(64)], keep=KEEP, most=SEEDS, policy="bayes", chunk=CHUNK, seed=seed)
    for (i, index), reward in np.ndenumerate(matrix):
        planner.took(str(i), index)
        planner.tell(str(i), index, float(reward))
    begun = time.process_time()
    issued = planner.ask(64 * CHUNK)
    milliseconds = 1e3 * (time.process_time() - begun)
    assert len(issued) == 64 * CHUNK
    return milliseconds


def per_data(values: Mapping[str, float], digits: int = 3) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())


def rows_of(played: Mapping[str, Mapping[str, Matrix]]) -> list[dict[str, str]]:
    return [
        {"rewards": name, "policy": policy}
        | {
            f"{budget:g}x": f"{values[:, at].mean():.4f} ± {standard_error(values[:, at]):.4f}"
            for at, budget in enumerate(BUDGETS)
        }
        for name, by_policy in played.items()
        for policy, values in by_policy.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="paired rounds, 2 or more")
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    load1 = load_now()
    begun = time.perf_counter()
    data = data_sets()
    milliseconds = {"strict": plan_ms(strict=True), "graded": plan_ms(strict=False)}
    played = {name: play(one, options.rounds) for name, one in data.items()}
    ratios = {name: two_for_three(played[name]) for name, one in data.items() if one.strict}
    bounds = {name: two_for_three(played[name], "knows rates") for name in ratios}
    counted = [name for name in ratios if data[name].recorded] or [LIKE_MEASURED]
    scores = {name: against_uniform(played[name]) for name, one in data.items() if not one.strict}
    publish(
        "planner",
        question="how much kept variance does each policy buy with the same number of candidates?",
        command="python -m tests.benchmarks.planner --json",
        result={
            "bayes_2x_vs_uniform_3x_strict": statistics.fmean(ratios[name] for name in counted),
            "counted_in_bayes_2x_vs_uniform_3x_strict": counted,
            "bayes_2x_vs_uniform_3x": ratios,
            "knows_rates_2x_vs_uniform_3x": bounds,
            "bayes_vs_uniform_graded_z": min(scores.values()),
            "bayes_vs_uniform_z": scores,
            "plan_ms_64_prompts": max(milliseconds.values()),
            "plan_ms": milliseconds,
            "missing": missing_tasks(data),
            "kept_variance": {
                name: {
                    policy: {
                        f"{budget:g}": {"mean": float(values[:, at].mean()), "se": standard_error(values[:, at])}
                        for at, budget in enumerate(BUDGETS)
                    }
                    for policy, values in by_policy.items()
                }
                for name, by_policy in played.items()
            },
            "keep": KEEP,
            "chunk": CHUNK,
            "at_a_time": AT_A_TIME,
            "seconds": time.perf_counter() - begun,
        },
        runs=options.rounds,
        seeds=[0, options.rounds - 1],
        load1=load1,
        rows=rows_of(played),
        shown=lambda row: row["policy"] in ("uniform", "bayes", "oracle"),
        text=f"""
Kept variance: mean over the prompts of the variance of the {KEEP} rewards kept, ± its standard error over
{options.rounds} rounds; all policies see the same matrices. Budgets in keep x prompts; at 1x there is nothing to plan.
By rule: {PROMPTS} prompts x {SEEDS} seeds. Recorded ones: the seeds of each prompt in another order every round.
`oracle` knows the matrix and chooses how many of each prompt's seeds to take (dynamic programme): every policy ends
with such a choice, so none can have more; it knows luck in advance, so none comes near. `knows rates` knows each
prompt's chance but not its luck; for strict rewards nothing that cannot foresee luck does better on average.
`bayes_2x_vs_uniform_3x_strict`: kept variance of `bayes` at 2x over `uniform` at 3x, mean over {", ".join(counted)}
(recorded strict rewards where there are any). By data: {per_data(ratios)};
with known rates: {per_data(bounds)}. It stays below 1 on {EXTREME}: three in ten of
its prompts succeed less than once in 20 tries or fail as rarely, and every policy has to find out which.
`bayes_vs_uniform_graded_z`: paired z of `bayes` minus `uniform`, mean over 1.5x, 2x and 3x; the smallest over the
graded data. By data: {per_data(scores, 1)}.
On shapes graded `bayes` wins at 1.5x and 2x and loses at 3x: most of its rewards are 1 with a rare 0, which `bayes`,
who thinks that rewards are normal, does not wait for long enough. Draws from the rewards of the whole batch instead
(replayed on measured rewards) won there and lost to `uniform` on digits-ocr and where prompts are alike, so it stays.
`plan_ms_64_prompts`: processor time of one chunk for each of 64 prompts with 16 results each, of `bayes`, the slower
kind of rewards; median of 21 matrices, of each the fastest of {TRIES} (other work on the machine slows it).
What it changed: `bayes` is optimistic for both kinds of rewards; `greedy` is kept for comparison only, as it is worse
than `uniform` where prompts are alike. It did not become the default of a job: with advantages divided by the group's
own deviation (`std: group`) every group weighs the same however much it varies, and there an even share trained better
(digits-ocr, exact match after 18 iterations, 144 candidates a batch, seeds 100 and 101: uniform .799 and .848, bayes
.773 and .811). More kept variance is worth more with `std: batch` and with strict rewards.
""",
    )


def missing_tasks(data: Sequence[str] | Mapping[str, Data]) -> list[str]:
    return [task for task in JOBS if not any(name.startswith(task) for name in data)]


if __name__ == "__main__":
    main()
