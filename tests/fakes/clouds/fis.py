"""AWS Fault Injection Service: moto keeps templates and experiments, this module carries experiments out.

moto's experiments only change their state. Here a started experiment is checked as FIS checks it (the role's trust and
permission, the target, the time before the interruption), and then interrupts its spot instances: the notice now, the
end after a time that a test may shorten. A template that FIS would refuse is refused.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from tests.fakes.clouds import addresses

INTERRUPT = "aws:ec2:send-spot-instance-interruptions"
LONGEST_MINUTES, SHORTEST_MINUTES = 15, 2
NOTICE_S = 120.0


class Refused(Exception):
    """A call that FIS answers with ValidationException."""


def action_of(method: str, path: str) -> str:
    """Return the name of the operation of a REST call, as IAM and the tests' faults name it."""
    kind, _, rest = path.strip("/").partition("/")
    if kind == "experimentTemplates":
        return {"POST": "CreateExperimentTemplate", "DELETE": "DeleteExperimentTemplate"}.get(
            method, "GetExperimentTemplate" if rest else "ListExperimentTemplates"
        )
    if kind == "experiments":
        return "StartExperiment" if method == "POST" else "GetExperiment" if rest else "ListExperiments"
    return kind


def check_template(body: bytes) -> None:
    """Raise Refused for a template that FIS refuses."""
    template = json.loads(body)
    for field in ("actions", "roleArn", "stopConditions", "description", "clientToken"):
        if not template.get(field):
            raise Refused(f"1 validation error detected: Value at '{field}' failed to satisfy constraint")
    targets = template.get("targets", {})
    for action in template["actions"].values():
        if action["actionId"] != INTERRUPT:
            raise Refused(f"Action with id {action['actionId']} does not exist.")
        found = re.fullmatch(r"PT(\d+)M", action.get("parameters", {}).get("durationBeforeInterruption", ""))
        if found is None or not SHORTEST_MINUTES <= int(found[1]) <= LONGEST_MINUTES:
            raise Refused("Parameter durationBeforeInterruption must be between PT2M and PT15M.")
        target = targets.get(action.get("targets", {}).get("SpotInstances"), {})
        if target.get("resourceType") != "aws:ec2:spot-instance" or not target.get("selectionMode"):
            raise Refused("Action requires the target SpotInstances of type aws:ec2:spot-instance.")


def carry_out(region: str, experiment_id: str, spot: Mapping[str, str], interrupt: Callable[[str], None]) -> None:
    """Run a started experiment. `spot`: state of the region's spot instances by ARN."""
    from moto.fis.models import fis_backends

    experiment = fis_backends[addresses.ACCOUNT][region].experiments[experiment_id]
    arns = [arn for target in experiment.targets.values() for arn in target.get("resourceArns", [])]
    reason = _role_problem(experiment.role_arn)
    if not reason and not any(spot.get(arn) == "running" for arn in arns):
        reason = "Target resolution returned empty set"
    if reason:
        vars(experiment)["STATUS_REASONS"] = {"failed": reason}
        experiment.status = "failed"
        return
    for arn in arns:
        if spot.get(arn) == "running":
            interrupt(arn.rpartition("/")[2])
    experiment.status = "completed"


def _role_problem(arn: str) -> str:
    """Return why FIS cannot act with the role; empty if it can."""
    from moto.iam.models import iam_backends

    roles = iam_backends[addresses.ACCOUNT]["aws"].roles.values()
    role: Any = next((one for one in roles if one.arn == arn), None)
    if role is None or "fis.amazonaws.com" not in _text(role.assume_role_policy_document):
        return "The role cannot be assumed by the Fault Injection Service."
    if not any("ec2:SendSpotInstanceInterruptions" in _text(policy) for policy in role.policies.values()):
        return "Not authorized to perform the required actions"
    return ""


def _text(policy: Any) -> str:
    return unquote(policy) if isinstance(policy, str) else json.dumps(policy)
