"""The memory of a job's GPUs and the disk of its nodes: the plan prints both, and a launch refuses what cannot fit."""

import json
import re
import shutil
from importlib.resources import files

import pytest

from engine.memory.budget import GIB, usable_bytes
from launcher.cli.main import run
from launcher.exit_codes import ExitCode
from tests.launcher.printed import printed
from tests.model_folders import write_model

JOB = "qwen_image_ocr.yaml"


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys, few_replays):
    """Call `spotrl launch --dry-run` on a copy of the reference recipe, in a temporary home."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    for name in (JOB, "qwen_image_ocr_prompts.txt", "qwen_image_ocr_test_prompts.txt"):
        shutil.copy(str(files("sky_yamls") / name), tmp_path / name)

    def dry_run(*settings: str, json: bool = False) -> tuple[int, str]:
        more = [part for setting in settings for part in ("--set", setting)]
        arguments = [*more, "--infra", "aws,gcp", "--dry-run", "--explain", *(["--json"] if json else [])]
        code = run(["launch", str(tmp_path / JOB), *arguments])
        captured = capsys.readouterr()
        return code, captured.out if code == ExitCode.OK else " ".join(captured.err.split())

    dry_run.folder = tmp_path
    return dry_run


def column(shown: str, role: int) -> dict[str, float]:
    """Return a column of the memory table by the words of its rows."""
    lines = shown[shown.index("GiB of each GPU") :].splitlines()[1:]
    table = {}
    for line in lines:
        found = re.fullmatch(r"  (.+?)  +([\d.]+|-)  +([\d.]+|-)", line)
        if found is None:
            break
        table[found[1]] = float(found[2 + role].replace("-", "0"))
    return table


PARTS = ("transformer", "VAE", "adapters", "adapters in bf16", "optimiser", "average, old policy", "gradients")


def test_the_printed_memory_adds_up(dry_run):
    code, shown = dry_run()
    assert code == ExitCode.OK
    trainer, rollout = column(shown, 0), column(shown, 1)
    for table in (trainer, rollout):
        assert table["free then"] == pytest.approx(
            table["usable"] - sum(table[name] for name in PARTS) - table["a pass"], abs=0.35
        )
        assert table["while it loads"] < table["usable"]
        assert table["rows, images of a pass"] == 8 <= table["as many would fit"]
    assert trainer["a pass"] == pytest.approx(8 * trainer["each row, each image"], rel=0.01)
    filled = sum(trainer[name] for name in PARTS) + trainer["as many would fit"] * trainer["each row, each image"]
    assert trainer["usable"] - trainer["each row, each image"] < filled <= trainer["usable"] + 0.35


def test_the_memory_of_the_20_b_model_is_recomputed_by_hand(dry_run):
    """20.43 billion bf16 weights, and 720 adapters of rank 64: 425 million fp32 numbers."""
    _, shown = dry_run()
    table = column(shown, 0)
    # Of 60 blocks, both streams have 4 projections of 3072 x 3072 and 2 between 3072 and 12288.
    adapters = 60 * 2 * 64 * (4 * (3072 + 3072) + 2 * (3072 + 12288))
    assert table["transformer"] == pytest.approx(20_430_401_088 * 2 / GIB, abs=0.05)
    assert table["adapters"] == pytest.approx(adapters * 4 / GIB, abs=0.05)
    assert table["optimiser"] == table["average, old policy"] == table["gradients"]
    assert table["optimiser"] == pytest.approx(2 * adapters * 4 / GIB, abs=0.05)
    # Checkpointing keeps the input of 60 blocks of two guidance branches: 1024 + 256 tokens of 3072 numbers.
    assert table["each row, each image"] > 2 * 60 * 1280 * 3072 * 2 / GIB


def test_the_json_plan_has_the_memory_in_bytes(dry_run):
    _, out = dry_run(json=True)
    trainer, rollout = printed("launch", out)["plan"]["memory"]
    assert (trainer["role"], rollout["role"]) == ("trainer", "rollout")
    assert trainer["usable"] == usable_bytes("H100", 80)
    parts = sum(trainer["parts"].values())
    assert trainer["busy"] == 8 * trainer["bytes_each"]
    assert trainer["free"] == trainer["usable"] - parts - trainer["busy"]
    assert trainer["fitting"] == (trainer["usable"] - parts) // trainer["bytes_each"]


@pytest.mark.parametrize(("degree", "groups"), [(1, 0), (2, 1), ("auto", 3)])
def test_the_groups_of_a_worker_take_memory(dry_run, degree, groups):
    """Of eight workers: pairs, fours and the eight with auto. NCCL took .59 GB for a group (gpu.md)."""
    _, shown = dry_run(f"runtime.sp_degree={degree}", *LIMITS)
    table = column(shown, 1)
    assert table.get("groups (NCCL)", 0) == pytest.approx(groups * 0.59e9 / GIB, abs=0.06)


LIMITS = ("budget.max_total=20000", "budget.deadline=60d")
"""Limits that leave room for a slow job: 1280 px, or one row a pass, takes five to ten times as long."""


def test_rows_that_do_not_fit_are_named_and_the_plan_takes_fewer(dry_run):
    _, shown = dry_run("model.height=1280", "model.width=1280", *LIMITS)
    assert column(shown, 0)["rows, images of a pass"] == 4
    assert "passes of 8 rows on the trainer, and 4 fit" in " ".join(shown.split())


@pytest.mark.parametrize(("settings", "words"), [
    (["resources.trainer.accelerators=L4:1"], ["resources.trainer.accelerators is L4:1", "one row of Qwen-Image",
                                               "transformer 38.1", "take A100-80GB or H100 or RTXPRO6000 or H200 or"]),
    (["resources.rollout.accelerators=A10G:1"], ["resources.rollout.accelerators is A10G:1", "one image of Qwen"]),
    (["model.checkpointing='off'", "model.height=768", "model.width=768"],
     ["a row 33.8", "take RTXPRO6000 or H200 or B200 or set model.checkpointing: on"]),
    (["algorithm.rows_per_forward=1", *LIMITS], []),
    (["model.checkpointing='off'", "model.height=1280", "model.width=1280"], ["set model.checkpointing: on"]),
    (["model.weights=full"], ["set model.weights: lora"]),
])  # fmt: skip
def test_a_launch_refuses_what_cannot_fit_and_says_what_would(dry_run, settings, words):
    code, shown = dry_run(*settings)
    assert code == (ExitCode.INVALID_JOB if words else ExitCode.OK)
    assert all(word in shown for word in words), shown


def test_sizes_come_from_the_models_own_folder_if_it_is_here(dry_run):
    folder = dry_run.folder / "qwen-image"
    write_model(folder, "qwen-image", transformer={"num_layers": 30})
    _, shown = dry_run()
    assert 19 < column(shown, 0)["transformer"] < 20
    write_model(folder, "qwen-image", transformer={"num_attention_heads": None})
    code, text = dry_run()
    assert code == ExitCode.INVALID_JOB
    assert "num_attention_heads: None; a whole number is needed" in text


def test_a_dry_run_shows_the_disk_and_every_node_has_it(dry_run):
    code, shown = dry_run()
    assert code == ExitCode.OK
    assert "disk of each node: 1" in shown
    assert "model 54, machine image 45" in shown
    _, out = dry_run("resources.disk_gb=333", json=True)
    plan = printed("launch", out)["plan"]
    options = [one for site in plan["sites"] for role in ("trainer", "rollout") for one in site[role]]
    assert len(options) > 4
    assert {one["placement"]["disk_gib"] for one in (*plan["slots"], *options)} == {333}


def test_a_dry_run_refuses_a_disk_that_the_sent_files_do_not_fit(dry_run):
    folder = dry_run.folder / "qwen-image"
    write_model(folder, "qwen-image")
    tensor = {"dtype": "BF16", "shape": [150 << 30], "data_offsets": [0, 300 << 30]}
    header = json.dumps({"weight": tensor}).encode()
    for place in ("vae/diffusion_pytorch_model.safetensors", "not-sent.safetensors"):
        with (folder / place).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + (300 << 30))
    code, text = dry_run("resources.disk_gb=300")
    assert code == ExitCode.INVALID_JOB
    needed = re.search(r"resources\.disk_gb is 300, and a node of this run needs (\d+) GB \(model 301, ", text)
    assert needed is not None, text
    assert 390 < int(needed[1]) < 420, "twice the model would be 700"
