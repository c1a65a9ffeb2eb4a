"""The world's own process: both clouds, their hosts and the router, and a socket for queries and orders of tests.

It is the first process of a process namespace: when it ends for any reason, the kernel ends every host.
One loop keeps hosts and rules in line with the clouds: it starts hosts of running instances and ends the others.

python -m tests.fakes.clouds.server FOLDER IMAGE WHEELS [attached]
"""

import json
import os
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.fakes.clouds import addresses, aws, google, prices
from tests.fakes.clouds.faults import Faults
from tests.fakes.clouds.gce import Gce
from tests.fakes.clouds.gcs import Gcs
from tests.fakes.clouds.hosts import Hosts, processes_of
from tests.fakes.clouds.image import Image
from tests.fakes.clouds.network import Router

PACE_S = 0.1
BUCKETS = ("spotrl-runs",)
FAR_BUCKETS = {"spotrl-far": "eu-central-1"}
"""S3 buckets outside us-east-1, in a region without instances."""


class Face:
    """The metadata of one instance, read from its cloud."""

    def __init__(self, cloud: aws.Aws | Gce, instance_id: str) -> None:
        self.cloud, self._of, self._machine = cloud.cloud, cloud, instance_id

    def paths(self) -> Any:
        return self._of.paths(self._machine)


class Server:
    def __init__(self, folder: Path, image: Image) -> None:
        self.folder = folder
        self.log = (folder / "log").open("a", buffering=1)
        self.faults = Faults()
        pool = addresses.Pool()
        self.router = Router()
        self.router.start()
        self.market = prices.open_market()
        self.aws = aws.Aws(self.faults, pool, self.market.url, self.say)
        self.gce = Gce(self.faults, pool, self._prices, self.say)
        self.gcs = Gcs(self.faults, buckets={name: {} for name in BUCKETS})
        self.aws.serve()
        google.serve(self.gce, self.gcs, folder, self.say, self._public_of)
        self.aws.furnish(BUCKETS, FAR_BUCKETS)
        prices.write_catalog(folder / "home", aws.AMI, aws.zone_ids())
        self.hosts = Hosts(
            folder=folder / "hosts",
            image=image,
            router=self.router,
            face=lambda instance_id: Face(self.gce if instance_id.isdigit() else self.aws, instance_id),
            certificate=folder / "ca.pem",
            say=self.say,
        )
        self.held: list[int] = []
        self.client = self.router.client
        self.furnished = {_key(thing) for thing in self._things()}

    def say(self, text: str) -> None:
        self.log.write(f"{time.time():.3f} {text}\n")

    def _public_of(self, address: str) -> str:
        hosts = list(self.hosts.hosts.values())
        return next((host.spec.public for host in hosts if host.spec.private == address), self.router.client)

    def _prices(self, path: str, query: str, body: bytes) -> bytes:
        self.market.now_ms = int(time.time() * 1000)
        message = Request(f"{self.market.url}{path}?{query}", data=body or None, method="POST" if body else "GET")
        with urlopen(message, timeout=30) as answer:
            return bytes(answer.read())

    def keep(self) -> None:
        """Run the loop; it never returns."""
        while True:
            try:
                self.market.now_ms = int(time.time() * 1000)
                self._pass()
            except Exception:
                self.say(traceback.format_exc())
                time.sleep(1)
            time.sleep(PACE_S)

    def _pass(self) -> None:
        if self.client != self.router.client:
            self.router.move(self.client, self.hosts.ports().values())
        for host_id, host in list(self.hosts.hosts.items()):
            if host.process.poll() is not None:
                (self.gce if host_id.isdigit() else self.aws).powered_off(host_id)
        want = {**self.aws.machines(), **self.gce.machines()}
        for host_id in [host_id for host_id in self.hosts.hosts if host_id not in want]:
            self.hosts.end(host_id)
        for host_id, spec in want.items():
            if host_id in self.hosts.hosts:
                self.hosts.hosts[host_id].spec = spec
            else:
                self.hosts.boot(spec)
                self._remember(host_id)
        self.router.apply(self.hosts.ports())

    def _remember(self, host_id: str) -> None:
        """Record a host's process namespace: a process found in it later has survived the host.

        The namespace is held open, so that the kernel does not give its number to another one.
        """
        path = f"/proc/{self.hosts.hosts[host_id].first}/ns/pid"
        self.held.append(os.open(path, os.O_RDONLY))
        with (self.folder / "namespaces").open("a") as file:
            file.write(json.dumps({"host": host_id, "pid": os.readlink(path)}) + "\n")

    # --- queries and orders of tests

    def find(self, node: str) -> str:
        """Return the instance that a test refers to by id, name or label."""
        live = {**self.aws.machines(), **self.gce.machines()}
        for fits in (lambda text: text == node, lambda text: text.startswith(f"{node}-")):
            for host_id, spec in live.items():
                if any(fits(text) for text in (host_id, spec.name, *(value for _, value in spec.labels))):
                    return host_id
        raise LookupError(f"no machine is called {node}; there are {sorted(spec.name for spec in live.values())}")

    def reclaim(self, node: str, seconds: float = 0, notice: bool = False) -> str:
        instance_id = self.find(node)
        self.say(f"reclaim {instance_id} in {seconds} s, {'with' if notice else 'without'} notice")
        (self.gce if instance_id.isdigit() else self.aws).reclaim(instance_id, seconds, notice)
        return instance_id

    def rebalance(self, node: str) -> str:
        instance_id = self.find(node)
        self.aws.rebalance(instance_id)
        return instance_id

    def freeze(self, node: str) -> str:
        instance_id = self.find(node)
        self.hosts.freeze(instance_id)
        return instance_id

    def thaw(self, node: str) -> str:
        instance_id = self.find(node)
        self.hosts.thaw(instance_id)
        return instance_id

    def unplug(self, node: str) -> str:
        """Unplug the host: it keeps running without a network."""
        instance_id = self.find(node)
        self.router.cut(self.hosts.hosts[instance_id].link)
        return instance_id

    def part(self, node: str, other: str) -> None:
        """Let no packet pass between a host and another: a host, `client`, or `apis` (the bucket is one of them)."""
        named = {"client": self.client, "apis": addresses.API}
        host, of_other = self.hosts.hosts[self.find(node)], named.get(other)
        self.say(f"no packet passes between {node} and {other}")
        self.router.apart.add((host.spec.private, of_other or self.hosts.hosts[self.find(other)].spec.private))

    def rejoin(self) -> None:
        """Let all packets pass again."""
        self.say("all packets pass again")
        self.router.apart.clear()

    def move(self, address: str) -> None:
        """Change the address of the client's computer, as a laptop in another network does."""
        self.say(f"the client moves to {address}")
        self.client = address

    def fault(self, kind: str, where: str = "", **more: Any) -> None:
        self.say(f"fault {kind} {where} {more}")
        self.faults.add(kind, where, **more)

    def clear(self, kind: str = "", where: str = "", run: str = "") -> None:
        self.say(f"clear {kind} {where} {run}")
        self.faults.clear(kind, where, run)

    def told_faults(self) -> list[dict[str, Any]]:
        return self.faults.told()

    def price(self, where: str, factor: float) -> int:
        return prices.change(self.market, where, factor)

    def quota(self, where: str, name: str, value: float) -> None:
        cloud, _, region = where.partition("/")
        if cloud == "aws":
            self.aws.quotas[name] = value
        else:
            for known, quotas in self.gce.quotas.items():
                if region in ("", known):
                    quotas[name] = value

    def quota_lag(self, seconds: float) -> None:
        """Count an instance against quotas for this long after its end."""
        self.aws.quota_lag_s = self.gce.quota_lag_s = seconds

    def notice(self, seconds: float) -> None:
        """Set the time between notice and end of a preemption that a client orders from its cloud."""
        self.aws.notice_s = self.gce.notice_s = seconds

    def machines(self) -> list[dict[str, Any]]:
        """Return every instance since the start, as the clouds remember it."""
        return [*self.aws.all_instances(), *self.gce.all_instances()]

    def all_hosts(self) -> dict[str, dict[str, Any]]:
        return {
            host_id: {
                "name": host.spec.name,
                "cloud": host.spec.cloud,
                "region": host.spec.region,
                "zone": host.spec.zone,
                "market": host.spec.market,
                "instance_type": host.spec.instance_type,
                "labels": dict(host.spec.labels),
                "private": host.spec.private,
                "public": host.spec.public,
                "user": host.spec.user,
                "frozen": host.frozen,
                "link": host.link,
                "rules": [rule.text(rule.ranges + rule.members) for rule in host.spec.rules],
                "processes": len(processes_of(host.first)),
            }
            for host_id, host in list(self.hosts.hosts.items())
        }

    def inventory(self) -> list[dict[str, Any]]:
        """Return the resources created since the start that still exist."""
        return [thing for thing in self._things() if _key(thing) not in self.furnished]

    def _things(self) -> list[dict[str, Any]]:
        return [*self.aws.inventory(), *self.gce.inventory()]

    def calls(self) -> dict[str, int]:
        return {**self.aws.calls, **self.gce.calls}

    def first(self, node: str) -> int:
        return self.hosts.hosts[self.find(node)].first

    ORDERS = (
        *("reclaim", "rebalance", "freeze", "thaw", "unplug", "fault", "clear", "price", "quota", "quota_lag"),
        *("notice", "move", "part", "rejoin"),
    )
    QUESTIONS = ("told_faults", "machines", "all_hosts", "inventory", "calls", "first")

    def listen(self) -> None:
        server = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                message = json.loads(self.rfile.readline())
                try:
                    if message["order"] not in (known := server.ORDERS + server.QUESTIONS):
                        raise LookupError(f"{message['order']} is none of {', '.join(known)}")
                    act: Callable[..., Any] = getattr(server, message["order"])
                    answer = {"answer": act(*message.get("args", ()), **message.get("more", {}))}
                except Exception as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                self.wfile.write(json.dumps(answer).encode() + b"\n")

        class Threads(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        listener = Threads(str(self.folder / "control"), Handler)
        threading.Thread(target=listener.serve_forever, args=(0.1,), daemon=True).start()


def _key(thing: dict[str, Any]) -> tuple[str, str, str, str]:
    return thing["cloud"], thing["region"], thing["kind"], thing["id"]


def _follow_owner() -> None:
    """End this process when the other end of standard input is closed."""
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    folder, layer, wheels = (Path(part) for part in sys.argv[1:4])
    if "attached" in sys.argv[4:]:
        threading.Thread(target=_follow_owner, daemon=True).start()
    aws.settings(folder)
    server = Server(folder, Image(layer=layer, wheels=wheels))
    server.listen()
    (folder / "ready").touch()
    server.keep()


if __name__ == "__main__":
    main()
