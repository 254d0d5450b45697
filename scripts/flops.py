"""Floating-point operations that training a token needs: the F in MFU = tokens/s x F / peak.

    python scripts/flops.py openai/gpt-oss-20b 4096 --trained lora      # a model's name or folder, document length

What counts: the matrix products of the model itself, forward and backward, for the tokens that are there. Attention is
counted causally, for each document by itself, and in a sliding-window layer only inside the window; of experts, those
that a token is sent to. What does not count: recomputing activations, padding, optimizer, norms, the adapters' own
products (below 1 %). Source: PaLM (arXiv 2204.02311, appendix B), with the causal half of Llama 3 (arXiv 2407.21783).
"""

import argparse
from collections.abc import Iterable

import numpy as np

TRAINED = ("full", "lora", "expert_lora")
PEAK = 989e12  # dense bf16 of an H100 or H200, NVIDIA's data sheet, FLOP/s; TRL's get_peak_flops knows more GPUs
CEILING = 790e12  # what an 8192-cubed bf16 matrix product of random numbers reaches on an H200, measured


def _experts(config) -> tuple[int, int]:
    """Number of experts and of those that a token is sent to; (0, 0) for a dense model."""
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    return count, config.num_experts_per_tok if count else 0


def matmul_parameters(config) -> dict[str, int]:
    """Parameters that one token is multiplied with, by part: attention, mlp, experts (active ones), router, lm_head.

    config: a transformers config of the Llama, Qwen3 or gpt-oss family. The embedding is a lookup and does not count;
    the head counts, tied or not. Biases do not count.
    """
    h, layers = config.hidden_size, config.num_hidden_layers
    head = getattr(config, "head_dim", None) or h // config.num_attention_heads
    count, active = _experts(config)
    gated = 3 * h * (getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    return {
        "attention": layers * h * (2 * queries + 2 * keys),
        "mlp": 0 if count else layers * gated,
        "experts": layers * active * gated,
        "router": layers * h * count,
        "lm_head": h * config.vocab_size,
    }


def attended_keys(lengths: np.ndarray, window: int | None = None) -> int:
    """Keys that the tokens of documents of `lengths` attend to, summed: token t (from 1) sees min(t, window) keys."""
    inside = np.minimum(lengths, window or np.inf)
    return int((inside * (inside + 1) / 2 + (lengths - inside) * (window or 0)).sum())


def attention_flops(config, lengths: Iterable[int] | int, causal: bool = True) -> float:
    """Forward FLOPs per token of scores and weighted values (not of the projections), mean over `lengths`.

    causal=False: every token meets the whole document in every layer, the convention of PaLM, Megatron and TRL.
    """
    lengths = np.atleast_1d(np.asarray(lengths, dtype=np.float64))
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    sliding = kinds[:layers].count("sliding_attention") if causal else 0
    keys = (layers - sliding) * (attended_keys(lengths) if causal else (lengths**2).sum())
    keys += sliding * attended_keys(lengths, config.sliding_window) if sliding else 0
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 4 * config.num_attention_heads * head * keys / lengths.sum()


def flops_per_token(config, lengths: Iterable[int] | int, trained: str = "full", causal: bool = True) -> float:
    """FLOPs to train one token, forward and backward, mean over documents of `lengths` (tokens).

    trained: "full" (6P + 3A), "lora" (4P + 3A: frozen weights have no gradient of their own), or "expert_lora" (the
    experts' weight gradient comes back: PEFT merges an adapter of a fused parameter, and differentiates the merged
    weight). P: matmul_parameters; A: attention_flops. Raises ValueError for another `trained`.
    """
    if trained not in TRAINED:
        raise ValueError(f"trained is {trained!r}, expected one of {', '.join(TRAINED)}.")
    parts = matmul_parameters(config)
    total = sum(parts.values())
    weights = {"full": 6 * total, "lora": 4 * total, "expert_lora": 4 * total + 2 * parts["experts"]}[trained]
    return weights + 3 * attention_flops(config, lengths, causal)


def main() -> None:
    from transformers import AutoConfig

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("length", type=int)
    parser.add_argument("--trained", choices=TRAINED, default="full")
    arguments = parser.parse_args()
    count = flops_per_token(AutoConfig.from_pretrained(arguments.model), arguments.length, arguments.trained)
    rate = 0.4 * PEAK / count
    print(f"{count / 1e9:.2f} GFLOP a token; 40 % of {PEAK / 1e12:.0f} TFLOP/s is {rate:.0f} tokens/s")


if __name__ == "__main__":
    main()
