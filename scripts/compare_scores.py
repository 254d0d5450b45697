"""Compare two reports of recipes/qwen3-8b-invoice/score.py, field by field.

    python scripts/compare_scores.py before.json after.json
    python scripts/compare_scores.py before.json after.json --at_least 0.40

With --keep RUN both go into RUN/scores.json, where report.py looks. With --at_least it exits with 1 unless
the second micro F1 is at least that and above the first.
"""

import argparse
import json
import sys
from pathlib import Path


def read_report(path: Path) -> dict:
    """A report of score.py. Raises ValueError, naming the file, when it is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a report of score.py --output ({error})") from error
    if not isinstance(report, dict) or not {"fields", "micro_f1", "documents"} <= report.keys():
        raise ValueError(f"{path} is not a report of score.py --output: it has no fields or no micro_f1")
    return report


def table(before: dict, after: dict) -> list[tuple[str, ...]]:
    """Rows of text, the head first: field, gold values, F1 before and after; at the end all fields, and whole JSON."""
    rows = [("field", "gold", "F1 before", "F1 after")]
    for name, field in after["fields"].items():
        rows.append((name, str(field["gold"]), _cell(before["fields"].get(name, {}).get("f1")), _cell(field["f1"])))
    gold = sum(field["gold"] for field in after["fields"].values())
    rows.append(("all fields", str(gold), _cell(before["micro_f1"]), _cell(after["micro_f1"])))
    rows.append(
        ("whole JSON", "", *(f"{x['documents'] - x['unparseable']} of {x['documents']}" for x in (before, after)))
    )
    return rows


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main() -> int | str:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--at_least", type=float, metavar="F1", help="the micro F1 that the second report must reach")
    parser.add_argument("--keep", type=Path, metavar="RUN", help="write both reports into RUN/scores.json")
    arguments = parser.parse_args()
    try:
        before, after = read_report(arguments.before), read_report(arguments.after)
    except ValueError as error:
        return f"compare_scores.py: {error}"  # sys.exit prints it and exits with 1
    rows = table(before, after)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]))
    if arguments.keep:
        scores = {str(after.get("data")): {"base": before, "tuned": after}}
        (arguments.keep / "scores.json").write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    if arguments.at_least is None:
        return 0
    old, new = before["micro_f1"] or 0.0, after["micro_f1"] or 0.0
    if new < arguments.at_least or new <= old:
        goal = f"a gain, to {arguments.at_least} or more, was asked for"
        return f"compare_scores.py: micro F1 went from {old:.3f} to {new:.3f}; {goal}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
