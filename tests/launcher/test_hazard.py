"""Hazard of spot nodes by age: the formulas checked by hand, and the effect of evidence from a ledger."""

from dataclasses import replace
from math import exp, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import gamma

from launcher.ledger.exposure import pool_histories
from launcher.ledger.models import NodeEvent
from launcher.market.advice import cloud_priors
from launcher.market.estimate import Basis
from launcher.market.evidence import (
    BUCKET_STARTS_MS,
    DISPERSION,
    HALF_LIFE_MS,
    Exposure,
    Life,
    lives_of_trace,
    weighed,
)
from launcher.market.hazard import (
    BURST_MS,
    H100_HAZARDS,
    POOLED,
    PRIOR_LAUNCHES,
    STEADY,
    Z90,
    HazardCurve,
    LaunchOdds,
    PoolHistory,
    bursts,
    cold_start,
    gamma_quantile,
    learn,
    odds_of_obtainability,
    prior_after,
    prior_of,
    prior_of_preemption_rate,
    prior_of_uptime,
    usual_odds,
)
from launcher.market.pools import OTHER_REGION, SAME_REGION, SAME_ZONE, Pool, correlation
from launcher.market.prices import AdviceKind, CapacityAdvice
from launcher.market.recorded import bamboo_prior, recorded_lives
from launcher.market.recorded_h100 import HAZARD_FACTORS, SHARES, SHARES_IN
from launcher.placement.requirements import market_view
from launcher.replay.readers import read_folder
from tests.benchmarks.calibration import TRACES, fitted_hazards, fitted_sizes
from tests.benchmarks.replay import FITTED_ON
from tests.launcher.made_ledger import HOUR_MS, MINUTE_MS, START_MS, a_run, a_session

EAST_A = Pool(cloud="aws", region="us-east-1", zone="us-east-1a", instance_type="g6.xlarge")

ONE_AN_HOUR = HazardCurve(per_hour=(1.0,) * 8)


def life(ms: int, reclaimed: bool = True, ended_ms: int | None = None) -> Life:
    return Life(ms=ms, reclaimed=reclaimed, ended_ms=ms if ended_ms is None else ended_ms)


hazards = st.lists(st.floats(0, 20), min_size=8, max_size=8).map(lambda each: HazardCurve(per_hour=tuple(each)))
lives = st.lists(
    st.builds(Life, ms=st.integers(0, 60 * HOUR_MS), reclaimed=st.booleans(), ended_ms=st.just(61 * HOUR_MS)),
    max_size=12,
)


# --- survival -----------------------------------------------------------------------------------------


def test_a_constant_hazard_is_the_exponential_law():
    assert ONE_AN_HOUR.survives(1.0) == pytest.approx(exp(-1))
    assert ONE_AN_HOUR.taken_within(2.0) == pytest.approx(1 - exp(-2))
    assert ONE_AN_HOUR.mean_life(2.0) == pytest.approx(1 - exp(-2))
    assert ONE_AN_HOUR.mean_life() == pytest.approx(1.0)


def test_the_hazard_changes_with_age():
    curve = HazardCurve(per_hour=(4.0, 2.0, 0, 0, 0, 0, 0, 0))
    assert curve.survives(0.25) == pytest.approx(exp(-1))
    assert curve.survives(0.5) == pytest.approx(exp(-1.5))
    assert curve.survives(40.0) == pytest.approx(exp(-1.5))  # a node that lives half an hour lives on


def test_on_demand_nodes_have_no_hazard():
    assert STEADY.mean_life(24.0) == 24.0
    assert STEADY.taken_within(24.0) == 0.0


def test_most_nodes_of_the_recorded_zones_are_preempted_in_an_hour():
    """With the pooled hazards of nine AWS V100 zones, 63 % of nodes end within an hour, as there."""
    within_an_hour = learn(POOLED, Exposure()).taken_within(1.0)
    assert within_an_hour.mean == pytest.approx(0.63, abs=0.02)
    assert within_an_hour.low < 0.4 < 0.8 < within_an_hour.high  # two prior preemptions have little weight
    assert (within_an_hour.events, within_an_hour.exposure_ms, within_an_hour.basis) == (0, 0, Basis.PRIOR)
    assert "V100" in within_an_hour.source


@settings(deadline=None)
@given(hazards, st.floats(0.01, 10))
def test_the_mean_lifetime_is_the_area_under_survival(curve, until):
    steps = 1000
    area = sum(curve.survives((step + 0.5) * until / steps) for step in range(steps)) * until / steps
    assert curve.mean_life(until) == pytest.approx(area, rel=0.02, abs=0.02)


@given(hazards, st.floats(0, 50), st.floats(0, 50))
def test_survival_never_rises(curve, one, other):
    assert curve.survives(max(one, other)) <= curve.survives(min(one, other)) <= 1
    assert curve.mean_life(min(one, other)) <= curve.mean_life(max(one, other)) + 1e-12


# --- evidence -----------------------------------------------------------------------------------------


def test_a_lifetime_counts_as_exposure_in_every_age_bucket():
    seen = Exposure.of(
        [
            life(40 * MINUTE_MS, True),
            life(10 * MINUTE_MS, False),
        ]
    )
    assert seen.ms == tuple(minutes * MINUTE_MS for minutes in (25, 15, 10, 0, 0, 0, 0, 0))
    assert seen.reclaims == (0, 0, 1, 0, 0, 0, 0, 0)


def test_the_end_of_an_age_bucket_is_the_start_of_the_next():
    assert Exposure.of([life(15 * MINUTE_MS, True)]).reclaims[:2] == (0, 1)
    assert Exposure.of([life(100 * HOUR_MS, True)]).reclaims[-1] == 1


@given(lives)
def test_exposure_loses_no_millisecond(some):
    seen = Exposure.of(some)
    assert sum(seen.ms) == sum(life.ms for life in some)
    assert sum(seen.reclaims) == sum(life.reclaimed for life in some)
    halves = Exposure.of(some[: len(some) // 2]) + Exposure.of(some[len(some) // 2 :])
    assert halves == seen


def test_the_hazard_is_prior_plus_preemptions_over_all_node_hours():
    seen = Exposure(ms=(HOUR_MS, *(0,) * 7), reclaims=(5, *(0,) * 7))
    learnt = learn(POOLED, seen)
    factor = (2 + 5) / (2 + 1.27)
    assert learnt.mean.per_hour[0] == pytest.approx((8 + 5) / (8 / (factor * 1.27) + 1))  # 3.30
    assert learnt.mean.per_hour[1:] == pytest.approx([factor * hazard for hazard in POOLED.curve.per_hour[1:]])
    hazard = learnt.hazard(0.1)
    assert (hazard.events, hazard.exposure_ms, hazard.basis) == (5, HOUR_MS, Basis.MEASURED)
    assert hazard.low < hazard.mean < hazard.high


@given(lives, st.integers(1, 5), st.integers(0, 7))
def test_preemptions_raise_the_hazard_and_quiet_hours_lower_it(some, count, bucket):
    seen = Exposure.of(some)
    more = Exposure(reclaims=tuple(count if index == bucket else 0 for index in range(8)))
    quiet = Exposure(ms=tuple(count * HOUR_MS if index == bucket else 0 for index in range(8)))
    before = learn(POOLED, seen).mean.per_hour[bucket]
    assert learn(POOLED, seen + more).mean.per_hour[bucket] > before
    assert learn(POOLED, seen + quiet).mean.per_hour[bucket] < before


def test_much_evidence_narrows_the_interval_and_outweighs_the_prior():
    hours = 400
    seen = Exposure(ms=(hours * HOUR_MS,) * 8, reclaims=(hours // 2,) * 8)
    little, much = learn(POOLED, Exposure()).hazard(5.0), learn(POOLED, seen).hazard(5.0)
    assert much.mean == pytest.approx(0.5, rel=0.1)  # the factor of the whole pool pulls a little
    widths = [(each.high - each.low) / each.mean for each in (much, little)]
    assert 0.75 * widths[1] > widths[0] > 1  # never certain: next week may differ


@pytest.mark.parametrize("shape", [1.0, 2.0, 6.0, 50.0])
def test_the_interval_has_the_quantiles_of_a_gamma(shape):
    assert gamma_quantile(shape, Z90) == pytest.approx(gamma.ppf(0.95, shape), rel=0.01)
    assert gamma_quantile(shape, -Z90) == pytest.approx(gamma.ppf(0.05, shape), rel=0.05, abs=0.02)


def test_a_burst_of_preemptions_counts_as_one_event():
    one = weighed([life(HOUR_MS)], HOUR_MS)
    six = weighed([life(HOUR_MS)] * 6, HOUR_MS)
    assert sum(one.preemptions) == pytest.approx(1 / DISPERSION)
    assert six.preemptions == pytest.approx(one.preemptions)
    assert six.hours == pytest.approx(one.hours)
    half = weighed([life(HOUR_MS)] * 3 + [life(HOUR_MS, reclaimed=False)] * 3, HOUR_MS)
    assert sum(half.preemptions) == pytest.approx(0.5 / DISPERSION)
    one_by_one = [life(HOUR_MS, ended_ms=hour * HOUR_MS) for hour in range(1, 7)]
    in_turn = weighed(one_by_one, 6 * HOUR_MS, half_life_ms=10**18)
    assert sum(in_turn.preemptions) == pytest.approx(6 / DISPERSION)


@given(lives)
def test_weights_keep_the_ratio_of_preemptions_to_hours_of_a_gang(some):
    gang = [life(HOUR_MS, each.reclaimed) for each in some]
    seen, raw = weighed(gang, HOUR_MS), Exposure.of(gang)
    assert sum(seen.preemptions) * sum(raw.ms) / HOUR_MS == pytest.approx(sum(seen.hours) * sum(raw.reclaims))


def test_evidence_fades_and_old_evidence_yields_to_the_prior():
    bad = [life(10 * MINUTE_MS, ended_ms=hour * HOUR_MS) for hour in range(1, 31)]
    now, later = weighed(bad, 30 * HOUR_MS), weighed(bad, 30 * HOUR_MS + HALF_LIFE_MS)
    assert later.preemptions == pytest.approx([count / 2 for count in now.preemptions])
    pool = PoolHistory(pool=EAST_A, lives=tuple(bad))
    chances = [pool.survival(POOLED, at * HALF_LIFE_MS).taken_within(1.0).mean for at in (1, 4, 52)]
    prior = learn(POOLED, Exposure()).taken_within(1.0).mean
    assert chances[0] > chances[1] > chances[2] == pytest.approx(prior, abs=0.01)


def test_pools_of_a_region_and_instance_type_share_what_they_saw():
    bad = tuple(life(10 * MINUTE_MS, ended_ms=hour * HOUR_MS) for hour in range(1, 31))
    here = PoolHistory(pool=EAST_A)
    near = [PoolHistory(pool=replace(EAST_A, zone=f"us-east-1{zone}"), lives=bad) for zone in "bc"]
    other = PoolHistory(pool=replace(EAST_A, instance_type="p5.48xlarge"), lives=bad)
    market = market_view((), [here, *near, other], now_ms=30 * HOUR_MS)
    alone = market_view((), [here, other], now_ms=30 * HOUR_MS)
    shared, unshared = (view.survival[EAST_A].taken_within(1.0) for view in (market, alone))
    assert unshared.mean == learn(POOLED, Exposure()).taken_within(1.0).mean
    assert shared.mean > unshared.mean + 0.1
    assert market.survival[near[0].pool].taken_within(1.0).mean > shared.mean  # its own lives say more
    assert shared.basis is Basis.PRIOR  # nothing of its own was seen


def test_pools_of_eight_gpus_and_of_h100_have_priors_of_their_own():
    one, eight = prior_of("V100", 1), prior_of("V100", 8)
    assert one is POOLED
    assert eight.curve.per_hour[0] == pytest.approx(1.15 * one.curve.per_hour[0])
    assert prior_of("V100", 3).curve == prior_of("V100", 4).curve
    assert prior_of("V100", 16).curve == eight.curve
    assert prior_of("H100", 8).curve.survives(1.0) < prior_of("H100", 1).curve.survives(1.0) < one.curve.survives(1.0)


def test_the_h100_prior_is_the_fit_of_the_named_recording():
    traces, _ = read_folder(TRACES, now_s=2e9)
    (fitted,) = [trace for trace in traces if trace.name in FITTED_ON]
    assert fitted_hazards(fitted) == pytest.approx(H100_HAZARDS, abs=0.006)
    sizes = fitted_sizes(fitted)
    assert [row["hazard_factor"] for row in sizes] == pytest.approx(HAZARD_FACTORS, abs=0.006)
    assert [row["share"] for row in sizes] == pytest.approx(SHARES, abs=0.006)
    for region, shares in SHARES_IN.items():
        assert [row["shares"][region] for row in sizes] == pytest.approx(shares, abs=0.006)
    assert sizes[0]["shares"].keys() == SHARES_IN.keys()


def test_a_recorded_region_has_a_prior_of_its_own_halfway_to_that_of_all():
    def prior(*node):
        return usual_odds(*node).mean

    assert prior("H100", 8, "gcp", "us-central1") == pytest.approx((0.45 + 0.55) / 2)
    assert prior("H100", 8, "gcp", "europe-west3") == pytest.approx(0.45 / 2)
    assert prior("h100", 1, "gcp", "asia-south2") == pytest.approx((0.64 + 1) / 2)
    for elsewhere in (
        ("H200", 8, "gcp", "us-central1"),
        ("H100", 8, "aws", "us-east-1"),
        ("H100", 8, "gcp", "us-west9"),
    ):
        assert prior(*elsewhere) == 0.45
    assert "us-central1" in usual_odds("H100", 8, "gcp", "us-central1").estimate().source


# --- other evidence -----------------------------------------------------------------------------------


def test_a_clouds_estimated_uptime_is_the_median_lifetime():
    advised = prior_of_uptime(POOLED, 6.0, "GCP AdviceClient.capacity")
    assert advised.curve.survives(6.0) == pytest.approx(0.5)
    assert advised.basis is Basis.REPORTED
    assert advised.curve.per_hour[0] / advised.curve.per_hour[-1] == pytest.approx(
        1.27 / 0.06
    )  # the shape over age stays


@pytest.mark.parametrize("rate", [1e-9, 0.01, 0.05])
def test_a_low_advised_rate_is_weak_evidence_and_never_certainty(rate):
    preempted = Exposure.of([life(10 * MINUTE_MS)] * 50)
    advised = prior_of_preemption_rate(POOLED, rate, 4.0, "GCP")
    before = learn(advised, Exposure()).taken_within(1.0)
    assert 0.1 < before.mean < learn(POOLED, Exposure()).taken_within(1.0).mean
    assert before.low < before.mean < before.high
    learnt = learn(advised, preempted).taken_within(1.0)
    assert learnt.mean == pytest.approx(learn(POOLED, preempted).taken_within(1.0).mean, abs=0.05)
    assert learnt.low > 0.5


def test_a_published_rate_of_0_is_an_unset_field():
    """A rate of 0 that cannot be unlearnt: 50 preempted nodes once left 1 % where the prior learns 98 %."""
    advice = [advised(AdviceKind.PREEMPTION_RATE, 0.0)]
    assert cloud_priors(advice, now_ms=10).priors == {}
    pool = Pool(cloud="gcp", region="r", zone="z", instance_type="i")
    lives = tuple(life(10 * MINUTE_MS, ended_ms=at * HOUR_MS) for at in range(1, 51))
    history = PoolHistory(pool=pool, lives=lives)
    advised_market = market_view((), [history], now_ms=50 * HOUR_MS, priors=cloud_priors(advice, now_ms=10).priors)
    assert advised_market.survival[pool].taken_within(1.0).mean > 0.9


def test_a_preemption_rate_needs_the_running_time_of_instances():
    short = prior_of_preemption_rate(POOLED, 0.3, 1.0, "GCP")
    long = prior_of_preemption_rate(POOLED, 0.5, 12.0, "GCP")
    assert short.curve.taken_within(1.0) == pytest.approx(0.3)
    assert long.curve.taken_within(12.0) == pytest.approx(0.5)
    assert short.curve.per_hour[0] > long.curve.per_hour[0]


def advised(kind: AdviceKind, value: float, at_ms: int = 1) -> CapacityAdvice:
    return CapacityAdvice(
        cloud="gcp",
        region="r",
        zone="z",
        instance_type="i",
        kind=kind,
        value=value,
        from_ms=0,
        until_ms=at_ms,
        observed_ms=at_ms,
        source="AdviceClient",
    )


def test_the_newest_credible_advice_counts_and_uptime_precedes_a_rate():
    pool = Pool(cloud="gcp", region="r", zone="z", instance_type="i")
    advice = [
        advised(AdviceKind.UPTIME_HOURS, 2.0, at_ms=1),
        advised(AdviceKind.UPTIME_HOURS, 6.0, at_ms=2),
        advised(AdviceKind.UPTIME_HOURS, -1.0, at_ms=3),
        advised(AdviceKind.PREEMPTION_RATE, 0.9, at_ms=9),
        advised(AdviceKind.OBTAINABILITY, 0.8),
    ]
    for order in (advice, advice[::-1]):
        believed = cloud_priors(order, now_ms=10)
        assert believed.priors[pool].curve.survives(6.0) == pytest.approx(0.5)
        assert believed.odds[pool].mean == pytest.approx(0.8)
    (rate,) = cloud_priors([advised(AdviceKind.PREEMPTION_RATE, 0.3)], now_ms=10, run_hours=2.0).priors.values()
    assert rate.curve.taken_within(2.0) == pytest.approx(0.3)
    assert "assumed" in rate.source


def test_lifetimes_are_read_from_a_trace():
    """b still runs at the end, 20 minutes after its start; c started before the trace and is not counted."""
    lines = ["0,add,a", "600000,add,b", "900000,remove,a", "900000,remove,c", "", "1800000,add,d"]
    assert lives_of_trace(lines) == (
        life(900_000, True),
        life(1_200_000, False, 1_800_000),
        life(0, False, 1_800_000),
    )


def test_the_shipped_trace_moves_the_prior_but_not_its_weight():
    counts = [life.reclaimed for life in recorded_lives()]
    assert (counts.count(True), counts.count(False)) == (167, 10)
    prior = bamboo_prior()
    assert (prior.basis, prior.reclaims) == (Basis.REPLAYED, POOLED.reclaims)
    moved = prior_after(POOLED, Exposure.of([life(HOUR_MS, False)] * 100), "a quiet trace")
    assert moved.curve.per_hour[0] < POOLED.curve.per_hour[0]


def test_launch_outcomes_are_added_to_the_prior_odds():
    assert LaunchOdds().mean == pytest.approx(0.64)
    assert LaunchOdds(successes=1).mean == pytest.approx((1.28 + 2 / 3) / (2 + 2 / 3))
    refused = LaunchOdds(failures=8).estimate()
    assert refused.mean == pytest.approx(1.28 / 3.6)
    assert (refused.events, refused.basis) == (8, Basis.MEASURED)
    assert 0 < refused.low < refused.mean < refused.high <= 1
    assert LaunchOdds(successes=400).estimate().mean == pytest.approx((0.64 + 1) / 2, abs=0.001)  # half at most


@pytest.mark.parametrize("launches", [2, 10, 1000])
def test_launches_move_an_uptime_and_do_not_narrow_its_interval(launches):
    """The next days of a zone are known no better by a thousand launches than by the prior."""
    said = LaunchOdds(successes=launches // 2, failures=launches // 2).estimate()
    half = Z90 * sqrt(said.mean * (1 - said.mean) / (PRIOR_LAUNCHES + 1))
    assert said.mean - said.low == pytest.approx(half)
    assert said.high == pytest.approx(min(1.0, said.mean + half))


def test_a_clouds_capacity_advice_counts_before_the_first_launch():
    advised = odds_of_obtainability(0.9, "GCP AdviceClient.capacity")
    pool = Pool(cloud="gcp", region="r", zone="z", instance_type="i")
    history = PoolHistory(pool=pool, launches=1, stock_outs_ms=(5, 6 + BURST_MS))
    assert advised.estimate().basis is Basis.REPORTED
    assert history.odds(advised).mean == pytest.approx((1.8 + 1.2 / 3) / 3.2)


def test_a_burst_of_refusals_lowers_the_odds_like_one_refusal():
    pool = Pool(cloud="aws", region="r", zone="z", instance_type="i")
    burst = PoolHistory(pool=pool, stock_outs_ms=tuple(range(0, 8000, 1000)))
    assert burst.odds().mean == PoolHistory(pool=pool, stock_outs_ms=(0,)).odds().mean


def test_nodes_requested_before_a_bursts_first_answer_belong_to_the_burst():
    assert bursts([]) == 0
    assert bursts([(0, 9000), (1000, 200_000), (30_000, 31_000)]) == 1
    assert bursts([(0, 9000), (9000 + BURST_MS, 80_000)]) == 2
    assert bursts([(0, 0), (20_000, 21_000), (40_000, 41_000)], within_ms=10_000) == 3


def test_a_cold_start_is_the_mean_of_the_observed_and_two_prior_ones():
    seen = cold_start([2 * MINUTE_MS])
    assert seen.mean == pytest.approx(6 * MINUTE_MS)
    assert (seen.events, seen.basis) == (1, Basis.MEASURED)
    assert cold_start().basis is Basis.ASSUMED
    assert cold_start([6 * MINUTE_MS] * 50).high - cold_start([6 * MINUTE_MS] * 50).low < 3 * MINUTE_MS


def test_the_correlation_of_losses_depends_on_zone_and_region():
    def pool(region: str, zone: str, cloud: str = "aws") -> Pool:
        return Pool(cloud=cloud, region=region, zone=zone, instance_type="i")

    assert correlation(pool("east", "a"), pool("east", "a")) is SAME_ZONE
    assert correlation(pool("east", "a"), pool("east", "b")) is SAME_REGION
    assert correlation(pool("east", "a"), pool("west", "a")) is OTHER_REGION
    assert correlation(pool("east", "a"), pool("east", "a", "gcp")) is OTHER_REGION
    assert OTHER_REGION.mean == 0.14
    assert (SAME_REGION.low, SAME_REGION.high) == (0.25, 0.59)


# --- from the ledger ----------------------------------------------------------------------------------


def a_bought_run(session):
    made = a_run(session)
    made.run.infra = "aws"
    return made


def test_lifetimes_and_their_ends_are_read_from_the_ledger():
    with a_session() as session:
        made = a_bought_run(session)
        lost = made.node("spot-0", 1, up=0, end=20 * MINUTE_MS)
        made.preempted(lost, 20 * MINUTE_MS)
        let_go = made.node("spot-0", 2, up=30 * MINUTE_MS, end=150 * MINUTE_MS)
        session.add(NodeEvent(node_id=let_go.id, at_ms=START_MS + 150 * MINUTE_MS, kind="released"))
        session.flush()
        history = pool_histories(session, START_MS + 10 * HOUR_MS)[EAST_A]
    assert history.lives == (
        life(20 * MINUTE_MS, True, START_MS + 20 * MINUTE_MS),
        life(120 * MINUTE_MS, False, START_MS + 150 * MINUTE_MS),
    )
    assert (history.launches, history.last_launch_ms) == (2, START_MS + 30 * MINUTE_MS)


def test_a_running_node_counts_until_the_last_fact_of_its_run():
    with a_session() as session:
        made = a_bought_run(session)
        made.node("spot-0", up=0)
        made.trained(1, at=90 * MINUTE_MS)
        session.flush()
        now = pool_histories(session, START_MS + HOUR_MS)[EAST_A]
        later = pool_histories(session, START_MS + 50 * HOUR_MS)[EAST_A]
    assert now.lives == (life(HOUR_MS, False, START_MS + HOUR_MS),)
    assert later.lives == (life(90 * MINUTE_MS, False, START_MS + 90 * MINUTE_MS),)


def test_refused_launches_and_cold_starts_are_read_too():
    with a_session() as session:
        made = a_bought_run(session)
        refused = made.node("spot-0", 1)
        session.add(NodeEvent(node_id=refused.id, at_ms=START_MS + 5 * MINUTE_MS, kind="no_capacity"))
        came = made.node("spot-0", 2, up=10 * MINUTE_MS)
        session.add(NodeEvent(node_id=came.id, at_ms=START_MS + 13 * MINUTE_MS, kind="ready"))
        session.flush()
        history = pool_histories(session, START_MS + HOUR_MS)[EAST_A]
    assert history.stock_outs_ms == (START_MS + 5 * MINUTE_MS,)
    assert history.cold_starts_ms == (3 * MINUTE_MS,)
    assert history.odds().mean == pytest.approx((1.28 + 1 / 2) / 3)


def test_on_demand_nodes_have_launches_but_no_hazard():
    with a_session() as session:
        made = a_bought_run(session)
        made.node("trainer", market="on_demand", up=0)
        session.flush()
        (history,) = pool_histories(session, START_MS + HOUR_MS).values()
    assert (history.pool.zone, history.lives, history.launches) == ("", (), 1)


def test_preemptions_of_the_local_infra_are_no_evidence():
    with a_session() as session:
        made = a_run(session)  # infra local
        made.preempted(made.node("spot-0", up=0, end=MINUTE_MS), MINUTE_MS)
        session.flush()
        assert pool_histories(session, START_MS + HOUR_MS) == {}


def test_age_buckets_equal_those_of_the_notes():
    assert [start // MINUTE_MS for start in BUCKET_STARTS_MS] == [0, 15, 30, 60, 120, 240, 480, 960]
