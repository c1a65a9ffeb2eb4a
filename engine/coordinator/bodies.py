"""Read the bodies of requests, up to a limit. A larger body is refused before it is in memory."""

from starlette.requests import Request

from engine.config import EngineConfig
from engine.model_folder import FAMILIES

SMALL_BYTES = 4 << 20
"""Most bytes of a body that holds no tensors: a snapshot of capacity, an order, times of a rank."""

LEAST_CALL_BYTES = 64 << 20
"""Bytes that every call may have: prompts of a task, and the tensors of a small model."""

BYTES_PER_PIXEL = 4
"""Most bytes of a latent in fp32 for each pixel of each frame. The published models have 1 to 3."""


class BodyTooLarge(Exception):
    """A body with more bytes than its route takes."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the body of this call has more than {most} bytes")


async def body_of(request: Request, most: int) -> bytes:
    """Return the body of a request. Raises BodyTooLarge as soon as there are more than `most` bytes."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise BodyTooLarge(most)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise BodyTooLarge(most)
    return bytes(body)


def most_call_bytes(config: EngineConfig) -> int:
    """Return the most bytes of a call: the trajectories of a lease, with every step recorded."""
    model, family = config.model, FAMILIES.get(config.model.name)
    size = None if family is None else family.size
    if size is None:  # a shipped model: its images have a few thousand pixels
        return LEAST_CALL_BYTES
    pixels = (model.height or size.height) * (model.width or size.width) * (model.frames or size.frames)
    trained = config.runtime.shape * (config.sampler.steps + 2)  # latents
    evaluated = config.evaluation.shape  # images, of a byte for each pixel and colour
    return LEAST_CALL_BYTES + max(trained, evaluated) * BYTES_PER_PIXEL * pixels
