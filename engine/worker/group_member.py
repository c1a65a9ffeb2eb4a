"""A worker as a member of the node's sequence-parallel group, or a worker that computes alone.

The group's first worker pulls the work, hands the work to the other members, and decides after each step to go on or to
stop. All members compute each forward pass together. The first worker alone records, commits and scores.
"""

import msgspec
import torch
from torch import Tensor

from engine.diffusion.sampler import advance
from engine.models.adapter import DiTAdapter
from engine.models.half import precision
from engine.parallel.communicator import TornGroup
from engine.parallel.elastic import Elastic
from engine.protocol.messages import GroupReport, SharedWork
from engine.protocol.request import Work
from engine.worker.faults import LeaseFaults
from engine.worker.image_inputs import ImageInputs
from engine.worker.loaded_weights import LoadedWeights
from engine.worker.phases import PHASE_OF
from engine.worker.usage import Usage


class GroupMember:
    """A worker's membership in SP groups.

    `elastic`: the state of the membership; None: the worker always computes alone.
    """

    def __init__(
        self, elastic: Elastic | None, adapter: DiTAdapter, weights: LoadedWeights, usage: Usage, faults: LeaseFaults
    ) -> None:
        self._elastic, self._adapter, self._weights, self._usage, self._faults = (
            elastic,
            adapter,
            weights,
            usage,
            faults,
        )

    @property
    def degree(self) -> int:
        """Return the number of workers that share this worker's images."""
        return 1 if self._elastic is None else self._elastic.degree

    @property
    def follows(self) -> bool:
        """Return True if another worker of the group hands out the work."""
        return self._elastic is not None and self._elastic.follows

    def report(self) -> GroupReport | None:
        """Return the group's part of a pull."""
        return None if self._elastic is None else self._elastic.report()

    def handed(self, wait_seconds: float) -> bytes | None:
        """Return the next work of the group's first worker, or None."""
        return None if self._elastic is None else self._elastic.handed(wait_seconds)

    def hand_out(self, work: Work, x: Tensor, step: int) -> None:
        """Start the other workers of the group on the same images, from these latents on."""
        if self._elastic is not None and self._elastic.degree > 1:
            assert self._weights.key is not None
            shared = SharedWork(work=work, digest=self._weights.key[1], step=step)
            self._elastic.hand_out(msgspec.json.encode(shared))
            self._elastic.share(x)

    def finish(self) -> None:
        """Wait for the group's part of a pass. Call before a result is used. Raises TornGroup."""
        if self._elastic is not None:
            self._elastic.finish()

    def agree(self, go_on: bool, device: torch.device) -> bool:
        """Return the `go_on` of the group's first worker: True to compute another step. Raises TornGroup."""
        return go_on if self._elastic is None else self._elastic.agree(go_on, device)

    def leave(self) -> None:
        """Leave the group and compute alone."""
        if self._elastic is not None:
            self._elastic.leave()

    def tore(self) -> None:
        """Break the group for every member, because this worker cannot go on with the forward passes."""
        if self._elastic is not None:
            self._elastic.tore()

    def follow(self, handed: bytes) -> Work:
        """Compute the forward passes of the group's first worker. Returns the work."""
        assert self._elastic is not None
        shared = msgspec.json.decode(handed, type=SharedWork)
        work = shared.work
        try:
            self._weights.require(work.attempts[0].weights, shared.digest)
            inputs = ImageInputs.of(work, self._adapter)
            transformer = self._adapter.transformer
            device = next(transformer.parameters()).device
            x = torch.empty(len(inputs.seeds), *self._adapter.latent_shape(), device=device)
            with self._usage.measure(PHASE_OF[work.attempts[0].request.kind]), precision(transformer, work.dtype):
                self._elastic.share(x)
                for step in range(shared.step, inputs.plan.steps):
                    x, _ = advance(self._adapter, inputs.plan, inputs.conditioning, inputs.seeds, x, step)
                    self._elastic.finish()
                    if step + 1 < inputs.plan.steps and not self._elastic.agree(True, device):
                        break
            self._faults.clear()
        except TornGroup:
            self._elastic.tore()
        except (ValueError, RuntimeError, ArithmeticError, MemoryError) as error:
            self._elastic.tore()
            self._faults.report_follower(work, error)
        return work
