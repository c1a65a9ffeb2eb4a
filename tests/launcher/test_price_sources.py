"""Shipped price clients against the fake market: accepted rows, refused rows and clouds that do not answer.

The clients are boto3's and Google's own, unmodified; the server is tests/fakes/market.py.
"""

import time
from decimal import Decimal
from types import SimpleNamespace

import pytest
from moto import mock_aws

from engine.events import Market
from launcher.cli import prices as prices_module
from launcher.cli.main import run
from launcher.exit_codes import ExitCode
from launcher.ledger.prices import capacity_advice, latest_prices
from launcher.ledger.store import open_ledger
from launcher.market.instance_types import instance_type_of
from launcher.market.prices import AdviceKind, FeedRefused, believe
from launcher.market.sources.asking import MissingCredentials, Patience, SourceFailed, ask_all
from launcher.market.sources.aws import AwsOnDemand, AwsSpot
from launcher.market.sources.gcp import GcpAdvice, GcpCatalog, hours_of
from launcher.market.sources.gcp_catalog import Sku, assemble, market_of
from launcher.services.refresh import ask, build_sources, refresh
from tests.fakes.market import FakeMarket, Fault, Product, Tick, iso, read_trace, sku
from tests.launcher.printed import printed

NOW_MS = 1_763_726_400_000  # 2025-11-21T12:00:00Z
HOUR_MS = 3_600_000
HASTY = Patience(attempts=2, seconds=1.5)
H100 = instance_type_of("gcp", "a3-highgpu-8g")

TRACE = """t_s,cloud,region,zone,instance_type,capacity,spot_usd_per_hour
0,aws,us-east-1,us-east-1a,p5.48xlarge,4,14.25
0,aws,us-east-1,us-east-1b,p5.48xlarge,0,47.21
3600,aws,us-east-1,us-east-1a,p5.48xlarge,4,15.00
0,aws,us-west-2,us-west-2a,p5.48xlarge,4,22.73
0,aws,us-west-2,us-west-2a,p5.4xlarge,4,2.47
0,gcp,us-central1,us-central1-a,a3-highgpu-8g,2,25.69
0,gcp,us-central1,us-central1-b,a3-highgpu-8g,1,26.83
3600,gcp,us-central1,us-central1-b,a3-highgpu-8g,1,26.90
"""


def a3_skus(regions=("us-central1",)):
    """Return an H100 instance in parts: on demand 78.3724 + 6.24 + 3.1824 + .657534 = $88.452334/h, spot a quarter."""
    spot = {"usage": "Preemptible"}
    return [
        sku("Nvidia H100 80GB GPU running in Americas", "9.79655", regions),
        sku("A3 Instance Core running in Americas", "0.03", regions),
        sku("A3 Instance Ram running in Americas", "0.0017", regions, unit="GiBy.h"),
        sku("SSD backed Local Storage", "0.08", regions, unit="GiBy.mo"),
        sku("Nvidia H100 80GB GPU attached to Spot Preemptible VMs running in Americas", "2.4491375", regions, **spot),
        sku("Spot Preemptible A3 Instance Core running in Americas", "0.0075", regions, **spot),
        sku("Spot Preemptible A3 Instance Ram running in Americas", "0.000425", regions, unit="GiBy.h", **spot),
        sku("SSD backed Local Storage attached to Spot Preemptible VMs", "0.02", regions, unit="GiBy.mo", **spot),
        # Rates that do not apply to a started instance.
        sku("DWS Calendar Mode Nvidia H100 80GB GPU running in Americas", "4.20", regions),
        sku("Nvidia H100 80GB GPU attached to DWS Defined Duration VMs running in Americas", "4.90", regions),
        sku("Commitment v1: Nvidia H100 80GB GPU running in Americas for 1 Year", "6.72", regions, usage="Commit1Yr"),
        # The host of another instance type, and a product that we do not use.
        sku("A3Plus Instance Core running in Americas", "0.04", regions),
        sku("Network Vpn Internet Egress from Americas to Africa", "0.12", regions, unit="GiBy"),
    ]


PRODUCTS = [
    Product(region="us-east-1", instance_type="p5.48xlarge", usd="55.0400000000"),
    Product(region="us-west-2", instance_type="p5.48xlarge", usd="55.0400000000"),
    Product(region="us-west-2", instance_type="p5.4xlarge", usd="6.8800000000"),
    Product(region="us-west-2", instance_type="p5.48xlarge", usd="0.0000000000", marketoption="CapacityBlock"),
]


@pytest.fixture
def market(monkeypatch):
    ticks = read_trace(TRACE.splitlines(), NOW_MS - 2 * HOUR_MS)
    rates = {("us-central1-a", "a3-highgpu-8g"): 0.25}
    with FakeMarket(
        ticks=ticks, products=PRODUCTS, skus=a3_skus(), preemption_rates=rates, now_ms=NOW_MS, page=2
    ) as fake:
        for name, value in fake.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        yield fake


@pytest.fixture
def sessions(tmp_path):
    return open_ledger(tmp_path / "ledger.sqlite")


def sources(market, clouds=("aws", "gcp"), patience=None):
    return build_sources(
        clouds,
        since_ms=NOW_MS - 4 * HOUR_MS,
        environ=market.environ,
        accelerators=("H100",),
        patience=patience,
    )


def spot(market, **options):
    return AwsSpot(["p5.48xlarge", "p5.4xlarge"], since_ms=NOW_MS - 4 * HOUR_MS, **options)


def dollars_of(points):
    return {(p.zone or p.region, p.instance_type, p.market.value): p.micro_usd_per_hour / 1e6 for p in points}


# --- accepted rows -----------------------------------------------------------------------------------


def test_prices_of_both_clouds_are_read_page_by_page(market, sessions):
    refreshed = refresh(sources(market), sessions, NOW_MS)
    assert refreshed.exit_code is ExitCode.OK
    assert market.calls["DescribeSpotPriceHistory"] > 2  # more than one page for one region
    assert market.calls["skus"] == 7  # 13 SKUs, 2 a page
    with sessions() as session:
        latest = latest_prices(session)
    assert dollars_of(p for p in latest if p.cloud == "aws") == {
        ("us-east-1a", "p5.48xlarge", "spot"): 15.0,
        ("us-east-1b", "p5.48xlarge", "spot"): 47.21,
        ("us-west-2a", "p5.48xlarge", "spot"): 22.73,
        ("us-west-2a", "p5.4xlarge", "spot"): 2.47,
        ("us-east-1", "p5.48xlarge", "on_demand"): 55.04,
        ("us-west-2", "p5.48xlarge", "on_demand"): 55.04,
        ("us-west-2", "p5.4xlarge", "on_demand"): 6.88,
    }
    gcp = dollars_of(p for p in latest if p.cloud == "gcp" and p.instance_type == "a3-highgpu-8g")
    assert gcp == {
        ("us-central1", "a3-highgpu-8g", "on_demand"): 88.452334,
        ("us-central1", "a3-highgpu-8g", "spot"): 22.113084,
        ("us-central1-a", "a3-highgpu-8g", "spot"): 25.69,
        ("us-central1-b", "a3-highgpu-8g", "spot"): 26.90,
    }
    assert {point.source for point in latest} == {
        "aws ec2 DescribeSpotPriceHistory",
        "aws pricing GetProducts",
        "gcp billing skus",
        "gcp compute advice.capacityHistory",
    }
    assert {p.zone_id for p in latest if p.zone == "us-east-1a"} == {"use1-aza"}


def test_a_type_that_is_not_sold_on_demand_has_no_on_demand_price(market, sessions):
    refresh(sources(market), sessions, NOW_MS)
    with sessions() as session:
        one = [point for point in latest_prices(session) if point.instance_type == "a3-highgpu-1g"]
    assert [(point.market, point.micro_usd_per_hour) for point in one] == [(Market.SPOT, 2_764_135)]


def test_a_second_refresh_adds_changes_and_renews_the_rest(market, sessions):
    first = refresh(sources(market, ["aws"]), sessions, NOW_MS)
    assert first.new == {"aws pricing GetProducts": 3, "aws ec2 DescribeSpotPriceHistory": 5}
    market.now_ms = NOW_MS + HOUR_MS
    market.ticks = [
        *market.ticks,
        Tick(
            at_ms=NOW_MS + HOUR_MS // 2,
            cloud="aws",
            region="us-east-1",
            zone="us-east-1b",
            instance_type="p5.48xlarge",
            usd="20.00",
        ),
    ]
    again = refresh(sources(market, ["aws"]), sessions, market.now_ms)
    assert again.new == {"aws pricing GetProducts": 0, "aws ec2 DescribeSpotPriceHistory": 1}
    with sessions() as session:
        latest = latest_prices(session)
    assert {point.observed_ms for point in latest} == {market.now_ms}
    assert dollars_of(latest)["us-east-1b", "p5.48xlarge", "spot"] == 20.0


def test_the_advisor_returns_preemption_rates_and_launch_odds(market, sessions):
    refresh(sources(market, ["gcp"]), sessions, NOW_MS)
    with sessions() as session:
        fetched = {(a.zone[-1], a.kind): a.value for a in capacity_advice(session)}
    assert fetched == {
        ("a", AdviceKind.PREEMPTION_RATE): 0.25,
        ("a", AdviceKind.OBTAINABILITY): 1.0,
        ("a", AdviceKind.UPTIME_HOURS): 2.0,
        ("b", AdviceKind.OBTAINABILITY): 1.0,
        ("b", AdviceKind.UPTIME_HOURS): 1.0,
    }


def test_the_advisor_is_called_only_for_types_it_covers(market):
    fetched = GcpAdvice([instance_type_of("gcp", "n1-highmem-8+V100:1")], environ=market.environ).fetch(NOW_MS)
    assert "no N1 machine with a GPU" in fetched.notes[0]
    assert not market.calls


def test_only_named_regions_are_queried(market, sessions):
    only = build_sources(
        ("aws",), since_ms=NOW_MS - HOUR_MS, environ=market.environ, regions=["us-west-2"], accelerators=["H100"]
    )
    refresh(only, sessions, NOW_MS)
    with sessions() as session:
        assert {point.region for point in latest_prices(session)} == {"us-west-2"}
    assert market.calls["DescribeRegions"] == 0


def test_a_zone_without_an_id_in_the_price_is_looked_up(market):
    market.with_zone_ids = False
    fetched = spot(market, regions=["us-east-1"]).fetch(NOW_MS)
    assert {(price.zone, price.zone_id) for price in fetched.prices} == {
        ("us-east-1a", "use1-aza"),
        ("us-east-1b", "use1-azb"),
    }
    assert market.calls["DescribeAvailabilityZones"] == 1


def test_a_price_in_yuan_is_refused_as_such(market):
    market.ticks = [
        Tick(at_ms=0, cloud="aws", region="cn-north-1", zone="cn-north-1a", instance_type="p5.48xlarge", usd="99")
    ]
    (price,) = spot(market, regions=["cn-north-1"]).fetch(NOW_MS).prices
    assert price.currency == "CNY"


# --- malformed rows ----------------------------------------------------------------------------------

BAD_TICKS = [
    ({"usd": None}, "its price is empty"),
    ({"usd": ""}, "its price is empty"),
    ({"usd": "NaN"}, "a finite number"),
    ({"usd": "0.00001"}, "stands for no price"),
    ({"usd": "56.00"}, "more than $55.04/h on demand"),
    ({"at": "2006-05-01T00:00:00Z"}, "before 2015"),
    ({"at": "soon"}, "no ISO 8601 time"),
    ({"at": iso(NOW_MS + HOUR_MS)}, "in the future"),
    ({"instance_type": ""}, "its instance type is empty"),
]


@pytest.mark.parametrize(("changes", "reason"), BAD_TICKS, ids=str)
def test_only_the_malformed_row_of_ec2_is_refused(market, changes, reason):
    row = {"cloud": "aws", "region": "us-east-1", "zone": "us-east-1c", "instance_type": "p5.48xlarge", "usd": "14"}
    market.ticks = [*market.ticks, Tick(at_ms=NOW_MS - HOUR_MS, **(row | changes))]
    types = ["p5.48xlarge", ""]
    prices = AwsSpot(types, since_ms=NOW_MS - 4 * HOUR_MS, regions=["us-east-1"]).fetch(NOW_MS).prices
    known = {("aws", "us-east-1", "p5.48xlarge"): 55_040_000}
    belief = believe(prices, source="aws", now_ms=NOW_MS, on_demand=known)
    assert len(belief.points) == 3
    (refusal,) = belief.refused
    assert reason in refusal.reason
    assert refusal.raw.zone == "us-east-1c"


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (Product(region="us-east-1", instance_type="p5.4xlarge", usd="0.0000000000"), "above zero"),
        (Product(region="us-east-1", instance_type="p5.4xlarge", usd="48.16", currency="CNY"), "its currency is CNY"),
        (Product(region="us-east-1", instance_type="p5.4xlarge", usd="5022", unit="Mo"), "it is a price per Mo"),
        ("{broken", "which is no number"),
        ('{"product": {}, "terms": {}}', "which is no number"),
    ],
    ids=str,
)
def test_only_the_malformed_row_of_the_price_list_is_refused(market, product, reason):
    market.products = [*PRODUCTS, product]
    prices = AwsOnDemand(["p5.4xlarge"]).fetch(NOW_MS).prices
    belief = believe(prices, source="aws", now_ms=NOW_MS)
    assert dollars_of(belief.points) == {("us-west-2", "p5.4xlarge", "on_demand"): 6.88}
    (refusal,) = belief.refused
    assert reason in refusal.reason


def without(description):
    return [one for one in a3_skus() if one["description"] != description]


CORE = "A3 Instance Core running in Americas"

BAD_SKUS = [
    (without(CORE), "incomplete: no SKU of A3 Instance Core"),
    ([*a3_skus(), sku(CORE, "0.09", ["us-central1"], sku_id="other")], "unclear: A3 Instance Core costs 0.03"),
    ([*without(CORE), sku(CORE, "0.03", ["us-central1"], unit="mo")], "is priced by mo, not by h"),
    ([*without(CORE), sku(CORE, "0", ["us-central1"])], "unclear: A3 Instance Core costs 0"),
    ([*without(CORE), sku(CORE, "0.03", ["us-central1"], currency="EUR")], "its currency is EUR"),
    ([*without(CORE), sku(CORE, "0.03", ["us-central1"]) | {"pricingInfo": []}], "incomplete: SKU"),
]


@pytest.mark.parametrize(("skus", "reason"), BAD_SKUS, ids=str)
def test_a_type_with_incomplete_parts_is_refused_and_its_spot_price_kept(market, skus, reason):
    market.skus = skus
    (answer,) = ask([GcpCatalog([H100], environ=market.environ)], NOW_MS)
    assert dollars_of(answer.points) == {("us-central1", "a3-highgpu-8g", "spot"): 22.113084}
    (refusal,) = answer.refused
    assert reason in refusal.reason


def test_rates_of_calendar_mode_and_dws_are_skipped_with_a_note(market):
    (answer,) = ask([GcpCatalog([H100], environ=market.environ)], NOW_MS)
    assert len(answer.points) == 2
    assert "3 SKUs were left out" in answer.notes[0]
    assert "DWS Calendar Mode" in answer.notes[0]


def test_an_empty_catalog_and_an_empty_price_history_are_refused(market):
    market.skus, market.products = [], []
    catalog, products = ask([*sources(market, ["gcp"])[:1], *sources(market, ["aws"])[:1]], NOW_MS)
    for answer in (catalog, products):
        (failure,) = answer.failures
        assert isinstance(failure, FeedRefused)
        assert "answered without a single price" in str(failure)


def test_the_price_feed_of_a_simulator_is_refused(monkeypatch):
    """moto answers every EC2 query, and every price is $0.00001 from 2006."""
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_EC2", raising=False)
    with mock_aws():
        (answer,) = ask([AwsSpot(["p5.48xlarge"], since_ms=0, regions=["us-east-1"])], NOW_MS)
    (failure,) = answer.failures
    assert isinstance(failure, FeedRefused)
    assert "stands for no price at all (moto, a simulator of AWS, answers it)" in str(failure)


# --- parts of Google's instance types ----------------------------------------------------------------


def as_text(description, usage="OnDemand"):
    return Sku(
        sku_id="1",
        description=description,
        usage_type=usage,
        regions=("us-central1",),
        unit="h",
        price="1",
        currency="USD",
        effective="2025-11-20T10:00:00Z",
    )


@pytest.mark.parametrize(
    ("description", "usage", "named"),
    [
        ("A2 Instance Core running in Iowa", "OnDemand", ("A2 Instance Core", Market.ON_DEMAND)),
        ("Spot Preemptible A2 Instance Ram running in Iowa", "Preemptible", ("A2 Instance Ram", Market.SPOT)),
        ("Nvidia Tesla A100 80GB GPU running in Iowa", "OnDemand", ("Nvidia Tesla A100 80GB GPU", Market.ON_DEMAND)),
        (
            "Nvidia Tesla T4 GPU attached to Spot Preemptible VMs running in Tokyo",
            "Preemptible",
            ("Nvidia Tesla T4 GPU", Market.SPOT),
        ),
        ("SSD backed Local Storage", "OnDemand", ("SSD backed Local Storage", Market.ON_DEMAND)),
        ("SSD backed Local Storage in Paris", "OnDemand", ("SSD backed Local Storage", Market.ON_DEMAND)),
        # Marked OnDemand in the real catalog, although it is spot.
        (
            "Spot Preemptible A4 Nvidia B200 (1 gpu slice) running in Americas",
            "OnDemand",
            ("A4 Nvidia B200 (1 gpu slice)", Market.SPOT),
        ),
        ("DWS Calendar Mode A4 Nvidia B200 (1 gpu slice) running in Americas", "OnDemand", None),
        ("Nvidia H100 80GB GPU attached to DWS Defined Duration VMs running in Americas", "OnDemand", None),
        ("Reserved A2 Instance Core in Iowa", "OnDemand", None),
        ("A2 Instance Core running in Iowa", "Commit1Yr", None),
    ],
)
def test_a_sku_names_a_part_and_a_market_or_another_product(description, usage, named):
    assert market_of(as_text(description, usage)) == named


def test_a_b200_is_priced_with_its_share_of_the_instance():
    b200 = Sku(**{**_fields(as_text("Spot Preemptible A4 Nvidia B200 (1 gpu slice) in Iowa")), "price": "4.9542"})
    (row,) = assemble([b200], [instance_type_of("gcp", "a4-highgpu-8g")]).prices
    assert (Decimal(row.price), row.market) == (Decimal("39.6336"), Market.SPOT)


def _fields(one):
    return {name: getattr(one, name) for name in Sku.__dataclass_fields__}


@pytest.mark.parametrize(("text", "hours"), [("36000s", 10.0), ("1800.0s", 0.5), ("10h", None), ("", None)])
def test_a_duration_of_google_is_in_seconds(text, hours):
    assert hours_of(text) == hours


# --- faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.THROTTLED, Fault.BROKEN])
def test_the_cloud_clients_retry_after_a_temporary_fault(market, sessions, fault):
    for service in ("ec2", "pricing", "billing", "compute"):
        market.fail(service, fault)
    refreshed = refresh(sources(market), sessions, NOW_MS)
    assert refreshed.exit_code is ExitCode.OK
    assert all(answer.points and not answer.failures for answer in refreshed.answers)


@pytest.mark.parametrize(
    ("source", "service", "action", "words"),
    [
        (lambda m: spot(m, regions=["us-east-1"], patience=HASTY), "ec2", "DescribeSpotPriceHistory", "RequestLimitEx"),
        (lambda m: AwsOnDemand(["p5.4xlarge"], patience=HASTY), "pricing", "GetProducts", "ThrottlingException"),
        (lambda m: GcpCatalog([H100], environ=m.environ, patience=HASTY), "billing", "skus", "kept refusing (429"),
        (lambda m: GcpAdvice([H100], environ=m.environ, patience=HASTY), "compute", "machineTypes", "kept refusing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_client_gives_up_in_the_end_with_a_remedy(market, source, service, action, words):
    market.fail(service, Fault.THROTTLED, times=1000)
    with pytest.raises(SourceFailed, match="try again in a minute") as failed:
        source(market).fetch(NOW_MS)
    assert words in str(failed.value)
    fewest = 1 if isinstance(source(market), (GcpCatalog, GcpAdvice)) else 2  # Google's client counts time, not tries
    assert fewest <= market.calls[action] <= 10  # bounded: no retries around a client that retries


def test_a_failing_region_does_not_affect_others(market):
    fetched = spot(market, regions=["us-east-1", "us-west-2"], patience=Patience(attempts=1)).fetch(NOW_MS)
    assert not fetched.failures
    market.fail("ec2", Fault.BROKEN)
    fetched = spot(market, regions=["us-east-1", "us-west-2"], patience=Patience(attempts=1)).fetch(NOW_MS)
    assert len({price.region for price in fetched.prices}) == 1
    (failure,) = fetched.failures
    assert "InternalError" in str(failure)


def test_a_failing_source_is_reported_and_the_others_are_kept(market, sessions):
    market.fail("billing", Fault.BROKEN, times=1000)
    refreshed = refresh(sources(market, patience=HASTY), sessions, NOW_MS)
    failed = {answer.source: answer.failures for answer in refreshed.answers if answer.failures}
    assert list(failed) == ["gcp billing skus"]
    assert refreshed.exit_code is ExitCode.FAILURE
    assert refreshed.new["aws ec2 DescribeSpotPriceHistory"] == 5
    assert refreshed.new["gcp compute advice.capacityHistory"] == 3


@pytest.mark.parametrize("service", ["ec2", "billing"])
def test_an_answer_in_another_format_is_a_failure_and_no_price(market, sessions, service):
    market.fail(service, Fault.GARBLED, times=1000)
    refreshed = refresh(sources(market, patience=HASTY), sessions, NOW_MS)
    assert sum(bool(answer.failures) for answer in refreshed.answers) == 1
    assert refreshed.exit_code is ExitCode.FAILURE


@pytest.mark.parametrize(
    ("service", "words"),
    [("ec2", "ec2:DescribeSpotPriceHistory"), ("pricing", "pricing:GetProducts"), ("compute", "role Compute Viewer")],
)
def test_a_refused_query_names_the_missing_permission(market, service, words):
    market.fail(service, Fault.DENIED, times=1000)
    answers = ask(sources(market, patience=HASTY), NOW_MS)
    (failure,) = {type(one) for answer in answers for one in answer.failures}
    assert failure is MissingCredentials
    assert words in next(str(one) for answer in answers for one in answer.failures)


def test_spot_is_compared_with_the_ledgers_on_demand_if_the_list_is_silent(market, sessions):
    refresh(sources(market, ["aws"]), sessions, NOW_MS)
    market.now_ms = NOW_MS + HOUR_MS
    dear = Tick(
        at_ms=market.now_ms, cloud="aws", region="us-east-1", zone="us-east-1d", instance_type="p5.48xlarge", usd="60"
    )
    market.ticks = [*market.ticks, dear]
    market.fail("pricing", Fault.BROKEN, times=1000)
    refreshed = refresh(sources(market, ["aws"], patience=HASTY), sessions, market.now_ms)
    (refusal,) = refreshed.answers[1].refused
    assert "more than $55.04/h on demand" in refusal.reason


def test_missing_credentials_come_before_other_failures():
    def failing(number):
        raise (MissingCredentials("who?") if number == 2 else SourceFailed("no answer"))

    with pytest.raises(MissingCredentials):
        ask_all([1, 2, 3], failing)
    assert ask_all([], failing) == ([], [])


# --- the command -------------------------------------------------------------------------------------


@pytest.fixture
def cli(market, tmp_path, monkeypatch):
    """Call `spotrl` at noon of the trace against the fake market, with a temporary ledger."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(prices_module, "now_ms", lambda: market.now_ms)
    return lambda *words: run(["prices", *words])


def test_the_command_records_both_clouds_and_shows_source_and_age(market, cli, capsys):
    assert cli("refresh", "--gpu", "H100") == ExitCode.OK
    out = capsys.readouterr()
    assert "aws ec2 DescribeSpotPriceHistory" in out.out
    assert "3 SKUs were left out" in out.err
    market.now_ms += 3 * HOUR_MS
    assert cli("show", "--gpu", "H100", "--market", "spot") == ExitCode.OK
    shown = capsys.readouterr().out
    assert "us-east-1a (use1-aza)" in shown
    assert "3h ago" in shown
    assert "gcp compute advice.capacityHistory" in shown
    assert "on_demand" not in shown


def test_the_prices_command_prints_json(market, cli, capsys):
    assert cli("refresh", "--gpu", "H100", "--cloud", "aws", "--json") == ExitCode.OK
    fetched = printed("prices-refresh", capsys.readouterr().out)
    assert [(one["source"], one["prices"], one["new"]) for one in fetched["sources"]] == [
        ("aws pricing GetProducts", 3, 3),
        ("aws ec2 DescribeSpotPriceHistory", 5, 5),
    ]
    assert cli("show", "--json") == ExitCode.OK
    rows = printed("prices-show", capsys.readouterr().out)["prices"]
    row = next(row for row in rows if row["zone"] == "us-east-1a")
    assert row["usd_per_hour"] == "$15"
    assert (row["accelerator"], row["gpus"], row["age_seconds"]) == ("H100", 8, 0)
    assert row["effective"] == "2025-11-21T11:00:00+00:00"


def test_refused_rows_are_listed_and_counted(market, cli, capsys):
    for number in range(7):
        bad = Tick(at_ms=0, cloud="aws", region="us-east-1", zone=f"z{number}", instance_type="p5.48xlarge", usd="0")
        market.ticks = [*market.ticks, bad]
    assert cli("refresh", "--gpu", "H100", "--cloud", "aws") == ExitCode.OK
    err = capsys.readouterr().err
    assert err.count("its price is 0; a price is above zero") == 5
    assert "2 more of aws ec2 DescribeSpotPriceHistory" in err


def test_the_history_of_a_zone_is_shown_and_drawn(market, cli, capsys, tmp_path):
    assert cli("refresh", "--gpu", "H100") == ExitCode.OK
    capsys.readouterr()
    assert cli("history", "us-east-1a", "--last", "1d") == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert ["10:00" in lines[1] and "$14.25" in lines[1], "11:00" in lines[2] and "$15.00" in lines[2]] == [True, True]
    assert cli("history", "use1-aza", "--json") == ExitCode.OK
    assert len(printed("prices-history", capsys.readouterr().out)["prices"]) == 2
    page = tmp_path / "chart.html"
    assert cli("history", "us-east-1a", "--html", str(page)) == ExitCode.OK
    html = page.read_text()
    assert "<svg" in html
    assert "spot p5.48xlarge in us-east-1a" in html
    assert "<script" not in html


def test_a_chart_that_cannot_be_written_is_reported(market, cli, capsys, tmp_path):
    cli("refresh", "--gpu", "H100", "--cloud", "aws")
    assert cli("history", "us-east-1a", "--html", str(tmp_path / "none" / "chart.html")) == ExitCode.FAILURE
    assert "chart.html cannot be written (No such file or directory)" in capsys.readouterr().err


def test_a_place_without_prices_names_those_that_have_some(market, cli, capsys):
    assert cli("history", "us-east-1a") == ExitCode.FAILURE
    assert "no price is known yet" in capsys.readouterr().err
    assert cli("refresh", "--gpu", "H100", "--cloud", "aws") == ExitCode.OK
    assert cli("history", "eu-west-1a") == ExitCode.FAILURE
    assert "us-east-1a, us-east-1b" in capsys.readouterr().err


def test_watching_prints_changed_prices(market, cli, capsys, monkeypatch):
    naps = []

    def nap(seconds):
        naps.append(seconds)
        market.now_ms += 5 * 60_000
        market.ticks = [
            *market.ticks,
            Tick(
                at_ms=market.now_ms,
                cloud="aws",
                region="us-east-1",
                zone="us-east-1a",
                instance_type="p5.48xlarge",
                usd="16.00",
            ),
        ]

    # A separate clock, because other threads of this process may sleep on the market's clock.
    monkeypatch.setattr(prices_module, "time", SimpleNamespace(sleep=nap, time_ns=time.time_ns))
    assert cli("watch", "--gpu", "H100", "--cloud", "aws", "--every", "5m", "--times", "2") == ExitCode.OK
    out = capsys.readouterr().out
    assert "7 moved or new" in out
    assert "1 moved or new" in out
    assert "spot p5.48xlarge in us-east-1a (use1-aza) (us-east-1): $15.00/h -> $16.00/h" in out
    assert naps == [300.0]
    assert cli("watch", "--gpu", "H100", "--cloud", "aws", "--times", "1", "--json") == ExitCode.OK
    printed("prices-watch", capsys.readouterr().out)


def test_watch_never_asks_the_clouds_without_a_pause(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    assert run(["prices", "watch", "--every", "0s"]) == ExitCode.USAGE
    assert "0s is less than a second" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["show"], ["refresh"], ["watch", "--times", "1"], ["show", "--json"]])
def test_without_credentials_the_command_names_them_and_quotes_no_shipped_price(command, tmp_path, monkeypatch, capsys):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    nowhere = str(tmp_path / "nowhere")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "CLOUDSDK_CONFIG", "HOME"):
        monkeypatch.setenv(name, nowhere)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    assert run(["prices", *command]) == ExitCode.CREDENTIALS
    captured = capsys.readouterr()
    assert "AWS found no credentials" in captured.err
    assert "Google Cloud found no credentials" in captured.err
    assert "gcloud auth application-default login" in captured.err
    assert "aws configure" in captured.err
    assert "$" not in captured.out


def test_an_unknown_gpu_is_a_mistake_of_usage(cli, capsys):
    assert cli("show", "--gpu", "H1000") == ExitCode.USAGE
    assert "there are A100, A100-80GB" in capsys.readouterr().err
