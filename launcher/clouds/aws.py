"""AWS's own API for a run: tagged instances and volumes, reasons of ends, termination; a security group and a role.

botocore handles endpoints and credentials (AWS_ENDPOINT_URL..., AWS_PROFILE). Every resource made for a run is called
`spotrl-RUN` and carries the run's tags. Roles and instance profiles lie under the path /spotrl/.

Each run gives its nodes one role: nodes may terminate instances of their own run, and read and write their own prefix.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from threading import Lock
from typing import Any

from engine.events import Market
from launcher.clouds.aws_named import FoundNetwork, look_at_network, look_at_profile
from launcher.clouds.base import (
    NODE_LABEL,
    OWNER_LABEL,
    RUN_LABEL,
    Caller,
    CloudRefused,
    CloudUnreachable,
    Finding,
    Machine,
    MachineState,
    Place,
    Thing,
    refuse_anothers,
    refuse_wrong,
    wrong_of,
)
from launcher.clouds.labels import bucket_of, run_name, slug
from launcher.job.company import NOTHING_NAMED, Named
from launcher.market.refusals import advice_on

HOME_REGION = "us-east-1"

PATH = "/spotrl/"

STATES: Mapping[str, MachineState] = {
    "pending": MachineState.PENDING,
    "running": MachineState.RUNNING,
    "shutting-down": MachineState.STOPPING,
    "stopping": MachineState.STOPPING,
    "stopped": MachineState.STOPPING,
    "terminated": MachineState.GONE,
}

RECLAIMED = frozenset({"Server.SpotInstanceTermination", "Server.SpotInstanceShutdown"})
"""State reasons for which EC2 itself ended the instance."""

ASK_LESS = re.compile(r"Throttl|RequestLimitExceeded|SlowDown|Unavailable|Internal|RequestTimeout|^NoSuchEntity$")
"""Error codes to retry. NoSuchEntity: IAM takes seconds until a new resource is known."""

NOT_YET = frozenset({"DependencyViolation", "VolumeInUse", "DeleteConflict", "IncorrectState"})

MISSING = re.compile(r"\.NotFound$|^NoSuchEntity$|\.Malformed$")

ALREADY = frozenset({"InvalidPermission.Duplicate", "InvalidGroup.Duplicate", "EntityAlreadyExists", "LimitExceeded"})

WHO_MAY_BE_A_NODE = json.dumps(
    {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"},
        ],
    }
)


SEEN_BY_NODES = ("ec2:DescribeInstances", "ec2:DescribeSecurityGroups", "ec2:DescribeSubnets", "ec2:DescribeVpcs")


def node_policy(run: str | None, buckets: Sequence[str], models: Sequence[str] = ()) -> dict[str, Any]:
    """Return the policy of a run's nodes.

    Nodes may see instances, terminate the run's instances, use the run's prefix and read the model.
    No `run`: an identity for nodes of all runs, which may terminate instances of any run.
    """
    label = f"ec2:ResourceTag/{RUN_LABEL}"
    statements: list[dict[str, Any]] = [
        # SkyPilot's timer on the VM reads more than our own termination does.
        {"Sid": "See", "Effect": "Allow", "Action": list(SEEN_BY_NODES), "Resource": "*"},
        {
            "Sid": "EndOurOwn",
            "Effect": "Allow",
            "Action": ["ec2:TerminateInstances"],
            "Resource": "*",
            "Condition": {"Null": {label: "false"}} if run is None else {"StringEquals": {label: run}},
        },
    ]
    for number, url in enumerate(url for url in buckets if url.startswith("s3://")):
        bucket, prefix = bucket_of(url)
        statements += [
            {
                "Sid": f"Keep{number}",
                "Effect": "Allow",
                "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
                "Resource": f"arn:aws:s3:::{bucket}/{prefix}/*" if prefix else f"arn:aws:s3:::{bucket}/*",
            },
            {
                "Sid": f"List{number}",
                "Effect": "Allow",
                "Action": ["s3:ListBucket"],
                "Resource": f"arn:aws:s3:::{bucket}",
                **({"Condition": {"StringLike": {"s3:prefix": [prefix, f"{prefix}/*"]}}} if prefix else {}),
            },
        ]
    for number, url in enumerate(url for url in models if url.startswith("s3://")):
        bucket, prefix = bucket_of(url)
        resource = f"arn:aws:s3:::{bucket}/{prefix}/*"
        statements.append({"Sid": f"Read{number}", "Effect": "Allow", "Action": ["s3:GetObject"], "Resource": resource})
    return {"Version": "2012-10-17", "Statement": statements}


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
    """One account.

    A client is made once per service and region. Clients may be shared between threads, a session may not.
    """

    cloud, home = "aws", HOME_REGION

    def __init__(self, client: Callable[[str, str], Any] | None = None) -> None:
        self._client = client or _clients()

    def caller(self) -> Caller:
        with _said("aws sts GetCallerIdentity"):
            who = self._client("sts", HOME_REGION).get_caller_identity()
        return Caller(account=who["Account"], identity=who["Arn"], owner=slug(owner_of(who["Arn"])))

    def regions(self) -> Sequence[str]:
        with _said("aws ec2 DescribeRegions"):
            found = self._client("ec2", HOME_REGION).describe_regions()["Regions"]
        return sorted(region["RegionName"] for region in found)

    def machines(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Machine]:
        with _said(f"aws ec2 DescribeInstances, {region}"):
            pages = (
                self._client("ec2", region)
                .get_paginator("describe_instances")
                .paginate(Filters=_by_tag(owner, run), PaginationConfig={"PageSize": 1000})
            )
            found = [one for page in pages for reservation in page["Reservations"] for one in reservation["Instances"]]
        return [_machine(region, one) for one in found]

    def end_of(self, machine: Machine) -> Machine:
        with _said(f"aws ec2 DescribeInstances, {machine.region}"), _missing_is_none():
            pages = self._client("ec2", machine.region).describe_instances(InstanceIds=[machine.id])
            for reservation in pages["Reservations"]:
                for one in reservation["Instances"]:
                    return _machine(machine.region, one)
        return _gone(machine, "EC2 does not list it any more")

    def things(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Thing]:
        client = self._client("ec2", region)
        found: list[Thing] = []
        with _said(f"aws ec2 DescribeVolumes, {region}"):
            for page in client.get_paginator("describe_volumes").paginate(Filters=_by_tag(owner, run)):
                found += [
                    _thing(region, "disk", volume["VolumeId"], volume.get("Tags", ()), size_gib=volume["Size"])
                    for volume in page["Volumes"]
                ]
        with _said(f"aws ec2 DescribeSecurityGroups, {region}"):
            for page in client.get_paginator("describe_security_groups").paginate(Filters=_by_tag(owner, run)):
                found += [
                    _thing(region, "group", one["GroupId"], one.get("Tags", ())) for one in page["SecurityGroups"]
                ]
        return found + self._roles(owner, run) if region == HOME_REGION else found

    def end(self, machines: Sequence[Machine]) -> None:
        """Terminate one by one: with one unknown id, EC2 refuses a whole call."""
        for machine in machines:
            with _said(f"aws ec2 TerminateInstances {machine.id}, {machine.region}"), _missing_is_none():
                self._client("ec2", machine.region).terminate_instances(InstanceIds=[machine.id])

    def remove(self, things: Sequence[Thing]) -> Sequence[Thing]:
        return [thing for thing in things if not self._remove(thing)]

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
    ) -> Place:
        name = run_name(run)
        found = self._look_at_network(region, named, ssh_from) if named.network else FoundNetwork(group_name=name)
        refuse_wrong([*self.check_identity(named), *found.findings])
        if not named.identity:
            self._prepare_role(name, run, owner, node_policy(run, buckets, models))
        if not named.network:
            self._prepare_group(region, name, run, owner, ssh_from)
        return Place(
            cloud="aws",
            region=region,
            group=found.group_name,
            identity=named.identity or name,
            network=found.vpc_name,
            subnets=found.subnet_names,
            ssh_from=ssh_from if named.is_reached_from_here else "",
            named=named,
        )

    def check_identity(self, named: Named) -> Sequence[Finding]:
        if not named.identity:
            return []
        with _said(f"aws iam GetInstanceProfile {named.identity}"):
            return [look_at_profile(self._client("iam", HOME_REGION), named.identity)]

    def check_network(self, region: str, named: Named, ssh_from: str) -> Sequence[Finding]:
        return self._look_at_network(region, named, ssh_from).findings if named.network else []

    def _look_at_network(self, region: str, named: Named, ssh_from: str) -> FoundNetwork:
        with _said(f"aws ec2 network {named.network}, {region}"):
            source = ssh_from if named.is_reached_from_here else ""
            return look_at_network(self._client("ec2", region), region, named, source)

    def _prepare_group(self, region: str, name: str, run: str, owner: str, ssh_from: str) -> None:
        with _said(f"aws ec2 security group {name}, {region}"):
            client = self._client("ec2", region)
            vpcs = client.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
            if not vpcs:
                raise CloudRefused(
                    f"aws has no default VPC in {region}, and nodes live in it; `aws ec2 create-default-vpc --region "
                    f"{region}`, or leave the region out"
                )
            group = self._group(client, name)
            if group is None:
                tags = {**_labels(run, owner), "Name": name}
                group = self._make_group(client, name, vpcs[0]["VpcId"], tags)
            whose = _from_tags(group.get("Tags", ())).get(OWNER_LABEL, "")
            refuse_anothers(f"aws security group {name} in {region}", run, owner, whose)
            self._set_rules(client, group, ssh_from)

    def open_rules(self, place: Place) -> Sequence[str]:
        if place.named.network:
            return wrong_of(self.check_network(place.region, place.named, place.ssh_from))
        with _said(f"aws ec2 DescribeSecurityGroups, {place.region}"):
            group = self._group(self._client("ec2", place.region), place.group)
        if group is None:
            return [f"security group {place.group} is not there in {place.region}"]
        missing = []
        if not _has_inside(group):
            missing.append(f"security group {place.group} ({place.region}) lacks the rule: all traffic from itself")
        if place.ssh_from not in _ssh_ranges(group):
            missing.append(
                f"security group {place.group} ({place.region}) lacks the rule: tcp 22 (SSH) from {place.ssh_from}"
            )
        return missing

    # --- parts ------------------------------------------------------------------------------------

    def _group(self, client: Any, name: str) -> dict[str, Any] | None:
        found = client.describe_security_groups(Filters=[{"Name": "group-name", "Values": [name]}])["SecurityGroups"]
        return dict(found[0]) if found else None

    def _make_group(self, client: Any, name: str, vpc: str, tags: Mapping[str, str]) -> dict[str, Any]:
        with _already_is_fine():
            client.create_security_group(
                GroupName=name,
                Description="Nodes of a spotrl run: all traffic among themselves, SSH from the controller",
                VpcId=vpc,
                TagSpecifications=[{"ResourceType": "security-group", "Tags": _tags(tags)}],
            )
        group = self._group(client, name)
        if group is None:
            raise CloudUnreachable(f"aws made security group {name} and does not list it yet; it is asked again")
        return group

    def _set_rules(self, client: Any, group: Mapping[str, Any], ssh_from: str) -> None:
        """Allow SSH only from the controller's current address, and all traffic inside the group."""
        group_id = group["GroupId"]
        if not _has_inside(group):
            inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}
            with _already_is_fine():
                client.authorize_security_group_ingress(GroupId=group_id, IpPermissions=[inside])
        ranges = _ssh_ranges(group)
        if ssh_from not in ranges:
            with _already_is_fine():
                client.authorize_security_group_ingress(GroupId=group_id, IpPermissions=[_ssh(ssh_from)])
        for old in ranges - {ssh_from}:
            with _missing_is_none():
                client.revoke_security_group_ingress(GroupId=group_id, IpPermissions=[_ssh(old)])

    def _prepare_role(self, name: str, run: str, owner: str, policy: Mapping[str, Any]) -> None:
        with _said(f"aws iam role {name}"):
            iam, tags, is_new = self._client("iam", HOME_REGION), _labels(run, owner), False
            with _already_is_fine():
                iam.create_role(RoleName=name, Path=PATH, AssumeRolePolicyDocument=WHO_MAY_BE_A_NODE, Tags=_tags(tags))
                is_new = True
            if not is_new:
                whose = _from_tags(iam.list_role_tags(RoleName=name)["Tags"]).get(OWNER_LABEL, "")
                refuse_anothers(f"aws role {name}", run, owner, whose)
            iam.put_role_policy(RoleName=name, PolicyName="node", PolicyDocument=json.dumps(policy))
            with _already_is_fine():
                iam.create_instance_profile(InstanceProfileName=name, Path=PATH, Tags=_tags(tags))
            with _already_is_fine():  # LimitExceeded: the profile already has its one role
                iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)

    def _roles(self, owner: str | None, run: str | None) -> list[Thing]:
        found = []
        with _said("aws iam ListRoles"):
            iam = self._client("iam", HOME_REGION)
            for page in iam.get_paginator("list_roles").paginate(PathPrefix=PATH):
                for role in page["Roles"]:
                    with _missing_is_none():
                        tags = iam.list_role_tags(RoleName=role["RoleName"])["Tags"]
                        found.append(_thing("", "role", role["RoleName"], tags))
        return [one for one in found if owner in (None, one.owner) and run in (None, one.run)]

    def _remove(self, thing: Thing) -> bool:
        with _said(f"aws {thing.kind} {thing.id}"), _missing_is_none():
            try:
                match thing.kind:
                    case "disk":
                        self._client("ec2", thing.region).delete_volume(VolumeId=thing.id)
                    case "group":
                        self._client("ec2", thing.region).delete_security_group(GroupId=thing.id)
                    case "role":
                        self._remove_role(thing.id)
                    case _:
                        return False
            except Exception as error:
                if _code(error) in NOT_YET:
                    return False
                raise
        return True

    def _remove_role(self, name: str) -> None:
        iam = self._client("iam", HOME_REGION)
        with _missing_is_none():
            iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=name)
        with _missing_is_none():
            iam.delete_instance_profile(InstanceProfileName=name)
        with _missing_is_none():
            iam.delete_role_policy(RoleName=name, PolicyName="node")
        iam.delete_role(RoleName=name)


def _machine(region: str, found: Mapping[str, Any]) -> Machine:
    tags = _from_tags(found.get("Tags", ()))
    reason = found.get("StateReason") or {}
    transition = found.get("StateTransitionReason") or ""
    state = STATES[found["State"]["Name"]]
    said = " ".join(dict.fromkeys(filter(None, [reason.get("Code"), reason.get("Message"), transition])))
    return Machine(
        cloud="aws",
        region=region,
        zone=found["Placement"]["AvailabilityZone"],
        id=found["InstanceId"],
        name=tags.get(NODE_LABEL, tags.get("Name", "")),
        run=tags.get(RUN_LABEL, ""),
        owner=tags.get(OWNER_LABEL, ""),
        state=state,
        market=Market.SPOT if found.get("InstanceLifecycle") == "spot" else Market.ON_DEMAND,
        instance_type=found["InstanceType"],
        address=found.get("PrivateIpAddress") or "",
        public_address=found.get("PublicIpAddress") or "",
        identity=(found.get("IamInstanceProfile") or {}).get("Arn", "").rpartition("/")[2],
        launched_ms=_ms(found.get("LaunchTime")),
        ended_ms=_transition_ms(transition) if state in (MachineState.GONE, MachineState.STOPPING) else None,
        reason=said if state in (MachineState.GONE, MachineState.STOPPING) else "",
        reclaimed=reason.get("Code") in RECLAIMED,
    )


def _gone(machine: Machine, reason: str) -> Machine:
    return replace(machine, state=MachineState.GONE, reason=machine.reason or reason)


def _thing(region: str, kind: str, id: str, tags: Sequence[Mapping[str, str]], size_gib: int | None = None) -> Thing:
    named = _from_tags(tags)
    return Thing(
        cloud="aws",
        region=region,
        kind=kind,
        id=id,
        run=named.get(RUN_LABEL, ""),
        owner=named.get(OWNER_LABEL, ""),
        node=named.get(NODE_LABEL, ""),
        size_gib=size_gib,
    )


def _by_tag(owner: str | None, run: str | None) -> list[dict[str, Any]]:
    filters: list[dict[str, Any]] = [{"Name": "tag-key", "Values": [RUN_LABEL]}]
    if owner is not None:
        filters.append({"Name": f"tag:{OWNER_LABEL}", "Values": [owner]})
    if run is not None:
        filters.append({"Name": f"tag:{RUN_LABEL}", "Values": [run]})
    return filters


def _labels(run: str, owner: str) -> dict[str, str]:
    return {RUN_LABEL: run, OWNER_LABEL: owner}


def _tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _from_tags(tags: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in tags}


def _ssh(cidr: str) -> dict[str, Any]:
    return {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": cidr}]}


def _ssh_ranges(group: Mapping[str, Any]) -> set[str]:
    rules = [rule for rule in group.get("IpPermissions", ()) if rule.get("FromPort") == 22]
    return {one["CidrIp"] for rule in rules for one in rule.get("IpRanges", ())}


def _has_inside(group: Mapping[str, Any]) -> bool:
    return any(
        pair.get("GroupId") == group["GroupId"]
        for rule in group.get("IpPermissions", ())
        if rule["IpProtocol"] == "-1"
        for pair in rule.get("UserIdGroupPairs", ())
    )


def _ms(when: datetime | None) -> int | None:
    return None if when is None else round(when.timestamp() * 1000)


def _transition_ms(text: str) -> int | None:
    """Return the end time in a text like `User initiated (2026-03-04 05:06:07 GMT)`.

    EC2 reports the time nowhere else.
    """
    found = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)", text)
    return _ms(datetime.fromisoformat(found[1]).replace(tzinfo=UTC)) if found else None


def _clients() -> Callable[[str, str], Any]:
    lock = Lock()
    made: dict[tuple[str, str], Any] = {}
    sessions: list[Any] = []

    def client(service: str, region: str) -> Any:
        import boto3
        from botocore.config import Config

        with lock:
            if not sessions:
                sessions.append(boto3.session.Session())
            if (service, region) not in made:
                # Twice 4.5 s and a pause: no call takes longer than 10 s, and callers retry.
                patience = Config(
                    retries={"mode": "standard", "total_max_attempts": 2}, connect_timeout=1.5, read_timeout=3
                )
                made[service, region] = sessions[0].client(service, region_name=region, config=patience)
            return made[service, region]

    return client


# --- errors -------------------------------------------------------------------------------------------


def _code(error: Exception) -> str:
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


@contextmanager
def _missing_is_none() -> Iterator[None]:
    """Ignore errors about missing resources, which need no removal."""
    try:
        yield
    except Exception as error:
        if not MISSING.search(_code(error)) and _code(error) != "InvalidPermission.NotFound":
            raise


@contextmanager
def _already_is_fine() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if _code(error) not in ALREADY:
            raise


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Convert the client's errors to CloudUnreachable (unknown state) or CloudRefused."""
    from botocore import exceptions as aws

    try:
        yield
    except aws.ClientError as error:
        code, message = _code(error), error.response.get("Error", {}).get("Message", "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if ASK_LESS.search(code) or status >= 500 or status == 429:
            raise CloudUnreachable(f"{what}: AWS answers {code or status} ({message}); it is asked again") from None
        advice = advice_on(message) or "`spotrl check --print-policy aws` prints what is needed"
        raise CloudRefused(f"{what}: AWS refused ({code}: {message}); {advice}") from None
    except (aws.NoCredentialsError, aws.PartialCredentialsError, aws.ProfileNotFound, aws.SSOError) as error:
        raise CloudRefused(
            f"{what}: AWS found no credentials ({error}); `aws configure` or `aws sso login` makes some"
        ) from None
    except aws.BotoCoreError as error:
        raise CloudUnreachable(f"{what}: AWS did not answer ({error}); it is asked again") from None
