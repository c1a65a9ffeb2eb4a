"""What a runtime must be able to do for the conformance suite: be started, hurt, healed and looked at.

`inproc`, `local` and `ray` each bring one `Stage`; the cases in test_conformance.py know nothing else of them.

A victim is named like this: `spot-3` the whole node, `spot-3/agent` its agent alone, `spot-3/worker-0` one worker
process, `coordinator` the coordinator's process. What is killed comes back if its runtime brings it back (a worker
by its agent, the coordinator by its own), and a whole node never does.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from engine.config import EngineConfig, RewardConfig, RuntimeConfig, SamplerConfig
from engine.events import Capacity
from engine.worker.transport import Transport

WORKDIR = Path(__file__).parent
"""Holds the reward, as a job's folder holds the user's own."""

STEPS = 6
SHAPE = 2
COMMIT_EVERY = 2


def engine_config(runtime: Literal["inproc", "local", "ray"]) -> EngineConfig:
    """The real digits model, few steps, paced so that there is a middle to hit, and promises that end soon.

    Threads of one process need no import and no connection, so `inproc` is faster by a factor of two.
    """
    pace = 0.5 if runtime == "inproc" else 1.0
    return EngineConfig(
        sampler=SamplerConfig(steps=STEPS),
        reward=RewardConfig(name="brightness:brightness"),
        runtime=RuntimeConfig(
            name=runtime,
            shape=SHAPE,
            lease_seconds=pace,
            first_lease_seconds=2 * pace,
            heartbeat_seconds=pace / 4,
            commit_every=COMMIT_EVERY,
            step_seconds=0.06 * pace,
            trace_steps=True,
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A denoising step that was finished: `step` of them are done."""

    at_ns: int
    node: str
    lease: int
    step: int
    batch: int
    seeds: tuple[int, ...]


class BadLine(NamedTuple):
    """A transport that does what transports do at their worst, and how often it did."""

    transport: Transport
    faults: Callable[[], int]


class Stage(Protocol):
    """One run of one runtime, without a trainer: the test has its place."""

    config: EngineConfig
    given_up_seconds: float
    """A node that stands still for so long is given up by the runtime itself, if that has an opinion of nodes."""

    def line(self) -> Transport:
        """The runtime's own transport, as the trainer would have it."""

    def bad_line(self) -> AbstractContextManager["BadLine"]:
        """As `line`, but messages are late, doubled, reordered, and what carries them breaks."""

    def start(self, node: str) -> None:
        """Start a spot node with one worker, and do not wait for it."""

    def is_ready(self, node: str) -> bool:
        """Whether its worker is up."""

    def has_ended(self, node: str) -> bool:
        """Whether it has ended by itself."""

    def forget(self, node: str) -> None:
        """End what is left of a node, frozen or not."""

    def kill(self, victim: str) -> None:
        """SIGKILL, without a word to anyone."""

    def freeze(self, victim: str) -> None:
        """SIGSTOP."""

    def thaw(self, victim: str) -> None:
        """SIGCONT."""

    def notice(self, node: str, seconds: float) -> None:
        """The cloud tells the node itself that it will be gone."""

    def tell(self, snapshot: Capacity) -> None:
        """The launcher's view of the nodes."""

    def fill_disk(self) -> None:
        """Leave no room under the coordinator's folder."""

    def free_disk(self) -> None:
        """Give it back."""

    def trouble(self) -> str | None:
        """Why the run stands still, in the coordinator's words."""

    def steps(self) -> list[Step]:
        """Every step that was finished so far, by time."""

    def journal(self) -> Path:
        """The coordinator's folder on disk."""

    def check(self) -> None:
        """AssertionError if the coordinator's memory contradicts itself, where a test can reach it."""

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
