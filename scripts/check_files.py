"""Lint of an accelerate file and of a DeepSpeed file, each by itself: unknown keys, wrong values, keys that do nothing.

What is known comes from the installed libraries: the flags of `accelerate launch` (a nested key that is no flag is
ignored in silence), the fields of accelerate's config classes, DeepSpeed's own models and its list of removed keys.
"""

import argparse
import difflib
from functools import cache
from pathlib import Path

from check_launch import Finding

# Blocks of an accelerate file, and the prefix that its launcher puts before a key that lacks it.
BLOCKS = {
    "fsdp_config": "fsdp_",
    "fp8_config": "fp8_",
    "dynamo_config": "dynamo_",
    "deepspeed_config": "",
    "parallelism_config": "",
    "megatron_lm_config": "",
    "mpirun_config": "",
}
RENAMED = {
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
    "fsdp_reshard_afterforward": "fsdp_reshard_after_forward",
    "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_gradient_checkpointing": "fsdp_activation_checkpointing",
    "fsdp_cpu_offload": "fsdp_offload_params",
}
# FSDP2 has no such setting; accelerate drops them. Value: what version 2 does.
FSDP1_ONLY = {
    "fsdp_sharding_strategy": "`fsdp_reshard_after_forward: true` is FULL_SHARD, false is SHARD_GRAD_OP",
    "fsdp_backward_prefetch": "version 2 always prefetches",
    "fsdp_forward_prefetch": "version 2 has no such setting",
    "fsdp_use_orig_params": "version 2 always keeps the original parameters",
    "fsdp_sync_module_states": "version 2 always broadcasts from rank 0 where it loads there",
}
# With a DeepSpeed file accelerate refuses these in its own; they stand in the DeepSpeed file instead.
DEEPSPEED_OWNS = {
    "gradient_accumulation_steps": '"gradient_accumulation_steps": "auto"',
    "gradient_clipping": '"gradient_clipping": "auto"',
    "zero_stage": '"stage" in "zero_optimization"',
    "offload_optimizer_device": '"offload_optimizer" in "zero_optimization"',
    "offload_param_device": '"offload_param" in "zero_optimization"',
    "offload_optimizer_nvme_path": '"nvme_path" in "offload_optimizer"',
    "offload_param_nvme_path": '"nvme_path" in "offload_param"',
    "zero3_save_16bit_model": '"stage3_gather_16bit_weights_on_model_save" in "zero_optimization"',
    "mixed_precision": '"bf16": {"enabled": "auto"}',
}
# Top-level keys that deepspeed.runtime.config and transformers read (its accessors take names, so no model lists them).
DEEPSPEED_KEYS = frozenset(
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "managed_gradient_accumulation",
        "steps_per_print",
        "dump_state",
        "disable_python_gc",
        "disable_allgather",
        "communication_data_type",
        "seq_parallel_communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "gradient_allreduce_op",
        "zero_optimization",
        "activation_checkpointing",
        "comms_logger",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "gradient_clipping",
        "fp16",
        "bf16",
        "bfloat16",
        "torch_autocast",
        "optimizer",
        "scheduler",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "flops_profiler",
        "wall_clock_breakdown",
        "memory_breakdown",
        "autotuning",
        "use_data_before_expert_parallelism",
        "hybrid_engine",
        "pipeline",
        "data_efficiency",
        "checkpoint",
        "data_types",
        "aio",
        "dataloader_drop_last",
        "log_level",
        "datastates_ckpt",
        "weight_quantization",
        "compile",
        "timers",
        "tensor_parallel",
        "expert_parallel",
        "sequence_parallel_size",
        "vocabulary_size",
        "monitor_config",
        "local_rank",
        "seed",
        "data_parallel_size",
        "inference",
        "zenflow",
        "msamp",
        "expert_data_topo",
        "compression",
        "use_node_local_storage",
        "data_sampling",
    ]
)


def is_true(value: object) -> bool:
    """As accelerate reads a switch: true, "true", "yes", 1."""
    return str(value).lower() in ("true", "1", "yes", "y", "on", "t")


@cache
def launch_flags() -> frozenset[str]:
    """The names of accelerate launch's flags."""
    from accelerate.commands.launch import launch_command_parser

    return frozenset(action.dest for action in launch_command_parser()._actions)


def nearest(name: str, known) -> str:
    """The known name that is closest to `name`, or "" where none is close."""
    return RENAMED.get(name) or next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.78)), "")


def flatten(keys: dict) -> dict:
    """An accelerate file's keys as its launcher merges them: blocks opened, prefixes added."""
    flat = {}
    for name, value in keys.items():
        if name in BLOCKS and isinstance(value, dict):
            prefix = BLOCKS[name]
            flat |= {k if k.startswith(prefix.rstrip("_")) else prefix + k: v for k, v in value.items()}
        else:
            flat[name] = value
    return flat


def lint_accelerate(keys: dict, path: Path, twice: list[str]) -> list[Finding]:
    """Keys of an accelerate file that are unknown, removed, doubled or of a value that accelerate does not know."""
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
    from accelerate.utils import ComputeEnvironment, DistributedType, SageMakerDistributedType

    found = []

    def add(rule, key, why, write, severity="error"):
        found.append(Finding(rule, severity, str(path), key, why, write))

    for key in twice:
        add("twice", key, "the key stands twice, and the first would be lost.", f"{key}: ... once")
    sagemaker = keys.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER
    fields = set((SageMakerConfig if sagemaker else ClusterConfig).__dataclass_fields__) | {"fp16", "dynamo_backend"}
    for key in keys.keys() - fields:
        near = nearest(str(key), fields)
        write = f"{near}: {keys[key]}" if near else f"take `{key}` out"
        add("unknown-key", str(key), "accelerate knows no such key, and stops.", write)
    for block, prefix in BLOCKS.items():
        value = keys.get(block)
        if value is None:
            continue
        if not isinstance(value, dict):
            add("wrong-value", block, f"it holds {value!r}, expected `key: value` lines.", f"{block}: {{}}")
            continue
        allowed = _allowed(block)
        for key in value:
            full = key if key.startswith(prefix.rstrip("_")) else prefix + key
            if full in allowed:
                continue
            near = nearest(full, allowed)
            write = f"{near}: {value[key]}" if near else f"take `{key}` out"
            why = "accelerate's launcher has no such flag, and ignores the key in silence."
            add("unknown-nested-key", f"{block}.{key}", why, write)
    kinds = SageMakerDistributedType if sagemaker else DistributedType
    known = [kind.value for kind in kinds]
    if "distributed_type" not in keys:
        add(
            "no-distributed-type",
            "distributed_type",
            "the key is missing, and accelerate stops.",
            "distributed_type: MULTI_GPU",
        )
    elif str(keys["distributed_type"]) not in known and keys["distributed_type"] is not False:
        near = nearest(str(keys["distributed_type"]).upper(), known) or "MULTI_GPU"
        add(
            "wrong-value",
            "distributed_type",
            f"{keys['distributed_type']!r} is none of {', '.join(known)}.",
            f"distributed_type: {near}",
        )
    elif keys["distributed_type"] is False:
        add("wrong-value", "distributed_type", "YAML reads NO without quotes as false.", "distributed_type: 'NO'")
    environment = keys.get("compute_environment", "LOCAL_MACHINE")
    if environment not in [kind.value for kind in ComputeEnvironment]:
        add("wrong-value", "compute_environment", f"{environment!r} is unknown.", "compute_environment: LOCAL_MACHINE")
    return found


def _allowed(block: str) -> set[str]:
    flags = launch_flags()
    if block == "deepspeed_config":
        wanted = ("deepspeed_", "zero", "offload_", "gradient_")
        return {flag for flag in flags if flag.startswith(wanted)} - {"use_deepspeed"}
    prefix = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_", "mpirun_config": "mpirun_"}
    prefix |= {"parallelism_config": "parallelism_config_", "megatron_lm_config": "megatron_lm_"}
    also = {"fsdp_config": {"fsdp_ignored_modules"}, "mpirun_config": {"mpirun_ccl"}}.get(block, set())
    return {flag for flag in flags if flag.startswith(prefix[block])} | also


def lint_settings(given: dict, path: Path, strict: bool) -> list[Finding]:
    """What is wrong with an accelerate file's settings taken together, flags of the line included (`flatten`).

    strict: for a launch of a recipe. Otherwise what accelerate accepts, but no recipe should have, is a warning.
    """
    from accelerate.utils.constants import (
        DEEPSPEED_MULTINODE_LAUNCHERS,
        FSDP2_STATE_DICT_TYPE,
        FSDP_AUTO_WRAP_POLICY,
        FSDP_STATE_DICT_TYPE,
    )

    found, ours = [], "error" if strict else "warning"

    def add(rule, key, why, write, severity="error"):
        found.append(Finding(rule, severity, str(path), key, why, write))

    kind = str(given.get("distributed_type", ""))
    fsdp = is_true(given.get("use_fsdp", False)) or kind == "FSDP"
    deepspeed = is_true(given.get("use_deepspeed", False)) or kind == "DEEPSPEED"
    processes = given.get("num_processes")
    several = processes not in (None, 0, 1, "1")
    machines = given.get("num_machines") or 1

    # ---- one process where several were asked for
    if kind == "NO" and several and not (fsdp or deepspeed or given.get("multi_gpu")):
        why = f"{processes} processes are asked for, but the type NO starts one, without a word."
        add("single-with-several", "num_processes", why, "distributed_type: MULTI_GPU, or num_processes: 1", ours)
    if (is_true(given.get("use_cpu", False)) or is_true(given.get("cpu", False)) or kind == "MULTI_CPU") and several:
        why = "with `use_cpu` or MULTI_CPU the launcher starts one process, whatever num_processes says."
        add("cpu-in-launch-file", "use_cpu", why, "use_cpu: false, and `--use_cpu true` after train.py", ours)
    if kind != "NO" and strict and processes in (None, -1):
        add("no-processes", "num_processes", "the key is missing, and accelerate stops.", "num_processes: gpu")
    if processes is not None and not (str(processes).lstrip("-").isdigit() or str(processes) in ("gpu", "auto", "cpu")):
        add("wrong-value", "num_processes", f"{processes!r} is no number.", "num_processes: gpu")
    if str(processes) == "auto" and strict:
        why = "`auto` means the number of CPU cores where no GPU is visible."
        add("auto-processes", "num_processes", why, "num_processes: gpu", "warning")
    precision = given.get("mixed_precision")
    if precision not in (None, "no", False, "fp16", "bf16", "fp8"):
        add("wrong-value", "mixed_precision", f"{precision!r} is none of no, fp16, bf16, fp8.", "mixed_precision: bf16")

    # ---- FSDP
    version = str(given.get("fsdp_version", "1"))
    if fsdp and not any(key.startswith("fsdp_") and key != "fsdp_version" for key in given) and not strict:
        pass  # an empty block: nothing more to say about a file by itself
    elif fsdp:
        if version not in ("1", "2"):
            add("wrong-value", "fsdp_config.fsdp_version", f"{version!r} is neither 1 nor 2.", "fsdp_version: 2")
        elif version == "1":
            why = "this is FSDP version 1 (the default where the key is missing), which accelerate deprecates."
            add("fsdp1", "fsdp_config.fsdp_version", why, "fsdp_version: 2", ours)
        policy = given.get("fsdp_auto_wrap_policy")
        if policy is None or str(policy).upper() == "NO_WRAP":
            why = "without a wrap policy only embedding and head become units: all layers are gathered at once."
            add(
                "no-wrap-policy",
                "fsdp_config.fsdp_auto_wrap_policy",
                why,
                "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
                ours,
            )
        elif str(policy).upper() not in FSDP_AUTO_WRAP_POLICY:
            near = nearest(str(policy).upper(), FSDP_AUTO_WRAP_POLICY) or FSDP_AUTO_WRAP_POLICY[0]
            why = f"{policy!r} is none of {', '.join(FSDP_AUTO_WRAP_POLICY)}."
            add("wrong-value", "fsdp_config.fsdp_auto_wrap_policy", why, f"fsdp_auto_wrap_policy: {near}")
        elif str(policy).upper() == "SIZE_BASED_WRAP" and given.get("fsdp_transformer_layer_cls_to_wrap"):
            why = "the class is used with TRANSFORMER_BASED_WRAP only."
            write = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
            add("wrap-class-unused", "fsdp_config.fsdp_transformer_layer_cls_to_wrap", why, write, "warning")
        kinds = FSDP2_STATE_DICT_TYPE if version == "2" else FSDP_STATE_DICT_TYPE
        state = given.get("fsdp_state_dict_type")
        if state is not None and str(state).upper() not in kinds:
            near = nearest(str(state).upper(), kinds) or "SHARDED_STATE_DICT"
            why = f"{state!r} is none of {', '.join(kinds)}."
            add("wrong-value", "fsdp_config.fsdp_state_dict_type", why, f"fsdp_state_dict_type: {near}")
        if version == "2":
            for key, instead in FSDP1_ONLY.items():
                if key not in given:
                    continue
                same = {"fsdp_sharding_strategy": ("FULL_SHARD", "1"), "fsdp_forward_prefetch": ("FALSE",)}
                harmless = key not in same or str(given[key]).upper() in same[key]
                why = f"this is a key of FSDP version 1, and version 2 ignores it: {instead}."
                add("fsdp1-key", f"fsdp_config.{key}", why, f"take `{key}` out", "warning" if harmless else "error")
            reshard = given.get("fsdp_reshard_after_forward", True)
            if str(reshard).lower() not in ("true", "false", "1", "0", "yes", "no", "y", "n", "t", "f", "on", "off"):
                why = f"{reshard!r} belongs to FSDP version 1; version 2 takes true or false, and stops."
                add("wrong-value", "fsdp_config.fsdp_reshard_after_forward", why, "fsdp_reshard_after_forward: true")
        recomputes = is_true(given.get("fsdp_activation_checkpointing", False)) and version == "2"
        if is_true(given.get("fsdp_activation_checkpointing_offload", False)) and not recomputes:
            key = "fsdp_config.fsdp_activation_checkpointing_offload"
            why = "it needs fsdp_version 2 and fsdp_activation_checkpointing, and accelerate stops."
            add("conflict", key, why, "fsdp_activation_checkpointing_offload: false")
        silent = not is_true(given.get("fsdp_sync_module_states", True))
        if is_true(given.get("fsdp_cpu_ram_efficient_loading", True)) and silent:
            why = "loading on rank 0 alone needs the broadcast, and accelerate stops."
            add("conflict", "fsdp_config.fsdp_sync_module_states", why, "fsdp_sync_module_states: true")

    # ---- DeepSpeed
    if deepspeed and given.get("deepspeed_config_file") not in (None, "none"):
        for key in DEEPSPEED_OWNS.keys() & given.keys():
            if key == "mixed_precision" and precision is None:
                continue
            name = key if key == "mixed_precision" else f"deepspeed_config.{key}"
            why = "beside a DeepSpeed file accelerate refuses this key; the DeepSpeed file says it."
            add(
                "beside-deepspeed-file", name, why, f"take `{key}` out, and {DEEPSPEED_OWNS[key]} in the DeepSpeed file"
            )
    launcher = given.get("deepspeed_multinode_launcher")
    if deepspeed and launcher is not None and launcher not in DEEPSPEED_MULTINODE_LAUNCHERS:
        why = f"{launcher!r} is none of {', '.join(DEEPSPEED_MULTINODE_LAUNCHERS)}."
        add(
            "wrong-value",
            "deepspeed_config.deepspeed_multinode_launcher",
            why,
            "deepspeed_multinode_launcher: standard",
        )
    if deepspeed and given.get("zero_stage") not in (None, 0, 1, 2, 3, "0", "1", "2", "3"):
        add("wrong-value", "deepspeed_config.zero_stage", f"{given['zero_stage']!r} is no stage.", "zero_stage: 3")

    # ---- several machines
    if isinstance(machines, int) and machines > 1:
        if isinstance(processes, int) and processes > 0 and processes % machines:
            why = f"{processes} processes do not divide over {machines} machines."
            add("machines", "num_processes", why, f"num_processes: {processes // machines * machines or machines}")
        rank = given.get("machine_rank", 0)
        if isinstance(rank, int) and rank >= machines:
            why = f"rank {rank} of {machines} machines: they count from 0."
            add("machines", "machine_rank", why, f"machine_rank: {machines - 1}", ours)
        if deepspeed and launcher != "standard":
            why = (
                "on several machines DeepSpeed's own launcher (pdsh by default) starts local ranks only where no hostfile "
                "is, ends with 0, and writes the whole environment, keys included, to a file."
            )
            write = "deepspeed_multinode_launcher: standard"
            add("deepspeed-launcher", "deepspeed_config.deepspeed_multinode_launcher", why, write, ours)
        address = given.get("main_process_ip")
        c10d = given.get("rdzv_backend") not in (None, "static")
        if not address and not (given.get("deepspeed_hostfile") and launcher != "standard"):
            why = f"{machines} machines need the address of the first one."
            add("no-address", "main_process_ip", why, "main_process_ip: ADDRESS_OF_MACHINE_0", ours)
        elif str(address).startswith("127.") or str(address) in ("localhost", "::1", "0.0.0.0"):
            why = f"{address} is this machine's own; the others cannot reach it."
            add("loopback", "main_process_ip", why, "main_process_ip: ADDRESS_OF_MACHINE_0", ours)
        if address and given.get("main_process_port") is None and not c10d and strict:
            add(
                "no-port",
                "main_process_port",
                "several machines need one fixed port.",
                "main_process_port: 29500",
                "warning",
            )
        if given.get("main_process_port") == 0:
            why = "port 0 is another one on each machine."
            add("no-port", "main_process_port", why, "main_process_port: 29500", ours)
    port = given.get("main_process_port")
    if port is not None and not (str(port).isdigit() and int(port) < 65536):
        add("wrong-value", "main_process_port", f"{port!r} is no port.", "main_process_port: 29500")

    # ---- N-dimensional parallelism
    sizes = {
        name: given.get(f"parallelism_config_{name}_size", 1) for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            add("wrong-value", f"parallelism_config.parallelism_config_{name}_size", f"{size!r} is no size.", "1")
            return found
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        why = "context and sequence parallelism exclude each other."
        add("parallelism", "parallelism_config.parallelism_config_sp_size", why, "parallelism_config_sp_size: 1")
    total = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["tp"] * sizes["cp"] * sizes["sp"]
    if total > 1 and isinstance(processes, int) and processes > 0 and total != processes and sizes["sp"] == 1:
        shape = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        why = f"{shape} is {total}, but num_processes is {processes}: they must be equal."
        add("parallelism", "num_processes", why, f"num_processes: {total}")
    return found


def lint_deepspeed(keys: dict, path: Path, twice: list[str] = ()) -> list[Finding]:
    """What is wrong with a DeepSpeed file by itself, checked by DeepSpeed's own models where they forbid extras."""
    import logging

    logging.disable(logging.WARNING)  # it tells that it found no GPU
    from deepspeed.compile.config import CompileConfig
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    logging.disable(logging.NOTSET)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    found = []

    def add(rule, key, why, write, severity="error"):
        found.append(Finding(rule, severity, str(path), key, why, write))

    for key in twice:
        add("twice", key, "the key stands twice, and DeepSpeed stops.", f'"{key}": once')
    for key in keys:
        if key in _REMOVED_TOP_LEVEL_CONFIG_KEYS:
            off = keys[key] is False or (isinstance(keys[key], dict) and keys[key].get("enabled") is False)
            why = _REMOVED_TOP_LEVEL_CONFIG_KEYS[key].partition(" See http")[0].strip()
            why += " Even switched off it is refused." if off else ""
            add("removed-key", key, why, f'take "{key}" out')
        elif key not in DEEPSPEED_KEYS and not key.startswith(("_", "#", "//")):
            near = "" if "comment" in key else nearest(key, DEEPSPEED_KEYS)
            why = "DeepSpeed reads no such key, and ignores it in silence."
            add("unknown-key", key, why, f'"{near}"' if near else f'take "{key}" out', "error" if near else "warning")
    zero = keys.get("zero_optimization")
    if zero is None:
        why = "the section is missing, and accelerate stops."
        add("no-zero", "zero_optimization", why, '"zero_optimization": {"stage": 2}')
    models = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    models["compile"] = CompileConfig
    for section, model in models.items():
        value = keys.get(section)
        if isinstance(value, dict):
            removed = _REMOVED_ZERO_CONFIG_KEYS if section == "zero_optimization" else {}
            found += _lint_section(section, value, model, path, removed)
        elif value is not None and not isinstance(value, bool):
            add("wrong-value", section, f"it holds {value!r}, expected an object.", f'"{section}": {{}}')
    zero = zero if isinstance(zero, dict) else {}
    stage = zero.get("stage", 0)
    for key in ("offload_param", "offload_optimizer"):
        place = zero.get(key)
        if not isinstance(place, dict):
            continue
        device = place.get("device", "none")
        if key == "offload_param" and device in ("cpu", "nvme") and stage != 3:
            why = f"parameters can be offloaded under stage 3 only; this is stage {stage}."
            add("offload", f"zero_optimization.{key}", why, '"stage": 3')
        if key == "offload_optimizer" and device in ("cpu", "nvme") and stage == 0:
            why = "without ZeRO (stage 0) nothing is offloaded."
            add("offload", f"zero_optimization.{key}", why, '"stage": 2')
        if device == "nvme" and not place.get("nvme_path"):
            why = "NVMe offload needs a folder."
            add("offload", f"zero_optimization.{key}.nvme_path", why, '"nvme_path": "/local_nvme"')
        if device == "nvme" and stage != 3:
            why = f"NVMe offload needs stage 3; this is stage {stage}."
            add("offload", f"zero_optimization.{key}.device", why, '"device": "cpu"')
    on = [name for name in ("bf16", "fp16") if is_true((_section(keys, name)).get("enabled", False))]
    if len(on) == 2:
        add(
            "two-precisions",
            "fp16.enabled",
            "bf16 and fp16 are both on, and DeepSpeed stops.",
            '"enabled": "auto" in both',
        )
    sizes = [keys.get(k) for k in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    numbers = all(type(size) is int and size > 0 for size in sizes)
    if numbers and sizes[0] % (sizes[1] * sizes[2]):
        why = f"{sizes[0]} is no multiple of {sizes[1]} x {sizes[2]} (micro-batch x accumulation)."
        add("batch", "train_batch_size", why, '"train_batch_size": "auto"')
    if not any(finding.severity == "error" for finding in found) and (said := deepspeed_says(keys)):
        add("refused", "file", f"DeepSpeed stops: {said}.", "what its documentation of config-json names")
    return found


def deepspeed_says(keys: dict) -> str | None:
    """Why DeepSpeed's own config class refuses the keys, or None. The batch is left to whoever knows the processes."""
    from deepspeed.runtime.config import DeepSpeedConfig

    def filled(value):
        if isinstance(value, dict):
            return {key: filled(content) for key, content in value.items() if content != "auto"}
        return value

    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    keys = {key: value for key, value in filled(keys).items() if key not in batch}
    try:
        DeepSpeedConfig(keys | {"train_micro_batch_size_per_gpu": 1})
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _section(keys: dict, name: str) -> dict:
    value = keys.get(name)
    return value if isinstance(value, dict) else {}


def _lint_section(section: str, value: dict, model, path: Path, removed: dict) -> list[Finding]:
    """Errors of DeepSpeed's pydantic model of a section, each as a finding; "auto" is accepted everywhere."""
    from pydantic import ValidationError

    found = []
    for key in value.keys() & removed.keys():
        why = removed[key].partition(" See http")[0]
        found.append(Finding("removed-key", "error", str(path), f"{section}.{key}", why, f'take "{key}" out'))
    known = {name for field, info in model.model_fields.items() for name in (field, info.alias) if name}
    for key in [key for key in value if value[key] == "auto" and key not in known]:  # dropped before the model looks
        near, why = nearest(key, known), "DeepSpeed knows no such key, and drops it in silence where it is auto."
        write = f'"{near}"' if near else f'take "{key}" out'
        found.append(Finding("unknown-nested-key", "error", str(path), f"{section}.{key}", why, write))
    try:
        model(**{key: content for key, content in value.items() if key not in removed})
    except ValidationError as error:
        for problem in error.errors():
            place = [str(part) for part in problem["loc"]]
            key = ".".join([section, *place])
            if problem["type"] == "extra_forbidden":
                near = nearest(place[-1], known) if len(place) == 1 else ""
                why = "DeepSpeed knows no such key, and stops."
                write = f'"{near}"' if near else f'take "{place[-1]}" out'
                found.append(Finding("unknown-nested-key", "error", str(path), key, why, write))
            else:
                why = f"DeepSpeed stops: {problem['msg']} (found {problem.get('input')!r:.60})."
                found.append(
                    Finding("wrong-value", "error", str(path), key, why, f'"{place[-1] if place else section}": "auto"')
                )
    except Exception as error:  # a deprecated key that DeepSpeed cannot translate
        found.append(
            Finding("wrong-value", "error", str(path), section, f"DeepSpeed stops: {error}.", "the present keys")
        )
    return found


def lint_file(path: Path) -> list[Finding]:
    """Lint one file that may be anyone's: a DeepSpeed file where it ends in .json and has no accelerate key."""
    from check_launch import load_json, load_yaml

    try:
        if path.suffix == ".json":
            keys, twice = load_json(path)
            if "distributed_type" not in keys:
                return lint_deepspeed(keys, path, twice)
        else:
            keys, twice = load_yaml(path)
    except ValueError as error:
        return [Finding("unreadable", "error", str(path), "file", str(error), "")]
    return lint_accelerate(keys, path, twice) + lint_settings(flatten(keys), path, strict=False)


def given_settings(keys: dict, args: argparse.Namespace) -> dict:
    """The settings of a launch that somebody wrote: the file's, overridden by the line's flags."""
    return flatten(keys) | {
        name: getattr(args, name) for name in getattr(args, "nondefault", set()) if hasattr(args, name)
    }
