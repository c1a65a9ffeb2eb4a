"""The security group of a run on AWS: all traffic among its nodes, SSH from the controller's address alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.clouds.aws_calls import Clients, errors_named, existing_is_fine, missing_is_fine
from launcher.clouds.aws_inventory import labels_of, tag_list, tags_of
from launcher.clouds.base import CloudRefused, NotSettled, RegionSetup, refuse_foreign


class RunGroup:
    """Makes and checks the security groups of runs. Idempotent."""

    def __init__(self, client: Clients) -> None:
        self._client = client

    def prepare(self, region: str, name: str, run: str, owner: str, ssh_from: str) -> None:
        with errors_named(f"aws ec2 security group {name}, {region}"):
            client = self._client("ec2", region)
            vpcs = client.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
            if not vpcs:
                raise CloudRefused(
                    f"aws has no default VPC in {region}, and nodes live in it; `aws ec2 create-default-vpc --region "
                    f"{region}`, or leave the region out"
                )
            group = self._group(client, name)
            if group is None:
                tags = {**labels_of(run, owner), "Name": name}
                group = self._make_group(client, name, vpcs[0]["VpcId"], tags)
            refuse_foreign(f"aws security group {name} in {region}", run, owner, tags_of(group.get("Tags", ())))
            self._set_rules(client, group, ssh_from)

    def missing_rules(self, setup: RegionSetup) -> Sequence[str]:
        """Return the missing rules of the run's own group, as text."""
        with errors_named(f"aws ec2 DescribeSecurityGroups, {setup.region}"):
            group = self._group(self._client("ec2", setup.region), setup.group)
        if group is None:
            return [f"security group {setup.group} is not there in {setup.region}"]
        missing = []
        if not _has_inside(group):
            missing.append(f"security group {setup.group} ({setup.region}) lacks the rule: all traffic from itself")
        if setup.ssh_from not in _ssh_ranges(group):
            missing.append(
                f"security group {setup.group} ({setup.region}) lacks the rule: tcp 22 (SSH) from {setup.ssh_from}"
            )
        return missing

    def _group(self, client: Any, name: str) -> dict[str, Any] | None:
        groups = client.describe_security_groups(Filters=[{"Name": "group-name", "Values": [name]}])["SecurityGroups"]
        return dict(groups[0]) if groups else None

    def _make_group(self, client: Any, name: str, vpc: str, tags: Mapping[str, str]) -> dict[str, Any]:
        with existing_is_fine():
            client.create_security_group(
                GroupName=name,
                Description="Nodes of a spotrl run: all traffic among themselves, SSH from the controller",
                VpcId=vpc,
                TagSpecifications=[{"ResourceType": "security-group", "Tags": tag_list(tags)}],
            )
        group = self._group(client, name)
        if group is None:
            raise NotSettled(f"aws made security group {name} and does not list it yet; it is asked again")
        return group

    def _set_rules(self, client: Any, group: Mapping[str, Any], ssh_from: str) -> None:
        """Allow SSH only from the controller's current address, and all traffic inside the group."""
        group_id = group["GroupId"]
        if not _has_inside(group):
            inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}
            with existing_is_fine():
                client.authorize_security_group_ingress(GroupId=group_id, IpPermissions=[inside])
        ranges = _ssh_ranges(group)
        if ssh_from not in ranges:
            with existing_is_fine():
                client.authorize_security_group_ingress(GroupId=group_id, IpPermissions=[_ssh(ssh_from)])
        for old in ranges - {ssh_from}:
            with missing_is_fine():
                client.revoke_security_group_ingress(GroupId=group_id, IpPermissions=[_ssh(old)])


def _ssh(cidr: str) -> dict[str, Any]:
    return {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": cidr}]}


def _ssh_ranges(group: Mapping[str, Any]) -> set[str]:
    rules = [rule for rule in group.get("IpPermissions", ()) if rule.get("FromPort") == 22]
    return {ip_range["CidrIp"] for rule in rules for ip_range in rule.get("IpRanges", ())}


def _has_inside(group: Mapping[str, Any]) -> bool:
    return any(
        pair.get("GroupId") == group["GroupId"]
        for rule in group.get("IpPermissions", ())
        if rule["IpProtocol"] == "-1"
        for pair in rule.get("UserIdGroupPairs", ())
    )
