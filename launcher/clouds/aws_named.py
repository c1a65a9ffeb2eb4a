"""Check resources on AWS named in a job: an instance profile, a VPC with its subnets and security group.

SkyPilot 0.14.1 finds a VPC and subnets by their Name tags and a group by its name inside the VPC
(sky/provision/aws/config.py). SkyPilot creates a missing group, and fills a group without rules. So each named resource
must exist, and be the only resource of its name, before SkyPilot is called.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from botocore.exceptions import ClientError

from launcher.clouds.addresses import covers
from launcher.clouds.base import RUN_LABEL, Finding, Look
from launcher.job.company import Named

ALL_PORTS = range(1, 65536)
SSH_PORT = range(22, 23)


@dataclass(slots=True)
class FoundNetwork:
    """The found parts of a network named in a job. `vpc_name`, `subnet_names`: Name tags, for SkyPilot."""

    vpc_name: str = ""
    group_name: str = ""
    subnet_names: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)

    def wrong(self, text: str) -> None:
        self.findings.append(Finding(look=Look.WRONG, text=text))


def look_at_profile(iam: Any, name: str) -> Finding:
    """Check for an instance profile with a role."""
    try:
        profile = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]
    except ClientError as error:
        match error.response["Error"]["Code"]:
            case "NoSuchEntity":
                return Finding(look=Look.WRONG, text=f"aws has no instance profile {name}; correct identity.aws")
            case "AccessDenied" | "AccessDeniedException":
                text = (
                    f"the instance profile {name} cannot be seen with these credentials; allow iam:GetInstanceProfile"
                )
                return Finding(look=Look.UNSURE, text=text)
            case _:
                raise
    if not profile.get("Roles"):
        command = f"`aws iam add-role-to-instance-profile --instance-profile-name {name} --role-name ROLE`"
        return Finding(look=Look.WRONG, text=f"the instance profile {name} has no role; {command}")
    return Finding(look=Look.OK, text=f"instance profile {name}, role {profile['Roles'][0]['Arn']}")


def look_at_network(ec2: Any, region: str, named: Named, ssh_from: str) -> FoundNetwork:
    """Check the VPC, the group and the subnets. `ssh_from`: CIDR; empty if SSH comes from an unknown address."""
    network = FoundNetwork()
    vpc = _vpc(ec2, region, named.network, network)
    if vpc is None:
        return network
    group = _group(ec2, vpc, named.group, network)
    if group is not None:
        for missing in missing_rules(group, region, ssh_from, vpc.get("CidrBlock", "")):
            network.wrong(f"{missing}; add it")
    _subnets(ec2, vpc, named, network)
    if not any(finding.look is Look.WRONG for finding in network.findings):
        subnets = f", subnets {', '.join(network.subnet_names)}" if network.subnet_names else ""
        text = f"VPC {vpc['VpcId']}, security group {network.group_name}{subnets}"
        network.findings.append(Finding(look=Look.OK, text=text))
    return network


def _vpc(ec2: Any, region: str, name_or_id: str, network: FoundNetwork) -> Mapping[str, Any] | None:
    vpcs = ec2.describe_vpcs(Filters=_by("vpc-id", "vpc-", name_or_id))["Vpcs"]
    if len(vpcs) != 1:
        how_many = "no VPC" if not vpcs else f"{len(vpcs)} VPCs"
        network.wrong(f"aws has {how_many} {name_or_id} in {region}; correct network.aws.{region}.vpc")
        return None
    vpc, name = vpcs[0], _name_of(vpcs[0])
    if not name:
        command = f"`aws ec2 create-tags --region {region} --resources {vpc['VpcId']} --tags Key=Name,Value=NAME`"
        network.wrong(f"VPC {vpc['VpcId']} ({region}) has no Name tag, and SkyPilot finds a VPC by it; {command}")
    elif len(ec2.describe_vpcs(Filters=_tagged(name))["Vpcs"]) > 1:
        network.wrong(f"more than one VPC in {region} has the Name tag {name}, by which SkyPilot finds it; rename one")
    network.vpc_name = name
    return dict(vpc)


def _group(ec2: Any, vpc: Mapping[str, Any], name_or_id: str, network: FoundNetwork) -> Mapping[str, Any] | None:
    key = "group-id" if name_or_id.startswith("sg-") else "group-name"
    filters = [{"Name": "vpc-id", "Values": [vpc["VpcId"]]}, {"Name": key, "Values": [name_or_id]}]
    groups = ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
    if not groups:
        network.wrong(f"VPC {vpc['VpcId']} has no security group {name_or_id}; name one that is in this VPC")
        return None
    group = dict(groups[0])
    if any(tag["Key"] == RUN_LABEL for tag in group.get("Tags", ())):
        network.wrong(f"security group {name_or_id} was made by spotrl for a run, and goes with it; name another one")
    if not group.get("IpPermissionsEgress"):
        network.wrong(f"security group {name_or_id} lets nothing out; add a rule for outbound traffic")
    network.group_name = group["GroupName"]
    return group


def _subnets(ec2: Any, vpc: Mapping[str, Any], named: Named, network: FoundNetwork) -> None:
    subnets = ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [vpc["VpcId"]]}])["Subnets"]
    if not subnets:
        network.wrong(f"VPC {vpc['VpcId']} has no subnet; add one, or name another VPC")
    tables = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc["VpcId"]]}])["RouteTables"]
    if not named.subnets and all(_unfit(subnet, tables, named) for subnet in subnets):
        network.wrong(f"every subnet of VPC {vpc['VpcId']} {_unfit(subnets[0], tables, named)}")
    names = []
    for name_or_id in named.subnets:
        subnet = next((subnet for subnet in subnets if name_or_id in (subnet["SubnetId"], _name_of(subnet))), None)
        if subnet is None:
            network.wrong(f"VPC {vpc['VpcId']} has no subnet {name_or_id}; name subnets of this VPC")
            continue
        name = _name_of(subnet)
        if not name:
            network.wrong(f"subnet {name_or_id} has no Name tag, and SkyPilot finds a subnet by it; give it one")
        elif len(ec2.describe_subnets(Filters=_tagged(name))["Subnets"]) > 1:
            network.wrong(f"more than one subnet has the Name tag {name}, by which SkyPilot finds it; rename one")
        if unfit := _unfit(subnet, tables, named):
            network.wrong(f"subnet {name_or_id} {unfit}")
        names.append(name)
    network.subnet_names = tuple(names)


def _unfit(subnet: Mapping[str, Any], tables: Sequence[Mapping[str, Any]], named: Named) -> str:
    """Return the reason why SkyPilot would not use this subnet, with the remedy; empty if SkyPilot would.

    SkyPilot takes a subnet for public if its route table, or else the VPC's main table, leads to an internet gateway.
    """
    is_public = _has_internet_gateway(subnet["SubnetId"], tables)
    if named.public_addresses:
        remedy = "name a public one, or set public_addresses: false"
        return "" if is_public else f"has no route to an internet gateway; {remedy}"
    remedy = "name a private one, or set public_addresses: true"
    if subnet.get("MapPublicIpOnLaunch"):
        return f"gives public addresses; {remedy}"
    return f"has a route to an internet gateway, so SkyPilot takes it for public; {remedy}" if is_public else ""


def _has_internet_gateway(subnet_id: str, tables: Sequence[Mapping[str, Any]]) -> bool:
    own = [table for table in tables if any(a.get("SubnetId") == subnet_id for a in table.get("Associations", ()))]
    main = [table for table in tables if any(a.get("Main") for a in table.get("Associations", ()))]
    routes = [route for table in own or main for route in table.get("Routes", ())]
    return any(route.get("GatewayId", "").startswith("igw-") for route in routes)


def missing_rules(group: Mapping[str, Any], region: str, ssh_from: str, vpc_cidr: str) -> list[str]:
    """Return the group's missing inbound rules, as text: SSH from `ssh_from`, and all traffic among its members."""
    name, missing = f"security group {group['GroupName']} ({region})", []
    if not any(_comes_from(rule, group, vpc_cidr) for rule in _rules_for(group, ALL_PORTS)):
        missing.append(f"{name} lacks the rule: all traffic from itself")
    if not any(_allows_source(rule, ssh_from) for rule in _rules_for(group, SSH_PORT)):
        source = f"from {ssh_from}" if ssh_from else "from where ssh_proxy, or this machine, connects"
        missing.append(f"{name} lacks the rule: tcp 22 (SSH) {source}")
    return missing


def _rules_for(group: Mapping[str, Any], ports: range) -> Iterator[Mapping[str, Any]]:
    """Yield inbound rules that allow TCP on all of the ports."""
    for rule in group.get("IpPermissions", ()):
        is_all, is_tcp = rule["IpProtocol"] == "-1", rule["IpProtocol"] in ("tcp", "6")
        if is_all or (is_tcp and rule["FromPort"] <= ports[0] and ports[-1] <= rule["ToPort"]):
            yield rule


def _comes_from(rule: Mapping[str, Any], group: Mapping[str, Any], cidr: str) -> bool:
    from_itself = any(pair.get("GroupId") == group["GroupId"] for pair in rule.get("UserIdGroupPairs", ()))
    return from_itself or _covers(rule, cidr)


def _allows_source(rule: Mapping[str, Any], ssh_from: str) -> bool:
    """Return whether a rule may allow SSH from `ssh_from`. Prefix lists are not read: a list may hold the address."""
    if rule.get("PrefixListIds"):
        return True
    if ssh_from:
        return _covers(rule, ssh_from)
    return bool(rule.get("IpRanges") or rule.get("Ipv6Ranges") or rule.get("UserIdGroupPairs"))


def _covers(rule: Mapping[str, Any], cidr: str) -> bool:
    return bool(cidr) and any(covers(ip_range["CidrIp"], cidr) for ip_range in rule.get("IpRanges", ()))


def _by(key: str, prefix: str, value: str) -> list[dict[str, Any]]:
    return [{"Name": key, "Values": [value]}] if value.startswith(prefix) else _tagged(value)


def _tagged(name: str) -> list[dict[str, Any]]:
    return [{"Name": "tag:Name", "Values": [name]}]


def _name_of(resource: Mapping[str, Any]) -> str:
    tags: Sequence[Mapping[str, str]] = resource.get("Tags", ())
    return next((tag["Value"] for tag in tags if tag["Key"] == "Name"), "")
