"""Full weights divided over the ranks of a trainer: FSDP2 (`fully_shard`) with sums in the order of the ranks.

    shard -> [gather a block -> compute -> free]* -> gradients are summed, and each rank keeps its part
    whole -> a rank computes alone with all weights -> divided

Every rank holds a part of each parameter in fp32, as DTensors. A pass gathers the parameters of one block at a time,
in the format of computing, so all ranks make the same passes at the same time. `gather_all` gathers all blocks once,
for passes of a rank without the others: a rank keeps the gathered weights, or frees each block again. Ranks on GPUs
were never run.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from engine.parallel.communicator import TornGroup

Measure = Callable[[], AbstractContextManager[None]]
"""Makes the context around every collective, e.g. to measure its seconds."""


def mesh_of(store: dist.Store, rank: int, ranks: int, device: torch.device) -> DeviceMesh:
    """Return the mesh of the ranks. All ranks call this function, once in a process."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with torn_if_lost():
        dist.init_process_group(backend, store=dist.PrefixStore("mesh", store), rank=rank, world_size=ranks)
        return init_device_mesh(device.type, (ranks,))


class Sharding:
    """A transformer whose parameters are divided. `mesh`: of all ranks. Call on every rank, with equal weights."""

    def __init__(
        self, transformer: nn.Module, mesh: DeviceMesh, measure: Measure, *, dtype: torch.dtype | None = None
    ) -> None:
        """Divide the parameters. `dtype`: of the gathered weights; None: as they are. Gradients are summed in fp32."""
        reduce_dtype = None if dtype is None else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        blocks = [block for child in transformer.children() if isinstance(child, nn.ModuleList) for block in child]
        for module in (*blocks, transformer):
            # The root too frees its weights after a pass, because the weights may be exchanged between two passes.
            fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        self._modules = [module for module in transformer.modules() if isinstance(module, FSDPModule)]
        self._transformer = transformer
        self._is_whole = False
        gather, reduce = _Gather(measure), _OrderedSum(measure)
        for module in self._modules:
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]  # the base class is private
            module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the rows of the whole step already
            module.set_force_sum_reduction_for_comms(True)

    def gather_all(self, *, keeps: bool) -> None:
        """Gather all weights: a collective. `keeps`: this rank keeps them until `divide`, to make passes alone."""
        self.divide()
        for module in self._modules:
            module.unshard()
            if keeps:
                module.set_reshard_after_forward(False, recurse=False)
            else:
                module.reshard()
        self._is_whole = keeps

    @property
    def is_whole(self) -> bool:
        """Return True while this rank keeps a copy of all weights."""
        return self._is_whole

    @property
    def whole(self) -> Mapping[str, nn.Parameter]:
        """Return this rank's own copy of all gathered weights by name. A change is lost with `divide`."""
        if not self._is_whole:
            raise ValueError("the weights are divided: call gather_all first")
        return dict(self._transformer.named_parameters())

    def divide(self) -> None:
        """Free the gathered weights."""
        if self._is_whole:
            for module in self._modules:
                module.reshard()
                module.set_reshard_after_forward(True, recurse=False)
            self._is_whole = False


class _Gather:
    """Gathers the parts of all ranks."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self._measure():
            work: dist.Work | None = dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
            return work


class _OrderedSum:
    """Gives each rank its part of the sum. Additions run in the order of the ranks, so a sum repeats bit for bit."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        parts = torch.empty_like(input_tensor)
        with self._measure():
            dist.all_to_all_single(parts, input_tensor, group=group)
        first, *other_parts = parts.view(dist.get_world_size(group), -1)
        output_tensor.copy_(first)
        for part in other_parts:
            output_tensor.add_(part)


@torch.no_grad()
def fill_shard(shard: Tensor, whole: Tensor) -> None:
    """Overwrite every rank's part with rank 0's whole tensor: a collective. `whole`: any values on other ranks.

    A tensor that is not divided becomes rank 0's on every rank.
    """
    if isinstance(shard, DTensor):
        placed = distribute_tensor(whole.to(shard.device, shard.dtype), shard.device_mesh, shard.placements)
        shard.to_local().copy_(placed.to_local())
    else:
        value = whole.to(shard.device, shard.dtype)
        dist.broadcast(value, 0)
        shard.copy_(value)


def whole_of(shard: Tensor) -> Tensor:
    """Return the whole tensor on every rank: a collective. A tensor that is not divided is returned as it is."""
    return shard.full_tensor() if isinstance(shard, DTensor) else shard


@contextmanager
def torn_if_lost() -> Iterator[None]:
    """Raise TornGroup if a collective fails because a rank was lost. Other errors pass through."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise TornGroup(str(error).split("\n")[0][:300]) from error
        raise
