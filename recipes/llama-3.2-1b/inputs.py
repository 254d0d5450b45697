"""What comes into a run: the config file and the rows. Version 1.

The same file, to the byte, lies in every recipe folder; `scripts/sync_guard.py FOLDER` brings a copy up to date.

The way of the data: a Hub dataset, a file or a folder -> raw rows (`read_file`) -> one conversation each, by the
recipe's own `to_conversation`, checked (`check_conversation`) -> rows that fit `max_length` (`load_rows`) -> TRL's SFTTrainer,
which renders, tokenizes and masks them. A folder that scripts/prepare_data.py wrote holds what comes out at the end.
"""

import csv
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import yaml
from accelerate import PartialState
from datasets import Dataset, Features, Json, List, Value, load_dataset
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

import prepared

FILE_KINDS = (".jsonl", ".json", ".csv", ".parquet")
ROLES = ("system", "developer", "user", "assistant", "tool")
SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system"}  # ShareGPT's names of them
PATH_KEYS = ("output_dir", "chat_template_path", "schema_file", "dataset_name", "model_name_or_path")
FIRST: int | None = None  # how many rows of each split are read; scripts that only look set it
COUNTS: dict[str, dict] = {}  # what became of the rows, by split; scripts read it
GIVEN: dict = {}  # the config file's name, and the words that stood after train.py; the run record keeps them
RENAMED = {
    "warmup_ratio": "warmup_steps (a number below 1 is a share of all steps)",
    "torch_dtype": "dtype",
    "max_seq_length": "max_length",
    "evaluation_strategy": "eval_strategy",
    "gradient_checkpointing": "activation_checkpointing",
    "group_by_length": "train_sampling_strategy",
    "overwrite_output_dir": "output_dir",
    "no_cuda": "use_cpu",
}


class RowError(ValueError):
    """A mistake in the user's data, told in one paragraph."""


@dataclass
class RecipeArguments:
    """What TRL has no name for; the same names in every recipe."""

    dataset_revision: str | None = field(default=None, metadata={"help": "Commit of the Hub dataset."})
    eval_fraction: float = field(
        default=0.05,
        metadata={
            "help": "Share of the training rows held out for evaluation; 0 takes the split `dataset_test_split`."
        },
    )
    unfit_rows: str = field(
        default="error",
        metadata={
            "help": "What to do with rows that are malformed or longer than max_length: stop, leave them out, or cut "
            "the long ones at max_length (malformed ones still stop).",
            "choices": ["error", "drop", "cut"],
        },
    )
    group_by: str | None = field(
        default=None, metadata={"help": "Column whose equal values stay on one side of the train/evaluation split."}
    )
    schema_file: str | None = field(default=None, metadata={"help": "JSON Schema of the answer (extraction recipes)."})
    text_column: str | None = field(default=None, metadata={"help": "Column of the document (extraction recipes)."})
    target_column: str | None = field(default=None, metadata={"help": "Column of the answer (extraction recipes)."})
    chat_template_kwargs: str | None = field(
        default=None,
        metadata={
            "help": "JSON object handed to the chat template in training, evaluation and use: mode, date, effort."
        },
    )

    def __post_init__(self):
        if not isinstance(self.chat_template_kwargs, dict):  # plain TRL hands the YAML's object over as it is
            self.chat_template_kwargs = json.loads(self.chat_template_kwargs or "{}")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"eval_fraction is {self.eval_fraction}; it must be at least 0 and below 1.")


# ------------------------------------------------------------------------------------------------- the config file


class StrictLoader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"the key `{key}` stands twice, and the first would be lost. Keep one.")
        return super().construct_mapping(node, deep)


def _suggest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return RENAMED.get(name) or (close[0] if close else "one of those that --help lists")


def _config_words(path: Path, known: set[str]) -> list[str]:
    """The config file as command-line words, so that its values pass the same type and choice checks as flags."""
    config = yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)
    if not isinstance(config, dict):
        raise ValueError("it holds no `key: value` lines.")
    words = []
    for key, value in config.items():
        if key not in known:
            raise ValueError(f"the key `{key}` is unknown. Did you mean {_suggest(str(key), known)}?")
        if key in PATH_KEYS and isinstance(value, str) and (key == "output_dir" or (path.parent / value).exists()):
            value = str(path.parent / value)  # relative to the file it stands in; what is no path stays a Hub id
        if isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        elif value is not None:
            words.append(f"--{key}={json.dumps(value) if isinstance(value, dict | bool) else value}")
    return words


def strict_arguments(parser, script: str) -> None:
    """Put the config file in front of the command line in sys.argv.

    Raises ValueError for what is unknown or of a wrong kind. `--config NAME` is a file, or the
    name of one beside `script`; without it, config.yaml beside `script` is read.
    """
    folder, words = Path(script).resolve().parent, sys.argv[1:]
    path = folder / "config.yaml"
    for i, word in enumerate(words):
        if word == "--config" or word.startswith("--config="):
            name = word.partition("=")[2] or "".join(words[i + 1 : i + 2])
            del words[i : i + (1 if "=" in word else 2)]
            path = Path(name).absolute() if os.path.isfile(name) else folder / f"{name.removesuffix('.yaml')}.yaml"
            break
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        raise ValueError(f"{path}: there is no such config file. Beside {script} there are: {names}.")

    def refuse(message):
        raise ValueError(message)

    parser.error, parser.allow_abbrev = refuse, False
    if action := parser._option_string_actions.get("--report_to"):
        action.nargs = "+"  # TRL's type is a list or a string, of which the parser has taken the string
    source, known = str(path), {action.dest for action in parser._actions} - {"help"}
    try:
        config = _config_words(path, known)
        parser.parse_known_args(config)
        source = "command line"
        for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
            if flag not in parser._option_string_actions:
                name = flag.removeprefix("--").replace("-", "_")
                raise ValueError(f"the flag {flag} is unknown. Did you mean --{_suggest(name, known)}?")
        if rest := parser.parse_known_args(words)[1]:
            raise ValueError(f"the words {' '.join(rest)} belong to no flag.")
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from None
    GIVEN.update(config=path.name, words=words)
    sys.argv[1:] = config + words


# -------------------------------------------------------------------------------------------------------- raw rows


def local_files(name: str, split: str) -> list[Path]:
    """The files of a split: the file itself, or the files of a folder whose name starts with the split's.

    A Hub dataset may call its splits train_sft and test_sft: here they are train and test as well.
    """
    path, training = Path(name), split.startswith("train")
    if path.is_file():
        return [path] if training else []
    files = sorted(p for p in path.iterdir() if p.suffix in FILE_KINDS)
    for start in (split, split.partition("_")[0]):
        if named := [p for p in files if p.stem == start or p.stem.startswith((f"{start}-", f"{start}_", f"{start}."))]:
            return named
    return [] if not training or any(p.stem.startswith(("test", "eval", "valid")) for p in files) else files


def read_file(path: Path) -> Iterator[dict]:
    """Rows of one local file: JSON by Python's reader (Arrow turns an ISO date into a timestamp), CSV as text."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1000):
            yield from batch.to_pylist()
        return

    def lines():
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise RowError(
                        f"{path}, line {number}: byte {error.start} (0x{line[error.start]:02x}) is not UTF-8. Save the "
                        "file as UTF-8."
                    ) from None

    if path.suffix == ".csv":
        yield from csv.DictReader(lines())
        return
    text = lines()
    first = next((line for line in text if line.strip()), "")
    if path.suffix == ".json" and first.lstrip().startswith("["):
        try:
            yield from json.loads(first + "".join(text))
        except json.JSONDecodeError as error:
            raise RowError(f"{path}, line {error.lineno}: this is not JSON ({error.msg}).") from None
        return
    number = 0
    for number, line in enumerate((line for part in ([first], text) for line in part if line.strip()), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RowError(f"{path}, row {number}: this is not JSON ({error.msg}): {line[:80]!r}.") from None
        if not isinstance(row, dict):
            raise RowError(f"{path}, row {number}: found {type(row).__name__}, expected an object with named columns.")
        yield row


def without_nulls(value):
    """Drop keys that hold nothing: column typing adds them, and templates take `thinking: null` for a thought."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


# ---------------------------------------------------------------------------------------------------- conversations


def chat(row: dict) -> dict:
    """A row of the chat recipes: `messages`; `prompt` and `completion` (message lists or strings); ShareGPT's
    `conversations`; or Alpaca's `instruction`, `input` and `output`. Raises KeyError and ValueError as `load_rows` says.
    """
    if "messages" in row:
        return {"messages": without_nulls(row["messages"])}
    if "prompt" in row and "completion" in row:
        sides = {"prompt": "user", "completion": "assistant"}
        return {
            side: [{"role": role, "content": row[side]}] if isinstance(row[side], str) else without_nulls(row[side])
            for side, role in sides.items()
        }
    if "conversations" in row:
        return {"messages": sharegpt_messages(row["conversations"])}
    if "instruction" in row and "output" in row:
        asked = [text for text in (row["instruction"], row.get("input")) if text]
        if not all(isinstance(text, str) for text in asked):
            raise ValueError("`instruction` or `input` is no text")
        answer = {"role": "assistant", "content": row["output"]}
        return {"messages": [{"role": "user", "content": "\n\n".join(asked)}, answer]}
    raise KeyError("`messages`; `prompt` and `completion`; `conversations`; or `instruction` and `output`")


def sharegpt_messages(turns: list) -> list:
    """Messages from ShareGPT's turns, which name their speaker `from` and their text `value`.

    Templates render a role that they do not know as nothing, or as itself: an unknown speaker raises ValueError.
    """
    messages = []
    if not isinstance(turns, list):
        return turns  # check_conversation refuses it
    for turn, told in enumerate(without_nulls(turns), 1):
        if isinstance(told, dict) and "from" in told:
            if told["from"] not in SPEAKERS:
                raise ValueError(f"turn {turn} is from {told['from']!r}, expected one of {', '.join(SPEAKERS)}")
            told = {"role": SPEAKERS[told["from"]], "content": told.get("value")}
        messages.append(told)
    return messages


def check_conversation(row: dict) -> str | None:
    """The reason why a conversation cannot be learned from, or None."""
    messages = row.get("messages", row.get("prompt", []))
    messages = messages + row.get("completion", []) if isinstance(messages, list) else messages
    if not isinstance(messages, list) or not messages:
        return f"expected a list of messages, found {messages!r:.60}"
    previous = None
    for turn, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {turn} is {message!r:.60}, expected an object with `role` and `content`"
        role, content = message["role"], message.get("content")
        if role not in ROLES:
            return f"message {turn} has the role {role!r}, expected one of {', '.join(ROLES)}"
        if role in ("system", "developer") and turn > 1:
            return f"message {turn} is a {role} message, which may only come first"
        if role == previous and role != "tool":
            return f"messages {turn - 1} and {turn} are both from {role!r}; turns must alternate"
        if content is not None and not isinstance(content, str):
            return (
                f"message {turn} ({role}) holds {type(content).__name__}, expected a string: write objects as JSON text"
            )
        if not (content or "").strip() and not message.get("tool_calls"):
            return f"message {turn} ({role}) is empty"
        previous = role
    if previous != "assistant":
        return f"the last message is from {previous!r}, so there is no answer to learn"
    if messages[0]["role"] == "assistant":
        return "the first message is from 'assistant', so there is no question"
    return None


def _generate(files, hub, to_conversation, group_by, first, stamp):
    """Checked rows; one that cannot be used keeps its number and the reason. `stamp` only enters the cache key."""
    rows = (row for path in files for row in read_file(Path(path))) if files else hub
    number = 0
    for number, raw in enumerate(islice(rows, first), 1):
        conversation = {}
        try:
            conversation = to_conversation(raw)
            problem = check_conversation(conversation)
        except KeyError as error:
            found = ", ".join(sorted(map(str, raw)))
            raise RowError(f"row {number} has the columns {found}; this recipe reads {error.args[0]}.") from None
        except ValueError as error:
            problem = str(error)
        group = str(raw.get(group_by) if group_by else number)
        yield {"row": number, "problem": problem, "group": group, "conversation": {} if problem else conversation}
    if number == 0:
        raise RowError(f"{', '.join(files) or 'the split'} holds no rows.")


def _read_split(script_args, recipe_args, to_conversation: Callable, split: str) -> Dataset | None:
    name = script_args.dataset_name
    files, hub, stamp = [], None, [recipe_args.dataset_revision]
    if os.path.exists(name):
        files = [str(path) for path in local_files(name, split)]
        if not files:
            return None
        stamp += map(prepared.file_digest, files)
    elif Path(name).suffix in FILE_KINDS or name.startswith((".", "/")):
        raise RowError(f"dataset_name: there is no file or folder {name!r} (looked in {os.getcwd()}).")
    else:
        try:
            hub = load_dataset(name, script_args.dataset_config, split=split, revision=recipe_args.dataset_revision)
        except Exception as error:
            raise RowError(
                f"dataset_name: {name!r} is no file or folder here, and the Hub did not give its split {split!r} "
                f"({type(error).__name__}: {error}). Check the name, the network and, for a gated dataset, HF_TOKEN."
            ) from None
    stamp += prepared.recipe_files()  # rows are cached on disk
    features = {"row": Value("int64"), "problem": Value("string"), "group": Value("string"), "conversation": Json()}
    arguments = {
        "files": tuple(files),
        "hub": hub,
        "to_conversation": to_conversation,
        "group_by": recipe_args.group_by,
        "first": FIRST,
    }
    try:
        return Dataset.from_generator(
            _generate, features=Features(features), gen_kwargs=arguments | {"stamp": tuple(stamp)}
        )
    except Exception as error:  # datasets wraps what the generator raised
        while error is not None and not isinstance(error, RowError):
            error = error.__cause__
        if error is None:
            raise
        raise error from None


def template_of(training_args, tokenizer) -> str:
    """The chat template that SFTTrainer will render."""
    template = tokenizer.chat_template
    if path := training_args.chat_template_path:
        template = Path(path).read_text(encoding="utf-8")
    if training_args.assistant_only_loss and not has_generation_markers(template):
        template = get_training_chat_template(tokenizer)
    return template


def without_tags(template: str) -> str:
    """The chat template without its generation tags, which only training reads, and comments: it renders the same text."""
    found = r"\{#(-?).*?(-?)#\}|\{%(-?)\s*(?:end)?generation\s*(-?)%\}"
    return re.sub(found, r"{#\1\3 \2\4#}", template, flags=re.DOTALL)  # an empty comment trims as a tag does


def _expand(rows: dict, columns: tuple, template_kwargs: dict, tokenizer, template: str) -> dict:
    """The columns that SFTTrainer reads, and the length that each row will get."""
    render = partial(tokenizer.apply_chat_template, chat_template=template, return_dict=False, **template_kwargs)
    sound = [row for row, problem in zip(rows["conversation"], rows["problem"], strict=True) if not problem]
    messages = [[message for column in columns for message in row[column]] for row in sound]
    try:
        found = iter([(None, len(ids)) for ids in render(messages)] if messages else [])  # a batch uses all cores
    except Exception:  # templates raise what they like: which row is it?

        def one(conversation):
            try:
                return None, len(render(conversation))
            except Exception as error:
                return f"the chat template refuses it: {error}", 0

        found = iter([one(conversation) for conversation in messages])
    lengths = [(problem, 0) if problem else next(found) for problem in rows["problem"]]
    made = {column: [row.get(column) for row in rows["conversation"]] for column in columns}
    made["chat_template_kwargs"] = [template_kwargs] * len(lengths)
    return made | {"problem": [problem for problem, _ in lengths], "tokens": [tokens for _, tokens in lengths]}


def _fitting(rows: Dataset, recipe_args, training_args, tokenizer, name: str) -> tuple[Dataset, str]:
    """Rows that can be learned from, and what became of the others. Raises RowError where `unfit_rows` is `error`."""
    sample = next((row["conversation"] for row in rows if not row["problem"]), {})
    columns = ("messages",) if "messages" in sample else ("prompt", "completion")
    features = rows.features | {column: List(Json()) for column in columns}
    rows = rows.map(
        _expand,
        fn_kwargs={
            "columns": columns,
            "template_kwargs": recipe_args.chat_template_kwargs,
            "tokenizer": tokenizer,
            "template": template_of(training_args, tokenizer),
        },
        batched=True,
        features=Features(features | {"tokens": Value("int64"), "chat_template_kwargs": Json()}),
        num_proc=training_args.dataset_num_proc,
        desc=f"Checking {name} rows",
    )
    facts = rows.select_columns(["row", "problem", "tokens"]).with_format("arrow")[:]  # a few bytes a row
    numbers, tokens = facts["row"].to_numpy(), facts["tokens"].to_numpy()
    limit, drop = training_args.max_length or sys.maxsize, recipe_args.unfit_rows == "drop"
    is_bad, is_long = facts["problem"].is_valid().to_numpy(), tokens > limit
    bad = [f"row {numbers[i]}: {facts['problem'][int(i)]}" for i in np.flatnonzero(is_bad)[:5]]
    long = [f"row {numbers[i]}: {tokens[i]} tokens, max_length is {limit}" for i in np.flatnonzero(is_long)[:5]]
    is_unfit = is_bad if recipe_args.unfit_rows == "cut" else is_bad | is_long
    if is_unfit.any() and not drop:
        reasons = bad if recipe_args.unfit_rows == "cut" else bad + long
        raise RowError(
            f"{name} data: {is_unfit.sum()} of {len(rows)} rows do not fit. {'; '.join(reasons[:5])}"
            f"{'; ...' if is_unfit.sum() > 5 else ''}. Mend them, or raise --max_length, or say what to do with them: "
            "--unfit_rows drop leaves them out"
            + (", --unfit_rows cut cuts the long ones (their answers lose the end)." if long else ".")
        )
    kept = np.flatnonzero(~is_unfit)
    if not len(kept):
        raise RowError(f"{name} data: none of {len(rows)} rows can be used. {'; '.join((bad + long)[:5])}")
    cut = 0 if drop else int(is_long.sum())
    report = f"{name}: {len(rows)} rows read, {len(kept)} kept, {len(rows) - len(kept)} dropped, {cut} cut"
    report += f" ({'; '.join((bad + long)[:3])})" if bad or long else ""
    COUNTS[name] = {"read": len(rows), "kept": len(kept), "malformed": int(is_bad.sum()), "long": int(is_long.sum())}
    COUNTS[name] |= {"cut": cut, "reasons": (bad + long)[:3], "longest": int(tokens.max())}
    return rows.select(kept), report


def _groups(rows: Dataset):
    """The column `group` as an Arrow dictionary array."""
    return rows.select_columns("group").with_format("arrow")[:]["group"].combine_chunks().dictionary_encode()


def _load(script_args, training_args, recipe_args, tokenizer, to_conversation):
    """Training and evaluation rows that fit, from their source, and what became of the others."""
    train = _read_split(script_args, recipe_args, to_conversation, script_args.dataset_train_split)
    if train is None:
        raise RowError(f"dataset_name: {script_args.dataset_name} holds no file of rows ({', '.join(FILE_KINDS)}).")
    train, report = _fitting(train, recipe_args, training_args, tokenizer, "training")
    held_out = None
    if training_args.eval_strategy != "no" and recipe_args.eval_fraction == 0:
        held_out = _read_split(script_args, recipe_args, to_conversation, script_args.dataset_test_split)
        if held_out is None:
            raise RowError(
                f"eval_fraction is 0 and {script_args.dataset_name} has no split "
                f"{script_args.dataset_test_split!r}. Name one with --dataset_test_split, or hold rows out with "
                "--eval_fraction 0.05, or set --eval_strategy no."
            )
        held_out, more = _fitting(held_out, recipe_args, training_args, tokenizer, "evaluation")
        report += f"\n{more}"
    elif training_args.eval_strategy != "no":
        groups = _groups(train)
        chosen = pc.sort_indices(groups.dictionary).to_numpy()  # numbers instead of names: a million fit anywhere
        chosen = np.random.default_rng(training_args.data_seed or training_args.seed).permutation(chosen)
        chosen = chosen[: max(1, round(len(chosen) * recipe_args.eval_fraction))]
        inside = np.isin(groups.indices.to_numpy(), chosen)
        if inside.all():
            raise RowError(f"training data: {len(train)} row(s) leave nothing to hold out for evaluation; add rows.")
        held_out, train = train.select(np.flatnonzero(inside)), train.select(np.flatnonzero(~inside))
        report += f"; {len(held_out)} of them held out for evaluation"
    return train, held_out, report


def load_rows(script_args, training_args, recipe_args, tokenizer, to_conversation: Callable = chat):
    """Training and evaluation rows as SFTTrainer reads them, checked, with nothing lost in silence.

    to_conversation turns a raw row (dict) into {"messages"} or {"prompt", "completion"}; it raises ValueError with the
    reason for a bad row and KeyError naming the wanted columns. Returns (train, eval or None). Raises RowError.
    The numbers of the evaluation rows are kept in the run folder, eval_rows.json.
    """
    state = PartialState()
    if prepared.is_prepared(script_args.dataset_name):
        key = prepared.key(training_args, recipe_args, tokenizer, template_of(training_args, tokenizer))
        train, held_out, record = prepared.load(script_args.dataset_name, key, training_args)
        report, numbers = f"{script_args.dataset_name}: {record['report']}", record["eval_rows"]
        COUNTS.update(record["counts"])
    else:
        # A cache that all machines share is filled once, one of its own on each machine; SFTTrainer does it this way, too.
        with state.main_process_first(), state.local_main_process_first():
            train, held_out, report = _load(script_args, training_args, recipe_args, tokenizer, to_conversation)
        numbers = list(held_out["row"]) if held_out is not None else []
        if held_out is not None and recipe_args.group_by:
            shared = np.intersect1d(*(_groups(rows).dictionary.to_pylist() for rows in (train, held_out)))
            COUNTS["groups"] = {"column": recipe_args.group_by, "shared": shared.tolist()[:100]}
        COUNTS["report"], COUNTS["eval_rows"] = report, numbers
        spare = ["row", "problem", "group", "conversation", "tokens"]
        train, held_out = (rows.remove_columns(spare) if rows is not None else None for rows in (train, held_out))
    if state.is_main_process:
        print(report, flush=True)
        if held_out is not None:
            Path(training_args.output_dir).mkdir(parents=True, exist_ok=True)
            Path(training_args.output_dir, "eval_rows.json").write_text(json.dumps(numbers))
    return train, held_out
