"""Convert EC2's descriptions of instances and other tagged resources; tags and filters."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from engine.events import Market
from launcher.clouds.base import NODE_LABEL, OWNER_LABEL, RUN_LABEL, Instance, InstanceState, Resource

STATES: Mapping[str, InstanceState] = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "shutting-down": InstanceState.STOPPING,
    "stopping": InstanceState.STOPPING,
    "stopped": InstanceState.STOPPING,
    "terminated": InstanceState.GONE,
}

RECLAIMED = frozenset({"Server.SpotInstanceTermination", "Server.SpotInstanceShutdown"})
"""State reasons for which EC2 itself ended the instance."""


def instance_of(region: str, vm: Mapping[str, Any]) -> Instance:
    tags = tags_of(vm.get("Tags", ()))
    reason = vm.get("StateReason") or {}
    transition = vm.get("StateTransitionReason") or ""
    state = STATES[vm["State"]["Name"]]
    text = " ".join(dict.fromkeys(filter(None, [reason.get("Code"), reason.get("Message"), transition])))
    return Instance(
        cloud="aws",
        region=region,
        zone=vm["Placement"]["AvailabilityZone"],
        id=vm["InstanceId"],
        name=tags.get(NODE_LABEL, tags.get("Name", "")),
        run=tags.get(RUN_LABEL, ""),
        owner=tags.get(OWNER_LABEL, ""),
        state=state,
        market=Market.SPOT if vm.get("InstanceLifecycle") == "spot" else Market.ON_DEMAND,
        instance_type=vm["InstanceType"],
        address=vm.get("PrivateIpAddress") or "",
        public_address=vm.get("PublicIpAddress") or "",
        identity=(vm.get("IamInstanceProfile") or {}).get("Arn", "").rpartition("/")[2],
        launched_ms=_ms(vm.get("LaunchTime")),
        ended_ms=_transition_ms(transition) if state in (InstanceState.GONE, InstanceState.STOPPING) else None,
        reason=text if state in (InstanceState.GONE, InstanceState.STOPPING) else "",
        reclaimed=reason.get("Code") in RECLAIMED,
    )


def gone(instance: Instance, reason: str) -> Instance:
    return replace(instance, state=InstanceState.GONE, reason=instance.reason or reason)


def resource_of(
    region: str, kind: str, id: str, tags: Sequence[Mapping[str, str]], size_gib: int | None = None
) -> Resource:
    named = tags_of(tags)
    return Resource(
        cloud="aws",
        region=region,
        kind=kind,
        id=id,
        run=named.get(RUN_LABEL, ""),
        owner=named.get(OWNER_LABEL, ""),
        node=named.get(NODE_LABEL, ""),
        size_gib=size_gib,
    )


def tag_filters(owner: str | None, run: str | None) -> list[dict[str, Any]]:
    filters: list[dict[str, Any]] = [{"Name": "tag-key", "Values": [RUN_LABEL]}]
    if owner is not None:
        filters.append({"Name": f"tag:{OWNER_LABEL}", "Values": [owner]})
    if run is not None:
        filters.append({"Name": f"tag:{RUN_LABEL}", "Values": [run]})
    return filters


def labels_of(run: str, owner: str) -> dict[str, str]:
    return {RUN_LABEL: run, OWNER_LABEL: owner}


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tags_of(tags: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in tags}


def _ms(when: datetime | None) -> int | None:
    return None if when is None else round(when.timestamp() * 1000)


def _transition_ms(text: str) -> int | None:
    """Return the end time in a text like `User initiated (2026-03-04 05:06:07 GMT)`.

    EC2 reports the time nowhere else.
    """
    match = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)", text)
    return _ms(datetime.fromisoformat(match[1]).replace(tzinfo=UTC)) if match else None
