"""Keeper of a run, version 1: its folder, its checkpoints, its record. Nothing that was trained is lost.

The same file, to the byte, lies in every recipe folder; `scripts/sync_guard.py FOLDER` brings a copy up to date.

A run folder (`output_dir`) holds checkpoint-N/ with complete.json written last, final/, run.json, metrics.jsonl (a line
of JSON for each logged step), eval_rows.json and .lock. Scripts read these and nothing else.
"""

import enum
import fcntl
import hashlib
import json
import math
import os
import pickle
import re
import secrets
import socket
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow.compute as pc
import torch
import xxhash
from accelerate import PartialState
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

import run_log
import speed
from guard import memory_problem
from inputs import COUNTS, GIVEN, PATH_KEYS
from ranks import RUN, SECRET, agree, environment, exchange, is_main, record, say
from watcher import MARK, Watcher, checkpoints, is_complete, is_damaged, lacks_state, number

# Arguments that may differ between two starts of one run, because they do not decide its weights. What the batch
# arguments and the number of processes decide together, the global batch, is compared by itself.
FREE = re.compile(
    "(output_dir|resume_from|log|save_|eval_(?!fraction)|per_device|gradient_accumulation|report_to|run_name|hub_|push_|"
    "project|trackio|disable_tqdm|dataloader_n|dataloader_p|dataset_num_proc|use_cpu|local_rank|ddp_|deepspeed|fsdp|do_|"
    "include_|prediction|debug|accelerator_config)"
)


# What from_pretrained is given otherwise than by model_init_kwargs, and by whom.
LOADING = {
    "revision": "--model_revision",
    "dtype": "--dtype",
    "torch_dtype": "--dtype",
    "attn_implementation": "--attn_implementation",
    "quantization_config": "--load_in_4bit",
    "token": "HF_TOKEN in the environment",  # the trainer writes its arguments, whole, into every checkpoint
    "device_map": "the launcher",
    "device_mesh": "the launcher",
    "tp_plan": "the launcher",
    "tp_size": "the launcher",
}


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


def can_move(before: dict, asked: dict, different: list[str]) -> bool:
    """Whether a checkpoint continues with another number of processes: replicated or distributed state, same batch."""
    one_file = {before["strategy"], asked["strategy"]} <= {"single", "ddp"}  # each rank holds all of it
    return set(different) <= ({"world_size", "strategy"} if one_file else {"world_size"}) and (
        one_file or asked["strategy"] == "fsdp"  # torch's distributed checkpoints are cut anew while loading
    )


def changes(before: dict, asked: dict, different: list[str]) -> str:
    """What differs from the run that a folder holds, and the ways forward."""
    told = "; ".join(f"{key} was {before.get(key)!r:.60}, now {asked.get(key)!r:.60}" for key in different)
    ways = "Give the old values, or another --output_dir."
    if can_move(before, asked, different):
        ways = "To continue it with this number of processes, add --resume_from_checkpoint and the checkpoint's folder."
    elif set(different) <= {"world_size", "strategy", "global_batch"}:
        ways = (
            f"Start it as before (global batch {before['global_batch']} = per_device_train_batch_size x "
            "gradient_accumulation_steps x processes); or begin a new run with its weights: `python scripts/export.py "
            "CHECKPOINT DEST`, then --model_name_or_path DEST and another --output_dir."
        )
        if {before["strategy"], asked["strategy"]} in ({"fsdp"}, {"single", "ddp"}, {"single"}, {"ddp"}):
            ways += " With the same global batch a checkpoint also continues on another number of processes."
    return f"{told}. {ways}"


def named_problem(checkpoint: Path, reasons: dict) -> str | None:
    """Why the checkpoint that --resume_from_checkpoint names cannot be continued from, or None."""
    if reason := is_complete(checkpoint):
        return f"resume_from_checkpoint {checkpoint}: {reason}."
    later = [path for path, reason in reasons.items() if not reason and number(path) > number(checkpoint)]
    if later:
        return (
            f"resume_from_checkpoint {checkpoint}: {', '.join(later)} is later, whole, and would be overwritten. Move it "
            "away first, or choose another --output_dir."
        )
    return None


def enum_member(kind, name):
    """In place of getattr, which before Python 3.11.4 every pickled Enum member calls: a member, and nothing else."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"it reads the attribute {name} of {kind}")
    return kind[name]


class NoCode(pickle.Unpickler):
    """Reads the .metadata of torch's distributed checkpoints, and refuses what could run code."""

    ALLOWED = re.compile(
        r"torch\.distributed\.checkpoint\.(metadata\.(Metadata|MetadataIndex|\w+StorageMetadata|TensorProperties|StorageMeta"
        r"|_MEM_FORMAT_ENCODING)|filesystem\._StorageInfo)|torch\.serialization\._get_layout|torch\.(Size|b?float\d+|u?int\d+"
        r"|bool)|collections\.OrderedDict|pathlib\.\w*Path"
    )

    def find_class(self, module: str, name: str):
        if f"{module}.{name}" == "builtins.getattr":
            return enum_member
        if not self.ALLOWED.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def code_problem(checkpoint: str) -> str | None:
    """Why reading a checkpoint could run code, or None. torch.load is held to weights, in DeepSpeed's calls too."""
    os.environ.setdefault("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    if RUN["strategy"].startswith("zero"):
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        allowed = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, (enum_member, "builtins.getattr")]
        torch.serialization.add_safe_globals(allowed)
    for file in Path(checkpoint).glob("*/.metadata"):
        try:
            with open(file, "rb") as content:
                NoCode(content).load()
        except Exception as error:  # pickle raises what it likes
            return f"{file} is damaged, or would run code ({error}). Take an older checkpoint, from a source you trust."
    return None


def forget_later(folder: Path, resume: str | None) -> None:
    """Before training goes on from `resume`: nothing that will be written again may look finished meanwhile."""
    for path in checkpoints(folder):
        if number(path) > (number(resume) if resume else -1):
            (path / MARK).unlink(missing_ok=True)
    metrics = folder / "metrics.jsonl"
    if metrics.is_file() and not resume:  # of a start that wrote no checkpoint
        os.replace(metrics, folder / "metrics.old.jsonl")
    elif metrics.is_file():
        text = metrics.read_bytes()
        if not text.endswith(b"\n"):  # cut off in the middle of a line
            metrics.write_bytes(text[: text.rfind(b"\n") + 1])


def hardware() -> dict:
    """What the run record says of this machine."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "host": socket.gethostname(),
        "gpus": gpus,
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
    }


def shared_problem(folder: Path) -> str | None:
    """Whether this machine sees rank 0's output folder; checkpoints cut over local disks could not be continued from."""
    if environment("WORLD_SIZE", 1) == environment("LOCAL_WORLD_SIZE", 1):
        return None
    host, token = exchange("token", [socket.gethostname(), secrets.token_hex(8)])[0]
    mark = folder / f".shared-{token}"  # a new name: no network file system can have cached it as absent
    if is_main():
        mark.touch()
    exchange("token written", None)
    begun = time.monotonic()
    while not (seen := mark.exists()) and time.monotonic() - begun < 10:
        time.sleep(0.2)
    exchange("token read", None)
    if is_main():
        mark.unlink()
    if seen:
        return None
    return (
        f"output_dir {folder.absolute()} on {socket.gethostname()} is not the folder that {host} writes: each machine would "
        "keep its own part of every checkpoint. Give an --output_dir on a file system that all machines share."
    )


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
    loading = training_args.model_init_kwargs or {}
    if not isinstance(loading, dict):
        problem = f'model_init_kwargs is {loading!r}, expected JSON such as \'{{"experts_implementation": "fused"}}\'.'
    elif named := [key for key in LOADING if key in loading]:
        problem = f"model_init_kwargs names {', '.join(named)}. Leave that to {', '.join(LOADING[k] for k in named)}."
    agree("loading", problem)
    if not os.path.isdir(name) and state.local_process_index == 0:  # one download a machine, the others wait
        try:
            snapshot_download(name, revision=model_args.model_revision, ignore_patterns=["original/*", "metal/*"])
        except Exception as error:
            problem = (
                f"model_name_or_path: {name!r} is no folder here, and the Hub did not give it "
                f"({type(error).__name__}). Check the spelling, the network and, for a gated model, its licence and HF_TOKEN."
            )
    agree("download", problem, patient=True)
    config = AutoConfig.from_pretrained(name, revision=model_args.model_revision).get_text_config()
    agree("memory", memory_problem(config, model_args, training_args))
    if changed := [key for key in loading if key != "experts_implementation" and hasattr(config, key)]:
        say(f"warning: model_init_kwargs changes the model ({', '.join(changed)}); an adapter would not record that.")

    agree("trackers", run_log.trackers_problem(training_args))
    if token := training_args.hub_token:  # the trainer writes its arguments, whole, into every checkpoint
        os.environ["HF_TOKEN"], training_args.hub_token = token, None
        for words in (sys.argv, GIVEN["words"]):  # trackers keep the command line, the run record both
            words[:] = [word.replace(token, "***") for word in words]
    sys.argv = [re.sub(SECRET, "***", word) for word in sys.argv]
    RUN["folder"] = folder = Path(training_args.output_dir)
    problem, earlier, reasons = None, {}, {}
    if is_main():
        folder.mkdir(parents=True, exist_ok=True)
        RUN["lock"] = open(folder / ".lock", "w")  # noqa: SIM115 the system lets go of it when this process dies
        try:
            fcntl.flock(RUN["lock"], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"output_dir {folder} is in use by a live run. Wait for it, or choose another --output_dir."
        except OSError as error:  # Lustre and NFS may be mounted without
            say(f"warning: {folder} has no file locks ({error.strerror}): nothing stops a second run in this folder.")
        if (folder / "run.json").is_file():
            earlier = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        reasons = {str(path): is_complete(path) for path in checkpoints(folder)}
    agree("lock", problem)
    agree("shared folder", shared_problem(folder))
    earlier, reasons = exchange("earlier", [earlier, reasons])[0]  # what rank 0 saw
    asked = identity(script_args, training_args, model_args, recipe_args)
    chosen = speed.choose_attention(config, training_args, model_args.attn_implementation)
    model_args.attn_implementation = chosen  # another machine may choose another: that does not make it another run
    before, resume = earlier.get("arguments", asked), training_args.resume_from_checkpoint
    named = None if resume == "auto" else resume
    different = sorted(key for key in before.keys() | asked.keys() if before.get(key) != asked.get(key))
    if (
        different
        and (reasons or earlier.get("outcome") == "done")
        and not (named and can_move(before, asked, different))
    ):
        problem = f"output_dir {folder} holds another run: {changes(before, asked, different)}"
    elif reasons and not earlier:
        problem = f"output_dir {folder} holds checkpoints without a run.json. Choose another --output_dir."
    agree("identity", problem)
    if earlier.get("outcome") == "done":
        say(f"This run is finished: {earlier.get('final')}. Nothing is left to train.")
        state.destroy_process_group()
        sys.exit(0)
    if named:
        problem = named_problem(Path(named), reasons)
        if not any(exchange("named", problem)) and (damage := is_damaged(Path(named))):
            problem = f"resume_from_checkpoint {named}: {damage}."
        if lacking := lacks_state(Path(named)):
            say(f"warning: {named} holds no {lacking}: as asked for, that state starts anew.")
    else:  # the same command continues the run
        for path, reason in reasons.items():
            if reason:
                say(f"skipped {path}: {reason}")
        resume = None
        for path in (path for path, reason in reasons.items() if not reason):
            if damage := is_damaged(Path(path)):
                say(f"skipped {path}: {damage}")
                continue
            resume = path
            break
        if resume and (lacking := lacks_state(Path(resume))):
            problem = (
                f"{resume} holds no {lacking}, so it cannot continue this run. To go on from it all the same, with that "
                f"state new, add `--resume_from_checkpoint {resume}`; or choose another --output_dir."
            )
    agree("checkpoint", problem or (resume and code_problem(resume)))
    training_args.resume_from_checkpoint = resume
    if is_main():
        forget_later(folder, resume)
    say(f"resuming from {resume}" if resume else "starting anew")
    RUN["record"] = {"outcome": "running", "arguments": asked, "command": sys.argv, "versions": RUN["versions"]}
    RUN["record"] |= {
        "started": [*earlier.get("started", []), time.time()],
        "data": earlier.get("data"),
        "hardware": hardware(),
        **GIVEN,
    }
    record()
    run_log.mark("opened")
    run_log.quiet_libraries()
    say(f"reading {script_args.dataset_name} and loading {name} ...")


def rows_problem(facts: list[list]) -> str | None:
    """Whether all ranks made the same rows: [host, digest of the training rows, number of evaluation rows] of each.

    With other revisions of the data, or packing on one machine alone, they would wait for each other, or train on wrong
    shares.
    """
    other = sorted({host for host, *found in facts if found != facts[0][1:]})
    if not other:
        return None
    return (
        f"{', '.join(other)} made other training or evaluation rows than {facts[0][0]}. Give all machines the same "
        "packages, attention (each log has a line `attention:`) and data; for data of the Hub add `--dataset_revision`."
    )


def watch(trainer) -> None:
    """Stage 2, with the trainer built: what it will see, what is adapted, and the Watcher that follows the steps."""
    config = getattr(trainer.model, "peft_config", {}).get("default")
    found = getattr(getattr(trainer.model, "base_model", None), "targeted_parameter_names", [])
    asked = (config and config.target_parameters) or []
    missed = [target for target in asked if not any(name.endswith(target) for name in found)]
    problem = f"lora_target_parameters: {', '.join(missed)} is no parameter of this model and would be left out."
    agree("adapted", problem if missed else None)
    speed.spare_casts(trainer)
    run_log.mark("rows and model")

    rows, tokens, labelled, digest = trainer.train_dataset, 0, 0, xxhash.xxh3_128()
    lengths = []  # of the documents, for the count of operations
    packed = "seq_lengths" in rows.column_names
    columns = ["input_ids", "labels", *(["seq_lengths"] if packed else [])]
    for batch in rows.select_columns(columns).with_format("arrow").iter(1000):
        for column in ("input_ids", "labels"):
            lists = batch[column].combine_chunks()
            values = lists.flatten().to_numpy(zero_copy_only=False)
            digest.update(pc.list_value_length(lists).to_numpy(zero_copy_only=False).tobytes() + values.tobytes())
        tokens, labelled = tokens + len(values), labelled + int((values != -100).sum())
        documents = batch["seq_lengths"].combine_chunks().flatten() if packed else pc.list_value_length(lists)
        lengths.append(documents.to_numpy(zero_copy_only=False))
    data, resumed = digest.hexdigest(), trainer.args.resume_from_checkpoint
    agree("rows", rows_problem(exchange("rows", [socket.gethostname(), data, len(trainer.eval_dataset or [])])))
    changed = is_main() and resumed and RUN["record"]["data"] not in (None, data)
    problem = f"the training data is not what {resumed} was trained on. Give the old data, or another --output_dir."
    agree("data", problem if changed else None)
    say(f"training on {len(rows)} rows: {tokens} tokens, {labelled} of them labelled ({labelled / tokens:.1%})")
    private = exchange(
        "private bytes", psutil.Process().memory_full_info().uss
    )  # host memory that each rank holds alone
    trained = "full" if config is None else "expert_lora" if config.target_parameters else "lora"
    lengths = np.concatenate(lengths)
    counts, edges = np.histogram(lengths, bins=min(24, int(np.ptp(lengths)) + 1))
    dataset = {  # what scripts/report.py shows of the data; lengths in tokens
        "rows": len(rows),
        "documents": len(lengths),
        "packed": packed,
        "lengths": {"percentiles": np.percentile(lengths, [50, 90, 99, 100]).tolist()},
        "counts": {name: COUNTS[name] for name in ("training", "evaluation") if name in COUNTS},
    }
    dataset["lengths"] |= {"histogram": counts.tolist(), "edges": edges.round(1).tolist()}
    record(data=data, tokens=tokens, labelled_tokens=labelled, host_private_bytes=private, dataset=dataset)
    RUN["pace"] = speed.Pace(trainer.model.config, lengths, labelled / tokens, trained, trainer.args.device)
    RUN["tokens_per_row"] = tokens / len(rows)
    run_log.attach(trainer, RUN["pace"])
    trainer.add_callback(Watcher(trainer))  # the last one: on SIGTERM it ends the process


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
        Path(final, "README.md").unlink(missing_ok=True)  # peft's placeholder, with a path of this machine in it
        for file in Path(final).iterdir():  # safetensors writes 0600: colleagues could not read it
            file.chmod(file.stat().st_mode | (Path(final).stat().st_mode & 0o444))
    record(outcome="done", final=str(final), step=trainer.state.global_step)
    run_log.outcome(trainer, final)
    PartialState().wait_for_everyone()  # a rank that leaves while another still writes can abort it
