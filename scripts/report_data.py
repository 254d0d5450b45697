"""What a run folder tells, read for scripts/report.py: curves, starts, scores, data, settings. Nothing is computed anew.

Reads run.json, metrics.jsonl, starts.jsonl, eval_rows.json and scores.json, and no weights. What is missing or damaged is
a note of the run, not an error, so that the report of a run that failed can be made.
"""

import json
import math
import shlex
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

FILES = {  # name -> what is not shown without it
    "metrics.jsonl": "no step was logged, so there are no curves",
    "eval_rows.json": "no rows were held out",
    "scores.json": "it was not scored; `recipes/qwen3-8b-invoice/score.py RUN` or `scripts/chat_scores.py RUN` does that",
}
LOSS = "held-out loss"  # the key of scripts/chat_scores.py in scores.json


class ReportError(ValueError):
    """Why no report can be made, in one paragraph."""


@dataclass
class Start:
    """One start of a run. `first` and `last` are logged steps, None where it logged none; times in seconds."""

    begun: float
    ended: float | None = None
    first: int | None = None
    last: int | None = None
    repeated: int = 0  # logged steps that an earlier start had logged already
    exit_code: int | None = None


@dataclass
class Scores:
    """Scores of one set of rows: reports of the base model and of the tuned one, None where it was not scored."""

    rows: str
    base: dict | None
    tuned: dict | None

    @property
    def is_loss(self) -> bool:
        return self.rows == LOSS

    @property
    def title(self) -> str:
        """The rows by name, without their folder."""
        return Path(self.rows).name

    @property
    def reports(self) -> dict[str, dict]:
        """{"base": report, "tuned": report}, of those that there are."""
        return {label: report for label, report in (("base", self.base), ("tuned", self.tuned)) if report}

    @property
    def newest(self) -> dict:
        return self.tuned or self.base or {}


@dataclass
class Run:
    """A run folder, read. lines: the whole lines of metrics.jsonl, in the order in which they were written."""

    folder: Path
    name: str
    record: dict
    lines: list[dict]
    starts: list[Start]
    scores: list[Scores]
    held_out: int | None
    notes: list[str] = field(default_factory=list)

    @cached_property
    def arguments(self) -> dict:
        return self.record.get("arguments") or {}

    @property
    def outcome(self) -> str:
        return str(self.record.get("outcome", "unknown"))

    def curve(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of a key of metrics.jsonl by step; of a step that was logged twice, the later value."""
        return sorted({line["step"]: line[key] for line in self.lines if _is_number(line.get(key))}.items())

    @property
    def resumes(self) -> list[Start]:
        """The starts that went on from a checkpoint, as far as logged steps tell: those that did not begin anew."""
        logged = [start for start in self.starts if start.first is not None]
        return [start for start in logged[1:] if start.first > logged[0].first]

    def values(self, key: str) -> list[float]:
        return [value for _, value in self.curve(key)]

    def median(self, key: str) -> float | None:
        values = self.values(key)
        return statistics.median(values) if values else None

    @property
    def steps(self) -> int:
        """The last step that was logged, or that run.json names."""
        return max([self.record.get("step") or 0, *(line["step"] for line in self.lines)])

    @property
    def planned_steps(self) -> int | None:
        """All steps of the run, where run.json or the logged share of an epoch tells them."""
        if (steps := self.arguments.get("max_steps") or 0) > 0:
            return steps
        epochs, wanted = self.curve("epoch"), self.arguments.get("num_train_epochs")
        return round(epochs[-1][0] / epochs[-1][1] * wanted) if epochs and epochs[-1][1] and wanted else None

    @property
    def seconds(self) -> float:
        """Time at work: from each start to its last logged line, without the time between the starts."""
        return sum(start.ended - start.begun for start in self.starts if start.ended)

    @property
    def tokens(self) -> int:
        """Tokens trained on, repeated steps included. TRL's counter begins at 0 at each start."""
        total = before = 0
        for count in (line["num_tokens"] for line in self.lines if _is_number(line.get("num_tokens"))):
            total, before = total + (count - before if count >= before else count), count
        return int(total)

    @property
    def last_losses(self) -> list[float]:
        """The last 5 %, but at least 3 and at most 20, of the logged losses."""
        losses = self.values("loss")
        return losses[-min(20, max(3, len(losses) // 20)) :]

    @property
    def peak_memory(self) -> tuple[float, str] | None:
        """(GiB, of what): the most that a GPU held, or without a GPU what the largest rank held after loading."""
        if peaks := self.values("peak_memory_gib"):
            return max(peaks), "peak of rank 0's GPU"
        if private := self.record.get("host_private_bytes"):
            return max(private) / 2**30, "host memory of a rank, with the model loaded"
        return None

    @property
    def global_batch(self) -> int | None:
        return self.arguments.get("global_batch")

    @property
    def hardware(self) -> str:
        """The machine in words: GPUs by name, or the CPU cores."""
        told = self.record.get("hardware") or {}
        gpus, world = told.get("gpus") or [], self.arguments.get("world_size", 1)
        if gpus:
            return f"{world} x {gpus[0]}"
        return f"{told['cores']} CPU cores" if told.get("cores") else "unknown hardware"

    @cached_property
    def own_words(self) -> list[str]:
        """The words after train.py as they were typed, without the config file's."""
        if "words" in self.record:
            return self.record["words"]
        words, known = (self.record.get("command") or [""])[1:], set()
        for place, word in enumerate(words):  # a record without them: the config file's stand first, as --key=value
            key, is_one_word, _ = word.partition("=")
            if key in known or not is_one_word:
                return words[place:]
            known.add(key)
        return []

    @property
    def command(self) -> str:
        """The launch line that makes this run again, from the cookbook's root."""
        script = Path((self.record.get("command") or ["train.py"])[0])
        strategy, world = self.arguments.get("strategy", "single"), self.arguments.get("world_size", 1)
        words = ["accelerate", "launch", "--config_file", f"accelerate_configs/{strategy}.yaml"]
        words += ["--num_processes", str(world)] if strategy != "single" else []
        config, own = self.record.get("config", "config.yaml"), self.own_words
        words += [str(Path(*script.parts[-3:])) if "recipes" in script.parts[-3:] else str(script)]
        own = (["--config", config] if config != "config.yaml" else []) + own
        lines = [shlex.join(words)]
        for word in own:  # an option a line
            if word.startswith("--"):
                lines.append(f"  {shlex.quote(word)}")
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return " \\\n".join(lines)

    @cached_property
    def changed_settings(self) -> list[tuple[str, str | None, str]]:
        """(setting, the config file's value or None where it has none, this run's value), where the two differ."""
        command = (self.record.get("command") or [""])[1:]
        config = _options(command[: len(command) - len(self.own_words)])
        own = _options(self.own_words)
        return [(key, config.get(key), value) for key, value in own.items() if not _same(config.get(key), value)]


def _options(words: list[str]) -> dict[str, str]:
    """{name: value} of command-line words; of a name that stands twice, the last value."""
    found, name = {}, None
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word.removeprefix("--").partition("=")
            found[name] = value if has_value else ""
        elif name is not None:
            found[name] = f"{found[name]} {word}".strip()
    return found


def _same(one: str | None, other: str) -> bool:
    """Whether two values of a setting mean the same: 1e-5 and 1e-05, true and True."""
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return one is not None and one.casefold() == other.casefold()


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_json(file: Path, notes: list[str]):
    """The content of a JSON file, or None with a note."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if file.name in FILES:
            notes.append(f"There is no {file.name}: {FILES[file.name]}.")
    except (OSError, ValueError) as error:
        notes.append(f"{file.name} cannot be read, and is left out: {error}.")
    return None


def read_lines(file: Path, notes: list[str]) -> list[dict]:
    """The lines of JSON that have a step (metrics.jsonl) or a time (starts.jsonl); damaged ones become one note."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    lines, damaged = [], []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            value = json.loads(line)
            whole = isinstance(value, dict) and (isinstance(value.get("step"), int) or "step" not in value)
            whole = whole and ("step" in value or "exit_code" in value or "checkpoint" in value)
        except ValueError:
            whole = False
        if whole:
            lines.append(value)
        elif line.strip():
            damaged.append(number)
    if damaged == [len(text.splitlines())] and not text.endswith("\n"):
        notes.append(f"{file.name}: the last line, {damaged[0]}, was cut off while it was written, and is left out.")
    elif damaged:
        told = ", ".join(map(str, damaged[:10])) + (", ..." if len(damaged) > 10 else "")
        notes.append(f"{file.name}: {len(damaged)} damaged line(s) left out: {told}.")
    return lines


def find_starts(record: dict, lines: list[dict], exits: list[dict], notes: list[str]) -> list[Start]:
    """The starts of a run, with what each logged. A start that ended without a logged step keeps None."""
    begun = [time for time in record.get("started") or [] if _is_number(time)]
    if not begun and lines:  # no record of starts: TRL's counter of tokens falls where one begins
        counted = [line for line in lines if "num_tokens" in line]
        falls = [b for a, b in pairwise(counted) if b["num_tokens"] < a["num_tokens"]]
        begun = [line["time"] for line in [lines[0], *falls] if _is_number(line.get("time"))]
    starts, seen = [Start(time) for time in begun], set()
    for number, start in enumerate(starts):
        until = begun[number + 1] if number + 1 < len(begun) else math.inf
        mine = [line for line in lines if start.begun <= line.get("time", 0) < until]
        steps = {line["step"] for line in mine if "loss" in line}
        if steps:
            start.first, start.last, start.repeated = min(steps), max(steps), len(steps & seen)
            seen |= steps
        start.ended = max((line["time"] for line in mine), default=None)
    codes = [line["exit_code"] for line in exits if "exit_code" in line]
    if len(codes) == len(starts):
        for start, code in zip(starts, codes, strict=True):
            start.exit_code = code
    silent = [str(number) for number, start in enumerate(starts, 1) if start.first is None]
    if silent and lines:
        notes.append(f"Start {', '.join(silent)} of {len(starts)} ended, or is still, before its first logged step.")
    return starts


def read_scores(found, notes: list[str]) -> list[Scores]:
    """The sets of rows in scores.json that are whole."""
    scores = []
    for rows, reports in (found if isinstance(found, dict) else {}).items():
        reports = reports if isinstance(reports, dict) else {}
        whole = {
            label: report
            for label, report in reports.items()
            if isinstance(report, dict)
            and ({"loss", "rows"} if rows == LOSS else {"fields", "micro_f1"}) <= report.keys()
        }
        if whole:
            scores.append(Scores(rows, whole.get("base"), whole.get("tuned")))
            if "tuned" not in whole:
                notes.append(
                    f"Of the scores on {rows} only the base model's are there: score the run again now it ended."
                )
        else:
            notes.append(f"scores.json: {rows!r} holds no scores, and is left out.")
    return scores


def read_run(folder: str | Path, name: str | None = None) -> Run:
    """Read a run folder. Raises ReportError where it holds neither run.json nor metrics.jsonl."""
    folder, notes = Path(folder), []
    if not (folder / "run.json").is_file() and not (folder / "metrics.jsonl").is_file():
        raise ReportError(
            f"{folder} is no run folder: it holds neither run.json nor metrics.jsonl. Give the output_dir of train.py."
        )
    record = _read_json(folder / "run.json", notes)
    if not isinstance(record, dict):
        record = {}
        notes.append("Without run.json the outcome, settings, versions and hardware are not known.")
    lines = read_lines(folder / "metrics.jsonl", notes)
    if not lines:
        notes.append(f"metrics.jsonl is missing or empty: {FILES['metrics.jsonl']}.")
    bad = sorted({line["step"] for line in lines if "loss" in line and not _is_number(line["loss"])})
    if bad:
        notes.append(f"The loss of step {', '.join(map(str, bad[:5]))} is not a finite number.")
    exits = read_lines(folder / "starts.jsonl", notes)
    starts = find_starts(record, lines, exits, notes)
    rows = _read_json(folder / "eval_rows.json", notes)
    scores = read_scores(_read_json(folder / "scores.json", notes), notes)
    if "dataset" not in record:
        notes.append(
            "run.json has no row counts and lengths: the run ended before its rows were ready, or is an older one."
        )
    held_out = len(rows) if isinstance(rows, list) else None
    return Run(folder, name or folder.name, record, lines, starts, scores, held_out, notes)


def read_runs(folders: list[Path]) -> list[Run]:
    """Read run folders under names that tell them apart: the folder's own, with as many parents as that takes."""
    folders = [folder.resolve() for folder in folders]
    if len(set(folders)) < len(folders):
        raise ReportError("one run folder was given twice.")
    names = []
    for folder in folders:
        depth = 2 if folder.name in ("run", "runs") else 1  # recipes/NAME/run
        others = [other for other in folders if other != folder]
        while any(other.parts[-depth:] == folder.parts[-depth:] for other in others):
            depth += 1
        names.append("/".join(folder.parts[-depth:]))
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
