"""Planted bugs of a node: in its agent, its guard, its coordinator and its access to the bucket."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.coordinator import coordinator as coordinators
from engine.coordinator import journal as journals
from engine.coordinator.journal import Journal
from engine.coordinator.rights import Rights
from engine.coordinator.run_state import RunState
from engine.coordinator.weight_book import WeightBook
from engine.events import Capacity, NodeState
from engine.node import spend_guard
from engine.node.agent_keeper import AgentKeeper
from engine.node.alone import Alone
from engine.node.child import Deaths
from engine.protocol.codec import pack
from engine.protocol.request import Reply
from engine.queue.queue import Queue
from engine.storage import bucket
from launcher.decide import stopping
from launcher.decide.facts import Facts, Wanted
from launcher.provision.sky.node_link import NodeLink
from tests.mutants.faults import Fault
from tests.mutants.planted_bug import changed, everywhere

FAULTS: dict[str, Fault] = {}


def _fault(name: str, forgets: str, found_by: str, *patches: tuple[Any, str, Any]) -> None:
    FAULTS[name] = Fault(name=name, forgets=forgets, patches=patches, found_by=found_by)


# --- spend of a node without a controller


def _never(self: Alone) -> str:
    return ""


_fault(
    "node_left_alone_waits_for_its_spend_deadline",
    "that a node without work and without a controller is still paid for",
    "tests/engine/test_spend_deadline.py::test_a_finished_node_without_a_controller_copies_its_logs_and_ends_after_ten_minutes",
    (Alone, "why_ended", _never),
)


def _whoever_works(self: Alone) -> bool:
    return False


def _work_is_enough(self: Alone, real: Any = Alone.why_ended) -> str:
    why: str = real(self)
    return "" if why.startswith("no coordinator") else why


_fault(
    "node_without_a_coordinator_waits_for_its_spend_deadline",
    "that a node whose trainer is lost calls in vain, and nobody without a controller replaces the trainer",
    "tests/engine/test_spend_deadline.py::test_a_node_without_controller_and_coordinator_ends_after_ten_minutes[-1-1-70.0]",
    (Alone, "why_ended", _work_is_enough),
)

_fault(
    "working_node_is_ended_without_a_controller",
    "that an agent which works needs no controller",
    "tests/engine/test_spend_deadline.py::test_a_node_stays_without_a_controller_while_its_agent_works",
    (Alone, "_agent_runs", _whoever_works),
)

_fault(
    "guard_asks_once",
    "that a machine may still be there after it was ended",
    "tests/engine/test_spend_deadline.py::test_the_guard_repeats_the_termination_while_the_instance_exists",
    (spend_guard, "AGAIN_SECONDS", 1e9),
)

# --- processes that die repeatedly


def _forgive_all(self: Deaths, how: str) -> None:
    self.exits = [how]


_fault(
    "late_death_is_forgiven",
    "the deaths of a process that lived for a while each time",
    "tests/engine/test_agent.py::test_three_equal_exits_without_progress_end_the_node_at_any_interval[25]",
    (Deaths, "add", _forgive_all),
)


def _never_forgive(self: Deaths, how: str) -> None:
    self.exits.append(how)


_fault(
    "progress_forgives_nothing",
    "that a node which makes progress is worth another start",
    "tests/engine/test_agent.py::test_a_process_is_restarted_without_limit_while_its_node_makes_progress",
    (Deaths, "add", _never_forgive),
)


def _always_worth_another(facts: Facts, slot: Any) -> None:
    return None


_fault(
    "slot_is_filled_for_ever",
    "how the last nodes of a slot ended",
    "tests/launcher/cluster/test_reconcile.py::test_a_slot_with_three_equal_failures_stays_empty_and_gives_the_reason",
    everywhere(stopping.is_given_up, _always_worth_another),
)


def _no_limit(facts: Facts, wanted: Wanted) -> None:
    return None


_fault(
    "standstill_is_paid_for",
    "how long an iteration was predicted to take",
    "tests/launcher/cluster/test_moving.py::test_a_run_whose_trainer_answers_without_progress_ends",
    (stopping, "_standstill", _no_limit),
)

# --- secrets on a node's disk

_fault(
    "secrets_are_kept_in_the_nodes_file",
    "that a job's secrets are written nowhere",
    "tests/engine/test_remote_console.py::test_secrets_reach_the_agent_and_no_file_and_its_files_are_private",
    (
        AgentKeeper,
        "run",
        changed(
            AgentKeeper.run,
            'self._write("node.json", spec)',
            'self._write("node.json", {**spec, "secrets": dict(secrets)})',
        ),
    ),
)
_fault(
    "agents_log_is_readable_by_all",
    "that other users of a node may not read what an agent prints",
    "tests/engine/test_remote_console.py::test_secrets_reach_the_agent_and_no_file_and_its_files_are_private",
    (AgentKeeper, "_start", changed(AgentKeeper._start, "0o600", "0o644")),
)

# --- access to the bucket, and rights of roles


def _checks_no_region(name: str) -> None:
    return None


_fault(
    "bucket_is_in_the_default_region",
    "that a bucket may be outside us-east-1",
    "tests/engine/test_store.py::test_logs_of_both_roles_are_signed_for_the_region_of_the_bucket",
    (bucket, "region_of", _checks_no_region),
)


def _any_role(self: Rights, token: str, head: Mapping[str, Any]) -> None:
    self.check(token, "/call")


_fault(
    "spot_node_may_publish",
    "which role's token a call bears",
    "tests/engine/test_server.py::test_a_spot_node_may_not_change_the_run",
    (Rights, "check_call", _any_role),
)

_fault(
    "spot_node_gets_a_tunnel",
    "that only a trainer has a coordinator",
    "tests/launcher/cluster/test_node_link.py::test_a_spot_node_has_no_tunnel",
    (NodeLink, "_tunnel", changed(NodeLink._tunnel, 'spec and spec.role == "trainer"', "spec")),
)

# --- leases and drains


def _heartbeat_of_anybody(self: Queue, worker: str, node: str, leases: Mapping[int, int], *, now_ms: int) -> Reply:
    owned = {number: self.state.leases.open[number].worker for number in leases if number in self.state.leases.open}
    return _heartbeat(self, next(iter(owned.values()), worker), node, leases, now_ms=now_ms)


_heartbeat = Queue.heartbeat
_fault(
    "heartbeat_with_another_workers_lease",
    "whose lease is renewed",
    "tests/engine/test_queue.py::test_a_worker_cannot_renew_another_workers_lease",
    (Queue, "heartbeat", _heartbeat_of_anybody),
)


def _commit_of_anybody(self: Queue, worker: str, node: str, number: int, states: Any, **more: Any) -> Reply:
    lease = self.state.leases.open.get(number)
    return _commit(self, worker if lease is None else lease.worker, node, number, states, **more)


_commit = Queue.commit
_fault(
    "commit_with_another_workers_lease",
    "whose lease the committed state belongs to",
    "tests/engine/test_queue.py::test_a_worker_cannot_commit_under_another_workers_lease",
    (Queue, "commit", _commit_of_anybody),
)


def _drains_for_good(self: Queue, snapshot: Capacity, *, now_ms: int) -> None:
    before = {fact.node: self.state.members.node(fact.node, now_ms).drain_ms for fact in snapshot.nodes}
    _capacity(self, snapshot, now_ms=now_ms)
    for fact in snapshot.nodes:
        if fact.state is NodeState.READY:
            self.state.members.node(fact.node, now_ms).drain_ms = before[fact.node]


_capacity = Queue.capacity
_fault(
    "drain_that_was_called_off_stays",
    "that a cloud may call off what it announced",
    "tests/engine/test_queue.py::test_a_cancelled_drain_ends",
    (Queue, "capacity", _drains_for_good),
)

# --- data after a power cut


def _write_without_fsync(self: WeightBook, weights: Any, data: bytes) -> None:
    self._path(weights).write_bytes(data)


_fault(
    "published_bytes_are_not_durable",
    "that the record of a publish must not outlive its bytes",
    "tests/engine/test_coordinator.py::test_published_weights_survive_a_power_cut",
    (WeightBook, "write", _write_without_fsync),
)


def _recover_without_sync(journal: Journal, *more: Any) -> RunState:
    sync = journal.sync
    journal.sync = lambda: None  # type: ignore[method-assign]
    try:
        return _recover(journal, *more)
    finally:
        journal.sync = sync  # type: ignore[method-assign]


_recover = coordinators.recover
_fault(
    "start_record_is_not_durable",
    "that the next coordinator must know which lease numbers this one gave",
    "tests/engine/test_coordinator.py::test_no_lease_number_is_issued_twice_after_a_power_cut_at_start",
    (coordinators, "recover", _recover_without_sync),
)


def _sync_nothing(self: Journal) -> None:
    return None


_fault(
    "journal_is_not_synced",
    "that written is not yet durable",
    "tests/engine/test_journal.py::test_synced_records_survive_a_power_cut",
    (Journal, "sync", _sync_nothing),
)


def _rewrite_without_fsync(self: Journal, records: Sequence[tuple[dict[str, Any], dict[str, bytes]]]) -> None:
    fresh = self._path.with_suffix(".new")
    with fresh.open("wb") as file:
        for record, blobs in records:
            body = pack(record, blobs)
            file.write(journals._HEAD.pack(journals._MAGIC, len(body), journals.zlib.crc32(body)) + body)
    fresh.replace(self._path)
    self._file.close()
    self._blobs = {}
    self._file = self._open()
    self._records = []


_fault(
    "journal_is_rewritten_without_fsync",
    "that a new journal must be durable before it takes the old one's name",
    "tests/engine/test_journal.py::test_a_rewrite_and_later_records_survive_a_power_cut",
    (Journal, "rewrite", _rewrite_without_fsync),
)


def _no_folder_sync(folder: Any) -> None:
    return None


_fault(
    "journals_new_name_is_not_durable",
    "that a rename is durable only with its folder",
    "tests/engine/test_journal.py::test_a_rewrite_and_later_records_survive_a_power_cut",
    (journals, "sync_folder", _no_folder_sync),
)
