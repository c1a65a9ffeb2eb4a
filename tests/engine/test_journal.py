"""The journal: acknowledged records survive a crash, and a failed write leaves no trace."""

import resource
import shutil
import signal

import pytest

from engine.coordinator.journal import Journal, JournalDamaged
from tests.engine.power import Power


def opened(folder):
    """Open a journal on this folder as after a crash, and return it with its records."""
    journal = Journal(folder)
    return journal, list(journal.replay())


@pytest.fixture
def small_disk():
    """Limit file sizes. Python ignores the signal of a write beyond the limit, so the write raises an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_records_and_blobs_come_back_in_order(tmp_path):
    journal = Journal(tmp_path)
    journal.append({"n": 1}, {"a": b"first", "b": b""})
    journal.append({"n": 2}, {"c": b"\0second"})
    assert journal.blob("a") == b"first"
    again, records = opened(tmp_path)
    assert records == [{"n": 1}, {"n": 2}]
    assert [again.blob(name) for name in "abc"] == [b"first", b"", b"\0second"]
    assert list(again.replay()) == []


def test_a_blob_that_was_never_written_is_a_key_error(tmp_path):
    with pytest.raises(KeyError, match="none"):
        Journal(tmp_path).blob("none")


def test_a_truncated_record_is_dropped_and_overwritten_by_the_next(tmp_path):
    journal = Journal(tmp_path / "whole")
    journal.append({"n": 1}, {"a": b"first"})
    first = journal.position()
    journal.append({"n": 2}, {"b": b"second"})
    whole = (tmp_path / "whole" / "journal").read_bytes()
    for size in range(first, len(whole)):
        torn = tmp_path / f"torn-{size}"
        torn.mkdir()
        (torn / "journal").write_bytes(whole[:size])
        again, records = opened(torn)
        assert records == [{"n": 1}]
        with pytest.raises(KeyError, match="b"):
            again.blob("b")
        again.append({"n": 3}, {"c": b"third"})
        last, records = opened(torn)
        assert records == [{"n": 1}, {"n": 3}]
        assert (last.blob("a"), last.blob("c")) == (b"first", b"third")
        shutil.rmtree(torn)


def with_a_flipped_byte(folder, at):
    """Return the path of a journal of three records, and its bytes with one changed."""
    journal = Journal(folder)
    for number in range(3):
        journal.append({"n": number}, {str(number): b"data"})
    path = folder / "journal"
    data = bytearray(path.read_bytes())
    data[at(len(data))] ^= 1
    path.write_bytes(data)
    return path, bytes(data)


@pytest.mark.parametrize("at", [0, 1, 5, 9, 13, 20, 25])
def test_damage_in_the_middle_is_an_error_and_keeps_the_file(tmp_path, at):
    path, data = with_a_flipped_byte(tmp_path, lambda size: size // 3 + at)
    with pytest.raises(JournalDamaged, match=rf"{path} is damaged at byte {len(data) // 3}.*Copy it away"):
        Journal(tmp_path)
    assert path.read_bytes() == data


def test_a_changed_byte_in_the_last_record_counts_as_truncation(tmp_path):
    path, data = with_a_flipped_byte(tmp_path, lambda size: size - 1)
    assert opened(tmp_path)[1] == [{"n": 0}, {"n": 1}]
    assert path.read_bytes() == data[: 2 * len(data) // 3]


@pytest.mark.parametrize("room", [0, 1, 20, 5000])
def test_a_failed_append_on_a_full_disk_leaves_no_trace(tmp_path, small_disk, room):
    journal = Journal(tmp_path)
    journal.append({"n": 1}, {"a": b"first"})
    end = journal.position()
    small_disk(end + room)
    with pytest.raises(OSError, match="File too large"):
        journal.append({"n": 2}, {"b": b"x" * 100_000})
    assert (tmp_path / "journal").stat().st_size == end
    assert journal.position() == end
    with pytest.raises(KeyError, match="b"):
        journal.blob("b")
    small_disk(resource.RLIM_INFINITY)
    assert (tmp_path / "journal").stat().st_size == end
    journal.append({"n": 3}, {"c": b"third"})
    journal.sync()
    assert journal.blob("c") == b"third"
    again, records = opened(tmp_path)
    assert records == [{"n": 1}, {"n": 3}]
    assert (again.blob("a"), again.blob("c")) == (b"first", b"third")


def test_a_rewrite_keeps_only_the_given_records(tmp_path):
    journal = Journal(tmp_path)
    journal.append({"n": 1}, {"a": b"first"})
    journal.append({"n": 2}, {"b": b"second"})
    journal.rewrite([({"n": 2}, {"b": journal.blob("b")})])
    assert journal.blob("b") == b"second"
    with pytest.raises(KeyError, match="a"):
        journal.blob("a")
    journal.append({"n": 3}, {"c": b"third"})
    again, records = opened(tmp_path)
    assert records == [{"n": 2}, {"n": 3}]
    assert (again.blob("b"), again.blob("c")) == (b"second", b"third")


def test_a_rewrite_that_does_not_fit_on_the_disk_changes_nothing(tmp_path, small_disk):
    journal = Journal(tmp_path)
    journal.append({"n": 1}, {"a": b"first"})
    small_disk(journal.position())
    with pytest.raises(OSError, match="File too large"):
        journal.rewrite([({"n": 2}, {"b": b"x" * 100_000})])
    small_disk(resource.RLIM_INFINITY)
    assert journal.blob("a") == b"first"
    journal.append({"n": 3})
    assert opened(tmp_path)[1] == [{"n": 1}, {"n": 3}]


def test_an_interrupted_rewrite_changes_nothing(tmp_path):
    journal = Journal(tmp_path)
    journal.append({"n": 1}, {"a": b"first"})
    (tmp_path / "journal.new").write_bytes(b"half of something")
    again, records = opened(tmp_path)
    assert records == [{"n": 1}]
    again.rewrite([({"n": 4}, {})])
    assert opened(tmp_path)[1] == [{"n": 4}]


def test_the_position_grows_with_every_record_and_across_a_rewrite(tmp_path):
    """The server compares positions to know what is durable already."""
    journal = Journal(tmp_path)
    journal.append({"n": 1}, {"a": b"x" * 1000})
    before = journal.position()
    journal.rewrite([])
    assert journal.position() >= before
    journal.append({"n": 2})
    assert journal.position() > before


def test_synced_records_survive_a_power_cut(tmp_path, monkeypatch):
    power = Power(monkeypatch)
    journal = Journal(tmp_path / "here")
    for number in range(3):
        journal.append({"n": number}, {f"b{number}": b"blob"})
        journal.sync()
    journal.append({"n": 3})
    again, records = opened(power.cut(tmp_path / "here", tmp_path / "after"))
    assert records == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert again.blob("b2") == b"blob"


def test_a_rewrite_and_later_records_survive_a_power_cut(tmp_path, monkeypatch):
    power = Power(monkeypatch)
    journal = Journal(tmp_path / "here")
    journal.append({"n": 1})
    journal.sync()
    journal.rewrite([({"n": 2}, {"b": b"blob"})])
    again, records = opened(power.cut(tmp_path / "here", tmp_path / "after"))
    assert records == [{"n": 2}]
    assert again.blob("b") == b"blob"
    journal.append({"n": 3})
    journal.sync()
    assert opened(power.cut(tmp_path / "here", tmp_path / "later"))[1] == [{"n": 2}, {"n": 3}]
