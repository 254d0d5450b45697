"""The prompt and the target of invoice extraction, both made from one JSON Schema.

train.py, score.py and predict.py all come here, so a served prompt cannot drift away from the trained one.
The rules of a target (`target_text`):

- keys stand in the order of the schema's `properties`, at every depth, and no other key is allowed;
- what the document does not say is null: a missing key, an empty or blank string and an empty list all become null
  where the schema allows null (SROIE writes "" for "no label"), so absence has one spelling to learn;
- numbers are JSON numbers with a decimal point (12 and 12.0 are both written 12.0), never strings;
- no spaces between tokens, no \\u escapes for letters.

A schema may hold objects, arrays of objects or of plain values, and plain values of one type, each of them "or null".
This file imports neither torch nor transformers.
"""

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema

PLAIN_TYPES = ("string", "number", "integer", "boolean")
INSTRUCTION = "Answer as JSON with these keys in this order, null if not in the document:"


def load_schema(path: str | Path) -> dict:
    """Read and check a JSON Schema (draft 2020-12) file.

    Raises ValueError, naming the file, when it cannot be read, is no JSON, is no valid schema, or uses a form that
    prompt, target and score do not support (see the top of this file).
    """
    try:
        schema = parse_json(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(
            f"{path}: the schema file cannot be read ({error.strerror}). Give --schema_file a file that exists."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: the schema file is not JSON ({error}). Correct it at that place.") from error
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(
            f"{path}: not a valid JSON Schema (draft 2020-12) at {error.json_path}: {error.message}. Correct that key."
        ) from error
    try:
        if not isinstance(schema, dict) or kind(schema) != "object":
            raise ValueError('the top must have "type": "object" and "properties"')
        _check_supported(schema, "", inside_array=False)
    except ValueError as error:
        raise ValueError(f"{path}: {error}. Change the schema file.") from error
    return schema


def kind(schema: dict) -> str:
    """The one type of a field apart from null: object, array, string, number, integer or boolean.

    Raises ValueError when there is none, or more than one.
    """
    types = schema.get("type")
    types = [name for name in ([types] if isinstance(types, str) else types or []) if name != "null"]
    if len(types) != 1:
        raise ValueError(f'"type" must be one type, or one type and "null"; found {schema.get("type")!r}')
    return types[0]


def nullable(schema: dict) -> bool:
    """Whether null is a value of this field."""
    return "null" in schema["type"] and None in schema.get("enum", [None])


def prompt_messages(text: str, schema: dict) -> list[dict]:
    """One user message: instruction, fields with their descriptions in schema order, document.

    There is no system message: the instruction stands in the user turn, because some chat templates have no system role
    and others write one of their own.
    """
    fields = "\n".join(_field_lines(schema, ""))
    content = f"{INSTRUCTION}\n{fields}\n<document>\n{text.strip()}\n</document>"
    return [{"role": "user", "content": content}]


def canonical(value: Any, schema: dict) -> dict:
    """`value` with the schema's keys in the schema's order and null for what is absent.

    Values of a wrong type pass through, `check_target` finds them. Raises ValueError for a key that the schema lacks.
    """
    return _canonical(value, schema, "")


def check_target(value: Any, schema: dict) -> list[str]:
    """Reasons, one a string and each naming its field, why `value` breaks the schema; an empty list when it does not.

    `value` is judged as it stands: `canonical` is not applied. Dates (`"format": "date"`) must be real days written
    YYYY-MM-DD.
    """
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date"]))
    errors = sorted(validator.iter_errors(value), key=lambda error: (list(map(str, error.path)), error.message))
    return [f"{error.json_path.removeprefix('$').removeprefix('.') or 'top'}: {error.message}" for error in errors]


def target_text(value: Any, schema: dict) -> str:
    """The canonical JSON text of a target. Raises ValueError naming the field when the value breaks the schema."""
    value = canonical(value, schema)
    reasons = check_target(value, schema)
    if reasons:
        raise ValueError("the target breaks the schema: " + "; ".join(reasons))
    return _write(value, schema, "")


def to_prompt_completion(
    row: dict, schema: dict, text_column: str | None = None, target_column: str | None = None
) -> dict:
    """One training row as {"prompt": [user message], "completion": [assistant message]}, and no other column.

    With `text_column` and `target_column` the row is a document and its target (an object, or JSON in a string). With
    neither it is a chat in `messages`: the last user message is the document, the assistant message after it is the
    target as JSON. A system message is left out: the schema says what to extract.

    Raises ValueError with the reason for a bad row, and KeyError naming the columns that are wanted where a row has
    others; the caller adds the file and the row number.
    """
    if bool(text_column) != bool(target_column):
        raise ValueError("give both --text_column and --target_column, or neither for rows with messages")
    if text_column:
        if text_column not in row or target_column not in row:
            raise KeyError(f"the columns {text_column!r} and {target_column!r}")
        text, target = row[text_column], row[target_column]
    else:
        text, target = _from_messages(row)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"the document must be text and not empty, found {_short(text)}")
    if isinstance(target, str):
        try:
            target = parse_json(target)
        except ValueError as error:
            raise ValueError(f"the target is not JSON ({error}): {_short(target)}") from error
    answer = target_text(target, schema)
    return {"prompt": prompt_messages(text, schema), "completion": [{"role": "assistant", "content": answer}]}


def parse_json(text: str) -> Any:
    """json.loads that refuses a repeated key (one of the values would be lost in silence) and NaN or Infinity."""

    def unique(pairs: list[tuple[str, Any]]) -> dict:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the key {name!r} stands twice in one object")
        return dict(pairs)

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)


def _check_supported(schema: dict, path: str, inside_array: bool) -> None:
    """Raise ValueError naming the field when prompt, target or score would not know what to do with it."""
    where = path or "the top"
    try:
        name = kind(schema)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if name == "object":
        if not schema.get("properties"):
            raise ValueError(f'{where}: an object needs "properties"')
        for key, field in schema["properties"].items():
            field_path = f"{path}.{key}".lstrip(".")
            if not isinstance(field, dict):
                raise ValueError(f"{field_path}: expected a schema object, found {field!r}")
            _check_supported(field, field_path, inside_array)
    elif name == "array":
        if inside_array:
            raise ValueError(f"{where}: an array inside an array is not supported")
        if not isinstance(schema.get("items"), dict):
            raise ValueError(f'{where}: an array needs "items", the schema of its entries')
        _check_supported(schema["items"], f"{path}[]", inside_array=True)
    elif name not in PLAIN_TYPES:
        raise ValueError(f"{where}: unknown type {name!r}")


def _field_lines(schema: dict, indent: str) -> Iterator[str]:
    for key, field in schema["properties"].items():
        name = kind(field)
        if "enum" in field:
            form = "/".join(str(value) for value in field["enum"] if value is not None)
        elif field.get("format") == "date":
            form = "YYYY-MM-DD"
        else:
            form = {"array": "list", "string": ""}.get(name, name)
        description = field.get("description", "")
        yield f"{indent}{key}" + (f" ({form})" if form else "") + (f": {description}" if description else "")
        inner = field.get("items", {}) if name == "array" else field
        if inner.get("properties"):
            yield from _field_lines(inner, indent + "  ")


def _canonical(value: Any, schema: dict, path: str) -> Any:
    name = kind(schema)
    empty = value is None or value == [] or (isinstance(value, str) and not value.strip())
    if empty and nullable(schema):
        return None
    if name == "object" and isinstance(value, dict):
        properties = schema["properties"]
        for key in value:
            if key not in properties:
                where = f"{path}.{key}".lstrip(".")
                raise ValueError(f"{where}: this key is not in the schema, which has {', '.join(properties)}")
        return {key: _canonical(value.get(key), field, f"{path}.{key}") for key, field in properties.items()}
    if name == "array" and isinstance(value, list):
        return [_canonical(item, schema["items"], f"{path}[{index}]") for index, item in enumerate(value)]
    return value


def _write(value: Any, schema: dict, path: str) -> str:
    if isinstance(value, dict):
        fields = schema["properties"]
        return "{" + ",".join(f"{_text(k)}:{_write(v, fields[k], f'{path}.{k}')}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_write(item, schema["items"], f"{path}[]") for item in value) + "]"
    if kind(schema) == "number" and value is not None:
        if not math.isfinite(value):
            raise ValueError(f"{path.lstrip('.')}: {value} is not a JSON number")
        # repr of a float is its shortest exact spelling; "f" spells it without an exponent.
        digits = format(Decimal(repr(value)), "f")
        return "0.0" if value == 0 else digits if "." in digits else digits + ".0"
    if kind(schema) == "integer" and value is not None:
        return str(int(value))
    return _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _from_messages(row: dict) -> tuple[Any, Any]:
    if "messages" not in row:
        raise KeyError("`messages`, or the two columns that --text_column and --target_column name")
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list and not empty, found {_short(messages)}")
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    if roles[-2:] != ["user", "assistant"] or set(roles) - {"system", "user", "assistant"}:
        raise ValueError(f"messages must end with a user and then an assistant message; the roles are {roles}")
    answer = messages[-1].get("content")
    if not isinstance(answer, str):
        raise ValueError(f"the assistant's content must be JSON in a string, found {_short(answer)}")
    return messages[-2].get("content"), answer


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
