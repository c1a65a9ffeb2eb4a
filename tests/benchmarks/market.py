"""market: how many prices a second come in, how long does a plan take, how many kinds of wrong price are refused?

    python -m tests.benchmarks.market --json

`prices_per_s`: boto3's and Google's unmodified clients query the fake market (tests/fakes/market.py) on loopback, in a
separate process; accepted prices go into a new ledger. Measured from the first query to the last row on disk.
`plan_ms`: `plan_cloud` on two clouds, 200 offers, up to 16 rollout nodes. `refusals_tested`: wrong rows and feeds that
have a line of their own in tests/launcher/test_prices.py, and are refused again here.
"""

import argparse
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from engine.events import Market
from launcher.ledger.models import PriceRow
from launcher.ledger.store import open_ledger
from launcher.market.instance_types import INSTANCE_TYPES
from launcher.market.offers import Offer
from launcher.market.prices import FeedRefused
from launcher.placement.plan_cloud import plan_cloud
from launcher.placement.requirements import CloudRequirements, MarketView, NodeRequirements
from launcher.services.refresh import ask, build_sources, refresh
from tests.benchmarks.page import load_now, publish, spread
from tests.fakes.market import FakeMarket, Product, Tick, sku
from tests.launcher.reference_recipe import verl_omni
from tests.launcher.test_prices import FEED_REFUSALS, ROW_REFUSALS, believed, on_demand, raw

NOW_MS = 1_763_726_400_000
HOUR_MS = 3_600_000

AWS_REGIONS = ("us-east-1", "us-east-2", "us-west-2", "eu-west-2")
GCP_REGIONS = ("us-central1", "us-east4", "us-east5", "europe-west4")
ZONES = "abc"
CHANGES = 24
"""Prices of each AWS pool in the requested day: one an hour."""
RUNS = 5
PLANS = 21
PLAN_NODES = 16


# --- the fake market ---------------------------------------------------------------------------------


def ticks() -> list[Tick]:
    """Yield prices of every instance type in three zones of four regions: AWS hourly, Google twice."""
    found = []
    for kind in INSTANCE_TYPES:
        regions, changes = (AWS_REGIONS, CHANGES) if kind.cloud == "aws" else (GCP_REGIONS, 2)
        if kind.instance_type != kind.machine_type:
            continue  # the capacity advisor does not cover N1 with attached GPUs
        for region in regions:
            for zone in ZONES:
                name = f"{region}{zone}" if kind.cloud == "aws" else f"{region}-{zone}"
                for change in range(changes):
                    found.append(
                        Tick(
                            at_ms=NOW_MS - (change + 1) * 50 * 60_000,
                            cloud=kind.cloud,
                            region=region,
                            zone=name,
                            instance_type=kind.instance_type,
                            usd=f"{kind.gpus * (0.5 + change / 100) + kind.vcpus / 1000:.4f}",
                        )
                    )
    return found


def products() -> list[Product]:
    """Return on-demand prices of four times the spot price."""
    return [
        Product(
            region=region,
            instance_type=kind.instance_type,
            usd=f"{kind.gpus * 4 + kind.vcpus / 1000:.4f}",
        )
        for kind in INSTANCE_TYPES
        if kind.cloud == "aws"
        for region in AWS_REGIONS
    ]


def skus() -> list[dict[str, Any]]:
    """Return the parts of every Google instance type, with SKUs of other products up to a catalog of 10,000."""
    gpus = (
        *("Nvidia Tesla V100 GPU", "Nvidia Tesla T4 GPU", "Nvidia L4 GPU", "Nvidia Tesla A100 GPU"),
        *("Nvidia Tesla A100 80GB GPU", "Nvidia H100 80GB GPU", "H200 141GB GPU", "A4 Nvidia B200 (1 gpu slice)"),
    )
    hosts = ("N1 Predefined Instance", "G2 Instance", "A2 Instance", "A3 Instance", "A3Ultra Instance")
    found = []
    for dear, spot, usage in ((4, "", "OnDemand"), (1, "Spot Preemptible ", "Preemptible")):
        cents = [(f"{spot}{gpu} running in Americas", 100, "h") for gpu in gpus]
        cents += [(f"{spot}{host} Core running in Americas", 1, "h") for host in hosts]
        cents += [(f"{spot}{host} Ram running in Americas", 0.1, "GiBy.h") for host in hosts]
        cents += [("SSD backed Local Storage" + (" attached to Spot Preemptible VMs" if spot else ""), 2, "GiBy.mo")]
        for name, part, unit in cents:
            found.append(sku(name, f"{dear * part / 100:.6f}", GCP_REGIONS, unit=unit, usage=usage))
    return found + [sku(f"Another Product {number} in Americas", "0.1", GCP_REGIONS) for number in range(9_950)]


def serve(ready: Connection) -> None:
    market = FakeMarket(ticks=ticks(), products=products(), skus=skus(), now_ms=NOW_MS, page=5000)
    ready.send(market.environ)
    ready.recv()
    market.close()


@contextmanager
def market_next_door() -> Iterator[dict[str, str]]:
    """Start the fake market in a separate process, so that it is not measured. Yield its environment variables."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    process.start()
    try:
        yield here.recv()
    finally:
        here.send(None)
        process.join()


# --- measurements ------------------------------------------------------------------------------------


def prices_in(environ: dict[str, str]) -> tuple[int, float]:
    """Return the number of prices that one refresh stored in a new ledger, and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        sessions = open_ledger(Path(folder) / "ledger.sqlite")
        begun = time.perf_counter()
        refreshed = refresh(build_sources(since_ms=NOW_MS - 24 * HOUR_MS, environ=environ), sessions, NOW_MS)
        seconds = time.perf_counter() - begun
        wrong = [str(failure) for answer in refreshed.answers for failure in answer.failures]
        wrong += [str(refusal) for answer in refreshed.answers for refusal in answer.refused]
        assert not wrong, wrong[:3]
        with sessions() as session:
            count = session.scalar(select(func.count()).select_from(PriceRow)) or 0
        assert count == sum(refreshed.new.values())
    return count, seconds


def query_alone(environ: dict[str, str], times: int) -> dict[str, tuple[int, list[float]]]:
    """Return the accepted prices of each source, and the seconds of query and checks, `times` times."""
    found = {}
    for source in build_sources(since_ms=NOW_MS - 24 * HOUR_MS, environ=environ):
        seconds = []
        for _ in range(times):
            begun = time.perf_counter()
            (answer,) = ask([source], NOW_MS)
            seconds.append(time.perf_counter() - begun)
        found[source.name] = (len(answer.points), seconds)
    return found


def refusals_tested() -> int:
    """Return the number of refused rows and feeds; each is tried here."""
    for changes, reason in ROW_REFUSALS:
        (refusal,) = believed(on_demand(), raw(zone="us-east-1b"), raw(**changes)).refused
        assert reason in refusal.reason, changes
    for rows, reason in FEED_REFUSALS:
        with pytest.raises(FeedRefused, match=re.escape(reason)):
            believed(*rows)
    return len(ROW_REFUSALS) + len(FEED_REFUSALS)


def offers() -> list[Offer]:
    """Return 200 offers: ten regions of two clouds, each with an H100 node on demand and in 19 spot zones."""
    found = []
    for cloud, instance_type in (("aws", "p5.48xlarge"), ("gcp", "a3-highgpu-8g")):
        for region in range(5):
            node = Offer(
                cloud=cloud,
                region=f"region-{region}",
                zone="",
                instance_type=instance_type,
                accelerator="H100",
                gpus=8,
                market=Market.ON_DEMAND,
                micro_usd_per_hour=55_040_000 + region * 1_000_000,
                source="made by rule for the benchmark",
                observed_at="2025-11-21T12:00:00+00:00",
            )
            found.append(node)
            for zone in range(19):
                price = 14_000_000 + (zone * 37 + region * 11) % 50 * 400_000
                name = f"{node.region}-{zone}"
                found.append(replace(node, zone=name, market=Market.SPOT, micro_usd_per_hour=price))
    return found


def plan_ms(offered: Sequence[Offer], times: int) -> list[float]:
    """Return the milliseconds of each of `times` plans, for the request of sky_yamls/qwen_image_ocr.yaml."""
    needs = CloudRequirements(
        recipe=verl_omni(),
        trainer=NodeRequirements(accelerator="H100", gpus=4),
        rollout=NodeRequirements(accelerator="H100", gpus=8),
        max_rollout_nodes=PLAN_NODES,
        max_hourly_micro_usd=400_000_000,
        max_total_micro_usd=20_000_000_000,
    )
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        plan = plan_cloud(needs, MarketView(offers=tuple(offered)))
        took.append(1e3 * (time.perf_counter() - begun))
        assert plan.slots
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help="refreshes, each into a new ledger")
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    load1 = load_now()
    refused = refusals_tested()
    offered = offers()
    plans = plan_ms(offered, PLANS)
    with market_next_door() as environ:
        os.environ |= environ
        counts, seconds = zip(*(prices_in(environ) for _ in range(options.runs)), strict=True)
        alone = query_alone(environ, options.runs)
    rates = [count / took for count, took in zip(counts, seconds, strict=True)]
    publish(
        "market",
        question="how many prices a second come in, how long does a plan take, and what is refused?",
        command="python -m tests.benchmarks.market --json",
        result={
            "prices_per_s": statistics.median(rates),
            "plan_ms": statistics.median(plans),
            "refusals_tested": refused,
            "prices": counts[0],
            "refresh_seconds": statistics.median(seconds),
            "seconds_alone": {name: statistics.median(took) for name, (_, took) in alone.items()},
            "plan_ms_worst": max(plans),
            "offers": len(offered),
            "max_rollout_nodes": PLAN_NODES,
            "plans": PLANS,
        },
        runs=options.runs,
        seeds=[],
        load1=load1,
        rows=[
            {"what": "prices a second, into a new ledger", "median (range)": spread(rates), "runs": options.runs},
            {"what": "seconds of one refresh, all sources", "median (range)": spread(seconds), "runs": options.runs},
            *(
                {
                    "what": f"seconds of {name} alone, {count} prices",
                    "median (range)": spread(took),
                    "runs": options.runs,
                }
                for name, (count, took) in alone.items()
            ),
            {"what": "milliseconds of one plan", "median (range)": spread(plans), "runs": PLANS},
        ],
        text=f"""
Measured, on loopback: a cloud's own answer takes longer than the fake market's, and its quotas are not here.
{counts[0]} prices of {len(AWS_REGIONS)} AWS and {len(GCP_REGIONS)} Google regions, {CHANGES} in a day for each AWS
pool; for Google's, {len(skus())} SKUs are read, and two questions asked for each machine in each zone. Asking and
believing is nearly all of it, and Google's clients take most of that.
`plan_ms`: {len(offered)} offers in ten regions of two clouds, up to {PLAN_NODES} rollout nodes, within an hourly and a
total limit; nothing is known of any pool, so the prior holds for each.
`refusals_tested`: {len(ROW_REFUSALS)} rows and {len(FEED_REFUSALS)} feeds, each refused for the reason that its test
names.
What it changed: SKUs are read from the bare messages, not through the client's wrapper (1.9 s of a refresh became 1.2),
and what is kept is written in one transaction after the network, which takes a tenth of a second.
""",
    )


if __name__ == "__main__":
    main()
