"""The VMs of a run as the clouds report them, region by region."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.clouds.base import Instance, InstanceState, Resource
from launcher.exit_codes import Failure
from launcher.provision.sky.cloud_node import CloudNode
from launcher.provision.sky.surroundings import Surroundings

LOOK_SECONDS = 2.0
"""Time between two reads of SkyPilot's requests and of the inventory of a region with nodes."""

FRESH_SECONDS = 10.0
"""Age up to which an inventory counts as proof."""


@dataclass(slots=True)
class RegionInventory:
    """The last inventory of a region.

    `at`: time of the last successful read; `at_ms`: the time before that read on the run's clock.
    `trouble`: error of the last read; empty if the read succeeded.
    """

    instances: tuple[Instance, ...] = ()
    at: float | None = None
    at_ms: int = 0
    looks: int = 0
    trouble: str = ""


@dataclass(slots=True)
class CloudInventory:
    """The last inventory of each region, and calls for a new one.

    `look_at`, `search`, `instances_in` and `resources_in` block and run in the pool. The other methods answer from
    memory.
    """

    around: Surroundings
    _by_region: dict[tuple[str, str], RegionInventory] = field(default_factory=dict)

    def look_at(self, cloud: str, region: str) -> None:
        """Read the inventory of the region and remember the result. Raises Failure if the cloud does not answer."""
        observed = self._by_region.setdefault((cloud, region), RegionInventory())
        at_ms = self.around.clock.now_ms()
        try:
            instances = tuple(self.instances_in(cloud, region))
        except Failure as failure:
            observed.trouble = str(failure)
            raise
        observed.instances, observed.at, observed.at_ms = instances, self.around.monotonic(), at_ms
        observed.trouble = ""
        observed.looks += 1

    def instances_in(self, cloud: str, region: str) -> list[Instance]:
        """Return the run's VMs.

        Another user's run may have the same name: VMs with another owner's label are left alone.
        """
        instances = self.around.clouds[cloud].instances(region, run=self.around.purchases.run)
        return [instance for instance in instances if instance.owner in ("", self.around.purchases.owners[cloud])]

    def resources_in(self, cloud: str, region: str) -> list[Resource]:
        """Return the run's other resources."""
        resources = self.around.clouds[cloud].resources(region, run=self.around.purchases.run)
        return [resource for resource in resources if resource.owner in ("", self.around.purchases.owners[cloud])]

    def search(self, node: CloudNode) -> tuple[str, str] | None:
        """Read every region of the run to find the VM of a requested node. Record the VM if one is found.

        Called for a node without a recorded region. Returns the node's region, or None if the region is still not
        known.
        """
        files = node.files
        if any((files.is_begun("want"), files.is_begun("spec"), files.is_begun("launch"), files.is_begun("machine"))):
            instances = [
                instance for region in self.around.purchases.regions for instance in self.instances_in(*region)
            ]
            newest = newest_of(instances, node.name)
            if newest is not None:
                node.files.write_instance(newest)
        return node.region

    # --- from memory ------------------------------------------------------------------------------

    def all_known(self) -> Sequence[RegionInventory]:
        return list(self._by_region.values())

    def last_in(self, region: tuple[str, str] | None) -> RegionInventory | None:
        """Return the last inventory of the region. None: the region is not known, or was not read yet."""
        return self._by_region.get(region) if region is not None else None

    def is_fresh(self, region: tuple[str, str] | None) -> bool:
        """Return whether the last inventory of the region is recent enough to count as proof."""
        observed = self.last_in(region)
        return (
            observed is not None and observed.at is not None and self.around.monotonic() - observed.at <= FRESH_SECONDS
        )

    def find_instance(self, node: CloudNode) -> None:
        """Record the VM that carries the node's name, if the node has no recorded region.

        Only the last inventories are searched. Nothing is recorded if no inventory has the VM.
        """
        if node.region is None:
            instance = newest_of(
                [instance for observed in self.all_known() for instance in observed.instances], node.name
            )
            if instance is not None:
                node.files.write_instance(instance)


def newest_of(instances: Sequence[Instance], name: str) -> Instance | None:
    """Return a node's VM; a live VM comes before an ended VM."""
    order = (InstanceState.GONE, InstanceState.STOPPING, InstanceState.PENDING, InstanceState.RUNNING)
    ours = [instance for instance in instances if instance.name == name]
    return max(ours, key=lambda instance: (order.index(instance.state), instance.launched_ms or 0), default=None)
