"""The rules of placement, each with a number checked by hand, and the closed forms of engine/exploration/value.py."""

from dataclasses import replace
from importlib.resources import files
from math import exp, inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.events import Market
from engine.exploration.value import selection_gain, variance_gain
from engine.trainer_ranks import RankLimits
from launcher.job.load import load_job
from launcher.job.recipe import GAIN_EXPONENTS
from launcher.job.resolved import resolve
from launcher.job.schema import Job
from launcher.market.estimate import Basis, Estimate
from launcher.market.evidence import Exposure, Life
from launcher.market.hazard import (
    POOLED,
    STEADY,
    HazardCurve,
    learn,
    prior_of,
    usual_odds,
)
from launcher.market.offers import read_catalog
from launcher.market.spells import chance_elsewhere
from launcher.money import HOUR_MS
from launcher.placement.cloud_plan import WhenSpotPays
from launcher.placement.forecast import GpusAtWork, progress, quickest
from launcher.placement.requirements import TrainerLosses, cloud_requirements, market_view, sites_of
from launcher.placement.value import (
    COOL_MOST_MS,
    FIND_HOURS,
    SWITCH_HOURS,
    NodeTerms,
    billed_hours,
    cools_until_ms,
    copies_micro_usd,
    cycle_hours,
    gpu_variance,
    is_first_hour_free,
    marginal_node,
    micro_usd_per_life,
    micro_usd_per_slot_hour,
    micro_usd_per_useful_hour,
    most_in_one_zone,
    square_root_rule,
    useful_hours,
    useful_share,
    value_of,
)
from tests.launcher.reference_recipe import verl_omni

USD = 1_000_000
MINUTE_MS = 60_000
ONE_AN_HOUR = HazardCurve(per_hour=(1.0,) * 8)

QUIET = NodeTerms(
    micro_usd_per_hour=3 * USD,
    hazards=STEADY,
    launch_odds=0.75,
    cold_start_hours=0.5,
    horizon_hours=2.0,
    lost_work_hours=0.0,
    first_hour_free=False,
)
"""A node at $3 an hour without hazard, with half an hour of cold start, wanted for two hours."""

HARSH = replace(QUIET, hazards=ONE_AN_HOUR)


# --- one node -----------------------------------------------------------------------------------------


def test_useful_hours_start_after_the_cold_start():
    assert useful_hours(QUIET) == 1.5
    assert useful_hours(HARSH) == pytest.approx(exp(-0.5) - exp(-2))  # .471
    assert useful_hours(replace(QUIET, cold_start_hours=5.0)) == 0


def test_every_hour_is_billed_unless_aws_preempts_in_the_first_hour():
    assert billed_hours(HARSH) == pytest.approx(1 - exp(-2))  # .865
    free = replace(HARSH, first_hour_free=True)
    assert billed_hours(free) == pytest.approx((1 - exp(-2)) - (1 - 2 * exp(-1)))  # .865 - .264 = .600
    assert billed_hours(replace(QUIET, first_hour_free=True)) == 2.0  # we terminated it, so all of it is billed


def test_a_node_wanted_for_less_than_an_hour_is_billed_only_if_it_survives():
    short = replace(HARSH, horizon_hours=0.5, first_hour_free=True)
    assert billed_hours(short) == pytest.approx(0.5 * exp(-0.5))


def test_the_first_hour_is_free_on_aws_spot_only():
    assert is_first_hour_free("aws", Market.SPOT)
    assert not is_first_hour_free("aws", Market.ON_DEMAND)
    assert not is_first_hour_free("gcp", Market.SPOT)


def test_a_useful_hours_cost_is_a_lifetimes_cost_over_its_useful_hours():
    assert micro_usd_per_life(QUIET) == 6 * USD
    assert micro_usd_per_useful_hour(QUIET) == pytest.approx(6 * USD / 1.5)
    assert micro_usd_per_useful_hour(replace(QUIET, cold_start_hours=2.0)) == inf


def test_work_lost_in_a_preemption_is_paid_for_again():
    lossy = replace(HARSH, lost_work_hours=0.2)
    extra = micro_usd_per_life(lossy) - micro_usd_per_life(HARSH)
    assert extra == pytest.approx(3 * USD * 0.2 * (1 - exp(-2)))  # w P(L < H)
    assert micro_usd_per_life(replace(QUIET, lost_work_hours=0.2)) == 6 * USD


def test_failed_launches_delay_a_slot():
    """With q = 3/4, on average a third of an attempt of 12.5 minutes fails before each success."""
    assert cycle_hours(QUIET) == pytest.approx(2 + 12.5 / 60 / 3)
    assert useful_share(QUIET) == pytest.approx(1.5 / (2 + 12.5 / 180))
    assert micro_usd_per_slot_hour(QUIET) == pytest.approx(6 * USD / (2 + 12.5 / 180))


@given(st.floats(0, 10), st.floats(0.05, 1), st.floats(0, 1), st.booleans())
def test_a_slot_is_never_useful_for_longer_than_the_run(hazard, odds, cold, free):
    terms = replace(
        QUIET,
        hazards=HazardCurve(per_hour=(hazard,) * 8),
        launch_odds=odds,
        cold_start_hours=cold,
        first_hour_free=free,
    )
    value = value_of(terms)
    assert 0 <= value.useful_share <= 1
    assert 0 <= value.micro_usd_per_hour <= terms.micro_usd_per_hour * (1 + 1e-9)
    assert 0 <= value.spread <= 0.5


@given(st.floats(0.1, 5), st.floats(0.1, 5))
def test_a_higher_hazard_makes_a_useful_hour_dearer(one, other):
    """The first hour is billed here. With a free first hour, an early preemption costs time, not money."""
    low, high = (replace(QUIET, hazards=HazardCurve(per_hour=(each,) * 8)) for each in sorted((one, other)))
    assert micro_usd_per_useful_hour(low) <= micro_usd_per_useful_hour(high) * (1 + 1e-9)


def test_a_useful_hour_never_gets_cheaper_with_a_higher_hazard():
    """All of 100 nodes were preempted within 15 minutes, on a cloud that does not bill them."""
    before = replace(QUIET, hazards=learn(POOLED, Exposure()).mean, launch_odds=0.64, first_hour_free=True)
    lives = [Life(ms=899_000, reclaimed=True, ended_ms=899_000)] * 100
    after = replace(before, hazards=learn(POOLED, Exposure.of(lives)).mean, launch_odds=0.99)
    assert micro_usd_per_useful_hour(after) > micro_usd_per_useful_hour(before)


SPOT = replace(QUIET, hazards=ONE_AN_HOUR, launch_odds=0.5, elsewhere=0.0, horizon_hours=48.0, cold_start_hours=8 / 60)
"""A slot in the only zone of a region: spells of an hour on average, and outages of as much."""


def test_a_slot_of_one_zone_waits_out_its_outages():
    """An hour up, an hour out: of the hour, the slot finds capacity after 6 minutes and works after 8 more."""
    assert cycle_hours(SPOT) == pytest.approx(2.0)
    assert useful_hours(SPOT) == pytest.approx(exp(-FIND_HOURS - 8 / 60))
    assert useful_share(SPOT) == pytest.approx(exp(-14 / 60) / 2)
    assert billed_hours(SPOT) == pytest.approx(exp(-FIND_HOURS))
    assert micro_usd_per_slot_hour(SPOT) == pytest.approx(3 * USD * exp(-FIND_HOURS) / 2)


def test_a_slot_with_another_zone_goes_there_and_meets_the_rest_of_its_spell():
    """Without memory the rest of a spell is as long as a whole one. Both zones are out for 1/4 of the time."""
    two = replace(SPOT, elsewhere=0.5)
    assert cycle_hours(two) == pytest.approx(1 / 0.75)
    up = 0.5 * exp(-SWITCH_HOURS) + 0.5 * exp(-FIND_HOURS)
    assert billed_hours(two) == pytest.approx(up)
    assert useful_share(two) == pytest.approx(up * exp(-8 / 60) * 0.75)


def test_the_rest_of_a_spell_is_longer_than_a_spell_where_hazards_fall_with_age():
    """Numerically: the integral of x S(x), over the mean."""
    hours = [n / 50 for n in range(30_000)]
    by_hand = sum(x * POOLED.curve.survives(x) / 50 for x in hours) / POOLED.curve.mean_life()
    assert POOLED.curve.mean_rest() == pytest.approx(by_hand, rel=0.001)
    assert POOLED.curve.mean_rest() > 3 * POOLED.curve.mean_life()
    assert ONE_AN_HOUR.mean_rest(1.0) == pytest.approx(1 - exp(-1))
    assert ONE_AN_HOUR.rests(1.0) == pytest.approx(exp(-1))
    assert STEADY.mean_rest(5.0) == 5.0


@pytest.mark.parametrize(
    ("accelerator", "gpus", "low", "high"), [("V100", 1, 0.41, 0.61), ("H100", 1, 0.41, 0.61), ("H100", 8, 0.36, 0.43)]
)
def test_a_slots_share_of_time_at_work_is_that_of_replays_of_recorded_zones(accelerator, gpus, low, high):
    """Our own cool-downs on recorded zones, each zone alone."""
    alone = replace(SPOT, hazards=prior_of(accelerator, gpus).curve, launch_odds=usual_odds(accelerator, gpus).mean)
    assert low <= useful_share(alone) <= high
    out = 1 - alone.launch_odds
    shares = [useful_share(replace(alone, elsewhere=chance_elsewhere(out, [out] * others))) for others in range(4)]
    assert shares == sorted(shares)


@given(st.floats(0.01, 1), st.floats(0, 1), st.floats(0.01, 20), st.floats(0, 1))
def test_a_slot_is_at_work_for_no_longer_than_there_is_capacity(odds, elsewhere, hazard, cold):
    terms = replace(
        SPOT,
        launch_odds=odds,
        elsewhere=elsewhere,
        hazards=POOLED.curve.scaled(hazard),
        cold_start_hours=cold,
        first_hour_free=True,
    )
    assert 0 <= useful_share(terms) <= 1 - (1 - odds) * (1 - elsewhere) + 1e-9
    assert 0 <= billed_hours(terms) <= cycle_hours(terms)


# --- number of nodes ----------------------------------------------------------------------------------


def test_the_square_root_rule_equals_that_of_the_notes():
    assert square_root_rule(6.0, 1.0, 3.5 * USD, 1.0 * USD) == pytest.approx(4.58, abs=0.01)


@given(st.floats(0.5, 50), st.floats(0.1, 5), st.floats(1, 50), st.floats(0.2, 10))
def test_the_square_root_rule_finds_the_cheapest_iteration(a, b, trainer, node):
    def cost(n: float) -> float:
        return (a / n + b) * (trainer + n * node)

    best = square_root_rule(a, b, trainer, node)
    assert cost(best) <= min(cost(best * 0.99), cost(best * 1.01))


def test_in_the_reference_recipe_rollouts_alone_pay_for_no_spot_node():
    """Each GPU is a node: 428 GPU-seconds, 253 s of training, 4 trainer GPUs at $7, spot at a discount of 69 %."""
    spot = 7 * USD * 0.31
    assert square_root_rule(428 / 3600, 253 / 3600, 28 * USD, spot, assist_nodes=4) == 0
    assert square_root_rule(428 / 3600, 25 / 3600, 28 * USD, spot, assist_nodes=4) == pytest.approx(8.3, abs=0.1)
    assert square_root_rule(6.0, 1.0, 3 * USD, 1 * USD, assist_nodes=4) == 0  # the trainer alone is worth four nodes


@given(st.floats(0.5, 50), st.floats(0.1, 5), st.floats(1, 50), st.floats(0.2, 10), st.floats(0, 8))
def test_the_rule_finds_the_cheapest_iteration_with_the_trainers_help(a, b, trainer, node, assist):
    def cost(n: float) -> float:
        return (a / (n + assist) + b) * (trainer + n * node)

    best = square_root_rule(a, b, trainer, node, assist) + (1e-9 if assist == 0 else 0)
    assert cost(best) <= min(cost(best * 0.99 + 1e-9), cost(best * 1.01 + 0.01)) * (1 + 1e-9)


@pytest.mark.parametrize(("rate", "pays"), [(12.49, True), (12.51, False)])
def test_a_node_pays_if_finishing_earlier_saves_more_than_it_costs(rate, pays):
    marginal = marginal_node(100.0, 80.0, 10 * USD, rate * USD)
    assert marginal.saved == 200 * USD
    assert marginal.paid == pytest.approx((rate - 10) * 80 * USD)
    assert marginal.pays is pays


# --- zones --------------------------------------------------------------------------------------------


def test_no_zone_has_more_than_half_of_the_nodes_if_others_exist():
    assert [most_in_one_zone(nodes, 3) for nodes in (0, 1, 2, 5, 8)] == [0, 1, 1, 3, 4]
    assert most_in_one_zone(5, 1) == 5


def test_correlated_preemptions_make_the_node_count_less_certain():
    assert gpu_variance([2], [0.5]) == pytest.approx(0.5 + 2 * 0.59 * 0.25)  # .795
    assert gpu_variance([1, 1], [0.5, 0.5]) == pytest.approx(0.5 + 2 * 0.42 * 0.25)  # .71
    assert gpu_variance([4], [0.0]) == 0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 3))
def test_one_more_node_never_makes_the_node_count_more_certain(nodes, zone):
    more = [count + (index == zone % len(nodes)) for index, count in enumerate(nodes)]
    spreads = [0.3] * len(nodes)
    assert gpu_variance(more, spreads) >= gpu_variance(nodes, spreads)


def test_a_zone_cools_down_longer_after_each_refusal():
    noon = 12 * HOUR_MS
    assert cools_until_ms([]) is None
    assert cools_until_ms([noon]) == noon + 10 * MINUTE_MS
    assert cools_until_ms([noon - HOUR_MS, noon]) == noon + 20 * MINUTE_MS
    assert cools_until_ms([noon - 9, noon - 5, noon]) == noon + 10 * MINUTE_MS  # one burst
    assert cools_until_ms([noon], jitter=1.0) == noon + 15 * MINUTE_MS
    assert cools_until_ms([noon - n * HOUR_MS for n in range(9)]) == noon + COOL_MOST_MS == noon + HOUR_MS // 2
    assert cools_until_ms([noon - 5], since_ms=noon) is None  # the zone had capacity since then


def test_weight_transfers_cost_what_their_traffic_costs():
    assert copies_micro_usd(40 * 10**9, 1, 100_000) == 4 * USD
    assert copies_micro_usd(380_000_000, 2) == pytest.approx(0.0152 * USD)


# --- time of an iteration -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spot", "seconds", "idle", "explorable", "per_prompt", "at_69", "at_77", "on_demand_69", "on_demand_77"),
    [
        (4, 306, 0.83, 1_211, 38, 1.12, 1.05, 0.66, 0.61),
        (8, 289, 0.88, 2_421, 76, 1.30, 1.17, 0.54, 0.49),
        (12, 280, 0.90, 3_632, 113, 1.50, 1.31, 0.48, 0.42),
    ],
)
def test_the_closed_forms_agree_with_the_table_of_the_notes(
    spot, seconds, idle, explorable, per_prompt, at_69, at_77, on_demand_69, on_demand_77
):
    """Worked out by hand. The tolerance is half a unit of the last printed digit or 1 %, whichever is larger."""
    recipe = verl_omni()
    found = recipe.seconds(spot)
    assert found == pytest.approx(seconds, rel=0.01)
    assert recipe.train_seconds / found == pytest.approx(idle, rel=0.01)
    assert spot * recipe.train_seconds / recipe.candidate_gpu_seconds == pytest.approx(explorable, rel=0.01)
    assert recipe.candidates_per_prompt(spot) == pytest.approx(per_prompt, rel=0.01, abs=1)  # the table rounds up
    for discount, ratio, to_on_demand in ((0.69, at_69, on_demand_69), (0.77, at_77, on_demand_77)):
        c = found * (4 + spot * (1 - discount)) / (recipe.seconds(0) * 4)
        assert c == pytest.approx(ratio, rel=0.01)
        assert (4 + spot * (1 - discount)) / (4 + spot) == pytest.approx(to_on_demand, rel=0.01)


def test_progress_is_averaged_over_the_time_with_each_number_of_gpus():
    """253 s of training, and 428 GPU-seconds on 4, 6, 8 or 12 GPUs. A node there for half of the time is no half."""
    recipe = verl_omni(explores=False)
    node = GpusAtWork(mean=2.0, variance=4.0, most=4.0)
    assert progress(recipe, node, 0.5).seconds == pytest.approx(1 / (0.5 / 360 + 0.5 / 306.5))
    half = progress(recipe, replace(node, variance=0.0), 0.5)
    assert half.seconds == pytest.approx(253 + 428 / 6)
    between = progress(recipe, replace(node, variance=2.0), 0.5).seconds
    assert half.seconds < between < progress(recipe, node, 0.5).seconds
    steady = GpusAtWork(mean=6.0, variance=4.0, fewest=4.0, most=8.0)
    assert progress(recipe, steady, 0.5).seconds == pytest.approx(1 / (0.5 / 306.5 + 0.5 / (253 + 428 / 12)))


def test_exploration_counts_only_while_its_gpus_are_there():
    recipe = verl_omni()
    always = progress(recipe, GpusAtWork(mean=8.0, most=8.0), 0.5)
    half = progress(recipe, GpusAtWork(mean=4.0, variance=16.0, most=8.0), 0.5)
    assert always.iterations_share == pytest.approx(recipe.iterations_share(75, 0.5))
    assert always.iterations_share < half.iterations_share < 1


@given(st.floats(0, 8), st.floats(0, 16), st.floats(0, 1))
def test_nothing_is_quicker_than_the_bound_of_a_search(mean, variance, exponent):
    recipe = verl_omni()
    gpus = GpusAtWork(mean=mean, variance=variance, most=8.0)
    bound = quickest(recipe, replace(gpus, mean=min(8.0, mean * 1.1)), exponent)
    assert bound.seconds <= progress(recipe, gpus, exponent).seconds * (1 + 1e-9)


def test_new_weights_are_waited_for_only_with_spot():
    recipe = replace(verl_omni(), sync_seconds=5.0)
    assert recipe.seconds(0) == pytest.approx(360)
    assert recipe.seconds(4) == pytest.approx(53.5 + 253 + 5)
    assert recipe.candidates_per_prompt(8) < verl_omni().candidates_per_prompt(8)


@pytest.mark.parametrize(
    "more", [{"candidate_gpu_seconds": 2.0}, {"guard_seconds": 150.0}, {"sync_seconds": 300.0}, {"max_candidates": 512}]
)
def test_no_gain_if_no_more_candidates_fit_than_are_trained(more):
    recipe = replace(verl_omni(), **more)
    assert recipe.candidates_per_prompt(4) == 0
    assert recipe.gain(0) == recipe.iterations_share(0, 0.5) == 1


def test_trained_candidates_leave_no_image_to_roll_out():
    """302 candidates a GPU fit beside 253 s of training, at 4 x 107 / 512 s each: one GPU makes 302 of 512 images."""
    again, trained = verl_omni(), replace(verl_omni(), trains_candidates=True)
    assert again.seconds(1) == pytest.approx(512 * 107 * 4 / 512 / 5 + 253)
    assert trained.seconds(1) == pytest.approx((512 - 302) * 107 * 4 / 512 / 5 + 253)
    assert trained.seconds(2) == pytest.approx(253)
    assert trained.seconds(0) == again.seconds(0) == 360
    assert replace(trained, explores=False).seconds(2) == again.seconds(2)


def test_a_job_trains_candidates_where_its_algorithm_and_profile_allow():
    nft = {"algorithm": {"name": "diffusion-nft"}}
    assert resolve(Job(**QWEN | nft)).recipe.trains_candidates
    assert not resolve(Job(**QWEN)).recipe.trains_candidates
    assert not resolve(Job(**QWEN | nft | {"exploration": {"trains": "rollouts"}})).recipe.trains_candidates


def test_another_trainer_type_scales_the_training_time():
    on_all = verl_omni(limits=RankLimits(most=8, sampling=8))
    assert on_all.on(8).seconds(0) == pytest.approx(180)
    assert on_all.on(4) == on_all


def test_a_trainer_counts_as_many_gpus_as_the_engine_trains_on():
    recipe = verl_omni(limits=RankLimits(most=1))
    assert recipe.on(8) == recipe.on(1)
    assert recipe.on(8).seconds(0) == pytest.approx(4 * 360)


def test_ranks_that_wait_take_no_part_in_rollouts():
    """8 ranks train for 1012 / 8 s, and one of them samples for 428 s."""
    recipe = verl_omni(limits=RankLimits(most=8, sampling=1))
    assert recipe.on(8).seconds(0) == pytest.approx(428 + 126.5)


def test_exploration_reduces_the_number_of_iterations():
    """8 spot GPUs allow 75 candidates a prompt, of which 16 are kept: gain 1 + .49 (V - 1)."""
    recipe = verl_omni()
    gain = variance_gain(0.7, selection_gain(16 / 75))
    assert recipe.iterations_share(75, 0.5) == pytest.approx(gain**-0.5)
    assert recipe.iterations_share(75, 0.0) == 1
    assert recipe.iterations_share(16, 0.5) == 1  # no choice between candidates
    assert replace(recipe, explores=False).candidates_per_prompt(8) == 0


def test_the_plan_states_what_spot_must_save():
    dear = WhenSpotPays(gpus=8, market="spot", cost_ratio=1.30, iterations_share=0.70)
    assert (dear.costs_more, dear.pays) == (True, True)
    assert dear.pays_below == pytest.approx(0.769, abs=0.001)
    assert dear.statement() == (
        "adding 8 spot GPUs (there on average) makes an iteration cost x1.30 of the trainer alone; it pays only if "
        "exploration saves more than 23% of the iterations (expected: 30%)"
    )
    assert "not expected: 10%" in replace(dear, iterations_share=0.9).statement()
    cheap = replace(dear, cost_ratio=0.8)
    assert not cheap.costs_more
    assert "pays by itself" in cheap.statement()


# --- from the job file --------------------------------------------------------------------------------

SAMPLER = {"steps": 10, "guidance": 4, "window": {"size": 2}}

QWEN = {
    "infra": "aws,gcp",
    "iterations": 200,
    "model": {"name": "qwen-image", "path": "there", "weights": "lora", "lora_rank": 32},
    "algorithm": {"prompts_per_batch": 16, "images_per_prompt": 8},
    "resources": {
        "trainer": {"accelerators": "H100:4", "infra": "aws/us-east-2"},
        "rollout": {"accelerators": "H100:1", "use_spot": True, "num_nodes": 12},
    },
    "budget": {"max_total": "$4,000", "max_hourly": "$150", "deadline": "3d"},
}


def test_a_job_file_sets_the_request_to_a_cloud():
    required = cloud_requirements(resolve(Job(**QWEN)))
    assert (required.trainer.infra, required.rollout.gpus, required.max_rollout_nodes) == ("aws/us-east-2", 1, 12)
    assert required.trainer_gpus_named == 4
    gpus = {
        most: cloud_requirements(resolve(Job(**QWEN), limits=RankLimits(most=most))).trainer.gpus for most in (1, 2, 64)
    }
    assert gpus == {1: 1, 2: 2, 64: 4}
    assert (required.max_total_micro_usd, required.max_hourly_micro_usd) == (4_000 * USD, 150 * USD)
    assert required.deadline_ms == 72 * HOUR_MS
    assert required.clouds == ("aws", "gcp")
    assert cloud_requirements(resolve(Job(**QWEN | {"spot": "never"}))).spot.value == "never"


def test_a_recipe_is_of_the_jobs_batch_and_of_measured_seconds():
    """A pass of Qwen-Image takes .0481 s an image, and a row of 22 in a pass 6.07 passes."""
    recipe = resolve(Job(**QWEN | {"sampler": SAMPLER, "model": QWEN["model"] | {"max_text_tokens": 256}})).recipe
    one = 2 * 0.0481  # with guidance
    assert recipe.iterations.mean == 200
    assert recipe.sampling_gpus == 1
    assert recipe.rollout_gpu_seconds == pytest.approx(10 * one + 0.02 * 512**2 / 1e6)
    rows = 16 * 8 * 2  # 128 images, 2 trained steps each; after the first of 2 updates, a pass of the old policy
    assert recipe.train_seconds == pytest.approx(rows * one * (6.07 + 1.75 / 2))
    assert "passes measured (spotrl on one H100, 2026-11-22" in recipe.source
    assert "training measured (spotrl on one H100, 2026-11-26" in recipe.source
    assert recipe.never_run


def test_a_copy_of_the_weights_has_the_bytes_of_the_memory_forecast():
    """720 adapters: 60 blocks, both streams, 4 projections of 3072 x 3072 and 2 between 3072 and 12288.

    The trainer has adapters in fp32 and sends them in bf16. Other weights are sent in fp32.
    """
    adapters = 60 * 2 * 64 * (4 * (3072 + 3072) + 2 * (3072 + 12288)) * 4
    rank_64 = Job(**QWEN | {"model": QWEN["model"] | {"lora_rank": 64}})
    assert resolve(rank_64).recipe.copy_bytes == adapters // 2 == 849_346_560
    assert resolve(Job(**QWEN)).recipe.copy_bytes == adapters // 4
    assert resolve(rank_64).memory.trainer.parts["adapters"] == adapters
    full = Job(**QWEN | {"model": {"name": "qwen-image", "path": "there"}})
    assert resolve(full).recipe.copy_bytes == 20_430_401_088 * 4
    assert resolve(Job(**QWEN | {"model": {"name": "digits-ocr"}})).recipe.copy_bytes == pytest.approx(5.6e6, rel=0.01)


def test_seconds_follow_the_gpu_the_size_and_the_algorithm():
    def cost(model, gpu, **more):
        resources = {role: {"accelerators": f"{gpu}:1"} for role in ("trainer", "rollout")}
        job = {
            "model": {"path": "sd3.5-medium" if model["name"] == "sd3" else "there", "weights": "lora"} | model,
            "infra": "aws",
            "resources": resources,
        }
        return resolve(Job(**job | more)).recipe

    on_h100, on_l40s = (cost({"name": "sd3"}, gpu) for gpu in ("H100", "L40S"))
    assert on_l40s.rollout_gpu_seconds > 1.5 * on_h100.rollout_gpu_seconds
    large = cost({"name": "flux", "height": 1024, "width": 1024}, "H100")
    assert large.rollout_gpu_seconds > 3 * cost({"name": "flux"}, "H100").rollout_gpu_seconds
    flow = cost({"name": "flux"}, "H100", algorithm={"name": "flow-grpo"})
    all_levels = {"name": "diffusion-nft", "diffusion_nft": {"levels": {"from": "all"}}}
    assert cost({"name": "flux"}, "H100", algorithm=all_levels).train_seconds > flow.train_seconds
    assert cost({"name": "flux"}, "H100", algorithm={"name": "diffusion-nft"}).train_seconds < flow.train_seconds


def test_an_untimed_recipe_is_planned_as_configured_and_marked_a_guess():
    job = Job(**QWEN | {"model": {"name": "digits-ocr"}})
    assert any("nobody has timed digits-ocr on H100" in sentence for sentence in resolve(job).recipe.never_run)
    assert resolve(job).recipe.iterations.high == job.iterations
    assert cloud_requirements(resolve(job)).min_rollout_nodes == 12
    assert cloud_requirements(resolve(Job(**QWEN))).min_rollout_nodes == 0
    nodes = {role: QWEN["resources"][role] | {"accelerators": "T4:1"} for role in ("trainer", "rollout")}
    unknown = Job(**QWEN | {"resources": nodes})
    assert any("nobody has timed qwen-image on" in sentence for sentence in resolve(unknown).recipe.never_run)


def test_a_job_may_insist_on_rollout_nodes():
    rollout = QWEN["resources"]["rollout"] | {"min_nodes": 3}
    job = Job(**QWEN | {"resources": QWEN["resources"] | {"rollout": rollout}})
    assert cloud_requirements(resolve(job)).min_rollout_nodes == 3


def test_exploration_saves_less_with_diffusion_nft():
    by_name = {
        name: resolve(Job(**QWEN | {"algorithm": {"name": name}})).recipe.gain_exponent
        for name in ("flow-grpo", "grpo-guard", "flow-dppo", "diffusion-nft", "awm", "auto")
    }
    for name, like in (("flow-dppo", "flow-grpo"), ("awm", "diffusion-nft")):
        assert by_name[name].mean == by_name[like].mean
        assert by_name[name].source.startswith(f"{name} was not measured and counts as {like}: assumed")
    assert by_name["diffusion-nft"].mean < by_name["grpo-guard"].mean
    assert by_name["auto"] == by_name["diffusion-nft"]


def test_every_assumption_of_a_recipe_is_named():
    recipe = resolve(Job(**QWEN)).recipe
    for estimate in (recipe.iterations, recipe.gain_exponent, *GAIN_EXPONENTS.values()):
        assert isinstance(estimate, Estimate)
        assert estimate.basis is Basis.ASSUMED
        assert "assumed" in estimate.source or "half and twice" in estimate.source
        assert estimate.low <= estimate.mean <= estimate.high


# --- a trainer on spot --------------------------------------------------------------------------------


def losses(share: float = 0.45, deadline_hours: float = inf) -> TrainerLosses:
    return TrainerLosses(share=share, life_hours=2.0, checkpoint_every=2, deadline_hours=deadline_hours)


def test_a_loss_costs_half_of_the_work_between_checkpoints_and_a_change():
    assert losses().slower(1800.0) == pytest.approx(1 + 0.45 * (2 * 0.5 / 2 + 0.2) / 2.0)


def test_a_trainer_waits_for_spot_as_long_as_its_deadline_allows():
    assert losses().on_demand(12.0) == 0
    assert losses().hours(12.0) == pytest.approx(12 / 0.45)
    assert losses(deadline_hours=72.0).on_demand(12.0) == pytest.approx(0.55 * 2 * 12 / 72)
    late = losses(deadline_hours=15.0)  # 6.75 of the 15 h have spot
    assert late.on_demand(12.0) == pytest.approx(max(0.55, 1 - 6.75 / 12))
    assert late.hours(12.0) == 15.0
    assert losses(deadline_hours=6.0).hours(12.0) == 12.0, "no less than the work"


@given(st.floats(0.05, 1), st.floats(0.1, 50), st.floats(1, 200))
def test_a_later_deadline_never_needs_more_on_demand(share, work_hours, deadline_hours):
    tight, loose = (losses(share, deadline) for deadline in (deadline_hours, 2 * deadline_hours))
    assert 0 <= loose.on_demand(work_hours) <= tight.on_demand(work_hours) <= 1
    assert tight.hours(work_hours) <= loose.hours(work_hours) + 1e-9


def test_a_run_that_buys_nothing_on_demand_waits_whatever_the_deadline():
    def losses_of(spot: str) -> TrainerLosses:
        job = load_job(
            Path(str(files("sky_yamls") / "qwen_image_ocr.yaml")),
            {"spot": spot, "runtime.name": "local", "resources.trainer.use_spot": True, "budget.deadline": "3d"},
        ).job
        sites, _ = sites_of(cloud_requirements(resolve(job)), market_view(read_catalog(), now_ms=1_795_348_800_000))
        return sites[0].trainer_losses

    assert losses_of("auto").deadline_hours == 72
    assert losses_of("only").on_demand(30.0) == 0
