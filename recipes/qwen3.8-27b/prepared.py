"""Rows that scripts/prepare_data.py prepared: the key that they lie under, and how a run reads them. Version 1.

The same file, to the byte, lies in every recipe folder; `scripts/sync_guard.py FOLDER` brings a copy up to date.

The folder holds `train/` and `eval/`, written by the datasets library as SFTTrainer made them, and prepared.json. All
ranks and machines of a run map the same files into memory. The key covers what decides the rows: tokenizer, chat
template, lengths, modes, the recipe's own files and the libraries; a run with another one is refused.
"""

import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path

from datasets import Dataset, load_from_disk

RECORD = "prepared.json"
ARGUMENTS = ("max_length", "packing", "packing_strategy", "eval_packing", "assistant_only_loss", "completion_only_loss")
ARGUMENTS += ("truncation_mode", "eos_token", "shuffle_dataset", "seed", "data_seed", "eval_fraction", "unfit_rows")
ARGUMENTS += ("group_by", "text_column", "target_column", "chat_template_kwargs")


def file_digest(path: str | Path) -> str:
    """sha256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recipe_files() -> list[str]:
    """Digests of the files that read the rows: they, too, may be edited between two runs."""
    files = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".py", ".json"))
    return [file_digest(path) for path in files if path.name not in ("guard.py", "keeper.py", "ranks.py", "watcher.py")]


def key(training_args, recipe_args, tokenizer, template: str) -> dict[str, str]:
    """What decides how rows are prepared, by name; texts and files as digests. The tokenizer is a fast one."""

    def digest(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    arguments = vars(training_args) | vars(recipe_args)
    made = {name: json.dumps(arguments[name]) for name in ARGUMENTS}
    made["evaluation"] = str(training_args.eval_strategy != "no")
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    made["tokenizer"] = digest(json.dumps([backend, tokenizer.special_tokens_map]))
    made["chat template"] = digest(template)
    made["schema_file"] = file_digest(recipe_args.schema_file)[:12] if recipe_args.schema_file else "none"
    made["the recipe's files"] = digest("".join(recipe_files()))
    return made | {name: version(name) for name in ("transformers", "trl", "datasets")}


def is_prepared(folder: str | Path) -> bool:
    """Whether the folder is one of scripts/prepare_data.py."""
    return Path(folder, RECORD).is_file()


def difference(record: dict, key: dict[str, str]) -> str:
    """How `key` differs from a folder's record, and which source files were changed since; empty where nothing does."""
    changes = [f"{name} was {record['key'].get(name)}, now {value}" for name, value in key.items()]
    changes = [text for text, name in zip(changes, key, strict=True) if record["key"].get(name) != key[name]]
    for path, digest in record["files"].items():
        if os.path.isfile(path) and file_digest(path) != digest:
            changes.append(f"the rows in {path} were changed")
    return "; ".join(changes)


def load(folder: str | Path, key: dict[str, str], training_args) -> tuple[Dataset, Dataset | None, dict]:
    """(train, eval or None, record) of a prepared folder, and SFTTrainer told to take them as they are.

    Raises ValueError, naming what differs, where this run would prepare the rows in another way.
    """
    record = json.loads(Path(folder, RECORD).read_text(encoding="utf-8"))
    if changes := difference(record, key):
        raise ValueError(
            f"dataset_name: {folder} was prepared for another run: {changes}. Give the old values, or prepare the rows "
            "anew with scripts/prepare_data.py."
        )
    training_args.dataset_kwargs = {"skip_prepare_dataset": True}
    training_args.assistant_only_loss = False  # the labels are made, and packed rows hold no messages any more
    train, held_out = (load_from_disk(path) if (path := Path(folder, n)).is_dir() else None for n in ("train", "eval"))
    return train, held_out, record
