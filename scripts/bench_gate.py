"""Is the fast path the same function? Packed against unpacked, and bf16 with the fast attention against fp32 eager.

    python scripts/bench_gate.py llama:1b gpt-oss:20b          # two layers in the published dimensions, on the GPU
    python scripts/bench_gate.py llama:tiny --attention sdpa   # on a CPU, in fp32

One model with random weights; documents of uneven length through TRL's own collator. Errors are relative, by norm, over
the logits and over the gradients of all weights. Exit code 1 where one is above its limit; against fp32, the limit is
what eager attention loses in the same dtype, where that is more. Packing is checked where the recipes allow it: gpt-oss
with a flash kernel, Llama and Qwen3 always. Of gpt-oss, one layer's experts run by fused_experts.py as well.
"""

import argparse
import copy
import json
import sys
import time
from pathlib import Path

import tiny_model
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.utils import is_flash_attn_4_available
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

sys.path.append(str(Path(__file__).resolve().parent.parent / "recipes" / "gpt-oss-20b"))
import fused_experts

LENGTHS = (37, 300, 5, 171)
# Rounding to bf16 moves logits and gradients of two layers by 1 to 2 %, a wrong mask by tens of percent.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
# With a router, rounding also sends some tokens to another expert, which moves those by much, whatever the attention: the
# fast attention may lose this many times what eager attention loses in the same dtype.
BESIDE_EAGER = 1.25


def relative(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Norm of the difference over the norm of `wanted`, over all tensors together."""
    above = sum((a.double() - b.double()).square().sum() for a, b in zip(found, wanted, strict=True))
    return (above / sum(b.double().square().sum() for b in wanted)).sqrt().item()


def logits_and_gradients(model, documents: list[list[int]], packed: bool):
    """Logits of each document, and the gradients of the mean loss over all tokens; in one packed row, or one by one."""
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=packed)
    rows = [{"input_ids": ids, "labels": ids} for ids in documents]
    batches = [collate(rows)] if packed else [collate([row]) for row in rows]
    model.zero_grad(set_to_none=True)
    outputs, total = [], sum(len(ids) - 1 for ids in documents)
    for batch in batches:
        batch = {k: v.to(model.device) if torch.is_tensor(v) else v for k, v in batch.items()}
        labels = batch.pop("labels")
        logits = model(**batch, use_cache=False).logits.float()
        outputs.append(logits.detach()[0])
        kept = labels[0, 1:] != -100
        if not packed:
            kept = torch.ones_like(kept)
        loss = torch.nn.functional.cross_entropy(logits[0, :-1][kept], labels[0, 1:][kept], reduction="sum") / total
        loss.backward()
    if packed:
        outputs = list(outputs[0].split([len(ids) for ids in documents]))
    return outputs, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check(family: str, size: str, attention: str | None, bf16: bool = False) -> dict:
    """The errors of one architecture, with the limit they have to keep. On a GPU, and with `bf16`, of bf16 weights."""
    cuda = torch.cuda.is_available()
    device, dtype = "cuda" if cuda else "cpu", torch.bfloat16 if cuda or bf16 else torch.float32
    if attention is None:
        plain = "eager" if family == "gpt-oss" else "sdpa"
        attention = "flash_attention_4" if cuda and is_flash_attn_4_available() else plain
    tokenizer = tiny_model.build_tokenizer(family)
    config = (
        tiny_model.build_config(family, tokenizer)
        if size == "tiny"
        else tiny_model.build_real_config(family, size, tokenizer, layers=2)
    )
    draw = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, config.vocab_size, (n,), generator=draw).tolist() for n in LENGTHS]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=attention)
    result = {
        "model": f"{family} {size}, 2 layers",
        "attention": attention,
        "dtype": str(dtype),
        "limit": LIMITS[dtype],
    }
    alone = logits_and_gradients(model, documents, packed=False)
    if family != "gpt-oss" or "flash" in attention:
        together = logits_and_gradients(model, documents, packed=True)
        result["packed_logits"] = relative(together[0], alone[0])
        result["packed_gradients"] = relative(list(together[1].values()), [alone[1][name] for name in together[1]])
    state = model.state_dict()

    def eager(dtype: torch.dtype):
        """The same weights with eager attention."""
        with torch.device(device):
            plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="eager")
        plain.load_state_dict(state)
        return logits_and_gradients(plain, documents, packed=False)

    wanted = eager(torch.float32)
    result |= errors(alone, wanted)
    if dtype != torch.float32:
        result["eager"] = errors(eager(dtype), wanted)
    if family == "gpt-oss":
        experts = drawn(model.model.layers[0].mlp.experts)
        sizes = (sum(LENGTHS), *LENGTHS)  # the second makes torch compile for all lengths
        result["fused_experts"] = max(experts_error(experts, True, tokens) for tokens in sizes)
        if "eager" in result:
            result["eager"]["fused_experts"] = max(experts_error(experts, False, tokens) for tokens in sizes)
    return result


def drawn(experts):
    """A copy of one layer's experts whose gate clamps some of its inputs, and whose biases count."""
    experts = copy.deepcopy(experts)
    for name, parameter in experts.named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if name.endswith("bias") else 4 * parameter.shape[1] ** -0.5)
    return experts


def experts_error(experts, fused: bool, tokens: int) -> float:
    """Error of one layer's experts against transformers' own in fp32: outputs, and all gradients, of random tokens."""
    draw, device = torch.Generator().manual_seed(0), experts.gate_up_proj.device
    hidden = torch.randn(tokens, experts.hidden_size, generator=draw)
    chosen = torch.randn(len(hidden), experts.num_experts, generator=draw).topk(4)
    weight, change = chosen.values.softmax(1), torch.randn(hidden.shape, generator=draw)

    def outputs(module, forward):
        dtype = module.gate_up_proj.dtype
        given = [tensor.to(device, dtype).detach().clone().requires_grad_() for tensor in (hidden, weight)]
        module.zero_grad(set_to_none=True)
        output = forward(module, given[0], chosen.indices.to(device), given[1])
        output.backward(change.to(device, dtype))
        return [output.detach(), *(tensor.grad for tensor in (*given, *module.parameters()))]

    forward = fused_experts.experts_forward if fused else grouped_mm_experts_forward
    exact = outputs(copy.deepcopy(experts).float(), grouped_mm_experts_forward)
    return max(relative([a], [b]) for a, b in zip(outputs(experts, forward), exact, strict=True))


def errors(found: tuple, wanted: tuple) -> dict[str, float]:
    """What `logits_and_gradients` gave against what it should have given."""
    names = list(found[1])
    made = {
        "logits": relative(found[0], wanted[0]),
        "gradients": relative(list(found[1].values()), [wanted[1][name] for name in names]),
    }
    sinks = [name for name in names if "sinks" in name]
    if sinks:  # small beside the others: a kernel that forgets them would not show in the sum
        made["sink_gradients"] = relative([found[1][n] for n in sinks], [wanted[1][n] for n in sinks])
    return made


def passes(result: dict) -> bool:
    """Whether every error of `check` keeps its limit."""
    beside = result.get("eager", {})
    found = {key: value for key, value in result.items() if isinstance(value, float) and key != "limit"}
    return all(value <= max(result["limit"], BESIDE_EAGER * beside.get(key, 0)) for key, value in found.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="FAMILY:SIZE of tiny_model.py; the size may be `tiny`")
    parser.add_argument("--attention", help="default: FlashAttention 4 where it is installed, else sdpa or eager")
    parser.add_argument("--bf16", action="store_true", help="bf16 weights on a CPU, too")
    parser.add_argument("--out", type=Path, help="file for the results, as lines of JSON")
    options = parser.parse_args()
    failed = 0
    for name in options.models:
        family, _, size = name.partition(":")
        begin = time.monotonic()
        result = check(family, size, options.attention, options.bf16)
        result["passed"] = passes(result)
        result["seconds"] = round(time.monotonic() - begin, 1)
        failed += not result["passed"]
        print("gate:", json.dumps(result), flush=True)
        if options.out:
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
