"""The network between the ranks of a trainer: loopback on one node, the nodes' private addresses between nodes.

The ranks' store and connections have no password. On a cloud, the firewall of the run lets only the run's nodes in.
"""

import contextlib
import os
import socket

import psutil

from engine.node_spec import NodeSpec
from engine.parallel.communicator import LOOPBACK


def host_of_store(spec: NodeSpec) -> str:
    """Return the address at which the ranks meet: that of the trainer's first node, where the coordinator is too."""
    return spec.coordinator_host if spec.trainer_nodes > 1 else LOOPBACK


def use_network(spec: NodeSpec) -> None:
    """Make gloo and NCCL connect this process to the ranks of other nodes. Call before a group is formed.

    Raises OSError if this node has no way to the trainer's first node.
    """
    if spec.trainer_nodes > 1:
        interface = interface_towards(host_of_store(spec))
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)


def interface_towards(host: str) -> str:
    """Return the name of the network interface through which this node reaches a host."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((host, 9))  # sends nothing
        own: str = probe.getsockname()[0]
    name: str
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return name
    raise OSError(f"no network interface has the address {own}, from which this node reaches {host}")
