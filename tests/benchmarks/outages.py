"""outages: how many minutes after an outage of all zones does every slot run on spot again?

    python -m tests.benchmarks.outages --json

The shipped `decide()` in passes of 10 s, on simulated clouds (tests/launcher/cluster/test_outages.py). Spot is there
except in one outage of every zone, and on demand always. Nothing is random, so one run is enough.
"""

import argparse
import sys
from typing import Any

from tests.benchmarks.page import load_now, publish
from tests.launcher.cluster.test_outages import MINUTE, OUTAGE_MINUTES, SLOTS, ZONES, spot_again_ms


def minutes_of(slots: int, zones: str, outage_minutes: int) -> float | None:
    """Return the minutes from the outage's end until all slots are on spot and nothing else. None: over an hour."""
    took_ms = spot_again_ms(slots, zones, outage_minutes)
    return None if took_ms is None else round(took_ms / MINUTE, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    parser.parse_args()
    load1 = load_now()
    rows: list[dict[str, Any]] = []
    for slots in SLOTS:
        for zones in ZONES:
            cells = {f"{minutes} min": minutes_of(slots, zones, minutes) for minutes in OUTAGE_MINUTES}
            rows.append({"slots": slots, "zones": len(zones), **cells})
            print(rows[-1], file=sys.stderr, flush=True)
    cells = [row[f"{minutes} min"] for row in rows for minutes in OUTAGE_MINUTES]
    publish(
        "outages",
        question="how many minutes after an outage of all zones does every slot run on spot again?",
        command="python -m tests.benchmarks.outages --json",
        result={
            "cells": len(cells),
            "within_60_minutes": sum(cell is not None for cell in cells),
            "worst_minutes": max((cell for cell in cells if cell is not None), default=None),
            "table": rows,
        },
        runs=1,
        seeds=[],
        load1=load1,
        rows=rows,
        text="""
Modelled: decisions are those of the shipped `decide()`, the clouds are on paper. A launch is answered after one to two
minutes, a node works eight minutes after it came up, a release takes 30 s. The columns are the lengths of the outage.
A cell is the time from the end of the outage until every slot has a spot node at work and no stand-in is left.
""",
    )


if __name__ == "__main__":
    main()
