"""Preempt a spot instance on AWS with the Fault Injection Service (FIS).

    experiment template (one instance, by its ARN) -> experiment -> the template is deleted

The action `aws:ec2:send-spot-instance-interruptions` sends the two-minute notice and then terminates the instance, as
EC2 does when it needs the capacity. FIS acts with a role that an administrator makes once. spotrl
only names the role, and neither makes nor changes it.
https://docs.aws.amazon.com/fis/latest/userguide/fis-actions-reference.html#send-spot-instance-interruptions
"""

import json
import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from launcher.clouds.aws_calls import code_of, errors_named
from launcher.clouds.aws_limits import AwsLimits
from launcher.clouds.aws_role import HOME_REGION
from launcher.clouds.base import RUN_LABEL, Finding, Instance, Look
from launcher.clouds.limits import Permissions
from launcher.clouds.preempting import Order, OrderState, Progress
from launcher.clouds.selftest_policies import FIS_ROLE, FIS_SERVICE, INTERRUPT, fis_statements

ACTION = "aws:ec2:send-spot-instance-interruptions"
NOTICE = "PT2M"
"""Time between notice and end. The shortest that FIS accepts, and what EC2 gives."""

STATES = {
    "completed": Progress.DONE,
    "failed": Progress.FAILED,
    "stopped": Progress.FAILED,
    "cancelled": Progress.FAILED,
}

POLICY = "--selftest --print-policy aws"
REMEDY = f"`spotrl check {POLICY}` prints the commands that make it"


class AwsPreempter(AwsLimits):
    """FIS experiments on one AWS account."""

    means = f"AWS Fault Injection Service, {ACTION}"
    notice_ms: int | None = 120_000

    def look(self) -> Sequence[Finding]:
        """Check that FIS may take the role, and that the role may interrupt spot instances."""
        iam = self._client("iam", HOME_REGION)
        with errors_named(f"aws iam GetRole {FIS_ROLE}"):
            try:
                trust = _document(iam.get_role(RoleName=FIS_ROLE)["Role"]["AssumeRolePolicyDocument"])
            except Exception as error:
                if code_of(error) == "NoSuchEntity":
                    return [Finding(look=Look.WRONG, text=f"there is no role {FIS_ROLE}; {REMEDY}")]
                raise
        if not any(FIS_SERVICE in _principals(statement) for statement in _statements(trust)):
            return [Finding(look=Look.WRONG, text=f"{FIS_SERVICE} may not take the role {FIS_ROLE}; {REMEDY}")]
        try:
            with errors_named(f"aws iam role policies of {FIS_ROLE}"):
                allowed = self._allowed(iam)
        except Exception as error:
            return [Finding(look=Look.UNSURE, text=f"what the role {FIS_ROLE} may do cannot be read ({error})")]
        if INTERRUPT not in allowed:
            text = f"the role {FIS_ROLE} has no policy of its own that allows {INTERRUPT}"
            return [Finding(look=Look.UNSURE, text=f"{text}, unless an attached policy does; {REMEDY}")]
        return [Finding(look=Look.OK, text=f"the role {FIS_ROLE} may be taken by FIS, and allows {INTERRUPT}")]

    def permissions_to_preempt(self) -> Permissions:
        return self.missing(fis_statements(self.caller().account), passed_to=FIS_SERVICE)

    def preempt(self, instance: Instance) -> Order:
        account = self.caller().account
        fis = self._client("fis", instance.region)
        with errors_named(f"aws fis CreateExperimentTemplate, {instance.region}", POLICY):
            template = fis.create_experiment_template(**_template(account, instance))["experimentTemplate"]["id"]
        try:
            with errors_named(f"aws fis StartExperiment, {instance.region}", POLICY):
                answer = fis.start_experiment(
                    clientToken=secrets.token_hex(16), experimentTemplateId=template, tags={RUN_LABEL: instance.run}
                )
        finally:
            # An experiment keeps what its template said, and a template left behind would have to be found again.
            with errors_named(f"aws fis DeleteExperimentTemplate, {instance.region}", POLICY):
                fis.delete_experiment_template(id=template)
        return Order(region=instance.region, zone=instance.zone, id=answer["experiment"]["id"])

    def state(self, order: Order) -> OrderState:
        with errors_named(f"aws fis GetExperiment, {order.region}", POLICY):
            state = self._client("fis", order.region).get_experiment(id=order.id)["experiment"]["state"]
        return OrderState(
            progress=STATES.get(state["status"], Progress.RUNNING),
            text=f"{state['status']}: {state.get('reason', '')}".rstrip(": "),
        )

    def _allowed(self, iam: Any) -> set[str]:
        """Return the actions that the role's own policies allow."""
        names = iam.list_role_policies(RoleName=FIS_ROLE)["PolicyNames"]
        policies = (iam.get_role_policy(RoleName=FIS_ROLE, PolicyName=name)["PolicyDocument"] for name in names)
        statements = [
            statement
            for policy in policies
            for statement in _statements(_document(policy))
            if statement.get("Effect") == "Allow"
        ]
        return {action for statement in statements for action in _listed(statement.get("Action", ()))}


def _template(account: str, instance: Instance) -> dict[str, Any]:
    target = "spot"
    return {
        "clientToken": secrets.token_hex(16),
        "description": f"spotrl selftest: interrupt {instance.name}",
        "stopConditions": [{"source": "none"}],
        "targets": {
            target: {
                "resourceType": "aws:ec2:spot-instance",
                "resourceArns": [f"arn:aws:ec2:{instance.region}:{account}:instance/{instance.id}"],
                "selectionMode": "ALL",
            }
        },
        "actions": {
            "interrupt": {
                "actionId": ACTION,
                "parameters": {"durationBeforeInterruption": NOTICE},
                "targets": {"SpotInstances": target},
            }
        },
        "roleArn": f"arn:aws:iam::{account}:role/{FIS_ROLE}",
        "tags": {RUN_LABEL: instance.run},
    }


def _document(policy: Any) -> dict[str, Any]:
    """Return a policy, which botocore decodes for some calls and not for others."""
    return dict(json.loads(unquote(policy)) if isinstance(policy, str) else policy)


def _statements(policy: dict[str, Any]) -> list[dict[str, Any]]:
    statements = policy.get("Statement", [])
    return list(statements) if isinstance(statements, list) else [statements]


def _principals(statement: dict[str, Any]) -> list[str]:
    principal = statement.get("Principal", {})
    return _listed(principal.get("Service", ())) if isinstance(principal, dict) else []


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
