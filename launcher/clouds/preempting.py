"""Preempt one of our own spot nodes by the cloud's own means, to test that a run recovers (`spotrl selftest`).

AWS: an experiment of the Fault Injection Service (aws_fis.py). Google Cloud: a simulated maintenance event, documented
as the test of preemption for Spot VMs (gce_maintenance.py). Both end the VM as a real preemption does, so the launcher
sees the same evidence.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from launcher.clouds.base import Finding, Instance
from launcher.clouds.limits import Permissions


class Progress(StrEnum):
    """The state of an ordered preemption, as the cloud tells it."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """An accepted order to preempt an instance. `id`: the cloud's name of the order, in `region` or `zone`."""

    region: str
    zone: str
    id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderState:
    """The state of an order. `text`: the cloud's own words about it."""

    progress: Progress
    text: str = ""


class Preempter(Protocol):
    """The means of one cloud to preempt a spot node. Thread-safe; every call is bounded in time (10 s).

    Every call may raise CloudRefused or CloudUnreachable.
    """

    cloud: str

    means: str
    """The means, as users find it in the cloud's documentation."""

    notice_ms: int | None
    """Milliseconds between notice and end that the cloud promises. None: it promises none."""

    def look(self) -> Sequence[Finding]:
        """Check what an administrator must have made beforehand (a role). Empty: nothing is needed."""

    def permissions_to_preempt(self) -> Permissions:
        """Return which of the permissions for the order the caller lacks."""

    def preempt(self, instance: Instance) -> Order:
        """Order the preemption of a spot instance of ours. Not idempotent: call once."""

    def state(self, order: Order) -> OrderState:
        """Return the state of an order."""


def build_preempter(cloud: str, environ: Mapping[str, str] = os.environ) -> Preempter:
    """Return the means of a cloud with the environment's credentials. No call is made yet."""
    match cloud:
        case "aws":
            from launcher.clouds.aws_fis import AwsPreempter

            return AwsPreempter()
        case "gcp":
            from launcher.clouds.gce_maintenance import GcePreempter

            return GcePreempter(environ)
        case _:
            raise ValueError(f"cloud is {cloud!r}; there are aws and gcp")
