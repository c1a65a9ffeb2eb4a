"""Recorded traces that ship with spotrl, as lives for a hazard prior. The only reader of `catalogs/traces` here."""

from functools import cache
from importlib.resources import files

from launcher.market.hazard import POOLED, Exposure, HazardPrior, Life, lives_of_trace, prior_after

BAMBOO = "p3-trace.csv"


@cache
def recorded_lives(file_name: str = BAMBOO) -> tuple[Life, ...]:
    """Every node of a trace (catalogs/traces/README.md: what it is, and its licence)."""
    return lives_of_trace(files("catalogs").joinpath("traces", file_name).read_text("utf-8").splitlines())


def bamboo_prior() -> HazardPrior:
    """The pooled prior, moved by one AWS p3 pool of 2020 that was resized often: harsher than the pooled one."""
    return prior_after(POOLED, Exposure.of(recorded_lives()), "Bamboo p3 trace, AWS V100, 2020, 11 h")
