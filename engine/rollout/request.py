"""What travels between queue, worker and trainer: requests, attempts, leases, manifests, replies, trajectories.

Identity and attempt are two things. A request is `(run, lineage, batch, prompt, seed, kind)`: what is wanted.
The weight version belongs to the *attempt*: when nobody holds it any more, the same request is issued again
at another version with the same noise. A lease number says who may still speak for an attempt.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal


class Kind(StrEnum):
    """What a rollout is for, in the order of its importance to the open batch."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    CONTROL = "control"
    """Candidates that were not chosen, rolled out like those that were, to see how good the choice is."""
    EXPLORE = "explore"

    __hash__ = str.__hash__


def request_class(shape: int, dtype: str) -> str:
    """What decides how long a step of a job's pictures takes: how many go through the network, and how precisely."""
    return f"{shape} x {dtype}"


Scorer = Literal["reward", "student"]
"""Who scores: the job's reward, or a cheap model that imitates it and ranks candidate seeds."""


class Stream(StrEnum):
    """Seeds of different streams never meet: exploration candidates are train seeds of their batch."""

    TRAIN = "train"
    CONTROL = "control"
    EVAL = "eval"


def seed_of(run_seed: int, stream: Stream, batch: int, prompt: str, index: int) -> int:
    """The 64-bit seed of one picture: all of its noise follows from it (engine/rollout/noise.py).

    blake2b of (run seed, stream, batch, prompt, index), so that a prompt that recurs gets new noise.
    """
    text = json.dumps([run_seed, stream.value, batch, prompt, index], ensure_ascii=True, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class RequestId:
    """One picture that is wanted."""

    run: str
    lineage: int
    batch: int
    prompt: str
    seed: int
    kind: Kind

    def __hash__(self) -> int:
        return hash((self.batch, self.seed))  # what tells them apart; the queue looks them up all the time


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsKey:
    """Weights by version: `live` is what the trainer trains, `ema` the average that is evaluated."""

    version: int
    average: bool = False

    def __str__(self) -> str:
        return f"{self.version}-ema" if self.average else str(self.version)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One prompt of a batch and the seeds that will be trained."""

    prompt: str
    seeds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a batch will train, made durable before its first rollout (invariant 3).

    `minibatches` lists group numbers per optimiser step. The trained multiset equals this, whatever happens.
    """

    run: str
    lineage: int
    batch: int
    version: int
    sampler: str
    groups: tuple[Group, ...]
    minibatches: tuple[tuple[int, ...], ...]

    @property
    def digest(self) -> str:
        """Of what is trained, without run and lineage: two runs of one job can be compared."""
        body = {"batch": self.batch, "version": self.version, "sampler": self.sampler, "minibatches": self.minibatches}
        body["groups"] = [[group.prompt, list(group.seeds)] for group in self.groups]
        return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()

    def requests(self) -> list[RequestId]:
        """In group order, so that complete groups arrive one after another (GAP)."""
        return [
            RequestId(
                run=self.run, lineage=self.lineage, batch=self.batch, prompt=group.prompt, seed=seed, kind=Kind.TRAIN
            )
            for group in self.groups
            for seed in group.seeds
        ]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Manifest":
        groups = tuple(Group(prompt=g["prompt"], seeds=tuple(g["seeds"])) for g in raw["groups"])
        minibatches = tuple(tuple(m) for m in raw["minibatches"])
        return cls(**{**raw, "groups": groups, "minibatches": minibatches})


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A request with the weights it must be made with, and where it stands.

    `step`: denoising steps that are committed; `state`: name of the committed blob, if step > 0.
    """

    request: RequestId
    weights: WeightsKey
    step: int = 0
    state: str | None = None


# --- replies: every call of a worker is answered with one of these --------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Nothing to do now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Make these pictures. The lease covers all of them; they stand at the same step."""

    lease: int
    attempts: tuple[Attempt, ...]
    sampler: str
    shape: int
    dtype: str
    expires_ms: int
    commit_every: int = 0
    """Make in-flight state durable after so many steps; 0: on notice only."""
    pictures: tuple[bool, ...] = ()
    """For each attempt: whether its finished picture is wanted back."""
    scorer: Scorer = "reward"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadWeights:
    """Fetch these weights and make them the current ones."""

    weights: WeightsKey
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Regroup:
    """Be in this sequence-parallel group from now on. Epoch 0: alone.

    `members` in rank order, the first one pulls; `communicator`: the number of what they share. `prepare`: more
    communicators to make first, for groups that may follow: number, rank and degree; `keep`: those made before that may
    be used again, None: any.
    """

    epoch: int
    rank: int
    degree: int
    members: tuple[str, ...]
    communicator: int
    prepare: tuple[tuple[int, int, int], ...] = ()
    keep: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """Commit what is in flight and take nothing new: the node will be gone at the deadline."""

    deadline_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fenced:
    """The lease is no longer yours: drop the work, pull again."""

    lease: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """The run is over, or this worker is no longer wanted."""

    reason: str


Reply = Wait | Work | LoadWeights | Regroup | Drain | Fenced | Exit


# --- what a worker sends back ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A finished picture's reward and named metrics (exact_match, similarity, ...). All finite."""

    reward: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """One finished request. `trajectory` names the blob (train only); exploration sends the score alone.

    `node`: where it was made, as the coordinator keeps it.
    """

    request: RequestId
    score: Score
    trajectory: str | None = None
    node: str = ""


def request_to_list(request: RequestId) -> list[Any]:
    """A request as it travels: [run, lineage, batch, prompt, seed, kind]."""
    return [request.run, request.lineage, request.batch, request.prompt, request.seed, request.kind.value]


def request_from_list(raw: Sequence[Any]) -> RequestId:
    run, lineage, batch, prompt, seed, kind = raw
    return RequestId(run=run, lineage=lineage, batch=batch, prompt=prompt, seed=seed, kind=Kind(kind))
