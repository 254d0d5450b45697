"""Start a recipe from the launch files as they are, with a tiny model and tiny rows, and read what it wrote.

smoke.py and the tests stand on this module. A launch is the line that a person would type, plus `--num_processes` and,
without GPUs, `--use_cpu true`. There FSDP alone goes through fsdp_on_cpu.py, because accelerate shards only on GPUs.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import preloaded
import psutil
import tiny_model
import yaml

SCRIPTS = Path(__file__).resolve().parent
FRESH = True  # False: launches fork from a process with the libraries, unless they ask for fresh ones; see preloaded.py
STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "zero3_offload")
# Part of another model's name, or of its model_type -> family of tiny_model.py; the first that fits.
FAMILIES = {
    "gpt-oss": "gpt-oss",
    "gpt_oss": "gpt-oss",
    "llama": "llama",
    "qwen3.8": "qwen3_5",
    "qwen3_5": "qwen3_5",
    "qwen3": "qwen3",
    "qwen2": "qwen2",
    "olmo3": "olmo3",
    "olmo-3": "olmo3",
}
WORDS = ("receipt", "total", "answer", "paper", "house", "date", "long", "road", "short", "user", "model", "learns")


class LaunchError(Exception):
    """What cannot be launched, and why, in one sentence."""


@dataclass
class Result:
    """One finished launch: exit code, everything it printed, seconds, and the largest process in bytes."""

    rc: int
    output: str
    seconds: float
    peak_memory: int


@dataclass
class Running:
    """A launch that was started. `wait` it, or it goes on."""

    process: subprocess.Popen | preloaded.Forked
    log: Path
    started: float = field(default_factory=time.monotonic)

    def wait(self, timeout: float = 1800, stop_when=None, kill_rank: int | None = None) -> Result:
        """Wait for the launcher and for every process it started; nothing is left behind.

        stop_when: called without arguments a hundred times a second until it returns true; then the launcher gets
        SIGTERM, as from a scheduler that takes the machine away, or the process of rank `kill_rank` gets SIGKILL.
        Raises LaunchError after `timeout` seconds.
        """
        family, peak, looked = {}, 0, 0.0
        while self.process.poll() is None:
            if stop_when is not None and stop_when():
                stop_when = None
                if kill_rank is None:
                    self.process.send_signal(signal.SIGTERM)
                else:
                    self._rank(kill_rank).kill()
            if time.monotonic() - looked > 0.3:
                looked = time.monotonic()
                family |= {child.pid: child for child in _children(self.process.pid)}
                peak = max([peak, *map(_resident, family.values())])
            if time.monotonic() - self.started > timeout:
                self._end(family)
                raise LaunchError(f"not finished after {timeout:.0f} s; its output: {self.log}")
            time.sleep(0.01)
        self._end(family, grace=30)
        output = self.log.read_text(encoding="utf-8", errors="replace")
        return Result(self.process.returncode, output, time.monotonic() - self.started, peak)

    def _rank(self, rank: int) -> psutil.Process:
        """The process of that rank. Raises LaunchError where there is none."""
        for child in psutil.Process(self.process.pid).children():
            if child.environ().get("RANK", "0") == str(rank):
                return child
        raise LaunchError(f"there is no rank {rank} to kill; its output: {self.log}")

    def _end(self, family: dict, grace: float = 0) -> None:
        """Wait `grace` seconds for the processes in `family`, then kill what is left, the launcher first."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        _, alive = psutil.wait_procs(list(family.values()), timeout=grace)
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(alive, timeout=10)


def start(
    folder: str | Path,
    strategy: str,
    *arguments: str,
    log: Path,
    processes: int = 2,
    launcher: tuple[str, ...] = (),
    wrapper: Path | bool | None = None,
    environment: dict[str, str] | None = None,
    cwd: Path | None = None,
    fresh: bool | None = None,
    gpu: bool = False,
) -> Running:
    """Start `folder`/train.py under accelerate_configs/`strategy`.yaml, on the CPU unless `gpu` says otherwise.

    arguments: what follows train.py. log: file for everything that is printed. launcher: flags of `accelerate launch`
    in place of `--num_processes` and the port. wrapper: a program that runs train.py (fsdp_on_cpu.py for fsdp, unless
    another is given). environment: variables on top of this process's. cwd: working directory, by default the folder
    that holds accelerate_configs/. fresh: new Python processes, by default as FRESH says. Raises LaunchError for an
    unknown strategy.
    """
    root = launch_root(folder)
    file = root / "accelerate_configs" / f"{strategy}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.yaml")))
        raise LaunchError(f"there is no launch file {file.name}; accelerate_configs/ holds {known}")
    if wrapper is None and strategy == "fsdp" and not gpu:
        wrapper = SCRIPTS / "fsdp_on_cpu.py"
    command = ["launch", "--config_file", str(file)]
    command += launcher or ("--num_processes", str(processes), "--main_process_port", "0")
    command += [str(wrapper)] * bool(wrapper) + [str(Path(folder).resolve() / "train.py")]
    command += [*([] if gpu else ["--use_cpu", "true"]), *map(str, arguments)]
    # DeepSpeed compiles its CPU optimizer with the ninja that lies beside python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    variables = os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    variables |= {"PYTHONFAULTHANDLER": "1"} | (environment or {})  # a rank that is aborted says where it was
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as output:
        # The DeepSpeed file's path is relative to the working directory.
        if FRESH if fresh is None else fresh:
            command[:0] = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
            process = subprocess.Popen(command, cwd=cwd or root, env=variables, stdout=output, stderr=subprocess.STDOUT)
        else:
            process = preloaded.Forked(command, cwd or root, variables, log)
    return Running(process, log)


def launch(
    folder, strategy, *arguments, log, timeout: float = 1800, stop_when=None, kill_rank: int | None = None, **options
) -> Result:
    """`start` and `wait` in one."""
    return start(folder, strategy, *arguments, log=log, **options).wait(timeout, stop_when, kill_rank)


def launch_root(folder: str | Path) -> Path:
    """The folder with accelerate_configs/ to launch from: two levels above the recipe, here, or the cookbook's own."""
    for root in (Path(folder).resolve().parent.parent, Path.cwd(), SCRIPTS.parent):
        if (root / "accelerate_configs").is_dir():
            return root
    raise LaunchError("there is no accelerate_configs/ beside the recipe, here or in the cookbook")


def metrics(run: str | Path) -> list[dict]:
    """The lines of a run folder's metrics.jsonl; a last line that is still being written is left out."""
    file = Path(run) / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(run: str | Path) -> list[float]:
    """Training loss of each step, from step 1 on; of a step that was logged twice, the later value.

    Raises LaunchError where a step is missing.
    """
    by_step = {line["step"]: line["loss"] for line in metrics(run) if "loss" in line}
    missing = sorted(set(range(1, max(by_step, default=1) + 1)) - by_step.keys())
    if missing:
        raise LaunchError(f"{run}/metrics.jsonl has no loss of step {', '.join(map(str, missing))}")
    return [by_step[step] for step in sorted(by_step)]


def read_config(folder: str | Path, config: str = "config") -> dict:
    """The recipe's YAML of that name. Raises LaunchError where it or train.py is missing."""
    folder = Path(folder)
    for file in (folder / "train.py", folder / f"{config}.yaml"):
        if not file.is_file():
            raise LaunchError(f"{folder} is no recipe folder with this configuration: there is no {file.name}")
    return yaml.safe_load((folder / f"{config}.yaml").read_text(encoding="utf-8"))


def model_family(folder: str | Path, config: str = "config") -> str:
    """Family of tiny_model.py for the model that a recipe names. Raises LaunchError, listing them, for another one."""
    name = str(read_config(folder, config).get("model_name_or_path"))
    if name in tiny_model.PUBLISHED:
        return tiny_model.PUBLISHED[name][0]
    described = Path(folder) / name / "config.json"
    kind = json.loads(described.read_text(encoding="utf-8"))["model_type"] if described.is_file() else name
    for part, family in FAMILIES.items():
        if part in kind.lower():
            return family
    raise LaunchError(f"there is no tiny model like {name}: known are {', '.join(sorted(tiny_model.FAMILIES))}")


def own_strategy(folder: str | Path, config: str = "config") -> str:
    """The strategy of the launch line in the head of a recipe's YAML. Raises LaunchError where there is none."""
    file = Path(folder) / f"{config}.yaml"
    named = re.search(r"^#.* accelerate_configs/(\w+)\.yaml", file.read_text(encoding="utf-8"), re.MULTILINE)
    if named is None:
        raise LaunchError(f"the head of {file} has no launch line with a file of accelerate_configs/")
    return named[1]


def tiny_rows(path: Path, folder: str | Path, config: str = "config", count: int = 24) -> Path:
    """Write `count` rows in the form that the recipe reads, with very uneven answers, and return `path`.

    A recipe with a `schema_file` gets documents with their fields; the others get chats of one and more turns, for
    gpt-oss with reasoning.
    """
    settings, draw = read_config(folder, config), random.Random(0)
    if schema_file := settings.get("schema_file"):
        schema = json.loads((Path(folder) / schema_file).read_text(encoding="utf-8"))
        rows = [_document(schema, settings, draw) for _ in range(count)]
    else:
        thinks = model_family(folder, config) == "gpt-oss"
        rows = [_chat(number, thinks, draw) for number in range(count)]
    rows = [{"id": number, **row} for number, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _chat(number: int, thinks: bool, draw: random.Random) -> dict:
    messages = [{"role": "system", "content": "Answer in a few words."}] if number % 4 == 3 else []
    for _ in range(1 + number % 3):
        answer = {"role": "assistant", "content": _text(draw, draw.choice((1, 2, 8, 40)))}
        if thinks:
            answer["thinking"] = _text(draw, draw.choice((3, 20)))
        messages += [{"role": "user", "content": _text(draw, draw.randint(2, 12))}, answer]
    return {"messages": messages}


def _document(schema: dict, settings: dict, draw: random.Random) -> dict:
    fields = _value(schema, draw)
    document = "\n".join(f"{key}: {value}" for key, value in fields.items() if value is not None) or "an empty page"
    if settings.get("text_column"):
        return {settings["text_column"]: document, settings["target_column"]: fields}
    texts = {"system": "Read the document.", "user": document, "assistant": json.dumps(fields)}
    return {"messages": [{"role": role, "content": text} for role, text in texts.items()]}


def _value(schema: dict, draw: random.Random):
    """A value that fits `schema`: null now and then where it may be."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if "null" in kinds and draw.random() < 0.3:
        return None
    kind = next(kind for kind in kinds if kind != "null")
    if values := [value for value in schema.get("enum", []) if value is not None]:
        return draw.choice(values)
    if kind == "object":
        return {key: _value(inner, draw) for key, inner in schema["properties"].items()}
    if kind == "array":
        return [_value(schema["items"], draw) for _ in range(draw.choice((1, 2, 5)))]
    if schema.get("format") == "date":
        return f"20{draw.randint(10, 26)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
    plain = {"number": draw.randint(100, 99999) / 100, "integer": draw.randint(1, 99), "boolean": draw.random() < 0.5}
    return plain[kind] if kind in plain else _text(draw, draw.choice((1, 2, 12)))


def _text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0
