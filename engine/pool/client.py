"""A worker's reward when scorers have processes of their own (`reward.placed: pool`).

An ask ends in one of these ways:

    scores for exactly these images        returned
    no process listens                     wait: the node's agent starts each process again, and gives the node up if
                                           a process cannot start
    the process ends before its answer,
    or gives scores for other images       ask the next process, at most `tries` times; then the images have no score
                                           (NaN), and the trainer skips their groups and counts the skips
    the scorer did not return in time      ask for each image alone; an image for which it does not return again has no
                                           score, and neither have the others of its prompt
    the scorer raised an error             RewardError: the worker reports a fault of the lease

A frozen process is killed by the node's agent, which ends the connection. No time limit is needed here: a scorer that
hangs ends its process (server.py), and heartbeats of the worker keep its leases meanwhile.
"""

import itertools
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import nan
from pathlib import Path

from torch import Tensor

from engine.pool.messages import (
    ANSWER_SECONDS,
    Ask,
    Failed,
    Hangs,
    Scores,
    address_in,
    digest_of,
    receive,
    send,
    socket_name,
)
from engine.protocol.request import Score
from engine.rewards.reward import RewardError

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 2.0
"""Pauses between two tries. Each pause is twice the pause before."""


HANGS_IN_A_ROW = 2
"""Images in a row for which the scorer does not return alone, after which the others of an ask are given up too."""


class ScorerHung(Exception):
    """The scorer did not return in time for a call with these images."""


class WrongScores(Exception):
    """An answer with scores of other images than the images sent."""


class PoolReward:
    """Asks the scoring processes in a node's folder. Threads may share a pool: each ask has its own connection."""

    def __init__(self, folder: Path, *, processes: int, tries: int, first: int = 0) -> None:
        """Create the pool. `first`: number of the process that is asked first, so workers start with different ones."""
        self._folder, self._processes, self._tries = folder, processes, tries
        self._turn = itertools.count(first)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> list[Score]:
        """Score images [B, C, H, W] or [B, C, F, H, W]. Raises RewardError if the scorer raised an error.

        All processes share the images: the last lease of a batch has the pool for itself, and the trainer waits for it.
        """
        first, size = next(self._turn), -(-len(prompts) // self._processes)
        starts = range(0, len(prompts), size)
        with ThreadPoolExecutor(len(starts), thread_name_prefix="ask-pool") as threads:
            parts = threads.map(
                lambda start: self._part(
                    images[start : start + size], prompts[start : start + size], first + start // size
                ),
                starts,
            )
            return [score for part in parts for score in part]

    def _part(self, images: Tensor, prompts: Sequence[str], first: int) -> list[Score]:
        """Score some images. `first`: number of the process that is asked first, modulo the number of processes."""
        try:
            return self._asked(images, prompts, first, alone=False)
        except ScorerHung as error:
            print(f"{error}; {len(prompts)} images are scored again one by one", flush=True)
        scores, hung, in_a_row, fault = [], set(), 0, ""
        for image, prompt in zip(images, prompts, strict=True):
            if prompt in hung or in_a_row >= HANGS_IN_A_ROW:
                scores.append(Score(reward=nan, metrics={}, fault=fault))
                continue
            try:
                scores += self._asked(image[None], [prompt], first, alone=True)
                in_a_row = 0
            except ScorerHung as error:
                fault = f"{error}, for {prompt!r} alone"
                hung.add(prompt)
                in_a_row += 1
                scores.append(Score(reward=nan, metrics={}, fault=fault))
        return scores

    def _asked(self, images: Tensor, prompts: Sequence[str], first: int, *, alone: bool) -> list[Score]:
        """Score some images in one call. `alone`: in a call without images of other workers. Raises ScorerHung."""
        digests = [digest_of(image, prompt) for image, prompt in zip(images, prompts, strict=True)]
        pause, failures, turn = FIRST_PAUSE_SECONDS, 0, itertools.count(first)
        fault = ""
        while failures < self._tries:
            number = next(turn) % self._processes
            try:
                connection = self._connect(number)
            except OSError:  # the process is starting, or starts again
                connection = None
            if connection is not None:
                try:
                    with connection:
                        return self._ask(connection, Ask(prompts=tuple(prompts), alone=alone), images, digests)
                except (OSError, WrongScores) as error:
                    failures += 1
                    fault = f"scorer-{number}: try {failures} of {self._tries}: {error}"
                    print(fault, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        print(f"{len(prompts)} images have no score, and their groups are skipped", flush=True)
        return [Score(reward=nan, metrics={}, fault=fault) for _ in prompts]

    def _ask(self, connection: socket.socket, ask: Ask, images: Tensor, digests: Sequence[str]) -> list[Score]:
        """Return the scores. Raises OSError, WrongScores, ScorerHung and RewardError."""
        send(connection, ask, images)
        answer, _ = receive(connection)
        match answer:
            case Scores(scores=scores):
                if [scored.digest for scored in scores] != list(digests):
                    raise WrongScores("the answer has scores of other images")
                return [scored.score() for scored in scores]
            case Failed(text=text):
                raise RewardError(text)
            case Hangs(text=text):
                time.sleep(2 * ANSWER_SECONDS)  # the process ends, and would take no further ask
                raise ScorerHung(text)
            case Ask():
                raise WrongScores("the answer is a request")

    def _connect(self, number: int) -> socket.socket:
        """Return a connection to a process. Raises OSError if no process listens."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder_number = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            connection.connect(address_in(folder_number, socket_name(number)))
        except OSError:
            connection.close()
            raise
        finally:
            os.close(folder_number)
        return connection
