"""Types of the JSON objects that commands print with `--json`, where no dataclass has exactly the printed keys.

The JSON schemas are generated from these types (launcher/schemas/documents.py). A command may print a new key at any
time: add the key here too. A key that is renamed, removed or gets another meaning needs a new version of the schema.

Money is in integer micro-dollars, durations in integer milliseconds, unless the key names another unit.
"""

from typing import Any, Literal

from typing_extensions import TypedDict

from launcher.cleanup.reaping import UncheckedRegion
from launcher.ledger.left_in_buckets import LeftInBucket
from launcher.market.offers import Table
from launcher.placement.front import ParetoFront
from launcher.report.exploration import Exploration
from launcher.report.values import Guard, Moment
from launcher.runs.event_lines import EventLine


class ErrorOutput(TypedDict):
    """Output of every command that fails with `--json`. The same text is on stderr."""

    error: str
    """The problem and the remedy, as a sentence."""
    exit_code: int


class SelftestStep(TypedDict):
    step: str
    purpose: str


class SelftestPlan(TypedDict):
    """Output of `spotrl selftest --dry-run --json`. Nothing was started."""

    run: str
    cloud: str
    started: Literal[False]
    gpu: str
    """GPU of both nodes."""
    max_total_micro_usd: int
    on_demand_micro_usd_per_hour: int
    """Lowest price of an on-demand node with this GPU."""
    spot_micro_usd_per_hour: int
    steps: list[SelftestStep]


# --- runs --------------------------------------------------------------------------------------------


class StatusEvents(TypedDict):
    events: list[EventLine]
    """The newest events of the run."""


class LogLine(TypedDict):
    """One line of a log of `spotrl logs RUN --json`."""

    file: str
    line: str


class PlanRates(TypedDict):
    expected_micro_usd_per_hour: int
    maximum_micro_usd_per_hour: int
    """Rate if every node were bought on demand."""


class CloudPlanBound(TypedDict):
    bound_micro_usd: int | None
    """Upper bound on the cost of the run, with the spend deadlines of its nodes. None: no limit."""
    fleets: ParetoFront | None
    """The fleets that the plan was chosen from. None: the job names its nodes."""


class SimulatedPlan(TypedDict):
    prices: str
    """Dates of the prices, as text."""
    fleets: ParetoFront | None
    """The fleets that the plan was chosen from. None: the job names its nodes."""


class FactorsCost(TypedDict):
    micro_usd: float
    """Product of the factors."""


class GpuMemoryCounts(TypedDict):
    count: int
    """Rows of a training pass, or images of a rollout pass: as asked, or as many as fit."""
    busy: int
    """Bytes of a pass beside the parts."""
    free: int
    """Bytes that stay free at the largest moment: during a pass, or while the model is loaded."""


class TrainerRanksCounts(TypedDict):
    waiting: int
    """Ranks that wait while the trainer has no complete group."""
    idle: int
    """GPUs that are paid for and never used."""


class SpotPaysVerdict(TypedDict):
    costs_more: bool
    pays_below: float | None
    pays: bool
    statement: str
    """The verdict as a sentence."""


class DryRun(TypedDict):
    """Output of `spotrl launch --dry-run --json`. `plan`: the plan of a local run, or of a run on clouds."""

    name: str
    started: Literal[False]
    plan: Any
    warnings: list[str]
    """What keeps it from being bought, and what the job's checks warn of; each with its remedy."""


class LaunchFacts(TypedDict):
    started: Literal[True]
    exit_code: int
    still_running: list[int]
    """Process ids of the run that are still alive."""
    plan: Any
    """The plan of the run, as of a local run."""


class Down(TypedDict):
    """Output of `spotrl down --json`."""

    run: str
    left: list[str]
    """Nodes and resources that were still there at the timeout."""


class Resumed(TypedDict):
    """Output of `spotrl resume --json`."""

    run: str
    controller: int
    """Process id of the new controller."""


class Removed(TypedDict):
    """Output of `spotrl rm --json`."""

    run: str
    folder: str
    bytes: int
    buckets: list[str]
    """Folders of the run in buckets. They are never deleted."""
    was_removed: bool
    """True if the run was removed before."""
    spent_micro_usd: int
    left_in_buckets: list[LeftInBucket]
    """Sizes and prices of the same folders, as counted now, or earlier if a bucket does not answer."""


class ShippedOutput(TypedDict):
    sink: Literal["wandb", "mlflow"]
    sent: int
    """Records that the sink has; with `is_offline`, that files on this machine have."""
    known: int
    """Records of the run in the ledger."""
    is_whole: bool
    where: str
    """Place of the run in the sink, or of the files; empty: unknown."""
    problem: str
    """Why the sink lacks records; empty: no reason."""
    is_offline: bool
    """True if the sink was not asked."""


class Synced(TypedDict):
    """Output of `spotrl sync --json`."""

    run: str
    sinks: list[ShippedOutput]


class PulledFileOutput(TypedDict):
    path: str
    sha256: str


class Pulled(TypedDict):
    """Output of `spotrl pull --json`."""

    run: str
    checkpoint: str
    iteration: int
    files: list[PulledFileOutput]
    diffusers: str | None
    """Folder with weights for diffusers; None if the model has none."""
    card: str
    """Path of the model card."""
    metrics: list[str]
    """Paths of the copied metrics files."""


class CheckedJobName(TypedDict):
    name: str
    """Name of the job."""


class SampledPicture(TypedDict):
    prompt: str
    seed: int
    file: str


class Sampled(TypedDict):
    """Output of `spotrl sample --json`. `checkpoint` and `iteration` are null with `--base`."""

    run: str
    checkpoint: str | None
    iteration: int | None
    steps: int
    pictures: list[SampledPicture]


class LocalNode(TypedDict):
    """Output of `spotrl ssh --json` for a node of the local infra."""

    node: str
    folder: str


class Login(TypedDict):
    """Output of `spotrl ssh --json` for a node on a cloud."""

    node: str
    host: str
    user: str
    port: int | None
    key: str
    """Path of the private key."""
    ssh: list[str]
    """The ssh command line."""


class RemoteCommand(TypedDict):
    """Output of `spotrl ssh --json` with a command."""

    node: str
    command: list[str]
    exit_code: int
    stdout: str
    stderr: str


class TraceOutput(TypedDict):
    """Output of `spotrl trace --json`: Trace Event Format, for ui.perfetto.dev. Google's format defines the events."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: Literal["ms"]
    otherData: dict[str, Any]


# --- result.json -------------------------------------------------------------------------------------


class ResultTarget(TypedDict):
    """The target, and its cost. `iteration`, `hours` and `micro_usd` are null if the target was not reached."""

    metric: str
    value: float | None
    reached: bool
    iteration: int | None
    hours: float | None
    micro_usd: int | None
    best: Moment | None


class ExactMatch(TypedDict):
    """Share of held-out prompts read exactly, in the first and the newest evaluation; null without an evaluation."""

    before: float | None
    after: float | None
    prompts_before: int | None
    prompts_after: int | None


class ResultPreemption(TypedDict):
    node: str
    role: str
    """`trainer` or `rollout`: what the node did when it was preempted."""
    zone: str
    signal: str | None
    notice: bool
    lost_steps: int
    recovered_by: str | None
    """`a new node`, or `a promotion` of a node that was up to the trainer; null if nothing took its place."""
    replaced_after_s: float | None
    """Seconds on the run's clock; null if the node was not replaced."""
    replaced_after_wall_s: float | None
    micro_usd: int


class ResultMoney(TypedDict):
    """Cost of the run in micro-dollars, and five splits of the same total."""

    total: int
    by_phase: dict[str, int]
    by_node: dict[str, int]
    by_market: dict[str, int]
    by_role: dict[str, int]
    by_place: dict[str, int]
    judges: int
    """Cost of paid judges, which is not in `total`."""


class Leftovers(TypedDict):
    processes: list[int]
    """Ids of the run's processes that are alive after the run's end."""


class Result(TypedDict):
    """The file written by `spotrl launch --result FILE` at the end of a run, also of a failed run."""

    schema_version: Literal[1]
    target: ResultTarget
    exact_match: ExactMatch
    drift: float | None
    guards: list[Guard]
    exploration: Exploration | None
    preemptions: list[ResultPreemption]
    micro_usd: ResultMoney
    clouds: dict[str, int]
    """Micro-dollars by cloud."""
    sums_equal: bool
    """True if every split of the cost has the same sum."""
    money_basis: str
    leftovers: Leftovers
    seed: int
    iterations: int
    wall_seconds: float
    clock_factor: float


# --- jobs and checks ---------------------------------------------------------------------------------


class FieldOrigin(TypedDict):
    value: Any
    origin: str
    """Source of the value: a flag, a variable, a file and line, or `default`."""


class ConfigShow(TypedDict):
    """Output of `spotrl config show --json`."""

    home: str
    user_config: str
    fields: dict[str, FieldOrigin]
    """Every field by its dotted name."""


class Initialised(TypedDict):
    """Output of `spotrl init --json`."""

    file: str
    beside: list[str]
    """Further files written beside the job file."""


class CheckLine(TypedDict):
    what: str
    verdict: Literal["OK", "WARN", "FAIL"]
    found: str
    remedy: str
    code: int
    """Exit code of the command if this check failed."""


class Checks(TypedDict):
    """Output of `spotrl check --json` and `spotrl doctor --json`."""

    exit_code: int
    checks: list[CheckLine]


# --- cleanup -----------------------------------------------------------------------------------------


class Cleanup(TypedDict):
    """Output of `spotrl reap --json` and `spotrl panic --json`.

    An entry of `found`, `kept` and `of_others` is an instance (`kind: machine`, with `age_ms` and
    `micro_usd_per_hour`) or another cloud resource. The keys of a resource depend on its kind.
    """

    found: list[dict[str, Any]]
    kept: list[dict[str, Any]]
    of_others: list[dict[str, Any]]
    notes: list[str]
    accounts: dict[str, dict[str, Any]]
    """The caller at each cloud."""
    dry_run: bool
    ended: list[str]
    left: list[str]
    """Resources that may still cost money, and steps that failed."""
    unasked: list[UncheckedRegion]
    troubles: list[str]
    exit_code: int


# --- catalog and prices ------------------------------------------------------------------------------


class OfferAge(TypedDict):
    age: str
    """Age class of the price: `fresh`, `old` or another word of the catalog."""


class CatalogShow(TypedDict):
    """Output of `spotrl catalog show --json`."""

    place: str
    tables: dict[str, Table]
    offers: list[Any]


class CatalogRefresh(TypedDict):
    """Output of `spotrl catalog refresh --json`."""

    folder: str
    written: list[str]
    changes: list[Any]
    left_out: list[str]
    """Instance types left out because their GPUs are not known."""
    failures: list[str]


class CatalogValidate(TypedDict):
    """Output of `spotrl catalog validate --json`."""

    place: str
    rows: int
    quality: dict[str, int]
    """Number of rows by quality."""
    wrong: list[str]


class CatalogDiff(TypedDict):
    """Output of `spotrl catalog diff --json`."""

    old: str
    new: str
    changes: list[Any]


class Price(TypedDict):
    """A price of an instance type. Times are ISO 8601, UTC."""

    cloud: str
    region: str
    zone: str
    zone_id: str
    instance_type: str
    accelerator: str
    """Empty if the GPUs of the instance type are not known."""
    gpus: int
    market: Literal["spot", "on_demand"]
    usd_per_hour: str
    """Exact price, like `$0.8048`."""
    micro_usd_per_hour: int
    source: str
    source_id: str
    effective: str
    last_seen: str
    age_seconds: float


class PriceChange(Price):
    before: str | None
    """Former price, like `$0.8048`; null for a new price."""


class PricesShow(TypedDict):
    """Output of `spotrl prices show --json`."""

    at: str
    prices: list[Price]


class PricesHistory(TypedDict):
    """Output of `spotrl prices history --json`."""

    place: str
    prices: list[Price]


class PriceReason(TypedDict):
    reason: str
    """Reason of the refusal."""


class PriceAnswer(TypedDict):
    """The answer of one source. `prices` and `new` are numbers of prices."""

    source: str
    cloud: str
    prices: int
    new: int
    estimates: int
    refused: list[Any]
    failures: list[str]
    notes: list[str]


class PricesRefresh(TypedDict):
    """Output of `spotrl prices refresh --json`."""

    exit_code: int
    sources: list[PriceAnswer]


class PricesWatch(TypedDict):
    """One line of `spotrl prices watch --json`: one fetch."""

    at: str
    exit_code: int
    sources: list[PriceAnswer]
    changed: list[PriceChange]
