"""Plans that were not chosen: one node fewer or more, other sites, other policies."""

from collections.abc import Sequence

from launcher.money import HOUR_MS, dollars, duration
from launcher.placement.cloud_plan import Alternative
from launcher.placement.forecast import Caps, Choice, Outlook, outlook
from launcher.placement.no_plan import broken_limits
from launcher.placement.policy import POLICIES, Situation, build_policy
from launcher.placement.requirements import CloudRequirements, Site, Spot
from launcher.placement.search import Found, cheapest_by_nodes, cheapest_choice, is_above_floor, is_spread
from launcher.placement.value import marginal_node


def fewer_or_more(needs: CloudRequirements, choice: Choice, expected: Outlook) -> tuple[Alternative, ...]:
    """Return the best choices at the same site with one rollout node fewer and one more.

    The difference is the value of the marginal node, in both directions.
    """
    alternatives = []
    for nodes, word in ((choice.nodes - 1, "one node fewer"), (choice.nodes + 1, "one node more")):
        choice_beside = with_nodes(needs, choice.site, nodes)
        if choice_beside is None:
            continue
        forecast = outlook(choice_beside)
        few, more = (forecast, expected) if nodes < choice.nodes else (expected, forecast)
        marginal = marginal_node(
            few.ms / HOUR_MS, more.ms / HOUR_MS, few.micro_usd * HOUR_MS / few.ms, more.micro_usd * HOUR_MS / more.ms
        )
        last = f"the last one saves {dollars(marginal.saved)} by ending earlier and costs {dollars(marginal.paid)}"
        counted = f"{nodes} rollout node{'s' if nodes > 1 else ''}" if nodes else "the trainer alone"
        broken = broken_limits(needs, choice_beside.listed_micro_usd_per_hour, forecast.micro_usd, forecast.ms)
        alternatives.append(
            Alternative(
                what=f"{word}: {counted}",
                why_not=broken or f"{difference(forecast.micro_usd, forecast.ms, expected)}: {last}",
                micro_usd=forecast.micro_usd,
                ms=forecast.ms,
            )
        )
    return tuple(alternatives)


def with_nodes(needs: CloudRequirements, site: Site, nodes: int) -> Choice | None:
    """Return the cheapest choice with exactly `nodes` rollout nodes, ignoring the caps; None if there is none."""
    if not 0 <= nodes <= needs.max_rollout_nodes:
        return None
    return dict(cheapest_by_nodes(needs, (site,), Caps(), [nodes])).get(nodes)


NEAREST = 3
"""Number of alternative sites that are planned completely. For the remaining sites the plan gives a lower bound of
the cost."""


def elsewhere(
    needs: CloudRequirements, sites: Sequence[Site], choice: Choice, expected: Outlook, found: Found | None
) -> tuple[Alternative, ...]:
    """Return the best plan of every site not chosen, cheapest bound first."""
    bounds: Sequence[int | None] = (None,) * len(sites) if found is None else found.at_least_micro_usd
    other_sites = [
        (site, bound) for site, bound in zip(sites, bounds, strict=True) if site.trainer != choice.site.trainer
    ]
    nearest = sorted((bound, number) for number, (_, bound) in enumerate(other_sites) if bound is not None)
    alternatives = []
    for place, (bound, number) in enumerate(nearest):
        site = other_sites[number][0]
        if place < NEAREST:
            alternatives.append(_at_its_best(needs, site, expected))
        else:
            why_not = f"at least {dollars(max(0, bound - expected.micro_usd))} more"
            alternatives.append(Alternative(what=_name(site), why_not=why_not, micro_usd=bound, is_at_least=True))
    never = [Alternative(what=_name(site), why_not=NOTHING_THERE) for site, bound in other_sites if bound is None]
    return (*alternatives, *never)


NOTHING_THERE = "nothing there keeps the limits"


def _at_its_best(needs: CloudRequirements, site: Site, expected: Outlook) -> Alternative:
    cheapest = cheapest_choice(needs, (site,), Caps.of(needs))
    if cheapest is None:
        return Alternative(what=_name(site), why_not=NOTHING_THERE)
    forecast = outlook(cheapest.choice)
    return Alternative(
        what=f"{_name(site)}: {rollout_nodes(cheapest.choice.nodes)}",
        why_not=difference(forecast.micro_usd, forecast.ms, expected),
        micro_usd=forecast.micro_usd,
        ms=forecast.ms,
    )


def _name(site: Site) -> str:
    several = f"{site.trainer_nodes} x " if site.trainer_nodes > 1 else ""
    return f"{site.name}, {several}{site.trainer.instance_type}"


def other_policies(needs: CloudRequirements, situation: Situation, expected: Outlook) -> tuple[Alternative, ...]:
    alternatives = []
    for policy in POLICIES:
        if policy == needs.policy:
            continue
        choice = build_policy(policy).choose(situation)
        if choice is None:
            alternatives.append(Alternative(what=f"policy {policy}", why_not="nothing it chooses keeps the limits"))
            continue
        forecast = outlook(choice)
        alternatives.append(
            Alternative(
                what=f"policy {policy}: {rollout_nodes(choice.nodes)} in {choice.site.name}",
                why_not=", ".join(
                    [difference(forecast.micro_usd, forecast.ms, expected), *_broken_rules(needs, choice)]
                ),
                micro_usd=forecast.micro_usd,
                ms=forecast.ms,
            )
        )
    return tuple(alternatives)


def _broken_rules(needs: CloudRequirements, choice: Choice) -> list[str]:
    """Return the rules of the `ours` policy that another policy's choice breaks, as text."""
    reasons = {
        "but more than half of its nodes in one zone": not is_spread(choice),
        "but on spot": needs.spot is Spot.NEVER and sum(choice.spot) > 0,
        "but on demand": needs.spot is Spot.ONLY and choice.on_demand > 0,
        "but below the floor": not is_above_floor(needs, choice),
    }
    return [reason for reason, holds in reasons.items() if holds]


def difference(micro_usd: int, ms: int, expected: Outlook) -> str:
    more, longer = micro_usd - expected.micro_usd, ms - expected.ms
    money = f"{dollars(abs(more))} {'more' if more > 0 else 'less'}" if more else "as much"
    time = f"{duration(abs(longer))} {'longer' if longer > 0 else 'shorter'}" if longer else "as long"
    return f"{money}, {time}"


def rollout_nodes(nodes: int) -> str:
    return f"{nodes} rollout node{'' if nodes == 1 else 's'}"
