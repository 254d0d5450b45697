"""Keeper of a run, version 1: its folder, its checkpoints, its record. Nothing that was trained is lost.

The same file, to the byte, lies in every recipe folder; `scripts/sync_guard.py FOLDER` brings a copy up to date.

A run folder (`output_dir`) holds checkpoint-N/ with complete.json written last, final/, run.json, metrics.jsonl (a line
of JSON for each logged step), eval_rows.json and .lock. Scripts read these and nothing else.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pyarrow.compute as pc
import torch
import torch.distributed as dist
import xxhash
from accelerate import PartialState
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from guard import (
    RUN,
    SECRET,
    agree,
    environment,
    exchange,
    hardware,
    is_main,
    memory_problem,
    record,
    say,
    strategy_problem,
)
from inputs import PATH_KEYS

MARK = "complete.json"  # a checkpoint without it is not whole
# Arguments that may differ between two starts of one run, because they do not decide its weights. What the batch
# arguments and the number of processes decide together, the global batch, is compared by itself.
FREE = re.compile(
    "(output_dir|resume_from|log|save_|eval_(?!fraction)|per_device|gradient_accumulation|report_to|run_name|hub_|push_|"
    "project|trackio|disable_tqdm|dataloader_n|dataloader_p|dataset_num_proc|use_cpu|local_rank|ddp_|deepspeed|fsdp|do_|"
    "include_|prediction|debug|accelerator_config)"
)


def is_complete(checkpoint: Path) -> str | None:
    """Why a checkpoint is not whole, or None: its mark lists every file that was on disk, with its size in bytes."""
    try:
        files = json.loads((checkpoint / MARK).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return "it carries no completeness mark: the save was cut off"
    for name, size in files.items():
        found = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else None
        if found != size:
            return f"{name} is {'missing' if found is None else f'{found} bytes'}, expected {size} bytes"
    return None


def checkpoints(folder: Path) -> list[Path]:
    """checkpoint-N folders, newest first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: -int(path.name.removeprefix("checkpoint-")))


def identity(script_args, training_args, model_args, recipe_args) -> dict:
    """What decides the weights: arguments, files by their content, batch and processes; without secrets."""
    every = {}
    for group in (script_args, training_args, model_args, recipe_args):
        every |= group.to_dict() if hasattr(group, "to_dict") else vars(group)
    every = {key: value for key, value in every.items() if not FREE.match(key)}
    for key in PATH_KEYS:
        if every.get(key) and os.path.isfile(every[key]):
            digest = hashlib.sha256(Path(every[key]).read_bytes()).hexdigest()[:12]
            every[key] = f"{Path(every[key]).name}, sha256 {digest}"
    every["world_size"], every["strategy"] = environment("WORLD_SIZE", 1), RUN["strategy"]
    every["global_batch"] = training_args.train_batch_size * training_args.gradient_accumulation_steps
    every["global_batch"] *= every["world_size"]
    return json.loads(re.sub(SECRET, "***", json.dumps(every, default=str)))


def open_run(script_args, training_args, model_args, recipe_args) -> None:
    """Stage 1, after the arguments: memory, the output folder (locked, and only ever one run's), what to resume.

    Sets training_args.resume_from_checkpoint to the newest complete checkpoint, or to None. Ends the process with
    exit code 0 where the folder holds this very run, finished.
    """
    state, world, name = PartialState(), environment("WORLD_SIZE", 1), model_args.model_name_or_path
    problem = None
    if state.num_processes != world:
        problem = (
            f"{world} processes were launched, but accelerate sees {state.num_processes}: each would train alone. On a "
            "machine without a GPU add `--use_cpu true` after train.py, and take `use_cpu` out of the launch file."
        )
    agree("world", problem)
    if not os.path.isdir(name) and state.local_process_index == 0:  # one download a machine, the others wait
        try:
            snapshot_download(name, revision=model_args.model_revision, ignore_patterns=["original/*", "metal/*"])
        except Exception as error:
            problem = (
                f"model_name_or_path: {name!r} is no folder here, and the Hub did not give it "
                f"({type(error).__name__}). Check the spelling, the network and, for a gated model, its licence and HF_TOKEN."
            )
    agree("download", problem, patient=True)
    config = AutoConfig.from_pretrained(name, revision=model_args.model_revision)
    agree("memory", memory_problem(config, model_args, training_args))

    RUN["folder"] = folder = Path(training_args.output_dir)
    problem, earlier, reasons = None, {}, {}
    if is_main():
        folder.mkdir(parents=True, exist_ok=True)
        RUN["lock"] = open(folder / ".lock", "w")  # noqa: SIM115 the system lets go of it when this process dies
        try:
            fcntl.flock(RUN["lock"], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            problem = f"output_dir {folder} is in use by a live run. Wait for it, or choose another --output_dir."
        if (folder / "run.json").is_file():
            earlier = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        reasons = {str(path): is_complete(path) for path in checkpoints(folder)}
    agree("lock", problem)
    earlier, reasons = exchange("earlier", [earlier, reasons])[0]  # what rank 0 saw
    asked = identity(script_args, training_args, model_args, recipe_args)
    before = earlier.get("arguments", asked)
    different = [
        f"{key} was {before.get(key)!r:.60}, now {asked.get(key)!r:.60}"
        for key in sorted(before.keys() | asked.keys())
        if before.get(key) != asked.get(key)
    ]
    if different and (reasons or earlier.get("outcome") == "done"):
        changes = "; ".join(different)
        problem = f"output_dir {folder} holds another run: {changes}. Give the old values, or another --output_dir."
    elif reasons and not earlier:
        problem = f"output_dir {folder} holds checkpoints without a run.json. Choose another --output_dir."
    agree("identity", problem)
    if earlier.get("outcome") == "done":
        say(f"This run is finished: {earlier.get('final')}. Nothing is left to train.")
        state.destroy_process_group()
        sys.exit(0)
    if training_args.resume_from_checkpoint in (None, "auto"):  # the same command continues the run
        for path, reason in reasons.items():
            if reason:
                say(f"skipped {path}: {reason}")
        training_args.resume_from_checkpoint = next((path for path, reason in reasons.items() if not reason), None)
    else:
        reason = is_complete(Path(training_args.resume_from_checkpoint))
        problem = f"resume_from_checkpoint {training_args.resume_from_checkpoint}: {reason}."
        agree("checkpoint", problem if reason else None)
    say(f"resuming from {resume}" if (resume := training_args.resume_from_checkpoint) else "starting anew")
    if is_main() and not resume and (folder / "metrics.jsonl").exists():  # of a start that wrote no checkpoint
        os.replace(folder / "metrics.jsonl", folder / "metrics.old.jsonl")
    RUN["record"] = {"outcome": "running", "arguments": asked, "command": sys.argv, "versions": RUN["versions"]}
    RUN["record"] |= {
        "started": [*earlier.get("started", []), time.time()],
        "data": earlier.get("data"),
        "hardware": hardware(),
    }
    record()


class Keeper(TrainerCallback):
    """Watches a training: metrics as lines of JSON, whole checkpoints, SIGTERM, numbers that are not finite."""

    def __init__(self, trainer):
        self.trainer, self.terminated = trainer, False
        self.keep = trainer.args.save_total_limit
        trainer.args.save_total_limit = None  # the trainer removes old checkpoints before the new one has its mark
        trainer.args.logging_nan_inf_filter = False  # it would show the last finite loss instead
        signal.signal(signal.SIGTERM, self.on_sigterm)

    def on_sigterm(self, *_):
        self.terminated = True  # saving here would wait for ranks that are elsewhere: they agree at the end of the step

    def on_train_begin(self, args, state, control, **_):
        agree("strategy", strategy_problem(self.trainer))
        world = environment("WORLD_SIZE", 1)
        cpu = " on CPU (gloo), from the same launch file" if args.device.type == "cpu" else ""
        batch = args.train_batch_size * args.gradient_accumulation_steps * world
        say(
            f"strategy {RUN['strategy']} over {world} process(es){cpu}; global batch {batch} = "
            f"{args.train_batch_size} x {args.gradient_accumulation_steps} x {world}; {state.max_steps} steps, of which "
            f"{args.get_warmup_steps(state.max_steps)} warm-up"
        )

    def on_step_end(self, args, state, control, **_):
        flag = torch.tensor(float(self.terminated), device=args.device)
        if dist.is_initialized():
            dist.all_reduce(flag)
        if flag.item():
            self.terminated = control.should_save = control.should_training_stop = True

    def on_save(self, args, state, control, **_):
        PartialState().wait_for_everyone()
        if not is_main():
            return
        os.sync()
        folder = RUN["folder"] / f"checkpoint-{state.global_step}"
        files = {
            str(p.relative_to(folder)): p.stat().st_size
            for p in sorted(folder.rglob("*"))
            if p.is_file() and p.name != MARK
        }
        partial = folder / f"{MARK}.partial"
        partial.write_text(
            json.dumps({"step": state.global_step, "world_size": environment("WORLD_SIZE", 1), "files": files})
        )
        os.replace(partial, folder / MARK)
        whole = [path for path in checkpoints(RUN["folder"]) if is_complete(path) is None]
        for path in whole[self.keep :] if self.keep else []:
            (path / MARK).unlink()
            shutil.rmtree(path)

    def on_log(self, args, state, control, logs=None, **_):
        if is_main():
            if args.device.type == "cuda":
                logs["peak_memory_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
            with open(RUN["folder"] / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "time": time.time(), **logs}) + "\n")
        for key in ("loss", "grad_norm", "eval_loss"):
            if key in logs and not math.isfinite(logs[key]):
                problem = (
                    f"{key} is {logs[key]} at step {state.global_step}. Look at the rows of the last "
                    f"{args.logging_steps:g} step(s), the learning rate and the precision; the checkpoints "
                    "before it are whole."
                )
                agree("finite", problem)

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


def watch(trainer) -> None:
    """Stage 2, with the trainer built: what it will see, what is adapted, and the Keeper that follows the steps."""
    config = getattr(trainer.model, "peft_config", {}).get("default")
    found = getattr(getattr(trainer.model, "base_model", None), "targeted_parameter_names", [])
    asked = (config and config.target_parameters) or []
    missed = [target for target in asked if not any(name.endswith(target) for name in found)]
    problem = f"lora_target_parameters: {', '.join(missed)} is no parameter of this model and would be left out."
    agree("adapted", problem if missed else None)

    rows, tokens, labelled, digest = trainer.train_dataset, 0, 0, xxhash.xxh3_128()
    for batch in rows.select_columns(["input_ids", "labels"]).with_format("arrow").iter(1000):
        for column in ("input_ids", "labels"):
            lists = batch[column].combine_chunks()
            values = lists.flatten().to_numpy(zero_copy_only=False)
            digest.update(pc.list_value_length(lists).to_numpy(zero_copy_only=False).tobytes() + values.tobytes())
        tokens, labelled = tokens + len(values), labelled + int((values != -100).sum())
    data, resumed = digest.hexdigest(), trainer.args.resume_from_checkpoint
    changed = is_main() and resumed and RUN["record"]["data"] not in (None, data)
    problem = f"the training data is not what {resumed} was trained on. Give the old data, or another --output_dir."
    agree("data", problem if changed else None)
    say(f"training on {len(rows)} rows: {tokens} tokens, {labelled} of them labelled ({labelled / tokens:.1%})")
    private = exchange(
        "private bytes", psutil.Process().memory_full_info().uss
    )  # host memory that each rank holds alone
    record(data=data, tokens=tokens, labelled_tokens=labelled, host_private_bytes=private)
    trainer.add_callback(Keeper(trainer))


def close_run(trainer, final: str) -> None:
    """Proof that the weights are on disk, whole and readable; only then is the run done."""
    PartialState().wait_for_everyone()
    problem = untie = None
    wanted = sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters() if p.requires_grad)
    if is_main():
        tensors = {}
        for file in Path(final).glob("*.safetensors"):
            with safe_open(file, "pt") as content:
                tensors |= {name: math.prod(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118
        empty = [name for name, size in tensors.items() if size == 0]
        untie = trainer.model.config.tie_word_embeddings and "lm_head.weight" in tensors
        if empty or sum(tensors.values()) < wanted:
            problem = (
                f"{final} holds {sum(tensors.values())} weights in {len(tensors)} tensors ({len(empty)} empty), but "
                f"{wanted} were trained. The newest checkpoint-N is whole: take the weights from there."
            )
    agree("saved", problem)
    if untie:  # FSDP and ZeRO gather the shared head as a second tensor; loading and saving makes it one again
        AutoModelForCausalLM.from_pretrained(final, dtype="auto").save_pretrained(final)
    if is_main():
        for file in Path(final).iterdir():  # safetensors writes 0600: colleagues could not read it
            file.chmod(file.stat().st_mode | (Path(final).stat().st_mode & 0o444))
    record(outcome="done", final=str(final), step=trainer.state.global_step)
    say(f"done: {final}")
    PartialState().wait_for_everyone()  # a rank that leaves while another still writes can abort it
