"""The files of one node on a real cloud, which are the truth about the node.

An unreadable file counts as absent: a power cut may have left the file empty. `is_begun` tells an unreadable file
from a file that was never written.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from engine.durable import write_durably
from engine.node_spec import NodeSpec
from launcher.clouds.base import Instance
from launcher.placement.placement import Placement
from launcher.provision.sky.records import AgentFile, FileName, LoginRecord, NodeRecord, RegionView, RoleView

T = TypeVar("T")
RecordType = TypeVar("RecordType", bound=NodeRecord)


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """The JSON files and the SSH key in a node's folder. Writing raises OSError."""

    folder: Path

    def has(self, file: FileName) -> bool:
        """Return whether the file can be read."""
        return _read_object(self._path(file)) is not None

    def is_begun(self, file: FileName) -> bool:
        """Return whether the file was ever written, even if unreadable now."""
        return self._path(file).exists()

    def read(self, kind: type[RecordType]) -> RecordType | None:
        """Return the record, or None when its file is missing or damaged.

        Raises ValueError for a file of ours with other keys than the record's.
        """
        content = _read_object(self._path(kind.FILE))
        if content is None:
            return None
        try:
            return kind.model_validate(content)
        except (ValueError, TypeError, OverflowError):
            if issubclass(kind, AgentFile):
                return None
            raise

    def write(self, record: NodeRecord) -> None:
        """Replace the record's file durably, readable by its owner only."""
        _write_object(self._path(record.FILE), _json(record))

    def forget(self, file: FileName) -> None:
        """Remove the file, so that its step is repeated."""
        self._path(file).unlink(missing_ok=True)

    def write_key(self, private_key: str) -> Path:
        """Write the private key for the SSH login and return its path."""
        key = self.folder / "ssh.key"
        write_durably(key, private_key.encode())
        # Addresses are reused by VMs with other host keys.
        (self.folder / "known_hosts").unlink(missing_ok=True)
        return key

    # --- files of types from elsewhere --------------------------------------------------------------

    @property
    def want(self) -> Placement | None:
        """Return the requested placement; None if the record is lost."""
        content = _read_object(self._path("want"))
        placement: Placement | None = None if content is None else _adapter(Placement).validate_python(content)
        return placement

    def write_want(self, want: Placement) -> None:
        _write_object(self._path("want"), dict(_adapter(Placement).dump_python(want, mode="json")))

    @property
    def spec(self) -> NodeSpec | None:
        """Return the start instructions; None if the record is lost."""
        content = _read_object(self._path("spec"))
        return None if content is None else NodeSpec.model_validate(content)

    def write_spec(self, spec: NodeSpec) -> None:
        _write_object(self._path("spec"), json.loads(spec.model_dump_json()))

    @property
    def role(self) -> RoleView | None:
        """Return the role that the node has now; None if the start instructions are lost."""
        content = _read_object(self._path("spec"))
        return None if content is None else RoleView.model_validate(content)

    @property
    def instance(self) -> Instance | None:
        """Return the VM as last written; None if no VM was found yet."""
        content = _read_object(self._path("machine"))
        if content is None or "id" not in content:
            return None
        instance: Instance = _adapter(Instance).validate_python(
            {key: value for key, value in content.items() if key != "login"}
        )
        return instance

    def write_instance(self, instance: Instance) -> None:
        """Write the VM's record together with the login, for `spotrl ssh`."""
        login = self.read(LoginRecord)
        _write_object(self._path("machine"), {**asdict(instance), "login": None if login is None else _json(login)})

    @property
    def region(self) -> tuple[str, str] | None:
        """Return the cloud and region of the request or of the found VM."""
        content = _read_object(self._path("want")) or _read_object(self._path("machine"))
        if content is None:
            return None
        view = RegionView.model_validate(content)
        return view.cloud, view.region

    def _path(self, file: FileName) -> Path:
        return self.folder / f"{file}.json"


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return the adapter of a type. Building one takes longer than a pass over all nodes."""
    return TypeAdapter(kind)


def _read_object(path: Path) -> dict[str, object] | None:
    """Return the JSON object in the file, or None when the file is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write_object(path: Path, value: Mapping[str, object]) -> None:
    write_durably(path, json.dumps(value).encode())


def _json(record: NodeRecord) -> dict[str, object]:
    return record.model_dump(mode="json", exclude_unset=True)
