"""FLOPs a token: the published architectures, checked against counts made another way."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import compute_flops_per_token

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "recipes" / "llama-3.2-1b"))
import flops  # noqa: E402
import tiny_model  # noqa: E402

import speed  # noqa: E402

SIZES = {"llama": "1b", "qwen3": "8b", "gpt-oss-20b": "20b", "gpt-oss-120b": "120b", "qwen3_5": "27b"}


def real(name: str):
    family = "gpt-oss" if name.startswith("gpt-oss") else name
    return tiny_model.build_real_config(family, SIZES[name], tiny_model.build_tokenizer(family)).get_text_config()


# GFLOP a token at 4096 tokens, worked out by hand from the published dimensions (full, LoRA).
@pytest.mark.parametrize(
    ("name", "full", "lora"),
    [
        ("llama", 8.22, 5.75),
        ("qwen3", 49.03, 33.90),
        ("gpt-oss-20b", 22.93, 15.71),
        ("gpt-oss-120b", 32.71, 22.45),
        ("qwen3_5", 156.83, 105.58),
    ],
)
def test_published_architectures(name, full, lora):
    assert round(flops.flops_per_token(real(name), 4096) / 1e9, 2) == full
    assert round(flops.flops_per_token(real(name), 4096, "lora") / 1e9, 2) == lora


@pytest.mark.parametrize(
    ("name", "trained"), [*((n, k) for n in SIZES for k in ("full", "lora")), ("gpt-oss-20b", "expert_lora")]
)
def test_a_run_logs_its_mfu_by_the_same_count(name, trained):
    """recipes/*/speed.py holds the formula once more, because a recipe takes nothing from scripts/."""
    config, lengths = real(name), [17, 600, 4096]
    expected = flops.flops_per_token(config, lengths, trained)
    assert speed.flops_per_token(config, lengths, trained) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_trl_counts_the_same_for_dense_models(name):
    config = real(name)
    assert flops.flops_per_token(config, 4096, causal=False) == pytest.approx(compute_flops_per_token(config, 4096))


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_those_of_the_model(name):
    """Every weight of at least two dimensions, counted on the module itself, with the active experts alone."""
    config = real(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = model.lm_head.weight.numel()
    for key, weight in model.model.layers.named_parameters():
        if "experts" in key and weight.ndim == 3:
            counted += weight.numel() * config.num_experts_per_tok // config.num_local_experts
        elif weight.ndim == 2 and "bias" not in key:
            counted += weight.numel()
    assert sum(flops.matmul_parameters(config).values()) == counted


def test_attention_is_counted_token_by_token():
    config = AutoConfig.for_model(
        "gpt_oss", num_hidden_layers=4, sliding_window=8, num_attention_heads=2, head_dim=16, hidden_size=32
    )
    lengths = [3, 8, 9, 50]
    full = sum(t for n in lengths for t in range(1, n + 1))
    windowed = sum(min(t, 8) for n in lengths for t in range(1, n + 1))
    expected = 4 * 2 * 16 * (2 * full + 2 * windowed) / sum(lengths)
    assert flops.attention_flops(config, lengths) == pytest.approx(expected)
    # A packed row of short documents costs less than one long document of as many tokens.
    assert flops.flops_per_token(config, lengths) < flops.flops_per_token(config, sum(lengths))


def test_expert_lora_pays_the_experts_weight_gradient():
    config = real("gpt-oss-20b")
    assert 20 < flops.flops_per_token(config, 4096, "expert_lora") / 1e9 < 21
    with pytest.raises(ValueError, match="full, lora, expert_lora"):
        flops.flops_per_token(config, 4096, "qlora")
