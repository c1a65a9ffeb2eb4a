"""A number that is not known exactly: with its interval, what it rests on, and where that comes from. Pure."""

from dataclasses import dataclass
from enum import StrEnum


class Basis(StrEnum):
    """What a figure rests on, weakest first."""

    ASSUMED = "assumed"
    PRIOR = "prior"
    """Of other machines, at another time: research notes, an earlier trace."""
    SAID = "said by the cloud"
    REPLAYED = "replayed"
    """Seen in a recorded trace, or on the local infra, which replays one."""
    MEASURED = "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """`low` and `high` are the 5 % and 95 % ends unless `source` says otherwise."""

    mean: float
    low: float
    high: float
    basis: Basis
    source: str
    events: int = 0
    """What was counted: reclaims, launches."""
    exposure_ms: int = 0
    """Node-milliseconds that were watched."""
