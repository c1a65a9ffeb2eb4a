"""The trainer's side of exploration: order, seed choice and judgement of the result.

    order (for batch t + 1, with weights t) -> ... -> choose (its groups) -> control (a slice of the other candidates)
    -> judge (fresh against stale rewards): may exploration go on, and with which profile

The coordinator hands out candidates by the order while the trainer trains (engine/exploration/batch.py). Pure: the
state is JSON values and part of every checkpoint. A restarted trainer therefore explores exactly like an uninterrupted
trainer.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.config import CandidateBudget, EngineConfig, ProfileConfig
from engine.exploration.batch import BatchExploration
from engine.exploration.profiles import Profile, ProfileBandit, visit_value
from engine.exploration.ranking import RankingMonitor, RankingReport, Scored, Visit
from engine.exploration.rest import Rest
from engine.exploration.selection import choose_groups, control_slice, first_seeds
from engine.protocol.exploration_order import Belief, ExplorationOrder
from engine.protocol.request import Finished, Group, Kind, Manifest, RequestId

MOST_SHARES = 4
"""Limit of a prompt's share of a counted budget, in even shares."""

BELIEFS_KEPT = 4096
"""Number of prompts whose last visit is stored."""


class Explorer:
    """The exploration state of a trainer. See the module docstring."""

    def __init__(self, config: EngineConfig, run: str) -> None:
        self._config, self._run = config, run
        exploration = config.exploration
        self._profiles = [_profile(profile, config.sampler.steps) for profile in exploration.profiles]
        self.monitor = RankingMonitor()
        self.bandit = ProfileBandit(self._profiles, run_seed=config.seed)
        self.rest = Rest()
        self.beliefs: dict[str, Belief] = {}
        self._stale: dict[tuple[str, int], float] = {}
        """Every candidate's reward, for the next batch to train."""
        self._visits: dict[int, tuple[str, float]] = {}
        """By batch in the monitor's window: the profile used for exploration, and the GPU-seconds spent."""

    def order(
        self,
        batch: int,
        prompts: Sequence[str],
        *,
        lineage: int,
        version: int,
        sampler_of: Callable[[int], str],
        pool: int | None = None,
    ) -> ExplorationOrder | None:
        """Return the exploration order for a batch with the live weights. None: the batch is not explored.

        `sampler_of`: returns the first steps of the batch's sampler plan, as JSON. `pool`: candidates of each prompt
        from which early groups are chosen; None: there are none.
        """
        exploration, keep = self._config.exploration, self._config.algorithm.images_per_prompt
        budget = exploration.budget
        waits = exploration.wait == "all"
        counted = budget.candidates if isinstance(budget, CandidateBudget) and waits else None
        per_prompt = self._each(prompts)
        trains = exploration.trains == "candidates"
        explores = trains or (self.monitor.explores(batch) and not self.rest.rests(batch))
        if exploration.mode != "stale" or per_prompt <= keep or not explores:
            return None
        profile = self.bandit.choose(batch)
        # A counted budget is small: the planner may give a prompt several times its even share.
        most = (
            per_prompt if counted is None or exploration.policy == "uniform" else min(counted, MOST_SHARES * per_prompt)
        )
        return ExplorationOrder(
            run=self._run,
            run_seed=self._config.seed,
            lineage=lineage,
            batch=batch,
            prompts=tuple(prompts),
            keep=keep,
            most=most,
            policy=exploration.policy,
            chunk=exploration.chunk,
            counted=counted,
            version=version,
            sampler=sampler_of(profile.steps),
            steps=profile.steps,
            shape=profile.shape,
            dtype=profile.dtype,
            scorer=profile.scorer,
            pool=None if pool is None or counted is not None else min(pool, most),
            latents=trains,
            priors={prompt: self.beliefs[prompt] for prompt in prompts if prompt in self.beliefs},
        )

    def choose_in_path(self, pool: Manifest, rewards: Mapping[tuple[str, int], float]) -> Manifest:
        """Return the trained part of a batch whose candidates are all rolled out."""
        prompts = [group.prompt for group in pool.groups]
        keep = self._config.algorithm.images_per_prompt
        rule = self._config.exploration.keep
        seed = self._config.seed
        groups = choose_groups(prompts, rewards, run_seed=seed, batch=pool.batch, keep=keep, rule=rule)
        return replace(pool, groups=groups)

    def choose(
        self,
        order: ExplorationOrder | None,
        prompts: Sequence[str],
        results: Sequence[Finished],
        *,
        batch: int,
        gpu_seconds: float,
    ) -> tuple[Group, ...]:
        """Choose the groups to train in a batch (with weights of the batch's number) from the exploration results."""
        self._stale = {}
        if self._config.exploration.mode == "in-path":
            return first_seeds(prompts, self._each(prompts), run_seed=self._config.seed, batch=batch)
        if order is not None:
            signature = json.loads(order.sampler)["signature"]
            scored = [_scored(result, order.version, signature) for result in results]
            self._stale = self.monitor.admit(scored, version=batch, sampler=signature)
            self._visits[batch] = (self.bandit.choose(batch).name, gpu_seconds)
            self._remember(order, results)
            if order.counted is None and not order.latents:  # a budget that is waited for depends on no idle time
                self.rest.explored(batch, (prompt for prompt, _ in self._stale), keep=order.keep)
        return choose_groups(
            prompts,
            self._stale,
            run_seed=self._config.seed,
            batch=batch,
            keep=self._config.algorithm.images_per_prompt,
            rule=self._config.exploration.keep,
        )

    def preview(
        self, order: ExplorationOrder | None, prompts: Sequence[str], results: Sequence[Finished], *, batch: int
    ) -> tuple[Group, ...]:
        """Return the groups that `choose` would return for these results, without any effect on the state."""
        rewards = {} if order is None else {(r.request.prompt, r.request.seed): r.score.reward for r in results}
        return choose_groups(
            prompts,
            rewards,
            run_seed=self._config.seed,
            batch=batch,
            keep=self._config.algorithm.images_per_prompt,
            rule=self._config.exploration.keep,
        )

    def control(self, manifest: Manifest) -> tuple[RequestId, ...]:
        """Return the control requests: unchosen candidates of the open batch, rolled out afresh and not trained.

        Candidates of early groups are left out, as in `judge`.
        """
        if self._config.exploration.trains == "candidates":
            return ()  # nothing is ranked for a second rollout
        chosen = {(group.prompt, seed) for group in manifest.groups for seed in group.seeds}
        early = {manifest.groups[number].prompt for number in manifest.early}
        unselected = [candidate for candidate in self._stale if candidate not in chosen and candidate[0] not in early]
        fraction = self._config.exploration.random_fraction
        return tuple(
            RequestId(
                run=manifest.run,
                lineage=manifest.lineage,
                batch=manifest.batch,
                prompt=prompt,
                seed=seed,
                kind=Kind.CONTROL,
            )
            for prompt, seed in control_slice(unselected, fraction, run_seed=self._config.seed, batch=manifest.batch)
        )

    def judge(
        self, manifest: Manifest, rewards: Mapping[tuple[str, int], float], control: Iterable[Finished]
    ) -> RankingReport | None:
        """Compare a batch's fresh rewards with its stale rewards.

        Return the ranking report; None: the batch was not explored. Early groups are left out: their rewards come from
        the same weights as the stale rewards.
        """
        if not self._stale or self._config.exploration.trains == "candidates":
            return None
        visits = [
            Visit(
                prompt=group.prompt,
                stale={seed: reward for (prompt, seed), reward in self._stale.items() if prompt == group.prompt},
                fresh={seed: rewards[group.prompt, seed] for seed in group.seeds},
            )
            for number, group in enumerate(manifest.groups)
            if number not in manifest.early
        ]
        batch, version, sampler = manifest.batch, manifest.version, manifest.sampler
        self.monitor.add(batch, visits, version=version, sampler=sampler)
        self.monitor.add_control(batch, [_scored(result, version, sampler) for result in control])
        self._record(batch)
        return self.monitor.report()

    def profile_of(self, batch: int) -> str:
        """Return the name of the profile used to explore a batch."""
        return self._visits[batch][0]

    def _record(self, batch: int) -> None:
        """Record the value of a batch's exploration for its profile, over all of the profile's visits in the window."""
        name, gpu_seconds = self._visits.get(batch, ("", 0.0))
        batches = {visited for visited, (profile, _) in self._visits.items() if profile == name}
        gain = self.monitor.report(only=batches).predicted_gain
        if gain is not None and gpu_seconds > 0:
            self.bandit.record(name, visit_value(gain, gpu_seconds))
        for old in sorted(self._visits)[: -self.monitor.rules.window]:
            del self._visits[old]

    def _each(self, prompts: Sequence[str]) -> int:
        """Return the candidates per prompt in even shares, but at least the number of kept seeds."""
        budget = self._config.exploration.budget
        total = budget.candidates if isinstance(budget, CandidateBudget) else budget.max_candidates
        return max(self._config.algorithm.images_per_prompt, total // len(prompts))

    def to_dict(self) -> dict[str, Any]:
        """Return the state for a restarted trainer, as JSON values."""
        return {
            "monitor": self.monitor.to_dict(),
            "bandit": self.bandit.to_dict(),
            "rest": self.rest.to_dict(),
            "beliefs": self.beliefs,
            "stale": [[prompt, seed, reward] for (prompt, seed), reward in self._stale.items()],
            "visits": [[batch, name, seconds] for batch, (name, seconds) in self._visits.items()],
        }

    def restore(self, raw: Mapping[str, Any]) -> None:
        """Restore the state from `to_dict`. If the profiles differ, start a new bandit, because the job was changed."""
        self.monitor = RankingMonitor.from_dict(raw["monitor"])
        if list(raw["bandit"]["arms"]) == [profile.name for profile in self._profiles]:
            self.bandit = ProfileBandit.from_dict(raw["bandit"], self._profiles, run_seed=self._config.seed)
        self.rest = Rest(**raw.get("rest", {}))  # missing in checkpoints of earlier versions
        self.beliefs = dict(raw["beliefs"])
        self._stale = {(prompt, seed): reward for prompt, seed, reward in raw["stale"]}
        self._visits = {batch: (name, seconds) for batch, name, seconds in raw["visits"]}

    def _remember(self, order: ExplorationOrder, results: Sequence[Finished]) -> None:
        """Store the moments of the batch's prompts for their next visit."""
        exploration = BatchExploration(order)
        exploration.took(result.request for result in results)
        exploration.add_results(results)
        for prompt, belief in exploration.beliefs().items():
            self.beliefs.pop(prompt, None)
            self.beliefs[prompt] = belief
        for oldest in list(self.beliefs)[:-BELIEFS_KEPT]:
            del self.beliefs[oldest]


def _profile(config: ProfileConfig, steps: int) -> Profile:
    return Profile(
        name=config.name,
        dtype=config.dtype,
        shape=config.shape,
        steps=config.steps or steps,
        scorer=config.scorer,
    )


def _scored(result: Finished, version: int, sampler: str) -> Scored:
    request = result.request
    return Scored(
        prompt=request.prompt, seed=request.seed, reward=result.score.reward, version=version, sampler=sampler
    )
