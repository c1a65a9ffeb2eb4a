"""Prompts are encoded once: on a node's disk, by digest, and without the text encoders beside the transformer."""

import pytest
import torch

from engine.config import ModelConfig
from engine.models import pipeline_text, prompt_files
from engine.models.load import load_adapter
from engine.models.pipeline_text import PipelineText, prepare_prompts
from engine.models.prompt_files import PromptFiles, digest_of_files
from engine.models.text import EncodedText
from engine.prompts import prompts_of_job
from tests.engine.test_families import tiny_sd3
from tests.tiny_pipelines import make_qwen_image, make_sd3


class Encoder(torch.nn.Module):
    """A text encoder: ten tokens of a prompt's bytes, zeros behind."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.encoded = []

    def forward(self, prompts):
        assert len(prompts) == 1
        self.encoded += prompts
        codes = torch.tensor([[float(code) for code in prompt.encode().ljust(10, b"\0")] for prompt in prompts])
        return EncodedText(codes[..., None].to(torch.bfloat16), codes != 0, codes.sum(dim=1, keepdim=True))


class Part(torch.nn.Module):
    config, dtype = {"joint_attention_dim": 4}, torch.float32


class Pipeline:
    """What `PipelineText` uses of a diffusers pipeline."""

    def __init__(self, folder):
        (folder / "text_encoder").mkdir(parents=True, exist_ok=True)
        (folder / "text_encoder" / "weights").write_bytes(b"first")
        self.name_or_path, self.device = str(folder), "cpu"
        self.transformer, self.vae, self.text_encoder, self.tokenizer = Part(), Part(), Encoder(), object()

    @property
    def components(self):
        return {name: value for name, value in vars(self).items() if name not in ("name_or_path", "device")}


@pytest.fixture
def model(tmp_path):
    return tmp_path / "model"


def text_of(model):
    pipeline = Pipeline(model)
    return PipelineText(pipeline, pipeline.text_encoder), pipeline.text_encoder


def test_every_prompt_is_encoded_once_and_rows_are_those_of_the_encoder(model, tmp_path):
    text, encoder = text_of(model)
    text.prepare(["a", "bb", "c"], tmp_path / "prompts")
    assert encoder.encoded == ["", "a", "bb", "c"]
    found = text(["c", "a", "c"])
    expected = [Encoder()([prompt]) for prompt in ("c", "a", "c")]
    assert torch.equal(found.hidden, torch.cat([one.hidden for one in expected]))
    assert torch.equal(found.mask, torch.cat([one.mask for one in expected]))
    assert torch.equal(found.pooled, torch.cat([one.pooled for one in expected]))
    assert len(encoder.encoded) == 4


def test_the_transformer_comes_to_the_device_when_the_text_encoders_have_left(model, monkeypatch):
    """The need is the larger of the two, and not the sum: the order in which parts go to a device."""
    make_sd3().save_pretrained(model)
    config = ModelConfig(name="sd3", path=str(model), height=16, width=16, weights="lora", lora_rank=2)
    order = []

    def to(module, device=None, *_, **__):
        order.extend([type(module).__name__] if device == "cuda" else [])
        return module

    monkeypatch.setattr(torch.nn.Module, "to", to)
    load_adapter(config, "cuda", encode_first=lambda adapter: order.append("prompts"))
    before, after = order[: order.index("prompts")], order[order.index("prompts") + 1 :]
    assert sorted(before) == ["CLIPTextModelWithProjection", "CLIPTextModelWithProjection", "T5EncoderModel"]
    assert after == ["SD3Transformer2DModel", "AutoencoderKL"]


def test_another_process_of_the_node_reads_the_files(model, tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_files, "IN_MEMORY", 1)
    first, _ = text_of(model)
    first.prepare(["a", "bb"], tmp_path / "prompts")
    second, encoder = text_of(model)
    second.prepare(["a", "bb"], tmp_path / "prompts")
    assert encoder.encoded == [""]  # the probe of the digest
    assert torch.equal(second(["a", "bb"]).hidden, first(["a", "bb"]).hidden)
    assert encoder.encoded == [""]


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"", lambda raw: raw[:-1] + b"\xff"])
def test_a_damaged_file_is_encoded_again(model, tmp_path, monkeypatch, damage):
    monkeypatch.setattr(prompt_files, "IN_MEMORY", 0)
    text_of(model)[0].prepare(["a"], tmp_path / "prompts")
    for file in (tmp_path / "prompts").glob("*/*.safetensors"):
        file.write_bytes(damage(file.read_bytes()))
    text, encoder = text_of(model)
    text.prepare([], tmp_path / "prompts")
    assert torch.equal(text(["a"]).hidden, Encoder()(["a"]).hidden)
    assert encoder.encoded == ["", "a"]
    text(["a"])
    assert encoder.encoded == ["", "a"]  # written whole


def test_other_weights_of_the_encoder_have_files_of_their_own(model, tmp_path):
    text_of(model)[0].prepare(["a"], tmp_path / "prompts")
    text, encoder = text_of(model)
    (model / "text_encoder" / "weights").write_bytes(b"other")
    text.prepare(["a"], tmp_path / "prompts")
    assert encoder.encoded == ["", "a"]


def test_a_change_inside_a_large_file_changes_the_digest(tmp_path):
    file = tmp_path / "weights"
    raw = bytearray(3 << 20)
    file.write_bytes(raw)
    before = digest_of_files([tmp_path], [])
    raw[: 1 << 20] = b"\1" * (1 << 20)
    file.write_bytes(raw)
    assert digest_of_files([tmp_path], []) != before


def test_a_prompt_that_was_not_prepared_is_encoded_with_those_after_it_and_said_once(
    model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(pipeline_text, "MOST_AHEAD", 2)
    text, encoder = text_of(model)
    text.prepare(["a", "b", "c", "d", "e", "f"], tmp_path / "prompts")
    assert encoder.encoded == ["", "a", "b"]
    text(["c"])
    assert encoder.encoded == ["", "a", "b", "c", "d", "e"]
    text(["f"])
    text(["unknown"])
    assert encoder.encoded[6:] == ["f", "unknown"]
    assert capsys.readouterr().out.count("was not prepared") == 1


def test_processes_begin_at_different_prompts(model, tmp_path):
    text, encoder = text_of(model)
    text.prepare(["a", "b", "c", "d"], tmp_path / "prompts", first=2)
    assert encoder.encoded == ["", "c", "d", "a", "b"]


def test_a_full_disk_loses_no_prompt(model, tmp_path, capsys):
    (tmp_path / "prompts").write_text("not a folder")
    text, encoder = text_of(model)
    text.prepare(["a"], tmp_path / "prompts")
    assert torch.equal(text(["a"]).hidden, Encoder()(["a"]).hidden)
    assert encoder.encoded == ["", "a"]
    assert "encoded prompts are not kept in" in capsys.readouterr().out


def test_the_encoders_leave_after_the_prompts_and_come_back_for_a_new_one(model, tmp_path, monkeypatch):
    text, encoder = text_of(model)
    moves = []
    monkeypatch.setattr(encoder, "to", moves.append)
    monkeypatch.setattr(pipeline_text, "free_memory", lambda: None)
    text(["before"])
    assert moves == []
    text.prepare(["a"], tmp_path / "prompts")
    assert moves == [torch.device("cpu")]
    text.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4, 80))  # bytes; the encoder has 4
    monkeypatch.setattr(pipeline_text, "joined", lambda rows, device: rows)
    text(["b"])
    assert moves == [torch.device("cpu")] * 2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6, 80))
    text(["c"])
    assert moves[2:] == [torch.device("cuda"), torch.device("cpu")]


def test_the_transformer_is_no_part_of_the_pipeline_that_encodes(model):
    pipeline = Pipeline(model)
    PipelineText(pipeline, pipeline.text_encoder)
    assert [name for name, one in pipeline.components.items() if isinstance(one, torch.nn.Module)] == ["text_encoder"]
    assert pipeline.transformer.config == {"joint_attention_dim": 4}


def test_a_model_with_a_small_encoder_asks_for_no_prompts(tmp_path):
    prepare_prompts(tiny_sd3(), lambda: pytest.fail("not needed"), tmp_path)


def test_the_prompts_of_a_job_are_in_the_order_of_their_use():
    class Source:
        def batch(self, batch):
            return [f"{batch}", f"{batch % 2}"]

        def held_out(self):
            return ["tested"]

    assert prompts_of_job(Source(), 4, 100) == ["0", "tested", "1", "2", "3"]
    assert prompts_of_job(Source(), 4, 3) == ["0", "tested", "1"]


def test_zeros_behind_the_text_take_no_disk(tmp_path):
    files = PromptFiles()
    files.keep_in(tmp_path, "encoder")
    hidden = torch.zeros(1, 512, 8)
    hidden[:, :3] = 1.0
    row = EncodedText(hidden, torch.ones(1, 512, dtype=torch.bool))
    files.put("a", row)
    again = PromptFiles()
    again.keep_in(tmp_path, "encoder")
    found = again.get("a")
    assert torch.equal(found.hidden, hidden)
    assert torch.equal(found.mask, row.mask)
    assert found.pooled is None
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) < 1000


@pytest.mark.parametrize("family", [make_qwen_image, make_sd3])
def test_a_loaded_models_prepared_prompts_are_those_of_its_pipeline(tmp_path, family):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pipeline = family()
    pipeline.save_pretrained(tmp_path / "model")
    name = "sd3" if family is make_sd3 else "qwen-image"
    size = {"height": 16, "width": 16}
    config = ModelConfig(name=name, path=str(tmp_path / "model"), weights="lora", lora_rank=2, **size)
    prompts = ["a cat", "two dogs and a much longer text"]
    expected = load_adapter(config).encode(prompts)
    adapter = load_adapter(config)
    prepare_prompts(adapter, lambda: prompts, tmp_path / "prompts")
    found = adapter.encode(prompts)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[part], found[part]) for part in found)
    assert len(list((tmp_path / "prompts").glob("*/*.safetensors"))) == 3
