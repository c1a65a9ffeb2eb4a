"""The objects that every step in a node's life uses: the run's common facts, SkyPilot, the clouds, the clocks, the
lease.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.clock import Clock
from launcher.clouds.base import CloudApi
from launcher.job.company import NOTHING_NAMED, Named
from launcher.provision.sky.bundle import Bundle
from launcher.provision.sky.sky import Sky


@dataclass(frozen=True, kw_only=True, slots=True)
class Purchases:
    """The common facts of all nodes of a run.

    `owners`: our identity, by cloud. `regions`: where the run may have nodes, (cloud, region). `weights`: location
    of the model, by cloud (weights.py); empty if the model ships with spotrl. `lora`: the same of `model.lora`.
    `images`: by cloud, or cloud/region.
    """

    run: str
    owners: Mapping[str, str]
    folder: Path
    ssh_from: str
    buckets: Sequence[str]
    bundle: Bundle
    regions: Sequence[tuple[str, str]]
    weights: Mapping[str, str] = field(default_factory=dict)
    lora: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=dict)
    keep_failed_ms: int = 0
    """Time for which a failed node is kept."""
    named: Callable[[str, str], Named] = lambda cloud, region: NOTHING_NAMED
    """The identity and network named in the job, by cloud and region."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """The objects that every step uses. Immutable.

    `check_lease` raises LeaseLost after a takeover. The call comes before each purchase, and before a node or the setup
    of a region is removed.
    """

    purchases: Purchases
    sky: Sky
    clouds: Mapping[str, CloudApi]
    clock: Clock
    monotonic: Callable[[], float] = time.monotonic
    check_lease: Callable[[], None] = lambda: None
    find_ssh_from: Callable[[], str] | None = None
    """Returns where SSH comes from now, like `Purchases.ssh_from`. None: it never changes."""
