"""The brute force of the benchmark of the planner's search: its figures by hand, and against the product's own."""

from dataclasses import replace

import pytest

from engine.events import Market
from launcher.job.resolved import resolve
from launcher.market.offers import Offer
from launcher.money import HOUR_MS
from launcher.replay.simulate import work_of
from tests.benchmarks import plan_search
from tests.benchmarks.every_fleet import (
    MOST_REGIONS,
    Fleet,
    GpuSeconds,
    Kind,
    Shop,
    Work,
    best,
    estimate,
    grid,
    iteration_seconds,
    iterations_share,
    pace,
    plan_of,
    training_seconds,
)
from tests.benchmarks.plan_search import CASES, EXAMPLE, Replays, best_of, keys, over_best, zones_of

H100 = GpuSeconds(sample=1.0, candidate=0.5, train=2.0)
WORK = Work(
    iterations=100.0,
    prompts=32,
    images_per_prompt=16,
    updates=2,
    trained_bytes=0,
    seconds={"H100": H100, "L40S": GpuSeconds(sample=None, candidate=1.0, train=None)},
    explores=True,
    trains_candidates=False,
    max_candidates=None,
    rho=0.7,
    exponent=0.5,
    checkpoint_every=1,
    deadline_ms=None,
    max_hourly=None,
    max_total=None,
)
EAST, WEST = ("aws", "us-east-1"), ("aws", "us-west-2")
SPOT_8, STEADY_8 = (Kind(gpu="H100", gpus=8, market=market) for market in (Market.SPOT, Market.ON_DEMAND))


def offer(usd: float, market: Market = Market.SPOT, zone: str = "", region: str = "us-east-1", gpu: str = "H100"):
    return Offer(
        cloud="aws",
        region=region,
        zone=zone,
        instance_type=f"{gpu}.8",
        accelerator=gpu,
        gpus=8,
        market=market,
        micro_usd_per_hour=round(usd * 1e6),
        source="test",
        observed_at="",
    )


SHOP = Shop(
    [
        *(offer(55, Market.ON_DEMAND, region=region) for region in ("us-east-1", "us-west-2")),
        *(offer(usd, zone=f"us-east-1{zone}") for zone, usd in (("a", 15), ("b", 16), ("c", 30))),
        offer(20, zone="us-west-2a", region="us-west-2"),
        offer(2, gpu="L40S", zone="us-east-1a"),
        offer(10, Market.ON_DEMAND, gpu="L40S"),
    ]
)


def fleet(nodes: int = 0, trainer: Kind = SPOT_8, explores: bool = False) -> Fleet:
    return Fleet(trainer=trainer, rollout=SPOT_8 if nodes else None, nodes=nodes, regions=(EAST,), explores=explores)


def test_an_iteration_of_eight_ranks_by_hand():
    # 512 images of 1 s on 8 GPUs, and 2 steps of 2 rounds of 16 images of 2 s.
    assert iteration_seconds(WORK, fleet(), 0) == pytest.approx(64 + 128)
    assert iteration_seconds(WORK, fleet(1), 1) == pytest.approx(32 + 128)
    assert training_seconds(WORK, Kind(gpu="H100", gpus=1, market=Market.SPOT)) == pytest.approx(1024)


def test_exploration_saves_iterations_only_with_a_choice():
    # 8 GPUs try 128 / .5 = 256 candidates each: 64 of each prompt, of which 16 are kept. z = 1.150, the gain is
    # 1 + .49 x 2 x 1.150 x .2059 / .25 = 1.928.
    assert iterations_share(WORK, fleet(1, explores=True), 1) == pytest.approx(1.928**-0.5, abs=1e-3)
    assert iterations_share(WORK, fleet(1), 1) == 1
    assert iterations_share(replace(WORK, max_candidates=512), fleet(1, explores=True), 1) == 1


@pytest.mark.parametrize("file", ["qwen_image_ocr", "sd3_5"])
def test_the_seconds_agree_with_the_products_where_all_gpus_are_alike(file):
    case = next(case for case in CASES if case.file == file)
    job = case.job(
        {
            "resources.trainer.accelerators": "H100:8",
            "resources.rollout.accelerators": "H100:8",
            "runtime.trainer_ranks": 8,
        }
    )
    recipe, work = resolve(job).recipe.on(8), Work.of(job)
    for nodes in (0, 1, 3):
        assert iteration_seconds(work, fleet(4), nodes) == pytest.approx(recipe.seconds(8 * nodes), rel=1e-6)
        share = recipe.iterations_share(recipe.candidates_per_prompt(8 * nodes), work.exponent)
        assert iterations_share(work, fleet(4, explores=True), nodes) == pytest.approx(share, rel=1e-6)


def test_a_zone_dearer_than_its_neighbours_is_left_out():
    assert [offer.zone for offer in SHOP.kinds[EAST][SPOT_8]] == ["us-east-1a", "us-east-1b"]


def test_the_grid_has_no_gpu_that_cannot_hold_the_model():
    fleets = list(grid(WORK, SHOP))
    assert {each.trainer.gpu for each in fleets} == {"H100"}
    assert {each.rollout.gpu for each in fleets if each.rollout} == {"H100"}
    assert {each.nodes for each in fleets} == {0, 1, 2, 3, 4}
    assert all(len(each.regions) == 1 for each in fleets if each.trainer.market is Market.ON_DEMAND)
    assert {len(each.regions) for each in fleets} == {1, 2}
    assert MOST_REGIONS == 4


def test_the_best_fleets_are_the_cheapest_of_the_grid():
    ranked, compared = best(WORK, SHOP, 3)
    every = [each for fleet in grid(WORK, SHOP) if (each := estimate(WORK, SHOP, fleet)) is not None]
    assert compared == len(list(grid(WORK, SHOP)))
    assert ranked[0].usd == min(each.usd for each in every)
    assert [each.usd for each in ranked] == sorted(each.usd for each in ranked)


def test_a_deadline_makes_fleets_dearer_and_then_impossible():
    loose, tight = (estimate(replace(WORK, deadline_ms=h * HOUR_MS), SHOP, fleet()) for h in (100, 7))
    assert loose is not None
    assert tight is not None
    assert loose.usd < tight.usd
    # All on demand takes 100 x 192 s and a cold start.
    assert tight.usd <= (100 * 192 / 3600 + 0.2) * 55
    assert best(replace(WORK, deadline_ms=HOUR_MS), SHOP, 3)[0] == []


def test_a_plan_has_the_slots_and_offers_of_its_fleet():
    both = replace(fleet(2), regions=(EAST, WEST))
    plan = plan_of(WORK, SHOP, both)
    assert [slot.name for slot in plan.slots] == ["trainer", "spot-0", "spot-1"]
    assert [slot.placement.zone for slot in plan.slots[1:]] == ["us-east-1a", "us-east-1b"]
    assert [site.region for site in plan.sites] == ["us-east-1", "us-west-2"]
    assert plan.sites[0].trainer[-1].placement.market is Market.ON_DEMAND
    iterations, seconds = pace(WORK, both)
    assert work_of(plan).left_ms(2) == pytest.approx(1000 * iterations * seconds[2], rel=1e-4)


def test_every_plan_meets_the_same_market():
    one, both = plan_of(WORK, SHOP, fleet()), plan_of(WORK, SHOP, replace(fleet(), regions=(EAST, WEST)))
    assert [(zone.region, zone.zone) for zone in zones_of(one, SHOP)] == [
        (zone.region, zone.zone) for zone in zones_of(both, SHOP)
    ]
    beyond = zones_of(one, Shop([offer(55, Market.ON_DEMAND)]))  # zones of GPUs that the brute force leaves out
    assert beyond
    assert {zone.zone for zone in beyond} == {zone for *_, zone in _zones_that_it_uses(one)}


def _zones_that_it_uses(plan):
    places = [option.placement for site in plan.sites for option in (*site.trainer, *site.rollout)]
    return {(place.region, place.zone) for place in places if place.market is Market.SPOT}


def test_a_plan_costs_the_same_in_a_second_replay():
    job = CASES[0].job()
    plan = plan_of(replace(WORK, iterations=20.0), SHOP, fleet())
    first, second = (Replays(plan, job, SHOP).priced(2) for _ in range(2))
    assert first == second
    assert first.is_in_time
    assert first.usd > 20 * 192 / 3600 * 15


def made(usd: float, chosen: dict, fixed: dict | None = None) -> dict:
    fleets = [{"fleet": "a", "usd": usd, "hours": 1.0, "starts": plan_search.STARTS, "in_time": True}]
    fleets.append(fleets[0] | {"usd": usd / 4, "starts": 4})
    fixed = fixed or {"refused": "nothing fits"}
    return {
        "starts": plan_search.STARTS,
        "job": EXAMPLE,
        "prices": "recorded",
        "brute_force": {"fleets": fleets},
        "fixed": fixed,
        "chosen": chosen,
    }


def plan(usd: float, in_time: bool = True) -> dict:
    rows = [{"name": "plan", "usd": usd, "replayed": usd * 0.8}]
    return {"fleet": "b", "usd": usd, "hours": 1.0, "late": 0, "in_time": in_time, "seconds": 2.0, "rows": rows}


def test_the_best_has_all_starts_and_is_in_time():
    assert over_best(made(100, plan(110)), "chosen") == pytest.approx(1.1)
    assert over_best(made(100, plan(80)), "chosen") == 1
    assert over_best(made(100, plan(80, in_time=False)), "chosen") is None
    assert best_of(made(100, plan(80, in_time=False)))["usd"] == 100


def test_the_keys_count_missing_and_late_plans():
    cells = [made(100, plan(110), plan(300)), made(100, {"refused": "no"}), made(100, plan(90, in_time=False))]
    found = keys(cells, {"flux": {"H100": 100.0, "H200": 110.0}})
    assert (found["over_best_mean"], found["over_best_worst"]) == (1.1, 1.1)
    assert (found["no_plan"], found["late"], found["cells"]) == (1, 1, 3)
    assert found["over_best_of_8ff64c3"] == 3
    assert found["same_basis"] == 0.25
    assert found["trainer_alone_spread"] == 0.1
