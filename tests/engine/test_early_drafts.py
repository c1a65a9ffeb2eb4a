"""Drafts of early groups, by calls: when one is made, with which version it is sampled, and when early groups pause.

The explorer, the prompts and the store are real. The coordinator is a list of what it was asked.
"""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.algorithm.health import Health
from engine.config import CandidateBudget, SamplerConfig, WindowConfig
from engine.diffusion.sampler import batch_plan
from engine.exploration.explorer import Explorer
from engine.noise_schedule import EVEN
from engine.prompts import prompt_source
from engine.protocol.request import Finished, Group, Kind, Manifest, RequestId, Score, WeightsKey
from engine.storage.checkpoint import CheckpointStore
from engine.trainer.checkpoints import Checkpoints
from engine.trainer.coordinator_client import Collected
from engine.trainer.early_groups import MOST_OUTSIDE, PAUSE_BATCHES, EarlyGroups
from engine.trainer.exploration import SeedExploration
from engine.trainer.state import TrainerState
from tests.engine.test_early_groups import EARLY, early_result

BATCH = 3
"""The batch that is drafted, while batch 2 is open."""

CONFIG = EARLY.model_copy(
    update={
        "iterations": 20,
        "sampler": SamplerConfig(steps=4, window=WindowConfig(size=1, order="sliding")),
        "algorithm": EARLY.algorithm.model_copy(update={"prompts_per_batch": 4}),
        "exploration": EARLY.exploration.model_copy(update={"budget": CandidateBudget(candidates=32)}),
    }
)
"""Eight candidates for each prompt. Each batch has another sampler plan."""


class Coordinator:
    """Records submissions and orders. `found`, `early`: candidates and early results that exist.

    `to_come`: more are expected.
    """

    def __init__(self, store):
        self.alone_since, self.found, self.to_come = None, [], False
        self.submitted, self.drafts_before = [], []
        self.early, self.blobs = [], {}
        self._store = store

    def submit(self, requests, plan, *, weights, shape):
        self.submitted.append((list(requests), plan, weights, shape))
        self.drafts_before.append(self._store.draft(1, BATCH))

    def explore(self, order):
        pass

    def collect(self, kind, batch, have, *, wait):
        assert (batch, wait) == (BATCH, False)
        found = self.found if kind is Kind.EXPLORE else self.early
        return Collected(results=found[have:], blobs=self.blobs, to_come=self.to_come, poisoned=())


class Side:
    """The trainer's side of early groups in batch 2. `counted`: the exploration has a fixed number of candidates."""

    def __init__(self, folder, config=CONFIG, *, counted=True):
        self.config = config
        self.store = CheckpointStore(f"file://{folder}")
        self.state = TrainerState(config_digest="d", iteration=BATCH - 1, lineage=1)
        self.coordinator, self.warned, self.share = Coordinator(self.store), [], 0.5
        reporter = SimpleNamespace(warn=self.warned.append)
        self.prompts = prompt_source(config, None)
        exploration = SeedExploration(
            config, Explorer(config, "r"), self.prompts, self.state, self.coordinator, reporter, EVEN
        )
        self.early = EarlyGroups(
            config,
            "r",
            self.prompts,
            EVEN,
            state=self.state,
            exploration=exploration,
            coordinator=self.coordinator,
            checkpoints=Checkpoints(SimpleNamespace(store=self.store), self.state, reporter),
            reporter=reporter,
            share=lambda: self.share,
        )
        self.order = exploration.order(BATCH, pool=self.early.pool(BATCH))
        assert self.order is not None
        if not counted:
            self.order = type(self.order)(**{**_fields(self.order), "counted": None})

    def candidates(self, each):
        """Return so many candidates of each prompt of the batch; the last have the highest rewards."""
        return [
            Finished(
                request=RequestId(run="r", lineage=1, batch=BATCH, prompt=prompt, seed=seed, kind=Kind.EXPLORE),
                score=Score(reward=0.1 * seed, metrics={}),
            )
            for prompt in self.prompts.batch(BATCH)
            for seed in range(each)
        ]

    def drafted(self, each=4):
        """Return the draft of these candidates."""
        self.early.begin(self.order)
        self.coordinator.found = self.candidates(each)
        self.early.look()
        return self.store.draft(1, BATCH)


def _fields(order):
    return {name: getattr(order, name) for name in order.__struct_fields__}


def test_a_draft_is_durable_before_its_rollouts_are_ordered_with_the_open_version(tmp_path):
    side = Side(tmp_path)
    draft = side.drafted()
    plan = batch_plan(CONFIG, BATCH, EVEN)
    assert (draft.run, draft.lineage, draft.batch, draft.version) == ("r", 1, BATCH, BATCH - 1)
    assert draft.sampler == plan.signature
    prompts = side.prompts.batch(BATCH)
    assert [group.prompt for group in draft.groups] == list(prompts[:2]), "half of four groups"
    assert {group.seeds for group in draft.groups} == {(0, 3)}, "the seeds with the most variance"
    assert side.coordinator.drafts_before == [draft], "a restarted trainer must not choose again"
    weights, shape = WeightsKey(version=BATCH - 1), CONFIG.runtime.shape
    assert side.coordinator.submitted == [(draft.requests(), plan, weights, shape)]
    assert {request.kind for request in draft.requests()} == {Kind.EARLY}
    side.early.look()
    side.early.finish()
    assert len(side.coordinator.submitted) == 1, "a draft is made once"
    assert side.early.may_follow


def test_a_stored_draft_of_the_open_version_is_taken_over_and_of_no_other(tmp_path):
    draft = Side(tmp_path).drafted()
    again = Side(tmp_path)
    again.early.begin(again.order)
    assert [(requests, weights.version) for requests, _, weights, _ in again.coordinator.submitted] == [
        (draft.requests(), BATCH - 1)
    ]
    again.coordinator.found = again.candidates(8)
    again.early.look()
    assert len(again.coordinator.submitted) == 1, "and no other is chosen"
    again.early.begin(again.order)
    assert len(again.coordinator.submitted) == 2, "each beginning takes it over"
    for version in (BATCH - 2, BATCH):
        again.store.put_draft(replace(draft, version=version))
        other = Side(tmp_path)
        other.early.begin(other.order)
        assert other.coordinator.submitted == [], "staleness is 0 or 1"
        assert other.early.may_follow, "and another draft may be made"
        assert other.early.merge(manifest(BATCH)) == manifest(BATCH)


def test_a_draft_waits_for_a_spot_node_a_share_and_enough_candidates(tmp_path):
    side = Side(tmp_path, counted=False)
    side.early.begin(side.order)
    assert side.early.may_follow
    least = 2 * CONFIG.algorithm.images_per_prompt
    for alone_since, share, each in ((1.0, 0.5, least), (None, 0.24, least), (None, 0.5, least - 1)):
        side.coordinator.alone_since, side.share = alone_since, share
        side.coordinator.found = side.candidates(each)
        side.early.look()
        assert side.coordinator.submitted == []
        side.early.begin(side.order)
    side.coordinator.found = [*side.candidates(least - 1)]
    for _ in range(3):
        side.early.look()
    assert side.coordinator.submitted == [], "no candidate counts twice"
    side.coordinator.found += side.candidates(least)[least - 1 :: least]
    side.early.look()
    assert len(side.coordinator.submitted) == 1, "later candidates are added to those before"


def test_the_pool_is_the_jobs_or_all_candidates_that_a_prompt_can_have(tmp_path):
    early = CONFIG.early.model_copy(update={"min_pool": 3})
    side = Side(tmp_path / "job", CONFIG.model_copy(update={"early": early}), counted=False)
    assert side.early.pool(BATCH) == 3
    assert side.drafted(2) is None
    assert side.drafted(3) is not None
    few = Side(tmp_path / "few", counted=False)
    few.order = type(few.order)(**{**_fields(few.order), "most": 2})
    assert few.drafted(1) is None
    assert few.drafted(2) is not None


def test_a_counted_budget_is_waited_for_and_has_one_more_look_at_the_end(tmp_path):
    side = Side(tmp_path / "counted")
    side.coordinator.to_come = True
    assert side.drafted(8) is None, "a repeated run would have other early groups"
    side.coordinator.to_come = False
    side.early.finish()
    assert len(side.coordinator.submitted) == 1
    for counted, to_come in ((True, True), (False, False)):
        other = Side(tmp_path / f"{counted}", counted=counted)
        other.early.begin(other.order)
        other.coordinator.found, other.coordinator.to_come = other.candidates(8), to_come
        other.early.finish()
        assert other.coordinator.submitted == []
        assert not other.early.may_follow, "the search has ended"
        other.early.look()
        assert other.coordinator.submitted == []
    without = Side(tmp_path / "without")
    without.early.begin(None)
    without.early.finish()
    assert len(without.coordinator.submitted) == 1, "without exploration no candidate is needed"


def test_no_draft_is_begun_for_a_batch_that_has_none(tmp_path):
    last = CONFIG.model_copy(update={"iterations": BATCH + 1})
    off = CONFIG.model_copy(update={"early": CONFIG.early.model_copy(update={"share": 0.0})})
    for config, off_until, may in ((last, BATCH, True), (CONFIG, BATCH + 1, False), (off, 0, False)):
        side = Side(tmp_path, config)
        side.state.early_off_until = off_until
        assert (side.early.pool(BATCH) is not None) == (may or config is off), "`share` is the forecast's"
        side.early.begin(side.order)
        assert side.early.may_follow == may
    assert Side(tmp_path, last).early.pool(BATCH + 1) is None
    assert Side(tmp_path).early.pool(BATCH) == 2 * CONFIG.algorithm.images_per_prompt
    over = Side(tmp_path, last)
    over.state.iteration = BATCH
    over.early.begin(None)
    assert not over.early.may_follow, "the run ends with the open batch"
    none = Side(tmp_path)
    none.share = 0.24
    assert none.early.pool(BATCH) is None, "a quarter of four groups is one, and less is none"


def test_a_draft_of_an_earlier_batch_does_not_follow_the_last_one(tmp_path):
    side = Side(tmp_path)
    assert side.drafted() is not None
    side.state.iteration = CONFIG.iterations - 1
    side.early.begin(None)
    assert not side.early.may_follow


def test_a_draft_is_merged_into_its_batch_and_forgotten_with_it(tmp_path):
    side = Side(tmp_path)
    draft = side.drafted()
    merged = side.early.merge(manifest(BATCH, prompts=side.prompts.batch(BATCH), sampler=draft.sampler))
    assert merged.early == (0, 1)
    rollouts = side.early.rollouts(merged, lambda numbers: None, any_degrees=True)
    requests, plan, weights, _ = side.coordinator.submitted[-1]
    assert (requests, weights) == (draft.requests(), WeightsKey(version=BATCH - 1))
    assert plan == batch_plan(CONFIG, BATCH, EVEN)
    first = draft.groups[0]
    made = [early_result(first.prompt, seed, (1, 2)) for seed in first.seeds]
    side.coordinator.early = [result for result, _ in made]
    side.coordinator.blobs = {result.trajectory: data for result, data in made}
    side.coordinator.alone_since = time.monotonic() - CONFIG.early.patience_seconds / 2
    assert rollouts.take(wait=False).keys() == {0}, "the trainer computes the log-probs"
    assert rollouts.open == {1}, "a spot node may come back"
    side.state.iteration = BATCH
    side.early.begin(None)
    assert side.early.merge(manifest(BATCH + 1)) == manifest(BATCH + 1)
    assert side.early.rollouts(manifest(BATCH + 1), lambda numbers: None, any_degrees=False) is None
    assert len(side.coordinator.submitted) == 2


@pytest.mark.parametrize(("outside", "pauses"), [(MOST_OUTSIDE, False), (MOST_OUTSIDE + 0.01, True), (None, False)])
def test_early_groups_pause_above_the_share_of_rows_outside_the_clip_range(tmp_path, outside, pauses):
    """The next batch's draft exists already, so the batch after it is the first that can be spared."""
    side = Side(tmp_path)
    rows = 0 if outside is None else 100
    steps = [Health(neutral={}, early_rows=rows, early_outside=rows * (outside or 0)), Health(neutral={})]
    side.early.judge(BATCH, steps)
    first = BATCH + 2 + PAUSE_BATCHES
    assert side.state.early_off_until == (first if pauses else 0)
    assert [f"before batch {first}" in text for text in side.warned] == [True] * pauses
    side.share, side.state.iteration = 0.5, first - 2
    assert (side.early.pool(first - 1) is None) == pauses
    assert side.early.pool(first) is not None
    side.early.begin(None)
    assert side.early.may_follow != pauses
    side.state.iteration = first - 1
    side.early.begin(None)
    assert side.early.may_follow


def manifest(batch, *, prompts="abcd", sampler="s"):
    groups = tuple(Group(prompt=prompt, seeds=(1, 2)) for prompt in prompts)
    return Manifest(
        run="r", lineage=1, batch=batch, version=batch, sampler=sampler, groups=groups, minibatches=((0, 1), (2, 3))
    )
