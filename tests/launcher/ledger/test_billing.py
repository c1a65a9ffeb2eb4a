"""Billing of a node's time: minimum, changed prices, AWS's free first hour, and side costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.events import Market
from launcher.ledger.accounting import charges_of
from launcher.ledger.billing import bill, interval_micro_usd, minimum_billed_ms, side_costs, stretches
from launcher.ledger.models import Node, NodeEvent, NodePrice, Run
from launcher.market.side_prices import MINIMUM_BILLED_MS, side_micro_usd_per_hour
from launcher.money import HOUR_MS

RATE = 3_600_000
"""One micro-dollar a millisecond."""


def node(cloud: str = "aws", market: Market = Market.SPOT, disk_gib: int = 100) -> Node:
    return Node(id=7, cloud=cloud, region="r", market=market, micro_usd_per_hour=RATE, disk_gib=disk_gib)


def price(at_ms: int, micro_usd_per_hour: int, number: int = 0) -> NodePrice:
    return NodePrice(id=number, node_id=7, at_ms=at_ms, micro_usd_per_hour=micro_usd_per_hour)


def run(infra: str) -> Run:
    return Run(id=1, infra=infra)


def test_a_changed_price_applies_from_its_change_on():
    found = stretches(node(), 0, 100_000, [price(40_000, 2 * RATE)], 0)
    assert [(piece.start_ms, piece.end_ms, piece.micro_usd) for piece in found] == [
        (0, 40_000, 40_000),
        (40_000, 100_000, 120_000),
    ]


def test_the_price_of_the_really_bought_offer_applies_from_the_start():
    found = stretches(node(), 50, 100_000, [price(50, 3 * RATE), price(100_000, RATE), price(200_000, RATE)], 0)
    assert [piece.micro_usd_per_hour for piece in found] == [3 * RATE]


def test_a_node_up_for_a_moment_costs_a_minute_at_its_final_price():
    [piece] = stretches(node(), 0, 1000, [], MINIMUM_BILLED_MS)
    assert (piece.end_ms, piece.micro_usd) == (1000, MINIMUM_BILLED_MS)
    cheap, dear = stretches(node(), 0, 1000, [price(500, 2 * RATE)], MINIMUM_BILLED_MS)
    assert cheap.micro_usd + dear.micro_usd == 500 + 2 * (MINIMUM_BILLED_MS - 500)


def test_the_local_infra_has_no_minimum_and_no_side_costs():
    assert minimum_billed_ms(run("local")) == 0
    assert minimum_billed_ms(run("aws,gcp")) == MINIMUM_BILLED_MS
    assert side_costs(run("local"), node(), 0, HOUR_MS) == []


@given(
    end_ms=st.integers(0, 10 * HOUR_MS),
    changes=st.lists(st.tuples(st.integers(0, 10 * HOUR_MS), st.integers(0, 10**8)), max_size=6),
    minimum_ms=st.sampled_from([0, MINIMUM_BILLED_MS]),
)
def test_billing_intervals_cover_the_time_once_and_match_the_final_bill(end_ms, changes, minimum_ms):
    prices = [price(at_ms, rate, number) for number, (at_ms, rate) in enumerate(changes)]
    found = stretches(node(), 0, end_ms, prices, minimum_ms)
    assert [piece.start_ms for piece in found] == [0, *(piece.end_ms for piece in found[:-1])]
    assert found[-1].end_ms == end_ms
    running = charges_of(node(), [], [NodeEvent(kind="up", at_ms=0)], end_ms, prices, minimum_ms)
    closed = bill(node(), 0, end_ms, prices, minimum_ms, "metered", None)
    assert [charge.micro_usd for charge in running] == [interval.micro_usd for interval in closed]
    assert len({interval.start_ms for interval in closed}) == len(closed)


@pytest.mark.parametrize(
    ("cloud", "market", "end_ms", "taken", "is_free"),
    [
        ("aws", Market.SPOT, HOUR_MS - 1, "Server.SpotInstanceTermination: taken", True),
        ("aws", Market.SPOT, HOUR_MS, "Server.SpotInstanceTermination: taken", False),
        ("aws", Market.SPOT, HOUR_MS - 1, "Client.UserInitiatedShutdown", False),
        ("aws", Market.SPOT, HOUR_MS - 1, None, False),
        ("aws", Market.ON_DEMAND, HOUR_MS - 1, "Server.SpotInstanceTermination: taken", False),
        ("gcp", Market.SPOT, HOUR_MS - 1, "Server.SpotInstanceTermination: taken", False),
    ],
)
def test_the_first_hour_is_free_only_if_ec2_reports_the_interruption(cloud, market, end_ms, taken, is_free):
    [interval] = bill(node(cloud, market), 0, end_ms, [], MINIMUM_BILLED_MS, "metered", taken)
    assert interval.micro_usd == (0 if is_free else interval_micro_usd(0, end_ms, RATE))
    assert interval.basis.startswith("metered")
    assert ("first hour" in interval.basis) is is_free


def test_side_costs_of_a_node_are_marked_as_assumed():
    costs = side_costs(run("gcp"), node("gcp"), 0, HOUR_MS)
    assert sum(cost.micro_usd or 0 for cost in costs) == side_micro_usd_per_hour("gcp", Market.SPOT)
    assert all("assumed" in cost.source for cost in costs)


def test_a_larger_disk_costs_as_much_more_as_it_is_larger():
    disk, _ = side_costs(run("gcp"), node("gcp", disk_gib=730), 0, HOUR_MS)
    assert (disk.kind, disk.amount, disk.micro_usd) == ("disk", "730 GiB", 100_000)
