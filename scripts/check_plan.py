"""What a launch would take: rows, steps, tokens, time and disk; and schedules that never come to their point."""

import json
import math
import os
import shutil
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from check_launch import ROOT, Launch, load_module
from check_model import meta_model

GIB = 2**30
SUSTAINED = (
    0.8  # of the data sheet's dense rate: what a large bf16 matrix product reaches (790 of 989 TFLOP/s, measured)
)
USUAL = 0.4  # what a well-set run reaches


@dataclass
class Plan:
    """rows: for training, None where they are not known here. tokens: of one step, at most. Seconds are of one step."""

    rows: int | None = None
    global_batch: int = 0
    steps: int | None = None
    warmup: int | None = None
    tokens: int = 0
    parameters: int | None = None
    trained: int | None = None
    flops: float | None = None
    fastest: float | None = None
    usual: float | None = None
    measured: float | None = None
    measured_from: str = ""
    checkpoint_bytes: int | None = None
    checkpoints: int | None = None
    final_bytes: int | None = None
    free_bytes: int | None = None

    def lines(self) -> list[str]:
        """For people."""
        told = [f"global batch {self.global_batch}, at most {self.tokens:,} tokens a step"]
        if self.steps is not None:
            rows = f"{self.rows:,} training rows, " if self.rows is not None else ""
            told.append(f"{rows}{self.steps:,} steps, of which {self.warmup:,} warm-up")
        else:
            told.append("steps: not known here (rows on the Hub, or packed); --max_steps N would say")
        if self.parameters:
            told.append(f"{self.parameters:,} parameters, {self.trained:,} of them trained")
        if self.fastest:
            step = f"{self.fastest:.2f} s at the roofline, {self.usual:.2f} s at {USUAL:.0%} of the GPU's rate"
            told.append(f"a full step: {step}")
            if self.steps:
                told.append(f"all steps: {_hours(self.fastest * self.steps)} to {_hours(self.usual * self.steps)}")
        if self.measured:
            whole = f"; all steps {_hours(self.measured * self.steps)}" if self.steps else ""
            told.append(f"measured: {self.measured:.2f} s a step ({self.measured_from}){whole}")
        if self.checkpoint_bytes is not None:
            free = "" if self.free_bytes is None else f"; free: {self.free_bytes / GIB:.1f} GiB"
            many = "" if self.checkpoints is None else f"{self.checkpoints} x "
            result = f"{self.final_bytes / GIB:.2f} GiB of result"
            told.append(f"disk: {many}{self.checkpoint_bytes / GIB:.2f} GiB of checkpoints, {result}{free}")
        return told


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def count_rows(launch: Launch) -> int | None:
    """Training rows of a local dataset after the held-out share; None for a Hub dataset and what cannot be read."""
    script_args, name = launch.script_args, getattr(launch.script_args, "dataset_name", None)
    if not name or not os.path.exists(name):
        return None
    inputs = load_module((launch.recipe / "inputs.py").resolve())
    total = 0
    try:
        for path in inputs.local_files(name, getattr(script_args, "dataset_train_split", "train") or "train"):
            if path.suffix == ".jsonl":
                with open(path, "rb") as file:
                    total += sum(1 for line in file if line.strip())
            elif path.suffix == ".parquet":
                import pyarrow.parquet

                total += pyarrow.parquet.ParquetFile(path).metadata.num_rows
            else:
                total += sum(1 for _ in inputs.read_file(path))
    except (OSError, ValueError) as error:
        launch.add(
            "data", launch.where("dataset_name"), "dataset_name", f"{error}", launch.line("dataset_name", "FILE")
        )
        return None
    fraction = getattr(launch.recipe_args, "eval_fraction", 0) or 0
    return total - (min(max(1, round(total * fraction)), total - 1) if fraction and total > 1 else 0)


def plan(launch: Launch) -> Plan:
    """Plan the run and add what is wrong with it; needs the arguments and, for time and disk, the model's config."""
    args, found = launch.training_args, Plan()
    micro, accumulation = max(args.per_device_train_batch_size, 1), max(args.gradient_accumulation_steps, 1)
    found.global_batch = micro * accumulation * launch.world
    length = args.max_length or getattr(launch.model_config, "max_position_embeddings", None) or 1024
    found.tokens = found.global_batch * length
    found.rows = count_rows(launch)
    if found.rows is not None and args.max_steps <= 0 and not args.packing:  # packed rows are fewer
        batches = math.ceil(found.rows / (micro * launch.world))
        found.steps = math.ceil(args.num_train_epochs * max(math.ceil(batches / accumulation), 1))
    elif args.max_steps > 0:
        found.steps = args.max_steps
    if found.steps is not None:
        found.warmup = args.get_warmup_steps(found.steps)
    _schedule(launch, found)
    meta = meta_model(launch)
    if meta is None:
        return found
    found.parameters = found.trained = sum(p.numel() for p in meta.parameters())
    if launch.model_args.use_peft:
        found.trained = adapter_parameters(meta, launch.model_args)
    _time(launch, found, length)
    _disk(launch, found)
    return found


def adapter_parameters(meta, args) -> int:
    """Parameters of the LoRA adapter: r x (in + out) for a linear layer, times the experts for a fused parameter."""
    import re

    targets, parameters = args.lora_target_modules, args.lora_target_parameters or []
    if not targets and not parameters:
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

        targets = DEFAULTS.get(meta.config.model_type, [])

    def wanted(name):
        if targets == "all-linear":
            return not name.endswith("lm_head")
        if isinstance(targets, str):
            return re.fullmatch(targets, name)
        return any(name == target or name.endswith(f".{target}") for target in targets or [])

    total = 0
    for name, module in meta.named_modules():
        if type(module).__name__ == "Linear" and wanted(name):
            total += args.lora_r * (module.in_features + module.out_features)
    for name, parameter in meta.named_parameters():
        if any(name == target or name.endswith(f".{target}") for target in parameters):
            experts, *sides = parameter.shape if parameter.ndim == 3 else (1, *parameter.shape)
            total += args.lora_r * experts * sum(sides)
    return total


def _text(value) -> str:
    return str(getattr(value, "value", value))


def _schedule(launch: Launch, found: Plan) -> None:
    args, steps = launch.training_args, found.steps
    if found.rows is not None and found.rows < launch.world:
        launch.add(
            "few-rows",
            launch.where("dataset_name"),
            "dataset_name",
            f"{found.rows} training row(s) for {launch.world} processes: some would train on a copy.",
            launch.line("dataset_name", "a file with more rows"),
        )
    elif found.rows is not None and found.rows < found.global_batch:
        launch.warn(
            "batch",
            launch.where("gradient_accumulation_steps"),
            "gradient_accumulation_steps",
            f"the global batch of {found.global_batch} is larger than the {found.rows} training rows.",
            launch.line("gradient_accumulation_steps", 1),
        )
    if (
        args.dataloader_drop_last
        and found.rows is not None
        and found.rows < max(args.per_device_train_batch_size, 1) * launch.world
    ):
        launch.add(
            "few-rows",
            launch.where("dataloader_drop_last"),
            "dataloader_drop_last",
            "the only batch is not full and would be dropped: nothing is trained.",
            launch.line("dataloader_drop_last", False),
        )
    if steps is None:
        return
    if found.warmup >= steps and args.warmup_steps and not _text(args.lr_scheduler_type).startswith("constant"):
        launch.add(
            "warm-up",
            launch.where("warmup_steps"),
            "warmup_steps",
            f"{found.warmup} warm-up steps of {steps} steps: the learning rate never reaches its value.",
            launch.line("warmup_steps", 0.03),
        )
    planned = {"total_num_steps": steps, "warmup_num_steps": max(1, found.warmup)}
    scheduler = (launch.deepspeed or {}).get("scheduler")
    asked = scheduler.get("params", {}) if isinstance(scheduler, dict) else {}
    for key, number in planned.items():
        if isinstance(asked.get(key), int) and asked[key] != number:
            why = f"it says {asked[key]}, the recipe's run has {number}; the start is refused."
            launch.add("mismatch", launch.deepspeed_file, f"scheduler.params.{key}", why, f'"{key}": "auto"')
    for name in ("save", "eval"):
        every, kind = getattr(args, f"{name}_steps"), _text(getattr(args, f"{name}_strategy"))
        if kind == "steps" and every and every > steps:
            what = "checkpoint" if name == "save" else "evaluation"
            launch.warn(
                f"{name}-never",
                launch.where(f"{name}_steps"),
                f"{name}_steps",
                f"{every:g} is more than the {steps} steps: the only {what} comes at the end.",
                launch.line(f"{name}_steps", max(steps // 4, 1)),
            )
    if args.eval_delay and args.eval_delay >= steps and _text(args.eval_strategy) == "steps":
        launch.warn(
            "eval-never",
            launch.where("eval_delay"),
            "eval_delay",
            f"{args.eval_delay:g} is not less than the {steps} steps: no evaluation comes.",
            launch.line("eval_delay", 0),
        )
    saves = _saves(args, steps)
    if saves > 3 and args.save_total_limit is None:
        launch.warn(
            "no-limit",
            launch.where("save_total_limit"),
            "save_total_limit",
            f"unset, all {saves} checkpoints are kept.",
            launch.line("save_total_limit", 2),
        )


def _saves(args, steps: int) -> int:
    """How many checkpoints a run of `steps` steps writes."""
    kind = _text(args.save_strategy)
    if kind == "no":
        return 0
    if kind == "epoch":
        return math.ceil(args.num_train_epochs)
    every = args.save_steps if args.save_steps >= 1 else max(1, math.ceil(args.save_steps * steps))
    return math.ceil(steps / every)


def _time(launch: Launch, found: Plan, length: int) -> None:
    facts = launch.gpu_facts
    if facts is None or not facts.tflops or launch.cpu:
        return
    import flops

    trained = "full"
    if launch.model_args.use_peft:
        trained = "expert_lora" if launch.model_args.lora_target_parameters else "lora"
    try:
        found.flops = flops.flops_per_token(launch.model_config, length, trained)
        forward = flops.flops_per_token(launch.model_config, length, "full") / 3
    except (AttributeError, TypeError):  # a config without the dimensions that are counted
        return
    work = found.tokens * (found.flops + (forward if launch.training_args.activation_checkpointing else 0))
    found.fastest = work / (launch.world * facts.tflops * 1e12 * SUSTAINED)
    found.usual = found.tokens * found.flops / (launch.world * facts.tflops * 1e12 * USUAL)
    found.usual = max(found.usual, found.fastest)
    found.measured, found.measured_from = measured(launch)


def measured(launch: Launch) -> tuple[float | None, str]:
    """Seconds of a step of the same recipe, config, strategy and processes: an earlier run's, else docs/gpu_check.json's."""
    folder = Path(launch.training_args.output_dir)
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))["arguments"]
        same = record["strategy"] == launch.strategy and record["world_size"] == launch.world
        same = same and record["max_length"] == launch.training_args.max_length
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        times = [(line["step"], line["time"]) for line in lines if "loss" in line]
        pauses = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(times) if b[0] > a[0]]
        if same and len(pauses) > 2 and not launch.elsewhere:
            return statistics.median(pauses[1:]), f"earlier run in {folder}"
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        report = json.loads((ROOT / "docs" / "gpu_check.json").read_text(encoding="utf-8"))
        name = launch.recipe.resolve().name
        if launch.gpu and all(launch.gpu.split("-")[0] in gpu.lower() for gpu in report["gpus"]):
            for cell in report["cells"]:
                same = (
                    cell["name"] == name and cell["strategy"] == launch.strategy and launch.world == len(report["gpus"])
                )
                if same and "step_seconds" in cell and launch.config_file.stem == "config":
                    return cell["step_seconds"], f"docs/gpu_check.json, rows of about 700 tokens, {report['gpus'][0]}"
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None, ""


def _disk(launch: Launch, found: Plan) -> None:
    """Checkpoints hold fp32 weights and the optimizer (DeepSpeed: bf16 weights beside the fp32 masters)."""
    args = launch.training_args
    moments = 2 if "8bit" in _text(args.optim) else 8
    each = 4 if args.save_only_model else 4 + moments + (2 if launch.is_deepspeed else 0)
    found.checkpoint_bytes = found.trained * each
    wide = 4 if launch.model_args.use_peft or not launch.is_deepspeed else 2
    found.final_bytes = found.trained * wide
    if found.steps is not None:
        saves = _saves(args, found.steps)
        found.checkpoints = min(saves, (args.save_total_limit or saves) + 1)
    elif args.save_total_limit and _text(args.save_strategy) != "no":
        found.checkpoints = args.save_total_limit + 1
    if launch.elsewhere:
        return
    folder = Path(args.output_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    found.free_bytes = shutil.disk_usage(folder).free
    need = (found.checkpoints or 0) * found.checkpoint_bytes + found.final_bytes
    if need > found.free_bytes:
        launch.add(
            "disk",
            launch.where("output_dir"),
            "output_dir",
            f"{found.checkpoints} checkpoint(s) of {found.checkpoint_bytes / GIB:.1f} GiB and "
            f"the result need {need / GIB:.1f} GiB; {found.free_bytes / GIB:.1f} GiB are free there.",
            launch.line("output_dir", "a folder on a larger disk") + f", or {launch.line('save_total_limit', 1)}",
        )
