"""Sections of the job file that only the launcher reads: resources, budget, recovery, prices."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic import model_validator as model_check

from engine.events import Market
from engine.strict import Positive, Strict
from launcher.job.values import DurationMs, KeyName, MicroUsd, MicroUsdPerHour, MicroUsdPerPoint, VariableName
from launcher.money import duration


def _kinds_of(value: Any) -> list[str]:
    """Return the nodes that `{H100: 4, A100: 4}`, `[H100:4, A100:4]` or `H100:4,A100:4` names, each as `NAME:COUNT`."""
    if isinstance(value, dict):
        kinds = [f"{name}:{count}" for name, count in value.items()]
    elif isinstance(value, list | tuple):
        kinds = [kind for part in value for kind in _kinds_of(part)]
    else:
        kinds = [kind for kind in re.split(r"[,|\s]+", value) if kind] if isinstance(value, str) else [repr(value)]
    return list(dict.fromkeys(kind if ":" in kind else f"{kind}:1" for kind in kinds))


class NodeResources(Strict):
    """Requirements for the nodes of one role. The fields follow SkyPilot's `resources`."""

    accelerators: str = "L4:1"
    """`NAME:COUNT` of one node; `L4` and `{L4: 1}` are accepted too. On clouds also several to choose from, like
    `[H100:8, A100-80GB:8]`, kept as `H100:8,A100-80GB:8`; without the field, the plan of a run on clouds chooses among
    all (launcher/placement/fleets.py)."""
    infra: str | None = None
    """Cloud, region and zone: `aws`, `aws/us-east-2` or `aws/us-east-2/use2-az3`. None: the cheapest place."""
    instance_type: str | None = None
    """Instance type of the cloud, like `g6.xlarge`. None: any type with the accelerators."""
    use_spot: bool | Literal["auto"] = False
    """True: buy spot capacity. Default: false for the trainer, and true for rollout nodes. A trainer on spot is lost
    now and then; a rollout node that is up then takes its role. With one node only. `auto`, for the trainer alone: on
    spot where a lost trainer can be replaced at any time (`recovery.controller_stays_up`), else on demand, and the plan
    says why."""
    num_nodes: Annotated[int, Field(ge=0, le=64)] = 1
    """Number of nodes. Of the trainer: 1, or up to as many as it has ranks, which `runtime.trainer_ranks` names and the
    nodes share equally. For rollout nodes: the maximum; default 2, or 4 where the plan chooses the GPUs."""
    min_nodes: Annotated[int, Field(ge=0, le=64)] | None = None
    """Minimum number of rollout nodes, bought even if the plan expects no saving. None: the plan decides; a model
    without timings gets all of `num_nodes`."""

    @field_validator("accelerators", mode="before")
    @classmethod
    def _one_way_to_write_it(cls, value: Any) -> Any:
        kinds = _kinds_of(value)
        if not kinds or not all(re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*:[1-9]\d?", kind) for kind in kinds):
            raise ValueError(f"accelerators is {value!r}; write the GPU and how many a node has, like L4:1 or H100:8")
        return ",".join(kinds)

    @field_validator("infra")
    @classmethod
    def _cloud_region_zone(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"(aws|gcp)(/[a-z0-9*-]+){0,2}", value):
            raise ValueError(f"infra is {value!r}; write cloud/region/zone, like aws, aws/us-east-2 or gcp/*")
        return value

    @model_check(mode="after")
    def _no_more_than_there_are(self) -> Self:
        if self.min_nodes is not None and self.min_nodes > self.num_nodes:
            raise ValueError(f"min_nodes is {self.min_nodes}, and num_nodes {self.num_nodes}; use at most as many")
        return self

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the nodes to choose from, each as `NAME:COUNT`."""
        return tuple(self.accelerators.split(","))

    @property
    def is_open(self) -> bool:
        """Return whether the plan of a run on clouds chooses the GPUs: the job names none, or several."""
        is_given = "accelerators" in self.model_fields_set or self.instance_type is not None
        return bool(self.num_nodes) and (not is_given or len(self.kinds) > 1)

    @property
    def accelerator(self) -> str:
        return self.kinds[0].partition(":")[0]

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of one node."""
        return int(self.kinds[0].partition(":")[2])


class Resources(Strict):
    """Nodes of a job. The number of rollout nodes may change during the run."""

    trainer: NodeResources = NodeResources()
    """Nodes of the trainer, on demand unless `use_spot` says otherwise. One, unless `num_nodes` says otherwise; several
    are alike and in one zone."""
    rollout: NodeResources = NodeResources(use_spot=True, num_nodes=2)
    """Nodes of the rollout workers. Default: up to two spot nodes."""
    disk_gb: Annotated[int, Field(ge=1, le=16_000)] | None = None
    """Boot disk of every node on a real cloud, in GB as clouds count them (2**30 bytes). None: from the model, the
    prompts and the trained weights, at least 100. A size that cannot hold the run is refused."""

    @field_validator("rollout", mode="wrap")
    @classmethod
    def _rollout_is_spot_by_default(cls, value: Any, build: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, dict):
            return build(value)
        resources = build({"use_spot": True, "num_nodes": 2} | value)
        resources.model_fields_set.intersection_update(value)  # the defaults of rollout nodes are not given
        return resources

    @field_validator("rollout")
    @classmethod
    def _rollout_is_on_one_market(cls, value: NodeResources) -> NodeResources:
        if value.use_spot == "auto":
            raise ValueError(
                "rollout.use_spot is auto; use true or false, because spot: auto buys rollout nodes on demand where "
                "spot is short"
            )
        return value

    @field_validator("trainer")
    @classmethod
    def _one_trainer_at_least(cls, value: NodeResources) -> NodeResources:
        if not value.num_nodes:
            raise ValueError("trainer.num_nodes is 0; use 1 or more, because nothing else can train")
        return value


class Recovery(Strict):
    """Failover settings of a run on real clouds."""

    trainer_wait: DurationMs = Field(default=600_000, validate_default=False)
    """Time to look for a trainer in the zones of its region, before the run moves to another region or cloud."""
    controller_stays_up: bool = False
    """True: the machine of the controller stays on, so a lost trainer is replaced at any time. Best kept in the user's
    own config file, on a server; `launch --service` says it for one run. On a machine that sleeps, a run whose trainer
    is on spot stands still from a loss until the machine wakes."""
    keep_failed: DurationMs | None = None
    """Time for which a node whose processes failed is kept for a look with `spotrl ssh`, like `30m`; then it ends. It
    costs money and counts against every limit: it ends earlier if a limit needs its money, and at `spotrl down`. One
    node of a run is kept at a time, and its successor is bought meanwhile. A run that fails waits for it. None: no
    node is kept."""
    launches_per_minute: Annotated[int, Field(ge=1, le=600)] = 10
    """Launches per minute, over the whole run. Without the limit, a fault that loses every node at once would buy
    nodes just as fast."""


class AllRuns(Strict):
    """Limits on the sum of all runs of this ledger. Belongs in the user's own config file.

    Nodes of the local infra are not bought, so such a run counts with its paid judges only.
    """

    max_total: MicroUsd | None = None
    """Money spent so far plus money reserved, over all runs together, with the budgets of paid judges."""
    max_hourly: MicroUsdPerHour | None = None
    """Summed price of the nodes of all runs, like `$40/h`. None: no limit."""


class Budget(Strict):
    """Spending limits of the run.

    The budget guard buys nothing that could break a limit; draining starts when a limit is reached.
    """

    max_total: MicroUsd | None = None
    """Maximum cost of the run, like `$40`. None: no limit."""
    max_hourly: MicroUsd | None = None
    """Maximum summed price of the run's nodes in dollars per hour, like `$4`. None: no limit."""
    deadline: DurationMs | None = None
    """Time in which the run should be done, on the run's own clock. Without `max_runtime` the run also ends then."""
    deadline_confidence: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """On clouds: smallest share of replays of the plan that meet `deadline`. With a smaller share, `launch` refuses to
    start. 0: no check."""
    max_runtime: DurationMs | None = None
    """Maximum duration of the run, done or not. A run that misses its `deadline` goes on until then."""

    @model_check(mode="after")
    def _deadline_is_within_max_runtime(self) -> Self:
        problem = runtime_problem(("budget.max_runtime", self.max_runtime), ("budget.deadline", self.deadline))
        if problem is not None:
            raise ValueError(f"{problem}; use a longer max_runtime, or leave out one of the two")
        return self

    @property
    def longest_ms(self) -> int | None:
        """Return the time after which the run ends, done or not, in milliseconds. None: no limit."""
        return self.deadline if self.max_runtime is None else self.max_runtime


class Stop(Strict):
    """Ends of a run that is no longer worth its money. The run ends as at its target, with the status `finished`."""

    usd_per_point: MicroUsdPerPoint | None = None
    """Most dollars for a point, which is +.01 of the smoothed target metric (the mean of the last three evaluations):
    `50` ends a run in which a point costs more than $50. It takes evidence: the last point, and even a favourable
    forecast for the next, cost more at three evaluations in a row, and after at least eight evaluations. Dollars are
    those of nodes. Needs `target`. None: no such end."""


def runtime_problem(max_runtime: tuple[str, int | None], deadline: tuple[str, int | None]) -> str | None:
    """Return the problem of a run that ends before its deadline, in words, or None. A limit is a name and ms."""
    (name, ms), (goal, goal_ms) = max_runtime, deadline
    if ms is None or goal_ms is None or ms >= goal_ms:
        return None
    return f"{name} is {duration(ms)}, less than {goal} {duration(goal_ms)}"


class Notifications(Strict):
    """Messages to a webhook about the run: its start, its target, 50, 80 and 100 % of `budget.max_total`, three
    preemptions within ten minutes, a new trainer, no progress, and its end."""

    webhook: VariableName | None = None
    """Name of the environment variable with the webhook's URL, like `SLACK_WEBHOOK`. Messages are in Slack's format:
    a POST of `{"text": "..."}`. None: no messages."""
    no_progress: DurationMs = Field(default=3_600_000, validate_default=False)
    """Time without a finished iteration that is reported, on the run's clock. A run with long iterations is given at
    least five of them."""


class WandbLogging(Strict):
    """The run's numbers in W&B. Needs the extra `wandb`."""

    project: str = "spotrl"
    """Project in W&B."""
    entity: str | None = None
    """User or team in W&B. None: the default of the key."""
    mode: Literal["online", "offline"] | None = None
    """`offline`: files in the run's folder, which `wandb sync` uploads. None: `online` if the key is set where the
    controller is started, else `offline`."""
    key: KeyName = "WANDB_API_KEY"
    """Name of the environment variable with the key. The key is stored nowhere, and no node gets it."""


class MlflowLogging(Strict):
    """The run's numbers in MLflow. Needs the extra `mlflow`."""

    tracking_uri: str | None = None
    """Address of the tracking server, without a password. None: MLFLOW_TRACKING_URI where the controller is started,
    else a database in the run's folder, which needs the whole package `mlflow`."""
    experiment: str = "spotrl"
    """Experiment in MLflow."""

    @field_validator("tracking_uri")
    @classmethod
    def _without_a_password(cls, value: str | None) -> str | None:
        if value is not None and "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError(
                "tracking_uri holds a user or a password; write the address only, and export "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            )
        return value


class Logging(Strict):
    """Copies of the run's numbers in the tools where a team keeps its runs. The controller sends them; a tool that is
    down, slow or frozen delays nothing."""

    wandb: WandbLogging | None = None
    """W&B: `wandb: {}` is enough. None: nothing is sent."""
    mlflow: MlflowLogging | None = None
    """MLflow: `mlflow: {tracking_uri: http://...}`. None: nothing is sent."""


class PlannedPreemption(Strict):
    """A preemption at a fixed point of a run, so at the same point on every machine."""

    iteration: Positive
    """Finished iterations of the run after which the nodes are taken, all at once, as soon as all of them are ready."""
    slots: Annotated[tuple[str, ...], Field(min_length=1)]
    """Slots whose nodes are taken: `trainer`, `spot-0`, `spot-1` and so on. A node on demand is left alone."""
    notice: bool = False
    """True: the cloud gives notice, `preemptions.notice` ahead."""
    signal: Literal["SIGKILL", "SIGSTOP"] = "SIGKILL"
    """`SIGKILL` closes a node's connections, like a crash. `SIGSTOP` leaves them open, like a lost machine."""


class PreemptionConfig(Strict):
    """Preemptions of spot nodes on the local infra (launcher/provision/local/preemptions.py)."""

    trace: Literal["bamboo-p3", "none"] = "bamboo-p3"
    """A recorded trace. The n-th spot node bought lives as long as the n-th node removed in the trace."""
    notice: DurationMs = Field(default=120_000, validate_default=False)
    """Time between the notice and the preemption, on the run's clock, for preemptions with a notice."""
    at: tuple[PlannedPreemption, ...] = ()
    """Preemptions at fixed points of the run, beside those of the trace."""
    rule: Literal["alternate"] = "alternate"
    """Kinds of preemption take turns: notice + SIGKILL, silent SIGSTOP, silent SIGKILL, notice + SIGSTOP."""


class PriceOverride(Strict):
    """The user's real price for an instance type: for the whole instance, per hour. Replaces the list price."""

    cloud: Literal["aws", "gcp"]
    """Cloud of the instance type."""
    instance_type: str
    """Instance type of the cloud, like `g6.xlarge`."""
    price: MicroUsdPerHour
    """Price of the whole instance, like `$0.70/h`."""
    market: Market = Market.ON_DEMAND
    """Capacity type with this price: `on_demand` or `spot`."""
    region: str | None = None
    """None: in every region."""


class Discount(Strict):
    """A discount on list prices, from a contract that no price list shows."""

    cloud: Literal["aws", "gcp"]
    """Cloud of the discounted list prices."""
    percent: Annotated[float, Field(gt=0.0, lt=100.0)]
    """Discount in percent, to a hundredth of a percent."""
    market: Market = Market.ON_DEMAND
    """Capacity type with the discount: `on_demand` or `spot`."""
    instance_type: str | None = None
    """None: every instance type."""
