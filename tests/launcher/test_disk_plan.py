"""The boot disk of a job's nodes: its size follows from the model, and a size that is too small is refused."""

import math

import pytest

from launcher.exit_codes import ExitCode
from launcher.job.resolved import resolve
from launcher.job.schema import Job
from launcher.placement.disk import boot_disk
from launcher.placement.plan import PlacementError

GIB = 1 << 30


def job(name="qwen-image", disk_gb=None, iterations=100, **model):
    more = {} if name == "digits-ocr" else {"path": "there", "weights": "lora"}
    return Job(
        reward={"name": "ocr", "frames": 3} if name == "wan" else {"name": "ocr"},
        model={"name": name, **more, **model},
        algorithm={"prompts_per_batch": 8, "images_per_prompt": 8},
        iterations=iterations,
        resources={"disk_gb": disk_gb},
    )


def disk_of(made, model_bytes=None):
    return boot_disk(resolve(made), model_bytes)


def test_the_disk_of_the_20_b_model_is_recomputed_by_hand():
    disk = disk_of(job(lora_rank=64))
    adapters = 4 * 60 * 2 * 64 * (4 * (3072 + 3072) + 2 * (3072 + 12288))
    assert disk.parts["trained weights"] == 6 * adapters
    assert disk.parts["encoded prompts"] == 800 * 512 * 3584 * 2
    weights = 20_430_401_088 + 8_292_166_656 + 126_892_531
    assert disk.parts["model"] == pytest.approx(2 * weights, rel=0.001)
    whole = (45 + 12 + 10) * GIB + 2 * weights + 6 * adapters + 800 * 512 * 3584 * 2
    assert disk.needed_gib == pytest.approx(whole / GIB / 0.95, abs=1)
    assert disk.gib == 10 * math.ceil(disk.needed_gib / 10) == 140


def test_a_shipped_model_has_the_least_disk():
    assert disk_of(job("digits-ocr")).gib == 100


def test_the_files_of_a_folder_count_instead_of_the_published_model():
    assert disk_of(job(), model_bytes=200 * GIB).parts["model"] == 200 * GIB
    assert disk_of(job(), model_bytes=200 * GIB).gib == 290


def test_files_in_fp32_and_full_training_need_more():
    wan = disk_of(job("wan", path="Wan2.1-14B"))
    assert wan.parts["model"] > 4 * 14_000_000_000
    full = disk_of(job("sd3", path="sd3.5-medium", weights="full"))
    assert full.parts["trained weights"] > 3 * 4 * 2_000_000_000


def test_prompts_count_up_to_what_a_node_encodes():
    assert disk_of(job(iterations=100_000)).parts["encoded prompts"] == 20_000 * 512 * 3584 * 2


@pytest.mark.parametrize(("asked", "model_gib"), [(500, 60), (130, 50), (72, 0)])
def test_a_size_in_the_job_is_taken_as_it_is_if_the_run_fits(asked, model_gib):
    made = job("digits-ocr" if model_gib == 0 else "qwen-image", disk_gb=asked)
    assert disk_of(made, model_gib * GIB).gib == asked


def test_a_size_in_the_job_that_is_too_small_is_refused_with_the_size_that_fits():
    with pytest.raises(
        PlacementError, match=r"resources\.disk_gb is 120, and a node of this run needs 287 GB"
    ) as found:
        disk_of(job(disk_gb=120), model_bytes=200 * GIB)
    assert "(model 200, machine image 45, file system 15, environment 12" in str(found.value)
    assert "set resources.disk_gb to 287 or more, or leave it out" in str(found.value)
    assert found.value.exit_code is ExitCode.INVALID_JOB
    assert disk_of(job(disk_gb=287), model_bytes=200 * GIB).gib == 287
