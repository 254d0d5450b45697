# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate", "jsonschema", "numpy", "peft", "rich", "torch", "tqdm", "transformers"]
# ///
"""Score a model on invoices or receipts: generate an answer for every document and compare it field by field.

    python recipes/qwen3-8b-invoice/score.py MODEL DATA.jsonl --text_column text --target_column entities \\
        --schema_file recipes/qwen3-8b-invoice/schema_receipt.json --chat_template_kwargs '{"enable_thinking": false}'

    accelerate launch --num_processes 8 recipes/qwen3-8b-invoice/score.py MODEL DATA.jsonl ...

MODEL is a folder or a Hub id of a whole model or of a PEFT adapter. Without --text_column and --target_column the rows
are chats (`messages`). --chat_template_kwargs must be what the model was trained with. How the counting is done stands
at the top of field_scores.py and field_values.py.

Answers are greedy, left padded, and do not depend on batch size or number of processes in float32. In bfloat16 on a GPU
the kernels round differently for different batch shapes, so a near tie between two tokens may fall the other way.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import gather_object
from field_scores import score_replies
from tqdm import tqdm

from inputs import FILE_KINDS, read_file
from invoice import canonical, load_schema, parse_json, to_prompt_completion


def load_model(model_id: str, dtype: torch.dtype, device: torch.device | str) -> tuple[Any, Any]:
    """(model, tokenizer) of a whole model or of a PEFT adapter (with its base model), in a folder or on the Hub.

    Raises ValueError naming `model_id` when either cannot be loaded or the tokenizer has no chat template.
    """
    base_id = model_id
    try:
        if transformers.utils.find_adapter_config_file(model_id):
            import peft

            config = peft.PeftConfig.from_pretrained(model_id)
            base_id = config.base_model_name_or_path
            base = transformers.AutoModelForCausalLM.from_pretrained(base_id, revision=config.revision, dtype=dtype)
            model = peft.PeftModel.from_pretrained(base, model_id)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(model_id, dtype=dtype)
    except (OSError, ValueError) as error:
        what = f"its base model {base_id}" if base_id != model_id else "it"
        where = "" if Path(base_id).is_dir() else " is not a folder here, and from the Hub"
        raise ValueError(f"MODEL {model_id}: {what}{where} cannot be loaded: {_one_line(error)}") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_id)
    except (OSError, ValueError):
        tokenizer = transformers.AutoTokenizer.from_pretrained(base_id)  # an adapter saved without its tokenizer
    if not tokenizer.chat_template:
        raise ValueError(f"MODEL {model_id}: its tokenizer has no chat template. Score the model as it was trained.")
    return model.to(device).eval(), tokenizer


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[dict]],
    *,
    batch_size: int = 8,
    max_new_tokens: int = 512,
    chat_template_kwargs: dict | None = None,
    names: Sequence[str] | None = None,
    progress: bool = True,
) -> list[tuple[str, bool]]:
    """Greedy answers to `prompts` (lists of messages) in their order: (text, whether the output limit stopped it).

    Prompts are batched by length, longest first, and padded on the left so that every answer starts right after its
    prompt. Raises ValueError, with the name of the document, when prompt and answer do not fit the model's positions.
    """
    encoded = [
        tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **(chat_template_kwargs or {})
        )["input_ids"]
        for prompt in prompts
    ]
    room = getattr(model.config, "max_position_embeddings", None)
    for index, ids in enumerate(encoded):
        if room and len(ids) + max_new_tokens > room:
            raise ValueError(
                f"document {names[index] if names else index}: {len(ids)} tokens of prompt and {max_new_tokens} of"
                f" answer are more than the model's {room} positions. Lower --max_new_tokens or leave the document out."
            )
    stop_ids = _stop_ids(model, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    # The model's own settings (sampling, penalties) are set aside: this is greedy decoding and nothing else.
    settings = transformers.GenerationConfig(
        do_sample=False, num_beams=1, max_new_tokens=max_new_tokens, eos_token_id=stop_ids, pad_token_id=pad_id
    )
    kept_settings, model.generation_config = model.generation_config, settings
    answers: list[tuple[str, bool]] = [("", False)] * len(encoded)
    order = sorted(range(len(encoded)), key=lambda index: -len(encoded[index]))
    try:
        with tqdm(total=len(order), desc="documents", disable=not progress) as bar, torch.inference_mode():
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                width = max(len(encoded[index]) for index in batch)
                padding = [width - len(encoded[index]) for index in batch]
                ids = [[pad_id] * pad + list(encoded[i]) for i, pad in zip(batch, padding, strict=True)]
                mask = [[0] * pad + [1] * (width - pad) for pad in padding]
                output = model.generate(
                    input_ids=torch.tensor(ids, device=model.device),
                    attention_mask=torch.tensor(mask, device=model.device),
                    generation_config=settings,
                )
                for index, new in zip(batch, output[:, width:].tolist(), strict=True):
                    # The stop id may also be the pad id, so the first one ends the answer.
                    end = next((place for place, token in enumerate(new) if token in stop_ids), None)
                    answers[index] = (tokenizer.decode(new[:end], skip_special_tokens=True), end is None)
                bar.update(len(batch))
    finally:
        model.generation_config = kept_settings
    return answers


def _stop_ids(model: Any, tokenizer: Any) -> list[int]:
    stop = model.generation_config.eos_token_id
    stop = stop if isinstance(stop, list) else [stop]
    found = [token for token in dict.fromkeys([tokenizer.eos_token_id, *stop]) if token is not None]
    if not found:
        raise ValueError("neither the tokenizer nor the model's generation_config names an end-of-turn token (eos)")
    return found


def read_documents(path: str, schema: dict, text_column: str | None, target_column: str | None, limit: int | None):
    """[(name, prompt messages, gold target)] of the first `limit` rows; a row's name is its `id`, or its number.

    Raises ValueError naming file and row for the first bad row, and when there is none.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file. Give a file with one document a row ({', '.join(FILE_KINDS)}).")
    documents = []
    for number, row in enumerate(read_file(Path(path)), 1):
        if limit is not None and len(documents) >= limit:
            break
        try:
            pair = to_prompt_completion(row, schema, text_column, target_column)
        except KeyError as error:
            found = ", ".join(map(str, row)) or "none"
            raise ValueError(f"{path}, row {number} has the columns {found}; wanted: {error.args[0]}.") from error
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}. Correct the row.") from error
        name = row["id"] if isinstance(row.get("id"), str | int) else f"row {number}"
        gold = canonical(parse_json(pair["completion"][0]["content"]), schema)
        documents.append((str(name), pair["prompt"], gold))
    if not documents:
        raise ValueError(f"{path}: no rows. Give a file with one document a row.")
    return documents


def print_report(report: dict) -> None:
    """Print the report: a rich table on a terminal, plain text elsewhere."""
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
    columns = ("gold", "predicted", "exact", "normalised", "missed", "invented", "wrong", "f1", "f1_exact")
    rows = [(name, *(_cell(field[column]) for column in columns)) for name, field in report["fields"].items()]
    # Short words, so that the table fits 80 columns.
    header = ("field", "gold", "pred", "exact", "norm", "missed", "invented", "wrong", "F1", "F1 exact")
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
    print("\n".join(lines))
    for entry in report["worst"]:
        print(
            f"\nworst: {entry['document']}, F1 {entry['f1']:.3f}" + (", output limit hit" if entry["limit_hit"] else "")
        )
        for reason in entry["violations"]:
            print(f"  violation   {reason}")
        print(f"  gold        {json.dumps(entry['gold'], ensure_ascii=False)}")
        print(f"  prediction  {entry['prediction']!r}")


def _cell(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _positive(text: str) -> int:
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
    parser.add_argument("model", metavar="MODEL", help="folder or Hub id of a model or of a PEFT adapter")
    parser.add_argument("data", metavar="DATA.jsonl", help="documents with their targets, one JSON object a line")
    parser.add_argument(
        "--schema_file", default=str(Path(__file__).parent / "schema.json"), help="default: %(default)s"
    )
    parser.add_argument("--text_column", help="column of the document; without it rows are chats in messages")
    parser.add_argument("--target_column", help="column of the target: an object, or JSON in a string")
    parser.add_argument("--limit", type=_positive, help="score the first N rows only")
    parser.add_argument("--batch_size", type=_positive, default=8, help="documents a batch and process (%(default)s)")
    parser.add_argument("--max_new_tokens", type=_positive, default=512, help="output limit in tokens (%(default)s)")
    parser.add_argument("--chat_template_kwargs", type=_mapping, default={}, metavar="JSON")
    parser.add_argument(
        "--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="auto: bfloat16 on a GPU"
    )
    parser.add_argument("--worst", type=int, default=5, help="how many of the worst documents to list (%(default)s)")
    parser.add_argument("--output", type=Path, help="write the report to this JSON file")
    parser.add_argument("--predictions", type=Path, help="write every answer to this JSON lines file")
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace) -> dict | None:
    """Score as the arguments say. Returns the report on rank 0 and None on the others. Raises ValueError, OSError."""
    schema = load_schema(arguments.schema_file)
    documents = read_documents(arguments.data, schema, arguments.text_column, arguments.target_column, arguments.limit)
    names, prompts, golds = (list(column) for column in zip(*documents, strict=True))
    for path in (arguments.output, arguments.predictions):
        if path:  # before the hours of generating, not after
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
    # Ranks meet once, at the end, so the default of 10 minutes on a GPU would be a limit on the slowest one.
    # Without a GPU, only cpu=True makes a process group; else each process would score everything by itself.
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(hours=12))
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}.get(arguments.dtype)
    dtype = dtype or (torch.bfloat16 if state.device.type == "cuda" else torch.float32)
    started = time.monotonic()
    model, tokenizer = load_model(arguments.model, dtype, state.device)
    mine = list(range(len(documents)))[state.process_index :: state.num_processes]
    answers = generate(
        model,
        tokenizer,
        [prompts[index] for index in mine],
        batch_size=arguments.batch_size,
        max_new_tokens=arguments.max_new_tokens,
        chat_template_kwargs=arguments.chat_template_kwargs,
        names=[names[index] for index in mine],
        progress=state.is_main_process,
    )
    merged = dict(gather_object(list(zip(mine, answers, strict=True))))
    if not state.is_main_process:
        return None
    replies, limit_hits = zip(*(merged[index] for index in range(len(documents))), strict=True)
    report = {
        "model": arguments.model,
        "data": arguments.data,
        "schema_file": arguments.schema_file,
        "max_new_tokens": arguments.max_new_tokens,
        "batch_size": arguments.batch_size,
        "chat_template_kwargs": arguments.chat_template_kwargs,
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if state.device.type == "cuda" else state.device.type,
        "processes": state.num_processes,
        "seconds": round(time.monotonic() - started, 1),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        **score_replies(golds, replies, schema, limit_hits=limit_hits, names=names, worst=arguments.worst),
    }
    if arguments.predictions:
        with arguments.predictions.open("w", encoding="utf-8") as file:
            for name, gold, reply, hit in zip(names, golds, replies, limit_hits, strict=True):
                row = {"document": name, "gold": gold, "prediction": reply, "limit_hit": hit}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    if arguments.output:
        arguments.output.write_text(json.dumps(report, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return report


def main() -> int:
    arguments = parse_arguments()
    try:
        report = run(arguments)
    except (ValueError, OSError) as error:
        print(f"score.py, rank {os.environ.get('RANK', '0')}: {_one_line(error)}", file=sys.stderr)
        return 1
    if report:
        print_report(report)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
