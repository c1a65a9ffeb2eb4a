"""Google Cloud's clock, permissions and quotas, for `spotrl check`.

Quotas of GPUs are counted in GPUs, by model and capacity type in each region, and once more over all regions. A project
without a preemptible GPU quota may use its ordinary quota for spot; the check does not rely on the rule. It does for
CPUs, whose preemptible quota is 0 in most projects. A new project often has 4 to 8 addresses, 500 GB of SSD and 5
networks in use of 5, and each of them refuses a node as a GPU quota does.
"""

from collections.abc import Collection, Mapping, Sequence
from email.utils import parsedate_to_datetime

from engine.events import Market
from launcher.clouds.base import CloudRefused, CloudUnreachable
from launcher.clouds.gce import GceApi
from launcher.clouds.gce_calls import errors_named
from launcher.clouds.gce_services import COMPUTE, PROJECTS
from launcher.clouds.labels import bucket_of
from launcher.clouds.limits import Permissions, Quota
from launcher.clouds.policies import gcp_permissions
from launcher.job.company import NOTHING_NAMED, Named
from launcher.market.instance_types import instance_type_of
from launcher.placement.placement import Placement

GPUS_EVERYWHERE, CPUS_EVERYWHERE, NETWORKS = "GPUS_ALL_REGIONS", "CPUS_ALL_REGIONS", "NETWORKS"
OF_THE_PROJECT = {GPUS_EVERYWHERE, CPUS_EVERYWHERE, NETWORKS}
"""Quotas of the project, not of a region."""

CPUS, SPOT_CPUS = "CPUS", "PREEMPTIBLE_CPUS"

OWN_CPUS = {"a2": "A2_CPUS"}
"""CPU quotas of families that do not count as `CPUS`."""

WITHOUT_CPUS = {"a3", "a4"}
"""Families whose CPUs have no quota in a region; their GPUs do."""

MODELS = {
    "T4": "NVIDIA_T4",
    "V100": "NVIDIA_V100",
    "L4": "NVIDIA_L4",
    "A100": "NVIDIA_A100",
    "A100-80GB": "NVIDIA_A100_80GB",
}
"""Compute Engine's names of GPUs in quota names (its client's Quota.Metric). Newer GPUs have quotas by family, which
only the console shows."""

SPOT_MODELS = {**MODELS, "H100": "NVIDIA_H100"}

STORAGE = "https://storage.googleapis.com/storage/v1/b"

AT_ONCE = 100
"""Most permissions tested by one call."""


class GceLimits(GceApi):
    """The checks of limits on one Google Cloud project."""

    def clock_ms(self) -> int:
        import requests

        url = self.calls.compute_url
        with errors_named("gcp compute"):
            date = requests.head(url, timeout=4.0).headers.get("Date", "")
        if not date:
            raise CloudUnreachable("gcp compute: the answer has no date")
        return round(parsedate_to_datetime(date).timestamp() * 1000)

    def permissions(self, named: Named = NOTHING_NAMED) -> Permissions:
        return self.missing(gcp_permissions(named))

    def missing(self, permissions: Sequence[str]) -> Permissions:
        """Return which of these permissions the caller lacks in the project."""
        granted: set[str] = set()
        with errors_named("gcp projects.testIamPermissions"):
            for start in range(0, len(permissions), AT_ONCE):
                body = {"permissions": list(permissions[start : start + AT_ONCE])}
                granted |= set(self.calls.ask("POST", PROJECTS, ":testIamPermissions", body).get("permissions", ()))
        return Permissions(missing=tuple(permission for permission in permissions if permission not in granted))

    def draws_on(self, want: Placement, named: Named = NOTHING_NAMED) -> Mapping[str, int]:
        is_spot = want.market is Market.SPOT
        model, machine = (
            (SPOT_MODELS if is_spot else MODELS).get(want.accelerator),
            instance_type_of("gcp", want.instance_type),
        )
        if model is None or machine is None:
            return {}
        family = want.instance_type.partition("-")[0]
        cpus = {} if family in WITHOUT_CPUS else {SPOT_CPUS if is_spot else OWN_CPUS.get(family, CPUS): machine.vcpus}
        return {
            f"{'PREEMPTIBLE_' if is_spot else ''}{model}_GPUS": want.gpus,
            GPUS_EVERYWHERE: want.gpus,
            **cpus,
            CPUS_EVERYWHERE: machine.vcpus,
            "SSD_TOTAL_GB": want.disk_gib,
            "IN_USE_ADDRESSES": int(named.public_addresses),
        }

    def draws_on_once(self, named: Named = NOTHING_NAMED) -> Mapping[str, int]:
        return {} if named.network else {NETWORKS: 1}

    def quotas(self, region: str, names: Collection[str]) -> Mapping[str, Quota]:
        with errors_named(f"gcp compute regions.get, {region}"):
            entries = [*self.calls.ask("GET", COMPUTE, f"/regions/{region}").get("quotas", ())]
            if OF_THE_PROJECT & {*names}:
                entries += self.calls.ask("GET", COMPUTE, "").get("quotas", ())
        quotas = {
            entry["metric"]: Quota(
                name=entry["metric"], title=entry["metric"], limit=int(entry["limit"]), used=int(entry.get("usage", 0))
            )
            for entry in entries
        }
        if SPOT_CPUS in quotas and quotas[SPOT_CPUS].limit == 0 and CPUS in quotas:
            quotas[SPOT_CPUS] = quotas[CPUS]  # then spot VMs count as ordinary ones
        return {name: quota for name, quota in quotas.items() if name in names}

    def bucket_doubts(self, url: str) -> Sequence[str]:
        bucket, _ = bucket_of(url)
        with errors_named(f"gcp storage buckets.get {bucket}"):
            answer = self.calls.call("GET", f"{STORAGE}/{bucket}", query={"fields": "iamConfiguration"})
        if answer.get("iamConfiguration", {}).get("uniformBucketLevelAccess", {}).get("enabled"):
            return []
        return [
            f"{url} has access lists for each object, beside which the conditions of the nodes' permissions do not "
            f"count: that was not tried. `gcloud storage buckets update gs://{bucket} --uniform-bucket-level-access`"
        ]

    def bucket_region(self, url: str) -> str:
        bucket, _ = bucket_of(url)
        with errors_named(f"gcp storage buckets.get {bucket}"):
            answer = self.calls.call("GET", f"{STORAGE}/{bucket}", query={"fields": "location"})
        location = str(answer.get("location", "")).lower()
        if not location:
            raise CloudRefused(f"gcp does not say where the bucket {bucket} is")
        return location
