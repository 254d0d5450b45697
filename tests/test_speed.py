"""What speed.py changes about a step is speed alone."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "recipes" / "llama-3.2-1b"))
import tiny_model  # noqa: E402

import speed  # noqa: E402


def adapted_step(spared: bool, dropout: float) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Loss, gradients and number of casts of one step of a bf16 model with an fp32 adapter, under autocast."""
    torch.manual_seed(0)
    tokenizer = tiny_model.build_tokenizer("llama")
    model = AutoModelForCausalLM.from_config(tiny_model.build_config("llama", tokenizer), dtype=torch.bfloat16)
    lora = LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(model, lora)
    if spared:
        trainer = {"model": model, "accelerator": SimpleNamespace(native_amp=True)}
        speed.spare_casts(SimpleNamespace(**trainer, args=SimpleNamespace(device=torch.device("cpu"))))
    ids = torch.arange(100).reshape(2, 50)
    torch.manual_seed(1)
    with torch.profiler.profile() as profile:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    casts = sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy")
    return loss.detach(), [weight.grad for weight in model.parameters() if weight.grad is not None], casts


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_adapters_without_needless_casts_give_the_same_bits(dropout):
    loss, gradients, casts = adapted_step(False, dropout)
    spared_loss, spared_gradients, spared_casts = adapted_step(True, dropout)
    assert torch.equal(loss, spared_loss)
    assert gradients and all(torch.equal(a, b) for a, b in zip(gradients, spared_gradients, strict=True))
    # With dropout the bits would not be the same, so nothing is spared.
    assert (spared_casts < casts) == (dropout == 0)
