from decimal import Decimal
from importlib.resources import files

import pytest

from engine.events import Market
from launcher.market.offers import CatalogError, parse_offers, read_catalog

HEADER = "cloud,region,zone,instance_type,accelerator,gpus,market,usd_per_hour,source,observed_at,note"


def table(*rows: str) -> list[str]:
    return [HEADER, *rows]


def test_the_catalog_is_readable_and_every_price_has_a_source_and_a_time():
    offers = read_catalog()
    assert {offer.accelerator for offer in offers} >= {"L4", "H100", "A100"}
    assert {offer.cloud for offer in offers} == {"aws", "gcp"}
    assert all(offer.source and offer.observed_at for offer in offers)
    assert all(offer.zone for offer in offers if offer.market is Market.SPOT)
    assert len({(o.region, o.zone, o.instance_type, o.market) for o in offers}) == len(offers)


def test_prices_are_those_of_the_table():
    offer = next(o for o in read_catalog() if o.zone == "us-east-2-cheapest" and o.instance_type == "g6e.xlarge")
    assert offer.micro_usd_per_hour == Decimal("0.53") * 1_000_000


@pytest.mark.parametrize("price", ["0", "0.0", "-1", "nan", "inf", "", "abc", "0.0000001", "1e-7"])
def test_a_price_that_misleads_a_budget_makes_the_table_unreadable(price):
    with pytest.raises(CatalogError, match=r"t\.csv, line 2"):
        parse_offers(table(f"aws,r,z,i,L4,1,spot,{price},s,2026-01-01,"), "t.csv")


@pytest.mark.parametrize(
    "row",
    [
        "aws,r,z,i,L4,0,spot,1,s,t,",
        "aws,r,z,i,L4,x,spot,1,s,t,",
        "aws,r,z,i,L4,1,spit,1,s,t,",
        "aws,r,z,i,L4,1,spot,1,,t,",
        "aws,r,z",
    ],
)
def test_a_row_that_is_not_whole_makes_the_table_unreadable(row):
    with pytest.raises(CatalogError, match="line 2"):
        parse_offers(table(row), "t.csv")


def test_spot_dearer_than_on_demand_is_another_products_price():
    rows = table("aws,r,,i,L4,1,on_demand,1.00,s,t,", "aws,r,z,i,L4,1,spot,1.01,s,t,")
    with pytest.raises(CatalogError, match=r"spot i in z costs \$1.01/h, more than \$1.00/h on demand"):
        parse_offers(rows, "t.csv")


def test_the_trace_travels_with_its_licence():
    traces = files("catalogs") / "traces"
    assert (traces / "p3-trace.csv").read_text().startswith("0,add,node1\n")
    assert "Copyright (c) 2022 UCLASystem" in (traces / "LICENSE.txt").read_text()
    assert "8080929" in (traces / "README.md").read_text()
