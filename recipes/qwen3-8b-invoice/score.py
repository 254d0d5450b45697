# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "accelerate", "datasets", "jsonschema", "numpy", "peft", "rich", "torch", "tqdm", "transformers", "trl",
# ]
# ///
"""Score a run, or any model, on invoices or receipts: generate every answer and compare it field by field.

    python recipes/qwen3-8b-invoice/score.py RUN
    python recipes/qwen3-8b-invoice/score.py RUN test.jsonl --constrained
    accelerate launch --num_processes 8 recipes/qwen3-8b-invoice/score.py RUN

RUN is a run folder, the output_dir of train.py: base model and tuned model are scored on the rows that the run held out,
or on DATA, with the run's schema, columns and template settings, and the reports are written into RUN/scores.json.
A base model that was scored there with the same settings is not scored again. Before training ends, only the base is.

    python recipes/qwen3-8b-invoice/score.py MODEL DATA.jsonl --text_column text --target_column entities \\
        --schema_file recipes/qwen3-8b-invoice/schema_receipt.json --chat_template_kwargs '{"enable_thinking": false}'

MODEL is a folder or a Hub id of a whole model or of a PEFT adapter. Without --text_column and --target_column the rows
are chats (`messages`). --chat_template_kwargs must be what the model was trained with. How the counting is done stands
at the top of field_scores.py and field_values.py.

--constrained answers a second time, held to the schema by llguidance, and reports that beside the free answers.
--engine vllm lets vLLM generate, from an environment of its own (vllm_answers.py).

Answers are greedy, left padded, and do not depend on batch size or number of processes in float32. In bfloat16 on a GPU
the kernels round differently for different batch shapes, so a near tie between two tokens may fall the other way.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import gather_object

from field_scores import score_replies
from finished_run import held_out_rows, is_run, read_run
from generation import generate, load_model, one_line, vllm_answers
from inputs import FILE_KINDS, read_file
from invoice import canonical, load_schema, parse_json, to_prompt_completion

Documents = list[tuple[str, list[dict], dict]]


def to_documents(
    rows: Iterable[tuple[int, dict]],
    source: str,
    schema: dict,
    text_column: str | None,
    target_column: str | None,
    limit: int | None = None,
) -> Documents:
    """[(name, prompt messages, gold target)] of the first `limit` rows; a row's name is its `id`, or its number.

    Raises ValueError naming `source` and row for the first bad row, and when there is none.
    """
    documents = []
    for number, row in rows:
        if limit is not None and len(documents) >= limit:
            break
        try:
            pair = to_prompt_completion(row, schema, text_column, target_column)
        except KeyError as error:
            found = ", ".join(map(str, row)) or "none"
            raise ValueError(f"{source}, row {number} has the columns {found}; wanted: {error.args[0]}.") from error
        except ValueError as error:
            raise ValueError(f"{source}, row {number}: {error}. Correct the row.") from error
        name = row["id"] if isinstance(row.get("id"), str | int) else f"row {number}"
        gold = canonical(parse_json(pair["completion"][0]["content"]), schema)
        documents.append((str(name), pair["prompt"], gold))
    if not documents:
        raise ValueError(f"{source}: no rows. Give a file with one document a row.")
    return documents


def read_documents(
    path: str, schema: dict, text_column: str | None, target_column: str | None, limit: int | None
) -> Documents:
    """`to_documents` of a file. Raises ValueError when there is no such file, too."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file. Give a file with one document a row ({', '.join(FILE_KINDS)}).")
    return to_documents(enumerate(read_file(Path(path)), 1), path, schema, text_column, target_column, limit)


def print_report(name: str, report: dict) -> None:
    """Print a report: a rich table on a terminal, plain text elsewhere."""
    rows = _table(report)
    # Short words, so that the table fits 80 columns.
    header = ("field", "gold", "pred", "exact", "norm", "missed", "invented", "wrong", "F1", "F1 exact")
    print(f"\n{name}")
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(*header, box=box.SIMPLE, padding=(0, 1, 0, 0))
        for column in table.columns:
            column.no_wrap = True
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    else:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for row in (header, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("\n".join(_summary(report)))
    for entry in report["worst"]:
        print(
            f"\nworst: {entry['document']}, F1 {entry['f1']:.3f}" + (", output limit hit" if entry["limit_hit"] else "")
        )
        for reason in entry["violations"]:
            print(f"  violation   {reason}")
        print(f"  gold        {json.dumps(entry['gold'], ensure_ascii=False)}")
        print(f"  prediction  {entry['prediction']!r}")
    if "constrained" in report:
        print("\nheld to the schema:\n" + "\n".join(_summary(report["constrained"])))


def _table(report: dict) -> list[list[str]]:
    columns = ("gold", "predicted", "exact", "normalised", "missed", "invented", "wrong", "f1", "f1_exact")
    return [[field, *(_cell(row[column]) for column in columns)] for field, row in report["fields"].items()]


def _summary(report: dict) -> list[str]:
    lines = [
        f"documents {report['documents']}, strict JSON {report['strict_json_rate']:.1%}, "
        f"lenient JSON {report['lenient_json_rate']:.1%}, output-limit hits {report['limit_hits']}, "
        f"unparseable {report['unparseable']}",
        f"schema violations {report['schema_violations']} in {report['documents_with_violations']} documents, "
        f"extra keys {report['extra_keys']}, missing keys {report['missing_keys']}, "
        f"repeated keys {report['repeated_keys']}",
    ]
    for name in ("micro_f1", "macro_f1"):
        low_high = report[f"{name}_interval"]
        lines.append(
            f"{name.removesuffix('_f1')} field F1 {_cell(report[name])}"
            + (f" [{low_high[0]:.3f}, {low_high[1]:.3f}]" if low_high else "")
            + f" (exact {_cell(report[f'{name}_exact'])})"
        )
    return lines


def _cell(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def positive(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, found {text!r}")
    return int(text)


def _mapping(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"expected a JSON object such as '{{\"enable_thinking\": false}}', found {text!r}"
        )
    return value


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; an unknown or shortened flag is an error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", metavar="RUN|MODEL", help="run folder, or folder or Hub id of a model or adapter")
    parser.add_argument("data", metavar="DATA.jsonl", nargs="?", help="documents with their targets, one JSON a line")
    parser.add_argument("--schema_file", help="JSON Schema of the answer; default: the run's, else schema.json")
    parser.add_argument("--text_column", help="column of the document; without it rows are chats in messages")
    parser.add_argument("--target_column", help="column of the target: an object, or JSON in a string")
    parser.add_argument("--chat_template_kwargs", type=_mapping, metavar="JSON", help="default: the run's, else {}")
    parser.add_argument("--limit", type=positive, help="score the first N rows only")
    parser.add_argument("--batch_size", type=positive, default=8, help="documents a batch and process (%(default)s)")
    parser.add_argument("--max_new_tokens", type=positive, default=512, help="output limit in tokens (%(default)s)")
    parser.add_argument("--constrained", action="store_true", help="answer a second time, held to the schema")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--vllm_python", default=sys.executable, help="Python of the environment that has vLLM")
    parser.add_argument(
        "--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="auto: bfloat16 on a GPU"
    )
    parser.add_argument(
        "--worst", type=int, default=5, help="how many of the worst, and of the first documents to keep (%(default)s)"
    )
    parser.add_argument("--output", type=Path, help="write the report to this JSON file; default: RUN/scores.json")
    parser.add_argument("--predictions", type=Path, help="write every answer to this JSON lines file")
    return parser.parse_args(arguments)


def prepare(arguments: argparse.Namespace) -> tuple[dict[str, tuple[str, str | None]], Documents, dict, dict]:
    """(models to score: {label: (model, revision)}, documents, schema, settings of the report), for run or model.

    Raises ValueError.
    """
    settings = {
        "data": arguments.data,
        "schema_file": arguments.schema_file or str(Path(__file__).parent / "schema.json"),
        "text_column": arguments.text_column,
        "target_column": arguments.target_column,
        "chat_template_kwargs": arguments.chat_template_kwargs or {},
    }
    models, run = {"model": (arguments.model, None)}, None
    if is_run(arguments.model):
        run = read_run(arguments.model, arguments.schema_file)
        settings["schema_file"] = str(run.schema_file)
        for key in ("text_column", "target_column", "chat_template_kwargs"):
            given = getattr(arguments, key)
            settings[key] = getattr(run, key) if given is None else given
        models = {"base": (run.base_model, run.base_revision)}
        models |= {"tuned": (str(run.final), None)} if run.final else {}
    elif not arguments.data:
        raise ValueError(f"{arguments.model} is no run folder (it has no run.json), so name a file of rows, too.")
    schema, columns = load_schema(settings["schema_file"]), (settings["text_column"], settings["target_column"])
    if arguments.data:
        documents = read_documents(arguments.data, schema, *columns, arguments.limit)
    else:
        settings["data"] = "held-out rows"
        documents = to_documents(held_out_rows(run), str(run.folder), schema, *columns, arguments.limit)
    for key in ("limit", "max_new_tokens", "batch_size", "engine", "dtype"):
        settings[key] = getattr(arguments, key)
    settings["held_to_schema_too"] = arguments.constrained
    if settings["dtype"] == "auto":
        settings["dtype"] = "bfloat16" if torch.cuda.is_available() else "float32"
    return models, documents, schema, settings


def score_model(
    model: tuple[str, str | None], documents: Documents, schema: dict, settings: dict, arguments: argparse.Namespace
) -> tuple[dict, list[dict]] | None:
    """(report, a row for each answer) of one model on rank 0, None on the others."""
    names, prompts, golds = (list(column) for column in zip(*documents, strict=True))
    # Ranks meet once, at the end, so the default of 10 minutes on a GPU would be a limit on the slowest one.
    # Without a GPU, only cpu=True makes a process group; else each process would score everything by itself.
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(hours=12))
    started, (model_id, revision) = time.monotonic(), model
    mine = list(range(len(documents)))[state.process_index :: state.num_processes]
    options = {"max_new_tokens": settings["max_new_tokens"], "chat_template_kwargs": settings["chat_template_kwargs"]}
    options["names"] = [names[index] for index in mine]
    if settings["engine"] == "vllm":
        if state.num_processes > 1:
            raise ValueError("--engine vllm shares the GPUs by itself: start score.py without accelerate launch.")
        options |= {"python": arguments.vllm_python, "dtype": settings["dtype"], "revision": revision}
        answer = lambda schema: vllm_answers(model_id, prompts, schema=schema, **options)  # noqa: E731
    else:
        loaded = load_model(model_id, getattr(torch, settings["dtype"]), state.device, revision)
        options |= {"batch_size": settings["batch_size"], "progress": state.is_main_process}
        answer = lambda schema: generate(*loaded, [prompts[i] for i in mine], schema=schema, **options)  # noqa: E731
    ways = {"free": answer(None)} | ({"constrained": answer(schema)} if settings["held_to_schema_too"] else {})
    merged = {way: dict(gather_object(list(zip(mine, answers, strict=True)))) for way, answers in ways.items()}
    if not state.is_main_process:
        return None
    report = {
        "model": model_id,
        "revision": revision,
        **settings,
        "device": torch.cuda.get_device_name() if state.device.type == "cuda" else state.device.type,
        "processes": state.num_processes,
        "seconds": round(time.monotonic() - started, 1),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    rows = [{"document": name, "gold": gold} for name, gold in zip(names, golds, strict=True)]
    for way, answers in merged.items():
        replies, limit_hits = zip(*(answers[index] for index in range(len(documents))), strict=True)
        scores = score_replies(golds, replies, schema, limit_hits=limit_hits, names=names, worst=arguments.worst)
        report |= scores if way == "free" else {way: scores}
        end = "" if way == "free" else f"_{way}"
        for row, reply, hit in zip(rows, replies, limit_hits, strict=True):
            row |= {f"prediction{end}": reply, f"limit_hit{end}": hit}
    report["samples"] = rows[: arguments.worst]  # the first documents, the same ones of every model
    return report, rows


def run(arguments: argparse.Namespace) -> dict[str, dict]:
    """Score as the arguments say. Returns {label: report} on rank 0, {} on the others. Raises ValueError, OSError."""
    models, documents, schema, settings = prepare(arguments)
    output = arguments.output or (Path(arguments.model, "scores.json") if "base" in models else None)
    for path in (output, arguments.predictions):
        if path:  # before the hours of generating, not after
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
    kept = json.loads(output.read_text(encoding="utf-8") or "{}") if output and "base" in models else {}
    reports, rows = {}, []
    for label, model in models.items():
        earlier = kept.get(settings["data"], {}).get(label, {})
        wanted = {"model": model[0], "revision": model[1], **settings}
        if label == "base" and earlier and not arguments.predictions and wanted == {k: earlier.get(k) for k in wanted}:
            reports[label] = earlier
            continue
        found = score_model(model, documents, schema, settings, arguments)
        if found:
            reports[label] = found[0]
            rows += [{"model": label, **row} for row in found[1]]
    if not PartialState().is_main_process:
        return {}
    if arguments.predictions:
        with arguments.predictions.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    if output:
        result = reports["model"] if "model" in reports else kept | {settings["data"]: reports}
        output.write_text(json.dumps(result, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return reports


def main() -> int:
    arguments = parse_arguments()
    try:
        reports = run(arguments)
    except (ValueError, OSError) as error:
        print(f"score.py, rank {os.environ.get('RANK', '0')}: {one_line(error)}", file=sys.stderr)
        return 1
    for label, report in reports.items():
        print_report(f"{label}: {report['model']}", report)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
