"""The interface of a runtime for the conformance suite: start, disturb, repair and observe it.

`inproc`, `local` and `ray` each implement one `Stage`; the cases in test_conformance.py use only this interface.

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
"""Folder of the reward, like a job's folder with a user's reward."""

STEPS = 6
SHAPE = 2
COMMIT_EVERY = 2


def engine_config(runtime: Literal["inproc", "local", "ray"]) -> EngineConfig:
    """Return a config of the real digits model with few slow steps and short leases, so that kills hit work.

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
    """An unreliable transport, and the number of its faults."""

    transport: Transport
    faults: Callable[[], int]


class Stage(Protocol):
    """One run of one runtime; the test takes the trainer's place."""

    config: EngineConfig
    given_up_seconds: float
    """Seconds after which the runtime itself gives up a frozen node, or None if it does not watch nodes."""

    def line(self) -> Transport:
        """Return the runtime's own transport, as the trainer has it."""

    def bad_line(self) -> AbstractContextManager["BadLine"]:
        """Return a transport with late, doubled and reordered messages and broken connections."""

    def start(self, node: str) -> None:
        """Start a spot node with one worker, and do not wait for it."""

    def is_ready(self, node: str) -> bool:
        """Return whether its worker is up."""

    def has_ended(self, node: str) -> bool:
        """Return whether the node has ended by itself."""

    def forget(self, node: str) -> None:
        """End what is left of a node, frozen or not."""

    def kill(self, victim: str) -> None:
        """Send SIGKILL without notice."""

    def freeze(self, victim: str) -> None:
        """Send SIGSTOP."""

    def thaw(self, victim: str) -> None:
        """Send SIGCONT."""

    def notice(self, node: str, seconds: float) -> None:
        """Send the node a preemption notice of the cloud."""

    def send_capacity(self, snapshot: Capacity) -> None:
        """Send the coordinator the launcher's capacity snapshot."""

    def fill_disk(self) -> None:
        """Fill the disk of the coordinator's folder."""

    def free_disk(self) -> None:
        """Free the disk again."""

    def trouble(self) -> str | None:
        """Return the coordinator's reason why the run is paused."""

    def steps(self) -> list[Step]:
        """Return every finished step so far, by time."""

    def journal(self) -> Path:
        """Return the coordinator's folder on disk."""

    def check(self) -> None:
        """Assert the invariants of the coordinator's memory, if the test can reach it."""

    def close(self) -> None:
        """End every process and delete all files."""
