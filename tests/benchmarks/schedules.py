"""schedules: does the queue keep its promises in every hostile schedule, and would the simulator notice if it did not?

    python -m tests.benchmarks.schedules --json

Plays the schedules of `make test` (tests/simulation) and hunts every planted bug (tests/mutants).
"""

import argparse
import time

from tests.benchmarks.page import load_now, publish
from tests.mutants.catalogue import MUTANTS
from tests.mutants.hunt import SCHEDULES as MOST_SCHEDULES
from tests.mutants.hunt import hunt
from tests.simulation.schedules import in_processes, kinds_of, play_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    load1 = load_now()
    begun = time.perf_counter()
    played = play_all(options.schedules)
    playing_s = time.perf_counter() - begun
    found = list(in_processes(hunt, list(MUTANTS)))
    seconds = time.perf_counter() - begun
    killed = [one for one in found if one.after is not None]
    slowest = max(killed, key=lambda one: one.after or 0)
    publish(
        "schedules",
        question="does the queue keep its promises in every hostile schedule, and is every planted bug found?",
        command="python -m tests.benchmarks.schedules --json",
        result={
            "schedules": played.schedules,
            "events": played.events,
            "fewest_events": played.fewest,
            "broken": {text: seeds[:5] for text, seeds in kinds_of(played.broken).items()},
            "mutants": len(found),
            "mutants_killed": len(killed),
            "most_schedules_to_kill": slowest.after,
            "seconds": seconds,
        },
        runs=1,
        seeds=[0, options.schedules - 1],
        load1=load1,
        rows=[
            {
                "planted bug: the queue forgets": f"{MUTANTS[one.mutant].forgets} (`{one.mutant}`)",
                "found after": "never" if one.after is None else one.after,
                "by seed": one.seed,
            }
            for one in found
        ],
        text=f"""
A schedule is one integer (`python -m tests.simulation --seed N --verbose` replays it): the real coordinator and queue
on a disk in memory, in a world that kills, freezes, delays, repeats and cuts, and calms down after 200 events; then
everything must come to its end. Message deliveries, answers, steps and strokes of fate count as events, the
coordinator's ticks do not. A judge that never looks into the queue checks every answer and every record.
{played.schedules} schedules took {playing_s:.0f} s on 2 processes. A planted bug is hunted with the seeds 0, 1, 2, ...
for at most {MOST_SCHEDULES} schedules; the hardest to find was `{slowest.mutant}`.
""",
    )


if __name__ == "__main__":
    main()
