"""Watcher of a training, version 1: what happens at each step. Metrics, whole checkpoints, SIGTERM, bad numbers.

The same file, to the byte, lies in every recipe folder; `scripts/sync_guard.py FOLDER` brings a copy up to date.
"""

import functools
import json
import math
import os
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from accelerate import PartialState
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import run_log
from guard import strategy_problem
from ranks import MARK, RUN, agree, environment, exchange, is_main, record, say

GIB = 2**30


def repeat_bias_correction(optimizer, steps: int) -> None:
    """Bring DeepSpeed's CPU Adam to where it was after `steps` steps: it keeps beta^t as a running product, and after a
    load takes a power instead, which rounds differently (deepspeed 0.19, csrc/includes/cpu_adam.h, IncrementStep)."""
    while type(optimizer).__name__ != "DeepSpeedCPUAdam" and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if type(optimizer).__name__ == "DeepSpeedCPUAdam":
        nothing = [torch.zeros(1) for _ in range(4)]  # parameter, gradient and moments
        for step in range(1, steps + 1):
            optimizer.ds_opt_adam.adam_update(
                optimizer.opt_id, step, 0.0, *optimizer.param_groups[0]["betas"], 1.0, 0.0, True, *nothing
            )


# ------------------------------------------------------------------------------------------------------- checkpoints


def is_complete(checkpoint: Path) -> str | None:
    """Why a checkpoint is not whole, or None: its mark lists every file that was on disk, with its size in bytes."""
    try:
        files = json.loads((checkpoint / MARK).read_text())["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "it carries no completeness mark: the save was cut off"
    for name, size in files:
        found = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else None
        if found != size:
            return f"{name} is {'missing' if found is None else f'{found} bytes'}, expected {size} bytes"
    return None


def listing(checkpoint: Path) -> dict[str, int]:
    """The files of a checkpoint that this machine sees, but its mark: name -> bytes."""
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != MARK]
    return {str(path.relative_to(checkpoint)): path.stat().st_size for path in files}


def digests(checkpoint: Path, files: dict[str, int]) -> dict[str, str]:
    """xxh3 of each file, the ranks sharing the work; none for a checkpoint of over 8 GiB a rank, to read which again
    would take minutes. Call it on every rank."""
    world, rank = environment("WORLD_SIZE", 1), environment("RANK", 0)
    if sum(files.values()) > 8 * GIB * world:
        return {}
    mine = {}
    for name in sorted(files)[rank::world]:
        digest = xxhash.xxh3_64()
        with open(checkpoint / name, "rb") as file:
            while block := file.read(2**24):
                digest.update(block)
        mine[name] = digest.hexdigest()
    return {name: value for part in exchange(f"digests of {checkpoint.name}", mine) for name, value in part.items()}


def is_damaged(checkpoint: Path) -> str | None:
    """Why a whole checkpoint does not hold what was written, though its sizes are right, or None. On every rank."""
    mark = json.loads((checkpoint / MARK).read_text())
    written = mark.get("digests") or {}
    found = digests(checkpoint, mark["files"]) if written else {}  # none where fewer ranks read than wrote
    changed = [name for name in written if found and found.get(name) != written[name]]
    return f"{changed[0]} is not what was written: its content changed on the disk" if changed else None


def lacks_state(checkpoint: Path) -> str | None:
    """Which state a whole checkpoint was saved without, or None: with it missing, the resumed run is another run."""
    names = [str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()]
    kinds = {
        "optimizer": ("optimizer", "global_step"),  # torch or FSDP, DeepSpeed
        "scheduler": ("scheduler",),
        "random state": ("rng_state",),
    }
    missing = [kind for kind, starts in kinds.items() if not any(name.startswith(starts) for name in names)]
    return " and ".join(missing) or None


def number(checkpoint: str | Path) -> int:
    """The step of a checkpoint-N folder; -1 for another name."""
    step = Path(checkpoint).name.removeprefix("checkpoint-")
    return int(step) if step.isdigit() else -1


def checkpoints(folder: Path) -> list[Path]:
    """checkpoint-N folders, newest first."""
    found = [path for path in folder.glob("checkpoint-*") if number(path) >= 0]
    return sorted(found, key=number, reverse=True)


def disk_problem(trainer, keep: int | None) -> str | None:
    """Whether the checkpoints that will be kept, one more while it is written, and the result fit the free disk."""
    args, state = trainer.args, trainer.state
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters() if p.requires_grad)
    checkpoint = trained * (4 + (2 if "8bit" in str(args.optim).lower() else 8))  # fp32 weights and Adam's moments
    saves = {"no": 0, "epoch": math.ceil(args.num_train_epochs)}.get(str(args.save_strategy.value))
    if saves is None:
        saves = math.ceil(state.max_steps / max(1, state.save_steps))
    if args.save_only_model:
        checkpoint = 4 * trained
    kept = (keep or saves) + 1 + args.load_best_model_at_end
    count = max(0, min(saves, kept) - len(checkpoints(RUN["folder"])))
    need, free = count * checkpoint + 2 * trained, shutil.disk_usage(RUN["folder"]).free
    if need <= free:
        return None
    return (
        f"output_dir {RUN['folder']} has {free / GIB:.1f} GiB of free disk, but {count} more checkpoint(s) of "
        f"{checkpoint / GIB:.1f} GiB and the result need {need / GIB:.1f} GiB (save_total_limit {keep}, and one more "
        "while it is written). Free some, choose another --output_dir, or lower --save_total_limit."
    )


# ------------------------------------------------------------------------------------------------------- the callback


def listen(target, name: str, heard) -> None:
    """Hand the result of each call of `target.name` to `heard`."""
    method = getattr(target, name)

    @functools.wraps(method)
    def listened(*args, **kwargs):
        result = method(*args, **kwargs)
        heard(result)
        return result

    setattr(target, name, listened)


def tolerate(target, name: str) -> None:
    """Make an error in `target.name` a warning: an upload that fails must not cost the training."""
    method = getattr(target, name)

    @functools.wraps(method)
    def tolerated(*args, **kwargs):
        try:
            return method(*args, **kwargs)
        except Exception as error:
            print(f"warning: {type(target).__name__}.{name} failed, training goes on: {error!r:.300}", flush=True)

    setattr(target, name, tolerated)


def keep_as_built(trainer) -> None:
    """Loading a checkpoint and evaluating leave the weights as they were built, or a resumed run is another run.

    peft makes a loaded adapter fp32, where TRL trains QLoRA's in bf16. On a CPU with AVX512-BF16 an evaluation packs a
    4-bit base anew and rounds its scales to bf16, and training goes on with them (bitsandbytes 0.50, Linear4bit).
    """
    wanted = {name: weight.dtype for name, weight in trainer.model.named_parameters() if weight.requires_grad}

    def restore(_):
        for name, weight in trainer.model.named_parameters():
            if name in wanted and weight.dtype != wanted[name]:
                weight.data = weight.data.to(wanted[name])

    listen(trainer, "_load_from_checkpoint", restore)
    for module in trainer.model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def loaded_problem(model, loaded) -> str | None:
    """Why a checkpoint's weights are not those of the model; the trainer only warns, and trains on from the first ones.

    loaded: what `load_state_dict` found missing and unexpected. A tied head has no tensor of its own.
    """
    missing = [
        name for name in loaded.missing_keys if name not in (getattr(model, "all_tied_weights_keys", None) or {})
    ]
    if not missing and not loaded.unexpected_keys:
        return None
    return (
        f"the checkpoint lacks {len(missing)} of the model's weights and holds {len(loaded.unexpected_keys)} that it has "
        f"not ({', '.join([*missing, *loaded.unexpected_keys][:2])} ...), so the run would go on with untrained weights. "
        "Was it saved by another train.py or another transformers? Take those, or choose another --output_dir."
    )


class Watcher(TrainerCallback):
    """Follows a training: metrics as lines of JSON, whole checkpoints, SIGTERM, numbers that are not finite."""

    def __init__(self, trainer):
        self.trainer, self.terminated = trainer, False
        self.keep = trainer.args.save_total_limit
        self.losses, self.norm, self.batches, self.clock, self.warned = [], 0.0, ([], None), time.monotonic(), False
        trainer.args.save_total_limit = None  # the trainer removes old checkpoints before the new one has its mark
        trainer.args.logging_nan_inf_filter = False  # it would show the last finite loss instead
        listen(trainer, "get_batch_samples", lambda batches: setattr(self, "batches", batches))
        listen(trainer, "training_step", self.losses.append)
        listen(trainer, "_get_grad_norm", lambda norm: setattr(self, "norm", norm))
        keep_as_built(trainer)
        tolerate(trainer, "_push_from_checkpoint")
        tolerate(trainer, "push_to_hub")
        trainer._issue_warnings_after_load = lambda loaded: agree("loaded", loaded_problem(trainer.model, loaded))
        signal.signal(signal.SIGTERM, self.on_sigterm)

    def on_sigterm(self, *_):
        self.terminated = True  # saving here would wait for ranks that are elsewhere: they agree at the end of the step

    def on_train_begin(self, args, state, control, **_):
        agree("strategy", strategy_problem(self.trainer))
        if (
            dist.is_initialized()
        ):  # gloo and DeepSpeed make their groups without it: a hang would last half an hour, or on
            for group in list(dist.distributed_c10d._world.pg_map):
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=args.ddp_timeout), group)
        agree("disk", disk_problem(self.trainer, self.keep) if is_main() else None)
        repeat_bias_correction(self.trainer.optimizer, state.global_step)
        run_log.plan(args, state, self.keep)
        if state.global_step >= state.max_steps:  # stopped between the last step and the result: the trainer looks at
            control.should_training_stop = True  # max_steps only after a step, so it is given none
            self.trainer.get_batch_samples = lambda *_: ([], None)

    def on_step_end(self, args, state, control, **_):
        """The ranks tell each other, in one number each: SIGTERM, bad loss, bad gradient or nothing labelled."""
        losses, (_, labelled) = torch.stack(self.losses).float(), self.batches
        norm = self.norm.full_tensor() if isinstance(self.norm, DTensor) else self.norm
        norm = torch.as_tensor(0.0 if norm is None else norm).float().to(losses.device)
        empty = torch.as_tensor(1 if labelled is None else labelled).sum().to(losses.device) == 0
        flags = [torch.tensor(self.terminated).to(losses.device), ~losses.isfinite().all(), ~norm.isfinite() | empty]
        flags = torch.stack(flags).float()
        mine = flags.clone()
        if dist.is_initialized():
            dist.all_reduce(flags)
        terminated, bad_loss, bad_step = flags.tolist()
        if bad_loss or bad_step:  # a bad loss makes every rank's gradient bad: name the rank that it came from
            guilty = mine[1 if bad_loss else 2].item()
            agree("numbers", self.bad_step(state.global_step, losses, norm, bool(empty)) if guilty else None)
        if terminated:
            self.terminated = control.should_save = control.should_training_stop = True
            if state.global_step < state.max_steps:  # it might outlast the time that is left for the save
                control.should_evaluate = False
        self.losses.clear()
        self.clock = time.monotonic()

    def bad_step(self, step: int, losses: torch.Tensor, norm, empty: bool) -> str:
        """Keep this rank's rows of the step, decoded, in the run folder; say what was wrong with it."""
        rows, decode = [], self.trainer.processing_class.decode
        for batch, loss in zip(self.batches[0], losses.tolist(), strict=False):
            for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
                learned = decode([token for token, label in zip(ids, labels, strict=True) if label != -100])
                rows.append({"micro_batch_loss": loss, "text": decode(ids), "labelled": learned, "input_ids": ids})
        file = RUN["folder"] / f"_bad_step_{step}_rank_{environment('RANK', 0)}.json"
        # The underscore keeps rows of the training data out of what --push_to_hub uploads.
        file.write_text(json.dumps({"step": step, "grad_norm": norm.item(), "rows": rows}, indent=1))
        what = "no token of this step carries a label"
        if not empty:
            what = f"the loss is {losses.mean().item():g} and the gradient norm {norm.item():g}"
        return (
            f"step {step}: {what}. The rows of this step lie in {file}. Look at them, at the learning rate and at the "
            "precision. Nothing of this step was saved; the checkpoints before it are whole."
        )

    def on_evaluate(self, args, state, control, metrics=None, **_):
        self.clock = time.monotonic()
        if not math.isfinite((metrics or {}).get("eval_loss", 0)):
            agree(
                "evaluation",
                f"eval_loss is {metrics['eval_loss']} at step {state.global_step}. Look at eval_rows.json.",
            )

    def on_save(self, args, state, control, **_):
        PartialState().wait_for_everyone()
        folder = RUN["folder"] / f"checkpoint-{state.global_step}"
        files = {}  # as all ranks see them together: a network file system may hide another machine's files for a while
        for seen in exchange(f"files of {folder.name}", listing(folder)):
            files |= {name: max(size, files.get(name, 0)) for name, size in seen.items()}
        content = digests(folder, files)
        if not is_main():
            return
        os.sync()
        partial = folder / f"{MARK}.partial"
        mark = {"step": state.global_step, "world_size": environment("WORLD_SIZE", 1), "files": files}
        partial.write_text(json.dumps(mark | {"digests": content}))
        os.replace(partial, folder / MARK)
        found = checkpoints(RUN["folder"])
        older = found[found.index(folder) + 1 :]
        whole = [path for path in older if is_complete(path) is None]
        cut_off = [path for path in older if path not in whole]
        best = Path(state.best_model_checkpoint or "").name  # load_best_model_at_end reads it
        spare = [path for path in whole[self.keep - 1 :] if path.name != best] if self.keep else []
        for path in [*spare, *cut_off]:
            (path / MARK).unlink(missing_ok=True)  # first: half a checkpoint must not look whole
            # Where a network file system still holds a file, the next save tries again.
            shutil.rmtree(path, ignore_errors=True)
        self.tell_save_time(time.monotonic() - self.clock)

    def tell_save_time(self, seconds: float) -> None:
        """torchrun kills its ranks so many seconds after SIGTERM: a save must fit in between."""
        record(save_seconds=round(seconds, 1))
        have = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
        if environment("WORLD_SIZE", 1) > 1 and seconds > have / 2 and not self.warned:
            self.warned = True
            say(
                f"warning: this save took {seconds:.0f} s, and {have:.0f} s after a SIGTERM the launcher kills the "
                f"ranks. Start it with TORCH_ELASTIC_SHUTDOWN_TIMEOUT={max(60, round(4 * seconds))} in its environment."
            )

    def on_log(self, args, state, control, logs=None, **_):
        if is_main():
            with open(RUN["folder"] / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "time": time.time(), **logs}) + "\n")

    def on_train_end(self, args, state, control, **_):
        PartialState().wait_for_everyone()
        if self.terminated and state.global_step < state.max_steps:
            record(outcome="preempted", step=state.global_step)
            say(
                f"stopped by SIGTERM at step {state.global_step}, checkpoint written. "
                "The same command continues the run."
            )
            PartialState().destroy_process_group()
            os._exit(1)
