"""Floating-point operations that training a token needs: the F in MFU = tokens/s x F / peak.

    python scripts/flops.py openai/gpt-oss-20b 4096 --trained lora      # a model's name or folder, document length

What counts: the matrix products of the model itself, forward and backward, for the tokens that are there. Attention is
counted causally, for each document by itself, and in a sliding-window layer only inside the window; linear attention as
its recurrence, token by token; of experts, those that a token is sent to. What does not count: recomputing activations,
padding, optimizer, norms, short convolutions, what kernels compute in chunks on top, the adapters' own products (below
1 %). Source: PaLM (arXiv 2204.02311, appendix B), with the causal half of Llama 3 (arXiv 2407.21783); the gated delta
rule of arXiv 2412.06464, equation 10.
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


def _kinds(config) -> list[str]:
    """The kind of each layer's attention."""
    return (getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)[
        : config.num_hidden_layers
    ]


def matmul_parameters(config) -> dict[str, int]:
    """Parameters that one token is multiplied with, by part: attention, linear_attention (its projections), mlp,
    experts (active ones), router, lm_head.

    config: a transformers config of a text model: Llama, Qwen, Olmo, gpt-oss. The embedding is a lookup and does not
    count; the head counts, tied or not. Biases do not count.
    """
    h, layers = config.hidden_size, config.num_hidden_layers
    head = getattr(config, "head_dim", None) or h // config.num_attention_heads
    count, active = _experts(config)
    gated = 3 * h * (getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    linear, projections = _kinds(config).count("linear_attention"), 0
    if linear:  # the query projection of such a model's full attention also makes the gate of its output
        k, v = (
            getattr(config, f"linear_num_{x}_heads") * getattr(config, f"linear_{x}_head_dim") for x in ("key", "value")
        )
        projections = 2 * k + v + v + 2 * config.linear_num_value_heads + v  # q, k, v; gate; decay and rate; output
    return {
        "attention": (layers - linear) * h * ((3 if linear else 2) * queries + 2 * keys),
        "linear_attention": linear * h * projections,
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

    Linear attention: three products of its state with a vector (what the state predicts for the key, the correction, the
    query's answer), whatever the length. causal=False: every token meets the whole document in every other layer, the
    convention of PaLM, Megatron and TRL.
    """
    lengths = np.atleast_1d(np.asarray(lengths, dtype=np.float64))
    kinds = _kinds(config)
    linear, sliding = kinds.count("linear_attention"), kinds.count("sliding_attention") if causal else 0
    keys = (len(kinds) - linear - sliding) * (attended_keys(lengths) if causal else (lengths**2).sum())
    keys += sliding * attended_keys(lengths, config.sliding_window) if sliding else 0
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim if linear else 0
    return 4 * config.num_attention_heads * head * keys / lengths.sum() + linear * 6 * state


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
    config = AutoConfig.from_pretrained(arguments.model).get_text_config()
    count = flops_per_token(config, arguments.length, arguments.trained)
    rate = 0.4 * PEAK / count
    print(f"{count / 1e9:.2f} GFLOP a token; 40 % of {PEAK / 1e12:.0f} TFLOP/s is {rate:.0f} tokens/s")


if __name__ == "__main__":
    main()
