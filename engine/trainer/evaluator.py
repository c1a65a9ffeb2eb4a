"""Evaluate the averaged weights on held-out prompts, with fixed noise and ODE steps.

All workers take part, and the trainer too. An evaluation on the way uses the first part of the prompts. A target counts
as reached only after an evaluation of all prompts.
"""

from collections.abc import Mapping, Sequence

from safetensors.torch import load

from engine.config import DRIFT, EngineConfig
from engine.diffusion.sampler import evaluation_plan
from engine.drift import drift, look_of
from engine.events import Evaluated, Phase, TargetReached
from engine.prompts import PromptSource
from engine.protocol.request import Finished, Kind, RequestId, Stream, Wait, WeightsKey, seed_of
from engine.trainer.checkpoints import Checkpoints
from engine.trainer.coordinator_client import CoordinatorClient
from engine.trainer.ending import Unhealthy
from engine.trainer.evaluation import contact_sheet, held, mean_metrics
from engine.trainer.model import TrainedModel
from engine.trainer.report import Reporter
from engine.trainer.state import TrainerState
from engine.worker.worker import Worker

IMAGES_SHOWN = 24
"""Images of each evaluation kept for the report."""


class Evaluator:
    """Runs evaluations and keeps their metrics in the state."""

    def __init__(
        self,
        config: EngineConfig,
        prompts: PromptSource,
        run: str,
        model: TrainedModel,
        worker: Worker,
        *,
        state: TrainerState,
        coordinator: CoordinatorClient,
        checkpoints: Checkpoints,
        reporter: Reporter,
    ) -> None:
        """`worker`: the trainer's own worker, which serves evaluations too."""
        self._config = config
        self._prompts = prompts
        self._run = run
        self._model = model
        self._worker = worker
        self._state = state
        self._coordinator = coordinator
        self._checkpoints = checkpoints
        self._reporter = reporter

    def evaluate_if_due(self) -> None:
        """Evaluate the current version, unless it was evaluated already or is not due (evaluation.every)."""
        iteration = self._state.iteration
        done = any(evaluated == iteration for evaluated, _ in self._state.evaluations)
        last = iteration == self._config.iterations
        if done or (iteration % self._config.evaluation.every and not last):
            return
        self._evaluate(is_whole=last or iteration == 0)

    def target_held(self) -> bool:
        target = self._config.target
        return target is not None and held([metrics for _, metrics in self._state.evaluations], target)

    def _evaluate(self, *, is_whole: bool) -> None:
        prompts, target = self._prompts.held_out(), self._config.target
        first = None if is_whole else self._config.evaluation.on_the_way
        results, blobs = self._roll_out(prompts[:first], images=IMAGES_SHOWN)
        metrics = self._record(results, blobs)
        if target is not None and target.metric not in metrics:
            reported = sorted(metrics.keys() - {DRIFT})
            raise Unhealthy(f"target.metric is {target.metric!r}, but the reward reports {reported}")
        if len(results) < len(prompts) and self.target_held():
            rest, _ = self._roll_out(prompts[first:], images=0)
            metrics = self._record([*results, *rest], blobs)
        if target is not None and self.target_held():
            value = metrics[target.metric]
            self._reporter.write(
                TargetReached(iteration=self._state.iteration, metric=target.metric, value=value),
            )

    def _record(self, results: Sequence[Finished], blobs: Mapping[str, bytes]) -> dict[str, float]:
        """Compute, store and report the metrics of the current iteration, and return the metrics.

        The metrics replace earlier metrics of the same iteration, which had fewer prompts.
        """
        state = self._state
        metrics = mean_metrics(results)
        sheet = f"evaluation/l{state.lineage:04d}-i{state.iteration:06d}.png"
        shown = [(one.request.prompt, blobs[one.trajectory]) for one in results if one.trajectory is not None]
        with self._worker.usage.measure(Phase.EVALUATION):
            self._checkpoints.put(sheet, contact_sheet(shown))
            metrics |= self._drift([data for _, data in shown])
        state.evaluations = [one for one in state.evaluations if one[0] != state.iteration]
        state.evaluations.append((state.iteration, metrics))
        event = Evaluated(iteration=state.iteration, metrics=metrics, prompts=len(results), pictures=sheet)
        self._reporter.evaluated(event)
        return metrics

    def _roll_out(self, prompts: Sequence[str], *, images: int) -> tuple[list[Finished], dict[str, bytes]]:
        """Return the results in the order of the prompts, and the first `images` images by name."""
        weights = WeightsKey(version=self._state.iteration, average=True)
        requests = [self._request(prompt) for prompt in prompts]
        live, kinds = self._worker.holds, self._worker.kinds
        with self._worker.usage.measure(Phase.EVALUATION):
            digest = self._coordinator.publish(weights, self._model.average_weights())
            plan = evaluation_plan(self._config.sampler, self._config.evaluation.steps)
            shape = self._config.evaluation.shape
            self._coordinator.submit(requests, plan, weights=weights, shape=shape, images=images)
            results: dict[RequestId, Finished] = {}
            blobs: dict[str, bytes] = {}
            with self._model.averaged():
                # Serve evaluations only. A batch begun before a trainer crash needs the live weights, not the averaged
                # weights.
                self._worker.assume(weights, digest)
                self._worker.kinds = (Kind.EVALUATE,)
                while len(results) < len(requests):
                    helped = self._worker.serve_once(wait=False)
                    found = self._coordinator.collect(
                        Kind.EVALUATE, self._state.iteration, len(results), wait=isinstance(helped, Wait)
                    )
                    results |= {result.request: result for result in found.results}
                    blobs |= found.blobs
            self._worker.kinds = kinds
            if live is not None:
                self._worker.assume(*live)
            self._coordinator.withdraw([(Kind.EVALUATE, self._state.iteration)])
        return [results[request] for request in requests], blobs

    def _request(self, prompt: str) -> RequestId:
        return RequestId(
            run=self._run,
            lineage=self._state.lineage,
            batch=self._state.iteration,
            prompt=prompt,
            # The seed does not depend on the run, so all runs are evaluated with the same noise.
            seed=seed_of(0, Stream.EVAL, 0, prompt, 0),
            kind=Kind.EVALUATE,
        )

    def _drift(self, images: Sequence[bytes]) -> dict[str, float]:
        """Return the distance of the images from the base model's images. Empty if the base model's look is unknown.

        images: safetensors bytes of uint8 [C, H, W] or [C, F, H, W], of the same prompts in each evaluation
        """
        if not images:
            return {}
        look = look_of([load(data)["picture"].numpy() for data in images])
        if self._state.iteration == 0:
            self._state.base = look
        return {DRIFT: drift(look, self._state.base)} if self._state.base is not None else {}
