"""Prompt files of every kind are read as what they are, or refused; prompts that are cut are named before the run."""

import json
import re

import pytest
from transformers import ByT5Tokenizer

from engine.config import EngineConfig, ModelConfig, RewardConfig
from engine.entrypoints import prompt_warnings as module
from engine.entrypoints.prompt_warnings import prompt_warnings
from engine.prompt_set import NO_METADATA, PromptFileError, read_prompts
from engine.prompts import FilePrompts
from launcher.cli.main import run
from launcher.exit_codes import ExitCode
from tests.model_folders import write_model

CATS = ["cat 0", "cat 1"]
OBJECTS = [{"prompt": cat} for cat in CATS]
LINES = "\n".join(map(json.dumps, OBJECTS))

READ = {
    "a.json": json.dumps(CATS, indent=2),
    "b.json": json.dumps(OBJECTS, indent=2),
    "c.JSON": json.dumps({"prompts": CATS}, indent=2),
    "d.json": json.dumps({"prompts": OBJECTS}),
    "lines.json": LINES,
    "e.jsonl": LINES,
    "f.JSONL": LINES + "\n\n",
    "g.ndjson": LINES,
    "h.Ndjson": LINES.replace("\n", "\r\n"),
    "strings.jsonl": '"cat 0"\n"cat 1"\n',
    "i.csv": "prompt\ncat 0\ncat 1\n",
    "j.CSV": "id,Prompt\r\n1,cat 0\r\n2,cat 1\r\n",
    "k.csv": 'prompt;id\n"cat 0";1\ncat 1;2\n',
    "l.tsv": "prompt\tid\ncat 0\t1\ncat 1\t2\n",
    "m.txt": "# two\ncat 0\n\ncat 1\n",
    "n.TXT": "\ufeffcat 0\r\ncat 1",
    "o": "cat 0\rcat 1",
    "old.prompts": "cat 0\ncat 1",
}


@pytest.mark.parametrize("name", READ)
def test_a_file_is_read_as_what_it_is(tmp_path, name):
    (tmp_path / name).write_bytes(READ[name].encode())
    assert list(read_prompts(tmp_path / name)) == CATS


def test_a_single_object_and_cells_with_separators_are_prompts(tmp_path):
    (tmp_path / "one.json").write_text('{\n  "prompt": "a cat",\n  "tag": 1\n}')
    assert read_prompts(tmp_path / "one.json") == {"a cat": {"prompt": "a cat", "tag": 1}}
    (tmp_path / "t.csv").write_text('prompt,tag\n"a cat, a dog\nand ""HI""",x\n')
    prompt = 'a cat, a dog\nand "HI"'
    assert read_prompts(tmp_path / "t.csv") == {prompt: {"prompt": prompt, "tag": "x"}}
    (tmp_path / "u.csv").write_text("prompt\na cat\n")
    assert read_prompts(tmp_path / "u.csv")["a cat"] is NO_METADATA


@pytest.mark.parametrize(
    "line",
    [
        "[photo] of a cat",
        "{a|b} cat",
        "- a cat\na dog",
        "a cat: two",
        "I prompt, you paint",
        "2 cats\n3 dogs",
        "1. FC Köln",
    ],
)
def test_a_text_that_only_looks_like_another_kind_stays_text(tmp_path, line):
    (tmp_path / "p.txt").write_text(line)
    assert list(read_prompts(tmp_path / "p.txt")) == line.split("\n")


REFUSED = {
    "p.yaml": ("- a cat\n- a dog\n", r"of another kind \(\.yaml\); use text with one prompt a line"),
    "p.YML": ("prompts:\n- a cat\n", r"of another kind \(\.YML\)"),
    "p.parquet": ("PAR1", "of another kind"),
    "p.xlsx": ("PK", "of another kind"),
    "p.jsonl.gz": ("\x1f", "of another kind"),
    "list.txt": (json.dumps(CATS, indent=2), r"is JSON by its content.*call it \.json"),
    "object.txt": ('{\n"prompts": ["a cat"]\n}', "is JSON by its content"),
    "cut.txt": ('[\n  "cat 0",\n', "is JSON by its content"),
    "short.txt": ('["cat 0", "cat 1"]', "is JSON by its content"),
    "lines.txt": (LINES, r"is JSON Lines by its content.*call it \.jsonl"),
    "one": (LINES.split("\n")[0], "is JSON Lines"),
    "table.txt": ("id,prompt\n1,a cat\n", r"is a table by its content.*call it \.csv"),
    "quoted.txt": ('"prompt"\n"a cat"\n', "is a table"),
    "marks.txt": ("- a cat\n- a dog\n", "is YAML by its content"),
    "doc.txt": ("---\n- a cat\n", "is YAML"),
    "keys.txt": ("prompts:\n  - a cat\n", "is YAML"),
    "python.txt": ("['a cat', 'a dog']\n", "is a Python list by its content"),
    "numbers.txt": ("1. a cat\n2. a dog\n", "is a list with marks by its content.*without numbers"),
    "bullets.txt": ("* a cat\n* a dog\n", "is a list with marks"),
    "commas.txt": ('"a cat",\n"a dog"\n', "is a list with marks"),
    "page.txt": ("<!DOCTYPE html>\n<p>a cat\n", "is a web page"),
    "zero.txt": ("a cat\0\n", r"line 1 has a control character \(\\x00\)"),
    "latin.jsonl": (r'{"prompt": "a cat\u0085"}', "control character"),
    "bad.json": ('["a cat"', "is no JSON"),
    "number.json": ("[1]", r'entry 1 has no text under "prompt"'),
    "empty.json": ('{"caption": "a cat"}', r'entry 1 has no text under "prompt"'),
    "pretty.jsonl": (json.dumps(OBJECTS, indent=2), r"line 1 is no JSON .*call it \.json"),
    "blank.ndjson": ('{"prompt": " "}', "line 1 has no text"),
    "caption.csv": ("caption,id\na cat,1\n", "has the columns caption, id, without one `prompt`"),
    "nohead.csv": ("a cat\na dog\n", "has the columns a cat, without one"),
    "commas.csv": ("prompt,id\na cat, a dog,1\n", "line 2 has 3 cells, and the header 2"),
    "hole.csv": ("prompt,id\n,1\n", "line 2 has no prompt"),
    "quotes.csv": ('prompt\n"a cat', "is no row of a table"),
    "half.jsonl": (r'{"prompt": "a \ud83d cat"}', r"line 1 has half of a character \(\\ud83d\)"),
    "half.json": (r'["a \ude00 cat"]', r"entry 1 has half of a character"),
    "inside.jsonl": (r'{"prompt": "a cat", "tag": ["\udc00"]}', "half of a character"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_of_another_kind_is_refused_with_its_kind(tmp_path, name):
    text, words = REFUSED[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(PromptFileError) as error:
        read_prompts(tmp_path / name)
    assert re.search(words, str(error.value)), error.value


def test_a_launch_refuses_the_file_and_names_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    (tmp_path / "p.yaml").write_text("- a cat\n")
    (tmp_path / "job.yaml").write_text("infra: local\nprompts: p.yaml\n")
    assert run(["launch", str(tmp_path / "job.yaml"), "--dry-run"]) == ExitCode.INVALID_JOB
    assert "p.yaml is a file of another kind (.yaml); use text" in " ".join(capsys.readouterr().err.split())


class Words:
    """A tokenizer with a token for each word."""

    def __call__(self, prompt, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": prompt.split()}

    def decode(self, ids):
        return " ".join(ids)


@pytest.fixture
def warned(monkeypatch):
    """Return the warnings about prompts of a model with a tokenizer of words, by family and `max_text_tokens`."""
    monkeypatch.setattr(module, "_tokenizer", lambda folder, part: Words())

    def warned(family, prompts, tokens, reward="pickle:rick"):
        model = ModelConfig(name=family, path="there", max_text_tokens=tokens)
        config = EngineConfig(model=model, reward=RewardConfig(name=reward))
        source = FilePrompts(trained=tuple(prompts[:-1]), evaluated=(prompts[-1],), run_seed=0, prompts_per_batch=1)
        return prompt_warnings(config, source)

    return warned


LONG = "word " * 29 + 'and a sign "OPEN NOW"'  # 34 words


@pytest.mark.parametrize(
    ("family", "fits"), [("qwen-image", 34), ("sd3", 35), ("flux", 35), ("wan", 35), ("hunyuan-video", 34)]
)
def test_cut_prompts_are_counted_and_named_with_the_limit(warned, family, fits):
    assert warned(family, [LONG, "a cat"], fits) == []
    (text,) = warned(family, [LONG, "a cat", LONG + " x"], fits - 1)
    assert f"2 of 3 prompts are longer than the 33 tokens that the text encoder of {family} takes" in text
    assert "(34 tokens), " in text
    assert "(35 tokens)" in text
    assert "raise model.max_text_tokens" in text


def test_a_requested_text_behind_the_limit_is_named(warned):
    cut, hidden = warned("flux", [LONG, "a “cat”"], 30, "ocr")
    assert "1 of 2 prompts are longer" in cut
    assert "1 of 2 prompts ask for a text behind the 29 tokens that the model sees" in hidden
    assert "asks for opennow" in hidden
    (only_cut,) = warned("flux", ['a sign "OPEN NOW" ' + "word " * 40, "a “cat”"], 30, "ocr")
    assert "longer" in only_cut


def test_the_pipelines_own_limit_of_qwen_image_counts(warned):
    (text,) = warned("qwen-image", ["word " * 1025, "a cat"], 2048)
    assert "longer than the 1024 tokens" in text
    assert "max_text_tokens" not in text


def test_many_cut_prompts_are_counted_and_three_are_shown(warned):
    (text,) = warned("wan", [f"{number} " + "word " * 40 for number in range(9)], 30)
    assert "9 of 9 prompts" in text
    assert ", and 6 more" in text


@pytest.mark.parametrize("family", ["sd3", "flux", "wan"])
def test_the_limit_is_that_of_the_diffusers_pipeline(tmp_path, family):
    from engine.models.load import load_family
    from tests.tiny_pipelines import PIPELINES

    PIPELINES[family]().save_pretrained(tmp_path)
    model = ModelConfig(name=family, path=str(tmp_path), height=16, width=16, max_text_tokens=40)
    adapter, taken = load_family(model), 40 - module.LIMITS[family].end_tokens

    def text(prompt):
        return adapter.encode([prompt])["hidden"][0][-40:]  # behind the 77 tokens of sd3's CLIP encoders

    def warnings(prompt):
        config = EngineConfig(model=model, reward=RewardConfig(name="module:function"))
        return prompt_warnings(config, FilePrompts((prompt,), (prompt,), 0, 1))

    whole, last, behind = "a" * taken, "a" * (taken - 1) + "b", "a" * taken + "b"  # a token a byte
    assert not text(whole).equal(text(last))
    assert text(whole).equal(text(behind))
    assert warnings(whole) == warnings(last) == []
    assert "2 of 2 prompts are longer than the 39 tokens" in warnings(behind)[0]


@pytest.mark.slow
def test_a_dry_run_on_a_cloud_names_the_prompts_without_loading_the_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    folder = write_model(tmp_path / "model", "sd3")
    ByT5Tokenizer().save_pretrained(folder / "tokenizer_3")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"tokenizer_3": ["transformers", "ByT5Tokenizer"]}))
    prompts = [f'cat "{number}"' for number in range(40)]
    (tmp_path / "p.txt").write_text("\n".join([*prompts, "a" * 300 + ' "DOG"', "a sign „привет“"]))
    (tmp_path / "job.yaml").write_text(
        "name: cut\ninfra: aws\nstore: {aws: s3://runs/ours}\nreward: ocr\nprompts: p.txt\n"
        "model: {name: sd3, path: model, weights: lora}\nbudget: {max_total: 400, max_hourly: 30}\n"
    )
    assert run(["launch", str(tmp_path / "job.yaml"), "--dry-run"]) == ExitCode.OK
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "1 of 42 prompts are longer than the 255 tokens that the text encoder of sd3 takes" in shown
    assert "1 of 42 prompts ask for a text behind the 255 tokens" in shown
    assert "1 of 42 prompts ask for characters that the OCR reader cannot read (п р и в е т)" in shown
