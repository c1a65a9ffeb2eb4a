"""The values exchanged by queue, worker and trainer: requests, attempts, leases, manifests, replies, trajectories.

Request and attempt are different values. A request is `(run, lineage, batch, prompt, seed, kind)`: the wanted image.
The weight version belongs to the *attempt*: when no worker has the version any more, the queue issues the same request
again at another version with the same noise. Only the worker with a valid lease number may report on an attempt.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

import msgspec


class Kind(StrEnum):
    """The purpose of a rollout, in order of importance to the open batch."""

    TRAIN = "train"
    EARLY = "early"
    """Rollouts of the next batch, made with the weights of one version before (TCSS). Their groups are trained."""
    EVALUATE = "evaluate"
    CONTROL = "control"
    """Rollouts of rejected candidates, sampled like the chosen candidates, to measure the quality of the choice."""
    EXPLORE = "explore"

    __hash__ = str.__hash__


TRAINED = (Kind.TRAIN, Kind.EARLY)
"""Kinds of rollouts that are trained: workers record their trajectories and commit them between steps."""


def request_class(shape: int, dtype: str) -> str:
    """Return the request class: the two values that set the time of a step, batch shape and dtype."""
    return f"{shape} x {dtype}"


Scorer = Literal["reward", "student"]
"""The scorer: the job's reward, or the student, a cheap model that imitates the reward and ranks candidate seeds."""


class Stream(StrEnum):
    """The seed streams.

    Seeds of different streams never overlap; exploration candidates are train seeds of their batch.
    """

    TRAIN = "train"
    CONTROL = "control"
    EVAL = "eval"


def seed_of(run_seed: int, stream: Stream, batch: int, prompt: str, index: int) -> int:
    """Return the 64-bit seed of an image. All noise of the image follows from the seed (engine/diffusion/noise.py).

    The seed is blake2b of (run seed, stream, batch, prompt, index), and a recurring prompt therefore gets new noise.
    """
    text = json.dumps([run_seed, stream.value, batch, prompt, index], ensure_ascii=True, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class RequestId(msgspec.Struct, frozen=True, kw_only=True, order=True, array_like=True):
    """The identity of a wanted image."""

    run: str
    lineage: int
    batch: int
    prompt: str
    seed: int
    kind: Kind

    def __hash__(self) -> int:
        return hash((self.batch, self.seed))  # batch and seed identify a request; the queue hashes often


class WeightsKey(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The key of a weight version.

    `average` selects the moving average for evaluation (`ema`), not the live weights.
    """

    version: int
    average: bool = False

    def __str__(self) -> str:
        return f"{self.version}-ema" if self.average else str(self.version)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A prompt of a batch and the seeds to train."""

    prompt: str
    seeds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of a batch, made durable before the batch's first rollout.

    `minibatches` lists group numbers per optimiser step. The trained multiset always equals the manifest.

    `unit`: groups that train together, cut from the start of each optimiser step; 0: as many as fit into a pass. A
    repeated batch has the same units, so its gradients have the same bits.

    `early`: numbers of the groups that are sampled with version `version - 1`. An early group that cannot be completed
    is made anew with `version`, whole, so `early` is no part of `digest`.
    """

    run: str
    lineage: int
    batch: int
    version: int
    sampler: str
    groups: tuple[Group, ...]
    minibatches: tuple[tuple[int, ...], ...]
    unit: int = 0
    early: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """Return a digest of the trained content without run and lineage, to compare two runs of a job."""
        body = {"batch": self.batch, "version": self.version, "sampler": self.sampler, "minibatches": self.minibatches}
        body["groups"] = [[group.prompt, list(group.seeds)] for group in self.groups]
        return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()

    def requests(self, kind: Kind = Kind.TRAIN) -> list[RequestId]:
        """Return the requests in the order of training: step by step, and within a step group by group.

        Of the early groups for `Kind.EARLY`, else of all other groups.

        The first unit then completes first, and trains while other units are sampled. All idle workers share the images
        of a group, if a lease holds fewer images than a group.
        """
        return self.requests_of(
            [number for step in self.minibatches for number in step if (number in self.early) == (kind is Kind.EARLY)],
            kind,
        )

    def requests_of(self, numbers: Iterable[int], kind: Kind = Kind.TRAIN) -> list[RequestId]:
        """Return the requests of some groups."""
        return [
            RequestId(run=self.run, lineage=self.lineage, batch=self.batch, prompt=group.prompt, seed=seed, kind=kind)
            for group in (self.groups[number] for number in numbers)
            for seed in group.seeds
        ]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Manifest":
        groups = tuple(Group(prompt=g["prompt"], seeds=tuple(g["seeds"])) for g in raw["groups"])
        minibatches = tuple(tuple(m) for m in raw["minibatches"])
        early = tuple(raw.get("early", ()))  # missing in checkpoints of earlier versions
        return cls(**{**raw, "groups": groups, "minibatches": minibatches, "early": early})


class Attempt(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request with the weights to use and the committed progress.

    `step`: number of committed denoising steps. `state`: name of the committed blob if step > 0.
    """

    request: RequestId
    weights: WeightsKey
    step: int = 0
    state: str | None = None


# --- replies: the queue answers every call of a worker with a reply --------------------------------------


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="wait"):
    """The order to wait: no work now."""


class Work(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="work"):
    """The order to sample these images. The lease covers all of them, and all of them are at the same step."""

    lease: int
    attempts: tuple[Attempt, ...]
    sampler: str
    shape: int
    dtype: str
    expires_ms: int
    commit_every: int = 0
    """Steps between commits of in-flight state. 0: commit on a preemption notice only."""
    images: tuple[bool, ...] = msgspec.field(default=(), name="images")
    """For each attempt: True if the finished image must be sent back."""
    scorer: Scorer = "reward"
    latents: bool = False
    """True: the final latents must be sent back, although the images are candidates."""
    no_score: tuple[str, ...] = ()
    """For each attempt: why its image gets no score and the scorer is not called; "": the image is scored. Empty: all
    images are scored."""


class LoadWeights(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="load_weights"):
    """The order to fetch these weights and to make them current."""

    weights: WeightsKey
    digest: str


ALONE = 0
"""The epoch of a worker outside every group."""


class Regroup(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="regroup"):
    """The order to join a sequence-parallel group. Epoch 0: work alone.

    `members` in rank order; the first member pulls work. `communicator`: number of the group's shared communicator.
    `prepare`: communicators to create beforehand for likely later groups, as (number, rank, degree). `keep`: the
    numbers of earlier communicators to keep for reuse; None: keep all.
    """

    epoch: int
    rank: int
    degree: int
    members: tuple[str, ...]
    communicator: int
    prepare: tuple[tuple[int, int, int], ...] = ()
    keep: tuple[int, ...] | None = None


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="drain"):
    """The order to commit in-flight state and take no new work: the node terminates at the deadline."""

    deadline_ms: int


class Yield(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="yield"):
    """The order to give a lease of exploration back and to pull again: a rollout waits, so the GPU is not idle."""

    lease: int


class Fenced(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="fenced"):
    """The answer to a call with a revoked lease: drop the work and pull again."""

    lease: int


class Exit(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="exit"):
    """The order to exit: the run is over, or the worker is not needed any more."""

    reason: str


Reply = Wait | Work | LoadWeights | Regroup | Drain | Yield | Fenced | Exit


# --- results from workers ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The reward of a finished image and named metrics (exact_match, similarity, ...). All values are finite."""

    reward: float
    metrics: Mapping[str, float]
    fault: str = ""
    """The reason of a reward that is NaN, such as the last answer of the scorer's server. Empty: unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The result of a finished request.

    `trajectory`: name of the stored trajectory of a train request, or of a candidate that may be trained. For any other
    request: name of the stored image if the image was wanted, else None.
    `node`: the node that made the image, as recorded by the coordinator.
    """

    request: RequestId
    score: Score
    trajectory: str | None = None
    node: str = ""
