# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "accelerate", "datasets", "jsonschema", "numpy", "peft", "pypdf", "torch", "tqdm", "transformers", "trl",
# ]
# ///
"""Read documents with a trained run, and mark the values that a person should look at.

    python recipes/qwen3-8b-invoice/predict.py RUN receipts/ more/0007.pdf -o predictions.csv
    python recipes/qwen3-8b-invoice/predict.py RUN documents.jsonl -o predictions.jsonl

RUN is the output_dir of train.py, finished. FILES are .txt and .pdf files, folders of them, or files of rows (.jsonl,
.json, .csv, .parquet) whose text stands in the run's text column. Prompt, schema and template settings are the run's,
decoding is that of score.py: greedy, by the same code.

The output is a .csv with a column for each key of the schema and one named `flags`, or a .jsonl with `document`,
`fields` and `flags`. A value is flagged when it does not stand in the text, breaks the schema, or was answered when the
output limit was hit; a document is, when no whole JSON came back. Flags are reasons to look, not proofs of an error.

Answers are kept in OUT.partial as they come. The same command started again goes on from there.
"""

import argparse
import csv
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from documents import DOCUMENT_KINDS, TEXT_COLUMN, find_documents, read_text
from finished_run import Run, read_run
from generation import generate_batches, load_model, one_line
from inputs import FILE_KINDS, read_file
from invoice import load_schema, prompt_messages
from value_flags import flag_values


def find_texts(files: Sequence[str], text_column: str) -> Iterator[tuple[str, str]]:
    """(name, text) of every document, in the order of the arguments. Raises ValueError, naming the file or the row."""
    for file in map(Path, files):
        if file.is_dir():
            documents = find_documents(file)
            if not documents:
                raise ValueError(f"{file} holds no {' or '.join(DOCUMENT_KINDS)} file.")
            yield from ((str(path), read_text(path)) for path in documents)
        elif not file.is_file():
            raise ValueError(f"{file}: no such file or folder.")
        elif file.suffix.lower() in DOCUMENT_KINDS:
            yield str(file), read_text(file)
        elif file.suffix in FILE_KINDS:
            for number, row in enumerate(read_file(file), 1):
                text = row.get(text_column)
                if not isinstance(text, str) or not text.strip():
                    raise ValueError(f"{file}, row {number}: the column {text_column!r} holds no text.")
                yield str(row.get("id") or f"{file}, row {number}"), text
        else:
            raise ValueError(f"{file}: expected {', '.join((*DOCUMENT_KINDS, *FILE_KINDS))}, or a folder.")


def read_journal(path: Path, settings: dict) -> dict[str, dict]:
    """Answers that an earlier start left in `path`, by document. A line that was cut off is taken out of the file.

    Raises ValueError when they were made with other settings.
    """
    if not path.is_file():
        path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
        return {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    first = json.loads(whole[0]) if whole else settings
    different = [key for key in settings if first.get(key) != settings[key]]
    if different:
        changes = "; ".join(f"{key} was {first.get(key)!r}, now {settings[key]!r}" for key in different)
        raise ValueError(f"{path} holds answers of another start: {changes}. Give the old values, or delete that file.")
    if len(whole) < len(lines) or not whole:
        path.write_text("".join(whole) or json.dumps(settings) + "\n", encoding="utf-8")
    return {row["document"]: row for row in map(json.loads, whole[1:])}


def write_results(path: Path, rows: list[dict], keys: list[str]) -> None:
    """Write the answers as .csv or .jsonl, by a rename, so that the file is whole or not there."""
    partial = path.with_name(f"{path.name}.writing")
    with partial.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.writer(file)
            writer.writerow(["document", *keys, "flags"])
            for row in rows:
                cells = [_cell((row["fields"] or {}).get(key)) for key in keys]
                flags = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in row["flags"].items())
                writer.writerow([row["document"], *cells, flags])
        else:
            for row in rows:
                kept = {key: row[key] for key in ("document", "fields", "flags", "reply")}
                file.write(json.dumps(kept, ensure_ascii=False) + "\n")
    os.replace(partial, path)


def _cell(value) -> str:
    """A value as a CSV cell: text as it is, nothing for null, JSON for the rest."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; an unknown or shortened flag is an error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="run folder of train.py, finished")
    parser.add_argument("files", metavar="FILES", nargs="+", help=".txt, .pdf, folders of them, or files of rows")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.csv|OUT.jsonl")
    parser.add_argument("--schema_file", help="the run's schema, where it lies elsewhere now")
    parser.add_argument("--batch_size", type=int, default=8, help="documents a batch (%(default)s)")
    parser.add_argument("--max_new_tokens", type=int, default=512, help="output limit in tokens (%(default)s)")
    parser.add_argument("--constrained", action="store_true", help="hold the answer to the schema (llguidance)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on a GPU, else float32")
    parsed = parser.parse_args(arguments)
    if parsed.output.suffix not in (".csv", ".jsonl"):
        parser.error(f"-o {parsed.output}: expected a name that ends in .csv or .jsonl")
    return parsed


def predict(arguments: argparse.Namespace) -> list[dict]:
    """Answer every document and write the output. Returns its rows. Raises ValueError, OSError."""
    run: Run = read_run(arguments.run, arguments.schema_file)
    if run.final is None:
        raise ValueError(f"{run.folder} is not finished: run.json names no result. Start train.py again, it continues.")
    if arguments.output.exists():
        raise ValueError(f"{arguments.output} is there already. Choose another -o, or delete it.")
    schema = load_schema(run.schema_file)
    documents = list(find_texts(arguments.files, run.text_column or TEXT_COLUMN))
    names = [name for name, _ in documents]
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"the document {twice} was given twice.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = arguments.dtype or ("bfloat16" if device == "cuda" else "float32")
    settings = {"run": str(run.folder), "trained": run.finished, "dtype": dtype}
    settings |= {key: getattr(arguments, key) for key in ("max_new_tokens", "constrained")}
    journal = arguments.output.with_name(f"{arguments.output.name}.partial")
    journal.parent.mkdir(parents=True, exist_ok=True)
    done = read_journal(journal, settings)
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in documents}
    left = [(name, text) for name, text in documents if done.get(name, {}).get("sha256") != digests[name]]
    if len(left) < len(documents):
        print(f"{len(documents) - len(left)} of {len(documents)} documents are answered in {journal}", flush=True)
    if left:
        model, tokenizer = load_model(str(run.final), getattr(torch, dtype), device)
        batches = generate_batches(
            model,
            tokenizer,
            [prompt_messages(text, schema) for _, text in left],
            batch_size=arguments.batch_size,
            max_new_tokens=arguments.max_new_tokens,
            chat_template_kwargs=run.chat_template_kwargs,
            names=[name for name, _ in left],
            schema=schema if arguments.constrained else None,
        )
        with journal.open("a", encoding="utf-8") as file:
            for index, reply, limit_hit in batches:
                name, text = left[index]
                value, flags = flag_values(reply, limit_hit, text, schema)
                fields = value and {key: value.get(key) for key in schema["properties"]}
                row = {"document": name, "fields": fields, "flags": flags, "reply": reply, "sha256": digests[name]}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                done[name] = row
    rows = [done[name] for name in names]
    write_results(arguments.output, rows, list(schema["properties"]))
    journal.unlink()
    return rows


def main() -> int:
    arguments = parse_arguments()
    try:
        rows = predict(arguments)
    except (ValueError, OSError) as error:
        print(f"predict.py: {one_line(error)}", file=sys.stderr)
        return 1
    flagged = [row for row in rows if row["flags"]]
    print(
        f"{arguments.output}: {len(rows)} documents; {sum(len(row['flags']) for row in flagged)} flags in "
        f"{len(flagged)} of them, to be looked at"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
