"""Prompts are a pure function of (run seed, batch), and never a held-out one."""

import pytest

from engine.algorithm_config import AlgorithmConfig
from engine.config import EngineConfig, EvaluationConfig
from engine.prompt_set import read_prompts
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


def test_the_held_out_strings_never_change():
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
    assert sorted([*source.batch(0), *source.held_out()]) == ["a cat", "a cow", "a dog", "a hen", "a pig"]


LINES = [f"{subject} {number}" for subject in ("cat", "dog", "hen", "pig", "cow") for number in range(10)]
"""A file that is sorted by subject."""


def source_of(folder, lines, **fields):
    return prompt_source(config(write(folder, lines), per_batch=6, **fields), str(folder))


def test_a_byte_order_mark_belongs_to_no_prompt(tmp_path):
    """Windows writes one at the start of a UTF-8 file."""
    (tmp_path / "prompts.txt").write_text("# a comment\na cat\n", encoding="utf-8-sig")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a cat"}\n', encoding="utf-8-sig")
    assert list(read_prompts(tmp_path / "prompts.txt")) == list(read_prompts(tmp_path / "prompts.jsonl")) == ["a cat"]


def test_a_random_part_of_a_file_is_held_out_and_never_trained(tmp_path):
    source = source_of(tmp_path, LINES, evaluated=9)
    trained = {prompt for batch in range(60) for prompt in source.batch(batch)}
    assert len(source.held_out()) == 9
    assert trained == set(LINES) - set(source.held_out())
    assert len({prompt.split()[0] for prompt in source.held_out()}) >= 4  # the last lines would all be cows


def test_held_out_prompts_depend_on_the_prompts_alone(tmp_path):
    first = set(source_of(tmp_path, LINES, evaluated=9).held_out())
    assert set(source_of(tmp_path, LINES[::-1], evaluated=9, seed=5).held_out()) == first
    assert len(first & set(source_of(tmp_path, [*LINES, "an owl"], evaluated=9).held_out())) >= 8


def test_prompts_of_a_test_file_are_evaluated_and_never_trained(tmp_path):
    (tmp_path / "test.txt").write_text("dog 3\nan owl\n# a comment\n\nan eel\n", encoding="utf-8")
    made = config(write(tmp_path, LINES), per_batch=8).model_copy(update={"test_prompts": "test.txt"})
    source = prompt_source(made, str(tmp_path))
    assert source.held_out() == ["dog 3", "an owl", "an eel"]
    assert {prompt for batch in range(60) for prompt in source.batch(batch)} == set(LINES) - {"dog 3"}


def test_a_test_file_that_is_missing_or_empty_is_named(tmp_path):
    made = config(write(tmp_path, LINES)).model_copy(update={"test_prompts": "test.txt"})
    with pytest.raises(ValueError, match=r"test_prompts is 'test.txt', but there is no file"):
        prompt_source(made, str(tmp_path))
    (tmp_path / "test.txt").write_text("# nothing\n")
    with pytest.raises(ValueError, match=r"test.txt has no prompts to evaluate with"):
        prompt_source(made, str(tmp_path))


def test_digits_have_held_out_prompts_of_their_own_and_take_no_test_file():
    with pytest.raises(ValueError, match="digits has held-out prompts of its own"):
        EngineConfig(test_prompts="test.txt")


def test_one_pass_over_a_file_repeats_no_prompt(tmp_path):
    name = write(tmp_path, [f"prompt {number}" for number in range(50)])
    source = prompt_source(config(name, per_batch=10), str(tmp_path))
    first_pass = [prompt for batch in range(4) for prompt in source.batch(batch)]
    assert len(set(first_pass)) == 40
    assert first_pass[:10] != source.batch(4)


def test_a_file_with_too_few_prompts_is_refused_with_its_count(tmp_path):
    name = write(tmp_path, ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"has 3 different prompts, 1 of them held out.*leaves 2"):
        prompt_source(config(name), str(tmp_path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file .*nowhere\.txt"):
        prompt_source(config("nowhere.txt"), str(tmp_path))
