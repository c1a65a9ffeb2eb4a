"""Images per GPU-second and MFU of a run, in all and by phase, from the ledger to the report."""

import json
from dataclasses import asdict

import pytest
from click.testing import CliRunner
from sqlalchemy.orm import sessionmaker

from engine.config import ModelConfig
from engine.events import EngineStarted
from engine.memory.job import sized_model
from engine.timing.utilisation import PEAKS, peak_of, possible_images_a_second, rollout_operations, training_operations
from launcher.cli.report import report
from launcher.job.schema import Job
from launcher.report.throughput import Rate, Throughput, throughput_words
from tests.launcher.made_ledger import HOUR_MS, JOB, a_run, a_session
from tests.launcher.test_rank_report import done

QWEN = {
    "model": {"name": "qwen-image", "path": "models/qwen", "weights": "lora", "max_text_tokens": 256},
    "sampler": {"steps": 10, "guidance": 4, "noise_level": 1.2, "window": {"size": 2}},
    "algorithm": {"name": "flow-grpo", "prompts_per_batch": 32, "images_per_prompt": 16},
}


def made_by(iteration, images):
    event = done(iteration, training=1000)
    return type(event)(**asdict(event) | {"made_by": {"demo-spot-0-g1": images}})


def reported(folder, job, devices):
    """Report two iterations of 360 images; two GPUs of an hour each, half an hour of rollouts and of training."""
    with a_session(folder / "ledger.sqlite") as session:
        made = a_run(session, job={**job, "target": JOB["target"]})
        made.status("running", 0)
        made.record(EngineStarted(iteration=0, config_digest="c", devices=devices, versions={}), 0)
        trainer = made.node("trainer", market="on_demand", up=0, end=HOUR_MS, seen=0)
        made.used(trainer, 0, HOUR_MS, training=HOUR_MS // 2)
        spot = made.node("spot-0", up=0, end=HOUR_MS, seen=0)
        made.used(spot, 0, HOUR_MS, rollout=HOUR_MS // 2)
        for iteration in range(2):
            made.record(made_by(iteration, 360), HOUR_MS)
        made.status("finished", HOUR_MS)
        session.commit()
        sessions = sessionmaker(session.get_bind())
    page = folder / "report.html"
    text = CliRunner().invoke(report, ["demo", "--html", str(page)], obj=sessions).output
    return text, json.loads(CliRunner().invoke(report, ["demo", "--json"], obj=sessions).output), page.read_text()


def test_images_per_gpu_second_and_mfu_reach_text_json_and_page(tmp_path):
    text, found, page = reported(tmp_path, QWEN, "cuda:0")
    throughput = found["throughput"]
    config, sized = Job.model_validate(QWEN).engine(), sized_model(ModelConfig.model_validate(QWEN["model"]))
    rollout, training = rollout_operations(config, sized), training_operations(config, sized)
    assert throughput["images"] == 720
    assert throughput["run"]["images_per_gpu_second"] == pytest.approx(720 / 7200)
    assert throughput["run"]["mfu"] == pytest.approx(0.1 * (rollout + training) / 121e12)
    for phase, work in (("rollout", rollout), ("training", training)):
        assert throughput["phases"][phase]["gpu_seconds"] == 1800
        assert throughput["phases"][phase]["mfu"] == pytest.approx(0.4 * work / 121e12)
    assert "Throughput: 0.1 images a GPU-second (MFU" in " ".join(text.split())
    assert "Throughput: 0.1 images a GPU-second (MFU" in page


def test_a_run_without_a_gpu_or_of_a_shipped_model_has_no_mfu(tmp_path):
    for number, (job, devices) in enumerate(((QWEN, "cpu"), (JOB, "cuda:0"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        text, found, _ = reported(folder, job, devices)
        assert found["throughput"]["run"]["mfu"] is None
        assert "Throughput: 0.1 images a GPU-second; rollout alone 0.4; training alone 0.4" in " ".join(text.split())


def test_the_sentence_names_each_phase():
    rate = Rate(gpu_seconds=100.0, images_per_gpu_second=0.463, mfu=0.385)
    throughput = Throughput(images=46, run=rate, phases={"rollout": rate})
    assert throughput_words(throughput) == (
        "Throughput: 0.463 images a GPU-second (MFU 38.5%); rollout alone 0.463 (MFU 38.5%), over 46 trained images."
    )
    assert throughput_words(None) == ""


def test_a_pass_with_guidance_counts_twice_and_a_lora_row_as_two_passes():
    config = Job.model_validate(QWEN).engine()
    sized = sized_model(config.model)
    assert sized.operations / 1e12 == pytest.approx(18.6, abs=0.05)  # tests/benchmarks/results/gpu.md
    assert rollout_operations(config, sized) == 10 * 2 * sized.operations
    assert training_operations(config, sized) == 2 * 2 * 2 * sized.operations
    full = config.model_copy(update={"model": config.model.model_copy(update={"weights": "full"})})
    assert training_operations(full, sized) == 3 * 2 * 2 * sized.operations
    work = rollout_operations(config, sized) + training_operations(config, sized)
    assert possible_images_a_second(config, "H100") == pytest.approx(989e12 / work)
    assert possible_images_a_second(config, "cpu") is None


@pytest.mark.parametrize(("gpu", "tera"), [
    ("H100", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H200", 989), ("A100-80GB", 312),
    ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10G", 70), ("A10", 125), ("NVIDIA L40S", 362), ("cpu", None),
    ("T4", None),
])  # fmt: skip
def test_a_gpu_has_its_peak_by_the_catalogs_and_by_the_drivers_name(gpu, tera):
    assert peak_of(gpu) == (None if tera is None else tera * 1e12)


def test_every_peak_is_of_a_data_sheet():
    assert all(figure.source.basis == "published" for figure in PEAKS.values())
