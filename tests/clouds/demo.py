"""`make fake-clouds-demo`: a run on spot on AWS and Google Cloud from launch to target, with preemptions and outages.

    python -m tests.clouds.demo --to FOLDER [--runtime local|ray]

The clouds are fakes that speak the real protocols (tests/fakes/clouds): no account is used and nothing is bought. The
steps are in story.py. It writes result.json, report.html and logs to FOLDER, and fails unless every claim holds.
"""

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.clouds import demo_reward
from tests.clouds.billed import check_bill
from tests.clouds.launched import SPOTRL, Launched
from tests.clouds.planted import below, plant, planted_in
from tests.clouds.story import JOB, RUN, Story, StoryLog, left_in_the_clouds
from tests.fakes.clouds.world import World, why_not

MINUTES = 45.0
"""Time limit for a story that hangs. On two idle cores it takes less than half of this."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("fake-clouds-demo"), help="folder for what it writes")
    parser.add_argument("--cache", type=Path, help="where the hosts' image is kept (default: the user's cache)")
    parser.add_argument("--runtime", choices=["local", "ray"], default="local")
    parser.add_argument("--target", type=float, default=0.7)
    parser.add_argument("--step-seconds", type=float, default=0.3)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"the fake clouds cannot be had here: {reason}", file=sys.stderr)
        return 2
    to = options.to.absolute()
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the world is stopped too
    log = StoryLog(out=sys.stdout)
    world = World(folder=to / "world", cache=options.cache)
    world.up()
    try:
        log("the fake clouds are up")
        return play(world, to, log, options)
    finally:
        world.down(keep=True)


def play(world: World, to: Path, log: StoryLog, options: argparse.Namespace) -> int:
    """Run launch, story, report and down; then compare the result with the claims."""
    run = Launched(world=world, name=RUN, home=world.folder / "home" / "state")
    log.began = time.monotonic()
    planted = plant(world)
    until = log.began + options.minutes * 60
    is_on_spot = options.runtime != "ray"
    story = Story(run=run, log=log, until=until, planted=planted.values(), is_on_spot=is_on_spot)
    code, problems = _launch_and_play(story, to, options)
    for name, arguments in (("report", ["report", RUN]), ("events", ["events", RUN])):
        done = run.spotrl(*arguments, check=False)
        (to / f"{name}.txt").write_text(done.stdout + done.stderr)
    down = run.spotrl("down", RUN, check=False)
    run.spotrl("report", RUN, "--focus", to / "focus.csv", check=False)
    bill = _bill(run, to)
    log("spotrl down", (down.stdout + down.stderr).strip())
    seconds = time.monotonic() - log.began
    left = left_in_the_clouds(world)
    secrets_found = story.found + below(world.folder / "home", planted.values(), but=planted_in(world))
    secrets_found += below(to, planted.values(), but=[world.folder])
    keep = shutil.ignore_patterns("bundles", "spec.json", "ssh.key")
    shutil.copytree(run.home / "runs" / RUN, to / "run", dirs_exist_ok=True, ignore=keep)

    file = to / "result.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    result |= {
        "leftovers": left,
        "bill": bill,
        "secrets_found": secrets_found,
        "made_by": list(run.made_by()),
        "moments_s": log.moments,
        "seconds": round(seconds, 1),
        "clouds_are": "fakes that speak the real protocols; nothing was bought",
    }
    claims = {
        "the target was reached": code == 0 and result.get("target", {}).get("reached", False),
        "down left nothing": down.returncode == 0,
        "the clouds' bills are matched and explained": "differences" in bill,
        f"within {options.minutes:g} minutes": seconds <= options.minutes * 60,
        **_claims(result, run.batch_size(), (to / "report.txt").read_text()),
        **({"a node that was up trained after each loss of the trainer": _losses(result)} if is_on_spot else {}),
    }
    file.write_text(json.dumps(result | {"claims": claims}, indent=2) + "\n")
    problems += [f"not so: {claim}" for claim, holds in claims.items() if not holds]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(
        f"{'FAILED' if problems else 'Done'} after {seconds / 60:.1f} minutes; "
        f"see {to}/result.json, report.html, launch.log"
    )
    return 1 if problems else 0


def _bill(run: Launched, to: Path) -> dict[str, Any]:
    """Return the clouds' bills beside what was metered, or what is wrong with them."""
    try:
        bill = check_bill(run, to / "bill")
    except (AssertionError, RuntimeError, LookupError) as error:
        print(f"the bills: {error}", file=sys.stderr)
        return {"error": str(error)}
    (to / "report-billed.txt").write_text(run.spotrl("report", RUN, check=False).stdout)
    return bill


def _launch_and_play(story: Story, to: Path, options: argparse.Namespace) -> tuple[int | None, list[str]]:
    """Launch like a user and play the story. Return the launch's exit code and the error of the story."""
    job = to / "job" / "demo.yaml"
    job.parent.mkdir()
    shutil.copyfile(Path(demo_reward.__file__), job.parent / "demo_reward.py")
    settings = {"target": options.target, "runtime": options.runtime, "step_seconds": options.step_seconds}
    bought = {"use_spot": "true", "spot": "only"} if story.is_on_spot else {"use_spot": "false", "spot": "auto"}
    job.write_text(JOB.format(run=RUN, **bought, **settings))
    refreshed = story.run.spotrl("catalog", "refresh")
    (to / "prices.txt").write_text(refreshed.stdout)
    story.log("both clouds have said their prices", refreshed.stdout.strip().splitlines()[-1])
    launch = [*SPOTRL, "launch", job, "-y", "--on-exit", "keep", "--result", to / "result.json"]
    with (to / "launch.log").open("w") as log:
        process = story.run.world.start(
            [*launch, "--html", to / "report.html"],
            env=story.run.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        story.log("spotrl launch")
        try:
            _wait_for_the_run(story.run, process, story.until)
            story.play()
            story.log.waits("the target is reached")
            code = _wait_for_the_end(story, process)
            story.log("launch has ended", f"exit code {code}")
        except (Exception, KeyboardInterrupt) as error:
            return process.poll(), [f"{type(error).__name__}: {error}"]
    return code, []


def _wait_for_the_end(story: Story, process: subprocess.Popen[str]) -> int:
    """Return the exit code of the launch. Raises TimeoutExpired."""
    while True:
        try:
            return process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            if time.monotonic() > story.until:
                raise
            story.open_target()  # for a node that came late


def _claims(result: Mapping[str, Any], batch_size: int, report: str) -> dict[str, bool]:
    """Return the claims of the demonstration and whether each holds."""
    batches, left = result["made_by"], result["leftovers"]
    return {
        "every batch is whole": bool(batches) and all(sum(nodes.values()) == batch_size for nodes in batches),
        "three hosts made one batch together": any(len([n for n in nodes.values() if n]) >= 3 for nodes in batches),
        "both clouds were paid": all(result.get("clouds", {}).get(cloud) for cloud in ("aws", "gcp")),
        "the report shows both clouds": "aws us-" in report and "gcp us-" in report,
        "no secret of the client was found": not result["secrets_found"],
        "nothing is left in the clouds": not (left["instances"] or left["disks"] or left["others"]),
        "no process or namespace is left": not (left["processes"] or left["namespaces"]),
    }


def _losses(result: Mapping[str, Any]) -> bool:
    """Return whether the trainer was lost with and without notice, and a node that was up took its role each time."""
    lost = [one for one in result.get("preemptions", []) if one["role"] == "trainer"]
    return {one["notice"] for one in lost if one["recovered_by"] == "a promotion"} == {True, False}


def _wait_for_the_run(run: Launched, process: subprocess.Popen[str], until: float) -> None:
    """Wait until the run exists; `launch` makes its checks before that."""
    while True:
        with contextlib.suppress(LookupError):
            run.view()
            return
        if process.poll() is not None or time.monotonic() > until:
            how = "still checks" if process.poll() is None else f"ended with code {process.poll()}"
            sys.exit(f"there is no run: launch {how}; see launch.log")
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
