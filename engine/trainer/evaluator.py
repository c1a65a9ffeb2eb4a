"""Evaluate the averaged weights on held-out prompts, with fixed noise and ODE steps.

    begin -> the next batch is rolled out and trained; idle workers serve the evaluation -> finish: judge, report

An evaluation has its own weights, so an evaluation may run beside the next batch (`evaluation.wait: false`). The
trainer helps only at the end. The promise: metrics belong to the version that was evaluated, whichever version is
trained meanwhile. A checkpoint is written only after the open evaluation is finished, so a restarted trainer evaluates
the version again or finds the metrics in the checkpoint.

An evaluation on the way uses the first part of the prompts. A target counts as reached only after an evaluation of all
prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from safetensors.torch import load

from engine.config import DRIFT, EngineConfig
from engine.diffusion.sampler import evaluation_plan
from engine.drift import drift, look_of
from engine.events import Evaluated, Phase, TargetReached
from engine.noise_schedule import ModelSchedule
from engine.prompts import PromptSource
from engine.protocol.request import Finished, Kind, RequestId, Stream, WeightsKey, Work, seed_of
from engine.storage.tensor_files import TensorFile
from engine.trainer.checkpoints import Checkpoints
from engine.trainer.coordinator_client import CoordinatorClient
from engine.trainer.ending import Unhealthy
from engine.trainer.evaluation import contact_sheet, faults, held, mean_metrics
from engine.trainer.model import TrainedModel
from engine.trainer.outbox import Outbox
from engine.trainer.ranks import OtherRanks
from engine.trainer.report import Reporter
from engine.trainer.state import TrainerState
from engine.worker.worker import Worker

IMAGES_SHOWN = 24
"""Images of each evaluation kept for the report."""


@dataclass(kw_only=True)
class OpenEvaluation:
    """An evaluation under way. `file`: the evaluated weights, the average after `iteration`."""

    iteration: int
    weights: WeightsKey
    file: TensorFile
    digest: str
    requests: list[RequestId]
    results: dict[RequestId, Finished] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Images to show, by name."""

    @property
    def is_complete(self) -> bool:
        return len(self.results) == len(self.requests)

    def in_order(self) -> list[Finished]:
        """Return the results in the order of the prompts."""
        return [self.results[request] for request in self.requests]


class Evaluator:
    """Runs evaluations and keeps their metrics in the state."""

    def __init__(
        self,
        config: EngineConfig,
        prompts: PromptSource,
        run: str,
        model: TrainedModel,
        worker: Worker,
        ranks: OtherRanks,
        schedule: ModelSchedule,
        *,
        state: TrainerState,
        coordinator: CoordinatorClient,
        checkpoints: Checkpoints,
        outbox: Outbox,
        reporter: Reporter,
    ) -> None:
        """`worker`, `ranks`: the trainer's own worker and its other ranks, which serve evaluations too.

        `schedule`: the model's noise levels.
        """
        self._config = config
        self._prompts = prompts
        self._run = run
        self._model = model
        self._worker = worker
        self._ranks = ranks
        self._schedule = schedule
        self._state = state
        self._coordinator = coordinator
        self._checkpoints = checkpoints
        self._outbox = outbox
        self._reporter = reporter
        self._open: OpenEvaluation | None = None

    def evaluate_if_due(self) -> None:
        """Evaluate the current version and wait for the result, unless nothing is due (evaluation.every)."""
        self.begin_if_due()
        self.finish()

    def begin_if_due(self) -> None:
        """Submit the evaluation of the current version, unless it was evaluated already or is not due."""
        iteration = self._state.iteration
        done = any(evaluated == iteration for evaluated, _ in self._state.evaluations)
        last = iteration == self._config.iterations
        if done or self._open is not None or (iteration % self._config.evaluation.every and not last):
            return
        first = None if last or iteration == 0 else self._config.evaluation.on_the_way
        weights = WeightsKey(version=iteration, average=True)
        with self._worker.usage.measure(Phase.EVALUATION):
            file = self._model.average_weights("evaluated")
            digest = self._coordinator.publish(weights, file)
            self._open = OpenEvaluation(iteration=iteration, weights=weights, file=file, digest=digest, requests=[])
            self._submit(self._prompts.held_out()[:first], images=IMAGES_SHOWN)

    def finish(self) -> None:
        """Wait for the evaluation under way, if any, and record its metrics. The trainer helps meanwhile."""
        if self._open is None:
            return
        evaluation, prompts, target = self._open, self._prompts.held_out(), self._config.target
        self._complete()
        metrics = self._record(evaluation)
        if fault := faults(evaluation.in_order()):
            text = f"the evaluation of iteration {evaluation.iteration}: {fault}"
            self._reporter.warn(text)
            if target is not None and "reward" not in metrics:
                raise Unhealthy(f"no image was scored in {text}")
        if target is not None and target.metric not in metrics:
            reported = sorted(metrics.keys() - {DRIFT})
            raise Unhealthy(f"target.metric is {target.metric!r}, but the reward reports {reported}")
        if len(evaluation.requests) < len(prompts) and self.target_held():
            self._submit(prompts[len(evaluation.requests) :], images=0)
            self._complete()
            metrics = self._record(evaluation)
        self._open = None
        self._outbox.drop(evaluation.file)
        self._coordinator.withdraw([(Kind.EVALUATE, evaluation.iteration)])
        if target is not None and self.target_held():
            value = metrics[target.metric]
            self._reporter.write(TargetReached(iteration=evaluation.iteration, metric=target.metric, value=value))

    def target_held(self) -> bool:
        target = self._config.target
        return target is not None and held([metrics for _, metrics in self._state.evaluations], target)

    def forget_later(self, batches: int) -> None:
        """Withdraw evaluations of the next `batches` versions. Call at the start of the trainer.

        An earlier trainer may have died after it trained those versions, and this trainer may train other ones.
        """
        iteration = self._state.iteration
        later = range(iteration + 1, iteration + 1 + batches)
        self._coordinator.withdraw([(Kind.EVALUATE, version) for version in later])

    def _record(self, evaluation: OpenEvaluation) -> dict[str, float]:
        """Compute, store and report the metrics of an evaluation, and return the metrics.

        The metrics replace earlier metrics of the same version, which had fewer prompts.
        """
        state, iteration, results = self._state, evaluation.iteration, evaluation.in_order()
        metrics = mean_metrics(results)
        sheet = f"evaluation/l{state.lineage:04d}-i{iteration:06d}.png"
        images = [(result.request.prompt, result.trajectory) for result in results]
        shown = [(prompt, evaluation.blobs[name]) for prompt, name in images if name is not None]
        with self._worker.usage.measure(Phase.EVALUATION):
            self._checkpoints.put(sheet, contact_sheet(shown))
            metrics |= self._drift(iteration, [data for _, data in shown])
        state.evaluations = [entry for entry in state.evaluations if entry[0] != iteration]
        state.evaluations.append((iteration, metrics))
        self._reporter.evaluated(
            Evaluated(iteration=iteration, metrics=metrics, prompts=len(results), pictures=sheet),
        )
        return metrics

    def _submit(self, prompts: Sequence[str], *, images: int) -> None:
        """Add prompts to the evaluation under way. `images`: the number of first results whose images come back."""
        assert self._open is not None
        requests = [self._request(self._open.iteration, prompt) for prompt in prompts]
        plan = evaluation_plan(self._config.sampler, self._config.evaluation.steps, self._schedule)
        shape = self._config.evaluation.shape
        self._coordinator.submit(requests, plan, weights=self._open.weights, shape=shape, images=images)
        self._open.requests += requests

    def _complete(self) -> None:
        """Collect all results of the evaluation under way, and serve its requests meanwhile."""
        evaluation = self._open
        assert evaluation is not None
        live, kinds = self._worker.holds, self._worker.kinds
        with self._worker.usage.measure(Phase.EVALUATION):
            self._collect(evaluation, wait=False)
            if evaluation.is_complete:
                return
            with self._model.exchanged(evaluation.file):
                # Serve evaluations only. Training rollouts need the live weights, not the averaged weights.
                self._worker.assume(evaluation.weights, evaluation.digest)
                self._worker.kinds = (Kind.EVALUATE,)
                with self._ranks.evaluating(evaluation.weights, evaluation.digest):
                    while not evaluation.is_complete:
                        helped = self._worker.serve_once(wait=False)
                        self._collect(evaluation, wait=not isinstance(helped, Work))
            self._worker.kinds = kinds
            if live is not None:
                self._worker.assume(*live)

    def _collect(self, evaluation: OpenEvaluation, *, wait: bool) -> None:
        collected = self._coordinator.collect(Kind.EVALUATE, evaluation.iteration, len(evaluation.results), wait=wait)
        evaluation.results |= {result.request: result for result in collected.results}
        evaluation.blobs |= collected.blobs

    def _request(self, iteration: int, prompt: str) -> RequestId:
        return RequestId(
            run=self._run,
            lineage=self._state.lineage,
            batch=iteration,
            prompt=prompt,
            # The seed does not depend on the run, so all runs are evaluated with the same noise.
            seed=seed_of(0, Stream.EVAL, 0, prompt, 0),
            kind=Kind.EVALUATE,
        )

    def _drift(self, iteration: int, images: Sequence[bytes]) -> dict[str, float]:
        """Return the distance of the images from the base model's images. Empty if the base model's look is unknown.

        images: safetensors bytes of uint8 [C, H, W] or [C, F, H, W], of the same prompts in each evaluation
        """
        if not images:
            return {}
        look = look_of([load(data)["picture"].numpy() for data in images])
        if iteration == 0:
            self._state.base = look
        return {DRIFT: drift(look, self._state.base)} if self._state.base is not None else {}
