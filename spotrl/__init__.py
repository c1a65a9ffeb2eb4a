"""spotrl in Python: plan a job, launch it, and read its runs.

    import spotrl

    plan = spotrl.plan("job.yaml", infra="aws,gcp")
    run = spotrl.launch("job.yaml", name="first-try")
    for event in run.events(follow=True):
        print(event.kind, event.text)
    print(run.report().target.best, run.weights())

This package is the public interface and holds nothing else. Reading works without the engine. Errors that a person can
fix are `spotrl.Failure`; its text names the problem and the remedy.
"""

from spotrl.own_packages import take_own

take_own()

from launcher.exit_codes import Failure  # noqa: E402
from launcher.placement.cloud_plan import CloudPlan  # noqa: E402
from launcher.placement.plan import Plan  # noqa: E402
from launcher.report.comparison import Comparison  # noqa: E402
from launcher.report.values import Report  # noqa: E402
from launcher.runs.event_lines import EventLine  # noqa: E402
from launcher.runs.views import RunView  # noqa: E402
from spotrl.interface import Run, compare, launch, plan, run, runs  # noqa: E402

__all__ = [
    "CloudPlan",
    "Comparison",
    "EventLine",
    "Failure",
    "Plan",
    "Report",
    "Run",
    "RunView",
    "compare",
    "launch",
    "plan",
    "run",
    "runs",
]
