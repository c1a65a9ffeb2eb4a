"""A spot node that explores with another noise path, so its results carry no information on the trained seeds.

    python -m tests.benchmarks.other_noise node.json

The control of the exploration benchmark: the same agent and the same work in the same time, without information.
"""

import sys
from typing import Any

from msgspec.structs import replace

import engine.node.agent
from engine.node.agent import Agent
from engine.node_spec import NodeSpec
from engine.protocol.request import Kind, Work
from engine.worker.sampling import ImageSampler

OTHER = 0x5DEECE66D
"""Change of each seed."""


class Control(Agent):
    """An agent whose workers are `run_other_noise`."""

    def _child(self, name: str, *arguments: Any) -> Any:
        ready = super()._child(name, *arguments)
        child, spec_json = self.children[-1], self.spec.model_dump_json()

        def start() -> Any:
            target = (spec_json, child.heartbeat, *arguments, ready)
            process = self.context.Process(target=run_other_noise, args=target)
            process.start()
            return process

        child.start = start
        return ready


def run_other_noise(spec_json: str, *arguments: Any) -> None:
    """Run the shipped worker, but sample candidates with the noise of other seeds."""
    from engine.entrypoints.processes import run_worker

    ImageSampler.sample = _other_noise(ImageSampler.sample)  # type: ignore[method-assign]
    run_worker(NodeSpec.model_validate_json(spec_json), *arguments)


def _other_noise(sample: Any) -> Any:
    def changed(sampler: ImageSampler, work: Work) -> Any:
        if work.attempts[0].request.kind is Kind.EXPLORE:
            attempts = tuple(
                replace(attempt, request=replace(attempt.request, seed=attempt.request.seed ^ OTHER))
                for attempt in work.attempts
            )
            return sample(sampler, replace(work, attempts=attempts))
        return sample(sampler, work)

    return changed


if __name__ == "__main__":
    engine.node.agent.Agent = Control  # type: ignore[misc]
    sys.exit(engine.node.agent.main())
