"""The safety list: each promise, a function that keeps it, and a quick test that fails if that function does nothing.

    python -m tests.mutants.faults safety

A test that is named here and passes without its function proves nothing: mend the test. A promise is kept by more code
than the function of its entry, so other planted bugs of this folder belong to the same promises.
"""

import pickle
from collections.abc import Callable
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

from engine import durable
from engine.algorithm.transaction import Transaction
from engine.coordinator.coordinator import Coordinator
from engine.coordinator.journal import Journal
from engine.coordinator.judge_account import JudgeAccount
from engine.coordinator.rights import Rights
from engine.diffusion import noise
from engine.node import file_watch
from engine.node.spend_guard import TimeLeft
from engine.queue.queue import Queue
from engine.queue.state import QueueState
from engine.rewards import http_protocols
from engine.storage.checkpoint import CheckpointStore
from engine.trainer.batch_schedule import BatchSchedule
from engine.worker.worker import Worker
from launcher import harmless, without_secrets
from launcher.checks import ready
from launcher.cleanup import reaping
from launcher.cli import controller as controller_command
from launcher.clouds import base
from launcher.controller import lease
from launcher.controller.controller import Controller
from launcher.controller.spend_deadlines import SpendDeadlines
from launcher.decide import budget_guard, found_nodes, price_events, run_budget
from launcher.decide.actions import Buy
from launcher.decide.steps import Steps
from launcher.job import yaml_file
from launcher.ledger import accounting
from launcher.market import offers
from launcher.provision.sky import bundle, mirror, our_nodes
from launcher.provision.sky.instance_end import InstanceEnds
from launcher.provision.sky.inventory import CloudInventory
from launcher.provision.sky.launches import Launches
from launcher.provision.sky.terminate import Terminator
from launcher.provision.sky.unknown_instances import UnknownInstances
from launcher.storage.store_lease import StoreLease
from launcher.web import guard
from tests.mutants.faults import Fault
from tests.mutants.planted_bug import changed, everywhere

FAULTS: dict[str, Fault] = {}


def answers(value: object = None) -> Callable[..., Any]:
    """Return a function that does nothing and returns this value."""
    return lambda *_, **__: value


def promise(name: str, text: str, found_by: str, *patches: tuple[Any, str, Any]) -> None:
    """Add an entry. `text`: the promise, in words that follow "it forgets that"."""
    FAULTS[name] = Fault(name=name, forgets=f"that {text}", patches=patches, found_by=found_by)


class AnyName:
    """A list of names and a pattern that allow every name."""

    def __contains__(self, name: object) -> bool:
        return True

    def fullmatch(self, name: str) -> bool:
        return True


CLUSTER = "tests/launcher/cluster"
DECISIONS = f"{CLUSTER}/test_reconcile.py::test_"
MOVING = f"{CLUSTER}/test_moving.py::test_"
CONTROLLER = f"{CLUSTER}/test_controller.py::test_"
MONEY_ENDS = "tests/reports/test_money_ends.py::test_"
NODES = f"{CLUSTER}/test_sky_provisioner.py::test_"
MIRROR = f"{CLUSTER}/test_mirror.py::test_"
QUEUE = "tests/engine/test_queue.py::test_"
WEB = "tests/launcher/web/test_server.py::test_"

# --- money

promise(
    "no-node-above-a-limit",
    "no node is bought that could break a limit of its run",
    f"{DECISIONS}disks_and_addresses_count_against_the_hourly_limit",
    everywhere(run_budget.budget_refusal, answers()),
)
promise(
    "limits-hold-for-two-purchases-at-once",
    "two controllers that buy at the same moment share the limits over all runs",
    f"{MOVING}limits_of_all_runs_hold_even_if_two_decide_at_the_same_moment",
    everywhere(run_budget.refused_now, answers()),
)
promise(
    "spend-stays-within-limit-and-allowance",
    "a run spends at most its limit and one allowance, in any order of events",
    f"{CLUSTER}/test_brakes.py::test_spend_stays_within_the_limit_for_every_history",
    (budget_guard, "may_buy", answers()),
)
promise(
    "run-drains-at-its-limit",
    "a run stops at the last moment that stays within its limit",
    f"{DECISIONS}the_budget_stops_a_run_at_the_last_moment_that_stays_in_it",
    everywhere(budget_guard.must_drain, answers(False)),
)
promise(
    "nodes-get-their-spend-deadline",
    "a node without a controller terminates itself before the money is used up",
    f"{MOVING}a_spend_deadline_comes_earlier_if_a_node_costs_more_than_planned",
    (SpendDeadlines, "send", answers()),
)
promise(
    "node-counts-down-to-its-deadline",
    "a node terminates itself at its spend deadline",
    "tests/engine/test_spend_deadline.py::test_the_guard_repeats_the_termination_while_the_instance_exists",
    (TimeLeft, "left_ms", answers()),
)
promise(
    "no-purchase-at-an-expired-price",
    "nothing is bought at an old price",
    f"{CLUSTER}/test_ready.py::test_nothing_is_bought_at_old_prices",
    everywhere(offers.age_of, answers(offers.Age.FRESH)),
)
promise(
    "unknown-prices-count-as-on-demand",
    "a price that is not known counts as the on-demand price",
    f"{DECISIONS}another_zone_or_type_costs_its_own_price_or_the_on_demand_price",
    everywhere(price_events.paid, answers([])),
)
promise(
    "cloud-runs-need-limits",
    "a run on a real cloud needs both limits and a bucket",
    f"{CLUSTER}/test_ready.py::test_a_launch_on_a_real_cloud_requires_limits_and_buckets",
    everywhere(ready.job_problems, answers(())),
)
promise(
    "splits-sum-to-the-total",
    "every split of a run's cost sums to its total",
    "tests/launcher/test_accounting.py::test_the_rest_goes_to_the_largest_remainders_and_ties_go_by_name",
    everywhere(accounting.share_out, changed(accounting.share_out, "shares[key] += 1", "pass")),
)
promise(
    "judges-stay-within-their-budget",
    "paid judges never spend more than their budget",
    "tests/engine/test_judge_money.py::test_no_order_of_kills_restarts_and_losses_spends_more_than_the_budget",
    (JudgeAccount, "free", 10**12),
)

# --- no node is forgotten, and none of others is touched


def asks_the_cloud_first(self: Controller, action: Buy) -> None:
    self._provisioner.request(action.option.placement, SimpleNamespace(node=action.name))
    _buy(self, action)


_buy = Controller._buy
promise(
    "purchase-is-recorded-first",
    "a purchase is recorded before the cloud is asked",
    f"{MOVING}purchases_and_releases_are_in_the_ledger_before_the_cloud_is_called",
    (Controller, "_buy", asks_the_cloud_first),
)
promise(
    "release-is-recorded-first",
    "a release is recorded before the cloud is told",
    f"{MOVING}purchases_and_releases_are_in_the_ledger_before_the_cloud_is_called",
    (
        Controller,
        "_release",
        changed(
            Controller._release,
            "with self.recorder.transaction()",
            "self._provisioner.release(action.nodes)\n    with self.recorder.transaction()",
        ),
    ),
)
promise(
    "recorded-release-is-ordered",
    "a recorded release is ordered even if the controller dies in between",
    f"{CLUSTER}/test_whole_trainer.py::test_a_release_that_was_recorded_and_not_ordered_is_ordered_by_the_next_controller",
    (Controller, "_pass", changed(Controller._pass, "if recorded:", "if False:")),
)
promise(
    "released-node-is-terminated",
    "a released node's VM is terminated until the cloud confirms its end",
    f"{NODES}a_release_terminates_the_instance_and_waits_for_confirmation",
    (Terminator, "end", answers()),
)
promise(
    "bill-ends-with-the-vm",
    "a node is billed until its cloud says that the VM ended",
    f"{MONEY_ENDS}a_node_that_ended_during_an_outage_is_paid_until_its_end[True-aws]",
    (InstanceEnds, "_end_ms", answers()),
)
promise(
    "last-sign-of-life-is-kept",
    "a VM whose end the cloud has forgotten is billed until its last sign of life",
    f"{MONEY_ENDS}a_new_process_knows_the_last_look_that_saw_the_vm",
    (InstanceEnds, "saw_alive", answers()),
)
promise(
    "preempted-node-is-paid-to-its-announced-end",
    "a preempted VM whose cloud names no end is billed to the announced time",
    f"{NODES}a_preemption_without_a_named_end_is_paid_to_its_announced_time[True-120000]",
    (InstanceEnds, "_end_ms", changed(InstanceEnds._end_ms, "if end.reclaimed else None", "if False else None")),
)
promise(
    "stuck-node-holds-its-money",
    "a node that cannot be ended holds the money that it may still cost",
    f"{MONEY_ENDS}replaced_nodes_that_cannot_be_ended_do_not_pass_the_budget[error-aws]",
    everywhere(run_budget.stuck_micro_usd, answers(0)),
)
promise(
    "launch-of-a-dead-controller-is-adopted",
    "a launch that a crash interrupted is adopted, and no second VM is bought",
    f"{NODES}a_request_whose_reply_was_lost_is_adopted",
    (Launches, "_adopt", answers(False)),
)
promise(
    "unknown-instances-are-reported",
    "a VM with the run's label and without a request is released",
    f"{NODES}an_unknown_instance_with_our_label_is_reported_and_can_be_released",
    (UnknownInstances, "report", answers([])),
)
promise(
    "unreachable-cloud-ends-no-node",
    "a cloud that does not answer says nothing about the end of a node",
    f"{NODES}an_unreachable_cloud_api_ends_no_node",
    (CloudInventory, "is_fresh", answers(True)),
)
promise(
    "another-owners-nodes-stay",
    "VMs of another owner's run with the same name are left alone",
    f"{NODES}another_owners_run_of_the_same_name_is_ignored",
    (
        CloudInventory,
        "instances_in",
        changed(CloudInventory.instances_in, 'instance.owner in ("", self.around.purchases.owners[cloud])', "True"),
    ),
)
promise(
    "another-owners-groups-stay",
    "security groups and roles of another owner are never changed",
    f"{CLUSTER}/test_cloud_apis.py::test_aws_does_not_touch_another_owners_run_of_the_same_name",
    everywhere(base.refuse_anothers, answers()),
)
promise(
    "reap-spares-live-runs",
    "`spotrl reap` deletes nothing of a live run",
    "tests/launcher/test_safety_commands.py::test_reap_deletes_only_resources_without_a_live_run",
    everywhere(reaping.split, lambda found, live_runs: (found, reaping.Inventory(instances=(), resources=()))),
)
promise(
    "reap-finds-what-carries-our-labels",
    "`spotrl reap` looks in every region of every cloud",
    f"{CLUSTER}/test_reaping.py::test_every_region_of_every_cloud_is_listed",
    everywhere(reaping._in_region, answers(((), ()))),
)

# --- one controller

promise(
    "one-controller-a-ledger",
    "a second controller of one ledger is refused while the first is alive",
    f"{CONTROLLER}a_second_controller_is_refused_until_the_first_is_dead_or_silent",
    everywhere(lease.is_held, answers(False)),
)
promise(
    "lost-lease-stops-a-controller",
    "a controller whose lease another one has taken writes nothing more",
    f"{CONTROLLER}a_controller_without_its_lease_stops_acting",
    everywhere(lease.renew, answers()),
)
promise(
    "bug-ends-no-guard",
    "a bug in one step of a pass stops no limit, release or end of the run",
    "tests/reports/test_passes.py::test_a_bug_in_one_step_buys_nothing_and_the_run_still_ends",
    (Steps, "take", lambda self, step, otherwise: step()),
)
promise(
    "no-controller-for-a-copy",
    "a controller of a copied ledger is refused while the first one lives",
    "tests/reports/test_places.py::test_a_controller_of_a_copied_ledger_is_refused_by_the_bucket",
    everywhere(lease.this_ledger, answers("what lies in the ledger")),
)
promise(
    "restored-ledger-is-repaired",
    "a ledger from a backup counts what was spent since",
    "tests/reports/test_places.py::test_a_restored_ledger_counts_what_was_spent_since_the_backup",
    everywhere(found_nodes.found_nodes, answers([])),
)
promise(
    "one-controller-a-bucket",
    "a second machine is refused while the first controls the run",
    f"{CLUSTER}/test_store_lease.py::test_a_second_computer_is_refused_with_the_name_of_the_first",
    (StoreLease, "_refuse_held", answers()),
)

# --- a batch trains exactly its manifest

promise(
    "revoked-lease-is-fenced",
    "results of an expired lease are rejected",
    f"{QUEUE}an_expired_lease_is_fenced_and_its_work_is_leased_to_another_worker",
    (Queue, "may_finish", answers(True)),
)
promise(
    "result-counts-once",
    "the first finished copy of a request counts, and the other is fenced",
    f"{QUEUE}the_first_finished_copy_counts_and_the_other_is_fenced",
    (QueueState, "leave", answers()),
)
promise(
    "old-capacity-is-ignored",
    "a capacity snapshot of an older generation is ignored",
    f"{QUEUE}a_snapshot_of_an_older_generation_is_ignored",
    (
        Queue,
        "capacity",
        changed(Queue.capacity, "snapshot.generation < self._members.generation", "False"),
    ),
)
promise(
    "late-orders-are-refused",
    "an order of the trainer that comes after a newer one is refused",
    "tests/engine/test_coordinator.py::test_a_late_order_of_the_trainer_is_ignored",
    (
        Coordinator,
        "_obey",
        changed(Coordinator._obey, "if (order.boot, order.seq) < self.state.newest_order:", "if False:"),
    ),
)
promise(
    "durable-before-acknowledged",
    "a result is on the disk before it is acknowledged",
    "tests/engine/test_server.py::test_simultaneous_finishes_share_an_fsync_before_they_are_acknowledged",
    (Journal, "position", answers(0)),
)
promise(
    "drained-work-is-committed",
    "a worker under notice makes its steps durable and gives its lease back",
    "tests/engine/test_worker.py::test_a_notice_commits_the_current_step_and_returns_the_lease",
    (Worker, "_hand_back", answers()),
)
promise(
    "notice-drains-a-node",
    "workers of a node that the cloud will preempt drain",
    f"{QUEUE}a_notice_makes_the_workers_of_the_node_drain",
    (Queue, "notice", answers()),
)
promise(
    "zero-spot-is-a-normal-state",
    "without spot nodes the trainer samples every batch itself",
    "tests/engine/test_help.py::test_without_a_rollout_gpu_the_trainer_samples_whatever_help_says",
    (BatchSchedule, "_help", answers(False)),
)
promise(
    "step-waits-for-its-groups",
    "an optimiser step trains all groups of its manifest",
    "tests/engine/test_transaction.py::test_commit_before_all_groups_are_in_is_refused",
    (Transaction, "missing", ()),
)
promise(
    "noise-follows-seed-and-step",
    "all noise is a function of seed and step",
    "tests/engine/test_noise.py::test_seeds_and_steps_are_independent_of_one_another",
    (noise, "_words", lambda seeds, step, count, real=noise._words: real([0] * len(seeds), step, count)),
)
promise(
    "checkpoint-counts-with-its-manifest",
    "a checkpoint counts only once its manifest is written, as the last of its files",
    "tests/engine/test_checkpoint.py::test_files_written_ahead_count_once_the_manifest_exists",
    (
        CheckpointStore,
        "names",
        lambda self: sorted({path.split("/")[1] for path in self._paths("checkpoints/")}),
    ),
)
promise(
    "damaged-checkpoint-is-refused",
    "a checkpoint whose files differ from its manifest is not loaded",
    "tests/engine/test_checkpoint.py::test_loading_a_damaged_file_fails_and_names_the_file",
    (CheckpointStore, "load", changed(CheckpointStore.load, "data.digest() != digest", "False")),
)

# --- secrets, rights and hostile input

promise(
    "calls-need-a-token",
    "the coordinator wants a token of the run on every call",
    "tests/engine/test_server.py::test_a_wrong_token_is_refused_on_every_route",
    (Rights, "check", answers("trainer")),
)
promise(
    "spot-nodes-may-not-change-a-run",
    "a spot node cannot change weights, tasks or capacity",
    "tests/engine/test_server.py::test_a_spot_node_may_not_change_the_run",
    (Rights, "check_call", answers()),
)
promise(
    "node-writes-only-its-own-files",
    "a node writes no file of the launcher's machine but the copies of its own",
    f"{MIRROR}a_file_with_a_forbidden_name_is_neither_written_nor_removed",
    (mirror, "MIRRORED", AnyName()),
    (mirror, "APPENDED", AnyName()),
)
promise(
    "token-stays-on-its-node",
    "the node's file with the token is never sent to the mirror",
    "tests/engine/test_remote_console.py::test_the_token_is_not_mirrored",
    (file_watch, "MIRRORED", ("node.json", *file_watch.MIRRORED)),
)
promise(
    "no-credential-file-reaches-a-node",
    "no credential file of a cloud reaches a node",
    f"{CLUSTER}/test_sky.py::test_no_credential_file_is_uploaded_to_a_node",
    (our_nodes, "_without_credentials", answers()),
)
promise(
    "private-keys-are-not-sent",
    "a file with a private key beside the job is refused",
    f"{CLUSTER}/test_bundle.py::test_a_private_key_is_refused_by_name",
    (bundle, "_copy_work", changed(bundle._copy_work, 'b"PRIVATE KEY-----" in path.read_bytes()', "False")),
)
promise(
    "dotfiles-are-not-sent",
    "dotfiles beside the job, like .env, stay here",
    f"{CLUSTER}/test_bundle.py::test_dotfiles_are_not_bundled",
    (bundle, "_work_files", changed(bundle._work_files, 'entry.name.startswith(".")', "False")),
)
promise(
    "secrets-are-cut-from-kept-text",
    "commands in the ledger and job files in reports show no secrets",
    "tests/launcher/test_without_secrets.py::test_a_secret_in_a_word_is_replaced_and_the_rest_stays",
    everywhere(without_secrets.without_secrets, lambda text, values=(): text),
)
promise(
    "webhooks-stay-out-of-logs",
    "the address of a webhook is a secret, and stays out of a controller's log",
    f"{CLUSTER}/test_notifications.py::test_the_log_of_a_controller_holds_no_webhook",
    (
        controller_command,
        "controller",
        changed(
            unwrap(controller_command.controller.callback),
            'logging.getLogger("httpx").setLevel(logging.WARNING)',
            "pass",
        ),
    ),
)
promise(
    "files-are-private",
    "only their owner can read files with tokens",
    "tests/engine/test_durable.py::test_a_file_is_private_and_either_complete_or_unchanged",
    everywhere(durable.write_durably, changed(durable.write_durably, "0o600", "0o644")),
)
promise(
    "text-from-nodes-is-harmless",
    "text from nodes is shown without control sequences",
    f"{WEB}a_log_is_read_from_its_end_without_control_characters",
    everywhere(harmless.harmless, lambda text: text),
)
promise(
    "web-view-is-the-users-own",
    "other web pages and other hosts' names get no answer from `spotrl ui`",
    f"{WEB}a_request_that_is_not_the_users_own_page_is_refused",
    everywhere(guard.refusal, answers()),
)
promise(
    "web-view-needs-its-token",
    "every page of `spotrl ui` with data needs the token",
    f"{WEB}no_path_with_data_is_answered_without_the_token",
    everywhere(guard.is_token, answers(True)),
)
promise(
    "job-files-are-plain-values",
    "anchors, aliases and tags in a job file are refused",
    "tests/launcher/test_yaml_file.py::test_ambiguous_yaml_is_refused_with_its_line",
    everywhere(yaml_file._refuse_what_can_grow, answers()),
)
promise(
    "answers-of-reward-servers-run-no-code",
    "a reward server's answer is data, and runs no code here",
    "tests/engine/test_http_reward.py::test_an_answer_that_would_run_code_is_not_unpickled",
    (http_protocols._PlainReader, "find_class", pickle.Unpickler.find_class),
)
