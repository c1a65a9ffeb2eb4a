"""Replay one schedule: `python -m tests.simulation --seed N [--events 200] [--verbose] [--mutant NAME]`."""

import argparse
import contextlib
import sys

from tests.mutants.catalogue import MUTANTS
from tests.simulation.world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--verbose", action="store_true", help="every call, not only what befell the world")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="with this bug planted")
    options = parser.parse_args()
    world = World(options.seed, quota=options.events, log=print if options.verbose else None)
    planted = MUTANTS[options.mutant].planted() if options.mutant else contextlib.nullcontext()
    try:
        with planted:
            world.run()
    except AssertionError as error:
        print(f"seed {options.seed}: {error}")
        return 1
    print(f"seed {options.seed}: {world.events} events, {world.now_ms / 1000:.1f} s, nothing broke")
    return 0


if __name__ == "__main__":
    sys.exit(main())
