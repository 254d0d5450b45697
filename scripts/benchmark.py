"""Tokens per second, MFU, memory and start-up of the recipes on one GPU, beside their peers, one lever at a time.

    python scripts/benchmark.py run WORK --target llama --arms seed trl full --seconds 40 --budget 500
    python scripts/benchmark.py run WORK --target qwen-lora --arms add drop        # every lever, on and off
    python scripts/benchmark.py run WORK --target llama qwen-lora --arms trl full --repeat 2 --overlap 2 --skip-kept
    python scripts/benchmark.py run WORK --target gpt-oss-120b --arms full --depth 4 8 12
    python scripts/benchmark.py run WORK --target llama --arms full --rows dense:1024 dense:16384 --repeat 2
    python scripts/benchmark.py run WORK --plan WORK/plan.jsonl --overlap 2         # single arms of many targets, in order
    python scripts/benchmark.py run WORK --target llama --arms seed full --rehearse # tiny model, CPU
    python scripts/benchmark.py list                                               # targets and arms, with their flags
    python scripts/benchmark.py keep WORK/benchmark.jsonl                          # into docs/benchmark.json
    python scripts/benchmark.py table docs/results.md                              # between the marks there
    python scripts/benchmark.py plot docs/benchmark.svg

Every arm is one process: the recipe's own train.py under its launch file (or TRL's sft.py, or Unsloth), started by
bench_run.py, which exchanges rows and weights and holds the clock. The weights are random, in the published dimensions.
The rows are random token ids with labels on all of them; their lengths are one frozen list (lognormal, mean 600, the
same for every arm). A correctness gate (bench_gate.py) comes first. Each result is written as soon as it is there, and
what WORK/benchmark.jsonl holds is not run again.
"""

import argparse
import collections
import contextlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import yaml
from bars import track
from published_models import PUBLISHED

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
KEPT = ROOT / "docs" / "benchmark.json"
MEAN, SIGMA, SEED = 600, 1.0, 0  # of the document lengths: lognormal
ATTENTION = {"attn_implementation": "flash_attention_4"}
COMPILE = {
    "torch_compile": True,
    "env": {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true", "ACCELERATE_DYNAMO_USE_DYNAMIC": "true"},
}
NO_CHECKPOINTING = {"activation_checkpointing": False}
FUSED_EXPERTS = {"model_init_kwargs": {"experts_implementation": "fused"}}  # the recipe's fused_experts.py
# torchao's Adam rounds bf16 weights at random: what the recipes' guard asks for.
ROUNDED = {"dtype": "bfloat16", "optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}
# On Hopper torch's SDPA takes cuDNN first, which builds a plan for every new (batch, padded length).
CUDNN_LAST = {"env": {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}}


# Peers that need other versions of the libraries: each has an environment of its own, and reads its weights from files.
PEERS = {"unsloth": "bench_unsloth.py", "axolotl": "bench_axolotl.py"}


@dataclass
class Target:
    """One row of the result table: what is trained, and the levers between its slowest and its fastest settings."""

    recipe: str
    model: tuple[str, str]  # family and size of tiny_model.py
    trained: str  # flops.TRAINED
    base: dict  # settings before any lever, all of them spelled out
    levers: dict[str, dict]  # in order: each on top of those before it (add), and each taken from all (drop)
    config: str = "config"
    strategy: str = "single"
    label: str = ""  # what a reader has to know beside the number
    extra: dict[str, dict] = field(default_factory=dict)  # all levers, and this change
    trl: dict | None = None  # what TRL's script needs beyond its defaults; None: no such arm
    unsloth: dict | None = None
    axolotl: dict | None = None


def _batch(batch: int, accumulation: int = 1) -> dict:
    return {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}


def _packed(batch: int, accumulation: int = 1, length: int = 4096) -> dict:
    return {"packing": True, "max_length": length} | _batch(batch, accumulation)


def _unpacked(batch: int, accumulation: int, length: int) -> dict:
    return _packed(batch, accumulation, length) | {"packing": False}


def _lora(rank: int, *modules: str) -> dict:
    return {"use_peft": True, "lora_r": rank, "lora_alpha": 2 * rank, "lora_target_modules": list(modules)}


ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
# axolotl's fastest for gpt-oss.
AXOLOTL = {"rank": 8, "modules": ATTENTION_MODULES, "length": 4096}
AXOLOTL |= {"attention": "flash_attention_4", "experts": "scattermoe"}
EXPERT_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LINEAR_MODULES = (*ATTENTION_MODULES, "gate_proj", "up_proj", "down_proj")
TARGETS = {
    "llama": Target(
        recipe="llama-3.2-1b",
        model=("llama", "1b"),
        trained="full",
        strategy="zero1",
        label="bf16 with fp32 masters (ZeRO-1)",
        base=_unpacked(2, 1, 4096) | {"attn_implementation": "sdpa", "dtype": "float32"} | NO_CHECKPOINTING,
        levers={
            "FA4": ATTENTION,
            "packed 8 x 4096": _packed(8),
            "Liger norms, SwiGLU, rope": {"use_liger_kernel": True},
        },
        extra={
            "compile without Liger": COMPILE | {"use_liger_kernel": False},
            "fp32 weights, autocast": {"strategy": "single"},
            "4 x 4096": _batch(4),
            "16 x 4096": _batch(16),
            "activation checkpointing": {"activation_checkpointing": True},
            "fixed shapes": {"pad_to_multiple_of": 8 * 4096},
        },
        trl={},
        unsloth={"full": True, "batch": 8, "accumulation": 1, "length": 4096, "checkpointing": False},
    ),
    "qwen-lora": Target(
        recipe="qwen3-8b-invoice",
        config="lora",
        model=("qwen3", "8b"),
        trained="lora",
        label="bf16 base, fp32 adapter r16 on all linear layers",
        base=_unpacked(2, 2, 4096)
        | {"attn_implementation": "sdpa", "lora_dropout": 0.05, "activation_checkpointing": True},
        levers={
            "FA4": ATTENTION,
            "packed 4 x 4096": _packed(4),
            "LoRA dropout 0": {"lora_dropout": 0.0},
            "no checkpointing, 2 x 4096 x 2": NO_CHECKPOINTING | _batch(2, 2),
            "Liger norms, SwiGLU, rope": {"use_liger_kernel": True},
        },
        extra={
            "compile without Liger": COMPILE | {"use_liger_kernel": False},
            "checkpointing, 4 x 4096": {"activation_checkpointing": True} | _batch(4),
            "3 x 4096": _batch(3),
        },
        trl=_lora(16, *LINEAR_MODULES),
        unsloth={"rank": 16, "modules": LINEAR_MODULES, "batch": 4, "accumulation": 1, "length": 4096},
    ),
    "qwen-full": Target(
        recipe="qwen3-8b-invoice",
        model=("qwen3", "8b"),
        trained="full",
        label="8-bit Adam, fp32 weights unless named",
        base=_unpacked(2, 2, 4096)
        | {"attn_implementation": "sdpa", "optim": "adamw_8bit", "dtype": "float32", "activation_checkpointing": True},
        levers={
            "FA4": ATTENTION,
            "packed 4 x 4096": _packed(4),
            "Liger norms, SwiGLU, rope": {"use_liger_kernel": True},
        },
        extra={
            "bf16 weights": {"dtype": "bfloat16", "bf16_weights": True},
            "every second layer, 2 x 4096 x 2": {
                "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2}
            }
            | _batch(2, 2),
            "no checkpointing, 1 x 4096 x 4": NO_CHECKPOINTING | _batch(1, 4),
            "bf16 weights, no checkpointing, 2 x 4096 x 2": {"dtype": "bfloat16", "bf16_weights": True}
            | NO_CHECKPOINTING
            | _batch(2, 2),
            "bf16 weights rounded at random, no checkpointing, 2 x 4096 x 2": ROUNDED | NO_CHECKPOINTING | _batch(2, 2),
        },
        trl={"optim": "adamw_8bit"},
        unsloth={"full": True, "batch": 4, "accumulation": 1, "length": 4096, "optim": "adamw_8bit"},
    ),
    "gpt-oss-20b-lora": Target(
        recipe="gpt-oss-20b",
        model=("gpt-oss", "20b"),
        trained="lora",
        label="bf16 base, fp32 adapter r8 on attention",
        base=_unpacked(1, 2, 2048)
        | {"attn_implementation": "eager", "lora_dropout": 0.05, "activation_checkpointing": True},
        levers={
            "FA4": ATTENTION,
            "packed 4 x 4096": _packed(4),
            "LoRA dropout 0": {"lora_dropout": 0.0},
            "no checkpointing, 2 x 4096 x 2": NO_CHECKPOINTING | _batch(2, 2),
            "Liger norms, rope": {"use_liger_kernel": True},
        },
        extra={
            "compile without Liger": COMPILE | {"use_liger_kernel": False},
            "checkpointing, 8 x 4096": {"activation_checkpointing": True} | _batch(8),
            "3 x 4096": _batch(3),
            "fused experts": FUSED_EXPERTS,
            "fused experts, 4 x 4096": FUSED_EXPERTS | _batch(4),
        },
        trl=_lora(8, *ATTENTION_MODULES) | {"dtype": "bfloat16"},
        unsloth={"rank": 8, "modules": ATTENTION_MODULES, "batch": 4, "accumulation": 1, "length": 4096},
        axolotl=AXOLOTL | {"batch": 2, "accumulation": 2, "checkpointing": False},
    ),
    "gpt-oss-20b-experts": Target(
        recipe="gpt-oss-20b",
        config="expert_lora",
        model=("gpt-oss", "20b"),
        trained="expert_lora",
        label="bf16 base, fp32 adapter r8 on attention and experts",
        base=_unpacked(1, 2, 2048) | {"attn_implementation": "eager", "activation_checkpointing": True},
        levers={
            "FA4": ATTENTION,
            "packed 4 x 4096": _packed(4),
            "8 x 4096": _batch(8),
            "Liger norms, rope": {"use_liger_kernel": True},
        },
        extra={"fused experts": FUSED_EXPERTS},
        trl=_lora(8, *ATTENTION_MODULES)
        | {
            "dtype": "bfloat16",
            "lora_dropout": 0.0,
            "lora_target_parameters": EXPERT_PARAMETERS,
        },
        unsloth={
            "rank": 8,
            "modules": (*ATTENTION_MODULES, "gate_proj", "up_proj", "down_proj"),
            "batch": 4,
            "accumulation": 1,
            "length": 4096,
        },
        axolotl=AXOLOTL | {"parameters": EXPERT_PARAMETERS, "batch": 8, "accumulation": 1, "checkpointing": True},
    ),
    "gpt-oss-20b-full": Target(
        recipe="gpt-oss-20b",
        model=("gpt-oss", "20b"),
        trained="full",
        label="bf16 weights (refused where they are not rounded at random), 8-bit Adam",
        base=_unpacked(1, 2, 2048)
        | {"attn_implementation": "eager", "use_peft": False, "optim": "adamw_8bit", "bf16_weights": True}
        | {"activation_checkpointing": True, "learning_rate": 1e-6},
        levers={"FA4": ATTENTION, "packed 2 x 4096 x 2": _packed(2, 2)},
        extra={
            "4 x 4096": _batch(4),
            "fused experts": FUSED_EXPERTS,
            "fused experts, Liger, 4 x 4096": FUSED_EXPERTS | {"use_liger_kernel": True} | _batch(4),
            "fused experts, Liger, 4 x 4096, rounded at random": FUSED_EXPERTS
            | {"use_liger_kernel": True, "bf16_weights": False}
            | ROUNDED
            | _batch(4),
        },
    ),
    "gpt-oss-120b": Target(
        recipe="gpt-oss-120b",
        model=("gpt-oss", "120b"),
        trained="lora",
        label="bf16 base, adapter on attention; depth cut",
        base=_unpacked(1, 4, 2048)
        | {"attn_implementation": "eager", "lora_dropout": 0.05, "activation_checkpointing": True},
        levers={"FA4": ATTENTION, "packed 4 x 4096": _packed(4), "LoRA dropout 0": {"lora_dropout": 0.0}},
        extra={
            "8 x 4096": _batch(8),
            "fused experts": FUSED_EXPERTS,
            "fused experts, no checkpointing": FUSED_EXPERTS | NO_CHECKPOINTING,
        },
    ),
}


def derived_target(recipe: Path) -> Target:
    """The target of a recipe that TARGETS does not name: its config.yaml, from the slowest of three settings on."""
    config = yaml.safe_load((recipe / "config.yaml").read_text(encoding="utf-8"))
    batch, accumulation = config["per_device_train_batch_size"], config.get("gradient_accumulation_steps", 1)
    base = _unpacked(batch, accumulation, config["max_length"]) | {"attn_implementation": "sdpa"}
    return Target(
        recipe=recipe.name,
        model=PUBLISHED[config["model_name_or_path"]],
        trained="lora" if config.get("use_peft") else "full",
        label=f"{'adapter' if config.get('use_peft') else 'all weights'} as in config.yaml",
        base=base | {"activation_checkpointing": config.get("activation_checkpointing", False)},
        levers={"FA4": ATTENTION, "packed": {"packing": True}, "Liger": {"use_liger_kernel": True}},
        trl=None,
    )


TARGETS |= {
    path.parent.name: derived_target(path.parent)
    for path in sorted((ROOT / "recipes").glob("*/train.py"))
    if path.parent.name not in {target.recipe for target in TARGETS.values()}
}


def arms(target: Target) -> dict[str, dict]:
    """Every arm of a target by name, with its settings. `seed` has no lever, `full` has all, `default` the recipe's own."""
    made, settings = {"default": {}, "seed": dict(target.base)}, dict(target.base)
    for name, change in target.levers.items():
        settings |= change
        made[f"add: {name}"] = dict(settings)
    made["full"] = settings
    for name in target.levers:
        others = dict(target.base)
        for other, change in target.levers.items():
            others |= {} if other == name else change
        made[f"drop: {name}"] = others
    made |= {f"full, {name}": settings | change for name, change in target.extra.items()}
    if target.base["attn_implementation"] == "sdpa":
        made["seed with cuDNN attention last"] = target.base | CUDNN_LAST
    if target.trl is not None:
        made["trl"] = target.trl
    made |= {name: getattr(target, name) for name in PEERS if getattr(target, name) is not None}
    # The last `add` is `full`; a recipe without that lever is not measured twice.
    made.pop(f"add: {list(target.levers)[-1]}")
    return made


def opt_in(settings: dict) -> bool:
    """Whether an arm's settings need a file that works around a library, which the recipes leave off: fused experts."""
    return settings.get("model_init_kwargs") == FUSED_EXPERTS["model_init_kwargs"]


def refused(settings: dict) -> bool:
    """Whether the recipe's guard, switched off for the arm, refuses these settings: bf16 weights without masters."""
    return settings.get("bf16_weights", False)


def settings_of(target: Target, arm: str, rows: str) -> dict:
    """An arm's settings for these rows: documents of N tokens are as long as the limit, in micro-batches as large."""
    settings = dict(arms(target)[arm])
    if rows.startswith("dense:") and "max_length" in settings:
        size = int(rows.partition(":")[2])
        tokens = settings["max_length"] * settings["per_device_train_batch_size"]
        settings |= {"max_length": size, "per_device_train_batch_size": max(1, tokens // size)}
    return settings


def chosen_arms(target: Target, wanted: list[str]) -> list[str]:
    """Names of arms that `wanted` asks for: a name, the part before the colon (add, drop), or `extra`."""
    names = []
    for word in wanted:
        start = "full, " if word == "extra" else f"{word}: "
        fits = [word] if word in arms(target) else [n for n in arms(target) if n.startswith(start)]
        names += [n for n in fits if n not in names]
    return names


def check_arms(targets: list[str], wanted: list[str]) -> None:
    """Ends the program where a wanted arm is one of no target."""
    for word in wanted:
        if not any(chosen_arms(TARGETS[name], [word]) for name in targets):
            there = "; ".join(dict.fromkeys(arm for name in targets for arm in arms(TARGETS[name])))
            sys.exit(f"error: --arms {word}: there is no such arm. There are: {there}.")


# -------------------------------------------------------------------------------------------------------------- rows


def document_lengths(kind: str, tokens: int, limit: int) -> np.ndarray:
    """The frozen list: document lengths in tokens that come to at least `tokens` together, each at most `limit`.

    kind: "real" (lognormal, mean 600), or "dense:N" (every document has N tokens).
    """
    if kind.startswith("dense:"):
        size = int(kind.partition(":")[2])
        return np.full(math.ceil(tokens / size), size)
    draw = np.random.default_rng(SEED)
    count = math.ceil(tokens / MEAN * 1.3) + 20
    lengths = draw.lognormal(math.log(MEAN) - SIGMA**2 / 2, SIGMA, 1_000_000)[:count]
    return np.clip(lengths, 16, limit).astype(int)


def write_rows(path: Path, lengths: np.ndarray, vocabulary: int) -> Path:
    """A parquet file of random token ids, `input_ids` and `labels` (the same: every token is trained)."""
    import pyarrow
    import pyarrow.parquet

    draw = np.random.default_rng(SEED + 1)
    # Above every special token of the tiny tokenizers, so that padding is told from data; below, where it is tiny.
    low, high = (1000, vocabulary - 1000) if vocabulary > 4000 else (0, 256)
    values = pyarrow.array(draw.integers(low, high, int(lengths.sum()), dtype=np.int64))
    offsets = pyarrow.array(np.concatenate([[0], np.cumsum(lengths)]), pyarrow.int32())
    ids = pyarrow.ListArray.from_arrays(offsets, values)
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": ids, "labels": ids}), path)
    return path


def model_folder(target: Target, work: Path, depth: int | None, rehearse: bool, weights: str) -> Path:
    """A folder with config, tokenizer and, where they are to be read from files, weights; made on first use."""
    family, size = target.model
    folder = (
        work
        / "models"
        / "-".join([family, "tiny" if rehearse else size, *([f"{depth}-layers"] if depth else []), weights])
    )
    if folder.is_dir():
        return folder
    import tiny_model
    from transformers import AutoModelForCausalLM, GenerationConfig

    if weights == "file":  # in a process of its own: it takes the GPU
        command = [sys.executable, SCRIPTS / "tiny_model.py", family, folder, "--dtype", "bfloat16"]
        command += [] if rehearse else ["--size", size]
        subprocess.run([*map(str, command), *(["--layers", str(depth)] if depth else [])], check=True)
        return folder
    tokenizer = tiny_model.build_tokenizer(family)
    if rehearse:
        config = tiny_model.build_config(family, tokenizer, depth or 2)
    else:
        config = tiny_model.build_real_config(family, size, tokenizer, depth)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig().save_pretrained(folder)
    return folder


# -------------------------------------------------------------------------------------------------------------- arms


def command_line(target: Target, arm: str, settings: dict, model: Path, rows: Path, out: Path, options) -> list[str]:
    """What starts one arm."""
    flags = {"model_name_or_path": model, "output_dir": out, "save_strategy": "no", "eval_strategy": "no"}
    flags |= {"max_steps": 10_000, "logging_steps": 5, "report_to": "none"}
    flags |= {"use_cpu": True} if options.rehearse else {}
    if arm in PEERS:
        settings = settings | (
            {"attention": "eager", "experts": "eager", "bf16": False, "length": 256} if options.rehearse else {}
        )
        return [sys.executable, str(SCRIPTS / PEERS[arm]), str(model), json.dumps(settings)]
    left_out = ["env", "strategy", "bf16_weights"]
    left_out += ["attn_implementation", "use_liger_kernel"] if options.rehearse else []  # kernels for GPUs
    settings = {k: v for k, v in settings.items() if k not in left_out}
    if arm == "trl":
        import trl

        script = [Path(trl.__file__).parent / "scripts" / "sft.py"]
        flags |= {"dataset_name": rows.parent}
    else:
        script = [ROOT / "recipes" / target.recipe / "train.py", "--config", target.config]
        flags |= {"dataset_name": rows, "assistant_only_loss": False}
    strategy = arms(target).get(arm, {}).get("strategy", "single" if arm == "trl" else target.strategy)
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file"]
    command += [f"accelerate_configs/{strategy}.yaml", "--num_processes", "1", "--main_process_port", "0"]
    command += [SCRIPTS / "bench_run.py", *script]
    for key, value in (flags | settings).items():
        if isinstance(value, list):
            command += [f"--{key}", *value]
        elif value is not None:
            command += [f"--{key}", value if isinstance(value, str | Path) else json.dumps(value)]
    return [str(word) for word in command]


def device_environment(options) -> dict[str, str]:
    """No GPU where it is only rehearsed; FlashAttention's compiled kernels are kept where start-up is not measured."""
    kept = {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(options.work / "flash-attention"),
    }
    return ({"CUDA_VISIBLE_DEVICES": ""} if options.rehearse else {}) | (kept if options.overlap else {})


class Arm:
    """One arm's process. It imports at once and takes the device when `go` is called."""

    def __init__(self, name: str, number: int, target: Target, key: dict, model: Path, rows: Path, options):
        work = options.work
        self.key, self.log = key, work / "logs" / f"{number:03}.log"
        self.result, self.gate = work / "logs" / f"{number:03}.json", work / "logs" / f"{number:03}.go"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        for file in (self.result, self.gate):
            file.unlink(missing_ok=True)
        settings = settings_of(target, name, key["rows"])
        passed = {
            "rows": str(rows),
            "result": str(self.result),
            "gate": str(self.gate),
            "warmup": options.warmup,
            "steps": options.steps,
            "seconds": options.seconds,
            "weights": "file" if name in PEERS else options.weights,
            "bf16_weights": refused(settings),
            "profile": str(work / f"profile-{number:03}.txt") if options.profile and not key["repeat"] else None,
        }
        environment = os.environ | {
            "BENCH_OPTIONS": json.dumps(passed),
            "BENCH_STARTED": str(time.time()),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            **device_environment(options),
            **settings.get("env", {}),
        }
        if name in PEERS:
            environment["PYTHONPATH"] = getattr(options, f"{name}_site")
            environment["UNSLOTH_COMPILE_LOCATION"] = str(work / "unsloth")  # else in the working directory
        run = work / "runs" / f"{number:03}"
        shutil.rmtree(run, ignore_errors=True)  # of an arm that was stopped in an earlier call
        command = command_line(target, name, settings, model, rows, run, options)
        with open(self.log, "w", encoding="utf-8") as output:
            output.write(" ".join(command) + "\n")
            output.flush()
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def finish(self, timeout: float) -> dict:
        """Let it run, and return what it measured, or the error."""
        self.gate.touch()
        try:
            problem = f"exit code {self.process.wait(max(timeout, 1))}"
        except subprocess.TimeoutExpired:
            problem = f"no result after {timeout:.0f} s"
        self.stop()
        if self.result.is_file():
            return json.loads(self.result.read_text())
        text = self.log.read_text(errors="replace")
        told = text.find(
            "\nerror:"
        )  # the recipe's own paragraph; else the end of what came before the launcher's words
        rank = re.split(r"torch[./]distributed[./]elastic", text)[0]
        return {"error": problem, "output": text[told:][:2000] if told >= 0 else rank[-2000:]}

    def stop(self) -> None:
        """End the launcher and its rank, which torchrun gives a session of its own: it would keep its GPU memory."""
        ranks = []
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            launcher.suspend()  # it starts nothing more while its ranks are listed
            ranks = launcher.children(recursive=True)
        for process in [*ranks, self.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        psutil.wait_procs(ranks, timeout=10)


def figures(result: dict, config, lengths: np.ndarray, trained: str) -> dict:
    """What follows from a result: F, MFU (of 989 TFLOP/s) and the share of the measured matmul ceiling (790)."""
    import flops

    count = flops.flops_per_token(config, lengths, trained)
    rate = result["tokens_per_second"] * count
    return {"flops_per_token": count, "mfu": rate / flops.PEAK, "share_of_ceiling": rate / flops.CEILING}


def read_plan(path: Path) -> list[dict]:
    """What to measure, from a file of JSON lines: `target` and `arm`, and where needed `rows`, `depth` and `repeat`."""
    plan = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        wanted = json.loads(line)
        if wanted["target"] not in TARGETS or wanted["arm"] not in arms(TARGETS[wanted["target"]]):
            sys.exit(f"error: {path}, line {number}: no such target or arm. `benchmark.py list` names them all.")
        plan.append({"rows": "real", "depth": None, "repeat": 0} | wanted)
    return plan


def planned(options, done: list[dict]) -> list[dict]:
    """Keys of what is to be measured, in order: the plan's, or every arm of every target once, then the next repeat."""
    if options.plan:
        keys = [key | {"weights": options.weights, "rehearse": options.rehearse} for key in read_plan(options.plan)]
        return [key for key in keys if key not in done]
    plan = []
    for repeat in range(options.repeat):
        for name in options.target:
            for rows in options.rows:
                for depth in options.depth or [None]:
                    for arm in chosen_arms(TARGETS[name], options.arms):
                        key = {"target": name, "arm": arm, "rows": rows, "depth": depth, "repeat": repeat}
                        key |= {"weights": options.weights, "rehearse": options.rehearse}
                        plan += [] if key in done else [key]
    return plan


def pass_gate(options, plan: list[dict]) -> None:
    """Run the correctness gate of each model that it has not passed yet; ends the program where one fails."""
    models = dict.fromkeys(TARGETS[key["target"]].model for key in plan)
    names = [f"{family}:{'tiny' if options.rehearse else size}" for family, size in models]
    if options.skip_kept and KEPT.is_file():
        passed = [line["model"] for line in read_kept()["gate"] if line["passed"]]
        names = [name for name in names if f"{name.replace(':', ' ')}, 2 layers" not in passed]
    if not names:
        return
    command = [sys.executable, str(SCRIPTS / "bench_gate.py"), *names, "--out", str(options.work / "gate.jsonl")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | device_environment(options)
    if subprocess.run(command, cwd=ROOT, env=environment).returncode:
        sys.exit("error: the correctness gate did not pass, so no speed is measured. Its output stands above.")


def start(options, key: dict, number: int) -> tuple[Arm, object, np.ndarray]:
    """The process of one arm, its model's config, and the document lengths that it trains on."""
    from transformers import AutoConfig

    target = TARGETS[key["target"]]
    settings, limit = settings_of(target, key["arm"], key["rows"]), 256 if options.rehearse else 4096
    weights = "file" if key["arm"] in PEERS else options.weights
    model = model_folder(target, options.work, key["depth"], options.rehearse, weights)
    config = AutoConfig.from_pretrained(model)
    length = int(settings.get("max_length") or settings.get("length") or (1024 if key["arm"] == "trl" else 4096))
    batch = settings.get("per_device_train_batch_size", settings.get("batch", 8))
    batch *= settings.get("gradient_accumulation_steps", settings.get("accumulation", 1))
    # Enough for every timed step, counted as if all rows were full; the loader starts over where they end.
    tokens = min(length * batch * (options.warmup + options.steps), 8_000_000)
    rows = document_lengths(key["rows"], 4000 if options.rehearse else tokens, limit)
    file = write_rows(options.work / "rows" / f"{number:03}" / "train.parquet", rows, config.vocab_size)
    arm = Arm(key["arm"], number, target, key, model, file, options)
    return arm, config, np.minimum(rows, length)


def run(options) -> int:
    """Measure the wanted arms, A B A B where they are repeated; each result becomes a line of WORK/benchmark.jsonl."""
    begin = time.monotonic()
    if options.target:
        check_arms(options.target, options.arms)
    options.work.mkdir(parents=True, exist_ok=True)
    out = options.work / "benchmark.jsonl"
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    done = [line["key"] for line in lines if "error" not in line]
    if options.skip_kept and KEPT.is_file():
        done += [line["key"] for line in read_kept()["results"] if line.get("steps", 0) >= options.steps]
    plan = planned(options, done)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`: no process is left behind

    failed, started = 0, collections.deque()  # arms whose processes run, in order

    def start_ahead(number: int) -> None:
        """Arm `number`, and as many after it as may import meanwhile."""
        while number + len(started) < min(number + 1 + options.overlap, len(plan)):
            ahead = number + len(started)
            started.append(start(options, plan[ahead], len(lines) + ahead))

    try:
        if options.overlap:
            start_ahead(0)
        if not options.no_gate and plan:
            pass_gate(options, plan)
        for number, key in enumerate(track(plan, "arms")):
            left = options.budget - (time.monotonic() - begin)
            if left < options.reserve:
                print(f"budget: {len(plan) - number} arms are not run", flush=True)
                break
            start_ahead(number)
            arm, config, rows = started[0]
            result = arm.finish(min(left - 5, options.arm_limit))
            started.popleft()
            target = TARGETS[key["target"]]
            line = {
                "key": key,
                "label": target.label,
                "settings": settings_of(target, key["arm"], key["rows"]),
                "date": time.strftime("%Y-%m-%d"),
                "overlap": bool(options.overlap),
                **result,
            }
            if "error" not in result:
                line |= figures(result, config, rows, target.trained)
            failed += "error" in result
            with open(out, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{time.monotonic() - begin:.0f} s: {summary(line)}", flush=True)
    finally:
        for arm, *_ in started:
            arm.stop()
    return int(failed > 0)


def summary(line: dict) -> str:
    """One line for the terminal."""
    key = line["key"]
    name = f"{key['target']} | {key['arm']} | {key['rows']}" + (f" | {key['depth']} layers" if key["depth"] else "")
    if "error" in line:
        return f"{name} | {line['error']}\n{line.get('output', '')}"
    memory = f"{line['peak_gib']['allocated']:.1f} GiB" if "peak_gib" in line else ""
    start = ", ".join(f"{part} {seconds:.1f}" for part, seconds in line["startup"].items())
    return (
        f"{name} | {line['tokens_per_second']:.0f} tok/s | MFU {line['mfu']:.1%} | {memory} | "
        f"{line['step_seconds']:.3f} s x {line['steps']} | start: {start} | loss {list(line['loss'].values())[:3]}"
    )


# ------------------------------------------------------------------------------------------------------------ report


def read_kept() -> dict:
    """docs/benchmark.json: `results`, and what the correctness `gate` found. Ends the program where there is none."""
    if not KEPT.is_file():
        sys.exit(f"error: there is no {KEPT}. Measure first: benchmark.py run ..., then benchmark.py keep FILE.")
    return json.loads(KEPT.read_text(encoding="utf-8"))


def keep(options) -> int:
    """Add lines of benchmark.jsonl and gate.jsonl to docs/benchmark.json.

    What was measured again takes its place, but an error or fewer steps never that of a result.
    """
    kept = read_kept() if KEPT.is_file() else {"gate": [], "results": []}
    for path in options.files:
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            line.pop("output", None)
            part, name = ("results", "key") if "key" in line else ("gate", "model")
            before = [other for other in kept[part] if other[name] == line[name]]
            if all(line.get("steps", 0) >= other.get("steps", 0) for other in before):
                kept[part] = [other for other in kept[part] if other not in before] + [line]
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{KEPT}: {len(kept['results'])} results")
    return 0


def grouped(results: list[dict]) -> dict[tuple, list[dict]]:
    """Results by what was measured, in the order of TARGETS and their arms; the repeats of one arm stand together."""
    groups, order = {}, {name: ["trl", *PEERS, *arms(target)] for name, target in TARGETS.items()}

    def place(line: dict) -> tuple:
        key = line["key"]
        return (
            list(order).index(key["target"]),
            int(key["rows"].partition(":")[2] or 0),
            order[key["target"]].index(key["arm"]),
            key["depth"] or 0,
        )

    for line in sorted(results, key=place):
        key = line["key"]
        groups.setdefault((key["target"], key["rows"], key["depth"], key["arm"]), []).append(line)
    return groups


def fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Least squares of seconds a token against the number of layers: (a, b) of t = a + b L. Needs two depths."""
    slope, offset = np.polyfit(*zip(*points, strict=True), 1)
    return float(offset), float(slope)


def table(results: list[dict]) -> str:
    """The Markdown table: medians over the processes of an arm, their spread, and what each arm's loss was."""
    lines = [
        "| target | arm | steps | tok/s | spread | trained tok/s | MFU | of ceiling | GiB | to step 1, s | loss, steps 1-5 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    depths = {}
    for (target, rows, depth, arm), repeats in grouped(results).items():
        place = f"{target}" + (f", {depth} layers" if depth else "") + ("" if rows == "real" else f", {rows}")
        good = [line for line in repeats if "error" not in line]
        if not good:
            lines.append(f"| {place} | {arm} | - | {repeats[-1]['error']} | | | | | | | |")
            continue

        def middle(*path, good=good):
            values = []
            for line in good:
                for part in path:
                    line = line.get(part) or {}
                values += [line] if line else []
            return statistics.median(values) if values else math.nan

        rates = [line["tokens_per_second"] for line in good]
        spread = (max(rates) - min(rates)) / statistics.median(rates)
        loss = next(iter(good[-1]["loss"].values()), math.nan)
        # Beside another arm's training, and with kernels compiled before, start-up is another figure.
        alone = [line["startup"]["total"] for line in good if not line.get("overlap")]
        lines.append(
            f"| {place} | {arm} | {' + '.join(str(line['steps']) for line in good)} | "
            f"{middle('tokens_per_second'):,.0f} | {f'{spread:.1%}' if len(good) > 1 else '-'} | "
            f"{middle('trained_tokens_per_second'):,.0f} | {middle('mfu'):.1%} | {middle('share_of_ceiling'):.1%} | "
            f"{middle('peak_gib', 'allocated'):.1f} | {f'{statistics.median(alone):.0f}' if alone else '-'} | {loss:.4f} |"
        )
        if depth:
            depths.setdefault((target, rows, arm), []).append((depth, 1 / statistics.median(rates)))
    notes = []
    for (target, rows, arm), points in depths.items():
        if len(points) > 1:
            offset, slope = fit(points)
            speed = 1 / (offset + 36 * slope)
            notes.append(
                f"{target}, {arm}, {rows}: microseconds a token = {offset * 1e6:.1f} + {slope * 1e6:.2f} L from depths "
                f"{', '.join(str(depth) for depth, _ in points)}; extrapolated, not measured, to 36 layers: "
                f"{speed:,.0f} tok/s on a GPU that could hold them."
            )
    last = next((line for line in reversed(results) if "error" not in line), None)
    if last:
        versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
        notes.append(
            f"{last['device']}; {last['date']}; {versions}. Tokens are those that are no padding. MFU: causal model FLOPs "
            "(scripts/flops.py) over 989 TFLOP/s; the ceiling is a measured bf16 matrix product, 790 TFLOP/s. Medians of "
            "the timed steps of each process; spread: between processes."
        )
    return "\n".join(lines + [text for note in notes for text in ("", note)])


def write_table(options) -> int:
    """Put the table between the marks of a Markdown file, or print it."""
    results = [line for line in read_kept()["results"] if not line["key"]["rehearse"]]
    made = table(results)
    if options.file is None:
        print(made)
        return 0
    text = options.file.read_text(encoding="utf-8")
    begin, end = "<!-- benchmark table -->", "<!-- end of benchmark table -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"error: {options.file} needs the lines {begin} and {end} once each.")
    options.file.write_text(f"{text.split(begin)[0]}{begin}\n{made}\n{end}{text.split(end)[1]}", encoding="utf-8")
    return 0


def plot(options) -> int:
    """Bars of tokens per second for each target's arms, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [r for r in read_kept()["results"] if "error" not in r and not r["key"]["rehearse"]]
    by_target = {}
    for (target, rows, _, arm), repeats in grouped([r for r in results if not r["key"]["depth"]]).items():
        if rows == "real":
            rate = statistics.median(r["tokens_per_second"] for r in repeats)
            by_target.setdefault(target, {})[arm] = (rate, statistics.median(r["mfu"] for r in repeats))
    if not by_target:
        sys.exit(f"error: {KEPT} holds no results to plot. Measure some first: python scripts/benchmark.py run ...")
    heights = [len(found) + 1 for found in by_target.values()]
    figure, axes = pyplot.subplots(
        len(by_target), figsize=(8, 0.32 * sum(heights) + 0.6), squeeze=False, height_ratios=heights
    )
    for axis, (target, found) in zip(axes[:, 0], by_target.items(), strict=True):
        bars = axis.barh(list(found), [rate for rate, _ in found.values()])
        axis.bar_label(bars, [f"{rate:,.0f} ({mfu:.0%})" for rate, mfu in found.values()], padding=3)
        axis.set_title(f"{target}, tokens/s (MFU)", loc="left")
        axis.invert_yaxis()
        axis.margins(x=0.18)
    figure.tight_layout()
    figure.savefig(options.picture)
    return 0


def show(options) -> int:
    """Print every target's arms with what they change."""
    for name, target in TARGETS.items():
        print(f"\n{name}: recipes/{target.recipe}, {target.config}.yaml, {target.strategy}.yaml; {target.label}")
        for arm, settings in arms(target).items():
            print(f"  {arm:36} {json.dumps(settings)}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("run", help="measure")
    verb.set_defaults(do=run)
    verb.add_argument("work", type=lambda text: Path(text).absolute(), help="folder for models, rows, logs, results")
    what = verb.add_mutually_exclusive_group(required=True)
    what.add_argument("--target", nargs="+", choices=TARGETS, default=[])
    what.add_argument(
        "--plan", type=Path, help="a file of JSON lines: target, arm, and where needed rows, depth, repeat"
    )
    verb.add_argument(
        "--arms",
        nargs="+",
        default=["seed", "trl", "full"],
        help="names, or add, drop, extra; of the targets that have them",
    )
    verb.add_argument("--rows", nargs="+", default=["real"], help="real, or dense:N for documents of N tokens")
    verb.add_argument("--depth", nargs="+", type=int, help="layers, in place of the published number")
    verb.add_argument("--repeat", type=int, default=1, help="processes an arm, interleaved")
    verb.add_argument("--warmup", type=int, default=10, help="steps before the timed ones")
    verb.add_argument("--steps", type=int, default=30, help="timed steps")
    verb.add_argument("--seconds", type=float, default=90, help="an arm ends this long after its first step")
    verb.add_argument("--arm-limit", type=float, default=240, help="an arm without a result is stopped after this long")
    verb.add_argument("--budget", type=float, default=560, help="seconds for all; what is measured by then is written")
    verb.add_argument("--reserve", type=float, default=45, help="no arm is begun with less than these seconds left")
    verb.add_argument("--weights", choices=["device", "file"], default="device", help="made there, or read from a file")
    verb.add_argument(
        "--overlap",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="N",
        help="the next N arms import while one trains, and compiled kernels are kept: start-up is blurred",
    )
    verb.add_argument(
        "--skip-kept", action="store_true", help="leave out what docs/benchmark.json holds, as many steps"
    )
    for peer in PEERS:
        verb.add_argument(
            f"--{peer}-site", default="", metavar="PATH", help=f"import path of that arm: {peer} and what it needs"
        )
    verb.add_argument("--profile", action="store_true", help="profile a step of each arm after the timed ones")
    verb.add_argument("--no-gate", action="store_true", help="leave the correctness gate out")
    verb.add_argument("--rehearse", action="store_true", help="tiny models on the CPU, without kernels for GPUs")
    verbs.add_parser("list", help="targets and arms").set_defaults(do=show)
    verb = verbs.add_parser("keep", help="add results to docs/benchmark.json")
    verb.set_defaults(do=keep)
    verb.add_argument("files", nargs="+", type=Path)
    verb = verbs.add_parser("table", help="write or print the table")
    verb.set_defaults(do=write_table)
    verb.add_argument("file", nargs="?", type=Path)
    verb = verbs.add_parser("plot", help="draw the bars")
    verb.set_defaults(do=plot)
    verb.add_argument("picture", type=Path)
    options = parser.parse_args()
    return options.do(options)


if __name__ == "__main__":
    sys.exit(main())
