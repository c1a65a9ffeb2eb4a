"""What spotrl asks of a cloud itself, beside SkyPilot: what exists under our labels, why it ended, and its end.

SkyPilot buys; this is the second pair of eyes. It reads the cloud's own inventory by label, region by region, so that
a machine or disk that nobody remembers is found, and a reclaim is told from a shutdown by the cloud's own words.

Every call may raise CloudUnreachable (nothing is known: never "gone") or CloudRefused (permission, quota: for good).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.events import Market
from launcher.company import NOTHING_NAMED, Named
from launcher.exit_codes import Failure

RUN_LABEL, NODE_LABEL, OWNER_LABEL = "spotrl-run", "spotrl-node", "spotrl-owner"
"""On every machine, disk, group, firewall rule, role that is made for a run. None of them ever changes."""


class CloudUnreachable(Failure):
    """The cloud's API did not answer, or asks to be called less. Nothing is known; ask again."""


class CloudRefused(Failure):
    """The cloud says no, and will say it again: a permission, a quota. The message names it and what to do."""


class MachineState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    STOPPING = "stopping"
    """On its way out, nobody works there any more; it may still be billed."""
    GONE = "gone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One instance that carries our labels. `address` is private, `public_address` may be empty.

    `identity`: what it runs as (instance profile, service account), as `Place.identity`; empty: the cloud does not say.
    `reason`: the cloud's own words for its end. `reclaimed`: the cloud took it back (a spot reclaim), by its own word.
    `launched_ms`, `ended_ms`: UTC milliseconds, None where the cloud does not say.
    """

    cloud: str
    region: str
    zone: str
    id: str
    name: str
    run: str
    owner: str
    state: MachineState
    market: Market
    instance_type: str
    address: str = ""
    public_address: str = ""
    identity: str = ""
    launched_ms: int | None = None
    ended_ms: int | None = None
    reason: str = ""
    reclaimed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """Something else that carries our labels: `kind` is disk, address, group, firewall, key, role, network, ..."""

    cloud: str
    region: str
    kind: str
    id: str
    run: str = ""
    owner: str = ""
    node: str = ""
    size_gib: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who asks: `owner` fits in a label (lower case, digits, -; at most 63), `account` is the account or project id."""

    account: str
    identity: str
    owner: str


def refuse_anothers(what: str, run: str, owner: str, found: str) -> None:
    """Two people may call their runs the same. `found`: whose it is by its label. Raises CloudRefused."""
    if found not in ("", owner):
        raise CloudRefused(
            f"{what} is there already and belongs to {found}, who has a run called {run} too; give this one another "
            "name (--name)"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What is ready in a region for a run's nodes: SkyPilot is told these names.

    `group`: security group (AWS) or network tag (GCP) that lets our nodes talk to one another and lets SSH in from the
    controller's address alone. `identity`: instance profile (AWS) or service account (GCP) that nodes run as.
    `network`: of Google Cloud; of AWS the Name tag of a VPC that the job names, empty for the default one.
    `ssh_from`: empty where nobody here knows which addresses SSH comes from, because it comes through a proxy.
    """

    cloud: str
    region: str
    group: str
    identity: str
    network: str = ""
    subnets: tuple[str, ...] = ()
    ssh_from: str = ""
    named: Named = NOTHING_NAMED
    """The part of it that the job named: it is never changed."""


class Look(StrEnum):
    """Result of a look at a thing that the job names. UNSURE: it could not be seen, or may not do."""

    OK = "ok"
    WRONG = "wrong"
    UNSURE = "unsure"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A look at a named thing, in words: `found; what to do`."""

    look: Look
    text: str


def wrong_of(findings: Sequence[Finding]) -> list[str]:
    """Return what is wrong, in words."""
    return [one.text for one in findings if one.look is Look.WRONG]


def refuse_wrong(findings: Sequence[Finding]) -> None:
    """Raise CloudRefused with everything that is wrong with the things that a job names."""
    if wrong := wrong_of(findings):
        raise CloudRefused(
            f"{'; '.join(wrong)} (the job names it, so spotrl does not change it; `spotrl check` looks again)"
        )


class CloudApi(Protocol):
    """One cloud, through its own client library. Thread-safe; every call is bounded in time (10 s)."""

    cloud: str

    home: str
    """The region under which `things` lists what belongs to no region (roles, networks)."""

    def caller(self) -> Caller:
        """Whose credentials these are."""

    def regions(self) -> Sequence[str]:
        """Every region of the account: where a forgotten machine could be."""

    def machines(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Machine]:
        """Every labelled machine of a region, those that ended a while ago too as long as the cloud remembers."""

    def end_of(self, machine: Machine) -> Machine:
        """What became of a machine that `machines` does not list any more: GONE, and why, as far as the cloud knows."""

    def things(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Thing]:
        """Every other labelled thing of a region: disks above all."""

    def end(self, machines: Sequence[Machine]) -> None:
        """Delete them, with their boot disks. Idempotent; returns when the cloud has taken the order."""

    def remove(self, things: Sequence[Thing]) -> Sequence[Thing]:
        """Delete them. Returns those that cannot go yet (a group that a dying machine still uses)."""

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
    ) -> Place:
        """Make what the run's nodes need in a region, or find it: group, rules, identity. Idempotent.

        `ssh_from`: the controller's address as CIDR. `buckets`: the URLs that the nodes may read and write.
        `models`: those that they may only read. `named`: what is there and used as it is; it is looked at only.
        Raises CloudRefused when it is there already and somebody else's, or when something named will not do.
        """

    def check_identity(self, named: Named) -> Sequence[Finding]:
        """Look at the identity that the job names. Empty when it names none."""

    def check_network(self, region: str, named: Named, ssh_from: str) -> Sequence[Finding]:
        """Look at the network that the job names in a region, its subnets and its rules. Empty when it names none."""

    def open_rules(self, place: Place) -> Sequence[str]:
        """Return the rules that the group or network lacks, in words that name each; empty when all are there."""
