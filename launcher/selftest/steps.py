"""The steps of a selftest, each a pure check of facts: what it expects, what was found, and whether both agree.

    buy -> train -> publish -> preempt -> notice -> drain -> replace -> checkpoint -> resume -> cleanup -> bill

A step that still waits for a fact says what it waits for. `launcher/selftest/conduct.py` acts, reads the facts and asks
again; a step that waits too long has failed. Cleanup and bill are judged in every case.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from launcher.clouds.preempting import Progress
from launcher.ledger.billing import interval_micro_usd
from launcher.money import dollars, duration
from launcher.selftest.facts import Batch, Facts, NodeFacts

TRAINED = 2
"""Batches that prove training: the second is rolled out with weights that the first has published."""

UNUSED = 6
"""Batches after which a ready spot node that made nothing counts as left out."""


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    WAITING = "waiting"
    NOT_TESTED = "not tested"
    INTERRUPTED = "interrupted"
    """The user ended the selftest in this step. No judge returns it."""


class Step(StrEnum):
    BUY = "buy"
    TRAIN = "train"
    PUBLISH = "publish"
    PREEMPT = "preempt"
    NOTICE = "notice"
    DRAIN = "drain"
    REPLACE = "replace"
    CHECKPOINT = "checkpoint"
    RESUME = "resume"
    CLEANUP = "cleanup"
    BILL = "bill"


ALWAYS = (Step.CLEANUP, Step.BILL)
"""Steps that are taken after a failed step and after Ctrl-C too."""

PURPOSE: Mapping[Step, str] = {
    Step.BUY: "one on-demand and one spot node come up and work",
    Step.TRAIN: "batches are trained, each rollout exactly once",
    Step.PUBLISH: "the spot node samples with weights that the trainer published",
    Step.PREEMPT: "the cloud preempts the spot node",
    Step.NOTICE: "the cloud's notice reaches spotrl before the node ends",
    Step.DRAIN: "the node hands its work over, and no rollout is lost or doubled",
    Step.REPLACE: "another spot node comes up and works",
    Step.CHECKPOINT: "after a stop the bucket holds the newest checkpoint",
    Step.RESUME: "the run goes on from that checkpoint",
    Step.CLEANUP: "nothing of it runs or lies in the cloud any more",
    Step.BILL: "the estimate of the bill adds up and is within the budget",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One comparison: what it is about, what was expected, what was found."""

    what: str
    expected: str
    found: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """The result of a step. `text`: one sentence."""

    verdict: Verdict
    text: str
    compared: tuple[Compared, ...] = ()


def judge(step: Step, facts: Facts) -> Judgement:
    """Return the result of a step by the facts of now. A step before the cleanup fails when the run ends early."""
    judgement = JUDGES[step](facts)
    ended = facts.stage in ("failed", "finished") or (facts.stage == "stopped" and facts.stopped_ms is None)
    if judgement.verdict is Verdict.WAITING and step not in ALWAYS and ended:
        return _failed(f"the run has {facts.stage} ({facts.reason}); it waited: {judgement.text}", *judgement.compared)
    return judgement


def _buy(facts: Facts) -> Judgement:
    compared, waits = [], []
    for role, market in (("trainer", "on_demand"), ("rollout", "spot")):
        ready = next((node for node in facts.nodes if node.role == role and node.ready_ms is not None), None)
        tried = [node for node in facts.nodes if node.role == role]
        if ready is None:
            waits.append(f"no {role} node is ready yet ({_state(tried[-1]) if tried else 'none asked for'})")
            continue
        compared.append(Compared(what=f"capacity type of {ready.name}", expected=market, found=ready.market))
        compared.append(_seconds(f"{ready.name}: seconds from order to work", ready.requested_ms, ready.ready_ms))
        place = f"{ready.instance_type} in {ready.zone}, {dollars(ready.micro_usd_per_hour)}/h"
        compared.append(Compared(what=f"bought for {ready.name}", expected=facts.cloud, found=place))
        if ready.market != market:
            return _failed(f"{ready.name} is {ready.market}, and should be {market}", *compared)
    if waits:
        return _waiting("; ".join(waits), *compared)
    return _passed("one on-demand and one spot node work", *compared)


def _train(facts: Facts) -> Judgement:
    if broken := _not_whole(facts):
        return broken
    compared = (Compared(what="batches trained", expected=f"{TRAINED} or more", found=str(len(facts.batches))),)
    if len(facts.batches) < TRAINED:
        return _waiting(f"{len(facts.batches)} of {TRAINED} batches are trained", *compared)
    return _passed(f"{len(facts.batches)} batches, each of {facts.batch_size} rollouts", *compared)


def _publish(facts: Facts) -> Judgement:
    spot = facts.spot
    if spot is None or spot.ready_ms is None:
        return _failed("no spot node was ever ready")
    later = [batch for batch in facts.batches if batch.at_ms > spot.ready_ms and batch.iteration >= 1]
    counts = {batch.iteration: batch.made_by.get(spot.name, 0) for batch in later}
    compared = tuple(
        Compared(what=f"rollouts of {spot.name} in batch {iteration}", expected="1 or more", found=str(count))
        for iteration, count in list(counts.items())[:UNUSED]
    )
    if any(counts.values()):
        return _passed(f"{spot.name} sampled with published weights", *compared)
    if len(counts) >= UNUSED:
        return _failed(f"{spot.name} made none of the rollouts of {len(counts)} batches", *compared)
    return _waiting(f"{spot.name} has made no rollout with published weights yet", *compared)


def _preempt(facts: Facts) -> Judgement:
    order = facts.order
    if order is None:
        return _waiting("nothing is ordered yet")
    compared = (
        Compared(what=f"state of the order ({order.means})", expected=Progress.DONE.value, found=order.state.text),
    )
    match order.state.progress:
        case Progress.FAILED:
            return _failed(f"the cloud did not preempt {order.node}: {order.state.text}", *compared)
        case Progress.RUNNING:
            return _waiting(f"the order for {order.node} is {order.state.text or 'under way'}", *compared)
        case Progress.DONE:
            return _passed(f"{order.node} is preempted by {order.means}", *compared)


def _notice(facts: Facts) -> Judgement:
    node, order = _ordered(facts), facts.order
    if node is None or order is None:
        return _failed("no node was preempted")
    noticed = node.happened.get("notice")
    promised = "none is promised" if order.notice_ms is None else duration(order.notice_ms)
    if noticed is not None:
        text = duration(max(0, node.ended_ms - noticed)) if node.ended_ms is not None else "the node still runs"
        return _passed(
            f"the notice was seen {duration(max(0, noticed - order.at_ms))} after the order",
            Compared(what="time from notice to end", expected=promised, found=text),
        )
    if node.ended_ms is None:
        return _waiting("no notice yet")
    missing = Compared(what="notice", expected=promised, found="none before the end")
    if order.notice_ms is None:
        return Judgement(
            verdict=Verdict.NOT_TESTED, text="the cloud promises no notice and gave none", compared=(missing,)
        )
    return _failed(f"{node.name} ended without a notice, and the cloud promises {promised}", missing)


def _drain(facts: Facts) -> Judgement:
    if broken := _not_whole(facts):
        return broken
    node, order = _ordered(facts), facts.order
    if node is None or order is None:
        return _failed("no node was preempted")
    if node.ended_ms is None:
        return _waiting(f"{node.name} still runs")
    after = [batch for batch in facts.batches if batch.at_ms > node.ended_ms]
    noticed = "notice" in node.happened
    compared = (
        Compared(what="end of the node", expected="a preemption", found=node.evidence or "no evidence"),
        Compared(
            what="denoising steps to repeat",
            expected="0 after a notice" if noticed else "any without a notice",
            found=str(node.lost_steps or 0),
        ),
        Compared(what="whole batches after the end", expected="1 or more", found=str(len(after))),
    )
    if not node.reclaimed:
        return _failed(f"{node.name} ended, but not by a preemption: {node.evidence or 'no evidence'}", *compared)
    if not after:
        return _waiting("no batch is trained since the node ended", *compared)
    if not noticed:
        text = "without a notice nothing drains; the rollouts were made again"
        return Judgement(verdict=Verdict.NOT_TESTED, text=text, compared=compared)
    if node.lost_steps:
        return _failed(f"{node.name} lost {node.lost_steps} denoising steps in spite of its notice", *compared)
    return _passed(f"{node.name} handed over, and every batch is whole", *compared)


def _replace(facts: Facts) -> Judgement:
    node, order = _ordered(facts), facts.order
    if node is None or order is None:
        return _failed("no node was preempted")
    successors = [
        successor for successor in facts.nodes if successor.slot == node.slot and successor.generation > node.generation
    ]
    if not successors:
        return _waiting(f"no other node for {node.slot} is asked for yet")
    successor = next((successor for successor in successors if successor.ready_ms is not None), successors[-1])
    compared = (
        Compared(what=f"capacity type of {successor.name}", expected=node.market, found=successor.market),
        _seconds(
            "seconds from the order to preempt to the request for another node", order.at_ms, successor.requested_ms
        ),
        _seconds("seconds from that request to work", successor.requested_ms, successor.ready_ms),
        _seconds("seconds from that request to the first rollout", successor.requested_ms, successor.served_ms),
    )
    if successor.market != node.market:
        return _failed(f"{successor.name} is {successor.market}, and should be {node.market}", *compared)
    if successor.ready_ms is None or successor.served_ms is None:
        return _waiting(f"{successor.name}: {_state(successor)}", *compared)
    return _passed(f"{successor.name} took the place of {node.name}", *compared)


def _checkpoint(facts: Facts) -> Judgement:
    if facts.stopped_ms is None:
        return _waiting("the run is not stopped yet")
    if not facts.saved:
        return _failed("the engine reported no checkpoint")
    newest = max(facts.saved, key=lambda saved: saved.name)
    compared = (Compared(what="newest checkpoint", expected=newest.name, found=facts.stored or "none in the bucket"),)
    if facts.stored is None or facts.stored < newest.name:
        return _failed(
            f"the bucket has {facts.stored or 'no checkpoint'}, and the engine saved {newest.name}", *compared
        )
    return _passed(f"the bucket has {facts.stored}", *compared)


def _resume(facts: Facts) -> Judgement:
    if facts.resumed_ms is None:
        return _waiting("the run is not resumed yet")
    resumed_ms = facts.resumed_ms
    start = next((start for start in facts.starts if start.at_ms >= resumed_ms), None)
    if start is None:
        return _waiting("the engine has not started again yet")
    expected = _iteration_of(facts.stored or "")
    compared = (Compared(what="first iteration after the resume", expected=str(expected), found=str(start.iteration)),)
    if start.iteration != expected:
        return _failed(f"the engine went on at {start.iteration}, and its checkpoint is of {expected}", *compared)
    if broken := _not_whole(facts):
        return broken
    if not any(batch.at_ms >= start.at_ms and batch.iteration >= start.iteration for batch in facts.batches):
        return _waiting(f"batch {start.iteration} is not trained yet", *compared)
    return _passed(f"the run went on at iteration {start.iteration}", *compared)


def _cleanup(facts: Facts) -> Judgement:
    if facts.still_running:
        return _waiting(f"still there: {', '.join(facts.still_running)}")
    if facts.in_cloud is None:
        return _waiting("the cloud is not asked yet")
    compared = (
        Compared(
            what="machines, disks, groups and identities with the run's label",
            expected="none",
            found=", ".join(facts.in_cloud) or "none",
        ),
    )
    if facts.in_cloud:
        return _waiting(f"the cloud still lists {', '.join(facts.in_cloud)}", *compared)
    return _passed("nothing is left", *compared)


def _bill(facts: Facts) -> Judgement:
    compared, total = [], 0
    for paid in facts.paid:
        expected = 0 if paid.is_free else interval_micro_usd(0, max(paid.ms, paid.minimum_ms), paid.micro_usd_per_hour)
        total += expected
        subject = f"{paid.node}: {duration(paid.ms)} at {dollars(paid.micro_usd_per_hour)}/h"
        compared.append(Compared(what=subject, expected=f"{expected} micro-dollars", found=f"{paid.micro_usd}"))
        if expected != paid.micro_usd:
            return _failed(f"{paid.node} costs {paid.micro_usd} micro-dollars, and should cost {expected}", *compared)
    open_nodes = [paid.node for paid in facts.paid if not paid.is_closed]
    # A sum that grows while it is read proves nothing. The cleanup has failed by then.
    is_growing = bool(open_nodes and facts.still_running)
    limit = facts.max_total_micro_usd
    compared.append(Compared(what="sum", expected=f"{total} micro-dollars", found=str(facts.spent_micro_usd)))
    whole = total + facts.beside_micro_usd
    compared.append(Compared(what="disks and addresses", expected="measured", found=str(facts.beside_micro_usd)))
    compared.append(Compared(what="budget", expected=f"at most {limit} micro-dollars", found=str(whole)))
    if total != facts.spent_micro_usd and not is_growing:
        return _failed(
            f"the run cost {facts.spent_micro_usd} micro-dollars, and its parts add up to {total}", *compared
        )
    if whole > limit:
        return _failed(f"{dollars(whole)} were spent, more than {dollars(limit)}", *compared)
    if is_growing:
        text = f"{', '.join(open_nodes)} may still cost money, so the bill is not closed"
        return Judgement(verdict=Verdict.NOT_TESTED, text=text, compared=tuple(compared))
    if open_nodes:
        return _failed(f"the bill of {', '.join(open_nodes)} is not closed", *compared)
    return _passed(f"{dollars(whole)} were spent by the estimate; compare it with your invoice", *compared)


JUDGES: Mapping[Step, Callable[[Facts], Judgement]] = {
    Step.BUY: _buy,
    Step.TRAIN: _train,
    Step.PUBLISH: _publish,
    Step.PREEMPT: _preempt,
    Step.NOTICE: _notice,
    Step.DRAIN: _drain,
    Step.REPLACE: _replace,
    Step.CHECKPOINT: _checkpoint,
    Step.RESUME: _resume,
    Step.CLEANUP: _cleanup,
    Step.BILL: _bill,
}


def _not_whole(facts: Facts) -> Judgement | None:
    """Return a failure if a batch does not have each rollout exactly once, else None."""
    for batch, count in _counts(facts):
        if count != facts.batch_size:
            return _failed(
                f"batch {batch.iteration} has {count} rollouts, and should have {facts.batch_size}",
                Compared(what=f"rollouts of batch {batch.iteration}", expected=str(facts.batch_size), found=str(count)),
            )
    return None


def _counts(facts: Facts) -> Iterator[tuple[Batch, int]]:
    return ((batch, sum(batch.made_by.values())) for batch in facts.batches)


def _ordered(facts: Facts) -> NodeFacts | None:
    return facts.node(facts.order.node) if facts.order is not None else None


def _iteration_of(checkpoint: str) -> int:
    """Return the iteration in a checkpoint's name, like l0001-i000012. -1 without a checkpoint."""
    return int(checkpoint.rpartition("-i")[2]) if "-i" in checkpoint else -1


def _state(node: NodeFacts) -> str:
    """Return the newest event of a node."""
    newest = max(node.happened, key=lambda kind: node.happened[kind], default="asked for")
    return f"{newest} ({node.evidence})" if node.evidence else newest


def _seconds(subject: str, start_ms: int, end_ms: int | None) -> Compared:
    text = "not yet" if end_ms is None else f"{(end_ms - start_ms) / 1000:.0f}"
    return Compared(what=subject, expected="measured", found=text)


def _passed(text: str, *compared: Compared) -> Judgement:
    return Judgement(verdict=Verdict.PASSED, text=text, compared=compared)


def _failed(text: str, *compared: Compared) -> Judgement:
    return Judgement(verdict=Verdict.FAILED, text=text, compared=compared)


def _waiting(text: str, *compared: Compared) -> Judgement:
    return Judgement(verdict=Verdict.WAITING, text=text, compared=compared)
