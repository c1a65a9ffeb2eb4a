"""The server of `spotrl ui`: refused requests, pages from the ledger, new events, and a ledger in trouble."""

import json
import os
import sqlite3
import time
from contextlib import ExitStack

import httpx
import pytest
from sqlalchemy import event, insert, select

from engine.events import Judged
from launcher.ledger.models import Node, NodeEvent, ProgressRow, Run, TroubleRow
from launcher.ledger.store import find_run, open_read_only
from launcher.runs.event_lines import newest_seen
from launcher.runs.run_list import COUNT, run_list
from launcher.runs.views import view_of
from launcher.web.guard import refusal
from launcher.web.reader import EVENTS_SHOWN
from launcher.web.server import LOG_BYTES, STATIC, STREAMS, parse_ids, tail
from tests.launcher.made_ledger import HOUR_MS, JOB, a_run, a_session
from tests.launcher.web.served import NASTY, TOKEN, Served, serving, two_runs


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Serve a ledger that no test changes."""
    with serving(*two_runs(tmp_path_factory.mktemp("served"))) as running:
        yield running


@pytest.fixture
def fresh(tmp_path):
    """Serve a ledger that the test may change."""
    with serving(*two_runs(tmp_path)) as running:
        yield running


GOOD = {"host": "127.0.0.1:8642"}


@pytest.mark.parametrize(
    ("method", "headers", "given", "words"),
    [
        ("GET", {"host": "evil.example:8642"}, TOKEN, "loopback only"),
        ("GET", {"host": "127.0.0.1.evil.example"}, TOKEN, "loopback only"),
        ("GET", {}, TOKEN, "loopback only"),
        ("GET", {**GOOD, "origin": "http://evil.example"}, TOKEN, "another site"),
        ("GET", {**GOOD, "origin": "http://127.0.0.1:9999"}, TOKEN, "another site"),
        ("GET", {**GOOD, "origin": "null"}, TOKEN, "another site"),
        ("POST", GOOD, TOKEN, "must name its origin"),
        ("GET", GOOD, "", "token is missing or wrong"),
        ("GET", GOOD, "ä", "token is missing or wrong"),
    ],
)
def test_a_request_that_is_not_the_users_own_page_is_refused(method, headers, given, words):
    assert words in refusal(method, headers, given, TOKEN, needs_token=True)


@pytest.mark.parametrize("host", ["127.0.0.1:8642", "localhost:8642", "localhost", "[::1]:8642", "[::1]"])
def test_the_users_own_page_is_answered_under_every_name_of_loopback(host):
    assert refusal("POST", {"host": host, "origin": f"http://{host}"}, TOKEN, TOKEN, needs_token=True) is None


def test_no_path_with_data_is_answered_without_the_token(served):
    for path in (
        "/",
        "/?run=live",
        "/api/list",
        "/api/changes",
        "/api/runs/live",
        "/api/runs/live/logs",
        "/api/runs/live/sheets/0",
    ):
        assert httpx.get(served.url + path).status_code == 403
        wrong = httpx.get(f"{served.url}{path}{'&' if '?' in path else '?'}token=wrong")
        assert wrong.status_code == 403
        assert "45" not in wrong.text
    assert httpx.post(f"{served.url}/api/runs/live/stop?token={TOKEN}").status_code == 403, "no origin"
    assert served.stopped == []


def test_every_file_of_the_page_has_its_type_and_no_foreign_source(served):
    for name, kind in STATIC.items():
        answer = served.get(f"/{name}")
        assert answer.headers["content-type"].startswith(kind)
        assert "http" not in answer.text.replace("HTTP", "").replace("http://www.w3.org/2000/svg", "")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"
    assert served.get("/server.py").status_code == 404
    assert served.get("/..%2fserver.py").status_code == 404


def test_the_list_has_every_run_with_its_spend_and_score(served):
    with open_read_only(served.path)() as session:
        live, done = run_list(session).rows
    assert (live.name, live.iteration, live.iterations, live.score) == ("live", 8, 45, 0.6)
    assert (done.name, done.status, done.micro_usd, done.is_over) == ("done", "finished", 2_000_000, True)


def test_the_list_counts_the_judges_of_a_run_as_its_page_does():
    with a_session() as session:
        made = a_run(session, "judged", job={**JOB, "iterations": 45})
        made.status("finished", HOUR_MS)
        made.node("trainer", rate=1_000_000, up=0, end=HOUR_MS)
        made.record(Judged(worker="w", calls=((1000, 50, 5000), (2000, 10, 10_000))), at=1)
        made.record(Judged(worker="w", unaccounted=7000), at=2)
        a_run(session, "free", job={**JOB, "iterations": 45}).status("running", 0)
        session.flush()
        assert [row.micro_usd for row in run_list(session).rows] == [0, 1_022_000]
        assert view_of(session, made.run).spent_micro_usd == 1_022_000


def test_a_run_in_trouble_says_so_in_the_list_and_on_its_page_until_a_pass_succeeds(fresh):
    def write(text: str) -> None:
        with fresh.add() as made:
            made.session.add(TroubleRow(run_id=made.run.id, at_ms=made.run.created_ms + HOUR_MS, text=text))

    ids = fresh.get("/api/list").json()["ids"]
    (message,) = news(fresh, f"/api/changes?after={','.join(map(str, ids))}", 1, lambda: write("KeyError: 'up'"))
    assert message["ids"] != ids, "open lists are read again"
    assert fresh.get("/api/list").json()["html"].count("running, in trouble") == 1
    assert "in trouble: KeyError" in httpx.get(f"{fresh.page}&run=live").text
    assert fresh.get("/api/runs/live").json()["view"]["trouble"] == "KeyError: 'up'"
    write("")
    assert "in trouble" not in fresh.get("/api/list").json()["html"] + httpx.get(f"{fresh.page}&run=live").text


def test_the_figures_of_a_run_are_read_without_its_curves(served):
    state, page = (served.get(f"/api/runs/live{part}").json() for part in ("/state", ""))
    assert state.keys() == {"view", "cpu_ms"}
    same = {"name", "status", "iteration", "score", "is_over", "lacks_controller"}
    assert {key: state["view"][key] for key in same} == {key: page["view"][key] for key in same}
    # The first calls read what later ones have already, and a busy machine delays some: the least of five.
    spent = {
        part: min(served.get(f"/api/runs/live{part}").json()["cpu_ms"] for _ in range(5)) for part in ("/state", "")
    }
    assert 0 < spent["/state"] < spent[""]
    assert served.get("/api/runs/nobody/state").status_code == 404


def test_the_list_and_the_page_agree_on_runs_without_a_controller(fresh):
    def lacking() -> set[str]:
        with fresh.sessions() as session:
            rows = {row.name for row in run_list(session).rows if row.lacks_controller}
            assert rows == {run.name for run in session.scalars(select(Run)) if view_of(session, run).lacks_controller}
            return rows

    assert lacking() == {"live"}
    with fresh.add() as made:
        made.status("failed", HOUR_MS)
    assert lacking() == {"live"}, "its trainer may still run"
    with fresh.add() as made:
        for node in made.session.scalars(select(Node).where(Node.run_id == made.run.id)):
            made.session.add(NodeEvent(node_id=node.id, at_ms=made.run.created_ms + HOUR_MS, kind="gone"))
    assert lacking() == set()


def test_a_part_of_the_list_is_drawn_by_the_server_and_the_rest_is_asked_for(fresh):
    with fresh.sessions() as session, session.begin():
        for number in range(COUNT):
            a_run(session, f"more-{number}", job={**JOB, "iterations": 45}).status("running", 0)
    page = httpx.get(fresh.page).text
    assert page.count('<td data-head="Run">') == COUNT
    assert f"{COUNT} of {COUNT + 2} runs" in page
    assert fresh.get(f"/api/list?count={COUNT + 2}").json()["html"].count('<td data-head="Run">') == COUNT + 2
    assert fresh.get("/api/list?contains=FINISHED").json()["html"].count('<td data-head="Run">') == 1
    assert "0 of 0 runs that match" in fresh.get("/api/list?contains=%3Cb%3E").json()["html"]
    for count in ("0", "-1", "x", "9" * 30):
        assert fresh.get(f"/api/list?count={count}").status_code == 200


def test_the_title_of_a_run_is_drawn_before_its_curves_are_read(served):
    assert "iteration 8 of 45; exact_match 0.600" in httpx.get(f"{served.page}&run=live").text
    nobody = httpx.get(f"{served.page}&run=%3Cscript%3E").text
    assert "<h1>&lt;script&gt;</h1>" in nobody


def test_the_newest_event_is_found_without_reading_older_ones(served):
    """Let SQLite say that the list walks the index of the events of one kind of one run."""
    asked = []
    reading = open_read_only(served.path)
    with reading() as session:
        event.listen(session.get_bind(), "before_cursor_execute", lambda *args: asked.append(args[2:4]))
        run_list(session)
        (statement, values), *_ = [one for one in asked if "ORDER BY progress.id DESC" in one[0]]
        plan = session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all()
    assert any("USING COVERING INDEX ix_progress_run_id_kind (run_id=? AND kind=?)" in row[-1] for row in plan)
    assert not any("TEMP B-TREE" in row[-1] for row in plan)


def test_the_page_of_a_run_has_curves_nodes_plan_and_events(served):
    page = served.get("/api/runs/live").json()
    assert [row["iteration"] for row in page["iterations"]] == list(range(8))
    assert page["iterations"][0]["micro_usd"] == (800_000 + 300_000) * 10 // 60
    assert [sheet["iteration"] for sheet in page["sheets"]] == [0, 4, 6]
    assert (page["plan"][0]["nodes"], page["plan"][0]["preemptions"]) == (1, 1)
    assert page["view"]["lacks_controller"]
    assert page["events"][-1]["kind"] == "iteration_done"


def test_an_unknown_run_and_a_lost_sheet_are_told(served):
    assert "did you mean live" in served.get("/api/runs/lives").json()["error"]
    assert served.get("/api/runs/lives/changes").status_code == 404
    assert "no image sheet" in served.get("/api/runs/live/sheets/2").json()["error"]
    assert "in no store" not in served.get("/api/runs/live/sheets/0").text
    assert served.get("/api/runs/live/sheets/4").json()["error"].startswith("no store of live has")
    assert served.get("/api/runs/live/sheets/0").headers["content-type"] == "image/png"


def test_a_log_is_read_from_its_end_without_control_characters(served):
    log = served.get("/api/runs/live/logs?file=controller.log").json()
    assert log["files"] == ["controller.log"]
    assert log["text"].startswith("first line\n<img")
    assert "\\x1b[31m" in log["text"]
    other = served.get("/api/runs/live/logs?file=../../../../etc/passwd").json()
    assert other["file"] == "controller.log"


def test_the_tail_of_a_log_begins_with_a_whole_line(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("x" * 50 + "\n" + "y" * (LOG_BYTES - 20) + "\nlast\n")
    assert tail(path) == "y" * (LOG_BYTES - 20) + "\nlast\n"


def news(served: Served, path: str, count: int, then=lambda: None) -> list[dict]:
    """Return the first `count` messages of a stream. `then` is called after the stream has opened."""
    found = []
    with httpx.stream("GET", f"{served.url}{path}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as stream:
        then()
        for line in stream.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                if len(found) == count:
                    return found
    return found


def test_a_new_event_arrives_in_seconds_and_only_once(fresh):
    ids = ",".join(map(str, fresh.get("/api/runs/live").json()["ids"]))
    wrote = []

    def write() -> None:
        time.sleep(0.3)
        with fresh.add() as made:
            made.trained(8, 2 * HOUR_MS)
        wrote.append(time.monotonic())

    (message,) = news(fresh, f"/api/runs/live/changes?after={ids}", 1, write)
    assert time.monotonic() - wrote[0] < 8.0
    assert [line["text"] for line in message["events"]] == ["iteration 8: reward 0.500, 0 explored"]


def test_a_browser_that_comes_back_gets_what_it_missed(fresh):
    ids = ",".join(map(str, fresh.get("/api/runs/live").json()["ids"]))
    with fresh.add() as made:
        made.status("running", 2 * HOUR_MS, "while away")
    (message,) = news(fresh, f"/api/runs/live/changes?after={ids}", 1)
    assert [line["text"] for line in message["events"]] == ["while away"]


def test_a_browser_that_comes_back_after_an_hour_reads_only_the_newest_events(fresh):
    ids = fresh.get("/api/runs/live").json()["ids"]
    with fresh.add() as made:
        made.trained(8, 2 * HOUR_MS)
        made.session.flush()
        one = made.session.scalars(select(ProgressRow).order_by(ProgressRow.id.desc())).first()
        row = {"run_id": one.run_id, "source": one.source, "lineage": 0, "kind": one.kind, "event": one.event}
        many = [{**row, "seq": 200_000 + n, "at_ms": one.at_ms + n} for n in range(5_000)]
        made.session.execute(insert(ProgressRow), many)
        made.status("running", 3 * HOUR_MS, "the newest")
    loaded = []
    event.listen(ProgressRow, "load", lambda row, context: loaded.append(row.id))
    begun = time.monotonic()
    (message,) = news(fresh, f"/api/runs/live/changes?after={','.join(map(str, ids))}", 1)
    assert time.monotonic() - begun < 30.0, "half a second on a quiet computer"
    assert len(loaded) <= EVENTS_SHOWN
    assert len(message["events"]) == EVENTS_SHOWN
    assert message["events"][-1]["text"] == "the newest"
    with fresh.sessions() as session:
        assert message["ids"] == list(newest_seen(session, find_run(session, "live")))


def test_a_stream_of_a_run_that_is_gone_says_so_and_goes_on_when_it_is_back(fresh):
    def rename(before: str, after: str) -> None:
        with fresh.sessions() as session, session.begin():
            find_run(session, before).name = after

    ids = ",".join(map(str, fresh.get("/api/runs/live").json()["ids"]))
    with httpx.stream("GET", f"{fresh.url}/api/runs/live/changes?after={ids}&token={TOKEN}", timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        rename("live", "gone")
        assert next(line for line in lines if line.startswith("event")) == "event: trouble"
        assert "no run is called live; did you mean" in next(lines)
        again = fresh.get(f"/api/runs/live/changes?after={ids}")
        assert (again.status_code, "no run is called live" in again.json()["error"]) == (404, True)
        rename("gone", "live")
        with fresh.add() as made:
            made.status("running", 2 * HOUR_MS, "it is back")
        assert "it is back" in next(line for line in lines if line.startswith('data: {"ids"'))


@pytest.mark.parametrize("text", ["", "1,2,3", "a,b,c,d", "1,2,3,-4", "1,2,3,4,5", "1,2,3," + "9" * 30])
def test_ids_that_are_none_count_as_nothing_seen(text):
    assert parse_ids(text) == (0, 0, 0, 0)
    assert parse_ids("1,2,3,4") == (1, 2, 3, 4)


def test_more_streams_than_allowed_are_refused(served):
    with httpx.Client(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as client, ExitStack() as opened:
        for _ in range(STREAMS):
            stream = opened.enter_context(client.stream("GET", f"{served.url}/api/changes"))
            assert stream.status_code == 200
        assert served.get("/api/changes").status_code == 503
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with httpx.stream("GET", f"{served.url}/api/changes?token={TOKEN}") as again:
            if again.status_code == 200:
                return
        time.sleep(0.1)
    pytest.fail("closed streams still count")


def test_a_stop_needs_the_name_of_the_run(fresh):
    headers = {"Authorization": f"Bearer {TOKEN}", "Origin": fresh.url}
    for body in ("", "{}", '{"confirm": "done"}', "[]"):
        assert httpx.post(f"{fresh.url}/api/runs/live/stop", headers=headers, content=body).status_code == 400
    assert fresh.stopped == []
    answer = httpx.post(f"{fresh.url}/api/runs/live/stop", headers=headers, content='{"confirm": "live"}')
    assert answer.json() == {"run": "live", "left": ["live-trainer-g1"]}
    assert fresh.stopped == ["live"]
    assert fresh.get("/api/runs/live").json()["view"]["status"] == "stopping"


def test_a_writer_is_never_kept_waiting_by_open_pages(served):
    with httpx.stream("GET", f"{served.url}/api/changes?token={TOKEN}", timeout=60) as stream:
        next(stream.iter_lines())
        writer = sqlite3.connect(served.path, timeout=0)
        writer.execute("BEGIN EXCLUSIVE")
        writer.execute("COMMIT")
        writer.close()


def test_a_ledger_that_is_gone_is_told_and_read_again_when_it_is_back(fresh):
    away = fresh.path.with_suffix(".away")
    os.rename(fresh.path, away)
    assert "Reading the ledger" in httpx.get(fresh.page).text
    answer = fresh.get("/api/list")
    assert answer.status_code == 503
    assert "the page tries again" in answer.json()["error"]
    os.rename(away, fresh.path)
    assert fresh.get("/api/list").status_code == 200


def test_a_reader_cannot_write(served):
    with open_read_only(served.path)() as session, pytest.raises(Exception, match="readonly"):
        session.connection().exec_driver_sql("DELETE FROM run")


def test_markup_in_the_ledger_is_data_in_the_answer(served):
    page = served.get("/api/runs/live")
    assert page.headers["content-type"] == "application/json"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.json()["plan"][0]["zones"] == [NASTY]
