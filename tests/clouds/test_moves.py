"""A run on spot whose region has no spot goes to another region, or to the other cloud, with its checkpoint."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.events import CheckpointSaved
from launcher.ledger.store import find_run, progress_of
from tests.clouds.billed import check_bill
from tests.clouds.launched import BACK_SECONDS, Launched, job, wait_for
from tests.clouds.test_spot_trainer import UP_SECONDS
from tests.fakes.clouds.world import World

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(2400)]

ITERATIONS = 10
"""Enough that some are left when spot ends, also where orders to the fake cloud take long. On a busy computer six were
over before that."""


def job_text(name: str, infra: str) -> str:
    """Return the text of a job with a trainer and two rollout nodes, all on spot, that repeats bit for bit."""
    text = job(name, infra, iterations=ITERATIONS, recovery="trainer_wait: 2m")
    for before, after in (
        ("images_per_prompt: 4}", "images_per_prompt: 4, order: fixed}"),
        ("shape: 8,", "shape: 8, trainer_threads: 1,"),
        ("trainer: {", "trainer: {use_spot: true, "),
        ("num_nodes: 1, min_nodes: 1}", "num_nodes: 2, min_nodes: 2}"),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    return text


def newest(run: Launched) -> CheckpointSaved | None:
    """Return the newest checkpoint that counts."""
    with run.sessions() as session:
        saved = progress_of(session, find_run(session, run.name), CheckpointSaved.KIND)
    return CheckpointSaved(**saved[-1].event) if saved else None


@pytest.fixture(scope="module")
def undisturbed(world: World) -> Iterator[Launched]:
    """The same job on this machine, finished."""
    run = Launched(world=world, name="moving", home=world.folder / "home" / "undisturbed")
    text = re.sub(r"^(infra|store|ssh_from): .*\n", "", job_text("moving", "gcp"), flags=re.MULTILINE)
    text = text.replace(", launches_per_minute", "").replace("accelerators: L4:1", "accelerators: L40S:1")
    run.launch(f"{text}infra: local\npreemptions: {{trace: none}}\n")
    wait_for(lambda: run.view().status == "finished", 600)
    yield run
    run.spotrl("down", run.name, check=False)


@pytest.mark.parametrize("to", ["region", "cloud"])
def test_a_run_whose_region_has_no_spot_goes_on_elsewhere_and_trains_the_same_bits(
    world: World, undisturbed: Launched, tmp_path: Path, to: str
) -> None:
    run = Launched(world=world, name=f"moving-{to}", home=world.folder / "home" / f"to-{to}")
    try:
        run.spotrl("catalog", "refresh")
        run.launch(job_text(run.name, "gcp" if to == "region" else "gcp,aws"))
        run.until("all its nodes work", lambda: len(run.ready()) == 3, UP_SECONDS)
        run.until("two batches are saved", lambda: (saved := newest(run)) is not None and saved.iteration >= 2, 300)
        places = {record.site for record in run.records().values()}
        assert len(places) == 1, "a run is in one region"
        ((cloud, region),) = places
        world.fault("capacity", f"{cloud}/{region}" if to == "region" else cloud, market="spot")
        for node in run.ready():
            world.reclaim(node.name)
        run.until("a trainer elsewhere works", lambda: bool(run.ready("trainer")), BACK_SECONDS)
        wait_for(lambda: run.view().status == "finished", 900)
        assert newest(run) is not None
        assert newest(run).digest == newest(undisturbed).digest
        assert run.every_batch_is_whole()
        moved = {record.site for record in run.records().values() if "up" in record.happened} - places
        assert len(moved) == 1
        assert (moved.pop()[0] == cloud) == (to == "region")
        assert all(record.market == "spot" for record in run.records().values() if "up" in record.happened)
        run.down()
        assert run.instances() == []
        assert check_bill(run, tmp_path)["basis"] == "billed"
        (move,) = json.loads(run.spotrl("report", run.name, "--json").stdout)["moves"]
        assert re.fullmatch(rf"no spot in {cloud} {region} for .*: the run moves to .* of traffic", move["why"])
        assert 0 < move["minutes"] < 30
    finally:
        world.clear()
        run.spotrl("down", run.name, check=False)
