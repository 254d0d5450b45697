"""What inspect_data.py looks for: numbers and checks over all prepared rows, and closer checks over some of them.

Over all rows the work is numpy on Arrow batches, so its memory does not grow with their number. Closer checks render
conversations again; they look at evenly spread rows.
"""

import unicodedata
from dataclasses import dataclass, field
from datetime import datetime
from unittest.mock import patch

import numpy as np
import torch
import transformers.utils.chat_template_utils as templates
from datasets import Dataset

BATCH = 1000
HEADERS = {"analysis", "commentary", "final", "assistant"}  # words between the marks of gpt-oss, which are labelled
THOUGHTS = ("thinking", "reasoning_content", "reasoning")  # where rows and templates put reasoning


@dataclass
class Check:
    """One check: ok is None where it does not apply or could not be made; detail says what was found."""

    name: str
    ok: bool | None
    detail: str


@dataclass
class Totals:
    """Sums over the documents of a dataset; lengths[n] is the number of documents of n tokens."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    labelled: int = 0
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    changed_labels: int = 0  # labels that are not the token they stand on
    unlabelled: int = 0  # documents without any label
    not_stopped: int = 0  # documents whose last label is no stop token
    not_stopped_full: int = 0  # of these, documents of max_length tokens: their end was cut off
    starts: tuple[int, int, int] = (0, 0, 0)  # documents with no start token, with one in front, with others
    labelled_pads: int = 0
    labelled_thoughts: int = 0  # labels on think tags

    def percentile(self, share: float) -> int:
        """Length in tokens that `share` of the documents do not exceed."""
        return int(np.searchsorted(np.cumsum(self.lengths), share * self.documents))


def _flat(column) -> tuple[np.ndarray, np.ndarray]:
    lists = column.combine_chunks()
    return lists.flatten().to_numpy(zero_copy_only=False), np.diff(lists.offsets.to_numpy())


def scan(rows: Dataset, stops: set[int], start: int | None, pad: int | None, thoughts: list[int], limit: int | None):
    """Totals over `rows`, which have input_ids and labels, and seq_lengths where documents are packed."""
    columns = [name for name in ("input_ids", "labels", "seq_lengths") if name in rows.column_names]
    sums, stops, starts = Totals(rows=len(rows)), np.array(sorted(stops)), np.zeros(3, dtype=np.int64)
    for batch in rows.select_columns(columns).with_format("arrow").iter(BATCH):
        ids, sizes = _flat(batch["input_ids"])
        labels, _ = _flat(batch["labels"])
        if "seq_lengths" in columns:
            sizes, _ = _flat(batch["seq_lengths"])
        sizes = sizes[sizes > 0]
        first = np.cumsum(sizes) - sizes
        counts = np.bincount(sizes, minlength=len(sums.lengths))
        counts[: len(sums.lengths)] += sums.lengths
        sums.lengths = counts
        on = labels != -100
        last = np.maximum.reduceat(np.where(on, np.arange(len(ids)), -1), first)
        open_end = (last >= 0) & ~np.isin(ids[last], stops)
        is_start = ids == start
        in_front, every = is_start[first], np.add.reduceat(is_start, first, dtype=np.int64)
        starts += [
            (every == 0).sum(),
            ((every == 1) & in_front).sum(),
            ((every > 1) | ((every == 1) & ~in_front)).sum(),
        ]
        sums.documents += len(sizes)
        sums.tokens += len(ids)
        sums.labelled += int(on.sum())
        sums.changed_labels += int((labels[on] != ids[on]).sum())
        sums.unlabelled += int((last < 0).sum())
        sums.not_stopped += int(open_end.sum())
        sums.not_stopped_full += int((open_end & (sizes == limit)).sum())
        sums.labelled_pads += int((labels == pad).sum()) if pad is not None else 0
        sums.labelled_thoughts += int(np.isin(labels, thoughts).sum()) if thoughts else 0
    sums.starts = tuple(map(int, starts))
    return sums


def stretches(labels: list[int]) -> list[tuple[int, int]]:
    """(first, end) of each run of labelled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(labels) != -100, [0]]).astype(int)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def token_checks(sums: Totals, trainer, counts: dict, thinking_off: bool, stops: set[int], thoughts: list[int]):
    """Checks that need no text, over all rows."""
    tokenizer, cut = trainer.processing_class, counts.get("training", {}).get("cut", 0)
    name = tokenizer.convert_ids_to_tokens
    bad = sums.not_stopped - (sums.not_stopped_full if cut else 0)
    ends = ", ".join(name(sorted(stops)))
    yield Check(
        "the stop token is labelled",
        bad == 0 and sums.unlabelled == 0,
        f"the last label is one of {ends} in all {sums.documents} documents" + (f" but {cut} cut ones" if cut else "")
        if bad == 0 and sums.unlabelled == 0
        else f"{bad} of {sums.documents} documents end their label with another token than {ends}, {sums.unlabelled} have "
        "no label: the model would not learn to stop. Look at the chat template, and at rows that were cut.",
    )
    yield Check(
        "labels are the tokens they stand on",
        sums.changed_labels == 0,
        f"{sums.changed_labels} of {sums.labelled} labels differ from their token",
    )
    start, expected = tokenizer.bos_token, tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    none, one, other = sums.starts
    right = other == 0 and (none == 0 if expected else min(none, one) == 0)
    yield Check(
        "one start token",
        right if start not in (None, tokenizer.eos_token) else None,
        f"{start} stands once in front of {one} documents, is absent from {none}, and stands elsewhere in {other}"
        if start not in (None, tokenizer.eos_token)
        else "this tokenizer has none that is no end token, too",
    )
    pad = tokenizer.pad_token_id
    is_end = pad == tokenizer.eos_token_id
    yield Check(
        "the pad token is not a stop token",
        not is_end and sums.labelled_pads == 0,
        f"{tokenizer.pad_token} is not the end of turn and never labelled"
        if not is_end and not sums.labelled_pads
        else f"{tokenizer.pad_token} (id {pad}) pads the rows and is a trained stop token, too ({sums.labelled_pads} labels). "
        "Set tokenizer.pad_token to one that no answer ends with.",
    )
    tags = ", ".join(name(thoughts))
    yield Check(
        "no think tags where thinking is off",
        sums.labelled_thoughts == 0 if thinking_off else None,
        f"{tags} labelled {sums.labelled_thoughts} times"
        if thinking_off
        else "chat_template_kwargs does not switch thinking off",
    )


# ------------------------------------------------------------------------------------------------ closer looks


def conversation(row: dict) -> tuple[list[dict], list[int]]:
    """All messages of a row, and the places of those that should be learned."""
    messages = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
    first = 0 if "messages" in row else len(row["prompt"])
    return messages, [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]


def plain(text: str | None) -> str:
    """Text as it can be compared: Qwen's tokenizer puts it into NFC, and templates strip it."""
    return unicodedata.normalize("NFC", text or "").strip()


def label_problem(row: dict, tokenizer) -> str | None:
    """Where the labelled part is more or less than each answer with its end of turn."""
    messages, answers = conversation(row)
    found = stretches(row["labels"])
    if len(found) != len(answers):
        return f"{len(found)} labelled stretches for {len(answers)} answers"
    marks = tokenizer.added_tokens_decoder
    for (first, end), place in zip(found, answers, strict=True):
        ids, message = row["input_ids"][first:end], messages[place]
        if ids[-1] not in marks:
            return f"the label of message {place + 1} ends with {tokenizer.decode(ids[-3:])!r}, expected an end-of-turn token"
        parts, part = [], []
        for token in ids:
            if token in marks:
                parts, part = [*parts, plain(tokenizer.decode(part))], []
            else:
                part.append(token)
        wanted = {plain(message.get("content"))} if (message.get("content") or "").strip() else set()
        allowed = wanted | HEADERS | {""} | {plain(message.get(key)) for key in THOUGHTS if message.get(key)}
        if message.get("tool_calls"):
            continue  # templates write calls in forms of their own
        if missing := wanted - set(parts):
            return f"message {place + 1} is not labelled as written: {missing.pop()[:60]!r} is missing"
        if extra := [text for text in parts if text not in allowed]:
            return f"message {place + 1} has more labelled than its answer: {extra[0][:60]!r}"
    return None


def prompt_problem(row: dict, tokenizer, template: str) -> str | None:
    """Where the prompt that generation starts from is not the start of the training row, turn by turn."""
    messages, answers = conversation(row)
    found = stretches(row["labels"])
    for (first, _), place in zip(found, answers, strict=False):
        kwargs = {"chat_template": template, "add_generation_prompt": True, "return_dict": False}
        ids = tokenizer.apply_chat_template(messages[:place], **kwargs, **row["chat_template_kwargs"])
        if ids != row["input_ids"][:first]:
            same = next((i for i, (a, b) in enumerate(zip(ids, row["input_ids"], strict=False)) if a != b), first)
            return (
                f"before message {place + 1}, from token {same + 1} on, generation reads "
                f"{tokenizer.decode(ids[same : same + 12])!r}, training {tokenizer.decode(row['input_ids'][same:first][:12])!r}"
            )
    return None


def thought_problem(row: dict, tokenizer, tags: list[int]) -> str | None:
    """Reasoning that a row has and the text lacks, or the other way round."""
    messages, answers = conversation(row)
    written = [plain(messages[answers[-1]].get(key)) for key in THOUGHTS if messages[answers[-1]].get(key)]
    text = plain(tokenizer.decode(row["input_ids"]))
    if lost := [thought for thought in written if thought not in text]:
        return f"the reasoning {lost[0][:40]!r} of the last answer is not in the text"
    if not written and tags and set(tags) & set(row["labels"]):
        content = messages[answers[-1]].get("content") or ""
        return None if "<think>" in content else "think tags are labelled, and the row has no reasoning"
    return None


def clock_problem(row: dict, tokenizer, template: str) -> str | None:
    """Whether the rendered text changes with the day."""
    texts = set()
    for year in (2001, 2002):
        clock = type("Clock", (datetime,), {"now": classmethod(lambda cls, tz=None, year=year: datetime(year, 3, 4))})
        with patch.object(templates, "datetime", clock):
            kwargs = {"chat_template": template, "tokenize": False, **row["chat_template_kwargs"]}
            texts.add(tokenizer.apply_chat_template(conversation(row)[0], **kwargs))
    return "the chat template prints the day on which it runs" if len(texts) > 1 else None


def row_checks(rows: Dataset, trainer, looks: int, thoughts: list[int]):
    """Checks that compare text, over `looks` evenly spread rows with their conversations."""
    if not {"messages", "prompt"} & set(rows.column_names):
        yield Check("labels and prompts", None, "the prepared rows hold no messages any more: look at their source")
        return
    tokenizer, template = trainer.processing_class, trainer.chat_template or trainer.processing_class.chat_template
    places = np.unique(np.linspace(0, len(rows) - 1, min(looks, len(rows)), dtype=int))
    chosen = [rows[int(place)] for place in places]
    chosen = [row | {"chat_template_kwargs": row.get("chat_template_kwargs") or {}} for row in chosen]
    full = trainer.args.max_length
    whole = [row for row in chosen if full is None or len(row["input_ids"]) < full]  # others may be cut
    reads = " and ".join(key for key in THOUGHTS if key in template) or "none"
    looked = {
        "the label is the answer and its end of turn": (lambda row: label_problem(row, tokenizer), whole, ""),
        "the prompt of inference is the start of the row": (
            lambda row: prompt_problem(row, tokenizer, template),
            whole,
            " Give the same mode and date in training and in use.",
        ),
        "reasoning is neither lost nor invented": (
            lambda row: thought_problem(row, tokenizer, thoughts),
            whole,
            f" Keys for reasoning that the chat template reads: {reads}.",
        ),
        "no date of the day": (
            lambda row: clock_problem(row, tokenizer, template),
            chosen[:20],
            " Pin it with chat_template_kwargs.",
        ),
    }
    for name, (problem, some, cure) in looked.items():
        found = [text for row in some if (text := problem(row))]
        detail = (
            f"{len(found)} of {len(some)} rows looked at: {found[0]}.{cure}" if found else f"{len(some)} rows looked at"
        )
        yield Check(name, not found if some else None, detail)


# --------------------------------------------------------------------------------------------------- isolation


def isolation_check(trainer, attention: str | None) -> Check:
    """Whether documents that share a packed row see each other: one is changed, the other's logits are compared."""
    name, args = "packed documents are isolated", trainer.args
    if not trainer.padding_free and not args.packing:
        return Check(name, None, "rows are not packed")
    if args.packing and args.packing_strategy == "wrapped":
        return Check(name, False, "packing_strategy wrapped lets documents of a row see each other. Take bfd.")
    if attention and "flash" in attention:
        return Check(name, True, f"by rule, not by a run: {attention} takes the documents' borders (cu_seq_lens)")
    model = trainer.model.float().eval()
    if next(model.parameters()).is_meta:
        return Check(name, None, f"no small model of the family {model.config.model_type} could be built")
    used = model.config._attn_implementation
    if attention not in (None, used):
        return Check(name, None, f"{attention} does not run on a CPU; try it on two packed rows")
    draw = torch.Generator().manual_seed(0)
    size, ids = 24, torch.randint(5, min(1000, model.config.vocab_size), (48,), generator=draw).tolist()
    other = [(token + 1) % 1000 for token in ids[:size]] + ids[size:]

    def logits(tokens: list[int]) -> torch.Tensor:
        rows = [{"input_ids": tokens, "labels": tokens, "seq_lengths": [size, size]}]
        batch = trainer.data_collator(rows)
        batch.pop("labels")
        with torch.no_grad():
            return model(**batch, use_cache=False).logits[0, size:].float()

    moved = float((logits(ids) - logits(other)).abs().max())
    scale = float(logits(ids).abs().max())
    return Check(
        name,
        moved <= 1e-4 * max(scale, 1e-3),
        f"with {used} attention a change of one document moves the next one's logits by {moved:.1e} of {scale:.1e}"
        + ("" if moved <= 1e-4 * max(scale, 1e-3) else ": it leaks. Set packing false, or take a flash kernel."),
    )
