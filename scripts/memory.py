"""How much memory a run needs, per GPU and per host, by phase and by item, from the model's config alone.

    python scripts/memory.py --compare docs/memory.json   # predicted against measured, error of each, mean and worst;
                                                          # puts the predictions into the file, for the README's table
    python scripts/memory.py --recipe llama-3.2-1b --gpus 8 --gpu-gib 80    # every strategy, for a shipped recipe

`predict(config, settings)` gives one Prediction; `table(config, settings, gpu_bytes, host_bytes)` all strategies, with
the largest micro batch that fits, the cheapest strategy, and what to change where nothing fits; `settings_of(launch)`
reads the Settings of a launch line (check_launch.Launch).

Where the bytes come from:

- Activations, temporaries, loss head, casts and gradients of one step: memory_trace.py, by torch's MemTracker.
- Weights, gradients and optimizer under each strategy: counted per tensor as FSDP2 and DeepSpeed shard them (`sharded`);
  two CPU processes are held to that to the byte.
- Gathers, buckets and host memory: formulas, each with its source in the code of the libraries (`_in_flight`, `_host`).

How far to trust it: on one GPU docs/memory.json holds measured peaks of many settings beside the predictions. Sharded runs
are checked to the byte for weights, gradients and optimizer, on CPU, and no further: their whole steps, against the memory
that the allocator had reserved on two GPUs (docs/gpu_check.json), were predicted 4 to 24 % too low (Llama 1B under zero2
and fsdp, Qwen3 8B under zero3 and fsdp, expert LoRA of four layers of gpt-oss-120b under fsdp). Leave a margin there, as
memory_chooser.py does.

To calibrate: measure with scripts/measure_memory.py, read `--compare`, and change the constants below, which are all
that is not counted or traced.
"""

import argparse
import dataclasses
import functools
import json
import math
import re
import sys
from pathlib import Path

import memory_trace
import tiny_model
import torch
import yaml
from peft import LoraConfig
from trl import ModelConfig, SFTConfig

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
STRATEGIES = ("single", "ddp", "zero1", "zero2", "fsdp", "zero3", "zero3_offload")  # the cheapest first

# Measured constants, bytes.
WORKSPACE = 72 * 2**20  # cuBLAS: one workspace for the main thread and one for that of the backward pass
CONTEXT = 600 * 2**20  # CUDA context and kernels, outside torch's allocator
NCCL = 900 * 2**20  # communicators' buffers, outside torch's allocator, with more than one GPU
PROCESS = GIB  # private host memory of a rank with all libraries imported
SLACK = 1.03  # what the allocator reserves over what it has handed out

BUCKET = 500_000_000  # elements; DeepSpeed's default `reduce_bucket_size` (stage_1_and_2.py), as zero1/2.json leave it
LIVE = 1_000_000_000  # elements; `stage3_max_live_parameters` and `stage3_max_reuse_distance` (zero/config.py)
SUB_GROUP = 1_000_000_000  # elements; `sub_group_size` (zero/config.py)
SHARD_FILE = 50 * 10**9  # bytes; `max_shard_size` of transformers' save_pretrained


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides a run's memory beside the model's config. Names are TRL's where TRL has one.

    strategy: a launch file's name, or "python" for one process without a launcher. world and local: processes in all
    and on one host. micro_batch: rows per GPU and micro step. length: tokens of a row; packed rows are one row of
    micro_batch x length. padded: rows differ in length, so there is a mask. labelled: share of tokens that bear a label.
    stored: how the weights lie on disk ("bfloat16", "float32" or "mxfp4").
    """

    strategy: str = "single"
    world: int = 1
    local: int = 1
    micro_batch: int = 1
    length: int = 2048
    accumulation: int = 1
    packing: bool = False
    padded: bool = False
    labelled: float = 1.0
    dtype: str = "float32"
    stored: str = "bfloat16"
    bf16: bool = True
    optim: str = "adamw_torch_fused"
    attention: str = "sdpa"
    experts: str = "grouped_mm"  # or "fused", of the gpt-oss recipes
    checkpointing: bool = False
    lora_r: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_parameters: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    load_in_4bit: bool = False
    load_in_8bit: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of input_ids in one micro step."""
        return (1, self.micro_batch * self.length) if self.packing else (self.micro_batch, self.length)

    @property
    def lora(self) -> LoraConfig | None:
        """The adapter's configuration, as TRL's get_peft_config makes it."""
        if not self.lora_r:
            return None
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.lora_r,
            lora_alpha=2 * self.lora_r,
            lora_dropout=self.lora_dropout,
            target_modules=list(self.lora_targets) or None,
            target_parameters=list(self.lora_parameters) or None,
        )

    @property
    def compute(self) -> str:
        """How the arithmetic gets its type: by autocast over the weights as loaded, or from weights of one dtype."""
        if self.strategy in ("python", "single", "ddp"):
            return "autocast"
        return "bfloat16" if self.bf16 else "float32"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter. unit: number of its decoder layer, "embedding" or "tail" (final norm and head)."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    decays: bool
    unit: int | str
    packs: bool  # 4-bit and 8-bit loading replace it

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass
class Prediction:
    """Bytes by item. load, step, save: on each GPU, at the peak of that phase. host_*: on one host, all its ranks.

    at: where in the step its peak lies. context: bytes on the GPU outside torch's allocator, in none of the phases.
    """

    load: dict[str, int]
    step: dict[str, int]
    save: dict[str, int]
    host_load: dict[str, int]
    host_step: dict[str, int]
    host_save: dict[str, int]
    at: str
    context: int

    @property
    def peak(self) -> int:
        """The largest of the GPU's phases: what `torch.cuda.max_memory_allocated` reports."""
        return max(sum(items.values()) for items in (self.load, self.step, self.save))

    @property
    def host(self) -> int:
        """The largest of the host's phases."""
        return max(sum(items.values()) for items in (self.host_load, self.host_step, self.host_save))

    @property
    def needs(self) -> int:
        """What the GPU must have: the peak, what the allocator reserves over it, and the context."""
        return round(self.peak * SLACK) + self.context

    def fits(self, gpu_bytes: float, host_bytes: float) -> bool:
        return self.needs <= gpu_bytes and self.host <= host_bytes


# ----------------------------------------------------------------------------------------------- what the model consists of


def parameters(config, settings: Settings) -> tuple[Parameter, ...]:
    """Every parameter of the model and its adapter, tied ones once, in the model's order."""
    return _parameters(config.to_json_string(use_diff=False), type(config), settings.lora_r, *_adapter(settings))


def _adapter(settings: Settings) -> tuple:
    return settings.lora_targets, settings.lora_parameters


@functools.lru_cache(maxsize=32)
def _parameters(config_json, kind, lora_r, targets, fused) -> tuple[Parameter, ...]:
    config = kind.from_dict(json.loads(config_json))
    model = memory_trace.meta_model(config, Settings(lora_r=lora_r, lora_targets=targets, lora_parameters=fused).lora)
    base = model.get_base_model() if lora_r else model
    embedding = base.get_input_embeddings().weight
    # What 4-bit loading packs: the recipes' expert stacks where there are some, else bitsandbytes' linear layers.
    stacks = {id(p) for n, p in base.named_parameters() if "experts" in n and p.ndim == 3 and "lora_" not in n}
    linear = {id(m.weight) for n, m in base.named_modules() if type(m).__name__ == "Linear" and "lora_" not in n}
    linear -= {id(base.get_output_embeddings().weight)}
    packed = stacks or linear
    found = []
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        tied = config.get_text_config().tie_word_embeddings
        outside = "embedding" if parameter is embedding and not tied else "tail"
        # As transformers' get_decay_parameter_names: what makes DeepSpeed's two groups.
        decays = not re.search(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", name.lower())
        unit = int(layer[1]) if layer else outside
        shape = tuple(parameter.shape)
        found.append(Parameter(name, shape, parameter.requires_grad, decays, unit, id(parameter) in packed))
    return tuple(found)


def _element(settings: Settings) -> int:
    return 4 if settings.dtype == "float32" else 2


def _stored_bytes(parameter: Parameter, settings: Settings) -> float:
    """Bytes of one parameter as it is loaded. PEFT keeps the adapter in fp32; NF4 has a scale for every 64 weights."""
    if "lora_" in parameter.name:
        # TRL casts a 4-bit model's adapter to bf16, and under ZeRO-3 the adapter keeps the base's dtype.
        half = settings.load_in_4bit or settings.strategy.startswith("zero3")
        return parameter.size * (_element(settings) if half else 4)
    if parameter.packs and settings.load_in_4bit:
        return parameter.size * 0.5625
    if parameter.packs and settings.load_in_8bit:
        return parameter.size * 1.0
    return parameter.size * _element(settings)


# ------------------------------------------------------------------------------------------------ what is sharded, exactly


def sharded(config, settings: Settings) -> dict[str, int]:
    """Bytes of `weights`, `gradients` and `optimizer` (fp32 masters included) that one rank keeps between the layers.

    Every rank holds the same. FSDP2 cuts each tensor along its first dimension and pads to whole rows
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py); ZeRO-1 and -2 cut the flat groups with and without weight
    decay, padded to 2 elements a rank (stage_1_and_2.py); ZeRO-3 cuts each tensor, padded to whole elements, and keeps
    small ones whole beside their parts (partition_parameters.py; `stage3_param_persistence_threshold` is
    10 x hidden size). Gradients are those that an optimizer step begins with.
    """
    every, world, strategy = parameters(config, settings), settings.world, settings.strategy
    trained = [p for p in every if p.trained]
    half = 2 if settings.bf16 else 4
    if strategy == "fsdp":

        def rows(p):
            return math.ceil(p.shape[0] / world) * math.prod(p.shape[1:]) if p.shape else 1

        own = sum(rows(p) for p in trained)
        frozen = sum(rows(p) * (_stored_bytes(p, settings) / p.size) for p in every if not p.trained)
        kept = 4 if settings.bf16 else _element(settings)
        return {
            "weights": round(frozen) + kept * own,
            "gradients": kept * own,
            "optimizer": _moments(settings, trained, own),
        }
    if strategy in ("zero1", "zero2"):
        groups = [sum(p.size for p in trained if p.decays == decays) for decays in (True, False)]
        flat = [math.ceil(group / (2 * world)) * 2 * world for group in groups]
        own = sum(flat) // world
        frozen = sum(p.size for p in every if not p.trained) * half
        optimizer = 4 * own + _moments(settings, trained, own)
        return {"weights": frozen + half * sum(flat), "gradients": half * own, "optimizer": optimizer}
    if strategy in ("zero3", "zero3_offload"):
        own = sum(math.ceil(p.size / world) for p in trained)
        parts = sum(math.ceil(p.size / world) for p in every)
        whole = sum(p.size for p in every if p.size <= 10 * config.get_text_config().hidden_size)
        optimizer = 4 * own + _moments(settings, trained, own)
        return {"weights": half * (parts + whole), "gradients": half * own, "optimizer": optimizer}
    own = sum(p.size for p in trained)
    weights = round(sum(_stored_bytes(p, settings) for p in every))
    gradients = round(sum(_stored_bytes(p, settings) for p in trained))
    return {"weights": weights, "gradients": gradients, "optimizer": _moments(settings, trained, own)}


def _moments(settings: Settings, trained: list[Parameter], own: int) -> int:
    """Bytes of Adam's two moments of `own` elements, a part of `trained`.

    They have the parameter's type. bitsandbytes keeps a byte each and a scale every 256 elements, and fp32 for what has
    fewer than 4096 elements; transformers' Trainer excepts embeddings from 8 bits (trainer.py, `optim_bits`). torchao's
    `adamw_torch_8bit` excepts what has fewer than 4096 elements, or no multiple of 256 (optim/adam.py, `_new_buffer`).
    """
    total = sum(p.size for p in trained)
    if not total:
        return 0
    masters = settings.strategy in ("fsdp", "zero1", "zero2", "zero3", "zero3_offload") and settings.bf16
    element = 4 if masters else sum(_stored_bytes(p, settings) for p in trained) / total
    if "8bit" not in settings.optim:
        return round(2 * element * own)
    if settings.strategy.startswith("zero"):  # one flat tensor: no name to except
        return round(own * 2 * (1 + 4 / 256))
    share, torchao = own / total, settings.optim == "adamw_torch_8bit"
    excepted = [p for p in trained if p.size < 4096 or (p.size % 256 if torchao else "embed_tokens" in p.name)]
    whole = sum(p.size for p in excepted)
    return round(share * (whole * 2 * (element if torchao else 4) + (total - whole) * 2 * (1 + 4 / 256)))


# ------------------------------------------------------------------------------------------------------- one step on a GPU

NAMES = {
    "Activation": "activations",
    "Casts": "bf16 copies of weights",
    "Experts": "experts' working set",
    "Head": "loss head",
    "Temp": "temporaries",
    "Other": "inputs",
    "Gradient": "gradients",
}


@functools.lru_cache(maxsize=256)
def _peaks(config_json, kind, settings: Settings) -> dict[str, dict[str, int]]:
    return memory_trace.at_depth(kind.from_dict(json.loads(config_json)), settings, settings.compute)


def peaks(config, settings: Settings) -> dict[str, dict[str, int]]:
    """memory_trace.at_depth, remembered: what does not touch the trace is not part of its key."""
    plain = settings.compute == "autocast"
    # "python" is measure_memory.py's own loop; the recipes spare casts of adapters.
    autocast = "python" if settings.strategy == "python" else "single"
    changes = {"strategy": autocast if plain else "zero2", "world": 1, "local": 1, "optim": "", "stored": ""}
    changes |= {"load_in_4bit": False, "load_in_8bit": False}
    changes |= {"accumulation": min(settings.accumulation, 2) if plain else 1}
    key = dataclasses.replace(settings, **changes)
    return _peaks(config.to_json_string(use_diff=False), type(config), key)


def _in_flight(config, settings: Settings, phase: str) -> dict[str, int]:
    """What sharding needs besides the shards: gathered weights, gradients on their way, buckets.

    FSDP2 holds a layer, the flat output of the next gather and the copies made of it; the tail (head, and the embedding
    tied to it) stays gathered after its forward (accelerate, fsdp_utils.py `fsdp2_prepare_model`). A layer's gradients
    are copied to the flat input of their reduce-scatter, and the last one's is freed a layer later. With accumulation
    accelerate's `no_sync` keeps every layer's gradients whole between the micro steps. ZeRO-3 keeps what it
    will use again within LIVE elements. ZeRO-1 and -2 take two buckets at the first gradient (`setup_buckets`).
    """
    every, strategy, half = parameters(config, settings), settings.strategy, 2 if settings.bf16 else 4
    units = {}
    for p in every:
        size = units.setdefault(p.unit, [0, 0])
        size[0] += p.size
        size[1] += p.size * p.trained
    layer = max((sizes for unit, sizes in units.items() if isinstance(unit, int)), default=[0, 0])
    tail, widest = units.get("tail", [0, 0]), max(trained for _, trained in units.values())
    trained, backward = sum(p.size for p in every if p.trained), phase not in ("forward", "optimizer")
    if strategy in ("single", "ddp"):  # accelerate wraps in DDP only where there is more than one process
        stored = round(sum(_stored_bytes(p, settings) for p in every if p.trained))
        return {"DDP buckets": stored} if settings.world > 1 else {}
    if phase == "optimizer":
        return {}
    if strategy == "fsdp":
        gathered = half * (3 * layer[0] + tail[0])
        whole = half * trained if settings.accumulation > 1 else 0
        return {"gathered weights": gathered, "gradients in flight": whole + 3 * half * layer[1] * backward}
    if strategy in ("zero1", "zero2"):
        # ZeRO-1 reduces at the end of the backward pass, and keeps every gradient whole until then.
        whole = half * (
            trained if strategy == "zero1" and phase not in ("head", "backward of the last layer") else widest
        )
        return {"buckets": 2 * half * BUCKET if backward else 0, "gradients in flight": whole if backward else 0}
    if strategy in ("zero3", "zero3_offload"):
        total = sum(p.size for p in every)
        gathered = half * min(total, max(LIVE, layer[0] + tail[0]) + layer[0])
        bucket = half * config.get_text_config().hidden_size ** 2
        return {
            "gathered weights": gathered,
            "buckets": bucket,
            "gradients in flight": half * widest if backward else 0,
        }
    return {}


def _unpacked(every: tuple[Parameter, ...]) -> int:
    """Elements of packed weights that are unpacked at one time: both expert stacks of a layer, or one linear layer."""
    packs = [p for p in every if p.packs]
    stacks = [p.size for p in packs if len(p.shape) == 3 and p.unit == packs[0].unit]
    return sum(stacks) or max((p.size for p in packs), default=0)


def _kinds(peak: dict[str, int]) -> dict[str, int]:
    """A traced peak by item. Totals grow evenly with layers and rows, their parts need not: the largest bears the rest."""
    items = {NAMES[kind]: size for kind, size in peak.items() if kind in NAMES}
    largest = max((name for name in items if name != "gradients"), key=items.get)
    items[largest] += sum(size for size in items.values() if size < 0)
    return {name: size for name, size in items.items() if size > 0}


def _step(config, settings: Settings, trace: dict[str, dict[str, int]]) -> tuple[str, dict[str, int]]:
    """Where a step's peak lies, and its items there."""
    kept, found = sharded(config, settings), {}
    for phase, peak in trace.items():
        items = {"weights": kept["weights"], "optimizer": kept["optimizer"], "workspace": WORKSPACE}
        items |= _kinds(peak)
        if settings.compute != "autocast" or settings.strategy.startswith(("zero", "fsdp")):
            items["gradients"] = (
                kept["gradients"] if "first" in phase or "end" in phase or settings.accumulation > 1 else 0
            )
        items |= _in_flight(config, settings, phase)
        if settings.load_in_4bit or settings.load_in_8bit:
            items["unpacked weights"] = 2 * _unpacked(parameters(config, settings))
        found[phase] = items
    found["optimizer"] = {
        "weights": kept["weights"],
        "optimizer": kept["optimizer"],
        "gradients": kept["gradients"],
        "workspace": WORKSPACE,
        **_in_flight(config, settings, "optimizer"),
    }
    if settings.strategy.startswith("zero"):
        # Once more flat, and in fp32; ZeRO-3 does so for SUB_GROUP elements at a time.
        most = math.inf if settings.strategy in ("zero1", "zero2") else 2 * SUB_GROUP
        found["optimizer"]["gradients in fp32"] = 3 * min(kept["gradients"], most)
    if settings.strategy == "zero3_offload":
        for items in found.values():
            items["optimizer"] = items["gradients"] = items["weights"] = 0
            items["gradients in fp32"] = 0
    at = max(found, key=lambda phase: sum(found[phase].values()))
    return at, {name: size for name, size in found[at].items() if size}


# ------------------------------------------------------------------------------------------------------ the other phases


def _load(config, settings: Settings) -> dict[str, int]:
    """A GPU's bytes when the trainer is built and the model is on it."""
    kept, every = sharded(config, settings), parameters(config, settings)
    items = {"weights": kept["weights"]}
    if settings.strategy in ("zero1", "zero2"):  # the flat copy beside the parameters it is made of, then fp32 masters
        items["flat copy"] = 2 * sum(p.size for p in every if p.trained)
    if settings.strategy == "fsdp":  # rank 0 sends one tensor at a time
        items["tensor on its way"] = 4 * max(p.size for p in every)
    if settings.strategy.startswith("zero3"):
        items["tensor on its way"] = 2 * max(p.size for p in every)
    if settings.strategy == "zero3_offload":
        items["weights"] = 0
    return {name: size for name, size in items.items() if size}


def _save(config, settings: Settings) -> dict[str, int]:
    """A GPU's bytes while a checkpoint or the result is written: what is resident, and a tensor gathered whole."""
    kept, every = sharded(config, settings), parameters(config, settings)
    items = {"weights": kept["weights"], "optimizer": kept["optimizer"]}
    if settings.strategy == "zero3_offload":
        items = {}
    if settings.strategy in ("fsdp", "zero3", "zero3_offload"):
        items["gathered weights"] = (4 if settings.strategy == "fsdp" else 2) * max(p.size for p in every)
    return items


def _host(config, settings: Settings) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Private bytes of one host, all its ranks, while loading, training and saving.

    Weights of the stored type are mapped from the files and shared. Others are converted by each rank for itself, under
    ZeRO-3 one tensor at a time; MXFP4 is dequantized by each rank.
    """
    every, local = parameters(config, settings), settings.local
    processes = {"processes": PROCESS * local}
    base = sum(p.size for p in every if "lora_" not in p.name)
    trained = sum(p.size for p in every if p.trained)
    load = dict(processes)
    if settings.stored == "mxfp4":
        load["dequantized weights"] = 2 * base * local
    elif settings.dtype != settings.stored and not settings.strategy.startswith("zero3"):
        load["converted weights"] = _element(settings) * base * local
    step, save = dict(processes), dict(processes)
    if settings.strategy == "zero3_offload":
        # bf16 parts and their gradients; fp32 masters, gradients and two moments.
        shares = local / settings.world
        offloaded = (2 * base + 2 * trained) + 16 * trained
        step["offloaded"] = save["offloaded"] = round(offloaded * shares)
        load["offloaded"] = round((2 * base + 4 * trained) * shares)
    whole = sum(p.size * (4 if p.trained else 2) for p in every)
    if settings.lora_r:
        whole = 4 * trained  # the adapter alone is written
    if settings.strategy in ("fsdp", "zero3", "zero3_offload"):
        save["whole model on rank 0"] = whole if settings.strategy == "fsdp" else min(whole, 2 * base)
    else:
        save["file being written"] = min(whole, SHARD_FILE)
    return load, step, save


def predict(config, settings: Settings, trace: dict | None = None) -> Prediction:
    """The memory of one run. trace: `peaks` of the same settings where they are known already."""
    at, step = _step(config, settings, trace or peaks(config, settings))
    context = CONTEXT + (NCCL if settings.world > 1 else 0)
    return Prediction(_load(config, settings), step, _save(config, settings), *_host(config, settings), at, context)


# ------------------------------------------------------------------------------------------------- every strategy at once


def _between(config, settings: Settings, micro_batch: int) -> dict[str, dict[str, int]]:
    """Peaks at any micro batch, from traces at the powers of two around it.

    A phase's peak is the largest of several moments that each grow evenly with the rows, or with their square where packed
    rows meet eager attention. So a line between two traces is never below it.
    """
    under = 1 << micro_batch.bit_length() - 1
    around = (under,) if under == micro_batch else (under, 2 * under)
    traces = [peaks(config, dataclasses.replace(settings, micro_batch=rows)) for rows in around]
    low, high = traces[0], traces[-1]
    share = micro_batch / under - 1
    return {
        phase: {kind: round(low[phase][kind] + share * (high[phase][kind] - low[phase][kind])) for kind in low[phase]}
        for phase in low
        if phase in high
    }


def largest_batch(config, settings: Settings, gpu_bytes: float, host_bytes: float) -> int:
    """The largest micro batch that fits, or 0."""

    def fits(rows):
        at = dataclasses.replace(settings, micro_batch=rows)
        return predict(config, at, _between(config, settings, rows)).fits(gpu_bytes, host_bytes)

    if _states_exceed(config, settings, gpu_bytes) or not fits(1):
        return 0
    low, high = 1, 2
    while high <= 4096 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def table(config, settings: Settings, gpu_bytes: float, host_bytes: float, strategies=STRATEGIES) -> dict:
    """All strategies for one run on `settings.world` GPUs.

    Returns {"rows": [{"strategy", "prediction", "fits", "largest_batch"}], "cheapest": the first strategy of STRATEGIES
    that fits, or None, "change": what to change, as sentences, where none does}. gpu_bytes and host_bytes: of one GPU
    and of one host.
    """
    rows = []
    for strategy in strategies:
        one = dataclasses.replace(
            settings, strategy=strategy, **({"world": 1, "local": 1} if strategy == "single" else {})
        )
        prediction = predict(config, one, _between(config, one, one.micro_batch))
        fits = prediction.fits(gpu_bytes, host_bytes)
        largest = largest_batch(config, one, gpu_bytes, host_bytes)
        rows.append({"strategy": strategy, "prediction": prediction, "fits": fits, "largest_batch": largest})
    cheapest = next((row["strategy"] for row in rows if row["fits"]), None)
    change = [] if cheapest else changes(config, settings, gpu_bytes, host_bytes, strategies)
    return {"rows": rows, "cheapest": cheapest, "change": change}


def changes(config, settings: Settings, gpu_bytes: float, host_bytes: float, strategies=STRATEGIES) -> list[str]:
    """What would make a run fit that fits under no strategy, least change first; each sentence stands alone."""
    several = [name for name in strategies if name != "single"] or list(strategies)
    tries = [("--per_device_train_batch_size 1", {"micro_batch": 1})]
    if not settings.checkpointing:
        tries.append(("--activation_checkpointing true", {"checkpointing": True}))
        tries.append(
            (
                "--activation_checkpointing true --per_device_train_batch_size 1",
                {"checkpointing": True, "micro_batch": 1},
            )
        )
    small = {"micro_batch": 1, "checkpointing": True}
    line = "--activation_checkpointing true --per_device_train_batch_size 1 "
    for length in (settings.length // 2, settings.length // 4):
        if length >= 512:
            tries.append((f"{line}--max_length {length}", small | {"length": length}))
    if not settings.lora_r:
        lora = {"lora_r": 16, "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj"), "dtype": "bfloat16"}
        tries.append(("--config lora: an adapter on the bf16 base", small | lora))
        tries.append(("--config qlora: an adapter on the 4-bit base", small | lora | {"load_in_4bit": True}))
    elif not settings.load_in_4bit:
        tries.append(("--config qlora: the base in 4 bits", small | {"load_in_4bit": True}))
    for words, change in tries:
        found = _first_fit(config, dataclasses.replace(settings, **change), gpu_bytes, host_bytes, several)
        if found:
            return [f"{words} fits under {found}.yaml."]
    for gpus in (2, 4, 8, 16, 32, 64):
        if gpus > settings.world:
            more = dataclasses.replace(settings, world=gpus, local=min(gpus, max(8, settings.local)), **small)
            found = _first_fit(config, more, gpu_bytes, host_bytes, several)
            if found:
                return [f"{line.strip()} fits on {gpus} such GPUs under {found}.yaml."]
    return ["Nothing smaller fits: take GPUs with more memory, or a smaller model."]


def _states_exceed(config, settings: Settings, gpu_bytes: float) -> bool:
    """Whether weights, gradients and optimizer alone are too much: no step need be traced to know."""
    return settings.strategy != "zero3_offload" and sum(sharded(config, settings).values()) > gpu_bytes


def _first_fit(config, settings: Settings, gpu_bytes: float, host_bytes: float, strategies) -> str | None:
    for strategy in strategies:
        one = dataclasses.replace(settings, strategy=strategy)
        if not _states_exceed(config, one, gpu_bytes) and predict(config, one).fits(gpu_bytes, host_bytes):
            return strategy
    return None


# ---------------------------------------------------------------------------------------------------- settings of a launch


def settings_from(config, model_args, training_args, strategy: str, world: int, local: int) -> Settings:
    """Settings from TRL's ModelConfig and SFTConfig, as a recipe parses them.

    Rows are taken to be as long as `max_length`, and to differ in length unless they are packed.
    """
    quantized = getattr(config, "quantization_config", None) or {}
    method = quantized.get("quant_method") if isinstance(quantized, dict) else getattr(quantized, "quant_method", None)
    own = getattr(config, "dtype", None)
    stored = "mxfp4" if str(method).endswith("mxfp4") else str(own or "bfloat16").removeprefix("torch.")
    dtype = str(model_args.dtype).removeprefix("torch.")
    attention = model_args.attn_implementation or ("eager" if config.model_type == "gpt_oss" else "sdpa")
    loading = training_args.model_init_kwargs
    checkpointing = training_args.activation_checkpointing
    if checkpointing is None:
        checkpointing = training_args.gradient_checkpointing
    adapter = {}
    if model_args.use_peft:
        targets = model_args.lora_target_modules or ()
        adapter = {
            "lora_r": model_args.lora_r,
            "lora_targets": _matching(config, targets) if isinstance(targets, str) else tuple(targets),
            "lora_parameters": tuple(getattr(model_args, "lora_target_parameters", None) or ()),
            "lora_dropout": model_args.lora_dropout,
        }
    return Settings(
        strategy=strategy,
        world=world,
        local=local,
        micro_batch=training_args.per_device_train_batch_size,
        length=training_args.max_length or config.get_text_config().max_position_embeddings,
        accumulation=training_args.gradient_accumulation_steps,
        packing=training_args.packing or training_args.padding_free,
        padded=not training_args.packing and training_args.per_device_train_batch_size > 1,
        dtype=stored if dtype == "auto" else dtype,
        stored=stored,
        bf16=bool(training_args.bf16),
        optim=getattr(training_args.optim, "value", str(training_args.optim)),
        attention=attention,
        experts=loading.get("experts_implementation", "grouped_mm") if isinstance(loading, dict) else "grouped_mm",
        checkpointing=bool(checkpointing),
        load_in_4bit=bool(model_args.load_in_4bit),
        load_in_8bit=bool(model_args.load_in_8bit),
        **adapter,
    )


def _matching(config, pattern: str) -> tuple[str, ...]:
    """Last names of the linear layers that a single target names: "all-linear", or a pattern as PEFT matches it.

    TRL makes a string of a list of one (ModelConfig). PEFT: utils/other.py, `match_target_against_key`.
    """
    model = memory_trace.meta_model(config)
    head = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
    if pattern != "all-linear":
        linear = [name for name in linear if re.fullmatch(pattern, name)]
    return tuple(sorted({name.rpartition(".")[2] for name in linear}))


def settings_of(launch) -> Settings:
    """Settings of a check_launch.Launch. Raises ValueError where the line left the model or an argument unread."""
    if launch.model_config is None or launch.training_args is None or launch.model_args is None:
        raise ValueError(
            "memory is predicted from the model's config and the recipe's arguments; one of them was not read"
        )
    return settings_from(
        launch.model_config,
        launch.model_args,
        launch.training_args,
        launch.strategy,
        launch.world,
        math.ceil(launch.world / launch.nodes),
    )


def recipes() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(path.parent.name for path in (ROOT / "recipes").glob("*/train.py"))


@functools.cache
def real_config(family: str, size: str, layers: int | None = None):
    """The config of a published model, from tiny_model.REAL: nothing is downloaded."""
    return tiny_model.build_real_config(family, size, tiny_model.build_tokenizer(family), layers).get_text_config()


def of_recipe(recipe: str, name: str = "config", world: int = 1, local: int = 1):
    """The published model's config and the Settings of a shipped recipe's `name`.yaml, its weights stored as bf16."""
    values = yaml.safe_load((ROOT / "recipes" / recipe / f"{name}.yaml").read_text(encoding="utf-8"))

    def chosen(kind):
        fields = {field.name for field in dataclasses.fields(kind)}
        return {key: value for key, value in values.items() if key in fields}

    config = real_config(*tiny_model.PUBLISHED[values["model_name_or_path"]])
    training = SFTConfig(**chosen(SFTConfig) | {"use_cpu": True, "output_dir": "unused"})
    settings = settings_from(config, ModelConfig(**chosen(ModelConfig)), training, "single", world, local)
    return config, dataclasses.replace(settings, stored="bfloat16")


# ----------------------------------------------------------------------------------------------- predicted and measured


def compare(report: dict) -> list[dict]:
    """The measured settings of measure_memory.py's file, each with `predicted` (bytes), `at` and `items` put in."""
    lines = [line for line in report["settings"] if "measured" in line]
    for line in lines:
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in line["settings"].items()}
        prediction = predict(real_config(line["family"], line["size"], line["layers"]), Settings(**given))
        line |= {"predicted": sum(prediction.step.values()), "at": prediction.at, "items": prediction.step}
    return lines


def error(line: dict) -> float:
    """Predicted over measured peak of a step, less one. Measured is the largest of the steps after the first."""
    return line["predicted"] / line["measured"]["step"] - 1


def summary(lines: list[dict]) -> str:
    """Mean and worst absolute error in one line."""
    errors = [abs(error(line)) for line in lines]
    return f"{len(lines)} settings: mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}"


def memory_peak_table(report: dict) -> str:
    """The table of predicted against measured peaks, from a file that `--compare` has completed."""
    lines, groups = [line for line in report["settings"] if "measured" in line], {}
    for line in lines:
        method = line["name"].split(", ")[2]  # measure_memory.campaign makes the name
        groups.setdefault((f"{line['family']}-{line['size']}", method), []).append(line)
    rows = ["| model | method | settings | measured GiB | mean error | worst |", "|---|---|---|---|---|---|"]
    for (model, method), group in sorted(groups.items()):
        sizes = [line["measured"]["step"] / GIB for line in group]
        errors = sorted((error(line) for line in group), key=abs)
        mean = sum(map(abs, errors)) / len(errors)
        span = f"{min(sizes):.1f} to {max(sizes):.1f}" if len(group) > 1 else f"{sizes[0]:.1f}"
        rows.append(f"| {model} | {method} | {len(group)} | {span} | {mean:.1%} | {errors[-1]:+.1%} |")
    failed = len(report["settings"]) - len(lines)
    unmeasured = f" {failed} more could not be measured." if failed else ""
    return "\n".join([*rows, "", f"{summary(lines)}.{unmeasured}"])


def _print_compare(file: Path) -> None:
    report = json.loads(file.read_text(encoding="utf-8"))
    lines = compare(report)
    for line in lines:
        measured = line["measured"]["step"]
        print(f"{measured / GIB:8.2f} {line['predicted'] / GIB:8.2f} {error(line):+7.1%}  {line['name']}")
        items = ", ".join(f"{name} {size / GIB:.2f}" for name, size in line["items"].items())
        print(f"{'':27}{line['at']}: {items}")
    for line in report["settings"]:
        if "error" in line:
            print(f"not measured: {line['name']}: {line['error'][:100]}")
    print(f"GiB measured, GiB predicted, error. {summary(lines)}.")
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _print_table(arguments) -> None:
    config, settings = of_recipe(arguments.recipe, arguments.config, arguments.gpus, min(arguments.gpus, 8))
    settings = dataclasses.replace(
        settings, **({"micro_batch": arguments.micro_batch} if arguments.micro_batch else {})
    )
    found = table(config, settings, arguments.gpu_gib * GIB, arguments.host_gib * GIB)
    for row in found["rows"]:
        p = row["prediction"]
        phases = ", ".join(f"{name} {sum(getattr(p, name).values()) / GIB:.1f}" for name in ("load", "step", "save"))
        fits = f"fits, micro batch up to {row['largest_batch']}" if row["fits"] else "does not fit"
        fits = fits if row["fits"] or not row["largest_batch"] else f"fits with micro batch {row['largest_batch']}"
        print(f"{row['strategy']:14} GiB: {phases}; host {p.host / GIB:.0f}. {fits}")
        print(f"{'':15}{p.at}: " + ", ".join(f"{name} {size / GIB:.2f}" for name, size in p.step.items()))
    print(f"cheapest that fits: {found['cheapest'] or 'none. ' + ' '.join(found['change'])}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", type=Path, metavar="FILE", help="a file that measure_memory.py wrote")
    parser.add_argument("--recipe", choices=recipes(), help="print every strategy for this recipe")
    parser.add_argument("--config", default="config", help="another configuration of the recipe, such as lora")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs in all, eight a host; default 1")
    parser.add_argument("--gpu-gib", type=float, default=80, help="memory of a GPU; default 80")
    parser.add_argument("--host-gib", type=float, default=1024, help="memory of a host; default 1024")
    parser.add_argument("--micro-batch", type=int, help="rows per GPU; default: the recipe's")
    arguments = parser.parse_args()
    if arguments.compare:
        _print_compare(arguments.compare)
    elif arguments.recipe:
        _print_table(arguments)
    else:
        parser.error("give --compare FILE or --recipe NAME")
    return 0


if __name__ == "__main__":
    sys.exit(main())
