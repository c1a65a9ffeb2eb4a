"""The report's tables as CSV files, for spreadsheets and notebooks. Money is in dollars, time in hours or seconds."""

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.money import MICRO
from launcher.report.values import Report

Row = Mapping[str, Any]


def write_tables(report: Report, folder: Path) -> list[Path]:
    """Write one file per table with rows, and return the files. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, rows in tables(report).items():
        if not rows:
            continue
        path = folder / f"{name}.csv"
        unfinished = path.with_name(f"{path.name}.part")
        with unfinished.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows({key: _safe(value) for key, value in row.items()} for row in rows)
        os.replace(unfinished, path)
        written.append(path)
    return written


def tables(report: Report) -> dict[str, Sequence[Row]]:
    """Return the rows of every table by name. All rows of a table have the same columns."""
    return {
        "evaluations": [
            {
                "iteration": point.iteration,
                "hours": point.hours,
                "dollars": point.micro_usd / MICRO,
                report.target.metric: point.score,
                "smoothed": point.smoothed,
            }
            for point in report.curve
        ],
        "drift": [
            {"iteration": point.iteration, "drift": point.drift, "guards_hold": point.guards_hold}
            for point in report.drift
        ],
        "iterations": _iterations(report),
        "costs": list(_costs(report)),
        "nodes": [
            {
                "node": node.node,
                "slot": node.slot,
                "role": node.role,
                "market": node.market,
                "zone": node.zone,
                "instance_type": node.instance_type,
                "dollars_per_hour": node.micro_usd_per_hour / MICRO,
                "hours": node.hours,
                "dollars": node.micro_usd / MICRO,
            }
            for node in report.nodes
        ],
        "preemptions": [
            {
                "hour": line.hours,
                "node": line.node,
                "zone": line.zone,
                "notice": line.notice,
                "lost_steps": line.lost_steps,
                "replaced_by": line.replaced_by,
                "replaced_after_s": line.replaced_after_s,
                "cold_start_dollars": line.cold_start_micro_usd / MICRO,
                "lost_work_dollars": line.lost_work_micro_usd / MICRO,
                "dollars": line.micro_usd / MICRO,
            }
            for line in report.preemptions
        ],
        "savings": [
            {
                "kind": saving.kind,
                "against": saving.against,
                "dollars_there": _dollars(saving.micro_usd),
                "dollars_saved": _dollars(saving.saved_micro_usd),
                "why": saving.why,
            }
            for saving in report.saved
        ],
    }


def _iterations(report: Report) -> list[Row]:
    names = sorted({name for done in report.learning for name in done.health})
    return [
        {
            "iteration": done.iteration,
            "hours": done.hours,
            "reward_mean": done.reward_mean,
            "reward_std": done.reward_std,
            "explored": done.explored,
            **{name: done.health.get(name) for name in names},
        }
        for done in report.learning
    ]


def _costs(report: Report) -> Iterator[Row]:
    costs = report.costs
    splits = (
        ("role", costs.by_role),
        ("market", costs.by_market),
        ("place", costs.by_place),
        ("phase", costs.by_phase),
        ("node", costs.by_node),
    )
    for split, amounts in splits:
        for name, micro_usd in amounts.items():
            yield {"split": split, "name": name, "dollars": micro_usd / MICRO}


def _dollars(micro_usd: int | None) -> float | None:
    return None if micro_usd is None else micro_usd / MICRO


def _safe(value: Any) -> Any:
    """Return a value that no spreadsheet takes for a formula. Names and evidence come from users and clouds."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
