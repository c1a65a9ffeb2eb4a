"""`model.compile`: blocks are compiled once, and every weight version takes effect in the compiled blocks."""

import shutil
from contextlib import nullcontext

import pytest
import torch
from pydantic import ValidationError

import engine.entrypoints.inproc as inproc
from engine.clock import ScaledClock
from engine.config import EngineConfig, ExplorationConfig, ModelConfig, RuntimeConfig
from engine.model_config import WITHOUT_REPEATED_BLOCKS
from engine.models.compiled import compile_blocks, repeated_blocks
from engine.models.load import freeze_but_trained, trainable
from engine.models.merge import MergedAdapters
from engine.models.weights import get_weights
from engine.protocol.request import LoadWeights, WeightsKey
from engine.worker.loaded_weights import LoadedWeights
from tests.engine.test_families import FAMILIES
from tests.engine.test_merge import set_version, velocity


class Eager:
    """A backend that runs a block's operations as traced, and counts the traces."""

    def __init__(self):
        self.traces = 0

    def __call__(self, graph, inputs):
        self.traces += 1
        return graph.forward


class FromMemory:
    """A weight source with one version's bytes."""

    def __init__(self, data):
        self._data = data

    def get(self, weights, digest):
        return nullcontext(self._data)


def few_adapters():
    """A Qwen-Image of two blocks in bfloat16, with two adapters in each block: more would only lengthen the trace."""
    torch.manual_seed(0)
    adapter = FAMILIES["qwen-image"].build()
    adapter.transformer.to(torch.bfloat16)
    adapter.lora_targets = lambda: ("to_q", "img_mlp.net.2")
    freeze_but_trained(adapter, ModelConfig(weights="lora", lora_rank=2))
    return adapter


@pytest.fixture(autouse=True)
def no_earlier_traces():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(before)


def test_the_blocks_share_one_trace_and_a_loaded_version_takes_effect():
    adapter, backend = few_adapters(), Eager()
    compile_blocks(adapter.transformer, backend)
    merged = MergedAdapters(adapter.transformer)
    merged.merge()
    before = velocity(adapter)
    assert len(adapter.transformer.transformer_blocks) == 2
    traces = backend.traces

    plain = few_adapters()
    set_version(plain, 1)
    weights = get_weights(trainable(plain))
    MergedAdapters(plain.transformer).merge()
    LoadedWeights(trainable(adapter), FromMemory(weights), merged).load(
        LoadWeights(weights=WeightsKey(version=1), digest="1")
    )
    after = velocity(adapter)
    assert torch.equal(after, velocity(plain))
    assert not torch.equal(after, before)
    assert backend.traces == traces == 1, "neither the second block nor the second version is traced again"


@pytest.mark.slow
def test_switched_off_and_unmerged_adapters_take_effect_in_compiled_blocks():
    adapter, plain = few_adapters(), few_adapters()
    compile_blocks(adapter.transformer, Eager())
    for one in (adapter, plain):
        set_version(one, 2)
    beside = velocity(adapter)
    assert torch.equal(beside, velocity(plain))
    for one in (adapter, plain):
        one.transformer.disable_adapters()
    assert torch.equal(velocity(adapter), velocity(plain))
    assert not torch.equal(velocity(adapter), beside)


def test_workers_compile_and_the_trainer_computes_log_probs_itself(tmp_path, monkeypatch):
    backend = Eager()
    monkeypatch.setattr(inproc, "compile_blocks", lambda transformer: compile_blocks(transformer, backend))
    for compiled in ("off", "on"):
        config = EngineConfig(
            model=ModelConfig(compile=compiled),
            exploration=ExplorationConfig(mode="none"),
            runtime=RuntimeConfig(name="inproc"),
        )
        made = inproc.build_inproc(
            config,
            tmp_path / compiled,
            run="run",
            clock=ScaledClock(origin_ms=0),
            reward=lambda images, prompts: [],
            workers=1,
        )
        of_worker = made.workers[0].adapter.transformer.transformer_blocks
        of_trainer = made.loop.worker.adapter.transformer.transformer_blocks
        is_compiled = compiled == "on"
        assert {block._compiled_call_impl is not None for block in of_worker} == {is_compiled}
        assert {block._compiled_call_impl is not None for block in of_trainer} == {False}
        assert made.loop.model.trainer.objective.needs_log_probs is not is_compiled


@pytest.mark.parametrize("name", FAMILIES)
def test_only_models_with_repeated_blocks_may_be_compiled(name):
    model = {"flux-dev": "flux", "flux-schnell": "flux"}.get(name, name)
    has_blocks = bool(repeated_blocks(FAMILIES[name].build().transformer))
    assert has_blocks == (model not in WITHOUT_REPEATED_BLOCKS)
    if has_blocks:
        assert ModelConfig(name=model, path="none", compile="on").compile == "on"


def test_a_model_without_repeated_blocks_is_refused_with_the_cure():
    with pytest.raises(ValidationError, match="sd3 in diffusers names no repeated block to compile"):
        ModelConfig(name="sd3", path="none", compile="on")
    with pytest.raises(ValueError, match="SD3Transformer2DModel names no repeated block"):
        compile_blocks(FAMILIES["sd3"].build().transformer, Eager())


def test_workers_that_share_images_are_not_compiled():
    with pytest.raises(ValidationError, match=r"model\.compile is on, but runtime\.sp_degree is 2"):
        EngineConfig(model=ModelConfig(compile="on"), runtime=RuntimeConfig(sp_degree=2))


def test_a_first_lease_lasts_as_long_as_compiling_unless_the_job_says_otherwise():
    compiled = ModelConfig(compile="on")
    assert EngineConfig(model=compiled).runtime.first_lease_seconds == 300
    chosen = EngineConfig(model=compiled, runtime=RuntimeConfig(first_lease_seconds=30))
    assert chosen.runtime.first_lease_seconds == 30
    assert EngineConfig().runtime.first_lease_seconds == 20


def test_without_a_compiler_the_blocks_stay_uncompiled(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda program: None)
    adapter = FAMILIES["qwen-image"].build()
    compile_blocks(adapter.transformer)
    assert "stay uncompiled: torch.compile needs a C compiler" in capsys.readouterr().out
    assert all(block._compiled_call_impl is None for block in adapter.transformer.transformer_blocks)


@pytest.mark.long
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("default")
def test_torchs_own_compiler_gives_the_velocity_of_uncompiled_blocks():
    """Torch's compiler itself uses parts of torch that torch has deprecated, so warnings are allowed."""
    torch.manual_seed(0)
    adapter = FAMILIES["qwen-image"].build()
    freeze_but_trained(adapter, ModelConfig(weights="lora", lora_rank=2))
    set_version(adapter, 1)
    expected = velocity(adapter)
    compile_blocks(adapter.transformer)
    found = velocity(adapter)
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))
