"""An impossible sequence-parallel degree is refused before anything is bought, with the possible ones."""

import pytest

from engine.memory.published import EMBEDDED
from launcher.job.checked import JobError
from launcher.job.gpu_checks import check_sp_degree, degrees_of
from launcher.job.load import load_job
from launcher.job.resolved import resolve
from tests.model_folders import write_model


def check(job):
    check_sp_degree(job, resolve(job.job, job.workdir).sized)


@pytest.fixture
def checked(tmp_path):
    def checked(degree: str, accelerators: str, **fields: str):
        (tmp_path / "weights").mkdir(exist_ok=True)
        if fields.get("model.name", "digits-ocr") != "digits-ocr":
            write_model(tmp_path / "weights", fields["model.name"])
        path = tmp_path / "job.yaml"
        path.write_text(f"runtime:\n  sp_degree: {degree}\nresources: {{rollout: {{accelerators: {accelerators}}}}}\n")
        return load_job(path, fields, working_folder=tmp_path)

    return checked


@pytest.mark.parametrize(
    ("accelerators", "degrees"), [("L4:1", (1,)), ("L4:2", (1, 2)), ("L4:3", (1, 2)), ("L4:8", (1, 2, 4))]
)
def test_degrees_divide_the_heads_and_fit_into_a_node(checked, accelerators, degrees):
    job = checked("auto", accelerators)
    assert degrees_of(job.job) == degrees
    check(job)
    for degree in degrees:
        check(checked(str(degree), accelerators))


@pytest.mark.parametrize(
    ("degree", "accelerators", "words"),
    [
        ("2", "L4:1", "a rollout node has 1 worker (resources.rollout.accelerators is L4:1"),
        ("4", "L4:2", "is L4:2, and a group never spans nodes); use 1, 2 or auto"),
        ("3", "L4:8", "does not divide the 4 attention heads of digits-ocr; use 1, 2, 4 or auto"),
        ("8", "L4:8", "does not divide the 4 attention heads of digits-ocr; use 1, 2, 4 or auto"),
    ],
)  # fmt: skip
def test_an_impossible_degree_is_refused_with_its_line_and_the_possible_ones(checked, degree, accelerators, words):
    with pytest.raises(JobError) as caught:
        check(checked(degree, accelerators))
    assert words in str(caught.value)
    assert (caught.value.line, caught.value.field) == (2, "runtime.sp_degree")


def test_the_heads_of_a_users_model_are_left_to_the_engine(checked):
    own = {"model.name": "digits-ocr", "model.path": "weights"}
    check(checked("3", "L4:4", **own))
    with pytest.raises(JobError, match="has 4 workers"):
        check(checked("5", "L4:4", **own))


def test_two_workers_may_share_the_branches_of_guidance(checked):
    fields = {"model.name": "sd3", "model.path": "weights", "runtime.cfg_parallel": "true", "sampler.guidance": "4"}
    for degree in ("2", "auto"):
        check(checked(degree, "L4:4", **fields))
    assert degrees_of(checked("auto", "L4:4", **fields).job) == (1, 2)
    with pytest.raises(JobError, match=r"a rollout node has 1 worker .*; use 1 or auto"):
        check(checked("2", "L4:1", **fields))
    with pytest.raises(JobError, match=r"FLUX.1-dev takes guidance as an input and has one branch; use cfg_parallel"):
        check(checked("2", "L4:4", **fields | {"model.name": "flux"}))


def test_the_launcher_knows_the_heads_of_every_model_that_ships():
    from engine.config import SHIPPED, ModelConfig
    from engine.models.load import load_adapter
    from engine.parallel import ulysses

    assert set(EMBEDDED) == set(SHIPPED)
    for name, architecture in EMBEDDED.items():
        adapter = load_adapter(ModelConfig.model_validate({"name": name}))
        assert max(ulysses.degrees_of(adapter.transformer)) == architecture.heads
