"""Collectives of the trainer's ranks in the report: seconds of an iteration, and dollars by node and by phase."""

import json

import pytest
from click.testing import CliRunner
from sqlalchemy.orm import sessionmaker

from engine.events import IterationDone
from launcher.cli.report import report
from launcher.report.ranks import collectives_of, collectives_words
from tests.launcher.made_ledger import HOUR_MS, MINUTE_MS, a_run, a_session


def done(iteration, **phase_ms):
    return IterationDone(
        iteration=iteration,
        reward_mean=0.5,
        reward_std=0.1,
        group_std_mean=0.1,
        explored=0,
        manifest_digest="m",
        phase_ms=phase_ms,
        wall_seconds=1.0,
        health={},
    )


@pytest.fixture
def reported(tmp_path):
    """Report a run whose trainer, at $3.60 an hour, had 10 minutes of collectives, and its successor 5 minutes.

    Return the text, the JSON and the page.
    """
    page = tmp_path / "report.html"
    with a_session(tmp_path / "ledger.sqlite") as session:
        made = a_run(session)
        made.status("running", 0)
        for generation, start, minutes in ((1, 0, 10), (2, HOUR_MS, 5)):
            node = made.node("trainer", generation, market="on_demand", up=start, end=start + HOUR_MS, seen=start)
            spent = minutes * MINUTE_MS
            made.used(node, start, start + HOUR_MS, lineage=generation, collective=spent, training=2 * spent)
        spot = made.node("spot-0", up=0, end=HOUR_MS, seen=0)
        made.used(spot, 0, HOUR_MS, rollout=HOUR_MS // 2)
        for iteration, seconds in enumerate((0.0, 3.0, 1.0, 2.0)):  # the first iteration had one rank
            made.record(done(iteration, collective=round(1000 * seconds), training=8000), HOUR_MS)
        made.status("finished", 2 * HOUR_MS)
        session.commit()
        sessions = sessionmaker(session.get_bind())
    text = CliRunner().invoke(report, ["demo", "--html", str(page)], obj=sessions).output
    found = json.loads(CliRunner().invoke(report, ["demo", "--json"], obj=sessions).output)
    return text, found, page.read_text()


def test_seconds_and_dollars_of_collectives_reach_the_report(reported):
    text, found, page = reported
    factor = found["run"]["clock_factor"]
    assert found["collectives"] == {
        "iterations": 3,
        "seconds": 2.0 / factor,
        "training_seconds": 8.0 / factor,
        "micro_usd": 900_000,
    }
    by_node = {node["node"]: node["phase_micro_usd"].get("collective", 0) for node in found["nodes"]}
    assert by_node == {"demo-trainer-g1": 600_000, "demo-trainer-g2": 300_000, "demo-spot-0-g1": 0}
    assert found["costs"]["by_phase"]["collective"] == 900_000
    assert "between ranks" in " ".join(text.split())
    assert "collectives cost $0.90." in " ".join(text.split())
    assert max(map(len, text.splitlines()[1:])) <= 80  # the first line has the page's path
    assert "collectives cost $0.90." in page
    assert "<td>collective</td>" in page
    assert "THE SPLITS DISAGREE" not in page


def test_the_time_of_every_gpu_of_the_trainer_reaches_the_report(reported):
    """Two trainer nodes for an hour each: 15 minutes of collectives and 30 of training. Spot is left out."""
    text, found, page = reported
    time = found["trainer_time"]
    assert time["hours"] == pytest.approx(2.0)
    assert time["share"] == pytest.approx({"idle": 75 / 120, "training": 30 / 120, "collective": 15 / 120})
    assert time["idle_share"] == pytest.approx({"idle": 75 / 120, "collective": 15 / 120})
    sentence = "Time of every GPU of the trainer, after its start: idle 62%, training 25%, collective 12%."
    assert sentence in " ".join(text.split())
    assert sentence in page


def test_the_sentence_has_wall_seconds():
    events = [{"phase_ms": {"collective": 50_000, "training": 400_000}}, {"phase_ms": {"training": 1}}, {}]
    assert collectives_words(collectives_of(events, 1_000_000, 200.0)) == (
        "Ranks of the trainer: an iteration had 0.25 s of collectives (gradients and weights between ranks, and "
        "waiting for the slowest) beside 2.00 s of training (medians of 1); collectives cost $1.00."
    )


def test_a_trainer_with_one_rank_has_no_sentence_on_collectives():
    assert collectives_of([{"phase_ms": {"training": 5}}, {}], 0, 1.0) is None
    assert collectives_words(None) == ""
