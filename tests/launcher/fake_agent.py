"""A node agent without an engine: it behaves like the agent, and "trains" by counting.

python tests/launcher/fake_agent.py node.json

It does no work that moves the run's clock, which therefore runs by the wall. It takes the lock, records its pid, starts
a child and reports ready. A trainer answers on the coordinator's port,
writes a progress line per iteration and continues from the number in the store. Received calls are in `calls.jsonl`.
In the environment: FAKE_SECONDS per iteration, FAKE_BEST score that is never exceeded, FAKE_TROUBLE = crash (exit 1 at
once) | crash-ready | deaf.
"""

import fcntl
import hmac
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.work_clock import WorkClock

spec = json.loads(Path(sys.argv[1]).read_text())
folder = Path(spec["folder"])
store = Path(unquote(urlparse(spec["store"]).path))
clock = WorkClock(
    path=Path(spec["clock"]["file"] or "/no/file"), origin_ms=spec["clock"]["origin_ms"], factor=spec["clock"]["factor"]
)
seconds = float(os.environ.get("FAKE_SECONDS", "0.05"))
trouble = os.environ.get("FAKE_TROUBLE", "")
stopping = threading.Event()
of_controller = hmac.new(spec["token"].encode(), b"controller", "sha256").hexdigest()
"""Token as in engine.node_spec.role_token, which takes a second to import."""


def score(iteration):
    return min(iteration / 100, float(os.environ.get("FAKE_BEST", "inf")))


def write(name, value):
    part = folder / (name + ".part")
    part.write_text(json.dumps(value))
    part.replace(folder / name)


class Coordinator(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        allowed = self.headers["Authorization"] == f"Bearer {of_controller}"
        with (folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps({"path": self.path, "body": json.loads(body), "allowed": allowed}) + "\n")
        self.send_response(200 if allowed else 401)
        self.end_headers()
        if self.path == "/stop":
            stopping.set()

    def log_message(self, *arguments):
        pass


class Server(HTTPServer):
    allow_reuse_address = True


class Reports:
    def __init__(self, lineage):
        (folder / "progress").mkdir(exist_ok=True)
        self.file = (folder / "progress" / "trainer.jsonl").open("a")
        self.lineage, self.seq = lineage, 0

    def report(self, kind, **event):
        head = {
            "run": spec["run"],
            "source": "trainer",
            "lineage": self.lineage,
            "seq": self.seq,
            "at_ms": clock.now_ms(),
        }
        self.file.write(json.dumps(head | {"kind": kind, "event": event}) + "\n")
        self.file.flush()
        self.seq += 1


def train():
    store.mkdir(parents=True, exist_ok=True)
    lineage = len(list(store.glob("start-*")))
    (store / f"start-{lineage}").touch()
    checkpoint = store / "iteration"
    iteration = int(checkpoint.read_text()) if checkpoint.exists() else 0
    reports = Reports(lineage)
    server = Server(("127.0.0.1", spec["coordinator_port"]), Coordinator)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    write("ready.json", {"at_ms": clock.now_ms(), "role": spec["role"], "hardware": "2 CPU cores (made up)"})
    reports.report("engine_started", iteration=iteration, config_digest="", devices="cpu", versions={})
    while iteration < spec["engine"]["iterations"]:
        if stopping.wait(seconds):
            reports.report("engine_finished", reason="stopped", iteration=iteration, text="")
            return
        done = {"reward_mean": iteration / 10, "reward_std": 0.1, "group_std_mean": 0.1, "explored": 0}
        rest = {"manifest_digest": "", "phase_ms": {}, "wall_seconds": seconds, "health": {}}
        # Like the engine: report before the state is durable, so that a kill in between loses no report.
        reports.report("iteration_done", iteration=iteration, **done, **rest)
        part = store / "iteration.part"
        part.write_text(str(iteration + 1))
        part.replace(checkpoint)
        iteration += 1
        reports.report("evaluated", iteration=iteration, metrics={"exact_match": score(iteration)}, prompts=8)
    reports.report("engine_finished", reason="iterations", iteration=iteration, text="")


def main():
    if trouble == "crash":
        print("no such model", flush=True)
        return 1
    lock = (folder / "agent.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("this node has an agent already")
        return 0
    started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    boot = next(float(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line[:5] == "btime")
    write("agent.json", {"pid": os.getpid(), "create_time": boot + started})
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    if trouble == "deaf":
        time.sleep(300)
    if spec["role"] == "trainer":
        train()
        return 0
    write("ready.json", {"at_ms": clock.now_ms(), "role": spec["role"], "hardware": "2 CPU cores (made up)"})
    if trouble == "crash-ready":
        return 1
    time.sleep(300)
    return 0


if __name__ == "__main__":
    os._exit(main())  # the child stays, like a worker whose agent died
