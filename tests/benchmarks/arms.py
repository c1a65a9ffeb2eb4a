"""One arm of the exploration benchmarks with one seed: a real run on two pinned cores, and what came of it.

The trainer's node has core 0 and the spot node core 1, each with one thread. A run goes on until it has done its
budget of iterations and crossed the target, or met the cap. What it did is stored by the version of the engine's code,
so that a benchmark can be made in pieces. `Settings` were fixed before the reported seeds were run.
"""

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import psutil
from safetensors.torch import load

from engine.algorithm_config import AlgorithmConfig
from engine.config import (
    CandidateBudget,
    CheckpointConfig,
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    ProfileConfig,
    RuntimeConfig,
)
from engine.storage.checkpoint import CheckpointStore
from tests.benchmarks.page import ROOT
from tests.engine.fleet import Fleet

PIECES = Path(__file__).parent / "pieces"
"""Stored cells; not in the repository."""

LOOK_SECONDS = 1.0
"""Between two looks at a run; CPU seconds in between are interpolated."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all arms share. Tuned for the better plain arm, on seeds that are not reported (`--tune`)."""

    learning_rate: float = 4e-4
    clip_range: float = 1e-3
    trained: int = 48
    """Pictures that an iteration trains."""
    candidates: int = 120
    """Of a batch that explores: so many fit beside training here."""
    explored_together: int = 60
    """Candidates in a forward pass."""
    random_fraction: float = 1 / 24
    """Of the candidates that were not chosen: rolled out afresh to check the ranking. 3 of 72, the fewest by which the
    monitor may stop exploring (`LEAST_CONTROLS`); figures of before 2026-11-24 were made with 2, by which it cannot."""
    budget: int = 18
    """Iterations after which the arms are compared."""
    cap: int = 45
    """Iterations after which a run has not reached the target."""
    target: float = 0.75
    evaluate_every: int = 6
    held_out: int = 512


@dataclass(frozen=True, kw_only=True)
class Arm:
    """How an arm differs from the others."""

    prompts: int = 6
    mode: str = "none"
    candidates: int | None = None
    """Of a batch, when it explores; None: as the settings say."""
    images: int | None = None
    """Trained pictures of a prompt; None: so many that the batch is as large as everybody's."""
    policy: str = "uniform"
    steps: int | None = None
    """Denoising steps of a candidate; None: all."""
    spot: bool = True
    module: str = "engine.node.agent"
    """What the spot node runs."""
    most: int | None = None
    """Iterations at most, target or not."""
    learning_rate: float | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of candidates. A CPU without bfloat16 instructions takes five times as long with bfloat16."""
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the algorithm, in the place of those of `Settings`."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one run did. Lists have one value for each iteration."""

    arm: str
    seed: int
    curve: dict[int, float]
    """Exact match by iterations done."""
    wall_seconds: list[float]
    training_seconds: list[float]
    cpu_seconds: dict[str, float]
    """Of each node, from the second iteration to the last, evaluation left out; by iteration."""
    stall_seconds: list[float]
    """The trainer had trained a batch and still waited for its candidates."""
    exploration_inside: float | None
    """Share of the spot node's exploration that lies between the trainer's first and last training of a batch. The
    first batch, in which everything is touched for the first time, is left out."""
    ranking: dict[str, Any]
    """The monitor's last report."""
    explored: list[int]
    manifests: dict[int, str]
    load1: float
    checks: dict[str, float] = field(default_factory=dict)
    """Exact match after the budget as other recognisers read it."""


def engine_config(arm: Arm, settings: Settings, seed: int) -> EngineConfig:
    images = arm.images or settings.trained // arm.prompts
    candidates = CandidateBudget(candidates=arm.candidates or settings.candidates)
    return EngineConfig(
        seed=seed,
        iterations=arm.most or settings.cap,
        algorithm=AlgorithmConfig.model_validate(
            {
                "prompts_per_batch": arm.prompts,
                "images_per_prompt": images,
                "learning_rate": arm.learning_rate or settings.learning_rate,
                "clip_range": settings.clip_range,
                **arm.algorithm,
            }
        ),
        exploration=ExplorationConfig.model_validate(
            {
                "mode": arm.mode,
                "budget": candidates,
                "wait": "all",
                "policy": arm.policy,
                "random_fraction": settings.random_fraction,
                "profiles": (
                    ProfileConfig(
                        name="cheap",
                        dtype=arm.dtype,
                        shape=settings.explored_together,
                        steps=arm.steps,
                        scorer="student",
                    ),
                ),
            }
        ),
        evaluation=EvaluationConfig(prompts=settings.held_out, every=settings.evaluate_every, wait=True),
        checkpoint=CheckpointConfig(keep=settings.cap + 1),
        runtime=RuntimeConfig(shape=24, trainer_threads=1),
    )


# --- cells ----------------------------------------------------------------------------------------------------


@cache
def code_version() -> str:
    """Of everything that decides what a run does: the engine and its weights."""
    digest = blake2b(digest_size=6)
    for path in sorted((ROOT / "engine").rglob("*")):
        if path.suffix in (".py", ".safetensors"):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def piece_of(name: str, arm: Arm, settings: Settings, seed: int, *, checked: bool = False) -> Path:
    """Where a cell is stored."""
    what = json.dumps([asdict(arm), asdict(settings), seed, checked], sort_keys=True)
    return PIECES / code_version() / f"{name}-{seed}-{blake2b(what.encode(), digest_size=4).hexdigest()}.json"


def stored_or_run(name: str, arm: Arm, settings: Settings, seed: int, *, checked: bool = False) -> Cell:
    """The cell of this arm and seed: from its file if this code and these settings made it, else from a run."""
    path = piece_of(name, arm, settings, seed, checked=checked)
    if path.exists():
        raw = json.loads(path.read_text())
        curves = {name: {int(k): v for k, v in raw[name].items()} for name in ("curve", "manifests")}
        return Cell(**raw | curves)
    cell = run(name, arm, settings, seed, checked=checked)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(cell)))
    return cell


def run(name: str, arm: Arm, settings: Settings, seed: int, *, checked: bool) -> Cell:
    """A run of two real nodes. `checked`: other recognisers read what the weights after the budget draw."""
    load1 = psutil.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), engine_config(arm, settings, seed))
        try:
            if arm.spot:
                fleet.start("spot-0", module=arm.module, cores=[1])
            fleet.start("trainer", cores=[0])
            meter = _follow(fleet, arm, settings)
            cell = _read(name, fleet, seed, meter, load1)
        finally:
            fleet.close()
        if not checked:
            return cell
        return Cell(**asdict(cell) | {"checks": _checks(Path(folder), settings)})


def _follow(fleet: Fleet, arm: Arm, settings: Settings) -> "Meter":
    meter = Meter(fleet)
    until = time.monotonic() + 900.0
    while not fleet.events("engine_finished"):
        if time.monotonic() > until:
            raise TimeoutError(f"a run of {settings.cap} iterations takes more than 900 s; logs:\n{fleet.logs()}")
        meter.look()
        evaluated = {event.iteration: event.metrics["exact_match"] for event in fleet.events("evaluated")}
        if max(evaluated, default=0) >= settings.budget and max(evaluated.values()) >= settings.target:
            break
        time.sleep(LOOK_SECONDS)
    else:
        time.sleep(1.5)  # the coordinator tells usage once a second
    meter.look()
    return meter


class Meter:
    """CPU seconds of a fleet's nodes over time."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._looks: list[tuple[float, dict[str, float]]] = []

    def look(self) -> None:
        spent = {node: sum(map(_cpu_seconds, self._fleet.pids(node))) for node in self._fleet.agents}
        self._looks.append((time.time(), spent))

    def between(self, node: str, begun: float, ended: float) -> float:
        """CPU seconds of a node between two moments (seconds since 1970), interpolated."""
        return self._at(node, ended) - self._at(node, begun)

    def _at(self, node: str, moment: float) -> float:
        pairs = itertools.pairwise((at, spent[node]) for at, spent in self._looks if node in spent)
        for (before, less), (after, more) in pairs:
            if moment <= after:
                return less + (more - less) * max(0.0, moment - before) / (after - before)
        return self._looks[-1][1].get(node, 0.0)


def _cpu_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _read(name: str, fleet: Fleet, seed: int, meter: Meter, load1: float) -> Cell:
    done = fleet.events("iteration_done")
    ranked = fleet.events("ranked")
    spans = [span for event in fleet.events("node_usage", "coordinator") for span in event.spans]
    stalls, inside = _timeline(spans)
    windows = list(_windows(fleet))
    cpu = {
        node: sum(meter.between(node, *window) for window in windows) / max(1, len(windows)) for node in fleet.agents
    }
    return Cell(
        arm=name,
        seed=seed,
        curve={event.iteration: event.metrics["exact_match"] for event in fleet.events("evaluated")},
        wall_seconds=[event.wall_seconds for event in done],
        training_seconds=[event.phase_ms.get("training", 0) / 1000 for event in done],
        cpu_seconds=cpu,
        stall_seconds=stalls,
        exploration_inside=inside,
        ranking=asdict(ranked[-1]) if ranked else {},
        explored=[event.explored for event in done],
        manifests=fleet.manifests(),
        load1=load1,
    )


def _windows(fleet: Fleet) -> Iterator[tuple[float, float]]:
    """From when to when the iterations after the first went on, evaluation left out; seconds since 1970."""
    begun = None
    for progress in fleet.progress():
        at = progress.at_ms / 1000
        if progress.event.KIND == "iteration_done":
            if begun is not None:
                yield begun, at
            begun = at
        elif progress.event.KIND == "evaluated" and begun is not None:
            begun = at


def _timeline(spans: Sequence[Sequence[Any]]) -> tuple[list[float], float | None]:
    """Seconds that the trainer waited between training a batch and knowing the next, by batch, writing the checkpoint's
    files left out; and how much of the spot node's exploration lay inside a training phase."""
    trainer = sorted((begin, end, phase) for worker, phase, begin, end in spans if worker == "trainer/trainer")
    phases: list[tuple[int, int]] = []
    stalls: list[float] = []
    training: list[tuple[int, int]] = []
    free = 0
    for begin, end, phase in trainer:
        if phase == "training":
            training.append((begin, end))
        elif phase == "checkpoint":
            if training:  # its files come first, its manifest when the next batch is known
                phases.append((training[0][0], training[-1][1]))
                stalls.append(0.0)
                free, training = training[-1][1], []
            if stalls:
                stalls[-1] += max(0, begin - free) / 1000
            free = end
    first = phases[0][1] if phases else 0
    explored = [(begin, end) for _, phase, begin, end in spans if phase == "exploration" and begin > first]
    whole = sum(end - begin for begin, end in explored)
    shared = sum(max(0, min(end, e) - max(begin, b)) for begin, end in explored for b, e in phases)
    return stalls, shared / whole if whole else None


# --- what cells say -------------------------------------------------------------------------------------------


def crossing(cell: Cell, target: float) -> float | None:
    """Iterations to the target, by a straight line between two evaluations; None: never."""
    points = sorted(cell.curve.items())
    if points[0][1] >= target:
        return 0.0
    for (before, low), (after, high) in itertools.pairwise(points):
        if high >= target:
            return before + (after - before) * (target - low) / (high - low)
    return None


def iteration_seconds(cell: Cell) -> float:
    """Wall seconds of an iteration: the mean without the first, which touches everything for the first time."""
    return statistics.mean(cell.wall_seconds[1:])


def iteration_cpu_seconds(cell: Cell) -> float:
    """CPU seconds of the busier node, by iteration: what one takes at least, whoever else is on the machine."""
    return max(cell.cpu_seconds.values())


# --- other readers --------------------------------------------------------------------------------------------


def _checks(folder: Path, settings: Settings) -> dict[str, float]:
    from tests.benchmarks.readers import exact_by_reader

    store = CheckpointStore(f"file://{folder}/store")
    for name in store.names():
        checkpoint = store.load(name)
        if checkpoint.iteration == settings.budget:
            return exact_by_reader(load(checkpoint.files["ema"]), settings.held_out)
    raise LookupError(f"there is no checkpoint of iteration {settings.budget} among {store.names()}")
