"""The words that the schema of playbooks is written in: one for each way reader.py reads a field.

A field that is null is a field that is not there, so every field but a required one may be null.
"""

from typing import Any, get_args, get_type_hints

import msgspec

from noetl_core.domain.reader import CONSTANT_GUARDS, DURATION, FLAGS

Schema = dict[str, Any]


def anything(says: str, *examples: Any) -> Schema:
    """A value that is data, or a template that gives it."""
    return {"description": says, **({"examples": list(examples)} if examples else {})}


def text(says: str, **more: Any) -> Schema:
    return {"description": says, "type": ["string", "null"], **more}


def name(says: str, **more: Any) -> Schema:
    """A text that must be there."""
    return {"description": says, "type": "string", "minLength": 1, **more}


def flag(says: str, *, default: bool) -> Schema:
    return {
        "description": says,
        "type": ["boolean", "string", "null"],
        "pattern": f"^({'|'.join(map(_any_case, sorted(FLAGS)))})$",
        "default": default,
    }


def whole(says: str, *, at_least: int, at_most: int, default: int | None = None) -> Schema:
    schema = {
        "description": says,
        "type": ["integer", "null"],
        "minimum": at_least,
        "maximum": at_most,
    }
    return schema if default is None else {**schema, "default": default}


def seconds(says: str, default: float | None = None) -> Schema:
    """A number of seconds, or a duration such as 1h30m."""
    schema = {
        "description": f"{says} Seconds, or a duration such as 500ms, 30s, 5m, 1h30m, 7d.",
        "type": ["number", "string", "null"],
        "minimum": 0,
        "pattern": rf"^\s*{DURATION.pattern}\s*$",
    }
    return schema if default is None else {**schema, "default": default}


def choice(says: str, model: type[msgspec.Struct], field: str) -> Schema:
    """One of the texts that this field of the model may have."""
    schema = {"description": says, "enum": [*literals_of(model, field), None]}
    default = {each.name: each.default for each in msgspec.structs.fields(model)}[field]
    return schema if default is None else {**schema, "default": default}


def literals_of(model: type[msgspec.Struct], field: str) -> list[str]:
    found: list[str] = []
    pending = [get_type_hints(model)[field]]
    while pending:
        for argument in get_args(pending.pop()):
            if isinstance(argument, str):
                found.append(argument)
            else:
                pending.append(argument)
    return found


def guard(says: str) -> Schema:
    """A template, or a constant that is true or false."""
    constants = "|".join(map(_any_case, sorted(CONSTANT_GUARDS)))
    return {
        "description": says,
        "anyOf": [
            {"type": "string", "pattern": rf"\{{\{{|\{{%|^\s*({constants})\s*$"},
            {"enum": [True, False, 0, 1, None]},
        ],
    }


def data(says: str) -> Schema:
    """A mapping of names to values, which may be templates."""
    return {"description": says, "type": ["object", "null"]}


def assignments(says: str, *roots: str) -> Schema:
    """`{ctx.total: ...}`."""
    pattern = rf"^({'|'.join(roots)})(\.[^.]+)+$"
    return {**data(says), "propertyNames": {"pattern": pattern}}


def listing(says: str, of: Schema | None = None, **more: Any) -> Schema:
    schema = {"description": says, "type": ["array", "null"], **more}
    return schema if of is None else {**schema, "items": of}


def section(says: str, fields: dict[str, Schema], **more: Any) -> Schema:
    """A mapping in which an unknown key is an error."""
    return {
        "description": says,
        "type": ["object", "null"],
        "properties": fields,
        "additionalProperties": False,
        **more,
    }


def must_have(schema: Schema, *fields: str) -> Schema:
    """A section that has to be there because some of its fields have to."""
    return {**schema, "type": "object", "required": list(fields)}


def given(field: str) -> Schema:
    """Holds where the field is there and not null."""
    return {"required": [field], "properties": {field: {"not": {"type": "null"}}}}


def is_constant(field: str, *values: str) -> Schema:
    """Holds where the field has one of these values."""
    return {"required": [field], "properties": {field: {"enum": list(values)}}}


def refer(definition: str) -> Schema:
    return {"$ref": f"#/$defs/{definition}"}


def _any_case(word: str) -> str:
    return "".join(f"[{each.lower()}{each.upper()}]" if each.isalpha() else each for each in word)
