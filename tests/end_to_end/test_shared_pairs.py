"""Workers that share images, beside each other part of the pipeline: the batches are those of workers that share none.

`tests/engine/test_pairs.py` has the pairs without shared images.
"""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from tests.end_to_end.sharing import Sharing
from tests.end_to_end.test_shared_images import BEGUN, CONFIG, WORKERS
from tests.engine.nursery import NurseryFleet

pytestmark = pytest.mark.long  # half a minute for each run

FEWEST = 4
PACE_SECONDS = 0.1

PAIRS: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "in-path, std, updates, diffusion-nft": {
        "algorithm": {"name": "diffusion-nft", "std": "batch", "updates_per_batch": 2},
        "exploration": {"mode": "in-path"},
    },
    "help, early groups, units, grpo-guard": {
        "algorithm": {"name": "grpo-guard", "std": "ema", "unit": 1, "order": "exact"},
        "early": {"share": 0.5, "patience_seconds": 600},
        "runtime": {"help": "feedback"},
    },
}


def config_of(pair: str, **runtime: Any) -> EngineConfig:
    job = CONFIG.model_dump(mode="json", by_alias=True)
    for section, changes in PAIRS[pair].items():
        job[section] = {**(job.get(section) or {}), **changes}
    if job["algorithm"]["name"] == "diffusion-nft":
        job["sampler"].pop("noise_level")
    job["runtime"] |= runtime
    return EngineConfig.model_validate(job)


def check_versions(folder: Path) -> set[str]:
    """Check that every rollout has the weights of its batch, and an early one those before. Return the kinds."""
    kinds = set()
    for path in folder.glob("nodes/*/traces/*.jsonl"):
        text = path.read_text()
        for line in map(json.loads, text[: text.rfind("\n") + 1].splitlines()):
            for batch, _prompt, _seed, kind in line.get("requests", ()):
                if kind in ("train", "early"):
                    kinds.add(kind)
                    assert line["version"] == (batch if kind == "train" else batch - 1), line
    return kinds


@pytest.mark.parametrize("pair", PAIRS)
def test_shared_images_change_no_batch_of_a_pair(tmp_path: Path, pair: str) -> None:
    """A worker of a group is killed and another is frozen meanwhile."""
    shared = NurseryFleet(tmp_path / "shared", config_of(pair, sp_degree=WORKERS, step_seconds=PACE_SECONDS))
    sharing = Sharing(shared.folder / "nodes", workers=WORKERS)
    try:
        for node in ("trainer", *BEGUN):
            shared.start(node, workers=WORKERS)
        sharing.wait(dict.fromkeys(BEGUN, 0))
        sharing.hurt({"spot-0": (1, signal.SIGKILL), "spot-1": (0, signal.SIGSTOP)})
        shared.wait_for_iteration(max(FEWEST, len(shared.manifests())))
        shared.post("/stop", json.dumps({"reason": "all has happened"}))
        assert shared.wait_until_finished().reason == "stopped", shared.logs()
        found = shared.manifests()
    finally:
        shared.close()
    kinds = check_versions(shared.folder)
    assert kinds == ({"train", "early"} if "early" in PAIRS[pair] else {"train"})
    alone = NurseryFleet(tmp_path / "alone", config_of(pair))
    try:
        for node in ("trainer", *BEGUN):
            alone.start(node, workers=WORKERS)
        alone.wait_for(lambda: len(alone.manifests()) >= len(found), seconds=240)
        assert {batch: digest for batch, digest in alone.manifests().items() if batch in found} == found
    finally:
        alone.close()
