"""Decide whether a run with its trainer on spot goes to another region, because its own has no spot. Pure.

A move is asked for when no node trains and every spot pool of the home region has refused for `trainer_wait_ms`. It
pays if the rest of the outage costs more than the move and the other region's prices over the rest of the run:

    rest of the outage x (idle nodes + worth of an hour)  >  work left x dearer fleet + restart of idle nodes + traffic

The newest checkpoint is carried along: the next trainer reads it from the bucket, which a move to another cloud copies
first. After a move the other region is home, so the run comes back only when that has no spot either.
"""

from collections.abc import Sequence

from launcher.decide.facts import Facts, NodeRecord, Wanted
from launcher.decide.failover import Elsewhere
from launcher.decide.launch_history import Tried
from launcher.decide.run_budget import hourly_of
from launcher.money import HOUR_MS, dollars, duration
from launcher.placement.options import SiteOptions
from launcher.placement.price_of_waiting import CHANGE_HOURS, expected_rest_hours
from launcher.placement.value import GB

HOUR_WORTH = 0.1
"""Worth of an hour that the run ends sooner, in hours of its whole fleet on spot. Assumed."""

REGION_MICRO_USD_PER_GB, CLOUD_MICRO_USD_PER_GB = 20_000, 120_000
"""List prices of traffic to another region of a cloud (AWS), and out of a cloud (the dearer one). Articles of 2026."""


def options_elsewhere(
    home: SiteOptions,
    sites: Sequence[SiteOptions],
    tried: Tried,
    facts: Facts,
    wanted: Wanted,
    after: Sequence[NodeRecord],
) -> list[Elsewhere]:
    """Return the spot options of other regions to which a move pays, the cheapest first. Empty: stay.

    `after`: the nodes after the actions decided so far.
    """
    at_home, since_ms, work = home.spot_trainer, tried.out_since_ms, facts.work
    if work is None or not work.left or since_ms is None or facts.now_ms < since_ms + wanted.rules.trainer_wait_ms:
        return []
    if not all(tried.is_denied(option) or tried.refused(option) for option in at_home):
        return []
    out_hours, left_hours = (facts.now_ms - since_ms) / HOUR_MS, work.left_ms(work.nodes) / HOUR_MS
    rest_hours = expected_rest_hours(out_hours)
    waiting = [node for node in after if node.role == "rollout" and node.is_live and not node.is_leaving]
    idle = hourly_of(waiting)
    stays = rest_hours * (idle + HOUR_WORTH * _fleet(home, wanted))
    paying: list[tuple[float, Elsewhere]] = []
    for site in sites:
        open_ones = [option for option in site.spot_trainer if not tried.is_denied(option)]
        if site.place == home.place or not open_ones:
            continue
        per_gb = REGION_MICRO_USD_PER_GB if site.cloud == home.cloud else CLOUD_MICRO_USD_PER_GB
        traffic = wanted.moved_bytes * per_gb / GB
        dearer = left_hours * (_fleet(site, wanted) - _fleet(home, wanted))
        goes = dearer + CHANGE_HOURS * idle + traffic
        if stays <= goes:
            continue
        why = (
            f"no spot in {home.cloud} {home.region} for {duration(round(out_hours * HOUR_MS))}: the run moves to "
            f"{site.cloud} {site.region}, with about {dollars(round(traffic))} of traffic"
        )
        paying += [(goes, Elsewhere(option=option, why=why)) for option in open_ones]
    return [elsewhere for _, elsewhere in sorted(paying, key=lambda pair: pair[0])]  # the plan's order among equals


def _fleet(site: SiteOptions, wanted: Wanted) -> int:
    """Return the hourly price of the run's nodes in a region at its cheapest offers, in micro-dollars."""
    trainer, rollout = site.least_micro_usd_per_hour
    return trainer + sum(slot.role == "rollout" for slot in wanted.slots) * rollout
