"""Google Cloud's clock, permissions and quotas, for `spotrl check`.

Quotas of GPUs are counted in GPUs, by model and capacity type in each region, and once more over all regions. A project
without a preemptible GPU quota may use its ordinary quota for spot; the check does not rely on the rule.
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
from launcher.placement.placement import Placement

EVERYWHERE = "GPUS_ALL_REGIONS"

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

    def missing(self, wanted: Sequence[str]) -> Permissions:
        """Return which of these permissions the caller lacks in the project."""
        granted: set[str] = set()
        with errors_named("gcp projects.testIamPermissions"):
            for start in range(0, len(wanted), AT_ONCE):
                body = {"permissions": list(wanted[start : start + AT_ONCE])}
                granted |= set(self.calls.ask("POST", PROJECTS, ":testIamPermissions", body).get("permissions", ()))
        return Permissions(missing=tuple(one for one in wanted if one not in granted))

    def draws_on(self, want: Placement) -> Mapping[str, int]:
        is_spot = want.market is Market.SPOT
        model = (SPOT_MODELS if is_spot else MODELS).get(want.accelerator)
        if model is None:
            return {}
        return {f"{'PREEMPTIBLE_' if is_spot else ''}{model}_GPUS": want.gpus, EVERYWHERE: want.gpus}

    def quotas(self, region: str, names: Collection[str]) -> Mapping[str, Quota]:
        with errors_named(f"gcp compute regions.get, {region}"):
            found = [*self.calls.ask("GET", COMPUTE, f"/regions/{region}").get("quotas", ())]
            if EVERYWHERE in names:
                found += self.calls.ask("GET", COMPUTE, "").get("quotas", ())
        return {
            one["metric"]: Quota(
                name=one["metric"], title=one["metric"], limit=int(one["limit"]), used=int(one.get("usage", 0))
            )
            for one in found
            if one["metric"] in names
        }

    def bucket_region(self, url: str) -> str:
        bucket, _ = bucket_of(url)
        with errors_named(f"gcp storage buckets.get {bucket}"):
            found = self.calls.call("GET", f"{STORAGE}/{bucket}", query={"fields": "location"})
        location = str(found.get("location", "")).lower()
        if not location:
            raise CloudRefused(f"gcp does not say where the bucket {bucket} is")
        return location
