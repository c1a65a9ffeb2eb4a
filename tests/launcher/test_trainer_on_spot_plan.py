"""A trainer on spot in plans and job files: where it is bought, what it may cost, and why it is on demand."""

import json
from dataclasses import replace

import pytest

from engine.events import Market
from launcher.exit_codes import BudgetError
from launcher.job import schema
from launcher.job.load import load_job
from launcher.placement.plan import PlacementError, plan_json, sites_from
from launcher.placement.plan_cloud import plan_cloud
from tests.launcher.test_cloud_plan import EAST, offer, requirements, view
from tests.launcher.test_plan_screen import is_one_screen

SPOT = (offer("a", 9, gpus=4), offer("b", 8, gpus=4))
NEEDS = replace(requirements(), trainer_on_spot=True)


def test_a_trainer_on_spot_is_planned_in_its_cheapest_zone_and_may_be_bought_on_demand():
    plan = plan_cloud(NEEDS, view(*EAST, *SPOT))
    trainer = plan.slots[0]
    assert (trainer.placement.zone, trainer.placement.market) == ("b", Market.SPOT)
    assert (trainer.placement.micro_usd_per_hour, trainer.on_demand_micro_usd_per_hour) == (8_000_000, 28_000_000)
    (site,) = sites_from(json.loads(json.dumps(plan_json(plan.as_plan()))))
    options = [(option.placement.zone, option.placement.market.value) for option in site.trainer]
    assert options == [("b", "spot"), ("a", "spot"), ("east, any zone", "on_demand")]
    rollout = plan.maximum_micro_usd_per_hour - 28_000_000
    assert rollout % 7_000_000 == 0, "the worst case is every node on demand"
    on_demand = plan_cloud(requirements(), view(*EAST, *SPOT))
    assert plan.cost.expected < on_demand.cost.expected
    assert on_demand.sites[0].trainer[0].placement.market is Market.ON_DEMAND
    assert len(on_demand.sites[0].trainer) == 1, "a trainer on demand is never bought on spot"


def test_a_region_without_a_trainer_on_spot_is_left_out_with_the_reason():
    with pytest.raises(PlacementError):
        plan_cloud(NEEDS, view(*EAST))
    dear = (*EAST, offer("a", 30, gpus=4))
    with pytest.raises(PlacementError):
        plan_cloud(NEEDS, view(*dear))
    west = [replace(one, region="west") for one in EAST]
    plan = plan_cloud(NEEDS, view(*EAST, *SPOT, *west))
    text = "no trainer with 4 x H100 on spot is to be had there"
    assert text in [left.why for left in plan.left_out if left.what == "gcp west"]


def test_the_hourly_limit_counts_a_trainer_on_spot_at_its_price():
    tight = replace(NEEDS, max_hourly_micro_usd=12_000_000)
    assert plan_cloud(tight, view(*EAST, *SPOT)).listed_micro_usd_per_hour <= 12_000_000
    with pytest.raises(BudgetError):
        plan_cloud(replace(tight, trainer_on_spot=False), view(*EAST, *SPOT))


# --- auto --------------------------------------------------------------------------------------------


def job_of(tmp_path, text: str):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_job(path)


CLOUDS = "infra: gcp\nresources: {trainer: {use_spot: auto}}\n"
STAYS_UP = "recovery: {controller_stays_up: true}\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("resources: {trainer: {use_spot: auto}}\n", ""),
        ("resources: {trainer: {use_spot: auto}}\nspot: never\n", "spot is never"),
        (CLOUDS, schema.ASLEEP),
        (CLOUDS + STAYS_UP, ""),
        (
            CLOUDS + STAYS_UP + "runtime: {name: ray}\n",
            "runtime.name is ray, whose cluster ends with the trainer's node",
        ),
    ],
)
def test_auto_takes_spot_only_where_a_lost_trainer_can_be_replaced(tmp_path, text, why):
    job = job_of(tmp_path, text).job
    assert (job.trains_on_spot, job.why_trainer_on_demand) == (not why, why)


def test_the_default_is_on_demand(tmp_path):
    assert not job_of(tmp_path, "infra: gcp\n").job.trains_on_spot


@pytest.mark.slow
def test_a_dry_run_compares_the_trainers_capacity_types(dry_run):
    on_spot = dry_run("qwen_image_ocr", "--set", "runtime.name=local", "--set", "resources.trainer.use_spot=true")
    assert is_one_screen(on_spot)
    assert any(line.startswith("  trainer on spot: lost ") for line in on_spot)
    assert any(line.startswith("  with the trainer on demand $") for line in on_spot)
    asleep = dry_run("qwen_image_ocr", "--set", "runtime.name=local", "--set", "resources.trainer.use_spot=auto")
    assert is_one_screen(asleep)
    at = asleep.index("  trainer on demand, because nobody would replace it while this machine sleeps;")
    assert asleep[at + 1].startswith("  with --service $")
    assert " instead of $" in asleep[at + 1]


def test_a_market_of_replays_has_the_zones_of_every_region_where_the_run_may_go():
    """A zone that a market lacks would always have capacity, and never take a node back."""
    west = [replace(offered, region="west", zone=offered.zone and f"{offered.zone}-west") for offered in (*EAST, *SPOT)]
    plan = plan_cloud(NEEDS, view(*EAST, *SPOT, *west))
    on_sale = {(o.placement.region, o.placement.zone) for site in plan.sites for o in site.trainer + site.rollout}
    spot = {(region, zone) for region, zone in on_sale if "any zone" not in zone}
    assert {region for region, _ in spot} == {"east", "west"}
    assert {(zone.region, zone.zone) for zone in plan.zones} == spot
