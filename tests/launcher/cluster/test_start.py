"""Start weights (`model.from`): found, checked against the job, and put into the run's stores."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from sqlalchemy.orm import sessionmaker

from engine.config import ModelConfig
from engine.models.load import load_adapter, load_start, trainable
from engine.models.weights import get_weights
from engine.storage.checkpoint import CheckpointDamaged, CheckpointStore
from engine.storage.tensor_files import Stored
from launcher.cli.pull import pull
from launcher.exit_codes import ExitCode
from launcher.job.checked import JobError
from launcher.job.load import load_job
from launcher.runs.start import copy_start, find_start, send_start
from launcher.storage.stores import run_stores
from tests.engine.test_checkpoint import at
from tests.launcher.made_ledger import a_run, a_session

LORA = {"name": "digits-ocr", "weights": "lora", "lora_rank": 2, "lora_alpha": 4}
TINY = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
WEIGHTS = len(TINY).to_bytes(8, "little") + TINY + b"\0\0\x80\x3f"


@pytest.fixture
def sessions(tmp_path):
    """Open a ledger with the run `first`, whose newest checkpoint holds WEIGHTS."""
    with a_session(tmp_path / "ledger.sqlite") as session:
        run = a_run(session, "first", folder=str(tmp_path / "first")).run
        run.job = {**run.job, "model": LORA}
        session.commit()
        made = sessionmaker(session.get_bind())
    save(tmp_path, WEIGHTS)
    return made


def save(tmp_path, weights):
    (tmp_path / "first" / "store").mkdir(parents=True, exist_ok=True)
    files = {name: Stored.of_bytes(weights) for name in ("weights", "ema", "optimizer")}
    CheckpointStore((tmp_path / "first" / "store").as_uri()).save(replace(at(7), files=files), keep=3)


def a_job(tmp_path, source="first", **model):
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps({"name": "second", "model": LORA | model | {"from": source}}))
    return load_job(file)


def found(sessions, tmp_path, job):
    (tmp_path / "place").mkdir(exist_ok=True)
    return find_start(sessions, job, tmp_path / "place")


def pulled(sessions, tmp_path):
    folder = tmp_path / "weights"
    result = CliRunner().invoke(pull, ["first", "--to", str(folder)], obj=sessions, standalone_mode=False)
    assert result.exception is None
    return folder


@pytest.mark.parametrize("by_folder", [False, True])
def test_a_run_and_a_pulled_folder_give_the_trainer_the_same_bytes(sessions, tmp_path, by_folder):
    if by_folder:
        pulled(sessions, tmp_path)
    job = a_job(tmp_path, "./weights" if by_folder else "first")
    start = found(sessions, tmp_path, job)
    send_start(start, job.job, tmp_path / "second")
    trainer_reads = CheckpointStore((tmp_path / "second" / "store").as_uri()).start()
    assert trainer_reads.weights.to_bytes() == WEIGHTS
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    assert trainer_reads.text == f"first, checkpoint l0001-i000007, sha256 {digest[:12]}"
    copied = copy_start(run_stores("local", {}, "second", tmp_path / "second"), tmp_path / "copy")
    assert copied.read_bytes() == WEIGHTS


def test_start_weights_of_a_run_on_clouds_are_in_each_of_its_buckets(sessions, tmp_path):
    job = a_job(tmp_path)
    urls = {cloud: (tmp_path / cloud).as_uri() for cloud in ("aws", "gcp")}
    for cloud in urls:
        (tmp_path / cloud / "second").mkdir(parents=True)
    send_start(found(sessions, tmp_path, job), job.job.model_copy(update={"infra": "aws,gcp", "store": urls}), tmp_path)
    assert [CheckpointStore(f"{url}/second").start().weights.to_bytes() for url in urls.values()] == [WEIGHTS, WEIGHTS]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "shapes"}, "trained with model.name digits-ocr, and this job has shapes"),
        ({"weights": "full"}, "trained with model.weights lora, and this job has full"),
        ({"lora_rank": 4}, "trained with model.lora_rank 2, and this job has 4"),
        ({"lora_alpha": 8}, "trained with model.lora_alpha 4, and this job has 8"),
        ({"path": "."}, "trained on the model that ships with spotrl"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(sessions, tmp_path, model, words):
    prompts = {"prompts": "shapes"} if model.get("name") == "shapes" else {}
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps({"model": LORA | model | {"from": "first"}, **prompts}))
    with pytest.raises(JobError, match=words) as refused:
        found(sessions, tmp_path, load_job(file))
    assert refused.value.field == "model.from"
    assert refused.value.exit_code is ExitCode.INVALID_JOB


def test_an_unknown_run_is_refused_with_similar_names(sessions, tmp_path):
    with pytest.raises(JobError, match="no run is called frist; did you mean first"):
        found(sessions, tmp_path, a_job(tmp_path, "frist"))


def test_a_run_without_a_checkpoint_is_refused(sessions, tmp_path):
    (tmp_path / "first" / "store" / "checkpoints" / "l0001-i000007" / "manifest.json").unlink()
    with pytest.raises(JobError, match="first has no complete checkpoint yet"):
        found(sessions, tmp_path, a_job(tmp_path))


def test_weights_that_are_not_a_safetensors_file_are_refused(sessions, tmp_path):
    save(tmp_path, WEIGHTS[:-1])
    with pytest.raises(JobError, match="no safetensors file"):
        found(sessions, tmp_path, a_job(tmp_path))


def a_damaged_folder(folder, damage):
    manifest, weights = folder / "manifest.json", folder / "weights.safetensors"
    match damage:
        case "no folder":
            folder.rename(folder.with_name("elsewhere"))
        case "no manifest":
            manifest.unlink()
        case "manifest cut short":
            manifest.write_text(manifest.read_text()[:40])
        case "manifest of another kind":
            manifest.write_text('{"files": []}')
        case "no weights":
            weights.unlink()
        case "other weights":
            weights.write_bytes(WEIGHTS + b"\0")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("no folder", "cannot be started from: it is not there; pull"),
        ("no manifest", "manifest.json is not there; pull the weights again"),
        ("manifest cut short", "manifest.json is damaged"),
        ("manifest of another kind", "manifest.json is damaged"),
        ("no weights", "weights.safetensors cannot be read"),
        ("other weights", "is not what manifest.json names"),
    ],
)
def test_a_pulled_folder_that_is_damaged_is_refused(sessions, tmp_path, damage, words):
    a_damaged_folder(pulled(sessions, tmp_path), damage)
    with pytest.raises(JobError, match=words):
        found(sessions, tmp_path, a_job(tmp_path, "./weights"))


@pytest.mark.parametrize("damage", ["missing", "other bytes"])
def test_a_trainer_without_its_start_weights_refuses_to_train(sessions, tmp_path, damage):
    job = a_job(tmp_path)
    send_start(found(sessions, tmp_path, job), job.job, tmp_path / "second")
    weights = tmp_path / "second" / "store" / "start" / "weights.safetensors"
    weights.unlink() if damage == "missing" else weights.write_bytes(b"x")
    with pytest.raises(CheckpointDamaged, match="launch the run again"):
        CheckpointStore((tmp_path / "second" / "store").as_uri()).start()


def test_weights_of_another_shape_are_refused_by_the_engine(tmp_path):
    small, large = (load_adapter(ModelConfig(weights="lora", lora_rank=rank)) for rank in (2, 4))
    before = {name: value.detach().clone() for name, value in trainable(large).items()}
    with pytest.raises(ValueError, match=r"of another model: .*lora_A.* is \[2, 96\] there and \[4, 96\] in this"):
        load_start(trainable(large), get_weights(trainable(small)))
    assert all(torch.equal(value, before[name]) for name, value in trainable(large).items())
