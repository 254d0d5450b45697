"""Runs a recipe's train.py and stops at one named moment of it, for fault_campaign.py, which then strikes.

    FAULT='{"moment": "files", "rank": 1, "nth": 2, "flag": "/run/flag"}' accelerate launch ... scripts/fault_wrapper.py \
        recipes/llama-3.2-1b/train.py --use_cpu true ...

At the `nth` time that rank `rank` comes to `moment`, it writes `flag`.reached and waits for `flag`.struck: the kill comes
from outside, as in life, and still at an exact place. Every rank writes its process id into `flag`.pid-<rank>. `delay`:
seconds after which it is reported instead, while the rank goes on. `action`: what the rank does by itself instead of
waiting: "raise" an error, "exit" with code 3 and no word, "hang".

    load         the model has its weights, the optimizer has not
    step         in a step, after the backward pass of a micro-batch
    evaluation   in an evaluation, after a batch
    save         a checkpoint save begins
    files        in a save, between the weights and the optimizer
    torn         in a save, trainer_state.json is half written (rank 0)
    mark         between the trainer's save and the completeness mark
    rename       the mark is written and has not got its name (rank 0)
    rotation     an old checkpoint is half removed (rank 0)
    final        the save of the result begins
    final_files  the result is written and not proven
    done         run.json does not say `done` yet (rank 0)

Without FAULT it runs train.py as it is, and FSDP2 for real as fsdp_on_cpu.py does.
"""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import fsdp_on_cpu
from accelerate.state import AcceleratorState
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler, TrainerState

FAULT = json.loads(os.environ.get("FAULT", "null"))
RANK, WAIT = int(os.environ.get("RANK", 0)), 60.0
passed = 0


def moment(name: str) -> None:
    """Report that this rank comes to the moment `name`, if it is the one asked for, and wait for the strike."""
    global passed
    if not FAULT or FAULT["moment"] != name or FAULT["rank"] != RANK:
        return
    passed += 1
    if passed != FAULT["nth"]:
        return
    if delay := FAULT.get("delay"):
        threading.Timer(delay, reach).start()
        return
    reach()
    match FAULT.get("action"):
        case "raise":
            raise RuntimeError("a rank fails on purpose")
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(3600)
    begun = time.monotonic()
    while not Path(FAULT["flag"] + ".struck").exists() and time.monotonic() - begun < WAIT:
        time.sleep(0.01)
    time.sleep(0.3)  # a signal to the launcher is passed on to the ranks


def reach() -> None:
    Path(FAULT["flag"] + ".reached").touch()


def before(owner, method: str, name: str, when=lambda *args, **kwargs: True) -> None:
    """Make `owner.method` come to the moment `name` before it runs."""
    original = getattr(owner, method)

    def replaced(*args, **kwargs):
        if when(*args, **kwargs):
            moment(name)
        return original(*args, **kwargs)

    setattr(owner, method, replaced)


def after(owner, method: str, name: str, when=lambda *args, **kwargs: True) -> None:
    """Make `owner.method` come to the moment `name` when it has run."""
    original = getattr(owner, method)

    def replaced(*args, **kwargs):
        result = original(*args, **kwargs)
        if when(*args, **kwargs):
            moment(name)
        return result

    setattr(owner, method, replaced)


def is_final(trainer, output_dir=None, _internal_call=False) -> bool:
    return not _internal_call


def is_mark(source, target, **_) -> bool:
    return Path(target).name == "complete.json"


def is_done(source, target, **_) -> bool:
    return Path(target).name == "run.json" and json.loads(Path(source).read_text())["outcome"] == "done"


def half_removed(path, *_, **__) -> bool:
    """Remove every second file of an old checkpoint."""
    if not Path(path).name.startswith("checkpoint-"):
        return False
    if FAULT["moment"] == "rotation" and FAULT["rank"] == RANK:
        for file in sorted(file for file in Path(path).rglob("*") if file.is_file())[::2]:
            file.unlink()
    return True


def half_written(state, json_path) -> bool:
    if FAULT["moment"] == "torn" and FAULT["rank"] == RANK and passed + 1 == FAULT["nth"]:
        text = json.dumps(state.__dict__, default=str)
        Path(json_path).write_text(text[: len(text) // 2])
    return True


def patch() -> None:
    before(Trainer, "_load_optimizer_and_scheduler", "load", lambda trainer, checkpoint: checkpoint is not None)
    after(Trainer, "training_step", "step")
    before(CallbackHandler, "on_prediction_step", "evaluation")
    before(Trainer, "_save_checkpoint", "save")
    before(Trainer, "_save_optimizer_and_scheduler", "files")
    before(TrainerState, "save_to_json", "torn", half_written)
    before(CallbackHandler, "on_save", "mark")
    before(os, "replace", "rename", is_mark)
    before(shutil, "rmtree", "rotation", half_removed)
    before(Trainer, "save_model", "final", is_final)
    after(Trainer, "save_model", "final_files", is_final)
    before(os, "replace", "done", is_done)


if __name__ == "__main__":
    AcceleratorState.__init__ = fsdp_on_cpu._init_and_promote
    if FAULT:
        Path(f"{FAULT['flag']}.pid-{RANK}").write_text(str(os.getpid()))
        patch()
    fsdp_on_cpu.run_wrapped()
