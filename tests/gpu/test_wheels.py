"""The wheels for a GPU machine follow from the imports, and torch with its CUDA packages stays out."""

import pytest

from tests.gpu import wheels


def test_imports_are_followed_through_our_own_modules_only(tmp_path):
    for path, text in {
        "engine/a.py": "import os\nimport numpy.linalg\nfrom tests.b import c",
        "engine/__init__.py": "",
        "tests/b/__init__.py": "",
        "tests/b/c.py": "def f():\n    from PIL import Image",
        "tests/other.py": "import scipy",
        "tests/gpu/d.py": "",
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert wheels.imported(("engine", "tests/gpu"), tmp_path) == {"numpy", "PIL"}


@pytest.fixture(scope="module")
def names():
    return wheels.imported()


def test_the_checks_need_the_engines_packages_but_no_cloud(names):
    found = wheels.needed(names)
    assert {"diffusers", "msgspec", "obstore", "peft", "pydantic-core", "transformers", "pytest-timeout"} <= found
    assert not found & {"torch", "triton", "boto3", "ray", "skypilot", "sqlalchemy"}
    assert not [name for name in found if name.startswith("nvidia-")]


def test_packages_of_the_machine_are_left_out_with_what_only_they_need(names):
    without = {"Transformers", "peft", "rapidocr", "diffusers", "accelerate", "huggingface_hub", "pytest"}
    found = wheels.needed(names, without)
    assert not found & {"transformers", "rapidocr", "omegaconf", "tokenizers"}
    assert "msgspec" in found


def test_versions_are_those_of_the_lock(tmp_path):
    lock = tmp_path / "lock"
    lock.write_text("# comment\nhuggingface_hub==1.2\nnumpy==2.4.6\n")
    assert wheels.pinned({"huggingface-hub", "numpy", "unlocked"}, lock) == [
        "huggingface-hub==1.2",
        "numpy==2.4.6",
        "unlocked",
    ]
