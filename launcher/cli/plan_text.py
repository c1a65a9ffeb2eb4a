"""A local plan as text for the user's confirmation, and as a dictionary for `--json`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from engine.algorithm_config import recommended
from engine.config import CandidateBudget
from launcher.cli.layout import columns, fitted
from launcher.job.resolved import Resolved
from launcher.job.schema import Job
from launcher.money import dollars, duration, hourly
from launcher.placement.memory import gib, pool_bytes_of_job
from launcher.placement.plan import Plan, Slot


def header(job: Job, plan: Plan) -> str:
    """Return a header like `local: priced as aws gr6.4xlarge in us-east-2, nothing was bought`."""
    kinds = sorted({f"{slot.placement.cloud} {slot.placement.instance_type}" for slot in plan.slots})
    if job.clouds:
        return f"{' and '.join(kinds)} in {plan.region}"
    return f"{job.infra}: priced as {' and '.join(kinds)} in {plan.region}, nothing was bought"


def plan_lines(resolved: Resolved, plan: Plan) -> Iterator[str]:
    """Return the plan as lines of at most 80 columns."""
    return fitted(_plan_lines(resolved, plan))


def place_table(slots: Iterable[tuple[str, Slot]]) -> Iterator[str]:
    """Yield a table of placements: market, GPUs, instance type and zone. A row covers one slot or equal slots."""
    rows = [("nodes", "market", "GPUs", "instance", "zone")]
    for name, slot in slots:
        place = slot.placement
        rows.append((name, place.market.value, f"{place.accelerator}:{place.gpus}", place.instance_type, place.zone))
    return columns(rows, words=5)


def pools_of(slots: Iterable[Slot]) -> list[list[Slot]]:
    """Return the slots in groups of equal nodes. The nodes of the trainer are one group."""
    pools: dict[tuple[object, ...], list[Slot]] = {}
    for slot in slots:
        pools.setdefault((slot.role == "rollout", slot.placement), []).append(slot)
    return list(pools.values())


def pool_name(equal: Sequence[Slot]) -> str:
    """Return the name of equal nodes, like `trainer`, `2 x trainer` or `3 x spot`."""
    if len(equal) == 1:
        return equal[0].name
    return f"{len(equal)} x {equal[-1].name.rpartition('-')[0]}"


def _plan_lines(resolved: Resolved, plan: Plan) -> Iterator[str]:
    job = resolved.job
    yield f"{job.name}: {header(job, plan)}"
    if note := clock_note(job):
        yield note
    yield ""
    yield from place_table((slot.name, slot) for slot in plan.slots)
    yield ""
    prices = [
        (slot.name, hourly(slot.placement.micro_usd_per_hour), hourly(slot.on_demand_micro_usd_per_hour))
        for slot in plan.slots
    ]
    yield from columns([("nodes", "price", "on demand"), *prices], words=1)
    yield ""
    expected, maximum = plan.expected_micro_usd_per_hour, plan.maximum_micro_usd_per_hour
    yield f"  expected {hourly(expected)}; at most {hourly(maximum)}, were every node bought on demand"
    if plan.max_total_micro_usd is not None and plan.lasts_ms is not None:
        yield f"  budget {dollars(plan.max_total_micro_usd)}: lasts {duration(plan.lasts_ms)} at the expected rate"
    else:
        yield "  no budget.max_total: the run ends with its iterations or target"
    yield from judges_text(job)
    yield from pool_text(job, plan.slots)
    if job.target:
        yield f"  until {job.target.metric} {job.target.value:g}, or {job.iterations} iterations; how long is not known"
    yield f"  {algorithm_text(job)}"
    yield f"  {exploration_text(resolved)}"
    if job.runtime.sp_degree != 1:
        yield f"  {sharing_text(job)}"
    sources = Counter((slot.placement.price_source, slot.placement.price_observed_at) for slot in plan.slots)
    for (source, observed_at), _ in sources.most_common():
        yield f"  prices ({plan.money_basis}): {source}, {observed_at}"


def judges_text(job: Job) -> Iterator[str]:
    """Yield a sentence on the budget of the job's paid judges, if it has any."""
    if judges := job.reward.judge_micro_usd:
        yield f"  judges: at most {dollars(judges)} of budget.max_total; the run stops when it is used up"


def pool_text(job: Job, slots: Iterable[Slot]) -> Iterator[str]:
    """Yield a sentence on the GPUs that only score, and their part of the nodes' listed prices, if there are any."""
    own, gpus = job.reward.pool_gpus, job.resources.rollout.gpus
    rollout = [slot.placement for slot in slots if slot.role == "rollout"]
    if not own or not rollout:
        return
    rate = hourly(sum(place.micro_usd_per_hour * own // place.gpus for place in rollout))
    held = pool_bytes_of_job(job)
    models = f", with models of {gib(held)} GiB on each" if held else ""
    yield f"  pool: {own} of the {gpus} GPUs of each rollout node only score{models}; {rate} of the nodes' price"


def algorithm_text(job: Job) -> str:
    """Return a sentence on the job's algorithm, and on the recommended one."""
    best = recommended(job.model.name)
    if job.algorithm.name == best.name:
        return f"algorithm {best.name}, as recommended: {best.reason}"
    return f"algorithm {job.algorithm.name}; recommended is {best.name}: {best.reason}"


def exploration_text(resolved: Resolved) -> str:
    """Return a sentence on the expected gain of exploration, before any measurement in the run."""
    exploration, recipe = resolved.job.exploration, resolved.recipe
    mode, keep = exploration.mode, recipe.images_per_prompt
    if mode == "none":
        return (
            "exploration none: each prompt's first seeds are trained, and spot nodes are idle while the trainer trains"
        )
    if not isinstance(exploration.budget, CandidateBudget):
        trained = ", and the chosen ones are trained as they are" if recipe.trains_candidates else ""
        return (
            f"exploration {mode}: as many candidates as spot nodes can try while the trainer trains{trained}; how many "
            "is known after the first batches"
        )
    candidates = exploration.budget.candidates / recipe.prompts
    if candidates <= keep:
        return (
            f"exploration {mode} chooses nothing: {candidates:g} candidates a prompt, of which {keep} are trained; "
            "raise exploration.budget.candidates"
        )
    if mode == "in-path":
        gain = replace(recipe, rho=1.0).gain(candidates)  # candidates are made with current weights
        return (
            f"exploration {mode}: {candidates:g} candidates a prompt, which everybody waits for; the {keep} that are "
            f"trained should differ x{gain:.1f} as much"
        )
    most = "at most " if exploration.wait == "idle" else ""
    if recipe.trains_candidates:
        gain = replace(recipe, rho=1.0).gain(candidates)
        return (
            f"exploration {mode}: {most}{candidates:g} candidates a prompt, made on spot nodes while the trainer "
            f"trains; the {keep} that differ most, x{gain:.1f} as much, are trained as they are, with no rollout"
        )
    return (
        f"exploration {mode}: {most}{candidates:g} candidates a prompt, tried on spot nodes while the trainer trains; "
        f"the {keep} that are trained should differ x{recipe.gain(candidates):.1f} as much, if old weights rank seeds "
        f"with rho {recipe.rho} (assumed; the run measures it)"
    )


RESUME = {
    "exact": "goes on among as many workers, bit for bit, or begins anew",
    "close": "goes on whoever shares it, equal to about 5e-7",
    "restart": "begins anew",
}
"""Text for each `resume` mode: the handling of an interrupted image (engine/config.py)."""


def sharing_text(job: Job) -> str:
    """Return a sentence on the SP degree of a node's workers, and on interrupted images after a regroup."""
    degree, resume, workers = job.runtime.sp_degree, job.runtime.resume, job.rollout_workers
    if workers == 1:
        return f"sp_degree {degree}: a rollout node's only worker works alone"
    who = (
        f"a rollout node's {workers} workers share images as demand has it"
        if degree == "auto"
        else f"{degree} of a rollout node's {workers} workers share an image"
    )
    if job.runtime.cfg_parallel:
        who += ", a branch of guidance each"
    return f"sp_degree {degree}: {who}; one that was interrupted {RESUME[resume]} (resume: {resume})"


def plan_dict(plan: Plan) -> dict[str, Any]:
    return asdict(plan) | {
        "expected_micro_usd_per_hour": plan.expected_micro_usd_per_hour,
        "maximum_micro_usd_per_hour": plan.maximum_micro_usd_per_hour,
    }


def clock_note(job: Job) -> str:
    """Return a sentence on the run's clock; empty for a clock that runs as fast as any other."""
    if job.factor == 1:
        return ""
    work = duration(round(3_600_000 / job.factor))
    return f"The clock moves with the work: an hour of prices and preemptions is {work} of two free cores."
