"""The work of a selftest's steps: what each step orders, and what it looks at while it waits."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from launcher.clouds.base import CloudUnreachable
from launcher.clouds.preempting import Order, OrderState, Progress
from launcher.exit_codes import Failure
from launcher.runs.runs import CLOUD_RELEASE_SECONDS, ControllerFailed
from launcher.selftest.acting import Acts
from launcher.selftest.facts import Facts, Preempted
from launcher.selftest.interruption import Interruption
from launcher.selftest.reading import Seen
from launcher.selftest.steps import Step

SAY_SECONDS = 30.0
"""Seconds between two lines about a step that still waits for the same."""


@dataclass(kw_only=True)
class StepWork:
    """Orders to one run, and what was seen of it. Arguments as of `Conductor`."""

    run: Acts
    say: Callable[[Step, str], None]
    observed: Seen
    minutes: Mapping[Step, float]
    interruption: Interruption
    look_seconds: float
    order: Order | None = None
    """The accepted order to preempt."""

    def facts(self) -> Facts:
        return self.run.facts(self.observed)

    def act(self, step: Step) -> None:
        """Order what the step needs. Raises Failure if that is impossible, Interrupted after a signal."""
        match step:
            case Step.PREEMPT:
                self._preempt()
            case Step.CHECKPOINT:
                self._stop(step)
                self.observed.stopped_ms = self.run.now_ms()
                self.observed.stored = self.run.newest_checkpoint()
            case Step.RESUME:
                self.observed.resumed_ms = self.run.now_ms()
                self.run.resume()
            case Step.CLEANUP:
                self._stop(step)
            case _:
                pass

    def _stop(self, step: Step) -> None:
        """Stop the run, and say what still runs as long as something does."""
        running: Sequence[str] = self.facts().still_running
        until = time.monotonic() + min(self.minutes[step] * 60, CLOUD_RELEASE_SECONDS)
        self.say(step, f"stopping the run; still there: {', '.join(running) or 'nothing'}")
        while True:
            try:
                running = self.run.stop(min(SAY_SECONDS, max(0.0, until - time.monotonic())))
                if not running:
                    return
                self.say(step, f"still there: {', '.join(running)}")
            except ControllerFailed as failure:  # a slow machine; what still runs must be ended all the same
                self.say(step, f"{failure}; trying again")
                time.sleep(self.look_seconds)
            self.interruption.check()
            if time.monotonic() > until:
                return

    def look(self, step: Step) -> None:
        """Refresh what the ledger does not hold, and restart a controller that died."""
        if step is Step.PREEMPT and self.order is not None and self.observed.order is not None:
            with suppress(CloudUnreachable):
                self.observed.order = replace(self.observed.order, state=self.run.order_state(self.order))
        if step is Step.CLEANUP:
            with suppress(CloudUnreachable):
                self.observed.in_cloud = self.run.left_in_cloud()
            return
        try:
            if self.run.ensure_controller():
                self.say(step, "the controller had ended; another is started")
        except ControllerFailed as failure:  # the next looks try again, until the step's time is over
            self.say(step, f"{failure}; trying again")

    def _preempt(self) -> None:
        spot = self.facts().spot
        if spot is None:
            raise Failure("no spot node is ready, so none can be preempted")
        at_ms = self.run.now_ms()
        self.order = self.run.preempt(spot.name)
        self.observed.order = Preempted(
            node=spot.name,
            at_ms=at_ms,
            means=self.run.means,
            notice_ms=self.run.notice_ms,
            state=OrderState(progress=Progress.RUNNING),
        )
