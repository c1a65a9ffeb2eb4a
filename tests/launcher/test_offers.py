"""Price tables: reading, invalid tables, and the age of prices."""

import json
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from importlib.resources import as_file, files
from pathlib import Path

import pytest

from engine.events import Market
from launcher.market.instance_types import instance_type_of
from launcher.market.offers import (
    COLUMNS,
    NEWER,
    TABLES,
    Age,
    CatalogError,
    Offer,
    Prices,
    age_of,
    age_text,
    as_row,
    buyable,
    current_catalog,
    dates_text,
    key,
    parse_offers,
    read_catalog,
    read_folder,
    refuse_stale,
    shipped_catalog,
    without_expired,
)
from launcher.market.prices import time_ms
from launcher.market.quality import USABLE, Quality, judge

HOUR_MS = 3_600_000
NOW_MS = round(datetime(2026, 11, 22, 12, tzinfo=UTC).timestamp() * 1000)


def table(*rows: str) -> list[str]:
    return [",".join(COLUMNS), *rows]


def row(zone: str = "z", gpus: str = "1", market: str = "spot", price: str = "1", source: str = "s") -> str:
    return f"aws,r,{zone},,i,L4,{gpus},24,{market},{price},{source},,2026-01-01,ok,"


# --- shipped tables ----------------------------------------------------------------------------------


def test_every_shipped_price_has_a_source_and_a_time_and_is_listed_once():
    offers = read_catalog()
    assert all(offer.source and offer.observed_at for offer in offers)
    assert all(offer.zone for offer in offers if offer.market is Market.SPOT)
    assert len({(o.region, o.zone, o.instance_type, o.market) for o in offers}) == len(offers)
    assert len({key(offer) for offer in offers}) == len(offers)


def test_every_gpu_family_is_there():
    families = {offer.accelerator for offer in read_catalog()}
    assert families == {"V100", "T4", "L4", "A10G", "L40S", "A100", "A100-80GB", "H100", "H200", "B200"}
    assert {offer.cloud for offer in read_catalog()} == {"aws", "gcp"}


def test_shipped_tables_match_their_manifest():
    catalog = shipped_catalog()
    assert set(catalog.tables) == set(TABLES)
    assert {name: len(offers) for name, offers in catalog.offers.items()} == {
        name: table.rows for name, table in catalog.tables.items()
    }
    assert set(shipped_catalog(Prices.NEWEST).tables) == {*TABLES, *(f"{NEWER}/{name}" for name in TABLES)}


def test_shipped_rows_are_known_instance_types():
    for offer in {*read_catalog(), *shipped_catalog(Prices.NEWEST).all_offers()}:
        known_type = instance_type_of(offer.cloud, offer.instance_type)
        assert known_type is not None
        assert (offer.accelerator, offer.gpus, offer.gpu_mem_gib) == (
            known_type.accelerator,
            known_type.gpus,
            known_type.gpu_mem_gib,
        )
        assert offer.market in known_type.markets, f"{offer.instance_type} is not sold {offer.market.value}"


def test_an_aws_zone_is_named_by_its_id():
    unnamed = {
        (o.zone, o.instance_type)
        for o in read_catalog()
        if (o.cloud, o.market.value) == ("aws", "spot") and not o.zone_id
    }
    assert unnamed == {
        ("us-cheapest", "gr6.4xlarge"),
        ("us-dearest", "gr6.4xlarge"),
        ("us-east-1-cheapest", "g6e.xlarge"),
        ("us-east-1-dearest", "g6e.xlarge"),
    }, "catalogs/README.md names these"


def test_shipped_verdicts_follow_the_rules_and_claim_no_cloud_query():
    offers = read_catalog()
    assert judge(offers) == offers
    assert Quality.OK not in {offer.quality for offer in offers}
    doubted = {(o.zone, o.instance_type, o.quality) for o in offers if o.quality not in USABLE}
    assert doubted == {
        ("use1-az1", "p5.48xlarge", Quality.SAME_AS_ON_DEMAND),
        ("use1-az4", "p5.48xlarge", Quality.SAME_AS_ON_DEMAND),
        ("apse3-az1", "p5.48xlarge", Quality.TENTH_OF_ON_DEMAND),
    }


def test_nothing_may_be_bought_at_shipped_prices():
    for prices in Prices:
        offers = shipped_catalog(prices).all_offers()
        assert {age_of(o.observed_at, o.market, NOW_MS) for o in offers} <= {Age.UNKNOWN, Age.EXPIRED}


def test_newer_prices_replace_recorded_ones_and_keep_the_rest():
    recorded = {key(offer): offer for offer in read_catalog()}
    newest = {key(offer): offer for offer in shipped_catalog(Prices.NEWEST).all_offers()}
    assert len(newest) == len(shipped_catalog(Prices.NEWEST).all_offers()), "a product is listed once"
    assert recorded.keys() - newest.keys() == {
        ("gcp", "us-east4", "us-east4", "a3-highgpu-8g", "spot"),
        ("gcp", "us-east5", "us-east5", "a2-ultragpu-2g", "spot"),
        ("gcp", "us-east5", "us-east5", "a2-ultragpu-8g", "spot"),
    }, "prices of a region that each zone has now"
    us_east_2 = ("aws", "us-east-2", "use2-az3", "p5en.48xlarge", "spot")
    assert (recorded[us_east_2].micro_usd_per_hour, newest[us_east_2].micro_usd_per_hour) == (16_090_000, 26_571_400)
    unchanged = ("aws", "us-east-2", "use2-az3", "p5.48xlarge", "spot")
    assert newest[unchanged] == recorded[unchanged], "nobody published a newer one"
    assert "RTXPRO6000" in {offer.accelerator for offer in newest.values()}
    assert judge(newest.values()) == tuple(newest.values()), "verdicts follow the rules for all rows together"


def test_every_newer_price_has_a_date_and_a_source():
    rows = [offer for key_of, offer in newer_rows().items() if offer != recorded_rows().get(key_of)]
    assert all(offer.source for offer in rows)
    undated = {(offer.instance_type, offer.observed_at) for offer in rows if time_ms(offer.observed_at) is None}
    assert undated == {
        ("p6-b200.48xlarge", "May 2026"),
        ("a3-ultragpu-8g", "snapshot H2-2025..2026"),
    }, "the sources name no day"


def recorded_rows():
    return {key(offer): offer for offer in read_catalog()}


def newer_rows():
    return {key(offer): offer for offer in shipped_catalog(Prices.NEWEST).all_offers()}


@pytest.mark.parametrize(
    ("dates", "text"),
    [
        (["2026-11-20", "2026-11-20"], "prices of 2026-11-20"),
        (["2026-11-20", "2026-07-20T08:00:00Z"], "prices of 2026-07-20 to 2026-11-20, older than 90 days"),
        (["May 2026", "2026-11-20"], "prices of May 2026 and 2026-11-20, perhaps older than 90 days"),
        (["snapshot"], "prices of snapshot, perhaps older than 90 days"),
    ],
)
def test_a_figure_names_the_dates_of_its_prices(dates, text):
    assert dates_text(dates, NOW_MS) == text


def test_catalog_prices_equal_those_of_the_table():
    offer = next(o for o in read_catalog() if o.zone == "us-east-2-cheapest" and o.instance_type == "g6e.xlarge")
    assert offer.micro_usd_per_hour == Decimal("0.53") * 1_000_000
    assert offer.zone_id == "use2-az3"


def test_the_trace_ships_with_its_licence():
    traces = files("catalogs") / "traces"
    assert (traces / "p3-trace.csv").read_text().startswith("0,add,node1\n")
    assert "Copyright (c) 2022 UCLASystem" in (traces / "LICENSE.txt").read_text()
    assert "8080929" in (traces / "README.md").read_text()


# --- invalid tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("price", ["0", "0.0", "-1", "nan", "inf", "", "abc", "0.0000001", "1e-7"])
def test_a_price_that_would_mislead_a_budget_makes_the_table_invalid(price):
    with pytest.raises(CatalogError, match=r"t\.csv, line 2"):
        parse_offers(table(row(price=price)), "t.csv")


@pytest.mark.parametrize(
    "line",
    [
        row(gpus="0"),
        row(gpus="x"),
        row(market="spit"),
        row(source=""),
        row().replace(",ok,", ",fine,"),
        row().replace(",24,", ",much,"),
        "aws,r,z",
    ],
)
def test_an_incomplete_row_makes_the_table_invalid(line):
    with pytest.raises(CatalogError, match="line 2"):
        parse_offers(table(line), "t.csv")


def test_a_repeated_offer_makes_the_table_invalid():
    with pytest.raises(CatalogError, match="line 3: the same offer as line 2"):
        parse_offers(table(row(price="1"), row(price="2")), "t.csv")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (",".join(COLUMNS).replace("usd_per_hour", "eur_per_hour"), "lacks usd_per_hour and has eur_per_hour"),
        (",".join(COLUMNS[:-1]), "lacks note"),
        ("", "lacks cloud"),
    ],
)
def test_a_table_with_other_columns_or_another_currency_is_refused(header, words):
    with pytest.raises(CatalogError, match=words) as caught:
        parse_offers([header, row()], "t.csv")
    assert caught.value.exit_code == 9


def test_a_row_survives_writing_and_reading():
    offers = parse_offers(table(row(price="1.5"), row(zone="y", price="0.123456", market="on_demand")), "t.csv")
    rows = [as_row(offer) for offer in offers]
    assert [each["usd_per_hour"] for each in rows] == ["1.50", "0.123456"]
    lines = [",".join(each[name] for name in COLUMNS) for each in rows]
    assert parse_offers(table(*lines), "t.csv") == offers


# --- folders -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    """Copy the shipped tables to a folder that a test may damage."""
    with as_file(files("catalogs")) as shipped:
        shutil.copytree(shipped, tmp_path / "tables", ignore=shutil.ignore_patterns("traces", "__pycache__"))
    return tmp_path / "tables"


def manifest(folder: Path, **fields) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_table_changed_by_hand_is_refused_until_its_checksum_is_updated(folder):
    path = folder / "gcp_spot.csv"
    path.write_text(path.read_text().replace("19.19", "1.919"))
    with pytest.raises(CatalogError, match=r"gcp_spot\.csv is not the table .* catalog validate .* --seal"):
        read_folder(folder)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schema": 2}, "has schema 2; this spotrl reads 1"),
        ({"currency": "EUR"}, "is in EUR"),
        (
            {"tables": {"azure_spot": {"file": "a", "fetched_at": "", "sha256": "", "rows": 0, "source": ""}}},
            "azure_spot",
        ),
        ({"tables": {"aws_spot": {"file": "a"}}}, "cannot be read"),
        ({"tables": []}, "cannot be read"),
    ],
)
def test_a_foreign_manifest_is_refused(folder, fields, words):
    manifest(folder, **fields)
    with pytest.raises(CatalogError, match=words):
        read_folder(folder)


def test_a_missing_table_is_named(folder):
    (folder / "aws_spot.csv").unlink()
    with pytest.raises(CatalogError, match=r"aws_spot\.csv cannot be read"):
        read_folder(folder)


def test_refreshed_tables_precede_shipped_ones(tmp_path, folder):
    raw = json.loads((folder / "manifest.json").read_text())
    manifest(folder, tables={"gcp_spot": raw["tables"]["gcp_spot"]})
    found = current_catalog(folder)
    assert found.place == f"{folder}, else shipped with spotrl"
    assert found.offers["aws_spot"] == shipped_catalog(Prices.NEWEST).offers["aws_spot"]
    assert current_catalog(tmp_path / "none") is shipped_catalog(Prices.NEWEST)
    assert current_catalog(tmp_path / "none", Prices.RECORDED) is shipped_catalog(Prices.RECORDED)


# --- offers that can be bought -----------------------------------------------------------------------


def test_zones_unknown_to_a_cloud_are_not_bought():
    places = {(o.region, o.zone) for o in buyable(read_catalog()) if o.cloud == "aws"}
    assert not [place for place in places if place[0] == "us" or place[1].endswith("est")]
    assert ("us-east-2", "use2-az3") in places, "shipped as us-east-2-cheapest"


def test_a_zone_that_has_a_name_keeps_it():
    named = replace(offer(Market.SPOT, "2026-11-22"), region="us-east-1", zone="us-east-1a", zone_id="use1-az4")
    nameless = replace(named, zone="us-east-1-cheapest", zone_id="")
    assert buyable([named, nameless, replace(nameless, zone_id="use1-az6")]) == (
        named,
        replace(named, zone="use1-az6", zone_id="use1-az6"),
    )


# --- age ---------------------------------------------------------------------------------------------


def offer(market: Market, observed_at: str) -> Offer:
    return Offer(
        cloud="aws",
        region="r",
        zone="z",
        instance_type="i",
        accelerator="L4",
        gpus=1,
        market=market,
        micro_usd_per_hour=1_000_000,
        source="a list",
        observed_at=observed_at,
    )


@pytest.mark.parametrize(
    ("market", "observed_at", "age"),
    [
        (Market.SPOT, "2026-11-22T06:00:00+00:00", Age.FRESH),  # 6 h
        (Market.SPOT, "2026-11-22T05:59:59+00:00", Age.OLD),
        (Market.SPOT, "2026-11-21T12:00:00+00:00", Age.OLD),  # 24 h
        (Market.SPOT, "2026-11-21T11:59:59+00:00", Age.EXPIRED),
        (Market.ON_DEMAND, "2026-11-15T12:00:00+00:00", Age.FRESH),  # 7 d
        (Market.ON_DEMAND, "2026-11-15T11:59:59+00:00", Age.OLD),
        (Market.ON_DEMAND, "2026-10-23T12:00:00+00:00", Age.OLD),  # 30 d
        (Market.ON_DEMAND, "2026-10-23T11:59:59+00:00", Age.EXPIRED),
        (Market.SPOT, "2026-11-22", Age.OLD),  # a date means its start: 12 h
        (Market.SPOT, "snapshot H2-2025..2026", Age.UNKNOWN),
        (Market.SPOT, "2026-11-22T13:00:00+00:00", Age.FRESH),  # clocks differ
        (Market.SPOT, "2026-11-22T13:00:01+00:00", Age.UNKNOWN),
    ],
)
def test_a_spot_price_ages_in_hours_and_an_on_demand_price_in_weeks(market, observed_at, age):
    assert age_of(observed_at, market, NOW_MS) is age


@pytest.mark.parametrize(
    ("observed_at", "words"),
    [
        ("2026-11-22T09:30:00+00:00", "2h 30m old"),
        ("snapshot H2-2025..2026", r"date unknown \(snapshot H2-2025..2026\)"),
        ("2027-01-01", "dated in the future"),
    ],
)
def test_the_age_of_a_price_is_printed_readably(observed_at, words):
    assert re.match(words, age_text(observed_at, NOW_MS))


def test_an_outdated_price_does_not_win_over_current_ones():
    fresh, old = offer(Market.SPOT, "2026-11-22T11:00:00+00:00"), offer(Market.SPOT, "2026-11-01")
    list_price = offer(Market.ON_DEMAND, "2026-01-01")
    assert without_expired([old, fresh, list_price], NOW_MS) == (fresh, list_price)
    assert without_expired([old, list_price], NOW_MS) == (old, list_price)


def test_nothing_is_bought_at_an_expired_price_and_the_refusal_has_a_remedy():
    refuse_stale([offer(Market.SPOT, "2026-11-22T01:00:00+00:00")], NOW_MS)
    with pytest.raises(CatalogError) as caught:
        refuse_stale([offer(Market.SPOT, "2026-11-20T12:00:00+00:00")], NOW_MS)
    assert "the spot price of aws i in z ($1.00/h, a list) is 2d old; nothing is bought by a spot price older" in str(
        caught.value
    )
    assert "spotrl catalog refresh" in str(caught.value)
    assert caught.value.exit_code == 9
