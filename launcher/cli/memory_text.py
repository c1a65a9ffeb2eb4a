"""The memory budget of a plan as text: a table in GiB, and what the job asks for beyond it."""

from collections.abc import Iterator, Sequence

from launcher.cli.layout import columns
from launcher.placement.memory import GpuMemory, gib


def memory_lines(gpus: Sequence[GpuMemory]) -> Iterator[str]:
    """Yield the memory budget of a GPU of each role. Nothing for a model that ships with spotrl."""
    if not gpus:
        return
    yield f"  memory: {gpus[0].model}"
    yield ""
    yield from columns(memory_table(gpus), words=1)
    for gpu in gpus:
        if gpu.ranks > 1:
            yield f"  {gpu.ranks} GPUs of the {gpu.role} train, each with its own groups: the column is of each of them"
        if gpu.asked > gpu.fitting:
            yield (
                f"  !! the job asks for passes of {gpu.asked} {gpu.unit}s on the {gpu.role}, and {gpu.fitting} fit: "
                "the engine halves a pass that does not fit"
            )


def memory_table(gpus: Sequence[GpuMemory]) -> list[tuple[str, ...]]:
    """Return the budget as a table in GiB, a column for each role. Counts are of one pass on one GPU."""
    names = list(dict.fromkeys(name for gpu in gpus for name in gpu.parts))
    rows = [("GiB of each GPU", *(f"{gpu.role}, {gpu.accelerator}" for gpu in gpus))]
    rows.append(("usable", *(gib(gpu.usable) for gpu in gpus)))
    rows += [(name, *(gib(gpu.parts[name]) if name in gpu.parts else "-" for gpu in gpus)) for name in names]
    rows.append(("a pass", *(gib(gpu.busy) for gpu in gpus)))
    rows.append(("free then", *(gib(gpu.usable - gpu.parts_and_pass) for gpu in gpus)))
    rows.append(("while it loads", *(gib(gpu.start) for gpu in gpus)))
    rows.append(("each row, each image", *(gib(gpu.bytes_each, 2) for gpu in gpus)))
    rows.append(("rows, images of a pass", *(str(gpu.count) for gpu in gpus)))
    rows.append(("as many would fit", *(str(gpu.fitting) for gpu in gpus)))
    return rows
