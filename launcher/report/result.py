"""The summary of a finished run for `result.json`, from the ledger alone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy.orm import Session

from engine.events import Evaluated
from launcher.ledger.accounting import judge_micro_usd
from launcher.ledger.store import find_run, progress_of
from launcher.report.build import build_report
from launcher.report.values import PreemptionLine

METRIC = "exact_match"

SCHEMA_VERSION = 1
"""Version of result.json (launcher/schemas/result.schema.json). A new key keeps the version; a changed or removed key
increments the version."""


def result_dict(session: Session, run_name: str, leftovers: Sequence[int]) -> dict[str, Any]:
    """Return the result of a run. `leftovers`: ids of the run's processes that are alive after the run's end.

    `hours` and `replaced_after_s` are on the run's clock, `wall_seconds` is wall time. On the local
    infra, the run's clock moves by `clock_factor` seconds for each second of work on the reference machine.
    """
    run = find_run(session, run_name)
    report = build_report(session, run, run.clock.now_ms())
    target = report.target
    there = target.confirmed
    scores = sorted(
        (row.event["iteration"], row.event["metrics"][METRIC], row.event["prompts"])
        for row in progress_of(session, run, Evaluated.KIND)
        if METRIC in row.event["metrics"]
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "target": {
            "metric": target.metric,
            "value": target.value,
            "reached": target.reached,
            "iteration": there.iteration if there else None,
            "hours": there.hours if there else None,
            "micro_usd": there.micro_usd if there else None,
            "best": asdict(target.best) if target.best else None,
        },
        "exact_match": {
            "before": scores[0][1] if scores else None,
            "after": scores[-1][1] if scores else None,
            "prompts_before": scores[0][2] if scores else None,
            "prompts_after": scores[-1][2] if scores else None,
        },
        "drift": report.drift[-1].drift if report.drift else None,
        "guards": [asdict(guard) for guard in target.guards],
        "exploration": asdict(report.exploration) if report.exploration else None,
        "preemptions": [_preemption(line) for line in report.preemptions],
        "micro_usd": {
            "total": report.costs.total,
            "by_phase": dict(report.costs.by_phase),
            "by_node": dict(report.costs.by_node),
            "by_market": dict(report.costs.by_market),
            "by_role": dict(report.costs.by_role),
            "by_place": dict(report.costs.by_place),
            "judges": judge_micro_usd(session, run),
        },
        "clouds": _by_cloud(report.costs.by_place),
        "sums_equal": report.costs.sums_equal,
        "money_basis": run.money_basis,  # of these amounts; an imported bill is beside them, in the report
        "leftovers": {"processes": sorted(leftovers)},
        "seed": run.seed,
        "iterations": report.run.iterations,
        "wall_seconds": report.run.wall_seconds,
        "clock_factor": report.run.clock_factor,
    }


def _by_cloud(by_place: Mapping[str, int]) -> dict[str, int]:
    """Return micro-dollars by cloud. A key of `by_place` is a cloud and a region, like `aws us-east-1`."""
    clouds: Counter[str] = Counter()
    for place, micro_usd in by_place.items():
        clouds[place.partition(" ")[0]] += micro_usd
    return dict(clouds)


def _preemption(line: PreemptionLine) -> dict[str, Any]:
    return {
        "node": line.node,
        "role": line.role,
        "zone": line.zone,
        "signal": line.signal,
        "notice": line.notice,
        "lost_steps": line.lost_steps,
        "recovered_by": line.recovered_by,
        "replaced_after_s": line.replaced_after_s,
        "replaced_after_wall_s": line.replaced_after_wall_s,
        "micro_usd": line.micro_usd,
    }
