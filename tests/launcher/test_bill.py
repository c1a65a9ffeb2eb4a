"""The clouds' own bills: which rows count, once each, and why billed and metered differ, to the micro-dollar."""

import gzip
import io
import json
import shutil
import sys
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from sqlalchemy import select

from launcher.bill.importing import import_bills
from launcher.cli.main import run as spotrl
from launcher.exit_codes import Failure
from launcher.ledger.billing import side_costs
from launcher.ledger.bills import PICO, rounded_parts
from launcher.ledger.models import BillingInterval, BillLine, KeptView, NodeEvent, Preemption
from launcher.ledger.store import find_run, open_ledger, writing
from launcher.report.bill import by_kind
from launcher.report.build import build_report
from launcher.report.comparison import compare_runs
from launcher.report.html import render_html
from launcher.report.result import result_dict
from launcher.report.tables import tables
from launcher.report.terminal import print_report
from launcher.runs.run_list import all_rows
from launcher.runs.views import run_documents
from tests.fakes.bills import (
    ADDRESS,
    DISK,
    PAYER,
    TRAFFIC,
    Used,
    aws_row,
    aws_rows,
    gcp_row,
    gcp_rows,
    write_csv,
    write_parquet,
)
from tests.launcher.made_ledger import HOUR_MS, JOB, MINUTE_MS, START_MS, a_run
from tests.launcher.printed import check, printed

ACCOUNT, PROJECT = "123456789012", "my-project"
DISK_RATES = {"aws": 10_959, "gcp": 13_699}
ADDRESS_RATES = {"aws": 5_000, "gcp": 2_500}
UP_MS, END_MS = START_MS + 30 * MINUTE_MS, START_MS + 210 * MINUTE_MS
"""From 8:30 to 11:30: rows of four hours for three."""
BESIDE = {cloud: 3 * (DISK_RATES[cloud] + ADDRESS_RATES[cloud]) for cloud in DISK_RATES}
"""Micro-dollars of disk and address in three hours."""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    return tmp_path


@pytest.fixture(scope="module")
def migrated(tmp_path_factory):
    """An empty ledger. To make one takes longer than most tests here."""
    path = tmp_path_factory.mktemp("migrated") / "ledger.sqlite"
    open_ledger(path).kw["bind"].dispose()
    return path


@pytest.fixture
def sessions(home, migrated):
    """A run with a node on each cloud, from 8:30 to 11:30, at $3.60 an hour."""
    opened = open_ledger(shutil.copy(migrated, home / "ledger.sqlite"))
    with writing(opened) as session:
        new_run(session, home, "demo", minutes={"aws": 180, "gcp": 180})
    return opened


def new_run(session, home, name, *, minutes):
    made = a_run(session, name, job={**JOB, "iterations": 10}, folder=str(home / name), factor=1.0)
    made.run.infra, made.run.money_basis = "aws,gcp", "metered"
    for cloud, length in minutes.items():
        zone = {"aws": "us-west-2a", "gcp": "us-central1-a"}[cloud]
        node = made.node(f"spot-{cloud}", up=30 * MINUTE_MS, end=(30 + length) * MINUTE_MS, zone=zone)
        node.cloud = cloud
        session.add(NodeEvent(node_id=node.id, at_ms=UP_MS + round(length * MINUTE_MS), kind="released"))
        session.add_all(side_costs(made.run, node, UP_MS, UP_MS + round(length * MINUTE_MS)))
        folder = home / name / "nodes" / node.name
        folder.mkdir(parents=True)
        (folder / "machine.json").write_text(json.dumps({"id": id_of(cloud, name)}))
    accounts = {"accounts": {"aws": ACCOUNT, "gcp": PROJECT}, "owners": {"aws": "me", "gcp": "me"}}
    (home / name / "common.json").write_text(json.dumps(accounts))
    made.status("finished", 210 * MINUTE_MS, "target")
    session.flush()
    return made


def id_of(cloud, run="demo"):
    return {"aws": f"i-{run}", "gcp": f"sky-{run}"}[cloud]


def labels_of(cloud, run="demo"):
    return {"spotrl-run": run, "spotrl-node": f"{run}-spot-{cloud}-g1", "spotrl-owner": "me"}


def instance(cloud, **more):
    account = {"aws": ACCOUNT, "gcp": PROJECT}[cloud]
    fields = {
        "resource": id_of(cloud),
        "labels": labels_of(cloud),
        "account": account,
        "start_ms": UP_MS,
        "end_ms": END_MS,
        "micro_usd_per_hour": 3_600_000,
    }
    return Used(**fields | more)


def whole(cloud, **more):
    """Return what a node used: its instance, disk and address, at the metered prices."""
    used = instance(cloud, **more)
    disk = replace(used, kind=DISK, resource=f"vol-{used.resource}", micro_usd_per_hour=DISK_RATES[cloud])
    address = replace(used, kind=ADDRESS, resource=f"eni-{used.resource}", micro_usd_per_hour=ADDRESS_RATES[cloud])
    return [used, disk, address]


def rows_of(cloud, used, version="1"):
    if cloud == "aws":
        return aws_rows(used, version)
    return gcp_rows(used, f"2027-01-0{version} 04:05:06.000000 UTC")


def written(home, rows, name="bill.csv"):
    return write_parquet(home / name, rows) if name.endswith("parquet") else write_csv(home / name, rows)


def imported(sessions, home, rows, name="bill.csv", **more):
    return import_bills(sessions, [written(home, rows, name)], **more)


def lines(sessions):
    with sessions() as session:
        found = session.scalars(select(BillLine).order_by(BillLine.identity)).all()
        return [(line.identity, line.kind, line.pico_usd, line.copies, line.node_id, line.month) for line in found]


def bill(sessions, name="demo"):
    with sessions() as session:
        return build_report(session, find_run(session, name), END_MS + 90 * 24 * HOUR_MS).bill


def differences(sessions, name="demo"):
    return by_kind(bill(sessions, name).differences)


# --- which rows count ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_a_bill_is_the_same_in_each_kind_of_file_and_counts_once(sessions, home, cloud):
    rows = rows_of(cloud, [*whole(cloud), replace(instance(cloud), resource="i-other", labels={})])
    first = imported(sessions, home, rows)
    kept = lines(sessions)
    assert (first.added, first.known, first.our_rows) == (len(kept), 0, len(kept))
    assert first.our_rows == len(rows) - (4 if cloud == "aws" else 8)
    assert first.nodes == (f"demo-spot-{cloud}-g1",)
    for name in ("bill.csv", "bill.csv.gz", "bill.parquet"):
        again = imported(sessions, home, rows, name)
        assert (again.added, again.known, again.replaced) == (0, len(kept), 0), name
        assert lines(sessions) == kept, name


def test_a_bill_that_says_what_was_metered_has_no_difference(sessions, home):
    for cloud in ("aws", "gcp"):
        imported(sessions, home, rows_of(cloud, whole(cloud)))
    found = bill(sessions)
    assert (found.basis, found.differences) == ("billed", ())
    assert found.billed_micro_usd == found.metered_micro_usd == 2 * 10_800_000 + sum(BESIDE.values())
    assert {node.basis for node in found.nodes} == {"billed"}


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_a_node_without_labels_is_found_by_the_id_of_its_instance(sessions, home, cloud):
    found = imported(sessions, home, rows_of(cloud, [instance(cloud, labels={})]))
    assert found.nodes == (f"demo-spot-{cloud}-g1",)
    (home / "demo/nodes" / f"demo-spot-{cloud}-g1/machine.json").unlink()  # `spotrl rm`; the bill still knows it
    again = imported(sessions, home, rows_of(cloud, [instance(cloud, labels={})]))
    assert (again.added, again.known) == (0, found.added)


def test_tags_may_be_columns_of_their_own_and_a_legacy_report_reads_alike(sessions, home):
    rows = [dict(row) for row in aws_rows([instance("aws", resource="i-unknown-to-the-files")])]
    for row in rows:
        row["resource_tags_user_spotrl_node"] = row.pop("resource_tags")["user_spotrl_node"]
    flat = write_csv(home / "flat.csv", rows, tuple(rows[0]))
    assert import_bills(sessions, [flat]).added == 4
    names = flat.read_text().splitlines()
    heads = {"line_item_": "lineItem/", "bill_": "bill/", "identity_": "identity/"}
    legacy = []
    for column in names[0].split(","):
        start = next((head for head in heads if column.startswith(head)), "")
        words = column.removeprefix(start).split("_")
        legacy.append(heads[start] + "".join(map(str.capitalize, words)) if start else column)
    legacy[-1] = "resourceTags/user:spotrl-node"
    (home / "legacy.csv").write_text("\n".join([",".join(legacy), *names[1:], ""]))
    assert import_bills(sessions, [home / "legacy.csv"]).known == 4


def test_rows_of_others_are_told_and_never_counted(sessions, home):
    ours = instance("aws")
    strangers = [
        replace(ours, resource="i-account", account="210987654321"),
        replace(ours, resource="i-owner", labels={**labels_of("aws"), "spotrl-owner": "you"}),
        replace(ours, resource="i-old", start_ms=START_MS - 30 * 24 * HOUR_MS, end_ms=START_MS - 30 * 24 * HOUR_MS + 1),
        replace(ours, resource="i-run", labels={"spotrl-run": "theirs", "spotrl-node": "theirs-trainer-g0"}),
        replace(ours, resource="i-plain", labels={}, account="210987654321"),
    ]
    found = imported(sessions, home, aws_rows([ours, *strangers]))
    assert found.billed_micro_usd == {"demo": 10_800_000}
    assert {thing.resource: thing.why for thing in found.unknown} == {
        "i-account": "demo ran in account 123456789012, the row is of 210987654321",
        "i-owner": "demo of this ledger belongs to me, the row to you",
        "i-old": "it is older than demo-spot-aws-g1 of this ledger",
        "i-run": "no run of this ledger has its label",
    }
    assert found.other_accounts == {"210987654321": 8}


def test_an_instance_with_the_runs_label_that_is_no_node_is_on_its_bill_by_name(sessions, home):
    lost = instance("aws", resource="i-forgotten", labels={"spotrl-run": "demo", "spotrl-node": "demo-spot-7-g0"})
    imported(sessions, home, aws_rows([*whole("aws"), lost]))
    (unknown,) = (one for one in bill(sessions).differences if one.kind == "unknown")
    assert (unknown.node, unknown.micro_usd) == (None, 10_800_000)
    assert "i-forgotten" in unknown.why


def test_a_node_that_no_bill_has_is_named_until_one_has(sessions, home):
    with writing(sessions) as session:
        new_run(session, home, "later", minutes={"aws": 180})
    first = imported(sessions, home, aws_rows(whole("aws")))
    assert first.nodes_without_rows == ("later-spot-aws-g1",)
    used = instance("aws", resource=id_of("aws", "later"), labels=labels_of("aws", "later"))
    assert imported(sessions, home, aws_rows([used]), "more.csv").nodes_without_rows == ()
    assert differences(sessions)["not_in_bill"] == -10_800_000 - BESIDE["gcp"]  # the node on Google Cloud
    assert bill(sessions).basis == "metered"


# --- once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_parts_and_overlaps_add_up_to_the_whole_in_any_order(sessions, home, cloud):
    rows = rows_of(cloud, whole(cloud))
    one, two = written(home, rows[:7], "1.csv"), written(home, rows[5:], "2.csv")
    for files in ([two], [one], [one, two], [two]):
        import_bills(sessions, files)
    assert bill(sessions).billed_micro_usd == 10_800_000 + BESIDE[cloud]


def test_equal_rows_of_one_file_count_each_and_in_two_files_once(sessions, home):
    row = gcp_row(instance("gcp"), START_MS, START_MS + HOUR_MS, sku="G2 Instance Core", usd="0.1")
    imported(sessions, home, [row, row])
    imported(sessions, home, [row])
    assert [(pico_usd, copies) for _, _, pico_usd, copies, _, _ in lines(sessions)] == [(PICO // 10, 2)]
    assert bill(sessions).billed_micro_usd == 200_000


def test_a_month_that_aws_wrote_again_replaces_what_it_said_before(sessions, home):
    imported(sessions, home, aws_rows(whole("aws")))
    dearer = [instance("aws", micro_usd_per_hour=4_000_000), *whole("aws")[1:]]
    found = imported(sessions, home, aws_rows([*dearer, instance("aws", kind=TRAFFIC)], "2"))
    assert (found.added, found.known, found.replaced) == (16, 0, 12)
    assert differences(sessions)["price"] == 1_200_000
    imported(sessions, home, gcp_rows(whole("gcp")))
    assert len(lines(sessions)) == 16 + 16


def test_a_part_of_a_month_that_aws_wrote_again_is_refused(sessions, home):
    imported(sessions, home, aws_rows(whole("aws")))
    kept, part = lines(sessions), aws_rows(whole("aws")[:1], "2")
    with pytest.raises(Failure, match=f"2025-01 of payer {PAYER}, and lack 8 lines.*name all files of the month"):
        imported(sessions, home, part)
    assert lines(sessions) == kept
    assert imported(sessions, home, part, replace=True).replaced == 12
    assert len(lines(sessions)) == 4


def test_split_lines_of_a_month_count_each_if_its_files_come_together(sessions, home):
    used = instance("aws")
    first, second = (aws_row(used, START_MS, usd=usd, usage="SpotUsage:x", note=usd) for usd in ("0.3", "0.2"))
    files = [written(home, [first], "1.csv"), written(home, [second], "2.csv")]
    for _ in range(2):
        import_bills(sessions, files)
        assert bill(sessions).billed_micro_usd == 500_000


def test_several_months_are_kept_apart(sessions, home):
    february = START_MS + 20 * 24 * HOUR_MS
    late = instance("aws", kind=DISK, resource="vol-1", start_ms=february, end_ms=february + HOUR_MS)
    found = imported(sessions, home, aws_rows([*whole("aws"), late]))
    assert found.months == (f"aws {PAYER} 2025-01", f"aws {PAYER} 2025-02")
    assert imported(sessions, home, aws_rows(whole("aws"), "2")).replaced == 12, "of January alone"
    assert [line[-1] for line in lines(sessions)].count("2025-02") == 1


def test_an_import_that_is_interrupted_leaves_nothing(sessions, home, monkeypatch):
    files = [written(home, aws_rows(whole("aws")), "1.csv"), written(home, gcp_rows(whole("gcp")), "2.csv")]
    monkeypatch.setattr("launcher.bill.importing.SHOWN_EVERY", 10)

    def stop(path, share):
        assert 0 <= share <= 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_bills(sessions, files, progress=stop)
    assert lines(sessions) == []
    import_bills(sessions, files)
    assert len(lines(sessions)) == 12 + 16


# --- money --------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(10**15), 10**15), max_size=30))
def test_rounded_parts_add_up_to_the_rounded_sum(amounts):
    parts = rounded_parts(dict(enumerate(amounts)))
    total = Decimal(sum(amounts)) / 10**6
    assert abs(sum(parts.values()) - total) <= Decimal("0.5")
    assert all(abs(parts[number] - Decimal(amount) / 10**6) < 1 for number, amount in enumerate(amounts))


@pytest.mark.parametrize(
    ("line_type", "usage", "usd", "kind"),
    [
        ("Tax", "SpotUsage:g6.xlarge", "0.9", "tax"),
        ("Credit", "SpotUsage:g6.xlarge", "-3", "credit"),
        ("Refund", "SpotUsage:g6.xlarge", "-0.0000004", "refund"),
        ("EdpDiscount", "SpotUsage:g6.xlarge", "-0.7", "discount"),
        ("SavingsPlanNegation", "BoxUsage:g6.xlarge", "-9", "discount"),
        ("Usage", "USE2-USW2-AWS-Out-Bytes", "0.0123456789", "traffic"),
        ("Usage", "CW:MetricMonitorUsage", "0.3", "other"),
    ],
)
def test_what_is_not_metered_has_a_line_of_its_own(sessions, home, line_type, usage, usd, kind):
    more = aws_row(instance("aws"), START_MS, usd=usd, usage=usage, line_type=line_type)
    imported(sessions, home, [*aws_rows(whole("aws")), more])
    imported(sessions, home, gcp_rows(whole("gcp")), "gcp.csv")
    found = bill(sessions)
    assert found.basis == "billed"
    assert by_kind(found.differences) == ({kind: round(Decimal(usd) * 10**6)} if kind != "refund" else {})


def test_credits_of_google_are_lines_beside_the_cost(sessions, home):
    credits = [
        {"name": "trial", "full_name": "", "id": "a", "type": "PROMOTION", "amount": -0.25},
        {"name": "commit", "full_name": "", "id": "b", "type": "COMMITTED_USAGE_DISCOUNT", "amount": -0.5},
    ]
    row = gcp_row(instance("gcp", kind=DISK, credits=credits), START_MS, END_MS, sku="Storage PD Capacity", usd="1")
    tax = gcp_row(instance("gcp"), START_MS, END_MS, sku="Tax", usd="0.1", cost_type="tax")
    for name in ("bill.csv", "bill.parquet"):
        imported(sessions, home, [row, tax], name)
    found = differences(sessions)
    assert (found["credit"], found["discount"], found["tax"]) == (-250_000, -500_000, 100_000)


def test_money_of_another_currency_counts_at_the_bills_own_rate_or_is_refused(sessions, home):
    found = imported(sessions, home, gcp_rows(whole("gcp", currency="EUR", rate="0.8")))
    assert found.other_currencies == {"EUR": found.rows}
    assert bill(sessions).billed_micro_usd == 10_800_000 + BESIDE["gcp"]
    rows = [{**row, "currency_conversion_rate": ""} for row in gcp_rows(whole("gcp", currency="EUR", rate="0.8"))]
    with pytest.raises(Failure, match=r"row 2: .*sky-demo is in EUR and has no currency_conversion_rate"):
        imported(sessions, home, rows)
    with pytest.raises(Failure, match="i-demo is in CNY, and the bill has no rate to dollars"):
        imported(sessions, home, aws_rows([instance("aws", currency="CNY")]))
    strangers = imported(sessions, home, aws_rows([instance("aws", currency="CNY", resource="i-1", labels={})]))
    assert strangers.other_currencies == {"CNY": 4}


@pytest.mark.parametrize(
    ("used", "kinds"),
    [
        ({"end_ms": END_MS - 36_000}, {"time": -36_000}),
        ({"end_ms": END_MS + 36_000}, {"time": 36_000}),
        ({"micro_usd_per_hour": 3_000_000}, {"price": -1_800_000}),
        ({"is_free": True}, {"price": -10_800_000}),
    ],
)
def test_another_time_and_another_price_are_told_apart(sessions, home, used, kinds):
    for cloud in ("aws", "gcp"):
        imported(sessions, home, rows_of(cloud, [instance(cloud, **used), *whole(cloud)[1:]]))
    assert differences(sessions) == {kind: 2 * micro_usd for kind, micro_usd in kinds.items()}


def preempted(sessions, home, *, minutes, metered):
    """Add a run with one node on AWS that was preempted after these minutes. `metered`: its cost in the ledger."""
    with writing(sessions) as session:
        made = new_run(session, home, "short", minutes={"aws": minutes})
        (node,) = made.nodes.values()
        made.preempted(node, round((30 + minutes) * MINUTE_MS))
        session.flush()
        session.execute(
            BillingInterval.__table__.update().where(BillingInterval.node_id == node.id).values(micro_usd=metered)
        )


@pytest.mark.parametrize(
    ("metered", "is_free", "difference"), [(1_800_000, True, -1_800_000), (0, False, 1_800_000), (0, True, None)]
)
def test_a_free_first_hour_is_told_apart_from_prices(sessions, home, metered, is_free, difference):
    preempted(sessions, home, minutes=30, metered=metered)
    end_ms = UP_MS + 30 * MINUTE_MS
    labels = labels_of("aws", "short")
    used = whole("aws", resource="i-short", labels=labels, end_ms=end_ms, is_free=is_free)
    beside = [replace(one, is_free=False) for one in used[1:]]
    imported(sessions, home, aws_rows([used[0], *beside]))
    assert differences(sessions, "short") == ({} if difference is None else {"free_first_hour": difference})
    assert bill(sessions, "short").basis == "billed"


def test_a_first_hour_that_has_no_row_at_all_is_free(sessions, home):
    preempted(sessions, home, minutes=30, metered=1_800_000)
    end_ms = UP_MS + 30 * MINUTE_MS
    beside = whole("aws", resource="i-short", labels=labels_of("aws", "short"), end_ms=end_ms)[1:]
    imported(sessions, home, aws_rows(beside))
    assert differences(sessions, "short") == {"free_first_hour": -1_800_000}


def test_the_shortest_billed_time_is_told(sessions, home):
    preempted(sessions, home, minutes=0.5, metered=60_000)  # a minute at $3.60 an hour
    with writing(sessions) as session:
        session.execute(Preemption.__table__.delete())
    end_ms = UP_MS + 30_000
    imported(
        sessions, home, aws_rows(whole("aws", resource="i-short", labels=labels_of("aws", "short"), end_ms=end_ms))
    )
    assert differences(sessions, "short") == {"minimum": -30_000}


def test_a_bill_of_a_part_of_a_life_leaves_the_rest_metered(sessions, home):
    imported(sessions, home, aws_rows(whole("aws", end_ms=START_MS + 3 * HOUR_MS)))
    imported(sessions, home, gcp_rows(whole("gcp")), "gcp.csv")
    found = bill(sessions)
    # Half a micro-dollar of the disk is rounded up on the bill, and down in what is covered of the metered cost.
    assert by_kind(found.differences) == {"not_in_bill": -1_800_000 - 5_480 - 2_500, "disk": 1}
    assert {node.node[-6:-3]: node.basis for node in found.nodes} == {"aws": "metered", "gcp": "billed"}


# --- damaged files ------------------------------------------------------------------------------------


def damaged(home):
    """Yield files that are no whole bill, each with a part of what is said about it."""
    rows = aws_rows(whole("aws"))
    text = write_csv(home / "whole.csv", rows).read_bytes()
    compressed = gzip.compress(text)
    parquet = write_parquet(home / "whole.parquet", rows).read_bytes()
    start = text.index(b"\n") + 1
    cuts = text.splitlines(keepends=True)
    unnested = ",".join(("billing_account_id", "labels.key", "labels.value", "cost")).encode() + b"\na,b,c,1\n"
    yield "empty.csv", b"", "is empty"
    yield "header.csv", text[:start], "has a header and no row"
    yield "within.csv", text[:-40], "ends within a line"
    yield "short.csv", b"".join(cuts[:3]) + b"a,b,c\n", r"row 4: it has 3 columns of \d+"
    yield "quote.csv", text[:start] + b'"' + text[start:], "not CSV|columns of"
    yield "latin.csv", text.replace(b"Amazon", b"Amaz\xf4n"), "not CSV in UTF-8"
    yield "cut.csv.gz", compressed[: len(compressed) // 2], "compressed file ends here|not CSV"
    yield "cut.parquet", parquet[: len(parquet) // 2], "not parquet, or cut off"
    yield "other.csv", b"a,b\n1,2\n", "no bill that spotrl reads.*its columns are a, b"
    yield "lacks.csv", text.replace(b"line_item_resource_id", b"x"), "lacks the column line_item_resource_id"
    yield "unnested.csv", unnested, "repeats a row for each of them"
    yield (
        "money.csv",
        text.replace(b",3.6000000000,", b",lots,"),
        "row 3: line_item_unblended_cost is no number: 'lots'",
    )
    yield "nan.csv", text.replace(b",3.6000000000,", b",NaN,"), "row 3: line_item_unblended_cost is no number: 'NaN'"
    yield "time.csv", text.replace(b"2025-01-15T08:00:00.000Z", b"soon"), "is no time: 'soon'"


def test_a_damaged_file_is_refused_with_its_row_and_nothing_is_kept(sessions, home):
    good = written(home, gcp_rows(whole("gcp")), "good.csv")
    count = 0
    for name, content, said in damaged(home):
        (home / name).write_bytes(content)
        with pytest.raises(Failure, match=said):
            import_bills(sessions, [good, home / name])
        count += 1
    assert count == 14
    assert lines(sessions) == []
    assert import_bills(sessions, [good]).added == 16


def test_a_parquet_file_without_duckdb_says_what_to_install(sessions, home, monkeypatch):
    file = written(home, aws_rows(whole("aws")), "bill.parquet")
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(Failure, match=r"install -e '.*\[bill\]'"):
        import_bills(sessions, [file])


# --- what is shown ------------------------------------------------------------------------------------


def test_reports_lists_and_comparisons_show_billed_beside_metered(sessions, home):
    with writing(sessions) as session:
        new_run(session, home, "plain", minutes={"aws": 180})
    tax = aws_row(instance("aws"), START_MS, usd="1.5", line_type="Tax")
    other = aws_row(instance("aws"), START_MS, usd="0.25", usage="Something")
    imported(sessions, home, [*aws_rows(whole("aws")), tax, other])
    imported(sessions, home, gcp_rows(whole("gcp")), "gcp.csv")
    billed = 21_600_000 + 1_750_000 + sum(BESIDE.values())
    with sessions() as session:
        run, plain = (find_run(session, name) for name in ("demo", "plain"))
        report = build_report(session, run, END_MS)
        assert (report.money_basis, report.costs.total) == ("billed", 21_600_000)
        check("report", json.loads(json.dumps(report.to_dict())))
        console = Console(file=io.StringIO(), width=140)
        print_report(report, console)
        page = render_html(report, lambda _: None)
        for shown in (console.file.getvalue(), page):
            assert "$23.45" in shown
            assert "tax" in shown
            assert "spot-aws-g1: the rest, $0.25." in shown
        assert sum(row["dollars"] for row in tables(report)["billed"]) == pytest.approx(1.75)
        compared = compare_runs(session, [run, plain])
        assert [one.billed_micro_usd for one in compared.runs] == [billed, None]
        assert any("billed with disks, traffic, tax and credits: demo $23.45" in note for note in compared.notes)
        assert [one.money_basis for one in compared.runs] == ["billed", "metered"]
        assert not any("different bases" in note for note in compared.notes), "the dollars of both are metered"
        plain.money_basis = "assumed"
        assert any("different bases" in note for note in compare_runs(session, [run, plain]).notes)
        session.rollback()
        assert result_dict(session, "demo", [])["money_basis"] == "metered"
        assert {row.name: row.billed_micro_usd for row in all_rows(session)} == {"demo": billed, "plain": None}
        assert build_report(session, plain, END_MS).bill is None


def test_a_kept_view_has_the_newest_bill_and_limits_stay_metered(sessions, home):
    def shown():
        (view,) = run_documents(sessions)
        return view["billed_micro_usd"], view["spent_micro_usd"]

    assert shown() == (None, 21_600_000)
    with sessions() as session:
        assert session.scalars(select(KeptView)).one().view["billed_micro_usd"] is None
    imported(sessions, home, aws_rows([instance("aws")]))
    assert shown() == (10_800_000, 21_600_000)
    imported(sessions, home, aws_rows([instance("aws", micro_usd_per_hour=7_200_000)], "2"))
    assert shown() == (21_600_000, 21_600_000)


def test_the_command_says_what_it_read(sessions, home, capsys):
    stranger = instance("aws", resource="i-x", labels={"spotrl-run": "theirs"})
    file = str(written(home, aws_rows([*whole("aws"), stranger])))
    assert spotrl(["bill", "import", file]) == 0
    said = capsys.readouterr().out
    assert "16 rows read, 12 about runs of this ledger" in said
    assert "12 amounts added, 0 known before" in said
    assert "demo: billed $10.85" in said
    assert "i-x (theirs): $10.80; no run of this ledger has its label" in " ".join(said.split())
    assert spotrl(["bill", "import", file, "--json"]) == 0
    assert printed("bill-import", capsys.readouterr().out)["known"] == 12
    assert spotrl(["ls"]) == 0
    assert "billed" in capsys.readouterr().out.splitlines()[0]
    assert spotrl(["status", "demo"]) == 0
    assert "; billed $10.85" in capsys.readouterr().out
    assert spotrl(["bill", "import", str(home / "none.csv")]) == 2
