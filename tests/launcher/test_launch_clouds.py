"""`spotrl launch` on clouds: it prints a plan from the price tables alone and buys nothing."""

import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.exit_codes import ExitCode
from launcher.market.advice import STALE_MS, cloud_priors
from launcher.market.hazard import POOLED
from launcher.market.offers import read_catalog
from launcher.market.pools import Pool
from launcher.market.prices import AdviceKind, CapacityAdvice, iso
from launcher.money import HOUR_MS
from launcher.services.refresh_catalog import replace_tables
from tests.cpu_seconds import takes_less_than
from tests.fakes.market import FakeMarket, Product, Tick
from tests.launcher.printed import printed

ROOT = Path(__file__).parents[2]
JOB = "qwen_image_ocr.yaml"
NOW_MS = 1_795_348_800_000


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys, few_replays):
    """Call `spotrl launch` on a copy of the reference recipe, in a temporary home."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    for name in (JOB, "qwen_image_ocr_prompts.txt", "qwen_image_ocr_test_prompts.txt"):
        shutil.copy(str(files("sky_yamls") / name), tmp_path / name)

    def launch(*arguments: str) -> tuple[int, str, str]:
        code = run(["launch", str(tmp_path / JOB), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    launch.folder = tmp_path
    return launch


def unwrapped(text: str) -> str:
    """Return the output as one line."""
    return " ".join(text.split())


@pytest.mark.parametrize("more", [(), ("--spot", "never"), ("--set", "resources.rollout.num_nodes=4")])
def test_no_line_of_a_cloud_plan_is_longer_than_80_columns(launch, more):
    code, text, _ = launch("--dry-run", "--explain", *more)
    assert code == ExitCode.OK
    assert "useful hour" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_dry_run_prints_the_whole_plan_from_the_shipped_tables(launch):
    code, shown, _ = launch("--dry-run", "--explain")
    assert code == ExitCode.OK
    assert "trainer  on_demand  H100:1" in shown
    assert "spot-0   spot       H100:8" in shown
    text = unwrapped(shown)
    assert "skypilot-org/skypilot-catalog" in text
    assert "TOO OLD TO BUY BY" in text
    assert "at most" in text
    assert "to similarity 0.9: $" in text
    assert "basis: " in text
    assert "exploration stale: " in text
    assert "makes an iteration cost x" in text
    assert "it pays only if exploration saves more than" in text
    assert "against the same nodes, all on demand" in text
    assert "iterations x" in text
    assert "could be spent, whatever is lost or late: budget.max_total $4,000.00" in text
    assert text.count("could be spent") == 1
    assert "the brakes hold" not in text  # one number, not two
    assert "what else there is, and why not:" in text
    assert "spotrl has never trained Qwen-Image" in text
    assert "seconds of an iteration from passes measured (spotrl on one H100, 2026-11-22" in text
    assert "qwen-image was not looked for" in text
    assert text.endswith("Dry run: nothing was started.")


def test_a_json_plan_has_sums_that_add_up(launch):
    _, text, _ = launch("--dry-run", "--json")
    answer = printed("launch", text)
    plan = answer["plan"]
    assert answer["started"] is False
    rates = [slot["placement"]["micro_usd_per_hour"] for slot in plan["slots"]]
    assert sum(rates) == plan["listed_micro_usd_per_hour"] <= 150_000_000
    assert plan["cost"]["expected"] <= plan["max_total_micro_usd"] < plan["bound_micro_usd"]
    assert all(slot["placement"]["price_source"] for slot in plan["slots"])
    assert {slot["placement"]["cloud"] for slot in plan["slots"]} == {plan["cloud"]}
    assert 1 <= len(rates) - 1 <= 12


def test_every_zone_of_the_plan_has_a_name_known_to_the_cloud(launch):
    _, text, _ = launch("--dry-run", "--json")
    zones = {slot["placement"]["zone"] for slot in printed("launch", text)["plan"]["slots"]}
    assert not [zone for zone in zones if "cheapest" in zone or "dearest" in zone or "-zone-" in zone]


def test_without_a_bucket_nothing_is_bought(launch):
    code, text, error = launch("-y")
    assert code == ExitCode.INVALID_JOB
    assert "trainer  on_demand" in text, "the plan is shown all the same"
    assert "store has no bucket on aws and gcp" in error
    assert "store: {aws: s3://my-bucket/spotrl, gcp: gs://my-bucket/spotrl}" in error


def test_nothing_is_bought_at_an_outdated_price(launch):
    (launch.folder / "digits.yaml").write_text(
        "infra: aws\nstore: s3://bucket\nbudget: {max_total: 40, max_hourly: 9}\n"
    )
    assert run(["launch", str(launch.folder / "digits.yaml"), "-y"]) == ExitCode.STALE_CATALOG


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--max-hourly", "10"), ExitCode.REFUSED_BY_BUDGET, "raise --max-hourly to"),
        (("--max-total", "10"), ExitCode.REFUSED_BY_BUDGET, "max_total $10.00"),
        (("--deadline", "1h"), ExitCode.REFUSED_BY_BUDGET, "the deadline of 1h"),
        (("--infra", "azure"), ExitCode.INVALID_JOB, "use local"),
        (
            ("--set", "resources.trainer.accelerators=H300:4"),
            ExitCode.INVALID_JOB,
            "H300:4, and spotrl knows no such GPU on aws or gcp",
        ),
        (("--set", "resources.trainer.accelerators=T4:1"), ExitCode.INVALID_JOB, "a GPU without timings: hours"),
        (
            ("--infra", "gcp", "--set", "resources.rollout.accelerators=L40S:8"),
            ExitCode.INVALID_JOB,
            "no price of it is known on gcp: prices are known of A100, A100-80GB, H100, H200, L4, RTXPRO6000",
        ),
    ],
)
def test_a_job_that_cannot_be_planned_is_refused_with_a_remedy(launch, arguments, code, words):
    found, _, error = launch("--dry-run", *arguments)
    assert found == code
    assert words in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ("runtime.trainer_ranks=8", "resources.trainer.accelerators=H100:8", "algorithm.prompts_per_batch=8"),
            ("runtime.trainer_ranks is 8, and an optimiser step has 4 groups", "use 4 or fewer, or auto"),
        ),
        (
            ("runtime.trainer_ranks=8", "resources.trainer.accelerators=H100:4"),
            ("runtime.trainer_ranks is 8, and a trainer node with H100:4", "has 4 GPUs", "use 4 or fewer, or auto"),
        ),
        (
            ("resources.trainer.instance_type=p5.4xlarge", "resources.trainer.accelerators=H100:4"),
            ("is H100:4, and resources.trainer.instance_type p5.4xlarge has H100:1", "use accelerators: H100:1"),
        ),
    ],
)
def test_ranks_that_no_node_has_are_refused_before_a_plan_and_a_purchase(launch, settings, words):
    code, text, error = launch("-y", *(word for setting in settings for word in ("--set", setting)))
    assert code == ExitCode.INVALID_JOB
    assert [word for word in words if word not in unwrapped(error)] == [], error
    assert "on_demand" not in text, "nothing was planned"


def test_a_deadline_may_be_met_by_nodes_on_demand_when_late(launch):
    """With 2 days the plan was all on demand for $2,439, and with 1 day the shortest deadline was said to be 4 days."""
    code, text, _ = launch("--dry-run", "--deadline", "2d")
    assert code == ExitCode.OK
    assert "spot-0   spot       H100:8" in text
    assert float(re.search(r"qwen-image-ocr: \$([\d,.]+)", text)[1].replace(",", "")) < 2_000
    code, _, error = launch("--dry-run", "--deadline", "1d")
    assert code == ExitCode.REFUSED_BY_BUDGET
    assert "raise --deadline to 1d 15h" in unwrapped(error)


def test_an_untimed_job_is_planned_as_configured_and_marked_a_guess(launch, capsys):
    (launch.folder / "digits.yaml").write_text("infra: aws\n")
    assert run(["launch", str(launch.folder / "digits.yaml"), "--dry-run", "--explain"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "nobody has timed digits-ocr on" in unwrapped(text)
    assert "spot-0" in text
    assert "spot-1" in text


def test_the_seconds_of_an_iteration_are_recomputed_by_hand(launch):
    """512 images of 10 guided steps of .0481 s, decoded, and 1024 rows of 6.07 guided passes and half of 1.75."""
    _, text, _ = launch("--dry-run", "--json")
    guided = 2 * 0.0481
    rollouts = 512 * (10 * guided + 0.02 * 512 * 512 / 1e6)
    training = 512 * 2 * guided * (6.07 + 1.75 / 2)
    plan = printed("launch", text)["plan"]
    assert plan["seconds_per_iteration_alone"] == pytest.approx(rollouts + training)
    gpus = plan["spot_pays"]["gpus"]
    assert rollouts / (1 + gpus) + training < plan["seconds_per_iteration"] < rollouts + training


def test_one_cloud_is_planned_on_that_cloud(launch):
    _, text, _ = launch("--dry-run", "--json", "--infra", "gcp", "--max-total", "9000")
    assert printed("launch", text)["plan"]["cloud"] == "gcp"


def test_spot_never_buys_no_spot(launch):
    _, text, _ = launch("--dry-run", "--json", "--spot", "never", "--max-hourly", "400", "--max-total", "40000")
    assert {slot["placement"]["market"] for slot in printed("launch", text)["plan"]["slots"]} == {"on_demand"}


def test_own_prices_are_shown_on_the_lines_that_they_change(launch):
    (launch.folder / "config.yaml").write_text("discounts: [{cloud: aws, percent: 10}, {cloud: gcp, percent: 10}]\n")
    _, text, _ = launch("--dry-run", "--explain")
    lines = [line for line in text.replace("\n      ", " ").splitlines() if line.startswith("  price of ")]
    assert ["less 10 % (discounts[" in line for line in lines] == ["on_demand" in line for line in lines]
    assert any("on_demand" in line for line in lines)


def test_refreshed_prices_come_before_shipped_ones(launch):
    _, before, _ = launch("--dry-run", "--json")
    region = printed("launch", before)["plan"]["region"]
    now_ms = time.time_ns() // 1_000_000
    dated = [replace(offer, observed_at=iso(now_ms), source="asked today") for offer in read_catalog()]
    replace_tables(launch.folder / "home" / "catalogs", dated, {}, source="test", now_ms=now_ms)
    _, text, _ = launch("--dry-run", "--explain")
    assert region in text.splitlines()[1], "the same prices, dated today"
    assert "asked today" in text
    assert "TOO OLD" not in text


def test_the_plan_uses_the_prices_that_the_cloud_reported(launch, monkeypatch):
    """Prices go from the fake market through EC2's client and the ledger to the plan."""
    now_ms = time.time_ns() // 1_000_000
    tick = Tick(
        at_ms=now_ms - HOUR_MS,
        cloud="aws",
        region="us-west-2",
        zone="us-west-2a",
        instance_type="p5.48xlarge",
        usd="11.11",
    )
    sold = [Product(region="us-west-2", instance_type="p5.48xlarge", usd="55.04")]
    with FakeMarket(ticks=[tick], products=sold, now_ms=now_ms) as market:
        for name, value in market.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        assert run(["prices", "refresh", "--cloud", "aws", "--gpu", "H100"]) == ExitCode.OK
    _, text, _ = launch("--dry-run", "--explain", "--infra", "aws", "--max-total", "9000")
    assert "price of p5.48xlarge spot in us-west-2a: aws ec2 DescribeSpotPriceHistory, " in unwrapped(text)
    assert "$11.11/h" in text
    assert "TOO OLD" not in text


def test_a_gpu_that_torch_cannot_use_is_refused_with_an_alternative(launch):
    code, _, text = launch("--dry-run", "--infra", "aws", "--set", "resources.rollout.accelerators=V100:1")
    assert code == ExitCode.INVALID_JOB
    assert "resources.rollout.accelerators is V100:1, a GPU older than compute capability 7.5" in text
    assert "driver (535, and CUDA 13 needs 580)" in text
    assert "use one of A100, A100-80GB, A10G, B200, H100, H200, L4, L40S, RTXPRO6000, T4" in text


def test_the_dry_run_takes_seconds_and_loads_no_sdk(launch):
    """The whole command in a new process."""
    code = (
        "import sys\nfrom launcher.cli.main import run\n"
        f"assert run(['launch', {str(launch.folder / JOB)!r}, '--infra', 'aws,gcp', '--dry-run']) == 0\n"
        "print({'boto3', 'google', 'requests', 'torch'} & {name.partition('.')[0] for name in sys.modules})"
    )

    def ask() -> None:
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
        assert done.stdout.splitlines()[-1] == "set()"

    assert takes_less_than(8, ask)


# --- capacity advice of the clouds -------------------------------------------------------------------


def advice(value: float, kind: AdviceKind = AdviceKind.UPTIME_HOURS, age_ms: int = 0) -> CapacityAdvice:
    return CapacityAdvice(
        cloud="gcp",
        region="us-east4",
        zone="us-east4-a",
        instance_type="a3-highgpu-8g",
        kind=kind,
        value=value,
        from_ms=NOW_MS - age_ms,
        until_ms=NOW_MS - age_ms,
        observed_ms=NOW_MS - age_ms,
        source="gcp AdviceClient",
    )


POOL = Pool(cloud="gcp", region="us-east4", zone="us-east4-a", instance_type="a3-highgpu-8g")


def test_an_estimated_uptime_sets_the_median_lifetime():
    advised = cloud_priors([advice(10)], NOW_MS)
    assert advised.priors[POOL].curve.survives(10) == pytest.approx(0.5)
    assert advised.priors[POOL].source == "gcp AdviceClient"
    assert advised.odds == {}


def test_obtainability_sets_the_odds_of_a_launch():
    assert cloud_priors([advice(0.3, AdviceKind.OBTAINABILITY)], NOW_MS).odds[POOL].mean == pytest.approx(0.3)


def test_the_newest_estimate_counts_and_an_old_one_does_not():
    advised = cloud_priors([advice(10, age_ms=1), advice(99, age_ms=2)], NOW_MS)
    assert advised.priors[POOL].curve.survives(10) == pytest.approx(0.5)
    assert cloud_priors([advice(10, age_ms=STALE_MS + 1)], NOW_MS).priors == {}
    assert POOLED.curve.survives(10) != pytest.approx(0.5)
