"""Print in one line whether a run improved its model. The last step of `make quickstart`.

    python -m launcher.report.verdict EXIT_CODE result.json report.html

EXIT_CODE is the exit code of `spotrl launch`. The program exits with 0 if the run ended by its target, its iterations,
its budget or its deadline, and if the run reached its target or raised the held-out score by at least `ENOUGH`.
Otherwise the program exits with 1.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.exit_codes import ExitCode
from launcher.report.result import METRIC

ENOUGH = 0.10
"""Rise of the held-out score not explained by noise: 512 prompts have a standard error of about .02."""

ENDED = (ExitCode.OK, ExitCode.STOPPED_BY_BUDGET, ExitCode.DEADLINE_MISSED)
"""Exit codes of a launch whose run ended and left nothing running."""


def verdict(exit_code: int, result: dict[str, Any] | None, report: str) -> tuple[bool, str]:
    """Return True if the run succeeded, and the line to print. `result`: the content of result.json, or None."""
    if result is None or exit_code not in ENDED:
        return (
            False,
            f"The quickstart failed: `spotrl launch` ended with exit code {exit_code}. Its words above say why.",
        )
    target, score = result["target"], result[METRIC]
    before, after = score["before"], score["after"]
    stopped = {
        ExitCode.STOPPED_BY_BUDGET: ", before its budget was used up",
        ExitCode.DEADLINE_MISSED: ", before its deadline",
    }.get(ExitCode(exit_code), "")
    reached = f"The target of {target['metric']} {target['value']:.3f} was reached" if target["reached"] else ""
    if before is None or after is None:
        missing = "The run ended before its score was measured twice"
        return bool(reached), f"{reached or missing}. The report is in {report}."
    late = exit_code == ExitCode.DEADLINE_MISSED
    moved = f"Held-out {METRIC} went from {before:.3f} to {after:.3f}{'' if reached and late else stopped}"
    lost = _recovered(result["preemptions"])
    if reached:
        return True, f"{reached}{', after the deadline' if late else ''}. {moved}.{lost} The report is in {report}."
    if after - before >= ENOUGH:
        return True, f"{moved}; the target was not reached.{lost} The report is in {report}."
    return False, f"{moved}: less than {ENOUGH:.2f} more. The report is in {report}."


def _recovered(preemptions: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about the preemptions; empty if there was none."""
    trainers = [one for one in preemptions if one["role"] == "trainer"]
    others = [one for one in preemptions if one["role"] != "trainer"]
    promoted = sum(one["recovered_by"] == "a promotion" for one in trainers)
    parts = [f"the trainer {_times(len(trainers))}"] if trainers else []
    if promoted:
        parts[0] += f" (a node that was up took its role {_times(promoted)})"
    if others:
        parts.append(f"a rollout node {_times(len(others))}")
    again = sum(one["recovered_by"] is not None for one in preemptions)
    replaced = "each was replaced" if again == len(preemptions) else f"{again} of {len(preemptions)} were replaced"
    return f" Preempted: {', '.join(parts)}; {replaced}." if parts else ""


def _times(count: int) -> str:
    return "once" if count == 1 else "twice" if count == 2 else f"{count} times"


def main(words: list[str]) -> int:
    exit_code, result, report = words
    path = Path(result)
    good, line = verdict(int(exit_code), json.loads(path.read_text()) if path.exists() else None, report)
    print(line)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
