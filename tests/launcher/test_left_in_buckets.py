"""What runs left in buckets, and its price a month: in `ls`, in the report, and after `rm`."""

import io
import json
from datetime import UTC, datetime

import pytest
from rich.console import Console

from launcher.cleanup.removal import count_buckets
from launcher.cli import rm as rm_module
from launcher.cli.follow import last_words
from launcher.cli.main import run
from launcher.cli.status import headline
from launcher.exit_codes import ExitCode
from launcher.ledger.left_in_buckets import LeftInBucket, left_in_buckets, left_words, size_row
from launcher.ledger.models import BucketSize, NodeEvent, Removal, Run
from launcher.ledger.store import append_status, find_run, nodes_of, open_ledger, writing
from launcher.market.side_prices import GIB, storage_rate
from launcher.report.build import build_report
from launcher.report.html import render_html
from launcher.report.terminal import print_report
from launcher.runs.run_list import run_list
from launcher.runs.views import run_documents, run_view, view_of
from launcher.storage.folder_sizes import FolderSize
from launcher.web.page import list_part
from launcher.web.reader import run_page
from tests.launcher.made_ledger import HOUR_MS, MINUTE_MS, START_MS, a_run
from tests.launcher.printed import printed

COUNTED_MS = round(datetime(2026, 11, 30, 23, tzinfo=UTC).timestamp() * 1000)
STORE = {"aws": "s3://runs/ours", "gcp": "gs://runs"}


@pytest.fixture
def sessions(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    return open_ledger(tmp_path / "ledger.sqlite")


def a_finished_run(session, name: str, infra: str = "aws", folder: str = "nowhere") -> Run:
    made = a_run(session, name, folder=folder, factor=1.0)
    made.run.infra, made.run.job = infra, {**made.run.job, "iterations": 42, "store": STORE}
    made.status("running", 0)
    node = made.node("trainer", up=0, end=HOUR_MS, seen=MINUTE_MS)
    session.add(NodeEvent(node_id=node.id, at_ms=START_MS + HOUR_MS, kind="released"))
    made.status("finished", HOUR_MS, "iterations")
    return made.run


def size(url: str, count: int | None, *, is_whole: bool = True, region: str = "us-east-1", problem: str = ""):
    return FolderSize(url=url, bytes=count, is_whole=is_whole, region=region, problem=problem)


def record(session, of: Run, found: FolderSize) -> None:
    row = size_row(of, found)
    row.at_wall_ms = COUNTED_MS
    session.add(row)
    session.flush()


def words_of(session, of: Run) -> list[str]:
    return [left_words(left) for left in left_in_buckets(session, [of.id])[of.id]]


# --- the price -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cloud", "region", "micro_usd", "is_us_price"),
    [
        ("aws", "us-east-1", 23_000, False),
        ("aws", "sa-east-1", 40_500, False),
        ("aws", "", 23_000, True),
        ("aws", "xx-new-1", 23_000, True),
        ("gcp", "us-central1", 20_000, False),
        ("gcp", "us-east4", 23_000, False),
        ("gcp", "eu", 26_000, False),
        ("gcp", "", 20_000, True),
    ],
)
def test_a_gib_month_has_the_price_of_its_region_or_of_the_us(cloud, region, micro_usd, is_us_price):
    rate = storage_rate(cloud, region)
    assert (rate.micro_usd_per_month(GIB), rate.is_us_price) == (micro_usd, is_us_price)
    assert "list price" in rate.source
    assert "20" in rate.source, "a price has a date"


def test_a_part_of_a_gib_month_is_rounded_up():
    rate = storage_rate("aws", "us-east-1")
    assert [rate.micro_usd_per_month(count) for count in (0, 1, GIB // 2, 10 * GIB)] == [0, 1, 11_500, 230_000]


# --- the words -----------------------------------------------------------------------------------------


def test_size_price_address_and_day_are_said(sessions):
    with sessions() as session:
        one = a_finished_run(session, "digits")
        record(session, one, size("s3://runs/ours/digits", 4130 * GIB // 100))
        assert words_of(session, one) == ["41.3 GiB, $0.95 a month (s3://runs/ours/digits), counted 2026-11-30"]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (size("s3://runs/ours/digits", GIB, is_whole=False), "at least 1.0 GiB, $0.02 a month (s3://"),
        (size("s3://runs/ours/digits", GIB, region=""), "$0.02 a month at the US price, as its region is unknown (s3"),
        (size("s3://runs/ours/digits", GIB, region="xx-1"), "at the US price, as that of xx-1 is unknown (s3://"),
        (size("s3://runs/ours/digits", 300), "300 bytes, less than $0.01 a month (s3://"),
        (size("s3://runs/ours/digits", 0), "0 bytes, $0.00 a month (s3://"),
        (
            size("s3://runs/ours/digits", None, is_whole=False, region="", problem="no\x1b[2J permission"),
            "unknown (s3://runs/ours/digits), tried 2026-11-30: no\\x1b[2J permission",
        ),
    ],
)
def test_what_is_not_known_of_a_folder_is_said(sessions, found, words):
    with sessions() as session:
        one = a_finished_run(session, "digits")
        record(session, one, found)
        [text] = words_of(session, one)
        assert words in text


def test_the_newest_count_of_each_folder_counts(sessions):
    with sessions() as session:
        one = a_finished_run(session, "digits", "aws,gcp")
        record(session, one, size("s3://runs/ours/digits", 9 * GIB))
        record(session, one, size("gs://runs/digits", 2 * GIB, region="us-east4"))
        record(session, one, size("s3://runs/ours/digits", GIB))
        found = left_in_buckets(session)[one.id]
        assert [(left.url, left.bytes, left.micro_usd_per_month) for left in found] == [
            ("s3://runs/ours/digits", GIB, 23_000),
            ("gs://runs/digits", 2 * GIB, 46_000),
        ]


def test_a_run_that_was_never_counted_says_so(sessions):
    """Its controller was killed between the run's end and the count, or had an older version."""
    with sessions() as session:
        one = a_finished_run(session, "digits")
        [left] = left_in_buckets(session)[one.id]
        assert left == LeftInBucket(
            url="s3://runs/ours/digits",
            bytes=None,
            is_whole=False,
            counted_ms=None,
            problem="",
            region="",
            micro_usd_per_month=None,
            is_us_price=True,
            price_source=left.price_source,
        )
        assert left_words(left) == "not counted (s3://runs/ours/digits)"


def test_runs_on_this_machine_and_without_buckets_leave_nothing(sessions):
    with sessions() as session:
        a_finished_run(session, "local", "local")
        without = a_finished_run(session, "without")
        without.job = {**without.job, "store": None}
        older = a_finished_run(session, "older")
        older.job = {key: value for key, value in older.job.items() if key != "store"}
        session.flush()
        assert left_in_buckets(session) == {}


# --- ls ------------------------------------------------------------------------------------------------


def listed(capsys, *words: str) -> list[str]:
    capsys.readouterr()
    assert run(["ls", *words]) == ExitCode.OK
    return capsys.readouterr().out.splitlines()


def test_ls_says_what_a_run_left_in_buckets_within_80_columns(sessions, capsys):
    with writing(sessions) as session:
        record(session, a_finished_run(session, "digits"), size("s3://runs/ours/digits", 4130 * GIB // 100))
    lines = listed(capsys)
    text = " ".join(" ".join(lines).split())
    assert "digits left in buckets: 41.3 GiB, $0.95 a month (s3://runs/ours/digits), counted 2026-11-30" in text
    assert "prints how to delete" in text
    assert max(map(len, lines)) <= 80


def test_ls_adds_up_what_all_runs_left_and_names_the_dearest(sessions, capsys):
    with writing(sessions) as session:
        for number in range(1, 8):
            name = f"run-{number}"
            record(session, a_finished_run(session, name), size(f"s3://runs/ours/{name}", number * 10 * GIB))
        a_finished_run(session, "never-counted")
        record(session, a_finished_run(session, "empty"), size("s3://runs/ours/empty", 0))
        session.add(Removal(run_id=find_run(session, "run-7").id, at_wall_ms=COUNTED_MS))
    lines = listed(capsys)
    assert "7 runs left in buckets: at least 280.0 GiB, $6.44 a month" in lines
    named = [line.partition(" ")[0] for line in lines if " left in buckets: " in line]
    assert named == ["7", "run-7", "run-6", "run-5", "run-4", "run-3", "never-counted"], "removed runs cost as before"
    assert "2 more folders in buckets: `spotrl ls --all --json`" in lines
    assert max(map(len, lines)) <= 80


def test_ls_counts_the_folders_of_unknown_size(sessions, capsys):
    with writing(sessions) as session:
        for number in range(3):
            a_finished_run(session, f"old-{number}")
    assert [line for line in listed(capsys) if "bucket" in line] == [
        "3 folders in buckets have an unknown size: `spotrl ls --all --json`"
    ]


def test_ls_is_silent_about_empty_folders_and_runs_that_go_on(sessions, capsys):
    with writing(sessions) as session:
        record(session, a_finished_run(session, "empty"), size("s3://runs/ours/empty", 0))
        resumed = a_finished_run(session, "resumed")
        record(session, resumed, size("s3://runs/ours/resumed", GIB))
        append_status(session, resumed, "running", "", START_MS + 2 * HOUR_MS)
    assert not any("bucket" in line for line in listed(capsys))
    documents = {view["name"]: view["left_in_buckets"] for view in json.loads(listed(capsys, "--json")[0])}
    assert documents["resumed"] == []
    assert [folder["bytes"] for folder in documents["empty"]] == [0]


def test_ls_as_json_has_a_count_that_came_after_the_view_was_kept(sessions, capsys):
    with writing(sessions) as session:
        one = a_finished_run(session, "digits")
    assert run_documents(sessions)[0]["left_in_buckets"][0]["counted_ms"] is None
    with writing(sessions) as session:
        record(session, one, size("s3://runs/ours/digits", 10 * GIB))
    capsys.readouterr()
    assert run(["ls", "--json"]) == ExitCode.OK
    [view] = printed("ls", capsys.readouterr().out)
    [left] = view["left_in_buckets"]
    assert (left["bytes"], left["micro_usd_per_month"], left["counted_ms"]) == (10 * GIB, 230_000, COUNTED_MS)
    with sessions() as session:
        [same] = view_of(session, find_run(session, "digits")).left_in_buckets
    assert (same.url, same.bytes) == (left["url"], left["bytes"])


# --- status, the last lines of a launch, and the list of the web view ----------------------------------

OF_PRICES = "prices of 2025-01-10, older than 90 days"


@pytest.fixture
def digits(sessions):
    """Make a finished run that left 41.3 GiB."""
    with writing(sessions) as session:
        made = a_finished_run(session, "digits")
        nodes_of(session, made)[0].requested_ms = COUNTED_MS
        record(session, made, size("s3://runs/ours/digits", 4130 * GIB // 100))
    return sessions


def test_status_and_the_end_of_a_launch_name_dates_of_prices_and_cost_in_buckets(digits):
    view = run_view(digits, "digits")
    left = "41.3 GiB, $0.95 a month (s3://runs/ours/digits), counted 2026-11-30"
    assert f"at {OF_PRICES}" in headline(view)
    assert f"left in buckets: {left}" in headline(view)
    first, second, *_ = last_words(view, [])
    assert first.endswith(f" spent at {OF_PRICES}.")
    assert second == f"Left in buckets: {left}."


def test_the_list_of_the_web_view_says_old_prices_and_what_its_runs_left(digits):
    with digits() as session:
        html = list_part("token", run_list(session))
    assert "; left in buckets: 41.3 GiB, $0.95 a month</p>" in html
    assert '<span class="state finished missed" title="iterations">' in html, "its target was not reached"
    assert f'title="{OF_PRICES}">assumed, prices older than 90 days</td>' in html


def test_the_page_of_a_run_says_what_it_left_in_buckets(digits):
    notes = run_page(digits, "digits")["bucket_notes"]
    assert notes[0] == "Left in buckets: 41.3 GiB, $0.95 a month (s3://runs/ours/digits), counted 2026-11-30."


# --- the report ----------------------------------------------------------------------------------------


def test_the_report_says_what_is_left_in_buckets_beside_its_costs(sessions):
    with sessions() as session:
        one = a_finished_run(session, "digits", "aws,gcp")
        before = build_report(session, one, START_MS + 2 * HOUR_MS)
        record(session, one, size("s3://runs/ours/digits", 4130 * GIB // 100))
        record(session, one, size("gs://runs/digits", 0, region="us-central1"))
        report = build_report(session, one, START_MS + 2 * HOUR_MS)
    assert [folder.bytes for folder in report.left_in_buckets] == [4130 * GIB // 100, 0]
    assert report.costs == before.costs
    console = Console(file=io.StringIO(), width=80)
    print_report(report, console)
    text = " ".join(console.file.getvalue().split())
    words = "Left in buckets: 41.3 GiB, $0.95 a month (s3://runs/ours/digits), counted 2026-11-30."
    assert words in text
    assert "Storage is priced at the list price of S3 Standard" in text
    assert "gs://runs/digits" not in text, "an empty folder costs nothing"
    page = render_html(report, lambda path: None)
    assert words in page
    console = Console(file=io.StringIO(), width=80)
    print_report(before, console)
    assert "Left in buckets: not counted (s3://runs/ours/digits)." in " ".join(console.file.getvalue().split())


def test_the_report_of_a_run_that_goes_on_has_nothing_left(sessions):
    with sessions() as session:
        one = a_finished_run(session, "digits")
        record(session, one, size("s3://runs/ours/digits", GIB))
        append_status(session, one, "running", "", START_MS + HOUR_MS)
        session.flush()
        assert build_report(session, one, START_MS + 2 * HOUR_MS).left_in_buckets == ()


# --- rm ------------------------------------------------------------------------------------------------


def removed(capsys, monkeypatch, found: list[FolderSize], *words: str) -> str:
    """Call `spotrl rm` where the buckets answer with `found`."""
    monkeypatch.setattr(rm_module, "count_buckets", lambda *given: count_buckets(*given, count=lambda urls: found))
    capsys.readouterr()
    assert run(["rm", "digits", "--yes", *words]) == ExitCode.OK
    return capsys.readouterr().out


def sizes_on_record(sessions) -> list[int | None]:
    with sessions() as session:
        return [row.bytes for row in session.query(BucketSize).order_by(BucketSize.id)]


def test_rm_counts_again_and_prints_the_deletion(sessions, tmp_path, monkeypatch, capsys):
    with writing(sessions) as session:
        one = a_finished_run(session, "digits", folder=str(tmp_path / "runs/digits"))
        record(session, one, size("s3://runs/ours/digits", 99))
    text = removed(capsys, monkeypatch, [size("s3://runs/ours/digits", 10 * GIB)])
    assert "Left in its bucket: 10.0 GiB, $0.23 a month (s3://runs/ours/digits), counted 20" in text
    assert "Delete it: aws s3 rm --recursive s3://runs/ours/digits/\n" in text
    text = removed(capsys, monkeypatch, [size("s3://runs/ours/digits", 0)])
    assert "Left in its bucket: 0 bytes" in text
    assert "Delete it" not in text
    assert sizes_on_record(sessions) == [99, 10 * GIB, 0]
    assert not any("left in buckets" in line for line in listed(capsys, "--all"))


def test_rm_keeps_an_earlier_count_if_the_bucket_does_not_answer(sessions, tmp_path, monkeypatch, capsys):
    silent = size("s3://runs/ours/digits", None, is_whole=False, region="", problem="the bucket is away")
    with writing(sessions) as session:
        a_finished_run(session, "digits", folder=str(tmp_path / "runs/digits"))
    text = removed(capsys, monkeypatch, [silent])
    assert "unknown (s3://runs/ours/digits), tried 20" in text
    assert ": the bucket is away\nDelete it: aws s3 rm --recursive s3://runs/ours/digits/\n" in text
    removed(capsys, monkeypatch, [size("s3://runs/ours/digits", 7)])
    text = removed(capsys, monkeypatch, [silent])
    assert "Left in its bucket: 7 bytes" in text
    assert sizes_on_record(sessions) == [None, 7]


def test_rm_as_json_has_the_folders(sessions, tmp_path, monkeypatch, capsys):
    with writing(sessions) as session:
        a_finished_run(session, "digits", folder=str(tmp_path / "runs/digits"))
    text = removed(capsys, monkeypatch, [size("s3://runs/ours/digits", 10 * GIB)], "--json")
    answered = printed("rm", text)
    assert answered["buckets"] == ["s3://runs/ours/digits"]
    assert [left["micro_usd_per_month"] for left in answered["left_in_buckets"]] == [230_000]


def test_rm_of_a_run_on_this_machine_asks_no_bucket(sessions, tmp_path, capsys):
    with writing(sessions) as session:
        one = a_finished_run(session, "digits", "local", folder=str(tmp_path / "runs/digits"))
        assert nodes_of(session, one)

    def count(urls):
        raise AssertionError("no bucket to ask")

    assert count_buckets(sessions, "digits", count) == ()
