"""The report's tables as CSV files, for spreadsheets and notebooks. Money is in dollars, time in hours or seconds."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.money import MICRO
from launcher.report.values import Report
from launcher.whole_file import whole_file

Row = Mapping[str, Any]


def write_tables(report: Report, folder: Path) -> list[Path]:
    """Write one file per table with rows, and return the files. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, rows in tables(report).items():
        if not rows:
            continue
        path = folder / f"{name}.csv"
        with whole_file(path) as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows({key: _safe(value) for key, value in row.items()} for row in rows)
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
        "scores": [
            {"name": one.name, "iteration": one.iteration, "dollars": one.micro_usd / MICRO, "score": one.score}
            for one in report.scores
        ],
        "gains": [
            {
                "from_iteration": gain.from_iteration,
                "to_iteration": gain.to_iteration,
                "from_score": gain.from_score,
                "to_score": gain.to_score,
                "dollars": gain.micro_usd / MICRO,
                "dollars_per_hundredth": gain.micro_usd_per_hundredth / MICRO,
            }
            for gain in report.gains
        ],
        "billed": [
            {"kind": one.kind, "node": one.node or "", "dollars": one.micro_usd / MICRO, "why": one.why}
            for one in (report.bill.differences if report.bill else ())
        ],
        "drift": [asdict(point) for point in report.drift],
        "iterations": _iterations(report),
        "images": [asdict(sheet) for sheet in report.pictures],
        "costs": list(_costs(report)),
        "bill": [
            {
                "what": line.kind,
                "amount": line.amount,
                "dollars": _dollars(line.micro_usd),
                "in_total": line.in_total,
                "source": line.source,
            }
            for line in report.extras
        ],
        "nodes": _nodes(report),
        "preemptions": _preemptions(report),
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
        "prices": [asdict(price) for price in report.prices],
        "commands": [asdict(one) for one in report.provenance.commands],
    }


def _nodes(report: Report) -> list[Row]:
    hardware = {one.node: one.hardware for one in report.provenance.hardware}
    return [
        {
            "node": node.node,
            "slot": node.slot,
            "role": node.role,
            "market": node.market,
            "zone": node.zone,
            "instance_type": node.instance_type,
            "hardware": hardware.get(node.node, ""),
            "dollars_per_hour": node.micro_usd_per_hour / MICRO,
            "hours": node.hours,
            "dollars": node.micro_usd / MICRO,
        }
        for node in report.nodes
    ]


def _preemptions(report: Report) -> list[Row]:
    return [
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
    ]


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
