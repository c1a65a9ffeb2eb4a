"""The JSON schema of the job file, for editors: fields with their descriptions, allowed values and short forms."""

from typing import Any

from launcher.job.layers import SHORT_FORMS
from launcher.job.schema import Job

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """Return the schema of a job file, with the short forms that `load_job` accepts.

    Editors check less than `spotrl launch` does: rules across fields are not in the schema.
    """
    schema = Job.model_json_schema(by_alias=True, mode="validation")
    fields = schema["properties"]
    for section, field in SHORT_FORMS.items():
        described = {key: fields[section].pop(key) for key in ("description", "default") if key in fields[section]}
        fields[section] = {**described, "anyOf": [fields[section], {"type": "string", "title": f"{section}.{field}"}]}
    fields["store"] = {**fields["store"], "anyOf": [{"type": "object"}, {"type": "string"}]}
    for key in ("type", "additionalProperties"):
        fields["store"].pop(key, None)
    accelerators = schema["$defs"]["NodeResources"]["properties"]["accelerators"]
    accelerators["type"] = ["string", "object"]
    return {"$schema": DIALECT, **schema, "title": "spotrl job"}
