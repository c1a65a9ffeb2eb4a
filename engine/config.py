"""The engine's half of the job file, and what a node is told when it starts.

Frozen pydantic models, one per room; unknown keys are refused. No torch here: the launcher imports this
module to check a job before anything is bought. Every error names what was found, what would do, and why.
"""

import hmac
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from engine.clock import ScaledClock
from engine.events import Market


class Strict(BaseModel):
    """Base of every configuration: frozen, and a key that nobody reads is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]


SHIPPED = {"digits-ocr": "digits", "shapes": "shapes"}
"""Models whose weights come with spotrl, and the prompts each was made for. They have no unconditional branch."""


class ModelConfig(Strict):
    """Which diffusion transformer, and what of it is trained."""

    # `from` is a word of Python's own, so the field has another name; every file and message says `from`.
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    name: Literal["digits-ocr", "shapes", "qwen-image", "sd3", "flux", "wan"] = "digits-ocr"
    path: str | None = None
    """Folder of a diffusers model (transformer, vae, ...). None: the weights that ship with spotrl."""
    weights: Literal["full", "lora"] = "full"
    """What is trained: every weight of the transformer, or low-rank adapters beside them."""
    lora_rank: Positive = 16
    lora_alpha: Positive = 32
    start: Annotated[str, Field(min_length=1)] | None = Field(default=None, alias="from")
    """Start weights: a run's name, or a folder that `spotrl pull` wrote (with a / in it, relative to the job file).
    Training goes on from its weights, with a new optimizer and a new average. They take the place of the base wherever
    a run is compared with the model before training: the first evaluation, the KL divergence, `sample --base`."""

    @model_validator(mode="after")
    def _weights_exist(self) -> Self:
        if self.path is None and self.name not in SHIPPED:
            raise ValueError(
                f"model.name is {self.name} but model.path is missing; give the folder of its diffusers weights, "
                f"because only {' and '.join(SHIPPED)} ship with spotrl"
            )
        return self


class WindowConfig(Strict):
    """Stochastic steps only inside a short window; the rest are ODE steps, and only the window is trained.

    `random` is Flow-GRPO-Fast, `sliding` is MixGRPO (arXiv 2507.21802): from noise towards the picture as training goes
    on, then from the beginning again. MixGRPO takes 25 iterations per position and stride 1.
    """

    size: Positive = 2
    first: Annotated[int, Field(ge=0)] = 0
    """Earliest step that the window may start at."""
    last: Positive | None = None
    """The window ends before this step; None: before the final step."""
    order: Literal["random", "sliding"] = "random"
    """Which position is next: one drawn from the run's seed, or the one after this."""
    stride: Positive = 1
    """Steps between two positions."""
    iterations_per_position: Positive = 1
    """Training iterations before the window moves."""


class SamplerConfig(Strict):
    """How a rollout denoises. Its signature decides which seed rankings may be compared."""

    name: Literal["flow-sde", "dance-sde", "cps"] = "flow-sde"
    steps: Annotated[int, Field(ge=2)] = 8
    noise_level: Annotated[float, Field(ge=0.0)] = 0.7
    """How much noise a random step adds; 0 makes every step an Euler step. Every sampler has its own scale (research
    notes rl 1.1), so change both together. flow-sde, `a`: 0.7 or 0.8, and 1.2 with Qwen-Image. dance-sde, `eta`: 0.25
    to 0.3; its noise does not fade towards the picture. cps, `eta`: 0.7; at most 1, where all of the noise is new."""
    shift: Annotated[float, Field(gt=0.0)] = 1.0
    guidance: Annotated[float, Field(ge=1.0)] = 1.0
    """Classifier-free guidance; 1 computes no unconditional branch."""
    window: WindowConfig | None = None
    noise: Literal[1] = 1
    """Version of the counter-based noise (engine/rollout/noise.py)."""

    @model_validator(mode="after")
    def _window_fits(self) -> Self:
        if self.window is None:
            return self
        last = self.window.last or self.steps - 1
        if last > self.steps - 1 or self.window.first + self.window.size > last:
            raise ValueError(
                f"sampler.window of {self.window.size} steps does not fit between step {self.window.first} and "
                f"{last}; sampler.steps is {self.steps} and the final step is always an ODE step"
            )
        return self

    @model_validator(mode="after")
    def _cps_draws_anew_at_most_everything(self) -> Self:
        if self.name == "cps" and self.noise_level > 1:
            raise ValueError(
                f"sampler.noise_level is {self.noise_level:g}, but cps draws all of the noise anew at 1; "
                "use 1 or less, 0.7 is a good start"
            )
        return self


class AlgorithmConfig(Strict):
    """GRPO on the denoising steps (arXiv 2505.05470; research notes rl 1.2)."""

    name: Literal["flow-grpo"] = "flow-grpo"
    prompts_per_batch: Positive = 12
    images_per_prompt: int = 4
    """Size of a group: the images whose rewards are compared with one another."""
    updates_per_batch: Positive = 2
    """Optimiser steps per batch; each takes its own share of the prompts."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-4
    clip_range: Annotated[float, Field(gt=0.0)] = 1e-3
    advantage_clip: Annotated[float, Field(gt=0.0)] = 5.0
    gradient_clip: Annotated[float, Field(gt=0.0)] = 1.0
    kl_beta: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the KL divergence from the base model; 0 computes none."""
    kl_form: Literal["flow-grpo", "gaussian"] = "flow-grpo"
    """`gaussian`: the exact KL divergence between the two transitions of a step. `flow-grpo`: the published form, the
    exact one times the length of the step in noise levels. It is 5 to 28 times smaller with 8 to 28 steps."""
    adam_betas: tuple[BelowOne, BelowOne] = (0.9, 0.99)
    """AdamW's decay rates. Flow-GRPO publishes .9 and .999, made for longer runs."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's weight decay. Flow-GRPO publishes 1e-4."""
    std: Literal["group", "batch", "ema"] = "group"
    """What advantages are divided by: the std of the group, of the batch, or of earlier batches."""
    std_correction: Literal[0, 1] = 0
    """A group's variance is a sum over its size (0, as Flow-GRPO) or over one less (1, as DanceGRPO)."""
    ema_decay: BelowOne = 0.7
    """Evaluation uses an average of the weights: this much of the old average is kept each iteration."""
    rows_per_forward: Positive = 168
    """(picture, step) pairs that training takes through the network together (time-step parallelism, TSP)."""
    order: Literal["fixed", "arrival"] = "fixed"
    """`fixed` accumulates gradients by group number, so that a run repeats bit for bit."""

    @field_validator("images_per_prompt")
    @classmethod
    def _a_group_compares(cls, value: int) -> int:
        if value < 2:
            raise ValueError(
                f"images_per_prompt is {value}; use 2 or more, "
                "because an image alone in its group always has advantage 0"
            )
        return value

    @model_validator(mode="after")
    def _updates_have_prompts(self) -> Self:
        if self.prompts_per_batch % self.updates_per_batch:
            raise ValueError(
                f"prompts_per_batch is {self.prompts_per_batch}, which updates_per_batch "
                f"({self.updates_per_batch}) does not divide; every update takes whole prompts"
            )
        return self


class CandidateBudget(Strict):
    """A counted budget: the same seeds are tried whatever the machine does, so runs repeat exactly."""

    candidates: Positive
    """Candidate seeds per batch, shared evenly by its prompts."""
    patience_seconds: Annotated[float, Field(gt=0.0)] = 30.0
    """With no spot node alive for this long (wall time) a batch goes on with what was explored, and so do those after
    it until there is one again."""


class SecondsBudget(Strict):
    """A budget of idle time: explore until the trainer is done, or for so many seconds."""

    seconds: Literal["auto"] | Annotated[float, Field(gt=0.0)] = "auto"
    max_candidates: Positive = 1024


class ProfileConfig(Strict):
    """One way to try candidates. Training data is always made in full, whatever a profile says."""

    name: str = "full"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 is faster, and ranks seeds nearly as well (research notes overlap 1)."""
    shape: Positive = 48
    """Pictures per forward pass of an exploring worker."""
    steps: Annotated[int, Field(ge=2)] | None = None
    """Denoising steps; None: all. With fewer, the picture that the network foresees after them is judged: the same
    noise path for less time, and ranks a little worse (6 of 8: .77 instead of .83, 12 prompts of digits-ocr)."""
    scorer: Literal["reward", "student"] = "reward"
    """`student`: a small model that imitates a built-in reward at a hundredth of its cost, where there is one."""


class ExplorationConfig(Strict):
    """Which seeds are worth training (research notes papers 6.1).

    The gradient of `stale` and `in-path` is that of a selected sample: seeds whose rewards differ most, not all seeds.
    `stale`: spot workers try candidates while the trainer trains, with the weights before. `in-path`: every candidate
    is rolled out with current weights and the best are trained, which everybody waits for. `none`: the first seeds.
    """

    mode: Literal["none", "in-path", "stale"] = "stale"
    budget: CandidateBudget | SecondsBudget = SecondsBudget()
    policy: Literal["uniform", "greedy", "ucb", "bayes"] = "uniform"
    """Which prompt gets the next candidates (engine/exploration/planner.py). The others give more to prompts whose
    rewards differ more, which pays with strict rewards and with `algorithm.std: batch`; with `std: group` every group
    weighs the same, and an even share did better on digits-ocr (2 seeds)."""
    chunk: Positive = 2
    """Candidates that a prompt gets at a time."""
    profiles: Annotated[tuple[ProfileConfig, ...], Field(min_length=1, max_length=6)] = (ProfileConfig(),)
    """With several, a bandit finds out which of them pays most."""
    random_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.125
    """Share of the candidates that were not chosen which is rolled out afresh all the same, in idle time and not to be
    trained: without it nobody knows how well old weights rank the seeds, and exploration never switches itself off."""

    @model_validator(mode="after")
    def _waiting_has_an_end(self) -> Self:
        if self.mode == "in-path" and not isinstance(self.budget, CandidateBudget):
            raise ValueError("mode in-path waits for every candidate, so it needs a budget like {candidates: 144}")
        return self


class RewardConfig(Strict):
    """What is optimised: a scorer of ours by name, or `package.module:function` of the user's own."""

    name: str = "ocr"
    """`ocr` and `ocr_strict` read pictures of at most 48 x 144 pixels as one line of text; in larger ones they find the
    lines first. `ocr_smooth` reads one line only."""
    placed: Literal["with_rollout"] = "with_rollout"


class EvaluationConfig(Strict):
    """Held-out prompts, fixed noise, ODE sampler, EMA weights: the curve that a target is read from."""

    prompts: Positive = 512
    on_the_way: Positive | None = None
    """Prompts of an evaluation on the way, the first of all; None: all. The first and the last evaluation use all, and
    so does one that would reach the target: a share p of n prompts has a standard error of sqrt(p (1 - p) / n)."""
    every: Positive = 3
    steps: Annotated[int, Field(ge=1)] = 8
    shape: Positive = 48
    """Pictures per forward pass."""

    @model_validator(mode="after")
    def _some_of_all(self) -> Self:
        if self.on_the_way is not None and self.on_the_way > self.prompts:
            raise ValueError(
                f"on_the_way is {self.on_the_way}, and prompts {self.prompts}; use at most as many, or leave it out"
            )
        return self


DRIFT = "drift"
"""The metric that every evaluation has of its own: how far its pictures are from the base model's (engine/drift.py)."""


class GuardConfig(Strict):
    """A metric of evaluations that must not pass `max`: `drift`, or one of the reward's."""

    metric: str = DRIFT
    max: float


class TargetConfig(Strict):
    """When the run has what it was started for."""

    metric: str = "exact_match"
    value: float
    evaluations: Positive = 3
    """The smoothed score must hold for this many evaluations in a row."""
    guards: tuple[GuardConfig, ...] = ()
    """The target counts as reached only in evaluations in which every guard holds."""


class CheckpointConfig(Strict):
    every: Positive = 1
    keep: Positive = 3


class RuntimeConfig(Strict):
    """Where workers run, and the promises they renew. Durations are wall seconds."""

    name: Literal["inproc", "local", "ray"] = "local"
    """`local`: processes of the node's agent, over HTTP. `ray`: actors of one Ray cluster. `inproc`: tests only."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What a node computes on. `auto`: GPUs if torch can use any, a worker each while there are as many, the trainer on
    the first of its own; else the CPU. `cuda`: GPUs or nothing, so that none is paid for and left idle; that is what
    `auto` means on clouds."""
    shape: Positive = 12
    """Pictures per forward pass of a training rollout; always this many, padded with copies."""
    lease_seconds: Annotated[float, Field(gt=0.0)] = 2.0
    """Shortest lease; otherwise a lease is four times the slowest step that was seen of its kind of work."""
    first_lease_seconds: Annotated[float, Field(gt=0.0)] = 20.0
    """The lease while no step of its kind was seen yet: compiling and first touches take long."""
    heartbeat_seconds: Annotated[float, Field(gt=0.0)] = 0.5
    """A worker calls in between steps when its last call is this old."""
    commit_every: Literal["auto"] | Positive = "auto"
    """Denoising steps between two commits of a training rollout. auto: sqrt(2 x commit cost x mean time to preemption)
    by what was measured (research notes engine 4), which may mean on notice only."""
    hours_to_preemption: Annotated[float, Field(gt=0.0)] = 1.0
    """Mean life of a spot node (run's clock) that `auto` starts from; what the run itself sees is added to it."""
    step_seconds: Annotated[float, Field(ge=0.0)] = 0.0
    """A denoising step takes at least so long: for drills and benchmarks."""
    sp_degree: Literal["auto"] | Positive = 1
    """Workers of a spot node that share a picture's sequence (Ulysses); the rest of a node works at smaller degrees.
    `auto`: by what waits and what steps were measured to take (engine/parallel/groups.py)."""
    resume: Literal["exact", "close", "restart"] = "close"
    """What becomes of a picture that was interrupted. `exact`: goes on if as many workers share it as before, else it
    begins anew, so that it is bit for bit what it would have been. `close`: goes on whoever shares it, equal to about
    5e-7; the trainer then computes its log-probs again. `restart`: begins anew."""
    sp_timeout_seconds: Annotated[float, Field(gt=0.0)] = 5.0
    """How long a worker waits for a peer of its group that neither answers nor dies."""
    trace_steps: bool = False
    """Every worker writes down the steps that it finishes, with the time: `traces/` in its node's folder."""
    trainer_threads: Annotated[int, Field(ge=0)] = 0
    """torch threads of the trainer on a CPU; 0: one if spot workers explore beside it, else one per core. A run repeats
    bit for bit with the same number."""

    @model_validator(mode="after")
    def _leases_outlive_heartbeats(self) -> Self:
        if self.heartbeat_seconds > self.lease_seconds / 2:
            raise ValueError(
                f"runtime.heartbeat_seconds is {self.heartbeat_seconds:g}, more than half of lease_seconds "
                f"({self.lease_seconds:g}); a worker must call in at least twice per lease: use "
                f"{self.lease_seconds / 4:g}, or a longer lease"
            )
        return self


class EngineConfig(Strict):
    """Everything the engine reads. The launcher builds it from the job file and sends it to every node."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    iterations: Annotated[int, Field(ge=1, le=1_000_000)] = 40
    """The run ends after so many trained batches, target reached or not."""
    model: ModelConfig = ModelConfig()
    sampler: SamplerConfig = SamplerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    exploration: ExplorationConfig = ExplorationConfig()
    reward: RewardConfig = RewardConfig()
    prompts: str = "digits"
    """`digits` or `shapes` (made on the fly), or a text file with one prompt a line."""
    test_prompts: str | None = None
    """A text file of prompts that are evaluated and never trained. None: a random fifth of `prompts` at most."""
    evaluation: EvaluationConfig = EvaluationConfig()
    target: TargetConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _exploration_has_a_choice(self) -> Self:
        budget, algorithm = self.exploration.budget, self.algorithm
        if self.exploration.mode == "none" or not isinstance(budget, CandidateBudget):
            return self
        trained = algorithm.prompts_per_batch * algorithm.images_per_prompt
        if budget.candidates // algorithm.prompts_per_batch <= algorithm.images_per_prompt:
            raise ValueError(
                f"exploration.budget.candidates is {budget.candidates}, but {trained} pictures are trained each batch, "
                f"so there is nothing to choose from; use {2 * trained} or more, or exploration.mode: none"
            )
        return self

    @model_validator(mode="after")
    def _profiles_do_not_outlast_training(self) -> Self:
        for profile in self.exploration.profiles:
            if profile.steps is not None and profile.steps > self.sampler.steps:
                raise ValueError(
                    f"exploration profile {profile.name!r} takes {profile.steps} steps, but sampler.steps is "
                    f"{self.sampler.steps}; a candidate is judged on the way of its rollout: use {self.sampler.steps} "
                    "or fewer, or leave steps out"
                )
        return self

    @model_validator(mode="after")
    def _the_model_reads_the_prompts(self) -> Self:
        made_for = SHIPPED.get(self.model.name)
        if made_for is not None and self.prompts in SHIPPED.values() and self.prompts != made_for:
            raise ValueError(
                f"prompts is {self.prompts}, which {self.model.name} cannot read; use prompts: {made_for}, "
                "or a file with prompts in its words"
            )
        return self

    @model_validator(mode="after")
    def _only_files_are_tested_by_files(self) -> Self:
        if self.test_prompts is not None and self.prompts in SHIPPED.values():
            raise ValueError(
                f"test_prompts is {self.test_prompts!r}, but {self.prompts} has held-out prompts of its own; "
                "leave it out, or give prompts a file as well"
            )
        return self

    @model_validator(mode="after")
    def _there_is_something_to_train(self) -> Self:
        if self.sampler.noise_level == 0:
            raise ValueError(
                "sampler.noise_level is 0, which leaves no random step to train; 0.7 is what Flow-GRPO uses"
            )
        if self.model.name in SHIPPED and self.sampler.guidance != 1.0:
            raise ValueError(
                f"sampler.guidance is {self.sampler.guidance}, but {self.model.name} was made without an "
                "unconditional branch; use 1"
            )
        return self


class ClockConfig(Strict):
    origin_ms: int
    factor: Annotated[float, Field(gt=0.0)] = 1.0

    def clock(self) -> ScaledClock:
        return ScaledClock(origin_ms=self.origin_ms, factor=self.factor)


Role = Literal["trainer", "rollout", "controller"]
"""A caller of the coordinator; engine/runtime/rights.py has what each may do."""


def role_token(run_token: str, role: Role) -> str:
    """Return the token of one role of a run. Nobody can tell the run's token, or another role's, from it."""
    return hmac.new(run_token.encode(), role.encode(), "sha256").hexdigest()


class NodeSpec(Strict):
    """What a node is told when it starts: `python -m engine.runtime.agent FILE` reads it from a JSON file.

    The agent takes a lock in `folder`, writes `agent.json` (pid, create_time), then `ready.json` once its
    workers called in; it watches for `notice.json` ({"deadline_ms": ...}), appends progress to
    `progress/SOURCE.jsonl` (trainer only) and logs to `logs/`. It exits 0 when the engine is finished, and says how it
    ended in `exit.json` ({"code", "at_ms", "text"}).
    """

    run: str
    node: str
    role: Literal["trainer", "rollout"]
    market: Market
    workers: Positive = 1
    folder: str
    """This node's own disk."""
    store: str
    """Checkpoint store: an obstore URL, file:///... on the local infra."""
    coordinator_host: str = "127.0.0.1"
    coordinator_port: int
    token: str
    """On a trainer's node the run's own, from which its coordinator derives that of every role. On a rollout node the
    token of that role, which opens no more than a spot node needs."""
    clock: ClockConfig
    engine: EngineConfig
    weights: str = ""
    """Where the model's folder is in the run's bucket (obstore URL): the node brings it to its own disk. Empty:
    `model.path` is a folder of this node, or the model ships with spotrl."""
    workdir: str | None = None
    """Where the user's reward module and prompt file are found."""
    money_deadline_ms: int | None = None
    """The node ends itself at this moment (run's clock), whoever is left to ask it to."""
    money_left_ms: int | None = None
    """On a cloud's machine instead of `money_deadline_ms`: so long from when the node is told, on its own boot clock,
    which no clock jump moves. `money.json` ({"left_ms": ..., "told": N}) says it anew."""
    money_longest_ms: int | None = None
    """No later order lets the node live longer than this, from when it was first told, on its own boot clock: running
    alone it would have used up the run's money by then. None: the run has no limit."""
    cloud: Literal["local", "aws", "gcp"] = "local"
    """Whose machine the node is. On `local` it is a process session of a machine that others use too."""
    digest: str = ""
    """Of what was set up on the machine (launcher/cluster/bundle.py). An agent that finds another one refuses."""

    @property
    def own_token(self) -> str:
        """The token with which this node's processes call the coordinator."""
        return role_token(self.token, "trainer") if self.role == "trainer" else self.token

    @property
    def rollout_token(self) -> str:
        """The token that every node of the run has or can derive."""
        return role_token(self.token, "rollout") if self.role == "trainer" else self.token
