"""Conduct a selftest: act (`step_work.py`), read the facts, judge, step by step; clean up in every case.

The run is a launch like any other: `spotrl launch` has started it, its controller buys, replaces and ends nodes within
its budget, and this module only orders what a user or the cloud could order: a preemption, a stop, a resume. Ctrl-C, a
failed step and an error all lead to the cleanup, which stops the run and asks the cloud what is left.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from launcher.exit_codes import ExitCode, Failure
from launcher.selftest.acting import Acts
from launcher.selftest.facts import Facts
from launcher.selftest.interruption import Interrupted, Interruption
from launcher.selftest.reading import Seen
from launcher.selftest.step_work import SAY_SECONDS, StepWork
from launcher.selftest.steps import ALWAYS, Judgement, Step, Verdict, judge

MINUTES: Mapping[Step, float] = {
    Step.BUY: 30,
    Step.TRAIN: 15,
    Step.PUBLISH: 10,
    Step.PREEMPT: 10,
    Step.NOTICE: 10,
    Step.DRAIN: 15,
    Step.REPLACE: 30,
    Step.CHECKPOINT: 15,
    Step.RESUME: 30,
    Step.CLEANUP: 15,
    Step.BILL: 1,
}
"""Longest time of each step. A node takes minutes to come up, and a cloud minutes to report its end. A run that is slow
in every step ends at its deadline. `spotrl selftest --minutes STEP=N` sets another."""

LOOK_SECONDS = 1.0
"""Seconds between two looks at the facts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A judged step with the time that it took."""

    step: Step
    judgement: Judgement
    seconds: float


@dataclass(kw_only=True)
class Conductor:
    """One selftest. `say(step, text)`: print a line of progress."""

    run: Acts
    say: Callable[[Step, str], None]
    observed: Seen = field(default_factory=Seen)
    results: list[Result] = field(default_factory=list)
    minutes: Mapping[Step, float] = field(default_factory=lambda: MINUTES)
    interruption: Interruption = field(default_factory=Interruption)
    look_seconds: float = LOOK_SECONDS
    is_interrupted: bool = False

    def __post_init__(self) -> None:
        self._work = StepWork(
            run=self.run,
            say=self.say,
            observed=self.observed,
            minutes=self.minutes,
            interruption=self.interruption,
            look_seconds=self.look_seconds,
        )

    def conduct(self) -> None:
        """Take every step. Never raises: an error of a step is its failure, and the cleanup follows."""
        for step in (step for step in Step if step not in ALWAYS):
            if not self._take(step):
                break
        self.clean_up()

    def clean_up(self) -> None:
        """Take the steps that are always taken. An interruption ends the waiting, and the step has failed then."""
        for step in ALWAYS:
            self._take(step)

    def end_launch(self, error: BaseException) -> None:
        """Record why the launch did not succeed, and clean up what it bought."""
        if isinstance(error, Interrupted):
            judgement = self.interrupted(Step.BUY, str(error))
        else:
            judgement = Judgement(verdict=Verdict.FAILED, text=str(error) or type(error).__name__)
        self._keep(Step.BUY, judgement, 0.0)
        self.clean_up()

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.judgement.verdict is Verdict.FAILED]

    def exit_code(self, facts: Facts) -> ExitCode:
        """Return the exit code by the facts at the end. What may still cost money counts before a failed step."""
        if facts.still_running or facts.in_cloud or facts.in_cloud is None:
            return ExitCode.TEARDOWN_INCOMPLETE
        if self.is_interrupted:
            return ExitCode.INTERRUPTED
        return ExitCode.FAILURE if self.failed else ExitCode.OK

    def facts(self) -> Facts:
        return self._work.facts()

    def _take(self, step: Step) -> bool:
        """Act, and wait until the step is judged. Return True if the next step may be taken.

        An interrupted step is no fault, but an interrupted cleanup has failed, because something may be left.
        """
        began = time.monotonic()
        try:
            judgement = self._judge_bill() if step is Step.BILL else self._wait_for(step, began)
        except Interrupted as interrupted:
            judgement = self.interrupted(step, str(interrupted))
        except Failure as failure:
            judgement = Judgement(verdict=Verdict.FAILED, text=str(failure))
        except Exception as error:  # whatever a step meets, the cleanup must follow
            judgement = Judgement(verdict=Verdict.FAILED, text=f"{type(error).__name__}: {error}")
        self._keep(step, judgement, time.monotonic() - began)
        return judgement.verdict in (Verdict.PASSED, Verdict.NOT_TESTED)

    def _wait_for(self, step: Step, began: float) -> Judgement:
        if step is Step.CLEANUP:
            self.run.ask_to_stop()  # even if a signal ends the waiting at once
        with self.interruption.may_interrupt():
            self._work.act(step)
            return self._judged(step, began + self.minutes[step] * 60)

    def _judge_bill(self) -> Judgement:
        """Return the result of the last step, which waits for nothing, so no signal can spoil it."""
        return judge(Step.BILL, self.facts())

    def interrupted(self, step: Step, by: str) -> Judgement:
        """Note that the user ended the wait of a step with this signal. Return the step's judgement."""
        self.is_interrupted = True
        self.interruption.answer()
        if step in ALWAYS:
            return Judgement(verdict=Verdict.FAILED, text=f"interrupted by {by} before it was done")
        return Judgement(verdict=Verdict.INTERRUPTED, text=f"by {by}; cleaning up (again: do not wait)")

    def _keep(self, step: Step, judgement: Judgement, seconds: float) -> None:
        self.results.append(Result(step=step, judgement=judgement, seconds=round(seconds, 1)))
        self.say(step, f"{judgement.verdict.value}: {judgement.text}")

    def _judged(self, step: Step, until: float) -> Judgement:
        last_text, said_at = "", 0.0
        while True:
            self.interruption.check()
            self._work.look(step)
            judgement = judge(step, self.facts())
            if judgement.verdict is not Verdict.WAITING:
                return judgement
            if time.monotonic() > until:
                return replace(
                    judgement, verdict=Verdict.FAILED, text=f"not within {self.minutes[step]:g} min: {judgement.text}"
                )
            if judgement.text != last_text or time.monotonic() - said_at > SAY_SECONDS:
                self.say(step, judgement.text)
                last_text, said_at = judgement.text, time.monotonic()
            time.sleep(self.look_seconds)
