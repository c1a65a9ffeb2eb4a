"""An uncertain number with an interval, a basis and a source. Pure."""

from dataclasses import dataclass
from enum import StrEnum


class Basis(StrEnum):
    """Basis of a figure, weakest first."""

    ASSUMED = "assumed"
    PRIOR = "prior"
    """From other machines, at another time: a published trace, an earlier measurement."""
    REPORTED = "said by the cloud"
    REPLAYED = "replayed"
    """Measured in a recorded trace, or on the local infra, which replays a trace."""
    MEASURED = "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """An estimate. `low` and `high` are the 5 % and 95 % ends unless `source` says otherwise."""

    mean: float
    low: float
    high: float
    basis: Basis
    source: str
    events: int = 0
    """Number of counted events: preemptions, launches."""
    exposure_ms: int = 0
    """Node-milliseconds that were watched."""
