"""The last line and the exit code of `make quickstart`."""

import json

import pytest

from launcher.report.verdict import main


def result(reached=False, before=0.3, after=0.5):
    target = {"metric": "exact_match", "value": 0.78, "reached": reached}
    return {"target": target, "exact_match": {"before": before, "after": after}, "preemptions": []}


@pytest.mark.parametrize(
    ("exit_code", "given", "expected", "words"),
    [
        (
            *(0, result(reached=True, after=0.8), 0),
            "The target of exact_match 0.780 was reached. Held-out exact_match went from 0.300 to 0.800. The report",
        ),
        (7, result(reached=True), 0, "was reached. Held-out exact_match went from 0.300 to 0.500, before its budget"),
        (0, result(reached=True, after=None), 0, "The target of exact_match 0.780 was reached. The report is in"),
        (7, result(), 0, "went from 0.300 to 0.500, before its budget was used up; the target was not reached"),
        (8, result(), 0, "before its deadline"),
        (
            8,
            result(reached=True),
            0,
            "was reached, after the deadline. Held-out exact_match went from 0.300 to 0.500. The",
        ),
        (0, result(after=0.41), 0, "went from 0.300 to 0.410; the target"),
        (0, result(after=0.39), 1, "went from 0.300 to 0.390: less than 0.10 more"),
        (7, result(after=None), 1, "before its score was measured twice"),
        (10, result(reached=True), 1, "ended with exit code 10"),
        (130, result(reached=True), 1, "ended with exit code 130"),
        (3, None, 1, "ended with exit code 3"),
    ],
)
def test_the_verdict_follows_target_rise_and_exit_code(tmp_path, capsys, exit_code, given, expected, words):
    path = tmp_path / "result.json"
    if given is not None:
        path.write_text(json.dumps(given))
    assert main([str(exit_code), str(path), "report.html"]) == expected
    assert words in capsys.readouterr().out


NODE, TRAINER, PROMOTION = ("rollout", "a new node"), ("trainer", "a new node"), ("trainer", "a promotion")


@pytest.mark.parametrize(
    ("preemptions", "words"),
    [
        ([], ". The report is in"),
        ([NODE], " Preempted: a rollout node once; each was replaced. The report"),
        (
            [NODE, PROMOTION, NODE],
            "the trainer once (a node that was up took its role once), a rollout node twice; each",
        ),
        ([PROMOTION, TRAINER, PROMOTION], "the trainer 3 times (a node that was up took its role twice); each was"),
        ([TRAINER], "the trainer once; each was replaced"),
        ([NODE, ("rollout", None)], "a rollout node twice; 1 of 2 were replaced"),
    ],
)
def test_the_verdict_says_what_was_lost_and_replaced(tmp_path, capsys, preemptions, words):
    path = tmp_path / "result.json"
    lost = [{"role": role, "recovered_by": recovered_by} for role, recovered_by in preemptions]
    path.write_text(json.dumps({**result(reached=True), "preemptions": lost}))
    assert main(["0", str(path), "report.html"]) == 0
    assert words in capsys.readouterr().out
