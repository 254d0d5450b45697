"""Answers of models for scripts/report.py: fields of documents side by side, the characters that differ marked."""

import json
import sys
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

from markupsafe import Markup, escape

INVOICE = Path(__file__).resolve().parent.parent / "recipes" / "qwen3-8b-invoice"
sys.path.append(str(INVOICE))  # the scores' own reading of an answer and of a value

from field_scores import field_groups, read_reply  # noqa: E402
from field_values import is_absent, same_value  # noqa: E402

LONGEST = 1500  # characters of a text that are shown


@cache
def field_schemas(schema_file: str | None) -> dict[str, dict]:
    """{name of a field: its schema}, empty where the schema is neither at its path nor beside the recipe."""
    for place in (Path(schema_file or ""), INVOICE / Path(schema_file or "").name):
        if place.is_file():
            groups = field_groups(json.loads(place.read_text(encoding="utf-8")))
            return {_name((*(group.array or ()), *path)): node for group in groups for path, node in group.fields}
    return {}


def _name(path) -> str:
    return ".".join(str(key) for key in path if not isinstance(key, int))


def flatten(value, path=()) -> dict[tuple, object]:
    """{path: plain value} of an answer's object; entries of an array by their place, from 0."""
    if isinstance(value, dict) and value:
        return {place: leaf for key, inner in value.items() for place, leaf in flatten(inner, (*path, key)).items()}
    if isinstance(value, list) and value:
        return {place: leaf for key, inner in enumerate(value) for place, leaf in flatten(inner, (*path, key)).items()}
    return {path: value}


def state(gold, answer, schema: dict | None) -> str:
    """What became of one value, in the words of the scores; empty where both are absent."""
    if is_absent(gold) or is_absent(answer):
        return "" if is_absent(gold) and is_absent(answer) else "invented" if is_absent(gold) else "missed"
    exact, same = same_value(gold, answer, schema or {"type": "string"})
    return "right" if exact else "right, written otherwise" if same else "wrong"


def text_of(value) -> str:
    return "" if is_absent(value) else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def marked(expected: str, answer: str) -> tuple[Markup, Markup]:
    """Both texts as HTML, the characters marked that the other one does not have."""
    left, right = [], []
    for kind, a, b, c, d in SequenceMatcher(None, expected, answer, autojunk=False).get_opcodes():
        if kind == "equal":
            left.append(escape(expected[a:b]))
            right.append(escape(answer[c:d]))
        else:
            left.append(Markup('<mark class="lost">{}</mark>').format(expected[a:b]) if b > a else "")
            right.append(Markup('<mark class="extra">{}</mark>').format(answer[c:d]) if d > c else "")
    return Markup("").join(left), Markup("").join(right)


def compare(gold: dict, answers: dict[str, str | None], schema_file: str | None) -> dict:
    """One document: {"rows": [(field, expected, [(answer, state)])], "raw": {label: text}}, HTML in expected and answer.

    answers: {label: the model's text}. One without a whole JSON object stands in "raw" and not in the rows. With one
    answer its expected value is marked, too.
    """
    read = {label: read_reply(text).value for label, text in answers.items()}
    known = {label: flatten(value) for label, value in read.items() if value is not None}
    raw = {label: shortened(answers[label] or "") for label, value in read.items() if value is None}
    wanted, schemas, rows = flatten(gold), field_schemas(schema_file), []
    for path in dict.fromkeys([*wanted, *(path for found in known.values() for path in found)]):
        name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
        expected, cells = text_of(wanted.get(path)), []
        shown = escape(expected)
        for found in known.values():
            left, right = marked(expected, text_of(found.get(path)))
            cells.append((right, state(wanted.get(path), found.get(path), schemas.get(_name(path)))))
            shown = left if len(known) == 1 else shown
        rows.append((name, shown, cells))
    return {"labels": list(known), "rows": rows if known else [(n, e, []) for n, e, _ in rows], "raw": raw}


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text) - LONGEST} more characters)"
