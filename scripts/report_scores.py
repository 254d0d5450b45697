"""Scores and answers for scripts/report.py: before and after, fields, and documents with the characters that differ marked.

The numbers are those of scores.json. An answer is read, and a value compared, by the recipe's own code.
"""

import json
import math
import sys
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

from markupsafe import Markup, escape
from report_data import Scores

INVOICE = Path(__file__).resolve().parent.parent / "recipes" / "qwen3-8b-invoice"
sys.path.append(str(INVOICE))

from field_scores import field_groups, read_reply  # noqa: E402
from field_values import is_absent, same_value  # noqa: E402

LONGEST = 1500  # characters of a text that are shown
OUTCOMES = ("normalised", "wrong", "missed", "invented")  # of a value, the first is right
# Key in a report, label, kind.
FIELD_SCORES = (
    ("micro_f1", "Field F1", "score"),
    ("micro_f1_exact", "Field F1, exact", "score"),
    ("macro_f1", "Mean F1 of the fields", "score"),
    ("strict_json", "Answers that are JSON alone", "share"),
    ("lenient_json", "Answers that hold whole JSON", "share"),
    ("documents_with_violations", "Answers that break the schema", "share"),
    ("limit_hits", "Answers cut at the output limit", "share"),
)
LOSS_SCORES = (("loss", "Held-out loss", "score"), ("perplexity", "Perplexity", "score"))


# ---- before and after ------------------------------------------------------------------------------------------------


def wilson(hits: int, count: int) -> tuple[float, float]:
    """95 % interval of a share, by Wilson's score."""
    z, share = 1.96, hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def plain(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def score_cell(report: dict | None, key: str, kind: str = "score") -> tuple[str, str]:
    """(value, 95 % interval) of a score as text, empty where there is none."""
    value = (report or {}).get(key)
    if value is None:
        return "", ""
    if kind == "share":
        low, high = wilson(value, report["documents"])
        return f"{value} of {report['documents']}", f"{low:.0%} to {high:.0%}"
    interval = report.get(f"{key}_interval")
    return plain(value), f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else ""


def score_rows(scores: Scores) -> list[dict]:
    """Rows of the table of scores: label, (value, interval) of base and of tuned, change."""
    rows = []
    for key, label, kind in LOSS_SCORES if scores.is_loss else FIELD_SCORES:
        base, tuned = (score_cell(report, key, kind) for report in (scores.base, scores.tuned))
        change = scores.tuned[key] - scores.base[key] if base[0] and tuned[0] else None
        told = "" if change is None else f"{change:+d}" if kind == "share" else f"{'+' * (change >= 0)}{plain(change)}"
        rows.append({"label": label, "base": base, "tuned": tuned, "change": told})
    if any("constrained" in report for report in scores.reports.values()):
        held = ((report or {}).get("constrained") for report in (scores.base, scores.tuned))
        base, tuned = (score_cell(report, "micro_f1") for report in held)
        rows.append({"label": "Field F1, held to the schema", "base": base, "tuned": tuned, "change": ""})
    return [row for row in rows if row["base"][0] or row["tuned"][0]]


def headline(scores: Scores) -> tuple[str, str]:
    """(before -> after, what that is) of the score that stands for the rows."""
    key, what = ("perplexity", "perplexity") if scores.is_loss else ("micro_f1", "field F1")
    before, after = (score_cell(report, key) for report in (scores.base, scores.tuned))
    count = scores.newest.get("rows" if scores.is_loss else "documents")
    interval = f", 95 % {after[1]}" if after[1] else ""
    rows = "held-out rows" if scores.is_loss or scores.title == "held-out rows" else f"documents of {scores.title}"
    return " → ".join(value for value in (before[0], after[0]) if value), f"{what}, {count} {rows}{interval}"


def field_rows(scores: Scores) -> list[dict]:
    """Rows of the table of fields, one a model: counts with F1, each outcome's share in percent, rows that the name spans."""
    rows = []
    for name in scores.newest["fields"]:
        found = [
            (label, report["fields"][name]) for label, report in scores.reports.items() if name in report["fields"]
        ]
        for place, (label, counts) in enumerate(found):
            every = max(1, sum(counts[key] for key in OUTCOMES))
            shares = [(key, 100 * counts[key] / every) for key in OUTCOMES]
            span = len(found) if place == 0 else 0
            rows.append({"field": name, "model": label, "counts": counts, "shares": shares, "span": span})
    return rows


# ---- answers ---------------------------------------------------------------------------------------------------------


def worst_documents(scores: Scores) -> list[dict]:
    """The documents that the newest model read worst, field by field."""
    schema_file = scores.newest.get("schema_file")
    return [
        entry | compare(entry["gold"], {"answer": entry["prediction"]}, schema_file)
        for entry in scores.newest.get("worst", [])
    ]


def sample_documents(scores: Scores) -> list[dict]:
    """The first documents, answered by base and tuned."""
    rows = {
        label: {row["document"]: row for row in report.get("samples", [])} for label, report in scores.reports.items()
    }
    golds = {name: row["gold"] for found in rows.values() for name, row in found.items()}
    made = []
    for name, gold in golds.items():
        answers = {label: found[name]["prediction"] for label, found in rows.items() if name in found}
        made.append({"document": name} | compare(gold, answers, scores.newest.get("schema_file")))
    return made


def sample_chats(scores: Scores) -> list[dict]:
    """The prompts of chat_scores.py, each with [(model, answer, whether it was cut)]."""
    chats = {}
    for label, report in scores.reports.items():
        for row in report.get("answers", []):
            chat = chats.setdefault(row["id"], {"id": row["id"], "prompt": row["prompt"], "answers": []})
            chat["answers"].append((label, shortened(row["answer"]), row.get("limit_hit")))
    return list(chats.values())


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
    left, right, matcher = [], [], SequenceMatcher(None, expected, answer, autojunk=False)
    codes = matcher.get_opcodes()
    same = sum(block.size for block in matcher.get_matching_blocks())
    if same < 0.5 * min(len(expected), len(answer)):  # what is the same are letters by chance
        codes = [("replace", 0, len(expected), 0, len(answer))]
    for kind, a, b, c, d in codes:
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
