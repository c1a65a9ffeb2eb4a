"""Planted bugs of nodes on clouds: whose VM is ended, what is removed while VMs live, what a selftest looks for."""

from typing import Any

from launcher.provision.sky.cloud_reports import CloudReports
from launcher.provision.sky.launches import Launches
from launcher.provision.sky.regions import Regions
from launcher.provision.sky.sky_provisioner import SkyProvisioner
from launcher.selftest import reading
from tests.mutants.faults import Fault
from tests.mutants.planted_bug import changed, everywhere

NODES = "tests/launcher/cluster/test_sky_provisioner.py::test_"
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
    "if one.name == node.name and",
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
    "(one.public_address, one.address)",
    "(one.public_address,)",
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
FAULTS["a-role-has-no-region-and-is-not-looked-for"] = Fault(
    name="a-role-has-no-region-and-is-not-looked-for",
    forgets="that some resources have no region",
    patches=(everywhere(reading.left_in_cloud, changed(reading.left_in_cloud, "{*regions, api.home}", "regions")),),
    found_by=f"{READING}what_is_left_counts_in_the_regions_of_nodes_and_beyond_all_regions",
)
