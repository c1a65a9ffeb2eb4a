"""The report's CSV files, its saving in words, its learning curves and its sheets, on a real run's ledger."""

import csv
import gzip
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli.report import report as report_command
from launcher.ledger.store import find_run, open_ledger
from launcher.report.build import build_report
from launcher.report.charts import learning_chart
from launcher.report.html import MOST_SHEETS, render_html
from launcher.report.tables import tables, write_tables
from launcher.report.values import Pictures
from launcher.report.words import saved_percent, saving_words

STORED = Path(__file__).parents[1] / "data/quickstart/ledger.sql.gz"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    path = tmp_path_factory.mktemp("quickstart") / "ledger.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(gzip.decompress(STORED.read_bytes()).decode())
    return open_ledger(path)


@pytest.fixture(scope="module")
def report(sessions):
    with sessions() as session:
        run = find_run(session, "quickstart")
        return build_report(session, run, run.clock.now_ms())


def test_every_table_is_written_and_adds_up(sessions, report, tmp_path):
    result = CliRunner().invoke(report_command, ["quickstart", "--csv", str(tmp_path / "tables")], obj=sessions)
    assert result.exit_code == 0, result.output
    files = {path.stem: list(csv.DictReader(path.open())) for path in (tmp_path / "tables").glob("*")}
    shown = {"evaluations", "gains", "drift", "iterations", "images", "costs", "nodes", "preemptions", "savings"}
    assert set(files) == shown | {"prices"}
    assert set(tables(report)) - set(files) == {"scores", "bill", "billed", "commands"}, "this run has none of these"
    assert len(files["images"]) == len(report.pictures)
    total = report.costs.total / 1e6
    assert sum(float(row["dollars"]) for row in files["nodes"]) == pytest.approx(total, abs=1e-6)
    for split in ("role", "market", "place", "phase", "node"):
        amounts = [float(row["dollars"]) for row in files["costs"] if row["split"] == split]
        assert sum(amounts) == pytest.approx(total, abs=1e-6)
    assert len(files["iterations"]) == report.run.iterations
    assert len(files["preemptions"]) == 3
    assert float(files["evaluations"][0]["exact_match"]) == pytest.approx(0.475, abs=0.001)


def test_no_cell_is_taken_for_a_formula(report, tmp_path):
    line = replace(report.preemptions[0], node='=HYPERLINK("http://example.com")')
    write_tables(replace(report, preemptions=(line,)), tmp_path)
    (row,) = csv.DictReader((tmp_path / "preemptions.csv").open())
    assert row["node"].startswith("'=")


def test_a_table_without_rows_has_no_file(report, tmp_path):
    paths = write_tables(replace(report, preemptions=()), tmp_path)
    assert "preemptions.csv" not in {path.name for path in paths}
    assert all(len({tuple(row) for row in rows}) <= 1 for rows in tables(report).values())


def test_the_saving_stands_at_the_top(report):
    saving = report.saved[-1]
    assert saved_percent(report) == pytest.approx(100 * saving.saved_micro_usd / saving.micro_usd)
    assert saving_words(report).endswith("%) less than the same nodes on demand.")
    dearer = replace(report, saved=(replace(saving, saved_micro_usd=-1_000_000, micro_usd=10_000_000),))
    assert saving_words(dearer) == "$1.00 (10 %) more than the same nodes on demand."
    assert saving_words(replace(report, saved=())) == ""


def test_curves_that_never_change_are_left_out(report):
    drawing = learning_chart(report)
    assert "mean reward of the trained rollouts" in drawing.svg
    flat = tuple(replace(done, reward_mean=0.5, health={"kl": 0.0}) for done in report.learning)
    assert learning_chart(replace(report, learning=flat)) is None
    assert learning_chart(replace(report, learning=())) is None


@pytest.mark.parametrize(
    ("count", "shown"), [(0, 0), (1, 1), (2, 2), (MOST_SHEETS, MOST_SHEETS), (10_000, MOST_SHEETS)]
)
def test_the_page_shows_sheets_of_all_evaluations_evenly_spread(report, count, shown):
    sheets = tuple(Pictures(iteration=number, path=f"{number}.png", score=None) for number in range(count))
    page = render_html(replace(report, pictures=sheets), lambda path: PNG + path.encode())
    assert page.count("<img ") == shown
    assert ("sheets, evenly spread" in page) == (count > shown)
    if count > 1:
        assert "Before: iteration 0<" in page
        assert f"After: iteration {count - 1}<" in page


def test_the_page_has_the_job_file_and_words_for_preemptions(report):
    page = render_html(replace(report, job_text="name: <b>demo</b>\n"), lambda path: None)
    assert "name: &lt;b&gt;demo&lt;/b&gt;" in page
    assert ">preemption with notice<" in page
    assert ">preemption without notice<" in page
