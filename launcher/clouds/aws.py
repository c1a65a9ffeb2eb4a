"""Manage the AWS resources of a run.

The module lists the run's tagged instances and volumes, finds out why an instance ended, and terminates instances. It
also makes and removes the run's security group and role.

botocore handles endpoints and credentials (AWS_ENDPOINT_URL..., AWS_PROFILE). Every resource made for a run is called
`spotrl-RUN` and carries the run's tags.
"""

from collections.abc import Sequence
from contextlib import suppress

from launcher.clouds.aws_calls import Clients, clients, code_of, errors_named, known_regions, missing_is_fine
from launcher.clouds.aws_group import RunGroup
from launcher.clouds.aws_inventory import gone, instance_of, resource_of, tag_filters
from launcher.clouds.aws_named import FoundNetwork, look_at_network, look_at_profile
from launcher.clouds.aws_role import HOME_REGION, NodeRole, node_policy
from launcher.clouds.base import (
    EVERYWHERE,
    CallerIdentity,
    CloudRefused,
    Finding,
    Instance,
    RegionSetup,
    Resource,
    refuse_wrong,
    wrong_of,
)
from launcher.clouds.labels import run_name, slug
from launcher.job.company import NOTHING_NAMED, Named
from launcher.market.sky_catalog import sky_folder

ASKED_FOR_REGIONS = (HOME_REGION, "us-west-2", "us-east-2", "eu-west-1", "eu-central-1", "ap-northeast-1")
"""Regions asked for the list of regions, in this order. They need no opt-in."""

SKY_ZONES = "v*/aws/az_mappings-*.csv"
"""SkyPilot's file of an account's zones, in the folder of its catalogs. With it SkyPilot lists no regions."""

NOT_YET = frozenset({"DependencyViolation", "VolumeInUse", "DeleteConflict", "IncorrectState"})


def owner_of(arn: str) -> str:
    """Return the part of a caller's ARN that is the same in every session.

    An assumed role's session has a different name each time (a CI job's number, a time), so the role counts. Only
    IAM Identity Center (roles called AWSReservedSSO_...) names the session after the person.
    """
    kind, _, name = arn.rpartition(":")[2].partition("/")
    if kind != "assumed-role":
        return name.rpartition("/")[2] or kind
    role, _, session = name.rpartition("/")
    return session if role.startswith("AWSReservedSSO_") else role


class AwsApi:
    """The API of one AWS account.

    A client is made once per service and region. Clients may be shared between threads, a session may not.
    """

    cloud, home = "aws", EVERYWHERE

    def __init__(self, client: Clients | None = None) -> None:
        self._client = client or clients()
        self._groups = RunGroup(self._client)
        self._roles = NodeRole(self._client)

    def caller(self) -> CallerIdentity:
        with errors_named("aws sts GetCallerIdentity"):
            answer = self._client("sts", HOME_REGION).get_caller_identity()
        return CallerIdentity(account=answer["Account"], identity=answer["Arn"], owner=slug(owner_of(answer["Arn"])))

    def check_launches(self) -> None:
        """Check that the account's regions may be listed in us-east-1, where SkyPilot asks for them.

        SkyPilot 0.14.1 (sky/catalog/aws_catalog.py) asks once an account and keeps the answer in its own folder.
        """
        if any(sky_folder().glob(SKY_ZONES)):
            return
        try:
            self._regions_by(HOME_REGION)
        except CloudRefused as refused:
            raise CloudRefused(
                f"{refused}. Before its first launch SkyPilot lists the account's regions there, whatever the region "
                f"of the launch: allow ec2:DescribeRegions in {HOME_REGION}, or leave aws out (--infra gcp)"
            ) from None

    def regions(self) -> Sequence[str]:
        for region in ASKED_FOR_REGIONS:
            with suppress(CloudRefused):
                return self._regions_by(region)
        return known_regions()

    def open_region(self) -> str | None:
        """Return a region that the account's organisation does not forbid; None if none was found."""
        for region in ASKED_FOR_REGIONS:
            with suppress(CloudRefused):
                self._regions_by(region)
                return region
        return None

    def _regions_by(self, region: str) -> list[str]:
        with errors_named(f"aws ec2 DescribeRegions, {region}"):
            regions = self._client("ec2", region).describe_regions()["Regions"]
        return sorted(entry["RegionName"] for entry in regions)

    def instances(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Instance]:
        if region == self.home:
            return []
        with errors_named(f"aws ec2 DescribeInstances, {region}"):
            pages = (
                self._client("ec2", region)
                .get_paginator("describe_instances")
                .paginate(Filters=tag_filters(owner, run), PaginationConfig={"PageSize": 1000})
            )
            vms = [vm for page in pages for reservation in page["Reservations"] for vm in reservation["Instances"]]
        return [instance_of(region, vm) for vm in vms]

    def end_of(self, instance: Instance) -> Instance:
        with errors_named(f"aws ec2 DescribeInstances, {instance.region}"), missing_is_fine():
            pages = self._client("ec2", instance.region).describe_instances(InstanceIds=[instance.id])
            for reservation in pages["Reservations"]:
                for vm in reservation["Instances"]:
                    return instance_of(instance.region, vm)
        return gone(instance, "EC2 does not list it any more")

    def resources(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Resource]:
        if region == self.home:
            return self._roles.list(owner, run)
        client = self._client("ec2", region)
        resources: list[Resource] = []
        with errors_named(f"aws ec2 DescribeVolumes, {region}"):
            for page in client.get_paginator("describe_volumes").paginate(Filters=tag_filters(owner, run)):
                resources += [
                    resource_of(region, "disk", volume["VolumeId"], volume.get("Tags", ()), size_gib=volume["Size"])
                    for volume in page["Volumes"]
                ]
        with errors_named(f"aws ec2 DescribeSecurityGroups, {region}"):
            for page in client.get_paginator("describe_security_groups").paginate(Filters=tag_filters(owner, run)):
                resources += [
                    resource_of(region, "group", group["GroupId"], group.get("Tags", ()))
                    for group in page["SecurityGroups"]
                ]
        return resources

    def end(self, instances: Sequence[Instance]) -> None:
        """Terminate the instances one by one, because EC2 refuses a whole call if one id is unknown."""
        for instance in instances:
            with errors_named(f"aws ec2 TerminateInstances {instance.id}, {instance.region}"), missing_is_fine():
                self._client("ec2", instance.region).terminate_instances(InstanceIds=[instance.id])

    def remove(self, resources: Sequence[Resource]) -> Sequence[Resource]:
        return [resource for resource in resources if not self._remove(resource)]

    def prepare(
        self,
        region: str,
        *,
        run: str,
        owner: str,
        ssh_from: str,
        buckets: Sequence[str],
        models: Sequence[str] = (),
        named: Named = NOTHING_NAMED,
    ) -> RegionSetup:
        name = run_name(run)
        network = self._look_at_network(region, named, ssh_from) if named.network else FoundNetwork(group_name=name)
        refuse_wrong([*self.check_identity(named), *network.findings])
        if not named.identity:
            self._roles.prepare(name, run, owner, node_policy(run, buckets, models))
        if not named.network:
            self._groups.prepare(region, name, run, owner, ssh_from)
        return RegionSetup(
            cloud="aws",
            region=region,
            group=network.group_name,
            identity=named.identity or name,
            network=network.vpc_name,
            subnets=network.subnet_names,
            ssh_from=ssh_from if named.is_reached_from_here else "",
            named=named,
        )

    def check_identity(self, named: Named) -> Sequence[Finding]:
        if not named.identity:
            return []
        with errors_named(f"aws iam GetInstanceProfile {named.identity}"):
            return [look_at_profile(self._client("iam", HOME_REGION), named.identity)]

    def check_network(self, region: str, named: Named, ssh_from: str) -> Sequence[Finding]:
        return self._look_at_network(region, named, ssh_from).findings if named.network else []

    def _look_at_network(self, region: str, named: Named, ssh_from: str) -> FoundNetwork:
        with errors_named(f"aws ec2 network {named.network}, {region}"):
            source = ssh_from if named.is_reached_from_here else ""
            return look_at_network(self._client("ec2", region), region, named, source)

    def open_rules(self, setup: RegionSetup) -> Sequence[str]:
        if setup.named.network:
            return wrong_of(self.check_network(setup.region, setup.named, setup.ssh_from))
        return self._groups.missing_rules(setup)

    def _remove(self, resource: Resource) -> bool:
        with errors_named(f"aws {resource.kind} {resource.id}"), missing_is_fine():
            try:
                match resource.kind:
                    case "disk":
                        self._client("ec2", resource.region).delete_volume(VolumeId=resource.id)
                    case "group":
                        self._client("ec2", resource.region).delete_security_group(GroupId=resource.id)
                    case "role":
                        self._roles.remove(resource.id)
                    case _:
                        return False
            except Exception as error:
                if code_of(error) in NOT_YET:
                    return False
                raise
        return True
