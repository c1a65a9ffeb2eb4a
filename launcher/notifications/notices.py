"""What is worth a message to a person. Pure: no I/O, no clock."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from launcher.decide.facts import OVER, Stage
from launcher.money import HOUR_MS, dollars, duration

SPEND_PERCENT = (50, 80, 100)
"""Shares of `budget.max_total` in percent whose spending is reported."""

STORM_NODES, STORM_MS = 3, 600_000
"""A preemption storm: this many preemptions within this time in ms (run's clock)."""

SLOW_FACTOR = 5.0
"""A run makes no progress after `no_progress`, and never before this many times its usual iteration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """One message. `key`: identifies the cause within the run, so that a cause is reported once."""

    key: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What the ledger says about a run. Times in ms on the run's clock, money in micro-dollars.

    `began_ms`: time of the newest status `planned`. `status_id`: ledger id of the newest status. `done_ms`: end of each
    iteration. `reached`: the target in words, once reached.
    """

    name: str
    now_ms: int
    began_ms: int
    stage: Stage
    status_id: int
    reason: str
    done_ms: Sequence[int]
    preempted_ms: Sequence[int]
    reached: str
    spent_micro_usd: int
    max_total_micro_usd: int | None
    learning: str = ""
    """As in `RunView`."""
    promoted: Sequence[tuple[int, str, str]] = ()
    """Promotions to the trainer's role: id of the event, name of the node, and evidence."""


def due_notices(facts: RunFacts, no_progress_ms: int) -> Iterator[Notice]:
    """Return every notice that the facts call for, also those that were sent before."""
    limit = "" if facts.max_total_micro_usd is None else f" of {dollars(facts.max_total_micro_usd)}"
    spent = f"{dollars(facts.spent_micro_usd)}{limit} spent"
    yield Notice(key="started", text=f"{facts.name} started" + (f"; budget{limit[3:]}" if limit else ""))
    if facts.reached:
        yield Notice(key="target", text=f"{facts.name} reached its target: {facts.reached}; {spent}")
    yield from _spending(facts, spent)
    yield from _storms(facts)
    for number, node, evidence in facts.promoted:
        why = evidence.partition(": ")[2].partition("\n")[0]
        yield Notice(
            key=f"promoted-{number}", text=f"{facts.name}: {node} trains now, from the newest checkpoint; {why}"
        )
    if facts.stage in OVER:
        yield Notice(
            key=f"ended-{facts.status_id}",
            text=f"{facts.name} {facts.stage} ({facts.reason or 'no reason given'}); {spent}. "
            f"`spotrl report {facts.name}` shows what it cost",
        )
    elif facts.stage is Stage.RUNNING:
        if facts.learning:
            # One message, also if the run learns again and stops to learn later.
            yield Notice(key="learns-nothing", text=f"{facts.name} learns nothing: {facts.learning}; {spent}")
        yield from _standstill(facts, no_progress_ms)


def _spending(facts: RunFacts, spent: str) -> Iterator[Notice]:
    if facts.max_total_micro_usd is None:
        return
    passed = [
        percent for percent in SPEND_PERCENT if facts.spent_micro_usd * 100 >= facts.max_total_micro_usd * percent
    ]
    if passed:
        # Only the largest: a run seen late would else send three messages at once.
        key = f"spend-{passed[-1]}-of-{facts.max_total_micro_usd}"
        yield Notice(key=key, text=f"{facts.name}: {spent} ({passed[-1]} % of the budget is passed)")


def _storms(facts: RunFacts) -> Iterator[Notice]:
    reported_ms = None
    for index in range(STORM_NODES - 1, len(facts.preempted_ms)):
        first_ms, last_ms = facts.preempted_ms[index - STORM_NODES + 1], facts.preempted_ms[index]
        is_new = reported_ms is None or last_ms - reported_ms >= HOUR_MS
        if last_ms - first_ms <= STORM_MS and is_new:
            reported_ms = last_ms
            within = duration(max(1000, last_ms - first_ms))
            text = f"{facts.name}: {STORM_NODES} preemptions within {within}; lost nodes are replaced"
            yield Notice(key=f"storm-{index}", text=text)


def _standstill(facts: RunFacts, no_progress_ms: int) -> Iterator[Notice]:
    done = [at_ms for at_ms in facts.done_ms if at_ms >= facts.began_ms]
    last_ms = done[-1] if done else facts.began_ms
    steps = [after - before for before, after in pairwise(done[-11:])]
    longest_ms = max(no_progress_ms, SLOW_FACTOR * median(steps) if steps else 0)
    if facts.now_ms - last_ms >= longest_ms:
        yield Notice(
            key=f"no-progress-{last_ms}",
            text=f"{facts.name}: no iteration ended for {duration(facts.now_ms - last_ms)}, and nodes cost money; see "
            f"`spotrl status {facts.name}` and `spotrl logs {facts.name} --tail 20`",
        )
