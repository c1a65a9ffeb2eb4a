"""Model folders that a run cannot train: refused before a plan, by name, by every command that reads a job.

Each folder is written as published: its class names, its configuration, and files of weights with one tensor.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from engine.config import EngineConfig, ModelConfig, RewardConfig, SamplerConfig
from engine.memory.architecture import image_tokens
from engine.memory.job import check_named, sized_model
from engine.memory.published import PUBLISHED as PUBLISHED_MODELS
from engine.model_folder import FolderError, ImageSize, check_folder, model_folder
from engine.model_parts import PIPELINES
from engine.node.build_worker import load_model
from launcher.cli.main import run
from launcher.controller.node_specs import node_spec
from launcher.exit_codes import ExitCode
from launcher.job.load import load_job
from launcher.storage.weights import bytes_of
from tests.launcher.made_ledger import a_run, a_session
from tests.model_folders import (
    WAN_5B_TRANSFORMER,
    WAN_5B_VAE,
    safetensors,
    weights_name,
    write_json,
    write_model,
)
from tests.tiny_pipelines import make_flux

OWN = RewardConfig(name="module:function")


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a folder of a family. See `write_model`."""
    return lambda family, **changes: write_model(tmp_path / "model", family, **changes)


def refusal(family: str, folder: Path) -> FolderError:
    """Return the error for a job of this family with this folder."""
    model = ModelConfig(name=family, path=str(folder))
    with pytest.raises(FolderError) as caught:
        check_folder(model, EngineConfig(model=model, reward=OWN).sampler, folder)
    assert caught.value.remedy
    return caught.value


def accept(family: str, folder: Path, **model: object) -> None:
    config = EngineConfig(model=ModelConfig(name=family, path=str(folder), **model), reward=OWN)
    check_folder(config.model, config.sampler, folder)


@pytest.mark.parametrize("family", PIPELINES)
def test_a_folder_as_published_is_accepted(write, family):
    folder = write(family)
    accept(family, folder)
    (folder / "transformer" / "config.json").unlink()
    with pytest.raises(FolderError, match="transformer"):
        accept(family, folder)


PUBLISHED = {
    "FLUX.1-Fill": ("flux", {"index": {"_class_name": "FluxFillPipeline"}, "transformer": {"in_channels": 384,
        "out_channels": 64}}, "FluxFillPipeline, which fills masked parts"),
    "FLUX.1-Canny": ("flux", {"index": {"_class_name": "FluxControlPipeline"}, "transformer": {"in_channels": 128,
        "out_channels": 64}}, "FluxControlPipeline, which follows a control image"),
    "FLUX.1-Kontext": ("flux", {"index": {"_class_name": "FluxKontextPipeline"}}, "FluxKontextPipeline, which edits"),
    "FLUX.1 inpainting": ("flux", {"index": {"_class_name": "FluxInpaintPipeline"}}, "fills masked parts"),
    "FLUX.2": ("flux", {"index": {"_class_name": "Flux2Pipeline", "transformer": ["diffusers",
        "Flux2Transformer2DModel"]}}, r"a folder of Flux2Pipeline, .* FluxPipeline \(flux\)"),
    "Chroma": ("flux", {"index": {"_class_name": "ChromaPipeline"}}, "ChromaPipeline"),
    "Z-Image": ("qwen-image", {"index": {"_class_name": "ZImagePipeline"}}, "a folder of ZImagePipeline"),
    "SANA-Sprint": ("sana", {"index": {"_class_name": "SanaSprintPipeline"}}, "a folder of SanaSprintPipeline,"),
    "LTX-2": ("wan", {"index": {"_class_name": "LTX2Pipeline"}}, "a folder of LTX2Pipeline,"),
    "Qwen-Image-Edit": ("qwen-image", {"index": {"_class_name": "QwenImageEditPipeline"}}, "edits a given image"),
    "Qwen-Image-Edit-2511": ("qwen-image", {"index": {"_class_name": "QwenImageEditPlusPipeline"},
        "transformer": {"zero_cond_t": True}}, "QwenImageEditPlusPipeline, which edits a given image"),
    "Qwen-Image-Layered": ("qwen-image", {"index": {"_class_name": "QwenImageLayeredPipeline"}}, "image of layers"),
    "Wan2.2-T2V-A14B": ("wan", {"index": {"transformer_2": ["diffusers", "WanTransformer3DModel"],
        "boundary_ratio": 0.875}}, "two transformers"),
    "Wan2.1-I2V": ("wan", {"index": {"_class_name": "WanImageToVideoPipeline"}, "transformer": {"in_channels": 36}},
        "WanImageToVideoPipeline, which makes a video from a given image"),
    "Wan2.1-VACE": ("wan", {"index": {"_class_name": "WanVACEPipeline"}}, "edits a given video"),
    "Wan2.2-Animate": ("wan", {"index": {"_class_name": "WanAnimatePipeline"}}, "animates a given image"),
    "HunyuanVideo-I2V": ("hunyuan-video", {"index": {"_class_name": "HunyuanVideoImageToVideoPipeline"}},
        "makes a video from a given image"),
    "HunyuanVideo-1.5": ("hunyuan-video", {"index": {"_class_name": "HunyuanVideo15Pipeline"}},
        "a folder of HunyuanVideo15Pipeline,"),
    "SD3 inpainting": ("sd3", {"index": {"_class_name": "StableDiffusion3InpaintPipeline"}}, "fills masked parts"),
    "no class": ("sd3", {"index": {"_class_name": None}}, "has no _class_name"),
    "SD3 without T5": ("sd3", {"index": {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}},
        r"has no text_encoder_3 in model_index\.json \(\[null, null\]\), and sd3 needs T5EncoderModel"),
    "FLUX without CLIP": ("flux", {"index": {"text_encoder": None}}, r"has no text_encoder in"),
    "null tokenizer": ("wan", {"index": {"tokenizer": [None, None]}}, "has no tokenizer in"),
    "null VAE": ("qwen-image", {"index": {"vae": [None, None]}}, "has no vae in"),
    "ControlNet beside": ("sd3", {"index": {"controlnet": ["diffusers", "SD3ControlNetModel"]}}, "the part control"),
    "another VAE": ("qwen-image", {"index": {"vae": ["diffusers", "AutoencoderKL"]}}, "a vae of class AutoencoderKL"),
    "tiny VAE": ("flux", {"index": {"vae": ["diffusers", "AutoencoderTiny"]}}, "a vae of class AutoencoderTiny"),
    "config of another class": ("wan", {"transformer": {"_class_name": "WanVACETransformer3DModel"}},
        "a transformer of class WanVACETransformer3DModel"),
}  # fmt: skip
"""Published folders and folders that people make: the family in the job, what is unlike the family's model, and the
sentence."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_folder_of_another_kind_is_refused_by_name(write, name):
    family, changes, words = PUBLISHED[name]
    error = refusal(family, write(family, **changes))
    assert error.field in ("model.path", "model.name")
    assert re.search(words, error.found), error.found


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("flux", {"transformer": {"in_channels": 384, "out_channels": 64}}, "384 input and 64 output .* VAE of 16"),
        ("flux", {"transformer": {"in_channels": 128, "out_channels": 64}}, "128 input and 64 output"),
        ("wan", {"transformer": {"in_channels": 36}}, "36 input and 16 output"),
        ("hunyuan-video", {"transformer": {"in_channels": 33}}, "33 input and 16 output"),
        ("sd3", {"transformer": {"in_channels": 33, "out_channels": 16}}, "33 input and 16"),
        ("qwen-image", {"vae": {"z_dim": 4}}, "64 input and 16 output channels, and a VAE of 4"),
        ("flux", {"vae": {"latent_channels": None}}, "and a VAE of 4"),
        ("qwen-image", {"transformer": {"zero_cond_t": True}}, "zero_cond_t: true"),
        ("qwen-image", {"transformer": {"use_layer3d_rope": True}}, "use_layer3d_rope: true"),
        ("hunyuan-video", {"transformer": {"image_condition_type": "token_replace"}}, "image_condition_type"),
        ("wan", {"transformer": {"image_dim": 1280}}, "image_dim: 1280"),
        ("wan", {"vae": {"z_dim": "16"}}, 'has z_dim: "16" in vae/config.json, and a number'),
    ],
)
def test_inputs_beside_the_prompt_are_found_under_the_right_class_name(write, family, changes, words):
    found = refusal(family, write(family, **changes)).found
    assert re.search(words, found), found


def test_a_folder_of_another_supported_family_names_that_family(write):
    error = refusal("flux", write("sd3"))
    assert error.field == "model.name"
    assert "StableDiffusion3Pipeline" in error.found
    assert "model.name: sd3" in error.remedy


PARTS = [(family, part) for family, pipeline in PIPELINES.items() for part in pipeline.parts]


@pytest.mark.parametrize(("family", "part"), PARTS)
def test_each_parts_weights_are_here_whole_and_not_quantised(write, family, part):
    folder = write(family)
    file = folder / part / weights_name(part)
    whole = file.read_bytes()

    def found(words: str) -> None:
        text = refusal(family, folder).found
        assert words in text, text
        assert part in text, text

    file.write_bytes(whole[:-1])
    found(f"has {len(whole) - 1} bytes, and its header names {len(whole)}")
    file.write_bytes(whole + b"\0")
    found("and its header names")
    file.write_bytes(whole[:20])
    found("ends in its header")
    file.write_bytes(b"")
    found("ends in its header: it has 0 bytes")
    file.write_bytes(b"<!DOCTYPE html>" + bytes(200))
    found("ends in its header")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    found("pointer of git-lfs")
    file.unlink()
    found("no file of weights")
    file.symlink_to(folder / "gone")
    found("link to a file that is not there")
    file.unlink()
    variant = file.with_name(file.name.replace(".safetensors", ".fp16.safetensors"))
    variant.write_bytes(whole)
    found(f"the variant fp16 only ({variant.name})")
    variant.unlink()
    file.with_name(f"{file.name}.index.json").write_text(
        json.dumps({"weight_map": {"a": "a-00001-of-00001.safetensors"}})
    )
    found("lacks")
    file.with_name("a-00001-of-00001.safetensors").write_bytes(safetensors({"b": ("F32", [1])}))
    found("index of")
    file.with_name(f"{file.name}.index.json").unlink()
    file.write_bytes(safetensors({"a": ("U8", [4])}))
    found("format U8: they are quantised")
    file.write_bytes(whole)
    config = folder / part / "config.json"
    plain = config.read_text()
    config.write_text(json.dumps({**json.loads(plain), "quantization_config": {"quant_method": "bitsandbytes",
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}))  # fmt: skip
    found("(bitsandbytes nf4)")
    config.write_text("version https://git-lfs.github.com/spec/v1\n")
    found("pointer of git-lfs")
    config.write_text(plain)
    accept(family, folder)
    shutil.rmtree(folder / part)
    found("cannot be read")


def test_weights_of_another_model_than_the_configuration_are_refused(write):
    folder = write("flux")
    file = folder / "transformer" / weights_name("transformer")
    file.write_bytes(safetensors({"x_embedder.weight": ("BF16", [1, 384])}))
    assert "[1, 384]" in refusal("flux", folder).found
    file.write_bytes(safetensors({"double_blocks.0.img_attn": ("BF16", [1, 64])}))
    assert "without x_embedder.weight" in refusal("flux", folder).found


@pytest.mark.parametrize(
    "name", ["tokenizer/tokenizer.json", "tokenizer_2/spiece.model", "scheduler/scheduler_config.json"]
)
def test_a_pointer_in_the_place_of_a_small_file_is_named(write, name):
    folder = write("flux")
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    found = refusal("flux", folder).found
    assert "git-lfs" in found
    assert name in found


def test_a_tokenizer_without_a_vocabulary_or_folder_is_refused(write):
    folder = write("sd3")
    (folder / "tokenizer_2" / "tokenizer.json").unlink()
    assert "no vocabulary in tokenizer_2" in refusal("sd3", folder).found
    shutil.rmtree(folder / "tokenizer_2")
    assert "has no folder tokenizer_2" in refusal("sd3", folder).found


def test_pickled_weights_are_loaded_only_where_nothing_else_is_and_must_be_whole(write):
    folder = write("sd3")
    (folder / "vae" / weights_name("vae")).rename(folder / "vae" / "diffusion_pytorch_model.bin")
    assert "is no file of torch" in refusal("sd3", folder).found
    (folder / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"PK\x03\x04 and no end")
    assert "ends early" in refusal("sd3", folder).found


@pytest.mark.parametrize("name", ["stable-diffusion-3.5-large-turbo", "models--s--sd3.5-Turbo/snapshots/0a1b2c"])
def test_a_distilled_sd3_is_not_trained_with_guidance(tmp_path, name):
    folder = write_model(tmp_path / name, "sd3")
    error = refusal("sd3", folder)
    assert error.field == "sampler.guidance"
    assert "urbo" in error.found
    config = EngineConfig.model_validate(
        {"model": {"name": "sd3", "path": str(folder)}, "reward": {"name": "a:b"}, "sampler": {"guidance": 1}}
    )
    check_folder(config.model, config.sampler, folder)


def test_the_5b_model_of_wan_counts_its_own_vae_and_gets_a_size_that_fits(write):
    folder = write("wan", transformer=WAN_5B_TRANSFORMER, vae=WAN_5B_VAE)
    accept("wan", folder)
    plain = ModelConfig(name="wan", path=str(folder))
    assert model_folder(plain, folder).size == ImageSize(256, 416, 33, 512)
    size = {"height": 704, "width": 1280, "frames": 121}
    config = EngineConfig(model=ModelConfig(name="wan", path=str(folder), **size), reward=OWN)
    architecture = sized_model(config.model, folder).architecture
    assert image_tokens(architecture, ImageSize(**size)) == model_folder(config.model, folder).tokens == 27_280
    assert sized_model(config.model, folder).size == ImageSize(704, 1280, 121, 512)
    assert sized_model(plain, folder).size == ImageSize(256, 416, 33, 512)
    assert sized_model(ModelConfig(name="wan", path="Wan2.1-T2V-1.3B")).size == ImageSize(240, 416, 33, 512)


@pytest.mark.parametrize(("path", "model"), [
    ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "Wan2.2-TI2V-5B"),
    ("models/wan2.1_t2v_14b", "Wan2.1-14B"),
    ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan2.1-1.3B"),
    ("stabilityai/stable-diffusion-3.5-large-turbo", "SD3.5-large"),
    ("black-forest-labs/FLUX.2-klein-base-4B", "FLUX.2-klein-base-4B"),
    ("Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers", "SANA-1.6B"),
    ("black-forest-labs/FLUX.1-schnell", "FLUX.1-dev"),
    ("models/base", "Qwen-Image"),
])  # fmt: skip
def test_a_folder_on_the_nodes_alone_has_the_sizes_that_its_name_says(path, model):
    family = next(published.family for published in PUBLISHED_MODELS if published.name == model)
    assert sized_model(ModelConfig(name=family, path=path)).model == model


@pytest.mark.parametrize(("family", "path"), [
    ("flux", "black-forest-labs/FLUX.2-klein-4B"),  # once planned as FLUX.1-dev
    ("flux", "FLUX.1-lite-8B"),
    ("wan", "there"),  # once planned as the first of the family
    ("wan", "Wan2.2-T2V-A14B"),
    ("sd3", "stable-diffusion-3-medium"),
    ("qwen-image", "Qwen-Image-2.1"),
    ("hunyuan-video", "HunyuanVideo-1.5"),
])  # fmt: skip
def test_a_folder_of_an_unknown_name_gets_no_plan(family, path):
    with pytest.raises(FolderError, match=r"the sizes of no .* model of that name are known") as refused:
        sized_model(ModelConfig(name=family, path=path))
    assert refused.value.field == "model.path"
    assert next(published.name for published in PUBLISHED_MODELS if published.family == family) in refused.value.found


@pytest.mark.parametrize(("family", "path"), [
    ("flux2-klein", "black-forest-labs/FLUX.2-klein-4B"),
    ("z-image", "models/z-image-turbo"),
    ("sd3", "stabilityai/stable-diffusion-3.5-large-turbo"),
])  # fmt: skip
def test_a_distilled_model_is_known_by_its_name_before_its_folder_is_here(family, path):
    model = ModelConfig(name=family, path=path)
    with pytest.raises(FolderError, match="is that of a distilled model: it takes no guidance") as refused:
        check_named(model, SamplerConfig(guidance=4.0))
    assert refused.value.field == "sampler.guidance"
    check_named(model, SamplerConfig(guidance=1.0))
    check_named(ModelConfig(name="flux2-klein", path="FLUX.2-klein-base-4B"), SamplerConfig(guidance=4.0))


def test_the_5b_model_of_wan_is_planned_with_its_own_tokens_before_its_folder_is_here(write):
    folder = write("wan", transformer=WAN_5B_TRANSFORMER, vae=WAN_5B_VAE)
    job = ModelConfig(name="wan", path="Wan2.2-TI2V-5B")
    assert sized_model(job) == sized_model(job, folder)
    assert sized_model(job).tokens == 9 * 8 * 13 + 512  # 33 frames of 256 x 416; 4 times as many with a factor of 8


OTHER_FAMILIES = (
    "flux2|flux-2|FLUX.2|sana-video|ltx-2|ltx|hunyuan-image|hidream|"
    "hunyuan-video-1.5|hunyuanvideo15|qwen-image-edit|qwen-image-layered|qwen-image-2|chroma|cogvideox|lumina2|"
    "kandinsky5|sd2|sd1.5|sdxl|wan-vace|flux-kontext"
)

NAMES = {
    None: OTHER_FAMILIES.split("|"),
    "qwen-image": ["Qwen-Image", "qwen_image", "qwen image", "qwenimage", "qwen-imge"],
    "sd3": ["SD3", "sd3.5", "sd-3"],
    "flux": ["flux.1", "FLUX.1-dev", "fluxx"],
    "wan": ["wan2.1", "Wan2.2"],
    "hunyuan-video": ["hunyuanvideo", "hunyuan_video", "hunyan-video"],
    "shapes": ["shape"],
}  # fmt: skip


@pytest.mark.parametrize("meant", NAMES)
def test_a_name_of_another_family_gets_no_wrong_hint(tmp_path, meant):
    for name in NAMES[meant]:
        (tmp_path / "job.yaml").write_text(f"model: {{name: '{name}', path: there}}\n")
        with pytest.raises(Exception, match=r"model\.name is ") as caught:
            load_job(tmp_path / "job.yaml")
        text = str(caught.value)
        assert (f"did you mean {meant}?" in text) if meant else ("did you mean" not in text), (name, text)
        assert "hunyuan-video" in text, "the supported names are listed"


def job_of(folder: Path, family: str, infra: str) -> Path:
    file = folder / "job.yaml"
    buckets = "store: {aws: s3://runs/ours}\n" if infra == "aws" else ""
    file.write_text(
        f"name: folder\ninfra: {infra}\n{buckets}model: {{name: {family}, path: model, weights: lora}}\n"
        "budget: {max_total: 40, max_hourly: 30}\n"
    )
    return file


@pytest.mark.parametrize("infra", ["aws", "local"])
@pytest.mark.parametrize("command", [["check"], ["launch", "--dry-run"], ["launch", "--yes"], ["check-reward"]])
def test_every_command_refuses_the_folder_with_the_same_sentence(tmp_path, monkeypatch, capsys, command, infra):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    write_model(tmp_path / "model", "flux")
    write_json(tmp_path / "model" / "transformer" / "config.json", {"in_channels": 64, "quantization_config": {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}})  # fmt: skip
    code = run([command[0], str(job_of(tmp_path, "flux", infra)), *command[1:]])
    text = " ".join("".join(capsys.readouterr()).split())
    assert code == ExitCode.INVALID_JOB
    assert "has a quantised transformer (bitsandbytes nf4), and spotrl trains unquantised weights" in text
    assert "Traceback" not in text
    assert "pip install" not in text


def test_only_the_files_that_a_run_loads_are_sent(write):
    folder = write("sd3")
    plain = bytes_of(folder)
    for part in PIPELINES["sd3"].parts:
        weights = folder / part / weights_name(part)
        stem = weights.name.removesuffix(".safetensors")
        pickled = "pytorch_model" if stem == "model" else stem
        twins = (f"{stem}.fp16.safetensors", f"{stem}.safetensors.index.fp16.json", f"{pickled}.bin",
                 f"{pickled}.fp16.bin",
                 "flax_model.msgpack", "model.onnx", "onnx/model.onnx_data", "q4.gguf",
                 f"{stem}.fp16-00001-of-00002.safetensors")  # fmt: skip
        for name in twins:
            (weights.parent / name).parent.mkdir(exist_ok=True)
            (weights.parent / name).write_bytes(b"twin" * 999)
    (folder / "sd3.safetensors").write_bytes(b"whole" * 999)
    accept("sd3", folder)
    assert bytes_of(folder) == plain


def test_a_sharded_folder_is_sent_with_its_index_and_without_the_single_file(write):
    folder = write("wan") / "transformer"
    single = folder / weights_name("transformer")
    whole = single.read_bytes()
    shard = "diffusion_pytorch_model-00001-of-00001.safetensors"
    (folder / shard).write_bytes(whole)
    write_json(folder / f"{single.name}.index.json", {"weight_map": {PIPELINES["wan"].input_layer: shard}})
    single.write_bytes(b"an old single file")
    accept("wan", folder.parent)
    with_single = bytes_of(folder.parent)
    single.unlink()
    assert bytes_of(folder.parent) == with_single


def test_a_node_finds_the_folder_beside_the_job_file(tmp_path, monkeypatch):
    """A path relative to the job file passed every check, and the workers of a local run looked elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    make_flux().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("\n".join(f"cat {number}" for number in range(40)))
    (tmp_path / "job.yaml").write_text(
        "infra: local\nprompts: prompts.txt\nreward: module:function\n"
        "model: {name: flux, path: model, height: 16, width: 16, weights: lora}\nsampler: {guidance: 1.0}\n"
    )
    with a_session() as session:
        made = a_run(session, folder=str(tmp_path / "elsewhere"))
        made.run.workdir = str(tmp_path)
        job = load_job(tmp_path / "job.yaml").job
        node = made.node("trainer")
        spec = node_spec(made.run, job, node, is_cloud=False, money_deadline_ms=None, money_longest_ms=None)
    Path(spec.folder).mkdir(parents=True)
    assert load_model(spec, 0).latent_shape()[0] == 16


@pytest.mark.slow
def test_a_small_folder_of_a_large_family_trains_on_this_machine_within_its_budget(tmp_path, monkeypatch, capsys):
    """Its work counts as much of the run's clock as its own sizes say, and not those of the published model."""
    make_flux().save_pretrained(tmp_path / "flux")
    (tmp_path / "bright.py").write_text("def bright(images, prompts):\n    return [float(i.mean()) for i in images]\n")
    (tmp_path / "prompts.txt").write_text("a cat\na dog\na house\na tree\n")
    (tmp_path / "job.yaml").write_text(
        "name: tiny\ninfra: local\niterations: 2\ntarget: null\nprompts: prompts.txt\nreward: bright:bright\n"
        "model: {name: flux, path: flux, height: 32, width: 32}\nsampler: {steps: 3, guidance: 1.0}\n"
        "algorithm: {name: flow-grpo, prompts_per_batch: 2, images_per_prompt: 2}\nexploration: {mode: none}\n"
        "evaluation: {prompts: 2, every: 10}\npreemptions: {trace: none}\n"
        "resources: {trainer: {accelerators: L40S:1}, rollout: {accelerators: L40S:1, num_nodes: 1}}\n"
        "budget: {max_total: $20, max_hourly: $10}\n"
    )
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert run(["launch", "job.yaml", "--yes", "--on-exit", "down"]) == ExitCode.OK
    last = capsys.readouterr().out
    assert "tiny finished (iterations): reward" in last
    assert "$20" not in last.splitlines()[-2]
