"""gpt-oss-120b with `distributed_config`: the sizes follow the launch, and what it cannot train is refused.

That its losses are those of one process, that it continues after a kill and that its adapter reloads, is a cell of the
matrix in test_strategies.py, as for every other configuration.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import check_launch
import launching
import pytest

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "gpt-oss-120b"


@pytest.fixture(scope="module")
def expert_parallel():
    """The recipe's expert_parallel.py as a module."""
    return check_launch.load_module(RECIPE / "expert_parallel.py")


def sharding(expert_parallel, config: str, **changes) -> dict:
    """What from_pretrained is told under this configuration, with `changes` to it."""
    settings = {"model_init_kwargs": None, "lora_target_parameters": None} | launching.read_config(RECIPE, config)
    settings = SimpleNamespace(**settings | changes)
    return expert_parallel.sharding(settings, settings)


def test_sizes_follow_the_launch(expert_parallel, monkeypatch):
    """Two machines of eight GPUs: experts over the eight of one, everything else over all; accelerate shards nothing."""
    for name, value in {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "ACCELERATE_USE_FSDP": "true"}.items():
        monkeypatch.setenv(name, value)
    assert sharding(expert_parallel, "config") == {} and os.environ["ACCELERATE_USE_FSDP"] == "true"
    told = sharding(expert_parallel, "expert_parallel")
    asked = told["distributed_config"]
    assert (asked.fsdp_size, asked.ep_size, asked.tp_size) == (16, 8, 1) and told["device_map"] is None
    assert asked.ep_implementation == "all_to_all" and os.environ["ACCELERATE_USE_FSDP"] == "false"
    given = sharding(expert_parallel, "expert_parallel", model_init_kwargs={"distributed_config": {"ep_size": 4}})
    assert given["distributed_config"].ep_size == 4


@pytest.mark.parametrize("changes", [{"use_peft": False}, {"lora_target_parameters": ["mlp.experts.down_proj"]}])
def test_what_it_cannot_train_is_refused(expert_parallel, changes):
    """Their optimizer state would be shards, which rank 0 alone would save."""
    with pytest.raises(ValueError, match="LoRA on Linear layers"):
        sharding(expert_parallel, "expert_parallel", **changes)


def test_other_library_versions_are_refused(expert_parallel, monkeypatch):
    monkeypatch.setattr(expert_parallel, "version", lambda name: "9.0.0")
    with pytest.raises(ValueError, match=r"limits of transformers 5\.24\.x, and 9\.0\.0 is installed"):
        sharding(expert_parallel, "expert_parallel")
