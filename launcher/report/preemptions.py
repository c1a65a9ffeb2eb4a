"""Preemptions of a run, and what each cost."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from engine.events import IterationDone, NodeMissed, Phase
from launcher.ledger.accounting import NodeCost, RunCosts
from launcher.ledger.billing import interval_micro_usd
from launcher.ledger.models import Node, Preemption, ProgressRow, Run
from launcher.ledger.store import progress_of
from launcher.money import HOUR_MS
from launcher.report.values import PreemptionLine


def preemption_lines(session: Session, run: Run, costs: RunCosts) -> tuple[PreemptionLine, ...]:
    rows = session.execute(
        select(Preemption, Node)
        .join(Node, Node.id == Preemption.node_id)
        .where(Node.run_id == run.id)
        .order_by(Preemption.at_ms, Preemption.id)
    ).all()
    lost_steps: dict[str, int] = {}
    for missed in progress_of(session, run, NodeMissed.KIND):
        node = missed.event["node"]
        lost_steps[node] = lost_steps.get(node, 0) + int(missed.event["lost_steps"])
    taken = {node.name for _, node in rows}
    step_ms, steps = _time_of_steps(session, run, costs)
    lines = []
    for preemption, node in rows:
        own = next(cost for cost in costs.nodes if cost.node == node.name)
        slot, generation = _place_of(own)
        promoted = next((cost for cost in costs.nodes if _takes_over(cost, slot, generation)), None)
        # A promoted node leaves its own slot, whose next node has the cold start.
        empty = (slot, generation) if promoted is None else (promoted.slot, promoted.generation)
        later = sorted(
            (cost for cost in costs.nodes if cost.slot == empty[0] and cost.generation > empty[1]),
            key=lambda cost: cost.generation,
        )
        replaced = promoted or next((cost for cost in later if cost.seen_ms is not None), None)
        seen_ms = None if replaced is None else replaced.seen_ms
        if promoted is not None:
            seen_ms = promoted.taken.ready_ms if promoted.taken is not None else None
        after_ms = None if seen_ms is None else max(0, seen_ms - preemption.at_ms)
        cold_start = sum(cost.phase_micro_usd.get(Phase.COLD_START.value, 0) for cost in paid_by(later, taken))
        lost = lost_steps.get(node.name, 0)
        work = min(own.micro_usd, _value(lost, step_ms, steps, node.micro_usd_per_hour))
        lines.append(
            PreemptionLine(
                node=node.name,
                slot=slot,
                role="rollout" if node.role == "rollout" and own.taken is None else "trainer",
                zone=node.zone,
                at_ms=preemption.at_ms,
                hours=(preemption.at_ms - run.created_ms) / HOUR_MS,
                signal=preemption.signal,
                notice=preemption.noticed_ms is not None,
                lost_steps=lost,
                replaced_by=replaced.node if replaced else None,
                recovered_by=None if seen_ms is None else "a new node" if promoted is None else "a promotion",
                replaced_after_s=None if after_ms is None else after_ms / 1000,
                replaced_after_wall_s=None if after_ms is None else round(after_ms / 1000 / run.clock_factor, 3),
                cold_start_micro_usd=cold_start,
                lost_work_micro_usd=work,
                micro_usd=cold_start + work,
            )
        )
    return tuple(lines)


def _place_of(cost: NodeCost) -> tuple[str, int]:
    """Return the slot and generation that a node had last."""
    return (cost.slot, cost.generation) if cost.taken is None else (cost.taken.slot, cost.taken.generation)


def _takes_over(cost: NodeCost, slot: str, generation: int) -> bool:
    """Return whether a node was promoted to the place after this one."""
    return cost.taken is not None and (cost.taken.slot, cost.taken.generation) == (slot, generation + 1)


def paid_by(later: Sequence[NodeCost], taken: set[str]) -> list[NodeCost]:
    """Return the successors whose cold start this preemption caused.

    `later`: the later nodes of the slot. The last successor is the first with a call from a worker, or in `taken` (the
    preempted nodes).
    """
    paid = []
    for cost in later:
        paid.append(cost)
        if cost.seen_ms is not None or cost.node in taken:
            break
    return paid


def _time_of_steps(session: Session, run: Run, costs: RunCosts) -> tuple[int, int]:
    """Return the node-milliseconds of rollouts and exploration in the whole run, and the number of denoising steps.

    Both figures include every lineage: repeated work took its time twice.
    """
    ms = sum(costs.phase_ms.get(phase.value, 0) for phase in (Phase.ROLLOUT, Phase.EXPLORATION))
    algorithm, sampler = run.job.get("algorithm", {}), run.job.get("sampler", {})
    trained = int(algorithm.get("prompts_per_batch", 0)) * int(algorithm.get("images_per_prompt", 0))
    done = session.scalars(
        select(ProgressRow).where(ProgressRow.run_id == run.id, ProgressRow.kind == IterationDone.KIND)
    )
    images = sum(trained + int(row.event["explored"]) for row in done)
    return ms, images * int(sampler.get("steps", 0))


def _value(lost_steps: int, ms: int, steps: int, micro_usd_per_hour: int) -> int:
    if steps == 0:
        return 0
    return interval_micro_usd(0, round(lost_steps * ms / steps), micro_usd_per_hour)
