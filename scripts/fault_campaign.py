"""Fault campaign: kill a run again and again, start the same command again, and compare with a run that was left alone.

    python scripts/fault_campaign.py --work DIR                    # all of it, an hour or two on two cores
    python scripts/fault_campaign.py --work DIR                    # again: continues where it was stopped
    python scripts/fault_campaign.py --work DIR --strategy fsdp    # only these chains
    python scripts/result_tables.py docs/faults.md                 # then writes the table

A chain is one run of one recipe under one strategy that is started, struck by a fault, started again by the same
command, struck again, ... until it is done. Two chains a strategy: all weights with packing, and LoRA with dropout; both
with accumulation and evaluation. The moments are those of fault_wrapper.py, and `random` seconds after the start. Struck
is one rank (SIGKILL), the launcher (SIGTERM, SIGKILL), or everything at once (SIGKILL), as when a machine is lost; a
rank that fails or hangs by itself; a checkpoint that is damaged; a file system that is full.

A fault is survived when

- no whole checkpoint is lost, and run.json and metrics.jsonl can be read;
- the launch ends non-zero within a minute and leaves no process (of a launcher that was killed itself, the ranks are
  killed after it);
- SIGTERM leaves a checkpoint of the last step;
- the next start continues from the newest whole checkpoint, and anew only where there was none;
- the loss of each step and evaluation is that of the unbroken run, to the last bit;
- at the end of its chain every weight of final/ is that of the unbroken run, to the last bit.

DIR/faults.jsonl gets a line as soon as a fault is judged; docs/faults.json is written from it after each
strategy.
Exit code 1 when one was lost.
"""

import argparse
import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import launching
import psutil
import smoke
import strategy_table
import torch
import xxhash
from bars import track
from launching import LaunchError
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "faults.json"
STEPS = 60
TARGETS = ("rank 0", "launcher, SIGTERM", "rank 1", "launcher", "everything")
# A moment, and when of its occurrences in one start: so each start gets some steps further.
BODY = (
    ("step", 9),
    ("files", 2),
    ("load", 1),
    ("mark", 2),
    ("evaluation", 2),
    ("save", 2),
    ("rotation", 2),
    ("torn", 2),
    ("random", 1),
    ("rename", 2),
)
ENDINGS = ("final", "final_files", "done")
FAILURES = ("raise", "exit", "hang")  # of the last rank, by itself
MAIN_ONLY = ("torn", "rename", "rotation", "done")  # moments that only rank 0 comes to
DAMAGES = ("empty", "truncated", "missing", "longer", "mark cut", "mark odd", "state cut", "flipped")
LIMIT, HANG = 60, 30  # seconds: from a fault to the end of the launch; of a collective that hangs
DISK = "64m"
ROWS = {
    "step": "in a step",
    "evaluation": "in an evaluation",
    "save": "during a save",
    "files": "between two files of a save",
    "torn": "within a file of a save",
    "mark": "saved, before the completeness mark",
    "rename": "the mark without its name",
    "rotation": "an old checkpoint half removed",
    "load": "while a checkpoint loads",
    "random": "at a random time",
    "final": "during the save of the result",
    "final_files": "the result saved, not proven",
    "done": "before the run is called done",
    "raise": "a rank fails with an error",
    "exit": "a rank ends without a word",
    "hang": "a rank hangs in a collective",
    "damage": "the newest checkpoint damaged",
    "full disk": "the disk full at a save",
}
SAID = {
    "rank 0": "of rank 0",
    "rank 1": "of rank 1",
    "launcher": "of the launcher",
    "launcher, SIGTERM": "by SIGTERM to the launcher",
    "everything": "of all processes at once",
}
# Recipe, configuration, precision, and arguments on top of smoke.py's.
PACKED = ["--packing", "true", "--max_length", "512", "--unfit_rows", "drop"]
LLAMA = ("llama-3.2-1b", "config", "fp32", PACKED)
QWEN = ("qwen3-8b-invoice", "config", "fp32", [*PACKED, "--max_length", "1536"])
LLAMA_LORA = ("llama-3.2-1b", "lora", "shipped", [*PACKED, "--lora_dropout", "0.1"])
QWEN_LORA = ("qwen3-8b-invoice", "lora", "shipped", [*PACKED, "--max_length", "1536", "--lora_dropout", "0.1"])
GPT_OSS = ("gpt-oss-20b", "config", "shipped", ["--lora_dropout", "0.1"])
SETTINGS = {
    "single": (LLAMA, GPT_OSS),
    "ddp": (LLAMA, QWEN_LORA),
    "fsdp": (QWEN, GPT_OSS),
    "zero1": (LLAMA, LLAMA_LORA),
    "zero2": (QWEN, LLAMA_LORA),
    "zero3": (LLAMA, GPT_OSS),
    "zero3_offload": (QWEN, QWEN_LORA),
}


@dataclass
class Fault:
    """What strikes, when. moment, nth: of fault_wrapper.py. target: one of TARGETS, an action of the rank, or a cause."""

    moment: str
    target: str
    nth: int = 1
    delay: float = 0.0


@dataclass
class Launch:
    """One launch of a chain that has ended, however it did."""

    rc: int
    output: str
    seconds: float  # from the strike, or from the start where nothing struck, to the end of the launcher
    struck: bool
    left: int  # processes that outlived the launcher by ten seconds


class Chain:
    """One run under one strategy, and its unbroken twin. All of it lies in `work`, so that a second start goes on."""

    def __init__(self, name: str, strategy: str, setting: tuple, work: Path, steps: int = STEPS, disk=None):
        """setting: recipe, configuration, precision, arguments. work: a folder. disk: a SmallDisk to run on."""
        self.recipe, self.config, precision, self.extra = setting
        self.name, self.strategy, self.work, self.steps = name, strategy, Path(work).resolve(), steps
        self.processes = 1 if strategy == "single" else 2
        self.disk = disk
        self.run, self.twin = (disk.folder if disk else self.work) / "run", self.work / "unbroken"
        for process in psutil.process_iter(["cmdline"]):  # of a campaign that was killed itself
            if str(self.run) in (process.info["cmdline"] or []):
                kill(process)
        shutil.rmtree(self.work / "bench" / "model", ignore_errors=True)  # the same is written again
        self.bench = smoke.Bench(ROOT / "recipes" / self.recipe, self.work / "bench", self.config, precision)
        launching.tiny_rows(self.bench.rows, self.bench.folder, self.config, count=100)
        self.file = self.work / "chain.json"
        state = json.loads(self.file.read_text(encoding="utf-8")) if self.file.is_file() and not disk else {}
        self.number = state.get("number", 0)  # faults that struck
        self.pending = state.get("pending", [])  # those of them whose consequence the next start shows

    def start(self, run: Path, log: Path, fault: dict | None = None, more: tuple = ()) -> launching.Running:
        environment = {"HF_HOME": str(self.bench.work / "cache")}
        if fault:
            environment["FAULT"] = json.dumps(fault)
        given = ["--eval_fraction", "0.1", "--max_steps", self.steps, "--save_steps", 2, "--eval_steps", 3]
        given += ["--save_total_limit", 2, *self.extra, *more]
        return launching.start(
            self.bench.folder,
            self.strategy,
            *self.bench.arguments(run, self.processes),
            *given,
            log=log,
            processes=self.processes,
            wrapper=ROOT / "scripts" / "fault_wrapper.py" if fault else None,
            environment=environment,
        )

    @cached_property
    def expected(self) -> dict:
        """(step, name) -> loss or eval_loss of the unbroken run; made where it is not there yet."""
        if outcome(self.twin) != "done":
            shutil.rmtree(self.twin, ignore_errors=True)
            log = self.work / "unbroken.log"
            result = self.start(self.twin, log).wait(600)
            if result.rc:
                raise LaunchError(f"the unbroken run fails: {smoke.reason(result.output)}; log: {log}")
        return all_measured(self.twin)

    @property
    def unbroken_seconds(self) -> float:
        told = json.loads((self.twin / "run.json").read_text(encoding="utf-8"))
        return (self.twin / "run.json").stat().st_mtime - told["started"][0] + 8  # and what goes before the record

    def launch(self, fault: Fault | None, log: Path, timeout: float = 300) -> Launch:
        """One launch, struck by `fault` where it comes to its moment."""
        flag = self.work / "flag"
        for old in self.work.glob("flag.*"):
            old.unlink()
        told = None
        if fault:
            by_itself = fault.target if fault.target in FAILURES else None
            rank = self.processes - 1 if fault.target == "rank 1" or by_itself else 0
            told = {"moment": fault.moment, "nth": fault.nth, "delay": fault.delay, "action": by_itself}
            told |= {"rank": 0 if fault.moment in MAIN_ONLY else rank, "flag": str(flag)}
        running = self.start(self.run, log, told, ("--ddp_timeout", 30) if fault and fault.target == "hang" else ())
        launcher, family, looked, struck = psutil.Process(running.process.pid), {}, 0.0, None
        while running.process.poll() is None:
            time.sleep(0.01)
            now = time.monotonic()
            if fault and not struck:
                at_random = fault.moment == "random" and now - running.started > fault.delay
                if at_random or flag.with_suffix(".reached").exists():
                    family |= {child.pid: child for child in children(launcher)}
                    self.strike(fault, launcher, family)
                    flag.with_suffix(".struck").touch()
                    struck = time.monotonic()
            if now - looked > 0.5:
                looked = now
                family |= {child.pid: child for child in children(launcher)}
            if now - (struck or running.started) > timeout:
                kill(launcher)
        ended = time.monotonic()
        if fault and fault.target == "launcher":
            time.sleep(random.Random(log.name).uniform(0, 3))  # nothing tells the ranks: they train on for a while
            for child in family.values():
                kill(child)
        _, alive = psutil.wait_procs(list(family.values()), timeout=10)
        for child in alive:
            kill(child)
        psutil.wait_procs(alive, timeout=10)
        if struck and fault.target.startswith("damage"):
            newest = self.run / f"checkpoint-{max(whole_checkpoints(self.run))}"
            damage(newest, fault.target.partition(": ")[2])
        (self.run.parent / "ballast").unlink(missing_ok=True)
        output = log.read_text(encoding="utf-8", errors="replace")
        seconds = ended - (struck or running.started)
        return Launch(running.process.returncode, output, seconds, struck is not None, len(alive))

    def strike(self, fault: Fault, launcher: psutil.Process, family: dict) -> None:
        if fault.target == "launcher, SIGTERM":
            launcher.send_signal(signal.SIGTERM)
        elif fault.target == "launcher":
            kill(launcher)
        elif fault.target == "everything" or fault.target.startswith("damage"):
            for process in [launcher, *family.values()]:
                kill(process)
        elif fault.target == "full disk" and self.disk:
            fill(self.run.parent / "ballast")
        elif fault.target == "full disk":  # the next best: no process can write a file longer than this
            for process in family.values():
                process.rlimit(psutil.RLIMIT_FSIZE, (2**16, 2**16))
        elif fault.target.startswith("rank"):
            file = self.work / f"flag.pid-{self.processes - 1 if fault.target == 'rank 1' else 0}"
            rank = family.get(int(file.read_text() or 0)) if file.exists() else None
            for process in [rank] if rank else [launcher, *family.values()]:  # at random it may not have begun
                kill(process)

    def hit(self, fault: Fault) -> list[dict]:
        """Start, strike at the moment, and return the lines of the faults before, which this start has judged.

        The fault itself is judged by the next start; it is left out where the run was done before its moment came.
        """
        log = self.work / f"{self.number:02}.log"
        self.expected  # noqa: B018 the twin runs first
        before, seen = whole_checkpoints(self.run), len(launching.metrics(self.run))
        launch = self.launch(fault, log)
        judged = self.judge_pending(launch, before, seen)
        told, whole = outcome(self.run), whole_checkpoints(self.run)
        if launch.struck or launch.rc or told != "done":
            line = {"chain": self.name, "strategy": self.strategy, "recipe": self.recipe, "config": self.config}
            line |= {"moment": fault.moment, "target": fault.target, "outcome": told, "rc": launch.rc}
            line |= {"resumed": max(before, default=0), "whole": max(whole, default=0)}
            line |= {"seconds": round(launch.seconds, 1), "log": log.name}
            line["problems"] = self.problems(fault, launch, before, whole, told)
            self.pending.append(line)
            self.number += 1
        self.file.write_text(json.dumps({"number": self.number, "pending": self.pending}), encoding="utf-8")
        return judged

    def problems(self, fault: Fault, launch: Launch, before: set, whole: set, told: str | None) -> list[str]:
        """What is wrong right after a fault."""
        found = [] if launch.struck else [f"failed before its moment: {smoke.reason(launch.output)}"]
        if max(whole, default=0) < max(before, default=0) and not fault.target.startswith("damage"):
            found.append(f"whole checkpoints were {sorted(before)}, are {sorted(whole)}")
        if launch.seconds > (LIMIT + HANG if fault.target == "hang" else LIMIT):
            found.append(f"the launch ended {launch.seconds:.0f} s after the fault")
        if launch.left and fault.target != "launcher":
            found.append(f"{launch.left} process(es) outlived the launcher")
        if launch.rc == 0 and told != "done":
            found.append("the launcher returned 0")
        if fault.target == "launcher, SIGTERM" and fault.moment != "random" and told != "done":
            last = max((line["step"] for line in launching.metrics(self.run) if "loss" in line), default=0)
            if told != "preempted" or max(whole, default=0) < last:
                found.append(f"SIGTERM at step {last}: outcome {told}, newest whole checkpoint {max(whole, default=0)}")
        expected = {"raise": "a rank fails on purpose", "full disk": "is full" if self.disk else ""}.get(
            fault.target, ""
        )
        if expected not in (shown := error_shown(launch.output)):
            found.append(f"expected `{expected}` as the first error, shown was: {shown}")
        return found

    def judge_pending(self, launch: Launch, before: set, seen: int) -> list[dict]:
        """Judge the faults before this launch by what it shows; none where it was struck before it showed anything.

        before: steps of the whole checkpoints, and seen: lines of metrics.jsonl, when it started.
        """
        begin = f"resuming from {self.run}/checkpoint-{max(before)}" if before else "starting anew"
        finished = "This run is finished" in launch.output
        if launch.struck and not any(text in launch.output for text in ("resuming from", "starting anew")):
            return []
        problems = [] if begin in launch.output or finished else [f"the next start did not say `{begin}`"]
        problems += [
            f"{name} of step {step} is {value}, unbroken {self.expected.get((step, name))}"
            for line in launching.metrics(self.run)[seen if before else 0 :]  # a run that starts anew starts a new file
            for (step, name), value in measured(line)
            if value != self.expected.get((step, name))
        ][:1]
        if not launch.struck and launch.rc:
            problems.append(f"the next start fails: {smoke.reason(launch.output)}")
        judged, self.pending = self.pending, []
        for line in judged:
            line["problems"] += problems
        return judged

    def finish(self) -> tuple[list[dict], dict]:
        """The last start: (lines that it judged, the chain's own line: `problems` is empty where the end is as unbroken)."""
        self.expected  # noqa: B018
        before, seen = whole_checkpoints(self.run), len(launching.metrics(self.run))
        launch = self.launch(None, self.work / "last.log")
        judged, problems = self.judge_pending(launch, before, seen), []
        if launch.rc or outcome(self.run) != "done":
            problems.append(f"the last start fails: {smoke.reason(launch.output)}")
        elif (found := all_measured(self.run)) != self.expected:
            problems.append(
                f"not the losses of the unbroken run, such as {sorted(self.expected.items() - found.items())[:1]}"
            )
        elif odd := different_weights(self.run / "final", self.twin / "final"):
            problems.append(odd)
        return judged, {"chain": self.name, "ended": True, "steps": self.steps, "problems": problems}


def measured(line: dict) -> list:
    """((step, name), value) of the losses in a line of metrics.jsonl."""
    return [((line["step"], name), line[name]) for name in ("loss", "eval_loss") if name in line]


def all_measured(run: Path) -> dict:
    """(step, name) -> loss or eval_loss of a run; of a step that was trained twice, the later."""
    return {key: value for line in launching.metrics(run) for key, value in measured(line)}


def outcome(run: Path) -> str | None:
    """What run.json says. Raises LaunchError where it is damaged."""
    file = run / "run.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))["outcome"] if file.is_file() else None
    except (ValueError, KeyError) as error:
        raise LaunchError(f"{file} cannot be read: {error}") from error


def whole_checkpoints(run: Path) -> set[int]:
    """Steps of the checkpoints whose files are as their mark lists them, in size and digest; read without the keeper."""
    found = set()
    for mark in run.glob("checkpoint-*/complete.json"):
        try:
            told = json.loads(mark.read_text(encoding="utf-8"))
            sizes, digests = told["files"].items(), told.get("digests") or {}
        except (ValueError, KeyError, AttributeError, TypeError):  # damaged on purpose, so not whole
            continue
        if not all((file := mark.parent / name).is_file() and file.stat().st_size == size for name, size in sizes):
            continue
        if all(xxhash.xxh3_64((mark.parent / name).read_bytes()).hexdigest() == told for name, told in digests.items()):
            found.add(int(mark.parent.name.rpartition("-")[2]))
    return found


def different_weights(one: Path, other: Path) -> str | None:
    """How the tensors of two folders differ, in one sentence, or None where they are equal to the last bit."""
    a, b = (
        {k: v for file in sorted(p.glob("*.safetensors")) for k, v in load_file(file).items()} for p in (one, other)
    )
    if a.keys() != b.keys() or not a:
        return f"{one.name}/ holds {len(a)} tensors, that of the unbroken run {len(b)}"
    odd = [name for name in a if not torch.equal(a[name], b[name])]
    return (
        f"{len(odd)} of {len(a)} tensors of {one.name}/ differ from the unbroken run, such as {odd[0]}" if odd else None
    )


def error_shown(output: str) -> str:
    """The last line of the first traceback, or the first line of the program's own error."""
    shown = re.search(
        r"^(?:\[rank\d+\]: )?(error: (?!the run stopped).*|\w*(\.\w+)*(Error|Exception)\b.*)", output, re.MULTILINE
    )
    return shown[1][:200] if shown else "none"


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


class SmallDisk:
    """A small file system of its own, `folder`, until `close`. Needs root or user namespaces; gone with its holder."""

    def __init__(self, work: Path, size: str = DISK):
        mount = work / "mount"
        mount.mkdir(parents=True, exist_ok=True)
        self.holder = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--map-root-user",
                "sh",
                "-c",
                'mount -t tmpfs -o "size=$1" tmpfs "$0" && echo ok && cat',
                mount,
                size,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self.holder.stdout.readline() != "ok\n":
            raise LaunchError("no file system can be mounted here: root or user namespaces are needed")
        self.folder = Path(f"/proc/{self.holder.pid}/root{mount.resolve()}")

    def close(self) -> None:
        self.holder.communicate()


def fill(ballast: Path) -> None:
    """Leave its file system with room for nothing but a few small files."""
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**16))
        except OSError:
            pass
        file.truncate(max(0, file.tell() - 2**17))


def damage(checkpoint: Path, kind: str) -> str:
    """Damage a checkpoint as a broken disk or a copy that was cut off would; returns the name of the file."""
    files = sorted(
        (f for f in checkpoint.rglob("*") if f.is_file() and f.name != "complete.json"), key=lambda f: f.stat().st_size
    )
    file, mark, state = files[-1], checkpoint / "complete.json", checkpoint / "trainer_state.json"
    content = file.read_bytes()
    if kind == "empty":
        file.write_bytes(b"")
    elif kind == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif kind == "missing":
        file.unlink()
    elif kind == "longer":
        file.write_bytes(content + b"\0")
    elif kind == "mark cut":
        file = mark
        file.write_text(mark.read_text()[:-20])
    elif kind == "mark odd":
        file = mark
        file.write_text('{"files": ["model.safetensors"]}')
    elif kind == "state cut":
        file = state
        file.write_text(state.read_text()[:-20])
    elif kind == "flipped":
        middle = len(content) // 2
        file.write_bytes(
            content[:middle] + bytes(255 - byte for byte in content[middle : middle + 64]) + content[middle + 64 :]
        )
    return str(file.relative_to(checkpoint))


def plan(strategy: str) -> dict[str, list[Fault]]:
    """The faults of a strategy's chains, by the chain's name: moments are dealt out, targets go round."""
    place = list(SETTINGS).index(strategy)
    draw = random.Random(strategy)
    body = [
        Fault(moment, TARGETS[(place + number) % len(TARGETS)], nth, _delay(moment, draw))
        for number, (moment, nth) in enumerate(BODY)
    ]
    failures = [Fault("step", action, 5) for action in FAILURES if action != "hang" or strategy != "single"]
    damages = [Fault("step", f"damage: {DAMAGES[(3 * place + n) % len(DAMAGES)]}", 9) for n in range(3)]
    chains = {}
    for number, name in enumerate(("packed", "lora")):
        moment = ENDINGS[(2 * place + number) % len(ENDINGS)]
        end = Fault(moment, TARGETS[(place + 2 + 3 * number) % len(TARGETS)], 1, _delay(moment, draw))
        faults = body[number::2] + failures[number::2] + damages[number::2] + [end]
        if strategy == "single":
            faults = [replace(fault, target=fault.target.replace("rank 1", "rank 0")) for fault in faults]
        chains[f"{strategy} {name}"] = faults
    return chains


def _delay(moment: str, draw: random.Random) -> float:
    """Seconds into a save; as a share of the unbroken run, for a strike at random."""
    return {"save": draw.uniform(0.01, 0.3), "final": draw.uniform(0.005, 0.1), "random": draw.uniform(0.3, 1)}.get(
        moment, 0
    )


def campaign(work: Path, strategies: list[str], disk: bool) -> None:
    """Run the chains that are not ended yet; a line for each fault as soon as it is judged."""
    lines_file = work / "faults.jsonl"
    work.mkdir(parents=True, exist_ok=True)
    lines_file.touch()

    def tell(*lines: dict) -> None:
        with open(lines_file, "a", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line) + "\n")
                what = f"{line['moment']}, {line['target']}" if "moment" in line else "end of the chain"
                print(
                    f"{'LOST' if line['problems'] else 'ok  '} {line['chain']}: {what}", *line["problems"], flush=True
                )

    def ended() -> set[str]:
        return {line["chain"] for line in read_lines(lines_file) if line.get("ended")}

    for strategy in strategies:
        chains = list(zip(plan(strategy).items(), SETTINGS[strategy], strict=True))
        for (name, faults), setting in track(chains, f"{strategy}: chains"):
            if name not in ended():
                chain = Chain(name, strategy, setting, work / name.replace(" ", "-"))
                while chain.number < len(faults) and outcome(chain.run) != "done":
                    fault = faults[chain.number]
                    if fault.moment == "random":
                        chain.expected  # noqa: B018
                        fault = replace(fault, delay=fault.delay * chain.unbroken_seconds)
                    tell(*chain.hit(fault))
                judged, end = chain.finish()
                tell(*judged, end)
                if not end["problems"]:
                    shutil.rmtree(chain.run)
        name = f"{strategy} disk"
        if disk and name not in ended():
            small = SmallDisk(work / "disk")
            try:
                chain = Chain(name, strategy, SETTINGS[strategy][0], work / name.replace(" ", "-"), 12, small)
                for fault in (
                    Fault("save", "full disk", 3),
                    Fault("files", "full disk", 2),
                    Fault("final", "full disk"),
                ):
                    tell(*chain.hit(fault))
                judged, end = chain.finish()
                tell(*judged, end)
            finally:
                small.close()
        write(read_lines(lines_file))


def read_lines(file: Path) -> list[dict]:
    """The whole lines of a file of JSON lines."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def write(lines: list[dict], file: Path = FILE) -> None:
    """docs/faults.json: the faults of all chains that have ended, each with whether it was survived."""
    ends = {line["chain"]: line for line in lines if line.get("ended")}
    faults = [
        {key: value for key, value in line.items() if key != "log"}
        | {"survived": not line["problems"] and not ends[line["chain"]]["problems"]}
        for line in lines
        if "moment" in line and line["chain"] in ends
    ]
    told = {"date": time.strftime("%Y-%m-%d"), **strategy_table.surroundings(), "chains": list(ends.values())}
    file.write_text(json.dumps(told | {"faults": faults}, indent=1) + "\n", encoding="utf-8")


def markdown(told: dict) -> str:
    """The table: what struck and when, by strategy, and how many faults were tried, survived and lost."""
    faults = [fault | {"row": _row(fault)} for fault in told["faults"]]
    strategies = [name for name in SETTINGS if any(fault["strategy"] == name for fault in faults)]
    lines = [
        f"| struck | {' | '.join(strategies)} | tried | survived | lost |",
        f"|---|{'---|' * (len(strategies) + 3)}",
    ]
    rows = [row for row in ROWS.values() if any(fault["row"] == row for fault in faults)]
    for row in [*rows, "all"]:
        of_row = [fault for fault in faults if row in (fault["row"], "all")]
        cells = [_count([fault for fault in of_row if fault["strategy"] == name]) for name in strategies]
        lost = sum(not fault["survived"] for fault in of_row)
        lines.append(f"| {row} | {' | '.join(cells)} | {len(of_row)} | {len(of_row) - lost} | {lost} |")
    kills = [fault for fault in faults if fault["target"] in TARGETS]
    by_target = ", ".join(
        f"{len([fault for fault in kills if fault['target'] == target])} {said}" for target, said in SAID.items()
    )
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    note = (
        f"Survived / tried. {len(kills)} kills: {by_target}. {len(told['chains'])} chains of restarts, each compared with "
        f"an unbroken run, to the last bit. Tiny models, {told['hardware']}; {told['date']}; {versions}."
    )
    return "\n".join([*lines, "", note])


def _row(fault: dict) -> str:
    target = fault["target"]
    return ROWS["damage" if target.startswith("damage") else target if target in ROWS else fault["moment"]]


def _count(faults: list[dict]) -> str:
    return f"{sum(fault['survived'] for fault in faults)}/{len(faults)}" if faults else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the campaign; some hundred MB")
    parser.add_argument("--strategy", action="append", choices=list(SETTINGS), help="default: all")
    parser.add_argument("--no-disk", action="store_true", help="where no file system can be mounted")
    asked = parser.parse_args()
    try:
        campaign(asked.work, asked.strategy or list(SETTINGS), not asked.no_disk)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(any(line["problems"] for line in read_lines(asked.work / "faults.jsonl")))


if __name__ == "__main__":
    sys.exit(main())
