"""Define the engine's half of the job file.

The models are frozen pydantic models, one per section of the file; unknown keys are refused. The module does not
import torch, because the launcher imports the module to check a job before anything is bought. Every error names the
value found, the values allowed, and the reason.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.algorithm_config import FACTS, AlgorithmConfig, recommended
from engine.early_config import EarlyConfig, why_not_early
from engine.families import FAMILIES
from engine.model_config import BOTH_BRANCHES
from engine.model_config import GUIDANCE as GUIDANCE
from engine.model_config import SHIPPED as SHIPPED
from engine.model_config import VIDEO as VIDEO
from engine.model_config import ModelConfig as ModelConfig
from engine.reward_config import RewardConfig as RewardConfig
from engine.strict import Positive, Strict

COMPILING_LEASE_SECONDS = 300.0
"""Assumed to be enough for torch to compile the blocks of a published model, once for each shape."""


class WindowConfig(Strict):
    """Window of stochastic steps. All other steps are ODE steps, and only steps of the window are trained.

    `random` is Flow-GRPO-Fast. `sliding` is MixGRPO (arXiv 2507.21802): the window moves from the noise towards the
    image as training proceeds, then starts again at the noise. MixGRPO uses 25 iterations per position and stride 1.
    """

    size: Positive = 2
    """Number of stochastic steps in the window."""
    first: Annotated[int, Field(ge=0)] = 0
    """Earliest step at which the window may start."""
    last: Positive | None = None
    """Step before which the window ends; None: the final step."""
    order: Literal["random", "sliding"] = "random"
    """Choice of the next position: `random` draws from the run's seed, `sliding` takes the following position."""
    stride: Positive = 1
    """Steps between two positions."""
    iterations_per_position: Positive = 1
    """Training iterations before the window moves."""


class SamplerConfig(Strict):
    """Denoising method of rollouts. Seed rankings are comparable only between samplers with equal signatures."""

    name: Literal["flow-sde", "dance-sde", "cps"] = "flow-sde"
    """Stochastic step: `flow-sde` (Flow-GRPO), `dance-sde` (DanceGRPO) or `cps` (coefficients-preserving sampling).
    `noise_level` has another scale for each."""
    steps: Annotated[int, Field(ge=2)] = 8
    """Denoising steps of a rollout."""
    noise_level: Annotated[float, Field(ge=0.0)] = 0.7
    """Noise added by a stochastic step; 0 makes every step an Euler step, which is the default with diffusion-nft and
    awm. Each sampler has its own scale, so change sampler and level together. flow-sde, `a`: 0.7 or 0.8, and 1.2 with
    Qwen-Image. dance-sde, `eta`: 0.25 to 0.3; the noise does not fade towards the image. cps, `eta`: 0.7;
    the maximum 1 replaces all of the noise."""
    shift: Literal["auto"] | Annotated[float, Field(gt=0.0)] = "auto"
    """Timestep shift of the flow-matching schedule. `auto`: the noise levels of the model's diffusers pipeline, from
    `scheduler/scheduler_config.json` in the model's folder and the size of the image; no shift for a shipped model. A
    number: even noise levels with this shift; 1: no shift. A larger shift spends more steps near the noise."""
    guidance: Annotated[float, Field(ge=1.0)] = 1.0
    """Guidance scale as in the model's diffusers pipeline; 1 computes no unconditional branch. The default is 1 for
    shipped models, and the published value for the others: 4 for qwen-image (norm of each token kept), 4.5 for sd3 (no
    skip-layer guidance), 5 for wan, 4 for flux2-klein, 5 for z-image (4 in its pipeline, where 0 is none), 4.5 for
    sana. With diffusion-nft and awm the default is 1 for these too, as both publish: training replaces guidance, and
    every pass costs half. FLUX.1-dev and HunyuanVideo take the scale as an input of the network, 3.5 and 6, and compute
    no unconditional branch."""
    window: WindowConfig | None = None
    """Window of stochastic steps. None: every step but the final one is stochastic, and all are trained."""
    noise: Literal[1] = 1
    """Version of the counter-based noise (engine/diffusion/noise.py)."""

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


class CandidateBudget(Strict):
    """Number of candidates: the most with `exploration.wait: idle`, and exactly as many with `wait: all`."""

    candidates: Positive
    """Candidate seeds per batch, shared evenly among the prompts."""
    patience_seconds: Annotated[float, Field(gt=0.0)] = 30.0
    """Used with `exploration.wait: all`: wall seconds without a live spot node after which a batch continues with the
    candidates explored by then. Later batches do the same until a spot node is live again."""


class SecondsBudget(Strict):
    """Budget of idle GPU time: explore until the trainer finishes, or for a number of seconds."""

    seconds: Literal["auto"] | Annotated[float, Field(gt=0.0)] = "auto"
    """GPU seconds of exploration per batch. `auto`: explore until the trainer finishes."""
    max_candidates: Positive = 1024
    """Maximum number of candidates per batch."""


class ProfileConfig(Strict):
    """Settings for sampling candidates. Training rollouts ignore every profile and always run in full."""

    name: str = "full"
    """Name of the profile in events and reports."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format. bfloat16 ranks seeds nearly as well as float32 (measured on digits-ocr: 99 % of the kept
    variance). On GPUs it is faster; a
    CPU without bfloat16 instructions takes five times as long."""
    shape: Positive = 48
    """Images per forward pass of an exploring worker."""
    steps: Annotated[int, Field(ge=2)] | None = None
    """Denoising steps; None: all steps. With fewer steps, the reward scores the network's prediction of the final
    image. The noise path is the same and takes less time; the ranking is a little worse (6 of 8 steps: .77 instead of
    .83, 12 prompts of digits-ocr)."""
    scorer: Literal["reward", "student"] = "reward"
    """Scorer of candidates. `student`: the cheaper scorer of `reward.student`. Without it, the reward `ocr` of
    digits-ocr has a small model that imitates the reward at a hundredth of the cost; other rewards have none."""


class ExplorationConfig(Strict):
    """Choice of the seeds to train, after the idea of Spotlight (arXiv 2606.19004).

    With `stale` and `in-path`, the gradient is the gradient of a selected sample: the seeds with the most different
    rewards, not all seeds. `stale`: spot workers try candidates with the previous weights while the trainer trains.
    `in-path`: workers roll out every candidate with current weights and the trainer trains the best; the trainer waits
    for all candidates. `none`: train the first seeds.
    """

    mode: Literal["none", "in-path", "stale"] = "stale"
    """Time of exploration: `stale` (in idle GPU time, with the previous weights), `in-path` (before training, with
    current weights) or `none`."""
    budget: CandidateBudget | SecondsBudget = SecondsBudget()
    """Amount of exploration per batch: `{candidates: N}` for a number, or `{seconds: N}` for GPU time. Default: until
    the trainer finishes."""
    wait: Literal["idle", "all"] = "idle"
    """Waiting for a counted budget. `idle`: exploration ends with training, and the budget is the most that is tried.
    `all`: the trainer waits for the whole budget, so a repeated run tries the same seeds and is bit-identical. Mode
    `in-path` always waits for all."""
    keep: Literal["variance", "extremes"] = "variance"
    """Rule for the seeds that are trained. `variance`: the seeds with the largest variance of rewards. `extremes`: as
    many best as worst seeds, as in Sol-RL."""
    trains: Literal["auto", "candidates", "rollouts"] = "auto"
    """Images that are trained, with mode `stale`. `candidates`: the chosen candidates themselves, whose final latents
    come back with their rewards; a prompt with too few candidates is rolled out. Only for algorithms that train images
    (diffusion-nft, awm), and for one exact profile: float32, all steps, scored by the reward. `rollouts`: the chosen
    seeds, rolled out again with the newest weights. `auto`: candidates where that is possible, else rollouts."""
    policy: Literal["uniform", "greedy", "ucb", "bayes"] = "uniform"
    """Rule for the prompt of the next candidates (engine/exploration/planner.py). Every policy but `uniform` gives more
    candidates to prompts with more different rewards. A larger share pays with strict rewards and with
    `algorithm.std: batch`. With `std: group` every group weighs the same, and `uniform` did better on digits-ocr (2
    seeds)."""
    chunk: Positive = 2
    """Candidates given to a prompt at a time."""
    profiles: Annotated[tuple[ProfileConfig, ...], Field(min_length=1, max_length=6)] = (ProfileConfig(),)
    """Exploration profiles. With several profiles, a bandit learns which profile pays most."""
    random_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.125
    """Share of the rejected candidates to roll out again with current weights, in idle time and without training. The
    comparison measures how well stale weights rank the seeds. Without the comparison, exploration never turns itself
    off."""

    @model_validator(mode="after")
    def _waiting_has_an_end(self) -> Self:
        if self.mode != "in-path":
            return self
        if not isinstance(self.budget, CandidateBudget):
            raise ValueError("mode in-path waits for every candidate, so it needs a budget like {candidates: 144}")
        if "wait" not in self.model_fields_set:
            self.__dict__["wait"] = "all"
        if self.wait != "all":
            raise ValueError(
                f"exploration.wait is {self.wait}, but mode in-path trains the best of all candidates; use wait: all, "
                "or mode: stale"
            )
        return self


class EvaluationConfig(Strict):
    """Evaluation, the basis of the target: held-out prompts, fixed noise, ODE sampler, EMA weights."""

    prompts: Positive = 512
    """Held-out prompts of a full evaluation."""
    on_the_way: Positive | None = None
    """Prompts of an intermediate evaluation, counted from the first prompt; None: all prompts. The first and the last
    evaluation use all prompts, and so does an evaluation about to reach the target. A share p of n prompts has a
    standard error of sqrt(p (1 - p) / n)."""
    every: Positive = 3
    """Iterations between two evaluations."""
    wait: bool = False
    """False: an evaluation runs beside the next batch, on GPUs that would be idle, and the target is judged one
    iteration later. True: everybody evaluates before the next batch begins."""
    steps: Annotated[int, Field(ge=1)] = 8
    """Denoising steps of the ODE sampler."""
    shape: Positive = 48
    """Images per forward pass."""

    @model_validator(mode="after")
    def _some_of_all(self) -> Self:
        if self.on_the_way is not None and self.on_the_way > self.prompts:
            raise ValueError(
                f"on_the_way is {self.on_the_way}, and prompts {self.prompts}; use at most as many, or leave it out"
            )
        return self


DRIFT = "drift"
"""Metric reported by every evaluation: the distance of its images from the base model's images (engine/drift.py)."""


class GuardConfig(Strict):
    """Upper bound `max` on an evaluation metric: `drift`, or a metric of the reward."""

    metric: str = DRIFT
    """Metric to bound: `drift`, or a metric of the reward."""
    max: float
    """Largest allowed value of the metric."""


class TargetConfig(Strict):
    """Score at which the run has reached its goal and stops."""

    metric: str = "exact_match"
    """Evaluation metric to reach, a metric of the reward: `exact_match`, `similarity`, `reward`; `ocr_smooth` has
    `smooth` too."""
    value: float
    """Value to reach. Shares (`exact_match`, `similarity`) are above 0 and at most 1."""
    evaluations: Positive = 3
    """Evaluations in a row in which the smoothed score must hold."""
    guards: tuple[GuardConfig, ...] = ()
    """Bounds on other metrics. An evaluation counts towards the target only if every guard holds."""


class CheckpointConfig(Strict):
    """Checkpoints: the state from which a run continues."""

    every: Literal["auto"] | Positive = 1
    """Iterations between two checkpoints. `auto`: after each iteration with LoRA; with full weights
    sqrt(2 x seconds of a checkpoint x mean life of the trainer's node) of work (Young 1974), at most 64 iterations. The
    seconds are measured; the life is the plan's."""
    keep: Positive = 3
    """Number of checkpoints kept; older checkpoints are deleted."""


class RuntimeConfig(Strict):
    """Runtime of the workers, with their lease and heartbeat intervals. Durations are wall seconds."""

    name: Literal["inproc", "local", "ray"] = "local"
    """Kind: `local` (processes of the node's agent, HTTP), `ray` (actors of one Ray cluster), `inproc` (tests only)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of a node's workers. `auto` uses GPUs if torch finds any, else the CPU. Each worker gets a GPU while GPUs
    remain, and the trainer uses the first GPU of its node. `cuda` refuses to run on a CPU, so no paid GPU stays idle.
    On clouds, `auto` means `cuda`."""
    shape: Positive = 12
    """Images per forward pass of a training rollout. A smaller batch is padded to the full shape with copies."""
    lease_seconds: Annotated[float, Field(gt=0.0)] = 2.0
    """Shortest lease. If longer, a lease lasts four times the slowest measured step of its kind of work."""
    first_lease_seconds: Annotated[float, Field(gt=0.0)] = 20.0
    """Lease duration before any step of the kind was measured: compilation and first memory use take long. The default
    is 300 with `model.compile: on`."""
    heartbeat_seconds: Annotated[float, Field(gt=0.0)] = 0.5
    """Maximum age of a worker's last call before the worker sends a heartbeat between steps."""
    commit_every: Literal["auto"] | Positive = "auto"
    """Denoising steps between two commits of a training rollout. `auto`: sqrt(2 x commit cost x mean time to
    preemption), from measured values (Young 1974). The result may be to commit only on a preemption
    notice."""
    hours_to_preemption: Annotated[float, Field(gt=0.0)] = 1.0
    """Initial estimate of a spot node's mean life for `auto` (run's clock). The run adds its own observations."""
    step_seconds: Annotated[float, Field(ge=0.0)] = 0.0
    """Minimum duration of a denoising step, for drills and benchmarks."""
    row_seconds: Annotated[float, Field(ge=0.0)] = 0.0
    """Minimum duration of a training row, a trained (image, step) pair, for drills and benchmarks."""
    pass_seconds: Annotated[float, Field(ge=0.0)] = 0.0
    """Duration of a training pass beside that of its rows, for drills and benchmarks."""
    sp_degree: Literal["auto"] | Positive = 1
    """Workers of a spot node that share an image's sequence (Ulysses). Workers left over on a node use smaller degrees.
    `auto`: chosen from the waiting requests and the measured step times (engine/parallel/groups.py)."""
    cfg_parallel: bool = False
    """True: two workers that share an image compute one branch of classifier-free guidance each, instead of a part of
    the sequence. Needs `sp_degree` 2 or `auto`, guidance above 1, and a model with two branches."""
    resume: Literal["exact", "close", "restart"] = "close"
    """Treatment of an interrupted image. `exact`: resume if the same number of workers shares the image, else restart,
    so the image is bit-identical to an uninterrupted image. `close`: resume with any number of workers, equal to about
    5e-7; the trainer then recomputes the log-probs. `restart`: always restart."""
    sp_timeout_seconds: Annotated[float, Field(gt=0.0)] = 5.0
    """Time a worker waits for a peer of its group that neither answers nor dies."""
    help: Literal["auto", "off", "greedy", "feedback", "search"] = "auto"
    """Rollouts made by a trainer that waits for a group. `greedy`: whole leases, whenever no group is ready.
    `feedback`: the same, but the trainer gives its lease back between two steps once it can train; no step is repeated.
    `search`: as `feedback`, for the number of leases that ends the batch soonest. `off`: none, while a rollout GPU
    lives. `auto`: `search` if help makes an iteration shorter by the rates measured in the run, else `off`; `feedback`
    before the rates are known, and with `sp_degree` above 1. All this is about rank 0: the other ranks that may sample
    do so whenever they have no group to train, except with `off` while a rollout GPU lives."""
    trace_steps: bool = False
    """Trace of steps: every worker logs finished steps with their times to `traces/` in the node's folder."""
    trainer_threads: Annotated[int, Field(ge=0)] = 0
    """torch threads of the trainer on a CPU; 0: one thread if spot workers explore on the same machine, else one per
    core, divided by the ranks. Bit-identical repetition of a run needs the same number."""
    trainer_ranks: Literal["auto"] | Positive = "auto"
    """Processes of the trainer on all of its nodes, each with a GPU of its own, that share the groups of an optimiser
    step. More than 1 needs as many groups in a step. Each rank also samples while it has no group to train. With
    `model.weights: full`, each rank holds a part of the weights (FSDP2), and gathers all to sample; only rank 0 does
    if the memory forecast says that the GPUs have no room for that.
    `auto`: 1, because several ranks were only run on CPUs, and never on GPUs."""
    trainer_nodes: Literal["auto", "elastic", "whole"] = "auto"
    """What a trainer of several nodes does without one of them. `elastic`: it waits for the node at most 50 s after the
    node's last sign of life, then trains with the ranks that are there; the node joins after the next checkpoint. LoRA
    only. `whole`: it waits, so that the number of ranks never changes. `auto`: `elastic` with LoRA, else `whole`."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.heartbeat_seconds > self.lease_seconds / 2:
            raise ValueError(
                f"runtime.heartbeat_seconds is {self.heartbeat_seconds:g}, more than half of lease_seconds "
                f"({self.lease_seconds:g}); a worker must call in at least twice per lease: use "
                f"{self.lease_seconds / 4:g}, or a longer lease"
            )
        if self.name == "inproc" and self.trainer_ranks not in ("auto", 1):
            raise ValueError(
                f"runtime.trainer_ranks is {self.trainer_ranks}, and runtime.name inproc is one process: use 1 or auto"
            )
        return self


class EngineConfig(Strict):
    """Complete configuration of the engine, built by the launcher from the job file and sent to every node."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the run. Prompts, noise and window positions are drawn from the seed."""
    iterations: Annotated[int, Field(ge=1, le=1_000_000)] = 40
    """Trained batches after which the run ends, even if the target was not reached."""
    model: ModelConfig = ModelConfig()
    """Model to train. Short form: the name."""
    sampler: SamplerConfig = SamplerConfig()
    """Denoising method of rollouts. Short form: the name."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Training algorithm. Short form: the name."""
    exploration: ExplorationConfig = ExplorationConfig()
    """Choice of the seeds to train. Short form: the mode."""
    early: EarlyConfig = EarlyConfig()
    """Groups of the next batch that are sampled one weight version early."""
    reward: RewardConfig = RewardConfig()
    """Training objective. Short form: the name."""
    prompts: str = "digits"
    """Prompt source: `digits` or `shapes` (generated); a text file with one prompt a line; a `.jsonl` file with one
    object a line, whose `prompt` is the prompt and which the scorer gets as metadata; or a folder with `train.txt` and
    `test.txt`, or with `train_metadata.jsonl` and `test_metadata.jsonl`."""
    test_prompts: str | None = None
    """File of evaluation prompts, text or JSONL, never trained. None: the test file of a folder of prompts, else a
    random fifth of `prompts` at most is held out."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on held-out prompts."""
    target: TargetConfig | None = None
    """Score at which the run stops. None: the run ends after `iterations` or at a budget limit."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Frequency and number of checkpoints."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Worker processes, leases and commits. Short form: the name."""

    @model_validator(mode="after")
    def _the_reward_can_score_the_model(self) -> Self:
        self.reward.check_scores(self.model.name, is_video=self.model.name in VIDEO)
        return self

    @model_validator(mode="after")
    def _a_student_is_used(self) -> Self:
        if self.reward.student is not None and all(
            profile.scorer != "student" for profile in self.exploration.profiles
        ):
            raise ValueError(
                "reward.student is set, but no exploration profile has scorer: student; write exploration: {profiles: "
                "[{name: quick, scorer: student}]}, or leave student out"
            )
        return self

    @model_validator(mode="after")
    def _all_shards_are_there(self) -> Self:
        if self.runtime.trainer_nodes == "elastic" and self.model.weights == "full":
            raise ValueError(
                "runtime.trainer_nodes is elastic, but model.weights is full: each node has a part of the weights, and "
                "none can be missing; use runtime.trainer_nodes: whole, or model.weights: lora"
            )
        return self

    @model_validator(mode="after")
    def _compiled_workers_share_no_image(self) -> Self:
        family, alone = FAMILIES.get(self.model.name), self.runtime.sp_degree == 1 or self.runtime.cfg_parallel
        if family is not None and not family.shares_sequence and not alone:
            raise ValueError(
                f"runtime.sp_degree is {self.runtime.sp_degree}, but workers cannot share the sequence of "
                f"{family.name}; use sp_degree: 1, or cfg_parallel: true with sp_degree: 2"
            )
        if self.model.compile == "on" and self.runtime.sp_degree != 1:
            raise ValueError(
                f"model.compile is on, but runtime.sp_degree is {self.runtime.sp_degree}; workers that share an image "
                "exchange data inside each block: use sp_degree: 1, or model.compile: off"
            )
        return self

    @model_validator(mode="after")
    def _two_workers_share_two_branches(self) -> Self:
        if not self.runtime.cfg_parallel:
            return self
        if self.runtime.sp_degree not in (2, "auto"):
            raise ValueError(
                f"runtime.cfg_parallel is true, but runtime.sp_degree is {self.runtime.sp_degree}; guidance has two "
                "branches: use sp_degree: 2 or auto, or cfg_parallel: false"
            )
        if self.sampler.guidance == 1.0:
            raise ValueError(
                "runtime.cfg_parallel is true, but sampler.guidance is 1, which has one branch; use guidance above 1 "
                "with a model that learned it, or cfg_parallel: false"
            )
        return self

    @model_validator(mode="after")
    def _a_first_lease_outlives_the_compiler(self) -> Self:
        """Set the default of `runtime.first_lease_seconds` that fits a worker whose first step compiles."""
        if self.model.compile == "on" and "first_lease_seconds" not in self.runtime.model_fields_set:
            longer = self.runtime.model_copy(update={"first_lease_seconds": COMPILING_LEASE_SECONDS})
            self.__dict__["runtime"] = longer
        return self

    @model_validator(mode="after")
    def _exploration_has_a_choice(self) -> Self:
        budget, algorithm = self.exploration.budget, self.algorithm
        if self.exploration.mode == "none" or not isinstance(budget, CandidateBudget):
            return self
        trained = algorithm.prompts_per_batch * algorithm.images_per_prompt
        if budget.candidates // algorithm.prompts_per_batch <= algorithm.images_per_prompt:
            raise ValueError(
                f"exploration.budget.candidates is {budget.candidates}, but {trained} images are trained each batch, "
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
    def _auto_means_the_recommended_algorithm(self) -> Self:
        if self.algorithm.name == "auto":
            name = recommended(self.model.name).name
            self.__dict__["algorithm"] = self.algorithm.model_copy(update={"name": name})
        return self

    @model_validator(mode="after")
    def _candidates_may_be_trained(self) -> Self:
        """Replace `exploration.trains: auto`. Raises ValueError for candidates that cannot be trained."""
        exploration = self.exploration
        if exploration.trains == "rollouts":
            return self
        why = self._why_not_candidates()
        if exploration.trains == "auto":
            trains = "candidates" if why is None else "rollouts"
            self.__dict__["exploration"] = exploration.model_copy(update={"trains": trains})
        elif why is not None:
            raise ValueError(f"exploration.trains is candidates, but {why}; or use trains: rollouts")
        return self

    def _why_not_candidates(self) -> str | None:
        """Return the reason why candidates cannot be trained, and what to do. None: they can."""
        exploration, profile = self.exploration, self.exploration.profiles[0]
        if exploration.mode != "stale":
            return f"exploration.mode is {exploration.mode}, which trains its rollouts; use mode: stale"
        if self.algorithm.image_training is None:
            return (
                f"algorithm.name is {self.algorithm.name}, which needs the steps of a rollout with the newest weights; "
                "use diffusion-nft or awm"
            )
        if len(exploration.profiles) > 1:
            return f"there are {len(exploration.profiles)} exploration profiles; use a single one"
        if profile.scorer != "reward":
            return f"profile {profile.name!r} scores with the student; what is trained needs scorer: reward"
        if profile.dtype != "float32" or profile.steps not in (None, self.sampler.steps):
            return f"profile {profile.name!r} is not exact; what is trained needs dtype: float32 and all steps"
        return None

    @model_validator(mode="after")
    def _early_groups_are_of_use(self) -> Self:
        full = self.model.compile == "on" and self.model.weights == "full"
        why = why_not_early(algorithm=self.algorithm, exploration=self.exploration.mode, compiles_full=full)
        if self.early.share == "auto" and why is not None:
            self.__dict__["early"] = self.early.model_copy(update={"share": 0.0})
        elif self.early.share and why is not None:
            raise ValueError(f"early.share is {self.early.share:g}, but {why}")
        return self

    @model_validator(mode="after")
    def _image_training_rolls_out_with_the_ode(self) -> Self:
        """Set the default of `sampler.noise_level` that fits the algorithm."""
        if self.algorithm.image_training is not None and "noise_level" not in self.sampler.model_fields_set:
            # The model is frozen once it is made; a validator before the fields would turn off strict JSON mode.
            self.__dict__["sampler"] = self.sampler.model_copy(update={"noise_level": 0.0})
        return self

    @model_validator(mode="after")
    def _guidance_is_as_published(self) -> Self:
        """Set the default of `sampler.guidance` that fits the model and the algorithm.

        Algorithms that train images publish guidance 1, so training replaces guidance, and a pass computes one branch.
        A network that takes the scale as an input keeps the model's: it was never trained without, and has one branch.
        """
        if self.model.name not in GUIDANCE or "guidance" in self.sampler.model_fields_set:
            return self
        if self.algorithm.image_training is not None and self.model.name in BOTH_BRANCHES:
            return self
        self.__dict__["sampler"] = self.sampler.model_copy(update={"guidance": GUIDANCE[self.model.name]})
        return self

    @model_validator(mode="after")
    def _there_is_something_to_train(self) -> Self:
        trained, steps = self.algorithm.image_training, self.sampler.steps
        if trained is not None:
            if self.sampler.window is not None:
                raise ValueError(
                    f"sampler.window is set, but {self.algorithm.name} trains on noised images and not on denoising "
                    "steps; leave window out, or use algorithm.name: flow-grpo"
                )
            pool = trained.levels.pool(steps)
            if trained.levels.count is not None and trained.levels.count > pool:
                which = "levels" if trained.levels.out_of == "all" else "levels in the noisier half"
                raise ValueError(
                    f"algorithm.{FACTS[self.algorithm.name].section}.levels.count is {trained.levels.count}, but a "
                    f"rollout of {steps} steps has {pool} {which}; use {pool} or fewer, or levels: {{from: all}}"
                )
        elif self.sampler.noise_level == 0:
            raise ValueError(
                f"sampler.noise_level is 0, which leaves no random step for {self.algorithm.name} to train; 0.7 is "
                "what Flow-GRPO uses, and diffusion-nft needs no random step"
            )
        if self.model.name in SHIPPED and self.sampler.guidance != 1.0:
            raise ValueError(
                f"sampler.guidance is {self.sampler.guidance}, but {self.model.name} was made without an "
                "unconditional branch; use 1"
            )
        return self
