"""Image sharing of spot workers, read from their step traces (`runtime.trace_steps`), and signals to them."""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engine.fleet import newest_pid

Victims = Mapping[str, tuple[int, signal.Signals]]
"""The place of one worker and the signal that it gets, by node."""


class Sharing:
    """Nodes of one run; all workers of a node share images."""

    def __init__(self, nodes: Path, *, workers: int) -> None:
        """`nodes`: the folder with the nodes' folders. `workers`: number of workers of every spot node."""
        self._nodes, self._workers = nodes, workers

    def hurt(self, victims: Victims) -> float:
        """Signal all of them at once. Return the seconds until each node shares again with the restarted worker."""
        began_ns = time.time_ns()
        for node, (place, number) in victims.items():
            os.kill(newest_pid(self._nodes / node / "logs" / f"worker-{place}.log"), number)
        return self.wait({node: place for node, (place, _) in victims.items()}, began_ns)

    def wait(self, joiners: Mapping[str, int], began_ns: int = 0, *, seconds: float = 240.0) -> float:
        """Wait until the worker in this place of each node joined a new group that has made a step."""
        until = time.monotonic() + seconds
        while not all(self._shares(node, place, began_ns) for node, place in joiners.items()):
            if time.monotonic() > until:
                raise TimeoutError(f"{joiners} do not share after {seconds:.0f} s; logs:\n{self._logs()}")
            time.sleep(0.1)
        return (time.time_ns() - began_ns) / 1e9

    def _shares(self, node: str, place: int, began_ns: int) -> bool:
        orders = [one["at_ns"] for one in self._trace(node, place) if "epoch" in one and one["degree"] == self._workers]
        joined_ns = next((at_ns for at_ns in orders if at_ns > began_ns), None)
        if joined_ns is None:
            return False
        steps = [one for other in range(self._workers) for one in self._trace(node, other) if "step" in one]
        return any(step["degree"] == self._workers and step["at_ns"] > joined_ns for step in steps)

    def _trace(self, node: str, place: int) -> list[dict[str, Any]]:
        path = self._nodes / node / "traces" / f"worker-{place}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def _logs(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in sorted(self._nodes.glob("*/logs/*.log")))
