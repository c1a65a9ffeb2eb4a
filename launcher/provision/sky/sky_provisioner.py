"""Nodes on real clouds: SkyPilot buys them, the clouds' inventories report their state, an SSH connection goes to each.

RUN/nodes/NAME/  want.json (Placement)  spec.json (NodeSpec)  launch.json  machine.json  login.json  ssh.key
                 seen.json  stopping.json  release.json  ending.json  ended.json  cleared.json
                 and beside these the mirror of the node's own files (node_link.py)

phase.py        the phases of a node    lifecycle.py           the next step in each phase
launches.py     requested               cloud_reports.py       the cloud's report about the VM, before every step
bring_up.py     launched                inventory.py           the VMs of each region
watch.py        set up                  regions.py             group, network and identity of each region
terminate.py    ending, ended           unknown_instances.py   VMs that belong to no node
instance_end.py the end of a VM         fact_reader.py         the node's state for the controller

The files of the nodes are the only state, so any process may continue the work. Each `observe` advances every node by
one step. Blocking calls run in a pool, one at a time for each node and each region. Promises:

A node is lost when the cloud reports the VM gone, or when the node stops answering although a fresh API call shows the
VM running. An API that does not answer proves nothing. A released name is never launched again. `ended.json` says that
no VM and no disk of the name is left. `cleared.json` says that SkyPilot has also forgotten the name. A VM with our
label and without a request is reported. A VM that lives on after its end is terminated again. The content of a file
damaged by a power cut is read again from the cloud or from SkyPilot. A node with a lost spec is terminated.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from engine.clock import Clock
from engine.node_spec import NodeSpec
from launcher.clouds.base import CloudApi
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.exit_codes import words_of
from launcher.placement.placement import Placement
from launcher.provision.local.provisioner import nodes_folder
from launcher.provision.sky.background_tasks import BackgroundTasks
from launcher.provision.sky.bring_up import BringUp
from launcher.provision.sky.cloud_node import CloudNode, Link
from launcher.provision.sky.cloud_reports import CloudReports
from launcher.provision.sky.fact_reader import FactReader
from launcher.provision.sky.instance_end import InstanceEnds
from launcher.provision.sky.inventory import LOOK_SECONDS, CloudInventory
from launcher.provision.sky.launches import Launches
from launcher.provision.sky.lifecycle import Lifecycle
from launcher.provision.sky.node_book import NodeBook
from launcher.provision.sky.node_link import Login
from launcher.provision.sky.records import ReleaseRecord
from launcher.provision.sky.regions import Regions
from launcher.provision.sky.set_up import SetUp, ask_set_up, begin_set_up
from launcher.provision.sky.sky import Sky
from launcher.provision.sky.surroundings import Purchases, Surroundings
from launcher.provision.sky.terminate import Terminator
from launcher.provision.sky.unknown_instances import UnknownInstances
from launcher.provision.sky.watch import AgentWatch, Pass
from launcher.storage.store_lease import LeaseLost

log = logging.getLogger(__name__)

ADDRESS_SECONDS = 60.0
"""Time between two looks at this machine's own address while a node does not answer: laptops and VPNs change it."""

SWEEP_SECONDS = 60.0
"""Time between two reads of a region where the run may have nodes and should have none."""


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
        begin_set_up: Callable[[Login, Path, str], None] = begin_set_up,
        monotonic: Callable[[], float] = time.monotonic,
        check_lease: Callable[[], None] = lambda: None,
        find_ssh_from: Callable[[], str] | None = None,
    ) -> None:
        """Create the provisioner.

        `check_lease` is called before each purchase and raises LeaseLost after a takeover.
        """
        self._around = around = Surroundings(
            purchases=purchases,
            sky=sky,
            clouds=clouds,
            clock=clock,
            monotonic=monotonic,
            check_lease=check_lease,
            find_ssh_from=find_ssh_from,
        )
        self._nodes = nodes = NodeBook(purchases.folder)
        self._tasks = tasks = BackgroundTasks(pool, monotonic)
        self._inventory = inventory = CloudInventory(around)
        self._regions = regions = Regions(around, inventory)
        self._launches = Launches(around, nodes, inventory, regions)
        ends = InstanceEnds(around)
        self._watch = AgentWatch(around, tasks, nodes, inventory, regions, ends, link)
        self._lifecycle = Lifecycle(
            tasks=tasks,
            launches=self._launches,
            bring_up=BringUp(around, tasks, self._launches, ask_set_up, begin_set_up),
            reports=CloudReports(around, tasks, inventory, regions, ends),
            watch=self._watch,
            terminator=Terminator(around, inventory, regions, self._launches, ends),
        )
        self._unknown = UnknownInstances(tasks, nodes, inventory)
        self._facts = FactReader(around, tasks, inventory, regions, self._launches)
        self._last_observed = monotonic(), clock.now_ms()
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

    def assign(self, spec: NodeSpec) -> None:
        """Write the node's new spec; the next `observe` has the agent start again with it.

        All other nodes then get the address of a new trainer. The spec holds the run's token only from now on. A notice
        does not keep a node from its role: what it does until its end is worth something, and the notice may be false.
        """
        node = self._nodes.get(spec.node)
        now = None if node is None else node.files.role
        if node is None or now is None or node.is_ending:
            return
        if (now.role, now.generation) != (spec.role, spec.generation):
            node.files.write_spec(spec)

    def observe(self) -> Sequence[NodeFact]:
        """Return the state of every node from current knowledge, and advance each node by one step."""
        now, now_ms = self._around.monotonic(), self._around.clock.now_ms()
        last, last_ms = self._last_observed
        self._last_observed = now, now_ms
        self._nodes.load()
        self._look()
        this_pass = Pass(seconds=min(1.0, now - last), gap_ms=now_ms - last_ms, trainer=self._watch.trainer_address())
        nodes = sorted(self._nodes.all(), key=lambda node: node.name)
        if any(node.should_answer and not node.agent.is_answering for node in nodes):
            self._tasks.every(ADDRESS_SECONDS, "ssh from", self._regions.follow_address)
        facts: list[NodeFact] = []
        for node in nodes:
            self._protect(node, facts, partial(self._lifecycle.advance, node, this_pass))
        faulty = {fact.name for fact in facts}
        for node in nodes:
            if node.name not in faulty:
                self._protect(node, facts, partial(self._add_fact, node, facts))
        return facts + self._unknown.report()

    def _add_fact(self, node: CloudNode, facts: list[NodeFact]) -> None:
        if (fact := self._facts.fact_of(node)) is not None:
            facts.append(fact)

    def _protect(self, node: CloudNode, facts: list[NodeFact], step: Callable[[], None]) -> None:
        """Do a step for one node. If the step raises, report the fault of this node: the other nodes must still end."""
        try:
            step()
        except LeaseLost:
            raise
        except Exception as error:
            log.exception("%s could not be looked after in this pass", node.name)
            facts.append(NodeFact(name=node.name, status=NodeStatus.UNKNOWN, fault=words_of(error)))

    def release(self, names: Sequence[str]) -> None:
        """Write the release; the next `observe` acts on the release.

        A name without a request is terminated by its label.
        """
        for name in names:
            node = self._nodes.open(name)
            if not node.files.is_begun("release") and not node.files.has("ended"):
                node.files.write(ReleaseRecord(at_ms=self._around.clock.now_ms()))
            self._inventory.find_instance(node)

    def rearm(self, name: str, money_deadline_ms: int) -> None:
        """Send the node a new spend deadline. SkyPilot's own timer on the VM is set anew later (watch.py)."""
        node = self._nodes.get(name)
        if node is None or node.files.has("ended"):
            return
        node.agent.deadline_ms = money_deadline_ms
        if node.agent.link is not None:
            node.agent.link.rearm(money_deadline_ms - self._around.clock.now_ms())

    def tunnel(self, name: str, port: int) -> tuple[str, int] | None:
        """Return the local end of the tunnel to the node."""
        node = self._nodes.get(name)
        return node.agent.link.tunnel(port) if node is not None and node.agent.link is not None else None

    def tidy(self) -> bool:
        """Remove the groups, networks and identities of the run, once no node is left."""
        self.observe()
        if self._nodes.with_work():
            return False
        with_nodes = self._nodes.regions()
        regions = self._regions.used(with_nodes)
        for cloud, region in sorted(regions - self._regions.tidied):
            self._tasks.do(f"tidy {cloud}/{region}", partial(self._regions.tidy, cloud, region, with_nodes))
        return regions <= self._regions.tidied

    def close(self) -> None:
        """Drop tasks waiting for a thread of the pool, and close the connections to nodes."""
        self._tasks.close()
        for node in self._nodes.all():
            node.agent.close()

    def troubles(self) -> Sequence[str]:
        """Return the current errors in words: clouds that do not answer, resources that cannot be removed."""
        return [f"{task}: {text}" for task, text in sorted(self._tasks.troubles.items())]

    # --- one pass ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Query the clouds and SkyPilot if due. The answers arrive in a later pass."""
        nodes = self._nodes.with_work()
        active = {site for node in nodes if (site := node.region) is not None}
        for cloud, region in sorted({*active, *self._around.purchases.regions}):
            seconds = LOOK_SECONDS if (cloud, region) in active else SWEEP_SECONDS
            self._tasks.every(seconds, f"look {cloud}/{region}", partial(self._inventory.look_at, cloud, region))
        # A process that continues the run may have another address, and so may this one by now.
        has_moved = self._regions.ssh_from != self._around.purchases.ssh_from
        to_reach = [node for node in nodes if node.files.has("login") or (has_moved and node.should_answer)]
        for cloud, region in sorted({site for node in to_reach if (site := node.region)}):
            if (cloud, region) not in self._regions.prepared:
                self._tasks.do(f"place {cloud}/{region}", partial(self._regions.prepare, cloud, region))
        requests = self._launches.under_way()
        if requests:
            self._tasks.every(LOOK_SECONDS, "requests", partial(self._launches.poll, requests))
