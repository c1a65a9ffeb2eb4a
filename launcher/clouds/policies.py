"""The minimal permissions of the launcher's own credentials, printed by `spotrl check --print-policy`.

AWS: a policy document. Google Cloud: a custom role. Both cover two sets of calls. The first set is made by unmodified
SkyPilot 0.14.1, driven as in launcher/provision/sky/sky.py (our own group or network, our own identity, no ports, no
storage mounts). The second set is our own (aws.py, gce.py, the price sources). Tests compare the permissions with the
code: a missing permission would fail a node that was just paid for.

On AWS, every action that ends or changes a resource is tied to our label, so these credentials cannot harm foreign VMs.
Google Cloud has no condition on labels: there the permissions hold for the whole project, and the text says so.
"""

from collections.abc import Sequence
from textwrap import dedent
from typing import Any

from launcher.clouds.base import RUN_LABEL
from launcher.clouds.labels import bucket_of
from launcher.job.company import NOTHING_NAMED, Named

ACCOUNT = "ACCOUNT_ID"
"""Placeholder in a policy for an unknown account."""

BUCKETS = ("s3://YOUR_BUCKET/YOUR_FOLDER",)

SEE = (
    "ec2:DescribeAvailabilityZones",
    "ec2:DescribeImages",
    "ec2:DescribeInstances",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeRegions",
    "ec2:DescribeRouteTables",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeSubnets",
    "ec2:DescribeVolumes",
    "ec2:DescribeVpcs",
    "iam:GetRole",
    "iam:ListRoles",
    "iam:SimulatePrincipalPolicy",
    "pricing:GetProducts",
    "servicequotas:GetAWSDefaultServiceQuota",
    "servicequotas:GetServiceQuota",
    "sts:GetCallerIdentity",
)
"""Read-only actions, which cost nothing. Most cannot be narrowed to resources; GetRole reads the caller's own role."""

ROLES = (
    "iam:CreateRole",
    "iam:DeleteRole",
    "iam:DeleteRolePolicy",
    "iam:ListRoleTags",
    "iam:PutRolePolicy",
    "iam:TagRole",
)
PROFILES = (
    "iam:CreateInstanceProfile",
    "iam:DeleteInstanceProfile",
    "iam:GetInstanceProfile",
    "iam:TagInstanceProfile",
)
MAKE_GROUP = "CreateSecurityGroup"
TO_EC2 = {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}
BOTH = ("iam:AddRoleToInstanceProfile", "iam:RemoveRoleFromInstanceProfile")


def aws_policy(
    account: str = ACCOUNT, buckets: Sequence[str] = (), named: Named = NOTHING_NAMED, role: str = ""
) -> dict[str, Any]:
    """Return the policy for the launching user. `buckets`: from the job's `store`; empty: no bucket statements.

    `named`: resources in the job, for which the permissions to create are left out. `role`: ARN of a named profile's
    role.
    """
    ec2 = f"arn:aws:ec2:*:{account}"
    ours, profile = f"arn:aws:iam::{account}:role/spotrl/*", f"arn:aws:iam::{account}:instance-profile/spotrl/*"
    labelled, with_label = ({"Null": {f"aws:{kind}/{RUN_LABEL}": "false"}} for kind in ("ResourceTag", "RequestTag"))
    statements: list[dict[str, Any]] = [
        allow("See", SEE, "*"),
        allow("StartOnlyWithOurLabel", ["ec2:RunInstances"], [f"{ec2}:instance/*", f"{ec2}:volume/*"], with_label),
        allow(
            "StartFrom",
            ["ec2:RunInstances"],
            [
                "arn:aws:ec2:*::image/*",
                f"{ec2}:image/*",
                f"{ec2}:network-interface/*",
                f"{ec2}:security-group/*",
                f"{ec2}:subnet/*",
            ],
        ),
        allow(
            "LabelWhatIsNew",
            ["ec2:CreateTags"],
            [f"{ec2}:instance/*", f"{ec2}:volume/*", *([] if named.network else [f"{ec2}:security-group/*"])],
            {"StringEquals": {"ec2:CreateAction": ["RunInstances", *([] if named.network else [MAKE_GROUP])]}},
        ),
        allow(
            "ChangeAndEndOurOwn",
            ["ec2:CreateTags", "ec2:TerminateInstances"],
            [f"{ec2}:instance/*"],
            labelled,
        ),
        allow("OurDisks", ["ec2:CreateTags", "ec2:DeleteVolume"], [f"{ec2}:volume/*"], labelled),
        *([] if named.network else _groups(ec2, with_label, labelled)),
        *(_named_role(account, named.identity, role) if named.identity else _roles(ours, profile)),
        allow(
            "FirstSpotInstance",
            ["iam:CreateServiceLinkedRole"],
            "*",
            {"StringEquals": {"iam:AWSServiceName": "spot.amazonaws.com"}},
        ),
    ]
    for number, url in enumerate(url for url in buckets if url.startswith("s3://")):
        bucket, prefix = bucket_of(url)
        inside = f"arn:aws:s3:::{bucket}/{prefix}/*" if prefix else f"arn:aws:s3:::{bucket}/*"
        statements += [
            allow(
                f"Bucket{number}",
                ["s3:GetBucketLocation", "s3:GetEncryptionConfiguration", "s3:ListBucket"],
                [f"arn:aws:s3:::{bucket}"],
            ),
            allow(
                f"Objects{number}",
                ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:PutObject"],
                [inside],
            ),
        ]
    return {"Version": "2012-10-17", "Statement": statements}


def _groups(ec2: str, with_label: dict[str, Any], labelled: dict[str, Any]) -> list[dict[str, Any]]:
    changes = ["ec2:AuthorizeSecurityGroupIngress", "ec2:DeleteSecurityGroup", "ec2:RevokeSecurityGroupIngress"]
    return [
        allow("MakeGroups", ["ec2:CreateSecurityGroup"], [f"{ec2}:vpc/*"]),
        allow("MakeGroupsWithOurLabel", ["ec2:CreateSecurityGroup"], [f"{ec2}:security-group/*"], with_label),
        allow("OurGroups", changes, [f"{ec2}:security-group/*"], labelled),
    ]


def _roles(role: str, profile: str) -> list[dict[str, Any]]:
    return [
        allow("OurRoles", ROLES, [role]),
        allow("OurProfiles", PROFILES, [profile]),
        allow("RolesInProfiles", BOTH, [profile]),
        allow("GiveNodesOurRoles", ["iam:PassRole"], [role], TO_EC2),
    ]


def _named_role(account: str, identity: str, role: str) -> list[dict[str, Any]]:
    """Return the statements for a named role. An unknown role is assumed to have its instance profile's name."""
    role = role or f"arn:aws:iam::{account}:role/{identity}"
    return [
        allow("SeeTheProfile", ["iam:GetInstanceProfile", "iam:ListRoleTags"], "*"),
        allow("GiveNodesTheNamedRole", ["iam:PassRole"], [role], TO_EC2),
    ]


def allow(
    sid: str, actions: Sequence[str], resources: str | Sequence[str], condition: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a statement that allows actions on resources."""
    statement = {
        "Sid": sid,
        "Effect": "Allow",
        "Action": list(actions),
        "Resource": resources if isinstance(resources, str) else list(resources),
    }
    return {**statement, "Condition": condition} if condition else statement


AWS_NOTES = dedent(
    """\
    # Save it: spotrl check --print-policy aws > policy.json, put your bucket in, then
    #   aws iam create-policy --policy-name spotrl-launcher --policy-document file://policy.json
    # and attach it to the user or role that launches.
    # Nodes get a role of their own for each run, under /spotrl/: they may describe instances, end those of their run,
    # and use the run's own folder of the bucket. No credentials of yours are copied to a node.
    # Whoever may write roles under /spotrl/ and give them to instances could write a wide one. Where that matters,
    # attach a permissions boundary to these roles by an administrator's policy.
    # The first spot instance of an account makes the service-linked role for spot; hence FirstSpotInstance.
    """
)

AWS_NAMED_NOTES = dedent(
    """\
    # The job names the instance profile {identity}. GiveNodesTheNamedRole takes its role to have the same name: put the
    # role's own name there if it has another. That role has to allow nodes this much:
    """
)

GCP_NAMED_NOTES = dedent(
    """\
    # The job names the account {identity}. It needs the role spotrlNode in this project, and roles/storage.objectAdmin
    # on the bucket; the launcher needs roles/iam.serviceAccountUser on it. The launcher grants nothing then, so the
    # condition above is not needed. An account of another project: its organisation policy must let it be attached
    # here (constraints/iam.disableCrossProjectServiceAccountUsage).
    """
)

SKYPILOT_TESTS = (
    "compute.disks.create",
    "compute.disks.list",
    "compute.firewalls.get",
    "compute.globalOperations.get",
    "compute.instances.create",
    "compute.instances.delete",
    "compute.instances.get",
    "compute.instances.list",
    "compute.instances.setLabels",
    "compute.instances.setServiceAccount",
    "compute.instances.start",
    "compute.instances.stop",
    "compute.networks.get",
    "compute.networks.getEffectiveFirewalls",
    "compute.networks.list",
    "compute.projects.get",
    "compute.subnetworks.list",
    "compute.subnetworks.use",
    "compute.subnetworks.useExternalIp",
    "compute.zoneOperations.get",
    "iam.roles.get",
    "iam.serviceAccounts.get",
    "resourcemanager.projects.get",
    "resourcemanager.projects.getIamPolicy",
    "serviceusage.services.enable",
    "serviceusage.services.list",
    "serviceusage.services.use",
)
"""Permissions that SkyPilot tests before any use of the cloud, even if no later call needs them."""

WE_ASK = (
    "compute.disks.delete",
    "compute.disks.setLabels",
    "compute.firewalls.create",
    "compute.firewalls.delete",
    "compute.firewalls.list",
    "compute.firewalls.update",
    "compute.instances.setMetadata",
    "compute.instances.setTags",
    "compute.networks.create",
    "compute.networks.delete",
    "compute.networks.updatePolicy",
    "compute.regionOperations.get",
    "compute.regions.get",
    "compute.regions.list",
    "compute.subnetworks.create",
    "compute.subnetworks.delete",
    "compute.subnetworks.get",
    "compute.zoneOperations.list",
    "compute.zones.list",
    "iam.serviceAccounts.actAs",
    "iam.serviceAccounts.create",
    "iam.serviceAccounts.delete",
    "iam.serviceAccounts.list",
    "resourcemanager.projects.setIamPolicy",
)


MAKING_NETWORKS = (
    "compute.firewalls.create",
    "compute.firewalls.delete",
    "compute.firewalls.update",
    "compute.networks.create",
    "compute.networks.delete",
    "compute.networks.updatePolicy",
    "compute.subnetworks.create",
    "compute.subnetworks.delete",
)
MAKING_IDENTITIES = (
    "iam.serviceAccounts.create",
    "iam.serviceAccounts.delete",
    "resourcemanager.projects.setIamPolicy",
)


def gcp_permissions(named: Named = NOTHING_NAMED) -> list[str]:
    """Return the launching user's permissions in the project.

    `named`: existing resources in the job, which are not created.
    """
    making = {*(MAKING_NETWORKS if named.network else ()), *(MAKING_IDENTITIES if named.identity else ())}
    return sorted({*SKYPILOT_TESTS, *WE_ASK} - making)


def gcp_role(named: Named = NOTHING_NAMED) -> str:
    """Return the launcher's role as YAML text for `gcloud iam roles create`.

    Comments in the text list the other commands of the setup. `named`: existing resources in the job; the role then
    leaves out the permissions to create such resources.
    """
    permissions = "\n".join(f"- {name}" for name in gcp_permissions(named))
    notes = GCP_NOTES + (GCP_NAMED_NOTES.format(identity=named.identity) if named.identity else "")
    return f"{notes}title: spotrl launcher\nstage: GA\nincludedPermissions:\n{permissions}\n"


GCP_NOTES = dedent(
    """\
    # Save it: spotrl check --print-policy gcp > role.yaml, then
    #   gcloud iam roles create spotrlLauncher --project PROJECT --file role.yaml
    #   gcloud projects add-iam-policy-binding PROJECT --member user:YOU --role projects/PROJECT/roles/spotrlLauncher \\
    #     --condition='title=only-node-roles,expression=api.getAttribute("iam.googleapis.com/modifiedGrantsByRole", [])
    #     .hasOnly(["projects/PROJECT/roles/spotrlNode", "roles/storage.objectAdmin", "roles/storage.objectViewer"])'
    #   gcloud storage buckets add-iam-policy-binding gs://YOUR_BUCKET --member user:YOU --role roles/storage.admin
    #   gcloud iam roles create spotrlNode --project PROJECT --title 'spotrl node' --permissions \\
    #     compute.instances.delete,compute.instances.get,compute.instances.list,compute.zoneOperations.get
    # The condition is what keeps resourcemanager.projects.setIamPolicy from granting anything but what nodes get. The
    # launcher may neither make nor change roles: who may could widen spotrlNode, and take what it allows.
    # The launcher's own permissions hold for the whole project: it can delete instances, disks, networks and service
    # accounts that are not spotrl's, and act as any service account. Google has no condition that narrows them to a
    # label. Where that matters, give spotrl a project of its own.
    # Prices are asked for with the role Compute Viewer and the Cloud Billing API, both optional.
    # Nodes get a service account of their own for each run: they may list and end instances of their run (role
    # spotrlNode, narrowed by a condition) and use the run's own folder of the bucket. No key of it is ever made, and
    # no credentials of yours are copied to a node.
    """
)
