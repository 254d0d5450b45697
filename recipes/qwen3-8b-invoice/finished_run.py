"""What score.py and predict.py read of a run folder: model, schema, columns, template settings, held-out rows.

A run folder is what train.py leaves: run.json, eval_rows.json, final/. It may still be training: then the base model
can be scored, and nothing else.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inputs import local_files, read_file
from prepared import is_prepared


@dataclass
class Run:
    """A run folder, read."""

    folder: Path
    base_model: str
    base_revision: str | None
    final: Path | None  # None until the run is done
    finished: str  # when run.json was last written
    schema_file: Path
    text_column: str | None
    target_column: str | None
    chat_template_kwargs: dict
    dataset_name: str
    dataset_config: str | None
    dataset_revision: str | None
    held_out_split: str  # the split that the numbers of eval_rows.json count


def is_run(folder: str | Path) -> bool:
    """Whether `folder` is a run folder (and not that of a model)."""
    return Path(folder, "run.json").is_file()


def read_run(folder: str | Path, schema_file: str | None = None) -> Run:
    """Read a run folder. `schema_file` is the schema where it is not any more where the run found it.

    Raises ValueError, naming the file, when run.json or the schema is missing, or the schema is not the one that the
    run was trained on.
    """
    folder = Path(folder)
    if not is_run(folder):
        raise ValueError(f"{folder} is no run folder: it has no run.json. Give the output_dir of train.py.")
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    arguments, command = record["arguments"], _paths_of_the_command(record["command"])
    final = folder / "final"
    held_out = "dataset_test_split" if arguments["eval_fraction"] == 0 else "dataset_train_split"
    return Run(
        folder=folder,
        base_model=arguments["model_name_or_path"],
        base_revision=arguments["model_revision"],
        final=final if record["outcome"] == "done" and final.is_dir() else None,
        finished=record["time"],
        schema_file=_find_schema(schema_file or command.schema_file, arguments["schema_file"], folder),
        text_column=arguments["text_column"],
        target_column=arguments["target_column"],
        chat_template_kwargs=arguments["chat_template_kwargs"],
        dataset_name=_find_data(command.dataset_name, arguments["dataset_name"], folder),
        dataset_config=arguments["dataset_config"],
        dataset_revision=arguments["dataset_revision"],
        held_out_split=arguments[held_out],
    )


def held_out_rows(run: Run) -> Iterator[tuple[int, dict]]:
    """(number, raw row) of the rows that the run held out, read again from its data.

    Raises ValueError when it held out none, or the data is not where it was.
    """
    listed = run.folder / "eval_rows.json"
    numbers = set(json.loads(listed.read_text())) if listed.is_file() else set()
    if not numbers:
        raise ValueError(
            f"{run.folder} held out no rows (eval_rows.json). Name a file of rows: score.py RUN DATA.jsonl."
        )
    if is_prepared(run.dataset_name):
        raise ValueError(
            f"{run.folder} was trained on rows prepared as tokens ({run.dataset_name}), which hold no text to answer. "
            "Name a file of rows: score.py RUN DATA.jsonl."
        )
    if Path(run.dataset_name).exists():
        files = local_files(run.dataset_name, run.held_out_split)
        rows = (row for file in files for row in read_file(file))
    else:
        from datasets import load_dataset

        try:
            rows = load_dataset(
                run.dataset_name, run.dataset_config, split=run.held_out_split, revision=run.dataset_revision
            )
        except Exception as error:  # datasets raises what its readers raise
            raise ValueError(
                f"the run's data, {run.dataset_name}, is neither a file here nor given by the Hub "
                f"({type(error).__name__}). Start from the folder that train.py was started in, or name a file of rows."
            ) from error
    for number, row in enumerate(rows, 1):
        if number in numbers:
            yield number, row


def _paths_of_the_command(command: list[str]) -> argparse.Namespace:
    """Where schema and data were; run.json's arguments keep only name and digest of a file."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--schema_file")
    parser.add_argument("--dataset_name")
    return parser.parse_known_args(command[1:])[0]


def _find_schema(path: str, recorded: str, folder: Path) -> Path:
    """The schema file at `path`, or beside this program; it must be the one that was recorded."""
    name, _, digest = recorded.partition(", sha256 ")
    for place in (Path(path), Path(__file__).with_name(Path(path).name)):
        if place.is_file():
            if digest and hashlib.sha256(place.read_bytes()).hexdigest()[:12] != digest:
                raise ValueError(
                    f"{place} is not the schema that {folder} was trained on (sha256 {digest}...): prompt and answer "
                    "would differ. Give that file by --schema_file."
                )
            return place
    raise ValueError(f"{path}: the schema of {folder} is not there. Give it by --schema_file ({name}).")


def _find_data(path: str, recorded: str, folder: Path) -> str:
    """The data at `path`, or the rows that documents.py left in the run folder."""
    rows = folder / recorded.partition(", sha256 ")[0]
    return str(rows) if rows.is_file() else path
