"""Define the start instructions of a node, and the tokens of a run's roles.

The module does not import torch, because the launcher writes the instructions.
"""

import hmac
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.clock import Clock, ScaledClock
from engine.config import EngineConfig
from engine.events import Market
from engine.strict import Positive, Strict
from engine.trainer_ranks import NodeOfTrainer, may_lack_ranks, sampling_ranks
from engine.work_clock import NoMeter, ProcessMeter, WorkClock, WorkMeter


class ClockConfig(Strict):
    """The clocks of a run's nodes."""

    origin_ms: int
    factor: Annotated[float, Field(gt=0.0)] = 1.0
    file: str = ""
    """File of the run's clock on the local infra (engine/work_clock.py). Empty: the run's clock is `clock`."""

    def clock(self) -> ScaledClock:
        """Return the engine's own clock, for leases and spans: the wall clock, `factor` times as fast."""
        return ScaledClock(origin_ms=self.origin_ms, factor=self.factor)

    def run_clock(self) -> Clock:
        """Return the clock of events, preemptions and money."""
        return self._work_clock() or self.clock()

    def meter(self) -> WorkMeter:
        """Return a process's report of its work to the run's clock."""
        clock = self._work_clock()
        return NoMeter() if clock is None else ProcessMeter(clock)

    def hold(self) -> None:
        """Hold the run's clock: the engine is finished, and the node's end is no work."""
        if (clock := self._work_clock()) is not None:
            clock.hold()

    def _work_clock(self) -> WorkClock | None:
        return WorkClock(path=Path(self.file), origin_ms=self.origin_ms, factor=self.factor) if self.file else None


EXIT_FINISHED, EXIT_MONEY = 0, 7
"""Exit codes of an agent whose work is done, and of one whose spend deadline has come."""

EXIT_UNFIT = 10
"""Exit code of an agent on a machine that cannot be a node. `exit.json` says why, with a cure (self_check.py)."""

Role = Literal["trainer", "ranks", "rollout", "controller"]
"""Role of a caller of the coordinator. engine/coordinator/rights.py lists the calls allowed to each role."""


def role_token(run_token: str, role: Role) -> str:
    """Return the token of one role of a run. The token reveals neither the run's token nor another role's token."""
    return hmac.new(run_token.encode(), role.encode(), "sha256").hexdigest()


class NodeSpec(Strict):
    """Start instructions of a node: `python -m engine.node.agent FILE` reads the specification from a JSON file.

    The agent takes a lock in `folder` and writes `agent.json` (pid, create_time). After its workers have called in, the
    agent writes `ready.json`. The agent watches for `notice.json` ({"deadline_ms": ...}), appends progress to
    `progress/SOURCE.jsonl` (trainer only) and logs to `logs/`. The agent exits 0 when the engine is finished, and
    writes the outcome to `exit.json` ({"code", "at_ms", "text"}).
    """

    run: str
    node: str
    role: Literal["trainer", "ranks", "rollout"]
    """`trainer`: coordinator and rank 0 of the trainer, with this node's other ranks. `ranks`: only ranks of a trainer
    of several nodes."""
    trainer_nodes: Positive = 1
    """Nodes of the trainer. Each has as many of its ranks."""
    trainer_node: Annotated[int, Field(ge=0)] = 0
    """Number of this node among them. The trainer's first node is 0."""
    ranks_have_room: bool = False
    """True if the GPU of every rank has room to sample, by the forecast of memory (`JobMemory.have_room`). Every node
    of a trainer gets the same value."""
    generation: Annotated[int, Field(ge=0)] = 0
    """Number of this node among the nodes of its slot, which replaced one another."""
    market: Market
    workers: Positive = 1
    folder: str
    """Folder on the node's own disk."""
    store: str
    """Checkpoint store: an obstore URL, file:///... on the local infra."""
    coordinator_host: str = "127.0.0.1"
    coordinator_port: int
    token: str
    """Token of the node. On the trainer's node: the run's token, from which the coordinator derives the token of every
    role. On any other node: the token of the node's role, which allows only the calls of such a node."""
    clock: ClockConfig
    life_hours: float | None = None
    """Mean life that the plan expects of the trainer's node on spot, in hours. None: not known, or on demand."""
    engine: EngineConfig
    weights: str = ""
    """Location of the model's folder in the run's bucket (obstore URL). The node downloads the folder to its own disk.
    Empty: `model.path` is a folder of this node, or the model ships with spotrl."""
    lora: str = ""
    """Location of the files of `model.lora` in the run's bucket, like `weights`. Empty: `model.lora` is a path of this
    node, or the job has none."""
    judges_micro_usd: int | None = None
    """Budget of the run's paid judges in micro-dollars, raised by `spotrl resume`. None: as in `engine.reward`. It is
    no part of `engine`, because a run with more money is the same job, and continues from its checkpoints."""
    workdir: str | None = None
    """Folder of the user's reward module and prompt file."""
    money_deadline_ms: int | None = None
    """Spend deadline (run's clock): the node terminates itself at this moment, even if no controller is left."""
    money_left_ms: int | None = None
    """Spend deadline on a cloud's node, instead of `money_deadline_ms`: milliseconds left from the moment of receipt,
    on the node's own boot clock, which no clock jump moves. `money.json` ({"left_ms": ..., "told": N}) replaces the
    deadline."""
    money_longest_ms: int | None = None
    """Upper bound on every later spend deadline, in milliseconds from the first order on the node's own boot clock. A
    node running alone would have used up the run's money by then. None: the run has no limit."""
    cloud: Literal["local", "aws", "gcp"] = "local"
    """Cloud of the node. On `local`, the node is a process session on a machine shared with other programs."""
    notice_ms: Positive | None = None
    """Notice of a preemption that Google Cloud granted this VM, in milliseconds. None: the cloud's usual notice."""
    digest: str = ""
    """Digest of the node's setup (launcher/provision/sky/bundle.py). An agent with another digest does not start."""

    @model_validator(mode="after")
    def _one_first_node(self) -> Self:
        is_first = self.trainer_node == 0
        if (self.role == "ranks") == is_first or self.trainer_node >= self.trainer_nodes:
            raise ValueError(
                f"a node of the role {self.role} is number {self.trainer_node} of {self.trainer_nodes} trainer nodes; "
                "only nodes of the role ranks have a number above 0, and it is below the number of nodes"
            )
        return self

    @property
    def in_trainer(self) -> NodeOfTrainer:
        """Return the place of this node in the trainer."""
        return NodeOfTrainer(number=self.trainer_node, nodes=self.trainer_nodes)

    @property
    def may_lack_ranks(self) -> bool:
        """Return True if the trainer may train without one of its nodes (`RuntimeConfig.trainer_nodes`)."""
        return may_lack_ranks(self.engine)

    @property
    def sampling_ranks(self) -> int:
        """Return the ranks of the trainer that sample, from rank 0 on."""
        return sampling_ranks(self.engine, have_room=self.ranks_have_room)

    @property
    def own_token(self) -> str:
        """Return the token with which this node's processes call the coordinator."""
        return role_token(self.token, "trainer") if self.role == "trainer" else self.token

    @property
    def rollout_token(self) -> str:
        """Return the rollout role's token. Every node of the run has or can derive the token."""
        return role_token(self.token, "rollout") if self.role == "trainer" else self.token
