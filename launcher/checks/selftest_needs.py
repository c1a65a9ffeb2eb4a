"""Check what `spotrl selftest` needs to preempt a node of its own: the role on AWS, and the permissions."""

from launcher.checks.check import Check
from launcher.checks.cloud_account import of_permissions
from launcher.checks.named import of_finding
from launcher.clouds.preempting import Preempter


def selftest_lines(preempter: Preempter) -> list[Check]:
    cloud = preempter.cloud
    remedy = f"`spotrl check --selftest --print-policy {cloud}` prints what is needed"
    return [
        *(of_finding(f"{cloud} selftest role", finding) for finding in preempter.look()),
        of_permissions(f"{cloud} selftest permissions", preempter.permissions_to_preempt(), "preempting", remedy),
    ]
