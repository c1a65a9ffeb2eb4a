"""Planted bugs in files, progress, leases, checkpoints and bills: data that a run must not lose or invent."""

from pathlib import Path

from engine import durable, prompts
from engine.algorithm.transaction import Trainer
from engine.coordinator import journal, weight_book
from engine.node import agent
from engine.storage.checkpoint import CheckpointStore
from engine.worker.worker import Worker
from launcher.clouds import aws
from launcher.controller import lease, price_watch, recorder, run_process
from launcher.ledger import node_history, store
from launcher.provision.local import local_nodes
from launcher.provision.local.node_records import NodeRecords
from launcher.provision.sky import cloud_node, inventory, mirror, node_files, terminate
from tests.mutants.faults import Fault
from tests.mutants.planted_bug import changed, everywhere

CLUSTER = "tests/launcher/cluster"


def write_without_sync(path: Path, data: bytes) -> None:
    """Write by a rename without fsync, like an old version."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    part.chmod(0o600)
    part.replace(path)


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="help-is-not-given-back",
            forgets="that a trainer that can train has no time for rollouts",
            patches=((Worker, "_go_on", changed(Worker._go_on, "drain or self._interrupted()", "drain")),),
            found_by="tests/engine/test_help.py::test_help_stops_between_steps_and_another_worker_goes_on_from_there",
        ),
        Fault(
            name="the-last-lines-are-held-out",
            forgets="that a file of prompts may be sorted by subject",
            patches=((prompts, "_drawn", lambda lines, count: tuple(lines[-count:])),),
            found_by="tests/engine/test_prompts.py::test_a_random_part_of_a_file_is_held_out_and_never_trained",
        ),
        Fault(
            name="test-prompts-are-trained",
            forgets="to leave the prompts of a test file out of training",
            patches=(
                (
                    prompts,
                    "file_prompts",
                    changed(prompts.file_prompts, "if prompt not in set(tested)", ""),
                ),
            ),
            found_by="tests/engine/test_prompts.py::test_prompts_of_a_test_file_are_evaluated_and_never_trained",
        ),
        Fault(
            name="a-file-that-exists-is-trusted",
            forgets="that a power cut leaves files empty under their names",
            patches=((node_files.NodeFiles, "has", node_files.NodeFiles.is_begun),),
            found_by=f"{CLUSTER}/test_damaged_files.py::"
            "test_a_node_with_an_empty_file_continues_or_ends[cleared-ended]",
        ),
        Fault(
            name="a-node-without-its-spec-is-left",
            forgets="to end a node of which nobody can say any more how its agent is started",
            patches=((cloud_node.CloudNode, "is_damaged", property(lambda self: False)),),
            found_by=f"{CLUSTER}/test_damaged_files.py::test_a_node_with_an_empty_file_continues_or_ends[up-spec]",
        ),
        Fault(
            name="a-node-without-a-place-is-not-looked-for",
            forgets="to look for a machine by its label where no file says in which region it is",
            patches=(
                (inventory.CloudInventory, "search", lambda self, node: node.region),
                (inventory.CloudInventory, "find_instance", lambda self, node: None),
            ),
            found_by=f"{CLUSTER}/test_damaged_files.py::test_an_instance_without_a_known_place_is_found_by_its_label",
        ),
        Fault(
            name="a-local-node-without-its-request-is-not-seen",
            forgets="that processes may run of which request.json says nothing any more",
            patches=(
                (
                    NodeRecords,
                    "requested",
                    changed(NodeRecords.requested, "if request is None and file.exists()", "if False"),
                ),
            ),
            found_by=f"{CLUSTER}/test_damaged_files.py::"
            "test_a_local_node_with_an_empty_file_is_still_accounted_for[up-request]",
        ),
        Fault(
            name="a-file-is-renamed-without-sync",
            forgets="to write a file's bytes to the disk before its name",
            patches=tuple((module, "write_durably", write_without_sync) for module in (durable, node_files, agent)),
            found_by="tests/engine/test_durable.py::"
            "test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_return[a node's file]",
        ),
        Fault(
            name="published-weights-are-not-durable",
            forgets="to write published weights to the disk before the journal names them",
            patches=((weight_book, "write_durably", write_without_sync),),
            found_by="tests/engine/test_durable.py::"
            "test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_return[weights]",
        ),
        Fault(
            name="a-damaged-journal-is-cut",
            forgets="that whole records behind a damaged one were acknowledged",
            patches=((journal, "_next_record", lambda data, start: None),),
            found_by="tests/engine/test_journal.py::test_damage_in_the_middle_is_an_error_and_keeps_the_file",
        ),
        Fault(
            name="the-write-ahead-log-is-kept-long",
            forgets="that a ledger may lose its -wal file",
            patches=((store, "CHECKPOINT_PAGES", 1000),),
            found_by="tests/launcher/test_lost_ledger.py::"
            "test_a_ledger_without_its_write_ahead_log_still_lists_every_node",
        ),
        Fault(
            name="the-ledger-does-not-wait-for-the-disk",
            forgets="that an intent must outlive a power cut",
            patches=(
                (
                    store,
                    "_prepare_connection",
                    changed(store._prepare_connection, "synchronous=FULL", "synchronous=OFF"),
                ),
            ),
            found_by="tests/launcher/ledger/test_store.py::test_a_new_ledger_is_private_and_sets_its_sqlite_options",
        ),
        Fault(
            name="a-disk-that-stays-is-forgotten",
            forgets="that a disk is billed until it is removed",
            patches=((terminate.Terminator, "end", changed(terminate.Terminator.end, "if remaining:", "if False:")),),
            found_by=f"{CLUSTER}/test_sky_provisioner.py::"
            "test_a_node_has_not_ended_while_a_disk_of_it_cannot_be_removed",
        ),
        Fault(
            name="a-nodes-file-name-is-checked-at-its-beginning",
            forgets="that a name from a node may go on behind its allowed part",
            patches=((mirror.NodeMirror, "take", changed(mirror.NodeMirror.take, ".fullmatch(", ".match(")),),
            found_by=f"{CLUSTER}/test_mirror.py::test_a_file_with_a_forbidden_name_is_neither_written_nor_removed",
        ),
        Fault(
            name="old-moments-stay-beside-loaded-ones",
            forgets="that a checkpoint from before the first step has no moments",
            patches=(
                (
                    Trainer,
                    "load_optimizer_state",
                    changed(Trainer.load_optimizer_state, "self.optimizer.state.clear()", "pass"),
                ),
            ),
            found_by="tests/engine/test_transaction.py::"
            "test_the_optimisers_state_goes_through_a_checkpoint_bit_for_bit",
        ),
        Fault(
            name="a-parameter-without-gradient-stands-still",
            forgets="that a step must not depend on which groups had variance",
            patches=((Trainer, "take_step", changed(Trainer.take_step, "if parameter.grad is None:", "if False:")),),
            found_by="tests/engine/test_transaction.py::"
            "test_a_step_without_any_variance_still_moves_every_parameter_by_its_moments",
        ),
        Fault(
            name="reap-forgets-this-machine",
            forgets="nodes of the local infra that no ledger names",
            patches=((local_nodes.LocalNodes, "instances", lambda self, region, **more: []),),
            found_by="tests/launcher/test_lost_ledger.py::test_a_local_node_unknown_to_the_ledger_is_ended",
        ),
        Fault(
            name="a-controller-gives-up",
            forgets="to go on while the ledger is locked",
            patches=(
                (
                    run_process,
                    "run_controller",
                    changed(
                        run_process.run_controller,
                        'log.exception("this pass failed (%s in a row); trying again", trouble)',
                        "if trouble >= 40: raise",
                    ),
                ),
            ),
            found_by=f"{CLUSTER}/test_no_controller.py::test_a_controller_retries_without_limit_with_growing_pauses",
        ),
        Fault(
            name="pruning-deletes-the-manifest-last",
            forgets="that a checkpoint counts as long as its manifest is there",
            patches=(
                (
                    CheckpointStore,
                    "save",
                    changed(CheckpointStore.save, 'not path.endswith(".json")', 'path.endswith(".json")'),
                ),
            ),
            found_by="tests/engine/test_checkpoint.py::test_an_interrupted_drop_leaves_only_loadable_checkpoints",
        ),
        Fault(
            name="a-lease-without-its-epoch",
            forgets="that a holder's name may come again",
            patches=(
                (
                    lease,
                    "renew",
                    changed(
                        lease.renew,
                        "(row.holder, row.epoch) != (lease.holder, lease.epoch)",
                        "row.holder != lease.holder",
                    ),
                ),
            ),
            found_by=f"{CLUSTER}/test_kept_facts.py::test_an_older_epoch_of_the_same_holder_has_lost_its_lease",
        ),
        Fault(
            name="a-redone-iteration-stays",
            forgets="that the first iteration after a checkpoint is done again",
            patches=((store, "_voids", changed(store._voids, "reported >= first", "reported > first")),),
            found_by="tests/launcher/ledger/test_store.py::test_a_lost_iteration_does_not_count_until_it_is_repeated",
        ),
        Fault(
            name="progress-of-another-run-counts",
            forgets="to look at which run a line of progress is of",
            patches=(
                (
                    recorder.Recorder,
                    "write_progress",
                    changed(recorder.Recorder.write_progress, " if line.run == self._run.name", ""),
                ),
            ),
            found_by=f"{CLUSTER}/test_kept_facts.py::test_progress_of_another_run_is_ignored",
        ),
        Fault(
            name="unwritten-progress-is-forgotten",
            forgets="to read progress again that could not be written",
            patches=(
                (
                    recorder.Recorder,
                    "write_progress",
                    changed(recorder.Recorder.write_progress, "self.progress_files.forget()", "pass"),
                ),
            ),
            found_by=f"{CLUSTER}/test_kept_facts.py::test_progress_that_could_not_be_written_is_read_again",
        ),
        Fault(
            name="the-first-hour-is-free-though-we-ended-it",
            forgets="that AWS bills what we told it to terminate",
            patches=(
                everywhere(
                    node_history.write_note,
                    changed(node_history.write_note, ' and "releasing" not in seen', ""),
                ),
            ),
            found_by=f"{CLUSTER}/test_kept_facts.py::test_the_first_hour_is_billed_if_we_terminated_the_node",
        ),
        Fault(
            name="the-owner-is-a-session",
            forgets="that an assumed role has another session each time",
            patches=((aws, "owner_of", lambda arn: arn.rpartition("/")[2]),),
            found_by=f"{CLUSTER}/test_cloud_apis.py::test_the_owner_label_is_the_same_in_every_session",
        ),
        Fault(
            name="a-look-that-fails-ends-the-price-watch",
            forgets="that a locked ledger is free again a moment later",
            patches=(
                everywhere(
                    price_watch.watch_prices,
                    changed(price_watch.watch_prices, "except Exception as error", "except StopIteration as error"),
                ),
            ),
            found_by=f"{CLUSTER}/test_watched_prices.py::test_a_failed_refresh_does_not_end_the_price_watch",
        ),
    )
}
