"""Values that are read later are those of a whole load, and a rank of a trainer reads no more than its own part."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from diffusers import SD3Transformer2DModel
from safetensors.torch import save_file

from engine.algorithm_config import AlgorithmConfig
from engine.config import VIDEO, ModelConfig
from engine.models.load import load_adapter, trainable
from engine.models.unread import FILE, read_values
from engine.parallel.communicator import join_store, serve_store
from engine.parallel.rank_group import RankGroup
from engine.parallel.sharding import whole_of
from engine.storage.tensor_files import Stored
from engine.trainer.shards import joined_shard, led_shard
from tests.benchmarks.large_weights import forget_peak, resident_bytes
from tests.benchmarks.sp_parity import Ranks as Processes
from tests.tiny_pipelines import PIPELINES, WIDTH, make_sd3

pytestmark = pytest.mark.usefixtures("one_layer")

CPU = torch.device("cpu")


def config_of(family: str, path: Path) -> ModelConfig:
    frames = {"frames": 5} if family in VIDEO else {}
    return ModelConfig(
        name=family,
        path=str(path),
        weights="full",
        height=16,
        width=16,
        max_text_tokens=20,
        checkpointing="off",
        **frames,
    )


@pytest.mark.parametrize("family", PIPELINES)
def test_values_read_later_are_those_of_a_whole_load(family, tmp_path):
    torch.manual_seed(0)
    PIPELINES[family]().save_pretrained(tmp_path)
    config = config_of(family, tmp_path)
    whole, later = load_adapter(config), load_adapter(config, reads_later=True)
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in trainable(later).values())
    read_values(later.transformer, CPU)
    for mine, its in (
        (dict(later.transformer.named_parameters()), dict(whole.transformer.named_parameters())),
        (dict(later.transformer.named_buffers()), dict(whole.transformer.named_buffers())),
    ):
        assert mine.keys() == its.keys()
        assert all(one.dtype == its[name].dtype and torch.equal(one, its[name]) for name, one in mine.items())
    x = torch.randn(1, *whole.latent_shape())
    with torch.no_grad():
        ours, theirs = (one.velocity(x, torch.tensor([0.5]), one.encode(["a"]), 1.0) for one in (later, whole))
    assert torch.equal(ours, theirs)


@pytest.fixture
def sd3(tmp_path):
    torch.manual_seed(0)
    pipeline = make_sd3()
    pipeline.save_pretrained(tmp_path)
    return pipeline


def test_weights_in_several_files_are_read(sd3, tmp_path):
    (tmp_path / "transformer" / FILE).unlink()
    sd3.transformer.save_pretrained(tmp_path / "transformer", max_shard_size="40KB")
    assert len(list((tmp_path / "transformer").glob("*.safetensors"))) > 2
    config = config_of("sd3", tmp_path)
    later, whole = load_adapter(config, reads_later=True), load_adapter(config)
    read_values(later.transformer, CPU)
    its = trainable(whole)
    assert all(torch.equal(parameter, its[name]) for name, parameter in trainable(later).items())


def test_a_file_without_a_parameter_is_refused(sd3, tmp_path):
    tensors = {name: value.contiguous() for name, value in sd3.transformer.state_dict().items()}
    del tensors["proj_out.bias"]
    save_file(tensors, tmp_path / "transformer" / FILE)
    later = load_adapter(config_of("sd3", tmp_path), reads_later=True)
    with pytest.raises(ValueError, match=r"lack \['proj_out.bias'\]; download the model again"):
        read_values(later.transformer, CPU)


def test_a_folder_without_safetensors_is_refused_and_says_what_to_do(sd3, tmp_path):
    (tmp_path / "transformer" / FILE).rename(tmp_path / "transformer" / "diffusion_pytorch_model.bin")
    later = load_adapter(config_of("sd3", tmp_path), reads_later=True)
    with pytest.raises(ValueError, match=r"download the model as safetensors, or set runtime\.trainer_ranks to 1"):
        read_values(later.transformer, CPU)


# --- ranks

LAYERS = 4
HEADS, HEAD_WIDTH = 8, 64
"""38 million parameters: 150 MB in fp32."""

SPARE = 24 << 20
"""Bytes that a rank may take beside its part: one tensor, the buffers, and what the allocator keeps."""


def large_sd3(path: Path) -> None:
    """Write a folder whose transformer is far larger than everything else."""
    torch.manual_seed(0)
    pipeline = make_sd3()
    pipeline.transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_WIDTH,
        joint_attention_dim=WIDTH,
        caption_projection_dim=HEADS * HEAD_WIDTH,
        pooled_projection_dim=16,
        pos_embed_max_size=16,
    )
    pipeline.save_pretrained(path)


def loaded(member, port, ranks, path, start, reads_later):
    """Load as a rank. Return the peak of resident memory, the rank's own bytes, and the digests of all tensors."""
    load_adapter(config_of("sd3", path / "small"))  # imports diffusers, and makes the allocator's first arenas
    config = config_of("sd3", path / "large")
    store = join_store(port, timeout_seconds=60.0)
    group = RankGroup.form(store, member.rank, ranks, CPU, limit_seconds=60.0)
    forget_peak()
    before = resident_bytes("VmRSS")
    adapter = load_adapter(config, reads_later=reads_later)
    algorithm = AlgorithmConfig(name="diffusion-nft", ema_decay=0.9)
    if member.rank == 0:
        weights = Stored.of_path(start) if start else None
        shard = led_shard(group, adapter, algorithm, nullcontext, start=weights, compiles=False)
    else:
        shard = joined_shard(group, adapter, algorithm, compiles=False)
    peak = resident_bytes("VmHWM") - before
    own = sum(part.to_local().nbytes for part in shard.tensors("weights").values())
    found = {name: float(whole_of(one.detach()).double().sum()) for name, one in shard.tensors("weights").items()}
    dist.destroy_process_group()
    return peak, own, found


@pytest.mark.slow
def test_a_rank_reads_its_own_part_and_never_holds_the_model(tmp_path):
    large_sd3(tmp_path / "large")
    make_sd3().save_pretrained(tmp_path / "small")
    its = trainable(load_adapter(config_of("sd3", tmp_path / "large")))
    started = {name: parameter.detach() + 1.0 for name, parameter in its.items()}
    save_file(started, tmp_path / "start.safetensors")
    whole_bytes = sum(parameter.nbytes for parameter in its.values())
    ranks = 3
    processes = Processes(ranks, (), preload=["tests.engine.test_unread"])
    try:
        peaks = {}
        for start, reads_later in ((None, True), (None, False), (tmp_path / "start.safetensors", True)):
            store = serve_store()
            results = processes.run(range(ranks), loaded, store.port, ranks, tmp_path, start, reads_later)
            wanted = its if start is None else started
            sums = {name: float(value.detach().double().sum()) for name, value in wanted.items()}
            assert all(found == pytest.approx(sums) for _, _, found in results)
            # Beside the weights, a rank has the running average.
            peaks[start is None, reads_later] = [(peak - 2 * own) for peak, own, _ in results]
    finally:
        processes.close()
    assert max(peaks[True, True] + peaks[False, True]) < SPARE, peaks
    assert min(peaks[True, False]) > whole_bytes // 4, peaks  # memory freed in the first load is used again
