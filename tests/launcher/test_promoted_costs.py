"""A node that took the role of the trainer: what each role cost, and what the loss of the trainer cost."""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from engine.events import CheckpointSaved
from launcher.cli.status import node_rows
from launcher.decide.facts import PROMOTED, promotion_text
from launcher.ledger.accounting import run_costs
from launcher.ledger.models import Node, NodeEvent
from launcher.report.build import build_report
from launcher.report.charts import _bars, _slots, _stacked
from launcher.report.html import render_html
from launcher.report.preemptions import preemption_lines
from launcher.report.trace import chrome_trace
from launcher.report.values import TrainerLosses
from launcher.report.words import trainer_loss_words
from launcher.runs.views import view_of
from tests.launcher.made_ledger import JOB, MINUTE_MS, START_MS, MadeLedger, a_run, a_session

END = 60 * MINUTE_MS


@pytest.fixture
def made() -> Iterator[MadeLedger]:
    """The trainer is lost after 20 minutes, and the node that took its role after 40."""
    with a_session() as session:
        made = a_run(session, job={**JOB, "iterations": 45}, factor=1.0)
        made.status("running", 0)
        trainer = made.node("trainer", 0, rate=3_600_000, up=0, end=20 * MINUTE_MS, seen=MINUTE_MS)
        spot = made.node("spot-0", 0, rate=3_600_000, up=0, end=40 * MINUTE_MS, seen=MINUTE_MS)
        made.node("spot-0", 1, rate=3_600_000, up=20 * MINUTE_MS, end=END, seen=24 * MINUTE_MS)
        made.node("trainer", 2, rate=3_600_000, up=40 * MINUTE_MS, end=END, seen=50 * MINUTE_MS)
        happens(made, spot, PROMOTED, 20, promotion_text("trainer", 1, "demo-trainer-g0 ended"))
        happens(made, spot, "ready", 21)
        made.preempted(trainer, 20 * MINUTE_MS)
        made.preempted(spot, 40 * MINUTE_MS, noticed=38 * MINUTE_MS)
        session.flush()
        yield made


def happens(made: MadeLedger, node: Node, kind: str, minute: int, evidence: str = "") -> None:
    made.session.add(NodeEvent(node_id=node.id, at_ms=START_MS + minute * MINUTE_MS, kind=kind, evidence=evidence))


def test_the_cost_of_a_role_changes_at_the_moment_of_the_promotion(made: MadeLedger) -> None:
    costs = run_costs(made.session, made.run, START_MS + END)
    minute = 60_000  # micro-dollars at $3.60 an hour
    assert costs.by_role == {"trainer": (20 + 20 + 20) * minute, "rollout": (20 + 40) * minute}
    assert sum(costs.by_role.values()) == costs.total


def test_a_lost_trainer_is_recovered_by_a_promotion_and_then_by_a_new_node(made: MadeLedger) -> None:
    first, second = preemption_lines(made.session, made.run, run_costs(made.session, made.run, START_MS + END))
    assert (first.node, first.role, first.recovered_by) == ("demo-trainer-g0", "trainer", "a promotion")
    assert (first.replaced_by, first.replaced_after_s) == ("demo-spot-0-g0", 60.0)
    assert first.cold_start_micro_usd == 4 * 60_000, "the slot that it left was filled again"
    assert (second.node, second.slot, second.role) == ("demo-spot-0-g0", "trainer", "trainer")
    assert (second.recovered_by, second.replaced_by) == ("a new node", "demo-trainer-g2")
    assert (second.replaced_after_s, second.cold_start_micro_usd) == (600.0, 10 * 60_000)


def test_a_rollout_node_is_recovered_by_a_new_node_or_not_at_all() -> None:
    with a_session() as session:
        made = a_run(session, job={**JOB, "iterations": 45}, factor=1.0)
        lost = made.node("spot-0", 0, up=0, end=10 * MINUTE_MS, seen=MINUTE_MS)
        last = made.node("spot-0", 1, up=11 * MINUTE_MS, end=20 * MINUTE_MS, seen=12 * MINUTE_MS)
        made.preempted(lost, 10 * MINUTE_MS)
        made.preempted(last, 20 * MINUTE_MS)
        session.flush()
        lines = preemption_lines(session, made.run, run_costs(session, made.run, START_MS + END))
        assert [(line.role, line.recovered_by) for line in lines] == [("rollout", "a new node"), ("rollout", None)]


def test_the_timeline_draws_each_iteration_beside_the_node_that_trained_it(made: MadeLedger) -> None:
    made.nodes["demo-trainer-g2"].requested_ms = START_MS + 40 * MINUTE_MS
    for iteration, minute in enumerate((10, 30, 55)):
        made.trained(iteration, minute * MINUTE_MS)
    made.session.flush()
    events = chrome_trace(made.session, made.run)["traceEvents"]
    names = {one["pid"]: one["args"]["name"].split()[0] for one in events if one["name"] == "process_name"}
    trained = [names[one["pid"]] for one in events if one["name"].startswith("iteration ")]
    assert trained == ["demo-trainer-g0", "demo-spot-0-g0", "demo-trainer-g2"]


def test_the_status_names_the_node_that_trains(made: MadeLedger) -> None:
    rows = [row[0] for row in node_rows(view_of(made.session, made.run))]
    assert "trainer-g2" in rows
    with a_session() as session:
        other = a_run(session, job={**JOB, "iterations": 45}, factor=1.0)
        other.status("running", 0)
        happens(other, other.node("spot-0", 0, up=0), PROMOTED, 20, promotion_text("trainer", 1, "lost"))
        session.flush()
        assert [row[0] for row in node_rows(view_of(session, other.run))] == ["node", "spot-0-g0 (trainer)"]


def test_the_charts_draw_a_promoted_node_in_the_trainers_slot_from_its_promotion_on(made: MadeLedger) -> None:
    made.status("finished", END)
    made.session.flush()
    report = build_report(made.session, made.run, START_MS + END)
    rates = [row for row in _stacked(report, _slots(report.nodes)) if row["slot"] == "trainer"]
    assert sum(row["to_h"] - row["from_h"] for row in rates) == pytest.approx(1.0), "a node trains in the whole hour"
    bars = [bar for node in report.nodes for bar in _bars(report, node) if bar["slot"] == "trainer"]
    cold = [bar["to_h"] - bar["from_h"] for bar in bars if bar["stage"].endswith("cold start")]
    assert cold == pytest.approx([1 / 60, 1 / 60, 10 / 60])
    for slot in ("trainer", "spot-0"):
        spans = sorted(
            (bar["from_h"], bar["to_h"]) for node in report.nodes for bar in _bars(report, node) if bar["slot"] == slot
        )
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(spans)), "no two nodes at once in a slot"


def test_the_report_says_what_the_losses_of_the_trainer_cost(made: MadeLedger) -> None:
    """Lost at 20 and 40 minutes, 5 and 19 minutes after what was kept; 1 and 10 minutes without a trainer."""
    made.started(0)
    made.record(CheckpointSaved(iteration=3, path="", digest=""), 15 * MINUTE_MS)
    made.started(21 * MINUTE_MS, iteration=3, lineage=1)
    report = build_report(made.session, made.run, START_MS + END)
    two_nodes = 2 * 60_000  # micro-dollars a minute
    assert report.trainer_losses == TrainerLosses(
        losses=2,
        promotions=1,
        made_again_seconds=(5 + 19) * 60.0,
        made_again_micro_usd=(5 + 19) * two_nodes,
        without_trainer_seconds=(1 + 10) * 60.0,
        without_trainer_micro_usd=(1 + 10) * two_nodes,
    )
    words = "The trainer was lost 2 times: 24m made again ($2.88), 11m without one ($1.32)."
    assert trainer_loss_words(report) == words
    assert words in render_html(report, lambda _: None)
