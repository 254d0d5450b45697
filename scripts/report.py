"""A report of one run, or a comparison of several: one HTML file that needs nothing else, PNG plots, a Markdown table.

    python scripts/report.py recipes/llama-3.2-1b/run
    python scripts/report.py RUN OTHER_RUN --output compared.html
    python scripts/report.py RUN --png plots --markdown results.md

RUN is the output_dir of train.py: finished, stopped, failed, or still training. The page, RUN/report.html unless --output
names another file, shows curves with each resume marked, scores before and after, answers of base and tuned model, the
data, settings that differ from the recipe's, versions, hardware, and the command that makes the run again. What a run
does not hold is named. Scores are those of recipes/qwen3-8b-invoice/score.py RUN and scripts/chat_scores.py RUN.

--png needs matplotlib (requirements-dev.txt).
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import jinja2
import report_answers
import report_charts
from markupsafe import Markup
from report_charts import Chart, Line, number, smoothed
from report_data import LOSS, ReportError, Run, Scores, Start, read_runs
from rich.console import Console
from rich.table import Table

# Title, key in metrics.jsonl, unit, factor, smoothed, dots, what it is or why it may be missing.
CURVES = (
    ("Training loss", "loss", "nats per labelled token", 1, True, False, "mean of each logged step"),
    ("Evaluation loss", "eval_loss", "nats per labelled token", 1, False, True, "needs an eval_strategy"),
    ("Learning rate", "learning_rate", "", 1, False, False, ""),
    ("Gradient norm", "grad_norm", "before clipping", 1, True, False, ""),
    ("Tokens per second", "tokens_per_second", "all ranks", 1, True, False, "without evaluation and saves"),
    ("MFU", "mfu", "% of the GPU's bf16 peak", 100, True, False, "needs a GPU whose peak is known"),
    ("Peak GPU memory", "peak_memory_gib", "GiB, rank 0", 1, False, False, "needs a GPU"),
    ("Token accuracy", "mean_token_accuracy", "% of labelled tokens", 100, True, False, ""),
)
OUTCOMES = {
    "done": "done",
    "preempted": "stopped by SIGTERM, checkpoint kept",
    "failed": "failed",
    "running": "running, or its processes were killed",
}
# Key in a report of score.py, label, kind.
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


# ---- words for numbers -----------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """42 s, 7 min 12 s, 3 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def wilson(hits: int, count: int) -> tuple[float, float]:
    """95 % interval of a share, by Wilson's score."""
    z, share = 1.96, hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def score_cell(report: dict | None, key: str, kind: str) -> tuple[str, str]:
    """(value, interval) of a score as text, empty where there is none."""
    value = (report or {}).get(key)
    if value is None:
        return "", ""
    if kind == "share":
        low, high = wilson(value, report["documents"])
        return f"{value} of {report['documents']}", f"{low:.0%} to {high:.0%}"
    interval = report.get(f"{key}_interval")
    return f"{value:.3f}", f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else ""


def score_rows(scores: Scores) -> list[dict]:
    """Rows of the before/after table: label, base, tuned, change."""
    rows = []
    for key, label, kind in LOSS_SCORES if scores.is_loss else FIELD_SCORES:
        cells = [score_cell(report, key, kind) for report in (scores.base, scores.tuned)]
        change = ""
        if cells[0][0] and cells[1][0]:
            difference = scores.tuned[key] - scores.base[key]
            change = f"{difference:+d}" if kind == "share" else f"{difference:+.3f}"
        if cells[0][0] or cells[1][0]:
            rows.append({"label": label, "base": cells[0], "tuned": cells[1], "change": change})
    held = [(report or {}).get("constrained") for report in (scores.base, scores.tuned)]
    if any(held):
        cells = [score_cell(report, "micro_f1", "score") for report in held]
        rows.append({"label": "Field F1, held to the schema", "base": cells[0], "tuned": cells[1], "change": ""})
    return rows


def headline(scores: Scores) -> tuple[str, str]:
    """(before -> after, what that is) of the score that stands for the rows."""
    key, what = ("perplexity", "perplexity") if scores.is_loss else ("micro_f1", "field F1")
    before, after = (score_cell(report, key, "score") for report in (scores.base, scores.tuned))
    count = scores.newest.get("rows" if scores.is_loss else "documents")
    interval = f", 95 % {after[1]}" if after[1] else ""
    rows = "held-out rows" if scores.is_loss else Path(scores.rows).name
    return " → ".join(value for value in (before[0], after[0]) if value), f"{what}, {count} {rows}{interval}"


def facts(run: Run) -> list[tuple[str, str, str]]:
    """(label, value, remark) of what one looks for first. The same labels for every run; value "–" where unknown."""
    losses, last, evals = run.values("loss"), run.last_losses, run.values("eval_loss")
    planned, memory, rate = run.planned_steps, run.peak_memory, run.median("tokens_per_second")
    resumes = len(run.starts) - 1
    outcome = OUTCOMES.get(run.outcome, run.outcome)
    found = [
        ("Outcome", outcome, f"step {run.steps}" + (f" of {planned}" if planned else "")),
        (
            "Training loss",
            f"{losses[0]:.3f} → {sum(last) / len(last):.3f}" if losses else "",
            f"first, mean of the last {len(last)} logged" if losses else "",
        ),
        ("Evaluation loss", " → ".join(f"{value:.3f}" for value in evals[:: max(1, len(evals) - 1)]), "first, last"),
    ]
    found += [("Score", *headline(scores)) for scores in run.scores] or [("Score", "", "")]
    mfu = run.median("mfu")
    found += [
        ("Time", duration(run.seconds) if run.seconds else "", f"{resumes} resume(s)" if resumes > 0 else "one start"),
        ("Tokens", number(run.tokens) if run.tokens else "", "trained on, repeated steps included"),
        (
            "Speed",
            f"{number(rate)} tokens/s" if rate else "",
            "median" + (f"; MFU {mfu:.1%}" if mfu else ""),
        ),
        ("Memory", f"{memory[0]:.1f} GiB" if memory else "", memory[1] if memory else ""),
    ]
    return [(label, value or "–", remark if value else "not recorded") for label, value, remark in found]


def about(run: Run) -> list[tuple[str, str]]:
    """What was trained on what, in a few rows."""
    arguments, record = run.arguments, run.record
    tuning = "all weights"
    if arguments.get("use_peft"):
        tuning = f"LoRA, rank {arguments.get('lora_r')}" + (", 4-bit base" if arguments.get("load_in_4bit") else "")
    hardware = record.get("hardware") or {}
    memory = f", {hardware['memory'] / 2**30:.0f} GiB of host memory" if hardware.get("memory") else ""
    rows = [
        ("Model", arguments.get("model_name_or_path")),
        ("Trained", tuning if arguments else None),
        ("Data", arguments.get("dataset_name")),
        (
            "Strategy",
            arguments.get("strategy") and f"{arguments['strategy']}, {arguments.get('world_size')} process(es)",
        ),
        ("Global batch", run.global_batch),
        ("Hardware", run.hardware + memory if record.get("hardware") else None),
        ("Versions", ", ".join(f"{name} {version}" for name, version in (record.get("versions") or {}).items())),
        ("Last written", record.get("time")),
    ]
    return [(label, str(value)) for label, value in rows if value]


def data_rows(run: Run) -> list[tuple[str, str]]:
    """The data section as a table."""
    record, found = run.record, run.record.get("dataset") or {}
    rows = []
    for name, counts in (found.get("counts") or {}).items():
        told = (
            f"{counts['read']} read, {counts['kept']} kept, {counts['malformed']} malformed, {counts['long']} too long"
        )
        rows.append((f"Rows, {name} file", told + (f" ({counts['cut']} of them cut)" if counts["cut"] else "")))
    if run.held_out is not None:
        rows.append(("Rows held out", str(run.held_out)))
    if found:
        kinds = f"{found['documents']} documents" + (f" in {found['rows']} packed rows" if found["packed"] else "")
        rows.append(("Trained on", kinds))
    if tokens := record.get("tokens"):
        share = record.get("labelled_tokens", 0) / tokens
        rows.append(("Tokens of an epoch", f"{tokens:,}, of which {share:.1%} carry a label"))
        limit = run.arguments.get("max_length")
        if found.get("packed") and limit:
            rows.append(("Packing", f"on; rows are {tokens / (found['rows'] * limit):.1%} full"))
        elif found:
            rows.append(("Packing", "off"))
    if lengths := found.get("lengths"):
        middle, high, higher, longest = (f"{value:.0f}" for value in lengths["percentiles"])
        limit = run.arguments.get("max_length") or "no"
        told = f"half up to {middle}, 90 % up to {high}, 99 % up to {higher}, longest {longest}; max_length {limit}"
        rows.append(("Tokens of a document", told))
    return rows


def setting(value) -> str:
    """A setting as a person would type it."""
    return value if isinstance(value, str) else "not set" if value is None else json.dumps(value)


def different_settings(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """(setting, its value in each run) of the settings that are not the same in all runs."""
    keys = sorted({key for run in runs for key in run.arguments})
    rows = [(key, [setting(run.arguments.get(key)) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


# ---- charts ----------------------------------------------------------------------------------------------------------


def charts(runs: list[Run]) -> tuple[list[Chart], list[str]]:
    """(the charts that have values, what is not drawn and why)."""
    drawn, missing = [], []
    for title, key, unit, factor, smooth, dots, note in CURVES:
        lines = []
        for index, run in enumerate(runs):
            if points := [(step, value * factor) for step, value in run.curve(key)]:
                line = Line(run.name, index, points, smoothed(points) if smooth and len(points) > 8 else (), dots)
                lines.append(line)
        if not lines:
            missing.append(f"{title} ({note})" if note else title)
            continue
        marks = [
            (start.first, index, "resumed" if len(runs) == 1 else f"{run.name} resumed")
            for index, run in enumerate(runs)
            for start in run.starts[1:]
            if start.first is not None
        ]
        drawn.append(Chart(title, unit, lines, marks, note))
    return drawn, missing


def figure(chart: Chart, is_first: bool) -> dict:
    """A chart for the template: drawn for a wide place and for a narrow one, which the page chooses between."""
    sizes = [("wide", 960, 330), ("narrow", 400, 260)] if is_first else [("only", 440, 230)]
    drawings = [
        (name, Markup(report_charts.svg(chart, width, height, f"{chart.key}-{name}"))) for name, width, height in sizes
    ]
    points = [{"name": line.name, "points": readings(line.points)} for line in chart.lines]
    return {"chart": chart, "drawings": drawings, "points": json.dumps(points)}


def readings(points) -> list[tuple[float, str]]:
    """(step, value as text) of the points that the page can be asked for."""
    every = max(1, len(points) // report_charts.MOST)
    return [(step, number(value)) for step, value in points[::every]]


# ---- the page --------------------------------------------------------------------------------------------------------


def field_rows(scores: Scores) -> list[dict]:
    """Rows of the table of fields, one a model: counts, F1, and shares in percent for the bar."""
    rows = []
    for name in scores.newest["fields"]:
        for label, report in (("base", scores.base), ("tuned", scores.tuned)):
            if counts := (report or {}).get("fields", {}).get(name):
                right, wrong, missed, invented = (counts[key] for key in ("normalised", "wrong", "missed", "invented"))
                every = max(1, right + wrong + missed + invented)
                shares = [(key, 100 * counts[key] / every) for key in ("normalised", "wrong", "missed", "invented")]
                rows.append({"field": name, "model": label, "counts": counts, "shares": shares})
    return rows


def worst_documents(scores: Scores) -> list[dict]:
    """The documents that the newest model read worst, field by field."""
    report = scores.newest
    return [
        entry | report_answers.compare(entry["gold"], {"answer": entry["prediction"]}, report.get("schema_file"))
        for entry in report.get("worst", [])
    ]


def sample_documents(scores: Scores) -> list[dict]:
    """The first documents, answered by base and tuned."""
    reports = {label: report for label, report in (("base", scores.base), ("tuned", scores.tuned)) if report}
    every = {label: {row["document"]: row for row in report.get("samples", [])} for label, report in reports.items()}
    made = []
    for document, row in every.get("tuned", every.get("base", {})).items():
        answers = {label: rows[document]["prediction"] for label, rows in every.items() if document in rows}
        compared = report_answers.compare(row["gold"], answers, scores.newest.get("schema_file"))
        made.append({"document": document} | compared)
    return made


def sample_chats(scores: Scores) -> list[dict]:
    """The prompts of chat_scores.py with the answers of base and tuned."""
    reports = {label: report for label, report in (("base", scores.base), ("tuned", scores.tuned)) if report}
    prompts = {row["id"]: row["prompt"] for report in reports.values() for row in report.get("answers", [])}
    return [
        {
            "id": ident,
            "prompt": prompt,
            "answers": [
                (label, report_answers.shortened(row["answer"]), row.get("limit_hit"))
                for label, report in reports.items()
                for row in report.get("answers", [])
                if row["id"] == ident
            ],
        }
        for ident, prompt in prompts.items()
    ]


def start_row(number: int, start: Start) -> list[str]:
    """A row of the table of starts."""
    steps = "none logged" if start.first is None else f"{start.first} to {start.last}"
    seconds = duration(start.ended - start.begun) if start.ended else "–"
    code = "" if start.exit_code is None else str(start.exit_code)
    return [str(number), moment(start.begun), steps, str(start.repeated), seconds, code]


def run_view(run: Run, index: int) -> dict:
    """Everything of one run that the template shows."""
    lengths = (run.record.get("dataset") or {}).get("lengths")
    histogram = lengths and Markup(
        report_charts.histogram_svg(
            lengths["histogram"], lengths["edges"], "Documents by length in tokens", f"lengths-{index}"
        )
    )
    sets = [
        {
            "scores": scores,
            "rows": score_rows(scores),
            "fields": [] if scores.is_loss else field_rows(scores),
            "worst": [] if scores.is_loss else worst_documents(scores),
            "samples": [] if scores.is_loss else sample_documents(scores),
            "chats": sample_chats(scores) if scores.is_loss else [],
        }
        for scores in run.scores
    ]
    return {
        "run": run,
        "index": index,
        "ident": f"run-{index}",
        "facts": facts(run),
        "about": about(run),
        "sets": sets,
        "data": data_rows(run),
        "histogram": histogram,
        "changed": [(key, old or "not in it", new) for key, old, new in run.changed_settings],
        "start_rows": [start_row(number, start) for number, start in enumerate(run.starts, 1)],
        "has_codes": any(start.exit_code is not None for start in run.starts),
        "every_setting": [(key, setting(value)) for key, value in sorted(run.arguments.items())],
    }


def page(runs: list[Run]) -> str:
    """The report as one HTML file."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    drawn, missing = charts(runs)
    return environment.get_template("report.html.jinja").render(
        title=" and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs compared",
        runs=[run_view(run, index) for index, run in enumerate(runs)],
        figures=[figure(chart, place == 0) for place, chart in enumerate(drawn)],
        missing=missing,
        different=[(key, *values) for key, values in different_settings(runs)],
        dashes=report_charts.DASHES,
        colours=report_charts.COLOURS,
        made=time.strftime("%Y-%m-%d"),
        LOSS=LOSS,
    )


# ---- Markdown and the terminal ---------------------------------------------------------------------------------------


def comparison(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """(label, a cell for each run): what stands in the summary, with the remark in brackets."""
    labels = dict.fromkeys(label for run in runs for label, _, _ in facts(run))
    rows = []
    for label in labels:
        cells = []
        for run in runs:
            told = [
                f"{value} ({remark})" if remark and value != "–" else value
                for name, value, remark in facts(run)
                if name == label
            ]
            cells.append("; ".join(told) or "–")
        rows.append((label, cells))
    for label in ("Model", "Trained", "Data", "Strategy", "Hardware", "Versions", "Last written"):
        rows.append((label, [dict(about(run)).get(label, "–") for run in runs]))
    return rows


def markdown(runs: list[Run]) -> str:
    """The summary as a Markdown table, then one of the fields for each set of scored documents."""

    def row(cells) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    lines = [row(["", *(run.name for run in runs)]), "|---" * (len(runs) + 1) + "|"]
    lines += [row([label, *cells]) for label, cells in comparison(runs)]
    for run in runs:
        for scores in run.scores:
            if not scores.is_loss:
                names = list(scores.newest["fields"])
                lines += [
                    "",
                    f"Field F1 of {run.name} on {Path(scores.rows).name}, {scores.newest['documents']} documents:",
                    "",
                ]
                lines += [row(["", *names, "all fields (95 %)"]), "|---" * (len(names) + 2) + "|"]
                for label, report in (("base", scores.base), ("tuned", scores.tuned)):
                    if report:
                        cells = [report["fields"].get(name, {}).get("f1") for name in names]
                        value, interval = score_cell(report, "micro_f1", "score")
                        cells = ["–" if cell is None else f"{cell:.3f}" for cell in cells]
                        lines.append(row([label, *cells, f"{value} ({interval})" if interval else value]))
    return "\n".join(lines) + "\n"


def show(runs: list[Run], console: Console) -> None:
    """The summary in the terminal."""
    table = Table("", *(run.name for run in runs), box=None, pad_edge=False)
    for label, cells in comparison(runs)[: -7 if len(runs) > 1 else None]:
        table.add_row(label, *cells)
    console.print(table)
    for run in runs:
        for note in run.notes:
            console.print(f"{run.name}: {note}", markup=False, highlight=False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a recipe's train.py")
    parser.add_argument("-o", "--output", type=Path, help="the page; default: report.html in the first RUN")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write each chart there as a PNG, too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there as Markdown, too")
    arguments = parser.parse_args(argv)
    console, output = Console(), arguments.output or arguments.runs[0] / "report.html"
    try:
        runs = read_runs(arguments.runs)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page(runs), encoding="utf-8")
        written = [output]
        if arguments.markdown:
            arguments.markdown.write_text(markdown(runs), encoding="utf-8")
            written.append(arguments.markdown)
        if arguments.png:
            arguments.png.mkdir(parents=True, exist_ok=True)
            for chart in charts(runs)[0]:
                written.append(arguments.png / f"{chart.key}.png")
                report_charts.write_png(chart, written[-1])
    except ImportError as error:
        print(f"report.py: --png needs {error.name}: pip install -r requirements-dev.txt", file=sys.stderr)
        return 1
    except (ReportError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 1
    show(runs, console)
    console.print("\n" + "\n".join(map(str, written)), markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
