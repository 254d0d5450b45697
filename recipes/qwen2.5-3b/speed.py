"""Speed of a run, version 1: the attention that fits this machine, and what every step achieved.

The same file, to the byte, lies in every recipe folder; `scripts/sync_guard.py FOLDER` brings a copy up to date.
"""

import contextlib
import importlib
import time

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, TrainerCallback
from transformers.utils import is_flash_attn_2_available, is_flash_attn_4_available
from trl.trainer.utils import get_peak_flops

from ranks import environment, is_main, say


def choose_attention(config, training_args, asked: str | None = None) -> str:
    """The fastest attention that is installed, fits the GPU and is right for the model; said in the log.

    asked: the recipe's or the user's own choice, which wins. Packing is switched off where documents would meet.
    """
    sinks, half = config.model_type == "gpt_oss", training_args.bf16 or training_args.fp16
    gpu = training_args.device.type == "cuda" and half
    major = torch.cuda.get_device_capability(training_args.device)[0] if gpu else 0
    why = "asked for"
    if asked is None and major in (9, 10) and is_flash_attn_4_available():
        try:
            from flash_attn.cute import flash_attn_varlen_func  # noqa: F401 its cutlass wheels may not fit

            asked, why = "flash_attention_4", "FlashAttention 4 is installed"
        except ImportError as error:
            say(f"FlashAttention 4 is installed, but does not load: {error}")
    if asked is None and major >= 8 and not sinks and is_flash_attn_2_available():
        asked, why = "flash_attention_2", "FlashAttention 2 is installed"
    if asked is None:
        asked, why = ("eager" if sinks else "sdpa"), "no FlashAttention for this machine and model"
        if major in (9, 10):
            why += "; requirements-hopper.txt has it, and makes packed training several times faster"
    if training_args.packing and (leak := mixing_layers(config, training_args.device.type, asked)):
        training_args.packing = False
        why += f"; packing is off, because {leak}"
    say(f"attention: {asked} ({why}); packing {'on' if training_args.packing else 'off'}")
    return asked


def mixing_layers(config, device: str, attention: str) -> str | None:
    """Which layers would let packed documents see each other, and what keeps them apart; None where every layer does.

    Attention is told the borders by position ids, gpt-oss through a flash kernel alone (huggingface/transformers 39997).
    A layer with a state needs kernels that begin anew at each border: transformers refuses packed rows without them.
    """
    if config.model_type == "gpt_oss" and "flash" not in attention:
        return "gpt-oss attends across packed documents without a flash kernel"
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other == {"linear_attention"} and config.model_type.startswith("qwen3_5"):  # Qwen3.5, 3.6 and 3.8
        with contextlib.suppress(Exception):  # as transformers tries them: one that does not load counts as absent
            if device == "cuda" and importlib.import_module("fla") and importlib.import_module("causal_conv1d"):
                return None
        return "linear attention mixes packed documents without flash-linear-attention and causal-conv1d, on a GPU"
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if other or getattr(kind, "_is_stateful", False):
        return f"nothing is known to keep packed documents apart in the {', '.join(sorted(other)) or 'state'} of this model"
    return None


def spare_casts(trainer) -> None:
    """Under autocast, give adapters their input as it is, in bf16.

    peft casts it to the dtype of the fp32 adapter, and autocast back to bf16 for the product: two passes over every
    layer's input, a sixth of a Qwen3-8B LoRA step on one H200, for the same bits. With dropout that holds on a GPU alone,
    where its kernel computes in fp32 and rounds once; on a CPU the scale is rounded, too. With 4-bit layers peft spares
    the casts itself.
    """
    if trainer.accelerator.native_amp:
        gpu = trainer.args.device.type == "cuda"
        exact = (torch.nn.Identity, torch.nn.Dropout) if gpu else torch.nn.Identity
        for module in trainer.model.modules():
            dropouts = getattr(module, "lora_dropout", {}).values()
            if isinstance(module, BaseTunerLayer) and all(isinstance(one, exact) for one in dropouts):
                module.cast_input_dtype_enabled = False  # as peft.helpers.disable_input_dtype_casting does for a while


def flops_per_token(config, lengths: np.ndarray, trained: str) -> float:
    """FLOPs to train one token, forward and backward, mean over documents of `lengths` tokens.

    6P + 3A for trained "full", 4P + 3A for "lora", and for "expert_lora" the experts' weight gradient besides. P: the
    weights that a token meets (active experts, no embedding); A: causal attention of each document by itself.
    """
    layers, h, lengths = config.num_hidden_layers, config.hidden_size, np.asarray(lengths, dtype=np.float64)
    head = getattr(config, "head_dim", None) or h // config.num_attention_heads
    queries, pairs = config.num_attention_heads * head, config.num_key_value_heads * head
    experts = getattr(config, "num_local_experts", None) or 0
    gated = layers * 3 * h * config.intermediate_size * (config.num_experts_per_tok if experts else 1)
    total = gated + layers * h * experts + h * config.vocab_size
    kinds = (getattr(config, "layer_types", None) or ["full_attention"] * layers)[:layers]
    hybrid, scores = "linear_attention" in kinds, 0.0
    for kind in kinds:
        if kind == "linear_attention":  # the gated delta rule: a state for each head, whatever the length
            k, v = config.linear_key_head_dim, config.linear_value_head_dim
            total += h * (2 * config.linear_num_key_heads * k + config.linear_num_value_heads * (3 * v + 2))
            scores += 6 * config.linear_num_value_heads * k * v
            continue
        total += h * ((3 if hybrid else 2) * queries + 2 * pairs)  # a hybrid's queries bring a gate along
        inside = np.minimum(lengths, config.sliding_window if kind == "sliding_attention" else np.inf)
        keys = (inside * (inside + 1) / 2 + (lengths - inside) * inside).sum()
        scores += 4 * queries * keys / lengths.sum()
    return {"full": 6 * total, "lora": 4 * total, "expert_lora": 4 * total + 2 * gated}[trained] + 3 * scores


class Pace(TrainerCallback):
    """Tokens a second, MFU, seconds a step and memory since the last log, from what TRL has counted already.

    TRL's `num_tokens` is the tokens of all ranks that are no padding, which it reads from the device for its own log:
    nothing here waits for the device. Evaluations and saves are left out. It adds to the log before others read it.

    config: the model's. lengths: tokens of each document of the training data. labelled: share of the tokens that carry
    a label. trained: full, lora or expert_lora.
    """

    def __init__(self, config, lengths: np.ndarray, labelled: float, trained: str, device: torch.device):
        self.seconds, self.rates = [], []  # of a step, and tokens in one, of each logged stretch
        self.flops, self.labelled, self.cuda = (
            flops_per_token(config, lengths, trained),
            labelled,
            device.type == "cuda",
        )
        self.peak = get_peak_flops(torch.cuda.get_device_name(device), "bfloat16") if self.cuda else None
        self.pause()

    def pause(self, *_, **__) -> None:
        self.last = None  # the time since then says nothing about training

    on_evaluate = on_save = pause

    def on_log(self, args, state, control, logs=None, **_):
        if is_main():
            logs |= self.measure(state.global_step, logs)

    def measure(self, step: int, logs: dict) -> dict:
        """The keys to add to one line of the log; the first line after a pause has the memory only."""
        now, added, tokens = time.perf_counter(), {}, logs.get("num_tokens")
        if self.last and tokens is not None and step > self.last[1]:
            seconds = now - self.last[0]
            rate = (tokens - self.last[2]) / seconds
            self.seconds.append(seconds / (step - self.last[1]))
            self.rates.append(rate)
            added = {
                "step_seconds": round(seconds / (step - self.last[1]), 4),
                "tokens_per_second": round(rate, 1),
                "trained_tokens_per_second": round(rate * self.labelled, 1),
            }
            if self.peak:
                added["mfu"] = round(rate * self.flops / self.peak / environment("WORLD_SIZE", 1), 4)
        if self.cuda:
            added["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            added["reserved_memory_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        if tokens is not None:
            self.last = (now, step, tokens)
        return added
