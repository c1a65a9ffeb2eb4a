"""Refreshing price tables (new, kept and reported rows), and `spotrl catalog` on a temporary ledger."""

import http.server
import io
import re
import threading
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from engine.events import Market
from launcher.cli import catalog as catalog_module
from launcher.cli import main
from launcher.cli.main import cli
from launcher.exit_codes import ExitCode, Failure
from launcher.ledger.prices import record_prices
from launcher.ledger.store import open_ledger, writing
from launcher.market.gpuhunt_prices import fetch_gpuhunt, version_ms
from launcher.market.offers import (
    CatalogError,
    Offer,
    Prices,
    current_catalog,
    read_catalog,
    read_folder,
    shipped_catalog,
)
from launcher.market.prices import Fetched, PricePoint, RawPrice
from launcher.market.quality import Quality
from launcher.services import refresh as refresh_module
from launcher.services.refresh_catalog import changes, merged, offers_from, replace_tables
from tests.launcher.printed import printed

NOW_MS = 1_795_348_800_000  # 2026-11-22 12:00 UTC
HOUR_MS = 3_600_000


def point(
    usd: float,
    zone: str = "us-east-2a",
    zone_id: str = "use2-az1",
    *,
    market: Market = Market.SPOT,
    instance_type: str = "p5.48xlarge",
    cloud: str = "aws",
    region: str = "us-east-2",
    observed_ms: int = NOW_MS,
) -> PricePoint:
    return PricePoint(
        cloud=cloud,
        region=region,
        zone=zone,
        zone_id=zone_id,
        instance_type=instance_type,
        market=market,
        micro_usd_per_hour=round(usd * 1_000_000),
        source="aws ec2 DescribeSpotPriceHistory",
        source_id="",
        effective_ms=observed_ms - HOUR_MS,
        observed_ms=observed_ms,
    )


LIST_PRICE = point(55.04, "", "", market=Market.ON_DEMAND)


def gcp(usd: float, zone: str, region: str = "us-east4", market: Market = Market.SPOT) -> PricePoint:
    return point(usd, zone, "", cloud="gcp", region=region, instance_type="a3-highgpu-8g", market=market)


# --- points -> offers --------------------------------------------------------------------------------


def test_a_point_becomes_an_offer_with_its_gpus_source_and_time():
    (offer,) = offers_from([point(17.5)]).offers
    assert offer == Offer(
        cloud="aws",
        region="us-east-2",
        zone="us-east-2a",
        zone_id="use2-az1",
        instance_type="p5.48xlarge",
        accelerator="H100",
        gpus=8,
        gpu_mem_gib=80,
        market=Market.SPOT,
        micro_usd_per_hour=17_500_000,
        source="aws ec2 DescribeSpotPriceHistory",
        observed_at="2026-11-22T12:00:00+00:00",
        quality=Quality.OK,
    )


def test_the_newest_of_several_prices_counts():
    points = [point(17, observed_ms=NOW_MS - 1), point(18), point(16, observed_ms=NOW_MS - 2)]
    assert [offer.micro_usd_per_hour for offer in offers_from(points).offers] == [18_000_000]


def test_an_unknown_instance_type_is_named_not_guessed():
    observed = offers_from([point(1, instance_type="p9.metal"), point(17)])
    assert [offer.instance_type for offer in observed.offers] == ["p5.48xlarge"]
    assert observed.unknown == ("aws p9.metal",)


def test_a_spot_price_of_a_whole_region_is_named_by_the_region():
    assert [offer.zone for offer in offers_from([gcp(20, "")]).offers] == ["us-east4"]
    assert [offer.zone for offer in offers_from([gcp(88, "", market=Market.ON_DEMAND)]).offers] == [""]


# --- offers -> tables --------------------------------------------------------------------------------


def known(*points: PricePoint) -> tuple[Offer, ...]:
    return offers_from(points).offers


def test_a_zone_is_identified_by_its_id_not_its_account_name():
    before = merged((), known(LIST_PRICE, point(17)))
    after = merged(before, known(point(18, zone="us-east-2c")))
    assert [(offer.zone, offer.micro_usd_per_hour) for offer in after] == [("", 55_040_000), ("us-east-2c", 18_000_000)]


def test_a_price_without_a_newer_answer_keeps_its_date():
    before = merged((), known(point(17, observed_ms=NOW_MS - HOUR_MS), point(15, "us-east-2b", "use2-az2")))
    after = merged(before, known(point(16, "us-east-2b", "use2-az2")))
    assert [(offer.zone_id, offer.observed_at[11:13]) for offer in after] == [("use2-az1", "11"), ("use2-az2", "12")]


def test_a_regional_price_is_dropped_once_zone_prices_are_known():
    before = merged((), known(gcp(20, ""), gcp(88, "", market=Market.ON_DEMAND)))
    after = merged(before, known(gcp(19, "us-east4-a"), gcp(21, "us-east4-b")))
    assert [offer.zone for offer in after] == ["", "us-east4-a", "us-east4-b"]


def test_verdicts_consider_all_merged_rows_together():
    after = merged(known(LIST_PRICE), known(point(55.04), point(5.504, "us-east-2b", "use2-az2")))
    assert [offer.quality for offer in after] == [Quality.OK, Quality.SAME_AS_ON_DEMAND, Quality.TENTH_OF_ON_DEMAND]


def test_changes_are_reported_by_kind_and_a_newer_date_is_no_change():
    old = merged((), known(point(17), point(15, "us-east-2b", "use2-az2"), point(20, "us-east-2c", "use2-az3")))
    new = merged((), known(LIST_PRICE, point(18), point(15, "us-east-2b", "use2-az2", observed_ms=NOW_MS + HOUR_MS)))
    assert [(change.kind, change.offer.zone_id) for change in changes(old, new)] == [
        ("new", ""),
        ("price", "use2-az1"),
        ("gone", "use2-az3"),
    ]
    assert changes(new, new) == []
    assert [change.kind for change in changes(new, [replace(each, quality=Quality.OUTLIER) for each in new[:1]])] == [
        "quality",
        "gone",
        "gone",
    ]


# --- tables -> disk ----------------------------------------------------------------------------------


def test_written_tables_are_read_back_and_old_files_are_deleted(tmp_path):
    old = {}
    for usd in (17, 18, 19, 20):
        offers = known(LIST_PRICE, point(usd))
        replace_tables(tmp_path, offers, old, source="test", now_ms=NOW_MS)
        assert read_folder(tmp_path).all_offers() == offers
        old = read_folder(tmp_path).tables
    assert old["aws_spot"].fetched_at == "2026-11-22T12:00:00+00:00"
    assert len(list(tmp_path.glob("aws_spot*.csv"))) == 2, "the last one too, for who was reading it"


def test_tables_that_were_not_requested_stay(tmp_path):
    replace_tables(tmp_path, known(gcp(20, "us-east4-a")), {}, source="test", now_ms=NOW_MS)
    replace_tables(tmp_path, known(point(17)), read_folder(tmp_path).tables, source="test", now_ms=NOW_MS)
    assert set(read_folder(tmp_path).tables) == {"aws_spot", "gcp_spot"}


def test_a_crash_before_the_manifest_leaves_the_old_tables(tmp_path, monkeypatch):
    old = known(LIST_PRICE, point(17))
    replace_tables(tmp_path, old, {}, source="test", now_ms=NOW_MS)
    write = refresh_catalog_write()

    def crash(path: Path, text: str) -> None:
        if path.name == "manifest.json":
            raise KeyboardInterrupt
        write(path, text)

    monkeypatch.setattr("launcher.services.refresh_catalog._write", crash)
    with pytest.raises(KeyboardInterrupt):
        replace_tables(tmp_path, known(LIST_PRICE, point(99)), {}, source="test", now_ms=NOW_MS)
    assert read_folder(tmp_path).all_offers() == old


def refresh_catalog_write():
    from launcher.services import refresh_catalog

    return refresh_catalog._write


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CatalogError, match=r"cannot be written .* as they were"):
        replace_tables(tmp_path / "file", known(point(17)), {}, source="test", now_ms=NOW_MS)


# --- the command -------------------------------------------------------------------------------------


@dataclass
class FakeSource:
    """A price feed with answers set by the test."""

    cloud: str
    prices: tuple[RawPrice, ...] = ()
    failure: Failure | None = None
    gives_prices: bool = True
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{self.cloud} fake"

    def fetch(self, now_ms: int) -> Fetched:
        if self.failure:
            raise self.failure
        return Fetched(prices=self.prices)


def raw(price: str, zone: str = "", zone_id: str = "", market: Market = Market.ON_DEMAND) -> RawPrice:
    return RawPrice(
        cloud="aws",
        region="us-east-2",
        zone=zone,
        zone_id=zone_id,
        instance_type="p5.48xlarge",
        market=market,
        price=price,
        currency="USD",
        unit="hour",
        effective="2026-11-22T11:00:00+00:00",
        source="aws fake",
        source_id="sku-1",
    )


AWS_PRICES = (raw("55.04"), raw("17.5", "us-east-2a", "use2-az1", Market.SPOT))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Call `spotrl catalog` at noon with made-up sources, in a temporary home and ledger."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(catalog_module, "now_ms", lambda: NOW_MS)
    sessions = open_ledger(tmp_path / "ledger.sqlite")

    def run(*words: str, sources=(), points=()):
        monkeypatch.setattr(
            refresh_module, "build_sources", lambda clouds, **_: [s for s in sources if s.cloud in clouds]
        )
        if points:
            with writing(sessions) as session:
                record_prices(session, points)
        try:
            code, lines = None, io.StringIO()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("sys.stdout", lines)
                patch.setattr("sys.stderr", lines)
                code = cli.main(["catalog", *words], obj=sessions, standalone_mode=False)
        except Failure as failure:
            return failure.exit_code, str(failure)
        return code, lines.getvalue()

    run.folder = tmp_path / "home" / "catalogs"
    return run


def test_refresh_writes_cloud_prices_to_the_users_home_and_lists_changes(run):
    code, text = run("refresh", "--cloud", "aws", sources=[FakeSource("aws", AWS_PRICES)])
    assert code == ExitCode.OK
    assert "~ aws us-east-2a p5.48xlarge spot: $17.29/h -> $17.50/h (+1.2 %), ok" in text
    assert f"Replaced the tables of aws in {run.folder}." in text
    own = read_folder(run.folder)
    assert set(own.tables) == {"aws_on_demand", "aws_spot"}
    (spot,) = [offer for offer in own.offers["aws_spot"] if offer.quality is Quality.OK]
    assert (spot.zone_id, spot.source, spot.observed_at) == ("use2-az1", "aws fake", "2026-11-22T12:00:00+00:00")
    assert current_catalog(run.folder).offers["gcp_spot"] == shipped_catalog(Prices.NEWEST).offers["gcp_spot"]


def test_a_dry_run_writes_nothing(run):
    code, text = run("refresh", "--cloud", "aws", "--dry-run", sources=[FakeSource("aws", AWS_PRICES)])
    assert code == ExitCode.OK
    assert "Dry run: would replace" in text
    assert not run.folder.exists()


def test_a_failing_source_keeps_its_clouds_tables_and_sets_the_exit_code(run):
    sources = [FakeSource("aws", AWS_PRICES), FakeSource("gcp", failure=NoCredentials("no Google credentials"))]
    code, text = run("refresh", sources=sources)
    assert code == ExitCode.CREDENTIALS
    assert "Error: no Google credentials" in text
    assert "The tables of gcp are as they were." in text
    assert set(read_folder(run.folder).tables) == {"aws_on_demand", "aws_spot"}


def test_one_failing_source_of_two_keeps_the_tables_of_their_cloud(run):
    broken = FakeSource("aws", failure=Failure("throttled"))
    broken.name = "aws spot"
    code, text = run("refresh", "--cloud", "aws", "--json", sources=[FakeSource("aws", AWS_PRICES[:1]), broken])
    assert code == ExitCode.FAILURE
    answer = printed("catalog-refresh", text)
    assert answer["written"] == []
    assert "throttled" in answer["failures"]
    assert not run.folder.exists()


def test_failing_capacity_advice_does_not_block_prices(run):
    advice = FakeSource("aws", failure=Failure("no advice today"), gives_prices=False)
    advice.name = "aws advice"
    code, _ = run("refresh", "--cloud", "aws", sources=[FakeSource("aws", AWS_PRICES), advice])
    assert code == ExitCode.FAILURE
    assert "aws_spot" in read_folder(run.folder).tables


def test_refresh_from_the_ledger_calls_no_cloud(run):
    unused = FakeSource("aws", failure=AssertionError("asked"))
    code, _ = run("refresh", "--cloud", "aws", "--from", "recorded", sources=[unused], points=[LIST_PRICE, point(16)])
    assert code == ExitCode.OK
    prices = {offer.micro_usd_per_hour for offer in read_folder(run.folder).offers["aws_spot"]}
    assert 16_000_000 in prices


def test_a_refresh_from_an_empty_ledger_is_reported_and_changes_nothing(run):
    code, text = run("refresh", "--from", "recorded")
    assert code == ExitCode.STALE_CATALOG
    assert "the ledger has no price of aws; `spotrl prices refresh` asks for them" in text
    assert not run.folder.exists()


def test_diff_shows_what_a_refresh_changed(run):
    assert run("diff") == (None, "Nothing changed.\n")
    run("refresh", "--cloud", "aws", sources=[FakeSource("aws", AWS_PRICES)])
    _, text = run("diff")
    assert "~ aws us-east-2a p5.48xlarge spot: $17.29/h -> $17.50/h" in text
    _, text = run("diff", "--json")
    assert printed("catalog-diff", text)["changes"][0]["kind"] in ("price", "quality")


def test_show_prints_price_age_source_and_verdict(run):
    _, text = run("show", "--gpu", "h100", "--market", "spot")
    assert "same-as-on-demand" in text
    assert "skypilot-org/skypilot-catalog v8 aws/vms.csv, commit e385a0d: date unknown" in text
    assert "too old to buy by" in text
    run("refresh", "--cloud", "aws", sources=[FakeSource("aws", AWS_PRICES)])
    _, text = run("show", "--gpu", "h100")
    assert "aws fake: 0ms old" in text
    _, text = run("show", "--shipped", "--json")
    shown = printed("catalog-show", text)
    assert len(shown["offers"]) == len(shipped_catalog(Prices.NEWEST).all_offers())
    assert {offer["age"] for offer in shown["offers"]} == {"unknown", "expired"}
    _, text = run("show", "--shipped", "--prices", "recorded", "--json")
    assert len(printed("catalog-show", text)["offers"]) == len(read_catalog())


def test_show_lists_the_cheapest_gpu_hour_first(run):
    _, text = run("show", "--gpu", "h100", "--market", "spot")
    prices = [float(re.findall(r"\$([\d.]+)", line)[1]) for line in text.splitlines() if " spot " in line]
    assert len(set(prices)) > 5
    assert prices == sorted(prices)


def test_diff_shows_how_prices_moved_since_they_were_recorded(run):
    _, text = run("diff", "recorded", "shipped")
    assert "~ aws use2-az3 p5en.48xlarge spot: $16.09/h -> $26.57/h (+65.1 %), unverified" in text


def test_show_lists_what_exists_when_nothing_matches(run):
    _, text = run("show", "--gpu", "H1000")
    assert text.startswith("No such offer. The tables have A100, A100-80GB, A10G, B200, H100")


def test_validate_passes_the_shipped_tables_and_lists_doubtful_rows(run):
    code, text = run("validate")
    assert code == ExitCode.OK
    assert "aws apse3-az1 p5.48xlarge spot: tenth-of-on-demand, $7.60/h" in text


def test_validate_with_json_counts_rows_by_quality(run):
    code, text = run("validate", "--json")
    answer = printed("catalog-validate", text)
    assert code == ExitCode.OK
    assert sum(answer["quality"].values()) == answer["rows"] > 0


def test_a_corrected_table_gets_new_verdicts_and_a_new_checksum(run, tmp_path):
    replace_tables(tmp_path / "own", known(LIST_PRICE, point(17)), {}, source="test", now_ms=NOW_MS)
    (path,) = (tmp_path / "own").glob("aws_spot*.csv")
    path.write_text(path.read_text().replace("17.00", "55.04"))
    code, text = run("validate", str(tmp_path / "own"))
    assert code == ExitCode.STALE_CATALOG
    assert "another sha256" in text
    code, text = run("validate", str(tmp_path / "own"), "--seal")
    assert code == ExitCode.OK
    assert "same-as-on-demand" in text
    assert read_folder(tmp_path / "own").offers["aws_spot"][0].quality is Quality.SAME_AS_ON_DEMAND


def test_validate_refuses_a_verdict_that_differs_from_the_rules(run, tmp_path):
    wrong = [replace(each, quality=Quality.OK) for each in known(LIST_PRICE, point(55.04))]
    replace_tables(tmp_path / "own", wrong, {}, source="test", now_ms=NOW_MS)
    code, text = run("validate", str(tmp_path / "own"))
    assert code == ExitCode.STALE_CATALOG
    assert "another verdict than the rules" in text


def test_validate_with_json_prints_one_object_for_a_wrong_table_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    wrong = [replace(each, quality=Quality.OK) for each in known(LIST_PRICE, point(55.04))]
    replace_tables(tmp_path / "own", wrong, {}, source="test", now_ms=NOW_MS)
    assert main.run(["catalog", "validate", str(tmp_path / "own"), "--json"]) == ExitCode.STALE_CATALOG
    out, err = capsys.readouterr()
    assert len(printed("catalog-validate", out)["wrong"]) == 1
    assert "another verdict than the rules" in err


class NoCredentials(Failure):
    exit_code = ExitCode.CREDENTIALS


# --- gpuhunt -----------------------------------------------------------------------------------------

GPUHUNT_COLUMNS = (
    "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags,cpu_arch,"
    "provider_data"
)


def hunted(name: str, location: str, price: float, gpus: int, gpu: str, spot: bool, flags: str = "") -> str:
    return f"{name},{location},{price},8,64,{gpus},{gpu},80.0,{spot},,nvidia,{flags},x86,{{}}"


@pytest.fixture
def published(monkeypatch):
    """Serve catalogs on loopback like dstack; the gpuhunt library is the real one."""
    pytest.importorskip("gpuhunt")
    rows = {
        "aws": [
            hunted("p5.48xlarge", "us-east-1", 55.04, 8, "H100", False),
            hunted("p5.48xlarge", "us-east-1", 14.0, 8, "H100", True),
            hunted("m9.huge", "us-east-1", 1.0, 1, "H100", False),
        ],
        "gcp": [
            hunted("a3-highgpu-8g", "us-east4-a", 88.123456, 8, "H100", False),
            hunted("a3-highgpu-8g", "us-east4-b", 88.123456, 8, "H100", False),
            hunted("a3-highgpu-8g", "us-east4-a", 20.5, 8, "H100", True),
            hunted("a3-highgpu-8g", "us-east4-a", 33.0, 8, "H100", False, "gcp-dws-calendar-mode"),
            hunted("a3-highgpu-1g", "us-east4-a", 11.0, 1, "H100", False),
            hunted("n1-highmem-8", "us-east4-c", 0.84, 1, "T4", False),
        ],
    }

    class Published(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, provider, *rest = self.path.split("/")
            if provider not in rows:
                self.send_error(404)
                return
            body = io.BytesIO(b"20261121")
            if rest != ["version"]:
                body = io.BytesIO()
                with zipfile.ZipFile(body, "w") as archive:
                    archive.writestr(f"{provider}.csv", "\n".join([GPUHUNT_COLUMNS, *rows[provider]]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.getvalue())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Published)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", f"http://127.0.0.1:{server.server_port}")
    yield rows
    server.shutdown()
    server.server_close()


def test_only_the_priced_offers_of_gpuhunt_are_taken(published):
    points = fetch_gpuhunt(NOW_MS)
    found = {(p.cloud, p.instance_type, p.zone or p.region, p.market.value, p.micro_usd_per_hour) for p in points}
    assert found == {
        ("aws", "p5.48xlarge", "us-east-1", "on_demand", 55_040_000),
        ("gcp", "a3-highgpu-8g", "us-east4", "on_demand", 88_123_456),
        ("gcp", "a3-highgpu-8g", "us-east4-a", "spot", 20_500_000),
        ("gcp", "n1-highmem-8+T4:1", "us-east4", "on_demand", 840_000),
    }, "no AWS spot without its zone, no calendar mode, nothing that is not sold on demand, no unknown machine"
    assert {p.source for p in points} == {"gpuhunt catalog 20261121"}
    assert {p.observed_ms for p in points} == {version_ms("20261121")}


def test_a_refresh_from_gpuhunt_is_unverified_and_dated_by_its_catalog(published, run):
    code, _ = run("refresh", "--from", "gpuhunt")
    assert code == ExitCode.OK
    (offer,) = [
        offer
        for offer in read_folder(run.folder).all_offers()
        if offer.source == "gpuhunt catalog 20261121" and offer.zone
    ]
    assert (offer.zone, offer.quality, offer.observed_at) == (
        "us-east4-a",
        Quality.UNVERIFIED,
        "2026-11-21T00:00:00+00:00",
    )


def test_a_catalog_that_gpuhunt_cannot_load_changes_no_table(published, run):
    del published["gcp"]
    code, text = run("refresh", "--from", "gpuhunt")
    assert code == ExitCode.FAILURE
    assert "gpuhunt has no catalog of gcp today" in text
    assert not run.folder.exists()


def test_a_gpuhunt_catalog_without_a_date_is_refused():
    with pytest.raises(Failure, match="has no date"):
        version_ms("latest")
