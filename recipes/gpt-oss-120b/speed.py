"""Speed of a run, version 1: the attention that fits this machine, and what every step achieved.

The same file, to the byte, lies in every recipe folder; `scripts/sync_guard.py FOLDER` brings a copy up to date.
"""

import time

import numpy as np
import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_4_available
from trl.trainer.utils import get_peak_flops

from ranks import environment, say


def choose_attention(config, training_args, asked: str | None = None) -> str:
    """The fastest attention that is installed, fits the GPU and is right for the model; said in the log.

    asked: the recipe's or the user's own choice, which wins. Switches packing off where documents would meet: gpt-oss
    is given no document borders by transformers but through a flash kernel (huggingface/transformers 39997).
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
    if training_args.packing and sinks and "flash" not in asked:
        training_args.packing = False
        why += "; packing is off, because gpt-oss attends across packed documents without a flash kernel"
    say(f"attention: {asked} ({why}); packing {'on' if training_args.packing else 'off'}")
    return asked


def flops_per_token(config, lengths: np.ndarray, trained: str) -> float:
    """FLOPs to train one token, forward and backward, mean over documents of `lengths` tokens.

    6P + 3A for trained "full", 4P + 3A for "lora", and for "expert_lora" the experts' weight gradient besides. P: the
    weights that a token meets (active experts, no embedding); A: causal attention of each document by itself.
    """
    layers, h, lengths = config.num_hidden_layers, config.hidden_size, np.asarray(lengths, dtype=np.float64)
    head = getattr(config, "head_dim", None) or h // config.num_attention_heads
    experts = getattr(config, "num_local_experts", None) or 0
    gated = layers * 3 * h * config.intermediate_size * (config.num_experts_per_tok if experts else 1)
    attention = layers * 2 * h * head * (config.num_attention_heads + config.num_key_value_heads)
    total = attention + gated + layers * h * experts + h * config.vocab_size
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    keys = 0.0
    for kind in kinds[:layers]:
        inside = np.minimum(lengths, config.sliding_window if kind == "sliding_attention" else np.inf)
        keys += (inside * (inside + 1) / 2 + (lengths - inside) * inside).sum()
    scores = 4 * config.num_attention_heads * head * keys / lengths.sum()
    return {"full": 6 * total, "lora": 4 * total, "expert_lora": 4 * total + 2 * gated}[trained] + 3 * scores


class Pace:
    """Tokens a second, MFU, seconds a step and memory since the last log, from what TRL has counted already.

    TRL's `num_tokens` is the tokens of all ranks that are no padding, which it reads from the device for its own log:
    nothing here waits for the device. A pause (evaluation, a save) is left out by `pause()`.

    config: the model's. lengths: tokens of each document of the training data. labelled: share of the tokens that carry
    a label. trained: full, lora or expert_lora.
    """

    def __init__(self, config, lengths: np.ndarray, labelled: float, trained: str, device: torch.device):
        self.flops, self.labelled, self.cuda = (
            flops_per_token(config, lengths, trained),
            labelled,
            device.type == "cuda",
        )
        self.peak = get_peak_flops(torch.cuda.get_device_name(device), "bfloat16") if self.cuda else None
        self.pause()

    def pause(self) -> None:
        self.last = None  # the time since then says nothing about training

    def measure(self, step: int, logs: dict) -> dict:
        """The keys to add to one line of the log; the first line after a pause has the memory only."""
        now, added, tokens = time.perf_counter(), {}, logs.get("num_tokens")
        if self.last and tokens is not None and step > self.last[1]:
            seconds = now - self.last[0]
            rate = (tokens - self.last[2]) / seconds
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
