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

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from engine.clock import Clock
from engine.node_spec import NodeSpec
from launcher.clouds.base import (
    NODE_LABEL,
    OWNER_LABEL,
    RUN_LABEL,
    CloudApi,
    CloudRefused,
    Machine,
    MachineState,
)
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.exit_codes import Failure
from launcher.placement.placement import Placement
from launcher.provision.local.provisioner import nodes_folder
from launcher.provision.sky.bundle import REMOTE_BUNDLE
from launcher.provision.sky.chores import Chores, NotYet
from launcher.provision.sky.cloud_node import CloudNode, Link
from launcher.provision.sky.inventory import CloudInventory, newest_of
from launcher.provision.sky.node_book import NodeBook
from launcher.provision.sky.node_link import Login
from launcher.provision.sky.outcome import Failed, Outcome
from launcher.provision.sky.records import (
    ClearedRecord,
    EndedRecord,
    EndingRecord,
    ExitRecord,
    LaunchRecord,
    LoginRecord,
    ReleaseRecord,
    StoppingRecord,
)
from launcher.provision.sky.regions import Regions
from launcher.provision.sky.set_up import MachineUnreachable, SetUp, ask_set_up
from launcher.provision.sky.sky import Sky
from launcher.provision.sky.surroundings import Purchases, Surroundings
from launcher.provision.sky.task import Launch

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Time between two reads of SkyPilot's requests and of the inventory of a region with nodes."""

SWEEP_SECONDS = 60.0
"""Time between two reads of a region where the run may have nodes and should have none."""

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
        self._around = Surroundings(
            purchases=purchases,
            sky=sky,
            clouds=clouds,
            clock=clock,
            monotonic=monotonic,
            check_lease=check_lease,
        )
        self._make_link, self._ask_set_up = link, ask_set_up
        self._nodes = NodeBook(purchases.folder)
        self._chores = Chores(pool, monotonic)
        self._inventory = CloudInventory(self._around)
        self._regions = Regions(self._around, self._inventory)
        self._outcomes: dict[str, Outcome | None] = {}
        self._last_observed: float | None = None
        self._trainer: str | None = None
        """Private address of the newest trainer, as found by the current pass."""
        nodes_folder(purchases.folder).mkdir(parents=True, exist_ok=True, mode=0o700)

    # --- calls of the controller ---------------------------------------------------------------------

    def request(self, want: Placement, spec: NodeSpec) -> None:
        """Write the intent; the next `observe` acts on the intent.

        A repeated name requests no second node. A name that ended stays ended.
        """
        node = self._nodes.open(spec.node)
        if node.files.has("spec"):
            return
        self._regions.tidied.clear()
        node.fresh = not node.files.has("launch")
        node.files.write_want(want)
        node.files.write_spec(spec)

    def observe(self) -> Sequence[NodeFact]:
        """Return the state of every node from current knowledge, and advance each node by one step."""
        now = self._around.monotonic()
        passed = 0.0 if self._last_observed is None else min(1.0, now - self._last_observed)
        self._last_observed = now
        self._nodes.load()
        self._look()
        self._trainer = self._trainer_address()
        nodes = sorted(self._nodes.all(), key=lambda node: node.name)
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
            node = self._nodes.open(name)
            if not node.files.is_begun("release") and not node.files.has("ended"):
                node.files.write(ReleaseRecord(at_ms=self._around.clock.now_ms()))
            self._inventory.find_machine(node)

    def rearm(self, name: str, money_deadline_ms: int) -> None:
        """Send the node a new spend deadline. SkyPilot's own timer on the VM follows."""
        node = self._nodes.get(name)
        if node is None or node.files.has("ended"):
            return
        node.agent.deadline_ms = money_deadline_ms
        if node.agent.link is not None:
            node.agent.link.rearm(money_deadline_ms - self._around.clock.now_ms())

    def door(self, name: str, port: int) -> tuple[str, int] | None:
        """Return the local end of the tunnel to the node."""
        node = self._nodes.get(name)
        return node.agent.link.door(port) if node is not None and node.agent.link is not None else None

    def tidy(self) -> bool:
        """Remove the groups, networks and identities of the run, once no node is left."""
        self.observe()
        if self._nodes.with_work():
            return False
        places = self._regions.used(self._nodes.regions())
        for cloud, region in places - self._regions.tidied:
            self._chores.do(f"tidy {cloud}/{region}", partial(self._regions.tidy, cloud, region))
        return places <= self._regions.tidied

    def close(self) -> None:
        """Drop tasks waiting for a thread of the pool, and close the connections to nodes."""
        self._chores.close()
        for node in self._nodes.all():
            node.agent.close()

    def troubles(self) -> Sequence[str]:
        """Return the current errors in words: clouds that do not answer, resources that cannot be removed."""
        return [f"{what}: {text}" for what, text in sorted(self._chores.troubles.items())]

    # --- reading ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Query the clouds and SkyPilot if due. The answers arrive in a later pass."""
        nodes = self._nodes.with_work()
        active = {place for node in nodes if (place := node.region) is not None}
        for cloud, region in {*active, *self._around.purchases.regions}:
            seconds = LOOK_SECONDS if (cloud, region) in active else SWEEP_SECONDS
            self._chores.every(seconds, f"look {cloud}/{region}", partial(self._inventory.look_at, cloud, region))
        for cloud, region in {place for node in nodes if node.files.has("login") and (place := node.region)}:
            if (cloud, region) not in self._regions.places:  # a process that continues the run may have another address
                self._chores.do(f"place {cloud}/{region}", partial(self._regions.prepare, cloud, region))
        requests = self._under_way()
        if requests:
            self._chores.every(LOOK_SECONDS, "requests", partial(self._poll, requests))

    def _poll(self, requests: Sequence[str]) -> None:
        known = self._around.sky.poll(requests)
        forgotten = Outcome(failed=Failed.UNKNOWN, text="SkyPilot's API server does not know its launch any more")
        self._outcomes.update({one: known.get(one, forgotten) for one in requests})

    def _strangers(self) -> list[NodeFact]:
        """Return VMs with the run's label and without a request. Terminate VMs that live on after their end."""
        facts = []
        for seen in self._inventory.all_seen():
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
        if node.files.has("ended"):
            node.agent.close()
            self._chores.do(node.name, partial(self._clear, node))
            return
        if node.is_ending:
            node.agent.close()
            self._chores.do(node.name, partial(self._end, node))
            return
        if not node.files.has("spec") and not node.is_damaged:
            return  # an interrupted intent: a repeated request completes the files
        machine = self._cloud_says(node)
        if node.is_ending or self._chores.is_busy(node.name):
            return
        self._mend(node)
        if node.is_ending:
            return
        launch = node.files.read(LaunchRecord)
        if launch is None:
            self._chores.do(node.name, partial(self._launch, node))
        elif not node.files.has("login"):
            self._wait_for_launch(node, launch)
        else:
            self._keep(node, machine, passed)

    def _mend(self, node: CloudNode) -> None:
        """Recover the content of a damaged file, or end the node if no other source knows the content."""
        if node.is_damaged:
            node.begin_end(
                EndingRecord(
                    status=NodeStatus.GONE,
                    evidence="its spec.json cannot be read: a power cut of the launcher's machine?",
                )
            )
        elif not node.files.has("want") and not node.files.has("launch"):
            node.begin_end(
                EndingRecord(
                    status=NodeStatus.GONE,
                    evidence="its want.json cannot be read: a power cut of the launcher's machine?",
                )
            )
        elif node.files.is_begun("login") and not node.can_log_in:
            log.warning("%s: its login cannot be read any more; SkyPilot is asked again", node.name)
            node.agent.close()
            node.setting_up.login = None
            node.files.forget("login")
            node.files.forget("launch")  # an old launch would count as late; its cluster is adopted instead

    def _cloud_says(self, node: CloudNode) -> Machine | None:
        """Return the node's VM from the inventory. Begin the node's end if the cloud reports an end."""
        self._inventory.find_machine(node)
        place = node.region
        seen = self._inventory.seen_in(place)
        if seen is None or seen.at is None or node.sightings.look == seen.looks:
            return None if seen is None else newest_of(seen.machines, node.name)
        node.sightings.look = seen.looks
        machine, known = newest_of(seen.machines, node.name), node.files.machine
        if machine is not None and machine.state in (MachineState.PENDING, MachineState.RUNNING):
            node.sightings.missing, node.sightings.stopping_since = 0, None
            if machine != known:
                node.files.write_machine(machine)
            self._end_doubles(node, seen.machines)
            self._refuse_strange_identity(node, machine)
            return machine
        if known is None and not node.files.has("login"):
            return machine  # no VM existed yet, or only remains of a SkyPilot attempt
        if machine is not None and machine.state is MachineState.STOPPING:
            self._is_stopping(node, machine)
            return machine
        node.sightings.missing += 1
        if machine is not None or node.sightings.missing >= GONE_LOOKS or node.files.has("stopping"):
            last = machine or known
            if last is not None:
                patient = node.sightings.missing * LOOK_SECONDS < STOPPED_SECONDS
                self._chores.do(node.name, partial(self._learn_end, node, last, patient))
            elif node.sightings.missing > NEVER_SEEN_LOOKS:
                node.begin_end(
                    EndingRecord(
                        status=NodeStatus.GONE,
                        evidence="SkyPilot says that it is up, and its cloud lists no machine of it",
                    )
                )
        return machine

    def _refuse_strange_identity(self, node: CloudNode, machine: Machine) -> None:
        """Deny a node that runs under a foreign identity.

        Without our plugin, SkyPilot's API server attaches an identity of its own with all permissions.
        """
        place = self._regions.places.get((machine.cloud, machine.region))
        if place is not None and machine.identity and machine.identity != place.identity:
            evidence = (
                f"it runs as {machine.identity} and not as {place.identity}: SkyPilot's API server was not started by "
                "spotrl and does not have its plugin (launcher/provision/sky/sky_plugins.yaml); name that file there "
                "in SKYPILOT_SERVER_PLUGINS_CONFIG, or end the server (`sky api stop`) and have spotrl start one"
            )
            node.begin_end(EndingRecord(status=NodeStatus.DENIED, evidence=evidence))

    def _is_stopping(self, node: CloudNode, machine: Machine) -> None:
        """Record a notice if none came, and end the node if the VM keeps stopping."""
        now = self._around.monotonic()
        if node.sightings.stopping_since is None:
            node.sightings.stopping_since = now
        # before the login, SkyPilot itself stops VMs of a failed launch
        if not node.files.has("stopping") and node.files.has("login"):
            deadline_ms = self._around.clock.now_ms() + STOPPING_NOTICE_MS
            node.files.write(StoppingRecord(deadline_ms=deadline_ms, reason=machine.reason))
            if node.agent.link is not None:
                node.agent.link.notice(deadline_ms)
        if now - node.sightings.stopping_since > STOPPED_SECONDS:
            self._chores.do(node.name, partial(self._learn_end, node, machine, False))

    def _end_doubles(self, node: CloudNode, machines: Sequence[Machine]) -> None:
        """Terminate second VMs of the same name, left by SkyPilot's retries. The VM of SkyPilot's login stays."""
        alive = [one for one in machines if one.name == node.name and one.state is MachineState.RUNNING]
        login = node.files.read(LoginRecord)
        if len(alive) > 1 and login is not None:
            extra = [one for one in alive if login.host not in (one.public_address, one.address)]
            if 0 < len(extra) < len(alive):
                log.warning("%s has %s machines: the extra ones are ended", node.name, len(alive))
                self._chores.do(f"double {node.name}", partial(self._around.clouds[extra[0].cloud].end, extra))

    def _wait_for_launch(self, node: CloudNode, launch: LaunchRecord) -> None:
        outcome = Outcome() if launch.adopted else self._outcomes.get(launch.request_id)
        waited_ms = self._around.clock.now_ms() - launch.at_ms
        if outcome is None:
            if waited_ms > LAUNCH_SECONDS * 1000:
                node.begin_end(
                    EndingRecord(
                        status=NodeStatus.GONE,
                        evidence=f"it did not come up within {LAUNCH_SECONDS:.0f} s",
                        ask_rules=True,
                    )
                )
        elif (
            outcome.failed is None
            and node.setting_up.outcome is not None
            and node.setting_up.outcome.failed is not None
        ):
            node.begin_end(
                EndingRecord(
                    status=NodeStatus.GONE,
                    evidence=f"its set-up failed: {node.setting_up.outcome.text}",
                    ask_rules=True,
                )
            )
        elif (
            outcome.failed is None
            and node.setting_up.outcome is not None
            and node.setting_up.digest not in ("", self._around.purchases.bundle.digest)
        ):
            ours = self._around.purchases.bundle.digest
            evidence = f"it was set up from bundle {node.setting_up.digest}, and this run's is {ours}"
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence))
        elif outcome.failed is None and waited_ms > LAUNCH_SECONDS * 1000:
            evidence = f"it was not set up within {LAUNCH_SECONDS:.0f} s {node.setting_up.trouble}".rstrip()
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence, ask_rules=True))
        elif outcome.failed is None:
            self._chores.do(node.name, partial(self._log_in, node))
            if node.setting_up.login is not None:
                self._chores.every(SET_UP_SECONDS, f"set-up {node.name}", partial(self._ask_sky_set_up, node))
        elif outcome.failed is Failed.NO_CAPACITY:
            node.begin_end(
                EndingRecord(status=NodeStatus.NO_CAPACITY, evidence=outcome.text, tried=_tried(node.files.want))
            )
        elif outcome.failed is Failed.DENIED:
            node.begin_end(EndingRecord(status=NodeStatus.DENIED, evidence=outcome.text))
        elif outcome.failed is Failed.UNKNOWN and launch.tries < LAUNCH_TRIES:
            if waited_ms > min(LAUNCH_GAP_MS * 2 ** (launch.tries - 1), LONGEST_LAUNCH_GAP_MS):
                self._chores.do(node.name, partial(self._launch, node, tries=launch.tries + 1))
        else:
            node.begin_end(
                EndingRecord(status=NodeStatus.GONE, evidence=f"its launch failed: {outcome.text}", ask_rules=True)
            )

    def _keep(self, node: CloudNode, machine: Machine | None, passed: float) -> None:
        """Keep the connection and the agent of a set-up VM alive, and watch both."""
        login = node.files.read(LoginRecord)
        assert login is not None
        if node.agent.link is None:
            line = Login(
                host=login.host,
                user=login.user,
                key=Path(login.key),
                port=login.port,
                proxy=login.proxy,
            )
            node.agent.link = self._make_link(line, node.files.folder)
            if (stopping := node.files.read(StoppingRecord)) is not None:
                node.agent.link.notice(stopping.deadline_ms)
        self._tell(node, login)
        if self._has_exited(node) or self._is_late(node):
            return
        self._doubt(node, machine, passed)
        if node.agent.deadline_ms is not None and node.agent.is_heard:
            self._chores.every(REARM_SECONDS, f"rearm {node.name}", partial(self._rearm_sky, node))

    def _tell(self, node: CloudNode, login: LoginRecord) -> None:
        """Start the agent with the address of the current trainer."""
        spec, place = node.files.spec, node.region
        assert spec is not None
        host = login.address if spec.role == "trainer" else self._trainer
        if (
            place is None
            or host is None
            or node.agent.link is None
            or (node.agent.told is not None and node.agent.told.coordinator_host == host)
        ):
            return
        deadline_ms = node.agent.deadline_ms or spec.money_deadline_ms
        home = f"{login.home}/spotrl"
        node.agent.told, node.agent.told_at = (
            spec.model_copy(
                update={
                    "coordinator_host": host,
                    "cloud": place[0],
                    "folder": f"{home}/node",
                    "workdir": f"{home}/work" if spec.workdir else None,
                    "digest": self._around.purchases.bundle.digest,
                    "weights": self._around.purchases.weights.get(place[0], ""),
                    "money_deadline_ms": None,
                    "money_left_ms": None if deadline_ms is None else max(0, deadline_ms - self._around.clock.now_ms()),
                }
            ),
            self._around.monotonic(),
        )
        node.agent.link.run(node.agent.told)

    def _trainer_address(self) -> str | None:
        """Return the private address of the newest trainer that has not ended."""
        trainers = []
        for node in self._nodes.all():
            if node.is_ending:
                continue
            role, login = node.files.role, node.files.read(LoginRecord)
            if role == "trainer" and login is not None:
                launch = node.files.read(LaunchRecord)
                trainers.append((launch.at_ms if launch is not None else 0, node.name, login.address))
        return max(trainers)[2] if trainers else None

    def _has_exited(self, node: CloudNode) -> bool:
        """Return whether the agent has exited for good, and end the node unless a preemption is near.

        AWS does not bill a spot instance that AWS preempts within an hour, but does if we terminate the instance first.
        """
        said = node.files.read(ExitRecord)
        if said is None:
            node.agent.exit_since = None
            return False
        now = self._around.monotonic()
        node.agent.exit_since = now if node.agent.exit_since is None else node.agent.exit_since
        deadline_ms = node.notice_ms
        if deadline_ms is not None and self._around.clock.now_ms() < deadline_ms + AFTER_NOTICE_MS:
            return False
        if now - node.agent.exit_since < EXIT_SECONDS:
            return False
        text = f": {said.text}" if said.text else ""
        node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=f"its agent exited with code {said.code}{text}"))
        return True

    def _is_late(self, node: CloudNode) -> bool:
        """Return whether the node's workers are late, and end the node after `READY_SECONDS`.

        A missing firewall rule is the usual reason, and can be looked up.
        """
        waited, place = self._around.monotonic() - node.agent.told_at, node.region
        if node.agent.told is None or place is None or node.files.has("ready") or waited < RULES_SECONDS:
            return False
        cloud, region = place
        self._chores.every(RULES_SECONDS, f"rules {cloud}/{region}", partial(self._regions.ask_rules, cloud, region))
        if waited < READY_SECONDS:
            return False
        evidence = f"its workers did not call in within {READY_SECONDS:.0f} s"
        node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence, ask_rules=True))
        return True

    def _doubt(self, node: CloudNode, machine: Machine | None, passed: float) -> None:
        """End a node after long silence. Silence counts only if a fresh inventory shows the VM running."""
        if node.agent.is_heard:
            node.agent.silent = 0.0
            return
        node.agent.silent += passed
        patience = FIRST_WORD_SECONDS if node.agent.link is None or node.agent.link.heard_s is None else LOST_SECONDS
        if not any(other.agent.is_heard for other in self._nodes.all()):
            patience *= ALL_SILENT
        if node.agent.silent < patience or machine is None or not self._inventory.is_fresh(node.region):
            return
        trouble = node.agent.link.trouble if node.agent.link is not None else ""
        evidence = (
            f"it stopped answering: nothing was heard for {node.agent.silent:.0f} s ({trouble}), though "
            f"{machine.cloud} calls it {machine.state}"
        )
        node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence, ask_rules=True))

    # --- blocking calls -----------------------------------------------------------------------------

    def _launch(self, node: CloudNode, tries: int = 1) -> None:
        """Send the launch to SkyPilot, unless a launch from before a crash exists."""
        if not node.fresh and tries == 1 and self._adopt(node):
            return
        want = node.files.want
        if want is None:
            node.begin_end(
                EndingRecord(
                    status=NodeStatus.GONE,
                    evidence="its want.json cannot be read, and SkyPilot does not know its launch",
                )
            )
            return
        try:
            place = self._regions.prepare(want.cloud, want.region)
        except CloudRefused as refused:
            node.begin_end(EndingRecord(status=NodeStatus.DENIED, evidence=str(refused)))
            return
        spec, now_ms = node.files.spec, self._around.clock.now_ms()
        assert spec is not None
        node.fresh = False
        launch = Launch(
            name=node.name,
            want=want,
            place=place,
            labels={
                RUN_LABEL: self._around.purchases.run,
                NODE_LABEL: node.name,
                OWNER_LABEL: self._around.purchases.owners[want.cloud],
            },
            setup=self._around.purchases.bundle.setup,
            files={REMOTE_BUNDLE: str(self._around.purchases.bundle.folder)},
            autostop_minutes=self._minutes_left(spec.money_deadline_ms),
            image=self._around.purchases.images.get(
                f"{want.cloud}/{want.region}", self._around.purchases.images.get(want.cloud)
            ),
        )
        self._around.check_lease()
        request = self._around.sky.start(launch)
        node.files.forget("machine")  # from an earlier attempt
        node.sightings.missing = 0
        node.files.write(LaunchRecord(request_id=request, at_ms=now_ms, tries=tries))

    def _adopt(self, node: CloudNode) -> bool:
        """Adopt a request or cluster left by a launch before a crash. VMs without either are found by the launch."""
        now_ms = self._around.clock.now_ms()
        request = self._around.sky.pending(node.name).get(node.name)
        if request is not None:
            node.files.write(LaunchRecord(request_id=request, at_ms=now_ms, tries=1))
            return True
        if self._around.sky.clusters(node.name).get(node.name) == "UP":
            node.files.write(LaunchRecord(request_id="", at_ms=now_ms, adopted=True))
            return True
        for cloud, region in self._around.purchases.regions:
            lost = [
                one
                for one in self._inventory.machines_in(cloud, region)
                if one.name == node.name and one.state is not MachineState.GONE
            ]
            if lost and (cloud, region) != node.region:
                self._around.clouds[cloud].end(lost)
        return False

    def _log_in(self, node: CloudNode) -> None:
        """Record the login, once the VM reports a finished set-up."""
        if node.setting_up.login is None:
            self._find_login(node)
        assert node.setting_up.login is not None
        try:
            found = self._ask_set_up(node.setting_up.login)
        except MachineUnreachable as error:
            node.setting_up.trouble = str(error)
            raise NotYet(str(error)) from None
        node.setting_up.trouble, node.setting_up.digest = "", found.digest
        if found.digest != self._around.purchases.bundle.digest:
            raise NotYet(f"{node.name} is not set up yet")
        node.files.write(
            LoginRecord(
                host=node.setting_up.login.host,
                user=node.setting_up.login.user,
                port=node.setting_up.login.port,
                key=str(node.setting_up.login.key),
                proxy=node.setting_up.login.proxy,
                address=node.setting_up.private_address,
                home=found.home,
            )
        )
        if (machine := node.files.machine) is not None:
            node.files.write_machine(machine)

    def _find_login(self, node: CloudNode) -> None:
        login = self._around.sky.login(node.name)
        if login is None:
            raise NotYet(f"SkyPilot has no address of {node.name} yet")
        key = node.files.write_key(login.private_key)
        node.setting_up.private_address = login.address
        proxy = self._around.purchases.named(*node.region).ssh_proxy if node.region is not None else ""
        node.setting_up.login = Login(host=login.host, user=login.user, key=key, proxy=proxy)

    def _ask_sky_set_up(self, node: CloudNode) -> None:
        node.setting_up.outcome = self._around.sky.set_up(node.name)

    def _learn_end(self, node: CloudNode, machine: Machine, patient: bool) -> None:
        """Record the VM's end as the cloud reports. `patient`: SkyPilot may still report a better reason."""
        end = self._around.clouds[machine.cloud].end_of(machine)
        if patient and not end.reclaimed and not node.files.has("login"):
            return  # SkyPilot terminates a VM after a failed set-up
        notice_ms = node.notice_ms
        now_ms = self._around.clock.now_ms()
        node.begin_end(
            EndingRecord(
                status=NodeStatus.GONE,
                evidence=end.reason or f"{machine.cloud} does not list it any more",
                ended_ms=min(end.ended_ms or now_ms, now_ms),
                reclaimed=end.reclaimed,
                with_notice=notice_ms is not None and not self._was_late(node) if end.reclaimed else None,
            )
        )

    def _end(self, node: CloudNode) -> None:
        """Terminate the VM and remove its disks through the cloud's own API, whatever SkyPilot's records say."""
        self._around.check_lease()
        ending = node.files.read(EndingRecord) or EndingRecord(status=NodeStatus.GONE, evidence=self._end_text(node))
        if not node.files.has("ending"):
            node.files.write(ending)
        try:
            self._cancel(node)
        except Failure as failure:  # the VM is terminated anyway, and `_clear` cancels again
            log.warning("%s: its launch could not be cancelled: %s", node.name, failure)
        place = node.region or self._inventory.search(node)
        if place is None:
            self._ended(node, ending)
            return
        api = self._around.clouds[place[0]]
        alive = [one for one in self._inventory.machines_in(*place) if one.name == node.name]
        alive = [one for one in alive if one.state is not MachineState.GONE]
        if alive:
            node.files.write(self._last_words(node, ending, alive[0]))
            api.end(alive)
            raise NotYet(f"{', '.join(one.id for one in alive)} is told to end and has not ended yet")
        disks = [one for one in self._inventory.things_in(*place) if one.kind == "disk" and one.node == node.name]
        left = api.remove(disks) if disks else []
        if left:
            raise NotYet(f"disk {', '.join(one.id for one in left)} cannot go yet")
        self._ended(node, ending)

    def _end_again(self, machine: Machine) -> None:
        self._around.check_lease()
        log.warning("%s lives on after its end (%s): ended again", machine.name, machine.id)
        self._around.clouds[machine.cloud].end([machine])
        self._inventory.look_at(machine.cloud, machine.region)

    def _last_words(self, node: CloudNode, ending: EndingRecord, machine: Machine) -> EndingRecord:
        """Return the record with the facts that are known only before the VM is terminated.

        The facts are the end time, and a missing firewall rule if the node was not reachable.
        """
        words: dict[str, object] = {}
        if ending.ended_ms is None:
            words["ended_ms"] = self._around.clock.now_ms()
        if not node.files.has("machine"):
            node.files.write_machine(machine)
        if ending.ask_rules:
            self._regions.ask_rules(machine.cloud, machine.region)
            missing = self._regions.missing_rules.get((machine.cloud, machine.region))
            words |= {"ask_rules": False, "evidence": "; ".join(filter(None, [ending.evidence, missing]))}
        return ending.model_copy(update=words)

    def _clear(self, node: CloudNode) -> None:
        """Remove the node from SkyPilot's records."""
        if node.files.is_begun("launch"):
            self._cancel(node)
            self._around.sky.down(node.name)
        node.files.write(ClearedRecord(at_ms=self._around.clock.now_ms()))

    def _cancel(self, node: CloudNode) -> None:
        """Cancel the node's launch, if still pending."""
        launch = node.files.read(LaunchRecord)
        request = launch.request_id if launch is not None else None
        if launch is None and node.files.is_begun("launch"):
            request = self._around.sky.pending(node.name).get(node.name)
        if request and self._outcomes.get(request) is None:
            self._around.sky.cancel(request)
            self._outcomes[request] = Outcome(failed=Failed.CANCELLED)

    def _rearm_sky(self, node: CloudNode) -> None:
        self._around.sky.rearm(node.name, self._minutes_left(node.agent.deadline_ms))

    # --- ends -------------------------------------------------------------------------------------

    def _ended(self, node: CloudNode, ending: EndingRecord) -> None:
        machine, now_ms = node.files.machine, self._around.clock.now_ms()
        node.files.write(
            EndedRecord(
                status=ending.status,
                evidence=ending.evidence,
                started_ms=machine.launched_ms if machine is not None else None,
                ended_ms=(ending.ended_ms or now_ms) if machine is not None else now_ms,
                ready_ms=node.ready_ms,
                notice_deadline_ms=node.notice_ms,
                reclaimed=ending.reclaimed,
                with_notice=ending.with_notice,
                zone=machine.zone if machine is not None else None,
                instance_type=machine.instance_type if machine is not None else None,
                tried=ending.tried,
            )
        )

    def _end_text(self, node: CloudNode) -> str:
        if node.files.is_begun("ended") or node.files.is_begun("ending"):
            return "it was ended; the file that says why cannot be read any more"
        return (
            "released"
            if node.files.is_begun("launch") or node.files.has("machine")
            else "released before it was started"
        )

    # --- facts ------------------------------------------------------------------------------------

    def _fact(self, node: CloudNode) -> NodeFact | None:
        if node.over is None and (ended := node.files.read(EndedRecord)) is not None:
            node.over, node.over_since = ended.fact(node.name), self._around.monotonic()
        if node.over is not None:
            return node.over
        if not node.files.has("spec") and not node.is_ending and not node.is_damaged:
            return None
        machine = node.files.machine
        is_up = node.is_ready and not node.files.is_begun("ending")
        status, evidence = NodeStatus.UP if is_up else NodeStatus.PENDING, ""
        if not node.agent.is_heard:
            place = node.region
            seen = self._inventory.seen_in(place)
            unknown = (seen.trouble if seen is not None else "") or self._chores.troubles.get(node.name, "")
            if unknown:
                status, evidence = NodeStatus.UNKNOWN, unknown
        if not evidence and not node.is_ready and (place := node.region) is not None:
            evidence = self._regions.missing_rules.get(place, "")
        ending = node.files.read(EndingRecord)
        return NodeFact(
            name=node.name,
            status=status,
            evidence=(ending.evidence if ending is not None else "") or evidence,
            started_ms=machine.launched_ms if machine is not None else None,
            ready_ms=node.ready_ms if node.is_ready else None,
            notice_deadline_ms=node.notice_ms,
            zone=machine.zone if machine is not None else None,
            instance_type=machine.instance_type if machine is not None else None,
        )

    def _was_late(self, node: CloudNode) -> bool:
        """Return True if a stopping VM was the only notice, which came too late to act."""
        return not node.files.has("notice")

    # --- helpers -----------------------------------------------------------------------------------

    def _under_way(self) -> list[str]:
        """Return the pending launch requests."""
        launches = [node.files.read(LaunchRecord) for node in self._nodes.with_work()]
        requests = [launch.request_id for launch in launches if launch is not None and launch.request_id]
        return [request for request in requests if self._outcomes.get(request) is None]

    def _minutes_left(self, deadline_ms: int | None) -> int:
        if deadline_ms is None:
            return UNLIMITED_MINUTES
        return math.ceil(max(0, deadline_ms - self._around.clock.now_ms()) / 60_000) + AUTOSTOP_MARGIN_MINUTES


def _tried(want: Placement | None) -> tuple[str, ...]:
    return () if want is None else (f"{want.cloud}/{want.region}/{want.zone}",)
