"""Nodes on real clouds: SkyPilot buys them, the clouds' inventories report their state, an SSH connection goes to each.

RUN/nodes/NAME/  want.json (Placement)  spec.json (NodeSpec)  launch.json  machine.json  login.json  ssh.key
                 stopping.json  release.json  ending.json  ended.json  cleared.json
                 and beside these the mirror of the node's own files (node_link.py)

requested -> launch sent to SkyPilot -> VM up and set up -> agent started -> ready -> ending -> ended -> cleared

`SkyProvisioner` keeps no state except these files, so any process may continue the work. Each `observe` advances every
node by one step. Blocking calls run in a pool, one at a time for each node and each region. Promises:

A node is lost when the cloud reports the VM gone, or when the node stops answering although a fresh API call shows the
VM running. An API that does not answer proves nothing. A released name is never launched again. `ended.json` says that
no VM and no disk of the name is left. `cleared.json` says that SkyPilot has also forgotten the name. A VM with our
label and without a request is reported. A VM that lives on after its end is terminated again. The content of a file
damaged by a power cut is read again from the cloud or from SkyPilot. A node with a lost spec is terminated.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from engine.clock import Clock
from engine.durable import sync_folder
from engine.node_spec import NodeSpec
from launcher.clouds.base import (
    NODE_LABEL,
    OWNER_LABEL,
    RUN_LABEL,
    CloudApi,
    CloudRefused,
    Machine,
    MachineState,
    Place,
    Thing,
)
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.exit_codes import Failure
from launcher.job.company import NOTHING_NAMED, Named
from launcher.placement.placement import Placement
from launcher.provision.local.provisioner import node_folder, nodes_folder
from launcher.provision.sky.bundle import REMOTE_BUNDLE, Bundle
from launcher.provision.sky.chores import Chores, NotYet
from launcher.provision.sky.cloud_node import CloudNode, Link
from launcher.provision.sky.node_link import Login
from launcher.provision.sky.outcome import Failed, Outcome
from launcher.provision.sky.set_up import MachineUnreachable, SetUp, ask_set_up
from launcher.provision.sky.sky import Sky
from launcher.provision.sky.task import Launch

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Time between two reads of SkyPilot's requests and of the inventory of a region with nodes."""

SWEEP_SECONDS = 60.0
"""Time between two reads of a region where the run may have nodes and should have none."""

FRESH_SECONDS = 10.0
"""Age up to which an inventory counts as proof."""

SILENT_SECONDS = 20.0
"""Silence of a connection after which the node is in doubt."""

LOST_SECONDS = 90.0
"""Silence after which a node is terminated even though the cloud calls the VM running: the node costs money without
work."""

ALL_SILENT = 4
"""Factor on the patience while no node at all answers: the controller's own network may be down."""

FIRST_WORD_SECONDS = 300.0
"""Patience with a VM that is set up and has never answered."""

LAUNCH_SECONDS = 1800.0
"""Longest time of a launch. SkyPilot waits 10 minutes for SSH, and an environment takes minutes to install."""

LAUNCH_TRIES = 5
LAUNCH_GAP_MS, LONGEST_LAUNCH_GAP_MS = 10_000, 120_000
"""Tries per node for launches that fail without a reason from the cloud, and the gap between tries, which doubles."""

READY_SECONDS = 900.0
"""Longest time until an agent's workers call in. Loading a large model takes minutes."""

RULES_SECONDS = 60.0
"""Time after which missing firewall rules are looked up for an agent that is not ready. The lookup repeats at the
same gap."""

STOPPED_SECONDS = 120.0
"""Time after which a stopping VM counts as stopped for good. The disk of a stopped VM is billed."""

GONE_LOOKS = 2
"""Inventory reads in a row that must miss a VM before the VM counts as gone. New VMs may be missing for a moment."""

NEVER_SEEN_LOOKS = 15
"""Inventory reads after which a VM that SkyPilot logged in to, and no read found, counts as gone."""

EXIT_SECONDS = 3.0
"""Time for which an agent's exit must last. A shorter exit is a restart."""

AFTER_NOTICE_MS = 600_000
"""Time after an announced preemption for which the VM is left to the cloud."""

STOPPING_NOTICE_MS = 30_000
"""Assumed time left if a stopping VM is the first sign of a preemption (Google Cloud's notice)."""

SET_UP_SECONDS = 30.0
"""Time between two queries to SkyPilot for the set-up. Each query costs an SSH session and seconds of CPU."""

REARM_SECONDS = 300.0
AUTOSTOP_MARGIN_MINUTES = 30
"""Delay of SkyPilot's own timer on the VM after the spend deadline, in case the node's agent did not terminate the
VM."""

UNLIMITED_MINUTES = 24 * 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Purchases:
    """The common facts of all nodes of a run.

    `owners`: our identity, by cloud. `regions`: where the run may have nodes, (cloud, region). `weights`: location
    of the model, by cloud (weights.py); empty if the model ships with spotrl. `images`: by cloud, or cloud/region.
    """

    run: str
    owners: Mapping[str, str]
    folder: Path
    ssh_from: str
    buckets: Sequence[str]
    bundle: Bundle
    regions: Sequence[tuple[str, str]]
    weights: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=dict)
    named: Callable[[str, str], Named] = lambda cloud, region: NOTHING_NAMED
    """The identity and network named in the job, by cloud and region."""


@dataclass(slots=True)
class _Seen:
    """The last inventory of a region.

    `at`: time of the last answer; `trouble`: reason for missing answers since then.
    """

    machines: tuple[Machine, ...] = ()
    at: float | None = None
    looks: int = 0
    trouble: str = ""


class SkyProvisioner:
    """Starts and stops nodes on AWS and Google Cloud, without waiting.

    For use by one thread; the pool has its own threads.
    """

    def __init__(
        self,
        purchases: Purchases,
        *,
        sky: Sky,
        clouds: Mapping[str, CloudApi],
        clock: Clock,
        link: Callable[[Login, Path], Link],
        pool: Executor,
        ask_set_up: Callable[[Login], SetUp] = ask_set_up,
        monotonic: Callable[[], float] = time.monotonic,
        check_lease: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the provisioner.

        `check_lease` is called before each purchase and raises LeaseLost after a takeover.
        """
        self._check_lease = check_lease
        self._all, self._sky, self._clouds, self._clock = purchases, sky, clouds, clock
        self._make_link, self._monotonic = link, monotonic
        self._ask_set_up = ask_set_up
        self._nodes: dict[str, CloudNode] = {}
        self._chores = Chores(pool, monotonic)
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._outcomes: dict[str, Outcome | None] = {}
        self._places: dict[tuple[str, str], Place] = {}
        self._preparing = Lock()
        self._missing_rules: dict[tuple[str, str], str] = {}
        self._tidied: set[tuple[str, str]] = set()
        self._last_observed: float | None = None
        self._trainer: str | None = None
        """Private address of the newest trainer, as found by the current pass."""
        nodes_folder(purchases.folder).mkdir(parents=True, exist_ok=True, mode=0o700)

    # --- calls of the controller ---------------------------------------------------------------------

    def request(self, want: Placement, spec: NodeSpec) -> None:
        """Write the intent; the next `observe` acts on the intent.

        A repeated name requests no second node. A name that ended stays ended.
        """
        node = self._node(spec.node)
        if node.has("spec"):
            return
        self._tidied.clear()
        node.fresh = not node.has("launch")
        node.write_want(want)
        node.write("spec", json.loads(spec.model_dump_json()))

    def observe(self) -> Sequence[NodeFact]:
        """Return the state of every node from current knowledge, and advance each node by one step."""
        now = self._monotonic()
        passed = 0.0 if self._last_observed is None else min(1.0, now - self._last_observed)
        self._last_observed = now
        for path in nodes_folder(self._all.folder).iterdir():
            if path.is_dir():
                self._node(path.name)
        self._look()
        self._trainer = self._trainer_address()
        nodes = sorted(self._nodes.values(), key=lambda node: node.name)
        for node in nodes:
            if not node.is_cleared():
                self._advance(node, passed)
        facts = [fact for node in nodes if (fact := self._fact(node)) is not None]
        return facts + self._strangers()

    def release(self, names: Sequence[str]) -> None:
        """Write the release; the next `observe` acts on the release.

        A name without a request is terminated by its label.
        """
        for name in names:
            node = self._node(name)
            if not node.is_begun("release") and not node.has("ended"):
                node.write("release", {"at_ms": self._clock.now_ms()})
            self._find_machine(node)

    def rearm(self, name: str, money_deadline_ms: int) -> None:
        """Send the node a new spend deadline. SkyPilot's own timer on the VM follows."""
        node = self._nodes.get(name)
        if node is None or node.has("ended"):
            return
        node.deadline_ms = money_deadline_ms
        if node.link is not None:
            node.link.rearm(money_deadline_ms - self._clock.now_ms())

    def door(self, name: str, port: int) -> tuple[str, int] | None:
        """Return the local end of the tunnel to the node."""
        node = self._nodes.get(name)
        return node.link.door(port) if node is not None and node.link is not None else None

    def tidy(self) -> bool:
        """Remove the groups, networks and identities of the run, once no node is left."""
        self.observe()
        if any(not node.is_cleared() for node in self._nodes.values()):
            return False
        places = self._used()
        for cloud, region in places - self._tidied:
            self._chores.do(f"tidy {cloud}/{region}", partial(self._tidy, cloud, region))
        return places <= self._tidied

    def close(self) -> None:
        """Drop tasks waiting for a thread of the pool, and close the connections to nodes."""
        self._chores.close()
        for node in self._nodes.values():
            self._close(node)

    def troubles(self) -> Sequence[str]:
        """Return the current errors in words: clouds that do not answer, resources that cannot be removed."""
        return [f"{what}: {text}" for what, text in sorted(self._chores.troubles.items())]

    # --- reading ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Query the clouds and SkyPilot if due. The answers arrive in a later pass."""
        nodes = [node for node in self._nodes.values() if not node.is_cleared()]
        active = {place for node in nodes if (place := node.region) is not None}
        for cloud, region in {*active, *self._all.regions}:
            seconds = LOOK_SECONDS if (cloud, region) in active else SWEEP_SECONDS
            self._chores.every(seconds, f"look {cloud}/{region}", partial(self._look_at, cloud, region))
        for cloud, region in {place for node in nodes if node.has("login") and (place := node.region)}:
            if (cloud, region) not in self._places:  # a process that continues the run may have another address
                self._chores.do(f"place {cloud}/{region}", partial(self._prepare, cloud, region))
        requests = [str(one["request_id"]) for node in self._launching() if (one := node.read("launch"))]
        if requests:
            self._chores.every(LOOK_SECONDS, "requests", partial(self._poll, requests))

    def _look_at(self, cloud: str, region: str) -> None:
        seen = self._seen.setdefault((cloud, region), _Seen())
        try:
            machines = tuple(self._machines_in(cloud, region))
        except Failure as failure:
            seen.trouble = str(failure)
            raise
        seen.machines, seen.at, seen.trouble = machines, self._monotonic(), ""
        seen.looks += 1

    def _machines_in(self, cloud: str, region: str) -> list[Machine]:
        """Return the run's VMs.

        Another user's run may have the same name: VMs with another owner's label are left alone.
        """
        found = self._clouds[cloud].machines(region, run=self._all.run)
        return [one for one in found if one.owner in ("", self._all.owners[cloud])]

    def _things_in(self, cloud: str, region: str) -> list[Thing]:
        found = self._clouds[cloud].things(region, run=self._all.run)
        return [one for one in found if one.owner in ("", self._all.owners[cloud])]

    def _poll(self, requests: Sequence[str]) -> None:
        known = self._sky.poll(requests)
        forgotten = Outcome(failed=Failed.UNKNOWN, text="SkyPilot's API server does not know its launch any more")
        self._outcomes.update({one: known.get(one, forgotten) for one in requests})

    def _machines(self) -> Iterable[Machine]:
        return [machine for seen in list(self._seen.values()) for machine in seen.machines]

    def _strangers(self) -> list[NodeFact]:
        """Return VMs with the run's label and without a request. Terminate VMs that live on after their end."""
        facts = []
        for seen in list(self._seen.values()):
            for machine in seen.machines:
                node = self._nodes.get(machine.name)
                if machine.state not in (MachineState.PENDING, MachineState.RUNNING):
                    continue
                if node is None:
                    evidence = f"{machine.cloud} {machine.id} in {machine.zone} bears the run's label"
                    facts.append(NodeFact(name=machine.name, status=NodeStatus.PENDING, evidence=evidence))
                elif node.over is not None and seen.at is not None and seen.at > node.over_since:
                    self._chores.do(f"end {machine.id}", partial(self._end_again, machine))
        return facts

    # --- advancing nodes ---------------------------------------------------------------------------

    def _advance(self, node: CloudNode, passed: float) -> None:
        if self._chores.is_busy(node.name):
            return  # a pool task is writing the node's files
        if node.has("ended"):
            self._close(node)
            self._chores.do(node.name, partial(self._clear, node))
            return
        if node.is_ending:
            self._close(node)
            self._chores.do(node.name, partial(self._end, node))
            return
        if not node.has("spec") and not self._is_damaged(node):
            return  # an interrupted intent: a repeated request completes the files
        machine = self._cloud_says(node)
        if node.is_ending or self._chores.is_busy(node.name):
            return
        self._mend(node)
        if node.is_ending:
            return
        launch = node.read("launch")
        if launch is None:
            self._chores.do(node.name, partial(self._launch, node))
        elif not node.has("login"):
            self._wait_for_launch(node, launch)
        else:
            self._keep(node, machine, passed)

    def _is_damaged(self, node: CloudNode) -> bool:
        """Return whether the node's spec was written and cannot be read any more."""
        return not node.has("spec") and (node.is_begun("spec") or node.is_begun("launch"))

    def _mend(self, node: CloudNode) -> None:
        """Recover the content of a damaged file, or end the node if no other source knows the content."""
        if self._is_damaged(node):
            self._ending(node, NodeStatus.GONE, "its spec.json cannot be read: a power cut of the launcher's machine?")
        elif not node.has("want") and not node.has("launch"):
            self._ending(node, NodeStatus.GONE, "its want.json cannot be read: a power cut of the launcher's machine?")
        elif node.is_begun("login") and not node.can_log_in:
            log.warning("%s: its login cannot be read any more; SkyPilot is asked again", node.name)
            self._close(node)
            node.login = None
            node.forget("login")
            node.forget("launch")  # an old launch would count as late; its cluster is adopted instead

    def _find_machine(self, node: CloudNode) -> None:
        """Record the VM of a node by its label, if no file says where the node is."""
        if node.region is None:
            known = _newest([*self._machines()], node.name)
            if known is not None:
                node.write_machine(known)

    def _cloud_says(self, node: CloudNode) -> Machine | None:
        """Return the node's VM from the inventory. Begin the node's end if the cloud reports an end."""
        self._find_machine(node)
        place = node.region
        seen = self._seen.get(place) if place is not None else None
        if seen is None or seen.at is None or node.missing_look == seen.looks:
            return None if seen is None else _newest(seen.machines, node.name)
        node.missing_look = seen.looks
        machine, known = _newest(seen.machines, node.name), node.machine
        if machine is not None and machine.state in (MachineState.PENDING, MachineState.RUNNING):
            node.missing, node.stopping_since = 0, None
            if machine != known:
                node.write_machine(machine)
            self._end_doubles(node, seen.machines)
            self._refuse_strange_identity(node, machine)
            return machine
        if known is None and not node.has("login"):
            return machine  # no VM existed yet, or only remains of a SkyPilot attempt
        if machine is not None and machine.state is MachineState.STOPPING:
            self._is_stopping(node, machine)
            return machine
        node.missing += 1
        if machine is not None or node.missing >= GONE_LOOKS or node.has("stopping"):
            last = machine or known
            if last is not None:
                patient = node.missing * LOOK_SECONDS < STOPPED_SECONDS
                self._chores.do(node.name, partial(self._learn_end, node, last, patient))
            elif node.missing > NEVER_SEEN_LOOKS:
                self._ending(node, NodeStatus.GONE, "SkyPilot says that it is up, and its cloud lists no machine of it")
        return machine

    def _refuse_strange_identity(self, node: CloudNode, machine: Machine) -> None:
        """Deny a node that runs under a foreign identity.

        Without our plugin, SkyPilot's API server attaches an identity of its own with all permissions.
        """
        place = self._places.get((machine.cloud, machine.region))
        if place is not None and machine.identity and machine.identity != place.identity:
            evidence = (
                f"it runs as {machine.identity} and not as {place.identity}: SkyPilot's API server was not started by "
                "spotrl and does not have its plugin (launcher/provision/sky/sky_plugins.yaml); name that file there "
                "in SKYPILOT_SERVER_PLUGINS_CONFIG, or end the server (`sky api stop`) and have spotrl start one"
            )
            self._ending(node, NodeStatus.DENIED, evidence)

    def _is_stopping(self, node: CloudNode, machine: Machine) -> None:
        """Record a notice if none came, and end the node if the VM keeps stopping."""
        now = self._monotonic()
        if node.stopping_since is None:
            node.stopping_since = now
        # before the login, SkyPilot itself stops VMs of a failed launch
        if not node.has("stopping") and node.has("login"):
            deadline_ms = self._clock.now_ms() + STOPPING_NOTICE_MS
            node.write("stopping", {"deadline_ms": deadline_ms, "reason": machine.reason})
            if node.link is not None:
                node.link.notice(deadline_ms)
        if now - node.stopping_since > STOPPED_SECONDS:
            self._chores.do(node.name, partial(self._learn_end, node, machine, False))

    def _end_doubles(self, node: CloudNode, machines: Sequence[Machine]) -> None:
        """Terminate second VMs of the same name, left by SkyPilot's retries. The VM of SkyPilot's login stays."""
        alive = [one for one in machines if one.name == node.name and one.state is MachineState.RUNNING]
        login = node.read("login")
        if len(alive) > 1 and login is not None:
            extra = [one for one in alive if login["host"] not in (one.public_address, one.address)]
            if 0 < len(extra) < len(alive):
                log.warning("%s has %s machines: the extra ones are ended", node.name, len(alive))
                self._chores.do(f"double {node.name}", partial(self._clouds[extra[0].cloud].end, extra))

    def _wait_for_launch(self, node: CloudNode, launch: Mapping[str, Any]) -> None:
        outcome = Outcome() if launch.get("adopted") else self._outcomes.get(str(launch["request_id"]))
        waited_ms = self._clock.now_ms() - int(launch["at_ms"])
        if outcome is None:
            if waited_ms > LAUNCH_SECONDS * 1000:
                self._ending(node, NodeStatus.GONE, f"it did not come up within {LAUNCH_SECONDS:.0f} s", ask_rules=True)
        elif outcome.failed is None and node.set_up is not None and node.set_up.failed is not None:
            self._ending(node, NodeStatus.GONE, f"its set-up failed: {node.set_up.text}", ask_rules=True)
        elif outcome.failed is None and node.set_up is not None and node.digest not in ("", self._all.bundle.digest):
            evidence = f"it was set up from bundle {node.digest}, and this run's is {self._all.bundle.digest}"
            self._ending(node, NodeStatus.GONE, evidence)
        elif outcome.failed is None and waited_ms > LAUNCH_SECONDS * 1000:
            evidence = f"it was not set up within {LAUNCH_SECONDS:.0f} s {node.words}".rstrip()
            self._ending(node, NodeStatus.GONE, evidence, ask_rules=True)
        elif outcome.failed is None:
            self._chores.do(node.name, partial(self._log_in, node))
            if node.login is not None:
                self._chores.every(SET_UP_SECONDS, f"set-up {node.name}", partial(self._ask_sky_set_up, node))
        elif outcome.failed is Failed.NO_CAPACITY:
            self._ending(node, NodeStatus.NO_CAPACITY, outcome.text, tried=_tried(node.want))
        elif outcome.failed is Failed.DENIED:
            self._ending(node, NodeStatus.DENIED, outcome.text)
        elif outcome.failed is Failed.UNKNOWN and (tries := int(launch.get("tries", 1))) < LAUNCH_TRIES:
            if waited_ms > min(LAUNCH_GAP_MS * 2 ** (tries - 1), LONGEST_LAUNCH_GAP_MS):
                self._chores.do(node.name, partial(self._launch, node, tries=tries + 1))
        else:
            self._ending(node, NodeStatus.GONE, f"its launch failed: {outcome.text}", ask_rules=True)

    def _keep(self, node: CloudNode, machine: Machine | None, passed: float) -> None:
        """Keep the connection and the agent of a set-up VM alive, and watch both."""
        login = node.read("login") or {}
        if node.link is None:
            line = Login(
                host=login["host"],
                user=login["user"],
                key=Path(login["key"]),
                port=login["port"],
                proxy=login.get("proxy", ""),
            )
            node.link = self._make_link(line, node.folder)
            if (stopping := node.read("stopping")) is not None:
                node.link.notice(int(stopping["deadline_ms"]))
        self._tell(node, login)
        if self._has_exited(node) or self._is_late(node):
            return
        self._doubt(node, machine, passed)
        if node.deadline_ms is not None and self._is_heard(node):
            self._chores.every(REARM_SECONDS, f"rearm {node.name}", partial(self._rearm_sky, node))

    def _tell(self, node: CloudNode, login: Mapping[str, Any]) -> None:
        """Start the agent with the address of the current trainer."""
        spec, place = NodeSpec.model_validate(node.read("spec")), node.region
        host = login["address"] if spec.role == "trainer" else self._trainer
        if (
            place is None
            or host is None
            or node.link is None
            or (node.told is not None and node.told.coordinator_host == host)
        ):
            return
        deadline_ms = node.deadline_ms or spec.money_deadline_ms
        home = f"{login['home']}/spotrl"
        node.told, node.told_at = (
            spec.model_copy(
                update={
                    "coordinator_host": host,
                    "cloud": place[0],
                    "folder": f"{home}/node",
                    "workdir": f"{home}/work" if spec.workdir else None,
                    "digest": self._all.bundle.digest,
                    "weights": self._all.weights.get(place[0], ""),
                    "money_deadline_ms": None,
                    "money_left_ms": None if deadline_ms is None else max(0, deadline_ms - self._clock.now_ms()),
                }
            ),
            self._monotonic(),
        )
        node.link.run(node.told)

    def _trainer_address(self) -> str | None:
        """Return the private address of the newest trainer that has not ended."""
        trainers = []
        for node in self._nodes.values():
            if node.is_ending:
                continue
            spec, login = node.read("spec"), node.read("login")
            if spec is not None and spec["role"] == "trainer" and login is not None:
                trainers.append((int((node.read("launch") or {}).get("at_ms", 0)), node.name, str(login["address"])))
        return max(trainers)[2] if trainers else None

    def _has_exited(self, node: CloudNode) -> bool:
        """Return whether the agent has exited for good, and end the node unless a preemption is near.

        AWS does not bill a spot instance that AWS preempts within an hour, but does if we terminate the instance first.
        """
        said = node.read("exit")
        if said is None:
            node.exit_since = None
            return False
        now = self._monotonic()
        node.exit_since = now if node.exit_since is None else node.exit_since
        deadline_ms = node.notice_ms
        if deadline_ms is not None and self._clock.now_ms() < deadline_ms + AFTER_NOTICE_MS:
            return False
        if now - node.exit_since < EXIT_SECONDS:
            return False
        text = f": {said['text']}" if said.get("text") else ""
        self._ending(node, NodeStatus.GONE, f"its agent exited with code {said.get('code')}{text}")
        return True

    def _is_late(self, node: CloudNode) -> bool:
        """Return whether the node's workers are late, and end the node after `READY_SECONDS`.

        A missing firewall rule is the usual reason, and can be looked up.
        """
        waited, place = self._monotonic() - node.told_at, node.region
        if node.told is None or place is None or node.has("ready") or waited < RULES_SECONDS:
            return False
        cloud, region = place
        self._chores.every(RULES_SECONDS, f"rules {cloud}/{region}", partial(self._ask_rules, cloud, region))
        if waited < READY_SECONDS:
            return False
        evidence = f"its workers did not call in within {READY_SECONDS:.0f} s"
        self._ending(node, NodeStatus.GONE, evidence, ask_rules=True)
        return True

    def _doubt(self, node: CloudNode, machine: Machine | None, passed: float) -> None:
        """End a node after long silence. Silence counts only if a fresh inventory shows the VM running."""
        if self._is_heard(node):
            node.silent = 0.0
            return
        node.silent += passed
        patience = FIRST_WORD_SECONDS if node.link is None or node.link.heard_s is None else LOST_SECONDS
        if not any(self._is_heard(other) for other in self._nodes.values()):
            patience *= ALL_SILENT
        if node.silent < patience or machine is None or not self._is_fresh(node):
            return
        trouble = node.link.trouble if node.link is not None else ""
        text = f"it stopped answering: nothing was heard for {node.silent:.0f} s ({trouble}), though {machine.cloud} "
        self._ending(node, NodeStatus.GONE, f"{text}calls it {machine.state}", ask_rules=True)

    def _is_heard(self, node: CloudNode) -> bool:
        return node.link is not None and node.link.heard_s is not None and node.link.heard_s <= SILENT_SECONDS

    def _is_fresh(self, node: CloudNode) -> bool:
        place = node.region
        seen = self._seen.get(place) if place is not None else None
        return seen is not None and seen.at is not None and self._monotonic() - seen.at <= FRESH_SECONDS

    # --- blocking calls -----------------------------------------------------------------------------

    def _launch(self, node: CloudNode, tries: int = 1) -> None:
        """Send the launch to SkyPilot, unless a launch from before a crash exists."""
        if not node.fresh and tries == 1 and self._adopt(node):
            return
        want = node.want
        if want is None:
            self._ending(node, NodeStatus.GONE, "its want.json cannot be read, and SkyPilot does not know its launch")
            return
        try:
            place = self._prepare(want.cloud, want.region)
        except CloudRefused as refused:
            self._ending(node, NodeStatus.DENIED, str(refused))
            return
        spec, now_ms = NodeSpec.model_validate(node.read("spec")), self._clock.now_ms()
        node.fresh = False
        launch = Launch(
            name=node.name,
            want=want,
            place=place,
            labels={RUN_LABEL: self._all.run, NODE_LABEL: node.name, OWNER_LABEL: self._all.owners[want.cloud]},
            setup=self._all.bundle.setup,
            files={REMOTE_BUNDLE: str(self._all.bundle.folder)},
            autostop_minutes=self._minutes_left(spec.money_deadline_ms),
            image=self._all.images.get(f"{want.cloud}/{want.region}", self._all.images.get(want.cloud)),
        )
        self._check_lease()
        request = self._sky.start(launch)
        node.forget("machine")  # from an earlier attempt
        node.missing = 0
        node.write("launch", {"request_id": request, "at_ms": now_ms, "tries": tries})

    def _adopt(self, node: CloudNode) -> bool:
        """Adopt a request or cluster left by a launch before a crash. VMs without either are found by the launch."""
        now_ms = self._clock.now_ms()
        request = self._sky.pending(node.name).get(node.name)
        if request is not None:
            node.write("launch", {"request_id": request, "at_ms": now_ms, "tries": 1})
            return True
        if self._sky.clusters(node.name).get(node.name) == "UP":
            node.write("launch", {"request_id": "", "at_ms": now_ms, "adopted": True})
            return True
        for cloud, region in self._all.regions:
            lost = [
                one
                for one in self._machines_in(cloud, region)
                if one.name == node.name and one.state is not MachineState.GONE
            ]
            if lost and (cloud, region) != node.region:
                self._clouds[cloud].end(lost)
        return False

    def _log_in(self, node: CloudNode) -> None:
        """Record the login, once the VM reports a finished set-up."""
        if node.login is None:
            self._find_login(node)
        assert node.login is not None
        try:
            found = self._ask_set_up(node.login)
        except MachineUnreachable as error:
            node.words = str(error)
            raise NotYet(str(error)) from None
        node.words, node.digest = "", found.digest
        if found.digest != self._all.bundle.digest:
            raise NotYet(f"{node.name} is not set up yet")
        said = {
            "host": node.login.host,
            "user": node.login.user,
            "port": node.login.port,
            "key": str(node.login.key),
            "proxy": node.login.proxy,
            "address": node.private_address,
            "home": found.home,
        }
        node.write("login", said)
        if (machine := node.machine) is not None:
            node.write_machine(machine)

    def _find_login(self, node: CloudNode) -> None:
        login = self._sky.login(node.name)
        if login is None:
            raise NotYet(f"SkyPilot has no address of {node.name} yet")
        key = node.write_key(login.private_key)
        node.private_address = login.address
        proxy = self._all.named(*node.region).ssh_proxy if node.region is not None else ""
        node.login = Login(host=login.host, user=login.user, key=key, proxy=proxy)

    def _ask_sky_set_up(self, node: CloudNode) -> None:
        node.set_up = self._sky.set_up(node.name)

    def _learn_end(self, node: CloudNode, machine: Machine, patient: bool) -> None:
        """Record the VM's end as the cloud reports. `patient`: SkyPilot may still report a better reason."""
        end = self._clouds[machine.cloud].end_of(machine)
        if patient and not end.reclaimed and not node.has("login"):
            return  # SkyPilot terminates a VM after a failed set-up
        notice_ms = node.notice_ms
        self._ending(
            node,
            NodeStatus.GONE,
            end.reason or f"{machine.cloud} does not list it any more",
            ended_ms=min(end.ended_ms or math.inf, self._clock.now_ms()),
            reclaimed=end.reclaimed,
            with_notice=notice_ms is not None and not self._was_late(node) if end.reclaimed else None,
        )

    def _end(self, node: CloudNode) -> None:
        """Terminate the VM and remove its disks through the cloud's own API, whatever SkyPilot's records say."""
        self._check_lease()
        ending = node.read("ending") or {"status": NodeStatus.GONE, "evidence": self._end_text(node)}
        if not node.has("ending"):
            node.write("ending", ending)
        try:
            self._cancel(node)
        except Failure as failure:  # the VM is terminated anyway, and `_clear` cancels again
            log.warning("%s: its launch could not be cancelled: %s", node.name, failure)
        place = node.region or self._search(node)
        if place is None:
            self._ended(node, ending)
            return
        api = self._clouds[place[0]]
        alive = [one for one in self._machines_in(*place) if one.name == node.name]
        alive = [one for one in alive if one.state is not MachineState.GONE]
        if alive:
            ending = {**ending, **self._last_words(node, ending, alive[0])}
            node.write("ending", ending)
            api.end(alive)
            raise NotYet(f"{', '.join(one.id for one in alive)} is told to end and has not ended yet")
        disks = [one for one in self._things_in(*place) if one.kind == "disk" and one.node == node.name]
        left = api.remove(disks) if disks else []
        if left:
            raise NotYet(f"disk {', '.join(one.id for one in left)} cannot go yet")
        self._ended(node, ending)

    def _search(self, node: CloudNode) -> tuple[str, str] | None:
        """Search every region of the run for the VM of a requested node without a recorded region."""
        if any(node.is_begun(what) for what in ("want", "spec", "launch", "machine")):
            found = [one for place in self._all.regions for one in self._machines_in(*place)]
            newest = _newest(found, node.name)
            if newest is not None:
                node.write_machine(newest)
        return node.region

    def _end_again(self, machine: Machine) -> None:
        self._check_lease()
        log.warning("%s lives on after its end (%s): ended again", machine.name, machine.id)
        self._clouds[machine.cloud].end([machine])
        self._look_at(machine.cloud, machine.region)

    def _last_words(self, node: CloudNode, ending: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
        """Return facts to record before the VM is terminated.

        The facts are the end time, and a missing firewall rule if the node was not reachable.
        """
        words: dict[str, Any] = {}
        if ending.get("ended_ms") is None:
            words["ended_ms"] = self._clock.now_ms()
        if not node.has("machine"):
            node.write_machine(machine)
        if ending.get("ask_rules"):
            self._ask_rules(machine.cloud, machine.region)
            missing = self._missing_rules.get((machine.cloud, machine.region))
            words |= {"ask_rules": False, "evidence": "; ".join(filter(None, [ending["evidence"], missing]))}
        return words

    def _ask_rules(self, cloud: str, region: str) -> None:
        """Look up which of our firewall rules were removed by hand.

        The next `_prepare` of the region creates them again.
        """
        place = self._places.get((cloud, region))
        if place is not None:
            self._missing_rules[cloud, region] = missing = "; ".join(self._clouds[cloud].open_rules(place))
            if missing:
                log.warning("%s/%s: %s", cloud, region, missing)
                self._places.pop((cloud, region), None)

    def _clear(self, node: CloudNode) -> None:
        """Remove the node from SkyPilot's records."""
        if node.is_begun("launch"):
            self._cancel(node)
            self._sky.down(node.name)
        node.write("cleared", {"at_ms": self._clock.now_ms()})

    def _cancel(self, node: CloudNode) -> None:
        """Cancel the node's launch, if still pending."""
        launch = node.read("launch")
        request = launch.get("request_id") if launch is not None else None
        if launch is None and node.is_begun("launch"):
            request = self._sky.pending(node.name).get(node.name)
        if request and self._outcomes.get(request) is None:
            self._sky.cancel(request)
            self._outcomes[request] = Outcome(failed=Failed.CANCELLED)

    def _rearm_sky(self, node: CloudNode) -> None:
        self._sky.rearm(node.name, self._minutes_left(node.deadline_ms))

    def _tidy(self, cloud: str, region: str) -> None:
        self._check_lease()
        api = self._clouds[cloud]
        alive = [one for one in self._machines_in(cloud, region) if one.state is not MachineState.GONE]
        if alive:
            api.end(alive)
            raise NotYet(f"{', '.join(one.id for one in alive)} is told to end and has not ended yet")
        things = self._things_in(cloud, region)
        left = api.remove(things) if things else []
        if left:
            raise NotYet(f"{', '.join(f'{one.kind} {one.id}' for one in left)} cannot go yet")
        self._places.pop((cloud, region), None)
        self._missing_rules.pop((cloud, region), None)
        self._tidied.add((cloud, region))

    def _prepare(self, cloud: str, region: str) -> Place:
        """Create the group, network and identity of a region, once and in one thread."""
        with self._preparing:
            if (cloud, region) not in self._places:
                self._places[cloud, region] = self._clouds[cloud].prepare(
                    region,
                    run=self._all.run,
                    owner=self._all.owners[cloud],
                    ssh_from=self._all.ssh_from,
                    buckets=self._all.buckets,
                    models=[*self._all.weights.values()],
                    named=self._all.named(cloud, region),
                )
            return self._places[cloud, region]

    # --- ends -------------------------------------------------------------------------------------

    def _ending(self, node: CloudNode, status: NodeStatus, evidence: str, **how: Any) -> None:
        log.info("%s: %s: %s", node.name, status, evidence)
        if not node.has("ending"):
            node.write("ending", {"status": status, "evidence": evidence, **how})

    def _ended(self, node: CloudNode, ending: Mapping[str, Any]) -> None:
        machine = node.machine
        bought = machine is not None
        node.write(
            "ended",
            {
                "status": ending["status"],
                "evidence": ending["evidence"],
                "started_ms": machine.launched_ms if machine is not None else None,
                "ended_ms": (ending.get("ended_ms") or self._clock.now_ms()) if bought else self._clock.now_ms(),
                "ready_ms": node.ready_ms,
                "notice_deadline_ms": node.notice_ms,
                "reclaimed": bool(ending.get("reclaimed")),
                "with_notice": ending.get("with_notice"),
                "zone": machine.zone if machine is not None else None,
                "instance_type": machine.instance_type if machine is not None else None,
                "tried": ending.get("tried", []),
            },
        )

    def _end_text(self, node: CloudNode) -> str:
        if node.is_begun("ended") or node.is_begun("ending"):
            return "it was ended; the file that says why cannot be read any more"
        return "released" if node.is_begun("launch") or node.has("machine") else "released before it was started"

    def _close(self, node: CloudNode) -> None:
        if node.link is not None:
            node.link.close()
            node.link = None

    # --- facts ------------------------------------------------------------------------------------

    def _fact(self, node: CloudNode) -> NodeFact | None:
        if node.over is None and (ended := node.read("ended")) is not None:
            known = {**ended, "status": NodeStatus(ended["status"]), "tried": tuple(ended["tried"])}
            node.over, node.over_since = NodeFact(name=node.name, **known), self._monotonic()
        if node.over is not None:
            return node.over
        if not node.has("spec") and not node.is_ending and not self._is_damaged(node):
            return None
        machine = node.machine
        is_up = node.is_ready and not node.is_begun("ending")
        status, evidence = NodeStatus.UP if is_up else NodeStatus.PENDING, ""
        if not self._is_heard(node):
            place = node.region
            seen = self._seen.get(place) if place is not None else None
            unknown = (seen.trouble if seen is not None else "") or self._chores.troubles.get(node.name, "")
            if unknown:
                status, evidence = NodeStatus.UNKNOWN, unknown
        if not evidence and not node.is_ready and (place := node.region) is not None:
            evidence = self._missing_rules.get(place, "")
        return NodeFact(
            name=node.name,
            status=status,
            evidence=(node.read("ending") or {}).get("evidence", "") or evidence,
            started_ms=machine.launched_ms if machine is not None else None,
            ready_ms=node.ready_ms if node.is_ready else None,
            notice_deadline_ms=node.notice_ms,
            zone=machine.zone if machine is not None else None,
            instance_type=machine.instance_type if machine is not None else None,
        )

    def _was_late(self, node: CloudNode) -> bool:
        """Return True if a stopping VM was the only notice, which came too late to act."""
        return not node.has("notice")

    # --- helpers -----------------------------------------------------------------------------------

    def _node(self, name: str) -> CloudNode:
        if name not in self._nodes:
            folder = node_folder(self._all.folder, name)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            sync_folder(folder.parent)
            self._nodes[name] = CloudNode(folder=folder)
        return self._nodes[name]

    def _used(self) -> set[tuple[str, str]]:
        """Return every region that had a node, and each cloud's `home` region for global resources."""
        regions = {place for node in self._nodes.values() if (place := node.region) is not None}
        return regions | {(cloud, self._clouds[cloud].home) for cloud, _ in regions}

    def _launching(self) -> list[CloudNode]:
        """Return the nodes with a pending launch request."""
        return [
            node
            for node in self._nodes.values()
            if not node.is_cleared()
            and (launch := node.read("launch")) is not None
            and launch.get("request_id")
            and self._outcomes.get(launch["request_id"]) is None
        ]

    def _minutes_left(self, deadline_ms: int | None) -> int:
        if deadline_ms is None:
            return UNLIMITED_MINUTES
        return math.ceil(max(0, deadline_ms - self._clock.now_ms()) / 60_000) + AUTOSTOP_MARGIN_MINUTES


def _newest(machines: Sequence[Machine], name: str) -> Machine | None:
    """Return a node's VM; a live VM comes before an ended VM."""
    order = (MachineState.GONE, MachineState.STOPPING, MachineState.PENDING, MachineState.RUNNING)
    ours = [machine for machine in machines if machine.name == name]
    return max(ours, key=lambda one: (order.index(one.state), one.launched_ms or 0), default=None)


def _tried(want: Placement | None) -> list[str]:
    return [] if want is None else [f"{want.cloud}/{want.region}/{want.zone}"]
