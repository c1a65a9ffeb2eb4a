"""A cloud with its inventory in this process; like a real one it lists terminated instances for a while."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.events import Market
from launcher.clouds.base import (
    CallerIdentity,
    CloudRefused,
    CloudUnreachable,
    Finding,
    Instance,
    InstanceState,
    RegionSetup,
    Resource,
)
from launcher.job.company import NOTHING_NAMED, Named

ME = "ada"
ACCOUNT = "123456789012"


ADA = CallerIdentity(account=ACCOUNT, identity=f"arn:aws:iam::{ACCOUNT}:user/{ME}", owner=ME)


def instance(id: str = "i-1", run: str = "digits", slot: str = "trainer", **more: object) -> Instance:
    known = {"cloud": "aws", "region": "us-east-1", "zone": "us-east-1a", "owner": ME, "state": InstanceState.RUNNING}
    named = {"id": id, "run": run, "name": f"{run}-{slot}-g1", "market": Market.SPOT, "instance_type": "g6.xlarge"}
    return Instance(**{**known, **named, **more})  # type: ignore[arg-type]


def resource(kind: str = "disk", id: str = "vol-1", run: str = "digits", **more: object) -> Resource:
    known = {"cloud": "aws", "region": "us-east-1", "owner": ME}
    return Resource(**{**known, "kind": kind, "id": id, "run": run, **more})  # type: ignore[arg-type]


@dataclass
class FakeCloud:
    """`lingers`: how many listings still show an instance after its termination was requested."""

    cloud: str = "aws"
    home: str = "us-east-1"
    its_regions: tuple[str, ...] = ("us-east-1", "us-west-2")
    lingers: int = 2
    has: dict[str, Instance] = field(default_factory=dict)
    other: dict[str, Resource] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    """Regions that do not answer; `caller` stands for the identity call."""
    forbidden: set[str] = field(default_factory=set)
    """Regions that an organisation forbids."""
    no_launch: str = ""
    """Why SkyPilot could launch nothing in the cloud."""
    immortal: set[str] = field(default_factory=set)
    late: dict[str, tuple[int, Instance]] = field(default_factory=dict)
    """Instances that appear only after this many listings of their region."""
    orders: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """Findings on resources that a job names."""
    looked: list[tuple[str, str]] = field(default_factory=list)
    """Regions whose named networks were checked, and the address that SSH comes from."""
    who: CallerIdentity | None = ADA
    _dying: dict[str, int] = field(default_factory=dict)

    def caller(self) -> CallerIdentity:
        if "caller" in self.silent:
            raise CloudUnreachable(f"{self.cloud} did not answer")
        if self.who is None:
            raise CloudRefused(f"{self.cloud} found no credentials")
        return self.who

    def regions(self) -> Sequence[str]:
        return self.its_regions

    def instances(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Instance]:
        self._answer(region)
        for id, (looks, one) in list(self.late.items()):
            if one.region == region:
                self.late[id] = (looks - 1, one)
                if looks <= 1:
                    self.has[id] = self.late.pop(id)[1]
        for id in [id for id, one in self.has.items() if one.region == region and id in self._dying]:
            self._dying[id] -= 1
            if self._dying[id] < 0:
                self.has[id] = replace(self.has[id], state=InstanceState.GONE)
                self.other = {key: one for key, one in self.other.items() if one.node != self.has[id].name}
        found = [one for one in self.has.values() if one.region == region and owner in (None, one.owner)]
        return [one for one in found if run in (None, one.run)]

    def end_of(self, instance: Instance) -> Instance:
        return replace(instance, state=InstanceState.GONE)

    def resources(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Resource]:
        self._answer(region)
        here = {region, ""} if region == self.home else {region}
        found = [one for one in self.other.values() if one.region in here and owner in (None, one.owner)]
        return [one for one in found if run in (None, one.run)]

    def end(self, instances: Sequence[Instance]) -> None:
        for one in instances:
            self._answer(one.region)
            self.orders.append(f"end {one.id}")
            if one.id in self.immortal:
                raise CloudRefused(f"{one.id} is protected against termination")
            if one.id not in self._dying:
                self._dying[one.id] = self.lingers
                self.has[one.id] = replace(self.has[one.id], state=InstanceState.STOPPING)

    def remove(self, resources: Sequence[Resource]) -> Sequence[Resource]:
        left = []
        for one in resources:
            self._answer(one.region)
            self.orders.append(f"remove {one.id}")
            alive = [each for each in self.has.values() if each.state is not InstanceState.GONE]
            if any(each.name == one.node if one.node else each.run == one.run for each in alive):
                left.append(one)
            else:
                self.other.pop(one.id, None)
        return left

    def prepare(
        self,
        region: str,
        *,
        run: str,
        owner: str,
        ssh_from: str,
        buckets: Sequence[str],
        models: Sequence[str] = (),
        named: Named = NOTHING_NAMED,
    ) -> RegionSetup:
        raise NotImplementedError

    def check_launches(self) -> None:
        if self.no_launch:
            raise CloudRefused(self.no_launch)

    def check_identity(self, named: Named) -> Sequence[Finding]:
        return self.findings if named.identity else []

    def check_network(self, region: str, named: Named, ssh_from: str) -> Sequence[Finding]:
        self.looked.append((region, ssh_from))
        return self.findings if named.network else []

    def open_rules(self, place: RegionSetup) -> Sequence[str]:
        raise NotImplementedError

    def _answer(self, region: str) -> None:
        if region in self.silent:
            raise CloudUnreachable(f"{self.cloud} {region} did not answer")
        if region in self.forbidden:
            raise CloudRefused(f"{self.cloud} {region}: an organisation's policy denies it")

    def add(self, *ones: Instance | Resource) -> "FakeCloud":
        for one in ones:
            if isinstance(one, Instance):
                self.has[one.id] = one
            else:
                self.other[one.id] = one
        return self

    @property
    def alive(self) -> list[str]:
        return sorted(one.id for one in self.has.values() if one.state is not InstanceState.GONE)
