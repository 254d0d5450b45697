"""Field scores of invoice extraction, driven by the schema; pure Python and numpy, no model.

Counting, for one field of one document, with the gold value and the predicted one:

- absent on both sides: nothing is counted. null, a missing key, an empty or blank string and an empty list are absent;
  0 is not.
- gold only: `missed`. Prediction only: `invented`. Both, and not the same: `wrong`.
- both, and the same after normalising: `normalised`; and the same as written: also `exact` (so exact <= normalised).
  What "the same" means stands at the top of field_values.py.

F1 = 2 * same / (gold values + predicted values), so a wrong value costs precision and recall. Micro F1 adds the counts
of all fields first; macro F1 is the mean of the F1 of the fields that have a gold or a predicted value.

Entries of an array are matched one to one, each gold entry once, so that the most fields agree; their order plays no
part. A reply without a whole JSON object misses every gold value.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from field_values import is_absent, same_value
from invoice import check_target, kind

COUNTS = ("exact", "normalised", "missed", "invented", "wrong")
EXACT, NORMALISED, MISSED, INVENTED, WRONG = range(len(COUNTS))

# ---- the model's text -> an object ----------------------------------------------------------------------------------


@dataclass
class Reply:
    """A model's text as an object; `value` is None when no whole JSON object stands in it."""

    value: dict | None
    strict: bool  # the whole text is one JSON object
    repeated_keys: int  # the last value of a repeated key is scored, as JSON parsers keep it


def read_reply(text: str | None) -> Reply:
    """Find the JSON object of a reply.

    Strict: the whole text, blanks around it apart, is one object. Lenient: after the <think> block, the first fenced
    block, or else the first object; it must be whole, as a cut object is not repaired. What stands in a <think> block
    that never closes is no answer. NaN and Infinity are not JSON.
    """
    text = text or ""
    value, repeated = _decode(text.strip(), whole=True)
    if value is not None:
        return Reply(value, True, repeated)
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    fence = re.search(r"```[A-Za-z]*\s*(\{.*?)```", text, re.DOTALL)
    # Only the first opening brace is tried: in a cut object the next one opens a line item.
    start = re.search(r'\{\s*["}]', text)
    for candidate in ([fence[1]] if fence else []) + ([text[start.start() :]] if start else []):
        value, repeated = _decode(candidate, whole=False)
        if value is not None:
            return Reply(value, False, repeated)
    return Reply(None, False, 0)


def _decode(text: str, whole: bool) -> tuple[dict | None, int]:
    repeated = 0

    def pairs(items: list[tuple[str, Any]]) -> dict:
        nonlocal repeated
        repeated += len(items) - len(dict(items))
        return dict(items)

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        value, end = json.JSONDecoder(object_pairs_hook=pairs, parse_constant=refuse).raw_decode(text)
    except (ValueError, RecursionError):  # RecursionError: a model stuck on "[[[["
        return None, 0
    if not isinstance(value, dict) or (whole and end != len(text)):
        return None, 0
    return value, repeated


# ---- one document ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Plain fields that are scored together: those of the document, or those of one array's entries."""

    array: tuple[str, ...] | None  # path of the array; None for the document itself
    fields: tuple[tuple[tuple[str, ...], dict], ...]  # path below the array (or the top), and the field's schema


def field_groups(schema: dict) -> list[Group]:
    """The schema as groups of plain fields, the document's own first."""
    arrays: list[Group] = []

    def plain(node: dict, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], dict]]:
        if kind(node) == "object":
            return [leaf for key, field in node["properties"].items() for leaf in plain(field, (*path, key))]
        if kind(node) == "array":
            arrays.append(Group(path, tuple(plain(node["items"], ()))))
            return []
        return [(path, node)]

    return [Group(None, tuple(plain(schema, ()))), *arrays]


def field_names(schema: dict) -> list[str]:
    """Names of the scored fields, in the order of the rows of `count_document`: total, items[].price, seller.name."""
    return [
        ".".join(path) if group.array is None else ".".join(group.array) + "[]" + "".join(f".{key}" for key in path)
        for group in field_groups(schema)
        for path, _ in group.fields
    ]


def count_document(gold: dict, predicted: dict | None, schema: dict) -> np.ndarray:
    """Counts of one document, an integer array (fields, len(COUNTS)). `predicted` None misses every gold value."""
    rows = []
    for group in field_groups(schema):
        if group.array is None:
            rows.append(_count_fields(gold, predicted, group))
        else:
            gold_items, items = (_get(side, group.array) for side in (gold, predicted))
            rows.append(_count_items(*(x if isinstance(x, list) else [] for x in (gold_items, items)), group))
    return np.concatenate(rows)


def key_errors(predicted: Any, schema: dict) -> tuple[int, int]:
    """(extra keys, missing keys) of a prediction, at every depth."""
    if kind(schema) == "array":
        found = [key_errors(item, schema["items"]) for item in predicted] if isinstance(predicted, list) else []
        return sum(extra for extra, _ in found), sum(missing for _, missing in found)
    if kind(schema) != "object" or not isinstance(predicted, dict):
        return 0, 0
    extra, missing = len(predicted.keys() - schema["properties"]), len(schema["properties"].keys() - predicted)
    for key in schema["properties"].keys() & predicted:
        below = key_errors(predicted[key], schema["properties"][key])
        extra, missing = extra + below[0], missing + below[1]
    return extra, missing


def _get(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _count_fields(gold: Any, predicted: Any, group: Group) -> np.ndarray:
    counts = np.zeros((len(group.fields), len(COUNTS)), dtype=np.int64)
    for row, (path, field) in zip(counts, group.fields, strict=True):
        a, b = _get(gold, path), _get(predicted, path)
        if is_absent(a) and is_absent(b):
            continue
        if is_absent(b):
            row[MISSED] = 1
        elif is_absent(a):
            row[INVENTED] = 1
        else:
            exact, normalised = same_value(a, b, field)
            row[EXACT], row[NORMALISED], row[WRONG] = exact, normalised, not normalised
    return counts


def _count_items(gold: list, predicted: list, group: Group) -> np.ndarray:
    """Counts over the matching with the most fields the same.

    Equal matchings are told apart by the counts of each field in turn, so that the counts depend on what the entries
    hold and never on their order. Entries that share nothing are not a pair: missed and invented, not wrong.
    """
    counts = [[_count_fields(a, b, group) for b in predicted] for a in gold]
    base = len(group.fields) * min(len(gold), len(predicted)) + 1

    def weight(pair: np.ndarray) -> int:
        number = int(pair[:, NORMALISED].sum())
        if number:
            for column in (NORMALISED, EXACT, WRONG):
                for count in pair[:, column].tolist():
                    number = number * base + count
        return number

    pairs = [(i, j) for i, j in best_matching([[weight(pair) for pair in row] for row in counts])]
    total = np.zeros((len(group.fields), len(COUNTS)), dtype=np.int64)
    for i, j in pairs:
        total += counts[i][j]
    for i in set(range(len(gold))) - {i for i, _ in pairs}:
        total += _count_fields(gold[i], None, group)
    for j in set(range(len(predicted))) - {j for _, j in pairs}:
        total += _count_fields(None, predicted[j], group)
    return total


def best_matching(weights: list[list[int]]) -> list[tuple[int, int]]:
    """One-to-one pairs (row, column) with the largest sum of weights; pairs of weight 0 are left out.

    The Hungarian method with potentials (Kuhn-Munkres), in whole numbers of any size, rows * rows * columns steps.
    """
    if not weights or not weights[0]:
        return []
    if len(weights) > len(weights[0]):
        flipped = best_matching([list(column) for column in zip(*weights, strict=True)])
        return sorted((i, j) for j, i in flipped)
    rows, columns = len(weights), len(weights[0])
    row_potential, column_potential = [0] * (rows + 1), [0] * (columns + 1)
    owner = [0] * (columns + 1)  # row matched to a column, counted from 1; 0 is none, column 0 the one being placed
    for row in range(1, rows + 1):
        owner[0], column = row, 0
        slack: list[int | None] = [None] * (columns + 1)
        came_from, used = [0] * (columns + 1), [False] * (columns + 1)
        while owner[column]:
            used[column] = True
            i, best, delta = owner[column], 0, None
            for j in range(1, columns + 1):
                if used[j]:
                    continue
                cost = -weights[i - 1][j - 1] - row_potential[i] - column_potential[j]
                if slack[j] is None or cost < slack[j]:
                    slack[j], came_from[j] = cost, column
                if delta is None or slack[j] < delta:
                    delta, best = slack[j], j
            for j in range(columns + 1):
                if used[j]:
                    row_potential[owner[j]] += delta
                    column_potential[j] -= delta
                elif slack[j] is not None:
                    slack[j] -= delta
            column = best
        while column:
            owner[column], column = owner[came_from[column]], came_from[column]
    return sorted((owner[j] - 1, j - 1) for j in range(1, columns + 1) if owner[j] and weights[owner[j] - 1][j - 1])


# ---- all documents ---------------------------------------------------------------------------------------------------


def score_replies(
    golds: Sequence[dict],
    replies: Sequence[str | None],
    schema: dict,
    *,
    limit_hits: Sequence[bool] | None = None,
    names: Sequence[str] | None = None,
    worst: int = 5,
    resamples: int = 1000,
    seed: int = 0,
) -> dict:
    """The report on `replies` (the model's texts) against `golds`, one a document, in the same order.

    `limit_hits` says which replies were stopped by the output limit, `names` what a document is called in the list of
    the `worst`. Intervals are 95 % percentile intervals over `resamples` bootstrap samples of whole documents. A reply
    may count under limit_hits and under unparseable: they are separate numbers. Raises ValueError for no document, or
    for lists of different lengths.
    """
    limit_hits = [False] * len(golds) if limit_hits is None else limit_hits
    names = [str(index) for index in range(len(golds))] if names is None else names
    if not golds or {len(golds)} != {len(replies), len(limit_hits), len(names)}:
        raise ValueError(
            "golds, replies, limit_hits and names must be lists of one length, 1 or more; found "
            f"{len(golds)}, {len(replies)}, {len(limit_hits)} and {len(names)}"
        )
    read = [read_reply(text) for text in replies]
    counts = np.stack([count_document(gold, reply.value, schema) for gold, reply in zip(golds, read, strict=True)])
    violations = [check_target(reply.value, schema) if reply.value is not None else [] for reply in read]
    keys = [key_errors(reply.value, schema) for reply in read]
    strict, lenient = sum(reply.strict for reply in read), sum(reply.value is not None for reply in read)
    report = {
        "documents": len(golds),
        "strict_json": strict,
        "strict_json_rate": strict / len(golds),
        "lenient_json": lenient,
        "lenient_json_rate": lenient / len(golds),
        "limit_hits": sum(map(bool, limit_hits)),
        "unparseable": len(golds) - lenient,
        "schema_violations": sum(map(len, violations)),
        "documents_with_violations": sum(map(bool, violations)),
        "extra_keys": sum(extra for extra, _ in keys),
        "missing_keys": sum(missing for _, missing in keys),
        "repeated_keys": sum(reply.repeated_keys for reply in read),
    }
    report |= _f1_report(counts, resamples, seed)
    totals = counts.sum(axis=0)
    report["fields"] = {
        name: _field_report(row) for name, row in zip(field_names(schema), totals.tolist(), strict=True)
    }
    report["worst"] = []
    scores = [_document_f1(document, reply) for document, reply in zip(counts.sum(axis=1), read, strict=True)]
    errors = counts[:, :, MISSED:].sum(axis=(1, 2))
    for index in sorted(range(len(golds)), key=lambda i: (scores[i], -errors[i], i))[:worst]:
        if scores[index] < 1:
            report["worst"].append(
                {
                    "document": names[index],
                    "f1": scores[index],
                    "limit_hit": bool(limit_hits[index]),
                    "violations": violations[index],
                    "gold": golds[index],
                    "prediction": replies[index],
                }
            )
    return report


def _sums(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values the same, gold values + predicted values) from counts (..., len(COUNTS))."""
    same = counts[..., NORMALISED]
    return same, 2 * same + 2 * counts[..., WRONG] + counts[..., MISSED] + counts[..., INVENTED]


def _f1(same: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.divide(2 * same, values, out=np.full(np.shape(values), np.nan), where=values > 0)


def _mean(scores: np.ndarray) -> np.ndarray:
    """Mean over the last axis of what is not nan; nan where all are."""
    known = ~np.isnan(scores)
    total, number = np.where(known, scores, 0).sum(axis=-1), known.sum(axis=-1)
    return np.divide(total, number, out=np.full(np.shape(number), np.nan), where=number > 0)


def _f1_report(counts: np.ndarray, resamples: int, seed: int) -> dict:
    same, values = _sums(counts)  # both (documents, fields)
    exact = counts[..., EXACT]
    draws = np.random.default_rng(seed).multinomial(len(counts), [1 / len(counts)] * len(counts), size=resamples)
    drawn_same, drawn_values = draws @ same, draws @ values
    report = {}
    for name, measure in (
        ("micro_f1", lambda s, v: _f1(s.sum(axis=-1), v.sum(axis=-1))),
        ("macro_f1", lambda s, v: _mean(_f1(s, v))),
    ):
        sampled = measure(drawn_same, drawn_values)
        sampled = sampled[~np.isnan(sampled)]
        report[name] = _number(measure(same.sum(axis=0), values.sum(axis=0)))
        report[f"{name}_interval"] = [_number(x) for x in np.percentile(sampled, [2.5, 97.5])] if sampled.size else None
        report[f"{name}_exact"] = _number(measure(exact.sum(axis=0), values.sum(axis=0)))
    report["bootstrap"] = {"resamples": resamples, "seed": seed, "level": 0.95}
    return report


def _field_report(row: list[int]) -> dict:
    exact, same, missed, invented, wrong = row
    gold, predicted = same + missed + wrong, same + invented + wrong
    return {
        "gold": gold,
        "predicted": predicted,
        **dict(zip(COUNTS, row, strict=True)),
        "precision": same / predicted if predicted else None,
        "recall": same / gold if gold else None,
        "f1": 2 * same / (gold + predicted) if gold + predicted else None,
        "f1_exact": 2 * exact / (gold + predicted) if gold + predicted else None,
    }


def _document_f1(row: np.ndarray, reply: Reply) -> float:
    if reply.value is None:
        return 0.0
    same, values = _sums(row)
    return float(2 * same / values) if values else 1.0


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)
