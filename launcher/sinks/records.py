"""Turn the ledger's rows into records for a sink.

Names are as in the trainer's TensorBoard files (engine/trainer/metrics.py), so that all tools show the same.

The promise: record n of a run is the same row at every call, because rows are only appended. An iteration that is
redone after a lost trainer is a record of its own, with the next `lineage`.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from engine.events import Evaluated, IterationDone, Judged
from launcher.ledger.accounting import Charge, charges_of_run
from launcher.ledger.models import LOCAL, ProgressRow, Run
from launcher.money import HOUR_MS, MICRO
from launcher.sinks.messages import Record

KINDS = (IterationDone.KIND, Evaluated.KIND)


def count_records(session: Session, run: Run) -> int:
    """Return the number of records of the run until now."""
    rows = select(func.count()).where(ProgressRow.run_id == run.id, ProgressRow.kind.in_(KINDS))
    return session.scalar(rows) or 0


def read_records(session: Session, run: Run, first: int, most: int, now_ms: int) -> list[Record]:
    """Return at most `most` records from record `first` on. `now_ms`: time until which nodes are metered."""
    rows = session.scalars(
        select(ProgressRow)
        .where(ProgressRow.run_id == run.id, ProgressRow.kind.in_(KINDS))
        .order_by(ProgressRow.id)
        .offset(first)
        .limit(most)
    ).all()
    if not rows:
        return []
    charges = [charge for of_node in charges_of_run(session, run, now_ms).values() for charge in of_node]
    judged = [
        (row.at_ms, Judged(**row.event).micro_usd)
        for row in session.scalars(
            select(ProgressRow).where(ProgressRow.run_id == run.id, ProgressRow.kind == Judged.KIND)
        )
    ]
    return [
        Record(
            number=first + n,
            iteration=row.event["iteration"],
            at_ms=row.at_ms,
            values={
                **dict(_figures(row)),
                **_money(charges, row.at_ms),
                "cost/dollars": (
                    sum(charge.until(row.at_ms) for charge in charges)
                    + sum(micro_usd for at_ms, micro_usd in judged if at_ms <= row.at_ms)
                )
                / MICRO,
                "hours": (row.at_ms - run.created_ms) / HOUR_MS,
                "lineage": float(row.lineage),
            },
            sheet=_sheet(run, row),
        )
        for n, row in enumerate(rows)
    ]


def _money(charges: list[Charge], at_ms: int) -> dict[str, float]:
    # A node that ends in the millisecond of the record is counted: the record may have been sent before the node ended.
    paid = [charge for charge in charges if charge.start_ms < at_ms and (at_ms <= charge.end_ms or not charge.closed)]
    return {
        "cost/dollars_per_hour": sum(charge.micro_usd_per_hour for charge in paid) / MICRO,
        "nodes": float(len(paid)),
    }


def _figures(row: ProgressRow) -> Iterator[tuple[str, float]]:
    event: Mapping[str, Any] = row.event
    if row.kind == Evaluated.KIND:
        yield from ((f"evaluation/{_plain(name)}", float(value)) for name, value in event["metrics"].items())
        return
    yield "reward/mean", float(event["reward_mean"])
    yield "reward/std", float(event["reward_std"])
    yield "reward/group_std", float(event["group_std_mean"])
    yield "explored", float(event["explored"])
    yield from ((f"rollouts/{_plain(name)}", float(value)) for name, value in event.get("scores", {}).items())
    yield from ((f"health/{_plain(name)}", float(value)) for name, value in event["health"].items())
    yield from ((f"seconds/{_plain(name)}", ms / 1000) for name, ms in event["phase_ms"].items())


def _plain(name: str) -> str:
    """Return the name with only characters that both tools accept. A metric of the user may have any name."""
    return re.sub(r"[^\w. -]", "_", name)


def _sheet(run: Run, row: ProgressRow) -> str | None:
    """Return the path of the evaluation's image sheet. None on clouds, where sheets are in a bucket."""
    if run.infra != LOCAL or not row.event.get("pictures"):
        return None
    path = Path(run.folder) / "store" / str(row.event["pictures"])
    return str(path) if path.is_file() else None
