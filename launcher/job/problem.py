"""Explain the errors in a job: pydantic's errors as sentences with a place, the value found, and a remedy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from launcher.job.yaml_file import Field as FieldPath

NEAR = 0.65
"""Least likeness of a misspelt key and the key that is suggested. Below, `import` would be taken for `spot`."""

CLOSE = 0.85
"""Likeness of a misspelt model name, by difflib: one letter of seven is wrong."""

RELEASES = {
    **dict.fromkeys(("sd35", "sd35medium", "sd35large", "sd3medium", "stablediffusion3", "stablediffusion35"), "sd3"),
    **dict.fromkeys(("flux1", "flux1dev", "flux1schnell", "flux1krea", "fluxdev", "fluxschnell"), "flux"),
    **dict.fromkeys(("wan21", "wan22", "wan21t2v", "wan22ti2v", "wan2"), "wan"),
    **dict.fromkeys(("hunyuan", "hunyuanvideo1"), "hunyuanvideo"),
    **dict.fromkeys(("qwen", "qwenimage2512"), "qwenimage"),
    "digits": "digitsocr",
}
"""Other names of the allowed families, in small letters and digits: releases that the family's adapter trains."""

REMEDIES = {
    "int_type": "use a whole number",
    "int_from_float": "use a whole number",
    "float_type": "use a number",
    "finite_number": "use a finite number",
    "bool_type": "use true or false",
    "string_type": "use a word, in quotes if it looks like a number",
    "tuple_type": "use a list: [A, B]",
    "list_type": "use a list: [A, B]",
    "model_type": "use a section: lines of `key: value` below it, indented",
    "model_attributes_type": "use a section: lines of `key: value` below it, indented",
    "greater_than_equal": "use {ge} or more",
    "greater_than": "use more than {gt}",
    "less_than_equal": "use {le} or less",
    "less_than": "use less than {lt}",
    "literal_error": "use {expected}",
}
"""Texts by pydantic's error type; the names in braces are pydantic's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    place: FieldPath
    found: str
    remedy: str


def explain(error: ValidationError, values: dict[str, Any], model: type[BaseModel]) -> list[Problem]:
    """Return every problem, unknown keys first. A misspelt key is often the reason for a missing key."""
    raw = error.errors(include_url=False)
    problems = [_unknown_key(_place(e["loc"], values), model) for e in raw if e["type"] == "extra_forbidden"]
    unknown = [problem for problem in problems if problem]
    other_problems = [
        _problem(e, values, model) for e in raw if e["type"] != "extra_forbidden" and _is_meant(e["loc"], values)
    ]
    merged: dict[FieldPath, Problem] = {}
    for problem in unknown or other_problems or [_exclusive(raw[0], values)]:
        first = merged.setdefault(problem.place, problem)
        if problem.found == first.found and problem.remedy != first.remedy:  # from another member of a union
            merged[problem.place] = replace(first, remedy=f"{first.remedy}, or {problem.remedy.removeprefix('use ')}")
    return list(merged.values())


def _place(loc: tuple[int | str, ...], values: Any) -> FieldPath:
    """Return `loc` without the names of union members, because the names are not in the file."""
    place: list[int | str] = []
    part = values
    for position, key in enumerate(loc):
        is_last = position == len(loc) - 1
        if isinstance(part, dict) and (key in part or is_last):
            part = part.get(key)
            place.append(key)
        elif isinstance(part, list) and isinstance(key, int) and key < len(part):
            part = part[key]
            place.append(key)
    return tuple(place)


def _is_meant(loc: tuple[int | str, ...], values: Any) -> bool:
    """Return False for errors of a union member that the keys in the file do not fit.

    The user meant another member.
    """
    members = [key for key in loc if key in ("CandidateBudget", "SecondsBudget")]
    if not members:
        return True
    section = _value(_place(loc[: loc.index(members[0])], values), values)
    if not isinstance(section, dict):
        return True
    return ("candidates" in section) == (members[0] == "CandidateBudget") and not {"candidates", "seconds"} <= set(
        section
    )


def _exclusive(raw: Any, values: Any) -> Problem:
    place = _place(raw["loc"], values)[:-1]
    keys = " and ".join(_value(place, values))
    return Problem(place=place, found=f"{_dotted(place)} has {keys}", remedy="keep one: candidates, or seconds")


def _unknown_key(place: FieldPath, model: type[BaseModel]) -> Problem | None:
    """Return a problem for an unknown key; None if another member of a union knows the key."""
    *section, key = place
    known_keys = sorted(_known_keys(tuple(section), model))
    if key in known_keys:
        return None
    elsewhere = [_dotted((*path, key)) for path in _sections(model) if key in _known_keys(path, model)]
    if elsewhere:
        remedy = f"did you mean {' or '.join(elsewhere)}?"
    elif near := get_close_matches(str(key), known_keys, n=1, cutoff=NEAR):
        remedy = f"did you mean {near[0]}?"
    else:
        remedy = f"known here: {', '.join(known_keys)}"
    return Problem(place=place, found=f"{_dotted(place)} is not a key that spotrl knows", remedy=remedy)


def _problem(error: Any, values: dict[str, Any], model: type[BaseModel]) -> Problem:
    place = _place(error["loc"], values)
    if error["type"] == "missing":
        return Problem(place=place, found=f"{_dotted(place)} is missing", remedy="add it, or leave out its section")
    if error["type"] == "value_error":
        return _own_words(str(error["ctx"]["error"]), place, model)
    remedy = REMEDIES.get(error["type"], error["msg"]).format(**error.get("ctx", {}))
    if error["type"] == "literal_error":
        allowed = [word.strip(" '") for word in error["ctx"]["expected"].replace(" or ", ",").split(",")]
        if place == ("model", "name"):
            meant = model_name_meant(str(error["input"]), allowed)
            remedy += f"; did you mean {meant}?" if meant else "; spotrl trains no other family yet"
        elif len(allowed) > 1 and (near := get_close_matches(str(error["input"]), allowed, n=1)):
            remedy += f"; did you mean {near[0]}?"
    shown = "not of that kind" if place[:1] == ("secrets",) or place[-1:] == ("key",) else _shown(error["input"])
    return Problem(place=place, found=f"{_dotted(place)} is {shown}", remedy=remedy)


def model_name_meant(text: str, allowed: Sequence[str]) -> str | None:
    """Return the allowed model that a name means, or None if the name is of another family.

    Names of families differ in few letters, and a near name may be another network, as flux2 and flux are. So a hint
    needs the same letters (Qwen_Image), a release of an allowed family (sd3.5), or a misspelling with the same digits.
    """

    def letters(name: str) -> str:
        return "".join(character for character in name.lower() if character.isalnum())

    def digits(name: str) -> str:
        return "".join(filter(str.isdigit, name))

    word = RELEASES.get(letters(text), letters(text))
    by_letters = {letters(name): name for name in allowed}
    near = [word] if word in by_letters else get_close_matches(word, by_letters, n=1, cutoff=CLOSE)
    return by_letters[near[0]] if near and digits(near[0]) == digits(word) else None


def _own_words(message: str, place: FieldPath, model: type[BaseModel]) -> Problem:
    """Parse the message of one of our validators.

    The message has the form `found; remedy`, and often begins with the field, absolute or within the field's section.
    """
    text, _, remedy = message.partition("; ")
    first_word = tuple(text.partition(" ")[0].partition(",")[0].split("."))
    for base in ((), place, place[:-1]):
        named = (*base, *first_word)
        if named[-1] in _known_keys(named[:-1], model):
            place = named if len(named) > len(place) else place
            tail = text.removeprefix(".".join(first_word))
            return Problem(place=place, found=_dotted(named) + tail, remedy=remedy)
    return Problem(place=place, found=f"{_dotted(place)}: {text}", remedy=remedy)


def _known_keys(section: FieldPath, model: type[BaseModel]) -> set[str]:
    models, is_mapping = [model], False
    for key in section:
        # A number is a place in a list, and a mapping has keys of the user's choice. All items share the keys of one
        # model.
        if isinstance(key, int) or is_mapping:
            is_mapping = False
            continue
        fields = [outer.model_fields[key].annotation for outer in models if key in outer.model_fields]
        models = [inner for annotation in fields for inner in _models_in(annotation)]
        is_mapping = any(get_origin(annotation) is dict for annotation in fields)
    if is_mapping:
        return set()
    return {field.alias or key for submodel in models for key, field in submodel.model_fields.items()}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _sections(model: type[BaseModel], above: FieldPath = ()) -> Iterator[FieldPath]:
    yield above
    for key, field in model.model_fields.items():
        for inner in _models_in(field.annotation):
            yield from _sections(inner, (*above, key))


def _value(place: FieldPath, values: Any) -> Any:
    for key in place:
        values = values[key]
    return values


def _dotted(place: FieldPath) -> str:
    return ".".join(map(str, place)) or "the job"


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
