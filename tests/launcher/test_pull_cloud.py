"""`spotrl pull` and `spotrl report` of a run whose store is a bucket with weights, images and metrics."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from sqlalchemy.orm import sessionmaker

from engine.events import Evaluated
from engine.models.digits import load_digits
from engine.models.weights import get_weights, set_weights
from engine.storage.checkpoint import CheckpointStore
from engine.storage.ship import StoreCopy
from engine.storage.tensor_files import Stored
from engine.trainer.metrics import MetricsLog
from launcher.cli.pull import pull
from launcher.cli.report import report
from launcher.report.html import PNG
from launcher.storage.stores import StoreError
from tests.engine.test_checkpoint import at
from tests.engine.test_node_agent_on_cloud import spec_of
from tests.launcher.cluster.test_stores import s3  # noqa: F401 (a fixture)
from tests.launcher.made_ledger import a_run, a_session
from tests.launcher.printed import printed

URL = "s3://runs/ours/demo"


pytestmark = pytest.mark.usefixtures("forked_engine")


@pytest.fixture
def engine_store(s3, monkeypatch):  # noqa: F811
    """Create the bucket as nodes see it; the agent sets its region."""
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    store = CheckpointStore(URL)
    monkeypatch.delenv("AWS_REGION")
    return store


@pytest.fixture
def sessions(tmp_path):
    """Open a ledger with an evaluated run on AWS that has no local files."""
    with a_session(tmp_path / "ledger.sqlite") as session:
        made = a_run(session, "demo", folder=str(tmp_path / "runs" / "demo"))
        made.run.infra, made.run.job = "aws", {**made.run.job, "store": {"aws": "s3://runs/ours"}}
        made.status("running", 0)
        made.evaluated(0, 0.1, 0, pictures="evaluation/000000.png")
        session.commit()
        return sessionmaker(session.get_bind())


def pulled_to(sessions, folder):
    result = CliRunner(mix_stderr=False).invoke(
        pull, ["demo", "--to", str(folder), "--json"], obj=sessions, standalone_mode=False
    )
    if result.exception is not None:
        raise result.exception
    return printed("pull", result.stdout)


def test_weights_of_a_cloud_run_are_pulled_and_load_in_the_engine(engine_store, sessions, tmp_path):
    trained, fresh = load_digits(), load_digits()
    parameters = dict(trained.transformer.named_parameters())
    with torch.no_grad():
        parameters["proj_out.bias"] += 1.0
    weights = get_weights(parameters)
    engine_store.save(
        replace(at(12), files={name: Stored.of_bytes(weights) for name in ("weights", "ema", "optimizer")}), keep=3
    )
    answer = pulled_to(sessions, tmp_path / "out")
    assert (answer["checkpoint"], answer["iteration"]) == ("l0001-i000012", 12)
    other = dict(fresh.transformer.named_parameters())
    assert not torch.equal(other["proj_out.bias"], parameters["proj_out.bias"])
    set_weights(other, (tmp_path / "out" / "weights.safetensors").read_bytes())
    assert all(torch.equal(other[name], parameters[name]) for name in parameters)


def test_metrics_of_a_cloud_run_are_pulled(engine_store, sessions, tmp_path, monkeypatch):
    engine_store.save(at(1), keep=3)
    node = tmp_path / "node"
    MetricsLog(node / "metrics").evaluation(Evaluated(iteration=1, metrics={"exact_match": 0.5}, prompts=8))
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    StoreCopy(spec_of(node, node="demo-trainer-g0", role="trainer", store=URL), every_seconds=3600).end()
    answer = pulled_to(sessions, tmp_path / "out")
    folder = tmp_path / "out" / "metrics" / "demo-trainer-g0"
    assert json.loads((folder / "metrics.jsonl").read_text())["metrics"] == {"exact_match": 0.5}
    assert str(folder / "metrics.jsonl") in answer["metrics"]


def test_the_report_of_a_cloud_run_has_its_images(engine_store, sessions, tmp_path):
    engine_store.put("evaluation/000000.png", PNG + b"digits")
    page = tmp_path / "report.html"
    result = CliRunner().invoke(report, ["demo", "--html", str(page)], obj=sessions, standalone_mode=False)
    assert result.exception is None
    assert page.read_text().count("data:image/png;base64,") == 1


def test_the_newest_checkpoint_over_all_buckets_is_pulled(sessions, tmp_path):
    for cloud, name in (("aws", "l0001-i000012"), ("gcp", "l0002-i000003")):
        (tmp_path / cloud / "demo").mkdir(parents=True)
        CheckpointStore((tmp_path / cloud / "demo").as_uri()).save(
            replace(
                at(int(name[-6:]), int(name[1:5])),
                files={file: Stored.of_bytes(name.encode()) for file in ("weights", "ema", "optimizer")},
            ),
            keep=3,
        )
    with sessions() as session, session.begin():
        run = a_run(session, "moved", folder=str(tmp_path)).run
        run.infra = "aws,gcp"
        run.job = {**run.job, "store": {cloud: (tmp_path / cloud).as_uri() for cloud in ("aws", "gcp")}}
    for cloud in ("aws", "gcp"):
        (tmp_path / cloud / "demo").rename(tmp_path / cloud / "moved")
    result = CliRunner().invoke(pull, ["moved", "--to", str(tmp_path / "out")], obj=sessions, standalone_mode=False)
    assert result.exception is None
    assert "checkpoint l0002-i000003" in result.output
    assert (tmp_path / "out" / "weights.safetensors").read_bytes() == b"l0002-i000003"


def test_a_bucket_that_cannot_be_read_is_named(s3, sessions, tmp_path):  # noqa: F811
    s3.delete_bucket(Bucket="runs")
    with pytest.raises(StoreError, match="runs"):
        pulled_to(sessions, tmp_path / "out")
    page = tmp_path / "report.html"
    result = CliRunner().invoke(report, ["demo", "--html", str(page)], obj=sessions, standalone_mode=False)
    assert result.exception is None
    assert "the report lacks evaluation/000000.png" in result.output
    assert page.exists()
