"""A job with somebody else's LoRA: checked before a purchase, identified by its digest, and sent to nodes on clouds."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file
from sqlalchemy.orm import sessionmaker

from engine.config import ModelConfig
from engine.lora_file import lora_digest
from engine.models.fetch import fetched
from launcher.exit_codes import Failure
from launcher.job.checked import JobError
from launcher.job.load import load_job
from launcher.job.resolved import resolve
from launcher.placement.disk import boot_disk
from launcher.provision.provide import prepare_folder
from launcher.provision.sky.bundle import Bundle
from launcher.runs.runs import resume_run
from launcher.runs.start import find_start
from launcher.storage.weights import digest_of, weights_of
from tests.launcher.cluster.fake_cloud import FakeCloud
from tests.launcher.made_ledger import a_run, a_session

NAMES = ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_q")


def a_lora(file, rank=4, fill=1.0):
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name in NAMES:
        tensors[f"transformer.{name}.lora_A.weight"] = np.full((rank, 96), fill, np.float32)
        tensors[f"transformer.{name}.lora_B.weight"] = np.full((96, rank), fill, np.float32)
    save_file(tensors, file)
    return file


def a_job(tmp_path, **model):
    (tmp_path / "job").mkdir(exist_ok=True)
    file = tmp_path / "job" / "job.yaml"
    file.write_text(json.dumps({"name": "second", "model": {"weights": "lora", **model}}))
    return load_job(file)


def test_a_job_knows_the_published_digest_of_its_file(tmp_path):
    lora = a_lora(tmp_path / "job" / "their.safetensors")
    checked = a_job(tmp_path, lora="their.safetensors")
    assert checked.job.model.lora_sha256 == hashlib.sha256(lora.read_bytes()).hexdigest()
    assert checked.job.model.lora_rank == 16, "the new adapters of a merged LoRA have a rank of their own"
    before = checked.digest
    a_lora(lora, fill=2.0)
    assert a_job(tmp_path, lora="their.safetensors").digest != before
    with pytest.raises(JobError, match=r"job\.yaml, line 1: .* it is not the file that the run began with"):
        a_job(tmp_path, lora="their.safetensors", lora_sha256=checked.job.model.lora_sha256)


def test_a_continued_lora_gives_its_rank_to_a_job_that_names_none(tmp_path):
    a_lora(tmp_path / "job" / "their.safetensors", rank=24)
    continued = {"lora": "their.safetensors", "lora_use": "continue"}
    assert a_job(tmp_path, **continued).job.model.lora_rank == 24
    assert a_job(tmp_path, **continued, lora_rank=32).job.model.lora_rank == 32
    with pytest.raises(
        JobError, match=r"use model\.lora_rank: 24 or more, leave it out, or use lora_use: merge"
    ) as refused:
        a_job(tmp_path, **continued, lora_rank=8)
    assert refused.value.field == "model.lora_rank"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"lora": "missing.safetensors"}, "there is no such file or folder; give a .safetensors file"),
        ({"lora": "their.safetensors", "weights": "full"}, "model.weights is full; use model.weights: lora"),
        ({"lora": "their.safetensors", "lora_use": "continue", "from": "first"}, "both say where the adapters begin"),
    ],
)
def test_a_job_whose_lora_cannot_be_used_is_refused_before_a_plan(tmp_path, model, words):
    a_lora(tmp_path / "job" / "their.safetensors")
    with pytest.raises(JobError, match=words):
        a_job(tmp_path, **model)


def test_start_weights_that_are_a_lora_are_named_as_one(tmp_path):
    a_lora(tmp_path / "job" / "theirs" / "pytorch_lora_weights.safetensors")
    job = a_job(tmp_path, **{"from": "./theirs"})
    with pytest.raises(JobError, match=r"but a LoRA: pytorch_lora_weights\.safetensors .diffusers, 2 modules, rank 4"):
        find_start(None, job, tmp_path)


def test_a_run_whose_lora_was_changed_is_not_resumed(tmp_path):
    lora = a_lora(tmp_path / "their.safetensors")
    with a_session(tmp_path / "ledger.sqlite") as session:
        run = a_run(session, "first", folder=str(tmp_path / "first")).run
        run.workdir = str(tmp_path)
        run.job = {
            **run.job,
            "model": ModelConfig(weights="lora", lora=lora.name, lora_sha256=lora_digest(lora)).model_dump(),
        }
        session.commit()
        a_lora(lora, fill=2.0)
        with pytest.raises(Failure, match="it is not the file that the run began with; put that file back"):
            resume_run(sessionmaker(session.get_bind()), "first")


def test_the_files_of_a_lora_count_for_the_disk_of_a_node(tmp_path):
    file = a_lora(tmp_path / "job" / "their.safetensors")
    resolved = resolve(a_job(tmp_path, lora="their.safetensors").job, tmp_path / "job")
    assert resolved.lora_files == [file]
    assert boot_disk(resolved, None, file.stat().st_size).parts["LoRA"] == file.stat().st_size


def test_a_node_on_a_cloud_reads_the_lora_from_the_bucket_alone(tmp_path, monkeypatch):
    """PEFT's two files go to the bucket, once; the bundle of the job's folder leaves them out."""
    folder = tmp_path / "job" / "theirs"
    a_lora(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 8, "r": 4}))
    checked = a_job(tmp_path, lora="theirs")
    bundles = []

    def make_bundle(to, workdir, *, sent):
        bundles.append([path.name for path in sent])
        return Bundle(folder=to, digest="d1", setup="")

    monkeypatch.setattr("launcher.provision.provide.make_bundle", make_bundle)
    (tmp_path / "bucket" / "_weights" / digest_of(folder)).mkdir(parents=True)
    on_aws = {"infra": "aws", "store": {"aws": (tmp_path / "bucket").as_uri()}, "ssh_from": "203.0.113.7/32"}
    job = checked.job.model_copy(update=on_aws)
    common = prepare_folder(tmp_path / "run", job, {"aws": FakeCloud()}, checked.workdir)
    assert bundles == [["adapter_model.safetensors", "adapter_config.json"]]
    shutil.rmtree(folder)
    there = fetched(weights_of((tmp_path / "bucket").as_uri(), common["lora"]), tmp_path / "node" / "weights")
    assert lora_digest(there / "adapter_model.safetensors") == checked.job.model.lora_sha256
