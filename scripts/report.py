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
import sys
import time
from pathlib import Path

import jinja2
import report_charts
import report_scores
from markupsafe import Markup
from report_charts import Chart, Line, number, smoothed
from report_data import ReportError, Run, Start, read_runs
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
ABOUT = ("Model", "Trained", "Data", "Strategy", "Global batch", "Hardware", "Versions", "Last written")
OUTCOMES = {
    "done": "done",
    "preempted": "stopped by SIGTERM, checkpoint kept",
    "failed": "failed",
    "running": "running, or its processes were killed",
}


# ---- words for numbers -----------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """42 s, 7 min 12 s, 3 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def facts(run: Run) -> list[tuple[str, str, str]]:
    """(label, value, remark) of what one looks for first. The same labels for every run; value "–" where unknown."""
    losses, last, evals = run.values("loss"), run.last_losses, run.values("eval_loss")
    planned, memory, rate = run.planned_steps, run.peak_memory, run.median("tokens_per_second")
    outcome = OUTCOMES.get(run.outcome, run.outcome)
    found = [
        ("Outcome", outcome, f"step {run.steps}" + (f" of {planned}" if planned else "")),
        (
            "Training loss",
            f"{losses[0]:.3f} → {sum(last) / len(last):.3f}" if losses else "",
            f"first, mean of the last {len(last)}" if losses else "",
        ),
        ("Evaluation loss", " → ".join(f"{value:.3f}" for value in evals[:: max(1, len(evals) - 1)]), "first, last"),
    ]
    found += [("Score", *report_scores.headline(scores)) for scores in run.scores] or [("Score", "", "")]
    mfu = run.median("mfu")
    found += [
        (
            "Time",
            duration(run.seconds) if run.seconds else "",
            f"{len(run.starts)} start{'s' * (len(run.starts) != 1)}"
            + (f", {len(run.resumes)} resumed" if run.resumes else ""),
        ),
        ("Tokens", number(run.tokens) if run.tokens else "", "trained on, repeated steps included"),
        (
            "Speed",
            f"{number(rate)} tokens/s" if rate else "",
            "median" + (f"; MFU {mfu:.1%}" if mfu else ""),
        ),
        ("Memory", f"{memory[0]:.1f} GiB" if memory else "", memory[1] if memory else ""),
    ]
    return [(label, value or "–", remark if value else "not recorded") for label, value, remark in found]


def strategy_in_words(arguments: dict) -> str | None:
    """The launch file's name and the number of processes."""
    count = arguments.get("world_size", 1)
    return arguments.get("strategy") and f"{arguments['strategy']}, {count} process{'es' if count > 1 else ''}"


def about(run: Run) -> list[tuple[str, str]]:
    """What was trained on what, in a few rows."""
    arguments, record = run.arguments, run.record
    tuning = "all weights"
    if arguments.get("use_peft"):
        tuning = f"LoRA, rank {arguments.get('lora_r')}" + (", 4-bit base" if arguments.get("load_in_4bit") else "")
    hardware = record.get("hardware") or {}
    memory = f", {hardware['memory'] / 2**30:.0f} GiB of host memory" if hardware.get("memory") else ""
    versions = ", ".join(f"{name} {version}" for name, version in (record.get("versions") or {}).items())
    machine = run.hardware + memory if record.get("hardware") else None
    model, data = arguments.get("model_name_or_path"), arguments.get("dataset_name")
    model = Path(model).name if model and Path(model).is_absolute() else model  # a folder of this machine
    values = (model, tuning if arguments else None, data, strategy_in_words(arguments), run.global_batch, machine)
    found = zip(ABOUT, (*values, versions, record.get("time")), strict=True)
    return [(label, str(value)) for label, value in found if value]


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
    steps = [line["step"] for run in runs for line in run.lines]
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
            for start in run.resumes
        ]
        drawn.append(Chart(title, unit, lines, marks, note, (min(steps), max(steps))))
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


def start_row(number: int, start: Start) -> list[str]:
    """A row of the table of starts."""
    steps = "none logged" if start.first is None else f"{start.first} to {start.last}"
    seconds = duration(start.ended - start.begun) if start.ended else "–"
    code = [] if start.exit_code is None else [str(start.exit_code)]
    return [str(number), moment(start.begun), steps, str(start.repeated), seconds, *code]


def run_view(run: Run, index: int) -> dict:
    """Everything of one run that the template shows."""
    lengths = (run.record.get("dataset") or {}).get("lengths")
    histogram = lengths and Markup(
        report_charts.histogram_svg(
            lengths["histogram"], lengths["edges"], "Documents by length in tokens", f"lengths-{index}"
        )
    )
    sets = []
    for scores in run.scores:
        made = {"scores": scores, "rows": report_scores.score_rows(scores)}
        if scores.is_loss:
            made["chats"] = report_scores.sample_chats(scores)
        else:
            made["fields"] = report_scores.field_rows(scores)
            made["worst"] = report_scores.worst_documents(scores)
            made["samples"] = report_scores.sample_documents(scores)
        sets.append(made)
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
        subtitle=", ".join(
            [*(value for key, value in about(runs[0]) if key in ("Model", "Trained")), runs[0].hardware]
        ),
        made=time.strftime("%Y-%m-%d"),
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
    for label in ABOUT:
        rows.append((label, [dict(about(run)).get(label, "–") for run in runs]))
    return rows


def markdown(runs: list[Run]) -> str:
    """The summary as a Markdown table, then one of the fields for each set of scored documents."""

    def row(cells) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    lines = [row(["", *(run.name for run in runs)]), "|---" * (len(runs) + 1) + "|"]
    lines += [row([label, *cells]) for label, cells in comparison(runs)]
    scored = [(run.name, scores) for run in runs for scores in run.scores if not scores.is_loss]
    for owner, scores in scored:
        names = list(scores.newest["fields"])
        lines += ["", f"Field F1 of {owner}, {scores.newest['documents']} documents of {scores.title}:", ""]
        lines += [row(["", *names, "all fields (95 %)"]), "|---" * (len(names) + 2) + "|"]
        for label, report in scores.reports.items():
            found = [report["fields"].get(name, {}).get("f1") for name in names]
            value, interval = report_scores.score_cell(report, "micro_f1")
            cells = ["–" if f1 is None else f"{f1:.3f}" for f1 in found]
            lines.append(row([label, *cells, f"{value} ({interval})" if interval else value]))
    return "\n".join(lines) + "\n"


def show(runs: list[Run], console: Console) -> None:
    """The summary in the terminal."""
    table = Table("", *(run.name for run in runs), box=None, pad_edge=False)
    for label, cells in comparison(runs):
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
