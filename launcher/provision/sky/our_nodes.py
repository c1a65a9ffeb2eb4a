"""`OurNodes`, the plugin of SkyPilot's API server named in sky_plugins.yaml. It changes only clusters with our label.

- No credential file of any cloud is uploaded.
- On Google Cloud, nodes run as the run's own service account, not as SkyPilot's wide one. Spot nodes ask for a notice
  of 120 s before a preemption (google_notice.py). The preparation of a region is repeated if Google Cloud does not
  answer: SkyPilot makes these calls once, and gives the zone up.
- No Ray of SkyPilot's runs on nodes. That Ray serves SkyPilot's jobs, and nodes have none. Starting it took 20 s of a
  core, and each end of a node waited for its stop over SSH. The record of the cluster says so (`has_ray`), and
  SkyPilot's own timer on the VM needs no Ray.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import stamina

from launcher.clouds.base import NODE_LABEL, OWNER_LABEL, RUN_LABEL
from launcher.provision.sky.google_notice import with_notice
from launcher.provision.sky.task import IDENTITY_LABEL, IDENTITY_PROJECT_LABEL

Answer = TypeVar("Answer")

TRIES = 5
"""Tries of a region's preparation on Google Cloud, with growing gaps: about 15 s in all."""


def email_of(labels: Mapping[str, str], project: str) -> str:
    """Return the service account in the labels. `project`: the VM's project, used if the labels name no project."""
    return f"{labels[IDENTITY_LABEL]}@{labels.get(IDENTITY_PROJECT_LABEL, project)}.iam.gserviceaccount.com"


def labels_of(node_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of a VM from SkyPilot's configuration of the VM, on either cloud."""
    labels = dict(node_config.get("labels", {}))
    for specification in node_config.get("TagSpecifications", ()):
        labels |= {tag["Key"]: tag["Value"] for tag in specification.get("Tags", ())}
    return labels


def __getattr__(name: str) -> Any:
    """Return the plugin. Created on access, because the base class is SkyPilot's."""
    if name != "OurNodes":
        raise AttributeError(name)
    return _plugin()


def _plugin() -> Any:
    from sky import provision
    from sky.provision import instance_setup
    from sky.server import plugins

    class OurNodes(plugins.BasePlugin):
        load_contexts = frozenset({plugins.PluginContext.EXECUTOR})

        def install(self, extension_context: Any) -> None:
            for cloud, module in (("aws", _OnAws), ("gcp", _OnGoogle)):
                provision.register_provisioner(cloud, module, template_override=_without_credentials)
            if not isinstance(instance_setup.start_ray_on_head_node, partial):
                instance_setup.start_ray_on_head_node = partial(_start_ray, instance_setup.start_ray_on_head_node)

    return OurNodes


def _without_credentials(
    task: Any, to_provision: Any, *, _extra_launch_context: Any, _is_launched_by_jobs_controller: bool
) -> Any:
    """Return SkyPilot's own template without uploads. Configuration alone cannot stop uploads for every cloud."""
    from sky import provision

    if RUN_LABEL not in (to_provision.labels or {}):
        return None
    cloud = to_provision.cloud.canonical_name()
    return provision.TemplateSpec(template_path=f"{cloud}-ray.yml.j2", variables={"credentials": {}})


def _start_ray(start: Any, cluster_name: str, custom_resource: Any, cluster_info: Any, ssh_credentials: Any) -> None:
    """Start SkyPilot's Ray, unless the VM is ours. `start`: SkyPilot's own function."""
    head = cluster_info.get_head_instance()
    if head is None or RUN_LABEL not in (head.tags or {}):
        start(cluster_name, custom_resource, cluster_info, ssh_credentials)


def _repeated(prepare: Callable[[], Answer], refused: Any) -> Answer:
    """Return the result of a region's preparation, which only reads. Repeat it while Google Cloud does not answer.

    `refused`: the class of its client's errors, with a `status_code`.
    """

    def has_no_answer(error: Exception) -> bool:
        return isinstance(error, refused) and (error.status_code == 429 or error.status_code >= 500)

    return stamina.retry(on=has_no_answer, attempts=TRIES, timeout=None, wait_initial=1.0, wait_max=8.0)(prepare)()


def _without_ray(record: Any, config: Any) -> Any:
    """Mark in the record of a purchase that our VM has no Ray and no queue of jobs."""
    from sky.provision import common

    if RUN_LABEL in labels_of(config.node_config):
        record.runtime_metadata = common.ProvisionRuntimeMetadata(has_ray=False, has_job_queue=False)
    return record


class _OnAws:
    """SkyPilot's calls on AWS that differ for our nodes."""

    @staticmethod
    def run_instances(region: str, cluster_name: str, cluster_name_on_cloud: str, config: Any) -> Any:
        from sky.provision.aws import instance

        return _without_ray(instance.run_instances(region, cluster_name, cluster_name_on_cloud, config), config)


class _OnGoogle:
    """SkyPilot's calls on Google Cloud that differ for our nodes."""

    @staticmethod
    def run_instances(region: str, cluster_name: str, cluster_name_on_cloud: str, config: Any) -> Any:
        from sky.provision.gcp import instance

        if RUN_LABEL not in labels_of(config.node_config):
            return instance.run_instances(region, cluster_name, cluster_name_on_cloud, config)
        run = partial(instance.run_instances, region, cluster_name, cluster_name_on_cloud, config)
        return _without_ray(with_notice(run, config.node_config), config)

    @staticmethod
    def bootstrap_instances(region: str, cluster_name_on_cloud: str, config: Any) -> Any:
        """Prepare a region like SkyPilot, with the run's own service account.

        SkyPilot's own preparation creates and attaches a service account with wide permissions.
        """
        from sky.adaptors.gcp import http_error_exception
        from sky.provision.gcp import config as gcp

        if IDENTITY_LABEL not in config.node_config.get("labels", {}):
            return gcp.bootstrap_instances(region, cluster_name_on_cloud, config)
        prepare = partial(_OnGoogle._prepare, region, cluster_name_on_cloud, config)
        return _repeated(prepare, http_error_exception())

    @staticmethod
    def _prepare(region: str, cluster_name_on_cloud: str, config: Any) -> Any:
        from sky.provision.gcp import config as gcp

        labels = config.node_config["labels"]
        crm, _, compute, _ = gcp.construct_clients_from_provider_config(config.provider_config)
        gcp._configure_project(config.provider_config, crm)
        config.node_config["serviceAccounts"] = [
            {
                "email": email_of(labels, config.provider_config["project_id"]),
                "scopes": ["https://www.googleapis.com/auth/cloud-platform"],
            }
        ]
        ours = {key: value for key, value in labels.items() if key in (RUN_LABEL, NODE_LABEL, OWNER_LABEL)}
        for disk in config.node_config.get("disks", []):
            disk.setdefault("initializeParams", {})["labels"] = ours
        config = gcp._configure_subnet(region, cluster_name_on_cloud, config, compute)
        return gcp._configure_placement_policy(region, cluster_name_on_cloud, config, compute)
