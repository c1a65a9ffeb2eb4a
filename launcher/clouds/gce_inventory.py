"""Convert Google Cloud's descriptions of instances, disks and other resources.

Networks, firewalls and service accounts carry no labels; the owner is in their description.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from engine.events import Market
from launcher.clouds.base import NODE_LABEL, OWNER_LABEL, RUN_LABEL, Instance, InstanceState, Resource
from launcher.clouds.labels import run_name

STATES: Mapping[str, InstanceState] = {
    "PROVISIONING": InstanceState.PENDING,
    "STAGING": InstanceState.PENDING,
    "RUNNING": InstanceState.RUNNING,
    "REPAIRING": InstanceState.RUNNING,
}
"""States by Google status. Every other status means stopping; a deleted instance is not listed."""

PREEMPTED, SHUTDOWN_MS = "compute.instances.preempted", 30_000
"""The operation of a preemption, and the longest time from the shutdown signal to the end of a spot VM."""

ENDS = frozenset({PREEMPTED, "delete", "stop", "compute.instances.guestTerminate"})
"""Operations that end a VM. `guestTerminate`: the VM shut itself down."""


def instance_of(vm: Mapping[str, Any]) -> Instance:
    labels = vm.get("labels", {})
    zone = vm["zone"].rpartition("/")[2]
    interface = (vm.get("networkInterfaces") or [{}])[0]
    access = (interface.get("accessConfigs") or [{}])[0]
    state = STATES.get(vm["status"], InstanceState.STOPPING)
    scheduling = vm.get("scheduling", {})
    spot = scheduling.get("provisioningModel") == "SPOT" or scheduling.get("preemptible")
    notice = scheduling.get("preemptionNoticeDuration", {})
    return Instance(
        cloud="gcp",
        region=zone.rpartition("-")[0],
        zone=zone,
        id=vm["name"],
        name=labels.get(NODE_LABEL, vm["name"]),
        run=labels.get(RUN_LABEL, ""),
        owner=labels.get(OWNER_LABEL, ""),
        state=state,
        market=Market.SPOT if spot else Market.ON_DEMAND,
        instance_type=vm["machineType"].rpartition("/")[2],
        address=interface.get("networkIP", ""),
        public_address=access.get("natIP", ""),
        identity=next((account["email"] for account in vm.get("serviceAccounts", ())), ""),
        launched_ms=_utc_ms(vm.get("lastStartTimestamp") or vm.get("creationTimestamp")),
        # A VM that is still stopping is billed, and its `lastStopTimestamp` is from an earlier stop.
        ended_ms=_utc_ms(vm.get("lastStopTimestamp")) if vm["status"] == "TERMINATED" else None,
        reason=vm["status"] if state is InstanceState.STOPPING else "",
        notice_ms=int(notice.get("seconds", 0)) * 1000 or None,  # the API writes 64-bit numbers as text
    )


def disk_of(disk: Mapping[str, Any]) -> Resource:
    labels, zone = disk.get("labels", {}), disk["zone"].rpartition("/")[2]
    return Resource(
        cloud="gcp",
        region=zone.rpartition("-")[0],
        kind="disk",
        id=f"{zone}/{disk['name']}",
        run=labels.get(RUN_LABEL, ""),
        owner=labels.get(OWNER_LABEL, ""),
        node=labels.get(NODE_LABEL, ""),
        size_gib=int(disk.get("sizeGb", 0)) or None,
    )


def described(kind: str, region: str, entry: Mapping[str, Any], run: str | None) -> Resource:
    """Return the resource with the owner from its description, or from its name if the description is empty."""
    try:
        whose = json.loads(entry.get("description") or "{}")
    except ValueError:
        whose = {}
    if run is not None and entry["name"].partition("@")[0] in _names_of(run):
        whose = {"run": run, **whose}
    return Resource(
        cloud="gcp",
        region=region,
        kind=kind,
        id=entry["name"],
        run=str(whose.get("run", "")),
        owner=str(whose.get("owner", "")),
    )


def _names_of(run: str) -> set[str]:
    name = run_name(run)
    return {name, f"{name}-inside", f"{name}-ssh", run_name(run, limit=30)}


def belongs_to(resource: Instance | Resource, owner: str | None, run: str | None) -> bool:
    return owner in (None, resource.owner) and run in (None, resource.run)


def is_end(operation: Mapping[str, Any], launched_ms: int | None) -> bool:
    """Return whether the operation may have ended the VM that was started at `launched_ms`."""
    begun_ms = _utc_ms(operation.get("insertTime"))
    is_earlier = begun_ms is not None and begun_ms < (launched_ms or 0)
    return operation["operationType"] in ENDS and "error" not in operation and not is_earlier


def end_ms(operation: Mapping[str, Any], notice_ms: int | None) -> int | None:
    """Return the latest time at which billing of a VM stopped. A preemption's operation has the start of the notice.

    None: the operation has not ended. An order to delete is no end.

    `notice_ms`: the notice that the VM had before the shutdown signal; None: none.
    """
    begun_ms = _utc_ms(operation.get("insertTime"))
    if begun_ms is not None and operation["operationType"] == PREEMPTED:
        return begun_ms + (notice_ms or 0) + SHUTDOWN_MS
    return _utc_ms(operation.get("endTime"))


def first_end_ms(last: Mapping[str, Any], ends: Iterable[Mapping[str, Any]], notice_ms: int | None) -> int | None:
    """Return the time at which billing of a VM stopped, if `last` of its `ends` is the one that counts; None: not yet.

    A VM that is deleted in the notice of its preemption ends then, and not at the end of the notice.
    """
    ended_ms = end_ms(last, notice_ms)
    if ended_ms is None or last["operationType"] != PREEMPTED:
        return ended_ms
    after = (end_ms(end, None) for end in ends if end.get("insertTime", "") > last.get("insertTime", ""))
    return min([ended_ms, *(deleted_ms for deleted_ms in after if deleted_ms is not None)])


def _utc_ms(text: str | None) -> int | None:
    return round(datetime.fromisoformat(text).timestamp() * 1000) if text else None
