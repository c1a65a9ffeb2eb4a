"""The cost model of Qwen-Image with spot GPUs, checked by hand; and its page, from made-up learning runs."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.exploration.value import IterationCost, candidates_that_fit, iteration_seconds, relative_cost, spot_pays
from tests.benchmarks import arms, modelled_cost
from tests.benchmarks.arms import Arm, Cell
from tests.benchmarks.modelled_cost import (
    IN_PATH_POOLS,
    SETTINGS,
    Figures,
    is_stored,
    learning_runs,
    rows,
    stale_pools,
    text,
)
from tests.benchmarks.qwen_image import (
    CONTROL_SHARE,
    POOLS,
    SPOT_GPUS,
    SYNC_SECONDS,
    TRAINED,
    Price,
    affordable,
    all_times,
    discounted,
    in_path_seconds,
    offered,
    pool_of,
    waiting_seconds,
)
from tests.benchmarks.spot_cells import (
    BASELINES,
    Learned,
    arms_of,
    cheaper_candidates,
    compare,
    product_error,
    spot_cell,
    waiting,
)

TIMES = {times.name: times for times in all_times(candidate_share=1.0)}
SMALL, LARGE = TIMES["512 px"], TIMES["1280 px"]

LEARNED = Learned(
    plain=[24.0, 38.0, 25.0],
    in_path={120: [19.0, 25.0, 20.0], 144: [15.0, 22.0, 19.0]},
    stale={72: [21.0, 26.0, 22.0], 120: [19.0, 22.0, 20.0], 144: [15.0, 17.0, 15.0], 192: [14.0] * 3, 288: [13.0] * 3},
)
HALF_PRICE = Price(name="50 % off", on_demand=6.0, spot=3.0, source="made up")

costs = st.builds(
    IterationCost,
    prompts=st.just(32),
    images_per_prompt=st.just(16),
    reserved_gpus=st.just(4),
    rollout_gpu_seconds=st.floats(0.1, 20),
    candidate_gpu_seconds=st.floats(0.1, 20),
    train_seconds=st.floats(0, 5000),
    sync_seconds=st.floats(0, 50),
    guard_seconds=st.floats(0, 50),
)


# --- seconds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spot", "seconds", "candidates"), [(4, 306, 1_211), (8, 289, 2_421), (12, 280, 3_632)])
def test_published_times_are_those_of_the_research_table(spot, seconds, candidates):
    bare = replace(SMALL.cost, sync_seconds=0.0, candidate_gpu_seconds=SMALL.cost.rollout_gpu_seconds)
    assert iteration_seconds(bare, 0) == 360
    assert iteration_seconds(bare, spot) == pytest.approx(seconds, abs=0.8)
    assert candidates_that_fit(bare, spot) == pytest.approx(candidates, abs=1)


def test_the_control_slice_uses_the_same_idle_seconds():
    # 8 x (253 - 0.152) s / (107 x 4 / 512 x 1.125) GPU-s = 2150.9
    assert pytest.approx(0.152) == SYNC_SECONDS
    assert CONTROL_SHARE == 0.125
    assert candidates_that_fit(SMALL.cost, 8) == 2150
    assert affordable(SMALL.cost, 8) == pytest.approx(2150 * 48 / 512)


def test_times_at_1280_follow_from_operations():
    assert LARGE.cost.rollout_gpu_seconds == pytest.approx(20 * 119 / (989 * 0.475))
    # 16 forwards of 119 TFLOP for 128 images a GPU, plus the part of 253 s beyond 16 forwards of 15.7 TFLOP.
    assert LARGE.cost.train_seconds == pytest.approx(616.1 + 253 - 81.3, abs=0.1)
    assert TIMES["1280 px, training computed"].cost.train_seconds == pytest.approx(616.1, abs=0.1)


def test_scaling_all_times_alike_keeps_the_number_of_candidates():
    alike = TIMES["1280 px, all scaled alike"].cost
    assert affordable(alike, 8) == pytest.approx(affordable(SMALL.cost, 8), rel=0.002)


def test_scoring_on_the_same_gpus_leaves_fewer_candidates():
    judged = TIMES["512 px, judged by the same GPUs"].cost
    assert iteration_seconds(judged, 0) == 420
    assert affordable(judged, 8) == pytest.approx(affordable(SMALL.cost, 8) * 107 / 167, rel=0.002)


def test_in_path_exploration_rolls_out_all_candidates():
    # Three times 512 images on 12 GPUs take as long as 512 on 4.
    assert in_path_seconds(SMALL.cost, 8, 144) == pytest.approx(107 + 253 + SYNC_SECONDS)
    assert in_path_seconds(SMALL.cost, 0, 144) == pytest.approx(3 * 107 + 253)


def test_waiting_for_candidates_costs_the_seconds_that_do_not_fit():
    assert waiting_seconds(SMALL.cost, 8, 192) == iteration_seconds(SMALL.cost, 8)
    # 3072 candidates of 0.940 GPU-s on 8 GPUs take 361.1 s, of which 252.8 are idle.
    assert waiting_seconds(SMALL.cost, 8, 288) - iteration_seconds(SMALL.cost, 8) == pytest.approx(108.3, abs=0.1)


# --- pools ------------------------------------------------------------------------------------------------------


@given(costs, st.integers(1, 64))
def test_a_candidate_pool_never_exceeds_what_is_affordable(cost, spot):
    pool = pool_of(affordable(cost, spot))
    if pool is None:
        assert affordable(cost, spot) < min(POOLS)
    else:
        candidates = pool * 512 / TRAINED
        idle = max(0.0, cost.train_seconds - cost.guard_seconds - cost.sync_seconds)
        assert candidates * cost.candidate_gpu_seconds <= spot * idle * (1 + 1e-9)


@given(costs, st.integers(1, 64), st.integers(0, 64))
def test_more_spot_never_lowers_the_pool(cost, spot, more):
    assert (pool_of(affordable(cost, spot + more)) or 0) >= (pool_of(affordable(cost, spot)) or 0)


@pytest.mark.parametrize(("candidates", "pool"), [(0, None), (71.9, None), (72, 72), (143.9, 120), (999, 432)])
def test_pools_are_rounded_down_and_capped(candidates, pool):
    assert pool_of(candidates) == pool


def test_every_candidate_pool_is_larger_than_the_kept_number():
    stale = modelled_cost.ARMS["stale"]
    assert not any(pool % stale.prompts for pool in (*POOLS, *IN_PATH_POOLS))
    assert min(POOLS) // stale.prompts > TRAINED // stale.prompts
    assert all(pool * 16 % TRAINED == 0 for pool in (*POOLS, *IN_PATH_POOLS))


# --- arms, hours and dollars ------------------------------------------------------------------------------------


def test_hours_and_dollars_by_hand():
    arms = arms_of(replace(SMALL.cost, sync_seconds=0.0), 8, LEARNED)
    assert arms["on-demand"].hours == pytest.approx([2.4, 3.8, 2.5])
    assert arms["on-demand"].rate(HALF_PRICE) == 24
    assert arms["on-demand"].dollars(HALF_PRICE) == pytest.approx([57.6, 91.2, 60.0])
    assert arms["stale"].pool == 192
    assert arms["stale"].rate(HALF_PRICE) == 4 * 6 + 8 * 3
    assert arms["stale"].dollars(HALF_PRICE) == pytest.approx([14 * (107 / 3 + 253) / 3600 * 48] * 3)
    assert arms["all on demand"].rate(HALF_PRICE) == 12 * 6
    assert arms["all on demand"].hours == arms["plain"].hours


def test_exploring_takes_no_time():
    arms = arms_of(SMALL.cost, 8, LEARNED)
    assert arms["stale"].seconds == arms["plain"].seconds == iteration_seconds(SMALL.cost, 8)
    assert arms["plain"].iterations == arms["on-demand"].iterations


def test_with_too_few_candidates_stale_equals_plain():
    assert affordable(LARGE.cost, 4) < min(POOLS)
    arms = arms_of(LARGE.cost, 4, LEARNED)
    assert arms["stale"] == arms["plain"]


def test_in_path_uses_the_faster_pool_of_the_cell():
    dear_rollouts = replace(SMALL.cost, rollout_gpu_seconds=20.0)
    assert arms_of(SMALL.cost, 8, LEARNED)["in-path"].pool == 144
    assert arms_of(dear_rollouts, 8, LEARNED)["in-path"].pool == 120


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize("spot", SPOT_GPUS)
@pytest.mark.parametrize("price", [*discounted(), HALF_PRICE], ids=lambda price: price.name)
def test_iterations_times_seconds_times_rate_is_the_cost(times, spot, price):
    cell = spot_cell(times, spot, price, LEARNED)
    for baseline in BASELINES:
        ratio = compare(cell.arms[baseline], cell.arms["stale"], price)
        assert product_error(ratio) < 1e-12
        assert ratio["iterations"]["mean"] * ratio["seconds"] == pytest.approx(ratio["time"]["mean"])
        assert ratio["cost"]["low"] <= ratio["cost"]["mean"] <= ratio["cost"]["high"]


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize("spot", SPOT_GPUS)
@pytest.mark.parametrize("price", discounted(), ids=lambda price: price.name)
def test_break_even_is_at_a_cost_ratio_of_one(times, spot, price):
    cell = spot_cell(times, spot, price, LEARNED)
    assert cell.break_even == pytest.approx(1 / relative_cost(times.cost, spot, price.discount))
    pays = spot_pays(1 / cell.mean("iterations"), relative_cost(times.cost, spot, price.discount))
    assert pays == (cell.mean("cost") > 1)


@pytest.mark.parametrize(
    ("pair", "verdict"), [([(9, 3), (10, 3)], "pays"), ([(3, 9), (3, 10)], "costs more"), ([(9, 3), (3, 9)], "open")]
)
def test_a_verdict_needs_the_whole_interval(pair, verdict):
    plain, stale = zip(*pair, strict=True)
    learned = Learned(plain=plain, in_path={120: plain}, stale={192: stale})
    assert spot_cell(SMALL, 8, discounted()[-1], learned).verdict == verdict


def test_remedies_take_no_more_time_than_stated():
    cell = spot_cell(LARGE, 4, HALF_PRICE, LEARNED)
    waits = waiting(cell, LEARNED).arms["stale"]
    assert waits.seconds == waiting_seconds(LARGE.cost, 4, waits.pool) if waits.pool else waits == cell.arms["plain"]
    cheap = cheaper_candidates(cell, LEARNED, candidate_share=0.5).arms["stale"]
    # 4 x 787.7 s / (5.066 x 0.625 GPU-s) = 995 candidates for 512, 93 for 48.
    assert (cheap.pool, cheap.seconds) == (72, cell.arms["plain"].seconds)


# --- prices -----------------------------------------------------------------------------------------------------


def test_prices_are_per_gpu_and_name_their_offer():
    assert [price.on_demand for price in discounted()] == [6.88] * 3
    assert [price.spot for price in discounted()] == pytest.approx([5.16, 3.44, 1.5824])
    by_name = {price.name: price for price in offered()}
    assert by_name["gcp us-east4"].discount == pytest.approx(1 - 19.19 / 87.83)
    assert all(0 < price.discount < 1 and price.source for price in offered())


# --- runs and the page ------------------------------------------------------------------------------------------


def made_up(name: str, arm: Arm, seed: int) -> Cell:
    """Return runs in which a larger pool is faster; the plain arm of seed 2 never reaches the target."""
    pool = (arm.candidates or SETTINGS.candidates) if arm.mode != "none" else TRAINED
    at = 20 - 3 * (pool // TRAINED) + seed if pool > TRAINED else (30 + seed if seed != 2 else SETTINGS.cap + 5)
    curve = {0: 0.47, at: 0.80} if at <= SETTINGS.cap else {0: 0.47, SETTINGS.cap: 0.70}
    return Cell(
        arm=name,
        seed=seed,
        curve=curve,
        wall_seconds=[],
        training_seconds=[],
        cpu_seconds={},
        stall_seconds=[],
        exploration_inside=None,
        ranking={},
        explored=[],
        manifests={},
        load1=0.0,
    )


def made_up_figures() -> Figures:
    return Figures(
        {name: {seed: made_up(name, arm, seed) for seed in (1, 2, 3)} for name, arm in learning_runs().items()}
    )


def test_cells_share_few_learning_runs():
    runs = learning_runs()
    assert set(runs) >= {"plain-6x8", "plain-12x4", "stale", "stale-144", "in-path", "in-path-144"}
    assert len(stale_pools()) <= 5
    assert runs["plain-6x8"] == modelled_cost.ARMS["plain-6x8"]
    assert runs["stale-144"] == replace(modelled_cost.ARMS["stale"], candidates=144)
    assert all(arm.candidates in (None, *POOLS) for arm in runs.values())


def test_a_page_can_be_written_from_made_up_runs():
    figures = made_up_figures()
    found = json.loads(json.dumps(figures.plain_json(), allow_nan=False))
    assert len(found["modelled_time_ratio"]) == 2 * len(SPOT_GPUS)
    assert len(found["modelled_cost_ratio"]) == 2 * len(SPOT_GPUS) * len(discounted()) == len(rows(figures))
    assert set(found["modelled_cost_ratio"]["512 px, 4+8, 50 % off"]["plain"]) == {"mean", "low", "high"}
    assert found["product_error"] < 1e-12
    assert found["censored"]["plain-6x8"] == 1
    assert max(found["iterations"]["plain-6x8"]) == SETTINGS.cap
    page = text(figures)
    assert "digits-ocr" in page
    assert "1280 px, 4+4" in page.split("so that `stale` is `plain`, in")[1].splitlines()[0]
    assert "nan" not in page
    assert found["arms"]["512 px, 4+8"]["stale"]["pool"] == 192
    assert found["curves"]["stale"]["1"].startswith("0:0.4700 ")


def test_conclusions_follow_the_runs():
    better = made_up_figures()
    nothing_gained = Figures(dict.fromkeys(better.by, better.by["plain-12x4"]))
    assert sum(cell.verdict == "pays" for cell in better.own) > sum(
        cell.verdict == "pays" for cell in nothing_gained.own
    )
    assert "512 px: stale on 4+12" in text(better)
    assert "512 px: on-demand on 4+0" in text(nothing_gained)


def test_at_1280_px_cheap_spot_pays_by_rollouts_alone():
    # (324 + 788) s at 4 + 4 x 0.23 is less than (648 + 788) s at 4; at 512 px it is more.
    same = (20.0, 30.0)
    nothing_gained = Learned(plain=same, in_path={120: same}, stale=dict.fromkeys(POOLS, same))
    cheap = discounted()[-1]
    assert spot_cell(LARGE, 4, cheap, nothing_gained).verdict == "pays"
    assert spot_cell(SMALL, 4, cheap, nothing_gained).verdict == "costs more"


def test_stored_runs_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "PIECES", tmp_path)
    monkeypatch.setattr(arms, "run", lambda name, arm, settings, seed, *, checked: made_up(name, arm, seed))
    for name, arm in learning_runs().items():
        assert not is_stored(name, arm, 2)
        modelled_cost.cell_of(name, arm, 2)
        assert is_stored(name, arm, 2)
        assert not is_stored(name, arm, 3)
