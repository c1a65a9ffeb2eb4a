"""From a sent launch to a login: wait for the VM and its set-up, and try a failed launch again.

launch sent -> VM with an address -> set-up started -> launch done, the VM reports a finished set-up -> login recorded
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.decide.node_facts import NodeStatus
from launcher.placement.placement import Placement
from launcher.provision.sky.background_tasks import BackgroundTasks, NotYet
from launcher.provision.sky.cloud_node import CloudNode
from launcher.provision.sky.launches import Launches
from launcher.provision.sky.node_link import Login
from launcher.provision.sky.outcome import LOG_CHARACTERS, Failed
from launcher.provision.sky.records import EndingRecord, LaunchRecord, LoginRecord
from launcher.provision.sky.set_up import InstanceUnreachable, SetUp
from launcher.provision.sky.surroundings import Surroundings
from launcher.provision.sky.task import FIRST_OF_ALL

LAUNCH_SECONDS = 1800.0
"""Longest time of a launch. SkyPilot waits 10 minutes for SSH, and an environment takes minutes to install."""

LAUNCH_TRIES = 5
LAUNCH_GAP_MS, LONGEST_LAUNCH_GAP_MS = 10_000, 120_000
"""Limits for launches that fail without a reason from the cloud: the number of tries per node, and the first and the
longest gap between tries. The gap doubles after each try."""


LOGIN_GAP_MS = 60_000
"""Time between two launches of a node while the user's login has expired, in milliseconds."""

EARLY_SECONDS = 3.0
"""Time between two queries to SkyPilot for the address of a VM that it still works on."""


@dataclass(slots=True)
class BringUp:
    """The steps of a node between its launch and its login.

    `ask_set_up` reads the set-up's state from the VM. `begin_set_up` copies the bundle's folder to the VM and
    starts the set-up with a shell command.
    """

    around: Surroundings
    tasks: BackgroundTasks
    launches: Launches
    ask_set_up: Callable[[Login], SetUp]
    begin_set_up: Callable[[Login, Path, str], None]

    def wait(self, node: CloudNode) -> None:
        """Log in once the launch is done. End the node, or launch again, after a failure or a long wait."""
        launch = node.files.read(LaunchRecord)
        assert launch is not None
        outcome = self.launches.outcome(launch)
        waited_ms = self.around.clock.now_ms() - launch.at_ms
        if outcome is None:
            if waited_ms > LAUNCH_SECONDS * 1000:
                evidence = f"it did not come up within {LAUNCH_SECONDS:.0f} s"
                node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence, ask_rules=True))
            elif node.files.instance is not None and not node.setting_up.begun:
                self.tasks.every(EARLY_SECONDS, node.name, partial(self._begin_early, node))
        elif outcome.failed is None and node.setting_up.failure:
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=node.setting_up.failure, ask_rules=True))
        elif outcome.failed is None and waited_ms > LAUNCH_SECONDS * 1000:
            evidence = f"it was not set up within {LAUNCH_SECONDS:.0f} s {node.setting_up.trouble}".rstrip()
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence, ask_rules=True))
        elif outcome.failed is None:
            self.tasks.do(node.name, partial(self._log_in, node))
        elif outcome.failed is Failed.NO_CAPACITY:
            tried = _tried(node.files.want)
            node.begin_end(EndingRecord(status=NodeStatus.NO_CAPACITY, evidence=outcome.text, tried=tried))
        elif outcome.failed is Failed.DENIED:
            node.begin_end(EndingRecord(status=NodeStatus.DENIED, evidence=outcome.text))
        elif outcome.failed is Failed.LOGIN:
            if waited_ms > LOGIN_GAP_MS:  # not a try: the cloud was not asked
                self.tasks.do(node.name, partial(self.launches.launch, node, tries=launch.tries))
        elif outcome.failed is Failed.REFUSED:
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=f"its launch was refused: {outcome.text}"))
        elif outcome.failed in (Failed.UNKNOWN, Failed.UNSENT) and launch.tries < LAUNCH_TRIES:
            if waited_ms > min(LAUNCH_GAP_MS * 2 ** (launch.tries - 1), LONGEST_LAUNCH_GAP_MS):
                self.tasks.do(node.name, partial(self.launches.launch, node, tries=launch.tries + 1))
        elif outcome.failed is Failed.UNSENT:
            node.begin_end(EndingRecord(status=NodeStatus.DENIED, evidence=outcome.text))
        else:
            evidence = f"its launch failed: {outcome.text}"
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence, ask_rules=True))

    def _begin_early(self, node: CloudNode) -> None:
        """Start the set-up while SkyPilot still works on the VM, as soon as SkyPilot has an address."""
        state = node.setting_up
        if state.login is None:
            self._find_login(node)
        assert state.login is not None
        try:
            if self.ask_set_up(state.login).digest != self.around.purchases.bundle.digest:
                self._begin(node, state.login)
        except InstanceUnreachable as error:
            raise NotYet(str(error)) from None

    def _log_in(self, node: CloudNode) -> None:
        """Start the set-up, and record the login once the VM reports that the set-up is finished."""
        state, bundle = node.setting_up, self.around.purchases.bundle
        if state.login is None:
            self._find_login(node)
        assert state.login is not None
        try:
            set_up = self.ask_set_up(state.login)
            if set_up.digest != bundle.digest and not state.begun:
                self._begin(node, state.login)
                raise NotYet(f"the set-up of {node.name} has begun")
        except InstanceUnreachable as error:
            state.trouble = str(error)
            raise NotYet(str(error)) from None
        state.trouble = ""
        if set_up.digest != bundle.digest:
            if set_up.exit_code is not None:
                state.failure = _why_useless(set_up, bundle.digest)
            raise NotYet(f"{node.name} is not set up yet")
        node.files.write(
            LoginRecord(
                host=state.login.host,
                user=state.login.user,
                port=state.login.port,
                key=str(state.login.key),
                proxy=state.login.proxy,
                address=state.private_address,
                home=set_up.home,
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

    def _begin(self, node: CloudNode, login: Login) -> None:
        spec = node.files.spec
        assert spec is not None
        bundle = self.around.purchases.bundle
        self.begin_set_up(login, bundle.folder, f"{FIRST_OF_ALL}; {bundle.setup_with(spec.store)}")
        node.setting_up.begun = True


def _why_useless(set_up: SetUp, digest: str) -> str:
    """Return the reason why an ended set-up left no environment of the bundle with this digest."""
    if set_up.exit_code == 0 and set_up.digest:
        return f"it was set up from bundle {set_up.digest}, and this run's is {digest}"
    return f"its set-up failed with exit code {set_up.exit_code}: {set_up.log[-LOG_CHARACTERS:]}"


def _tried(want: Placement | None) -> tuple[str, ...]:
    return () if want is None else (f"{want.cloud}/{want.region}/{want.zone}",)
