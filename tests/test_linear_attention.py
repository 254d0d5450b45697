"""Qwen3.8's linear attention: when rows may be packed, what of the checkpoint is loaded, what a step costs.

Its kernels (flash-linear-attention, causal-conv1d) need a GPU. Here stand-ins run each document by itself, as those do:
what is tested is that the borders reach every layer, from TRL's collator through transformers.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import export_run
import memory
import memory_trace
import pytest
import tiny_model
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes" / "llama-3.2-1b"))
import speed  # noqa: E402
import watcher  # noqa: E402

SIZE = 70  # tokens of a document: more than the 64 of a chunk


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.write_tiny_model("qwen3_5", tmp_path_factory.mktemp("models") / "tiny", layers=4)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def stored_names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as content:
        return set(content.keys())


# ------------------------------------------------------------------------------------------------------------- packing


def packed_logits(model, documents: list[torch.Tensor], *left_out: str) -> torch.Tensor:
    """Logits of the last document of a packed row, from TRL's own batch without the keys `left_out`."""
    tokens = torch.cat(documents).tolist()
    row = {"input_ids": tokens, "labels": tokens, "seq_lengths": [len(document) for document in documents]}
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([row])
    for key in ("labels", *left_out):
        batch.pop(key)
    with torch.no_grad():
        return model(**batch, use_cache=False).logits[0, -len(documents[-1]) :]


def moved(model, *left_out: str) -> float:
    """How far another first document moves the logits of the second, which is packed behind it."""
    draw = torch.Generator().manual_seed(0)
    first, other, last = (torch.randint(5, 300, (SIZE,), generator=draw) for _ in range(3))
    return float(
        (packed_logits(model, [first, last], *left_out) - packed_logits(model, [other, last], *left_out)).abs().max()
    )


def test_packed_documents_are_refused_without_the_kernels(model):
    """So a recipe that packed all the same would stop at its first step; speed.py switches packing off before."""
    with pytest.raises(ValueError, match="keep packed sequences apart"):
        moved(model)


def test_position_ids_alone_do_not_part_documents(model):
    assert moved(model, "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k") > 1e-3


def test_the_borders_reach_every_layer(model, monkeypatch):
    """With kernels that begin anew at each border a document does not know what is packed before it."""
    delta, convolution, seen = modeling.torch_chunk_gated_delta_rule, modeling.causal_conv1d_fn, []

    def delta_by_document(*tensors, g, beta, cu_seqlens, use_qk_l2norm_in_kernel, **_):
        seen.append("delta")
        outputs = []
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            part = [tensor[:, start:end] for tensor in (*tensors, g, beta)]
            options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            outputs.append(delta(*part[:3], g=part[3], beta=part[4], **options)[0])
        return torch.cat(outputs, 1), None

    def convolution_by_document(x, weight, bias=None, activation=None, *, seq_idx, **_):
        seen.append("convolution")
        parts = [x[:, :, seq_idx[0] == document] for document in seq_idx[0].unique()]
        return torch.cat([convolution(part, weight, bias, activation=activation) for part in parts], 2)

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", delta_by_document)
    monkeypatch.setattr(modeling, "causal_conv1d_fn", convolution_by_document)
    assert moved(model) <= 1e-5
    layers = model.config.layer_types.count("linear_attention")
    assert seen.count("delta") == seen.count("convolution") == 2 * layers > 0


def test_packing_is_allowed_only_where_every_layer_isolates_documents(model, monkeypatch, capsys):
    def why(config, device="cuda", attention="flash_attention_4"):
        return speed.mixing_layers(config, device, attention)

    llama, gpt_oss = (tiny_model.build_config(f, tiny_model.build_tokenizer(f)) for f in ("llama", "gpt-oss"))
    assert why(llama, "cpu", "sdpa") is None
    assert why(gpt_oss) is None and "gpt-oss" in why(gpt_oss, attention="eager")
    for name in ("fla", "causal_conv1d"):
        monkeypatch.setitem(sys.modules, name, None)  # import raises ImportError
    assert "flash-linear-attention and causal-conv1d" in why(model.config)
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    assert "causal-conv1d" in why(model.config)  # one of the two is not enough
    monkeypatch.setitem(sys.modules, "causal_conv1d", ModuleType("causal_conv1d"))
    assert why(model.config) is None and why(model.config, "cpu") is not None
    # A state or a kind of layer of which nothing is known here.
    for other in ("falcon_mamba", "jamba", "qwen3_next"):
        assert "nothing is known" in why(AutoConfig.for_model(other)), other

    arguments = SimpleNamespace(packing=True, bf16=True, fp16=False, device=torch.device("cpu"))
    speed.choose_attention(model.config, arguments)
    assert arguments.packing is False and "packing is off, because linear attention" in capsys.readouterr().out


def test_the_chunked_form_learns_what_the_recurrence_says():
    """Outputs and gradients of what runs without the kernels, against the delta rule token by token."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, SIZE, 2, 8), (1, SIZE, 2, 8), (1, SIZE, 6, 8), (1, SIZE, 6), (1, SIZE, 6)]
    q, k, v, g, beta = (torch.randn(shape, generator=draw) for shape in shapes)
    results = []
    for rule in (modeling.torch_chunk_gated_delta_rule, modeling.torch_recurrent_gated_delta_rule):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, -g.exp(), beta.sigmoid())]
        out, _ = rule(*inputs[:3], g=inputs[3], beta=inputs[4], use_qk_l2norm_in_kernel=True)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    for chunked, recurrent in zip(*results, strict=True):
        assert torch.allclose(chunked, recurrent, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------- what is loaded and saved


def test_the_language_model_alone_is_loaded_and_saved_as_itself(folder, model, tmp_path):
    """The same logits as the whole model's, no vision weights; saved as train.py saves it, it loads as what it is."""
    whole, ids = AutoModelForImageTextToText.from_pretrained(folder).eval(), torch.arange(40).unsqueeze(0) + 60

    def logits(of):
        with torch.no_grad():
            return of.eval()(input_ids=ids).logits

    assert torch.equal(logits(whole), logits(model))
    assert not any("visual" in name for name, _ in model.named_parameters())
    copy = AutoModelForCausalLM.from_pretrained(folder)
    copy._weight_conversions = []
    copy.save_pretrained(tmp_path)
    assert stored_names(tmp_path) == set(copy.state_dict())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_a_checkpoint_under_other_names_is_refused(folder, model, tmp_path):
    """Saved without that line it bears the whole model's names: Trainer finds none of its own, warns, and goes on."""
    model.save_pretrained(tmp_path)
    copy = AutoModelForCausalLM.from_pretrained(folder)
    loaded = copy.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert "would go on with untrained weights" in watcher.loaded_problem(copy, loaded)
    tied = tiny_model.build_config("llama", tiny_model.build_tokenizer("llama"))
    llama = AutoModelForCausalLM.from_config(tied)
    state = {name: tensor for name, tensor in llama.state_dict().items() if name != "lm_head.weight"}
    assert watcher.loaded_problem(llama, llama.load_state_dict(state, strict=False)) is None
    assert watcher.loaded_problem(
        llama, llama.load_state_dict({**state, "other": state["model.norm.weight"]}, strict=False)
    )


def test_an_adapter_is_merged_into_the_language_model_alone(folder, tmp_path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "adapter")
    export_run.export_run(tmp_path / "adapter", tmp_path / "merged", base=str(folder), merge=True, proof=False)
    merged, told = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(told.values()) and merged.config.model_type == "qwen3_5_text"
    assert merged.config.architectures == ["Qwen3_5ForCausalLM"]
    ids = torch.arange(40).unsqueeze(0) + 60
    with torch.no_grad():
        assert torch.allclose(merged.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits, atol=1e-5)


# ----------------------------------------------------------------------------------------------------- what a step costs


def test_the_recurrence_takes_the_operations_that_are_counted():
    """The delta rule in products of matrices gives what transformers computes, and FlopCounterMode counts its products."""
    heads, key, value, tokens = 3, 4, 5, 7
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, tokens, heads, key), (1, tokens, heads, key), (1, tokens, heads, value), (1, tokens, heads)]
    q, k, v, g = (torch.randn(shape, generator=draw) for shape in shapes)
    g, beta = -g.abs(), g.sigmoid()
    expected, _ = modeling.torch_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta)
    state, outputs = torch.zeros(heads, key, value), []
    with FlopCounterMode(display=False) as counter:
        for t in range(tokens):
            state = state * g[0, t].exp()[:, None, None]
            correction = (v[0, t] - torch.einsum("hkv,hk->hv", state, k[0, t])) * beta[0, t][:, None]
            state = state + torch.bmm(k[0, t][:, :, None], correction[:, None])
            outputs.append(torch.einsum("hkv,hk->hv", state, q[0, t] * key**-0.5))
    assert torch.allclose(torch.stack(outputs), expected[0], atol=1e-5)
    config = AutoConfig.for_model(
        "qwen3_5_text",
        num_hidden_layers=1,
        linear_num_value_heads=heads,
        linear_num_key_heads=heads,
        linear_key_head_dim=key,
        linear_value_head_dim=value,
    )
    assert config.layer_types == ["linear_attention"]
    projections = 4 * (
        config.hidden_size * (2 * heads * key + heads * (3 * value + 2))
        + 3 * config.hidden_size * config.intermediate_size
        + config.hidden_size * config.vocab_size
    )
    assert speed.flops_per_token(config, [tokens], "lora") - projections == 3 * counter.get_total_flops() / tokens


def test_memory_grows_with_each_round_of_layers():
    """Extrapolated from one and two rounds of 3 + 1 layers, to the byte what a trace of all twelve layers says."""
    config = tiny_model.build_config("qwen3_5", tiny_model.build_tokenizer("qwen3_5"), layers=12).get_text_config()
    config.layer_types = (["linear_attention"] * 3 + ["full_attention"]) * 3
    assert memory_trace.depths(config) == (4, 8)
    for changes in ({"packing": True}, {"micro_batch": 2, "padded": True, "checkpointing": True}):
        settings = memory.Settings(strategy="fsdp", length=256, dtype="bfloat16", **changes)
        whole = memory_trace.trace(config, settings, 12, "bfloat16")
        peaks = memory_trace.at_depth(config, settings, "bfloat16")
        for phase in ("forward", "head", "backward of the first layer", "end of backward"):
            assert peaks[phase]["Total"] == whole[phase]["Total"], phase
