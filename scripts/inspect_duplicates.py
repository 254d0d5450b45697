"""Rows of the evaluation that training has seen, too: equal ones, and near duplicates by their words; for inspect_data.py.

Near is a Jaccard overlap of word sets of 0.9 or more. Candidates come from datasketch's MinHash index, and each is
counted again exactly. Only evaluation rows are held in memory, at most `LIMIT` of them.
"""

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import xxhash
from datasets import Dataset

try:
    from datasketch import MinHash, MinHashLSH
except ImportError:  # optional: without it equal rows are still counted
    MinHash = MinHashLSH = None

LIMIT = 5000
NEAR = 0.9
WORD = re.compile(r"\w+")


@dataclass
class Duplicates:
    """looked_at of evaluation rows: how many equal a training row, how many are near one (equal ones included, None
    without datasketch), and some pairs (evaluation row, training row, overlap), as places in the two datasets."""

    evaluation_rows: int
    looked_at: int
    equal: int
    near: int | None
    pairs: list[tuple[int, int, float]]


def text_of(row: dict) -> str:
    """What people wrote in a row: the contents of its messages without the system's."""
    messages = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
    return "\n".join(
        message.get("content") or "" for message in messages if message["role"] not in ("system", "developer")
    )


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def _sketch(words: set[str]):
    sketch = MinHash(num_perm=64, hashfunc=xxhash.xxh32_intdigest)
    sketch.update_batch([word.encode() for word in words])
    return sketch


def find(train: Dataset, evaluation: Dataset) -> Duplicates:
    """Compare two datasets with `messages`, or `prompt` and `completion`."""
    columns = [name for name in ("messages", "prompt", "completion") if name in train.column_names]
    train, evaluation = train.select_columns(columns), evaluation.select_columns(columns)
    places = np.unique(np.linspace(0, len(evaluation) - 1, min(LIMIT, len(evaluation)), dtype=int))
    texts = [text_of(row) for row in evaluation.select(places)]
    equal, seen = {_digest(text): place for place, text in zip(places, texts, strict=True)}, set()
    words = [set(WORD.findall(text.lower())) for text in texts]
    # Words of every row are the task's frame (instruction, names of fields): they would make any two rows look alike.
    spread = Counter(word for row in words for word in row)
    frame = {word for word, count in spread.items() if count == len(words)} if len(words) >= 20 else set()
    words = [row - frame for row in words]
    index = MinHashLSH(threshold=0.8, num_perm=64) if MinHash else None
    for number, row in enumerate(words if index else []):
        index.insert(number, _sketch(row))
    twins = {}
    for place, row in enumerate(train):
        text = text_of(row)
        if (digest := _digest(text)) in equal:
            seen.add(digest)
        if index is None:
            continue
        mine = set(WORD.findall(text.lower())) - frame
        for number in index.query(_sketch(mine)):
            overlap = len(mine & words[number]) / max(1, len(mine | words[number]))
            if overlap >= NEAR:
                twins[number] = (overlap, place)
                index.remove(number)  # counted: rows that all look alike would otherwise be compared again and again
    pairs = [(int(places[number]), place, round(overlap, 3)) for number, (overlap, place) in twins.items()]
    equal_rows = sum(_digest(text) in seen for text in texts)
    near = len(twins) if index is not None else None
    return Duplicates(len(evaluation), len(places), equal_rows, near, sorted(pairs, key=lambda pair: -pair[2])[:20])
