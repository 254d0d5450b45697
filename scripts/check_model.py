"""What is wrong between the recipe and the model, from the model's config alone: quantization, attention, LoRA, lengths.

Each function takes a `Launch` and adds findings to it.
"""

import ast
import copy
import importlib.util
import inspect
import re
import textwrap
from functools import cache

from check_launch import Launch

# The package behind an attention's name, and the compute capabilities (major) that its kernels are built for.
FLASH = {
    "flash_attention_2": ("flash_attn", (8, 9, 10, 12)),
    "flash_attention_3": ("flash_attn_interface", (9,)),
    "flash_attention_4": ("flash_attn", (9, 10)),
}
MODELS: dict = {}


def meta_model(launch: Launch):
    """The model on the meta device: names, shapes and classes without a byte of weights. None where it cannot be built."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    key = repr(launch.model_config.to_dict()) if launch.model_config is not None else None
    if key is not None and key not in MODELS:
        config = copy.deepcopy(launch.model_config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        try:
            with torch.device("meta"):
                MODELS[key] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        except Exception:
            MODELS[key] = None
    return MODELS.get(key)


def quantization(launch: Launch) -> None:
    args, optim = launch.model_args, launch.training_args and launch.training_args.optim.value
    if optim and "8bit" in optim and launch.strategy == "fsdp":
        launch.add(
            "8bit-optimizer-fsdp",
            launch.where("optim"),
            "optim",
            "bitsandbytes' optimizers do not know the shards of FSDP2, so that the first step would fail, and torchao's are "
            "not tested with them.",
            launch.line("optim", "adamw_torch_fused"),
        )
    if not (args.load_in_4bit or args.load_in_8bit):
        return
    key = "load_in_4bit" if args.load_in_4bit else "load_in_8bit"
    if not args.use_peft:
        launch.add(
            "quantized-full",
            launch.where(key),
            key,
            "quantized weights cannot be trained; an adapter can.",
            f"{launch.line('use_peft', True)} with lora_target_modules",
        )
    if args.load_in_8bit and launch.strategy == "fsdp":
        launch.add(
            "8bit-fsdp",
            launch.where(key),
            key,
            "8-bit weights cannot be sharded by FSDP.",
            launch.line("load_in_4bit", True),
        )
    if args.load_in_8bit and launch.strategy.startswith("zero3"):
        launch.add(
            "8bit-fsdp",
            launch.where(key),
            key,
            "8-bit weights cannot be sharded by ZeRO-3.",
            launch.line("load_in_4bit", True),
        )
    storage = args.bnb_4bit_quant_storage
    packed_experts = launch.model_config is not None and launch.model_config.model_type == "gpt_oss"
    if args.load_in_4bit and packed_experts and (launch.strategy == "fsdp" or launch.strategy.startswith("zero3")):
        launch.add(
            "4bit-experts-sharded",
            launch.where(key),
            key,
            f"the packed experts of gpt-oss would not be sharded under {launch.strategy}.",
            "accelerate_configs/ddp.yaml or single.yaml",
        )
    elif args.load_in_4bit and launch.strategy == "fsdp" and storage != args.dtype:
        launch.add(
            "4bit-storage",
            launch.where("bnb_4bit_quant_storage"),
            "bnb_4bit_quant_storage",
            f"the packed weights are stored as "
            f"{storage or 'uint8'}, the others as {args.dtype}: FSDP2 leaves them unsharded, or stops.",
            launch.line("bnb_4bit_quant_storage", args.dtype),
        )
    if args.dtype == "float32" and args.load_in_4bit and args.use_peft:
        launch.warn(
            "4bit-compute",
            launch.where("dtype"),
            "dtype",
            "4-bit weights would be computed in fp32, several times slower.",
            launch.line("dtype", "bfloat16"),
        )


@cache
def passes_positions(model_class: type) -> bool:
    """Whether a model gives its mask the position ids, which tell packed documents apart, by the source of its forward.

    True where the source cannot be read or makes no mask. Issue: huggingface/transformers#39997.
    """
    from transformers import MODEL_MAPPING

    try:
        base = MODEL_MAPPING[model_class.config_class]
        tree = ast.parse(textwrap.dedent(inspect.getsource(base.forward)))
    except (KeyError, OSError, TypeError, SyntaxError):
        return True
    made = False
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Call) and "mask" in ast.unparse(node.func) and "create" in ast.unparse(node.func):
            made, names = True, [word.arg for word in node.keywords]
        if (
            isinstance(node, ast.Assign)
            and "mask_kwargs" in ast.unparse(node.targets[0])
            and isinstance(node.value, ast.Dict)
        ):
            names = [getattr(key, "value", None) for key in node.value.keys]
        if "position_ids" in names:
            return True
    return not made


def attention(launch: Launch) -> None:
    """Attention that the model or the GPU lacks; packing where this model's attention leaks."""
    args, name = launch.training_args, launch.model_args.attn_implementation
    file, meta = launch.where("attn_implementation"), meta_model(launch)
    flash = bool(name) and ("flash" in name or name.startswith("kernels-community/"))
    known = ("eager", "sdpa", "flex_attention", *FLASH)
    if name and name not in known and "/" not in name:
        launch.add(
            "attention",
            file,
            "attn_implementation",
            f"{name!r} is none of {', '.join(known)}.",
            launch.line("attn_implementation", "eager"),
        )
    if meta is not None:
        fits = [
            kind for kind, can in (("sdpa", meta._supports_sdpa), ("flex_attention", meta._supports_flex_attn)) if can
        ]
        if (name == "sdpa" and "sdpa" not in fits) or (name == "flex_attention" and "flex_attention" not in fits):
            launch.add(
                "attention",
                file,
                "attn_implementation",
                f"{type(meta).__name__} has no {name}, and the start is refused.",
                launch.line("attn_implementation", (["eager", *fits])[0]),
            )
        listed = getattr(meta, "_compatible_flash_implementations", None)
        if flash and listed and name not in listed:
            launch.add(
                "attention",
                file,
                "attn_implementation",
                f"{type(meta).__name__} goes with {', '.join(listed)}; transformers would swap "
                f"{name} for {listed[0]}, which is not proven to train.",
                launch.line("attn_implementation", "eager"),
            )
    if name in FLASH and not launch.cpu:
        package, majors = FLASH[name]
        if launch.gpu_facts and launch.gpu_facts.capability[0] not in majors:
            launch.add(
                "attention",
                file,
                "attn_implementation",
                f"{name} has no kernels for {launch.gpu} (compute capability "
                f"{'.'.join(map(str, launch.gpu_facts.capability))}).",
                launch.line("attn_implementation", "sdpa" if meta is None or meta._supports_sdpa else "eager"),
            )
        elif not launch.elsewhere and importlib.util.find_spec(package) is None:
            launch.add(
                "attention",
                file,
                "attn_implementation",
                f"{name} needs the package {package}, which is not installed here.",
                "pip install -r requirements.txt -r requirements-hopper.txt"
                if name.endswith("4")
                else launch.line("attn_implementation", "sdpa"),
            )
    if flash and launch.cpu:
        launch.add(
            "attention",
            file,
            "attn_implementation",
            f"{name} runs on GPUs only.",
            launch.line("attn_implementation", "eager"),
        )
    if flash and not (args.bf16 or args.fp16):
        launch.add(
            "attention",
            file,
            "attn_implementation",
            f"{name} takes bf16 or fp16, and the recipe has neither.",
            launch.line("bf16", True),
        )
    packed = [key for key in ("packing", "padding_free") if getattr(args, key)]
    isolates = (flash and not launch.cpu) or meta is None or passes_positions(type(meta))
    if packed and not isolates:
        launch.add(
            "packing-leaks",
            launch.where(packed[0]),
            packed[0],
            f"with {name or 'its default'} attention {type(meta).__name__} attends across packed documents.",
            launch.line(packed[0], False) + ", or attn_implementation: flash_attention_4",
        )
    if args.packing and args.packing_strategy == "wrapped":
        launch.warn(
            "packing-wrapped",
            launch.where("packing_strategy"),
            "packing_strategy",
            "`wrapped` cuts documents and mixes them in one row.",
            launch.line("packing_strategy", "bfd"),
        )
    if args.padding_free and not args.packing and args.max_length is not None:
        launch.add(
            "conflict",
            launch.where("padding_free"),
            "padding_free",
            "without packing TRL does not enforce max_length, and stops.",
            launch.line("padding_free", False),
        )


def adapters(launch: Launch) -> None:
    """LoRA: dropout on experts, targets that the model has not, a head that would not be trained."""
    args, meta = launch.model_args, meta_model(launch)
    asked = [key for key in ("lora_target_parameters", "lora_target_modules") if getattr(args, key)]
    if not args.use_peft:
        if asked and (asked[0] in launch.flags or asked[0] in launch.config_keys):
            launch.add(
                "lora-unused",
                launch.where(asked[0]),
                asked[0],
                "without use_peft all weights are trained, and the key does nothing.",
                launch.line("use_peft", True),
            )
        return
    parameters = args.lora_target_parameters or []
    parameters = [parameters] if isinstance(parameters, str) else parameters
    if parameters and args.lora_dropout:
        launch.add(
            "expert-dropout",
            launch.where("lora_dropout"),
            "lora_dropout",
            f"peft adapts fused parameters without dropout only; this is {args.lora_dropout}.",
            launch.line("lora_dropout", 0.0),
        )
    if parameters and args.use_dora:
        launch.add(
            "expert-dropout",
            launch.where("use_dora"),
            "use_dora",
            "peft has no DoRA for fused parameters.",
            launch.line("use_dora", False),
        )
    modules = args.lora_target_modules
    if modules == "lm_head" or (isinstance(modules, list) and "lm_head" in modules):
        launch.add(
            "lora-head",
            launch.where("lora_target_modules"),
            "lora_target_modules",
            "TRL computes the loss from the head's weight, so an adapter of lm_head would not be trained.",
            "take lm_head out",
        )
    if meta is None:
        return
    names = {name for name, _ in meta.named_modules()}
    every = {name for name, _ in meta.named_parameters()}
    for target in modules if isinstance(modules, list) else []:
        if target != "lm_head" and not any(name == target or name.endswith(f".{target}") for name in names):
            linear = sorted(
                {n.rpartition(".")[2] for n, m in meta.named_modules() if type(m).__name__ == "Linear"} - {"lm_head"}
            )
            launch.add(
                "lora-target",
                launch.where("lora_target_modules"),
                "lora_target_modules",
                f"{type(meta).__name__} has no module {target!r}.",
                f"lora_target_modules: [{', '.join(linear)}]",
            )
    single = isinstance(modules, str) and modules not in ("all-linear", "lm_head")
    if single and not any(re.fullmatch(modules, name) for name in names):
        known = any(name.endswith(f".{modules}") for name in names)
        launch.add(
            "lora-target",
            launch.where("lora_target_modules"),
            "lora_target_modules",
            f"a name by itself is a pattern for whole names, and {modules!r} matches no module of {type(meta).__name__}.",
            launch.line("lora_target_modules", rf"'.*\.{modules}'" if known else "all-linear"),
        )
    for target in parameters:
        if not any(name == target or name.endswith(f".{target}") for name in every):
            experts = sorted({".".join(n.split(".")[-3:]) for n, p in meta.named_parameters() if p.ndim == 3})
            launch.add(
                "lora-target",
                launch.where("lora_target_parameters"),
                "lora_target_parameters",
                f"{target!r} is no parameter of {type(meta).__name__}; peft would only warn, and leave it out.",
                f"lora_target_parameters: [{', '.join(experts)}]",
            )
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    if not modules and not parameters and launch.model_config.model_type not in DEFAULTS:
        launch.add(
            "lora-target",
            launch.where("use_peft"),
            "lora_target_modules",
            f"peft has no default targets for {launch.model_config.model_type}, and stops.",
            "lora_target_modules: [q_proj, k_proj, v_proj, o_proj]",
        )
    if (
        modules == "all-linear"
        and not parameters
        and any(p.ndim == 3 and "experts" in n for n, p in meta.named_parameters())
    ):
        launch.warn(
            "lora-target",
            launch.where("lora_target_modules"),
            "lora_target_modules",
            "`all-linear` reaches the attention only: the experts are fused parameters.",
            "lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]",
        )


def model(launch: Launch) -> None:
    """The recipe against the model's config: length, router loss."""
    config, args = launch.model_config, launch.training_args
    if config is None:
        return
    longest = getattr(config, "max_position_embeddings", None)
    if args.max_length and longest and args.max_length > longest:
        launch.add(
            "too-long",
            launch.where("max_length"),
            "max_length",
            f"the model's positions end at {longest}.",
            launch.line("max_length", longest),
        )
    weight, experts = (
        getattr(config, "router_aux_loss_coef", None),
        getattr(config, "output_router_logits", None) is not None,
    )
    coefficient = args.router_aux_loss_coef
    if experts and coefficient is None and weight:
        launch.add(
            "router-loss",
            launch.where("router_aux_loss_coef"),
            "router_aux_loss_coef",
            f"unset, TRL adds {weight} (the model's config) times the router's loss to the loss.",
            launch.line("router_aux_loss_coef", 0.0),
        )
    if experts and coefficient and launch.model_args.use_peft:
        launch.warn(
            "router-loss",
            launch.where("router_aux_loss_coef"),
            "router_aux_loss_coef",
            "the router is frozen under LoRA, so this only disturbs the loss.",
            launch.line("router_aux_loss_coef", 0.0),
        )
    if coefficient and not experts:
        launch.add(
            "router-loss",
            launch.where("router_aux_loss_coef"),
            "router_aux_loss_coef",
            f"{config.model_type} has no router, and TRL stops.",
            "take it out",
        )
