"""The results of requests without any disturbance: one process, one loop, no queue, no worker class."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.diffusion.sampler import advance, initial, rollout_plan
from engine.diffusion.trajectory import Trajectory
from engine.models.load import load_adapter, trainable
from engine.models.weights import get_weights, set_weights
from engine.protocol.request import RequestId
from engine.rewards.load import load_reward
from tests.conformance.stage import WORKDIR


class Undisturbed:
    """Computes trajectories and rewards of requests, at the batch shape of the fleet."""

    def __init__(self, config: EngineConfig) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.adapter = load_adapter(config.model)
        self.parameters = trainable(self.adapter)
        self.reward = load_reward(config.reward, str(WORKDIR))
        self.plan = rollout_plan(config.sampler, config.seed, 0)
        self._first = get_weights(self.parameters)
        self._weights: dict[int, bytes] = {}
        self._known: dict[tuple[str, int, int], tuple[Trajectory, float]] = {}

    def weights(self, version: int) -> bytes:
        """Return the weights of a version; all versions differ."""
        if version not in self._weights:
            self._weights[version] = self._make_weights(version)
        return self._weights[version]

    def _make_weights(self, version: int) -> bytes:
        set_weights(self.parameters, self._first)
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.mul_(1.0 + version / 64)
        return get_weights(self.parameters)

    def results(self, requests: Sequence[RequestId], version: int) -> dict[RequestId, tuple[Trajectory, float]]:
        """Return trajectory and reward of each request. Results are cached, because noise depends only on the seed."""
        unknown = [request for request in requests if self._key(request, version) not in self._known]
        if unknown:
            set_weights(self.parameters, self.weights(version))
        for at in range(0, len(unknown), self.config.runtime.shape):
            for request, made in self._lease(unknown[at : at + self.config.runtime.shape]).items():
                reward = self.reward(self.adapter.decode(made.x[None]), [request.prompt])[0].reward
                self._known[self._key(request, version)] = (made, reward)
        return {request: self._known[self._key(request, version)] for request in requests}

    def _key(self, request: RequestId, version: int) -> tuple[str, int, int]:
        return request.prompt, request.seed, version

    def _lease(self, requests: Sequence[RequestId]) -> dict[RequestId, Trajectory]:
        filled = [requests[min(i, len(requests) - 1)] for i in range(self.config.runtime.shape)]
        seeds = [request.seed for request in filled]
        conditioning = self.adapter.encode([request.prompt for request in filled])
        x = initial(seeds, self.adapter.latent_shape())
        path, log_probs = [x], []
        for step in range(self.plan.steps):
            x, log_prob = advance(self.adapter, self.plan, conditioning, seeds, x, step)
            if self.plan.stochastic[step]:
                path.append(x)
                log_probs.append(log_prob)
        latents, densities = torch.stack(path, dim=1), torch.stack(log_probs, dim=1)
        return {
            request: Trajectory(
                step=self.plan.steps,
                x=x[i],
                latents=latents[i],
                log_probs=densities[i],
                degrees=torch.ones(self.plan.steps, dtype=torch.uint8),
            )
            for i, request in enumerate(requests)
        }


def equal(mine: Trajectory, other: Trajectory) -> bool:
    """Return whether two trajectories are equal bit for bit."""
    pairs: list[tuple[Tensor, Tensor]] = [
        (mine.x, other.x),
        (mine.latents, other.latents),
        (mine.log_probs, other.log_probs),
        (mine.degrees, other.degrees),
    ]
    return mine.step == other.step and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
