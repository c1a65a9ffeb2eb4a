"""Summarise an evaluation: metrics averaged over held-out prompts, and a sheet of images."""

import io
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load

from engine.config import GuardConfig, TargetConfig
from engine.protocol.request import Finished

SMOOTHED_OVER = 3
"""Number of evaluations averaged into a score. The standard error of one evaluation is about .02 with 512 images, and
.04 with 128."""

NOT_FINITE, NOT_FINITE_SHARE = "not_finite", "not_finite_share"
"""Metrics of an evaluation with images without a score: their number, and their share of all images."""

MOST_NOT_FINITE = 0.1
"""Largest share of images without a score in an evaluation that may reach the target. With more, the mean of the others
says little about the model."""

COLUMNS = 4
BORDER = 6
CAPTION = 16
SMALL, SCALE = 128, 4
"""Width limit and scale: images narrower than SMALL pixels are shown SCALE times larger."""


def mean_metrics(results: Sequence[Finished]) -> dict[str, float]:
    """Return the mean of the reward and of every named metric. Values that are not finite are left out and counted."""
    rows = [{"reward": result.score.reward, **result.score.metrics} for result in results]
    names = sorted({name for row in rows for name in row})
    means = {}
    for name in names:
        values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
        if values:
            means[name] = sum(values) / len(values)
    broken = sum(1 for row in rows if not math.isfinite(row["reward"]))
    if not broken:
        return means
    return {**means, NOT_FINITE: float(broken), NOT_FINITE_SHARE: broken / len(rows)}


def faults(results: Sequence[Finished]) -> str:
    """Return how many images of an evaluation have no score, and why; empty if all have one."""
    broken = [result for result in results if not math.isfinite(result.score.reward)]
    if not broken:
        return ""
    why = next((f": {result.score.fault}" for result in broken if result.score.fault), "")
    return f"{len(broken)} of {len(results)} images have no score, {broken[0].request.prompt!r} for one{why}"


def smoothed(values: Sequence[float]) -> list[float]:
    """Return each evaluation's average with the previous evaluations, over at most SMOOTHED_OVER."""
    return [statistics.mean(values[max(0, i + 1 - SMOOTHED_OVER) : i + 1]) for i in range(len(values))]


def guards_hold(metrics: Mapping[str, float], guards: Sequence[GuardConfig]) -> bool:
    """Return True if every guarded metric is within its limit, and most images have a score.

    A metric missing from the evaluation breaks its guard.
    """
    if metrics.get(NOT_FINITE_SHARE, 0.0) > MOST_NOT_FINITE:
        return False
    return all(metrics.get(guard.metric, math.inf) <= guard.max for guard in guards)


def held(evaluations: Sequence[Mapping[str, float]], target: TargetConfig) -> bool:
    """Return True if the target held for the last `target.evaluations` evaluations.

    The target holds in an evaluation if the smoothed score is at or above `target.value` and every guard holds.
    """
    scores = smoothed([metrics.get(target.metric, -math.inf) for metrics in evaluations])
    last = [
        score >= target.value and guards_hold(metrics, target.guards)
        for score, metrics in zip(scores, evaluations, strict=True)
    ][-target.evaluations :]
    return len(last) == target.evaluations and all(last)


def contact_sheet(images: Sequence[tuple[str, bytes]]) -> bytes:
    """Return a PNG of these images in a grid, in order, each image under its prompt.

    images: (prompt, safetensors bytes of uint8 [C, H, W] or [C, F, H, W])
    """
    if not images:
        return b""
    tiles = [Image.fromarray(to_rgb(load(data)["picture"].numpy())) for _, data in images]
    scale = SCALE if tiles[0].width < SMALL else 1
    width, height = tiles[0].width * scale, tiles[0].height * scale + CAPTION
    lines = math.ceil(len(tiles) / COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (width + BORDER) + BORDER, lines * (height + BORDER) + BORDER), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(CAPTION - 4)
    for i, ((prompt, _), tile) in enumerate(zip(images, tiles, strict=True)):
        left, top = BORDER + i % COLUMNS * (width + BORDER), BORDER + i // COLUMNS * (height + BORDER)
        draw.text((left, top), _shortened(prompt, font, width), font=font, fill=(90, 90, 90))
        sheet.paste(tile.resize((width, height - CAPTION), Image.Resampling.NEAREST), (left, top + CAPTION))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()


def _shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Return the longest start of a prompt that fits into `width`."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."


def to_rgb(image: np.ndarray) -> np.ndarray:
    """Convert uint8 [C, H, W], or the first frame of [C, F, H, W], to [H, W, 3]. Grey images become RGB."""
    if image.ndim == 4:  # video: use the first frame
        image = image[:, 0]
    channels = image if image.shape[0] == 3 else np.repeat(image[:1], 3, axis=0)
    return np.moveaxis(channels, 0, 2)
