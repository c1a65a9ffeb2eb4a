"""The job file: what to train, on which GPUs, within which budget.

The promise: a job that loads can be planned and sent to every node unchanged.
"""

from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic import model_validator as model_check

from engine.config import EngineConfig
from launcher.job.agreement import CHECKS, why_never_on_spot
from launcher.job.bucket_names import SCHEMES, problem_with_store
from launcher.job.company import Identity, Named, Network, named_in
from launcher.job.sections import (
    AllRuns,
    Budget,
    Discount,
    Logging,
    Notifications,
    PreemptionConfig,
    PriceOverride,
    Recovery,
    Resources,
    Stop,
)
from launcher.job.values import Cidr, Infra, RunName, VariableNames
from launcher.market.offers import CLOUDS

SHOWN_CHARACTERS = 80
"""Most characters of a wrong address in a message."""

PROMPTS = ("digits", "shapes")
"""Prompt sets that spotrl generates; any other name is a file."""

CLOCK_FACTOR = 60.0
"""`clock_factor: auto`: an hour of prices and preemptions is a minute of work on the reference machine."""


ASLEEP = "nobody would replace it while this machine sleeps"


class Job(EngineConfig):
    """A job file: the engine's configuration, and the nodes and money for the run."""

    name: RunName = "run"
    """Name of the run. The names of all its nodes and cloud resources contain the run's name."""
    infra: Infra = "local"
    """`local`: nodes are process groups of this machine, priced from the catalog. `aws`, `gcp` or `aws,gcp`: the
    clouds to buy from."""
    clock_factor: Literal["auto"] | Annotated[float, Field(gt=0.0, le=3600.0)] = "auto"
    """Local infra: simulated seconds for each second of work, so that hours of a spot market take minutes. The clock
    moves with the work of the run, counted as on a machine with two free cores: hours, dollars and preemptions are the
    same on a slow and on a quick machine. `auto`: 60. The factor never changes during a run."""
    resources: Resources = Resources()
    """Nodes of the trainer and of the rollout workers."""
    spot: Literal["auto", "only", "never"] = "auto"
    """Capacity type of the rollout nodes. `auto`: spot, and on-demand where the plan finds too little spot capacity.
    `only`: never on-demand. `never`: always on-demand. `resources.trainer.use_spot` says
    how the trainer is bought."""
    budget: Budget = Budget()
    """Spending limits of the run. A run on clouds needs `max_total` and `max_hourly`."""
    stop: Stop = Stop()
    """End of a run that has stopped paying: the dollars that +.01 of score may cost."""
    price_overrides: tuple[PriceOverride, ...] = ()
    """The user's real prices, which replace list prices; best kept in the user's own config file."""
    discounts: tuple[Discount, ...] = ()
    """Discounts on list prices; best kept in the user's own config file. A plan marks every line changed by a
    discount."""
    all_runs: AllRuns = AllRuns()
    """Limits on the sum of all runs; kept in the user's own config file."""
    store: dict[str, str] = Field(default_factory=dict)
    """Storage for checkpoints and logs on real clouds: a bucket for each cloud to buy from, like `{aws:
    s3://bucket/folder, gcp: gs://bucket/folder}`. Each run makes its own folder in the bucket."""
    ssh_from: Cidr | None = None
    """Addresses that may reach nodes by SSH, like `203.0.113.7/32`. None: the address of this machine, found by
    asking a service."""
    identity: Identity = Identity()
    """Cloud identities of nodes, made by an administrator (launcher/job/company.py). None: spotrl makes an identity for
    the run."""
    network: Network = Network()
    """Cloud networks of nodes, made by an administrator, and the way into the networks (launcher/job/company.py)."""
    image: dict[str, str] = Field(default_factory=dict)
    """Machine images with the environment installed: by cloud, or by cloud and region, because an AWS image belongs
    to one region (`{aws/us-east-1: ami-..., gcp: projects/P/global/images/I}`). Without an image, nodes start from
    SkyPilot's own image and install the environment."""
    recovery: Recovery = Recovery()
    """Failover settings of a run on real clouds."""
    secrets: VariableNames = ()
    """Names of environment variables that nodes get. The values are never stored."""
    notifications: Notifications = Notifications()
    """Messages to a webhook about the run."""
    logging: Logging = Logging()
    """Copies of the run's numbers in W&B and MLflow."""
    preemptions: PreemptionConfig = Field(
        default=PreemptionConfig(), validation_alias=AliasChoices("preemptions", "reclaims")
    )
    """Simulated preemptions of spot nodes on the local infra."""

    @field_validator("store", mode="before")
    @classmethod
    def _one_bucket_or_one_a_cloud(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {next((cloud for cloud, scheme in SCHEMES.items() if value.startswith(scheme)), "aws"): value}
        if isinstance(value, dict):
            for cloud, url in value.items():
                if cloud in SCHEMES and (problem := problem_with_store(cloud, url)):
                    shown = repr(url) if len(repr(url)) <= SHOWN_CHARACTERS else f"{repr(url)[:SHOWN_CHARACTERS]}..."
                    raise ValueError(f"store of {cloud} is {shown}; {problem}")
            value = {cloud: str(url).rstrip("/") for cloud, url in value.items()}
        return value

    @field_validator("store", "image")
    @classmethod
    def _of_clouds(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        for place in value:
            cloud, _, region = place.partition("/")
            if cloud not in CLOUDS or (region and info.field_name == "store"):
                raise ValueError(f"{info.field_name} has an entry of {place}; use {' and '.join(CLOUDS)}")
        return value

    @field_validator("prompts", "test_prompts")
    @classmethod
    def _beside_the_job_file(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        path = PurePosixPath(value)
        if path.is_absolute() or ".." in path.parts or not value.strip():
            shipped = f"{' or '.join(PROMPTS)}, or " if info.field_name == "prompts" else ""
            raise ValueError(
                f"{info.field_name} is {value!r}; use {shipped}a file in the folder of the job file, "
                "because that folder is what nodes are sent"
            )
        return value

    @model_check(mode="after")
    def _fields_agree(self) -> Self:
        for check in CHECKS:
            check(self)
        return self

    @property
    def rollout_workers(self) -> int:
        """Return the workers of a rollout node: one on each GPU that the scoring pool does not have for itself."""
        return self.resources.rollout.gpus - self.reward.pool_gpus

    @property
    def nodes_max_total(self) -> int | None:
        """Return the part of `budget.max_total` for nodes, in micro-dollars. The judges' budget is set aside."""
        return None if self.budget.max_total is None else self.budget.max_total - self.reward.judge_micro_usd

    @property
    def clouds(self) -> tuple[str, ...]:
        """Return the clouds to buy from, in the order of `infra`; empty on the local infra."""
        return () if self.infra == "local" else tuple(self.infra.split(","))

    @property
    def factor(self) -> float:
        """Return the seconds of the run's clock for each second of work on the reference machine."""
        if self.clouds:
            return 1.0
        return CLOCK_FACTOR if self.clock_factor == "auto" else self.clock_factor

    @property
    def rolls_out_on_spot(self) -> bool:
        """Return whether rollout nodes are requested on spot."""
        return bool(self.resources.rollout.use_spot) and self.spot != "never"

    @property
    def trains_on_spot(self) -> bool:
        """Return whether the trainer is requested on spot."""
        use_spot = self.resources.trainer.use_spot
        return not self.why_trainer_on_demand if use_spot == "auto" else use_spot

    @property
    def why_trainer_on_demand(self) -> str:
        """Return why `resources.trainer.use_spot: auto` takes the trainer on demand. Empty: it does not."""
        if self.resources.trainer.use_spot != "auto":
            return ""
        refusal = why_never_on_spot(self)
        if refusal is not None:
            return refusal[0]
        return ASLEEP if self.clouds and not self.recovery.controller_stays_up else ""

    def named(self, cloud: str, region: str) -> Named:
        """Return the job's identity and network for nodes in a region."""
        return named_in(self.identity, self.network, cloud, region)

    def named_on(self, cloud: str) -> Named:
        """Return the job's identity and network for nodes on a cloud, from the first region that the job names."""
        return self.named(cloud, next(iter(self.network.regions(cloud)), ""))

    def engine(self) -> EngineConfig:
        """Return the configuration sent to every node.

        On clouds, `device: auto` becomes `cuda`: the run pays for the GPU, and a GPU that torch cannot use must be an
        error.
        """
        fields = {name: getattr(self, name) for name in EngineConfig.model_fields}
        if self.clouds and self.runtime.device == "auto":
            fields["runtime"] = self.runtime.model_copy(update={"device": "cuda"})
        return EngineConfig(**fields)
