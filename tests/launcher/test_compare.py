"""`spotrl compare`: figures checked by hand, groups of seeds, and what is refused."""

import json
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from sqlalchemy.orm import sessionmaker

from engine.events import Judged
from launcher.cli.compare import compare
from launcher.exit_codes import Failure
from launcher.ledger.store import nodes_of
from launcher.report.comparison import T_975, ComparedRun, compare_runs, flattened, score_at, seed_mean
from launcher.report.comparison_html import render_comparison, round_ticks
from launcher.report.result import result_dict
from tests.launcher.made_ledger import HOUR_MS, JOB, START_MS, MadeLedger, a_run, a_session
from tests.launcher.printed import check, printed

NASTY = "<script>alert(1)</script>"


def climbing(session, name, scores, *, algorithm="flow-grpo", seed=1, rate=1_000_000, status="finished", metric=None):
    """Add a run that costs `rate` an hour and is evaluated every hour."""
    job = {**JOB, "name": name, "seed": seed, "algorithm": {"name": algorithm, "prompts_per_batch": 2}}
    made = a_run(session, name, job=job)
    made.run.seed = seed
    made.run.target_metric = metric or "exact_match"
    made.status("running", 0)
    made.node("trainer", market="on_demand", rate=rate, on_demand=rate, up=0, end=10 * HOUR_MS)
    for number, score in enumerate(scores):
        made.evaluated(number, score, number * HOUR_MS, more={metric: score} if metric else None)
    made.status(status, 10 * HOUR_MS)
    return made.run


FAST = [0.5, 0.8, 0.8, 0.8, 0.8, 0.8]
SLOW = [0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8]


@pytest.fixture
def session():
    with a_session() as opened:
        yield opened


def test_each_run_has_its_dollars_and_hours_to_the_target(session):
    found = compare_runs(session, [climbing(session, "a", FAST), climbing(session, "b", SLOW, rate=500_000)])
    a, b = found.runs
    assert (a.confirmed.iteration, a.confirmed.micro_usd, a.confirmed.hours) == (5, 5_000_000, 5.0)
    assert (b.confirmed.iteration, b.confirmed.micro_usd, b.confirmed.hours) == (7, 3_500_000, 7.0)
    assert (a.micro_usd, b.micro_usd) == (10_000_000, 5_000_000)
    assert found.target == 0.8


def test_runs_that_differ_in_the_seed_alone_are_a_group_with_an_interval(session):
    runs = [climbing(session, f"a{seed}", FAST, seed=seed, rate=seed * 1_000_000) for seed in (1, 2, 3)]
    found = compare_runs(session, [*runs, climbing(session, "b", SLOW, algorithm="diffusion-nft")])
    a, b = found.groups
    assert (a.name, a.runs, a.reached) == ("a1", ("a1", "a2", "a3"), 3)
    assert a.micro_usd.mean == 10_000_000  # 5, 10 and 15 dollars
    assert a.micro_usd.high - a.micro_usd.mean == pytest.approx(4.303 * 5_000_000 / 3**0.5)
    assert (b.micro_usd.low, b.micro_usd.n) == (None, 1)
    assert "one seed, so no interval: b" in found.notes
    assert [one.field for one in found.differences] == ["algorithm.name", "seed"]


def test_a_group_with_a_run_that_failed_has_no_mean_to_the_target(session):
    runs = [climbing(session, "a", FAST, seed=1), climbing(session, "b", [0.1, 0.2], seed=2)]
    (group,) = compare_runs(session, runs).groups
    assert (group.reached, group.micro_usd, group.hours) == (1, None, None)
    assert group.spent_micro_usd.n == 2


def test_runs_are_grouped_by_a_named_field(session):
    runs = [
        climbing(session, "a", FAST, seed=1),
        climbing(session, "b", SLOW, algorithm="diffusion-nft", seed=2),
        climbing(session, "c", FAST, seed=3, status="running"),
    ]
    found = compare_runs(session, runs, ["algorithm.name"])
    assert [(group.name, group.runs) for group in found.groups] == [
        ("algorithm.name=flow-grpo", ("a", "c")),
        ("algorithm.name=diffusion-nft", ("b",)),
    ]
    assert "not over yet: c" in found.notes
    with pytest.raises(Failure, match=r"has a field algorithm\.nme"):
        compare_runs(session, runs, ["algorithm.nme"])


def test_runs_with_different_metrics_are_refused(session):
    runs = [climbing(session, "a", FAST), climbing(session, "b", SLOW, metric="similarity")]
    with pytest.raises(Failure, match="a: exact_match, b: similarity"):
        compare_runs(session, runs)


def test_other_bases_of_money_and_other_clocks_are_told(session):
    a, b = climbing(session, "a", FAST), climbing(session, "b", FAST)
    assert "hours are on the runs' clock, 60 s for each second of work" in compare_runs(session, [a, b]).notes
    b.money_basis, b.clock_factor = "metered", 30.0
    notes = compare_runs(session, [a, b]).notes
    assert "the dollars have different bases (assumed, metered): compare them with care" in notes
    assert "the clocks of the runs differ (a x60, b x30): hours and dollars depend on the clock" in notes


def test_the_dates_of_the_prices_are_told(session):
    a, b = climbing(session, "a", FAST), climbing(session, "b", SLOW)
    assert "prices of 2025-01-10: a, b" in compare_runs(session, [a, b]).notes
    for node in nodes_of(session, b):
        node.price_observed_at = "2024-07-20"
    notes = compare_runs(session, [a, b]).notes
    assert {"prices of 2025-01-10: a", "prices of 2024-07-20, older than 90 days: b"} <= set(notes)


def test_the_cost_of_paid_judges_is_told_because_it_is_not_in_the_dollars(session):
    cheap, judged = climbing(session, "a", FAST), climbing(session, "b", SLOW)
    assert not any("judges" in note for note in compare_runs(session, [cheap, judged]).notes)
    MadeLedger(session, judged, seq=100).record(Judged(worker="w", calls=((1000, 50, 7_500_000),)), at=HOUR_MS)
    notes = compare_runs(session, [cheap, judged]).notes
    assert "the dollars are those of nodes; paid judges cost beside them: b $7.50" in notes
    money = result_dict(session, "b", [])["micro_usd"]
    assert (money["total"], money["judges"]) == (10_000_000, 7_500_000)


def test_a_run_without_an_evaluation_is_compared_by_its_dollars(session):
    found = compare_runs(session, [climbing(session, "a", FAST), climbing(session, "b", [])])
    assert (found.runs[1].best, found.runs[1].confirmed, found.runs[1].micro_usd) == (None, None, 10_000_000)
    assert "<polyline" in render_comparison(found)


@pytest.mark.parametrize(
    ("low", "high", "options", "ticks"),
    [
        (0.0, 1.08, {}, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.0, 1.0, {}, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.0, 3.0, {"finest": 1.0}, [0, 1, 2, 3]),
        (0.45, 0.95, {"outside": True}, [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]),
        (0.0, 4321.0, {}, [0, 1000, 2000, 3000, 4000]),
        (-0.3, 0.3, {"outside": True}, [-0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.3]),
    ],
)
def test_the_numbers_at_an_axis_are_round(low, high, options, ticks):
    assert round_ticks(low, high, **options) == ticks


def test_the_interval_of_equal_values_is_the_value():
    assert (seed_mean([2.0, 2.0]).low, seed_mean([2.0, 2.0]).high) == (2.0, 2.0)
    assert seed_mean([1.0] * 100).n == 100
    assert list(T_975) == sorted(T_975, reverse=True)
    assert len(T_975) == 30


def test_a_job_is_flattened_to_dotted_fields():
    assert dict(flattened({"a": {"b": 1, "c": []}, "d": {}, "e": None})) == {
        "a.b": "1",
        "a.c": "[]",
        "d": "{}",
        "e": "null",
    }


def test_a_score_holds_until_the_last_evaluation(session):
    run: ComparedRun = compare_runs(session, [climbing(session, "a", FAST), climbing(session, "b", SLOW)]).runs[0]
    assert score_at(run, "hours", 0.5) == 0.5
    assert score_at(run, "hours", 5.0) == pytest.approx(0.8)
    assert score_at(run, "hours", 5.1) is None
    assert score_at(run, "micro_usd", -1) is None


@pytest.fixture
def ledger(tmp_path):
    with a_session(tmp_path / "ledger.sqlite") as session:
        climbing(session, "a", FAST)
        climbing(session, "b", SLOW, algorithm=NASTY, seed=2)
        session.commit()
        yield sessionmaker(session.get_bind())


def test_the_terminal_shows_results_scores_jobs_and_dollars_in_80_columns(ledger):
    result = CliRunner().invoke(compare, ["a", "b", "--over", "hours"], obj=ledger)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["a", "1", "$5.00", "5.00", "5", "0.800", "$10.00"] in lines
    assert ["b", "2", "$7.00", "7.00", "7", "0.800", "$10.00"] in lines
    assert ["7.00", "-", "0.800"] in lines
    assert ["all", "$10.00", "$10.00"] in lines
    assert ["algorithm.name", "flow-grpo", NASTY] in lines
    assert max(map(len, result.output.splitlines())) <= 80


def test_a_long_value_does_not_break_the_table_of_differences(ledger):
    with ledger() as session, session.begin():
        climbing(session, "c", SLOW, algorithm="a" * 60, seed=1)
    lines = CliRunner().invoke(compare, ["a", "c"], obj=ledger).output.splitlines()
    assert any(line.startswith("algorithm.name of c:") for line in lines)
    assert "a" * 60 in "".join(lines)


def test_the_json_keeps_its_schema(ledger):
    result = CliRunner().invoke(compare, ["a", "b", "--json"], obj=ledger)
    found = printed("compare", result.stdout)
    assert [run["name"] for run in found["runs"]] == ["a", "b"]
    assert check("compare", json.loads(result.stdout))["runs"][0]["curve"][0]["at_ms"] == START_MS


def test_the_page_is_whole_and_escapes_what_a_job_says(ledger, tmp_path):
    page = tmp_path / "compare.html"
    assert CliRunner().invoke(compare, ["a", "b", "--html", str(page)], obj=ledger).exit_code == 0
    text = page.read_text("utf-8")
    assert NASTY not in text
    assert "&lt;script&gt;" in text
    assert text.count("<polyline") == 6
    assert "http" not in text.replace("http-equiv", "")
    HTMLParser().feed(text)


@pytest.mark.parametrize("names", [["a"], ["a", "a"]])
def test_one_run_is_no_comparison(ledger, names):
    result = CliRunner().invoke(compare, names, obj=ledger)
    assert result.exit_code == 2
    assert "two different runs" in result.output
