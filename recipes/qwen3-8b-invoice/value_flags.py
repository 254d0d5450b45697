"""Which values of an answer a person should look at: not in the text, against the schema, or cut by the output limit.

A value stands in the text

- as an amount, for numbers: some amount of the text has the same value in one of its readings, sign apart;
- as a day, for dates: some date of the text is the same day in one of its readings;
- else by letters and digits, blanks and punctuation between them apart, not as a part of a longer number or word.

Values of an enumeration and booleans are conclusions, not copies, and are not looked for.
"""

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from field_scores import read_reply
from field_values import amount_readings, date_readings, is_absent
from invoice import check_target, kind

NOT_IN_TEXT = "not in the text"
OUTPUT_LIMIT = "output limit hit"
NO_JSON = "no whole JSON object"
DOCUMENT = "document"  # the key of what concerns the whole answer

_AMOUNT = re.compile(r"\d(?:[\d.,'’]*\d)?|[.,]\d+")
_DATE = re.compile(
    r"(?<!\d)(?:\d{8}|\d{1,4}(?:\s*[./-]\s*|\s+)(?:\d{1,2}|[A-Za-z]{3,9})\.?(?:\s*[,./-]\s*|\s+)\d{1,4}"
    r"|\d{1,2}[A-Za-z]{3,9}\d{2,4}|[A-Za-z]{3,9}\.?\s*\d{1,2}(?:st|nd|rd|th)?,?\s+\d{4})(?!\d)"
)


def flag_values(reply: str, limit_hit: bool, text: str, schema: dict) -> tuple[dict | None, dict[str, list[str]]]:
    """(the answer's object or None, {path of a value: reasons}) of the model's `reply` on the document `text`.

    Paths are those of `field_paths`, such as `total` or `items[0].price`; what concerns the whole answer stands under
    `document`.
    """
    value, flags = read_reply(reply).value, {}
    if value is None:
        flags[DOCUMENT] = [OUTPUT_LIMIT] * limit_hit + [NO_JSON]
        return None, flags
    for path, field, found in field_paths(value, schema):
        if not is_absent(found) and not stands_in(found, field, text):
            flags.setdefault(path, []).append(NOT_IN_TEXT)
        if limit_hit:
            flags.setdefault(path, []).append(OUTPUT_LIMIT)
    for reason in check_target(value, schema):
        path, _, what = reason.partition(": ")
        flags.setdefault(DOCUMENT if path == "top" else path, []).append(f"breaks the schema: {what}")
    return value, flags


def field_paths(value: Any, schema: dict, path: str = "") -> Iterator[tuple[str, dict, Any]]:
    """(path, schema of the field, value) of every plain value that the schema knows, absent ones included."""
    if kind(schema) == "object":
        for key, field in schema["properties"].items():
            inner = value.get(key) if isinstance(value, dict) else None
            yield from field_paths(inner, field, f"{path}.{key}".lstrip("."))
    elif kind(schema) == "array":
        for index, entry in enumerate(value if isinstance(value, list) else []):
            yield from field_paths(entry, schema["items"], f"{path}[{index}]")
    else:
        yield path, schema, value


def stands_in(value: Any, field: dict, text: str) -> bool:
    """Whether a value that is not absent stands in `text`; the rules are at the top of this file."""
    if "enum" in field or kind(field) == "boolean" or isinstance(value, bool):
        return True
    if isinstance(value, dict | list):
        return False
    if kind(field) in ("number", "integer"):
        wanted = {abs(number) for number in amount_readings(str(value)).values()}
        return any(wanted & _sizes(amount) for amount in _AMOUNT.findall(_plain(text)))
    if field.get("format") == "date" and (days := set(date_readings(str(value)).values())):
        return any(days & set(date_readings(day).values()) for day in _DATE.findall(_plain(text)))
    return bool(_pattern(str(value)).search(_plain(text)))


def _sizes(text: str) -> set:
    return {abs(number) for number in amount_readings(text).values()}


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _pattern(value: str) -> re.Pattern:
    """Letters and digits of `value` in order. Two digits that were apart must stay apart: 9.00 is not 900."""
    marks = [(mark[0], bool(mark[1])) for mark in re.findall(r"([^\W_])([\W_]*)", _plain(value))]
    if not marks:
        return re.compile(r"(?!)")
    parts = []
    for (mark, apart), (following, _) in zip(marks, [*marks[1:], ("", False)], strict=True):
        digits = mark.isdigit() and following.isdigit()
        between = (r"[\W_]+" if apart else "") if digits else r"[\W_]*"
        parts.append(re.escape(mark) + (between if following else ""))
    first, last = (r"\d" if mark[0].isdigit() else r"[^\W\d_]" for mark in (marks[0], marks[-1]))
    return re.compile(f"(?<!{first}){''.join(parts)}(?!{last})", re.IGNORECASE)
