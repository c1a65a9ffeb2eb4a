"""Drive a policy through a trace: facts in, actions out, in passes, until the work is done.

The shipped policy is `launcher.decide.reconcile.decide`, unchanged: a live run and a replay run the same lines. A
baseline (baselines.py) is another function of the same facts. The same trace, start and seed give the same result.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random

from engine.events import Market
from launcher.decide.actions import Action, Buy, Enter, Promote, Release
from launcher.decide.budget_guard import RELEASE_ALLOWANCE_MS, Limits
from launcher.decide.facts import OVER, Facts, NodeRecord, Stage, Wanted
from launcher.decide.failover import LaunchRate
from launcher.decide.launch_history import MoveRules
from launcher.decide.reconcile import decide
from launcher.decide.work_left import WorkLeft
from launcher.placement.plan import Plan
from launcher.replay.trace import Trace
from launcher.replay.world import World

Policy = Callable[[Facts, Wanted], list[Action]]
"""A policy: what to do now, from facts. Never sees the trace."""

PASS_MS = 120_000
"""Time between two passes, in milliseconds, while something happens."""

QUIET_MS = 240_000
"""Time between two passes in which nothing happened to a node."""

WHOLE_MS = 20 * 60_000
"""The same while every slot has a node that works, as planned: there is nothing to decide but the end of the run."""

LONGEST_MS = 80 * 3_600_000
"""A replay ends after this time of the run's clock, finished or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerLosses:
    """What the ends of the trainer's nodes cost."""

    losses: int
    """Nodes of the trainer that ended while they trained: preempted, or given back."""
    promotions: int
    """Losses after which a node that was up took the role."""
    lost_iterations: float
    without_trainer_ms: int
    """Time in which nodes were paid and none trained."""
    without_trainer_micro_usd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """The result of one replay."""

    micro_usd: int
    ms: int
    reached: bool
    """Whether the work was done; False if the trace, or the longest time, ended first."""
    by_market: Mapping[str, int]
    """Micro-dollars of the trainer, and of spot and on-demand rollout nodes."""
    preemptions: int
    refusals: int
    share_at_work: float
    """Average share of the slots at work."""
    fleet: tuple[tuple[int, int, int], ...]
    """(ms, spot nodes at work, on-demand rollout nodes at work), at each change."""
    nodes: tuple[NodeRecord, ...]
    """Every node with its events, as in the ledger."""
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """Why each node that stands in for missing spot was bought, by name."""
    trainer: TrainerLosses


def replay(
    plan: Plan,
    rules: MoveRules,
    work: WorkLeft,
    trace: Trace,
    start_ms: int,
    seed: int,
    *,
    deadline_ms: int | None = None,
    ends_ms: int | None = None,
    longest_ms: int = LONGEST_MS,
    policy: Policy = decide,
    gpus_a_place: int | None = None,
) -> Replayed:
    """Run a plan from `start_ms` of the trace.

    `deadline_ms`: time to be done by; `ends_ms`: time at which the run ends, done or not, None: at the deadline;
    `longest_ms`: time at which the replay ends. All are on the run's clock, which starts at 0. `gpus_a_place`: GPUs of
    the nodes that the trace counts, None: a node of the plan takes one place of the trace.
    """
    trainers = sum(slot.role != "rollout" for slot in plan.slots)
    world = World(
        trace=trace,
        start_ms=start_ms,
        work=work,
        random=Random(seed),
        trainer_nodes=trainers,
        is_trainer_on_spot=any(s.role == "trainer" and s.placement.market is Market.SPOT for s in plan.slots),
        gpus_a_place=gpus_a_place,
    )
    wanted = Wanted(
        run="replay",
        slots=plan.slots,
        limits=Limits(max_total=plan.max_total_micro_usd, max_hourly=plan.max_hourly_micro_usd),
        deadline_ms=deadline_ms,
        ends_ms=ends_ms,
        allowance_ms=RELEASE_ALLOWANCE_MS,
        settle_ms=0,
        rules=rules,
        launch_rate=LaunchRate(),
    )
    last_ms = min(longest_ms, trace.end_ms - start_ms)
    stage, reason, passed_ms = Stage.PLANNED, "", -QUIET_MS
    happened = True
    stand_ins: dict[str, str] = {}
    while world.finished_ms is None and world.now_ms < last_ms and stage not in OVER:
        due_ms = passed_ms + (WHOLE_MS if world.is_whole(plan) else QUIET_MS)
        if happened or world.now_ms >= min(due_ms, due_ms if ends_ms is None else ends_ms):
            passed_ms = world.now_ms
            facts = Facts(
                now_ms=world.now_ms,
                stage=stage,
                reason=reason,
                stage_ms=0,
                planned_ms=0,
                nodes=world.records(),
                metered=world.micro_usd,
                advances_ms=tuple(world.advances_ms),
                saved_ms=world.saved_ms,
                sites=plan.sites,
                work=replace(work, done=world.done),
            )
            happened = False
            for action in policy(facts, wanted):
                happened = True
                match action:
                    case Enter():
                        stage, reason = action.stage, action.reason
                        happened = False
                    case Buy():
                        world.buy(action)
                        if action.stand_in:
                            stand_ins[action.name] = action.stand_in
                    case Promote():
                        world.promote(action)
                    case Release():
                        world.release(action.nodes)
        happened |= world.advance(min(last_ms, world.now_ms + PASS_MS))
    worked = world.counts["slot ms"] / max(1, world.now_ms * max(1, work.nodes))
    return Replayed(
        micro_usd=world.micro_usd,
        ms=world.now_ms,
        reached=world.finished_ms is not None,
        by_market={name: round(amount) for name, amount in sorted(world.bill.items())},
        preemptions=world.counts["preemptions"],
        refusals=world.counts["refusals"],
        share_at_work=worked,
        fleet=tuple(world.fleet),
        nodes=tuple(world.records()),
        stand_ins=stand_ins,
        trainer=TrainerLosses(
            losses=len(world.losses_ms),
            promotions=world.counts["promotions"],
            lost_iterations=world.lost_iterations,
            without_trainer_ms=world.without_trainer_ms,
            without_trainer_micro_usd=round(world.without_trainer_micro_usd),
        ),
    )
