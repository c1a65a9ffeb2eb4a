"""The role of a run's nodes on AWS, in an instance profile of the same name.

Nodes may terminate instances of their own run, and read and write their own prefix. Roles and instance profiles lie
under the path /spotrl/.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from launcher.clouds.aws_calls import Clients, code_of, errors_named, existing_is_fine, missing_is_fine
from launcher.clouds.aws_inventory import labels_of, resource_of, tag_list, tags_of
from launcher.clouds.base import RUN_LABEL, CloudRefused, Resource, refuse_foreign
from launcher.clouds.labels import bucket_of

HOME_REGION = "us-east-1"

PATH = "/spotrl/"

WHO_MAY_BE_A_NODE = json.dumps(
    {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"},
        ],
    }
)


NODE_READ_ACTIONS = ("ec2:DescribeInstances", "ec2:DescribeSecurityGroups", "ec2:DescribeSubnets", "ec2:DescribeVpcs")


def node_policy(run: str | None, buckets: Sequence[str], models: Sequence[str] = ()) -> dict[str, Any]:
    """Return the policy of a run's nodes.

    Nodes may see instances, terminate the run's instances, use the run's prefix and read the model.
    `run` None: return the policy of an identity shared by all runs, whose nodes may terminate instances of any run.
    """
    label = f"ec2:ResourceTag/{RUN_LABEL}"
    statements: list[dict[str, Any]] = [
        # SkyPilot's timer on the VM reads more than our own termination does.
        {"Sid": "See", "Effect": "Allow", "Action": list(NODE_READ_ACTIONS), "Resource": "*"},
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


@contextmanager
def quota_named(quota: str) -> Iterator[None]:
    """Name the quota of IAM if it is used up."""
    try:
        yield
    except Exception as error:
        if code_of(error) != "LimitExceeded":
            raise
        raise CloudRefused(
            f'aws iam: the quota "{quota}" is used up ({error}); `spotrl reap` removes what old runs left, and AWS '
            "console, Service Quotas, IAM raises it"
        ) from None


class NodeRole:
    """Makes, lists and deletes the roles of runs. Idempotent."""

    def __init__(self, client: Clients) -> None:
        self._client = client

    def prepare(self, name: str, run: str, owner: str, policy: Mapping[str, Any]) -> None:
        with errors_named(f"aws iam role {name}"):
            iam, tags, is_new = self._client("iam", HOME_REGION), tag_list(labels_of(run, owner)), False
            is_new_profile = False
            with existing_is_fine(), quota_named("Roles per account"):
                iam.create_role(RoleName=name, Path=PATH, AssumeRolePolicyDocument=WHO_MAY_BE_A_NODE, Tags=tags)
                is_new = True
            if not is_new:
                refuse_foreign(f"aws role {name}", run, owner, tags_of(iam.list_role_tags(RoleName=name)["Tags"]))
            roles: list[str] = []
            with existing_is_fine(), quota_named("Instance profiles per account"):
                iam.create_instance_profile(InstanceProfileName=name, Path=PATH, Tags=tags)
                is_new_profile = True
            if not is_new_profile:
                profile = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]
                refuse_foreign(f"aws instance profile {name}", run, owner, tags_of(profile.get("Tags", ())))
                roles = [role["RoleName"] for role in profile["Roles"]]
                if roles not in ([], [name]):
                    raise CloudRefused(
                        f"aws instance profile {name} has the role {', '.join(roles)}, and nodes would get its rights; "
                        "take the role out, or give this run another name (--name)"
                    )
            iam.put_role_policy(RoleName=name, PolicyName="node", PolicyDocument=json.dumps(policy))
            if not roles:
                with existing_is_fine():
                    iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)

    def list(self, owner: str | None, run: str | None) -> list[Resource]:
        resources = []
        with errors_named("aws iam ListRoles"):
            iam = self._client("iam", HOME_REGION)
            for page in iam.get_paginator("list_roles").paginate(PathPrefix=PATH):
                for role in page["Roles"]:
                    with missing_is_fine():
                        tags = iam.list_role_tags(RoleName=role["RoleName"])["Tags"]
                        resources.append(resource_of("", "role", role["RoleName"], tags))
        return [resource for resource in resources if owner in (None, resource.owner) and run in (None, resource.run)]

    def remove(self, name: str) -> None:
        iam = self._client("iam", HOME_REGION)
        with missing_is_fine():
            iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=name)
        with missing_is_fine():
            iam.delete_instance_profile(InstanceProfileName=name)
        with missing_is_fine():
            iam.delete_role_policy(RoleName=name, PolicyName="node")
        iam.delete_role(RoleName=name)
