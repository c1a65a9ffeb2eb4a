"""sp_parity: how far is a forward and backward pass shared by several ranks from the same pass in one process?

    python -m tests.benchmarks.sp_parity --json

Tiny random configurations of the real diffusers classes, and digits-ocr with its real weights; real processes with a
gloo group on the loopback. With and without masked text where a family takes a mask; with lengths that divide by the
degree and lengths that do not. `tests/engine/test_ulysses.py` runs a part of it.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
from diffusers import (
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from torch import Tensor, nn

from engine.families import FAMILIES as FILES
from engine.models.digits import load_digits
from engine.models.flux import grid_positions
from engine.parallel.communicator import Communicators, SPGroup, join_store, serve_store
from engine.parallel.ulysses import Ulysses, sum_gradients
from tests.benchmarks.page import load_now, publish

HEADS, WIDTH, POOLED, BATCH = 4, 32, 16, 2
DEGREES = (1, 2, 4)
GROUPS = ((0, 1), (2, 3), (0, 1, 2, 3))
"""Ranks that have a communicator, made once: degrees 2 and 4."""
OUTPUT_BOUND, GRADIENT_BOUND = 5e-6, 1e-5
NOISE_FLOOR = 1e-3
"""Gradients of a parameter are compared to its own largest, or to this part of the model's largest if that is more:
some are zero but for rounding (the bias of a key moves all scores alike)."""
ANSWER_SECONDS = 120.0
HEAVY = ("engine.models.digits", "engine.parallel.ulysses")
"""Imported once for all ranks."""
SWITCH_BLOCKS, SWITCHES = 60, 200
"""Of the model whose switch is timed: as many blocks as Qwen-Image has, but narrow ones."""


# --- families


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of the image, [rows, columns], and of the text."""

    rows: int
    columns: int
    text: int


LENGTHS = {"divides": Lengths(rows=4, columns=6, text=8), "odd": Lengths(rows=3, columns=5, text=7)}
"""24 and 8 divide by 2 and 4; 15 and 7 by neither."""


@dataclass(frozen=True)
class Family:
    """One kind of transformer: how it is made, and one forward pass of a fixed input."""

    build: Callable[[], nn.Module]
    forward: Callable[[nn.Module, Lengths, bool], Tensor]
    """(model, lengths, masked) -> output"""
    takes_mask: bool = False
    lengths: Sequence[str] = tuple(LENGTHS)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_masked(text: int, masked: bool) -> Tensor:
    """Return a mask [BATCH, text]: True at text tokens; rows differ."""
    ends = torch.tensor([text - 3, text - 1] if masked else [text, text])
    return torch.arange(text) < ends[:, None]


SIGMA = torch.tensor([0.3, 0.8])


def build_qwen_image() -> nn.Module:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=HEADS,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )


def qwen_image(model: nn.Module, lengths: Lengths, masked: bool) -> Tensor:
    return model(
        hidden_states=drawn(BATCH, lengths.rows * lengths.columns, 16),
        encoder_hidden_states=drawn(BATCH, lengths.text, WIDTH, seed=2),
        encoder_hidden_states_mask=some_masked(lengths.text, masked) if masked else None,
        timestep=SIGMA,
        img_shapes=[[(1, lengths.rows, lengths.columns)]] * BATCH,
        return_dict=False,
    )[0]


def build_flux() -> nn.Module:
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=HEADS,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=POOLED,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )


def flux(model: nn.Module, lengths: Lengths, masked: bool) -> Tensor:
    return model(
        hidden_states=drawn(BATCH, lengths.rows * lengths.columns, 16),
        encoder_hidden_states=drawn(BATCH, lengths.text, WIDTH, seed=2),
        pooled_projections=drawn(BATCH, POOLED, seed=3),
        timestep=SIGMA,
        img_ids=grid_positions(lengths.rows, lengths.columns),
        txt_ids=torch.zeros(lengths.text, 3),
        guidance=torch.full((BATCH,), 3.5),
        return_dict=False,
    )[0]


def build_wan() -> nn.Module:
    return WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=WIDTH,
        freq_dim=16,
        ffn_dim=96,
        num_layers=2,
        rope_max_seq_len=32,
    )


def wan(model: nn.Module, lengths: Lengths, masked: bool) -> Tensor:
    return model(
        hidden_states=drawn(BATCH, 4, 3, 2 * lengths.rows, 2 * lengths.columns),
        encoder_hidden_states=drawn(BATCH, lengths.text, WIDTH, seed=2),
        timestep=1000.0 * SIGMA,
        return_dict=False,
    )[0]


def build_sd3() -> nn.Module:
    """Build SD3 with the additions of SD3.5: normalised queries, and a second attention over the image alone."""
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=HEADS,
        joint_attention_dim=WIDTH,
        caption_projection_dim=16 * HEADS,
        pooled_projection_dim=POOLED,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def sd3(model: nn.Module, lengths: Lengths, masked: bool) -> Tensor:
    return model(
        hidden_states=drawn(BATCH, 4, 2 * lengths.rows, 2 * lengths.columns),
        encoder_hidden_states=drawn(BATCH, lengths.text, WIDTH, seed=2),
        pooled_projections=drawn(BATCH, POOLED, seed=3),
        timestep=1000.0 * SIGMA,
        return_dict=False,
    )[0]


def build_hunyuan_video() -> nn.Module:
    return HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=WIDTH,
        pooled_projection_dim=POOLED,
        rope_axes_dim=(4, 6, 6),
    )


def hunyuan_video(model: nn.Module, lengths: Lengths, masked: bool) -> Tensor:
    return model(
        hidden_states=drawn(BATCH, 4, 3, 2 * lengths.rows, 2 * lengths.columns),
        encoder_hidden_states=drawn(BATCH, lengths.text, WIDTH, seed=2),
        encoder_attention_mask=some_masked(lengths.text, masked),
        pooled_projections=drawn(BATCH, POOLED, seed=3),
        timestep=1000.0 * SIGMA,
        guidance=torch.full((BATCH,), 6000.0),
        return_dict=False,
    )[0]


def build_flux2() -> nn.Module:
    return Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=HEADS,
        joint_attention_dim=WIDTH,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )


def flux2(model: nn.Module, lengths: Lengths, masked: bool) -> Tensor:
    x = drawn(BATCH, 16, lengths.rows, lengths.columns)
    text = drawn(BATCH, lengths.text, WIDTH, seed=2)
    return FILES["flux2-klein"].forward(model, x, SIGMA, text, some_masked(lengths.text, masked))


def digits(model: nn.Module, lengths: Lengths, masked: bool) -> Tensor:
    """Return digits-ocr through its adapter; its lengths are fixed."""
    adapter = load_digits()
    adapter.transformer = model
    return adapter.velocity(drawn(BATCH, 24, 16), SIGMA, adapter.encode(["1234", "77"]), 1.0)


FAMILIES = {
    "QwenImage": Family(build_qwen_image, qwen_image, takes_mask=True),
    "Flux": Family(build_flux, flux),
    "Wan": Family(build_wan, wan),
    "SD3": Family(build_sd3, sd3),
    "HunyuanVideo": Family(build_hunyuan_video, hunyuan_video, takes_mask=True),
    "Flux2": Family(build_flux2, flux2),
    "digits-ocr": Family(lambda: load_digits().transformer, digits, lengths=("divides",)),
}


@dataclass(frozen=True)
class Case:
    family: str
    lengths: str
    masked: bool

    def __str__(self) -> str:
        return f"{self.family}, {self.lengths}{', masked text' if self.masked else ''}"


CASES = [
    Case(name, lengths, masked)
    for name, family in FAMILIES.items()
    for lengths in family.lengths
    for masked in ((False, True) if family.takes_mask else (False,))
]


# --- live ranks


@dataclass
class Member:
    """One process among `Ranks`, with the state that it keeps between the functions sent to it."""

    rank: int
    groups: dict[tuple[int, ...], SPGroup]
    """The groups that it is in."""
    kept: dict[str, Any] = field(default_factory=dict)

    def group_of(self, degree: int) -> SPGroup | None:
        """Return its group of that degree; None at degree 1."""
        return None if degree == 1 else next(one for one in self.groups.values() if one.degree == degree)


class Failed(Exception):
    """A rank raised; the text is its exception's type and message."""


class Ranks:
    """Live processes with gloo groups on the loopback that run the functions sent to them. `close` ends them."""

    def __init__(
        self,
        number: int,
        groups: Sequence[tuple[int, ...]],
        *,
        preload: Sequence[str] = (),
        timeout_seconds: float = 60.0,
        on_gpus: bool = False,
    ) -> None:
        """`preload`: modules that are imported once for all ranks, beside HEAVY: those whose functions are sent.

        `on_gpus`: the ranks use CUDA, so each imports everything itself; diffusers looks for GPUs when it is imported,
        and no fork of a process that did may use them.

        `timeout_seconds`: how long a collective waits for a peer that neither answers nor dies.
        """
        context = multiprocessing.get_context("spawn" if on_gpus else "forkserver")
        context.set_forkserver_preload([*HEAVY, *preload])
        self._store = serve_store()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(number):
            ours, theirs = context.Pipe()
            arguments = (theirs, self._store.port, rank, tuple(groups), timeout_seconds)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def send(self, ranks: Iterable[int], function: Callable[..., Any], *args: Any) -> None:
        """Have some ranks call `function(member, *args)`."""
        for rank in ranks:
            self._pipes[rank].send((function, args))

    def answers(self, ranks: Iterable[int]) -> list[Any]:
        """Return their results by rank; `Failed` stands for an exception."""
        found = []
        for rank in ranks:
            if not self._pipes[rank].poll(ANSWER_SECONDS):
                raise TimeoutError(f"rank {rank} has not answered for {ANSWER_SECONDS:g} s: a collective hangs")
            found.append(self._pipes[rank].recv())
        return found

    def run(self, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function on some ranks and return the results; the first failure is raised here."""
        self.send(ranks, function, *args)
        found = self.answers(ranks)
        for answer in found:
            if isinstance(answer, Failed):
                raise answer
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _serve(pipe: Connection, port: int, rank: int, groups: tuple[tuple[int, ...], ...], timeout_seconds: float) -> None:
    torch.set_num_threads(1)
    store = join_store(port, timeout_seconds=ANSWER_SECONDS)
    communicators = Communicators(store, timeout_seconds=timeout_seconds, patience_seconds=ANSWER_SECONDS)
    made = {
        ranks: communicators.get(which, ranks.index(rank), len(ranks))
        for which, ranks in enumerate(groups)
        if rank in ranks
    }
    member = Member(rank, made)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(member, *args))
        except Exception as error:
            pipe.send(Failed(f"{type(error).__name__}: {error}"))


# --- measurements of each rank


@dataclass(frozen=True)
class Difference:
    """Largest difference to the pass alone, relative to the largest value."""

    output: float
    gradients: float
    worst: str
    """The parameter whose gradient differs most."""
    again: bool
    """Whether the second pass gave the same bits as the first, in output and gradients."""


@dataclass
class Live:
    """A model of one family in this process, with its sharing."""

    model: nn.Module
    ulysses: Ulysses


def live(member: Member, family: str) -> Live:
    """Return the family's model, created once per process, with equal weights on every rank."""
    if family not in member.kept:
        torch.manual_seed(0)
        model = FAMILIES[family].build().eval().requires_grad_(True)
        member.kept[family] = Live(model, Ulysses(model))
    return member.kept[family]


def both_passes(
    model: nn.Module, forward: Callable[[], Tensor], group: SPGroup | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output, and the complete gradients of a fixed weighted sum of it."""
    output = forward()
    (output * drawn(*output.shape, seed=4)).sum().backward()
    sum_gradients(model.parameters(), group)
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)
    return output.detach(), gradients


def difference(member: Member, case: Case, degree: int) -> Difference:
    """Return the difference between this rank's result at that degree and its result alone."""
    one = live(member, case.family)
    return shared_difference(
        one.ulysses,
        one.model,
        lambda: FAMILIES[case.family].forward(one.model, LENGTHS[case.lengths], case.masked),
        member.group_of(degree),
    )


def shared_difference(
    ulysses: Ulysses, model: nn.Module, forward: Callable[[], Tensor], group: SPGroup | None
) -> Difference:
    ulysses.use(None)
    output, gradients = both_passes(model, forward, None)
    ulysses.use(group)
    found, again = (both_passes(model, forward, group) for _ in range(2))
    ulysses.use(None)
    assert found[1].keys() == gradients.keys()
    floor = NOISE_FLOOR * max(float(one.abs().max()) for one in gradients.values())
    by_parameter = {
        name: float((found[1][name] - one).abs().max()) / max(float(one.abs().max()), floor)
        for name, one in gradients.items()
    }
    worst = max(by_parameter, key=lambda name: by_parameter[name])
    return Difference(
        output=float((found[0] - output).abs().max() / output.abs().max()),
        gradients=by_parameter[worst],
        worst=worst,
        again=torch.equal(found[0], again[0])
        and all(torch.equal(one, again[1][name]) for name, one in found[1].items()),
    )


def alone_again(member: Member, case: Case, degrees: Sequence[int]) -> bool:
    """Return whether a pass alone gives the same bits before and after shared passes of these degrees."""
    one = live(member, case.family)

    @torch.no_grad()
    def output() -> Tensor:
        return FAMILIES[case.family].forward(one.model, LENGTHS[case.lengths], case.masked)

    one.ulysses.use(None)
    before = output()
    for degree in degrees:
        one.ulysses.use(member.group_of(degree))
        output()
    one.ulysses.use(None)
    return torch.equal(before, output())


@cache
def _many_blocks() -> nn.Module:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=SWITCH_BLOCKS,
        attention_head_dim=6,
        num_attention_heads=HEADS,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(2, 2, 2),
    )


def switch_ms(member: Member) -> dict[str, list[float]]:
    """Return the milliseconds of each `use` of one rank by new degree, on a model of SWITCH_BLOCKS blocks."""
    ulysses = Ulysses(_many_blocks())
    found: dict[str, list[float]] = {str(degree): [] for degree in DEGREES}
    for _ in range(SWITCHES):
        for degree in (2, 4, 1):
            group = member.group_of(degree)
            begun = time.perf_counter()
            ulysses.use(group)
            found[str(degree)].append(1e3 * (time.perf_counter() - begun))
    return found


# --- figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    parser.parse_args()
    load1 = load_now()
    ranks = Ranks(4, GROUPS)
    try:
        everyone = range(4)
        cases: dict[str, dict[str, Difference]] = {}
        for case in CASES:
            for degree in DEGREES:
                found = ranks.run(everyone, difference, case, degree)
                cases.setdefault(str(case), {})[str(degree)] = Difference(
                    output=max(one.output for one in found),
                    gradients=max(one.gradients for one in found),
                    worst=max(found, key=lambda one: one.gradients).worst,
                    again=all(one.again for one in found),
                )
        same = {str(case): all(ranks.run(everyone, alone_again, case, DEGREES)) for case in CASES}
        switches = ranks.run(everyone, switch_ms)[0]
    finally:
        ranks.close()
    all_of_them = [one for by_degree in cases.values() for one in by_degree.values()]
    shared = [one for by_degree in cases.values() for degree, one in by_degree.items() if degree != "1"]
    switch = {degree: statistics.median(times) for degree, times in switches.items()}
    publish(
        "sp_parity",
        question="how far is a pass shared by several ranks from the same pass in one process?",
        command="python -m tests.benchmarks.sp_parity --json",
        result={
            "max_rel_diff": max(one.output for one in all_of_them),
            "max_grad_rel_diff": max(one.gradients for one in all_of_them),
            "bounds": {"max_rel_diff": OUTPUT_BOUND, "max_grad_rel_diff": GRADIENT_BOUND},
            "families": list(FAMILIES),
            "degrees": list(DEGREES),
            "shared_outputs": len(shared),
            "shared_outputs_bit_equal": sum(one.output == 0 for one in shared),
            "same_degree_again_bit_equal": all(one.again for one in all_of_them),
            "alone_after_shared_bit_equal": all(same.values()),
            "switch_ms_median": switch,
            "switch_ms_worst": {degree: max(times) for degree, times in switches.items()},
            "cases": {
                case: {
                    degree: {"max_rel_diff": one.output, "max_grad_rel_diff": one.gradients, "worst": one.worst}
                    for degree, one in by_degree.items()
                }
                for case, by_degree in cases.items()
            },
        },
        runs=1,
        seeds=[0],
        load1=load1,
        rows=[
            {"case": case}
            | {f"degree {degree}": f"{one.output:.1e} / {one.gradients:.1e}" for degree, one in by_degree.items()}
            for case, by_degree in cases.items()
        ],
        text=f"""
Measured: {len(everyone)} processes with gloo on the loopback, fp32, one thread each, batch {BATCH}. In the table, the
largest difference of the output / of the gradients to the same pass in one process, over all ranks. Output: relative to
its largest value. Gradients of a fixed weighted sum of the output, after `sum_gradients`: of each parameter relative to
the largest of its own, or to {NOISE_FLOOR:g} of the model's largest where that is more (some gradients are zero but for
rounding). Weights are random, and the shipped base for digits-ocr. `divides`: 24 tokens a frame beside 8 of text;
`odd`: 15 and 7, which are filled up inside and left out of attention. Wan and HunyuanVideo have 3 frames.
Degree 1 must be 0: it is the untouched model. Attention sees all tokens in the order of a pass alone, and everything
else works on one token at a time, so {sum(one.output == 0 for one in shared)} of {len(shared)} shared outputs have the
very bits of the pass alone; matrix products of other heights may round otherwise, and sums of gradients do.
A second pass at the same degree gave the same bits
({all(one.again for one in all_of_them)}), and so did a pass alone after shared ones ({all(same.values())}).
Switch: {", ".join(f"{value:.2f} ms to degree {degree}" for degree, value in switch.items())}, median of {SWITCHES} on a
Qwen-Image of {SWITCH_BLOCKS} narrow blocks; no communicator is made, and no message sent.
What it changed: the same noise and weights give the same pictures whatever the degree, within {OUTPUT_BOUND:g} of the
largest value a pass, so an order to regroup may come between any two denoising steps.
""",
    )


if __name__ == "__main__":
    main()
