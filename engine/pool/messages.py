"""Messages between a worker and the scoring processes of its node, and their frames on a Unix socket.

    worker --- [8 bytes: length][Ask, images as safetensors] ---> scorer
    worker <-- [8 bytes: length][Scores or Failed] -------------- scorer

Promise: every score carries the digest of the image and the prompt that it was computed from. A worker accepts a score
only for the image with that digest, so neither a mixed-up batch nor a late answer can give an image a wrong score.
"""

import socket
import struct
from hashlib import blake2b
from math import isfinite, nan
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor

from engine.protocol.codec import pack, unpack
from engine.protocol.request import Score

_LENGTH = struct.Struct("<Q")


ANSWER_SECONDS = 0.5
"""Time in which the workers of a batch learn that its scorer hung, before the process ends."""


class Ask(msgspec.Struct, frozen=True, tag="ask", tag_field="message"):
    """Order to score images, one for each prompt. `alone`: in a call without images of other workers."""

    prompts: tuple[str, ...]
    alone: bool = False


class Scored(msgspec.Struct, frozen=True):
    """Score of one image. None stands for NaN, which JSON does not know."""

    digest: str
    """Of the scored image and its prompt (`digest_of`)."""
    reward: float | None
    metrics: dict[str, float | None]
    fault: str = ""

    @classmethod
    def of(cls, digest: str, score: Score) -> "Scored":
        metrics = {name: value if isfinite(value) else None for name, value in score.metrics.items()}
        reward = score.reward if isfinite(score.reward) else None
        return cls(digest=digest, reward=reward, metrics=metrics, fault=score.fault)

    def score(self) -> Score:
        metrics = {name: nan if value is None else value for name, value in self.metrics.items()}
        return Score(reward=nan if self.reward is None else self.reward, metrics=metrics, fault=self.fault)


class Scores(msgspec.Struct, frozen=True, tag="scores", tag_field="message"):
    """Scores in the order of the images."""

    scores: tuple[Scored, ...]


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="message"):
    """The scorer raised an error."""

    text: str


class Hangs(msgspec.Struct, frozen=True, tag="hangs", tag_field="message"):
    """The scorer did not return in time for a call with these images. The process ends after this answer."""

    text: str


Message = Ask | Scores | Failed | Hangs


def digest_of(image: Tensor, prompt: str) -> str:
    """Return the digest of an image and its prompt."""
    bits = image.detach().cpu().contiguous().view(torch.uint8).numpy()
    digest = blake2b(str((image.dtype, *image.shape)).encode(), digest_size=16)
    digest.update(bits.tobytes())
    digest.update(prompt.encode())
    return digest.hexdigest()


def send(connection: socket.socket, message: Message, images: Tensor | None = None) -> None:
    """Send a message. Raises OSError if the connection is gone."""
    blobs = {} if images is None else {"images": save({"images": images.contiguous()})}
    body = pack(msgspec.to_builtins(message), blobs)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket) -> tuple[Message, Tensor | None]:
    """Return the next message and its images. Raises OSError if the connection ends first."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    head, blobs = unpack(_exactly(connection, length))
    message: Message = msgspec.convert(head, type=Message)
    return message, load(blobs["images"])["images"] if "images" in blobs else None


def _exactly(connection: socket.socket, count: int) -> bytes:
    pieces: list[bytes] = []
    while count:
        piece = connection.recv(min(count, 1 << 20))
        if not piece:
            raise ConnectionResetError("the scoring process closed the connection")
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def socket_name(number: int) -> str:
    """Return the name of a scoring process's socket in its node's folder."""
    return f"scorer-{number}.sock"


def address_in(folder_number: int, name: str) -> str:
    """Return the address of a socket in the open folder with this file number.

    The address of a Unix socket has at most 107 characters, which a node's folder may exceed.
    """
    return str(Path("/proc/self/fd") / str(folder_number) / name)
