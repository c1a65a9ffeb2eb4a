"""ladder: what does each part of the pipeline gain, by three clocks?

    python -m tests.benchmarks.ladder --json                                                  4 minutes
    python -m tests.benchmarks.ladder --clock simulated|paced|raw ... [--quick | --split NAME] [--runs FILE]

`simulated`: the schedule played forward with assumed rates. `paced`: nodes of a run, their work stretched by sleep.
`raw`: the same nodes without paces, on the cores of this computer. Each has the keys `seconds`, `over_bound`,
`bubble_share`, `idle_by_cause` (by cell), `ratio_to_rung_below` (the smallest), `on_in` (number of cells) and
`images_regenerated`. Without `--clock`, the simulated clock and the split with two ranks are made again, and the other
runs with paces and without are read from their pages' raw figures: 40 minutes make those.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tests.benchmarks.ladder_paced import SPLITS, TWO_RANKS, paced, two_ranks, write_two_ranks
from tests.benchmarks.ladder_raw import raw
from tests.benchmarks.ladder_simulated import simulated
from tests.benchmarks.page import RESULTS, load_now, origin

CLOCKS = ("simulated", "paced", "raw")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    parser.add_argument("--clock", choices=CLOCKS, action="append", help="one of the clocks; may be given again")
    parser.add_argument("--quick", action="store_true", help="few cells, one optimiser step a batch; writes no page")
    parser.add_argument(
        "--split",
        choices=[split.name for split in (*SPLITS, TWO_RANKS)],
        help="one split of the paced clock; only the split with two ranks has a page of its own",
    )
    parser.add_argument("--runs", type=Path, help="file that keeps finished runs of the paced clock")
    options = parser.parse_args()
    clocks = options.clock or (("simulated",) if options.split is None else ("paced",))
    found: dict[str, Any] = origin(load_now())
    if "simulated" in clocks:
        found["simulated"] = simulated(quick=options.quick)
    if options.clock is None and options.split is None:
        stored = {name: json.loads((RESULTS / f"ladder_{name}.json").read_text()) for name in ("paced", "raw")}
        found |= stored | {"made_again": ["simulated", TWO_RANKS.name]}
        found["paced"]["two_ranks"] = two_ranks()
        write_two_ranks(found["paced"]["two_ranks"], origin(load_now()))
    elif options.split == TWO_RANKS.name:
        found["paced"] = {"two_ranks": two_ranks()}
        write_two_ranks(found["paced"]["two_ranks"], found)
    elif "paced" in clocks:
        found["paced"] = paced(quick=options.quick, only=options.split, keep=options.runs)
    if "raw" in clocks:
        found["raw"] = raw(quick=options.quick)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
