"""The job of a selftest: the shipped digits model on the cheapest GPU, one on-demand trainer and one spot node."""

from collections.abc import Iterable

from engine.events import Market
from launcher.exit_codes import Failure
from launcher.market.instance_types import INSTANCE_TYPES
from launcher.market.offers import Offer

MOST_MICRO_USD = 5_000_000
"""Most that a selftest may cost. `--max-total` can only lower it."""

STOP_MICRO_USD = 500_000
"""Part set aside for nodes that still run while the run stops at its budget: 16 minutes at `HOURLY_MICRO_USD`, the
allowance of the budget guard's bound (`spotrl launch --dry-run` prints it as the hard maximum)."""

HOURLY_MICRO_USD = 1_850_000
"""Most that both nodes together may cost an hour."""

JOB = """\
# Written by `spotrl selftest`: the shipped model, small batches, and a run that lasts as long as the steps take.
name: {name}
infra: {cloud}
iterations: 200
evaluation: {{prompts: 16, every: 200}}
algorithm: {{prompts_per_batch: 8, images_per_prompt: 4}}
exploration: {{mode: none}}
model: digits-ocr
checkpoint: {{every: 1}}
runtime: {{name: local, shape: 8, step_seconds: 1.0}}
spot: only
resources:
  trainer: {{accelerators: "{gpu}:1"}}
  rollout: {{accelerators: "{gpu}:1", use_spot: true, num_nodes: 1, min_nodes: 1}}
budget: {{max_total: ${usd:.2f}, max_hourly: ${hourly:.2f}, deadline: 4h}}
"""
"""A denoising step takes at least `step_seconds`, so that 200 iterations outlast the steps, and the trainer alone does
not make every rollout. The plan of more iterations would not fit the budget, and would be refused.
"""


def cheapest_gpu(offers: Iterable[Offer], cloud: str) -> tuple[str, int, int]:
    """Return the GPU whose cheapest on-demand and spot nodes cost least together, with both hourly prices.

    Only instance types with one GPU that spotrl knows count. Prices are in micro-dollars. Raises Failure without any.
    """
    known_types = {machine.instance_type for machine in INSTANCE_TYPES if machine.cloud == cloud and machine.gpus == 1}
    cheapest: dict[str, dict[Market, int]] = {}
    for offer in offers:
        if offer.cloud == cloud and offer.gpus == 1 and offer.instance_type in known_types:
            of_gpu = cheapest.setdefault(offer.accelerator, {})
            of_gpu[offer.market] = min(offer.micro_usd_per_hour, of_gpu.get(offer.market, offer.micro_usd_per_hour))
    whole = {gpu: prices for gpu, prices in cheapest.items() if len(prices) == len(Market)}
    if not whole:
        raise Failure(
            f"no offer of {cloud} has one GPU on demand and on spot; `spotrl catalog refresh` asks for prices"
        )
    gpu = min(whole, key=lambda name: (sum(whole[name].values()), name))
    return gpu, whole[gpu][Market.ON_DEMAND], whole[gpu][Market.SPOT]


def job_text(name: str, cloud: str, gpu: str, micro_usd: int) -> str:
    """Return the job file. `micro_usd`: the most that the selftest may cost, its stop included."""
    budget = budget_of(micro_usd)
    return JOB.format(name=name, cloud=cloud, gpu=gpu, usd=budget / 1e6, hourly=HOURLY_MICRO_USD / 1e6)


def budget_of(micro_usd: int) -> int:
    """Return the run's budget, which leaves a part of the limit for the stop."""
    return micro_usd - STOP_MICRO_USD
