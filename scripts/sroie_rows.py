"""Training rows of SROIE made anew: a fixed validation split, labels that do not stand in the text, augmented copies.

Used by sroie_study.py. Rows have `id`, `text` and `entities` (company, date, address, total; strings). Nothing here
reads the test receipts but `label_ceiling`, which counts their labels and changes nothing.
"""

import random
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes" / "qwen3-8b-invoice"))
from value_flags import stands_in  # noqa: E402

# What an OCR program takes for one another, both ways.
CONFUSED = {
    "O": "0",
    "I": "1",
    "S": "5",
    "B": "8",
    "Z": "2",
    "G": "6",
    "L": "I",
    "D": "O",
    "U": "V",
    ",": ".",
    "C": "G",
}
CONFUSED |= {right: left for left, right in CONFUSED.items()}


def split(rows: list[dict], validation: int, seed: int = 0) -> tuple[list[dict], list[dict]]:
    """(rows to train on, `validation` rows to choose by), drawn at random, the same for the same seed."""
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    return [rows[i] for i in sorted(order[validation:])], [rows[i] for i in sorted(order[:validation])]


def absent_labels(row: dict, schema: dict) -> list[str]:
    """Names of the fields whose label does not stand in the row's text."""
    fields = schema["properties"]
    return [key for key, value in row["entities"].items() if value and not stands_in(value, fields[key], row["text"])]


def label_ceiling(rows: list[dict], schema: dict) -> dict:
    """How many labels do not stand in the text: a model that copies without an error misses these.

    F1 of that model is 1 - absent / labels, for it answers as often as there are labels.
    """
    labels = sum(bool(value) for row in rows for value in row["entities"].values())
    absent = {key: sum(key in absent_labels(row, schema) for row in rows) for key in schema["properties"]}
    return {"labels": labels, "absent": absent, "f1": 1 - sum(absent.values()) / labels}


def without_absent_labels(rows: list[dict], schema: dict) -> list[dict]:
    """The rows whose labels all stand in their text: the others teach to answer what cannot be read."""
    return [row for row in rows if not absent_labels(row, schema)]


def augmented(rows: list[dict], copies: int, entities: bool, seed: int = 0) -> list[dict]:
    """The rows, and `copies` changed copies of each.

    In a copy some lines without a label are dropped or misread as OCR does. With `entities`, the labels change too, in
    text and answer alike: company and address come from other rows, date and total get other digits, so that a copy
    cannot be answered from memory of the shop.
    """
    draw, made = random.Random(seed), list(rows)
    found = [(row, spans(row)) for row in rows]
    pools = {
        key: [(row["text"][start:end], row["entities"][key]) for row, places in found for start, end in places[key][:1]]
        for key in ("company", "address")
    }
    for number in range(copies):
        for row, places in found:
            text, values = row["text"], dict(row["entities"])
            if entities:
                text, values = changed_entities(text, values, places, pools, draw)
            lines = worn_lines(text, values, draw)
            made.append({"id": f"{row['id']}-{number}", "text": "\n".join(lines), "entities": values})
    return made


def spans(row: dict) -> dict[str, list[tuple[int, int]]]:
    """Where each label stands in the text, as (start, end); line breaks and commas may part its words."""
    places = {}
    for key, value in row["entities"].items():
        words = [re.escape(word) for word in re.split(r"[\s,]+", value) if word]
        pattern = r"[\s,]*".join(words) if words else r"(?!)"
        found = re.finditer(rf"(?<!\d){pattern}(?!\d)" if key in ("date", "total") else pattern, row["text"])
        places[key] = [match.span() for match in found]
    return places


def changed_entities(text: str, values: dict, places: dict, pools: dict, draw: random.Random) -> tuple[str, dict]:
    """Text and labels with new entities; a label that is not found in the text stays as it is."""
    edits = []
    for key, spots in places.items():
        if not spots or draw.random() < 0.25:
            continue
        if key in pools:
            printed, values[key] = draw.choice(pools[key])
        else:
            printed = values[key] = other_date(values[key], draw) if key == "date" else other_amount(values[key], draw)
        edits += [(start, end, printed) for start, end in spots]
    last = len(text) + 1
    for start, end, printed in sorted(edits, reverse=True):
        if end <= last:  # a shop's name may stand inside its address: the later span wins
            text, last = text[:start] + printed + text[end:], start
    return text, values


def other_date(value: str, draw: random.Random) -> str:
    """Another day in the same form: a number above 12 stays above 12, so that day and month can be told as before."""

    def other(match: re.Match) -> str:
        digits = match[0]
        if len(digits) == 4:
            return str(draw.randint(2015, 2019))
        if len(digits) > 4:
            return digits
        if len(digits) == 1:
            return str(draw.randint(1, 9))
        return f"{draw.randint(13, 28) if int(digits) > 12 else draw.randint(1, 12):02}"

    parts = re.split(r"(\d+)", value)
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    keep = numbers[-1] if numbers and len(parts[numbers[-1]]) == 2 else None  # a two-digit year stays
    return "".join(re.sub(r"\d+", other, part) if i in numbers and i != keep else part for i, part in enumerate(parts))


def other_amount(value: str, draw: random.Random) -> str:
    """Another amount of as many digits; the first is not 0 unless it was."""
    first = re.search(r"[1-9]", value)
    text = re.sub(r"\d", lambda _: str(draw.randint(0, 9)), value)
    return text if not first else text[: first.start()] + str(draw.randint(1, 9)) + text[first.end() :]


def worn_lines(text: str, values: dict, draw: random.Random) -> list[str]:
    """The lines, of those without a part of a label one in twelve dropped, and two in a hundred letters misread."""
    labels = {word for value in values.values() for word in re.findall(r"\w+", value.upper()) if len(word) > 1}
    lines = []
    for line in text.split("\n"):
        words = set(re.findall(r"\w+", line.upper()))
        if not words & labels:
            if draw.random() < 1 / 12:
                continue
            line = "".join(CONFUSED.get(mark, mark) if draw.random() < 0.02 else mark for mark in line)
        lines.append(line)
    return lines
