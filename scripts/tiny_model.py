"""Write a tiny random model with the manners of a published one, without a hub, in seconds.

    python scripts/tiny_model.py llama models/tiny-llama
    python scripts/tiny_model.py qwen3 models/tiny-qwen3 --dtype bfloat16 --layers 4 --hidden 128
    python scripts/tiny_model.py gpt-oss models/tiny-gpt-oss
    python scripts/tiny_model.py gpt-oss models/tiny-gpt-oss-mxfp4 --mxfp4
    python scripts/tiny_model.py gpt-oss models/random-gpt-oss-20b --mxfp4 --size 20b
    python scripts/tiny_model.py qwen3 models/random-qwen3-8b --size 8b --dtype bfloat16

The folder loads with `AutoModelForCausalLM` and `AutoTokenizer`. What a recipe or a test can stumble over is as
published by the models in PUBLISHED: special tokens, stop and pad tokens, chat template, bos, tied or untied head,
attention layout, router loss weight, MXFP4 layout. Ids, sizes and weights are not: the weights are
random, and the vocabulary is 256 bytes, some 150 merges and the special tokens. All but qwen3_5, which puts text into NFC
as published, give back any text unchanged; so does qwen3, unlike Qwen3's own tokenizer.

`--size` writes random weights in the real dimensions, to measure loading, exporting and training without a download:
gpt-oss 20b and 120b as MXFP4, shard by shard (14 and 65 GB), the others whole, and gpt-oss, too, with `--dtype bfloat16`.
Their text is still read by the tiny tokenizer.
"""

import argparse
import copy
import importlib.util
import math
import re
import sys
from pathlib import Path

import torch
from export import ExportError, write_shards
from published_models import PUBLISHED  # noqa: F401 (read by others)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

MERGES_TEXT = """A tiny model learns from a tiny text. The answer is a short sentence, and the question is shorter.
{"company": "The Paper House", "date": "2018-03-30", "address": "12 Long Road", "total": "10.50"}
You are a helpful assistant. Read the receipt, then answer in JSON with the company, the date and the total.
The user asks; the assistant answers; the system says how. What was trained is saved, and what was saved is loaded.
"""
LLAMA_SPECIAL = "<|begin_of_text|> <|end_of_text|> <|finetune_right_pad_id|> <|start_header_id|> <|end_header_id|> "
LLAMA_SPECIAL += "<|eom_id|> <|eot_id|> <|python_tag|>"
QWEN_VISION = ("object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end", "vision_start")
QWEN_VISION += ("vision_end", "vision_pad", "image_pad", "video_pad")
QWEN_CODE = ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")
QWEN_SPECIAL = "<|endoftext|> <|im_start|> <|im_end|> " + " ".join(f"<|{name}|>" for name in QWEN_VISION)
QWEN_PLAIN = "<tool_call> </tool_call> " + " ".join(f"<|{name}|>" for name in QWEN_CODE)
QWEN_PLAIN += " <tool_response> </tool_response> <think> </think>"
QWEN_STOP = {"bos": "<|endoftext|>", "eos": ["<|im_end|>", "<|endoftext|>"], "pad": "<|endoftext|>"}

# What a family publishes, by token strings. `special` are skipped when decoding, `plain` are single ids that stay.
FAMILIES = {
    "llama": {
        "template": "llama3_2.jinja",
        "special": LLAMA_SPECIAL,
        "plain": "",
        "tokenizer": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "model_max_length": 131072},
        "config": {"bos": "<|begin_of_text|>", "eos": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]},
        "generation": {"bos": "<|begin_of_text|>", "eos": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]},
        "sampling": {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    },
    "llama-base": {  # Llama 3.1: as above, but with no chat template, and it stops at the end of text alone
        "model_type": "llama",
        "template": None,
        "special": LLAMA_SPECIAL,
        "plain": "",
        "tokenizer": {
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|end_of_text|>",
            "model_max_length": 131072,
        },
        "config": {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"},
        "generation": {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"},
        "sampling": {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    },
    "qwen2": {  # Qwen2.5, the base models
        "template": "qwen2_5.jinja",
        "special": QWEN_SPECIAL,
        "plain": "<tool_call> </tool_call> " + " ".join(f"<|{name}|>" for name in QWEN_CODE),
        "tokenizer": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "model_max_length": 131072},
        "config": {"bos": "<|endoftext|>", "eos": "<|endoftext|>"},
        "generation": {"bos": "<|endoftext|>", "eos": "<|endoftext|>"},
        "sampling": {"do_sample": False},
    },
    "olmo3": {
        "template": "olmo3.jinja",
        "special": "<|endoftext|> <|pad|>",
        "plain": "<|im_start|> <|im_end|> <functions> </functions> <function_calls> </function_calls>",
        "tokenizer": {
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|pad|>",
            "model_max_length": 65536,
        },
        "config": {"eos": "<|endoftext|>", "pad": "<|pad|>"},
        "generation": {"eos": ["<|im_end|>", "<|endoftext|>"], "pad": "<|pad|>"},
        "sampling": {"do_sample": True, "temperature": 0.6, "top_p": 0.95},
    },
    "qwen3": {
        "template": "qwen3.jinja",
        "special": QWEN_SPECIAL,
        "plain": QWEN_PLAIN,
        "tokenizer": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": 131072},
        "config": {"bos": "<|endoftext|>", "eos": "<|im_end|>"},
        "generation": QWEN_STOP,
        "sampling": {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
    },
    "qwen3_5": {  # the architecture of Qwen3.5, 3.6 and 3.8; the facts are those of Qwen3.8-27B
        "template": "qwen3_8.jinja",
        "special": f"{QWEN_SPECIAL} <|audio_start|> <|audio_end|> <|audio_pad|>",
        "plain": f"{QWEN_PLAIN} <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single>",
        "tokenizer": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": 262144},
        "config": {"bos": "<|endoftext|>", "eos": "<|endoftext|>"},
        "generation": QWEN_STOP,
        "sampling": {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20},
    },
    "gpt-oss": {
        "template": "gptoss.jinja",
        "special": "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> "
        "<|call|> <|endofprompt|>",
        "plain": "",
        "tokenizer": {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        "config": {"eos": "<|return|>", "pad": "<|endoftext|>"},
        "generation": {
            "bos": "<|startoftext|>",
            "eos": ["<|return|>", "<|endoftext|>", "<|call|>"],
            "pad": "<|endoftext|>",
        },
        "sampling": {"do_sample": True},
    },
}
MXFP4_SECTION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
# Published dimensions, by family and size. Sources: config.json of the models named in `build_real_config`.
LLAMA_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
LLAMA_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA31_ROPE = LLAMA_ROPE | {"factor": 8.0}
OLMO3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
QWEN3_5_ROPE = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
QWEN3_5_ROPE |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
_GPT_OSS = {
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "router_aux_loss_coef": 0.9,
}
REAL = {
    ("gpt-oss", "20b"): {"num_hidden_layers": 24, "num_local_experts": 32, **_GPT_OSS},
    ("gpt-oss", "120b"): {"num_hidden_layers": 36, "num_local_experts": 128, **_GPT_OSS},
    ("llama", "1b"): {
        "num_hidden_layers": 16,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA_ROPE,
    },
    ("llama", "3b"): {
        "num_hidden_layers": 28,
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA_ROPE,
    },
    ("llama-base", "8b"): {
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA31_ROPE,
    },
    ("qwen2", "3b"): {
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "rope_parameters": QWEN_ROPE,
    },
    ("olmo3", "7b"): {
        "num_hidden_layers": 32,  # three with a sliding window, then one without
        "vocab_size": 100278,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "rope_parameters": OLMO3_ROPE,
    },
    ("qwen3", "8b"): {
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
        "rope_parameters": QWEN_ROPE,
    },
    ("qwen3_5", "27b"): {
        "text_config": {
            "num_hidden_layers": 64,  # three of linear attention, then one of full attention
            "vocab_size": 248320,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "tie_word_embeddings": False,
            "max_position_embeddings": 262144,
            "rope_parameters": QWEN3_5_ROPE,
            "dtype": "bfloat16",
        },
        "vision_config": {"out_hidden_size": 5120},
    },
}


def model_type(family: str) -> str:
    """The `model_type` of the family's config."""
    return FAMILIES[family].get("model_type", family.replace("-", "_"))


def stock_chat_template(family: str) -> str | None:
    """Return the family's published chat template, as the installed TRL ships it; None for a base model without one.

    TRL exchanges a template for its training variant only when the text is the same to the last byte. It has none of
    Olmo 3: there it is the recipe's own without its tags. Raises ExportError when TRL is not installed. Source:
    trl/chat_templates/.
    """
    name = FAMILIES[family]["template"]
    if name is None:
        return None
    if family == "olmo3":
        own = Path(__file__).resolve().parent.parent / "recipes" / "olmo-3-7b" / name
        text = re.sub(r"\{#.*?#\}", "", own.read_text(encoding="utf-8"), flags=re.DOTALL)
        return re.sub(r"\{%- (end)?generation %\}", "{#- #}", text)  # an empty comment trims as the tag does
    spec = importlib.util.find_spec("trl")  # finds the folder without the seconds that importing TRL takes
    if spec is None:
        raise ExportError("The chat templates come from TRL, which is not installed: pip install -r requirements.txt")
    text = Path(spec.submodule_search_locations[0], "chat_templates", name).read_text(encoding="utf-8")
    # Of Qwen2.5 TRL ships the Instruct models'; the base models' has a shorter system message.
    return text.replace("You are Qwen, created by Alibaba Cloud. ", "") if family == "qwen2" else text


def build_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Build the family's tokenizer: byte-level BPE (256 bytes, some 150 merges), real special tokens and template.

    Every call gives the same tokenizer. Llama's puts <|begin_of_text|> in front when `add_special_tokens` is true and
    has no pad token, as published.
    """
    facts = FAMILIES[family]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=456, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([MERGES_TEXT], trainer)
    special, plain = facts["special"].split(), facts["plain"].split()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    post = [processors.ByteLevel(trim_offsets=False)]
    if model_type(family) == "llama":
        bos = facts["tokenizer"]["bos_token"]
        post.append(
            processors.TemplateProcessing(
                single=f"{bos}:0 $A:0",
                pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
                special_tokens=[(bos, backend.token_to_id(bos))],
            )
        )
    backend.post_processor = processors.Sequence(post)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=stock_chat_template(family),
        **facts["tokenizer"],
    )


def token_ids(tokenizer: PreTrainedTokenizerFast, names: dict) -> dict:
    """Turn {"eos": ["<|a|>", ...], "pad": "<|b|>"} into {"eos_token_id": [1, ...], "pad_token_id": 2}."""
    return {f"{role}_token_id": tokenizer.convert_tokens_to_ids(tokens) for role, tokens in names.items()}


def build_config(family: str, tokenizer: PreTrainedTokenizerFast, layers: int = 2, hidden: int = 64):
    """Return the family's config, tiny: `layers` decoder layers, width `hidden` (a multiple of 32, for MXFP4 blocks).

    The embedding is rounded up to a multiple of 64 rows, so, as with the published models, it is larger than the
    tokenizer. Raises ExportError for a `hidden` that is not a positive multiple of 32.
    """
    if hidden <= 0 or hidden % 32:
        raise ExportError(f"--hidden {hidden} is not a positive multiple of 32 (an MXFP4 block is 32 values). Give 64.")
    common = {
        "vocab_size": math.ceil(len(tokenizer) / 64) * 64,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **token_ids(tokenizer, FAMILIES[family]["config"]),
    }
    if family == "llama":
        specific = {"intermediate_size": 2 * hidden, "tie_word_embeddings": True, "max_position_embeddings": 131072}
        specific |= {"rms_norm_eps": 1e-5, "head_dim": hidden // 4, "rope_parameters": LLAMA_ROPE}
    elif family == "llama-base":
        specific = {"intermediate_size": 2 * hidden, "tie_word_embeddings": False, "max_position_embeddings": 131072}
        specific |= {"rms_norm_eps": 1e-5, "head_dim": hidden // 4, "rope_parameters": LLAMA31_ROPE}
    elif family == "qwen2":
        specific = {"intermediate_size": 2 * hidden, "tie_word_embeddings": True, "max_position_embeddings": 32768}
        specific |= {"rope_parameters": QWEN_ROPE}
    elif family == "olmo3":
        specific = {"intermediate_size": 2 * hidden, "tie_word_embeddings": False, "max_position_embeddings": 65536}
        specific |= {"rms_norm_eps": 1e-6, "sliding_window": 8, "rope_parameters": copy.deepcopy(OLMO3_ROPE)}
        # Published are three layers with a sliding window, then one without: both kinds within two layers here.
        specific["layer_types"] = (["sliding_attention", "full_attention"] * layers)[:layers]
    elif family == "qwen3":
        specific = {"intermediate_size": 2 * hidden, "tie_word_embeddings": False, "max_position_embeddings": 40960}
        specific |= {"head_dim": 16, "rope_parameters": QWEN_ROPE}
    elif family == "qwen3_5":
        specific = {"intermediate_size": 2 * hidden, "tie_word_embeddings": False, "max_position_embeddings": 262144}
        specific |= {"head_dim": 16, "rope_parameters": QWEN3_5_ROPE | {"mrope_section": [1, 1, 0]}}
        specific |= {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
        specific |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
        # Published are three layers of linear attention, then one of full attention: both kinds within two layers here.
        specific["layer_types"] = (["linear_attention", "full_attention"] * layers)[:layers]
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": hidden}
        vision["num_position_embeddings"] = 16
        return AutoConfig.for_model(family, text_config=common | specific, vision_config=vision)
    else:
        specific = {"intermediate_size": hidden, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
        specific |= {"sliding_window": 8, "router_aux_loss_coef": 0.9}
    return AutoConfig.for_model(model_type(family), **common, **specific)


def build_real_config(family: str, size: str, tokenizer: PreTrainedTokenizerFast, layers: int | None = None):
    """Return the config of a published model in its real dimensions, with `layers` layers if given.

    Source: config.json of the models in PUBLISHED; what is not named here is the family's default. Token ids are those of
    the tiny tokenizer.
    """
    dimensions = copy.deepcopy(REAL[family, size])
    text = dimensions.get("text_config", dimensions)  # nested where the model reads images, too
    text |= token_ids(tokenizer, FAMILIES[family]["config"])
    if layers:
        text["num_hidden_layers"] = layers
    return AutoConfig.for_model(model_type(family), **dimensions)


def random_mxfp4_weights(folder: Path, config, seed: int = 0, **options) -> int:
    """Write random gpt-oss weights of `config` into `folder` in the published MXFP4 layout; returns the shard count.

    An expert weight that the module holds as (experts, in, out) becomes `..._blocks` uint8 (experts, out, in / 32, 16)
    and `..._scales` uint8 (experts, out, in / 32); everything else is bf16. Expert weights have a standard deviation
    of 0.018. One shard is in memory at a time (`options` go to export.write_shards), and each tensor depends on `seed`
    and its place alone.
    """
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    layout = {}
    for name, shape in shapes.items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            experts, inner, outer = shape
            layout[name + "_blocks"] = (experts, outer, inner // 32, 16)
            layout[name + "_scales"] = (experts, outer, inner // 32)
        else:
            layout[name] = tuple(shape)
    places = {name: place for place, name in enumerate(layout)}

    def make(name: str) -> torch.Tensor:
        shape, generator = layout[name], torch.Generator().manual_seed(seed * 100_003 + places[name])
        if name.endswith("_blocks"):
            draw = torch.empty(math.prod(shape) // 8, dtype=torch.int64)  # eight bytes a draw
            return draw.random_(-(2**63), 2**63 - 1, generator=generator).view(torch.uint8).view(shape)
        if name.endswith("_scales"):  # FP4 codes have a root mean square of 2.9: times 2**-8 or 2**-7
            return torch.randint(119, 121, shape, dtype=torch.uint8, generator=generator)
        tensor = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        return tensor.add_(1) if name.endswith("norm.weight") else tensor

    sizes = {
        name: math.prod(shape) * (1 if name.endswith(("_blocks", "_scales")) else 2) for name, shape in layout.items()
    }
    return write_shards(folder, sizes, make, **options)


def write_tiny_model(
    family: str,
    dest: str | Path,
    mxfp4: bool = False,
    dtype: str | None = None,
    layers: int | None = None,
    seed: int = 0,
    hidden: int | None = None,
    size: str = "tiny",
    **options,
) -> Path:
    """Write the folder described at the top of this file and return its path. Same arguments, same bytes.

    family: a key of FAMILIES. dtype: "float32" (default) or "bfloat16" (always with mxfp4). layers:
    default 2, or the published number with `size`. hidden: default 64. `options` go to export.write_shards. Raises
    ExportError for arguments that do not go together and for a DEST that is not empty.
    """
    dest = Path(dest).expanduser()
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ExportError(f"{dest} already exists and is not empty. Choose another DEST, or delete it first.")
    if mxfp4 and family != "gpt-oss":
        raise ExportError(f"--mxfp4 was given for {family}, but only gpt-oss is published in MXFP4. Leave it out.")
    if size != "tiny" and (family, size) not in REAL:
        sizes = ", ".join(known for name, known in REAL if name == family)
        raise ExportError(f"--size {size} is no published size of {family}. There is: {sizes}.")
    if size != "tiny" and family == "gpt-oss" and not mxfp4 and dtype != "bfloat16":
        raise ExportError(
            f"--size {size} of gpt-oss needs --mxfp4, for the published layout, or --dtype bfloat16, which makes the "
            f"whole model at once."
        )
    if mxfp4 and dtype == "float32":
        raise ExportError(
            "--dtype float32 was given with --mxfp4, whose other weights are bfloat16. Leave --dtype out."
        )
    if layers is not None and layers < 1:
        raise ExportError(f"--layers {layers} leaves no layer. Give 1 or more.")
    if size != "tiny" and hidden is not None:
        raise ExportError(f"--hidden {hidden} was given with --size {size}, which has its own. Leave one of them out.")
    tokenizer = build_tokenizer(family)
    if size == "tiny":
        config = build_config(family, tokenizer, 2 if layers is None else layers, 64 if hidden is None else hidden)
    else:
        config = build_real_config(family, size, tokenizer, layers)
    generation = GenerationConfig(
        **token_ids(tokenizer, FAMILIES[family]["generation"]), **FAMILIES[family]["sampling"]
    )
    dest.mkdir(parents=True, exist_ok=True)
    if mxfp4:
        random_mxfp4_weights(dest, config, seed, **options)
        config.architectures, config.dtype = ["GptOssForCausalLM"], "bfloat16"
        config.quantization_config = MXFP4_SECTION
        config.save_pretrained(dest)
    else:
        torch.manual_seed(seed)
        with torch.device("cuda" if size != "tiny" and torch.cuda.is_available() else "cpu"):
            # What reads images, too, is written whole: its text alone is for the recipe to load.
            kind = AutoModelForCausalLM if config is config.get_text_config() else AutoModelForImageTextToText
            model = kind.from_config(config, dtype=getattr(torch, dtype or "float32"))
        model.config.get_text_config().dtype = model.dtype
        model.generation_config = generation
        model.save_pretrained(dest)
    generation.save_pretrained(dest)
    tokenizer.save_pretrained(dest)
    return dest


def main(argv: list[str] | None = None) -> None:
    """Read the command line and write the folder; ends with one paragraph and exit code 1 when it cannot be done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("dest", metavar="DEST", help="the folder to write; must not exist or be empty")
    parser.add_argument("--mxfp4", action="store_true", help="gpt-oss: expert weights in the published MXFP4 layout")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default float32")
    parser.add_argument("--layers", type=int, help="default 2, or the published number with --size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, help="hidden size, a multiple of 32; default 64")
    parser.add_argument(
        "--size", choices=["tiny", *dict.fromkeys(size for _, size in REAL)], default="tiny", help="real dimensions"
    )
    args = parser.parse_args(argv)
    try:
        print(write_tiny_model(**vars(args)))
    except (ExportError, OSError) as error:
        sys.exit(f"tiny_model.py: {error}")


if __name__ == "__main__":
    main()
