"""Planted bugs that tests with real processes find and tests of one process miss, each with the tests that find it.

    python -m tests.mutants.processes                        plant each bug in turn and run its tests
    python -m tests.mutants.processes NAME ... --json        only these; the last line is one JSON object
    python -m tests.mutants.processes --matrix FILE ...      run whole test files with each bug, into one JSON file
    python -m tests.mutants.processes --own FILE ...         show that tests of one process miss the bugs
    python -m tests.mutants.processes --undisturbed          show that the named tests pass without a bug

A bug is a change of a module's source in every process that a test starts, and never in pytest's own process
(process_plugin.py). The bugs of the other catalogues are planted in pytest's process, so they say nothing about these
tests. Tests of one process miss the bugs of this list: with all bugs planted in pytest's own process and in no other,
the files of `missed_in_process_by` pass.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.process_runs import QUICK, ROOT, Edit, TestRun, run_tests

RESULTS = ROOT / "tests/benchmarks/results/process_bugs.json"

FOUND, MISSED = "found", "MISSED"
"""The first word of a bug's line."""

PROCESSES = ("agent", "guard", "worker", "coordinator", "trainer", "rank", "controller", "starter", "console", "ray")

LIMIT_SECONDS = 600.0
"""Longest time of the tests of one bug."""

SHORTEST_TIMEOUT_SECONDS, TIMES_SLOWER = 30.0, 5.0
"""A test of a matrix fails if it takes this many times as long as the slowest test of its file without a bug, and never
earlier than after this time. Most tests wait for a minute or two before they fail."""


@dataclass(frozen=True, kw_only=True)
class ProcessBug:
    """A bug of one process.

    `forgets`: the missing behaviour. `process`: the process that misbehaves. `found_by`: node ids of tests that fail
    with the bug, the cheapest first. `missed_in_process_by`: test files that pass with the bug in pytest's own process.
    `chosen_by_reader`: chosen from the product's code alone, before its tests were read.
    """

    name: str
    process: str
    module: str
    old: str
    new: str
    forgets: str
    found_by: tuple[str, ...]
    missed_in_process_by: tuple[str, ...]
    chosen_by_reader: bool = False

    @property
    def edit(self) -> Edit:
        return Edit(module=self.module, old=self.old, new=self.new)

    @property
    def digest(self) -> str:
        """Return a name of the change. Results of another change are old."""
        return hashlib.sha256(f"{self.module}\n{self.old}\n{self.new}".encode()).hexdigest()[:12]

    @property
    def file(self) -> Path:
        return ROOT / f"{self.module.replace('.', '/')}.py"


BUGS: dict[str, ProcessBug] = {}

AGENT_TESTS = "tests/engine/test_agent.py"
CLOUD_TESTS = "tests/engine/test_node_agent_on_cloud.py"
GUARD_TESTS = "tests/engine/test_spend_deadline.py"
CONFORMANCE = "tests/conformance/test_conformance.py"
STARTER_TESTS = "tests/launcher/cluster/test_agent_starter.py"
RUNS = "tests/launcher/cluster/test_runs.py"
LINK_TESTS = "tests/launcher/cluster/test_node_link.py"
CONSOLE_TESTS = "tests/engine/test_remote_console.py"
SURVIVAL = "tests/end_to_end/test_survival.py"
RANKS = "tests/end_to_end/test_rank_survival.py"
SAMPLING = "tests/end_to_end/test_rank_sampling.py"


def _bug(
    name: str,
    process: str,
    module: str,
    old: str,
    new: str,
    *,
    forgets: str,
    found_by: Sequence[str],
    missed: Sequence[str],
    reader: bool = False,
) -> None:
    BUGS[name] = ProcessBug(
        name=name,
        process=process,
        module=module,
        old=old,
        new=new,
        forgets=forgets,
        found_by=tuple(found_by),
        missed_in_process_by=tuple(missed),
        chosen_by_reader=reader,
    )


# --- the node's agent

_bug(
    "agent_ignores_a_notice",
    "agent",
    "engine.node.agent",
    "if deadline_ms is None or deadline_ms == self.noticed_ms:",
    "if deadline_ms is None or deadline_ms != self.noticed_ms:",
    forgets="that a node with a preemption notice takes no new work",
    found_by=[f"{AGENT_TESTS}::test_a_node_under_notice_commits_returns_its_leases_and_pulls_no_more"],
    missed=[AGENT_TESTS],
)
_bug(
    "agent_keeps_a_notice_to_itself",
    "agent",
    "engine.node.agent",
    "        threading.Thread(target=self._send_notice, args=(client, deadline_ms), daemon=True).start()",
    "        pass",
    forgets="to send a preemption notice to the coordinator",
    found_by=[f"{CLOUD_TESTS}::test_a_preemption_notice_drains_the_node_and_reaches_the_coordinator"],
    missed=[AGENT_TESTS, CLOUD_TESTS],
)
_bug(
    "frozen_process_is_left_alone",
    "agent",
    "engine.node.agent",
    "                self.process.kill()\n                self.process.join()\n                frozen = True",
    "                return None",
    forgets="to kill a process that is frozen",
    found_by=[
        f"{CONFORMANCE}::test_a_worker_that_stays_frozen_is_replaced_by_its_node[local]",
        f"{CONFORMANCE}::test_every_node_that_came_back_works[local]",
    ],
    missed=[AGENT_TESTS],
)
_bug(
    "ending_agent_leaves_its_processes",
    "agent",
    "engine.node.agent",
    "        agent.stop()",
    "        pass",
    forgets="to kill the node's processes when the agent ends",
    found_by=[f"{CLOUD_TESTS}::test_a_terminated_agent_leaves_no_process_but_the_guard[True]"],
    missed=[CLOUD_TESTS],
)
_bug(
    "ending_agent_kills_its_guard",
    "agent",
    "engine.node.agent",
    "if process.status() == psutil.STATUS_ZOMBIE or process.pid == self.guard.pid:",
    "if process.status() == psutil.STATUS_ZOMBIE:",
    forgets="that the guard outlives the agent",
    found_by=[f"{CLOUD_TESTS}::test_a_terminated_agent_leaves_no_process_but_the_guard[False]"],
    missed=[CLOUD_TESTS],
)
_bug(
    "two_agents_share_a_node",
    "agent",
    "engine.node.agent",
    "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)",
    forgets="that a node has one agent",
    found_by=[f"{CLOUD_TESTS}::test_a_second_agent_of_an_instance_exits_and_leaves_the_first_alone"],
    missed=[AGENT_TESTS],
)
_bug(
    "guard_is_not_watched",
    "agent",
    "engine.node.agent",
    "            if self.on_cloud:\n                self.guard.keep_alive()\n",
    "",
    forgets="to start the guard again after the guard died",
    found_by=[f"{CLOUD_TESTS}::test_a_guard_that_dies_beside_its_agent_is_started_again"],
    missed=[CLOUD_TESTS],
)
_bug(
    "instance_of_another_setup_is_used",
    "agent",
    "engine.node.agent",
    "if (refusal := other_setup(self.spec)) is not None:",
    "if (refusal := other_setup(self.spec)) is not None and not self.on_cloud:",
    forgets="to refuse an instance that was set up for something else",
    found_by=[f"{CLOUD_TESTS}::test_an_instance_with_another_setup_is_refused_with_a_reason"],
    missed=[CLOUD_TESTS],
)
_bug(
    "on_demand_node_polls_for_a_notice",
    "agent",
    "engine.node.agent",
    'if self.spec.cloud != "local" and self.spec.market == Market.SPOT:',
    'if self.spec.cloud != "local":',
    forgets="that only spot nodes are preempted",
    found_by=[f"{CLOUD_TESTS}::test_an_on_demand_node_does_not_poll_for_a_notice"],
    missed=[CLOUD_TESTS],
)
_bug(
    "guard_starts_after_the_checks",
    "agent",
    "engine.node.agent",
    "        agent.guard.keep_alive()  # start first: a machine that refuses its work needs a guard too",
    "        pass",
    forgets="that a machine which refuses its work is paid for too",
    found_by=[f"{CLOUD_TESTS}::test_a_node_that_refuses_its_work_deletes_itself_without_a_controller"],
    missed=[CLOUD_TESTS],
)
_bug(
    "agent_leaves_the_deadline_to_its_guard",
    "agent",
    "engine.node.agent",
    "return left_ms is not None and left_ms <= 0",
    "return left_ms is not None and left_ms <= -3_600_000",
    forgets="that the agent itself ends the node at the spend deadline",
    found_by=[f"{CLOUD_TESTS}::test_a_node_past_its_spend_deadline_deletes_itself_and_records_why"],
    missed=[CLOUD_TESTS, GUARD_TESTS],
)

# --- every process of a node

_bug(
    "processes_survive_their_agent",
    "agent",
    "engine.node.child",
    "        threading.Thread(target=_follow, args=(parent,), daemon=True).start()",
    "        pass",
    forgets="that a node's processes end with a killed agent",
    found_by=[f"{CONFORMANCE}::test_a_node_killed_during_a_lease_loses_no_result[local-agent]"],
    missed=[AGENT_TESTS],
    reader=True,
)
_bug(
    "frozen_process_hides_the_agents_death",
    "worker",
    "engine.node.child",
    "    while os.getppid() == before:",
    "    while True:",
    forgets="that a frozen sibling may hold the pipe open which reports the agent's death",
    found_by=[f"{AGENT_TESTS}::test_a_worker_ends_with_its_agent_while_another_worker_is_frozen"],
    missed=[AGENT_TESTS],
)

# --- the guard of a cloud's instance

_bug(
    "guard_bears_the_nodes_mark",
    "guard",
    "engine.node.spend_guard",
    "environment = {name: value for name, value in os.environ.items() if name != MARK}",
    "environment = dict(os.environ)",
    forgets="that a cleanup kills whatever bears the node's mark",
    found_by=[f"{CLOUD_TESTS}::test_a_terminated_agent_leaves_no_process_but_the_guard[False]"],
    missed=[GUARD_TESTS, CLOUD_TESTS],
    reader=True,
)
_bug(
    "two_guards_of_a_folder",
    "guard",
    "engine.node.spend_guard",
    "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)",
    forgets="that a folder has one guard",
    found_by=[f"{GUARD_TESTS}::test_a_dead_or_frozen_guard_is_replaced_and_a_second_guard_exits[9]"],
    missed=[GUARD_TESTS],
)
_bug(
    "frozen_guard_is_left_alone",
    "guard",
    "engine.node.spend_guard",
    "            if _is_stopped(self._process.pid):",
    "            if False:",
    forgets="that a frozen guard ends no instance",
    found_by=[f"{GUARD_TESTS}::test_a_dead_or_frozen_guard_is_replaced_and_a_second_guard_exits[19]"],
    missed=[GUARD_TESTS],
)

# --- workers

_bug(
    "worker_is_not_present",
    "worker",
    "engine.entrypoints.processes",
    "    threading.Thread(target=_transport(spec).stay_present, args=presence, daemon=True).start()\n    ready.set()",
    "    ready.set()",
    forgets="the connection whose end reports a worker's death at once",
    found_by=[f"{AGENT_TESTS}::test_two_workers_fetch_weights_once_and_a_restarted_worker_reuses_them"],
    missed=[AGENT_TESTS, "tests/engine/test_transport.py"],
    reader=True,
)
_bug(
    "worker_does_not_hear_its_agent",
    "worker",
    "engine.entrypoints.processes",
    "    worker = make_worker(spec, number, transport, source, drain.is_set)",
    "    worker = make_worker(spec, number, transport, source, lambda: False)",
    forgets="that the agent tells its workers of a notice before the coordinator does",
    found_by=[f"{AGENT_TESTS}::test_a_node_under_notice_commits_returns_its_leases_and_pulls_no_more"],
    missed=[AGENT_TESTS],
)
_bug(
    "each_worker_fetches_its_own_weights",
    "worker",
    "engine.entrypoints.processes",
    "    source = NodeWeights(memory, download)",
    "    source = NodeWeights(NodeMemory.make(Path(spec.folder)), download)",
    forgets="that the workers of a node share one copy of the weights",
    found_by=[f"{AGENT_TESTS}::test_two_workers_fetch_weights_once_and_a_restarted_worker_reuses_them"],
    missed=[AGENT_TESTS, "tests/engine/test_node_weights.py"],
)
_bug(
    "workers_keep_a_dead_store",
    "worker",
    "engine.node.node_store",
    "is_current=lambda: read_note(file) == joined",
    "is_current=lambda: True",
    forgets="that the store in which a group meets may have died",
    found_by=[f"{AGENT_TESTS}::test_a_node_whose_store_dies_starts_a_new_one_and_its_workers_regroup"],
    missed=[AGENT_TESTS],
)
_bug(
    "scorers_socket_of_the_dead_stays",
    "worker",
    "engine.pool.server",
    "    (folder / name).unlink(missing_ok=True)",
    "    pass",
    forgets="that a killed scoring process leaves its socket behind",
    found_by=["tests/engine/test_pool.py::test_a_scorer_that_hangs_ends_its_process"],
    missed=["tests/engine/test_pool.py"],
)
_bug(
    "hanging_scorer_lives_on",
    "worker",
    "engine.pool.server",
    "                os._exit(EXIT_SCORER_HANGS)",
    "                continue",
    forgets="to end a scoring process whose scorer hangs",
    found_by=["tests/engine/test_pool.py::test_a_scorer_that_hangs_ends_its_process"],
    missed=["tests/engine/test_pool.py"],
)

# --- the coordinator

_bug(
    "restarted_coordinator_forgets_its_journal",
    "coordinator",
    "engine.entrypoints.processes",
    '            folder / "coordinator",\n            clock=spec.clock.clock(),',
    '            folder / f"coordinator-{os.getpid()}",\n            clock=spec.clock.clock(),',
    forgets="that a restarted coordinator continues from the journal of the last one",
    found_by=[f"{CONFORMANCE}::test_a_coordinator_killed_during_leases_loses_no_result[local]"],
    missed=["tests/engine/test_server.py", "tests/engine/test_journal.py"],
)

# --- the trainer

_bug(
    "checkpoints_stay_on_the_trainers_node",
    "trainer",
    "engine.entrypoints.processes",
    "when_there_is_room(lambda: CheckpointStore(spec.store, spec.node), print)",
    'when_there_is_room(lambda: CheckpointStore(f"file://{spec.folder}/store", spec.node), print)',
    forgets="that a new trainer node continues from the checkpoints of the lost one",
    found_by=[f"{SURVIVAL}::test_a_lost_trainer_node_resumes_from_its_checkpoint_in_a_new_lineage[SIGKILL]"],
    missed=["tests/engine/test_loop.py"],
)

# --- ranks of the trainer

_bug(
    "lost_rank_is_a_fault_of_the_others",
    "rank",
    "engine.node.rank_rendezvous",
    "        sys.exit(EXIT_TORN)",
    "        sys.exit(1)",
    forgets="that a rank is not at fault when another rank was lost",
    found_by=[f"{RANKS}::test_killed_and_frozen_ranks_change_no_batch_and_no_weight"],
    missed=["tests/engine/test_rank_rendezvous.py"],
)
_bug(
    "further_node_never_learns_of_the_end",
    "rank",
    "engine.node.trainer_nodes",
    "            if new.is_over:\n                return\n",
    "",
    forgets="that a further node of the trainer ends with the run",
    found_by=[f"{RANKS}::test_two_nodes_with_a_rank_each_train_what_two_ranks_of_one_node_train"],
    missed=["tests/engine/test_trainer_nodes.py"],
)

_bug(
    "full_ranks_sample_with_the_trained_weights",
    "rank",
    "engine.trainer.shards",
    "        if old is not None:\n",
    "        if old is not None and order.key is None:\n",
    forgets="that ranks with a gathered copy sample a batch with the weights from before its first step",
    found_by=[f"{SAMPLING}::test_ranks_that_all_sample_train_the_bits_of_rank_0_sampling_alone[2-full]"],
    missed=["tests/engine/test_rank_threads.py"],
)
_bug(
    "sampling_rank_ends_its_lease_first",
    "rank",
    "engine.trainer.rank_sampling",
    "interrupted=is_called if self._may_stop else lambda: False",
    "interrupted=lambda: False",
    forgets="that an order of rank 0 ends the sampling of a rank at the next denoising step",
    found_by=[f"{SAMPLING}::test_an_order_ends_the_sampling_of_a_rank_within_a_denoising_step[full]"],
    missed=["tests/engine/test_rank_threads.py"],
)
_bug(
    "full_ranks_sample_without_room",
    "rank",
    "engine.node_spec",
    "have_room=self.ranks_have_room",
    "have_room=True",
    forgets="that only rank 0 samples if full weights leave no room",
    found_by=[f"{SAMPLING}::test_ranks_that_all_sample_train_the_bits_of_rank_0_sampling_alone[2-full]"],
    missed=["tests/engine/test_rank_threads.py"],
)

# --- the controller

_bug(
    "controller_goes_on_without_its_lease",
    "controller",
    "launcher.controller.run_process",
    "            provisioner.close()\n            ended.set()\n            return\n",
    "            sleep(pass_seconds)\n            continue\n",
    forgets="to exit once another controller has taken over",
    found_by=[f"{RUNS}::test_down_needs_no_running_controller[frozen]"],
    missed=["tests/launcher/cluster/test_controller.py", "tests/launcher/cluster/test_no_controller.py"],
)
_bug(
    "controller_has_another_clock_than_its_nodes",
    "controller",
    "launcher.controller.run_process",
    "        return run.work_clock\n",
    "        return type(run.work_clock)(path=run.work_clock.path, origin_ms=run.clock_origin_ms, factor=1.0)\n",
    forgets="that nodes and controller share the run's clock",
    found_by=[f"{RUNS}::test_a_run_that_its_budget_stopped_goes_on_with_a_larger_one"],
    missed=["tests/launcher/cluster/test_controller.py"],
)
_bug(
    "live_controller_counts_as_dead",
    "controller",
    "launcher.controller.lease",
    '{os.getpid()}@{psutil.Process().create_time()}"',
    '{os.getpid()}@0"',
    forgets="the start time by which a controller is told from a later process of its pid",
    found_by=[f"{RUNS}::test_a_run_that_its_budget_stopped_goes_on_with_a_larger_one"],
    missed=["tests/launcher/cluster/test_controller.py"],
)

# --- the starter of local agents

_bug(
    "agent_shares_the_starters_session",
    "starter",
    "engine.node.starter",
    "    os.setsid()",
    "    pass",
    forgets="that an agent has a session of its own",
    found_by=[f"{STARTER_TESTS}::test_an_agent_is_found_by_its_mark_and_so_is_what_it_starts"],
    missed=[STARTER_TESTS],
)
_bug(
    "starter_obeys_a_dead_controller",
    "starter",
    "engine.node.starter",
    "            if ready.get(0, 0) & ~select.POLLIN:",
    "            if ready.get(0, 0) & ~select.POLLIN and not ready.get(0, 0) & select.POLLIN:",
    forgets="that no process can end a node that starts after its controller's death",
    found_by=["tests/engine/test_starter.py::test_an_order_of_a_controller_that_is_gone_starts_no_agent"],
    missed=[STARTER_TESTS],
)
_bug(
    "exits_of_agents_are_not_recorded",
    "starter",
    "engine.node.starter",
    "                self._note_ends()",
    "                pass",
    forgets="to record an agent's exit",
    found_by=[f"{STARTER_TESTS}::test_the_exit_of_an_agent_is_recorded[9]"],
    missed=[STARTER_TESTS],
)

# --- the remote console

_bug(
    "console_outlives_a_silent_launcher",
    "console",
    "engine.node.remote_console",
    "    threading.Thread(target=watch, daemon=True).start()",
    "    pass",
    forgets="that a connection without a message for a while is dead, whatever TCP reports",
    found_by=[f"{CONSOLE_TESTS}::test_the_console_exits_after_its_launcher[falls silent]"],
    missed=[CONSOLE_TESTS],
    reader=True,
)
_bug(
    "agent_gets_no_secrets",
    "console",
    "engine.node.agent_keeper",
    "env={**os.environ, **secrets, MARK: str(self._folder)},",
    "env={**os.environ, MARK: str(self._folder)},",
    forgets="to give the job's secrets to the agent",
    found_by=[f"{LINK_TESTS}::test_the_agent_gets_the_secrets_by_environment_and_never_by_file"],
    missed=[CONSOLE_TESTS],
)

# --- Ray

_bug(
    "frozen_coordinator_on_ray_is_left_alone",
    "ray",
    "engine.ray.supervisor",
    "            self._kill_coordinator()",
    "            pass",
    forgets="that Ray does not notice a frozen actor",
    found_by=["tests/engine/test_ray_freeze.py::test_a_frozen_coordinator_on_ray_is_killed_and_the_run_goes_on"],
    missed=["tests/engine/test_server.py", "tests/engine/test_transport.py"],
    reader=True,
)
_bug(
    "coordinator_on_ray_is_not_restarted",
    "ray",
    "engine.ray.supervisor",
    "            max_restarts=-1,",
    "            max_restarts=0,",
    forgets="that Ray restarts a dead coordinator",
    found_by=["tests/engine/test_ray_freeze.py::test_a_killed_coordinator_on_ray_is_restarted_and_the_run_goes_on"],
    missed=["tests/engine/test_server.py", "tests/engine/test_transport.py"],
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line for each bug. Return 1 if one was not found."""
    chosen = _parsed(arguments)
    bugs = [BUGS[name] for name in chosen.names or BUGS]
    if chosen.own is not None:
        return _run_own(bugs, chosen)
    if chosen.matrix is not None:
        return _run_matrix(bugs, chosen)
    if chosen.undisturbed:
        return _run_undisturbed(bugs, chosen)
    store = None if chosen.store is None else Store(chosen.store)
    by_bug: dict[str, Any] = {}
    for bug in bugs:
        try:
            run = run_tests([bug.edit], bug.found_by, limit_seconds=LIMIT_SECONDS)
        except RuntimeError as error:  # the other bugs still count
            print(f"    {error}", flush=True)
            run = TestRun()
        by_bug[bug.name] = {"process": bug.process, "forgets": bug.forgets, "found_by": run.found_by, **run.as_dict()}
        print(f"{FOUND if run.found_by else MISSED} {bug.name}: the {bug.process} forgets {bug.forgets}", flush=True)
        if not run.planted:
            print(f"    no process imported {bug.module}", flush=True)
        if store is not None:
            store.put(("named", bug.name), {"digest": bug.digest, **run.as_dict()})
    missed = [name for name, one in by_bug.items() if not one["found_by"]]
    if chosen.json:
        print(json.dumps({"bugs": len(bugs), "found": len(bugs) - len(missed), "missed": missed, "by_bug": by_bug}))
    return 1 if missed else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.processes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these bugs")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--matrix", nargs="+", metavar="FILE", help="run these test files with every bug")
    parser.add_argument("--own", nargs="+", metavar="FILE", help="plant all bugs in pytest's own process only")
    parser.add_argument("--undisturbed", action="store_true", help="run the named tests without the bugs")
    parser.add_argument("--marks", default=QUICK, help=f"marks of the tests that run (default: {QUICK})")
    parser.add_argument("--store", type=Path, help="file of the results, continued if the file exists")
    chosen = parser.parse_args(arguments)
    if unknown := [name for name in chosen.names if name not in BUGS]:
        parser.error(f"no such bug: {', '.join(unknown)}; there are {', '.join(BUGS)}")
    if chosen.store is None and (chosen.matrix or chosen.own or chosen.undisturbed):
        chosen.store = RESULTS
    return chosen


class Store:
    """Results in a JSON file. Each result is in the file as soon as it is known."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.values: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def get(self, keys: Sequence[str]) -> Any:
        value: Any = self.values
        for key in keys:
            value = value.get(key, {})
        return value

    def put(self, keys: Sequence[str], value: Any) -> None:
        *above, last = keys
        place = self.values
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(self.values, indent=1, sort_keys=True) + "\n")
        fresh.replace(self._file)


def _run_matrix(bugs: Sequence[ProcessBug], chosen: argparse.Namespace) -> int:
    """Run every file with every bug that its processes import. Results of an earlier call are kept.

    Return 1 if no test found one of the bugs.
    """
    store = Store(chosen.store)
    for file in chosen.matrix:
        calm = _undisturbed(file, chosen.marks, store)
        for bug in bugs:
            if store.get(("matrix", bug.name, file)).get("digest") == bug.digest:
                continue
            if bug.module not in calm["planted"]:
                store.put(("matrix", bug.name, file), {"digest": bug.digest, "planted": {}})
                continue
            slowest = max(calm["test_seconds"].values(), default=0.0)
            seconds = max(SHORTEST_TIMEOUT_SECONDS, TIMES_SLOWER * slowest)
            run = run_tests(
                [bug.edit],
                [file],
                marks=chosen.marks,
                limit_seconds=TIMES_SLOWER * calm["seconds"] + 300.0,
                more=["--timeout", f"{seconds:.0f}"],
            )
            result = {"digest": bug.digest, **run.as_dict()}
            result["failed"] = [test for test in run.failed if test not in calm["failed"]]
            store.put(("matrix", bug.name, file), result)
            found = [*result["failed"], *run.unfinished]
            print(f"{FOUND if found else MISSED} {bug.name} in {run.seconds:.0f} s: {found or file}", flush=True)
    found_by = {bug.name: sorted(tests_that_find(store, bug.name)) for bug in bugs}
    missed = [name for name, tests in found_by.items() if not tests]
    if chosen.json:
        print(json.dumps({"bugs": len(bugs), "found": len(bugs) - len(missed), "missed": missed, "by_bug": found_by}))
    return 1 if missed else 0


def _run_undisturbed(bugs: Sequence[ProcessBug], chosen: argparse.Namespace) -> int:
    """Run the named tests with each module planted unchanged. Return 1 if one of them fails."""
    store, failed = Store(chosen.store), False
    tests = {test for bug in bugs for test in bug.found_by}
    for file in sorted({test.partition("::")[0] for test in tests}):
        # In the order of the file, because its tests share fixtures.
        source = (ROOT / file).read_text()
        named = [test for test in tests if test.startswith(f"{file}::")]
        named.sort(key=lambda test, source=source: (source.index(test.partition("::")[2].partition("[")[0]), test))
        run = run_tests(unchanged(), named, limit_seconds=LIMIT_SECONDS)
        store.put(("named_undisturbed", file), run.as_dict(whole=True))
        print(f"{file}: {len(run.passed)} tests pass in {run.seconds:.0f} s, {run.found_by or 'none'} fail", flush=True)
        failed = failed or bool(run.found_by)
    return 1 if failed else 0


def _undisturbed(file: str, marks: str, store: Store) -> Any:
    """Return the result of a file without bugs."""
    known = store.get(("undisturbed", file))
    edits = unchanged()
    modules = sorted(edit.module for edit in edits)
    if known.get("modules") == modules:
        return known
    run = run_tests(edits, [file], marks=marks, limit_seconds=1800.0)
    result = {"modules": modules, "marks": marks, **run.as_dict(whole=True)}
    store.put(("undisturbed", file), result)
    print(f"{file}: {len(run.passed)} tests pass in {run.seconds:.0f} s, {run.found_by or 'none'} fail", flush=True)
    return result


def unchanged() -> list[Edit]:
    """Return edits that plant each module of a bug as it is, to see which processes import it."""
    modules = {bug.module: bug.edit for bug in BUGS.values()}
    return [Edit(module=edit.module, old=edit.old, new=edit.old) for edit in modules.values()]


def tests_that_find(store: Store, bug: str) -> set[str]:
    """Return the tests that failed with a bug, in a matrix or as its named tests."""
    runs = [*store.get(("matrix", bug)).values(), store.get(("named", bug))]
    return {test for run in runs for test in (*run.get("failed", ()), *run.get("unfinished", ()))}


def _run_own(bugs: Sequence[ProcessBug], chosen: argparse.Namespace) -> int:
    """Plant all bugs at once in pytest's own process, and in no process that it starts. Return 1 if a test fails."""
    store, edits, failed = Store(chosen.store), [bug.edit for bug in bugs], False
    digests = sorted(bug.digest for bug in bugs)
    for file in chosen.own:
        known = store.get(("own", file))
        if known.get("bugs") == digests:
            continue
        run = run_tests(edits, [file], where="own", marks=chosen.marks, limit_seconds=1800.0)
        store.put(("own", file), {"bugs": digests, **run.as_dict()})
        print(f"{file}: {len(run.passed)} tests pass in {run.seconds:.0f} s, {run.found_by or 'none'} fail", flush=True)
        failed = failed or bool(run.found_by)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
