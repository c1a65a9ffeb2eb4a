"""A made front: a cheap fleet past the deadline, the chosen one in time, and a quick one."""

from collections.abc import Sequence
from typing import Any

from launcher.placement.front import FrontFleet, ParetoFront


def a_fleet(number: int, usd: float, hours: float, **more: Any) -> FrontFleet:
    fields = {
        "nodes": "H100:8 on spot alone, aws us-east-2",
        "place": "aws us-east-2",
        "trainer": "H100:8",
        "trainer_on_spot": True,
        "rollout": None,
        "rollout_nodes": 0,
        "usd_low": usd * 0.7,
        "usd_high": usd * 1.3,
        "starts": 10,
        "met": 10,
        "in_time": True,
        "why_not": "",
    }
    return FrontFleet(number=number, usd=usd, hours=hours, **(fields | more))


FLEETS = (
    a_fleet(1, 200.0, 30.0, in_time=False, met=3, why_not="past the deadline of 1d (3 of 10 replays meet it)"),
    a_fleet(2, 300.0, 20.0),
    a_fleet(3, 600.0, 10.0, nodes="B200:8 on spot + 4 x B200:8, aws us-east-2"),
)


def a_front(fleets: Sequence[FrontFleet] = FLEETS, chosen: int = 2, **more: Any) -> ParetoFront:
    fields = {
        "in_time": chosen,
        "usd_per_hour_saved": 30.0,
        "deadline_hours": 24.0,
        "budget_usd": 800.0,
        "prices": "prices of 2026-07-20, older than 90 days",
    }
    return ParetoFront(
        cheapest=1,
        quickest=len(fleets),
        chosen=chosen,
        compared=256,
        replayed=7,
        not_searched="not searched: other algorithms",
        front=tuple(fleets),
        **(fields | more),
    )
