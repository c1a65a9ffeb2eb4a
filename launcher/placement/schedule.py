"""The schedule of a plan: an iteration played forward event by event, and the setting that would shorten it. Pure.

The plan's price counts rollouts as shared without loss, and training after the last rollout. The schedule
(`engine/schedule/`) instead plays the engine as it is: leases of whole images, units of groups, a trainer that helps as
`runtime.help` and `early.share` say. The schedule shows where GPUs wait, and does not change the price.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil

from engine.schedule.choose import choose, with_early
from engine.schedule.values import Gpus, Rates, Work, lower_bound
from engine.timing.figures import Figure, Source
from launcher.job.resolved import Resolved
from launcher.placement.ranks import TrainerRanks

MOST_IMAGES = 2048
"""Images of a batch above which no schedule is played: a plan answers within seconds."""

MOST_SEARCHED = 512
"""Images of a batch above which a plan plays `feedback` for `search`, which takes seconds to play."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSchedule:
    """A forecast of an iteration, with all nodes at work."""

    rollout_gpus: int
    """Rollout GPUs: the average number at work, rounded."""
    unit: int
    """Groups that train together: as many whole groups as fit into `algorithm.rows_per_forward` rows of each rank."""
    seconds: float
    seconds_at_least: float
    """Seconds that no schedule can beat."""
    bubble_share: float
    """Idle GPU-seconds over all GPU-seconds."""
    idle: Mapping[str, float]
    """Idle GPU-seconds of an iteration by cause."""
    better_unit: int
    """The unit with the shortest iteration."""
    better_rows: int
    """The `algorithm.rows_per_forward` that gives `better_unit`."""
    better_seconds: float
    early_share: float = 0.0
    """Largest share of a batch's groups that is sampled one version early (`early.share`)."""
    stale_share: float = 0.0
    """Share of the groups that is expected to be sampled early."""

    def text(self) -> str:
        """Return the forecast in words."""
        groups = f"{self.unit} group{'s' if self.unit > 1 else ''} train{'' if self.unit > 1 else 's'} at a time"
        parts = [
            f"schedule: with {self.rollout_gpus} rollout GPUs at work an iteration takes {self.seconds:.0f} s "
            f"(no schedule takes less than {self.seconds_at_least:.0f} s); {groups}; "
            f"without exploration {self.bubble_share:.0%} idle"
        ]
        most = max(self.idle, key=lambda cause: self.idle[cause], default=None)
        if most is not None and self.idle[most] > 0:
            parts[-1] += f", mostly because the {most}"
        if self.early_share:
            parts.append(f"early.share {self.early_share:g}: {self.stale_share:.0%} of the groups one version early")
        if self.better_unit != self.unit:
            parts.append(f"algorithm.unit: {self.better_unit} would make it {self.better_seconds:.0f} s")
        return "; ".join(parts)


def plan_schedule(resolved: Resolved, trainer: TrainerRanks, *, rollout: int) -> PlanSchedule | None:
    """Return the schedule of a job. None: no usable rates, more than `MOST_IMAGES` images, or candidates are trained.

    `trainer`: the work of its GPUs. `rollout`: rollout GPUs at work.
    """
    job, recipe = resolved.job, resolved.recipe.on(trainer.gpus)
    algorithm, ranks, rows = job.algorithm, trainer.ranks, resolved.rows_of_image
    gpus = Gpus(trainer=trainer.sampling, rollout=rollout)
    images = recipe.prompts * recipe.images_per_prompt
    source = Source(basis="assumed", text=recipe.source)
    # The training seconds are those of all ranks together, which the schedule takes for one GPU of the trainer. Each
    # pass of divided weights has collectives, so small passes cost more.
    gather = recipe.step.collective_seconds_of_pass(ranks) if recipe.step is not None else 0.0
    gathers = gather * recipe.step.passes(ranks) * algorithm.updates_per_batch if recipe.step is not None else 0.0
    row_seconds = (recipe.train_seconds - gathers) * gpus.trainer / (images * rows)
    rates = Rates(
        image=Figure(value=recipe.rollout_gpu_seconds, source=source),
        row=Figure(value=row_seconds, source=source),
        launch=Figure(value=gather, source=source),
        publish=Figure(value=recipe.sync_seconds, source=source),
    )
    if images > MOST_IMAGES or rates.problems() or (recipe.trains_candidates and rollout):
        return None  # groups of candidates are there when a batch opens, which no schedule plays
    work = Work(
        groups=recipe.prompts,
        images=recipe.images_per_prompt,
        rows_of_image=rows,
        updates=algorithm.updates_per_batch,
        steps=job.sampler.steps,
        lease=job.runtime.shape,
        in_order=algorithm.order == "fixed",
    )
    unit = work.unit(algorithm.rows_per_forward, ranks, algorithm.unit if isinstance(algorithm.unit, int) else 0)
    quickest = partial(
        choose,
        job.runtime.help,
        rates,
        work,
        gpus,
        rows=ranks * algorithm.rows_per_forward,
        searched=images <= MOST_SEARCHED,
    )
    now = with_early(quickest(units=(unit,), early=job.early.shares[0]), rates, work, gpus, job.early.shares)
    timeline = now.timeline
    assert timeline is not None
    smallest = min(unit, ranks)  # each rank trains at least a group of a unit
    smaller = tuple(dict.fromkeys((unit, *(max(smallest, ceil(unit / part)) for part in (2, 4, 8)), smallest)))
    better = quickest(units=smaller, early=now.knobs.early, beside=now)
    assert better.timeline is not None
    return PlanSchedule(
        rollout_gpus=gpus.rollout,
        unit=unit,
        seconds=timeline.seconds,
        seconds_at_least=lower_bound(rates, work, gpus),
        bubble_share=timeline.bubble_share,
        idle=dict(timeline.idle),
        better_unit=better.knobs.unit,
        better_rows=ceil(better.knobs.unit / ranks) * rows * recipe.images_per_prompt,
        better_seconds=better.timeline.seconds,
        early_share=now.knobs.early,
        stale_share=timeline.stale_share,
    )
