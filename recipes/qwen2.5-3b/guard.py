"""Guard of a run, version 1: is what runs what was asked for, and can it fit?

The same file, to the byte, lies in every recipe folder; `scripts/sync_guard.py FOLDER` brings a copy up to date.
train.py makes four calls, in this order, and is a plain TRL script without them:

    guard.check_launch   the launch line and the config file, before any argument is parsed
    keeper.open_run      memory, the output folder, what may be resumed, before the model is loaded
    keeper.watch         the strategy that really runs, the data, the checkpoints: from the first step on
    keeper.close_run     proof that the weights are on disk, after the last step

inputs.py reads config file and rows, watcher.py follows the steps, ranks.py lets the ranks stop together.
"""

import copy
import hashlib
import importlib.metadata
import json
import math
import os
import socket
import sys
from pathlib import Path

import psutil
import torch
import yaml
from peft import get_peft_model
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from trl import get_peft_config

import inputs
import run_log
from ranks import RUN, agree, environment, exchange, on_exception

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "datasets", "bitsandbytes")
MOMENTS = {"8bit": 2, "adafactor": 0, "sgd": 0, "lion": 4}  # bytes a trained weight that optimizers keep; else Adam's 8


# ----------------------------------------------------------------------------------------------------- the launch line


def declared_strategy() -> str:
    """What the launcher was told: single, ddp, fsdp, zero1, zero2, zero3 or zero3_offload."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
        if not os.path.isfile(file):
            raise ValueError(
                f"the launch file names the DeepSpeed file `{file or 'none'}`, which is not here ({os.getcwd()}). Its "
                "path is relative to the working directory: start from the cookbook's root, or beside deepspeed_configs/."
            )
        with open(file, encoding="utf-8") as text:
            zero = json.load(text).get("zero_optimization", {})
        return f"zero{zero.get('stage', 0)}" + ("_offload" if "offload_optimizer" in zero else "")
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return "fsdp"
    return "ddp" if environment("WORLD_SIZE", 1) > 1 else "single"


def launch_problem(parser, script: str, strategies: tuple[str, ...]) -> str | None:
    """The first thing that is wrong with the launch line, or None. Sets RUN's strategy and rewrites sys.argv."""
    try:
        inputs.strict_arguments(parser, script)
        strategy = RUN["strategy"] = declared_strategy()
    except ValueError as error:
        return str(error)
    if strategy not in strategies:
        fits = ", ".join(f"{name}.yaml" for name in strategies)
        return f"this recipe does not fit the strategy `{strategy}`. Launch it with one of accelerate_configs/: {fits}."
    if strategy == "fsdp" and os.environ.get("FSDP_VERSION") != "2":
        return "the launch file asks for FSDP version 1. Write `fsdp_version: 2`, as in accelerate_configs/fsdp.yaml."
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        return "the launch file sets `mixed_precision`, which silently beats the recipe's `bf16`. Take that line out."
    if parser.parse_known_args(sys.argv[1:])[0].use_cpu:
        return None
    local, gpus = environment("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
    if gpus == 0:
        return (
            f"no GPU is visible on {socket.gethostname()}, so {local} process(es) would each train alone on the CPU, "
            "as rank 0 of 1, into one folder. To train on the CPU on purpose, add `--use_cpu true` after train.py."
        )
    if local > gpus:
        return f"{local} processes were started on a machine with {gpus} visible GPU(s). Use `--num_processes {gpus}`."
    if gpus > 1 and "RANK" not in os.environ:
        line = f"accelerate launch --config_file accelerate_configs/{strategies[0]}.yaml {script}"
        return f"{gpus} GPUs are visible but no launcher started this process. Use `{line}`."
    return None


def check_launch(parser, script: str, strategies: tuple[str, ...]) -> None:
    """Stage 1, before arguments are parsed. All ranks stop, with one paragraph, where one of them finds a problem.

    parser: the TrlParser of train.py. script: its `__file__`. strategies: the launch files that the recipe fits.
    """
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # read when CUDA starts; saves some GB
    sys.excepthook = on_exception
    run_log.mark("imported")
    agree("launch", launch_problem(parser, script, strategies))
    RUN["script"], RUN["strategies"] = script, strategies
    RUN["versions"] = {name: version(name) for name in PACKAGES}
    digest = hashlib.sha256(json.dumps([sys.argv[1:], RUN["strategy"], RUN["versions"]]).encode()).hexdigest()[:12]
    facts = exchange("facts", [socket.gethostname(), digest, environment("RANK", 0)])
    odd = [host for host, other, _ in facts if other != facts[0][1]]
    agree(
        "same",
        f"{', '.join(odd)} differ(s) from {facts[0][0]} in arguments, launch file or package versions."
        if odd
        else None,
    )


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------------------------------- the memory


def state_bytes(config, model_args, optim: str, strategy: str, world: int, host: bool = False) -> float:
    """Bytes per GPU of weights, gradients and optimizer, from the model's config alone; activations come on top.

    host: instead, the bytes of host memory per process that they take under zero3_offload, which keeps all of it there.
    """
    if host != (strategy == "zero3_offload"):
        return 0.0
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)  # from_config would shard it under ZeRO-3
        linear = sum(
            m.weight.numel() for n, m in model.named_modules() if type(m) is torch.nn.Linear and "head" not in n
        )
        experts = sum(p.numel() for n, p in model.named_parameters() if "experts" in n and p.ndim == 3)
        total = trained = RUN["parameters"] = sum(p.numel() for p in model.parameters())
        if model_args.use_peft:
            model = get_peft_model(model, get_peft_config(model_args))
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    element = 4 if model_args.dtype == "float32" else 2
    frozen = 0 if trained == total else total * element
    if frozen and (model_args.load_in_4bit or model_args.load_in_8bit):
        frozen -= (experts or linear) * (
            element - (0.5625 if model_args.load_in_4bit else 1)
        )  # NF4: a scale every 64 weights
    moments = next((size for name, size in MOMENTS.items() if name in optim), 8)
    # Sharded over: the weights, the gradients, the optimizer with its fp32 masters.
    over = {"fsdp": (1, 1, 1), "zero1": (0, 0, 1), "zero2": (0, 1, 1), "zero3": (1, 1, 1), "zero3_offload": (1, 1, 1)}
    w, g, o = (world if sharded else 1 for sharded in over.get(strategy, (0, 0, 0)))
    if strategy.startswith("zero"):  # bf16 copies are trained beside fp32 masters
        return frozen / w + trained * (2 / w + 2 / g + (4 + moments) / o)
    kept = 2 if element == 2 and not frozen and strategy != "fsdp" else 4  # FSDP2 and peft keep what trains in fp32
    return frozen / w + trained * (kept / w + kept / g + moments / o)


def memory_problem(config, model_args, training_args) -> str | None:
    """Whether weights, gradients and optimizer can fit each GPU, and the host while it dequantizes MXFP4."""
    world, local = environment("WORLD_SIZE", 1), environment("LOCAL_WORLD_SIZE", 1)
    name, gib = model_args.model_name_or_path, 2**30
    optim, offloads = str(training_args.optim).lower(), RUN["strategy"] == "zero3_offload"
    need = RUN["state_bytes"] = state_bytes(config, model_args, optim, RUN["strategy"], world, offloads)
    free, stored = psutil.virtual_memory().available, getattr(config, "quantization_config", None) or {}
    host = 2 * RUN["parameters"] * local
    # Unsharded, and not for QLoRA, the gpt-oss recipes dequantize on the GPU.
    on_gpu = training_args.device.type == "cuda" and not model_args.load_in_4bit
    on_gpu = on_gpu and RUN["strategy"] in ("single", "ddp", "zero1", "zero2")
    if stored.get("quant_method") == "mxfp4" and host > free and not on_gpu:
        return (
            f"{name} is stored as MXFP4: each of the {local} processes of this machine would dequantize all of it, "
            f"{host / gib:.0f} GiB of host memory together, on every start; {free / gib:.0f} GiB are free. Write bf16 "
            f"weights once, `python scripts/export.py {name} DEST --bf16`, and start with `--model_name_or_path DEST`."
        )
    # transformers reads the weights on every rank. What keeps its dtype is mapped from the file and shared.
    if (
        RUN["strategy"] == "fsdp"
        and model_args.dtype == "float32"
        and config.dtype != torch.float32
        and 2 * host > free
    ):
        return (
            f"each of the {local} processes of this machine would hold {name} in fp32, {2 * host / gib:.0f} GiB of host "
            f"memory together; {free / gib:.0f} GiB are free. Add `--dtype bfloat16`: FSDP2 keeps fp32 masters of its shards."
        )
    if training_args.device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(training_args.device).total_memory
    have = free / local if offloads else gpu
    if need <= have:
        return None
    fits = []
    for file in sorted(Path(RUN["script"]).resolve().parent.glob("*.yaml")):
        other = copy.copy(model_args)
        vars(other).update(
            {k: v for k, v in yaml.safe_load(file.read_text()).items() if hasattr(other, k)}, model_name_or_path=name
        )
        for strategy in dict.fromkeys((RUN["strategy"], "fsdp", "zero3", "zero3_offload")):
            if (
                strategy in RUN["strategies"]
                and state_bytes(config, other, optim, strategy, world) <= gpu
                and state_bytes(config, other, optim, strategy, world, host=True) <= free / local
            ):
                fits.append(f"--config {file.stem} under {strategy}.yaml")
                break
    return (
        f"{name} needs {need / gib:.0f} GiB {'of host memory ' if offloads else ''}per GPU under {RUN['strategy']} with "
        f"{world} process(es) for weights, gradients and optimizer alone; "
        + (f"{have / gib:.0f} GiB are free for each. " if offloads else f"this GPU has {have / gib:.0f} GiB. ")
        + (f"What fits here: {'; '.join(fits)}." if fits else "Use more GPUs, or a smaller model.")
    )


# ------------------------------------------------------------------------------------------------------- the strategy


def rounds_at_random(args) -> bool:
    """Whether bf16 weights keep small updates without fp32 masters: torchao's Adam rounds up or down by chance.

    So an update that is a tenth of the distance to the next number moves the weight one time in ten.
    """
    asked = (args.optim_args or "").replace(" ", "").lower()
    return args.optim.value == "adamw_torch_8bit" and "bf16_stochastic_round=true" in asked


def strategy_problem(trainer) -> str | None:
    """Where what runs is not what was asked for: sharding, clipping, precision. Called with the model prepared."""
    args, world, strategy = trainer.args, environment("WORLD_SIZE", 1), RUN["strategy"]
    parameters, wrapped = list(trainer.model.parameters()), trainer.model_wrapped
    if hasattr(wrapped, "zero_optimization_stage"):  # a DeepSpeed engine
        runs = f"zero{wrapped.zero_optimization_stage()}" + ("_offload" if wrapped.zero_offload_optimizer() else "")
        if not math.isclose(wrapped.gradient_clipping(), args.max_grad_norm):
            return (
                f"DeepSpeed clips gradients at {wrapped.gradient_clipping()}, the recipe asks for {args.max_grad_norm}"
                '. Write `"gradient_clipping": "auto"` in the DeepSpeed file.'
            )
    elif any(isinstance(parameter, DTensor) for parameter in parameters):
        runs = "fsdp"
    else:
        runs = "ddp" if world > 1 and isinstance(wrapped, DistributedDataParallel) else "single"
    if runs != strategy:
        cure = " On CPU accelerate does not shard; for tests scripts/fsdp_on_cpu.py does." if strategy == "fsdp" else ""
        return f"the launch file asks for {strategy} over {world} process(es), but what runs is {runs}.{cure}"
    if runs == "fsdp" and "8bit" in args.optim.value:
        return (
            f"`optim: {args.optim.value}` is not for FSDP2: bitsandbytes does not know its shards, and torchao is not tested "
            "with them. Add `--optim adamw_torch_fused`."
        )
    adapter = hasattr(trainer.model, "peft_config")
    if runs == "fsdp" and torch.__version__ < (2, 13) and not adapter and args.eval_strategy != "no":
        # TRL's loss reads the head's weight without calling it. Older FSDP2 then takes the group of norm and head for
        # one that still runs, and a save in between leaves it sharded (seen with torch 2.11, not with 2.13).
        return (
            f"FSDP2 of torch {torch.__version__} fails at the first step after an evaluation and a save. Install torch "
            "2.13 (requirements.txt), or leave evaluation out: `--eval_strategy no`."
        )
    trained = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    if runs in ("single", "ddp") and torch.bfloat16 in trained and not adapter:
        if not rounds_at_random(args):
            return (
                "all weights would train in bf16 without fp32 masters, which rounds small updates away. Set "
                "`dtype: float32` and `bf16: true`, or on one GPU `optim: adamw_torch_8bit` and "
                "`optim_args: bf16_stochastic_round=True`, which needs the package torchao."
            )
        if runs == "ddp":
            return (
                "each rank would round its bf16 weights by its own draw, and the ranks would drift apart. Set "
                "`dtype: float32` and `bf16: true`, or train on one GPU."
            )
    return None
