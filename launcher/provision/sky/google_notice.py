"""Ask Google Cloud for 120 s between the notice of a spot preemption and the shutdown of the VM.

ask with the field -> granted: the VM's description carries it (`Instance.notice_ms`)
                  \\-> refused: the same request without it, and the node has Google's usual 30 s

The field is `scheduling.preemptionNoticeDuration` of Compute Engine's v1 API: "the Metadata Service preemption notice
duration before the GCE ACPI G2 Soft Off signal is triggered for Spot VMs only" (google-cloud-compute 1.56). Without the
field there is no wait before that signal, and a VM stops within 30 s of the signal.
"""

from collections.abc import Callable
from typing import Any

FIELD = "preemptionNoticeDuration"
NOTICE_SECONDS = 120


def with_notice(run: Callable[[], Any], node_config: dict[str, Any]) -> Any:
    """Return `run()` with the notice asked for in SkyPilot's configuration of the VM, or without it if refused.

    Only a refusal that names the field leads to a second try. Every other error of SkyPilot is raised, and an
    on-demand VM is not touched.
    """
    from sky.provision import common

    scheduling = _scheduling_of(node_config)
    if scheduling.get("provisioningModel") != "SPOT":
        return run()
    node_config["scheduling"] = {**scheduling, FIELD: {"seconds": NOTICE_SECONDS}}
    try:
        return run()
    except common.ProvisionerError as error:
        if not is_refused(error):
            raise
        node_config["scheduling"] = scheduling
        return run()


def is_refused(error: Any) -> bool:
    """Return whether Google refused the field: an older API does not know it, or a machine type does not allow it."""
    return any(
        FIELD.lower() in str(detail.get("message", "")).lower() for detail in getattr(error, "errors", None) or ()
    )


def _scheduling_of(node_config: dict[str, Any]) -> dict[str, Any]:
    """Return the VM's scheduling as one object; SkyPilot also takes a list of objects."""
    scheduling = node_config.get("scheduling") or {}
    if isinstance(scheduling, list):
        return {key: value for part in scheduling for key, value in part.items()}
    return dict(scheduling)
