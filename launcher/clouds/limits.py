"""Facts about a cloud that `spotrl check` reads before a purchase: clock, permissions, quotas, regions of buckets.

A quota is a name and a number in a region. A node uses one or more quotas, in a unit per cloud (AWS counts vCPUs by
family, Google Cloud GPUs by model), so a plan's need is a sum per quota name.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from launcher.job.company import NOTHING_NAMED, Named
from launcher.placement.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """A limit on an account's use of a resource. `used` counts the current use, by spotrl and by all else."""

    name: str
    limit: int
    used: int
    title: str = ""
    """The quota's title in the cloud's console."""

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True, kw_only=True, slots=True)
class Permissions:
    """The result of a permission check: `missing` are denied, `unchecked` could not be checked for the reason `why`."""

    missing: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    why: str = ""


class CloudLimits(Protocol):
    """The limits of one cloud. Every call may raise CloudUnreachable or CloudRefused, and is bounded in time (10 s)."""

    cloud: str

    def clock_ms(self) -> int:
        """Return the cloud's time from an answer (UTC milliseconds, with a resolution of seconds)."""

    def permissions(self, named: Named = NOTHING_NAMED) -> Permissions:
        """Return the caller's missing permissions among those for launching (launcher/clouds/policies.py).

        `named`: existing resources in the job on this cloud, which are not created.
        """

    def draws_on(self, want: Placement, named: Named = NOTHING_NAMED) -> Mapping[str, int]:
        """Return the use of each quota by one such node, by quota name. Empty: unknown."""

    def draws_on_once(self, named: Named = NOTHING_NAMED) -> Mapping[str, int]:
        """Return what the run itself uses of each quota, however many nodes it has."""

    def quotas(self, region: str, names: Collection[str]) -> Mapping[str, Quota]:
        """Return the requested quotas, as far as the cloud reports them."""

    def bucket_region(self, url: str) -> str:
        """Return a bucket's location: a region, or on Google Cloud also a continent (`us`)."""

    def bucket_doubts(self, url: str) -> Sequence[str]:
        """Return why nodes, with their own identity, may not use a bucket that this user can use. Empty: no doubt."""


def build_limits(cloud: str) -> CloudLimits:
    """Return the limits of a cloud with the environment's credentials. No call is made yet."""
    match cloud:
        case "aws":
            from launcher.clouds.aws_limits import AwsLimits

            return AwsLimits()
        case "gcp":
            from launcher.clouds.gce_limits import GceLimits

            return GceLimits()
        case _:
            raise ValueError(f"cloud is {cloud!r}; there are aws and gcp")
