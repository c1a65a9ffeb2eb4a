"""The cost of the same nodes on demand, and the saving against that cost."""

from collections.abc import Sequence

from engine.events import Phase
from launcher.ledger.accounting import NodeCost, RunCosts
from launcher.ledger.billing import interval_micro_usd
from launcher.report.preemptions import paid_by
from launcher.report.values import PreemptionLine, Saving, Target

ONE_SEED = "One seed (n=1): no interval can be given for dollars or hours."

NOT_MODELLED = (
    "Discounts, credits and taxes are not in these figures, nor are disks, traffic and addresses.",
    ONE_SEED,
)

NOT_MODELLED_ON_CLOUDS = (
    "Credits and taxes are not in these figures, nor discounts that the job does not name; what is beside the machines "
    "is listed apart, and what has no price is not counted as nothing.",
    ONE_SEED,
)


def savings_of(costs: RunCosts, preemptions: Sequence[PreemptionLine]) -> Saving:
    """Return the saving against all nodes on demand.

    The baseline is the same node-time at on-demand prices, without the cold starts after preemptions.
    """
    taken = {line.node for line in preemptions}
    caused: dict[str, NodeCost] = {}
    for line in preemptions:
        generation = next(cost.generation for cost in costs.nodes if cost.node == line.node)
        later = [cost for cost in costs.nodes if cost.slot == line.slot and cost.generation > generation]
        caused |= {cost.node: cost for cost in paid_by(sorted(later, key=lambda cost: cost.generation), taken)}
    spared = sum(
        interval_micro_usd(0, cost.phase_ms.get(Phase.COLD_START.value, 0), cost.on_demand_micro_usd_per_hour)
        for cost in caused.values()
    )
    there = sum(cost.on_demand_micro_usd for cost in costs.nodes) - spared
    return Saving(
        kind="counterfactual",
        against="all nodes on demand, no preemption cold starts",
        micro_usd=there,
        saved_micro_usd=there - costs.total,
        why="not a run: the node-time of this one at on-demand prices; work redone after preemptions is still in it",
    )


def saving_against(ours: Target, name: str, theirs: Target) -> Saving:
    """Compare the dollars to the same target in two runs, with the factors of each cost."""
    if ours.value is None:
        return _incomparable(name, "there is no target to compare at; name one with --target-reward")
    late = [who for who, target in (("this run", ours), (name, theirs)) if target.confirmed is None]
    if ours.confirmed is None or theirs.confirmed is None:
        return _incomparable(name, f"{ours.metric} {ours.value:g} was not reached by {' and '.join(late)}")
    return Saving(
        kind="run",
        against=name,
        micro_usd=theirs.confirmed.micro_usd,
        saved_micro_usd=theirs.confirmed.micro_usd - ours.confirmed.micro_usd,
        why=f"dollars until {ours.metric} {ours.value:g} was confirmed in both runs; n=1 each, no interval",
        ours=ours.factors,
        theirs=theirs.factors,
    )


def _incomparable(name: str, why: str) -> Saving:
    return Saving(kind="run", against=name, micro_usd=None, saved_micro_usd=None, why=why)
