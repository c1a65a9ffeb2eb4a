"""Preempt a Spot VM on Google Cloud with a simulated maintenance event.

Google documents it as the way to test how applications handle preemption and shutdown of Spot VMs. A Spot VM cannot
migrate, so the event ends it, and Compute Engine records the operation `compute.instances.preempted`. A notice of up to
30 s comes before a preemption if Google can give one, so a missing notice is no fault of spotrl.
https://docs.cloud.google.com/compute/docs/instances/simulating-host-maintenance
"""

from collections.abc import Sequence

from launcher.clouds.base import Finding, Instance
from launcher.clouds.gce_calls import errors_named
from launcher.clouds.gce_limits import GceLimits
from launcher.clouds.gce_services import COMPUTE
from launcher.clouds.limits import Permissions
from launcher.clouds.preempting import Order, OrderState, Progress
from launcher.clouds.selftest_policies import SIMULATE

POLICY = "--selftest --print-policy gcp"


class GcePreempter(GceLimits):
    """Simulated maintenance events in one project."""

    means = "Google Cloud, instances.simulateMaintenanceEvent"
    notice_ms: int | None = None

    def look(self) -> Sequence[Finding]:
        return []

    def permissions_to_preempt(self) -> Permissions:
        return self.missing([SIMULATE])

    def preempt(self, instance: Instance) -> Order:
        path = f"/zones/{instance.zone}/instances/{instance.id}/simulateMaintenanceEvent"
        with errors_named(f"gcp compute instances.simulateMaintenanceEvent {instance.id}", POLICY):
            operation = self.calls.ask("POST", COMPUTE, path, {})
        return Order(region=instance.region, zone=instance.zone, id=operation["name"])

    def state(self, order: Order) -> OrderState:
        with errors_named(f"gcp compute zoneOperations.get {order.id}"):
            operation = self.calls.ask("GET", COMPUTE, f"/zones/{order.zone}/operations/{order.id}")
        errors = operation.get("error", {}).get("errors", ())
        if errors:
            text = "; ".join(f"{error.get('code', '')} {error.get('message', '')}".strip() for error in errors)
            return OrderState(progress=Progress.FAILED, text=text)
        done = operation.get("status") == "DONE"
        return OrderState(progress=Progress.DONE if done else Progress.RUNNING, text=str(operation.get("status", "")))
