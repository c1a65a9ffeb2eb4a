"""A model of the time and cost of an iteration of Qwen-Image with spot H100 beside four on-demand ones. No runs.

Seconds are published or computed (research notes papers 4.2 and 6.2, engine 6), dollars are from the catalog. The idle
seconds of an arm's GPUs limit its candidates, rounded down.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from engine.config import ExplorationConfig
from engine.events import Market
from engine.exploration.value import IterationCost, candidates_that_fit, iteration_seconds
from launcher.market.offers import Offer, read_catalog
from launcher.market.quality import USABLE
from tests.benchmarks.arms import Settings

ON_DEMAND_GPUS = 4
SPOT_GPUS = (4, 8, 12)

# --- seconds ----------------------------------------------------------------------------------------------------

PROMPTS, IMAGES = 32, 16
"""Of a batch: flow_grpo's and verl-omni's recipes for Qwen-Image (papers 4.2)."""

GENERATION_SECONDS = 107.0
"""Published: 512 images of 512 px, 10 steps, guidance 4, in 106 to 108 s. The number of GPUs is not published; four are
assumed as in the other figures (papers 4.2)."""

STEP_SECONDS, JUDGING_STEP_SECONDS = 360.0, 420.0
"""Published: a training step on four H800, LoRA, with images scored on a fifth GPU, and by the four themselves.
H800 counts as H100; the fifth GPU is not charged to any arm."""

FORWARD_TFLOP = {512: 15.7, 1280: 119.0}
"""Computed from the architecture, by pixels of an edge; guidance takes two of them (engine 6)."""

H100_TFLOP_PER_SECOND = 989.0

ROLLOUT_UTILISATION = 0.475
"""At 1280 px: the middle of 0.45 to 0.5, from published times of images of 4k to 10k tokens (engine 6)."""

TRAINING_UTILISATION = 0.40
"""Assumed: the middle of 0.35 to 0.45 (engine 6)."""

STEPS, TRAINED_STEPS = 10, 2

FORWARDS_A_TRAINED_STEP = 2 * (1 + 3)
"""With guidance: one forward for the old log-probability, three for the update (LoRA, activations recomputed)."""

SYNC_SECONDS = 0.38 * 8 / (0.8 * 25)
"""Adapters at 25 Gb/s, of which 80 % are reached; nodes forward them, so the wait is once (engine 6; assumed). The page
of modelled_cost was made with 0.38 GB. Adapters of rank 64 are 1.70 GB, which takes .68 s instead of .15 s."""

CONTROL_SHARE = ExplorationConfig().random_fraction
"""Share of unchosen candidates that are rolled out as controls in the same idle seconds, as in the measured runs."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """The source of an iteration's seconds."""

    name: str
    cost: IterationCost
    basis: str
    own: bool = True
    """False: not a result, but a test of the assumptions."""


def iteration_cost(rollout_gpu_seconds: float, train_seconds: float, *, candidate_share: float) -> IterationCost:
    """`candidate_share`: what a candidate costs of a rollout. Its share of the control slice is added, as if none of
    them were chosen, so that a pool is rather too small."""
    return IterationCost(
        prompts=PROMPTS,
        images_per_prompt=IMAGES,
        reserved_gpus=ON_DEMAND_GPUS,
        rollout_gpu_seconds=rollout_gpu_seconds,
        candidate_gpu_seconds=rollout_gpu_seconds * (candidate_share + CONTROL_SHARE),
        train_seconds=train_seconds,
        sync_seconds=SYNC_SECONDS,
    )


def on_four_gpus(seconds: float) -> float:
    """Return the GPU-seconds of one image, if the four GPUs take this long for a batch."""
    return seconds * ON_DEMAND_GPUS / (PROMPTS * IMAGES)


def computed_rollout(pixels: int) -> float:
    """Return the GPU-seconds of one image, from operations and published utilisation."""
    return STEPS * 2 * FORWARD_TFLOP[pixels] / (H100_TFLOP_PER_SECOND * ROLLOUT_UTILISATION)


def computed_training(pixels: int) -> float:
    """Return the seconds of a batch on the four GPUs, from operations and assumed utilisation."""
    each = TRAINED_STEPS * FORWARDS_A_TRAINED_STEP * FORWARD_TFLOP[pixels]
    return PROMPTS * IMAGES * each / (ON_DEMAND_GPUS * H100_TFLOP_PER_SECOND * TRAINING_UTILISATION)


def all_times(candidate_share: float) -> tuple[Times, ...]:
    small, large = on_four_gpus(GENERATION_SECONDS), computed_rollout(1280)
    judged = on_four_gpus(GENERATION_SECONDS + JUDGING_STEP_SECONDS - STEP_SECONDS)
    other = STEP_SECONDS - GENERATION_SECONDS
    training = computed_training(1280)
    return (
        Times(
            name="512 px",
            cost=iteration_cost(small, other, candidate_share=candidate_share),
            basis="published: generation, and the rest of a step of 360 s as training",
        ),
        Times(
            name="1280 px",
            cost=iteration_cost(large, training + other - computed_training(512), candidate_share=candidate_share),
            basis="no time is published, so computed from operations and utilisation; training has besides, unchanged, "
            "the seconds that operations do not explain at 512 px (assumed)",
        ),
        Times(
            name="512 px, judged by the same GPUs",
            cost=iteration_cost(judged, other, candidate_share=candidate_share),
            basis="published: a step of 420 s; a candidate is judged as dearly as a picture that is trained",
            own=False,
        ),
        Times(
            name="1280 px, training computed",
            cost=iteration_cost(large, training, candidate_share=candidate_share),
            basis="operations and utilisation alone",
            own=False,
        ),
        Times(
            name="1280 px, all scaled alike",
            cost=iteration_cost(large, other * large / small, candidate_share=candidate_share),
            basis="training takes as many times longer than at 512 px as a rollout does",
            own=False,
        ),
    )


# --- pools ------------------------------------------------------------------------------------------------------

TRAINED = Settings().trained
"""Images that an iteration of a learning run trains. Pools count candidates for this many."""

POOLS = (72, 120, 144, 192, 288, 432)
"""Which learning runs are made: few, so that cells share them; multiples of 12. The last is the cap, 9
for each trained picture, because what is gained by one more falls."""


def affordable(cost: IterationCost, spot_gpus: int) -> float:
    """Return the candidates for `TRAINED` trained images that fit into the idle seconds, without cap."""
    return candidates_that_fit(cost, spot_gpus) * TRAINED / (cost.prompts * cost.images_per_prompt)


def pool_of(candidates: float, pools: Iterable[int] = POOLS) -> int | None:
    """Return the largest pool within `candidates`, or None if they are too few to choose from."""
    return max((pool for pool in pools if pool <= candidates), default=None)


def in_path_seconds(cost: IterationCost, spot_gpus: int, pool: int) -> float:
    """Return the seconds of an iteration in which all GPUs roll out every candidate with the new weights."""
    images = pool * cost.images_per_prompt // TRAINED
    return iteration_seconds(replace(cost, images_per_prompt=images), spot_gpus)


def waiting_seconds(cost: IterationCost, spot_gpus: int, pool: int) -> float:
    """Return the seconds of an iteration in which the trainer waits until spot GPUs have tried the whole pool."""
    candidates = pool * cost.prompts * cost.images_per_prompt / TRAINED
    idle = cost.train_seconds - cost.guard_seconds - cost.sync_seconds
    late = candidates * cost.candidate_gpu_seconds / spot_gpus - idle
    return iteration_seconds(cost, spot_gpus) + max(0.0, late)


# --- prices -----------------------------------------------------------------------------------------------------

DISCOUNTS = (0.25, 0.50, 0.77)

LISTED = ("aws", "us-east-1", "p5.48xlarge")
"""The offer whose on-demand price the discounts refer to."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """Dollars of one H100 for an hour."""

    name: str
    on_demand: float
    spot: float
    source: str

    @property
    def discount(self) -> float:
        return 1 - self.spot / self.on_demand


def discounted() -> tuple[Price, ...]:
    offer = _on_demand()[LISTED]
    dollars = _of_a_gpu(offer)
    return tuple(
        Price(name=f"{100 * off:.0f} % off", on_demand=dollars, spot=dollars * (1 - off), source=_source(offer))
        for off in DISCOUNTS
    )


def offered() -> tuple[Price, ...]:
    """Return every accepted spot offer of eight H100 with its region's on-demand price, smallest discount first."""
    on_demand = _on_demand()
    prices = [
        Price(
            name=f"{offer.cloud} {offer.zone}",
            on_demand=_of_a_gpu(on_demand[offer.cloud, offer.region, offer.instance_type]),
            spot=_of_a_gpu(offer),
            source=_source(offer),
        )
        for offer in read_catalog()
        if (offer.accelerator, offer.gpus, offer.market) == ("H100", 8, Market.SPOT) and offer.quality in USABLE
    ]
    return tuple(sorted(prices, key=lambda price: price.discount))


def _on_demand() -> Mapping[tuple[str, str, str], Offer]:
    return {
        (offer.cloud, offer.region, offer.instance_type): offer
        for offer in read_catalog()
        if offer.accelerator == "H100" and offer.market is Market.ON_DEMAND
    }


def _of_a_gpu(offer: Offer) -> float:
    return offer.micro_usd_per_hour / 1e6 / offer.gpus


def _source(offer: Offer) -> str:
    return f"{offer.source}, {offer.observed_at}"
