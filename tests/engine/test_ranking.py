"""The ranking monitor corrects for selection, gives intervals, and switches off exploration without gain."""

import json
import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.exploration.ranking import (
    KnownVisit,
    RankingMonitor,
    RankingRules,
    Scored,
    Sums,
    Visit,
    set_weights,
    student_quantile,
)
from engine.exploration.selection import control_slice, max_variance_subset

SAMPLER = "flow-sde-8-n1-abc"
Candidates = dict[str, tuple[list[float], list[float]]]
"""Stale and fresh rewards of every candidate, by prompt; a candidate's seed is its index."""


def normal(rng: np.random.Generator, rho: float, *, prompts: int = 12, n: int = 24, batch: int = 0) -> Candidates:
    stale = rng.normal(size=(prompts, n))
    fresh = rho * stale + math.sqrt(1 - rho**2) * rng.normal(size=(prompts, n))
    return {f"{batch}-{p}": (stale[p].tolist(), fresh[p].tolist()) for p in range(prompts)}


def visit_of(prompt: str, candidates: Candidates, keep: int) -> Visit:
    stale, fresh = candidates[prompt]
    chosen = max_variance_subset(stale, keep)
    return Visit(prompt=prompt, stale=dict(enumerate(stale)), fresh={seed: fresh[seed] for seed in chosen})


def scored(prompt: str, seed: int, reward: float, *, version: int = 1, sampler: str = SAMPLER) -> Scored:
    return Scored(prompt=prompt, seed=seed, reward=reward, version=version, sampler=sampler)


def controls(candidates: Candidates, keep: int, fraction: float, *, run_seed: int = 0, batch: int = 0) -> list[Scored]:
    visits = [visit_of(prompt, candidates, keep) for prompt in candidates]
    unselected = [(visit.prompt, seed) for visit in visits for seed in visit.stale if seed not in visit.fresh]
    drawn = control_slice(unselected, fraction, run_seed=run_seed, batch=batch)
    return [scored(prompt, seed, candidates[prompt][1][seed]) for prompt, seed in drawn]


def explore(
    monitor: RankingMonitor,
    batch: int,
    candidates: Candidates,
    *,
    keep: int = 8,
    fraction: float = 0.125,
    run_seed: int = 0,
) -> None:
    visits = [visit_of(prompt, candidates, keep) for prompt in candidates]
    monitor.add(batch, visits, version=1, sampler=SAMPLER)
    monitor.add_control(batch, controls(candidates, keep, fraction, run_seed=run_seed, batch=batch))


def run(rho: float, batches: range, *, seed: int = 0, fraction: float = 0.125, **shape: int) -> RankingMonitor:
    rng, monitor = np.random.default_rng(seed), RankingMonitor()
    for batch in batches:
        explore(monitor, batch, normal(rng, rho, batch=batch, **shape), fraction=fraction, run_seed=seed)
    return monitor


def expected_spearman(rho: float, n: int) -> float:
    """Return the expected Spearman correlation of n pairs of a bivariate normal (Moran 1948, Biometrika 35:203)."""
    return 6 / (math.pi * (n + 1)) * (math.asin(rho) + (n - 2) * math.asin(rho / 2))


# --- the correction


@pytest.mark.parametrize("rho", [0.3, 0.7])
def test_controls_correct_the_correlation_that_selection_overstates(rho):
    rounds = 40
    found = [run(rho, range(3), seed=seed).report() for seed in range(rounds)]
    truth = expected_spearman(rho, 24)
    spearmans = [report.spearman for report in found]
    error = np.std(spearmans) / math.sqrt(rounds)
    assert abs(np.mean(spearmans) - truth) < 4 * error
    kendalls = [report.kendall for report in found]
    assert abs(np.mean(kendalls) - 2 / math.pi * math.asin(rho)) < 4 * np.std(kendalls) / math.sqrt(rounds)
    alone = [run(rho, range(3), seed=seed, fraction=0).report() for seed in range(10)]
    assert np.mean([report.spearman for report in alone]) > truth + 8 * error
    assert all(report.corrected for report in found)
    assert not any(report.corrected for report in alone)


def test_the_predicted_gain_equals_the_observed_gain():
    found = [run(0.7, range(3), seed=seed).report() for seed in range(20)]
    predicted = np.mean([report.predicted_gain for report in found])
    realised = np.mean([report.realised_gain for report in found])
    selection = np.mean([report.selection_gain for report in found])
    # Spearman of normal pairs is a little below rho, so the prediction is a little low.
    assert 1 + expected_spearman(0.7, 24) ** 2 * (selection - 1) == pytest.approx(predicted, rel=0.05)
    assert 1 + 0.7**2 * (selection - 1) == pytest.approx(realised, rel=0.07)


REWARDS = st.lists(st.integers(0, 4).map(float), min_size=6, max_size=6)


@settings(max_examples=30)
@given(REWARDS, REWARDS, REWARDS, REWARDS)
def test_sums_averaged_over_all_control_slices_equal_the_population(x0, y0, x1, y1):
    candidates: Candidates = {"a": (x0, y0), "b": (x1, y1)}
    visits = [KnownVisit.of(visit_of(prompt, candidates, 3)) for prompt in candidates]
    assume(all(np.ptp(list(visit.selected.values())) and np.ptp(list(visit.stale.values())) for visit in visits))
    unselected = [(visit, seed) for visit in visits for seed in visit.stale if seed not in visit.selected]

    def total(drawn):
        def of(visit):
            rewards = {seed: candidates[visit.prompt][1][seed] for owner, seed in drawn if owner is visit}
            return visit.with_control(rewards).sums(set_weights(len(unselected), len(drawn)))

        return sum(of(visit) for visit in visits)

    everything = Sums(*total(unselected))
    for size in (3, 4):
        mean = Sums(*np.mean([total(drawn) for drawn in combinations(unselected, size)], axis=0))
        np.testing.assert_allclose(mean[:-1], everything[:-1], rtol=1e-9, atol=1e-9)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=12))
def test_with_every_reward_known_the_figures_equal_the_textbook_ones(pairs):
    x, y = (list(map(float, side)) for side in zip(*pairs, strict=True))
    candidates: Candidates = {"a": (x, y)}
    monitor = RankingMonitor()
    explore(monitor, 0, candidates, keep=2, fraction=1)
    report = monitor.report()
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert (report.spearman, report.left_out) == (None, 1)
        return
    assert report.corrected
    assert report.spearman == pytest.approx(np.corrcoef(mid_ranks(x), mid_ranks(y))[0, 1])
    assert report.kendall == pytest.approx(tau_b(x, y))
    chosen = list(max_variance_subset(x, 2))
    assert report.selection_gain == pytest.approx(np.var(np.take(x, chosen), ddof=1) / np.var(x, ddof=1))
    assert report.realised_gain == pytest.approx(np.var(np.take(y, chosen), ddof=1) / np.var(y, ddof=1))


def mid_ranks(values: list[float]) -> list[float]:
    return [sum(v < value for v in values) + (values.count(value) + 1) / 2 for value in values]


def tau_b(x: list[float], y: list[float]) -> float:
    signs = [(np.sign(x[i] - x[j]), np.sign(y[i] - y[j])) for i, j in combinations(range(len(x)), 2)]
    untied = sum(a != 0 for a, _ in signs) * sum(b != 0 for _, b in signs)
    return sum(a * b for a, b in signs) / math.sqrt(untied)


def test_without_controls_the_figures_cover_only_the_selected_seeds():
    candidates = normal(np.random.default_rng(0), 0.5, prompts=1)
    stale, fresh = candidates["0-0"]
    monitor = RankingMonitor()
    explore(monitor, 0, candidates, fraction=0)
    chosen = max_variance_subset(stale, 8)
    x, y = [stale[seed] for seed in chosen], [fresh[seed] for seed in chosen]
    report = monitor.report()
    assert report.spearman == pytest.approx(np.corrcoef(mid_ranks(x), mid_ranks(y))[0, 1])
    assert report.kendall == pytest.approx(tau_b(x, y))
    assert report.selection_gain == pytest.approx(np.var(x, ddof=1) / np.var(stale, ddof=1))
    assert (report.corrected, report.realised_gain, report.pairs) == (False, None, 8)


POPULATION = st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=8, max_size=14)


@given(st.lists(POPULATION, min_size=1, max_size=4), st.floats(0.1, 1))
def test_correlations_are_in_bounds_and_depend_only_on_the_order(prompts, fraction):
    candidates = {
        str(number): ([float(x) for x, _ in pairs], [float(y) for _, y in pairs])
        for number, pairs in enumerate(prompts)
    }
    plain, mapped = RankingMonitor(), RankingMonitor()
    visits = [visit_of(prompt, candidates, 4) for prompt in candidates]
    drawn = controls(candidates, 4, fraction)
    plain.add(0, visits, version=1, sampler=SAMPLER)
    plain.add_control(0, drawn)

    def up(reward: float) -> float:
        return reward**3 + reward - 7

    mapped.add(
        0,
        [
            Visit(
                prompt=visit.prompt,
                stale={seed: up(reward) for seed, reward in visit.stale.items()},
                fresh={seed: 2 * up(reward) for seed, reward in visit.fresh.items()},
            )
            for visit in visits
        ],
        version=1,
        sampler=SAMPLER,
    )
    mapped.add_control(0, [scored(one.prompt, one.seed, 2 * up(one.reward)) for one in drawn])
    one, other = plain.report(), mapped.report()
    assert one.spearman == other.spearman
    assert one.kendall == other.kendall
    assert (one.low, one.high) == (other.low, other.high)
    if one.spearman is not None:
        assert -1 <= one.kendall <= 1
        assert -1 <= one.low <= one.spearman <= one.high <= 1


@given(st.lists(POPULATION, min_size=1, max_size=4), st.floats(0.1, 1))
def test_a_perfect_ranking_has_correlation_1_for_any_control_slice(prompts, fraction):
    candidates = {
        str(number): ([float(x) for x, _ in pairs], [float(x) for x, _ in pairs])
        for number, pairs in enumerate(prompts)
    }
    monitor = RankingMonitor()
    explore(monitor, 0, candidates, keep=4, fraction=fraction)
    report = monitor.report()
    assert report.spearman in (None, pytest.approx(1))
    assert report.kendall in (None, pytest.approx(1))


def test_prompts_with_equal_rewards_on_one_side_are_excluded_and_counted():
    candidates: Candidates = {
        "mastered": ([0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]),
        "hopeless": ([0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]),
        "mixed": ([0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]),
    }
    monitor = RankingMonitor()
    explore(monitor, 0, candidates, keep=2, fraction=1)
    report = monitor.report()
    assert (report.prompts, report.left_out, report.pairs) == (1, 2, 4)
    assert report.spearman == pytest.approx(1)


# --- the interval


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_about_95_of_100_intervals_contain_the_true_value(rho):
    rounds = 120
    truth = expected_spearman(rho, 16)
    found = [run(rho, range(3), seed=1000 + seed, prompts=10, n=16).report() for seed in range(rounds)]
    hits = sum(report.low <= truth <= report.high for report in found)
    assert abs(hits - 0.95 * rounds) < 3.3 * math.sqrt(rounds * 0.95 * 0.05)


@pytest.mark.parametrize(("n", "batches"), [(96, 1), (24, 4)])
def test_pairs_of_one_prompt_are_not_counted_as_independent(n, batches):
    """With six prompts, four times the candidates or four batches hardly narrow the interval."""

    def width(n: int, batches: int) -> float:
        rng, monitor = np.random.default_rng(4), RankingMonitor()
        for batch in range(batches):
            good, bad = (normal(rng, rho, prompts=3, n=n, batch=kind) for kind, rho in enumerate((0.95, 0.05)))
            explore(monitor, batch, good | bad, fraction=1)
        report = monitor.report()
        assert report.prompts == 6
        return report.high - report.low

    assert width(24, 1) > 0.5
    assert width(n, batches) > 0.75 * width(24, 1)


def test_few_prompts_give_a_wide_interval():
    report = run(0.9, range(4), prompts=1).report()
    assert report.prompts == 4
    assert (report.low, report.high) == (-1, 1)


@pytest.mark.parametrize(("freedom", "quantile"), [(5, 2.571), (7, 2.365), (11, 2.201), (35, 2.030), (95, 1.985)])
def test_quantiles_of_students_t(freedom, quantile):
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, rel=0.003)


# --- the verdict


def test_a_useless_ranking_switches_exploration_off_until_it_is_tried_again():
    monitor = run(0.0, range(3))
    assert monitor.report().most_that_selection_adds < 0.1
    assert [monitor.explores(batch) for batch in range(3, 13)] == [False] * 8 + [True] * 2
    assert monitor.explores(2)


@pytest.mark.parametrize("rho", [0.8, -0.8])
def test_an_informative_ranking_keeps_exploration_on(rho):
    """A reversed ranking is as good, because both ends of the ranking are kept."""
    monitor = run(rho, range(6))
    assert all(monitor.explores(batch) for batch in range(6, 20))
    assert monitor.report().predicted_gain > 1.5


def test_the_end_of_the_interval_farther_from_0_decides():
    report = replace(run(0.5, range(3)).report(), low=-0.8, high=0.1, selection_gain=2.5)
    assert report.most_that_selection_adds == pytest.approx(0.64 * 1.5)


def test_without_controls_exploration_is_never_switched_off_by_the_monitor():
    monitor = run(0.0, range(12), fraction=0)
    report = monitor.report()
    assert report.most_that_selection_adds < 0.1
    assert (report.corrected, report.realised_gain) == (False, None)
    assert all(monitor.explores(batch) for batch in range(30))


def test_a_verdict_needs_controls_of_three_batches():
    rng, monitor = np.random.default_rng(0), RankingMonitor()
    for batch in range(5):
        explore(monitor, batch, normal(rng, 0.0, prompts=40, batch=batch), fraction=0.125 if batch < 2 else 0)
    assert monitor.report().most_that_selection_adds < 0.1
    assert monitor.explores(5)
    explore(monitor, 5, normal(rng, 0.0, prompts=40, batch=5))
    assert not monitor.explores(6)


def test_too_few_candidates_gain_nothing_even_if_ranked_perfectly():
    rng, monitor = np.random.default_rng(0), RankingMonitor()
    for batch in range(3):
        explore(monitor, batch, normal(rng, 0.99, n=34, batch=batch), keep=32)
    report = monitor.report()
    assert report.spearman > 0.9
    assert report.selection_gain < 1.1
    assert not monitor.explores(3)


def test_a_new_trial_decides_by_its_own_measurements():
    rng = np.random.default_rng(0)
    monitor = run(0.0, range(3))
    for batch in (3, 4):  # were in flight when exploration was switched off
        explore(monitor, batch, normal(rng, 0.0, batch=batch))
    assert not monitor.explores(10)
    for batch in (11, 12):
        assert monitor.explores(batch)
        explore(monitor, batch, normal(rng, 0.0, batch=batch))
        assert monitor.report().batches == batch - 10
    assert monitor.explores(13)
    explore(monitor, 13, normal(rng, 0.0, batch=13))
    assert not monitor.explores(14)

    better = RankingMonitor.from_dict(json.loads(json.dumps(run(0.0, range(3)).to_dict())))
    for batch in range(11, 20):
        explore(better, batch, normal(rng, 0.9, batch=batch))
    assert better.explores(20)
    assert better.report().spearman > 0.8


# --- accepted and refused figures


def test_only_the_newest_batches_count():
    rng, monitor = np.random.default_rng(0), RankingMonitor(RankingRules(window=2))
    for batch, rho in enumerate((-0.9, 0.9, 0.9)):
        explore(monitor, batch, normal(rng, rho, batch=batch))
    report = monitor.report()
    assert (report.batches, report.prompts) == (2, 24)
    assert report.spearman > 0.8
    assert monitor.report(only={2}).prompts == 12
    assert monitor.report(only={0}).spearman is None


def test_controls_may_arrive_in_parts_late_twice_or_never():
    rng = np.random.default_rng(0)
    candidates = normal(rng, 0.7)
    drawn = controls(candidates, 8, 0.125)
    whole, parts = RankingMonitor(), RankingMonitor()
    for monitor in (whole, parts):
        explore(monitor, 0, candidates, fraction=0)
        explore(monitor, 1, normal(rng, 0.7, batch=1), fraction=0)
    whole.add_control(0, drawn)
    parts.add_control(0, drawn[:2])
    assert not parts.report().corrected  # two controls cannot stand for triples
    parts.add_control(0, drawn[:10])
    assert parts.report().pairs == 12 * 8 + 10
    parts.add_control(0, drawn)
    assert parts.report() == whole.report()
    assert whole.report().batches == 1  # the batch without controls would not be corrected
    whole.add_control(99, drawn)
    assert parts.report() == whole.report()


def test_a_control_that_is_not_an_unselected_candidate_is_refused():
    candidates = normal(np.random.default_rng(0), 0.7)
    monitor = RankingMonitor()
    explore(monitor, 0, candidates, fraction=0)
    selected = min(visit_of("0-0", candidates, 8).fresh)
    for seed in (selected, 77):
        with pytest.raises(ValueError, match=f"seed {seed} of prompt '0-0'"):
            monitor.add_control(0, [scored("0-0", seed, 0.5)])
    with pytest.raises(ValueError, match="does not have: other"):
        monitor.add_control(0, [scored("other", 0, 0.5)])


def test_a_non_finite_reward_excludes_its_seed():
    nan = float("nan")
    visit = Visit(prompt="a", stale={0: 0.0, 1: 1.0, 2: 0.5, 3: nan, 4: 2.0}, fresh={0: 0.0, 1: 1.0, 4: nan, 9: 3.0})
    monitor = RankingMonitor()
    monitor.add(0, [visit], version=1, sampler=SAMPLER)
    monitor.add_control(0, [scored("a", 2, 0.2)])
    report = monitor.report()
    assert (report.corrected, report.pairs) == (True, 3)
    assert report.spearman == pytest.approx(1)


def test_results_too_old_or_of_another_sampler_are_refused_and_counted():
    monitor = RankingMonitor()
    results = [
        scored("a", 1, 0.1, version=4),
        scored("a", 2, 0.2, version=5),
        scored("a", 3, 0.3, version=3),
        scored("a", 4, 0.4, version=6),
        scored("a", 5, 0.5, version=4, sampler="cps"),
        scored("a", 6, float("nan"), version=4),
    ]
    assert monitor.admit(results, version=5, sampler=SAMPLER) == {("a", 1): 0.1, ("a", 2): 0.2}
    assert (monitor.report().refused_stale, monitor.report().refused_sampler) == (2, 1)
    patient = RankingMonitor(RankingRules(max_staleness=2))
    assert ("a", 3) in patient.admit(results, version=5, sampler=SAMPLER)
    assert patient.report().refused_stale == 1


def test_controls_of_other_weights_or_another_sampler_are_refused_and_counted():
    candidates = normal(np.random.default_rng(0), 0.7)
    monitor = RankingMonitor()
    explore(monitor, 0, candidates, fraction=0)
    drawn = controls(candidates, 8, 0.125)
    monitor.add_control(0, [scored(one.prompt, one.seed, one.reward, version=0) for one in drawn])
    monitor.add_control(0, [scored(one.prompt, one.seed, one.reward, sampler="cps") for one in drawn])
    report = monitor.report()
    assert (report.refused_stale, report.refused_sampler, report.corrected) == (len(drawn), len(drawn), False)


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_restored_monitor_gives_the_same_verdicts(stop):
    """It is restored before a verdict, after one, and in the next trial."""

    def batches(monitor: RankingMonitor, numbers: list[int]) -> None:
        for batch in numbers:
            explore(monitor, batch, normal(np.random.default_rng(batch), 0.0, batch=batch))
            monitor.admit([scored("a", 0, 0.0, version=-5)], version=1, sampler=SAMPLER)

    numbers = [0, 1, 2, 11, 12, 13, 14]
    whole, before = RankingMonitor(), RankingMonitor()
    batches(whole, numbers)
    batches(before, numbers[:stop])
    state = json.loads(json.dumps(before.to_dict()))
    after = RankingMonitor.from_dict(state)
    assert after.to_dict() == state
    assert after.report() == before.report()
    batches(after, numbers[stop:])
    assert after.to_dict() == whole.to_dict()
    assert after.report() == whole.report()
    assert [after.explores(batch) for batch in range(40)] == [whole.explores(batch) for batch in range(40)]


def test_a_new_monitor_has_no_figures():
    monitor = RankingMonitor()
    report = monitor.report()
    assert (report.spearman, report.predicted_gain, report.realised_gain) == (None, None, None)
    assert (report.low, report.high, report.most_that_selection_adds) == (-1, 1, math.inf)
    assert monitor.explores(0)


def test_a_repeated_batch_replaces_its_earlier_figures():
    rng, monitor = np.random.default_rng(0), RankingMonitor()
    explore(monitor, 0, normal(rng, -0.9))
    redone = normal(rng, 0.9)
    explore(monitor, 0, redone)
    once = RankingMonitor()
    explore(once, 0, redone)
    assert monitor.report() == once.report()


def test_a_batch_without_a_choice_does_not_count():
    monitor = run(0.7, range(2))
    before = monitor.report()
    visit = Visit(prompt="a", stale={0: 0.0, 1: 1.0}, fresh={0: 1.0, 1: 0.0, 2: 0.5})
    monitor.add(2, [visit, Visit(prompt="b", stale={}, fresh={5: 1.0, 6: 0.0})], version=1, sampler=SAMPLER)
    assert monitor.report() == before
    monitor.add(1, [visit], version=1, sampler=SAMPLER)
    assert monitor.report() == monitor.report(only={0})
