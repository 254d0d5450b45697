"""Tiny-model CI for any recipe folder, a copied one too: train, kill, resume, reload, under real strategies on the CPU.

    python scripts/smoke.py recipes/llama-3.2-1b                      # every strategy that the recipe fits
    python scripts/smoke.py ../my-recipe --strategy fsdp --strategy zero3
    python scripts/smoke.py recipes/gpt-oss-20b --config qlora --strategy ddp --precision shipped
    python scripts/smoke.py recipes/gpt-oss-120b --strategy fsdp --gpus 2          # the same on real GPUs, under NCCL

One line a strategy, OK or FAIL; exit code 1 when one fails. A strategy passes when, with two processes,

- a run that is killed in the middle (by SIGTERM; on GPUs its last rank by SIGKILL) continues from its checkpoint by the
  same command and finishes;
- the checkpoint shows that state was sharded as the strategy says;
- the loss of every step, accumulation and uneven answers included, is that of one unbroken process with the same
  global batch: to 1e-4 (relative) in fp32, to 2e-2 in the recipe's own precision;
- final/ loads in a fresh process with transformers or peft alone and gives the evaluation loss of the last step, and
  the logits of that one process.

There is no fp32 with a 4-bit base: TRL trains its adapter in bf16. Such a configuration runs in its own precision, and
its adapter is reloaded on the base as it is published.

The recipe is run as it lies there, from the launch files two levels above it, in the working directory, or else of the
cookbook. Changed for the test, by flags: model, rows, batch, steps and learning rate; dropout, router loss and packing
are off, because they depend on how rows are spread over processes. Needs no GPU and no network. DeepSpeed compiles its
CPU optimizer once, which takes a minute or two.
"""

import argparse
import ast
import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import launching
import tiny_model
from launching import LaunchError
from torch.distributed.checkpoint import FileSystemReader

STEPS, SAVE_EVERY, STOP_AT = 9, 3, 3
TOLERANCE = {"fp32": 1e-4, "shipped": 2e-2}
LOGITS_TOLERANCE = {"fp32": 1e-2, "shipped": 0.5}  # as a share of what training changed


@dataclass
class Cell:
    """What was measured of one recipe under one strategy. `error` is None where everything holds."""

    recipe: str
    config: str
    strategy: str
    precision: str
    processes: int
    loss_deviation: float | None = None  # largest of all steps, relative to one process
    stopped_at: int | None = None  # step of the checkpoint that the run continued from
    eval_deviation: float | None = None  # reloaded final/ against the last evaluation, relative
    logits_error: float | None = None  # reloaded final/ against one process, as a share of what training changed
    peak_memory: int | None = None  # bytes of the largest process
    seconds: float = 0.0
    error: str | None = None


class Bench:
    """One recipe with one configuration and precision: its tiny model, its rows, and the curve of one process."""

    def __init__(
        self,
        folder: str | Path,
        work: Path,
        config: str = "config",
        precision: str = "fp32",
        rows=None,
        gpus: int = 0,
        evaluates: bool = True,
    ):
        """folder: the recipe. work: a new folder, or one that this has filled. rows: a .jsonl file of 24 rows or more.

        gpus: run on that many GPUs, one process each, in place of two CPU processes. evaluates: false for full weights
        under FSDP2 of torch before 2.13, see guard.strategy_problem; nothing is held out then.
        """
        self.folder, self.work, self.config = Path(folder), Path(work), config
        self.gpus, self.evaluates = gpus, evaluates
        self.settings = launching.read_config(folder, config)
        self.precision = "shipped" if self.settings.get("load_in_4bit") else precision
        self.family = launching.model_family(folder, config)
        self.work.mkdir(parents=True, exist_ok=True)
        self.model, self.rows = self.work / "model", self.work / "rows.jsonl"
        if rows:
            lines = [line for line in Path(rows).read_text(encoding="utf-8").splitlines() if line.strip()][:24]
            if len(lines) < 24:
                raise LaunchError(f"{rows} holds {len(lines)} rows; 24 are needed")
            self.rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
        elif not self.rows.is_file():
            launching.tiny_rows(self.rows, folder, config, 24 * max(1, gpus // 2))
        if not self.model.is_dir():
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # others' notes
                tiny_model.write_tiny_model(self.family, self.model)

    def arguments(self, run: Path, processes: int) -> list[str]:
        """What follows train.py; the global batch is the same for one process and for many: 4, or two for each GPU."""
        given = {
            "model_name_or_path": self.model,
            "dataset_name": self.rows,
            "dataset_train_split": "train",
            "output_dir": run,
            "eval_fraction": 1 / 6,  # 4 of 24 rows: epochs of 5 steps, so that the run crosses one
            "max_steps": STEPS,
            "save_strategy": "steps",
            "save_steps": SAVE_EVERY,
            "eval_strategy": "steps" if self.evaluates else "no",
            "eval_steps": SAVE_EVERY,
            "logging_steps": 1,
            "per_device_train_batch_size": max(2, self.gpus) // processes,
            "gradient_accumulation_steps": 2,
            "per_device_eval_batch_size": 1,  # the reported loss is a mean over batches
            "learning_rate": 1e-3,
            "warmup_steps": 1,
            "packing": "false",
        }
        if self.family == "gpt-oss":
            given["router_aux_loss_coef"] = 0.0
        if self.settings.get("use_peft"):
            given["lora_dropout"] = 0.0
        if self.settings.get("group_by"):
            given["group_by"] = "id"
        if not self.settings.get("use_peft"):  # what shards keeps fp32 masters of bf16 weights; one process does not
            given["dtype"] = "float32"
        if self.precision == "fp32":
            given |= {"bf16": "false", "dtype": "float32"}
        words = ["--config", self.config]
        for name, value in given.items():
            words += [f"--{name}", str(value)]
        return words

    def launch(self, strategy: str, run: Path, processes: int, log: Path, **options) -> launching.Result:
        """One launch of this bench; its caches lie in the work folder."""
        options["environment"] = {"HF_HOME": str(self.work / "cache")}
        options["gpu"] = bool(self.gpus)
        arguments = self.arguments(run, processes)
        if self.settings.get("load_in_4bit") and strategy.startswith("zero3") and not self.gpus:
            options.setdefault("wrapper", launching.SCRIPTS / "fsdp_on_cpu.py")  # for 4-bit shards on a CPU: see there
        return launching.launch(self.folder, strategy, *arguments, log=log, processes=processes, **options)

    @cached_property
    def reference(self) -> list[float]:
        """Loss of each step of one unbroken process. Writes record.pt for the reload."""
        run, log = self.work / "one-process", self.work / "one-process.log"
        record = run / "run.json"
        if record.is_file() and json.loads(record.read_text(encoding="utf-8"))["outcome"] == "done":
            return launching.losses(run)
        progress("one process, for comparison")
        result = self.launch("single", run, 1, log, wrapper=launching.SCRIPTS / "record_run.py")
        if result.rc:
            raise LaunchError(f"one process alone fails: {reason(result.output)}; log: {log}")
        return launching.losses(run)

    def cell(self, strategy: str, start_again: bool = False) -> Cell:
        """Run one strategy through all of it. start_again: also prove that a third start finds the run finished."""
        processes = 1 if strategy == "single" else self.gpus or 2
        cell = Cell(self.folder.resolve().name, self.config, strategy, self.precision, processes)
        log = self.work / f"{strategy}.log"
        try:
            expected, begun = self.reference, time.monotonic()
            try:
                self._measure(cell, expected, log, start_again)
            finally:
                cell.seconds = round(time.monotonic() - begun, 1)
        except LaunchError as error:
            cell.error = str(error)
        return cell

    def _measure(self, cell: Cell, expected: list[float], log: Path, start_again: bool) -> None:
        run, strategy, processes = self.work / cell.strategy, cell.strategy, cell.processes

        def stop():
            if self.gpus:  # a killed rank saves nothing
                return (run / f"checkpoint-{STOP_AT}" / "complete.json").is_file()
            return any("loss" in line and line["step"] >= STOP_AT for line in launching.metrics(run))

        for _ in range(3):  # on a busy machine the run may be done before the signal arrives: then once more
            shutil.rmtree(run, ignore_errors=True)
            progress(f"{strategy}: start, and a kill at step {STOP_AT}")
            # As a person starts it; in the tests, later starts fork from a process that has the libraries.
            killed = processes - 1 if self.gpus else None
            first = self.launch(strategy, run, processes, log, stop_when=stop, kill_rank=killed, fresh=True)
            stopped = max((line["step"] for line in launching.metrics(run)), default=0)
            if stopped == 0:
                raise LaunchError(f"the first start fails: {reason(first.output)}; log: {log}")
            if stopped < STEPS:
                break
        else:
            raise LaunchError(f"could not be stopped before step {STEPS}; log: {log}")
        if not (found := saved_steps(run)):
            raise LaunchError(f"killed at step {stopped}, it left no checkpoint; log: {log}")
        cell.stopped_at = found[-1]
        # Where transformers shards while it loads, the guard has seen the shards, and the adapter is whole on each rank.
        native = (self.settings.get("model_init_kwargs") or {}).get("distributed_config")
        kind = "ddp" if native else strategy
        if problem := sharding_problem(run / f"checkpoint-{found[-1]}", kind, processes):
            raise LaunchError(problem)

        progress(f"{strategy}: the same command again")
        log = log.with_suffix(".2.log")
        second = self.launch(strategy, run, processes, log)
        cell.peak_memory = max(first.peak_memory, second.peak_memory)
        if second.rc:
            raise LaunchError(f"the second start fails: {reason(second.output)}; log: {log}")
        again = [line["step"] for line in launching.metrics(run) if "loss" in line]
        if again.count(1) > 1:
            raise LaunchError(f"the second start began anew instead of continuing from step {found[-1]}; log: {log}")
        curve = launching.losses(run)
        if len(curve) != STEPS:
            raise LaunchError(f"{len(curve)} steps were trained, expected {STEPS}; log: {log}")
        cell.loss_deviation = max(deviation(a, b) for a, b in zip(curve, expected, strict=True))
        if not cell.loss_deviation <= TOLERANCE[self.precision]:
            raise LaunchError(f"losses {cell.loss_deviation:.1e} (relative) away from those of one process; log: {log}")

        self._reload(cell, run)
        if start_again:
            progress(f"{strategy}: a third start")
            log = log.with_suffix(".3.log")
            lines, third = len(launching.metrics(run)), self.launch(strategy, run, processes, log)
            if third.rc or "This run is finished" not in third.output or lines != len(launching.metrics(run)):
                raise LaunchError(f"a third start of the finished run does not say so and end; log: {log}")

    def _reload(self, cell: Cell, run: Path) -> None:
        progress(f"{cell.strategy}: final/ in a fresh process")
        log, final = self.work / f"{cell.strategy}.reload.log", run / "final"
        record = self.work / "one-process" / "record.pt"
        command = [sys.executable, str(launching.SCRIPTS / "reload_final.py"), str(record), str(self.model), str(final)]
        done = subprocess.run(command, capture_output=True, text=True)
        log.write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode:
            raise LaunchError(f"final/ does not load: {reason(done.stderr)}; log: {log}")
        found = json.loads(done.stdout.splitlines()[-1])[str(final)]
        cell.logits_error = found["logits_error"]
        if found["learned"] == 0:
            raise LaunchError(f"final/ gives the logits of the untrained model; log: {log}")
        if self.evaluates:
            told = [line["eval_loss"] for line in launching.metrics(run) if "eval_loss" in line][-1]
            cell.eval_deviation = deviation(found["eval_loss"], told)
            if not cell.eval_deviation <= TOLERANCE[self.precision]:
                raise LaunchError(f"final/ evaluates to {found['eval_loss']:.4f}, training said {told:.4f}; log: {log}")
        if not cell.logits_error <= LOGITS_TOLERANCE[self.precision]:
            raise LaunchError(f"the logits of final/ are {cell.logits_error:.1e} off those of one process; log: {log}")


def deviation(found: float, expected: float) -> float:
    """Relative difference."""
    return abs(found - expected) / abs(expected)


def saved_steps(run: Path) -> list[int]:
    """The steps of the checkpoints in a run folder, in order."""
    return sorted(int(path.name.rpartition("-")[2]) for path in run.glob("checkpoint-*"))


def sharding_problem(checkpoint: Path, strategy: str, processes: int) -> str | None:
    """Why a checkpoint is not what `strategy` over `processes` writes, judged by its files alone, or None."""
    ranks = range(processes)
    if strategy == "fsdp":
        parts = sorted(checkpoint.glob("pytorch_model_fsdp*"))
        if not parts:
            return f"{checkpoint} holds no FSDP shards: what ran was no FSDP"
        tensors = FileSystemReader(parts[0]).read_metadata().state_dict_metadata.values()
        split = [tensor for tensor in tensors if len(getattr(tensor, "chunks", ())) == processes]
        return None if split or processes == 1 else f"{parts[0]}: no tensor is split over {processes} processes"
    if strategy.startswith("zero"):
        wanted = [f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in ranks]
        if strategy.startswith("zero3"):
            wanted += [f"*zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in ranks]
        missing = [name for name in wanted if not list(checkpoint.glob(f"global_step*/{name}"))]
        return f"{checkpoint} lacks {', '.join(missing)}: the state was not sharded" if missing else None
    states = {f"rng_state_{rank}.pth" for rank in ranks} if processes > 1 else {"rng_state.pth"}
    found = {path.name for path in checkpoint.glob("rng_state*.pth")}
    return None if found == states else f"{checkpoint} was written by other processes: {sorted(found)}"


def fitting(folder: str | Path, config: str = "config") -> tuple[str, ...]:
    """The strategies that a recipe accepts for a configuration: of those it hands to guard.check_launch, or of all."""
    tree, found = ast.parse((Path(folder) / "train.py").read_text(encoding="utf-8")), launching.STRATEGIES
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "guard.check_launch":
            found = tuple(ast.literal_eval(call.args[2]))
    settings = launching.read_config(folder, config)
    if (settings.get("model_init_kwargs") or {}).get("distributed_config"):
        return tuple(name for name in found if not name.startswith("zero3"))  # transformers shards, not DeepSpeed
    if "8bit" in settings.get("optim", ""):  # its shards are strange to bitsandbytes: refused
        found = tuple(name for name in found if name != "fsdp")
    if settings.get("load_in_4bit") and launching.model_family(folder, config) == "gpt-oss":  # not sharded: refused
        return tuple(name for name in found if name != "fsdp" and not name.startswith("zero3"))
    return found


def reason(output: str) -> str:
    """The paragraph that says what went wrong in a program's output, on one line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for sign in (
        r"(\[rank\d+\]: )?error( \(rank \d+\))?:",
        r"terminate called|Fatal Python error",
        r"(\w+\.)*\w*Error\b",
        "",
    ):
        if told := [line for line in lines if re.match(sign, line)]:
            return told[0][:300]
    return "it printed nothing"


def progress(text: str) -> None:
    """What goes on, for a person at a terminal."""
    if sys.stderr.isatty():
        print(f"     {text} ...", file=sys.stderr, flush=True)


def line(cell: Cell) -> str:
    """One cell as a line of plain text."""
    head = f"{'FAIL' if cell.error else 'OK  '} {cell.strategy:<13} {cell.seconds:>5.0f} s  "
    if cell.error:
        return head + cell.error
    return head + (
        f"resumed from step {cell.stopped_at}; losses within {cell.loss_deviation:.0e} of one process; "
        f"final/ reloads, eval loss within {cell.eval_deviation:.0e}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="a recipe folder: train.py, its files, config.yaml")
    parser.add_argument("--strategy", action="append", choices=[*launching.STRATEGIES, "all"], help="default: all")
    parser.add_argument("--config", default="config", help="another configuration of the recipe, by its bare name")
    parser.add_argument("--precision", choices=list(TOLERANCE), default="fp32", help="shipped: the recipe's own")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="on N GPUs, in place of two CPU processes")
    parser.add_argument("--rows", type=Path, help="24 or more own rows (.jsonl), for a recipe that reads others")
    parser.add_argument("--keep", action="store_true", help="keep the runs and their logs, and say where")
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    arguments = parser.parse_args()
    asked = arguments.strategy or ["all"]
    work = Path(tempfile.mkdtemp(prefix="smoke-"))
    cells, keep = [], arguments.keep
    try:
        asked_of = (arguments.config, arguments.precision, arguments.rows, arguments.gpus)
        bench = Bench(arguments.folder, work / "bench", *asked_of)
        for strategy in fitting(arguments.folder, arguments.config) if "all" in asked else dict.fromkeys(asked):
            cells.append(bench.cell(strategy, start_again=not cells))
            print(line(cells[-1]), flush=True)
    except LaunchError as error:
        print(f"FAIL {arguments.folder}: {error}")
        return 1
    finally:
        keep = keep or any(cell.error for cell in cells)
        if keep:
            print(f"kept: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1), encoding="utf-8")
    return int(any(cell.error for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
