"""The addresses of the fake internet, from ranges that the real one does not route.

The client (where controllers run) and the clouds' APIs have fixed addresses; a host has a private address, valid in its
own network, and a public one that is translated to it. No address is used twice within a world, so a late message
about a deleted instance is never taken for one about its successor.
"""

import itertools
import threading
from dataclasses import dataclass, field
from ipaddress import IPv4Network

CLIENT = "192.0.2.1"
API = "192.0.2.10"
"""AWS on port 80, Google's names on 443."""
GATEWAY = "169.254.1.1"
METADATA = "169.254.169.254"

AWS_URL = f"http://{API}"
PROJECT = "fake-project"
ACCOUNT = "123456789012"

GOOGLE_NAMES = tuple(
    f"{name}.googleapis.com"
    for name in (
        "cloudbilling",
        "cloudresourcemanager",
        "compute",
        "iam",
        "iamcredentials",
        "oauth2",
        "openidconnect",
        "serviceusage",
        "storage",
        "sts",
        "tpu",
        "www",
    )
)
CHECK_IP = "checkip.amazonaws.com"
"""Service that returns the public address of its caller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    cloud: str
    name: str
    zones: tuple[str, ...]
    private: IPv4Network
    """Range of the default network."""
    public: IPv4Network


def _region(cloud: str, name: str, zones: str, private: str, public: str) -> Region:
    dash = "" if cloud == "aws" else "-"
    named = tuple(f"{name}{dash}{letter}" for letter in zones)
    return Region(cloud=cloud, name=name, zones=named, private=IPv4Network(private), public=IPv4Network(public))


REGIONS = (
    _region("aws", "us-east-1", "abc", "172.31.0.0/16", "198.51.100.0/25"),
    # A default VPC has 172.31.0.0/16 in every region; here each has its own range, because one router serves them all.
    _region("aws", "us-west-2", "abc", "172.30.0.0/16", "198.51.100.128/25"),
    _region("gcp", "us-central1", "abc", "10.128.0.0/20", "203.0.113.0/25"),
    _region("gcp", "us-east4", "abc", "10.150.0.0/20", "203.0.113.128/25"),
)
PUBLIC = (IPv4Network("198.51.100.0/24"), IPv4Network("203.0.113.0/24"))


def region(cloud: str, name: str) -> Region:
    return next(one for one in REGIONS if (one.cloud, one.name) == (cloud, name))


def regions_of(cloud: str) -> tuple[Region, ...]:
    return tuple(one for one in REGIONS if one.cloud == cloud)


@dataclass
class Pool:
    """Allocates addresses of ranges, each once; when a range is used up, the one allocated longest ago."""

    given: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, network: IPv4Network) -> str:
        with self.lock:
            # The first addresses of a range belong to the cloud.
            hosts = [str(host) for host in itertools.islice(network.hosts(), 3, 1000)]
            address = min(hosts, key=lambda host: self.given.get(host, 0))
            self.given[address] = max(self.given.values(), default=0) + 1
            return address
