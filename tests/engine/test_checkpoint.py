"""Checkpoint store: a checkpoint counts once its manifest is written; the newest lineage comes first."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import obstore
import pytest

from engine.drift import Look
from engine.protocol.request import Group, Manifest
from engine.storage.checkpoint import Checkpoint, CheckpointDamaged, CheckpointStore, RowsThatFit, Superseded
from engine.storage.tensor_files import Stored

MANIFEST = Manifest(
    run="run",
    lineage=1,
    batch=1,
    version=1,
    sampler="plan",
    groups=(Group(prompt="1234", seeds=(2**64 - 1, 0)),),
    minibatches=((0,),),
)
FIRST = Checkpoint(
    iteration=1,
    lineage=1,
    next_batch=MANIFEST,
    files={name: Stored.of_bytes(name[:1].encode()) for name in ("weights", "ema", "optimizer")},
    evaluations=((0, {"exact_match": 0.1}),),
    std=0.1 + 0.2,
    skipped_in_a_row=2,
    config_digest="abc",
    exploration={"stale": [["1234", 2**64 - 1, 0.5]]},
    base=Look(tone=(1, 3), grain=(4, 0)),
    fits=RowsThatFit(device="NVIDIA H100", rows=8),
)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(f"file://{tmp_path}/store")


def at(iteration, lineage=1):
    return replace(FIRST, iteration=iteration, lineage=lineage)


def test_a_store_without_a_checkpoint_returns_none(store):
    assert store.names() == []
    assert store.newest() is None


def test_a_checkpoint_loads_completely_on_another_node(tmp_path, store):
    store.save(FIRST, keep=3)
    assert CheckpointStore(f"file://{tmp_path}/store").newest() == FIRST


def test_files_written_ahead_count_once_the_manifest_exists(tmp_path, store):
    store.save(FIRST, keep=3)
    second = replace(at(13), files={**FIRST.files, "weights": Stored.of_bytes(b"newer")})
    digests = store.write_files(second.name, second.files)
    assert store.newest() == FIRST
    store.save(second, keep=3, digests=digests)
    assert CheckpointStore(f"file://{tmp_path}/store").newest() == second


@pytest.mark.parametrize("kept", [0, 1, 60])
def test_a_truncated_manifest_does_not_count(tmp_path, store, capsys, kept):
    store.save(FIRST, keep=3)
    store.save(at(13), keep=3)
    manifest = tmp_path / "store/checkpoints" / at(13).name / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:kept])
    assert store.newest() == FIRST
    assert f"checkpoint {at(13).name} does not count" in capsys.readouterr().out
    store.save(at(13), keep=3)  # the trainer reaches this iteration again
    assert store.newest() == at(13)


def test_files_without_a_manifest_are_deleted(tmp_path, store):
    store.write_files(at(1).name, FIRST.files)
    ahead = at(1, lineage=2)
    store.write_files(ahead.name, FIRST.files)
    store.save(at(2), keep=3)
    assert sorted(path.name for path in tmp_path.glob("store/checkpoints/*/weights.*")) == ["weights.safetensors"] * 2
    assert not list(tmp_path.glob(f"store/checkpoints/{at(1).name}/*"))
    store.save(ahead, keep=3)
    assert store.names() == [at(2).name, ahead.name]


def test_a_checkpoint_of_an_earlier_version_lacks_the_newer_fields(tmp_path, store):
    store.save(FIRST, keep=3)
    (manifest,) = tmp_path.glob("store/checkpoints/*/manifest.json")
    raw = json.loads(manifest.read_text())
    del raw["exploration"], raw["base"], raw["fits"]
    manifest.write_text(json.dumps(raw))
    assert store.newest() == replace(FIRST, exploration={}, base=None, fits=None)


def test_the_newest_checkpoints_are_kept(store):
    for iteration in range(5):
        store.save(at(iteration), keep=2)
    assert store.names() == ["l0001-i000003", "l0001-i000004"]
    assert store.newest() == at(4)


def test_dropping_a_checkpoint_deletes_all_its_files(tmp_path, store):
    for iteration in range(3):
        store.save(at(iteration), keep=1)
    left = [path.name for path in (tmp_path / "store" / "checkpoints").rglob("*") if path.is_file()]
    assert sorted(left) == ["ema.safetensors", "manifest.json", "optimizer.safetensors", "weights.safetensors"]


@pytest.mark.parametrize("deletes", range(4))
def test_an_interrupted_drop_leaves_only_loadable_checkpoints(store, monkeypatch, deletes):
    store.save(at(1), keep=1)
    delete, done = obstore.delete, []

    def interrupted(bucket, path):
        if len(done) == deletes:
            raise KeyboardInterrupt
        done.append(path)
        delete(bucket, path)

    monkeypatch.setattr(obstore, "delete", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.save(at(2), keep=1)
    assert len(done) == deletes
    assert [store.load(name).iteration for name in store.names()] == ([1, 2] if deletes == 0 else [2])


def test_a_save_interrupted_before_its_manifest_does_not_count(store):
    store.save(at(1), keep=3)
    for file in ("weights", "ema", "optimizer"):
        store.put(f"checkpoints/l0001-i000002/{file}.safetensors", b"new")
        assert store.newest() == at(1)
    store.save(at(2), keep=3)
    assert store.newest() == at(2)


def test_an_interrupted_save_drops_no_earlier_checkpoint(tmp_path, store):
    """Old checkpoints are dropped after the new manifest is written, so a complete checkpoint always exists."""
    store.save(at(1), keep=1)
    (tmp_path / "store" / "checkpoints" / "l0001-i000002").mkdir()
    (
        tmp_path / "store" / "checkpoints" / "l0001-i000002" / "optimizer.safetensors"
    ).mkdir()  # a folder here makes the write fail
    with pytest.raises(IsADirectoryError):
        store.save(at(2), keep=1)
    assert store.newest() == at(1)


@pytest.mark.parametrize("file", ["weights", "ema", "optimizer"])
def test_loading_a_damaged_file_fails_and_names_the_file(store, file):
    store.save(FIRST, keep=3)
    store.put(f"checkpoints/{FIRST.name}/{file}.safetensors", b"other")
    with pytest.raises(CheckpointDamaged, match=f"{FIRST.name}/{file}"):
        store.newest()


def test_the_newest_checkpoint_has_the_highest_lineage_then_iteration(store):
    for one in (at(9, lineage=1), at(3, lineage=2), at(4, lineage=2)):
        store.save(one, keep=9)
    assert store.newest() == at(4, lineage=2)


def test_checkpoints_of_an_old_lineage_are_not_read_and_drop_no_newer_one(store):
    store.save(at(3, lineage=2), keep=2)
    for iteration in range(10, 14):
        store.save(at(iteration, lineage=1), keep=2)
        assert store.newest() == at(3, lineage=2)


def test_lineages_count_from_one_and_none_is_issued_twice(tmp_path, store):
    assert [store.claim_lineage() for _ in range(3)] == [1, 2, 3]
    assert CheckpointStore(f"file://{tmp_path}/store").claim_lineage() == 4


def test_lineages_claimed_at_the_same_time_are_different(tmp_path, store):
    stores = [CheckpointStore(f"file://{tmp_path}/store") for _ in range(8)]
    with ThreadPoolExecutor(len(stores)) as pool:
        claimed = list(pool.map(lambda one: [one.claim_lineage() for _ in range(4)], stores))
    assert sorted(lineage for some in claimed for lineage in some) == list(range(1, 33))


def test_a_trainer_whose_role_another_node_has_saves_and_deletes_nothing(tmp_path):
    url = f"file://{tmp_path}/store"
    old, successor = CheckpointStore(url, "old"), CheckpointStore(url, "successor")
    assert old.claim_lineage() == 1
    for iteration in (1, 2):
        old.save(at(iteration), keep=1)
    assert successor.claim_lineage() == 2
    with pytest.raises(Superseded, match="lineage 2 of the run is claimed by successor"):
        old.save(at(3), keep=1)
    with pytest.raises(Superseded):
        old.check_lineage(1)
    assert old.names() == [at(2).name]
    successor.check_lineage(2)
    successor.save(at(3, lineage=2), keep=1)
    assert successor.names() == [at(3, lineage=2).name]


def test_a_lineage_that_a_node_claimed_and_never_began_does_not_end_its_own_trainer(tmp_path):
    store = CheckpointStore(f"file://{tmp_path}/store", "node")
    assert [store.claim_lineage(), store.claim_lineage()] == [1, 2]
    store.check_lineage(1)
    store.save(at(1), keep=1)
    assert store.newest() == at(1)


class Interrupted(CheckpointStore):
    """A store whose `act` is called before each access, with the number of the access."""

    def __init__(self, url, act):
        super().__init__(url, "old")
        self.accesses, self._act, self._turn = 0, act, threading.Lock()

    def _next(self):
        with self._turn:  # files are written side by side
            self.accesses += 1
            self._act(self.accesses)

    def _paths(self, prefix):
        self._next()
        return super()._paths(prefix)

    def put(self, path, data):
        self._next()
        super().put(path, data)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_successor_reads_what_it_found_whatever_the_old_trainer_does_in_between(tmp_path, keep):
    """Try every order of a claim, a look and a read of the successor between the accesses of the old trainer."""
    cases = 0
    for claim in range(1, 22):
        for look in (claim, claim + 1, claim + 5):
            for read in (look, look + 1, look + 4, look + 9):
                found: dict[str, str] = {}
                url = f"file://{tmp_path}/{claim}-{look}-{read}"
                successor = CheckpointStore(url, "successor")

                def act(number, moments=(claim, look, read), successor=successor, found=found):
                    if number == moments[0]:
                        successor.claim_lineage()
                    if number == moments[1]:
                        found["name"] = successor.names()[-1]
                    if number == moments[2]:
                        found["read"] = successor.load(found["name"]).name

                first = CheckpointStore(url, "old")
                assert first.claim_lineage() == 1
                first.save(at(1), keep=keep)
                old = Interrupted(url, act)
                with suppress(Superseded):
                    for iteration in range(2, 6):
                        old.save(at(iteration), keep=keep)
                if "name" not in found:
                    continue  # the old trainer had ended before
                assert successor.load(found["name"]).name == found["name"], (claim, look, read)
                cases += "read" in found
                successor.save(at(9, lineage=2), keep=1)
                assert successor.newest().name == at(9, lineage=2).name
    assert cases > 50
