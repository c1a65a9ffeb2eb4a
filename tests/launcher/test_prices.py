"""Rules that accept or refuse the prices of a feed: values in, values out."""

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

import engine
from engine.events import Market
from launcher.exit_codes import ExitCode
from launcher.market.instance_types import (
    COMPUTE_CAPABILITY,
    INSTANCE_TYPES,
    instance_type_of,
    instance_types,
    is_too_old,
)
from launcher.market.prices import (
    AdviceKind,
    CapacityAdvice,
    FeedRefused,
    RawPrice,
    believe,
    micro_usd,
    on_demand_prices,
    time_ms,
)
from tests.fakes.clouds.prices import rows

NOW_MS = time_ms("2025-11-21T12:00:00Z") or 0
HOUR_MS = 3_600_000


def raw(**changes) -> RawPrice:
    """Return a valid spot price of $14.25."""
    row = RawPrice(
        cloud="aws",
        region="us-east-1",
        zone="us-east-1a",
        zone_id="use1-az1",
        instance_type="p5.48xlarge",
        market=Market.SPOT,
        price="14.250000",
        currency="USD",
        unit="hour",
        effective="2025-11-21T11:00:00Z",
        source="aws ec2 DescribeSpotPriceHistory",
        source_id="p5.48xlarge@use1-az1",
    )
    return replace(row, **changes)


def on_demand(price="55.04", **changes) -> RawPrice:
    return raw(zone="", zone_id="", market=Market.ON_DEMAND, price=price, effective="2025-11-01T00:00:00Z", **changes)


def believed(*raws, **options):
    return believe(raws, source="a feed", now_ms=NOW_MS, **options)


ROW_REFUSALS = [
    ({"price": ""}, "its price is empty; an offer without a price is no offer"),
    ({"price": "  "}, "its price is empty"),
    ({"price": "about 14"}, "its price is 'about 14', which is no number"),
    ({"price": "0"}, "its price is 0; a price is above zero"),
    ({"price": "0.000000"}, "a price is above zero"),
    ({"price": "-14.25"}, "a price is above zero"),
    ({"price": "NaN"}, "its price is NaN; a price is a finite number"),
    ({"price": "Infinity"}, "a price is a finite number"),
    ({"price": "-inf"}, "a price is a finite number"),
    ({"price": "0.00001"}, "stands for no price at all (moto, a simulator of AWS, answers it)"),
    ({"price": "0.00001000"}, "stands for no price at all"),
    ({"price": "700.0"}, "stands for no price at all (price lists of TPUs say it)"),
    ({"price": "0.0099"}, "no machine with a GPU costs less than $0.01/h"),
    ({"price": "0.0000004"}, "no machine with a GPU costs less than"),
    ({"currency": "CNY"}, "its currency is CNY; only USD is understood"),
    ({"currency": ""}, "its currency is not said"),
    ({"unit": "GiBy.mo"}, "it is a price per GiBy.mo; only instance-hours are understood"),
    ({"effective": "2006-01-01T00:00:00Z"}, "nobody sold these GPUs before 2015"),
    ({"effective": "2014-12-31T23:59:59Z"}, "nobody sold these GPUs before 2015"),
    ({"effective": "2025-11-21T12:10:01Z"}, "in the future; if it is not, this machine's clock is behind"),
    ({"effective": "yesterday"}, "its time is 'yesterday', which is no ISO 8601 time"),
    ({"effective": ""}, "its time is '', which is no ISO 8601 time"),
    ({"instance_type": ""}, "its instance type is empty; nobody could buy it"),
    ({"region": " "}, "its region is empty"),
    ({"price": "55.05"}, "it costs $55.05/h, more than $55.04/h on demand; one of the two is another product's price"),
]
"""(changes to a valid row, the reason of its refusal)"""

FEED_REFUSALS = [
    ([], "answered without a single price"),
    ([raw(price="0"), raw(price="0", zone="us-east-1b")], "not one of its 2 prices is believed; the first is"),
    ([raw(price="NaN")], "a price is a finite number"),
    (
        [raw(price="0.00001", effective="2006-01-01T00:00:00Z", zone=zone) for zone in ("a", "b", "c")],
        "stands for no price at all",
    ),
    (
        [raw(instance_type=name, zone=zone, price="3.0") for name in ("p5", "p4d", "g5") for zone in ("a", "b")],
        "3 instance types cost $3.00/h each (spot); a market has more than one price",
    ),
    (
        [on_demand("10"), *(raw(zone=zone, price="10.50") for zone in ("a", "b", "c")), raw(zone="d", price="9")],
        "3 of 4 spot prices are above the on-demand price of the same machine",
    ),
]
"""(rows that are all refused, the reason)"""


# --- one row -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "reason"), ROW_REFUSALS, ids=str)
def test_only_the_misleading_price_is_refused_with_its_reason(changes, reason):
    belief = believed(on_demand(), raw(zone="us-east-1b"), raw(**changes))
    assert [point.zone for point in belief.points] == ["", "us-east-1b"]
    (refusal,) = belief.refused
    assert refusal.raw == raw(**changes)
    assert reason in refusal.reason


def test_an_accepted_price_becomes_a_point_in_micro_dollars():
    (point,) = believed(raw()).points
    assert (point.micro_usd_per_hour, point.effective_ms) == (14_250_000, NOW_MS - HOUR_MS)
    assert (point.zone, point.zone_id, point.market) == ("us-east-1a", "use1-az1", Market.SPOT)
    assert point.observed_ms == NOW_MS


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("6.8800000000", 6_880_000),
        ("1", 1_000_000),
        ("0.01", 10_000),
        ("0.0123454", 12_345),
        ("0.0123455", 12_346),  # half to even
        ("0.0123465", 12_346),
        (" 2.5 ", 2_500_000),
    ],
)
def test_fractions_of_a_micro_dollar_are_rounded_to_the_nearest(text, exact):
    assert micro_usd(text) == exact


def test_a_time_that_is_minutes_ahead_is_accepted():
    assert believed(raw(effective="2025-11-21T12:09:59Z")).points


@pytest.mark.parametrize("text", ["2025-11-21T12:00:00Z", "2025-11-21T12:00:00", "2025-11-21T14:00:00+02:00"])
def test_a_time_without_an_offset_is_utc(text):
    assert time_ms(text) == NOW_MS


def test_points_are_sorted_so_that_the_last_one_is_current():
    late, early = raw(effective="2025-11-21T11:00:00Z"), raw(effective="2025-11-21T09:00:00Z", price="15")
    assert [point.micro_usd_per_hour for point in believed(late, early).points] == [15_000_000, 14_250_000]


# --- rows beside one another -------------------------------------------------------------------------


def test_a_repeated_price_is_one_point():
    assert len(believed(raw(), raw()).points) == 1


def test_two_prices_of_one_offer_at_one_time_are_both_refused():
    belief = believed(raw(), raw(price="47.21"), raw(zone="us-east-1b"))
    assert [point.zone for point in belief.points] == ["us-east-1b"]
    assert [refusal.raw.price for refusal in belief.refused] == ["14.250000", "47.21"]
    assert "says both $14.25 and $47.21" in belief.refused[0].reason


def test_spot_is_compared_with_known_on_demand_prices():
    known = {("aws", "us-east-1", "p5.48xlarge"): 14_000_000}
    belief = believed(raw(), raw(zone="us-east-1b", price="13"), on_demand=known)
    assert [point.zone for point in belief.points] == ["us-east-1b"]
    assert "more than $14.00/h on demand" in belief.refused[0].reason


def test_the_on_demand_price_of_another_region_does_not_count():
    assert len(believed(on_demand("10", region="us-west-2"), raw()).points) == 2


def test_spot_at_the_on_demand_price_is_kept():
    """Such a price is information: there is no discount, and probably no capacity."""
    assert len(believed(on_demand("14.25"), raw()).points) == 2


def test_one_price_in_many_zones_is_accepted():
    """Google has one spot price for all zones of a region."""
    assert len(believed(*(raw(zone=zone) for zone in "abcdef")).points) == 6


@pytest.mark.parametrize(("raws", "reason"), FEED_REFUSALS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_feed_that_is_wrong_as_a_whole_is_refused_completely(raws, reason):
    with pytest.raises(FeedRefused) as refused:
        believed(*raws)
    assert reason in str(refused.value)
    assert str(refused.value).startswith("a feed")
    assert refused.value.exit_code is ExitCode.STALE_CATALOG


def test_the_newest_on_demand_price_counts():
    points = believed(on_demand("98.32"), replace(on_demand("55.04"), effective="2025-11-02T00:00:00Z")).points
    assert on_demand_prices(points) == {("aws", "us-east-1", "p5.48xlarge"): 55_040_000}


@pytest.mark.parametrize(
    ("kind", "value", "is_credible"),
    [
        (AdviceKind.OBTAINABILITY, 0.0, True),
        (AdviceKind.OBTAINABILITY, 1.01, False),
        (AdviceKind.PREEMPTION_RATE, 1.0, True),
        (AdviceKind.PREEMPTION_RATE, 0.0, False),  # a day without a preemption
        (AdviceKind.PREEMPTION_RATE, -0.1, False),
        (AdviceKind.PREEMPTION_RATE, float("nan"), False),
        (AdviceKind.UPTIME_HOURS, 30.0, True),
        (AdviceKind.UPTIME_HOURS, 0.0, False),
    ],
)
def test_launch_odds_are_between_0_and_1_and_an_uptime_is_above_0(kind, value, is_credible):
    advice = CapacityAdvice(
        cloud="gcp",
        region="us-central1",
        zone="us-central1-a",
        instance_type="a3-highgpu-8g",
        kind=kind,
        value=value,
        from_ms=0,
        until_ms=0,
        observed_ms=0,
        source="gcp compute advice.capacity",
    )
    assert advice.is_credible is is_credible


# --- instance types ----------------------------------------------------------------------------------


def test_every_gpu_family_is_known_and_every_instance_type_once():
    assert {known_type.accelerator for known_type in INSTANCE_TYPES} == {
        *("V100", "T4", "L4", "A10G", "L40S", "A100", "A100-80GB", "H100", "H200", "B200", "RTXPRO6000")
    }
    assert len({(known_type.cloud, known_type.instance_type) for known_type in INSTANCE_TYPES}) == len(INSTANCE_TYPES)


def test_the_fake_clouds_sell_every_instance_type_at_a_price():
    known = {(row.kind.cloud, row.kind.instance_type) for row in rows() if Decimal(row.on_demand) * Decimal(row.spot)}
    assert known >= {(sold.cloud, sold.instance_type) for sold in INSTANCE_TYPES}


def test_an_instance_type_is_found_by_its_name_and_by_its_gpu():
    known_type = instance_type_of("gcp", "n1-highmem-8+V100:1")
    assert known_type is not None
    assert (known_type.machine_type, known_type.gpus, known_type.gpu_mem_gib) == ("n1-highmem-8", 1, 16)
    assert instance_type_of("aws", "a3-highgpu-8g") is None
    assert {known_type.instance_type for known_type in instance_types(("aws",), ("h100",))} == {
        "p5.4xlarge",
        "p5.48xlarge",
    }


def test_a_gpu_below_the_capability_of_our_torch_is_too_old():
    assert {known_type.accelerator for known_type in INSTANCE_TYPES} <= set(COMPUTE_CAPABILITY)
    old = {name for name in COMPUTE_CAPABILITY if is_too_old(name)}
    assert old == {"K80", "M60", "P100", "P4", "V100", "V100-32GB"}
    assert is_too_old("v100")
    assert not is_too_old("a GPU of next year")


def test_the_minimum_gpu_capability_is_that_of_the_torch_on_nodes():
    """Another torch supports other GPUs. If this test fails, read LEAST_CAPABILITY from the new wheel."""
    lock = (Path(engine.__file__).parent / "node.lock").read_text()
    assert "\ntorch==2.13.0" in lock
