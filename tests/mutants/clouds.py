"""Planted bugs of nodes on clouds: whose VM is ended, what is removed while VMs live, what a selftest looks for."""

from typing import Any

from launcher.controller.node_specs import node_spec
from launcher.provision.sky.cloud_reports import CloudReports
from launcher.provision.sky.launches import Launches
from launcher.provision.sky.node_files import NodeFiles
from launcher.provision.sky.regions import Regions
from launcher.provision.sky.sky_provisioner import SkyProvisioner
from launcher.provision.sky.terminate import Terminator
from launcher.provision.sky.watch import AgentWatch
from launcher.selftest import reading
from tests.mutants.faults import Fault
from tests.mutants.planted_bug import changed, everywhere

NODES = "tests/launcher/cluster/test_sky_provisioner.py::test_"
LAUNCHES = "tests/launcher/cluster/test_launches.py::test_"
REPORTS = "tests/launcher/cluster/test_cloud_reports.py::test_"
CALLS = "tests/launcher/cluster/test_provisioner_calls.py::test_"
PROMOTION = "tests/launcher/cluster/test_promotion.py::test_"
READING = "tests/launcher/test_selftest_reading.py::test_"

FAULTS: dict[str, Fault] = {}


def _fault(name: str, forgets: str, found_by: str, where: Any, method: str, old: str, new: str) -> None:
    patch = where, method, changed(vars(where)[method], old, new)
    FAULTS[name] = Fault(name=name, forgets=forgets, patches=(patch,), found_by=found_by)


_fault(
    "a-vm-in-its-own-region-is-ended-after-a-crash",
    "that the next launch finds the VM that an interrupted launch left in the node's region",
    f"{NODES}after_a_crash_only_its_vms_in_other_regions_are_ended",
    Launches,
    "_adopt",
    "if lost and (cloud, region) != node.region:",
    "if lost:",
)
_fault(
    "a-vm-of-another-node-is-ended-after-a-crash",
    "whose VM it ends",
    f"{NODES}after_a_crash_only_its_vms_in_other_regions_are_ended",
    Launches,
    "_adopt",
    "if instance.name == node.name and",
    "if",
)
_fault(
    "both-vms-are-ended-when-the-login-is-old",
    "that a VM's address may have changed since its login",
    f"{NODES}of_two_vms_only_the_one_without_the_login_is_ended[neither]",
    CloudReports,
    "_end_doubles",
    "0 < len(extra) < len(alive)",
    "extra",
)
_fault(
    "a-login-is-always-public",
    "that a login may name the private address of its VM",
    f"{NODES}of_two_vms_only_the_one_without_the_login_is_ended[private]",
    CloudReports,
    "_end_doubles",
    "(instance.public_address, instance.address)",
    "(instance.public_address,)",
)
_fault(
    "vms-missing-now-and-then-are-gone",
    "that only looks in a row count",
    f"{REPORTS}a_vm_that_is_missing_from_every_other_list_lives",
    CloudReports,
    "evaluate",
    "node.sightings.missing, node.sightings.stopping_since = 0, None",
    "node.sightings.stopping_since = None",
)
_fault(
    "a-second-stop-is-counted-from-the-first",
    "that a VM ran between two stops",
    f"{REPORTS}a_second_stop_has_its_own_time_limit",
    CloudReports,
    "evaluate",
    "node.sightings.missing, node.sightings.stopping_since = 0, None",
    "node.sightings.missing = 0",
)
_fault(
    "a-vms-first-address-is-kept",
    "that a VM's address may change",
    f"{REPORTS}a_vm_that_moved_to_another_address_is_written_down",
    CloudReports,
    "evaluate",
    "if instance != recorded:",
    "if recorded is None:",
)
_fault(
    "a-vm-that-no-list-shows-is-waited-for",
    "that a node ends whose VM never appears",
    f"{REPORTS}a_vm_that_no_list_ever_showed_ends_its_node",
    CloudReports,
    "evaluate",
    'if recorded is None and not node.files.has("login"):',
    "if recorded is None:",
)
_fault(
    "a-stopping-vm-is-free",
    "that a VM is billed until it has stopped",
    f"{REPORTS}a_stopping_vm_is_paid_until_the_last_list_that_showed_it",
    CloudReports,
    "evaluate",
    "if is_billed(instance):",
    "if False:",
)
_fault(
    "a-stopped-vm-must-be-missing-twice",
    "that a stopping VM that is not listed has ended",
    f"{REPORTS}a_stopping_vm_is_gone_with_the_first_list_without_it",
    CloudReports,
    "evaluate",
    'or node.files.has("stopping")',
    "",
)
_fault(
    "every-notice-is-thirty-seconds",
    "the notice that the cloud granted",
    f"{REPORTS}the_notice_that_the_cloud_names_is_the_nodes_deadline",
    CloudReports,
    "_record_stopping",
    "(instance.notice_ms or STOPPING_NOTICE_MS)",
    "STOPPING_NOTICE_MS",
)
_fault(
    "a-preemption-waits-for-skypilot",
    "that the cloud's word for a preemption is enough",
    f"{REPORTS}a_preemption_during_a_launch_needs_no_word_of_skypilot",
    CloudReports,
    "_learn_end",
    "patient and not end.reclaimed and",
    "patient and",
)
_fault(
    "a-launch-without-a-record-is-not-cancelled",
    "that a process may die after it sent a launch",
    f"{LAUNCHES}a_request_whose_reply_was_lost_is_cancelled_by_a_release",
    Launches,
    "cancel",
    "node.may_be_launched",
    'node.files.is_begun("launch")',
)
_fault(
    "a-cluster-that-never-came-up-is-adopted",
    "that a cluster without a VM needs a launch",
    f"{LAUNCHES}a_cluster_that_never_came_up_is_launched_again_after_a_crash",
    Launches,
    "_adopt",
    '.get(node.name) == "UP"',
    ".get(node.name)",
)
_fault(
    "an-earlier-attempts-vm-is-missed",
    "that the VM of an earlier attempt has ended",
    f"{LAUNCHES}the_vm_of_an_earlier_attempt_is_not_missed_during_the_next",
    Launches,
    "launch",
    'node.files.forget("machine")',
    "pass",
)
_fault(
    "the-time-to-settle-is-never-new",
    "that each launch has its own time to settle",
    f"{LAUNCHES}each_launch_has_its_own_time_until_the_clouds_resources_are_known",
    Launches,
    "launch",
    "node.unsettled_since = None\n    except",
    "pass\n    except",
)
_fault(
    "groups-and-roles-go-before-their-vms",
    "that a VM ends itself with its role",
    f"{NODES}the_role_of_a_run_goes_after_the_machines_of_all_regions",
    Regions,
    "tidy",
    "if alive:",
    "if False:",
)
_fault(
    "a-release-is-written-in-every-pass",
    "that a release is recorded at its first order",
    f"{NODES}a_release_is_recorded_once_and_only_while_the_node_is_there",
    SkyProvisioner,
    "release",
    'not node.files.is_begun("release") and ',
    "",
)
_fault(
    "a-repeated-request-is-taken-as-new",
    "that a node was requested already",
    f"{CALLS}a_repeated_request_changes_nothing[launched]",
    SkyProvisioner,
    "request",
    'if node.files.has("spec"):',
    "if False:",
)
_fault(
    "a-tidied-region-stays-tidied",
    "that a new node brings the group and the role of its region back",
    f"{CALLS}a_node_after_a_tidy_leaves_nothing_either",
    SkyProvisioner,
    "request",
    "self._regions.tidied.clear()",
    "pass",
)
_fault(
    "a-broken-node-is-gone",
    "that an error in a pass says nothing about the node's VM",
    f"{CALLS}an_error_at_a_node_is_its_own_fault_and_the_others_go_on[step]",
    SkyProvisioner,
    "_protect",
    "NodeStatus.UNKNOWN",
    "NodeStatus.GONE",
)
_fault(
    "a-pass-after-a-suspension-trusts-old-messages",
    "that messages may be as old as the pause of this machine",
    f"{CALLS}a_message_from_before_a_suspension_is_no_sign_of_life_after_it",
    SkyProvisioner,
    "observe",
    "gap_ms=now_ms - last_ms",
    "gap_ms=0",
)
_fault(
    "only-regions-with-nodes-are-looked-at",
    "that a VM may live in a region where the run has no node",
    f"{CALLS}every_region_of_the_run_is_looked_at_and_those_without_nodes_seldom",
    SkyProvisioner,
    "_look",
    "{*active, *self._around.purchases.regions}",
    "active",
)
_fault(
    "the-end-of-a-node-ends-every-vm-of-its-region",
    "whose VM it ends",
    f"{CALLS}the_end_of_a_node_ends_no_other_machine_and_removes_no_other_disk",
    Terminator,
    "end",
    " if instance.name == node.name]",
    "]",
)
_fault(
    "the-end-of-a-node-removes-every-disk-of-its-region",
    "whose disk it removes",
    f"{CALLS}the_end_of_a_node_ends_no_other_machine_and_removes_no_other_disk",
    Terminator,
    "end",
    'if disk.kind == "disk" and disk.node == node.name',
    'if disk.kind == "disk"',
)
_fault(
    "a-controller-that-was-replaced-ends-nodes",
    "that another controller may have taken over",
    f"{CALLS}a_controller_without_its_lease_ends_no_node",
    Terminator,
    "end",
    "self.around.check_lease()",
    "pass",
)
FAULTS["nonsense-of-a-node-hinders-its-end"] = Fault(
    name="nonsense-of-a-node-hinders-its-end",
    forgets="that a node may write anything into its agent's files",
    patches=((NodeFiles, "read", changed(NodeFiles.read, "if issubclass(kind, AgentFile):", "if False:")),),
    found_by=f"{CALLS}a_node_that_writes_nonsense_does_not_hinder_its_own_end",
)
FAULTS["a-stopping-machine-is-not-left"] = Fault(
    name="a-stopping-machine-is-not-left",
    forgets="that a machine is billed until it is gone, when it looks for what is left",
    patches=(
        everywhere(
            reading.left_in_cloud,
            changed(reading.left_in_cloud, "is not InstanceState.GONE", "is InstanceState.RUNNING"),
        ),
    ),
    found_by=f"{READING}every_machine_that_has_not_ended_and_only_this_runs_is_left",
)
FAULTS["steps-lost-before-the-order-count"] = Fault(
    name="steps-lost-before-the-order-count",
    forgets="that a worker may have crashed before the preemption",
    patches=(everywhere(reading._lost_steps, changed(reading._lost_steps, " and row.at_ms >= since_ms", "")),),
    found_by=f"{READING}lost_steps_of_the_ordered_node_count_from_the_order_on",
)
FAULTS["a-role-has-no-region-and-is-not-looked-for"] = Fault(
    name="a-role-has-no-region-and-is-not-looked-for",
    forgets="that some resources have no region",
    patches=(everywhere(reading.left_in_cloud, changed(reading.left_in_cloud, "{*regions, api.home}", "regions")),),
    found_by=f"{READING}what_is_left_counts_in_the_regions_of_nodes_and_beyond_all_regions",
)
_fault(
    "the-newest-vm-of-a-trainer-has-the-address",
    "that a promoted node is the trainer, however old its VM is",
    f"{NODES}the_newest_promotion_has_the_address_although_its_vm_is_the_oldest",
    AgentWatch,
    "trainer_address",
    "(now.generation, node.name, login.address)",
    "(0, node.name, login.address)",
)
_fault(
    "a-node-that-is-ending-becomes-the-trainer",
    "that a node whose end is ordered gets no token and no role",
    f"{NODES}a_node_that_is_ending_gets_no_other_role",
    SkyProvisioner,
    "assign",
    "now is None or node.is_ending",
    "now is None",
)
_fault(
    "a-promotion-changes-only-the-ledger",
    "that a node has to be told of its new role",
    f"{NODES}a_promoted_node_gets_the_role_and_the_token_and_all_others_its_address",
    SkyProvisioner,
    "assign",
    "node.files.write_spec(spec)",
    "pass",
)
FAULTS["every-node-gets-the-runs-token"] = Fault(
    name="every-node-gets-the-runs-token",
    forgets="that a rollout node may do only what its role allows, until it is promoted",
    patches=(everywhere(node_spec, changed(node_spec, 'if role == "trainer" else role_token(run.token, role)', "")),),
    found_by=f"{PROMOTION}a_lost_trainer_is_replaced_by_a_node_that_is_up[9]",
)
