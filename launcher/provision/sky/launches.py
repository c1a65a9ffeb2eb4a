"""Launches sent to SkyPilot: send, adopt after a crash, read the outcome, cancel."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.clouds.base import NODE_LABEL, OWNER_LABEL, RUN_LABEL, CloudRefused, InstanceState, NotSettled
from launcher.decide.node_facts import NodeStatus
from launcher.exit_codes import Failure
from launcher.market.refusals import UNSENT, is_login_needed, remedy_for
from launcher.provision.sky.cloud_node import CloudNode, SettingUp
from launcher.provision.sky.inventory import CloudInventory
from launcher.provision.sky.node_book import NodeBook
from launcher.provision.sky.outcome import LOG_CHARACTERS, Failed, Outcome, login_text
from launcher.provision.sky.records import EndingRecord, LaunchRecord
from launcher.provision.sky.regions import Regions
from launcher.provision.sky.surroundings import Surroundings
from launcher.provision.sky.task import Launch

log = logging.getLogger(__name__)

AUTOSTOP_MARGIN_MINUTES = 30
"""Delay of SkyPilot's own timer on the VM after the spend deadline, in case the node's agent did not terminate the
VM."""

SETTLE_SECONDS = 300.0
"""Time for which a region's setup is asked again while the cloud does not know its own resources. Clouds mostly take
seconds. After that the pool counts as refused, and another place is tried."""

UNLIMITED_MINUTES = 24 * 60


@dataclass(slots=True)
class Launches:
    """The launches of a run and their outcomes. `launch`, `poll` and `cancel` block and run in the pool."""

    around: Surroundings
    nodes: NodeBook
    inventory: CloudInventory
    regions: Regions
    _outcomes: dict[str, Outcome | None] = field(default_factory=dict)
    """By request id; None while pending."""

    def launch(self, node: CloudNode, tries: int = 1) -> None:
        """Send the launch to SkyPilot, unless a launch from before a crash exists."""
        before = node.files.read(LaunchRecord)
        is_unsent = before is not None and bool(before.unsent)
        last = None if before is None else self.outcome(before)
        login = last.text if last is not None and last.failed is Failed.LOGIN else ""
        if not node.fresh and (tries == 1 or is_unsent) and self._adopt(node):
            return
        want = node.files.want
        if want is None:
            evidence = "its want.json cannot be read, and SkyPilot does not know its launch"
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence))
            return
        try:
            region_setup = self.regions.prepare(want.cloud, want.region)
            node.unsettled_since = None
        except NotSettled as unsettled:
            now = self.around.monotonic()
            node.unsettled_since = now if node.unsettled_since is None else node.unsettled_since
            if now - node.unsettled_since < SETTLE_SECONDS:
                raise
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=str(unsettled)))
            return
        except CloudRefused as refused:
            # What the user can mend while the run waits is no denial: the pool is asked again later.
            status = NodeStatus.DENIED if remedy_for(str(refused)) is None else NodeStatus.GONE
            node.begin_end(EndingRecord(status=status, evidence=str(refused)))
            return
        purchases, spec, now_ms = self.around.purchases, node.files.spec, self.around.clock.now_ms()
        assert spec is not None
        node.fresh = False
        launch = Launch(
            name=node.name,
            want=want,
            region_setup=region_setup,
            labels={RUN_LABEL: purchases.run, NODE_LABEL: node.name, OWNER_LABEL: purchases.owners[want.cloud]},
            autostop_minutes=autostop_minutes(spec.money_deadline_ms, now_ms),
            image=purchases.images.get(f"{want.cloud}/{want.region}", purchases.images.get(want.cloud)),
        )
        self.around.check_lease()
        request, unsent = "", ""
        try:
            request = self.around.sky.start(launch)
            self._check_lease_after(request)
        except Failure:
            raise
        except Exception as error:  # SkyPilot's client raises errors of many types
            log.warning("%s: SkyPilot's client did not send the launch", node.name, exc_info=True)
            unsent = f"{UNSENT}: {type(error).__name__}: {error}"[:LOG_CHARACTERS]
        node.files.forget("machine")  # from an earlier attempt, like the VM's login
        node.setting_up = SettingUp()
        node.sightings.missing = 0
        record = LaunchRecord(request_id=request, at_ms=now_ms, tries=tries)
        why = {"unsent": unsent, "login": login}
        node.files.write(record.model_copy(update={name: text for name, text in why.items() if text}))

    def _check_lease_after(self, request: str) -> None:
        """Cancel a launch that was sent after another controller took over. Raises LeaseLost.

        A controller can be frozen between its look at the lease and the launch, and thaw when the run has ended.
        """
        try:
            self.around.check_lease()
        except Failure:
            self.around.sky.cancel(request)
            raise

    def _adopt(self, node: CloudNode) -> bool:
        """Adopt a request or cluster left by a launch before a crash, and return True.

        Without either, terminate VMs of this name in other regions and return False. The next launch finds a VM in the
        node's own region.
        """
        now_ms = self.around.clock.now_ms()
        request = self.around.sky.pending(node.name).get(node.name)
        if request is not None:
            node.files.write(LaunchRecord(request_id=request, at_ms=now_ms, tries=1))
            return True
        if self.around.sky.clusters(node.name).get(node.name) == "UP":
            node.files.write(LaunchRecord(request_id="", at_ms=now_ms, adopted=True))
            return True
        for cloud, region in self.around.purchases.regions:
            lost = [
                instance
                for instance in self.inventory.instances_in(cloud, region)
                if instance.name == node.name and instance.state is not InstanceState.GONE
            ]
            if lost and (cloud, region) != node.region:
                self.around.check_lease()
                self.around.clouds[cloud].end(lost)
        return False

    def under_way(self) -> list[str]:
        """Return the pending launch requests."""
        launches = [node.files.read(LaunchRecord) for node in self.nodes.with_work()]
        requests = [launch.request_id for launch in launches if launch is not None and launch.request_id]
        return [request for request in requests if self._outcomes.get(request) is None]

    def poll(self, requests: Sequence[str]) -> None:
        """Read the outcomes of the requests from SkyPilot."""
        outcomes = self.around.sky.poll(requests)
        forgotten = Outcome(failed=Failed.UNKNOWN, text="SkyPilot's API server does not know its launch any more")
        self._outcomes.update({request: outcomes.get(request, forgotten) for request in requests})

    def outcome(self, launch: LaunchRecord) -> Outcome | None:
        """Return the outcome of the launch; None while pending."""
        if launch.unsent and is_login_needed(launch.unsent):
            return Outcome(failed=Failed.LOGIN, text=login_text(launch.unsent))
        if launch.unsent:
            return Outcome(failed=Failed.UNSENT, text=launch.unsent)
        return Outcome() if launch.adopted else self._outcomes.get(launch.request_id)

    def cancel(self, node: CloudNode) -> None:
        """Cancel the node's launch, if still pending."""
        launch = node.files.read(LaunchRecord)
        request = launch.request_id if launch is not None else None
        if launch is None and node.may_be_launched:
            request = self.around.sky.pending(node.name).get(node.name)
        elif launch is not None and launch.unsent:
            # The client may have failed after it sent the launch. If it fails again, the node ends without an answer.
            try:
                request = self.around.sky.pending(node.name).get(node.name)
            except Exception as error:
                log.warning("%s: SkyPilot does not say whether it knows a launch: %s", node.name, error)
        if request and self._outcomes.get(request) is None:
            self.around.sky.cancel(request)
            self._outcomes[request] = Outcome(failed=Failed.CANCELLED)


def autostop_minutes(deadline_ms: int | None, now_ms: int) -> int:
    """Return the minutes from now after which SkyPilot's timer ends the VM."""
    if deadline_ms is None:
        return UNLIMITED_MINUTES
    return math.ceil(max(0, deadline_ms - now_ms) / 60_000) + AUTOSTOP_MARGIN_MINUTES
