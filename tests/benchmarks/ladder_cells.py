"""Settings of the ladder: models on testbeds of the DigenRL preprint, and drawn splits. Rates are assumed.

The seconds of a cell come from operations, peaks and utilisations, and the gathers of FSDP from bytes over the links of
the testbeds. The preprint is withdrawn; its testbeds are known from a digest.
"""

import random
from dataclasses import dataclass

from engine.schedule.simulate import Disturbance
from engine.schedule.values import Gpus, Rates, Work, train_seconds
from engine.timing.figures import Figure, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    name: str
    rates: Rates
    work: Work
    number: int
    """GPUs."""
    rows: int
    """Rows of a training pass that fit on a GPU."""

    def split(self, trainer: int) -> Gpus:
        return Gpus(trainer=trainer, rollout=self.number - trainer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Testbed:
    gpus: int
    tflops: float
    link_gb: float
    """GB per second between nodes."""
    memory_gb: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    tflop: float
    """Of a forward pass."""
    billions: float
    """Weights."""
    passes: int
    """2 with guidance."""
    trained_share: float
    rollout_share: float
    """Share of the peak reached by rollouts."""
    training_share: float


TESTBEDS = {
    "A": Testbed(gpus=32, tflops=155, link_gb=20, memory_gb=48),
    "B": Testbed(gpus=32, tflops=989, link_gb=40, memory_gb=80),
    "C": Testbed(gpus=16, tflops=500, link_gb=20, memory_gb=96),
}
QWEN = Model(tflop=15.7, billions=20.4, passes=2, trained_share=0.4, rollout_share=0.40, training_share=0.30)
FLUX = Model(tflop=40, billions=11.9, passes=1, trained_share=0.6, rollout_share=0.45, training_share=0.35)
WAN = Model(tflop=500, billions=14.3, passes=2, trained_share=0.6, rollout_share=0.35, training_share=0.33)
HUNYUAN = Model(tflop=436, billions=12.8, passes=1, trained_share=0.6, rollout_share=0.33, training_share=0.32)
CELLS = (
    *(("QwenImage-20B 512", QWEN, bed) for bed in "ABC"),
    *(("FLUX-12B 720", FLUX, bed) for bed in "ABC"),
    *(("Wan2.1-14B 480p", WAN, bed) for bed in "BC"),
    *(("Hunyuan-13B 480p", HUNYUAN, bed) for bed in "BC"),
)
STEPS = 20
BUS_GB = 20
"""GB per second into a GPU from its host."""


def assumed(seconds: float, text: str) -> Figure:
    return Figure(value=seconds, source=Source(basis="assumed", text=text))


def published(seconds: float, text: str) -> Figure:
    return Figure(value=seconds, source=Source(basis="published", text=text))


def cells() -> list[Setting]:
    return [cell(name, model, bed) for name, model, bed in CELLS]


def cell(name: str, model: Model, bed: str) -> Setting:
    """Return a cell with 64 images in groups of 8."""
    on = TESTBEDS[bed]
    weights_gb, large = 2 * model.billions, model.tflop > 100
    fits = {48: 4, 80: 8, 96: 8}[on.memory_gb]
    pass_tflop = model.tflop * model.passes
    rates = Rates(
        image=assumed(STEPS * pass_tflop / (on.tflops * model.rollout_share), "operations over a share of the peak"),
        row=assumed(4 * pass_tflop / (on.tflops * model.training_share), "four forward passes"),
        gather=assumed(2 * weights_gb / on.link_gb, "weights gathered twice across nodes"),
        launch=assumed(0.05, "a guess"),
        switch=assumed(
            weights_gb / BUS_GB + 12 * model.billions / on.gpus / BUS_GB, "weights and optimiser over the bus"
        ),
        publish=assumed(weights_gb / on.link_gb, "weights across nodes"),
        load=assumed(weights_gb / BUS_GB, "weights over the bus"),
        score=assumed(0.5, "a guess"),
    )
    work = Work(groups=8, images=8, rows_of_image=round(STEPS * model.trained_share))
    rows = fits // 2 if large else fits
    return Setting(name=f"{name} on {bed}", rates=rates, work=work, number=on.gpus, rows=rows)


def drawn(number: int, seed: int = 0) -> list[tuple[Setting, Gpus]]:
    """Return drawn settings, each with a drawn split of its GPUs."""
    draw = random.Random(seed)
    found = []
    for place in range(number):
        gpus, trainer = draw.choice([(4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (16, 8), (16, 12)])
        images, rows = draw.choice([4, 8]), draw.choice([6, 8, 12])
        image = draw.uniform(2, 30)
        row = image / rows * draw.uniform(0.25, 2.5)
        rates = Rates(
            image=assumed(image, "drawn"),
            row=assumed(row, "drawn"),
            gather=assumed(row * draw.uniform(0, 4), "drawn"),
            launch=assumed(0.05, "drawn"),
            switch=assumed(image * draw.uniform(0, 0.1), "drawn"),
            publish=assumed(image * draw.uniform(0, 0.2), "drawn"),
            load=assumed(image * draw.uniform(0, 0.2), "drawn"),
            score=assumed(image * draw.uniform(0, 0.1), "drawn"),
        )
        work = Work(groups=draw.choice([8, 12]), images=images, rows_of_image=rows, updates=draw.choice([1, 2]))
        setting = Setting(name=f"drawn {place}", rates=rates, work=work, number=gpus, rows=draw.choice([2, 4, 8]))
        found.append((setting, setting.split(trainer)))
    return found


def rollout_bound(number: int) -> list[tuple[Setting, Gpus]]:
    """Return the first drawn splits whose rollouts take longer than their training: where help can gain at all."""
    found = []
    for setting, gpus in drawn(8 * number):
        images = setting.work.groups * setting.work.images
        training = train_seconds(setting.rates, setting.work, gpus.trainer, setting.work.groups, setting.rows)
        if images * setting.rates.image.value / gpus.rollout > training:
            found.append((setting, gpus))
    return found[:number]


def of_verl_omni_575() -> Setting:
    """Return the setting of verl-omni #575: 128 videos a step on two trainer GPUs and one generator.

    Published: 377.9 s a step with one generator, which is then the bottleneck, and 250.4 s with two, of which the
    trainer waits 0.1 s; 9.1 s to switch to rollouts and 3.3 s back. The group size is not published.
    """
    source = "verl-omni #575"
    work = Work(groups=16, images=8, rows_of_image=10, steps=20)
    rates = Rates(
        image=published(377.9 / 128, source),
        row=published(250.3 * 2 / 128 / work.rows_of_image, source),
        switch=published((9.1 + 3.3) / 2, source),
    )
    return Setting(name=source, rates=rates, work=work, number=3, rows=work.groups * work.images * work.rows_of_image)


class Wrong(Disturbance):
    """Rates 20 % wrong either way, and durations with 15 % noise."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._rollout, self._training = (self._draw.choice([0.8, 1.2]) for _ in range(2))

    def _noise(self) -> float:
        return max(0.3, self._draw.gauss(1, 0.15))

    def rollout(self) -> float:
        return self._rollout * self._noise()

    def training(self) -> float:
        return self._training * self._noise()
