"""Permissions of `spotrl selftest` beside those of a launch, printed by `spotrl check --selftest --print-policy`.

AWS: what the launching user needs to order an interruption, and the role with which the Fault Injection Service carries
it out. An administrator makes the role once; it can interrupt only spot instances with spotrl's label.
"""

import json
from textwrap import dedent
from typing import Any

from launcher.clouds.base import RUN_LABEL
from launcher.clouds.policies import ACCOUNT, allow

FIS_ROLE = "spotrl-selftest"
FIS_SERVICE = "fis.amazonaws.com"
INTERRUPT = "ec2:SendSpotInstanceInterruptions"

SIMULATE = "compute.instances.simulateMaintenanceEvent"
"""Permission of the launching user on Google Cloud."""

ORDERS = ("fis:CreateExperimentTemplate", "fis:DeleteExperimentTemplate", "fis:StartExperiment", "fis:TagResource")


def fis_statements(account: str = ACCOUNT) -> list[dict[str, Any]]:
    """Return the statements of the launching user's policy that a selftest needs beside a launch's."""
    fis, role = f"arn:aws:fis:*:{account}", f"arn:aws:iam::{account}:role/{FIS_ROLE}"
    return [
        allow(
            "SelftestInterrupts",
            [*ORDERS, "fis:GetExperiment"],
            [f"{fis}:experiment-template/*", f"{fis}:experiment/*", "arn:aws:fis:*::action/*"],
        ),
        allow("SelftestSeesItsRole", ["iam:GetRole", "iam:GetRolePolicy", "iam:ListRolePolicies"], [role]),
        allow(
            "SelftestGivesItsRole",
            ["iam:PassRole"],
            [role],
            {"StringEquals": {"iam:PassedToService": FIS_SERVICE}},
        ),
        allow(
            "FirstExperiment",
            ["iam:CreateServiceLinkedRole"],
            "*",
            {"StringEquals": {"iam:AWSServiceName": FIS_SERVICE}},
        ),
    ]


def fis_trust() -> dict[str, Any]:
    """Return the trust policy of the role: only FIS may take it."""
    return {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Principal": {"Service": FIS_SERVICE}, "Action": "sts:AssumeRole"}],
    }


def fis_role_policy() -> dict[str, Any]:
    """Return the policy of the role: interrupt spot instances that carry spotrl's label, and nothing else."""
    labelled = {"Null": {f"aws:ResourceTag/{RUN_LABEL}": "false"}}
    return {
        "Version": "2012-10-17",
        "Statement": [
            allow("See", ["ec2:DescribeInstances"], "*"),
            allow("InterruptOurOwn", [INTERRUPT], ["arn:aws:ec2:*:*:instance/*"], labelled),
        ],
    }


def fis_notes() -> str:
    """Return the commands with which an administrator makes the role, as shell comments."""
    notes = dedent(
        f"""\
        # The last four statements are for `spotrl selftest` alone. The Fault Injection Service acts with a role that an
        # administrator makes once:
        #   aws iam create-role --role-name {FIS_ROLE} --assume-role-policy-document '{{trust}}'
        #   aws iam put-role-policy --role-name {FIS_ROLE} --policy-name interrupt --policy-document '{{policy}}'
        """
    )
    return notes.replace("{trust}", json.dumps(fis_trust())).replace("{policy}", json.dumps(fis_role_policy()))
