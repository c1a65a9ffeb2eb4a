"""Parts of the pipeline in every allowed pair: killed in the middle of a batch, a run ends on the same bits.

Few runs hold all pairs: each row of `ROWS` is one job, and a test says that no allowed pair is missing. Groups train as
they complete in all rows. `tests/end_to_end/test_shared_pairs.py` has the pairs with shared images.
"""

import re
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.algorithm.transaction import Transaction
from engine.config import EngineConfig
from engine.protocol.request import TRAINED, Kind
from tests.engine.test_loop import (
    CANDIDATES,
    TINY,
    Killed,
    build,
    one_thread,  # noqa: F401  a fixture
    outcome,
    progress,
)

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"
PARTS = ("exploration", "GAP", "TAG", "TCSS", "SP", "in-path", "std", "updates", "algorithm")


class Row(NamedTuple):
    exploration: str
    help: str
    early: float
    std: str
    updates: int
    algorithm: str


ROWS = [
    Row("stale", "off", 0.5, "group", 1, "flow-grpo"),
    Row("stale", "feedback", 0.5, "batch", 2, "grpo-guard"),
    Row("stale", "search", 0.5, "ema", 2, "flow-grpo"),
    Row("stale", "search", 0.0, "batch", 1, "diffusion-nft"),
    Row("in-path", "feedback", 0.0, "group", 2, "diffusion-nft"),
    Row("in-path", "off", 0.0, "batch", 1, "grpo-guard"),
    Row("in-path", "search", 0.0, "ema", 1, "flow-grpo"),
    Row("none", "off", 0.0, "ema", 2, "diffusion-nft"),
    Row("none", "feedback", 0.0, "batch", 1, "flow-grpo"),
    Row("none", "search", 0.5, "group", 2, "grpo-guard"),
    Row("stale", "feedback", 0.5, "ema", 1, "grpo-guard"),
]
QUICK = {2, 4, 5, 8}
"""Rows that hold every value. The others run with `make test-long`."""

REFUSED = {(("exploration", "in-path"), ("early", 0.5)), (("early", 0.5), ("algorithm", "diffusion-nft"))}
"""Pairs that the job's schema refuses; `test_early_groups.py` has their messages."""


def pairs(row):
    return set(combinations(row._asdict().items(), 2))


def config_of(row):
    job = TINY.model_dump(mode="json", by_alias=True)
    job["algorithm"] |= {
        "name": row.algorithm,
        "std": row.std,
        "updates_per_batch": row.updates,
        "order": "exact",
        "unit": 1,
        "learning_rate": 3e-3,
    }
    if row.algorithm == "diffusion-nft":
        job["sampler"].pop("noise_level")
    if row.exploration == "none":
        job["exploration"] = {"mode": "none"}
    job["exploration"]["mode"] = row.exploration
    job["early"] = {"share": row.early, "patience_seconds": 600}
    job["runtime"]["help"] = row.help
    return EngineConfig.model_validate(job)


class Steps:
    """Denoising steps of the rollouts of a run, whichever of its processes made them."""

    def __init__(self):
        self.made = Counter()
        """Number by (request, step)."""
        self.versions = {}
        """Weight versions of each kind of request and batch."""

    def watch(self, run):
        for worker in (*run.workers, run.loop.worker):
            worker.sampler.trace = self._trace

    def _trace(self, work, step):
        for attempt in work.attempts:
            request = attempt.request
            if request.kind in TRAINED:
                self.made[request, step] += 1
                self.versions.setdefault((request.kind, request.batch), set()).add(attempt.weights.version)


def begun(config, folder, steps):
    """Build a run whose spot worker has called in, so that the trainer knows of a rollout GPU."""
    run = build(config, folder)
    steps.watch(run)
    run.workers[0].serve_once(wait=False)
    return run


def check_steps(steps, row):
    """Check that no step was made twice, that nothing is missing, and that no version is older than one before."""
    assert set(steps.made.values()) == {1}, "no step of an image is made twice"
    of_batch = Counter(request.batch for request, _ in steps.made)
    images = CANDIDATES if row.exploration == "in-path" else 4
    assert of_batch == dict.fromkeys(range(TINY.iterations), images * TINY.sampler.steps)
    fresh = {(Kind.TRAIN, batch): {batch} for batch in range(TINY.iterations)}
    early = {(Kind.EARLY, batch): {batch - 1} for batch in range(1, TINY.iterations)}
    assert steps.versions == fresh | (early if row.early else {})


def test_the_rows_hold_every_allowed_pair():
    values = {name: {getattr(row, name) for row in ROWS} for name in Row._fields}
    possible = {
        ((one, value), (other, second))
        for one, other in combinations(Row._fields, 2)
        for value in values[one]
        for second in values[other]
    }
    assert possible - set().union(*map(pairs, ROWS)) == REFUSED
    quick = {name: {getattr(ROWS[number], name) for number in QUICK} for name in Row._fields}
    assert quick == values


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id="-".join(map(str, row)), marks=pytest.mark.slow if number in QUICK else pytest.mark.long)
        for number, row in enumerate(ROWS)
    ],
)
def test_every_pair_killed_in_a_batch_ends_on_the_same_bits(tmp_path, monkeypatch, row):
    config, steps = config_of(row), Steps()
    assert begun(config, tmp_path / "straight", steps).loop.run().reason == "iterations"
    check_steps(steps, row)
    done = progress(tmp_path / "straight", "iteration_done")
    assert [event.iteration for event in done] == list(range(TINY.iterations))
    assert all(event.health["skipped_groups"] == 0 < event.health["gradient_norm"] for event in done)
    assert [event.health["staleness"] for event in done] == [0.0] + [row.early] * (TINY.iterations - 1)
    assert done[0].explored == (CANDIDATES if row.exploration == "stale" else 0)
    for seconds in (event.schedule for event in done):
        assert seconds["seconds"] > seconds["helped_seconds"] + seconds["waited_seconds"] > 0
    assert any(event.schedule["helped_seconds"] > 0 for event in done) == (row.help != "off")

    added = Transaction.add
    groups = 0

    def deadly(transaction, *arguments, **options):
        nonlocal groups
        result = added(transaction, *arguments, **options)
        groups += 1
        if groups == 3:  # one of the two groups of the second batch
            raise Killed
        return result

    steps = Steps()
    monkeypatch.setattr(Transaction, "add", deadly)
    with pytest.raises(Killed):
        begun(config, tmp_path / "killed", steps).loop.run()
    assert begun(config, tmp_path / "killed", steps).loop.run().reason == "iterations"
    check_steps(steps, row)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "straight")


# --- the table of the page


def test_the_page_names_a_test_for_every_pair_of_parts():
    """A cell names tests as `FILE` WORDS, WORDS; `FILE` WORDS: parts of the names of tests that exist."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    tested = {cells[0]: cells[-1] for cells in lines if len(cells) == 4 and ", " in cells[0]}
    assert list(tested) == [", ".join(pair) for pair in combinations(PARTS, 2)]
    folder = Path(__file__).parents[1]
    for pair, cell in tested.items():
        for named in () if cell == "job schema" else cell.split("; "):
            file, words = re.fullmatch(r"`(\w+)` (.+)", named).groups()
            found = [*folder.glob(f"e*/{file}.py")]
            assert len(found) == 1, f"{pair}: {named}"
            tests = re.findall(r"^def (test_\w+)", found[0].read_text(), re.MULTILINE)
            for word in words.split(", "):
                assert any(word in test for test in tests), f"{pair}: no test of {file} has {word} in its name"
