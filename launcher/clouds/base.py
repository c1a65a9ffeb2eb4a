"""The interface to a cloud's own API, beside SkyPilot: labelled resources, the reason of an end, and termination.

SkyPilot buys; this interface checks independently. An implementation reads the cloud's own inventory by label,
region by region. So a forgotten VM or disk is found, and a preemption is distinguished from a shutdown by the cloud's
own report.

Every call may raise CloudUnreachable (unknown state, never "gone"; LoginNeeded is one) or CloudRefused (a permission or
quota is missing; a retry does not help).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.events import Market
from launcher.exit_codes import ExitCode, Failure
from launcher.job.company import NOTHING_NAMED, Named

RUN_LABEL, NODE_LABEL, OWNER_LABEL = "spotrl-run", "spotrl-node", "spotrl-owner"
"""Labels on every VM, disk, group, firewall rule and role made for a run. A label never changes."""


EVERYWHERE = "global"
"""Region of what belongs to no region."""


class CloudUnreachable(Failure):
    """The cloud's API did not answer, or throttled the call. The state is unknown; ask again."""


class NotSettled(CloudUnreachable):
    """A part of the cloud does not know yet what was made or changed a moment ago. The same call succeeds soon."""


class LoginNeeded(CloudUnreachable):
    """The cloud, or a client of it, no longer accepts the user's login, or finds none. A new login heals it.

    Nothing is known, as for every unreachable cloud: no node ends, no place is denied, and buying waits. The message
    names the command. New keys in the user's files are read by running processes.
    """

    exit_code = ExitCode.CREDENTIALS


class CloudRefused(Failure):
    """The cloud refuses permanently: a permission, a quota. The message names the cause and the remedy."""


class InstanceState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    STOPPING = "stopping"
    """The VM is stopping and does no work any more. The cloud may still bill the VM."""
    GONE = "gone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One VM with our labels. `address` is private, `public_address` may be empty.

    `identity`: the VM's instance profile or service account, like `RegionSetup.identity`; empty: not known.
    `reason`: the cloud's own text about the end. `reclaimed`: the cloud reports a spot preemption.
    `launched_ms`, `ended_ms`: UTC milliseconds, None if the cloud does not say.
    `notice_ms`: the notice that Google Cloud granted this spot VM; None: the cloud's usual notice.
    """

    cloud: str
    region: str
    zone: str
    id: str
    name: str
    run: str
    owner: str
    state: InstanceState
    market: Market
    instance_type: str
    address: str = ""
    public_address: str = ""
    identity: str = ""
    launched_ms: int | None = None
    ended_ms: int | None = None
    reason: str = ""
    reclaimed: bool = False
    notice_ms: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """A labelled resource other than a VM: `kind` is disk, address, group, firewall, key, role, network, ..."""

    cloud: str
    region: str
    kind: str
    id: str
    run: str = ""
    owner: str = ""
    node: str = ""
    size_gib: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallerIdentity:
    """The identity behind the credentials.

    `owner` fits in a label (lower case, digits, -; at most 63 characters), `account` is the account or project id.
    """

    account: str
    identity: str
    owner: str


def refuse_foreign(resource: str, run: str, owner: str, labels: Mapping[str, str]) -> None:
    """Raise CloudRefused if a resource with the name of ours was not made by spotrl for this owner's run."""
    if labels.get(RUN_LABEL) != run:
        raise CloudRefused(
            f"{resource} is there already and was not made by spotrl, which leaves it alone; rename or delete it, or "
            "give this run another name (--name)"
        )
    refuse_anothers(resource, run, owner, labels.get(OWNER_LABEL, ""))


def refuse_anothers(resource: str, run: str, owner: str, owner_label: str) -> None:
    """Raise CloudRefused if the resource belongs to another owner. Two users may give their runs the same name.

    `owner_label`: the owner in the resource's label.
    """
    if owner_label not in ("", owner):
        raise CloudRefused(
            f"{resource} is there already and belongs to {owner_label}, who has a run called {run} too; give this one "
            "another name (--name)"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionSetup:
    """The prepared resources of a region for a run's nodes. SkyPilot receives the names.

    `group`: security group (AWS) or network tag (GCP) that opens traffic between our nodes, and SSH from the
    controller's address alone. `identity`: instance profile (AWS) or service account (GCP) of the nodes.
    `network`: on Google Cloud the network; on AWS the Name tag of a VPC named in the job, empty for the default VPC.
    `ssh_from`: the SSH source addresses; empty if SSH comes through a proxy with unknown addresses.
    """

    cloud: str
    region: str
    group: str
    identity: str
    network: str = ""
    subnets: tuple[str, ...] = ()
    ssh_from: str = ""
    named: Named = NOTHING_NAMED
    """The part named in the job, which spotrl never changes."""


class Look(StrEnum):
    """The result of checking a resource named in the job.

    UNSURE: the check could not see the resource, or has doubts.
    """

    OK = "ok"
    WRONG = "wrong"
    UNSURE = "unsure"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The check of a named resource, as text: `found; what to do`."""

    look: Look
    text: str


def wrong_of(findings: Sequence[Finding]) -> list[str]:
    """Return the texts of all wrong findings."""
    return [finding.text for finding in findings if finding.look is Look.WRONG]


def refuse_wrong(findings: Sequence[Finding]) -> None:
    """Raise CloudRefused with every wrong finding about resources named in a job."""
    if wrong := wrong_of(findings):
        raise CloudRefused(
            f"{'; '.join(wrong)} (the job names it, so spotrl does not change it; `spotrl check` looks again)"
        )


class CloudApi(Protocol):
    """One cloud, through its own client library. Thread-safe; every call is bounded in time (10 s)."""

    cloud: str

    home: str
    """The region under which `resources` lists what belongs to no region (roles, networks), and nothing else. It has no
    VMs. An organisation may forbid every real region, and what belongs to none has to be found all the same."""

    def caller(self) -> CallerIdentity:
        """Return the identity behind the credentials."""

    def check_launches(self) -> None:
        """Check the calls that SkyPilot makes before a launch in any region. Raises CloudRefused with the remedy."""

    def regions(self) -> Sequence[str]:
        """Return every region of the account, because a forgotten VM may be in any region.

        If no region may be asked for the list, it is that of the client's library, where some may not be switched on.
        """

    def instances(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Instance]:
        """Return every labelled VM of a region, including ended VMs as long as the cloud remembers."""

    def end_of(self, instance: Instance) -> Instance:
        """Return the end of a VM missing from `instances`: GONE, with the reason as far as the cloud knows."""

    def resources(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Resource]:
        """Return every other labelled resource of a region, above all disks."""

    def end(self, instances: Sequence[Instance]) -> None:
        """Delete the VMs with their boot disks. Idempotent; returns when the cloud has accepted the order."""

    def remove(self, resources: Sequence[Resource]) -> Sequence[Resource]:
        """Delete the resources. Return those that cannot go yet (a group that a dying VM still uses)."""

    def prepare(
        self,
        region: str,
        *,
        run: str,
        owner: str,
        ssh_from: str,
        buckets: Sequence[str],
        models: Sequence[str] = (),
        named: Named = NOTHING_NAMED,
    ) -> RegionSetup:
        """Find or create the resources for the run's nodes in a region: group, rules, identity. Idempotent.

        `ssh_from`: the controller's address as CIDR. `buckets`: URLs that the nodes may read and write.
        `models`: URLs that the nodes may only read. `named`: existing resources used unchanged; spotrl only checks
        them.
        Raises CloudRefused if the resources belong to another owner, or if a named resource is unsuitable.
        """

    def check_identity(self, named: Named) -> Sequence[Finding]:
        """Check the identity named in the job. Empty if the job names none."""

    def check_network(self, region: str, named: Named, ssh_from: str) -> Sequence[Finding]:
        """Check the network named in the job in a region, with its subnets and rules. Empty if the job names none."""

    def open_rules(self, setup: RegionSetup) -> Sequence[str]:
        """Return the missing rules of the group or network, as text; empty if all rules exist."""
