"""Decide whether a run must stop: budget, deadline, cost of a point, standstill, nodes that keep failing alike."""

import re
from collections.abc import Callable, Sequence

from launcher.decide import budget_guard
from launcher.decide.actions import Enter
from launcher.decide.facts import FAILING, FINISHING, Facts, NodeRecord, Stage, Wanted
from launcher.decide.failover import (
    NothingLeft,
    next_trainer,
)
from launcher.decide.launch_history import Tried
from launcher.decide.point_cost import too_dear
from launcher.decide.run_budget import judges_refusal, reserve_of, stuck_micro_usd
from launcher.decide.steps import Steps
from launcher.job.agreement import IN_A_ROW
from launcher.money import dollars, duration
from launcher.placement.plan import Slot

TRAINER_TRIES = 5
"""Trainers lost in a row without a new iteration before the run fails. A sixth trainer would fail in the same way."""

SAME_ENDS = 3
"""Nodes in a row that end young with the same evidence before the controller gives up. A fourth node would end alike.
The limit is three because one node may be faulty and two failures may be chance. Requests that gave no instance do not
count: they say something about a pool and nothing about the job."""

STANDSTILL_ITERATIONS, SHORTEST_STANDSTILL_MS = 10, 7_200_000
"""The limits after which a run without progress is ended, although its trainer answers. The run may stand still for 10
times the predicted time of an iteration with the trainer alone, because predictions for models never run before have
been wrong by a factor of 5. The minimum is 2 hours: the first iteration loads and evaluates the model, and the
prediction covers neither."""


def limit_reached(facts: Facts, wanted: Wanted, live: Sequence[NodeRecord], steps: Steps) -> Enter | None:
    """Return the action that ends a run at one of its limits: money, judges, time, cost of a point.

    Each limit is a step of its own.
    """
    limits = (
        lambda: _money_is_used_up(facts, wanted, live),
        lambda: _money_of_all_runs_is_used_up(facts, wanted, live),
        lambda: _judges_do_not_fit(facts, wanted),
        lambda: _time_is_up(facts, wanted),
        lambda: _point_is_too_dear(facts, wanted),
    )
    return _first(limits, steps)


def nothing_works(facts: Facts, wanted: Wanted, tried: Tried, steps: Steps) -> Enter | None:
    """Return the action that ends a run in which no trainer, no rollout node or no iteration can be expected."""
    reasons = (
        lambda: _no_trainer(facts, wanted, tried),
        lambda: _trainers_are_lost(facts, wanted),
        lambda: _no_rollout_node_works(facts, wanted),
        lambda: _standstill(facts, wanted),
    )
    return _first(reasons, steps)


def _first(checks: Sequence[Callable[[], Enter | None]], steps: Steps) -> Enter | None:
    """Return the first end that a check finds. A check that raises hinders no other check."""
    for check in checks:
        stop = steps.take(check, None)
        if stop is not None:
            return stop
    return None


def _money_is_used_up(facts: Facts, wanted: Wanted, live: Sequence[NodeRecord]) -> Enter | None:
    held = reserve_of([*live, *facts.kept], wanted.allowance_ms, facts.now_ms) + stuck_micro_usd(facts, wanted)
    if budget_guard.must_drain(metered=facts.metered, reserved=held, max_total=wanted.limits.max_total):
        return Enter(stage=Stage.DRAINING, reason="budget")
    return None


def _money_of_all_runs_is_used_up(facts: Facts, wanted: Wanted, live: Sequence[NodeRecord]) -> Enter | None:
    if wanted.all_runs.max_total is None:
        return None
    held = reserve_of([*live, *facts.kept], wanted.allowance_ms, facts.now_ms) + stuck_micro_usd(facts, wanted)
    others = facts.others
    if budget_guard.must_drain(
        metered=facts.metered + others.metered, reserved=held + others.reserved, max_total=wanted.all_runs.max_total
    ):
        return Enter(stage=Stage.DRAINING, reason="budget: all_runs.max_total is used up by all runs together")
    return None


def _judges_do_not_fit(facts: Facts, wanted: Wanted) -> Enter | None:
    refusal = judges_refusal(facts, wanted)
    return None if refusal is None else Enter(stage=Stage.DRAINING, reason=refusal)


def _time_is_up(facts: Facts, wanted: Wanted) -> Enter | None:
    if wanted.last_ms is None or facts.now_ms < wanted.last_ms:
        return None
    return Enter(stage=Stage.DRAINING, reason="deadline" if wanted.last_ms == wanted.deadline_ms else "max_runtime")


def _point_is_too_dear(facts: Facts, wanted: Wanted) -> Enter | None:
    limit = wanted.micro_usd_per_point
    micro_usd = None if limit is None else too_dear(facts.scores, limit)
    if limit is None or micro_usd is None:
        return None
    reason = (
        f"{FINISHING}a point (+.01 of {wanted.metric}) costs {dollars(micro_usd)}, above stop.usd_per_point "
        f"{dollars(limit)}, at {IN_A_ROW} evaluations in a row"
    )
    return Enter(stage=Stage.DRAINING, reason=reason)


def _no_trainer(facts: Facts, wanted: Wanted, tried: Tried) -> Enter | None:
    trainers = [node for node in facts.nodes if node.role != "rollout"]
    denial = _no_trainer_can_be_had(facts, wanted, trainers, tried)
    return None if denial is None else Enter(stage=Stage.DRAINING, reason=f"{FAILING}no trainer can be had: {denial}")


def _trainers_are_lost(facts: Facts, wanted: Wanted) -> Enter | None:
    ends = (_trainer_is_lost(facts, slot) for slot in wanted.slots if slot.role != "rollout")
    return next((end for end in ends if end is not None), None)


def _no_rollout_node_works(facts: Facts, wanted: Wanted) -> Enter | None:
    evidence = [is_given_up(facts, slot) for slot in wanted.slots if slot.role == "rollout"]
    if not evidence or not all(evidence):
        return None
    reason = f"no rollout node works, the last {SAME_ENDS} of each slot ended in the same way: {evidence[0]}"
    return Enter(stage=Stage.DRAINING, reason=FAILING + reason)


def _trainer_is_lost(facts: Facts, slot: Slot) -> Enter | None:
    """Return the action that ends a run whose node of the trainer ends again and again; None if it may still work."""
    who = "the trainer" if slot.role == "trainer" else f"the trainer's node {slot.name}"
    since_ms = max(facts.advanced_ms, facts.planned_ms)
    lost = [node for node in facts.nodes if node.slot == slot.name and _was_lost(node, since_ms)]
    alike = _alike(lost)
    if alike is not None:
        reason = f"{who} was lost {SAME_ENDS} times in the same way without a new iteration: {alike.evidence}"
        return Enter(stage=Stage.DRAINING, reason=FAILING + reason, log_of=alike.name)
    if len(lost) >= TRAINER_TRIES:
        reason = f"{who} was lost {len(lost)} times without a new iteration; the last one: {lost[-1].evidence}"
        return Enter(stage=Stage.DRAINING, reason=FAILING + reason, log_of=lost[-1].name)
    return None


def _standstill(facts: Facts, wanted: Wanted) -> Enter | None:
    """Return the action that ends a run whose engine answers but makes no progress; None if no limit is reached."""
    if wanted.iteration_ms is None or facts.still_since_ms is None:
        return None
    still_ms = facts.now_ms - facts.still_since_ms
    if still_ms < max(SHORTEST_STANDSTILL_MS, STANDSTILL_ITERATIONS * wanted.iteration_ms):
        return None
    reason = (
        f"no new iteration for {duration(still_ms)} although the trainer answers; "
        f"one was predicted to take {duration(wanted.iteration_ms)} with the trainer alone"
    )
    return Enter(stage=Stage.DRAINING, reason=FAILING + reason)


def _alike(ended: Sequence[NodeRecord]) -> NodeRecord | None:
    """Return the last of the nodes if the last `SAME_ENDS` ended in the same way, else None."""
    last = sorted(ended, key=lambda node: node.ended_ms or 0)[-SAME_ENDS:]
    is_alike = len(last) == SAME_ENDS and len({without_numbers(node.evidence) for node in last}) == 1
    return last[-1] if is_alike and last[-1].evidence else None


def without_numbers(evidence: str) -> str:
    """Return the evidence without words that hold a number: node names, processes and times differ each time."""
    return re.sub(r"\w*\d\w*", "#", evidence)


def is_given_up(facts: Facts, slot: Slot) -> str | None:
    """Return the common evidence of the slot's last nodes if all of them ended young and alike.

    None: the slot may still work.
    """
    held = [node for node in facts.nodes if node.slot == slot.name and not node.was_refused]
    last = sorted(held, key=lambda node: node.generation)[-SAME_ENDS:]
    if any(not node.died_young or node.reclaimed or node.requested_ms < facts.planned_ms for node in last):
        return None
    alike = _alike(last)
    return None if alike is None else alike.evidence


def _was_lost(node: NodeRecord, since_ms: int) -> bool:
    """Return True if the node ended by itself after `since_ms`.

    A preemption, a refusal or a release does not count.
    """
    if node.ended_ms is None or node.ended_ms <= since_ms or node.reclaimed or "released" in node.happened:
        return False
    return not node.was_refused


def _no_trainer_can_be_had(facts: Facts, wanted: Wanted, trainers: Sequence[NodeRecord], tried: Tried) -> str | None:
    """Return the reason why no trainer can ever be bought, or None."""
    if facts.sites:
        move = next_trainer(tried, facts.sites, wanted.rules, facts.now_ms)
        return move.why if isinstance(move, NothingLeft) else None
    return next((node.evidence for node in trainers if was_denied(node, facts)), None)


def was_denied(node: NodeRecord, facts: Facts) -> bool:
    return node.happened.get("denied", -1) >= facts.planned_ms
