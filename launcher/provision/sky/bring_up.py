"""From a sent launch to a login: wait for the VM and its set-up, and try a failed launch again.

launch sent -> launch done -> the VM reports a finished set-up -> login recorded
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from launcher.decide.node_facts import NodeStatus
from launcher.placement.placement import Placement
from launcher.provision.sky.background_tasks import BackgroundTasks, NotYet
from launcher.provision.sky.cloud_node import CloudNode
from launcher.provision.sky.launches import Launches
from launcher.provision.sky.node_link import Login
from launcher.provision.sky.outcome import Failed
from launcher.provision.sky.records import EndingRecord, LaunchRecord, LoginRecord
from launcher.provision.sky.set_up import InstanceUnreachable, SetUp
from launcher.provision.sky.surroundings import Surroundings

LAUNCH_SECONDS = 1800.0
"""Longest time of a launch. SkyPilot waits 10 minutes for SSH, and an environment takes minutes to install."""

LAUNCH_TRIES = 5
LAUNCH_GAP_MS, LONGEST_LAUNCH_GAP_MS = 10_000, 120_000
"""Limits for launches that fail without a reason from the cloud: the number of tries per node, and the first and the
longest gap between tries. The gap doubles after each try."""

SET_UP_SECONDS = 30.0
"""Time between two queries to SkyPilot for the set-up. Each query costs an SSH session and seconds of CPU."""


@dataclass(slots=True)
class BringUp:
    """The steps of a node between its launch and its login. `ask_set_up` reads the set-up's state from the VM."""

    around: Surroundings
    tasks: BackgroundTasks
    launches: Launches
    ask_set_up: Callable[[Login], SetUp]

    def wait(self, node: CloudNode) -> None:
        """Log in once the launch is done. End the node, or launch again, after a failure or a long wait."""
        launch = node.files.read(LaunchRecord)
        assert launch is not None
        outcome, bundle = self.launches.outcome(launch), self.around.purchases.bundle
        set_up, digest = node.setting_up.outcome, node.setting_up.digest
        waited_ms = self.around.clock.now_ms() - launch.at_ms
        if outcome is None:
            if waited_ms > LAUNCH_SECONDS * 1000:
                evidence = f"it did not come up within {LAUNCH_SECONDS:.0f} s"
                node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence, ask_rules=True))
        elif outcome.failed is None and set_up is not None and set_up.failed is not None:
            evidence = f"its set-up failed: {set_up.text}"
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence, ask_rules=True))
        elif outcome.failed is None and set_up is not None and digest not in ("", bundle.digest):
            evidence = f"it was set up from bundle {digest}, and this run's is {bundle.digest}"
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence))
        elif outcome.failed is None and waited_ms > LAUNCH_SECONDS * 1000:
            evidence = f"it was not set up within {LAUNCH_SECONDS:.0f} s {node.setting_up.trouble}".rstrip()
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence, ask_rules=True))
        elif outcome.failed is None:
            self.tasks.do(node.name, partial(self._log_in, node))
            if node.setting_up.login is not None:
                self.tasks.every(SET_UP_SECONDS, f"set-up {node.name}", partial(self._ask_sky_set_up, node))
        elif outcome.failed is Failed.NO_CAPACITY:
            tried = _tried(node.files.want)
            node.begin_end(EndingRecord(status=NodeStatus.NO_CAPACITY, evidence=outcome.text, tried=tried))
        elif outcome.failed is Failed.DENIED:
            node.begin_end(EndingRecord(status=NodeStatus.DENIED, evidence=outcome.text))
        elif outcome.failed is Failed.UNKNOWN and launch.tries < LAUNCH_TRIES:
            if waited_ms > min(LAUNCH_GAP_MS * 2 ** (launch.tries - 1), LONGEST_LAUNCH_GAP_MS):
                self.tasks.do(node.name, partial(self.launches.launch, node, tries=launch.tries + 1))
        else:
            evidence = f"its launch failed: {outcome.text}"
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence, ask_rules=True))

    def _log_in(self, node: CloudNode) -> None:
        """Record the login, once the VM reports a finished set-up."""
        state = node.setting_up
        if state.login is None:
            self._find_login(node)
        assert state.login is not None
        try:
            found = self.ask_set_up(state.login)
        except InstanceUnreachable as error:
            state.trouble = str(error)
            raise NotYet(str(error)) from None
        state.trouble, state.digest = "", found.digest
        if found.digest != self.around.purchases.bundle.digest:
            raise NotYet(f"{node.name} is not set up yet")
        node.files.write(
            LoginRecord(
                host=state.login.host,
                user=state.login.user,
                port=state.login.port,
                key=str(state.login.key),
                proxy=state.login.proxy,
                address=state.private_address,
                home=found.home,
            )
        )
        if (instance := node.files.instance) is not None:
            node.files.write_instance(instance)

    def _find_login(self, node: CloudNode) -> None:
        login = self.around.sky.login(node.name)
        if login is None:
            raise NotYet(f"SkyPilot has no address of {node.name} yet")
        key = node.files.write_key(login.private_key)
        node.setting_up.private_address = login.address
        proxy = self.around.purchases.named(*node.region).ssh_proxy if node.region is not None else ""
        node.setting_up.login = Login(host=login.host, user=login.user, key=key, proxy=proxy)

    def _ask_sky_set_up(self, node: CloudNode) -> None:
        node.setting_up.outcome = self.around.sky.set_up(node.name)


def _tried(want: Placement | None) -> tuple[str, ...]:
    return () if want is None else (f"{want.cloud}/{want.region}/{want.zone}",)
