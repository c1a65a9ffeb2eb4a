"""FOCUS rows of runs: by node and hour, in the columns of the specification, with the cost of the run as their sum."""

import csv
import json
from collections import defaultdict
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from engine.events import Judged
from launcher.cli.main import run as spotrl
from launcher.clouds.base import Instance, InstanceState
from launcher.ledger.accounting import run_costs, side_costs_of_run
from launcher.ledger.models import BillingInterval, Node, Removal
from launcher.ledger.node_history import node_records
from launcher.ledger.store import writing
from launcher.provision.sky.node_files import NodeFiles
from launcher.report.focus import COLUMNS, focus_rows
from launcher.runs.runs import request_stop
from tests.launcher import test_promoted_costs
from tests.launcher.cluster.stage import ledger
from tests.launcher.cluster.test_moving import Stage
from tests.launcher.made_ledger import HOUR_MS, MINUTE_MS, START_MS, MadeLedger, a_run, a_session
from tests.launcher.test_accounting import MOMENT, histories

promoted = test_promoted_costs.made


def micro(rows, column="BilledCost") -> int:
    return round(sum(Decimal(row[column]) for row in rows) * 1_000_000)


def rows_of(made: MadeLedger, now: int) -> list[dict]:
    made.session.flush()
    return list(focus_rows(made.session, made.run, START_MS + now))


def billed(made: MadeLedger, node: Node, end: int, micro_usd: int, basis: str = "metered") -> None:
    """Write the bill of a node from the start of the run on, at $3.60 an hour."""
    made.session.add(
        BillingInterval(
            node_id=node.id,
            start_ms=START_MS,
            end_ms=START_MS + end,
            micro_usd_per_hour=3_600_000,
            micro_usd=micro_usd,
            basis=basis,
        )
    )


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories(), MOMENT)
def test_the_rows_of_a_random_history_add_up_to_its_cost(history, now):
    with a_session() as session:
        made = a_run(session)
        for fact in history:
            node = made.node(fact["slot"], fact["generation"], market=fact["market"], rate=fact["rate"])
            moments = fact["moments"]
            for start, end in zip(moments[::2], moments[1::2], strict=False):
                made.bill(node, start, end)
        rows = rows_of(made, now)
        assert micro(rows) == run_costs(session, made.run, START_MS + now).total
        assert all(set(row) <= set(COLUMNS) for row in rows)
        for row in rows:
            start, end = (datetime.fromisoformat(row[f"ChargePeriod{edge}"]) for edge in ("Start", "End"))
            assert (start.minute, start.second, end - start) == (0, 0, timedelta(hours=1))
            assert datetime.fromisoformat(row["BillingPeriodStart"]) <= start
            assert end <= datetime.fromisoformat(row["BillingPeriodEnd"])


def test_a_node_has_a_row_for_each_hour_with_its_place_market_prices_and_labels():
    with a_session() as session:
        made = a_run(session)
        made.node("spot-0", rate=3_600_000, on_demand=9_000_000, up=50 * MINUTE_MS, end=130 * MINUTE_MS)
        first, second, third = rows_of(made, 0)
    assert [row["ChargePeriodStart"][11:16] for row in (first, second, third)] == ["08:00", "09:00", "10:00"]
    assert [row["BilledCost"] for row in (first, second, third)] == ["0.600000", "3.600000", "0.600000"]
    assert [row["ListCost"] for row in (first, second, third)] == ["1.500000", "9.000000", "1.500000"]
    assert [row["PricingQuantity"][:6] for row in (first, second, third)] == ["0.1666", "1.0000", "0.1666"]
    assert json.loads(first["Tags"]) == {"spotrl-run": "demo", "spotrl-node": "demo-spot-0-g1"}
    shown = {
        "ProviderName": "This machine",
        "RegionId": "us-east-1",
        "AvailabilityZone": "us-east-1a",
        "ResourceId": "demo-spot-0-g1",
        "SkuId": "g6.xlarge",
        "PricingCategory": "Dynamic",
        "ContractedUnitPrice": "3.600000",
        "ListUnitPrice": "9.000000",
        "PricingUnit": "Hours",
        "BillingCurrency": "USD",
        "ServiceCategory": "Compute",
        "x_Market": "spot",
        "x_Role": "rollout",
        "x_CostBasis": "assumed",
        "x_Run": "demo",
    }
    assert {column: first[column] for column in shown} == shown


def test_a_month_ends_at_the_turn_of_the_year():
    with a_session() as session:
        made = a_run(session)
        hours_to_2026 = round((datetime.fromisoformat("2026-01-01T00:00:00Z").timestamp() * 1000 - START_MS) / HOUR_MS)
        made.node("spot-0", up=(hours_to_2026 - 1) * HOUR_MS, end=(hours_to_2026 + 1) * HOUR_MS)
        before, after = rows_of(made, 0)
    assert (before["BillingPeriodStart"][:7], before["BillingPeriodEnd"][:10]) == ("2025-12", "2026-01-01")
    assert (after["BillingPeriodStart"][:7], after["BillingPeriodEnd"][:10]) == ("2026-01", "2026-02-01")


def test_the_role_of_a_row_changes_at_the_promotion(promoted):
    by_role = defaultdict(int)
    now_ms = START_MS + test_promoted_costs.END
    for row in focus_rows(promoted.session, promoted.run, now_ms):
        by_role[row["x_Role"]] += round(Decimal(row["BilledCost"]) * 1_000_000)
    assert dict(by_role) == run_costs(promoted.session, promoted.run, now_ms).by_role


def test_a_free_first_hour_is_billed_with_nothing_and_keeps_its_price():
    with a_session() as session:
        made = a_run(session)
        billed(made, made.node("spot-0"), HOUR_MS // 2, 0, "metered; not billed: AWS interrupted it in its first hour")
        (row,) = rows_of(made, 0)
    assert (row["BilledCost"], row["EffectiveCost"], row["ContractedCost"]) == ("0.000000", "0.000000", "1.800000")
    assert row["ChargeDescription"].endswith("not billed: preempted in its first hour")


@pytest.mark.parametrize(("worked_ms", "consumed"), [(0, "0.000000000"), (30_000, "0.008333333")])
def test_the_quantity_of_a_short_life_is_the_minimum_billed_time(worked_ms, consumed):
    with a_session() as session:
        made = a_run(session)
        billed(made, made.node("spot-0"), worked_ms, 60_000)
        (row,) = rows_of(made, 0)
    assert (row["BilledCost"], row["PricingQuantity"], row["ConsumedQuantity"]) == ("0.060000", "0.016666667", consumed)


def test_the_quantity_of_a_longer_life_is_its_time_though_its_cost_is_rounded():
    with a_session() as session:
        made = a_run(session)
        made.node("spot-0", rate=1_861_001, up=57 * MINUTE_MS, end=112 * MINUTE_MS)
        rows = rows_of(made, 0)
    assert [row["PricingQuantity"] for row in rows] == [row["ConsumedQuantity"] for row in rows]


@pytest.mark.parametrize(("infra", "provider"), [("local", "This machine"), ("aws,gcp", "AWS")])
def test_no_cloud_provides_a_run_on_this_machine_at_the_price_of_a_clouds_offer(infra, provider):
    with a_session() as session:
        made = a_run(session)
        made.run.infra = infra
        made.node("spot-0", up=0, end=HOUR_MS)
        row, *_ = rows_of(made, 0)
    assert (row["ProviderName"], row["InvoiceIssuerName"]) == (provider, provider)
    assert (
        (row["BillingAccountId"] == "local") == (row["ServiceName"] == "spotrl on this machine") == (infra == "local")
    )


def test_paid_judges_have_a_row_an_hour():
    with a_session() as session:
        made = a_run(session)
        for minute, micro_usd in ((1, 20), (59, 30), (61, 7)):
            made.record(Judged(worker="w", calls=((1, 1, micro_usd),)), minute * MINUTE_MS)
        made.record(Judged(worker="w", unaccounted=5), 62 * MINUTE_MS)
        first, second = rows_of(made, 0)
    assert [(row["BilledCost"], row["PricingQuantity"]) for row in (first, second)] == [
        ("0.000050", "2"),
        ("0.000012", "1"),
    ]
    assert (first["ServiceCategory"], first["PricingUnit"]) == ("AI and Machine Learning", "Calls")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run on two simulated clouds that has trained for some hours and been stopped."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    stage = Stage(ledger(tmp_path))
    stage.passes(90, step_ms=60_000)
    request_stop(stage.sessions, "demo")
    stage.passes(5)
    return stage


def test_disks_and_addresses_have_rows_and_costs_without_a_price_have_none(run):
    with run.sessions() as session:
        now_ms = run.clock.now_ms()
        sides = side_costs_of_run(session, run.run, now_ms)
        total = run_costs(session, run.run, now_ms).total
        assert any(cost.micro_usd is None for cost in sides)
        rows = list(focus_rows(session, run.run, now_ms))
    assert {row["ResourceType"] for row in rows} == {"Virtual machine", "Disk", "IP address"}
    assert {row["ServiceSubcategory"] for row in rows} == {
        "Virtual Machines",
        "Block Storage",
        "Network Infrastructure",
    }
    services = {(row["ProviderName"], row["ServiceName"]): row["ServiceCategory"] for row in rows}
    assert (
        len({name for _, name in services})
        == len(services)
        == len({(row["ProviderName"], row["ResourceType"]) for row in rows})
    )
    assert micro(rows) == total + sum(cost.micro_usd or 0 for cost in sides)
    assert micro(row for row in rows if row["ResourceType"] == "Disk") == sum(
        cost.micro_usd for cost in sides if cost.kind == "disk"
    )


def test_a_row_names_the_instance_and_the_account_if_the_run_knows_them(run):
    (Path(run.run.folder) / "common.json").write_text(json.dumps({"accounts": {"gcp": "my-project"}}))
    files = NodeFiles(Path(run.run.folder) / "nodes" / "demo-trainer-g0")
    files.folder.mkdir(parents=True, exist_ok=True)
    with run.sessions() as session:
        place = node_records(session, run.run)[0].wanted.placement
    instance = Instance(
        id="i-0123",
        run="demo",
        name="demo-trainer-g0",
        state=InstanceState.RUNNING,
        cloud="gcp",
        region=place.region,
        zone=place.zone,
        market=place.market,
        instance_type=place.instance_type,
        owner="me",
    )
    files.write_instance(instance)
    with run.sessions() as session:
        rows = list(focus_rows(session, run.run, run.clock.now_ms()))
    (trainer,) = {row["ResourceId"] for row in rows if row["ResourceName"] == "demo-trainer-g0"}
    assert trainer == "i-0123"
    assert {(row["SubAccountId"], row["BillingAccountId"]) for row in rows} == {("my-project", "unknown")}


def test_report_and_ls_write_the_rows_and_say_what_is_missing(run, tmp_path, capsys):
    one, every = tmp_path / "new" / "one.csv", tmp_path / "all.csv"
    assert spotrl(["report", "demo", "--focus", str(one), "--json"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    beside = sum(extra["micro_usd"] or 0 for extra in report["extras"] if not extra["in_total"])
    assert micro(read(one)) == report["costs"]["total"] + beside
    assert f"wrote {one}: {len(read(one))} rows, $" in shown.err
    assert "CapacityReservationId" in shown.err
    assert "BillingAccountId of a cloud is `unknown`" in shown.err
    with writing(run.sessions) as session:
        session.add(Removal(run_id=run.run.id, at_wall_ms=0))
    assert spotrl(["ls", "--focus", str(every)]) == 0
    assert micro(read(every)) == micro(read(one)) > 0
    assert tuple(read(every)[0]) == COLUMNS


@pytest.mark.parametrize("words", [["report", "demo"], ["ls"]])
def test_a_file_that_cannot_be_written_is_refused(run, tmp_path, capsys, words):
    assert spotrl([*words, "--focus", str(tmp_path / "ledger.sqlite" / "costs.csv")]) == 1
    assert "cannot be made for costs.csv" in capsys.readouterr().err
