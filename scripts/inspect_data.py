"""Show what a recipe would train on, and check it, before a GPU is taken.

    python scripts/inspect_data.py recipes/llama-3.2-1b
    python scripts/inspect_data.py recipes/qwen3-8b-invoice --dataset_name receipts.jsonl --max_length 2048 --show 5
    python scripts/inspect_data.py my-recipe --config lora --sample 500 --json inspection.json

What follows the folder is given to train.py, apart from --show, --sample and --json. Rows, tokens and labels come from
the recipe's own train.py and SFTTrainer, stopped before the first step; of the model only config and tokenizer are
read. The exit code is 1 where a check fails.
"""

import argparse
import dataclasses
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import inspect_duplicates
import numpy as np
from inspect_checks import Check, Totals, isolation_check, row_checks, scan, stretches, token_checks
from inspect_duplicates import Duplicates
from preparation import PreparationError, Prepared, prepare

LOOKS = 200  # rows that closer checks render again
MARKS = ("[[", "]]")
COLOURS = ("\033[7m", "\033[0m")  # the labelled part in reverse


@dataclass
class Report:
    """What was found. counts: what the reader did with the rows, by split; train, eval: Totals of the prepared rows."""

    recipe: str
    model: str
    sample: int | None
    max_length: int | None
    counts: dict
    train: Totals
    eval: Totals | None = None
    padding: float = 0.0  # share of pad tokens in the first batches
    packing_fill: float | None = None  # share of max_length that packed rows fill
    duplicates: Duplicates | None = None
    examples: list[tuple[list[str], list[str]]] = field(default_factory=list)  # text between labels, labelled text
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(check.ok is not False for check in self.checks)


def inspect(folder: Path, words: list[str], sample: int | None = None, show: int = 0) -> Report:
    """Prepare the rows of recipe `folder` as its train.py would with the arguments `words`, and look at them.

    sample: read only so many rows of each split. show: how many rows to decode. Raises PreparationError where train.py
    itself would refuse.
    """
    made = prepare(folder, words, sample)
    trainer, args = made.trainer, made.trainer.args
    tokenizer, model = trainer.processing_class, trainer.model
    ends = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    thoughts = [tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>") if tag in tokenizer.get_vocab()]
    facts = (stops, tokenizer.bos_token_id, tokenizer.pad_token_id, thoughts, args.max_length)
    report = Report(
        Path(folder).name, made.model_name, sample, args.max_length, made.counts, scan(trainer.train_dataset, *facts)
    )
    if trainer.eval_dataset is not None:
        report.eval = scan(trainer.eval_dataset, *facts)
    report.padding = _padding(trainer)
    whole = made  # rows that still have their conversation
    if args.packing:
        report.packing_fill = report.train.tokens / (report.train.rows * args.max_length)
        if "messages" in (made.rows[0] or trainer.train_dataset).column_names or "prompt" in made.rows[0].column_names:
            whole = prepare(folder, [*words, "--packing", "false"], min(sample or 2000, 2000))
    rows = whole.trainer.train_dataset
    thinking_off = any(_thinking_is_off(rows[i]) for i in range(min(3, len(rows))))
    report.checks = [_nothing_lost(report, made)]
    report.checks += token_checks(report.train, trainer, made.counts, thinking_off, stops, thoughts)
    report.checks += row_checks(rows, whole.trainer, LOOKS, thoughts)
    report.checks.append(isolation_check(trainer, made.attention))
    if groups := made.counts.get("groups"):
        shared = groups["shared"]
        detail = (
            f"no value of {groups['column']} is on both sides"
            if not shared
            else f"on both sides: {', '.join(shared[:5])}"
        )
        report.checks.append(Check("training and evaluation share no group", not shared, detail))
    train, evaluation = made.rows
    if evaluation is not None and {"messages", "prompt"} & set(train.column_names):
        report.duplicates = inspect_duplicates.find(train, evaluation)
    report.examples = [
        _marked(rows[int(i)], tokenizer) for i in np.linspace(0, len(rows) - 1, min(show, len(rows)), dtype=int)
    ]
    return report


def _thinking_is_off(row: dict) -> bool:
    return (row.get("chat_template_kwargs") or {}).get("enable_thinking") is False


def _nothing_lost(report: Report, made: Prepared) -> Check:
    """The rows that were kept all arrive: SFTTrainer itself drops rows without a word."""
    given = sum(len(rows) for rows in made.rows if rows is not None)
    arrived = report.train.documents + (report.eval.documents if report.eval else 0)
    prepared = report.train.rows == len(made.rows[0]) and "input_ids" in made.rows[0].column_names
    return Check(
        "no row is lost in the trainer",
        None if prepared else arrived == given,
        f"{given} rows were given to it, {arrived} documents came out",
    )


def _padding(trainer) -> float:
    """Share of pad tokens in the first ten batches, by the trainer's own collator and order of rows."""
    pads = every = 0
    for number, batch in enumerate(trainer.get_train_dataloader()):
        if number == 10:
            break
        every += batch["input_ids"].numel()
        pads += int((batch["attention_mask"] == 0).sum()) if "attention_mask" in batch else 0
    return pads / max(1, every)


def _marked(row: dict, tokenizer) -> tuple[list[str], list[str]]:
    """The decoded text of a row in turns: n + 1 unlabelled parts around n labelled ones."""
    spans, ids = stretches(row["labels"]), row["input_ids"]
    edges = [0, *(edge for span in spans for edge in span), len(ids)]
    parts = [tokenizer.decode(ids[a:b]) for a, b in pairwise(edges)]
    return parts[::2], parts[1::2]


# ----------------------------------------------------------------------------------------------------- printing


def _split_lines(name: str, sums: Totals, limit: int | None):
    share = sums.labelled / max(1, sums.tokens)
    marks = ", ".join(f"{int(100 * p)} % {sums.percentile(p)}" for p in (0.5, 0.9, 0.99))
    yield f"{name}: {sums.documents} documents in {sums.rows} rows, {sums.tokens} tokens, {share:.1%} of them labelled"
    yield f"  tokens of a document: {marks}, longest {len(sums.lengths) - 1}, max_length {limit}"


def _histogram(sums: Totals, bins: int = 10):
    longest = len(sums.lengths) - 1
    width = max(1, -(-longest // bins))
    counts = [int(sums.lengths[i + 1 : i + width + 1].sum()) for i in range(0, longest, width)]
    for number, count in enumerate(counts):
        bar = "#" * -(-40 * count // max(counts))
        yield f"  {number * width + 1:>7} to {min((number + 1) * width, longest):>7} {count:>9} {bar}"


def lines(report: Report, colour: bool):
    """The report as text, line by line."""
    yield f"{report.recipe}, tokenizer of {report.model}" + (f", first {report.sample} rows" if report.sample else "")
    for name in ("training", "evaluation"):
        if counts := report.counts.get(name):
            yield (
                f"{name} data: {counts['read']} rows read, {counts['kept']} kept, {counts['malformed']} malformed, "
                f"{counts['long']} longer than max_length ({counts['cut']} of them cut)"
            )
            yield from (f"  {reason}" for reason in counts["reasons"])
    yield from _split_lines("training", report.train, report.max_length)
    yield from _histogram(report.train)
    if report.eval:
        yield from _split_lines("evaluation", report.eval, report.max_length)
    yield f"padding: {report.padding:.1%} of the first batches" + (
        f"; packed rows are {report.packing_fill:.1%} full" if report.packing_fill is not None else ""
    )
    if found := report.duplicates:
        near = f"{found.near} near one" if found.near is not None else "near ones not counted: pip install datasketch"
        yield f"evaluation rows that training has, too: {found.equal} of {found.looked_at} equal one, {near}"
        for held_out, trained, overlap in found.pairs[:5]:
            yield f"  evaluation row {held_out + 1}, training row {trained + 1}: {overlap:.0%} of their words are the same"
    for between, labelled in report.examples:
        before, after = COLOURS if colour else MARKS
        text = between[0] + "".join(f"{before}{a}{after}{b}" for a, b in zip(labelled, between[1:], strict=True))
        yield from ("", "-" * 40, text, "-" * 40, "")
    for check in report.checks:
        yield f"{ {True: 'ok  ', False: 'FAIL', None: '-   '}[check.ok] } {check.name}: {check.detail}"


def main(argv: list[str] | None = None) -> int:
    """Read the command line and print the report; 1 where a check fails or the rows cannot be prepared."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="the recipe's folder")
    parser.add_argument("--show", type=int, default=2, metavar="N", help="decode N rows, the labelled part marked")
    parser.add_argument("--sample", type=int, metavar="N", help="look at the first N rows of each split only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    arguments, words = parser.parse_known_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no GPU is taken
    try:
        report = inspect(arguments.folder, words, arguments.sample, arguments.show)
    except PreparationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    colour = sys.stdout.isatty() and shutil.get_terminal_size().columns > 0
    print("\n".join(lines(report, colour)))
    if arguments.json:
        plain = dataclasses.asdict(report) | {"ok": report.ok}
        arguments.json.write_text(json.dumps(plain, indent=1, default=np.ndarray.tolist) + "\n", encoding="utf-8")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
