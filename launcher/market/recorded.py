"""Load the recorded traces that ship with spotrl, for a hazard prior.

The only reader of `catalogs/traces` in this folder.
"""

from functools import cache
from importlib.resources import files

from launcher.market.evidence import Exposure, Life, lives_of_trace
from launcher.market.hazard import POOLED, HazardPrior, prior_after

BAMBOO = "p3-trace.csv"


@cache
def recorded_lives(file_name: str = BAMBOO) -> tuple[Life, ...]:
    """Return the life of every node of a trace (origin and licence: catalogs/traces/README.md)."""
    return lives_of_trace(files("catalogs").joinpath("traces", file_name).read_text("utf-8").splitlines())


def bamboo_prior() -> HazardPrior:
    """Return the pooled prior updated by the Bamboo trace, an AWS p3 pool of 2020.

    The pool was resized often, so the result is harsher than the pooled prior.
    """
    return prior_after(POOLED, Exposure.of(recorded_lives()), "Bamboo p3 trace, AWS V100, 2020, 11 h")
