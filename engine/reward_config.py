"""Define the job file's `reward` section. The module does not import torch, like `engine/config.py`."""

import re
from math import ceil, floor
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from engine.strict import Positive, Strict


def _web_address(value: str) -> str:
    try:
        parts = urlsplit(value)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        port_is_valid = False
    if not port_is_valid or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url is {value!r}; use an address like http://10.0.0.5:18085")
    if parts.username or parts.password:
        # The message does not repeat the value, because it holds a password.
        raise ValueError("url holds a user name or a password; name a key in key, and list that name in secrets")
    return value


def _variable_name(value: str) -> str:
    # The message does not repeat the value, because a user may have written the key itself.
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("key is no name of an environment variable; write a name like JUDGE_KEY, not the key itself")
    return value


WebAddress = Annotated[str, AfterValidator(_web_address)]
VariableName = Annotated[str, AfterValidator(_variable_name)]


class VlmConfig(Strict):
    """Settings of `reward.name: vlm`, a vision-language model behind an OpenAI-compatible address."""

    url: WebAddress
    """Address of the API, such as `http://10.0.0.5:8000/v1`. Requests go to `/chat/completions` below it."""
    model: str
    """Name of the model, as the server knows it."""
    task: Literal["judge", "read"] = "judge"
    """`judge`: the answer is a score by the rubric. `read`: the answer is the text in the image, which is compared with
    the text in the prompt like in the reward `ocr`."""
    rubric: str | None = None
    """Instructions of the model; `{prompt}` and `{metadata}` stand for the prompt and its metadata as JSON. None: for
    `judge`, rate how well the image fits the prompt; for `read`, read all text. The form of the answer is added for
    `judge`."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Worst and best score of a judge. The reward is the score's place between both, from 0 to 1. A score outside is an
    error, and the request is repeated."""
    key: VariableName | None = None
    """Name of the environment variable with the server's key, sent as `Authorization: Bearer KEY`. The job's `secrets`
    must list the name."""
    image: Literal["png", "jpeg"] = "png"
    """Form in which an image is sent. PNG loses nothing; JPEG takes a tenth of the bytes."""
    longest_side: Positive = 1024
    """Pixels of the longest side of a sent image. Larger images are made smaller."""
    max_tokens: Positive = 512
    """Most tokens of an answer."""
    usd_per_million_input: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """Price of a million tokens of the question, with its image. 0 with both prices: the judge is free."""
    usd_per_million_output: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """Price of a million tokens of the answer."""
    most_input_tokens: Positive = 8192
    """Most tokens of a question with its image. Before each call, money for so many tokens must be left."""
    max_usd: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Budget of a paid judge in dollars, for the whole run and inside `budget.max_total`. No call is made after it is
    used up, and the run then stops; `spotrl resume --max-judges` raises it. The budgets of several judges are one
    sum. A judge with a price needs it."""
    concurrency: Positive = 8
    """Most requests of one worker at a time. A request holds one image."""
    requests_per_minute: Positive | None = None
    """Most requests of the whole run in a minute, evenly spaced; the coordinator gives the turns. None: no limit of
    ours; an answer 429 still pauses."""
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 120.0
    """Time in which a whole answer must arrive."""
    tries: Positive = 8
    """Most requests for an image, with the pauses of `http`. An image without a score after the last try is skipped
    with its group."""

    @property
    def is_paid(self) -> bool:
        return self.usd_per_million_input + self.usd_per_million_output > 0

    def micro_usd(self, input_tokens: int, output_tokens: int) -> int:
        """Return the price of a call, rounded up. A dollar per million tokens is a micro-dollar per token."""
        return ceil(input_tokens * self.usd_per_million_input + output_tokens * self.usd_per_million_output)

    @property
    def most_micro_usd(self) -> int:
        """Return the most that a call costs."""
        return self.micro_usd(self.most_input_tokens, self.max_tokens)

    @model_validator(mode="after")
    def _paid_judges_have_a_budget(self) -> Self:
        if self.is_paid != (self.max_usd is not None):
            raise ValueError(
                f"max_usd is {self.max_usd}, and the prices are ${self.usd_per_million_input:g} and "
                f"${self.usd_per_million_output:g}; a judge with a price needs max_usd, and a free judge has none"
            )
        if self.max_usd is not None and self.max_usd * 1e6 < self.most_micro_usd:
            raise ValueError(
                f"max_usd is ${self.max_usd:g}, and one call may cost ${self.most_micro_usd / 1e6:g}; use more, or "
                "fewer most_input_tokens"
            )
        return self

    @model_validator(mode="after")
    def _scale_is_ordered(self) -> Self:
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale is {list(self.scale)}; give the worst score first")
        if self.task == "read" and "scale" in self.model_fields_set:
            raise ValueError("scale is set, but task is read, which gives no score of its own; leave scale out")
        return self


class HttpConfig(Strict):
    """Settings of `reward.name: http`, a scorer behind a URL. docs/rewards.md describes the protocols."""

    url: WebAddress
    """Address that scores are requested from, by POST. Every worker and the trainer must reach it."""
    protocol: Literal["json", "verl-omni", "flow-grpo"] = "json"
    """Form of requests and answers. `json`: JSON with PNG images. `verl-omni` and `flow-grpo`: pickled, with JPEG
    images, as in those projects; answers may contain numbers, text and numpy arrays only."""
    key: VariableName | None = None
    """Name of the environment variable with the server's key, sent as `Authorization: Bearer KEY`. The job's `secrets`
    must list the name."""
    batch: Positive = 16
    """Most images in one request."""
    concurrency: Positive = 4
    """Most requests of one worker at a time."""
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 120.0
    """Time in which a whole answer must arrive."""
    tries: Positive = 8
    """Most requests for the same images. The pauses grow from half a second to 30 seconds, so eight tries bridge about
    a minute without an answer. Images without a score after the last try are skipped with their groups."""
    score_range: tuple[float, float] | None = None
    """Least and greatest possible score. A score outside is an error of the scorer, and the request is repeated. None:
    any finite number."""

    @model_validator(mode="after")
    def _range_is_ordered(self) -> Self:
        if self.score_range is not None and not self.score_range[0] < self.score_range[1]:
            raise ValueError(f"score_range is {list(self.score_range)}; give the smaller number first")
        return self


SUM = "sum"
"""Name of the reward that is a weighted sum of scorers."""

NODE_SCORER_SECONDS = 600.0
"""Default time of a call of a scorer on the node. The slowest shipped scorer loads its model in about two minutes."""

LONGEST_PAUSE_SECONDS = 30.0
"""Longest pause between two tries of a server."""

WORKERS_OF_A_JUDGE = 64
"""Workers that may wait for turns at a judge with a limit of requests, for the default time of a call."""

LOCAL_MODELS = ("clip", "pickscore", "aesthetic", "hpsv3", "geneval")
"""Scorers that load a model from a local folder."""


class LocalModelConfig(Strict):
    """Model of a scorer in a local folder."""

    path: str
    """Folder of the model, relative to the job file or absolute. An absolute folder must exist on every node, such as
    in the machine image."""
    batch: Positive = 16
    """Images or prompts in one forward pass."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format. `auto`: bfloat16 on a GPU, float32 on a CPU; float32 for the detector of `geneval`."""


class ScorerConfig(Strict):
    """A scorer by name, with the settings that the scorer needs."""

    name: str = "ocr"
    """Name of the scorer, or `package.module:function` of the user's own. `ocr` and `ocr_strict` read images of at most
    48 x 144 pixels as one line of text, and find the lines first in larger images. `ocr_smooth` reads one line only.
    `clip`, `pickscore`, `aesthetic`, `hpsv3` and `geneval` load a model from a local folder. `http` asks a server,
    `vlm` a vision-language model."""
    http: HttpConfig | None = None
    """Settings of the scorer `http`, which needs at least `url`."""
    vlm: VlmConfig | None = None
    """Settings of the scorer `vlm`, which needs at least `url` and `model`."""
    model: LocalModelConfig | None = None
    """Model of `clip`, `pickscore`, `aesthetic` and `hpsv3`, and detector of `geneval`. Each needs at least `path`."""
    colours: LocalModelConfig | None = None
    """CLIP model that names colours for `geneval`. None: no prompt asks for a colour."""

    def longest_seconds(self, images: int) -> float:
        """Return the longest time that a call of this scorer takes unless it hangs.

        A server is asked several times, with pauses. A judge with a limit of requests also waits for the turns of
        other workers.
        """
        if self.http is not None:
            rounds = ceil(ceil(images / self.http.batch) / self.http.concurrency)
            return NODE_SCORER_SECONDS + rounds * self.http.tries * (self.http.timeout_seconds + LONGEST_PAUSE_SECONDS)
        if self.vlm is not None:
            rounds, tries = ceil(images / self.vlm.concurrency), self.vlm.tries
            per_minute = self.vlm.requests_per_minute
            turns = 60.0 / per_minute * images * WORKERS_OF_A_JUDGE if per_minute else 0.0
            return NODE_SCORER_SECONDS + tries * (rounds * (self.vlm.timeout_seconds + LONGEST_PAUSE_SECONDS) + turns)
        return NODE_SCORER_SECONDS

    @model_validator(mode="after")
    def _settings_belong_to_the_scorer(self) -> Self:
        if self.name == "http" and self.http is None:
            raise ValueError("reward.name is http, without an address; use reward: {name: http, http: {url: ...}}")
        if self.name != "http" and self.http is not None:
            raise ValueError(f"reward.http is set, but reward.name is {self.name}; use name: http, or leave http out")
        if self.name == "vlm" and self.vlm is None:
            raise ValueError(
                "reward.name is vlm, without a model; use reward: {name: vlm, vlm: {url: ..., model: ...}}"
            )
        if self.name != "vlm" and self.vlm is not None:
            raise ValueError(f"reward.vlm is set, but reward.name is {self.name}; use name: vlm, or leave vlm out")
        if self.name in LOCAL_MODELS and self.model is None:
            raise ValueError(
                f"reward.name is {self.name}, without a model; use reward: {{name: {self.name}, model: {{path: ...}}}}"
            )
        if self.name != "geneval" and self.colours is not None:
            raise ValueError(f"reward.colours is set, but reward.name is {self.name}; leave colours out")
        if self.name not in LOCAL_MODELS and self.model is not None:
            raise ValueError(
                f"reward.model is set, but reward.name is {self.name}, which loads no model; leave model out"
            )
        return self


class WeightedScorer(ScorerConfig):
    """A scorer of a weighted sum."""

    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of the score. A negative weight makes a high score bad."""
    label: str | None = None
    """Name of the score among the metrics. None: the scorer's name, or the name of the user's own function."""

    @property
    def metric(self) -> str:
        """Return the name of the score among the metrics."""
        return self.label or self.name.rpartition(":")[2]


class StudentConfig(ScorerConfig):
    """A cheaper scorer that ranks candidate seeds in the reward's place."""

    frames: Positive | None = None
    """Frames of a video to score, like `reward.frames`."""


class PoolConfig(Strict):
    """Scoring processes of a node (`reward.placed: pool`)."""

    processes: Positive = 1
    """Scoring processes of each node, the trainer's too. Each has its own copy of the scorer."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of each rollout node that only score, from the last on; the others sample, with a worker each. The trainer
    waits for scores, so its node shares its GPUs. 0: the processes share the GPUs of the workers, from the last on."""
    batch: Positive = 16
    """Most images in one call of the scorer. Images of several workers share a call."""
    tries: Positive = 3
    """Most scoring processes that may end while they score the same images. Then the images have no score, and are
    skipped with their groups."""
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 600.0
    """Time in which a batch must be scored. A process that takes longer is ended, and a new one starts."""

    @model_validator(mode="after")
    def _every_gpu_has_a_process(self) -> Self:
        if self.gpus > self.processes:
            raise ValueError(
                f"reward.pool.gpus is {self.gpus}, and reward.pool.processes is {self.processes}; a process uses one "
                f"GPU: use processes: {self.gpus}, or fewer gpus"
            )
        return self

    def gpu_of(self, process: int, *, is_rollout_node: bool) -> int:
        """Return the number of a process's GPU on its node, counted from the last: -1, -2, ...

        Workers count from the first. On the trainer's node, processes take any GPU of the node.
        """
        return -1 - (process % self.gpus if self.gpus and is_rollout_node else process)


LEASES_AT_A_SERVER = 4
"""Leases of a worker that a server scores at once. The worker keeps their latents in memory meanwhile."""


class RewardConfig(ScorerConfig):
    """Training objective: one scorer, or the weighted sum of several. `reward: [...]` is short for a sum."""

    frames: Positive | None = None
    """Frames of a video to score, evenly spaced from the first to the last: the score of a video is the mean of its
    frames' scores. None: the scorer gets whole videos, which only a function of the user's own can score. Image models
    have no frames."""
    placed: Literal["with_rollout", "pool", "http"] = "with_rollout"
    """Place of the scorer. `with_rollout`: the worker that made the images scores them, or asks the server, while it
    samples the next. `pool`: processes of their own on each node score, for slow scorers and for functions that hold
    Python's lock. `http`: a server scores several leases of a worker at once; only for scorers behind a URL."""
    pool: PoolConfig | None = None
    """Settings of `placed: pool`. None: the defaults."""
    timeout_seconds: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Time in which the images of a lease must be scored, also by the first call, which may load a model. Images of a
    call that takes longer are scored once more, each by itself; an image that takes longer again has no score. None:
    600 seconds, or the time of all tries for a scorer behind a URL. A pool has `pool.timeout_seconds`."""
    parts: tuple[WeightedScorer, ...] = ()
    """Scorers of `name: sum`, two or more. The reward is the sum of weight times score, and each score is a metric."""
    student: StudentConfig | None = None
    """Cheaper scorer of candidates, for exploration profiles with `scorer: student`. What is trained, evaluated or used
    as control is always scored by the reward. The student runs in the worker, whatever `placed` says. None: the
    shipped student, which `ocr` has for the model digits-ocr."""
    combine: Literal["scores", "advantages"] = "scores"
    """What the weights of `parts` multiply in training. `scores`: the scores as they are. `advantages`: each score less
    its mean in the group and divided by its std in the group (GDPO, arXiv 2601.05242), so a scorer with a wide spread
    does not outweigh the others. Evaluations and exploration use the sum of the scores in both cases."""

    @model_validator(mode="after")
    def _parts_make_a_sum(self) -> Self:
        if (self.name == SUM) != (len(self.parts) > 1):
            raise ValueError(
                f"reward.name is {self.name}, with {len(self.parts)} parts; use name: sum for two or more, like "
                "reward: [{name: ocr}, {name: my_reward:look, weight: .5}]"
            )
        if self.combine == "advantages" and not self.parts:
            raise ValueError(f"reward.combine is advantages, but reward.name is {self.name}, one scorer; leave it out")
        names = [part.metric for part in self.parts]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"reward.parts has {repeated} twice; give each a label of its own")
        if nested := next((part for part in self.parts if part.name == SUM or part.weight == 0), None):
            raise ValueError(f"reward.parts has {nested.name} with weight {nested.weight:g}; leave it out")
        return self

    @model_validator(mode="after")
    def _the_place_fits_the_scorers(self) -> Self:
        asks_a_server = [scorer.http is not None or scorer.vlm is not None for scorer in self.scorers]
        if self.placed == "pool" and any(asks_a_server):
            raise ValueError(
                "reward.placed is pool, and a scorer asks a server; a server needs no process beside it: use placed: "
                "http if all scorers do, else with_rollout"
            )
        if self.placed == "http" and not all(asks_a_server):
            raise ValueError("reward.placed is http, and a scorer runs on the node; use with_rollout or pool")
        if self.pool is not None and self.placed != "pool":
            raise ValueError(f"reward.pool is set, but reward.placed is {self.placed}; use placed: pool")
        if self.timeout_seconds is not None and self.placed == "pool":
            raise ValueError(
                f"reward.timeout_seconds is {self.timeout_seconds:g}, but reward.placed is pool; use "
                "reward.pool.timeout_seconds"
            )
        return self

    @property
    def scoring_pool(self) -> PoolConfig | None:
        """Return the settings of the pool, or None if the scorer has no processes of its own."""
        return self.pool or PoolConfig() if self.placed == "pool" else None

    @property
    def pool_gpus(self) -> int:
        """Return the GPUs of each rollout node that only score."""
        pool = self.scoring_pool
        return 0 if pool is None else pool.gpus

    def limit_seconds(self, images: int) -> float | None:
        """Return the time in which a call with so many images must end. None: the pool has a limit of its own."""
        if self.placed == "pool":
            return None
        return self.timeout_seconds or sum(scorer.longest_seconds(images) for scorer in self.scorers)

    @property
    def label(self) -> str:
        """Return the names of the scorers, for a message."""
        return " + ".join(scorer.name for scorer in self.scorers)

    @property
    def asks_a_server(self) -> bool:
        return any(scorer.http is not None or scorer.vlm is not None for scorer in self.scorers)

    @property
    def scored_beside(self) -> int:
        """Return how many leases of a worker are scored while the worker samples the next."""
        pool = self.scoring_pool
        return LEASES_AT_A_SERVER if self.placed == "http" else 1 if pool is None else pool.processes

    @property
    def scorers(self) -> tuple[ScorerConfig, ...]:
        """Return the scorers that score an image."""
        return self.parts or (self,)

    @property
    def student_reward(self) -> "RewardConfig | None":
        """Return the student as a reward, or None without a student of the job's own."""
        return None if self.student is None else RewardConfig.model_validate(self.student.model_dump())

    @property
    def loaded(self) -> tuple[ScorerConfig, ...]:
        """Return every scorer that the job loads: those that score an image, and the student."""
        return self.scorers if self.student is None else (*self.scorers, self.student)

    @property
    def key_names(self) -> tuple[str, ...]:
        """Return the names of the environment variables that the scorers read."""
        servers = (server for scorer in self.loaded for server in (scorer.http, scorer.vlm) if server is not None)
        return tuple(server.key for server in servers if server.key is not None)

    @property
    def judge_micro_usd(self) -> int:
        """Return the budget of all paid judges in micro-dollars; 0 without paid judges."""
        return sum(
            floor(scorer.vlm.max_usd * 1e6) for scorer in self.loaded if scorer.vlm is not None and scorer.vlm.max_usd
        )

    def check_scores(self, model: str, *, is_video: bool) -> None:
        """Check that the reward can score the model's images or videos. Raises ValueError."""
        only_images = next((scorer.name for scorer in self.scorers if ":" not in scorer.name), None)
        if is_video and self.frames is None and only_images is not None:
            raise ValueError(
                f"model.name is {model}, and reward {only_images} scores images, not videos; set "
                f"reward: {{name: {self.name}, frames: 3}}, or use a function of your own (module:function)"
            )
        if not is_video and self.frames is not None:
            raise ValueError(f"reward.frames is {self.frames}, but {model} makes images; leave frames out")
        if self.student_reward is not None:
            try:
                self.student_reward.check_scores(model, is_video=is_video)
            except ValueError as error:
                raise ValueError(f"reward.student: {error}") from None
