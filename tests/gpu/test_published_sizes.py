"""Models of published sizes with random weights on one GPU, each in a process of its own (measure.py).

The same measurements run on the CPU with narrow models.
"""

import json
import sys

import pytest
import torch

from engine.models.load import freeze_but_trained, trainable
from engine.models.merge import MergedAdapters
from tests.gpu.device import needs_gpus, run_alone
from tests.gpu.figures import LINES_VARIABLE
from tests.gpu.measure import CHECKS, LORA, OUT_OF_MEMORY, EngineStep, Scale, pass_of, timed_if_it_fits
from tests.gpu.published import MODELS

CPU = Scale(device="cpu", is_narrow=True)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def narrow(dtype):
    """The narrow Qwen-Image with low-rank adapters, and its transformer."""
    torch.manual_seed(0)
    transformer = CPU.transformer(MODELS["20 B"], dtype)
    adapter = CPU.adapter(MODELS["20 B"], transformer, "512 px")
    return adapter, transformer


@pytest.mark.parametrize("name", MODELS)
def test_the_published_configurations_have_their_published_numbers_of_parameters(name):
    model = MODELS[name]
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model.transformer(**model.config).parameters())
    assert count / 1e9 == pytest.approx(model.billions, abs=0.01)


def test_the_checks_that_answer_most_are_first_and_fit_into_ten_minutes():
    """The bounds are the time limits of the processes; on an H100 each takes half as long or less."""
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert names[:2] == ["20 B engine step, 512 px", "20 B rollout passes, 512 px"]
    assert sum(check.seconds for check in CHECKS[:3]) <= 600


class Found(dict):
    """Figures by case, in words."""

    def __call__(self, case, value):
        self[", ".join(case)] = value

    def has(self, case):
        return ", ".join(case) in self


@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_narrow_model_runs_the_measurement_of_the_large_one(check, monkeypatch):
    monkeypatch.setattr("tests.gpu.measure.RUNS", 1)
    found = Found()
    check.measure(CPU, found)
    assert found
    assert OUT_OF_MEMORY not in found.values()
    timed = [case for case, value in found.items() if isinstance(value, dict) and "s_a_row" in value]
    if "step" in check.name:
        assert any(case.endswith(("rows 2", "rows 4")) for case in timed)
    if "passes" in check.name:
        assert any(case.endswith(("images 2", "images 4")) for case in timed)
    if "compiled" in check.name or "rollout" in check.name:
        kinds = {case.split(", ")[1] for case in timed}
        assert {"two passes", "one doubled pass"} <= kinds
    if "precision" in check.name:
        assert found["512 px, bf16 with fp32 master weights, largest_difference"] > 0
        assert found["512 px, fp32, largest_difference"] == 0
        assert len(timed) == 6


def test_a_step_trains_as_many_rows_as_it_is_timed_for_and_changes_the_weights():
    adapter, transformer = narrow(torch.bfloat16)
    step = EngineStep.of(transformer, adapter, LORA, guidance=4.0)
    before = {name: value.detach().clone() for name, value in trainable(adapter).items()}
    rows = []
    transformer.register_forward_pre_hook(
        lambda _, __, named: rows.append((len(named["hidden_states"]), torch.is_grad_enabled())), with_kwargs=True
    )
    step.once(adapter, 3)()
    # With and without the prompt. The old policy is the trained weights themselves, so it needs no pass of its own.
    assert rows == [(3, True), (3, True)]
    assert any(not torch.equal(value, before[name]) for name, value in trainable(adapter).items())
    rows.clear()
    step.once(adapter, 1)()
    assert [count for count, _ in rows] == [1] * 4, "two images, because the rewards of one never differ"


def test_a_step_that_the_engine_had_to_halve_is_kept_as_out_of_memory(monkeypatch):
    adapter, transformer = narrow(torch.bfloat16)
    step = EngineStep.of(transformer, adapter, LORA, guidance=4.0)
    plain = adapter.velocity

    def velocity(x, *more):
        if len(x) > 2:
            raise torch.OutOfMemoryError("planted")
        return plain(x, *more)

    monkeypatch.setattr(adapter, "velocity", velocity)
    assert timed_if_it_fits(step.once(adapter, 4), "cpu", 4) == OUT_OF_MEMORY
    assert "s_a_row" in timed_if_it_fits(step.once(adapter, 2), "cpu", 2)


@torch.no_grad()
def test_merged_adapters_give_the_velocity_of_adapters_beside_the_weights():
    adapter, transformer = narrow(torch.bfloat16)
    freeze_but_trained(adapter, LORA)
    once = pass_of(adapter, "cpu", 1, 4.0)
    plain = once()
    for parameter in trainable(adapter).values():
        parameter.add_(0.05)
    beside = once()
    MergedAdapters(transformer).merge()
    moved, apart = (beside - plain).norm(), (once() - beside).norm()
    assert apart < 0.1 * moved


def test_only_memory_errors_are_kept_as_out_of_memory():
    def failing(error):
        def run(*_):
            raise error

        return run

    assert timed_if_it_fits(failing(torch.OutOfMemoryError()), "cpu", 1) == OUT_OF_MEMORY
    with pytest.raises(RuntimeError, match="illegal memory access"):
        timed_if_it_fits(failing(RuntimeError("CUDA error: an illegal memory access")), "cpu", 1)


def test_a_process_that_fails_leaves_its_error_beside_the_figures(tmp_path, monkeypatch):
    monkeypatch.setenv(LINES_VARIABLE, str(tmp_path / "lines.jsonl"))
    with pytest.raises(AssertionError, match="broken: exit code 3\nit broke"):
        run_alone([sys.executable, "-c", "print('it broke'); raise SystemExit(3)"], "broken", 60)
    with pytest.raises(AssertionError, match=r"slow: not finished after 0\.3 s"):
        run_alone([sys.executable, "-c", "import time; time.sleep(60)"], "slow", 0.3)
    run_alone([sys.executable, "-c", "print('fine')"], "fine", 60)
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [(line["check"], line["error"].splitlines()[0]) for line in lines] == [
        ("broken", "exit code 3"),
        ("slow", "not finished after 0.3 s"),
    ]


def checks():
    """Every check as a parameter that is skipped on a GPU with too little memory."""
    return [pytest.param(check, id=check.name, marks=needs_gpus(1, gib=check.gib)) for check in CHECKS]


@pytest.mark.gpu
@pytest.mark.timeout(330)
@pytest.mark.parametrize("check", checks())
def test_a_model_of_published_size_is_measured(check):
    run_alone([sys.executable, "-m", "tests.gpu.measure", check.name], check.name, check.seconds)
