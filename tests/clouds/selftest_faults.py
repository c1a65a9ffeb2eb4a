"""One fault for each step of a selftest: a cloud, a host or a bucket misbehaves, or the process of the step dies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from launcher.exit_codes import ExitCode
from launcher.selftest.steps import Step
from tests.clouds.selftesting import KILL, KILL_AT_NOTICE, Selftest


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault, and what the selftest has to say about it.

    `says`: part of the step's text. `before`: called before the command starts. `plant`: called after that, and returns
    once the fault is planted.
    """

    step: Step
    about: str
    says: str
    before: Callable[[Selftest], None] | None = None
    plant: Callable[[Selftest], None] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    minutes: Mapping[Step, float] = field(default_factory=dict)
    clouds: tuple[str, ...] = ("aws", "gcp")
    exit_code: ExitCode = ExitCode.FAILURE


def no_trainer(selftest: Selftest) -> None:
    selftest.says(Step.BUY, "passed")
    selftest.on(selftest.node("trainer"), KILL, "trainer")


def no_worker(selftest: Selftest) -> None:
    selftest.on(selftest.node("rollout"), KILL, "worker-0")


def no_handover(selftest: Selftest) -> None:
    selftest.on(selftest.node("rollout"), KILL_AT_NOTICE, "worker-0")


def no_capacity(selftest: Selftest) -> None:
    selftest.says(Step.BUY, "passed")
    selftest.fault("capacity", market="spot")


def no_checkpoint(selftest: Selftest) -> None:
    selftest.says(Step.CHECKPOINT, "stopping")
    wiping = selftest.wipe(300)
    try:
        selftest.says(Step.CHECKPOINT, "failed")
    finally:
        wiping.kill()
        wiping.wait()


def lost_checkpoint(selftest: Selftest) -> None:
    selftest.says(Step.CHECKPOINT, "passed")
    assert selftest.wipe(0).wait(timeout=60) == 0


def no_end(selftest: Selftest) -> None:
    selftest.says(Step.RESUME, "passed")
    selftest.denied("ec2:TerminateInstances", "delete")


def wrong_bill(selftest: Selftest) -> None:
    selftest.says(Step.CLEANUP, "stopping")
    selftest.change_a_bill()


FAULTS = (
    Fault(
        step=Step.BUY,
        about="the cloud refuses to create machines",
        says="the run has failed (no trainer can be had: ",
        before=lambda selftest: selftest.denied("ec2:RunInstances", "create"),
    ),
    Fault(
        step=Step.TRAIN,
        about="the trainer's process is killed (SIGKILL) whenever it starts",
        says="of 2 batches are trained",
        plant=no_trainer,
        settings={"runtime.step_seconds": "4"},
        minutes={Step.TRAIN: 0.7},
    ),
    Fault(
        step=Step.PUBLISH,
        about="the worker of the spot node is killed (SIGKILL) whenever it starts",
        says="has made no rollout with published weights yet",
        plant=no_worker,
        settings={"runtime.step_seconds": "0.5"},
        minutes={Step.PUBLISH: 1.0},
    ),
    Fault(
        step=Step.PREEMPT,
        about="the cloud refuses the order to preempt",
        says="`spotrl check --selftest --print-policy ",
        before=lambda selftest: selftest.denied("fis:StartExperiment", "simulateMaintenanceEvent"),
    ),
    Fault(
        step=Step.NOTICE,
        about="the cloud reports the preemption as done, and the spot node runs on",
        says="not within 0.3 min: no notice yet",
        before=lambda selftest: selftest.fault("unfulfilled"),
        minutes={Step.NOTICE: 0.3},
        clouds=("gcp",),
    ),
    Fault(
        step=Step.NOTICE,
        about="the cloud ends the spot node at once, without a notice",
        says="ended without a notice, and the cloud promises",
        before=lambda selftest: selftest.fault("unannounced"),
        clouds=("aws",),
    ),
    Fault(
        step=Step.DRAIN,
        about="the worker of the spot node is killed (SIGKILL) at the notice",
        says="denoising steps in spite of its notice",
        plant=no_handover,
        settings={"runtime.step_seconds": "1.0"},
    ),
    Fault(
        step=Step.REPLACE,
        about="there is no more spot capacity",
        says="not within 0.7 min: ",
        plant=no_capacity,
        minutes={Step.REPLACE: 0.7},
    ),
    Fault(
        step=Step.CHECKPOINT,
        about="the bucket loses every checkpoint while the run stops",
        says="the bucket has no checkpoint, and the engine saved",
        plant=no_checkpoint,
    ),
    Fault(
        step=Step.RESUME,
        about="the bucket loses every checkpoint between the stop and the resume",
        says="the engine went on at 0, and its checkpoint is of",
        plant=lost_checkpoint,
    ),
    Fault(
        step=Step.CLEANUP,
        about="the cloud refuses to end the machines",
        says="not within 0.5 min: still there: ",
        plant=no_end,
        minutes={Step.CLEANUP: 0.5},
        exit_code=ExitCode.TEARDOWN_INCOMPLETE,
    ),
    Fault(
        step=Step.BILL,
        about="a closed stretch in the ledger costs $0.001 more than its time",
        says="micro-dollars, and should cost",
        plant=wrong_bill,
    ),
)
"""In the order of the steps, so that the shortest selftests come first."""


def faults_of(cloud: str) -> list[Fault]:
    return [fault for fault in FAULTS if cloud in fault.clouds]
