"""The oracle: it decides from calls, answers and journal records alone which answers of a coordinator are right.

It sees every call with its answer, and every record that reaches the journal; it never reads the queue. From the
records (the durable format) it computes the leases like an independent reader of the file. A broken invariant raises
`Broken`.

An image in the simulator is the list of its steps: `trail[i]` = weights that made step i, times STEPS_MAX, plus i.
So a state resumed at the wrong version, or with a missing or repeated step, is detected.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STEPS_MAX = 64
SEEDS = 1_000_000
REWARDS = 100_000_000_000

Key = int
"""A request: lineage * SEEDS + seed. Seeds of the simulator are unique in a lineage."""
Trail = tuple[int, ...]


class Broken(AssertionError):
    """An invariant was broken."""


def key_of(raw: list[Any]) -> Key:
    return int(raw[1]) * SEEDS + int(raw[4])


def made_with(lineage: int, version: int, average: bool) -> int:
    """Return a number for the bytes of a set of weights: version 3 differs between lineages."""
    return lineage * 10_000 + 2 * version + average


def reward_of(key: Key, weights: int) -> float:
    return float(weights * REWARDS + key)


def whole(weights: int, steps: int) -> Trail:
    return tuple(range(weights * STEPS_MAX, weights * STEPS_MAX + steps))


@dataclass(slots=True, eq=False)
class Lease:
    """One issued lease, as seen from outside."""

    number: int
    worker: str
    node: str
    boot: int
    weights: int
    given: tuple[Key, ...]
    holds: set[Key]
    last_heartbeat_ms: int
    seq: int
    life: int
    """The life of the coordinator that issued it, and the pull that it answered."""
    over: bool = False
    """Whether it must be fenced from now on."""
    excused: bool = False
    """Whether it may be fenced: the coordinator may know of an event that ended it."""


class Oracle:
    """See the module docstring. `leases`: all leases by number; no number may be issued twice."""

    def __init__(self, lease_ms: int, steps: int) -> None:
        self.lease_ms, self.steps = lease_ms, steps
        self.now_ms = 0
        self.head: Mapping[str, Any] = {}
        self.leases: dict[int, Lease] = {}
        self.holders: dict[Key, list[Lease]] = {}
        self.wanted: dict[Key, int] = {}
        """Weights of the attempt, by request that was submitted and not withdrawn."""
        self.kind: dict[Key, tuple[str, int]] = {}
        self.finished: dict[Key, int] = {}
        self.states: dict[Key, dict[int, tuple[int, str]]] = {}
        """Committed steps of the attempt in the journal, with the weights and the blob's name."""
        self.acknowledged_finished: set[Key] = set()
        self.acknowledged_step: dict[Key, tuple[int, int]] = {}
        self.dead: set[tuple[str, int]] = set()
        self.faults: dict[Key, list[bool]] = {}
        self.poisonous: set[Key] = set()
        self.reported: set[Key] = set()
        self.lineage = 0
        self.born: dict[str, int] = {}
        """The newest process of each worker, even if it has not called yet."""
        self._noted: dict[int, bool] = {}
        """Leases with a record, and whether the record marks a speculative copy."""
        self._kept: set[int] | None = None
        self._written: dict[str, list[tuple[Key, int, int]]] = {"finish": [], "commit": []}
        self.life = 0
        self._forget_life()

    def _forget_life(self) -> None:
        """Forget the knowledge that a coordinator loses in a restart."""
        self.life += 1
        self.generation = -1
        self.snapshot_state: dict[str, str] = {}
        self.noticed: set[str] = set()
        self.boots: dict[str, int] = {}
        self.seqs: dict[tuple[str, int], int] = {}
        self.pulls: dict[tuple[str, int, int], Lease] = {}
        """The lease that answered a pull; a restarted coordinator issues a new one."""
        self.stopped = False

    # --- journal records ------------------------------------------------------------------------------

    def wrote(self, record: Mapping[str, Any], blobs: Mapping[str, Any]) -> None:
        """Note a record appended for the call that is being answered."""
        op = record["op"]
        if op == "commit":
            for raw, step, name in record["states"]:
                self._committed(key_of(raw), step, name, blobs[name])
        elif op == "finish":
            for result in record["results"]:
                self._finished(result, blobs)
        elif op == "lease":
            self._noted[record["number"]] = record["copy"]

    def wrote_anew(self, records: list[tuple[Mapping[str, Any], Any]]) -> None:
        """Note a rewrite of the journal; it is checked when its call is over."""
        self._kept = {record["number"] for record, _ in records if record["op"] == "lease"}

    def _judge_what_was_kept(self) -> None:
        kept, self._kept = self._kept, None
        for lease in self.leases.values():
            if kept is not None and lease.number in self._noted and lease.number not in kept and self._must_live(lease):
                raise Broken(f"the journal was written anew without lease {lease.number}")

    def _committed(self, key: Key, step: int, name: str, trail: Trail) -> None:
        weights = self._speaks_for(key, "commit")
        if trail != whole(weights, step):
            raise Broken(f"state of {key} at step {step} is {trail}, not made with {weights} throughout")
        self.states.setdefault(key, {})[step] = (weights, name)
        self._written["commit"].append((key, weights, step))

    def _finished(self, result: Mapping[str, Any], blobs: Mapping[str, Any]) -> None:
        key = key_of(result["request"])
        weights = self._speaks_for(key, "finish")
        if result["reward"] != reward_of(key, weights):
            raise Broken(f"{key} was finished with other weights than {weights}")
        name = result["trajectory"]
        if name is not None and blobs[name] != whole(weights, self.steps):
            raise Broken(f"trajectory of {key} is {blobs[name]}, not made with {weights} throughout")
        self.finished[key] = weights
        self._written["finish"].append((key, weights, self.steps))
        for lease in self.holders.pop(key, ()):
            lease.holds.discard(key)

    def _speaks_for(self, key: Key, what: str) -> int:
        """Return the weights of this request's attempt if the caller's lease on it is valid, else None."""
        number = self.head["lease"]
        lease = self.leases.get(number)
        if lease is None or lease.worker != self.head["worker"]:
            raise Broken(f"{what} of lease {number} accepted from {self.head['worker']}, who never had it")
        if lease.over:
            raise Broken(f"{what} of lease {number} accepted, which is over")
        if key not in self.wanted:
            raise Broken(f"{what} of {key} accepted, which nobody wants")
        if key in self.finished:
            raise Broken(f"{what} of {key} accepted, which is finished already")
        if key not in lease.holds:
            raise Broken(f"{what} of {key} accepted from lease {number}, which no longer holds it")
        return self.wanted[key]

    # --- answers --------------------------------------------------------------------------------------

    def before_call(self, head: Mapping[str, Any]) -> None:
        """Note a call before it is made."""
        self.head = head
        self._written["finish"].clear()
        self._written["commit"].clear()

    def after_answer(self, head: Mapping[str, Any], answer: Mapping[str, Any]) -> list[tuple[Key, int, int]]:
        """Check an answer. Return the facts that the caller may rely on once the answer is sent."""
        call = head["call"]
        judge = getattr(self, "_answered_" + call, None)
        if answer["do"] == "late":
            return []
        if judge is not None:
            judge(head, answer)
        if self._kept is not None:
            self._judge_what_was_kept()
        return list(self._written[call]) if call in self._written else []

    def refused(self, head: Mapping[str, Any]) -> None:
        """Note a call refused by a full disk: its effect is unknown until it is repeated."""
        lease = self.leases.get(head.get("lease", 0))
        if lease is not None:
            lease.excused = True

    def left(self, head: Mapping[str, Any], promised: list[tuple[Key, int, int]]) -> None:
        """Note that the answer is sent: from now on it must survive every crash."""
        for key, weights, step in promised:
            if self.wanted.get(key) != weights:
                continue
            if head["call"] == "finish":
                self.acknowledged_finished.add(key)
            elif self.acknowledged_step.get(key, (0, 0))[1] < step:
                self.acknowledged_step[key] = (weights, step)

    def _answered_pull(self, head: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        worker, node, boot, do = head["worker"], head["node"], head["boot"], answer["do"]
        newest = self.boots.get(worker, 0)
        if boot < newest:
            if do != "exit":
                raise Broken(f"{worker} is in its boot {newest}, and boot {boot} was answered {do}")
            return
        if boot > newest:
            self.boots[worker] = boot
            for lease in self.leases.values():
                if lease.worker == worker and lease.boot < boot:
                    lease.over = True
        seq = head["seq"]
        if seq < self.seqs.get((worker, boot), 0):
            if do != "wait" and (do != "exit" or self.born.get(worker) == boot):
                raise Broken(f"pull {seq} of {worker} is older than {self.seqs[worker, boot]}, and got {do}")
            return
        self.seqs[worker, boot] = seq
        for lease in self.leases.values():
            if lease.life < self.life and lease.worker == worker and lease.boot == boot and lease.seq >= seq:
                lease.excused = True  # the answer that named it may be lost with an earlier coordinator
        if self.stopped and do != "exit" and not (do == "work" and answer["lease"] in self.leases):
            raise Broken(f"told to stop, and {worker} got {do}")
        if (
            do == "exit"
            and not self.stopped
            and self.snapshot_state.get(node) != "lost"
            and self.born.get(worker) == boot
        ):
            raise Broken(f"{worker} was sent home: {answer['reason']}")
        again = self.pulls.get((worker, boot, seq))
        if do == "work":
            if again is not None and answer["lease"] == again.number:
                if again.over:
                    raise Broken(f"lease {again.number} is over and was given again")
                return
            if again is not None and self._must_live(again):
                raise Broken(f"pull {seq} of {worker} got {again.number}, and {answer['lease']} the second time")
            if self.snapshot_state.get(node) in ("lost", "draining") or node in self.noticed:
                raise Broken(f"{worker} got work while {node} is {self.snapshot_state.get(node, 'noticed')}")
            self._given(head, answer)
        else:
            if again is not None and self._must_live(again):
                raise Broken(f"pull {seq} of {worker} got lease {again.number}, and {do} the second time")
            if self.snapshot_state.get(node) == "lost" and do != "exit":
                raise Broken(f"{node} is lost and {worker} got {do}")
            if do in ("wait", "load_weights") and (node in self.noticed or self.snapshot_state.get(node) == "draining"):
                raise Broken(f"{node} drains and {worker} got {do}")

    def _given(self, head: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        number = answer["lease"]
        if number in self.leases:
            raise Broken(f"lease number {number} was given twice")
        attempts = answer["attempts"]
        keys = tuple(key_of(a[0]) for a in attempts)
        held = head["holds"]
        if not attempts or len(attempts) > answer["shape"] or len(set(keys)) != len(keys):
            raise Broken(f"lease {number} holds {keys}")
        if any(a[1] != held[:2] or a[2] != attempts[0][2] for a in attempts):
            raise Broken(f"lease {number} mixes versions or steps: {attempts} for a worker with {held}")
        if head["room"] is not None and answer["shape"] > head["room"]:
            raise Broken(f"shape {answer['shape']} was given to a worker with room for {head['room']}")
        weights = self.wanted.get(keys[0], -1)
        who = head["worker"], head["node"], head["boot"]
        lease = Lease(number, *who, weights, keys, set(keys), self.now_ms, head["seq"], self.life)
        for key, (raw, named, step, state) in zip(keys, attempts, strict=True):
            if self.wanted.get(key) != made_with(raw[1], *named):
                raise Broken(f"{key} was given out at {named}, and {self.wanted.get(key)} is wanted")
            if key in self.finished or key in self.reported:
                raise Broken(f"{key} is finished or reported, and was given out")
            if raw[5] not in head["kinds"]:
                raise Broken(f"{head['worker']} does not do {raw[5]}")
            if step and self.states.get(key, {}).get(step) != (weights, state):
                raise Broken(f"{key} goes on at step {step} from {state}, which was never written")
            if step < self.acknowledged_step.get(key, (0, 0))[1]:
                raise Broken(f"{key} goes on at step {step}, and {self.acknowledged_step[key][1]} was acknowledged")
            others = self.holders.setdefault(key, [])
            is_copy = self._noted.get(number)
            if is_copy is None:  # the disk was full, so it may be a copy
                for other in others:
                    other.excused = True
            elif not is_copy:
                for other in others:
                    if self._must_live(other):
                        raise Broken(f"{key} was taken from lease {other.number}, whose worker calls in")
                    other.over = True
                others.clear()
            others.append(lease)
        self.leases[number] = self.pulls[head["worker"], head["boot"], head["seq"]] = lease

    def _must_live(self, lease: Lease) -> bool:
        """Return whether no event can have ended this lease."""
        return bool(
            lease.holds
            and not lease.over
            and not lease.excused
            and self.now_ms - lease.last_heartbeat_ms < self.lease_ms
        )

    def _answered_heartbeat(self, head: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        if answer["do"] == "fenced":
            return self._fenced(answer["lease"])
        for number in head["leases"]:
            self._accepted(int(number), head, answer)
        if answer["do"] == "yield":
            self._gives_way(answer["lease"])
        return None

    def _gives_way(self, number: int) -> None:
        """Check that only exploration gives way, and only to a rollout that somebody wants."""
        kinds = {self.kind[key][0] for key in self.leases[number].given if key in self.kind}
        if kinds - {"explore"}:
            raise Broken(f"lease {number} on {kinds} was told to give way")
        unfinished = self.wanted.keys() - self.finished.keys() - self.reported
        if not any(self.kind[key][0] in ("train", "early") for key in unfinished):
            raise Broken(f"lease {number} was told to give way, and no rollout is wanted")

    def _answered_commit(self, head: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        if answer["do"] == "fenced":
            return self._fenced(answer["lease"])
        return self._accepted(head["lease"], head, answer, renewed=bool(self._written["commit"]))

    def _answered_finish(self, head: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        if answer["do"] == "fenced":
            return self._fenced(answer["lease"])
        self._accepted(head["lease"], head, None)
        mine = {key for key, _, _ in self._written["finish"]}
        left = {key_of(r["request"]) for r in head["results"]} & self.leases[head["lease"]].holds - mine
        if left:
            raise Broken(f"lease {head['lease']} was told that it is finished, and {left} was not taken")
        return None

    def _answered_give_back(self, head: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        if answer["do"] == "fenced":
            return self._fenced(answer["lease"])
        self._accepted(head["lease"], head, None)
        self.leases[head["lease"]].over = True
        return None

    _answered_fault = _answered_give_back

    def _accepted(
        self, number: int, head: Mapping[str, Any], answer: Mapping[str, Any] | None, *, renewed: bool = True
    ) -> None:
        """Note that the coordinator treats the lease as valid. `answer`: it may carry a pending order."""
        lease = self.leases.get(number)
        if lease is None or lease.worker != head["worker"]:
            raise Broken(f"{head['worker']} speaks for lease {number}, which it never had")
        if lease.over:
            raise Broken(f"{head['call']} of lease {number} accepted, which is over")
        if renewed:
            lease.last_heartbeat_ms = self.now_ms
        if answer is None:
            return
        node, do = head["node"], answer["do"]
        if do == "wait" and (node in self.noticed or self.snapshot_state.get(node) == "draining"):
            raise Broken(f"{node} drains, and {head['worker']} was not told")
        if do == "exit" and not self.stopped:
            raise Broken(f"{head['worker']} was sent home in the middle of its work")

    def _fenced(self, number: int) -> None:
        lease = self.leases.get(number)
        if lease is None:
            return
        if self._must_live(lease):
            raise Broken(f"lease {number} was fenced, and its worker calls in and nobody took it away")
        lease.over = True

    # --- workers and nodes ------------------------------------------------------------------------------

    def _answered_died(self, head: Mapping[str, Any], _answer: Mapping[str, Any]) -> None:
        for lease in self.leases.values():
            if lease.worker == head["worker"] and lease.boot == head["boot"]:
                lease.excused = True
                # The coordinator may not know a newer boot, or one that never called.
                lease.over = lease.over or self.boots.get(lease.worker) == lease.boot

    def _answered_node_lost(self, head: Mapping[str, Any], _answer: Mapping[str, Any]) -> None:
        self._gone(head["node"])

    def _answered_notice(self, head: Mapping[str, Any], _answer: Mapping[str, Any]) -> None:
        self.noticed.add(head["node"])

    def _gone(self, node: str) -> None:
        for lease in self.leases.values():
            if lease.node == node:
                lease.over = True

    def capacity_received(self, generation: int, nodes: Mapping[str, str]) -> None:
        """Note a snapshot that reached the coordinator: node -> ready, draining, lost."""
        if generation < self.generation:
            return
        self.generation = generation
        for node, state in nodes.items():
            if state == "lost" and self.snapshot_state.get(node) != "lost":
                self._gone(node)
            self.snapshot_state[node] = state

    def slept(self, gap_ms: int) -> None:
        """Note a freeze of the coordinator: a long freeze extends the leases."""
        if gap_ms > self.lease_ms // 2:
            for lease in self.leases.values():
                lease.last_heartbeat_ms += gap_ms

    def process_died(self, worker: str, boot: int) -> None:
        """Note that a process died or was replaced as dead: that counts against all requests of its leases."""
        self.dead.add((worker, boot))

    def faulted(self, keys: list[Key]) -> None:
        guilty = bool(self.poisonous & set(keys))
        for key in keys:
            self.faults.setdefault(key, []).append(guilty)

    def _came_down_with(self, key: Key) -> int:
        """Return the workers that this request crashed. An innocent one counts twice at most, then it runs alone."""
        held = [x for x in self.leases.values() if key in x.given and (x.worker, x.boot) in self.dead]
        alone = {(x.worker, x.boot) for x in held if not self.poisonous & set(x.given)}
        beside = {(x.worker, x.boot) for x in held} - alone
        faults = self.faults.get(key, [])
        return len(alone) + faults.count(False) + min(2, len(beside) + faults.count(True))

    def poisoned(self, keys: set[Key]) -> None:
        """Check the requests that the coordinator reports as poisoned."""
        for key in keys - self.reported:
            if key not in self.poisonous and self._came_down_with(key) < 3:
                raise Broken(f"{key} is reported, and only {self._came_down_with(key)} workers came down with it")
            if key in self.finished:
                raise Broken(f"{key} is reported and finished")
            for lease in self.holders.pop(key, ()):
                lease.over = True
        self.reported = keys

    # --- the trainer ------------------------------------------------------------------------------------

    def _answered_submit(self, head: Mapping[str, Any], _answer: Mapping[str, Any]) -> None:
        task = head["task"]
        for raw in task["requests"]:
            self._submitted(raw, task["weights"])

    def _submitted(self, raw: list[Any], named: list[Any]) -> None:
        key, weights = key_of(raw), made_with(raw[1], *named)
        if key in self.finished or self.wanted.get(key) == weights:
            return
        self._forget(key)
        self.wanted[key] = weights
        self.kind[key] = (raw[5], raw[2])

    def _answered_withdraw(self, head: Mapping[str, Any], _answer: Mapping[str, Any]) -> None:
        for key in [key for key, (kind, batch) in self.kind.items() if [kind, batch] in head["batches"]]:
            self._forget(key)

    def _answered_hello(self, head: Mapping[str, Any], _answer: Mapping[str, Any]) -> None:
        if head["lineage"] != self.lineage:
            self.lineage = head["lineage"]
            for key in list(self.wanted):
                self._forget(key)

    def _answered_stop(self, _head: Mapping[str, Any], _answer: Mapping[str, Any]) -> None:
        self.stopped = True

    def _forget(self, key: Key) -> None:
        self.wanted.pop(key, None)
        self.kind.pop(key, None)
        self.finished.pop(key, None)
        self.states.pop(key, None)
        self.acknowledged_step.pop(key, None)
        self.acknowledged_finished.discard(key)
        self.reported.discard(key)
        for lease in self.holders.pop(key, ()):
            lease.holds.discard(key)

    # --- crashes ------------------------------------------------------------------------------------------

    def wiped(self) -> None:
        """Note that the coordinator's node is lost with its disk: earlier answers do not bind the next one."""
        for key in list(self.wanted):
            self._forget(key)
        self.lineage = 0

    def crashed(self, records: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Check after a crash that the surviving records contain everything acknowledged."""
        acknowledged, steps = self.acknowledged_finished, self.acknowledged_step
        clear = {n: x for n, x in self.leases.items() if not x.over and not x.excused}
        self.wanted, self.kind, self.finished, self.states, self.reported = {}, {}, {}, {}, set()
        self.acknowledged_finished, self.acknowledged_step, self.holders, self.lineage = set(), {}, {}, 0
        self._forget_life()
        left: dict[int, Lease] = {}
        for record, _ in records:
            op = record["op"]
            if op == "submit":
                for raw in record["task"]["requests"]:
                    self._submitted(raw, record["task"]["weights"])
            elif op == "finish":
                for result in record["results"]:
                    key = key_of(result["request"])
                    if key in self.wanted:
                        self.finished[key] = self.wanted[key]
            elif op == "commit":
                for raw, step, name in record["states"]:
                    key = key_of(raw)
                    if key in self.wanted and key not in self.finished:
                        self.states.setdefault(key, {})[step] = (self.wanted[key], name)
            elif op == "hello":
                self._answered_hello(record, {})
            elif op == "withdraw":
                self._answered_withdraw(record, {})
            elif op == "poison":
                self.reported.add(key_of(record["request"]))
            elif op == "lease" and record["number"] in self.leases:
                lease = left[record["number"]] = self.leases[record["number"]]
                for key in map(key_of, record["requests"]):
                    others = self.holders.setdefault(key, [])
                    if not record["copy"]:
                        others.clear()
                    others.append(lease)
        for key in acknowledged:
            if key in self.wanted and key not in self.finished:
                raise Broken(f"{key} was acknowledged as finished, and the crash lost it")
        for key, (weights, step) in steps.items():
            if key in self.finished or self.wanted.get(key) != weights:
                continue
            if step > max(self.states.get(key, {0: None})):
                raise Broken(f"step {step} of {key} was acknowledged, and the crash lost it")
        self.acknowledged_finished = acknowledged & self.finished.keys()
        self.acknowledged_step = {
            k: s for k, s in steps.items() if self.wanted.get(k) == s[0] and k not in self.finished
        }
        self._settle_leases(left, clear)

    def _settle_leases(self, left: Mapping[int, Lease], clear: Mapping[int, Lease]) -> None:
        """Keep the leases whose record survived; the others are fenced, which costs only steps."""
        for lease in left.values():
            self.boots[lease.worker] = max(self.boots.get(lease.worker, 0), lease.boot)
            process = lease.worker, lease.boot
            self.seqs[process] = max(self.seqs.get(process, 0), lease.seq)
        for lease in self.leases.values():
            lease.over = lease.number not in left
            lease.holds = set()
        for key in list(self.holders):
            if key in self.finished or key in self.reported:
                del self.holders[key]
                continue
            self.holders[key] = [x for x in self.holders[key] if self.wanted.get(key) == x.weights]
            for lease in self.holders[key]:
                lease.holds.add(key)
        for number, lease in left.items():
            alone = all(len(self.holders.get(key, ())) < 2 for key in lease.given)
            lease.excused = number not in clear or not alone
            lease.last_heartbeat_ms = self.now_ms
            if not lease.holds:
                lease.over = True
