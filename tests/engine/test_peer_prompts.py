"""Prompt files of other projects are read as those projects read them, and their metadata reaches the scorer.

`tests/data/prompts` holds 40 prompts in each format, written for these tests. `peers.json` records the output of the
other projects' own readers on the files: flow_grpo's `TextPromptDataset`, `GenevalPromptDataset` and the target of its
`OcrScorer` (commit ac4c86e), and the reader of T2I-CompBench's `inference_eval.py`.
"""

import json
from pathlib import Path

import pytest
import torch

from engine.algorithm_config import AlgorithmConfig
from engine.config import EngineConfig, RewardConfig
from engine.prompt_set import PromptFileError, all_metadata, read_prompts
from engine.prompts import prompt_source
from engine.rewards.load import load_reward_of_job
from engine.rewards.requested_text import requested_texts

DATA = Path(__file__).parent.parent / "data/prompts"
PEERS = json.loads((DATA / "peers.json").read_text("utf-8"))


@pytest.mark.parametrize("name", ["ocr.txt", "pickscore.txt", "geneval.jsonl", "compbench.txt"])
def test_a_peers_file_gives_the_prompts_and_the_metadata_of_the_peers_reader(name):
    recorded = PEERS[Path(name).stem]
    assert len(recorded) == 40
    read = read_prompts(DATA / name)
    assert [(prompt, dict(metadata)) for prompt, metadata in read.items()] == [
        (case["prompt"], case.get("metadata", {})) for case in recorded
    ]


def test_the_ocr_reward_looks_for_the_targets_of_flow_grpos_scorer():
    # flow_grpo removes spaces alone, spotrl every white space: no reader reports a tab.
    # flow_grpo asks for the first text in straight quotes, spotrl for all texts in any quotes.
    for case in PEERS["ocr"]:
        assert case["target"].replace("\t", "") in requested_texts(case["prompt"])
    several = [requested_texts(case["prompt"]) for case in PEERS["ocr"] if len(requested_texts(case["prompt"])) > 1]
    assert several == [("salt", "pepper"), ("curlyquotes", "straightquotes")]


def own_reward(folder, module, body):
    (folder / f"{module}.py").write_text(body)
    return RewardConfig(name=f"{module}:score")


def geneval_job(folder, reward, **changes):
    (folder / "set").mkdir(exist_ok=True)
    (folder / "set/train_metadata.jsonl").write_bytes((DATA / "geneval.jsonl").read_bytes())
    batch = AlgorithmConfig(prompts_per_batch=4)
    return EngineConfig(prompts="set", reward=reward, algorithm=batch, **changes)


def test_the_metadata_of_each_prompt_reaches_a_users_function(tmp_path):
    body = "def score(images, prompts, metadata):\n    return [one['include'][0]['count'] for one in metadata]\n"
    job = geneval_job(tmp_path, own_reward(tmp_path, "counts_objects", body))
    cases = {case["prompt"]: case["metadata"]["include"][0]["count"] for case in PEERS["geneval"]}
    prompts = prompt_source(job, str(tmp_path)).batch(0)
    scores = load_reward_of_job(job, str(tmp_path))(torch.zeros(4, 3, 8, 8), prompts)
    assert [score.reward for score in scores] == [cases[prompt] for prompt in prompts]


def test_an_async_function_is_awaited(tmp_path):
    body = "import asyncio\nasync def score(images, prompts):\n    await asyncio.sleep(0)\n    return [0.5, 1.0]\n"
    reward = load_reward_of_job(geneval_job(tmp_path, own_reward(tmp_path, "waits_a_little", body)), str(tmp_path))
    assert [score.reward for score in reward(torch.zeros(2, 3, 8, 8), ["a", "b"])] == [0.5, 1.0]


def test_a_folder_of_prompts_is_trained_and_tested_by_its_two_files(tmp_path):
    job = geneval_job(tmp_path, RewardConfig())
    (tmp_path / "set/test_metadata.jsonl").write_text('{"prompt": "a heron"}\n{"prompt": "an egret"}\n')
    assert prompt_source(job, str(tmp_path)).held_out() == ["a heron", "an egret"]
    (tmp_path / "set/train.txt").write_text("a cat\n")
    with pytest.raises(PromptFileError, match=r"has train.txt and train_metadata.jsonl; use a folder with one of"):
        prompt_source(job, str(tmp_path))


def test_two_metadata_of_one_prompt_are_refused_within_a_file_and_between_files(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "a cat", "count": 1}\n\n{"prompt": "a cat", "count": 1}\n')
    (tmp_path / "test.jsonl").write_text('{"prompt": "a cat", "count": 2}\n')
    assert all_metadata(tmp_path, "train.jsonl", None) == {"a cat": {"prompt": "a cat", "count": 1}}
    with pytest.raises(PromptFileError, match=r"'a cat' has two different metadata, .*\"count\": 1.*\"count\": 2"):
        all_metadata(tmp_path, "train.jsonl", "test.jsonl")


@pytest.mark.parametrize("line", ["a cat", "[1]", '{"text": "a cat"}', '{"prompt": 3}', '{"prompt": " "}'])
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a dog"}\n' + line + "\n")
    with pytest.raises(PromptFileError, match=r"mine.jsonl, line 2 (is no JSON|has no text under \"prompt\")"):
        read_prompts(tmp_path / "mine.jsonl")
