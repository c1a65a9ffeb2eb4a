"""Load and check the job file: what to train, on which GPUs, within which budget.

All checks run before any purchase.

flag > `SPOTRL_*` > job file > user's config > default    (`spotrl config show --origin` prints the sources)

The promise: a job that loads can be planned and sent to every node unchanged. A job that does not load raises a single
`JobError`. The error names the place, the value found and the allowed values. Nothing has been started by then, and the
error repeats no secret.
"""

import hashlib
import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic import model_validator as model_check

from engine.config import DRIFT, EngineConfig, Strict
from engine.events import Market
from launcher.exit_codes import ExitCode, Failure
from launcher.job.company import Identity, Named, Network, named_in
from launcher.job.problem import explain
from launcher.job.yaml_file import Field as Place
from launcher.job.yaml_file import YamlFile, YamlFileError, parse_value, read_yaml
from launcher.market.machines import LEAST_CAPABILITY, is_too_old, machines
from launcher.market.offers import CLOUDS
from launcher.money import dollars, exact_dollars, exact_duration, parse_duration, parse_hourly, parse_money

REWARDS = ("ocr", "ocr_strict", "ocr_smooth", "shapes", "shapes_strict")
"""Scorers that ship with spotrl (engine/rewards/). A user's own scorer is written `package.module:function`."""

PROMPTS = ("digits", "shapes")
"""Prompt sets that spotrl generates; any other name is a file."""

METRICS = dict.fromkeys(REWARDS, ("exact_match", "similarity", "reward")) | {
    "ocr_smooth": ("exact_match", "similarity", "smooth", "reward")
}
"""Metrics of each scorer that ships with spotrl. A user's own scorer has `reward` and the metrics that the scorer
returns."""

BOUNDED_METRICS = ("exact_match", "similarity")
"""Metrics that are shares and cannot exceed 1."""

SHORT_FORMS = {
    "model": "name",
    "sampler": "name",
    "algorithm": "name",
    "reward": "name",
    "runtime": "name",
    "exploration": "mode",
}
"""Fields with a short form: `reward: ocr` means `reward: {name: ocr}`."""

FLAGS = {
    "name": "--name",
    "infra": "--infra",
    "iterations": "--iterations",
    "seed": "--seed",
    "runtime": "--runtime",
    "budget.max_total": "--max-total",
    "budget.max_hourly": "--max-hourly",
    "budget.deadline": "--deadline",
    "spot": "--spot",
}
"""Fields with their own flag on `spotrl launch`; `--set FIELD=VALUE` reaches every field."""

ENVIRONMENT_PREFIX = "SPOTRL_"
SLOTS_IN_NAMES = ("-trainer-g", "-spot-")
"""Text after the run's name in the names of nodes: `digits-trainer-g0`, `digits-spot-3-g1`."""

NOT_A_FIELD = (
    "SPOTRL_HOME",
    "SPOTRL_CONFIG",
    "SPOTRL_GCP_BILLING_ENDPOINT",
    "SPOTRL_GCP_COMPUTE_ENDPOINT",
    "SPOTRL_GCP_IAM_ENDPOINT",
    "SPOTRL_GCP_RESOURCE_MANAGER_ENDPOINT",
    "SPOTRL_CHECK_IP_URL",
    "SPOTRL_IMDS_URL",
    "SPOTRL_SHUTDOWN",
    "SPOTRL_ALONE_SECONDS",
)
"""`SPOTRL_*` variables that are no job fields: settings (`launcher/settings.py`) and the endpoints for Google's
prices (launcher/market/sources/gcp.py). Every variable not listed here names a field: SPOTRL_BUDGET__MAX_TOTAL."""


# --- values as written in a job file -----------------------------------------------------------------


def _some_money(micro_usd: int) -> int:
    if micro_usd <= 0:
        raise ValueError(
            f"{dollars(micro_usd)} is not a budget; use more than $0 (in a shell, quote it: '$40', or write 40)"
        )
    return micro_usd


def _some_price(micro_usd: int) -> int:
    if micro_usd <= 0:
        raise ValueError(f"{dollars(micro_usd)}/h is no price; use more than $0/h")
    return micro_usd


def _some_time(ms: int) -> int:
    if ms <= 0:
        raise ValueError("0s is no time at all; use a second or more")
    return ms


MicroUsd = Annotated[
    int,
    BeforeValidator(lambda value: parse_money(str(value))),
    AfterValidator(_some_money),
    PlainSerializer(exact_dollars),
]
"""An amount, written `$40`. Micro-dollars (integer) in the code, and `$40` again in the ledger's copy of the job."""

MicroUsdPerHour = Annotated[
    int,
    BeforeValidator(lambda value: parse_hourly(str(value))),
    AfterValidator(_some_price),
    PlainSerializer(lambda micro_usd: f"{exact_dollars(micro_usd)}/h"),
]
"""A rate, written `$40/h`. Micro-dollars per hour (integer) in the code."""

DurationMs = Annotated[
    int,
    BeforeValidator(lambda value: parse_duration(str(value))),
    AfterValidator(_some_time),
    PlainSerializer(exact_duration),
]
"""A duration, written `12h30m`. Milliseconds (integer) in the code."""


# --- the sections that the engine does not read ------------------------------------------------------


class NodeResources(Strict):
    """Requirements for the nodes of one role. The fields follow SkyPilot's `resources`."""

    accelerators: str = "L4:1"
    """`NAME:COUNT` of one node; `L4` and `{L4: 1}` are accepted too."""
    infra: str | None = None
    """Cloud, region and zone: `aws`, `aws/us-east-2` or `aws/us-east-2/use2-az3`. None: the cheapest place."""
    instance_type: str | None = None
    use_spot: bool = False
    num_nodes: Annotated[int, Field(ge=0, le=64)] = 1
    min_nodes: Annotated[int, Field(ge=0, le=64)] | None = None
    """Minimum number of rollout nodes, bought even if the plan expects no saving. None: the plan decides; a model
    without timings gets all of `num_nodes`."""

    @field_validator("accelerators", mode="before")
    @classmethod
    def _one_way_to_write_it(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) == 1:
            name, count = next(iter(value.items()))
            value = f"{name}:{count}"
        if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*(:[1-9]\d?)?", value):
            raise ValueError(f"accelerators is {value!r}; write the GPU and how many a node has, like L4:1 or H100:8")
        return value if ":" in value else f"{value}:1"

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
    def accelerator(self) -> str:
        return self.accelerators.partition(":")[0]

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of one node."""
        return int(self.accelerators.partition(":")[2])


class Resources(Strict):
    """Nodes of a job.

    The trainer is bought on demand. Rollout nodes may be spot, and the number of rollout nodes may change during the
    run.
    """

    trainer: NodeResources = NodeResources()
    rollout: NodeResources = NodeResources(use_spot=True, num_nodes=2)

    @field_validator("rollout", mode="before")
    @classmethod
    def _rollout_is_spot_unless_said(cls, value: Any) -> Any:
        return {"use_spot": True, "num_nodes": 2} | value if isinstance(value, dict) else value

    @field_validator("trainer")
    @classmethod
    def _one_trainer_that_stays(cls, value: NodeResources) -> NodeResources:
        if value.use_spot:
            raise ValueError(
                "trainer.use_spot is true; use false, because the trainer holds the weights and the work committed "
                "by spot nodes"
            )
        if value.num_nodes != 1:
            raise ValueError(f"trainer.num_nodes is {value.num_nodes}; use 1, more trainer nodes are not built yet")
        return value


class Recovery(Strict):
    """Failover settings of a run on real clouds."""

    trainer_wait: DurationMs = Field(default=600_000, validate_default=False)
    """Time to look for a trainer in the zones of its region, before the run moves to another region or cloud."""
    launches_per_minute: Annotated[int, Field(ge=1, le=600)] = 10
    """Launches per minute, over the whole run. Without the limit, a fault that loses every node at once would buy
    nodes just as fast."""


class AllRuns(Strict):
    """Limits on the sum of all runs of this ledger. Belongs in the user's own config file."""

    max_total: MicroUsd | None = None
    """Money spent so far plus money reserved, over all runs together."""
    max_hourly: MicroUsdPerHour | None = None


class Budget(Strict):
    """Spending limits of the run.

    The budget guard buys nothing that could break a limit; draining starts when a limit is reached.
    """

    max_total: MicroUsd | None = None
    max_hourly: MicroUsd | None = None
    deadline: DurationMs | None = None
    """Maximum duration of the run, on the run's own clock."""


class ReclaimConfig(Strict):
    """Preemptions of spot nodes on the local infra (launcher/provision/local/preemptions.py)."""

    trace: Literal["bamboo-p3", "none"] = "bamboo-p3"
    """A recorded trace. The n-th spot node bought lives as long as the n-th node removed in the trace."""
    notice: DurationMs = Field(default=120_000, validate_default=False)
    """Time between the notice and the preemption, on the run's clock, for preemptions with a notice."""
    rule: Literal["alternate"] = "alternate"
    """Kinds of preemption take turns: notice + SIGKILL, silent SIGSTOP, silent SIGKILL, notice + SIGSTOP."""


class PriceOverride(Strict):
    """The user's real price for an instance type: for the whole instance, per hour. Replaces the list price."""

    cloud: Literal["aws", "gcp"]
    instance_type: str
    price: MicroUsdPerHour
    market: Market = Market.ON_DEMAND
    region: str | None = None
    """None: in every region."""


class Discount(Strict):
    """A discount on list prices, from a contract that no price list shows."""

    cloud: Literal["aws", "gcp"]
    percent: Annotated[float, Field(gt=0.0, lt=100.0)]
    """Discount in percent, to a hundredth of a percent."""
    market: Market = Market.ON_DEMAND
    instance_type: str | None = None
    """None: every instance type."""


FASTEST_CLOCK = 60.0
"""`clock_factor: auto` on a machine at least as fast as the reference machine."""

SLOWEST_CLOCK = 4.0
"""`clock_factor: auto` on the slowest machine: an hour of prices takes a quarter of an hour."""


class Job(EngineConfig):
    """A job file: the engine's configuration, and the nodes and money for the run."""

    name: str = "run"
    """Name of the run. The names of all its nodes and cloud resources contain the run's name."""
    infra: str = "local"
    """`local`: nodes are process groups of this machine, priced from the catalog. `aws`, `gcp` or `aws,gcp`: the
    clouds to buy from."""
    clock_factor: Literal["auto"] | Annotated[float, Field(gt=0.0, le=3600.0)] = "auto"
    """Local infra: simulated seconds per second, so that hours of a spot market take minutes. `auto`: 60 on a
    machine with two free cores, and less on a machine that is slow or busy at launch, so that the run costs about as
    much on every machine. The factor never changes during a run."""
    resources: Resources = Resources()
    spot: Literal["auto", "only", "never"] = "auto"
    """Capacity type of the rollout nodes. `auto`: spot, and on-demand where the plan finds too little spot capacity.
    `only`: never on-demand. `never`: always on-demand. The trainer is always bought on demand."""
    budget: Budget = Budget()
    price_overrides: tuple[PriceOverride, ...] = ()
    discounts: tuple[Discount, ...] = ()
    """Discounts on list prices; best kept in the user's own config file. A plan marks every line changed by a
    discount."""
    all_runs: AllRuns = AllRuns()
    store: dict[str, str] = Field(default_factory=dict)
    """Storage for checkpoints and logs on real clouds: a bucket for each cloud to buy from, like `{aws:
    s3://bucket/folder, gcp: gs://bucket/folder}`. Each run makes its own folder in the bucket."""
    ssh_from: str | None = None
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
    secrets: tuple[str, ...] = ()
    """Names of environment variables that nodes get. The values are never stored."""
    reclaims: ReclaimConfig = ReclaimConfig()

    @field_validator("name")
    @classmethod
    def _name_fits_every_cloud(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", value):
            raise ValueError(
                f"name is {value!r}; use up to 40 of a-z, 0-9 and -, beginning with a letter, "
                "because it becomes part of the names of nodes"
            )
        if found := next((part for part in SLOTS_IN_NAMES if part in f"{value}-"), None):
            raise ValueError(
                f"name is {value!r}; leave {found!r} out, because nodes are called NAME{found}..., and another run's "
                "nodes could be taken for this run's"
            )
        return value

    @field_validator("infra")
    @classmethod
    def _infra_exists(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",")]
        if "/" in value:
            raise ValueError(
                f"infra is {value!r}; name clouds only ({', '.join(CLOUDS)}), and say regions under "
                "resources.trainer.infra and resources.rollout.infra"
            )
        if names != ["local"] and (not set(names) <= set(CLOUDS) or len(set(names)) < len(names)):
            raise ValueError(
                f"infra is {value!r}; use local (this machine, nothing is bought), or clouds: {', '.join(CLOUDS)} or "
                f"{','.join(CLOUDS)}"
            )
        return ",".join(names)

    @field_validator("store", mode="before")
    @classmethod
    def _one_bucket_or_one_a_cloud(cls, value: Any) -> Any:
        schemes = dict(zip(CLOUDS, ("s3://", "gs://"), strict=True))
        if isinstance(value, str):
            value = {next((cloud for cloud, scheme in schemes.items() if value.startswith(scheme)), "aws"): value}
        if isinstance(value, dict):
            for cloud, url in value.items():
                scheme = schemes.get(cloud)
                if scheme is None:
                    continue
                if not isinstance(url, str) or not re.fullmatch(
                    re.escape(scheme) + r"[a-z0-9][a-z0-9._-]+(/[^\s/]+)*/?", url
                ):
                    raise ValueError(
                        f"store of {cloud} is {url!r}; use a bucket of that cloud, like {scheme}my-bucket/spotrl"
                    )
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

    @field_validator("ssh_from")
    @classmethod
    def _addresses(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            network = ipaddress.ip_network(value)
        except ValueError:
            raise ValueError(f"ssh_from is {value!r}; write addresses as CIDR, like 203.0.113.7/32") from None
        if network.prefixlen == 0:
            raise ValueError(f"ssh_from is {value!r}, the whole internet; name your own addresses, like 203.0.113.7/32")
        return str(network)

    @field_validator("secrets")
    @classmethod
    def _names_only(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in value):
            raise ValueError(
                "secrets has an entry that is no name of an environment variable; "
                "write names only, like [HF_TOKEN], and export the values where you run spotrl"
            )
        return value

    @field_validator("prompts", "test_prompts")
    @classmethod
    def _beside_the_job_file(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        path = PurePosixPath(value)
        if path.is_absolute() or ".." in path.parts or not value.strip():
            made = f"{' or '.join(PROMPTS)}, or " if info.field_name == "prompts" else ""
            raise ValueError(
                f"{info.field_name} is {value!r}; use {made}a file in the folder of the job file, "
                "because that folder is what nodes are sent"
            )
        return value

    @model_check(mode="after")
    def _reward_exists(self) -> Self:
        name = self.reward.name
        if ":" in name and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", name):
            raise ValueError(f"reward.name is {name!r}; write your own reward as package.module:function")
        if ":" not in name and name not in REWARDS:
            raise ValueError(f"reward.name is {name!r}; use {', '.join(REWARDS)}, or your own package.module:function")
        return self

    @model_check(mode="after")
    def _target_can_be_reached(self) -> Self:
        if self.target is None:
            return self
        known, metric, value = METRICS.get(self.reward.name), self.target.metric, self.target.value
        if known and metric not in known:
            raise ValueError(f"target.metric is {metric!r}; the reward {self.reward.name} has {', '.join(known)}")
        guarded = (*known, DRIFT) if known else ()
        if guarded and (strange := [guard.metric for guard in self.target.guards if guard.metric not in guarded]):
            raise ValueError(
                f"target.guards has {strange[0]!r}; with the reward {self.reward.name} use {', '.join(guarded)}"
            )
        if metric in BOUNDED_METRICS and not 0 < value <= 1:
            raise ValueError(f"target.value is {value}; {metric} is a share, so use more than 0 and at most 1")
        possible = self.iterations // self.evaluation.every + 1
        if self.target.evaluations > possible:
            raise ValueError(
                f"target.evaluations is {self.target.evaluations}, but {self.iterations} iterations with one "
                f"evaluation every {self.evaluation.every} make {possible}; use fewer, or more iterations"
            )
        return self

    @model_check(mode="after")
    def _resources_are_where_infra_is(self) -> Self:
        for role in ("trainer", "rollout"):
            infra = getattr(self.resources, role).infra
            cloud = (infra or "").partition("/")[0]
            if self.clouds and cloud and cloud not in self.clouds:
                raise ValueError(
                    f"resources.{role}.infra is {infra}, but infra is {self.infra}; add {cloud} to infra, or leave "
                    f"resources.{role}.infra out"
                )
        return self

    @model_check(mode="after")
    def _store_is_where_infra_is(self) -> Self:
        strange = sorted(set(self.store) - set(self.clouds)) if self.clouds else []
        if strange:
            raise ValueError(
                f"store is a bucket of {', '.join(strange)}, which infra does not name ({self.infra}); add it to "
                "infra, or leave it out"
            )
        return self

    @model_check(mode="after")
    def _resources_are_where_the_network_is(self) -> Self:
        for role in ("trainer", "rollout"):
            infra: str | None = getattr(self.resources, role).infra
            cloud, region, *_ = [*(infra or "").split("/"), "", ""]
            if self.clouds and region not in ("", "*") and not self.network.reaches(cloud, region):
                named = ", ".join(self.network.regions(cloud))
                raise ValueError(
                    f"resources.{role}.infra is {infra}, but network.{cloud} is in {named}; name the network in "
                    f"{region} too, or leave resources.{role}.infra out"
                )
        return self

    @model_check(mode="after")
    def _spot_only_has_spot(self) -> Self:
        if self.spot == "only" and not self.resources.rollout.use_spot:
            raise ValueError(
                "spot is only, but resources.rollout.use_spot is false; use spot: never for rollout nodes on demand, "
                "or use_spot: true"
            )
        return self

    @property
    def clouds(self) -> tuple[str, ...]:
        """Return the clouds to buy from, in the order of `infra`; empty on the local infra."""
        return () if self.infra == "local" else tuple(self.infra.split(","))

    @property
    def factor(self) -> float:
        """Return the number of seconds of the run's clock per second. `auto` counts as on the reference machine."""
        if self.clouds:
            return 1.0
        return FASTEST_CLOCK if self.clock_factor == "auto" else self.clock_factor

    @property
    def rolls_out_on_spot(self) -> bool:
        """Return whether rollout nodes are requested on spot."""
        return self.resources.rollout.use_spot and self.spot != "never"

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


# --- loading and checking ----------------------------------------------------------------------------


class JobError(Failure):
    """The job cannot run as written. The message is `place: found; remedy`."""

    exit_code = ExitCode.INVALID_JOB

    def __init__(
        self, found: str, remedy: str, *, file: Path | str = "", line: int | None = None, field: str = ""
    ) -> None:
        self.found, self.remedy, self.file, self.line, self.field = found, remedy, str(file), line, field
        place = f"{self.file}, line {line}: " if line else f"{self.file}: " if self.file else ""
        super().__init__(f"{place}{found}; {remedy}")


def auto_clock_factor(slowness: float) -> float:
    """Return the clock factor for a machine that takes `slowness` times as long as the reference machine."""
    return max(SLOWEST_CLOCK, float(round(FASTEST_CLOCK / max(1.0, slowness))))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedJob:
    """A job that can run: every default filled in, and the origin of each value."""

    job: Job
    origins: Mapping[str, str]
    """Origin of each dotted field: `--max-total`, `SPOTRL_BUDGET__MAX_TOTAL`, `quickstart.yaml, line 12` or
    `default`."""
    digest: str
    """Digest of the checked job. Two files with the same meaning have the same digest."""
    text: str
    path: Path
    workdir: Path
    """Folder of the job file. The user's reward module and prompt files are looked up here."""
    lines: Mapping[Place, int]

    def with_clock_factor(self, factor: float) -> "CheckedJob":
        return replace(self, job=self.job.model_copy(update={"clock_factor": factor}))

    def error(self, field: str, found: str, remedy: str) -> JobError:
        """Return a `JobError` for a fault found after loading, such as a reward that raises.

        The error names the line of the field in the job file.
        """
        line = YamlFile(text=self.text, values={}, lines=self.lines).line(tuple(field.split(".")))
        return JobError(found, remedy, file=self.path, line=line, field=field)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """A source of values. `labels` names the origin of each field; a file has line numbers instead."""

    values: dict[str, Any]
    labels: Mapping[Place, str]
    file: Path | None = None
    yaml: YamlFile | None = None

    def has(self, place: Place) -> bool:
        here: Any = self.values
        for key in place:
            if isinstance(here, dict) and key in here:
                here = here[key]
            elif not (isinstance(here, list) and isinstance(key, int) and key < len(here)):
                return False
        return True

    def line(self, place: Place) -> int | None:
        return self.yaml.line(place) if self.yaml else None

    def origin(self, place: Place) -> str:
        if self.file:
            return f"{self.file.name}, line {self.line(place)}"
        inside = (label for at, label in self.labels.items() if at == place[: len(at)] or place == at[: len(place)])
        return next(inside, "")


def load_job(
    path: Path | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    user_config: Path | None = None,
) -> CheckedJob:
    """Read and check a job. Raises JobError. Without a path: the defaults of every job.

    `overrides` are flags, by dotted field (`budget.max_total`); text values are parsed as YAML. Commands pass `environ`
    and `user_config`. Without both, only the file and the flags count.
    """
    layers = [_read(path) if path else _Layer(values={}, labels={})]
    job_file = layers[0].yaml or YamlFile(text="", values={}, lines={})
    if user_config and user_config.exists():
        layers.append(_read(user_config))
    if environ is not None:
        layers.insert(0, _environment_layer(environ))
    layers.insert(0, _flag_layer(overrides or {}))

    values: dict[str, Any] = {}
    for layer in reversed(layers):
        values = _merged(values, layer.values)
    if "name" not in values and path:
        values["name"] = _name_from(path)
    try:
        # Validate as JSON: strict JSON mode rejects `true` for a 1 and "12" for a 12, but accepts a list for a tuple.
        job = Job.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise _job_error(error, values, layers) from None
    checked = CheckedJob(
        job=job,
        origins=_origins(job, layers),
        digest=_digest(job),
        text=job_file.text,
        path=path or Path("job.yaml"),
        workdir=path.absolute().parent if path else Path.cwd(),
        lines=job_file.lines,
    )
    _check_files(checked)
    _check_gpus(checked)
    return checked


def all_runs_of(user_config: Path, at_launch: AllRuns) -> AllRuns:
    """Return the limits over all runs from the user's current configuration, else the limits at launch.

    Raises JobError if the file cannot be read, or holds anything but amounts.
    """
    values = _read(user_config).values.get("all_runs") if user_config.exists() else None
    if values is None:
        return at_launch
    try:
        today = AllRuns.model_validate_json(json.dumps(values), strict=True)
    except (ValidationError, TypeError):
        raise JobError(
            f"all_runs is {values!r}", "use amounts, such as all_runs: {max_total: 100}", file=user_config
        ) from None
    return at_launch.model_copy(update={name: getattr(today, name) for name in today.model_fields_set})


def _read(path: Path) -> _Layer:
    try:
        return _file_layer(read_yaml(path), path)
    except YamlFileError as error:
        raise JobError(error.found, error.remedy, file=path, line=error.line) from None


def _file_layer(yaml: YamlFile, path: Path) -> _Layer:
    return _Layer(values=_long_forms(yaml.values), labels={}, file=path, yaml=yaml)


def _flag_layer(overrides: Mapping[str, Any]) -> _Layer:
    named = {tuple(field.split(".")): value for field, value in overrides.items() if value is not None}
    labels: dict[Place, str] = {place: FLAGS.get(".".join(place), f"--set {'.'.join(place)}") for place in named}
    for place, value in named.items():
        if isinstance(value, str) and not value.strip():
            raise JobError("it has no value", "give one, or leave it out", file=labels[place], field=".".join(place))
    return _Layer(values=_nested(named, labels), labels=labels)


def _environment_layer(environ: Mapping[str, str]) -> _Layer:
    """Return the fields set by environment variables: SPOTRL_BUDGET__MAX_TOTAL=40 is budget.max_total: 40."""
    named, labels = {}, dict[Place, str]()
    for variable, value in environ.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in NOT_A_FIELD:
            place = tuple(variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            named[place], labels[place] = value, variable
    return _Layer(values=_nested(named, labels), labels=labels)


def _nested(named: Mapping[tuple[str, ...], Any], labels: Mapping[Place, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for place, value in sorted(named.items(), key=lambda item: len(item[0])):
        try:
            value = parse_value(value) if isinstance(value, str) else value
        except YamlFileError as error:
            raise JobError(error.found, error.remedy, file=labels[place], field=".".join(place)) from None
        for key in reversed(place):
            value = {key: value}
        values = _merged(values, _long_forms(value))
    return values


def _long_forms(values: dict[str, Any]) -> dict[str, Any]:
    return {
        section: {SHORT_FORMS[section]: value} if section in SHORT_FORMS and isinstance(value, str) else value
        for section, value in values.items()
    }


def _merged(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Merge two layers field by field; `high` wins.

    An exploration budget of one kind replaces a budget of the other kind entirely.
    """
    result = dict(low)
    for key, value in high.items():
        old = result.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            replaces = {"candidates", "seconds"} & (value.keys() ^ old.keys()) & value.keys()
            result[key] = value if replaces else _merged(old, value)
        else:
            result[key] = value
    return result


def _name_from(path: Path) -> str:
    """Turn a file name into a run name: `My job.yaml` -> my-job."""
    return re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:40].strip("-") or "run"


def _job_error(error: ValidationError, values: dict[str, Any], layers: Sequence[_Layer]) -> JobError:
    problems = explain(error, values, Job)
    first = problems[0]
    layer = next((layer for layer in layers if layer.has(first.place)), None)
    if layer is None:  # a missing field: report the line of its section
        parents = [first.place[:n] for n in range(len(first.place) - 1, 0, -1)]
        found_in = (layer for parent in parents for layer in layers if layer.has(parent))
        layer = next(found_in, layers[-1])
    more = f" ({len(problems) - 1} more after this one)" if len(problems) > 1 else ""
    return JobError(
        first.found,
        first.remedy + more,
        file=layer.file or layer.origin(first.place),
        line=layer.line(first.place),
        field=".".join(map(str, first.place)),
    )


def _origins(job: Job, layers: Sequence[_Layer]) -> dict[str, str]:
    def leaves(value: Any, place: Place) -> list[Place]:
        if isinstance(value, dict) and value:
            return [leaf for key, item in value.items() for leaf in leaves(item, (*place, key))]
        return [place]

    return {
        ".".join(map(str, place)): next((layer.origin(place) for layer in layers if layer.has(place)), "default")
        for place in leaves(job.model_dump(mode="json"), ())
    }


def _digest(job: Job) -> str:
    canonical = json.dumps(job.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def _check_gpus(checked: CheckedJob) -> None:
    """Raise JobError for GPUs too old for the torch build of cloud nodes.

    On the local infra a GPU is only a row of the price tables.
    """
    job = checked.job
    for role, resources in (("trainer", job.resources.trainer), ("rollout", job.resources.rollout)):
        if job.clouds and is_too_old(resources.accelerator):
            usable = sorted({one.accelerator for one in machines(job.clouds) if not is_too_old(one.accelerator)})
            major, minor = LEAST_CAPABILITY
            field = f"resources.{role}.accelerators"
            raise checked.error(
                field,
                f"{field} is {resources.accelerators}, a GPU older than compute capability {major}.{minor}: the torch "
                "of nodes is built for CUDA 13 and has no code for it, nor does SkyPilot's image for it have the "
                "driver (535, and CUDA 13 needs 580)",
                f"use one of {', '.join(usable)}",
            )


def _check_prompt_file(checked: CheckedJob, field: str, name: str, instead: str) -> None:
    """Raise JobError if the file that a field names is missing, is no text, or is empty."""
    file = checked.workdir / name
    if not file.is_file():
        raise checked.error(
            field,
            f"{field} is {name!r}, and there is no such file beside the job file",
            f"write it with one prompt a line, or {instead}",
        )
    try:
        has_prompts = any(line.strip() for line in file.read_text("utf-8").splitlines())
    except (UnicodeDecodeError, OSError) as error:
        raise checked.error(field, f"{name} cannot be read as text ({error})", "save it as UTF-8") from None
    if not has_prompts:
        raise checked.error(field, f"{name} has no prompts", "write one prompt a line")


def _check_files(checked: CheckedJob) -> None:
    """Raise JobError if a file that the job names is missing here, before the first node misses the file."""
    job, folder = checked.job, checked.workdir
    if job.prompts not in PROMPTS:
        _check_prompt_file(checked, "prompts", job.prompts, f"use {' or '.join(PROMPTS)}")
    if job.test_prompts is not None:
        _check_prompt_file(checked, "test_prompts", job.test_prompts, "leave test_prompts out")
    # On clouds the plan reports a missing model folder, and only `launch` needs the folder.
    if job.model.path is not None and not job.clouds and not (folder / job.model.path).is_dir():
        raise checked.error(
            "model.path",
            f"model.path is {job.model.path!r}, and there is no such folder",
            "give the folder of a diffusers model, relative to the job file",
        )
