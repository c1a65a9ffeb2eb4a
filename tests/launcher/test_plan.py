import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from engine.events import Market
from launcher.job.load import load_job
from launcher.job.schema import Job
from launcher.market.offers import Offer, read_catalog
from launcher.market.quality import Quality
from launcher.placement.plan import PlacementError, number_of_trainer_slot, plan_json, plan_local, slots_from


def offer(zone: str, usd: float, *, region: str = "east", accelerator: str = "L4") -> Offer:
    return Offer(
        cloud="aws",
        region=region,
        zone=zone,
        instance_type=f"{accelerator.lower()}.large",
        accelerator=accelerator,
        gpus=1,
        market=Market.SPOT if zone else Market.ON_DEMAND,
        micro_usd_per_hour=round(usd * 1_000_000),
        source="table",
        observed_at="2026-01-01",
    )


EAST = [offer("", 3), offer("a", 1.5), offer("b", 1), offer("c", 2)]


def job(**resources) -> Job:
    return Job(resources=resources, budget={"max_total": "$10"})


def prices(plan) -> list[tuple[str, str, int]]:
    return [(slot.name, slot.placement.zone, slot.placement.micro_usd_per_hour) for slot in plan.slots]


def test_a_trainer_on_demand_and_spot_nodes_in_the_two_cheapest_zones():
    plan = plan_local(job(rollout={"use_spot": True, "num_nodes": 3}), EAST)
    assert prices(plan) == [
        ("trainer", "east, any zone", 3_000_000),
        ("spot-0", "b", 1_000_000),
        ("spot-1", "a", 1_500_000),
        ("spot-2", "b", 1_000_000),
    ]
    assert [slot.role for slot in plan.slots] == ["trainer", "rollout", "rollout", "rollout"]


def test_every_node_of_a_trainer_is_in_one_place_and_in_the_rates():
    three = Job(resources={"trainer": {"num_nodes": 3}}, runtime={"trainer_ranks": 6})
    plan = plan_local(three, EAST)
    roles = {slot.name: slot.role for slot in plan.slots}
    assert roles == {
        "trainer": "trainer", "trainer-1": "ranks", "trainer-2": "ranks", "spot-0": "rollout", "spot-1": "rollout"
    }  # fmt: skip
    assert len({slot.placement for slot in plan.slots[:3]}) == 1
    assert plan.expected_micro_usd_per_hour == 3 * 3_000_000 + 2_500_000
    assert slots_from(json.loads(json.dumps(plan_json(plan)))) == plan.slots
    assert [number_of_trainer_slot(slot.name) for slot in plan.slots[:3]] == [0, 1, 2]


def test_a_plan_has_hourly_rates_and_the_time_that_the_budget_lasts():
    plan = plan_local(job(), EAST)
    assert plan.expected_micro_usd_per_hour == 5_500_000
    assert plan.maximum_micro_usd_per_hour == 9_000_000
    assert plan.lasts_ms == 10 * 3_600_000 * 10 // 55
    assert plan.money_basis == "assumed"


def test_all_nodes_are_in_the_region_with_the_cheapest_total():
    west = [offer("", 2, region="west"), offer("w", 1.9, region="west")]
    assert plan_local(job(), EAST + west).region == "east"
    assert plan_local(job(rollout={"use_spot": True, "num_nodes": 1}), EAST + west).region == "west"


def test_on_demand_rollout_nodes_are_the_baseline():
    plan = plan_local(job(rollout={"use_spot": False, "num_nodes": 1}), EAST)
    assert [(slot.name, slot.placement.market) for slot in plan.slots] == [
        ("trainer", Market.ON_DEMAND),
        ("on-demand-0", Market.ON_DEMAND),
    ]


def test_spot_never_is_the_same_baseline():
    never = Job(resources={"rollout": {"num_nodes": 1}}, spot="never")
    assert [slot.name for slot in plan_local(never, EAST).slots] == ["trainer", "on-demand-0"]


def test_a_doubtful_price_is_not_chosen():
    tenth = replace(offer("d", 0.3), quality=Quality.TENTH_OF_ON_DEMAND)
    assert plan_local(job(), [*EAST, tenth]) == plan_local(job(), EAST)


def test_a_plan_without_spot_nodes_is_valid():
    assert [slot.name for slot in plan_local(job(rollout={"num_nodes": 0}), EAST).slots] == ["trainer"]


def test_infra_narrows_the_choice():
    plan = plan_local(job(rollout={"infra": "aws/east/c", "num_nodes": 2}), EAST)
    assert {slot.placement.zone for slot in plan.slots[1:]} == {"c"}


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ({"trainer": {"accelerators": "L5:1"}}, "did you mean L4:1?"),
        ({"rollout": {"accelerators": "L4:8"}}, "did you mean L4:1?"),
        ({"rollout": {"infra": "gcp"}}, "no region of the catalog offers"),
    ],
)
def test_a_gpu_without_an_offer_is_refused_by_name(resources, words):
    with pytest.raises(PlacementError) as caught:
        plan_local(job(**resources), EAST)
    assert words in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_plan_survives_the_ledger():
    plan = plan_local(job(), EAST)
    assert slots_from(json.loads(json.dumps(plan_json(plan)))) == plan.slots


def test_the_shipped_catalog_has_a_plan_for_the_default_job():
    plan = plan_local(job(), read_catalog())
    assert plan.region == "us-east-2"
    assert plan.expected_micro_usd_per_hour < plan.maximum_micro_usd_per_hour


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quickstart", [("us-east-2-cheapest", 0.53), ("us-east-2-cheapest", 0.53), ("us-east-2-dearest", 0.55)]),
        ("shapes", [("", 1.861), ("us-east-2-cheapest", 0.53), ("us-east-2-dearest", 0.55)]),
        ("digits_ocr_shared", [("", 5.52), ("us-east5", 3.29), ("us-east5", 3.29)]),
    ],
)
def test_prices_of_shipped_local_jobs_do_not_change(name, expected):
    shipped = load_job(Path(str(files("sky_yamls") / f"{name}.yaml"))).job
    assert [
        ("" if "any zone" in zone else zone, usd / 1_000_000)
        for _, zone, usd in prices(plan_local(shipped, read_catalog()))
    ] == expected
