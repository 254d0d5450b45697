"""Expert parallelism by transformers' own sharding, for expert_parallel.yaml; off where the config file does not ask.

train.py works around two limits of the libraries for it: transformers 5.24 saves no optimizer state of a model that it
shards itself (trainer.py), and peft 0.21 would gather the whole base to save an adapter (save_and_load.py). Both are of
these versions, so others are refused until somebody has looked.
"""

import os
from importlib.metadata import version

from transformers.distributed import DistributedConfig
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import ModelConfig, SFTConfig

LOOKED_AT = {"transformers": "5.24.", "peft": "0.21."}


def sharding(training_args: SFTConfig, model_args: ModelConfig) -> dict:
    """What from_pretrained is told where the config file gives `distributed_config`: transformers shards, not accelerate.

    Each GPU of a machine then keeps its own experts, and tokens travel to them; other weights are FSDP2 over all GPUs.
    Raises ValueError for what cannot be trained this way, and for library versions that were not looked at.
    """
    asked = (training_args.model_init_kwargs or {}).get("distributed_config")
    if asked is None:
        return {}
    if is_deepspeed_zero3_enabled() or not model_args.use_peft or model_args.lora_target_parameters:
        raise ValueError(
            "`distributed_config` is for LoRA on Linear layers, launched with accelerate_configs/fsdp.yaml."
        )
    for name, known in LOOKED_AT.items():
        if not version(name).startswith(known):
            raise ValueError(
                f"`distributed_config` works around limits of {name} {known}x, and {version(name)} is installed. Install "
                "requirements.txt, or look whether expert_parallel.py and train.py still do what they say."
            )
    os.environ["ACCELERATE_USE_FSDP"] = "false"  # accelerate would shard the shards again
    sizes = {"fsdp_size": os.environ.get("WORLD_SIZE", 1), "ep_size": os.environ.get("LOCAL_WORLD_SIZE", 1)}
    sizes = {name: int(size) for name, size in sizes.items()} | asked
    return {"distributed_config": DistributedConfig(**sizes), "device_map": None}
