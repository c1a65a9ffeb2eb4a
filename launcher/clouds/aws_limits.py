"""AWS's clock, permissions and quotas, for `spotrl check`.

Quotas of GPUs are counted in vCPUs, by family and capacity type, separately in each region. The codes are the Amazon
EC2 quotas in the Service Quotas console (several public lists agree). The console lists no P6 spot quota, so none is
guessed.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from engine.events import Market
from launcher.clouds.aws import AwsApi
from launcher.clouds.aws_calls import code_of, errors_named
from launcher.clouds.aws_inventory import labels_of, tag_list
from launcher.clouds.aws_role import HOME_REGION
from launcher.clouds.base import RUN_LABEL, CloudRefused, CloudUnreachable
from launcher.clouds.labels import bucket_of
from launcher.clouds.limits import Permissions, Quota
from launcher.clouds.policies import aws_policy
from launcher.job.company import NOTHING_NAMED, Named
from launcher.market.instance_types import instance_type_of
from launcher.placement.placement import Placement
from launcher.storage.stores import bucket_region

G, P = "L-DB2E81BA", "L-417A185B"
G_SPOT, P_SPOT, P5_SPOT = "L-3819A6DF", "L-7212CCBC", "L-C4BD4855"
STANDARD, STANDARD_SPOT = "L-1216C47A", "L-34B43A08"

TITLES = {
    G: "Running On-Demand G and VT instances",
    P: "Running On-Demand P instances",
    STANDARD: "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
    G_SPOT: "All G and VT Spot Instance Requests",
    P_SPOT: "All P4, P3 and P2 Spot Instance Requests",
    P5_SPOT: "All P5 Spot Instance Requests",
    STANDARD_SPOT: "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
}


def _labelled(*kinds: str) -> list[dict[str, Any]]:
    """Return the tags of our own calls: the printed policy allows what it allows with them alone."""
    return [{"ResourceType": kind, "Tags": tag_list(labels_of("probe", "probe"))} for kind in kinds]


DRY_RUN: Mapping[str, tuple[str, dict[str, Any]]] = {
    "ec2:RunInstances": (
        "run_instances",
        {
            "ImageId": "ami-00000000",
            "MinCount": 1,
            "MaxCount": 1,
            "TagSpecifications": _labelled("instance", "volume"),
        },
    ),
    "ec2:CreateSecurityGroup": (
        "create_security_group",
        {
            "GroupName": "spotrl-probe",
            "Description": "probe",
            "TagSpecifications": _labelled("security-group"),
        },
    ),
    "ec2:DescribeInstances": ("describe_instances", {}),
    "ec2:DescribeVolumes": ("describe_volumes", {}),
}
"""Actions with a dry run, used if IAM does not tell the caller's permissions. TerminateInstances has none here: the
policy allows it for instances of a run, and without one the answer says nothing."""

IDENTITY_CENTER = "aws-reserved/sso.amazonaws.com/"
"""Path of the roles of IAM Identity Center, if its home is us-east-1. Elsewhere the region follows."""

EC2_SERVICE, SPOT_SERVICE = "ec2.amazonaws.com", "spot.amazonaws.com"


def context(passed_to: str) -> list[dict[str, Any]]:
    """Return tags and services of our own calls. IAM's simulation evaluates the policy's conditions with these."""
    values = (
        (f"aws:RequestTag/{RUN_LABEL}", "any"),
        (f"aws:ResourceTag/{RUN_LABEL}", "any"),
        ("ec2:CreateAction", "RunInstances"),
        ("iam:PassedToService", passed_to),
        ("iam:AWSServiceName", SPOT_SERVICE if passed_to == EC2_SERVICE else passed_to),
    )
    return [{"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"} for key, value in values]


def quota_code(instance_type: str, market: Market) -> str | None:
    """Return the code of an instance type's quota; None if unknown."""
    family = re.match(r"[a-z]+\d*", instance_type)
    name, spot = family[0] if family else "", market is Market.SPOT
    if re.fullmatch(r"(g|gr|vt)\d+", name):
        return G_SPOT if spot else G
    if re.fullmatch(r"p[2-4]", name):
        return P_SPOT if spot else P
    if re.fullmatch(r"p5", name):
        return P5_SPOT if spot else P
    if re.fullmatch(r"p\d+", name):
        return None if spot else P
    if re.fullmatch(r"[acdhimrtz]\d+", name):
        return STANDARD_SPOT if spot else STANDARD
    return None


class AwsLimits(AwsApi):
    """The checks of limits on one AWS account."""

    def clock_ms(self) -> int:
        """Return AWS's time from the date of an answer (UTC milliseconds).

        The answer may be a refusal, because AWS refuses the signatures of a machine with a wrong clock.
        """
        client = self._client("sts", HOME_REGION)
        try:
            with errors_named("aws sts GetCallerIdentity"):
                try:
                    answer = client.get_caller_identity()["ResponseMetadata"]
                except Exception as error:
                    if not code_of(error):
                        raise
                    answer = getattr(error, "response", {}).get("ResponseMetadata", {})
        except CloudRefused as refused:
            raise CloudUnreachable(str(refused)) from None
        date = answer.get("HTTPHeaders", {}).get("date", "")
        if not date:
            raise CloudUnreachable("aws sts GetCallerIdentity: the answer has no date")
        return round(parsedate_to_datetime(date).timestamp() * 1000)

    def permissions(self, named: Named = NOTHING_NAMED) -> Permissions:
        """Return the caller's missing permissions, by IAM's simulation if allowed, else by dry runs.

        Raises CloudRefused if a call of SkyPilot is refused: no simulation knows the policies of an organisation.
        """
        self.check_launches()
        return self.missing(aws_policy(self.caller().account, named=named, role=self._role_of(named))["Statement"])

    def missing(self, statements: Sequence[Mapping[str, Any]], passed_to: str = EC2_SERVICE) -> Permissions:
        """Return which actions of policy statements the caller lacks. `passed_to`: the service that gets a role."""
        identity = self.caller().identity
        role = re.fullmatch(r"arn:(aws[a-z-]*):sts::(\d+):assumed-role/([^/]+)/.+", identity)
        source = identity if role is None else self._arn_of(role[3], f"arn:{role[1]}:iam::{role[2]}:role")
        try:
            return Permissions(missing=tuple(dict.fromkeys(self._simulated(source, statements, passed_to))))
        except (CloudRefused, CloudUnreachable, ResponseParserError) as refused:
            actions = [action for statement in statements for action in statement["Action"]]
            unchecked = [action for action in actions if action not in DRY_RUN]
            return Permissions(
                missing=tuple(self._tried(actions)), unchecked=tuple(unchecked), why=str(refused).partition("\n")[0]
            )

    def _arn_of(self, role: str, beginning: str) -> str:
        """Return the ARN of the caller's role. Roles of IAM Identity Center, and others, have a path in it."""
        try:
            return str(self._client("iam", HOME_REGION).get_role(RoleName=role)["Role"]["Arn"])
        except (ClientError, BotoCoreError, ResponseParserError):  # a caller may be allowed to simulate and not to look
            return f"{beginning}/{IDENTITY_CENTER if role.startswith('AWSReservedSSO_') else ''}{role}"

    def draws_on(self, want: Placement, named: Named = NOTHING_NAMED) -> Mapping[str, int]:
        code, machine = quota_code(want.instance_type, want.market), instance_type_of("aws", want.instance_type)
        return {code: machine.vcpus} if code and machine else {}

    def draws_on_once(self, named: Named = NOTHING_NAMED) -> Mapping[str, int]:
        return {}

    def quotas(self, region: str, names: Collection[str]) -> Mapping[str, Quota]:
        try:
            used = self._used(region)
            limits = {code: self._limit(region, code) for code in sorted(names)}
        except ResponseParserError as error:  # for example a proxy's answer
            raise CloudUnreachable(f"aws quotas, {region}: the answer cannot be read ({error})") from None
        return {
            code: Quota(name=code, title=TITLES[code], limit=limit, used=used.get(code, 0))
            for code, limit in limits.items()
            if limit is not None
        }

    def bucket_region(self, url: str) -> str:
        return bucket_region(url)

    def bucket_doubts(self, url: str) -> Sequence[str]:
        bucket, _ = bucket_of(url)
        with errors_named(f"aws s3 GetBucketEncryption {bucket}"):
            try:
                encryption = self._client("s3", HOME_REGION).get_bucket_encryption(Bucket=bucket)
            except Exception as error:
                if code_of(error) == "ServerSideEncryptionConfigurationNotFoundError":
                    return []
                raise
        rules = encryption["ServerSideEncryptionConfiguration"]["Rules"]
        keys = [rule.get("ApplyServerSideEncryptionByDefault", {}).get("KMSMasterKeyID", "") for rule in rules]
        return [
            f"{url} is encrypted with the key {key} of your own, and the role that spotrl makes for nodes may not use "
            "it: that was not tried. Name an instance profile that may (identity.aws), or a bucket with a key of AWS"
            for key in keys
            if key and not key.endswith("alias/aws/s3")
        ]

    def _simulated(self, source: str, statements: Sequence[Mapping[str, Any]], passed_to: str) -> Iterator[str]:
        """Yield the denied actions of each policy statement, simulated with the statement's resources and our tags."""
        with errors_named("aws iam SimulatePrincipalPolicy"):
            pages = self._client("iam", HOME_REGION).get_paginator("simulate_principal_policy")
            for statement in statements:
                resources = statement["Resource"] if isinstance(statement["Resource"], list) else []
                asked = {
                    "PolicySourceArn": source,
                    "ActionNames": statement["Action"],
                    "ContextEntries": context(passed_to),
                    **({"ResourceArns": resources} if resources else {}),
                }
                for page in pages.paginate(**asked):
                    for result in page["EvaluationResults"]:
                        if result["EvalDecision"] != "allowed":
                            yield result["EvalActionName"]

    def _role_of(self, named: Named) -> str:
        """Return the role of a named instance profile; empty if not visible."""
        if not named.identity:
            return ""
        iam = self._client("iam", HOME_REGION)
        try:
            profile = iam.get_instance_profile(InstanceProfileName=named.identity)["InstanceProfile"]
            return str(profile["Roles"][0]["Arn"])
        except (ClientError, BotoCoreError, IndexError):  # `check_identity` reports the reason
            return ""

    def _tried(self, actions: Collection[str]) -> Iterator[str]:
        client = self._client("ec2", self.open_region() or HOME_REGION)
        for action, (method, arguments) in DRY_RUN.items():
            if action not in actions:
                continue
            with errors_named(f"aws {action} (dry run)"):
                try:
                    getattr(client, method)(DryRun=True, **arguments)
                except Exception as error:
                    if not code_of(error):
                        raise
                    if code_of(error) in ("UnauthorizedOperation", "AccessDenied"):
                        yield action

    def _limit(self, region: str, code: str) -> int | None:
        """Return the account's quota, or AWS's default if the quota was never raised; None if AWS has no such quota."""
        with errors_named(f"aws servicequotas GetServiceQuota {code}, {region}"):
            client = self._client("service-quotas", region)
            for ask in (client.get_service_quota, client.get_aws_default_service_quota):
                try:
                    return int(ask(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])
                except Exception as error:
                    if code_of(error) != "NoSuchResourceException":
                        raise
        return None

    def _used(self, region: str) -> dict[str, int]:
        used: dict[str, int] = {}
        with errors_named(f"aws ec2 DescribeInstances, {region}"):
            running = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
            for page in self._client("ec2", region).get_paginator("describe_instances").paginate(Filters=running):
                for reservation in page["Reservations"]:
                    for vm in reservation["Instances"]:
                        market = Market.SPOT if vm.get("InstanceLifecycle") == "spot" else Market.ON_DEMAND
                        code = quota_code(vm["InstanceType"], market) or ""
                        cpu = vm.get("CpuOptions") or {}
                        vcpus = int(cpu.get("CoreCount", 0)) * int(cpu.get("ThreadsPerCore", 1))
                        used[code] = used.get(code, 0) + vcpus
        return used
