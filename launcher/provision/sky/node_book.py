"""The nodes of a run by name: those with a folder, and those named by the controller."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.durable import sync_folder
from launcher.provision.local.provisioner import node_folder, nodes_folder
from launcher.provision.sky.cloud_node import CloudNode
from launcher.provision.sky.node_files import NodeFiles


@dataclass(slots=True)
class NodeBook:
    """The nodes known to this process. For use by one thread."""

    run_folder: Path
    _nodes: dict[str, CloudNode] = field(default_factory=dict)

    def load(self) -> None:
        """Add the nodes of earlier processes."""
        for path in nodes_folder(self.run_folder).iterdir():
            if path.is_dir():
                self.open(path.name)

    def open(self, name: str) -> CloudNode:
        """Return the node, and create its folder if there is none."""
        if name not in self._nodes:
            folder = node_folder(self.run_folder, name)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            sync_folder(folder.parent)
            self._nodes[name] = CloudNode(files=NodeFiles(folder))
        return self._nodes[name]

    def get(self, name: str) -> CloudNode | None:
        return self._nodes.get(name)

    def all(self) -> Sequence[CloudNode]:
        return list(self._nodes.values())

    def with_work(self) -> Sequence[CloudNode]:
        """Return the nodes that are not cleared."""
        return [node for node in self._nodes.values() if not node.is_cleared()]

    def regions(self) -> set[tuple[str, str]]:
        """Return every region that had a node."""
        return {region for node in self._nodes.values() if (region := node.region) is not None}
