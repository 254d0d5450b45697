"""What a run tells: lines for a person, a bar on a terminal, and the trackers of `report_to`. Version 1.

The same file, to the byte, lies in every recipe folder; `scripts/sync_guard.py FOLDER` brings a copy up to date.

Only rank 0 prints. On a terminal the libraries show their bars and training has one of rich; anywhere else every line of
the log is whole and plain.
"""

import atexit
import math
import os
import statistics
import sys
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from queue import SimpleQueue

import datasets
import huggingface_hub
import psutil
import transformers
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK

from ranks import RUN, environment, is_main, record, say

PATIENCE = 60  # seconds that a tracker may take for one call: rank 0 waits, and all others for rank 0
SHOWN = {  # what a line shows of a log, in this order: key -> how
    "loss": "loss {:.4g}",
    "eval_loss": "eval_loss {:.4g}",
    "grad_norm": "grad_norm {:.3g}",
    "learning_rate": "lr {:.3g}",
    "mean_token_accuracy": "accuracy {:.3f}",
    "eval_mean_token_accuracy": "accuracy {:.3f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "peak_memory_gib": "{:.1f} GiB",
    "eval_runtime": "in {:.1f} s",
}


def mark(name: str) -> None:
    """Keep when this start of the run reached a point, in seconds since its process began."""
    begun = psutil.Process().create_time()
    RUN.setdefault("marks", {}).setdefault(name, round(time.time() - begun, 2))


def quiet_libraries() -> None:
    """Without a terminal, and on all ranks but the first, the libraries draw no bars: a log keeps every redraw."""
    if not (is_main() and sys.stderr.isatty()):
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
        huggingface_hub.utils.disable_progress_bars()


# ----------------------------------------------------------------------------------------------------- the trackers


def trackers_problem(training_args) -> str | None:
    """A name in `report_to` that no tracker has. The others are kept in RUN: the trainer makes none by itself."""
    RUN["trackers"], training_args.report_to = training_args.report_to or [], []
    unknown = [name for name in RUN["trackers"] if name not in INTEGRATION_TO_CALLBACK]
    if not unknown:
        return None
    return (
        f"report_to: there is no tracker {unknown[0]!r}; known are none, {', '.join(sorted(INTEGRATION_TO_CALLBACK))}."
    )


class Tracker(TrainerCallback):
    """A tracker that can neither stop a run nor hold it up for long: its calls run, in order, in a thread of its own.

    An error is a warning. After three errors in a row, a call that takes longer than PATIENCE, or where it cannot even be
    made (its package is missing), it is switched off. make: called without arguments, returns the TrainerCallback.
    """

    def __init__(self, name: str, make):
        self.name, self.callback, self.failures, self.off = name, None, 0, False
        self.calls = SimpleQueue()
        threading.Thread(target=self.work, daemon=True, name=name).start()
        if self.ask("start", lambda: setattr(self, "callback", make())) and not self.off:
            for event in (event for event in dir(TrainerCallback) if event.startswith("on_")):
                if getattr(type(self.callback), event) is not getattr(TrainerCallback, event):
                    setattr(self, event, self.calling(event))
        elif not self.off:
            self.switch_off("is not used")

    def work(self) -> None:
        while True:
            call, done, errors = self.calls.get()
            try:
                call()
            except Exception as error:
                errors.append(error)
            done.set()

    def calling(self, event: str):
        """The callback's own method of that name, asked through the thread."""

        def call(*args, **kwargs) -> None:
            if not self.off and not self.ask(event, lambda: getattr(self.callback, event)(*args, **kwargs)):
                self.failures += 1
                if self.failures == 3:
                    self.switch_off("is switched off after three errors in a row")

        return call

    def ask(self, event: str, call) -> bool:
        """Whether the call came back without an error, within PATIENCE."""
        done, errors = threading.Event(), []
        self.calls.put((call, done, errors))
        if not done.wait(PATIENCE):
            say(f"warning: {self.name}.{event} has not answered for {PATIENCE} s.")
            self.switch_off("is switched off")
            leave_at_end(1)
            return True
        if errors:
            say(f"warning: {self.name}.{event} failed, training goes on: {errors[0]!r:.300}")
            return False
        self.failures = 0
        return True

    def switch_off(self, how: str) -> None:
        self.off = True
        say(f"warning: the tracker {self.name} {how}; metrics.jsonl in the run folder has all that it would get.")


def leave_at_end(code: int) -> None:
    """The process ends without what the libraries do at its end, where a tracker that hangs would be waited for."""
    RUN["leaves"] = True
    atexit.register(lambda: (sys.stdout.flush(), sys.stderr.flush(), os._exit(code)))


# --------------------------------------------------------------------------------------------------------- the lines


class RunLog(TrainerCallback):
    """The lines of a training, in place of the trainer's own, and its bar. pace: the Pace of speed.py."""

    def __init__(self, pace):
        self.pace, self.bar, self.told = pace, None, False

    def on_train_begin(self, args, state, control, **_):
        mark("training")
        if not (is_main() and sys.stdout.isatty()) or args.disable_tqdm:
            return
        try:
            from rich import progress
        except ImportError:  # the lines say the same
            return
        columns = [progress.TextColumn("training"), progress.BarColumn(), progress.MofNCompleteColumn()]
        columns += [progress.TimeElapsedColumn(), progress.TextColumn("to go"), progress.TimeRemainingColumn()]
        self.bar = progress.Progress(*columns, auto_refresh=False)  # no thread beside the data loader's forks
        self.bar.start()
        self.bar.console.show_cursor(True)  # a run that is killed cannot give it back
        self.task = self.bar.add_task("", total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args, state, control, **_):
        if "first step" not in RUN["marks"]:
            mark("first step")
            record(startup_seconds=RUN["marks"])
        if self.bar:
            self.bar.update(self.task, completed=state.global_step, refresh=True)

    def on_log(self, args, state, control, logs=None, **_):
        if not is_main() or not {"loss", "eval_loss"} & logs.keys():
            return
        shown = [how.format(logs[key]) for key, how in SHOWN.items() if isinstance(logs.get(key), int | float)]
        say("  ".join([f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}", *shown]))
        left = state.max_steps - state.global_step
        if not self.told and len(self.pace.seconds) >= 3 and left > 0:
            self.told = True
            seconds = timedelta(seconds=round(left * statistics.median(self.pace.seconds)))
            until = f"{datetime.now() + seconds:%Y-%m-%d %H:%M}"
            say(f"about {seconds} of steps to go, until {until}; evaluations and saves come on top")

    def on_train_end(self, args, state, control, **_):
        if self.bar:
            self.bar.stop()


def attach(trainer, pace) -> None:
    """Give a trainer its pace, trackers and lines, in this order: a log has the pace when the others read it."""
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(pace)
    for name in RUN["trackers"]:
        kind = INTEGRATION_TO_CALLBACK[name]
        tracker = Tracker(kind.__name__.removesuffix("Callback"), kind)
        trainer.add_callback(tracker)
        tracker.on_init_end(trainer.args, trainer.state, trainer.control)  # the trainer has done so with its own
    trainer.args.report_to = RUN["trackers"]
    trainer.add_callback(RunLog(pace))


def plan(args, state, keep: int | None) -> None:
    """The first lines of a training: how it is spread, what it will do, what it needs, what it leaves."""
    world, steps = environment("WORLD_SIZE", 1), state.max_steps
    cpu = " on CPU (gloo), from the same launch file" if args.device.type == "cpu" else ""
    batch = args.train_batch_size * args.gradient_accumulation_steps * world
    say(
        f"strategy {RUN['strategy']} over {world} process(es){cpu}; global batch {batch} = "
        f"{args.train_batch_size} x {args.gradient_accumulation_steps} x {world}; {steps} steps, of which "
        f"{args.get_warmup_steps(steps)} warm-up"
    )
    tokens = RUN["tokens_per_row"] * batch
    place = "process" if args.device.type == "cpu" else "GPU"
    place = "host memory for each process" if RUN["strategy"] == "zero3_offload" else f"a {place}"
    say(
        f"about {tokens:,.0f} tokens a step, {tokens * (steps - state.global_step):,.0f} in "
        f"{steps - state.global_step} steps to go; weights, gradients and optimizer take about "
        f"{RUN['state_bytes'] / 2**30:.2f} GiB {place}, activations come on top"
    )
    saves = {"steps": f"every {state.save_steps:g} steps", "epoch": "after each epoch"}.get(args.save_strategy.value)
    kept = f" (the newest {keep} kept)" if keep else ""
    saved = f"a checkpoint {saves}{kept}, " if saves else "no checkpoint, "
    say(f"into {RUN['folder']}: metrics.jsonl, {saved}final/")


def outcome(trainer, final: str) -> None:
    """The last lines of a run: what came out, where it is, and what to do with it."""
    if RUN.get("leaves"):
        leave_at_end(0)  # registered last, so called first
    history, pace = trainer.state.log_history, RUN["pace"]
    told = [f"done: {final} after {trainer.state.global_step} steps"]
    for key in ("loss", "eval_loss"):
        values = [line[key] for line in history if key in line]
        told += [f"{key} {values[-1]:.4g}"] if values and math.isfinite(values[-1]) else []
    if pace.rates:
        told.append(f"{statistics.median(pace.rates):,.0f} tokens/s")
    mark("done")
    took, first = RUN["marks"]["done"], RUN["marks"].get("first step", 0)
    told.append(f"this start took {timedelta(seconds=round(took))}, {first:.0f} s of it up to its first step")
    say("; ".join(told))

    recipe, run = Path(os.path.relpath(Path(RUN["script"]).parent)), RUN["folder"]
    scripts = next((path for path in (Path("scripts"), recipe / ".." / ".." / "scripts") if path.is_dir()), Path("-"))
    score = f"{recipe / 'score.py'} {run}"
    if not (recipe / "score.py").is_file():
        score = f"{scripts / 'chat_scores.py'} {run}" + (" --use_cpu true" if trainer.args.use_cpu else "")
    commands = [score, f"{scripts / 'report.py'} {run}", f"{scripts / 'export.py'} {run} DEST"]
    for command in (f"python {command}" for command in commands if os.path.isfile(command.split()[0])):
        say(f"next: {command}")
