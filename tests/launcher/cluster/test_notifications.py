"""Messages about a run: what is due, each cause once, and a webhook that is down, slow or wrong."""

import json
import logging
import re
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from launcher.checks.preflight import check_secrets
from launcher.cli import controller as controller_command
from launcher.controller.run_process import run_controller
from launcher.decide.facts import Stage
from launcher.job.checked import JobError
from launcher.job.load import load_job
from launcher.ledger.models import NoticeRow, Run
from launcher.ledger.store import append_status, find_run, writing
from launcher.money import HOUR_MS
from launcher.notifications.notices import RunFacts, due_notices
from launcher.notifications.notifier import Notifier
from launcher.notifications.webhook import NotDelivered, send, url_problem
from launcher.provision.local.provisioner import LocalProvisioner
from tests.launcher.cluster.stage import FAKE_AGENT, ledger, made_run

MINUTE = 60_000
RUNNING = RunFacts(
    name="digits",
    now_ms=100 * MINUTE,
    began_ms=0,
    stage=Stage.RUNNING,
    status_id=2,
    reason="",
    done_ms=(90 * MINUTE, 95 * MINUTE),
    preempted_ms=(),
    reached="",
    spent_micro_usd=1_000_000,
    max_total_micro_usd=20_000_000,
)


def keys(facts, no_progress_ms=HOUR_MS):
    return [notice.key for notice in due_notices(facts, no_progress_ms)]


def texts(facts):
    return "\n".join(notice.text for notice in due_notices(facts, HOUR_MS))


def test_a_run_that_goes_well_reports_its_start_only():
    assert keys(RUNNING) == ["started"]
    assert texts(RUNNING) == "digits started; budget $20.00"
    assert texts(replace(RUNNING, max_total_micro_usd=None)) == "digits started"


@pytest.mark.parametrize(
    ("spent", "percent"), [(9_999_999, None), (10_000_000, 50), (16_500_000, 80), (21_000_000, 100)]
)
def test_spending_is_reported_at_half_at_eighty_percent_and_at_the_end(spent, percent):
    found = keys(replace(RUNNING, spent_micro_usd=spent))
    assert found == (["started"] if percent is None else ["started", f"spend-{percent}-of-20000000"])


def test_each_promotion_is_reported_with_its_reason():
    lost = "trainer g1: digits-trainer-g0 ended: Server.SpotInstanceTermination: taken back\nlook at the zone"
    facts = replace(RUNNING, promoted=((7, "digits-spot-1-g0", lost), (9, "digits-spot-0-g2", "trainer g2: gone")))
    assert keys(facts) == ["started", "promoted-7", "promoted-9"]
    assert (
        "digits: digits-spot-1-g0 trains now, from the newest checkpoint; digits-trainer-g0 ended: "
        "Server.SpotInstanceTermination: taken back\n" in texts(facts)
    )


def test_a_larger_budget_is_reported_anew():
    assert keys(replace(RUNNING, spent_micro_usd=20_000_000, max_total_micro_usd=40_000_000))[-1].startswith(
        "spend-50-"
    )


def test_the_target_and_the_end_name_the_money():
    over = replace(
        RUNNING, stage=Stage.FINISHED, status_id=7, reason="target", reached="exact_match 0.986 at iteration 21"
    )
    assert keys(over) == ["started", "target", "ended-7"]
    assert "digits reached its target: exact_match 0.986 at iteration 21; $1.00 of $20.00 spent" in texts(over)
    assert "digits finished (target); $1.00 of $20.00 spent" in texts(over)


def test_three_preemptions_within_ten_minutes_are_a_storm_once_an_hour():
    storm = (10 * MINUTE, 14 * MINUTE, 19 * MINUTE, 21 * MINUTE, 24 * MINUTE)
    assert keys(replace(RUNNING, preempted_ms=storm)) == ["started", "storm-2"]
    assert keys(replace(RUNNING, preempted_ms=(10 * MINUTE, 14 * MINUTE, 21 * MINUTE))) == ["started"]
    later = (*storm, 90 * MINUTE, 91 * MINUTE, 92 * MINUTE)
    assert keys(replace(RUNNING, preempted_ms=later)) == ["started", "storm-2", "storm-7"]


def test_no_progress_is_measured_from_the_last_iteration_or_the_start():
    waits = replace(RUNNING, now_ms=95 * MINUTE + HOUR_MS)
    assert keys(waits)[-1] == f"no-progress-{95 * MINUTE}"
    assert keys(replace(waits, now_ms=waits.now_ms - 1)) == ["started"]
    assert keys(replace(waits, stage=Stage.STOPPING)) == ["started"]
    fresh = replace(RUNNING, began_ms=96 * MINUTE)  # resumed a moment ago
    assert keys(fresh) == ["started"]
    assert keys(replace(fresh, now_ms=96 * MINUTE + HOUR_MS))[-1] == f"no-progress-{96 * MINUTE}"
    slow = replace(RUNNING, done_ms=(0, 30 * MINUTE, 60 * MINUTE), now_ms=60 * MINUTE + 149 * MINUTE)
    assert keys(slow) == ["started"]  # five of its iterations take 150 minutes
    assert len(keys(replace(slow, now_ms=slow.now_ms + MINUTE))) == 2


@given(
    spent=st.integers(0, 10**8),
    preempted=st.lists(st.integers(0, 10**8), max_size=20).map(sorted),
    done=st.lists(st.integers(0, 10**8), max_size=20).map(sorted),
    more=st.integers(0, 10**8),
)
def test_a_cause_keeps_its_key_while_time_passes(spent, preempted, done, more):
    facts = replace(RUNNING, spent_micro_usd=spent, preempted_ms=preempted, done_ms=done, now_ms=10**8)
    found = keys(facts)
    assert len(found) == len(set(found))
    later = keys(replace(facts, now_ms=10**8 + more))
    assert set(found) <= set(later)


# --- the webhook ----------------------------------------------------------------------------------------------------


class Hook(ThreadingHTTPServer):
    """A webhook on loopback. `answers`: HTTP statuses to give next; then 200. `delay_s`: time before an answer."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HookHandler)
        self.answers, self.taken, self.asked, self.delay_s = [], [], 0, 0.0
        self.url = f"http://127.0.0.1:{self.server_port}/services/T0/SECRETPART"


class HookHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked += 1
        time.sleep(self.server.delay_s)
        status = self.server.answers.pop(0) if self.server.answers else 200
        if status == 200:
            self.server.taken.append(body["text"])
        self.send_response(status)
        self.send_header("Location", "http://127.0.0.1:9/")
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hook():
    server = Hook()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def sessions(home):
    return ledger(home)


def notifier(sessions, hook):
    """Return a notifier of the run `demo`, which is created if missing."""
    with sessions() as session:
        is_known = session.scalar(select(Run.id)) is not None
    if not is_known:
        made_run(sessions)
    with sessions() as session:
        clock = find_run(session, "demo").clock
    return Notifier(sessions, "demo", clock, hook.url, HOUR_MS)


def run_to_its_end(sessions, run):
    nodes = LocalProvisioner(Path(run.folder), run.clock, None, FAKE_AGENT)
    run_controller(sessions, run.name, provisioner=nodes)


def rows(sessions):
    with sessions() as session:
        return [(row.key, row.sent_wall_ms is not None, row.failure) for row in session.scalars(select(NoticeRow))]


def test_each_cause_is_sent_once_also_after_a_restart(sessions, hook):
    notifier(sessions, hook).look()
    again = notifier(sessions, hook)
    again.look()
    again.look()
    assert hook.taken == ["demo started"]
    with writing(sessions) as session:
        append_status(session, find_run(session, "demo"), Stage.STOPPED, "budget", 5)
    again.look()
    assert len(hook.taken) == 2
    assert "demo stopped (budget)" in hook.taken[1]


def test_what_a_webhook_did_not_take_is_sent_after_a_restart(sessions, hook):
    hook.answers = [503]
    first = notifier(sessions, hook)
    first.look()
    first.look()  # waits before its next attempt
    assert (hook.taken, hook.asked) == ([], 1)
    assert rows(sessions) == [("started", False, "")]
    notifier(sessions, hook).look()
    assert hook.taken == ["demo started"]
    assert rows(sessions) == [("started", True, "")]


def test_a_webhook_that_refuses_for_good_is_not_asked_again(sessions, hook, caplog):
    hook.answers = [404]
    one = notifier(sessions, hook)
    one.look()
    one.look()
    assert hook.asked == 1
    assert rows(sessions) == [("started", False, "HTTP status 404")]
    assert "SECRETPART" not in caplog.text
    assert "HTTP status 404" in caplog.text


@pytest.mark.parametrize(("status", "is_final"), [(302, True), (404, True), (429, False), (500, False)])
def test_answers_of_a_webhook(hook, status, is_final):
    hook.answers = [status]
    with pytest.raises(NotDelivered, match=str(status)) as found:
        send(hook.url, "text")
    assert found.value.is_final is is_final
    assert hook.asked == 1  # no redirect is followed


def test_no_text_about_a_failure_holds_the_url(hook):
    hook.delay_s = 1.0
    for url in (hook.url, "http://127.0.0.1:1/SECRETPART", "http://127.0.0.1:99999/SECRETPART"):
        with pytest.raises(NotDelivered) as found:
            send(url, "text", timeout_s=0.2)
        assert "SECRETPART" not in f"{found.value!r}{found.value.__cause__!r}"
        assert not found.value.is_final


def test_the_notifier_ends_in_time_when_its_webhook_hangs(sessions, hook):
    hook.delay_s = 30.0
    one = notifier(sessions, hook)
    one.start()
    began = time.monotonic()
    one.end(timeout_s=0.5)
    assert time.monotonic() - began < 8.0  # a request itself may take ten


def test_a_whole_run_sends_its_start_and_its_end(sessions, hook, monkeypatch, caplog):
    monkeypatch.setenv("FAKE_SECONDS", "0.1")
    monkeypatch.setenv("HOOK", hook.url)
    run = made_run(sessions, spot=1, iterations=3, factor=3000.0, notifications={"webhook": "HOOK"})
    run_to_its_end(sessions, run)
    assert hook.taken[0] == "demo started"
    assert re.match(r"demo finished \(.*\); \$0\.\d+ spent", hook.taken[-1])
    assert "SECRETPART" not in caplog.text


def test_the_log_of_a_controller_holds_no_webhook(sessions, hook, monkeypatch, caplog):
    """The address is a secret, and httpx logs every address at the level at which a controller logs."""
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.INFO, logger="httpx")
    run = made_run(sessions, spot=1)
    monkeypatch.setattr(controller_command, "run_controller", lambda sessions, name: send(hook.url, "text"))
    CliRunner().invoke(controller_command.controller, [run.name], obj=sessions)
    assert hook.taken == ["text"]
    assert "looks after demo" in caplog.text
    assert "SECRETPART" not in caplog.text


def test_a_run_goes_on_when_its_webhook_is_down(sessions, monkeypatch, caplog):
    monkeypatch.setenv("FAKE_SECONDS", "0.1")
    monkeypatch.setenv("HOOK", "http://127.0.0.1:1/SECRETPART")
    run = made_run(sessions, spot=1, iterations=3, factor=3000.0, notifications={"webhook": "HOOK"})
    run_to_its_end(sessions, run)
    assert rows(sessions)[0] == ("started", False, "")
    assert "SECRETPART" not in caplog.text


def test_a_controller_without_the_url_says_so_and_goes_on(sessions, monkeypatch, caplog):
    monkeypatch.setenv("FAKE_SECONDS", "0.1")
    monkeypatch.delenv("HOOK", raising=False)
    run = made_run(sessions, spot=1, iterations=3, factor=3000.0, notifications={"webhook": "HOOK"})
    run_to_its_end(sessions, run)
    assert "no notices are sent: HOOK is not set where the controller was started" in caplog.text


@pytest.mark.parametrize(
    ("url", "is_usable"),
    [
        ("https://hooks.slack.com/services/T/B/x", True),
        ("http://localhost:8080/x", True),
        ("http://hooks.example.com/x", False),
        ("hooks.slack.com/x", False),
        ("https://", False),
        ("http://[::1", False),
    ],
)
def test_urls_of_webhooks(url, is_usable):
    assert (url_problem(url) == "") is is_usable
    assert "example" not in url_problem(url)


def test_the_job_names_a_variable_and_not_the_url(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("notifications: {webhook: SLACK_WEBHOOK}\n")
    checked = load_job(path)
    check_secrets(checked, {"SLACK_WEBHOOK": "https://hooks.slack.com/x"})
    for environ, found in (({}, "is not set here"), ({"SLACK_WEBHOOK": "ftp://SECRETPART"}, "https:// URL")):
        with pytest.raises(JobError, match=found) as refused:
            check_secrets(checked, environ)
        assert "SECRETPART" not in str(refused.value)
    path.write_text("notifications: {webhook: 'https://hooks.slack.com/SECRETPART'}\n")
    with pytest.raises(JobError, match="write the name only, like SLACK_WEBHOOK"):
        load_job(path)
