"""The task and the configuration of one launch, in SkyPilot's words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.events import Market
from launcher.clouds.base import RegionSetup
from launcher.placement.placement import Placement

IDENTITY_LABEL, IDENTITY_PROJECT_LABEL = "spotrl-identity", "spotrl-identity-project"
"""Labels for `OurNodes` on Google Cloud: the service account of the VM, and the account's project. Two labels are
needed, because a label allows neither the @ nor the dots of an e-mail address."""

UPLOADED = (
    "~/.aws/credentials",
    "~/.config/gcloud",
    "~/.cache/huggingface/token",
    "~/.cloudflare",
    "~/.coreweave",
    "~/.vastdata",
    "~/.ssh/sky-cluster-key",
)
"""Files that SkyPilot may have copied to a VM if the API server was not started by spotrl."""

FIRST_OF_ALL = f"rm -rf {' '.join(UPLOADED)}"
"""The first command on a VM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One VM to start. Its files and its set-up are sent over SSH (set_up.py)."""

    name: str
    want: Placement
    region_setup: RegionSetup
    labels: Mapping[str, str]
    autostop_minutes: int
    image: str | None = None


def task_of(launch: Launch) -> dict[str, Any]:
    """Return SkyPilot's task: one resource, no files, no `setup`, no `run`.

    The task holds no secrets. Secrets are sent with the order that starts the agent.
    """
    want, labels = launch.want, dict(launch.labels)
    resources: dict[str, Any] = {
        "infra": "/".join(filter(None, [want.cloud, want.region, want.zone_name])),
        "instance_type": want.instance_type,
        "use_spot": want.market is Market.SPOT,
        "disk_size": want.disk_gib,
        "autostop": {"idle_minutes": launch.autostop_minutes, "down": True, "wait_for": "none"},
    }
    if want.cloud == "gcp":
        account, _, domain = launch.region_setup.identity.partition("@")
        labels |= {IDENTITY_LABEL: account, IDENTITY_PROJECT_LABEL: domain.partition(".")[0]}
        if want.gpus:
            resources["accelerators"] = {want.accelerator: want.gpus}  # on AWS the instance type implies the GPUs
    if launch.image:
        resources["image_id"] = launch.image
    return {
        "name": "node",
        "resources": {**resources, "labels": labels},
    }


def config_of(setup: RegionSetup) -> dict[str, Any]:
    """Return SkyPilot's configuration for the request: our group and identity, and no credential upload."""
    from sky.utils import schemas

    properties = schemas.get_config_schema()["properties"]
    config: dict[str, Any] = {
        cloud: {"remote_identity": "NO_UPLOAD"}
        for cloud, schema in properties.items()
        if "remote_identity" in schema.get("properties", {})
    }
    if setup.cloud == "aws":
        config["aws"] = {"remote_identity": setup.identity, "security_group_name": setup.group}
    else:
        config["gcp"] = {"remote_identity": "NO_UPLOAD", "vpc_name": setup.network}
    if setup.named.network:
        config[setup.cloud] |= network_config(setup)
    return config


def network_config(setup: RegionSetup) -> dict[str, Any]:
    """Return the configuration of a network named in the job.

    Every key is set, so that no value of the user's own SkyPilot configuration applies to the node.
    """
    named = setup.named
    network: dict[str, Any] = {
        "vpc_name": setup.network,
        "subnet_names": list(setup.subnets) or None,
        "use_internal_ips": not named.public_addresses,
        "ssh_proxy_command": named.ssh_proxy or None,
    }
    # Without a proxy, SkyPilot would reach private AWS addresses through the Session Manager, unless disabled.
    return network | {"vpc_names": None, "use_ssm": False} if setup.cloud == "aws" else network
