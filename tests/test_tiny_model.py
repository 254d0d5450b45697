"""A tiny model behaves like the published one where a recipe can tell: tokens, template, stop ids, layout, loading."""

import sys
import unicodedata
from pathlib import Path

import pytest
import torch
import trl
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Mxfp4Config
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import tiny_model

PUBLISHED = {
    "llama": {
        "template": "llama3_2.jinja",
        "eos": "<|eot_id|>",
        "pad": None,
        "stop": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        "singles": "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> "
        "<|python_tag|> <|finetune_right_pad_id|>",
    },
    "qwen3": {
        "template": "qwen3.jinja",
        "eos": "<|im_end|>",
        "pad": "<|endoftext|>",
        "stop": ["<|im_end|>", "<|endoftext|>"],
        "singles": "<|im_start|> <|im_end|> <|endoftext|> <think> </think> <tool_call> </tool_call> <tool_response> "
        "</tool_response> <|vision_start|> <|image_pad|> <|fim_prefix|>",
    },
    "qwen3_5": {
        "template": "qwen3_8.jinja",
        "eos": "<|im_end|>",
        "pad": "<|endoftext|>",
        "stop": ["<|im_end|>", "<|endoftext|>"],
        "singles": "<|im_start|> <|im_end|> <|endoftext|> <think> </think> <tool_call> <tool_response> <|vision_start|> "
        "<|image_pad|> <|fim_prefix|> <|audio_start|> <tts_pad>",
    },
    "gpt-oss": {
        "template": "gptoss.jinja",
        "eos": "<|return|>",
        "pad": "<|endoftext|>",
        "stop": ["<|return|>", "<|endoftext|>", "<|call|>"],
        "singles": "<|start|> <|end|> <|message|> <|channel|> <|return|> <|call|> <|constrain|> <|startoftext|> "
        "<|endoftext|> <|endofprompt|>",
    },
}
FAMILIES = list(PUBLISHED)
MESSAGES = [{"role": "user", "content": "Grüße, 你好 🙂"}, {"role": "assistant", "content": '{"total": "10.50"}'}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder a family, and gpt-oss once more in the MXFP4 layout."""
    root = tmp_path_factory.mktemp("tiny")
    made = {family: tiny_model.write_tiny_model(family, root / family) for family in FAMILIES}
    made["mxfp4"] = tiny_model.write_tiny_model("gpt-oss", root / "mxfp4", mxfp4=True)
    return made


@pytest.fixture(scope="module")
def tokenizers(folders):
    return {family: AutoTokenizer.from_pretrained(folders[family]) for family in FAMILIES}


def stored_names(folder):
    names = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            names += list(handle.keys())
    return names


def logits(model):
    ids = torch.arange(40).unsqueeze(0) + 60
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_special_strings_are_single_ids(tokenizers, family):
    tokenizer = tokenizers[family]
    for token in PUBLISHED[family]["singles"].split():
        ids = tokenizer(f"a{token}b", add_special_tokens=False).input_ids
        assert len(ids) == 3 and tokenizer.convert_ids_to_tokens(ids[1]) == token


@pytest.mark.parametrize("family", FAMILIES)
def test_chat_template_is_trls_to_the_byte(folders, tokenizers, family):
    stock = Path(trl.__file__).parent / "chat_templates" / PUBLISHED[family]["template"]
    assert (folders[family] / "chat_template.jinja").read_bytes() == stock.read_bytes()
    assert tokenizers[family].chat_template == stock.read_text(encoding="utf-8")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt-oss"])
def test_trl_finds_its_training_template(tokenizers, family):
    assert has_generation_markers(get_training_chat_template(tokenizers[family]))


@pytest.mark.parametrize("family", FAMILIES)
def test_stop_and_pad_ids_are_the_published_ones(folders, tokenizers, family):
    tokenizer, facts = tokenizers[family], PUBLISHED[family]
    generation = GenerationConfig.from_pretrained(folders[family])
    assert tokenizer.eos_token == facts["eos"] and tokenizer.pad_token == facts["pad"]
    assert tokenizer.convert_ids_to_tokens(generation.eos_token_id) == facts["stop"]
    assert generation.pad_token_id == tokenizer.pad_token_id
    config = AutoModelForCausalLM.from_pretrained(folders[family]).config
    published = {"llama": generation.eos_token_id, "qwen3_5": tokenizer.pad_token_id}
    assert config.eos_token_id == published.get(family, tokenizer.eos_token_id)
    assert config.vocab_size >= len(tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_text_comes_back_unchanged(tokenizers, family):
    every_plane = "".join(chr(point) for point in range(0, 0x110000, 97) if not 0xD800 <= point <= 0xDFFF)
    for text in (
        "  two  spaces , \t tabs\r\n\n",
        "e\u0301 is not \u00e9",
        "🙂👩‍👩‍👧 हिन्दी עברית",
        "it 's , n't .",
        "\0\x7f",
        every_plane,
    ):
        ids = tokenizers[family](text, add_special_tokens=False).input_ids
        if family == "qwen3_5":  # transformers builds this tokenizer anew, and as published it puts text into NFC
            text = unicodedata.normalize("NFC", text)
        assert tokenizers[family].decode(ids) == text


def test_only_llama_prepends_bos_and_only_once(tokenizers):
    bos = tokenizers["llama"].bos_token_id
    assert tokenizers["llama"]("a").input_ids.count(bos) == 1
    assert tokenizers["llama"]("a").input_ids[0] == bos
    assert bos not in tokenizers["llama"]("a", add_special_tokens=False).input_ids
    chat = tokenizers["llama"].apply_chat_template(MESSAGES, tokenize=True, return_dict=True)["input_ids"]
    assert chat.count(bos) == 1 and chat[0] == bos
    for family in ("qwen3", "gpt-oss"):
        with_special = tokenizers[family]("a").input_ids
        assert with_special == tokenizers[family]("a", add_special_tokens=False).input_ids


def test_qwen3_thinking_marks_are_kept_when_special_tokens_are_skipped(tokenizers):
    ids = tokenizers["qwen3"]("<think>x</think>y<|im_end|>").input_ids
    assert tokenizers["qwen3"].decode(ids, skip_special_tokens=True) == "<think>x</think>y"


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_again_gives_the_same_logits(folders, family, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders[family])
    assert model.dtype == torch.float32
    before = logits(model)
    assert torch.isfinite(before).all() and before.std() > 0
    model.save_pretrained(tmp_path)
    assert torch.equal(before, logits(AutoModelForCausalLM.from_pretrained(tmp_path)))


def test_llama_has_one_head_tensor_and_qwen3_two(folders):
    assert "lm_head.weight" not in stored_names(folders["llama"])
    assert "lm_head.weight" in stored_names(folders["qwen3"])
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_attention_is_laid_out_as_published(folders):
    gpt_oss = AutoModelForCausalLM.from_pretrained(folders["gpt-oss"]).config
    assert gpt_oss.layer_types == ["sliding_attention", "full_attention"] and gpt_oss.sliding_window == 8
    assert gpt_oss.router_aux_loss_coef == 0.9 and gpt_oss.num_experts_per_tok < gpt_oss.num_local_experts
    assert any(name.endswith("self_attn.sinks") for name in stored_names(folders["gpt-oss"]))
    llama = AutoModelForCausalLM.from_pretrained(folders["llama"]).config
    assert llama.rope_parameters["rope_type"] == "llama3" and llama.num_key_value_heads < llama.num_attention_heads
    assert any(name.endswith("q_norm.weight") for name in stored_names(folders["qwen3"]))
    hybrid = AutoModelForCausalLM.from_pretrained(folders["qwen3_5"]).config
    assert hybrid.layer_types == ["linear_attention", "full_attention"]
    assert any(".visual." in name for name in stored_names(folders["qwen3_5"]))


def test_mxfp4_layout_loads_dequantized(folders):
    names = stored_names(folders["mxfp4"])
    for part in ("gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias", "down_proj_blocks"):
        assert f"model.layers.1.mlp.experts.{part}" in names
    model = AutoModelForCausalLM.from_pretrained(
        folders["mxfp4"], quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    out = logits(model)
    assert torch.isfinite(out).all() and out.std() > 0
    assert 0.01 < model.model.layers[0].mlp.experts.gate_up_proj.float().std() < 0.03


def test_real_size_has_the_published_number_of_bytes(folders, tokenizers, monkeypatch, tmp_path):
    planned = {}
    monkeypatch.setattr(tiny_model, "write_shards", lambda folder, sizes, make: planned.update(sizes))
    tiny_model.random_mxfp4_weights(tmp_path, tiny_model.build_real_config("gpt-oss", "20b", tokenizers["gpt-oss"]))
    # metadata.total_size in model.safetensors.index.json of openai/gpt-oss-20b
    assert sum(planned.values()) == 13_761_264_768
    tiny = {name.replace(".1.", ".23.") for name in stored_names(folders["mxfp4"])}
    assert tiny <= set(planned)


@pytest.mark.parametrize(
    ("family", "size", "parameters"),  # as published on the model cards' safetensors line
    [
        ("llama", "1b", 1_235_814_400),
        ("qwen3", "8b", 8_190_735_360),
        # The language model: of 27.78 billion published, 0.46 are the vision tower and 0.42 the layer for drafting.
        ("qwen3_5", "27b", 26_895_998_464),
    ],
)
def test_real_size_has_the_published_number_of_parameters(family, size, parameters, tokenizers):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_model.build_real_config(family, size, tokenizers[family]))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_same_arguments_same_bytes(folders, tmp_path):
    for name, kind in (("qwen3", {}), ("mxfp4", {"mxfp4": True})):
        family = "gpt-oss" if name == "mxfp4" else name
        again = tiny_model.write_tiny_model(family, tmp_path / name, **kind)
        for file in folders[name].iterdir():
            assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    other = tiny_model.write_tiny_model("qwen3", tmp_path / "other", seed=1, dtype="bfloat16", layers=1, hidden=32)
    model = AutoModelForCausalLM.from_pretrained(other)
    assert (model.dtype, model.config.num_hidden_layers, model.config.hidden_size) == (torch.bfloat16, 1, 32)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["llama", "DEST", "--mxfp4"], "--mxfp4"),
        (["gpt-oss", "DEST", "--size", "20b"], "--size 20b"),
        (["llama", "DEST", "--size", "8b"], "--size 8b"),
        (["gpt-oss", "DEST", "--mxfp4", "--dtype", "float32"], "--dtype"),
        (["gpt-oss", "DEST", "--hidden", "40"], "--hidden 40"),
        (["gpt-oss", "DEST", "--mxfp4", "--size", "20b", "--layers", "0"], "--layers 0"),
        (["llama", "FULL"], "not empty"),
    ],
)
def test_refusals_name_the_argument_and_write_nothing(arguments, named, tmp_path):
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "mine.txt").write_text("keep")
    arguments = [str(tmp_path / word) if word.isupper() else word for word in arguments]
    with pytest.raises(SystemExit) as stopped:
        tiny_model.main(arguments)
    assert named in stopped.value.code and "\n" not in stopped.value.code
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["FULL", "mine.txt"]
