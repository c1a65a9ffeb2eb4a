"""The page of one run and its new events, read from the ledger.

Every function takes a session of its own, reads, and returns plain values for JSON. No session outlives a call, so a
page that is open holds no lock and keeps no old pages of the write-ahead log alive. Every list is bounded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any, TypeVar

from sqlalchemy.orm import Session, sessionmaker

from engine.events import Evaluated, IterationDone
from launcher.decide.facts import OVER
from launcher.ledger.models import Run
from launcher.ledger.store import find_run, reading_once
from launcher.money import HOUR_MS
from launcher.report.build import build_report
from launcher.report.front_chart import front_html
from launcher.report.provenance import hardware_by_nodes
from launcher.report.reached import by_iteration
from launcher.report.values import Report
from launcher.report.words import bucket_words, clock_words, drift_words, headline, point_words
from launcher.runs.event_lines import Seen, newest_events, newest_seen
from launcher.runs.views import RunView, view_of

EVENTS_SHOWN = 400
"""Newest events on a page; `spotrl events` prints all of them."""

POINTS_SHOWN = 600
"""Most iterations of a curve. A longer run shows every n-th, because a chart is not wider than this many pixels."""

Row = TypeVar("Row")


def run_page(sessions: sessionmaker[Session], name: str) -> dict[str, Any]:
    """Return everything on the page of a run. Raises LookupError for an unknown run."""
    with sessions() as session, reading_once(session):
        run = find_run(session, name)
        view, ids = view_of(session, run), newest_seen(session, run)
        report = build_report(session, run, run.clock.now_ms())
        return {
            "ids": ids,
            "headline": headline(report),
            "drift": drift_words(report),
            "money_note": report.money_note,
            "bucket_notes": bucket_words(report),
            "clock_note": clock_words(run.clock_factor),
            "view": _shown(view),
            "run": asdict(report.run),
            "target": asdict(report.target),
            "costs": asdict(report.costs),
            "nodes": [asdict(node) for node in report.nodes],
            "preemptions": [asdict(line) for line in report.preemptions],
            "saved": [asdict(saving) for saving in report.saved],
            "prices": [asdict(source) for source in report.prices],
            "start_ms": report.start_ms,
            "end_ms": report.end_ms,
            "curve": [asdict(moment) for moment in _thinned(report.curve)],
            "iterations": _iterations(session, run, report),
            "sheets": _thinned(_sheets(session, run, report.target.metric)),
            "plan": _plan(run, report),
            "fleets": None if report.fleets is None else front_html(report.fleets),
            "events": [asdict(line) for line in newest_events(session, run, EVENTS_SHOWN)[0]],
            "job": report.job_text,
            "provenance": asdict(report.provenance) | {"alike": hardware_by_nodes(report.provenance)},
        }


def run_state(sessions: sessionmaker[Session], name: str) -> dict[str, Any]:
    """Return the figures at the top of a run's page, without its curves. Raises LookupError for an unknown run."""
    with sessions() as session, reading_once(session):
        return {"view": _shown(view_of(session, find_run(session, name)))}


def _shown(view: RunView) -> dict[str, Any]:
    shown = {"is_over": view.status in OVER, "lacks_controller": view.lacks_controller}
    return asdict(view) | shown | {"point_text": point_words(view.point, view.metric)}


def events_after(session: Session, name: str, after: Seen) -> tuple[Seen, list[dict[str, Any]]]:
    """Return the events after `after`, oldest first and at most the newest `EVENTS_SHOWN`, and the ids to go on from.

    Without anything new, nothing but four ids is read.
    """
    run = find_run(session, name)
    ids = newest_seen(session, run)
    if ids == after:
        return after, []
    lines, ids = newest_events(session, run, EVENTS_SHOWN, after)
    return ids, [asdict(line) for line in lines]


def sheet_path(session: Session, name: str, iteration: int) -> tuple[Run, str]:
    """Return the run, and the path of an evaluation's contact sheet in its store. Raises LookupError."""
    run = find_run(session, name)
    row = by_iteration(session, run, Evaluated.KIND).get(iteration)
    if row is None or not row.event.get("pictures"):
        raise LookupError(f"{name} has no image sheet of iteration {iteration}")
    return run, str(row.event["pictures"])


def _iterations(session: Session, run: Run, report: Report) -> list[dict[str, Any]]:
    """Return reward, health and seconds of the trained batches, with the hours and micro-dollars until then."""
    rows = _thinned(list(by_iteration(session, run, IterationDone.KIND).values()))
    charges = sorted((charge for node in report.nodes for charge in node.charges), key=lambda charge: charge.start_ms)
    return [
        {
            "iteration": row.event["iteration"],
            "hours": (row.at_ms - run.created_ms) / HOUR_MS,
            "micro_usd": sum(charge.until(row.at_ms) for charge in charges),
            "reward": _finite(row.event["reward_mean"]),
            "seconds": row.event["wall_seconds"],
            "explored": row.event["explored"],
            "shares": _shares(row.event.get("schedule", {})),
            "health": {name: _finite(value) for name, value in row.event["health"].items()},
        }
        for row in rows
    ]


def _shares(schedule: Mapping[str, float]) -> dict[str, float] | None:
    """Return the shares of an iteration in which the trainer waited for the queue and helped it; None if not known."""
    seconds = schedule.get("seconds", 0.0)
    if seconds <= 0:
        return None
    names = {"waiting": "waited_seconds", "helping": "helped_seconds"}
    return {name: _finite(schedule.get(key, 0.0) / seconds) or 0.0 for name, key in names.items()}


def _finite(value: float) -> float | None:
    """Return the value, or None for a NaN or an infinity, which JSON does not have."""
    return value if isfinite(value) else None


def _sheets(session: Session, run: Run, metric: str) -> list[dict[str, Any]]:
    """Return the evaluations with an image sheet, oldest first."""
    rows = by_iteration(session, run, Evaluated.KIND).items()
    return [
        {"iteration": iteration, "score": row.event["metrics"].get(metric), "prompts": row.event["prompts"]}
        for iteration, row in rows
        if row.event.get("pictures")
    ]


def _plan(run: Run, report: Report) -> list[dict[str, Any]]:
    """Return the planned nodes beside what happened in each slot."""
    slots = []
    for slot in run.plan.get("slots", ()):
        had = [node for node in report.nodes if node.slot == slot["name"]]
        preemptions = [line for line in report.preemptions if line.slot == slot["name"]]
        slots.append(
            {
                "slot": slot["name"],
                "planned": slot["placement"],
                "nodes": len(had),
                "preemptions": len(preemptions),
                "hours": sum(node.hours for node in had),
                "micro_usd": sum(node.micro_usd for node in had),
                "zones": sorted({node.zone for node in had}),
            }
        )
    return slots


def _thinned(rows: Sequence[Row]) -> Sequence[Row]:
    """Return at most about `POINTS_SHOWN` rows: every n-th, and the last."""
    step = -(-len(rows) // POINTS_SHOWN)
    if step <= 1:
        return rows
    return [*rows[: len(rows) - 1 : step], rows[-1]]
