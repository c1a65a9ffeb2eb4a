"""The pull queue: a state machine that leases rollout requests to workers.

No I/O, no torch, no Ray and no clock. Workers only call in. The queue answers every call with the pending order
(work, load weights, drain, exit). The promises:

- every request of a manifest finishes exactly once, even if workers are killed, frozen, delayed or repeat a call;
- the queue issues each lease number once and rejects calls with a revoked number;
- a worker samples an attempt only with the weights named in the attempt;
- rollouts of the open batch come first, then early rollouts of the next batch, evaluation and exploration, which gives
  way to rollouts (priority.py); when no request waits, an idle worker makes a speculative copy of the lease with the
  latest predicted end, and the first result to arrive counts;
- a poisoned request (every worker crashes on the request) is reported and no longer retried; requests leased together
  with the poisoned request are cleared.

Each other file of this folder holds one value or decision. state.py holds the parts and the transitions between them,
with a diagram. recovery.py restores the facts of a journal.

Methods return every change the coordinator must remember. The coordinator makes the change durable *before* answering
(engine/coordinator/coordinator.py). After a crash, the `restore_...` methods load the same facts.
All times are milliseconds of the run's clock and are passed in by the caller.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from engine.events import Capacity, Market, NodeSeen, NodeServed, NodeState, Warned
from engine.parallel.forecast import Demand
from engine.protocol.messages import Outlook
from engine.protocol.records import LeaseRecord
from engine.protocol.request import (
    Attempt,
    Drain,
    Exit,
    Fenced,
    Finished,
    Kind,
    Reply,
    RequestId,
    Scorer,
    Wait,
    WeightsKey,
    Work,
    Yield,
)
from engine.protocol.task import Task
from engine.queue import recovery
from engine.queue.commits import CommitTimer
from engine.queue.hangs import Hangs
from engine.queue.leases import Lease
from engine.queue.members import WorkerRecord
from engine.queue.outlook import outlook
from engine.queue.pace import STEPS_PER_LEASE, Pace, Rules
from engine.queue.priority import PRIORITY, gives_way, in_order
from engine.queue.speculation import slowest_requests
from engine.queue.state import REPORTED_LOST, QueueState
from engine.queue.task import QueuedRequest, Submission
from engine.queue.weights import PublishedWeights

MISSED = "missed its lease"


class Queue:
    """The pull queue. The module docstring lists the promises. Every method is idempotent."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.state = QueueState(rules)
        self.stop_reason: str | None = None
        self.weights = PublishedWeights()
        self.commits = CommitTimer(rules)
        self._hangs: defaultdict[Scorer, Hangs] = defaultdict(Hangs)
        self.events = self.state.events
        """Events for the launcher. The caller removes them after reading."""
        self.finished = self.state.finished
        self.poisoned = self.state.poisoned
        self._backlog = self.state.backlog
        self._leases = self.state.leases
        self._members = self.state.members
        self._paces: dict[tuple[Kind, str, int, str, str], Pace] = {}
        self._submissions = 0
        self._ticked_ms: int | None = None

    @property
    def live(self) -> WeightsKey | None:
        """The newest published weights that are no average."""
        return self.weights.live

    # --- the trainer's side ---------------------------------------------------------------------------

    def submit(self, task: Task) -> None:
        """Add the task's requests. Skip requests already finished, and requests already queued with the same weights.

        A request queued with other weights becomes a new attempt: its old leases are revoked and sampling starts from
        step 0. A training request replaces the early request for the same image.
        """
        if not task.requests:
            return
        work = (task.requests[0].kind, task.sampler, task.shape, task.dtype, task.scorer)
        pace = self._paces.setdefault(work, Pace())
        shown = frozenset(task.requests[: task.images])
        of = Submission(number=self._submissions, task=task, pace=pace, shown=shown)
        self._submissions += 1
        for request in task.requests:
            if request in self.finished or self.state.is_made_anew(request):
                continue
            self.state.drop_early(request)
            entry = self.state.requests.get(request)
            if entry is not None and entry.attempt.weights == task.weights:
                continue
            if entry is not None:
                self.state.leave(entry)
            self.poisoned.pop(request, None)
            entry = QueuedRequest(attempt=Attempt(request=request, weights=task.weights), of=of)
            self.state.requests[request] = entry
            self._backlog.add(entry)

    def publish(self, weights: WeightsKey, digest: str) -> None:
        """Make weights available to workers. Weights without `average` become the live weights."""
        self.weights.publish(weights, digest)

    def withdraw(self, requests: Iterable[RequestId]) -> None:
        """Remove requests: exploration cut short, or a batch already trained. Revoke their leases."""
        for request in requests:
            self.finished.pop(request, None)
            self.poisoned.pop(request, None)
            entry = self.state.requests.pop(request, None)
            if entry is not None:
                self.state.leave(entry)

    def forget_weights(self, keep: Iterable[WeightsKey]) -> list[WeightsKey]:
        """Drop the weights that are not in `keep`, not live and not needed by a queued request.

        Return the dropped keys.
        """
        return self.weights.drop([*keep, *(entry.attempt.weights for entry in self.state.requests.values())])

    def wanted(self, kind: Kind) -> int:
        """Return the number of unfinished requests of a kind."""
        return sum(1 for request in self.state.requests if request.kind == kind)

    def waits(self, kind: Kind) -> bool:
        """Return True if a request of this kind waits for a worker."""
        return self._backlog.holds(kind)

    def stop(self, reason: str) -> None:
        """Order every worker to exit at its next call."""
        self.stop_reason = self.stop_reason or reason

    # --- the workers' side ----------------------------------------------------------------------------

    def pull(
        self,
        worker: str,
        node: str,
        *,
        boot: int,
        seq: int,
        now_ms: int,
        holds: tuple[WeightsKey, str] | None,
        kinds: Sequence[Kind] = PRIORITY,
        most_images: int | None = None,
    ) -> Reply:
        """Return the next order for a worker.

        `boot` numbers the worker's processes and `seq` a process's pulls. A repeated `seq` gets the same work again,
        because the first answer may have been lost.

        `holds`: the worker's loaded weights and their digest. `most_images`: the most images of a forward pass that fit
        into the worker's memory.
        """
        member = self._calling_worker(worker, node, boot, now_ms)
        if member is None:
            return Exit(reason="a newer process of this worker has called in")
        if seq < member.seq:
            return Wait()
        if seq == member.seq and member.work is not None and member.work.lease in self._leases.open:
            return member.work
        for number in [n for n in member.leases if self._leases.open[n].seq >= seq]:
            self.state.requeue(number, now_ms)  # the answer was lost, and a restart lost `work`
        member.seq = seq
        reply = self._order(member, now_ms, holds, kinds, most_images)
        member.work = reply if isinstance(reply, Work) else None
        return reply

    def heartbeat(self, worker: str, node: str, leases: Mapping[int, int], *, now_ms: int) -> Reply:
        """Renew leases. `leases` maps lease number to the current denoising step."""
        self._members.call(node, now_ms)
        for number, step in leases.items():
            lease = self._leases.open.get(number)
            if lease is None or lease.worker != worker:
                self._lengthen_after_late_call(worker, number, now_ms)
                return Fenced(lease=number)
            self._leases.renew(lease, step, now_ms)
        order = self._pending(node)
        for number in leases if isinstance(order, Wait) else ():
            most = self._members.workers[worker].most_images
            if gives_way(self._leases.open[number], self._backlog, self.weights, most):
                return Yield(lease=number)
        return order

    def may_finish(self, worker: str, number: int) -> bool:
        """Return True if the worker holds the lease. Call before making the worker's bytes durable."""
        return self._leases.is_held(worker, number)

    def held(self, worker: str, number: int) -> Sequence[RequestId]:
        """Return the requests still covered by the worker's lease.

        Withdrawn and resubmitted requests are no longer covered.
        """
        return tuple(self._leases.open[number].requests) if self.may_finish(worker, number) else ()

    def finish(
        self, worker: str, node: str, number: int, results: Sequence[Finished], *, now_ms: int, hangs: str = ""
    ) -> Reply:
        """Record finished images. Call only after the bytes are durable.

        `hangs`: the scorer did not return for the lease's only image, in words; empty: the scorer returned.
        """
        self._members.call(node, now_ms)
        if not self.may_finish(worker, number):
            self._lengthen_after_late_call(worker, number, now_ms)
            return Fenced(lease=number)
        lease = self._leases.open[number]
        lease.of.pace.observe_lease((now_ms - lease.granted_ms) / max(1, lease.of.task.steps - lease.first_step))
        if results and not self._members.nodes[node].served:
            self._members.nodes[node].served = True
            self.events.append(NodeServed(node=node, worker=worker))
        if hangs:
            self.events.append(Warned(text=f"{worker} failed: {hangs}"))
        for result in results:
            if result.request in lease.requests:
                self.state.finish(result)
            if hangs:
                self._hangs[lease.of.task.scorer].alone(result.request, hangs)
            elif math.isfinite(result.score.reward):
                self._hangs[lease.of.task.scorer].scored()
        if number in self._leases.open:  # only a part is finished: the worker still works on the rest
            self._leases.renew(lease, lease.step, now_ms)
        return Wait()

    def commit(
        self,
        worker: str,
        node: str,
        number: int,
        states: Mapping[RequestId, tuple[int, str]],
        *,
        now_ms: int,
        cost_ms: float | None = None,
    ) -> Reply:
        """Record committed in-flight state. The next worker resumes from `(step, blob)`.

        `cost_ms`: duration of the worker's last commit. A commit renews the lease.
        """
        self._members.call(node, now_ms)
        if not self.may_finish(worker, number):
            return Fenced(lease=number)
        lease = self._leases.open[number]
        for request, (step, blob) in states.items():
            entry = lease.requests.get(request)
            if entry is not None:
                self.state.commit(entry, step, blob)
        if states:
            self._leases.renew(lease, max(step for step, _ in states.values()), now_ms)
        if cost_ms is not None:
            self.commits.observe(cost_ms)
        return self._pending(node)

    def give_back(self, worker: str, number: int, *, now_ms: int) -> Reply:
        """Return a lease's unfinished requests to the queue. Committed steps are kept."""
        if not self.may_finish(worker, number):
            return Fenced(lease=number)
        self.state.requeue(number, now_ms)
        return Wait()

    def fault(self, worker: str, node: str, number: int, text: str, *, now_ms: int, hangs: bool = False) -> Reply:
        """Record a worker's failure to make the images of a lease. Return the requests to the queue.

        `hangs`: a scorer did not return in time, so each request runs alone next time.
        """
        self._members.call(node, now_ms)
        is_held = self.may_finish(worker, number)
        lease = self._leases.open[number] if is_held else self._lengthen_after_late_call(worker, number, now_ms)
        if lease is None:
            return Fenced(lease=number)
        requests = list(lease.requests)
        if is_held:
            self.state.requeue(number, now_ms)
        self.events.append(Warned(text=f"{worker} failed: {text}"))
        for request in reversed(requests):
            if hangs:
                self.state.record_hang(request)
            else:
                self.state.record_crash(request, text, alone=lease.images == 1)
        if not is_held:
            return Fenced(lease=number)
        return Wait()

    # --- state of workers and nodes ---------------------------------------------------------------------

    def died(self, worker: str, boot: int, reason: str, *, now_ms: int) -> None:
        """Revoke the leases of a dead process at once. The evidence is a closed connection or an actor's death.

        The evidence may be wrong. A worker still alive gets `Fenced` at its next call and pulls again.
        """
        member = self._members.workers.get(worker)
        if member is not None and member.boot == boot:
            self.state.revoke(member.leases, member.node, reason, now_ms)

    def capacity(self, snapshot: Capacity, *, now_ms: int) -> None:
        """Apply the launcher's capacity snapshot. Ignore a generation older than the last applied snapshot."""
        if snapshot.generation < self._members.generation:
            return
        self._members.generation = snapshot.generation
        for fact in snapshot.nodes:
            node = self._members.node(fact.node, now_ms)
            node.market = fact.market
            node.drain_ms = fact.deadline_ms if fact.state is NodeState.DRAINING else None
            if fact.state is NodeState.LOST:
                self.lost(fact.node, REPORTED_LOST, now_ms=now_ms)
            else:
                node.lost_ms = None

    def notice(self, node: str, deadline_ms: int, *, now_ms: int) -> None:
        """Record a preemption notice from the node's agent. The node's workers are then ordered to drain."""
        self._members.node(node, now_ms).notice_ms = deadline_ms

    def lost(self, node: str, reason: str, *, now_ms: int) -> None:
        """Mark a node as lost and revoke its leases at once. Workers calling from a lost node are ordered to exit."""
        member = self._members.node(node, now_ms)
        if member.lost_ms is None:
            member.lost_ms = now_ms
            self._members.losses += member.market is Market.SPOT
            self.unreachable(node, reason, now_ms=now_ms)

    def unreachable(self, node: str, reason: str, *, now_ms: int) -> None:
        """Revoke the leases of a node that died, by a report of the launcher or of the engine itself.

        The engine may be wrong: the node may call in again.
        """
        self.state.revoke(self._leases.of_node(node), node, reason, now_ms)
        self._members.clear_suspects(node)

    def tick(self, now_ms: int) -> None:
        """Revoke expired leases. If the coordinator itself was frozen, extend every lease by the length of the gap."""
        gap = 0 if self._ticked_ms is None else now_ms - self._ticked_ms
        self._ticked_ms = now_ms
        self.commits.preemption_ms = self._members.mean_life_ms(self.rules.preemption_ms, now_ms)
        if gap > self.rules.lease_ms // 2:
            self._leases.extend_all(gap)
            return
        late = self._leases.expired(now_ms)
        for number in late:
            lease = self._leases.open[number]
            self._members.workers[lease.worker].missed = (number, lease)
        for node in sorted({self._leases.open[number].node for number in late}):
            self.state.revoke(late & self._leases.of_node(node), node, MISSED, now_ms)
            late &= self._leases.open.keys()

    def takes_part(self, node: str) -> bool:
        """Return True if the node's workers may get work: the node is neither lost nor draining."""
        return self._members.takes_work(node)

    def demand(self, now_ms: int) -> Demand:
        """Return the waiting and in-flight work, as input for planning SP groups."""
        return self.state.demand(now_ms)

    def outlook(self, batch: int, *, now_ms: int) -> Outlook:
        """Return the rollouts of a batch that wait or are under way."""
        return outlook(self.state, batch, now_ms=now_ms, silence_ms=2 * self.rules.lease_ms)

    def live_nodes(self, now_ms: int, within_ms: int) -> list[str]:
        """Return the nodes with a lease or a recent call. Draining and lost nodes are left out."""
        return self._members.live_nodes(self._leases.nodes(), now_ms, within_ms)

    def rollout_nodes(self, now_ms: int, within_ms: int) -> list[str]:
        """Return those of `live_nodes` that are no nodes of the trainer."""
        return self._members.rollout_nodes(self._leases.nodes(), now_ms, within_ms)

    # --- after a crash ------------------------------------------------------------------------------------

    def restore_finished(self, result: Finished) -> None:
        """Restore a durable result."""
        self.state.finish(result)

    def restore_state(self, request: RequestId, step: int, blob: str) -> None:
        """Restore a durable in-flight state."""
        recovery.restore_state(self.state, request, step, blob)

    def restore_poisoned(self, request: RequestId, text: str) -> None:
        """Restore a poisoned request and its error text."""
        recovery.restore_poisoned(self.state, request, text)

    def restore_lease(self, record: LeaseRecord, *, now_ms: int) -> None:
        """Restore a lease. Its worker kept sampling while the coordinator was down."""
        recovery.restore_lease(self.state, record, now_ms)

    def begin_leases(self, first: int) -> None:
        """Continue lease numbers from `first`, above every number issued by an earlier coordinator."""
        self._leases.begin(first)

    def lease_record(self, number: int) -> LeaseRecord:
        """Return the facts for `restore_lease`. Raises KeyError if the lease has ended."""
        return self._leases.record(number)

    def lease_records(self) -> list[LeaseRecord]:
        """Return the records of all leases, oldest first."""
        return [self.lease_record(number) for number in sorted(self._leases.open)]

    def committed(self, requests: Iterable[RequestId]) -> list[tuple[RequestId, int, str]]:
        """Return the durable in-flight states of these requests: (request, step, blob)."""
        return recovery.committed_states(self.state, requests)

    def forget_all_weights(self) -> None:
        """Forget all weights: version numbers of a new lineage mean different weights."""
        self.weights.clear()

    def check(self, number: int | None = None) -> None:
        """Raise AssertionError if the state contradicts itself.

        Check a single open lease, or everything if `number` is None.
        """
        self.state.check(number)

    # --- orders -----------------------------------------------------------------------------------------

    def _order(
        self,
        member: WorkerRecord,
        now_ms: int,
        holds: tuple[WeightsKey, str] | None,
        kinds: Sequence[Kind],
        most_images: int | None,
    ) -> Reply:
        node = self._members.nodes[member.node]
        if self.stop_reason is not None:
            return Exit(reason=self.stop_reason)
        if node.lost_ms is not None:
            return Exit(reason="this node was given up")
        if node.deadline_ms is not None:
            return Drain(deadline_ms=node.deadline_ms)
        too_large, member.most_images = 0, most_images
        for kind in in_order(self._backlog, self.weights, holds, most_images):
            if kind not in kinds:
                continue
            entries, copy = self._backlog.next_batch(kind, most_images, self.weights.digests), False
            if entries is None and kind in (Kind.TRAIN, Kind.EVALUATE):
                entries = slowest_requests(
                    self._leases.open.values(), self.rules, kind, member.name, now_ms, most_images
                )
                copy = True
            if entries is None:
                too_large = too_large or self._backlog.too_large(kind, most_images)
                continue
            load = self.weights.order(entries[0].attempt.weights, holds)
            return load if load is not None else self._work(member, entries, now_ms, copy=copy)
        if too_large and member.warned_images != most_images:
            member.warned_images = most_images
            text = f"{member.name} has room for {most_images} images a forward pass, and what waits needs {too_large}"
            self.events.append(
                Warned(text=f"{text}; lower the shape of runtime, evaluation or exploration if nobody can take it")
            )
        return self.weights.order(self.live, holds) or Wait()

    def _work(self, member: WorkerRecord, entries: list[QueuedRequest], now_ms: int, *, copy: bool) -> Work:
        number, of = self._leases.issue_number(), entries[0].of
        lease = self.state.grant(number, member, entries, entries[0].attempt.step, now_ms, copy=copy)
        return Work(
            lease=number,
            attempts=tuple(entry.attempt for entry in entries),
            sampler=of.task.sampler,
            shape=of.task.shape,
            dtype=of.task.dtype,
            expires_ms=lease.expires_ms,
            commit_every=self.commits.steps_between(of, lease.first_step),
            images=tuple(entry.attempt.request in of.shown for entry in entries),
            scorer=of.task.scorer,
            latents=of.task.latents,
            no_score=self._hangs[of.task.scorer].reasons([entry.attempt.request for entry in entries]),
        )

    # --- leases -----------------------------------------------------------------------------------------

    def _lengthen_after_late_call(self, worker: str, number: int, now_ms: int) -> Lease | None:
        """Lengthen future leases (up to twice) after a late call for a lease revoked by missed heartbeats.

        Without longer leases, work whose single step takes longer than a lease would be revoked forever. Return the
        revoked lease, or None if the call is not about the worker's last revoked lease.
        """
        member = self._members.workers.get(worker)
        if member is None or member.missed is None or member.missed[0] != number:
            return None
        lease, member.missed = member.missed[1], None
        pace = lease.of.pace
        pace.observe_step(min(now_ms - lease.last_step_ms, 2 * self.rules.lease_of(pace) / STEPS_PER_LEASE))
        return lease

    # --- members ----------------------------------------------------------------------------------------

    def _pending(self, name: str) -> Reply:
        """Return the pending order for a node's workers. Every reply carries the order."""
        if self.stop_reason is not None:
            return Exit(reason=self.stop_reason)
        deadline_ms = self._members.nodes[name].deadline_ms
        return Wait() if deadline_ms is None else Drain(deadline_ms=deadline_ms)

    def _calling_worker(self, worker: str, name: str, boot: int, now_ms: int) -> WorkerRecord | None:
        """Return the calling worker, or None if a newer process has replaced the calling process."""
        node = self._members.call(name, now_ms)
        if not node.called:
            node.called = True
            self.events.append(NodeSeen(node=name, worker=worker))
        member = self._members.workers.get(worker)
        if member is None:
            member = self._members.workers[worker] = WorkerRecord(name=worker, node=name, boot=boot)
        elif boot < member.boot:
            return None
        elif boot > member.boot:
            # The worker process died and its node lives: blame the leased requests, not the cloud.
            self.state.revoke(member.leases, name, "its worker started anew", now_ms)
            suspects = member.suspects
            member.suspects = []
            member.restart(boot)
            for request, alone in reversed(suspects):
                self.state.record_crash(request, f"{worker} died while it made this", alone=alone)
        else:
            member.suspects = []
        return member
