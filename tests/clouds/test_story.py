"""The demonstration's story does not race with the run that it is about. Needs no cloud: the run is a fake."""

import io
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from launcher.job.load import load_job
from tests.clouds import demo_reward
from tests.clouds.story import JOB, Story, StoryLog


@dataclass
class World:
    """A world that records its calls; a preempted node is replaced some polls later."""

    run: "Run"
    done: list[str] = field(default_factory=list)

    def reclaim(self, name, seconds=0.0, notice=False):
        self.done.append(f"reclaim {name}{' with notice' if notice else ''}")
        self.run.lose(name)

    def fault(self, kind, cloud, market):
        self.done.append(f"no {market or 'machine'} on {cloud}")
        self.run.is_without_capacity = True

    def hosts(self):
        return []

    def on(self, name, command):
        self.done.append(f"open {name}")


class Run:
    """A run that trains `pace` iterations per poll, and whose nodes take `install` polls for their setup."""

    def __init__(self, pace, install):
        self.world = World(self)
        self.pace, self.install, self.iteration, self.looks = pace, install, 0, 0
        self.is_without_capacity = False
        self.nodes = {
            "trainer": ("trainer-g0", "gcp", 0),
            "spot-0": ("spot-0-g0", "gcp", 0),
            "spot-1": ("spot-1-g0", "gcp", 0),
        }

    def lose(self, name):
        slot = next((slot for slot, node in self.nodes.items() if node[0] == name), None)
        if slot == "trainer" and not self.is_without_capacity:  # a node that is up takes its role
            self.nodes["trainer"], slot = self.nodes["spot-1"], "spot-1"
        if slot == "trainer":  # all of its nodes move
            self.nodes = {one: (f"{one}-g9", "aws", self.looks + self.install) for one in self.nodes}
        elif slot is not None and not self.is_without_capacity:
            generation = int(self.nodes[slot][0].rpartition("-g")[2]) + 1
            self.nodes[slot] = (f"{slot}-g{generation}", "gcp", self.looks + self.install)

    def ready(self, role="", cloud=""):
        return [
            SimpleNamespace(name=name, slot=slot)
            for slot, (name, where, since) in self.nodes.items()
            if since <= self.looks
            and cloud in ("", where)
            and role in ("", "trainer" if slot == "trainer" else "rollout")
        ]

    def view(self):
        return SimpleNamespace(iteration=self.iteration, metric="after_story", score=0.0)

    def until(self, what, holds, seconds):
        for _ in range(1000):
            if holds():
                return
            self.looks += 1
            self.iteration += self.pace
        raise TimeoutError(what)


OPENED = ("open trainer-g9", "open spot-0-g9", "open spot-1-g9")
LOST_TRAINERS = ("reclaim trainer-g0 with notice", "reclaim spot-1-g0")
LOST_AT_ONCE = ("no machine on gcp", "reclaim spot-1-g1", "reclaim spot-0-g2", "reclaim spot-1-g2")


@pytest.mark.parametrize(("pace", "install"), [(1000, 1), (1000, 90), (1, 1), (1, 300)])
@pytest.mark.parametrize(
    ("is_on_spot", "ends", "waits"),
    [(True, (*LOST_TRAINERS, *LOST_AT_ONCE), 14), (False, ("no on_demand on gcp", "reclaim trainer-g0"), 8)],
)
def test_the_story_is_complete_and_opens_the_target_last_at_any_speed(pace, install, is_on_spot, ends, waits):
    run, out = Run(pace, install), io.StringIO()
    Story(run=run, log=StoryLog(out=out), until=0.0, is_on_spot=is_on_spot).play()
    lost = ("reclaim spot-0-g0 with notice", "reclaim spot-0-g1")
    assert run.world.done == [*lost, *ends, *OPENED]
    texts = [line.partition("waits until: ")[2] for line in out.getvalue().splitlines() if "waits until: " in line]
    assert texts[2:4] == ["its successor serves (with notice)", "its successor serves (without notice)"]
    assert len(texts) == waits


def test_a_late_node_is_opened_too_and_each_only_once():
    run = Run(1, 1)
    story = Story(run=run, log=StoryLog(out=io.StringIO()), until=0.0)
    story.open_target()
    run.lose("spot-1-g0")
    run.looks += 1
    story.open_target()
    assert run.world.done == ["open trainer-g0", "open spot-0-g0", "open spot-1-g0", "open spot-1-g1"]


def test_no_match_counts_for_the_target_before_the_storys_last_step(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_reward, "GATE", tmp_path / "over")
    ocr = [demo_reward.Score(reward=0.75, metrics={"exact_match": 1.0, "similarity": 0.75})]
    monkeypatch.setattr(demo_reward, "_ocr", lambda: lambda images, prompts: ocr)
    images = torch.zeros(1, 1, 12, 32)
    (before,) = demo_reward.score(images, ["1234"])
    (tmp_path / "over").touch()
    (after,) = demo_reward.score(images, ["1234"])
    assert (before.metrics["after_story"], after.metrics["after_story"]) == (0.0, 1.0)
    assert before.reward == after.reward == 0.75  # the training settings do not change
    assert before.metrics["exact_match"] == 1.0


def test_the_demonstrations_job_outlasts_any_story_and_names_the_gated_metric(tmp_path):
    settings = {"run": "demo", "target": 0.7, "runtime": "local", "step_seconds": 0.3}
    (tmp_path / "demo.yaml").write_text(JOB.format(use_spot="true", spot="only", **settings))
    job = load_job(tmp_path / "demo.yaml").job
    assert (job.reward.name, job.target.metric, job.iterations) == ("demo_reward:score", "after_story", 1_000)
    # A plan expects 41 s an iteration. A launch is refused if its plan does not fit into the deadline.
    assert job.budget.deadline / 1000 / job.iterations > 60
