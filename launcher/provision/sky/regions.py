"""The region setup of a run: group, network and identity of each region with nodes, from the first node to the end.

none -> prepared -> tidied
          |
          +--> forgotten, after a rule was removed by hand: prepared again before the next launch
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from threading import Lock

from launcher.clouds.base import InstanceState, RegionSetup
from launcher.provision.sky.background_tasks import NotYet
from launcher.provision.sky.inventory import CloudInventory
from launcher.provision.sky.surroundings import Surroundings

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Regions:
    """The prepared regions and their missing rules. `prepare`, `look_up_rules` and `tidy` block and run in the pool."""

    around: Surroundings
    inventory: CloudInventory
    prepared: dict[tuple[str, str], RegionSetup] = field(default_factory=dict)
    missing_rules: dict[tuple[str, str], str] = field(default_factory=dict)
    tidied: set[tuple[str, str]] = field(default_factory=set)
    ssh_from: str = ""
    """Where SSH comes from, as CIDR. `follow_address` asks again."""
    address_asked_at: float | None = None
    """Monotonic time of the end of the last `follow_address`."""
    address_changed_at: float | None = None
    """Monotonic time at which another address was found. The rules of the regions follow within a pass."""
    _preparing: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.ssh_from = self.around.purchases.ssh_from

    def prepare(self, cloud: str, region: str) -> RegionSetup:
        """Create the group, network and identity of a region, once and in one thread."""
        with self._preparing:
            if (cloud, region) not in self.prepared:
                purchases = self.around.purchases
                self.prepared[cloud, region] = self.around.clouds[cloud].prepare(
                    region,
                    run=purchases.run,
                    owner=purchases.owners[cloud],
                    ssh_from=self.ssh_from,
                    buckets=purchases.buckets,
                    models=[*purchases.weights.values(), *purchases.lora.values()],
                    named=purchases.named(cloud, region),
                )
            return self.prepared[cloud, region]

    def follow_address(self) -> None:
        """Ask where SSH comes from now. After a change every region has to be prepared again.

        Raises Failure if nobody knows the address.
        """
        try:
            if self.around.find_ssh_from is not None and (now := self.around.find_ssh_from()) != self.ssh_from:
                log.warning("SSH came from %s and comes from %s now: the rules follow", self.ssh_from, now)
                with self._preparing:
                    self.ssh_from = now
                    self.prepared.clear()
                self.address_changed_at = self.around.monotonic()
        finally:
            self.address_asked_at = self.around.monotonic()

    def look_up_rules(self, cloud: str, region: str) -> None:
        """Look up which of our firewall rules were removed by hand.

        The next `prepare` of the region creates them again.
        """
        setup = self.prepared.get((cloud, region))
        if setup is not None:
            self.missing_rules[cloud, region] = missing = "; ".join(self.around.clouds[cloud].open_rules(setup))
            if missing:
                log.warning("%s/%s: %s", cloud, region, missing)
                self.prepared.pop((cloud, region), None)

    def tidy(self, cloud: str, region: str, with_nodes: Collection[tuple[str, str]]) -> None:
        """Terminate what is left in the region and remove the group, network and identity.

        The identity goes after the VMs of all regions `with_nodes`: a VM ends itself with it.
        """
        self.around.check_lease()
        api = self.around.clouds[cloud]
        places = [region] if region != api.home else [place for where, place in with_nodes if where == cloud]
        instances = [instance for place in places for instance in self.inventory.instances_in(cloud, place)]
        alive = [instance for instance in instances if instance.state is not InstanceState.GONE]
        if alive:
            api.end(alive)
            raise NotYet(f"{', '.join(instance.id for instance in alive)} is told to end and has not ended yet")
        resources = self.inventory.resources_in(cloud, region)
        remaining = api.remove(resources) if resources else []
        if remaining:
            raise NotYet(f"{', '.join(f'{resource.kind} {resource.id}' for resource in remaining)} cannot go yet")
        self.prepared.pop((cloud, region), None)
        self.missing_rules.pop((cloud, region), None)
        self.tidied.add((cloud, region))

    def used(self, with_nodes: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return the regions with nodes, and each cloud's `home` region for global resources."""
        return {*with_nodes, *((cloud, self.around.clouds[cloud].home) for cloud, _ in with_nodes)}
