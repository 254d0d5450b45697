"""Tokenize a recipe's rows once, ahead of time, into a folder that all ranks and machines of a run read.

    python scripts/prepare_data.py recipes/llama-3.2-1b prepared --dataset_name chats.jsonl --dataset_num_proc 16
    accelerate launch --config_file accelerate_configs/zero2.yaml recipes/llama-3.2-1b/train.py --dataset_name prepared

What follows the two folders is given to train.py, which is stopped before its first step. Give the same arguments to
the run, apart from the dataset: one that would prepare the rows in another way refuses the folder, and says why. The
same command again changes nothing, and two at once give one complete folder. No GPU and no weights are needed. Attention
decides whether gpt-oss rows are packed: prepare them for a flash kernel with `--attn_implementation flash_attention_4`.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from filelock import FileLock
from preparation import PreparationError, prepare

RECORD = "prepared.json"


def write(folder: Path, dest: Path, words: list[str]) -> dict:
    """Prepare the rows of recipe `folder` with train.py's arguments `words` into `dest`, and return its record.

    A `dest` with the same key and rows is left as it is. Raises PreparationError where `dest` holds something else.
    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    if dest.exists() and not (dest / RECORD).is_file():
        raise PreparationError(f"{dest} exists and holds no prepared rows. Choose another folder, or delete it first.")
    made = prepare(folder, words)
    record = {"key": made.key, **made.source}
    if not made.key:
        raise PreparationError(f"{folder}/train.py does not read its rows with inputs.load_rows, so they have no key.")
    if dest.exists():
        earlier = json.loads((dest / RECORD).read_text(encoding="utf-8"))
        if changes := [name for name in record if record[name] != earlier.get(name)]:
            now, then = made.key, earlier["key"]
            details = [f"{name} was {then.get(name)}, now {now[name]}" for name in now if now[name] != then.get(name)]
            details += [f"{name} differs" for name in changes if name != "key"]
            raise PreparationError(
                f"{dest} holds other rows: {'; '.join(details)}. Choose another folder, or delete it."
            )
        return earlier
    counts = {name: made.counts[name] for name in made.counts if name not in ("report", "eval_rows")}
    record |= {"counts": counts, "report": made.counts["report"], "eval_rows": made.counts["eval_rows"]}
    record["rows"] = {"train": len(made.trainer.train_dataset), "eval": len(made.trainer.eval_dataset or [])}
    # Readers see the folder whole or not at all: it is written under another name beside its place.
    partial = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        partial.chmod(0o777 & ~os.umask(0))
        made.trainer.train_dataset.save_to_disk(partial / "train")
        if made.trainer.eval_dataset is not None:
            made.trainer.eval_dataset.save_to_disk(partial / "eval")
        (partial / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        os.sync()
        os.rename(partial, dest)
    except OSError:
        if not (dest / RECORD).is_file():
            raise
        return write(folder, dest, words)  # another one was faster, on a file system without locks
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return record


def main(argv: list[str] | None = None) -> int:
    """Read the command line and write the folder; 1 where the rows cannot be prepared."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="the recipe's folder")
    parser.add_argument("dest", metavar="DEST", type=Path, help="the folder to write")
    arguments, words = parser.parse_known_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no GPU is taken
    dest = arguments.dest.absolute()
    dest.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(dest.parent / f".{dest.name}.lock"):  # a second start waits, and finds the work done
            record = write(arguments.folder, dest, words)
    except PreparationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.dest}: {record['rows']['train']} training and {record['rows']['eval']} evaluation rows")
    print(record["report"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
