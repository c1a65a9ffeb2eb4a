"""Forecast the training seconds and the efficiency of a trainer with several ranks (engine/trainer_ranks.py). Pure.

    rounds           = ceil(groups / ranks)                                   groups of the busiest rank in a step
    seconds of step  = rounds x seconds of a group + bytes of a step / (peak of the link x LINK_SHARE)
    efficiency       = groups x seconds of a group / (ranks x seconds of step)

Bytes that a rank receives in an optimiser step:

    LoRA          2 x (ranks - 1) / ranks x gradients in fp32: every rank adds a part of the sums of all ranks, in the
                  order of the ranks, and gets the other parts. And the new weights in fp32, from rank 0
    full weights  (ranks - 1) / ranks x passes x (2 x weights in bf16 + gradients in fp32): FSDP2 gathers the weights
                  for the forward and for the backward pass, and reduces the gradients after each pass

No collective overlaps computation in the forecast, so a forecast is a lower bound of the efficiency if the link reaches
its share. Nobody has timed spotrl's ranks on GPUs: the basis of every efficiency is `assumed`.
"""

from dataclasses import dataclass

from engine.timing.figures import LINK_BYTES_PER_SECOND, LINK_OTHERWISE, LINK_SHARE, Figure, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """An optimiser step as ranks divide it."""

    groups: int
    group_seconds: float
    """Training seconds of a group on one GPU."""
    passes_of_group: int
    """Training passes of a group on one GPU."""
    groups_of_pass: int = 1
    """Whole groups of a training pass on one GPU, if a pass holds more than one."""
    unit: int = 0
    """Most groups that all ranks train together (`algorithm.unit`). 0: as many as fit into their passes."""
    trained_bytes: int
    """Bytes of the trained weights in fp32: adapters, or the whole transformer. A set of gradients has as many."""
    is_sharded: bool
    """True with full weights: FSDP2 divides them over the ranks. False with LoRA: every rank has all weights."""
    gpu: str

    def rounds(self, ranks: int) -> int:
        """Return the groups that the busiest rank trains in a step."""
        return -(-self.groups // ranks)

    def passes(self, ranks: int) -> int:
        """Return the training passes of a step, which all ranks make together."""
        together = min(self.groups_of_pass, -(-self.unit // ranks)) if self.unit else self.groups_of_pass
        return -(-self.rounds(ranks) // together) * self.passes_of_group

    def received_bytes(self, ranks: int) -> float:
        """Return the bytes that a rank receives from the other ranks in a step."""
        if not self.is_sharded:
            weights = self.trained_bytes if ranks > 1 else 0
            return 2 * (ranks - 1) / ranks * self.trained_bytes + weights
        gathered = 2 * self.trained_bytes / 2  # twice the weights in bf16, half of their bytes in fp32
        return (ranks - 1) / ranks * self.passes(ranks) * (gathered + self.trained_bytes)

    def collective_seconds(self, ranks: int) -> float:
        """Return the seconds of a step in which a rank receives bytes."""
        return self.received_bytes(ranks) / (link_of(self.gpu).value * LINK_SHARE.value)

    def collective_seconds_of_pass(self, ranks: int) -> float:
        """Return the seconds of collectives that each training pass needs, whatever its rows. With LoRA 0."""
        return self.collective_seconds(ranks) / self.passes(ranks) if self.is_sharded else 0.0

    def seconds(self, ranks: int) -> float:
        """Return the seconds of the step."""
        return self.rounds(ranks) * self.group_seconds + self.collective_seconds(ranks)

    def efficiency(self, ranks: int) -> Figure:
        """Return the work of a GPU of `ranks` ranks, relative to the work of a GPU that trains alone."""
        value = self.groups * self.group_seconds / (ranks * self.seconds(ranks))
        return Figure(value=value, source=Source(basis="assumed", text=self._words(ranks)))

    def _words(self, ranks: int) -> str:
        link = link_of(self.gpu).value * LINK_SHARE.value
        return (
            f"{self.groups} groups of a step on {ranks} ranks take {self.rounds(ranks)} rounds; "
            f"{self.received_bytes(ranks) / 1e9:.1f} GB a step at {link / 1e9:.0f} GB/s take "
            f"{self.collective_seconds(ranks):.2f} s of {self.seconds(ranks):.1f} s"
        )


def link_of(gpu: str) -> Figure:
    """Return the peak bytes per second between the GPUs of a node. Case does not matter."""
    return next((rate for name, rate in LINK_BYTES_PER_SECOND.items() if name.lower() == gpu.lower()), LINK_OTHERWISE)
