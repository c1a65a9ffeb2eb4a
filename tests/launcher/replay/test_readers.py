"""Readers of recorded traces: every format gives the one table, and a bad row is refused with its line."""

import json
from pathlib import Path

import pytest

from launcher.replay.readers import read_file, read_folder
from launcher.replay.trace import TraceRefused

NOW_S = 1_800_000_000.0
HEAD = "t_s,cloud,region,zone,instance_type,capacity,usd_per_hour"
A = "gcp,us-east4,us-east4-a,a3-highgpu-8g"


def table(folder: Path, *rows: str) -> Path:
    path = folder / "t.csv"
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    return path


def test_a_table_gives_capacity_and_price_by_time(tmp_path):
    (trace,) = read_file(table(tmp_path, f"0,{A},4,14.85", f"600,{A},0,", f"1200,{A},2,15"), NOW_S)
    (pool,) = trace.pools
    assert [pool.capacity_at(at) for at in (0, 599_999, 600_000, 1_200_000)] == [4, 4, 0, 2]
    assert [pool.price_at(at) for at in (0, 700_000, 1_200_000)] == [14_850_000, None, 15_000_000]
    assert trace.end_ms == 1_800_000
    assert trace.share_with_capacity() == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("rows", "line", "why"),
    [
        ([f"0,{A},4,1", f"600,{A},-1,1"], 3, "capacity is -1"),
        ([f"0,{A},4,1", f"0,{A},4,1"], 3, "is not after"),
        ([f"600,{A},4,1", f"0,{A},4,1"], 3, "is not after"),
        ([f"1900000000,{A},4,1"], 2, "in the future"),
        (["0,gcp,us-east4,us-west1-a,a3-highgpu-8g,4,1"], 2, "is no zone of gcp us-east4"),
        (["0,azure,us-east4,us-east4-a,x,4,1"], 2, "is no zone of azure"),
        ([f"0,{A},4,-2"], 2, "usd_per_hour is -2"),
        ([f"0,{A},four,2"], 2, "capacity is 'four'"),
        ([f"0,{A}"], 2, "5 cells"),
        ([*(f"{n * 600},{A},4,1" for n in range(20)), f"{40 * 600},{A},4,1"], 22, "a gap of 12600 s"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path, rows, line, why):
    with pytest.raises(TraceRefused, match=f"t.csv:{line}: .*{why}"):
        read_file(table(tmp_path, *rows), NOW_S)


def test_probes_are_cut_at_a_pause_and_priced_by_region(tmp_path):
    times = [*range(0, 6000, 600), *range(20_000, 26_000, 600)]
    path = tmp_path / "probes.csv"
    path.write_text("t_s,zone,requested,created\n" + "".join(f"{t},us-east4-a,16,{t % 7}\n" for t in times))
    (tmp_path / "h100_spot_prices.csv").write_text("region,usd,fetched\nus-east4,14.8,2025-10-23\n")
    first, second = read_file(path, NOW_S)
    assert (first.end_ms, second.end_ms) == (6_000_000, 6_000_000)
    assert second.pools[0].price_at(0) == 14_800_000


def test_counts_of_one_folder_are_one_recording(tmp_path):
    for zone, data in (("us-west-2a", [1, 1, 0]), ("us-west-2b", [0, 2, 2])):
        raw = {"metadata": {"gap_seconds": 300}, "data": data}
        (tmp_path / f"{zone}_v100_1.json").write_text(json.dumps(raw))
    (tmp_path / "notes.txt").write_text("none")
    (trace,), skipped = read_folder(tmp_path, NOW_S)
    assert [pool.zone for pool in trace.pools] == ["us-west-2a", "us-west-2b"]
    assert trace.pools[1].capacity_at(300_000) == 2
    assert skipped == ["notes.txt"]


def test_counts_with_a_negative_number_are_refused(tmp_path):
    path = tmp_path / "us-west-2a_v100_1.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [1, -1]}))
    with pytest.raises(TraceRefused, match=r"data\[1\] is -1"):
        read_file(path, NOW_S)


def test_a_log_of_one_pool_counts_its_nodes(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("0,add,a\n0,add,b\n60000,remove,a\n")
    (trace,) = read_file(path, NOW_S)
    assert [trace.pools[0].capacity_at(at) for at in (0, 60_000)] == [2, 1]


def test_the_traces_that_ship_are_read():
    traces, _ = read_folder(Path(__file__).parents[3] / "catalogs" / "traces", NOW_S)
    names = {trace.name: len(trace.pools) for trace in traces}
    assert names == {
        "p3-trace": 1,
        "h100_gcp_13_zones_days_0_to_9 part 1": 13,
        "h100_gcp_13_zones_days_0_to_9 part 2": 13,
    }
