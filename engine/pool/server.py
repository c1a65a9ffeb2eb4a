"""A scoring process of a node: it takes images from the node's workers, joins them to batches, and scores them.

    connection threads -> waiting requests -> one thread takes a batch -> reward -> an answer for each request

The process keeps no result. A worker asks again if the process dies. A request whose worker is gone is not scored. A
batch that takes longer than `timeout_seconds` ends the process: a scorer that hangs would answer no worker, and the
node's agent starts a new process. Before, the workers of the batch learn that it hung.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from engine.pool.messages import (
    ANSWER_SECONDS,
    Ask,
    Failed,
    Hangs,
    Scored,
    Scores,
    address_in,
    digest_of,
    receive,
    send,
    socket_name,
)
from engine.rewards.reward import Reward, RewardError

EXIT_SCORER_HANGS = 77
"""Exit code of a process whose scorer did not return in time. The node's agent starts the process again."""

LOOK_SECONDS = 0.5
"""Interval of looks at the age of the current batch."""

ERROR_CHARACTERS = 500


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """Images of one worker that wait for their scores. images: [B, C, H, W], or [B, C, F, H, W] for videos."""

    images: Tensor
    prompts: tuple[str, ...]
    connection: socket.socket
    answer: "Future[Scores | Failed | Hangs]" = field(default_factory=Future)
    alone: bool = False
    """The images are scored in a call of their own."""

    def joins(self, request: "Request") -> bool:
        """Return True if the images of both fit into one tensor, and neither is to be scored alone."""
        if self.alone or request.alone:
            return False
        return self.images.shape[1:] == request.images.shape[1:] and self.images.dtype == request.images.dtype

    def is_abandoned(self) -> bool:
        """Return True if the worker closed its connection."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


class ScoringProcess:
    """Scores the images of a node's workers. `batch`: most images in one call of the reward. `name`: of the reward."""

    def __init__(self, reward: Reward, *, batch: int, timeout_seconds: float, name: str = "") -> None:
        self._reward, self._batch, self._timeout_seconds, self._name = reward, batch, timeout_seconds, name
        self._waiting: SimpleQueue[Request] = SimpleQueue()
        self._next: Request | None = None
        """A request that did not fit into the last batch."""
        self._begun: float | None = None
        """Start of the current batch (`time.monotonic`)."""
        self._current: Sequence[Request] = ()
        """The requests of the current batch."""

    def serve(self, listener: socket.socket) -> None:
        """Score until the process ends."""
        for name, run in (("score", self._score_all), ("watch", self._watch)):
            threading.Thread(target=run, name=name, daemon=True).start()
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        """Answer the requests of one connection, one after another."""
        with connection:
            while True:
                try:
                    message, images = receive(connection)
                except OSError:
                    return
                assert isinstance(message, Ask)
                assert images is not None
                request = Request(images=images, prompts=message.prompts, connection=connection, alone=message.alone)
                self._waiting.put(request)
                try:
                    send(connection, request.answer.result())
                except OSError:
                    return

    def _score_all(self) -> None:
        while True:
            batch = self._take()
            self._current, self._begun = batch, time.monotonic()
            for request, answer in zip(batch, self.scores_of(batch), strict=True):
                request.answer.set_result(answer)
            self._begun, self._current = None, ()

    def _take(self) -> list[Request]:
        """Wait for a request, and return it with the waiting requests that fit into the same batch."""
        first, self._next = self._next or self._waiting.get(), None
        requests, count = [first], len(first.prompts)
        while count < self._batch:
            try:
                more = self._waiting.get_nowait()
            except Empty:
                break
            if not more.joins(first) or count + len(more.prompts) > self._batch:
                self._next = more
                break
            requests.append(more)
            count += len(more.prompts)
        return requests

    def scores_of(self, requests: Sequence[Request]) -> list[Scores | Failed]:
        """Return an answer for each request. An error fails only the request that causes it."""
        pending = [request for request in requests if not request.is_abandoned()]
        if not pending:
            return [Failed(text="the worker is gone")] * len(requests)
        images = torch.cat([request.images for request in pending])
        prompts = [prompt for request in pending for prompt in request.prompts]
        try:
            scored = iter(self._score(images, prompts))
        except Exception as error:  # a user's reward may raise anything; the worker reports the fault
            if len(requests) > 1:
                return [self.scores_of([request])[0] for request in requests]
            return [Failed(text=f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS])]
        by_request = {id(request): tuple(next(scored) for _ in request.prompts) for request in pending}
        return [
            Scores(scores=by_request[id(request)]) if id(request) in by_request else Failed(text="the worker is gone")
            for request in requests
        ]

    def _score(self, images: Tensor, prompts: Sequence[str]) -> list[Scored]:
        """Score images in calls of at most `batch` images. Raises RewardError for a wrong number of scores."""
        scored: list[Scored] = []
        for start in range(0, len(prompts), self._batch):
            part, words = images[start : start + self._batch], prompts[start : start + self._batch]
            scores = list(self._reward(part, words))
            if len(scores) != len(words):
                raise RewardError(f"the reward returned {len(scores)} scores for {len(words)} images; return one each")
            for image, prompt, score in zip(part, words, scores, strict=True):
                scored.append(Scored.of(digest_of(image, prompt), score))
        return scored

    def _watch(self) -> None:
        """End the process if a batch takes too long."""
        while True:
            time.sleep(LOOK_SECONDS)
            begun = self._begun
            if begun is not None and time.monotonic() - begun > self._timeout_seconds:
                text = f"reward {self._name} gave no score in {self._timeout_seconds:g} s (reward.pool.timeout_seconds)"
                print(f"{text}; this process ends, and a new one starts", flush=True)
                for request in self._current:
                    with contextlib.suppress(InvalidStateError):  # the batch has ended just now
                        request.answer.set_result(Hangs(text=text))
                time.sleep(ANSWER_SECONDS)
                os._exit(EXIT_SCORER_HANGS)


def listen(folder: Path, number: int) -> socket.socket:
    """Return a listening socket in the node's folder. Replaces the socket of an earlier process."""
    name = socket_name(number)
    (folder / name).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder_number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        listener.bind(address_in(folder_number, name))
    finally:
        os.close(folder_number)
    (folder / name).chmod(0o600)
    listener.listen()
    return listener
