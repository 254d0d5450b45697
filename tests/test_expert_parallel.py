"""gpt-oss-120b with `distributed_config`: the sizes follow the launch, and what it cannot train is refused.

That its losses are those of one process, that it continues after a kill and that its adapter reloads, is a cell of the
matrix in test_strategies.py, as for every other configuration.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import launching
import pytest

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "gpt-oss-120b"


@pytest.fixture(scope="module")
def train():
    """The recipe's train.py as a module."""
    sys.path.insert(0, str(RECIPE))
    spec = importlib.util.spec_from_file_location("train_gpt_oss_120b", RECIPE / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(RECIPE))


def sharding(train, config: str, **changes) -> dict:
    """What from_pretrained is told under this configuration, with `changes` to it."""
    settings = {"model_init_kwargs": None, "lora_target_parameters": None} | launching.read_config(RECIPE, config)
    settings = SimpleNamespace(**settings | changes)
    return train.sharding(settings, settings)


def test_sizes_follow_the_launch(train, monkeypatch):
    """Two machines of eight GPUs: experts over the eight of one, everything else over all; accelerate shards nothing."""
    for name, value in {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "ACCELERATE_USE_FSDP": "true"}.items():
        monkeypatch.setenv(name, value)
    assert sharding(train, "config") == {} and os.environ["ACCELERATE_USE_FSDP"] == "true"
    told = sharding(train, "expert_parallel")
    asked = told["distributed_config"]
    assert (asked.fsdp_size, asked.ep_size, asked.tp_size) == (16, 8, 1) and told["device_map"] is None
    assert asked.ep_implementation == "all_to_all" and os.environ["ACCELERATE_USE_FSDP"] == "false"
    given = sharding(train, "expert_parallel", model_init_kwargs={"distributed_config": {"ep_size": 4}})
    assert given["distributed_config"].ep_size == 4


@pytest.mark.parametrize("changes", [{"use_peft": False}, {"lora_target_parameters": ["mlp.experts.down_proj"]}])
def test_what_it_cannot_train_is_refused(train, changes):
    """Their optimizer state would be shards, which rank 0 alone would save."""
    with pytest.raises(ValueError, match="LoRA on Linear layers"):
        sharding(train, "expert_parallel", **changes)
