"""Error texts for a job that no plan fits. The texts name the broken limits, and limits that a plan would meet."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from launcher.market.offers import Offer
from launcher.market.quality import USABLE
from launcher.money import dollars, duration, hourly
from launcher.placement.forecast import Caps, on_demand_outlook, outlook
from launcher.placement.requirements import CloudRequirements, LeftOut, Site, Spot, trainer_text
from launcher.placement.search import cheapest_by_nodes, cheapest_choice


def broken_limits(needs: CloudRequirements, listed: int, micro_usd: int, ms: int) -> str | None:
    """Return a text that names every limit of the job that a plan breaks, or None if the plan keeps all limits.

    listed     the plan's rate with every node running, in micro-dollars per hour
    micro_usd  the plan's expected cost in micro-dollars
    ms         the plan's expected duration in milliseconds
    """
    limits = []
    if needs.max_hourly_micro_usd is not None and listed > needs.max_hourly_micro_usd:
        limits.append(f"{hourly(listed)} is above max_hourly {hourly(needs.max_hourly_micro_usd)}")
    if needs.max_total_micro_usd is not None and micro_usd > needs.max_total_micro_usd:
        limits.append(f"{dollars(micro_usd)} is above max_total {dollars(needs.max_total_micro_usd)}")
    if needs.deadline_ms is not None and ms > needs.deadline_ms:
        limits.append(f"{duration(ms)} is past the deadline of {duration(needs.deadline_ms)}")
    elif needs.max_runtime_ms is not None and ms > needs.max_runtime_ms:
        limits.append(f"{duration(ms)} is longer than max_runtime {duration(needs.max_runtime_ms)}")
    return " and ".join(limits) or None


def too_tight(needs: CloudRequirements, sites: Sequence[Site]) -> str:
    """Return the error text for a job whose limits no plan keeps.

    The text describes the cheapest plan without limits and the limits that this plan breaks. For each limit that is
    enough to raise alone, the text gives the value needed. If no site has enough nodes even without limits, the text
    says that instead.
    """
    caps = Caps.of(needs)
    time_flag = "--max-runtime" if needs.deadline_ms is None else "--deadline"
    lifted = {
        "--max-hourly": replace(caps, max_hourly_micro_usd=None),
        "--max-total": replace(caps, max_total_micro_usd=None),
        time_flag: replace(caps, deadline_ms=None),
    }
    ways = []
    for flag, fewer in lifted.items():
        cheapest = cheapest_choice(needs, sites, fewer) if fewer != caps else None
        if cheapest is not None:
            forecast = outlook(cheapest.choice)
            enough = {
                "--max-hourly": hourly(cheapest.choice.listed_micro_usd_per_hour),
                "--max-total": dollars(forecast.micro_usd),
                time_flag: duration(_shortest_ms(needs, sites, fewer)),
            }
            ways.append(f"raise {flag} to {enough[flag]}")
    free = cheapest_choice(needs, sites, Caps())
    if free is None:
        least = max(needs.min_rollout_nodes, needs.floor_nodes)
        return (
            f"no region with a trainer of {trainer_text(needs)} sells the {least} rollout nodes of {needs.rollout} "
            "that the job needs at least; take another GPU (resources.rollout.accelerators), allow on-demand nodes "
            "(--spot auto) or fewer nodes (resources.rollout.min_nodes), or loosen resources.rollout.infra"
        )
    forecast = outlook(free.choice)
    why = broken_limits(needs, free.choice.listed_micro_usd_per_hour, forecast.micro_usd, forecast.ms)
    best = (
        f"the cheapest plan is expected to take {dollars(forecast.micro_usd)} and {duration(forecast.ms)} at "
        f"{hourly(free.choice.listed_micro_usd_per_hour)}: {why or 'the policy found nothing within the limits'}"
    )
    remedy = " or ".join(ways) or "raise them together, or ask for fewer iterations (--iterations)"
    return f"no plan reaches the target within the limits; {best}; {remedy}"


def _shortest_ms(needs: CloudRequirements, sites: Sequence[Site], caps: Caps) -> int:
    """Return the time of the quickest plan within the caps; late runs buy nodes on demand, where the job allows it."""
    choices = dict(cheapest_by_nodes(needs, sites, caps, range(needs.max_rollout_nodes + 1))).values()
    late = [on_demand_outlook(choice).ms for choice in choices if needs.spot is not Spot.ONLY]
    return min([outlook(choice).ms for choice in choices] + late)


def not_sold(needs: CloudRequirements, offers: Iterable[Offer]) -> str | None:
    """Return the error text for a GPU without a usable price on the job's clouds, or for a size of node not sold."""
    clouds = " or ".join(needs.clouds)
    usable = [offer for offer in offers if offer.cloud in needs.clouds and offer.quality in USABLE]
    nodes = {"trainer": needs.trainer} | ({"rollout": needs.rollout} if needs.max_rollout_nodes else {})
    for role, node in nodes.items():
        field = f"resources.{role}.accelerators"
        sizes = sorted({offer.gpus for offer in usable if offer.accelerator.lower() == node.accelerator.lower()})
        if usable and not sizes:
            known = ", ".join(sorted({offer.accelerator for offer in usable}))
            return (
                f"{field} is {node.accelerator}, and no price of it is known on {clouds}: prices are known of {known}; "
                "take one of these, or ask the clouds (`spotrl catalog refresh`)"
            )
        if role == "rollout" and sizes and node.gpus not in sizes:
            return (
                f"{field} is {node.accelerator}:{node.gpus}, and no such node is sold on {clouds}: nodes with this GPU "
                f"have {' or '.join(map(str, sizes))}; take one of these numbers"
            )
    return None


def nowhere(needs: CloudRequirements, no_sites: Sequence[LeftOut]) -> str:
    clouds = " or ".join(needs.clouds) or "no cloud"
    if not no_sites:
        return f"nothing is offered on {clouds}; refresh the catalog (spotrl catalog refresh), or name another cloud"
    places = ", ".join(place.what for place in no_sites)
    return (
        f"no region of {clouds} offers a trainer with {trainer_text(needs)} or more on demand (looked in {places}); "
        "take another accelerator (resources.trainer.accelerators), or loosen resources.trainer.infra"
    )
