"""Prompts are a pure function of (run seed, batch), and never a held-out one."""

import pytest

from engine.config import AlgorithmConfig, EngineConfig, EvaluationConfig
from engine.prompts import held_out_digits, prompt_source


def config(prompts="digits", seed=0, per_batch=12, evaluated=512):
    return EngineConfig(
        seed=seed,
        prompts=prompts,
        algorithm=AlgorithmConfig(prompts_per_batch=per_batch),
        evaluation=EvaluationConfig(prompts=evaluated),
    )


def write(folder, lines):
    (folder / "prompts.txt").write_text("\n".join(lines), encoding="utf-8")
    return "prompts.txt"


def test_digits_of_a_batch_are_distinct_strings_of_four_digits():
    source = prompt_source(config(), None)
    for batch in range(50):
        prompts = source.batch(batch)
        assert len(set(prompts)) == 12
        assert all(len(prompt) == 4 and prompt.isdigit() for prompt in prompts)


def test_a_batch_asked_for_again_is_the_same():
    assert prompt_source(config(), None).batch(7) == prompt_source(config(), None).batch(7)


def test_other_batches_and_other_runs_have_other_prompts():
    source = prompt_source(config(), None)
    assert source.batch(7) != source.batch(8)
    assert source.batch(7) != prompt_source(config(seed=1), None).batch(7)


def test_these_strings_stay_held_out_for_good():
    assert held_out_digits()[:5] == ["6509", "6355", "3893", "0386", "6274"]
    assert len(set(held_out_digits())) == 512


def test_held_out_digits_are_never_trained():
    source = prompt_source(config(per_batch=2000, evaluated=100), None)
    trained = {prompt for batch in range(30) for prompt in source.batch(batch)}
    assert source.held_out() == held_out_digits()[:100]
    assert not trained & set(held_out_digits())


def test_more_digits_than_are_held_out_cannot_be_evaluated():
    with pytest.raises(ValueError, match="513"):
        prompt_source(config(evaluated=513), None)


def test_blank_lines_comments_and_repeats_of_a_file_are_skipped(tmp_path):
    name = write(tmp_path, ["# a comment", "a cat", "", "  a dog  ", "a cat", "a cow", "a pig", "a hen"])
    source = prompt_source(config(name, per_batch=4), str(tmp_path))
    assert sorted(source.batch(0)) == ["a cat", "a cow", "a dog", "a pig"]
    assert source.held_out() == ["a hen"]


def test_the_last_lines_are_held_out_and_never_trained(tmp_path):
    lines = [f"prompt {number}" for number in range(50)]
    source = prompt_source(config(write(tmp_path, lines), per_batch=6, evaluated=7), str(tmp_path))
    trained = {prompt for batch in range(40) for prompt in source.batch(batch)}
    assert source.held_out() == lines[-7:]
    assert trained == set(lines[:-7])


def test_one_pass_over_a_file_repeats_no_prompt(tmp_path):
    name = write(tmp_path, [f"prompt {number}" for number in range(50)])
    source = prompt_source(config(name, per_batch=10), str(tmp_path))
    first_pass = [prompt for batch in range(4) for prompt in source.batch(batch)]
    assert len(set(first_pass)) == 40
    assert first_pass[:10] != source.batch(4)


def test_a_file_with_too_few_prompts_says_what_it_has(tmp_path):
    name = write(tmp_path, ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"has 3 different prompts, 1 of them held out.*leaves 2"):
        prompt_source(config(name), str(tmp_path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file .*nowhere\.txt"):
        prompt_source(config("nowhere.txt"), str(tmp_path))
