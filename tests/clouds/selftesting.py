"""`spotrl selftest` as a process of a user on the fake clouds, and the faults that are planted in its steps.

Several selftests run at the same time in one world. Each has its own home, name and folder in the bucket, and a fault
of a cloud is planted for the instances of one run.
"""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3

from launcher.clouds.selftest_policies import FIS_ROLE, fis_role_policy, fis_trust
from launcher.selftest.steps import Step
from tests.clouds.launched import BUCKETS, SPOTRL, Launched
from tests.clouds.story import SHARED_ROLE
from tests.fakes.clouds import addresses
from tests.fakes.clouds.world import World

AT_ONCE = int(os.environ.get("SELFTESTS_AT_ONCE", "3"))
"""Selftests that run at the same time. Each has two hosts that import torch: two cores are busy with three."""

NOTICE_SECONDS = 10.0
"""The clouds give 120 s and 30 s; the run's drain needs a few."""

LINE_SECONDS = 1800.0
"""Longest wait for a line of a selftest, on two cores that others use too."""

NODE_FOLDER = "/home/ubuntu/spotrl/node"

KILL = f"""
pid() {{ sed -n 's/^--- .*, pid //p' {NODE_FOLDER}/logs/$1.log 2>/dev/null | tail -n 1; }}
last=
while :; do
  now=$(pid "$1")
  if [ -n "$now" ] && [ "$now" != "$last" ]; then kill -KILL "$now" && last=$now; fi
  sleep 0.1
done
"""
"""Program for a host: kill a process of the node, and each successor of it as soon as it has begun its log."""

KILL_AT_NOTICE = f"""
until [ -e {NODE_FOLDER}/notice.json ]; do sleep 0.02; done
kill -KILL $(sed -n 's/^--- .*, pid //p' {NODE_FOLDER}/logs/$1.log | tail -n 1)
"""
"""Program for a host: kill a process of the node when the cloud's notice has come, before it can hand over its work."""

WIPE = """
import sys, time
import obstore
from launcher.storage.stores import open_store, paths_in

store, until = open_store(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while True:
    for path in paths_in(store, "checkpoints/"):
        obstore.delete(store, path)
    if time.monotonic() > until:
        break
    time.sleep(0.2)
"""
"""Program for the client: the bucket loses its checkpoints, again and again for some seconds."""


def make_role() -> None:
    """Make the role for the Fault Injection Service, as an administrator does once."""
    iam = boto3.client("iam")
    if FIS_ROLE not in [role["RoleName"] for role in iam.list_roles()["Roles"]]:
        iam.create_role(RoleName=FIS_ROLE, AssumeRolePolicyDocument=json.dumps(fis_trust()))
    iam.put_role_policy(RoleName=FIS_ROLE, PolicyName="interrupt", PolicyDocument=json.dumps(fis_role_policy()))


def priced_home(world: World, name: str = "st-prices") -> Path:
    """Make a home whose ledger has the prices of now."""
    home = world.folder / "home" / name
    Launched(world=world, name=name, home=home).spotrl("catalog", "refresh")
    return home


@dataclass(kw_only=True)
class Selftest:
    """One `spotrl selftest` on one cloud. `settings`: fields of the job. `minutes`: longest times of steps."""

    world: World
    cloud: str
    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    minutes: Mapping[Step, float] = field(default_factory=dict)
    gpu: str = ""
    prices: Path | None = None
    """Home whose ledger has the prices, to copy (`priced_home`)."""
    home: Path = Path()
    """Default: a home of its own."""
    launched: Launched = field(init=False)
    process: subprocess.Popen[str] | None = None
    began: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.home == Path():
            self.home = self.world.folder / "home" / self.name
        if self.prices is not None:
            shutil.copytree(self.prices, self.home)
        self.launched = Launched(world=self.world, name=self.name, home=self.home)

    # --- the command

    def words(self) -> list[str]:
        fast = {
            "ssh_from": f"{addresses.CLIENT}/32",
            "runtime.device": "cpu",
            "runtime.step_seconds": "0.3",
            "recovery.launches_per_minute": "60",
        }
        words = ["selftest", "--infra", self.cloud, "--name", self.name, "--store", BUCKETS[self.cloud], "-y", "--json"]
        words += ["--to", str(self.file("outcome.json"))]
        for key, value in (fast | dict(self.settings)).items():
            words += ["--set", f"{key}={value}"]
        words += ["--gpu", self.gpu] if self.gpu else []
        for step, minutes in self.minutes.items():
            words += ["--minutes", f"{step.value}={minutes}"]
        return words

    def start(self) -> None:
        """Start the command. Its lines go to `NAME.log` in its home, its JSON to `NAME.json`."""
        self.began = time.monotonic()
        with self.file("log").open("w") as log, self.file("json").open("w") as answer:
            self.process = self.world.start(
                [*SPOTRL, *self.words()],
                env=self.launched.environment,
                stdout=answer,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def ended(self) -> int:
        """Wait for the end of the command, and return its exit status."""
        assert self.process is not None
        code = self.process.wait(timeout=LINE_SECONDS)
        self.seconds = time.monotonic() - self.began
        return code

    def give_up(self) -> None:
        """End the command and its run, whatever became of the test."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.world.clear(run=self.name)
        if self.has_run() and self.left():
            self.down()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    # --- what it says

    def file(self, kind: str) -> Path:
        return self.home / f"{self.name}.{kind}"

    def log(self) -> str:
        return self.file("log").read_text()

    def outcome(self) -> dict[str, Any]:
        """Return the file that a user sends back."""
        return dict(json.loads(self.file("outcome.json").read_text()))

    def answer(self) -> dict[str, Any]:
        """Return the JSON that the command printed."""
        return dict(json.loads(self.file("json").read_text().splitlines()[-1]))

    def says(self, step: Step, text: str) -> None:
        """Wait until the command has said this in a step. Raises AssertionError if it ends before."""
        line = re.compile(rf"^\[ *[^\]]+\] {step.value} +{re.escape(text)}", re.MULTILINE)
        self.until(f"{step.value}: {text}", lambda: line.search(self.log()))

    def until(self, what: str, holds: Callable[[], object]) -> None:
        """Wait for a condition while the command runs. Raises AssertionError if it ends before, or after too long."""
        assert self.process is not None
        until = time.monotonic() + LINE_SECONDS
        while not holds():
            ends = self.log()[-2000:]
            assert self.process.poll() is None, f"{self.name} ended before: {what}\n{ends}"
            assert time.monotonic() < until, f"{self.name}: not within {LINE_SECONDS:.0f} s: {what}\n{ends}"
            time.sleep(0.1)

    def has_run(self) -> bool:
        try:
            self.launched.view()
        except LookupError:
            return False
        return True

    # --- what it leaves

    def left(self) -> dict[str, int]:
        """Count what the clouds have of this run, by their own inventory."""
        named = (one for one in self.world.inventory() if one["id"] != SHARED_ROLE and self.name in json.dumps(one))
        return dict(Counter(one["kind"] for one in named))

    def down(self) -> int:
        return self.launched.spotrl("down", self.name, check=False).returncode

    # --- faults

    def fault(self, kind: str, **more: str) -> None:
        """Plant a fault of the cloud for the instances of this run."""
        self.world.fault(kind, self.cloud, run=self.name, **more)

    def denied(self, aws: str, gcp: str) -> None:
        """Take a permission away for the instances of this run."""
        self.fault("denied", code=aws if self.cloud == "aws" else f"compute.instances.{gcp}")

    def node(self, role: str) -> str:
        """Return the first node of a role, once it works."""
        self.until(f"a {role} node works", lambda: self.has_run() and self.launched.ready(role))
        return self.launched.ready(role)[0].name

    def on(self, node: str, program: str, process: str) -> None:
        """Start a program on a host, which ends with the host."""
        begin = '(setsid sh -c "$1" sh "$2" > /dev/null 2>&1 &)'
        self.world.on(node, ["sh", "-c", begin, "sh", program, process], root=True)

    def wipe(self, seconds: float) -> "subprocess.Popen[str]":
        """Start to delete the checkpoints of this run from the bucket, for some seconds."""
        url = f"{BUCKETS[self.cloud]}/{self.name}"
        words = [sys.executable, "-c", WIPE, url, str(seconds)]
        return self.world.start(words, env=self.launched.environment, stdin=subprocess.DEVNULL)

    def change_a_bill(self) -> None:
        """Add a tenth of a cent to a closed stretch of the ledger."""
        with sqlite3.connect(self.home / "ledger.sqlite", timeout=30) as connection:
            changed = connection.execute(
                "UPDATE billing_interval SET micro_usd = micro_usd + 1000"
                " WHERE id = (SELECT min(id) FROM billing_interval WHERE micro_usd > 0)"
            )
            assert changed.rowcount == 1
        connection.close()
