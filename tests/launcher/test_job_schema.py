"""Every field of the job file and of the settings has a description, which editors and the docs show."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from launcher.job.schema import Job
from launcher.settings import Settings


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def fields(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, str | None]]:
    """Return the dotted name and the description of every field, sections included."""
    for name, field in model.model_fields.items():
        yield f"{above}{name}", field.description
        for section in models_in(field.annotation):
            yield from fields(section, f"{above}{name}.")


@pytest.mark.parametrize("model", [Job, Settings])
def test_every_field_has_a_description(model):
    found = list(fields(model))
    assert len(found) > 1
    assert not [name for name, description in found if not (description or "").strip()]


def test_descriptions_are_sentences():
    assert not [name for name, description in fields(Job) if not description.strip().endswith((".", ")"))]
