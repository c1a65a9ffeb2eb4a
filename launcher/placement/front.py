"""The fleets that a plan chose from, as `--json` prints them, the run keeps them and charts show them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontFleet:
    """A fleet of the front. Dollars and hours are means of replays."""

    number: int
    """For `--choose`, from 1."""
    nodes: str
    """The fleet's nodes and region as text."""
    place: str
    """Cloud and region, with which `nodes` ends."""
    trainer: str
    trainer_on_spot: bool
    rollout: str | None
    rollout_nodes: int
    usd: float
    usd_low: float
    usd_high: float
    """The ends of the middle 90 % of the replays."""
    hours: float
    starts: int
    met: int | None
    """Replays that were done at the deadline. None: the job has no deadline."""
    in_time: bool
    """True if enough of the replays meet the deadline, or without a deadline."""
    why_not: str
    """Why this is not the cheapest plan in time. Empty: it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParetoFront:
    """The fleets of which none is both cheaper and quicker, cheapest first. Fleets are named by their numbers."""

    cheapest: int
    in_time: int | None
    """None: no fleet meets the deadline, or the job has none."""
    quickest: int
    chosen: int
    usd_per_hour_saved: float | None
    """Dollars of each hour by which the quickest plan is earlier than the chosen one. None: it is the same."""
    compared: int
    replayed: int
    not_searched: str
    deadline_hours: float | None
    budget_usd: float | None
    prices: str
    """Dates of the prices behind the dollars, as text."""
    front: tuple[FrontFleet, ...]
