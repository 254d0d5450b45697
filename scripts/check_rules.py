"""What is wrong between the files: launch file against DeepSpeed file against recipe against model against GPU.

Each function takes a `Launch` and adds findings to it. A rule that the recipe's guard knows, too, says the same here.
"""

import ast
import copy
import importlib.util
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace

from check_files import is_true
from check_launch import Launch, load_module
from check_model import adapters, attention, meta_model, model, quantization

TRACKERS = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "comet_ml": "comet_ml",
    "trackio": "trackio",
}
TRACKERS |= {"swanlab": "swanlab", "clearml": "clearml", "neptune": "neptune", "dvclive": "dvclive"}


def check(launch: Launch) -> None:
    """All rules that need more than one file; in the order of a run: line, machine, precision, model, data, schedule."""
    if launch.accelerate is None:
        return
    processes(launch)
    addresses(launch)
    if launch.training_args is None or launch.model_args is None:
        return
    strategy(launch)
    precision(launch)
    deepspeed(launch)
    fsdp(launch)
    recomputation(launch)
    saving(launch)
    quantization(launch)
    attention(launch)
    adapters(launch)
    model(launch)
    files(launch)
    trainer(launch)


# --------------------------------------------------------------------------------------------- processes and machines


def processes(launch: Launch) -> None:
    """num_processes against devices."""
    file, local = launch.launch_file or "command line", -(-launch.world // max(launch.nodes, 1))
    machines = launch.accelerate.num_machines or 1
    if launch.nodes != machines:
        launch.add(
            "machines",
            file,
            "num_machines",
            f"the launch line is for {machines} machine(s), --nodes says {launch.nodes}.",
            f"num_machines: {launch.nodes}",
        )
    if launch.cpu:
        if str(launch.accelerate.num_processes) == "gpu" and not launch.elsewhere:
            import torch

            if torch.cuda.device_count() == 0:
                launch.add(
                    "no-gpu",
                    file,
                    "num_processes",
                    "`gpu` counts the visible GPUs, and there is none; the launcher stops.",
                    "--num_processes 2, before train.py",
                )
        return
    if launch.gpus_per_node == 0:
        launch.add(
            "no-gpu",
            file,
            "num_processes",
            "no GPU is visible here, so each process would train alone on the CPU. To check "
            "for another machine, name its GPU.",
            "--gpu h100-80gb before the launch line, or --use_cpu true after train.py",
        )
    elif local > launch.gpus_per_node:
        launch.add(
            "too-many-processes",
            file,
            "num_processes",
            f"{local} processes on a machine with {launch.gpus_per_node} GPU(s).",
            f"num_processes: {launch.gpus_per_node * machines}",
        )
    elif launch.accelerate.gpus_per_node and launch.nodes == machines and launch.strategy != "single":
        every = launch.gpus_per_node * machines
        if launch.world < every:
            why = f"{launch.world} processes leave {every - launch.world} of the GPUs idle."
            launch.warn("idle-gpus", file, "num_processes", why, f"num_processes: {every}")
    ids = [word for word in str(launch.accelerate.gpu_ids or "all").split(",") if word]
    if ids != ["all"] and machines == 1 and len(ids) < local:
        launch.add(
            "too-many-processes",
            file,
            "gpu_ids",
            f"{local} processes share the {len(ids)} GPU(s) {','.join(ids)}.",
            f"num_processes: {len(ids)}",
        )


def addresses(launch: Launch) -> None:
    """A port that is taken, an address that has no meaning here. Only for this machine."""
    args, file = launch.accelerate, launch.launch_file or "command line"
    machines, address = args.num_machines or 1, args.main_process_ip
    if launch.elsewhere:
        return
    port = int(args.main_process_port or 29500) if str(args.main_process_port or 29500).isdigit() else 0
    if port and launch.world > 1 and int(args.machine_rank or 0) == 0 and _taken(port):
        text = "another process of this machine listens on it"
        if machines > 1:
            launch.add(
                "port-taken", file, "main_process_port", f"port {port}: {text}.", f"main_process_port: {port + 1}"
            )
        else:
            launch.warn(
                "port-taken",
                file,
                "main_process_port",
                f"port {port}: {text}; two launches started together may meet.",
                "main_process_port: 0",
            )
    if machines > 1 and address:
        try:
            socket.getaddrinfo(address, port or None)
        except OSError:
            launch.add(
                "unknown-address",
                file,
                "main_process_ip",
                f"this machine knows no host {address!r}.",
                "main_process_ip: an address that every machine reaches",
            )


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


# ----------------------------------------------------------------------------------------------------- the strategy


def strategy(launch: Launch) -> None:
    if launch.strategy not in launch.strategies:
        fits = ", ".join(f"{name}.yaml" for name in launch.strategies)
        launch.add(
            "unfit-strategy",
            launch.launch_file,
            "distributed_type",
            f"this recipe does not fit `{launch.strategy}`; it fits {fits}.",
            f"--config_file accelerate_configs/{launch.strategies[0]}.yaml",
        )
    args = launch.training_args
    for key in ("fsdp", "deepspeed", "fsdp_config"):
        if getattr(args, key, None) and (key in launch.flags or key in launch.config_keys):
            launch.add(
                "strategy-in-recipe",
                launch.where(key),
                key,
                "the launch file decides how a run is spread; a second answer in the recipe conflicts with it.",
                f"take `{key}` out, and choose the file by --config_file",
            )
    sizes = {name: launch.given.get(f"parallelism_config_{name}_size", 1) for name in ("tp", "cp", "sp")}
    for name, size in sizes.items():
        if isinstance(size, int) and size > 1:
            launch.add(
                "parallelism",
                launch.launch_file,
                f"parallelism_config.parallelism_config_{name}_size",
                "the recipes support no tensor, context or sequence parallelism.",
                f"parallelism_config_{name}_size: 1",
            )


def precision(launch: Launch) -> None:
    """One precision: launch file, DeepSpeed file, recipe, GPU."""
    args, dtype = launch.training_args, launch.model_args.dtype
    asked = launch.given.get("mixed_precision")
    if asked not in (None, "no", False):
        launch.add(
            "precision",
            launch.launch_file,
            "mixed_precision",
            f"{asked!r} silently beats the recipe's `bf16: {str(bool(args.bf16)).lower()}`; the recipe owns precision.",
            "take `mixed_precision` out",
        )
    if launch.strategy in ("single", "ddp") and dtype == "bfloat16" and not launch.model_args.use_peft:
        asked = (args.optim_args or "").replace(" ", "").lower()
        rounded = args.optim.value == "adamw_torch_8bit" and "bf16_stochastic_round=true" in asked
        if not rounded or launch.strategy == "ddp":
            launch.add(
                "bf16-without-masters",
                launch.where("dtype"),
                "dtype",
                "each rank would round its bf16 weights by its own draw, and the ranks would drift apart."
                if rounded
                else "all weights would train in bf16 without fp32 masters, which rounds small updates away.",
                f"{launch.line('dtype', 'float32')} with bf16: true",
            )
    if dtype == "float16" and not launch.cpu:
        launch.add(
            "precision",
            launch.where("dtype"),
            "dtype",
            "weights in fp16 cannot be trained: their gradients overflow, and the gradient scaler refuses them.",
            launch.line("dtype", "bfloat16" if launch.model_args.use_peft else "float32"),
        )
    if launch.gpu_facts and launch.gpu_facts.capability < (8, 0) and args.bf16 and not launch.cpu:
        launch.add(
            "no-bf16",
            launch.where("bf16"),
            "bf16",
            f"{launch.gpu} has no bf16.",
            "--bf16 false --fp16 true --dtype float32",
        )
    if (
        not args.bf16
        and not args.fp16
        and not launch.cpu
        and (launch.gpu_facts or 0)
        and launch.gpu_facts.capability >= (8, 0)
    ):
        launch.warn(
            "full-fp32",
            launch.where("bf16"),
            "bf16",
            "everything would run in fp32, several times slower.",
            launch.line("bf16", True),
        )


def deepspeed(launch: Launch) -> None:
    """The DeepSpeed file against the recipe: transformers' own comparison, before the model is loaded."""
    keys, file, args = launch.deepspeed, launch.deepspeed_file, launch.training_args
    if keys is None or not isinstance(keys.get("zero_optimization", {}), dict):
        return
    for name, wanted, given in _mismatches(launch):
        auto = f'"{name.rpartition(".")[2]}": "auto"'
        launch.add("mismatch", file, name, f"it says {given}, the recipe says {wanted}; the start is refused.", auto)
    if "gradient_clipping" not in keys:
        severity = "warning" if args.max_grad_norm == 1.0 else "error"
        why = f"the key is missing, so DeepSpeed clips at 1.0, whatever max_grad_norm ({args.max_grad_norm}) says."
        launch.add("no-clipping", file, "gradient_clipping", why, '"gradient_clipping": "auto"', severity)
    elif isinstance(keys["gradient_clipping"], int | float) and keys["gradient_clipping"] == 0 and args.max_grad_norm:
        pass  # told as a mismatch
    for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if name not in keys:
            launch.add(
                "no-batch",
                file,
                name,
                "the key is missing, so DeepSpeed's own default may differ from the recipe's number.",
                f'"{name}": "auto"',
            )
    on = {
        name: (keys.get(name) or {}).get("enabled") if isinstance(keys.get(name), dict) else None
        for name in ("bf16", "fp16")
    }
    if args.bf16 and on["bf16"] is None and not (keys.get("bfloat16") or {}).get("enabled"):
        launch.add(
            "precision",
            file,
            "bf16",
            "the section is missing, so DeepSpeed would train in fp32 (or fp16), the recipe in bf16.",
            '"bf16": {"enabled": "auto"}',
        )
    zero = keys.get("zero_optimization", {})
    gather = zero.get(
        "stage3_gather_16bit_weights_on_model_save", zero.get("gather_16bit_weights_on_model_save", False)
    )
    if zero.get("stage") == 3 and not is_true(gather):
        launch.add(
            "no-gather",
            file,
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "without it the end of the run writes DeepSpeed shards in place of a model.",
            '"stage3_gather_16bit_weights_on_model_save": true',
        )
    optim = str(getattr(args.optim, "value", args.optim))
    known = optim.startswith("adamw_torch") or optim in ("adamw_hf", "adamw_8bit", "adamw_bnb_8bit", "lamb")
    if "optimizer" in keys:
        name = keys["optimizer"].get("type", "") if isinstance(keys["optimizer"], dict) else ""
        if "optim" in launch.config_keys or "optim" in launch.flags:
            launch.warn(
                "two-optimizers",
                file,
                "optimizer",
                f"DeepSpeed's {name} is used, and the recipe's `optim: {optim}` is ignored.",
                'take "optimizer" out',
            )
    elif not known and not is_true(keys.get("zero_allow_untested_optimizer", False)):
        launch.add(
            "untested-optimizer",
            file,
            "zero_allow_untested_optimizer",
            f"DeepSpeed stops at the optimizer {optim}.",
            '"zero_allow_untested_optimizer": true',
        )
    if "scheduler" in keys and ("lr_scheduler_type" in launch.config_keys or "lr_scheduler_type" in launch.flags):
        launch.warn(
            "two-schedulers",
            file,
            "scheduler",
            "DeepSpeed's schedule is used, and the recipe's `lr_scheduler_type: "
            f"{getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type)}` is ignored.",
            'take "scheduler" out',
        )
    checkpointing = keys.get("activation_checkpointing")
    if isinstance(checkpointing, dict) and any(value for value in checkpointing.values()):
        launch.warn(
            "checkpointing-unused",
            file,
            "activation_checkpointing",
            "transformers does not use DeepSpeed's checkpointing; the recipe's `activation_checkpointing` decides.",
            'take "activation_checkpointing" out',
        )
    if zero.get("stage") == 3 and args.auto_find_batch_size:
        launch.add(
            "conflict",
            launch.where("auto_find_batch_size"),
            "auto_find_batch_size",
            "ZeRO-3 does not support it, and the start is refused.",
            launch.line("auto_find_batch_size", False),
        )
    if launch.model_config is not None:
        auto = [key for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size") if zero.get(key) == "auto"]
        sized = getattr(launch.model_config, "hidden_size", None) or getattr(launch.model_config, "text_config", None)
        if auto and not sized:
            launch.add(
                "auto-bucket",
                file,
                f"zero_optimization.{auto[0]}",
                "the model's config names no hidden_size, so `auto` has no value.",
                f'"{auto[0]}": 500000000',
            )


def _mismatches(launch: Launch) -> list[tuple[str, str, str]]:
    """(key, recipe's value, file's value) where transformers would refuse the DeepSpeed file."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

    args = launch.training_args
    facts = {name: getattr(args, name) for name in args.__dataclass_fields__}
    try:
        config = HfTrainerDeepSpeedConfig(copy.deepcopy(launch.deepspeed))
        config.trainer_config_process(SimpleNamespace(**facts | {"world_size": launch.world}))
    except Exception as error:
        return [("file", "-", f"{type(error).__name__}: {error}")]
    finally:
        unset_hf_deepspeed_config()
    found = []
    for line in config.mismatches:
        told = re.match(r"- ds (\S+?)=(.*) vs hf (\S.*?)=(.*)$", line)
        found.append((told[1], f"{told[3]} = {told[4]}", told[2]) if told else ("file", "-", line))
    return found


def fsdp(launch: Launch) -> None:
    """The wrap class against the model, and what FSDP2 cannot do."""
    if launch.strategy != "fsdp" or launch.model_config is None:
        return
    names = launch.given.get("fsdp_transformer_layer_cls_to_wrap")
    meta = meta_model(launch)
    if not names or meta is None:
        return
    names = [name.strip() for name in (names if isinstance(names, list) else str(names).split(","))]
    classes = {type(module).__name__ for module in meta.modules()}
    for name in names:
        if name not in classes:
            own = ",".join(sorted(meta._no_split_modules or []))
            launch.add(
                "wrap-class",
                launch.launch_file,
                "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
                f"{type(meta).__name__} has no module of the class {name}, and the start is refused.",
                f"fsdp_transformer_layer_cls_to_wrap: {own}, or take the key out",
            )


def recomputation(launch: Launch) -> None:
    """Exactly one activation checkpointing."""
    args, own = launch.training_args, is_true(launch.given.get("fsdp_activation_checkpointing", False))
    options = args.activation_checkpointing_kwargs or {}
    if launch.strategy == "fsdp" and own and args.activation_checkpointing:
        launch.add(
            "two-checkpointings",
            launch.launch_file,
            "fsdp_config.fsdp_activation_checkpointing",
            "the recipe's "
            "`activation_checkpointing` is on, too: each layer would be recomputed twice, and the start is refused.",
            "fsdp_activation_checkpointing: false",
        )
    old = [
        key
        for key in ("gradient_checkpointing", "gradient_checkpointing_kwargs")
        if key in launch.flags or key in launch.config_keys
    ]
    for key in old:
        launch.warn(
            "deprecated",
            launch.where(key),
            key,
            "the old name, gone in transformers 6; it does nothing where the new one is set.",
            launch.line(key.replace("gradient", "activation"), launch.config_keys.get(key, getattr(args, key))).replace(
                key, key.replace("gradient", "activation")
            ),
        )
    if options.get("selective"):
        key = "activation_checkpointing_kwargs"
        why = None
        if not args.activation_checkpointing:
            why = "`selective` needs `activation_checkpointing: true`."
        elif options.get("use_reentrant"):
            why = "`selective` needs `use_reentrant: false`."
        elif launch.model_args.use_peft and launch.strategy.startswith("zero3"):
            why = "`selective` does not go with LoRA under ZeRO-3."
        if why:
            launch.add("conflict", launch.where(key), key, why, launch.line(key, '{"use_reentrant": false}'))


def saving(launch: Launch) -> None:
    """Sharded state with model-only save or best-model reload; what can never be loaded again."""
    args = launch.training_args
    sharded = (
        launch.strategy == "fsdp"
        and str(launch.given.get("fsdp_state_dict_type", "SHARDED_STATE_DICT")).upper() != "FULL_STATE_DICT"
    )
    if args.save_only_model and args.load_best_model_at_end and (launch.is_deepspeed or launch.strategy == "fsdp"):
        launch.add(
            "model-only-save",
            launch.where("save_only_model"),
            "save_only_model",
            f"with load_best_model_at_end it is refused under {launch.strategy}.",
            launch.line("save_only_model", False),
        )
    elif args.save_only_model and sharded:
        launch.add(
            "model-only-save",
            launch.where("save_only_model"),
            "save_only_model",
            "the launch file shards the state, so a checkpoint without it holds no weights; the start is refused.",
            launch.line("save_only_model", False),
        )
    elif args.save_only_model:
        launch.warn(
            "model-only-save",
            launch.where("save_only_model"),
            "save_only_model",
            "such checkpoints hold no optimizer, and a stopped run cannot be continued.",
            launch.line("save_only_model", False),
        )
    if args.load_best_model_at_end and sharded:
        launch.add(
            "best-model-reload",
            launch.where("load_best_model_at_end"),
            "load_best_model_at_end",
            "the launch file shards the state; the best model would be read back from shards.",
            launch.line("load_best_model_at_end", False) + ", or fsdp_state_dict_type: FULL_STATE_DICT",
        )
    if args.load_best_model_at_end and launch.strategy.startswith("zero3") and launch.model_args.use_peft:
        launch.warn(
            "best-model-reload",
            launch.where("load_best_model_at_end"),
            "load_best_model_at_end",
            "under ZeRO-3 an adapter is not read back.",
            launch.line("load_best_model_at_end", False),
        )
    if args.enable_jit_checkpoint:
        launch.warn(
            "jit-checkpoint",
            launch.where("enable_jit_checkpoint"),
            "enable_jit_checkpoint",
            "each rank decides alone when to save: one "
            "may save while another does not. The recipe saves on SIGTERM by itself.",
            launch.line("enable_jit_checkpoint", False),
        )
    resume = args.resume_from_checkpoint
    if resume not in (None, "auto") and not os.path.isdir(resume):
        launch.add(
            "no-checkpoint",
            launch.where("resume_from_checkpoint"),
            "resume_from_checkpoint",
            f"{resume} is no folder.",
            "take it out: the same command continues from the newest whole checkpoint",
        )


# ----------------------------------------------------------------------------------------------------- files, trainer


def files(launch: Launch) -> None:
    """Paths that are named and not there; a device map in train.py under a launcher."""
    groups = (launch.script_args, launch.training_args, launch.recipe_args, launch.model_args)

    def value(key):
        return next((getattr(group, key) for group in groups if hasattr(group, key)), None)

    for key in ("schema_file", "chat_template_path"):
        path = value(key)
        if path and not os.path.exists(path) and (key == "schema_file" or path.endswith(".jinja")):
            launch.add(
                "no-file",
                launch.where(key),
                key,
                f"{path} is not here ({Path.cwd()}).",
                launch.line(key, "a file that exists"),
            )
    dataset = value("dataset_name")
    looks_local = bool(dataset) and (
        dataset.startswith((".", "/", "~")) or Path(dataset).suffix in (".jsonl", ".json", ".csv", ".parquet")
    )
    if looks_local and not os.path.exists(dataset):
        launch.add(
            "no-file",
            launch.where("dataset_name"),
            "dataset_name",
            f"{dataset} is not here ({Path.cwd()}).",
            launch.line("dataset_name", "FILE"),
        )
    if dataset and os.path.isfile(dataset) and Path(dataset).suffix not in (".jsonl", ".json", ".csv", ".parquet"):
        launch.add(
            "no-file",
            launch.where("dataset_name"),
            "dataset_name",
            f"{dataset} is none of .jsonl, .json, .csv, .parquet.",
            launch.line("dataset_name", "rows.jsonl"),
        )
    evaluates = getattr(launch.training_args.eval_strategy, "value", launch.training_args.eval_strategy) != "no"
    whole = looks_local and os.path.isfile(dataset) and getattr(launch.recipe_args, "eval_fraction", None) == 0
    if whole and evaluates:
        launch.add(
            "no-eval-rows",
            launch.where("eval_fraction"),
            "eval_fraction",
            f"0 takes the split {value('dataset_test_split')!r}, which a single file has not; the trainer stops.",
            launch.line("eval_fraction", 0.05) + ", or eval_strategy: no",
        )
    tree = ast.parse(launch.script.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        pairs = [(word.arg, word.value) for word in node.keywords] if isinstance(node, ast.Call) else []
        if isinstance(node, ast.Dict):
            pairs = [(getattr(k, "value", None), v) for k, v in zip(node.keys, node.values, strict=True)]
        for name, given in pairs:
            if name == "device_map" and isinstance(given, ast.Constant) and isinstance(given.value, str):
                launch.add(
                    "device-map",
                    f"{launch.script}, line {given.lineno}",
                    "device_map",
                    f"{given.value!r} spreads one process's model over all "
                    "GPUs; under a launcher each process has one.",
                    'device_map={"": training_args.device}, or none',
                )
    loading = launch.training_args.model_init_kwargs
    if loading and not isinstance(loading, dict):
        launch.add(
            "model-init",
            launch.where("model_init_kwargs"),
            "model_init_kwargs",
            f"{loading!r} is no JSON object.",
            """model_init_kwargs: '{"experts_implementation": "fused"}'""",
        )
        loading = {}
    loading = loading or {}
    # What the recipe refuses at its start; an older copy refuses nothing. device_map has a rule of its own, below.
    keeper = (launch.recipe / "keeper.py").resolve()
    refused = getattr(load_module(keeper), "LOADING", {}) if loading and keeper.is_file() else {}
    for key in (key for key in refused if key in loading and key != "device_map"):
        launch.add(
            "model-init",
            launch.where("model_init_kwargs"),
            "model_init_kwargs",
            f"{key} is for {refused[key]} to say, and is refused here.",
            f"take it out, and leave it to {refused[key]}",
        )
    if loading.get("device_map"):
        launch.add(
            "device-map",
            launch.where("model_init_kwargs"),
            "model_init_kwargs",
            "a device map spreads one process's model over all GPUs; under a launcher each process has one.",
            "take device_map out",
        )


def trainer(launch: Launch) -> None:
    """What TRL or transformers would refuse, drop or warn of in the recipe's own arguments."""
    args = launch.training_args
    for name in args.report_to or []:
        if name in TRACKERS and not launch.elsewhere and importlib.util.find_spec(TRACKERS[name]) is None:
            launch.add(
                "no-tracker",
                launch.where("report_to"),
                "report_to",
                f"the package {TRACKERS[name]} is not installed, and the trainer stops.",
                f"pip install {TRACKERS[name]}, or {launch.line('report_to', 'none')}",
            )
    if args.use_liger_kernel:
        launch.warn(
            "deprecated",
            launch.where("use_liger_kernel"),
            "use_liger_kernel",
            "TRL drops it in its version 2.",
            launch.line("use_liger_kernel", False),
        )
    if (args.liger_kernel_config or {}).get("fused_linear_cross_entropy"):
        launch.add(
            "conflict",
            launch.where("liger_kernel_config"),
            "liger_kernel_config",
            "TRL has a fused head of its own, and stops.",
            "take fused_linear_cross_entropy out",
        )
    if args.loss_type not in ("nll", "dft"):
        launch.add(
            "wrong-value",
            launch.where("loss_type"),
            "loss_type",
            f"{args.loss_type!r} is neither nll nor dft.",
            launch.line("loss_type", "nll"),
        )
    if args.max_length == 1024 and "max_length" not in launch.config_keys and "max_length" not in launch.flags:
        launch.warn(
            "default-length",
            launch.where("max_length"),
            "max_length",
            "unset, TRL cuts rows at 1024 tokens.",
            launch.line("max_length", 4096),
        )
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    options = args.lr_scheduler_kwargs or {}
    if kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") and not ({"min_lr", "min_lr_rate"} & options.keys()):
        launch.add(
            "schedule",
            launch.where("lr_scheduler_kwargs"),
            "lr_scheduler_kwargs",
            f"{kind} needs min_lr or min_lr_rate, and the trainer stops.",
            "lr_scheduler_kwargs: {min_lr_rate: 0.1}",
        )
    if args.push_to_hub and not args.hub_model_id:
        launch.warn(
            "hub",
            launch.where("push_to_hub"),
            "hub_model_id",
            f"unset, the upload is named after the folder `{Path(args.output_dir).name}`.",
            launch.line("hub_model_id", "OWNER/NAME"),
        )
    if args.per_device_train_batch_size < 1:
        launch.add(
            "batch",
            launch.where("per_device_train_batch_size"),
            "per_device_train_batch_size",
            "a batch holds at least one row.",
            launch.line("per_device_train_batch_size", 1),
        )
    if args.gradient_accumulation_steps < 1:
        launch.add(
            "batch",
            launch.where("gradient_accumulation_steps"),
            "gradient_accumulation_steps",
            "at least one micro-batch makes a step.",
            launch.line("gradient_accumulation_steps", 1),
        )
    if args.learning_rate <= 0:
        launch.add(
            "schedule",
            launch.where("learning_rate"),
            "learning_rate",
            f"{args.learning_rate} trains nothing.",
            launch.line("learning_rate", 2e-5),
        )
