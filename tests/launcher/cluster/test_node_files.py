"""The JSON files of a cloud node keep their names and format, so that an upgrade continues with running nodes.

`tests/data/released/0.1.0/node_files.json` holds every file of a node at many stages of its life, as released code
wrote them. `python -m tests.launcher.cluster.test_node_files` prints what the code writes now.
"""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from launcher.clouds.base import InstanceState
from launcher.decide.node_facts import NodeStatus
from launcher.market.side_prices import DISK_GIB
from launcher.provision.sky.outcome import Failed, Outcome
from tests.launcher.cluster.test_damaged_files import STAGES, bring_to
from tests.launcher.cluster.test_sky_provisioner import TRAINER, Killed, Stage, placement

GOLDEN = Path(__file__).parents[2] / "data/released/0.1.0/node_files.json"

NODES_OWN = ("spec", "agent", "ready", "notice", "exit")
"""Files outside this test: the start instructions follow the engine's settings, the agent writes the others."""

ADDED = {"want": {"disk_gib": DISK_GIB}, "machine": {"notice_ms": None}}
"""Fields that later code adds, by file, and the value that a file without the field means."""

ENDS = {"ending": {"ended_ms", "vm_ended_ms", "disks_ms"}, "ended": {"ended_ms", "disks_ms"}}
"""Times of ends, by file: released code wrote when it first ordered the end, and later code what the cloud said."""

LATER = ("seen",)
"""Files that released code does not write, and that a node may lack."""


def preempted(stage: Stage) -> None:
    stage.bring_up(TRAINER)
    stage.cloud.change(TRAINER, state=InstanceState.STOPPING, reason="STOPPING")
    stage.passes(3)
    stage.cloud.vanish(TRAINER, reclaimed=True, reason="compute.instances.preempted", ended_ms=stage.time.ms)
    stage.passes(6)


def without_capacity(stage: Stage) -> None:
    stage.request(TRAINER)
    stage.passes(1)
    stage.sky.finish(TRAINER, Outcome(failed=Failed.NO_CAPACITY, text="InsufficientInstanceCapacity"))
    stage.passes(5)


def adopted(stage: Stage) -> None:
    stage.request(TRAINER)
    stage.sky.reply_lost = True
    with pytest.raises(Killed):
        stage.passes(1)
    stage.sky.finish(TRAINER)
    stage.process()
    stage.passes(5)


def tried_again(stage: Stage) -> None:
    stage.request(TRAINER)
    stage.passes(1)
    stage.sky.finish(TRAINER, Outcome(failed=Failed.UNKNOWN, text="server restarted"))
    stage.passes(20)


def behind_a_removed_rule(stage: Stage) -> None:
    stage.digest = None
    stage.cloud.missing_rules = ("tcp 22 (SSH) is missing",)
    stage.request(TRAINER)
    stage.passes(1)
    stage.sky.finish(TRAINER)
    stage.cloud.ends_slowly = True
    stage.time.ms += 1_800_000
    stage.passes(5)


def found_by_its_label(stage: Stage) -> None:
    stage.cloud.start(TRAINER, placement())
    stage.cloud.ends_slowly = True
    stage.provisioner.release([TRAINER])
    stage.passes(5)


STORIES: dict[str, Callable[[Stage], None]] = {
    **{name: partial(bring_to, which=name) for name in STAGES},
    "reclaimed": preempted,
    "without capacity": without_capacity,
    "adopted": adopted,
    "tried again": tried_again,
    "behind a removed rule": behind_a_removed_rule,
    "found by its label": found_by_its_label,
}


def files_after(story: str, folder: Path) -> dict[str, dict]:
    """Return the content of each file of the node by its name, with the folder's path removed."""
    stage = Stage(folder)
    STORIES[story](stage)
    return {
        path.stem: json.loads(path.read_text().replace(str(folder), "FOLDER"))
        for path in sorted((folder / "nodes" / TRAINER).glob("[a-z]*.json"))
        if path.stem not in NODES_OWN + LATER
    }


@pytest.mark.parametrize("story", STORIES)
def test_node_files_equal_those_of_released_code_but_for_added_fields(tmp_path, story):
    released = json.loads(GOLDEN.read_text())[story]
    expected = {name: content | ADDED.get(name, {}) for name, content in released.items()}
    assert without_ends(files_after(story, tmp_path)) == without_ends(expected)


def without_ends(files: dict[str, dict]) -> dict[str, dict]:
    return {
        name: {key: value for key, value in content.items() if key not in ENDS.get(name, ())}
        for name, content in files.items()
    }


@pytest.mark.parametrize("story", STORIES)
def test_a_node_with_files_of_released_code_can_be_released(tmp_path, story):
    """The agent's files come from current code; the launcher's released files replace the current ones."""
    stage = Stage(tmp_path)
    STORIES[story](stage)
    for name, content in json.loads(GOLDEN.read_text())[story].items():
        text = json.dumps(content).replace("FOLDER", str(tmp_path))
        (tmp_path / "nodes" / TRAINER / f"{name}.json").write_text(text)
    stage.process()
    stage.cloud.ends_slowly = False
    stage.provisioner.release([TRAINER])
    fact = stage.passes(150, step=1)[TRAINER]
    assert fact.status in (NodeStatus.GONE, NodeStatus.NO_CAPACITY)
    assert stage.provisioner.tidy() or stage.provisioner.tidy()
    assert {one.state for one in stage.cloud.there} <= {InstanceState.GONE}


def main() -> None:
    stories = {}
    for story in STORIES:
        with tempfile.TemporaryDirectory() as folder:
            stories[story] = files_after(story, Path(folder))
    print(json.dumps(stories, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
