"""What `spotrl check` asks of a cloud before anything is bought: its clock, permissions, quotas, where a bucket is.

A quota is a name and a number in a region. A machine draws on one or more of them, in units of its own (AWS counts
vCPUs by family, Google Cloud GPUs by model), so that what a plan needs is a sum of names.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from launcher.company import NOTHING_NAMED, Named
from launcher.placement.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """How much of something an account may have at once. `used` counts what is there now, ours or not."""

    name: str
    limit: int
    used: int
    title: str = ""
    """As the cloud's console calls it."""

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True, kw_only=True, slots=True)
class Permissions:
    """What was found out: those that are missing, those that nobody could say, and why not."""

    missing: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()
    why: str = ""


class CloudLimits(Protocol):
    """One cloud. Every call may raise CloudUnreachable or CloudRefused, and is bounded in time (10 s)."""

    cloud: str

    def clock_ms(self) -> int:
        """What time it is, by the cloud's own answer (UTC, milliseconds; it tells seconds)."""

    def permissions(self, named: Named = NOTHING_NAMED) -> Permissions:
        """Which of those that launching needs (launcher/cluster/clouds/policies.py) the caller lacks.

        `named`: what the job names on this cloud, which is not made.
        """

    def draws_on(self, want: Placement) -> Mapping[str, int]:
        """Quotas by name that one such machine uses, and how much. Empty: nobody knows which."""

    def quotas(self, region: str, names: Collection[str]) -> Mapping[str, Quota]:
        """Those of these quotas that the cloud tells of."""

    def bucket_region(self, url: str) -> str:
        """Where a bucket is: a region, or on Google Cloud also a continent (`us`)."""


def build_limits(cloud: str) -> CloudLimits:
    """As whom the environment says; nothing is asked yet."""
    match cloud:
        case "aws":
            from launcher.cluster.clouds.aws_limits import AwsLimits

            return AwsLimits()
        case "gcp":
            from launcher.cluster.clouds.gce_limits import GceLimits

            return GceLimits()
        case _:
            raise ValueError(f"cloud is {cloud!r}; there are aws and gcp")
