"""Cloud resources made by an administrator and named in the job: identities, and networks with their SSH access.

    identity: {aws: INSTANCE_PROFILE, gcp: NAME@PROJECT.iam.gserviceaccount.com}
    network:
      aws: {us-east-1: {vpc: vpc-0a1b, security_group: nodes, subnets: [subnet-0c1d], public_addresses: false}}
      gcp: {network: nodes, subnets: {us-central1: nodes-central}, public_addresses: false, ssh_proxy: ...}

Named resources are used unchanged: spotrl makes no replacement, and changes or deletes no part of a named resource. A
VPC and a subnet of Google Cloud are in one region. Both are written by region, and nodes are bought in no other region.

`public_addresses: false` gives nodes private addresses only. This machine must then be inside the network, or
`ssh_proxy` must lead into the network. `ssh_proxy` is an OpenSSH ProxyCommand, in which %h is the node's address and %p
its port:

    ssh -W %h:%p bastion.example.com
    gcloud compute start-iap-tunnel %h %p --listen-on-stdin --region=REGION --network=NETWORK --dest-group=GROUP
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

from pydantic import Field, field_validator
from pydantic import model_validator as model_check

from engine.strict import Strict

OURS = "spotrl-"
"""Prefix of the resources that spotrl makes and deletes."""

SERVICE_ACCOUNT = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?@[a-z]([a-z0-9-]*[a-z0-9])?\.iam\.gserviceaccount\.com")

AWS_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
GCP_REGION = re.compile(r"[a-z]+-[a-z]+\d+")

BREAKS_YAML = re.compile(r": |:$| #|^[\"'\[{&*!|>%@`]|[\n\r]")
"""Texts that break a YAML file, because SkyPilot writes the proxy command into a YAML file without quotes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """Identity and network that the job names in a region of a cloud. A field is empty if spotrl makes the resource.

    `network`: id or Name tag of a VPC (AWS); NETWORK or PROJECT/NETWORK (Google Cloud). `group`: security group (AWS).
    """

    identity: str = ""
    network: str = ""
    subnets: tuple[str, ...] = ()
    group: str = ""
    public_addresses: bool = True
    ssh_proxy: str = ""

    @property
    def is_reached_from_here(self) -> bool:
        """Return True if SSH comes from the public address of this machine."""
        return self.public_addresses and not self.ssh_proxy


NOTHING_NAMED = Named()


def _not_ours(field: str, value: str | None) -> str | None:
    if value is not None and value.rpartition("/")[2].startswith(OURS):
        raise ValueError(
            f"{field} is {value!r}; names that begin with {OURS} are of things that spotrl makes and deletes, so use "
            "another one"
        )
    return value


class Identity(Strict):
    """Identities of nodes, instead of an identity that spotrl makes for the run."""

    aws: Annotated[str, Field(pattern=r"^[\w+=,.@-]{1,128}$")] | None = None
    """Name of an instance profile."""
    gcp: str | None = None
    """E-mail of a service account, of any project."""

    @field_validator("aws")
    @classmethod
    def _profile_is_not_ours(cls, value: str | None) -> str | None:
        return _not_ours("aws", value)

    @field_validator("gcp")
    @classmethod
    def _is_a_service_account(cls, value: str | None) -> str | None:
        if value is not None and not SERVICE_ACCOUNT.fullmatch(value):
            raise ValueError(f"gcp is {value!r}; write a service account as NAME@PROJECT.iam.gserviceaccount.com")
        return _not_ours("gcp", value)


class WayIn(Strict):
    """SSH access of this machine and SkyPilot to the nodes of a network."""

    public_addresses: bool = True
    """True: nodes have public addresses. False: private addresses only, reached from inside the network or through
    `ssh_proxy`."""
    ssh_proxy: str | None = None
    """An OpenSSH ProxyCommand with %h. None: nodes are reached directly."""

    @property
    def is_direct(self) -> bool:
        """Return True if nodes are reached at public addresses, without a proxy."""
        return self.public_addresses and self.ssh_proxy is None

    @field_validator("ssh_proxy")
    @classmethod
    def _can_be_run(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if "%h" not in value:
            raise ValueError(f"ssh_proxy is {value!r}; write a ProxyCommand with %h, like ssh -W %h:%p bastion")
        if BREAKS_YAML.search(value):
            raise ValueError(
                f"ssh_proxy is {value!r}; SkyPilot cannot pass on a command with ': ' or ' #', or that begins with a "
                "sign; write it into a script, like /path/to/proxy %h %p"
            )
        return value


class AwsNetwork(WayIn):
    """A VPC, and the security group of the nodes in the VPC."""

    vpc: Annotated[str, Field(min_length=1)]
    """Id or Name tag of the VPC."""
    security_group: Annotated[str, Field(min_length=1)]
    """Id or name of the security group. The group allows SSH from this machine or the proxy, and all traffic among
    its members."""
    subnets: tuple[str, ...] = ()
    """Ids or Name tags of subnets. None: the subnets of the VPC that fit `public_addresses`."""

    @field_validator("security_group")
    @classmethod
    def _group_is_not_ours(cls, value: str) -> str | None:
        return _not_ours("security_group", value)


class GcpNetwork(WayIn):
    """A VPC network with firewall rules for SSH and for all traffic among nodes."""

    network: Annotated[str, Field(pattern=r"^([a-z][-a-z0-9]*/)?[a-z][-a-z0-9]*$")]
    """NETWORK, or PROJECT/NETWORK of a Shared VPC."""
    subnets: dict[str, str] = Field(default_factory=dict)
    """Subnet by region. None: any region, with any subnet of the network."""

    @field_validator("network")
    @classmethod
    def _network_is_not_ours(cls, value: str) -> str | None:
        return _not_ours("network", value)

    @field_validator("subnets")
    @classmethod
    def _by_region(cls, value: dict[str, str]) -> dict[str, str]:
        _check_regions("subnets", value, GCP_REGION, "us-central1")
        return value


class Network(Strict):
    """Networks of nodes, instead of a network and a security group that spotrl makes for the run."""

    aws: dict[str, AwsNetwork] = Field(default_factory=dict)
    """Networks by region."""
    gcp: GcpNetwork | None = None
    """Network on Google Cloud. None: spotrl uses a network of its own."""

    @model_check(mode="after")
    def _by_region(self) -> Self:
        _check_regions("network.aws", self.aws, AWS_REGION, "us-east-1")
        return self

    def regions(self, cloud: str) -> tuple[str, ...]:
        """Return the only regions of a cloud where nodes may be; empty: all regions."""
        if cloud == "aws":
            return tuple(self.aws)
        return tuple(self.gcp.subnets) if self.gcp is not None else ()

    def is_reached_from_here(self, clouds: Iterable[str]) -> bool:
        """Return whether SSH to some node comes from the public address of this machine."""
        of_gcp = [self.gcp] if self.gcp is not None else []
        ways: dict[str, Sequence[WayIn]] = {"aws": list(self.aws.values()), "gcp": of_gcp}
        return any(not ways[cloud] or any(way.is_direct for way in ways[cloud]) for cloud in clouds)

    def reaches(self, cloud: str, region: str) -> bool:
        """Return whether nodes may be in a region."""
        return not self.regions(cloud) or region in self.regions(cloud)


def named_in(identity: Identity, network: Network, cloud: str, region: str) -> Named:
    """Return the named resources in a region of a cloud."""
    if cloud == "aws":
        of_aws = network.aws.get(region)
        named = Named(identity=identity.aws or "")
        if of_aws is not None:
            named = replace(named, network=of_aws.vpc, group=of_aws.security_group, subnets=of_aws.subnets)
        return _with_way_in(named, of_aws)
    of_gcp = network.gcp
    named = Named(identity=identity.gcp or "")
    if of_gcp is not None:
        subnets = (of_gcp.subnets[region],) if region in of_gcp.subnets else ()
        named = replace(named, network=of_gcp.network, subnets=subnets)
    return _with_way_in(named, of_gcp)


def _with_way_in(named: Named, way_in: WayIn | None) -> Named:
    if way_in is None:
        return named
    return replace(named, public_addresses=way_in.public_addresses, ssh_proxy=way_in.ssh_proxy or "")


def _check_regions(field: str, by_region: Mapping[str, object], shape: re.Pattern[str], example: str) -> None:
    strange = next((region for region in by_region if not shape.fullmatch(region)), None)
    if strange is not None:
        raise ValueError(f"{field} has an entry of {strange}; write it by region, like {example}")
