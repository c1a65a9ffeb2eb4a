"""Notes of a plan for its reader: the evidence, the limits, and the zones that are left out."""

from launcher.market.estimate import Basis
from launcher.money import HOUR_MS, dollars, hourly
from launcher.placement.forecast import Choice
from launcher.placement.ranks import TrainerRanks
from launcher.placement.requirements import CloudRequirements, LeftOut, Spot


def basis_of(needs: CloudRequirements, choice: Choice) -> str:
    """Describe the weakest evidence behind the figures, and the measured part of the evidence."""
    recipe = needs.recipe
    pools = [pool for pool, _ in choice.pools if pool.survival is not None]
    watched_ms = sum(sum(pool.survival.evidence.ms) for pool in pools if pool.survival is not None)
    reclaims = sum(sum(pool.survival.evidence.reclaims) for pool in pools if pool.survival is not None)
    text = (
        f"iterations {recipe.iterations.basis.value}, seconds of an iteration from {recipe.source}; what exploration "
        f"saves {recipe.gain_exponent.basis.value}"
    )
    if pools:
        watched = (
            f"{reclaims} preemptions in {watched_ms / HOUR_MS:.1f} node-hours of our own"
            if watched_ms
            else "none of our own"
        )
        text += f"; preemptions: {watched}, beside {Basis.PRIOR.value} figures"
    return f"{text}. The interval has every one of them at its good, or its bad, end at once"


def notes_of(needs: CloudRequirements, choice: Choice, ranks: TrainerRanks) -> tuple[str, ...]:
    """Return notes for the reader: limits of the plan, and parts that were never run."""
    recipe, trainer = needs.recipe, choice.site.trainer
    notes = list(recipe.never_run)
    if ranks.ranks != recipe.sampling_gpus:
        notes.append(
            f"the trainer trains on {ranks.ranks} GPU{'s' if ranks.ranks > 1 else ''}, and its seconds are known of "
            f"{recipe.measured_on}: the work is taken to be as many GPU-seconds"
        )
    if ranks.ranks > 1:
        notes.append(
            f"spotrl has never trained with {ranks.ranks} GPUs: an efficiency of {ranks.efficiency:.1%} is "
            f"{ranks.basis} ({ranks.source})"
        )
    if ranks.waiting:
        notes.append(_waiting_ranks(choice, ranks))
    if ranks.nodes > 1:
        notes.append(
            "the network between the trainer's nodes is not in the predicted time; several nodes have never run on GPUs"
        )
    if needs.trainer_gpus_named * ranks.nodes > ranks.ranks:
        notes.append(_fewer_ranks(needs, ranks))
    if ranks.idle:
        several = f", and the trainer has {ranks.nodes} nodes" if ranks.nodes > 1 else ""
        notes.append(
            f"the smallest trainer node that is sold there has {trainer.gpus} GPUs{several}: {ranks.idle} are paid for "
            "idle"
        )
    if sum(choice.spot) > 1 and len(choice.site.zones) == 1:
        notes.append("the region has one zone with such spot nodes: what takes one back may take all of them")
    if sum(choice.spot) > 0:
        notes.append(
            "how often spot has capacity: zones of recorded markets had some for 0 to 100 % of the time. The interval "
            "holds such zones, and the mean is of all of them"
        )
    if choice.site.trainer.cloud == "aws" and sum(choice.spot) > 0:
        notes.append("not counted: AWS bills nothing for a spot node that it preempts in its first hour")
    if needs.spot is Spot.AUTO and sum(choice.spot) > 0:
        notes.append(
            "alternatives are compared by spot alone; the dollars to the target also count the trainer's start, and "
            "nodes on demand after long outages or near the deadline"
        )
    notes.append("not counted: evaluations, taxes; disks are in the replays only")
    return tuple(notes)


def _waiting_ranks(choice: Choice, ranks: TrainerRanks) -> str:
    """Return what the ranks cost that wait for rollouts, with every rollout node at work."""
    recipe = choice.site.recipe
    gpus = sum(count * pool.offer.gpus for pool, count in choice.pools)
    seconds = recipe.seconds(gpus) - recipe.train_seconds - (recipe.sync_seconds if gpus else 0.0)
    rate = choice.site.trainer_micro_usd_per_hour * ranks.waiting / ranks.all_gpus
    return (
        f"{ranks.waiting} of the trainer's {ranks.all_gpus} GPUs wait for rollouts, {seconds:.0f} s and "
        f"{dollars(round(rate * seconds / 3600))} of an iteration: full weights are divided over the GPUs, and these "
        "GPUs have no room to gather and sample on each, so one samples; with more memory, or model.weights: lora, "
        "all sample"
    )


def _fewer_ranks(needs: CloudRequirements, ranks: TrainerRanks) -> str:
    """Return why fewer GPUs train than the job names."""
    whose = f"each of the trainer's {ranks.nodes} nodes" if ranks.nodes > 1 else "the trainer"
    named = f"the job names {needs.trainer_gpus_named} x {needs.trainer.accelerator} for {whose}"
    most, asked = needs.recipe.limits.most, needs.recipe.asked_ranks
    if ranks.ranks == ranks.gpus < needs.trainer.gpus:
        return f"{named}; a node with {ranks.gpus}, which all train, is cheaper than one that has idle GPUs"
    if ranks.ranks == asked:
        why = f"runtime.trainer_ranks is {asked}"
    elif ranks.ranks == most:
        why = f"the engine trains on {most}"
    else:
        why = f"an optimiser step has {ranks.ranks} groups"
    return f"{named}; {why}, so the plan counts {ranks.ranks} and looks for a node with {ranks.ranks // ranks.nodes}"


def dearer_zones(choice: Choice) -> tuple[LeftOut, ...]:
    """Return the zones of the site that the plan does not buy in, with the reason."""
    bought = [pool.value.micro_usd_per_useful_hour for pool, _ in choice.pools if pool.survival is not None]
    why = f" beside {hourly(round(max(bought)))} at most where nodes are" if bought else ""
    return tuple(
        LeftOut(
            what=f"{pool.offer.instance_type} in {pool.offer.zone}",
            why=f"a useful hour costs {hourly(round(pool.value.micro_usd_per_useful_hour))}{why}",
        )
        for pool, count in zip(choice.site.zones, choice.spot, strict=True)
        if not count
    )
