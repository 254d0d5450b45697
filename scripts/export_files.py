"""What every export shares: safetensors folders read by their headers and written shard by shard, DEST, the base model."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from bars import track
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
BASE_RECORD = "cookbook.json"
IN_PROGRESS = "EXPORT_IN_PROGRESS"  # stands in DEST.partial only, so that no folder of somebody else is ever deleted
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "LICEN[CS]E*",
    "*POLICY*",  # gpt-oss: USAGE_POLICY, Llama: USE_POLICY.md
    "NOTICE*",
)
DOWNLOAD = ("config.json", "model*.safetensors", INDEX, *COMPANIONS)
# `model*` and `tokenizer*` also match in sub-folders; gpt-oss keeps two more copies of its weights there.
DO_NOT_DOWNLOAD = ("original/*", "metal/*")


class ExportError(ValueError):
    """Something the user has to change; the message says what was found, what was expected and what to do."""


class Stored(NamedTuple):
    """Where one tensor of a checkpoint lies: its safetensors file, shape, and dtype as safetensors spells it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


# ---------------------------------------------------------------- safetensors folders


def read_headers(folder: Path) -> dict[str, Stored]:
    """List the tensors of a safetensors checkpoint from its headers alone; no weight is read.

    Raises ExportError when a shard named by the index is missing, a file cannot be read, the index and the files
    disagree, or a tensor has no elements (which is what a sharded run leaves when a save was not gathered).
    """
    index = folder / INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        weight_map, files = None, sorted(folder.glob("*.safetensors"))
    if not files:
        raise ExportError(
            f"{folder} holds no weights: neither {INDEX} nor a .safetensors file was found there. "
            "Give the folder of a downloaded or saved model, or a Hub id such as openai/gpt-oss-20b."
        )
    tensors = {}
    for file in files:
        if not file.is_file():
            raise ExportError(
                f"{file} is missing, but {index} names it. The folder is incomplete: download or save the model again."
            )
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (safe_open is no mapping)
                    entry = handle.get_slice(name)
                    tensors[name] = Stored(file, tuple(entry.get_shape()), entry.get_dtype())
        except SafetensorError as error:
            raise ExportError(
                f"{file} cannot be read as safetensors ({error}). "
                "It is probably cut short: download or save the model again."
            ) from error
    if weight_map is not None and set(weight_map) != set(tensors):
        differing = sorted(set(weight_map) ^ set(tensors))
        raise ExportError(
            f"{index} and the shards beside it name different tensors ({len(differing)} differ, the first is "
            f"{differing[0]}). Files of two saves are mixed in the folder: download or save the model again."
        )
    for name, stored in tensors.items():
        if 0 in stored.shape:
            raise ExportError(
                f"{stored.file}: tensor {name} is empty (shape {list(stored.shape)}), so this checkpoint has lost "
                "weights. Use a checkpoint that was gathered before it was saved."
            )
    return tensors


def read_tensor(stored: Stored, name: str) -> torch.Tensor:
    """Read one tensor. The file is opened each time so that no mapping of a finished shard stays in memory."""
    with safe_open(stored.file, framework="pt") as handle:
        return handle.get_tensor(name)


def group_shards(sizes: dict[str, int], shard_bytes: int = SHARD_BYTES) -> list[list[str]]:
    """Split tensor names, in order, into shards of at most `shard_bytes`; a larger tensor gets a shard to itself.

    `sizes` maps each tensor's name to its size in bytes.
    """
    shards: list[list[str]] = []
    filled = math.inf
    for name, size in sizes.items():
        if filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_shards(
    folder: Path, sizes: dict[str, int], make: Callable[[str], torch.Tensor], shard_bytes: int = SHARD_BYTES
) -> int:
    """Write `model-0000i-of-0000n.safetensors` and their index, holding one shard in memory at a time.

    `sizes` maps each tensor's name to its size in bytes; `make(name)` returns that tensor and is called once for each
    name, in order. Returns the number of shards. Raises ExportError when the disk has too little room, before
    anything is written.
    """
    total, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if total > free:
        raise ExportError(
            f"{folder} is on a disk with {free / 1e9:.1f} GB free, but the weights take {total / 1e9:.1f} GB. "
            "Free some space or choose a DEST on another disk."
        )
    shards = group_shards(sizes, shard_bytes)
    weight_map = {}
    for number, names in enumerate(track(shards, "writing shards"), start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(folder / file, {name: sizes[name] for name in names}, make)
        weight_map.update(dict.fromkeys(names, file))
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for file in set(weight_map.values()):  # safetensors makes files that their owner alone can read
        shutil.copymode(folder / INDEX, folder / file)
    return len(shards)


def write_shard(file: Path, sizes: dict[str, int], make: Callable[[str], torch.Tensor]) -> None:
    """Make and save the tensors of one shard; they are freed on return. Raises ExportError for a size not planned."""
    tensors = {name: make(name).contiguous() for name in track(sizes, file.name)}
    for name, tensor in tensors.items():
        if tensor.nbytes != sizes[name]:
            raise ExportError(f"{file.name}: {name} has {tensor.nbytes} bytes, but {sizes[name]} were planned.")
    save_file(tensors, file, metadata={"format": "pt"})


def write_json(path: Path, content: dict) -> None:
    """Write `content` as indented JSON with a newline at the end."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_companions(source: Path, dest: Path) -> None:
    """Copy what belongs to a model besides weights and config: tokenizer, chat template, generation config, licence."""
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, dest / file.name)


# ---------------------------------------------------------------- the folder to write


def partial_folder(dest: Path) -> Path:
    """Make the empty folder `DEST.partial` that is filled and renamed at the end; an own unfinished one is replaced.

    Raises ExportError when DEST exists and is not an empty folder, or DEST.partial was not made by this script.
    """
    partial = dest.with_name(dest.name + ".partial")
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ExportError(f"{dest} already exists and is not empty. Choose another DEST, or delete it first.")
    if partial.exists():
        if not (partial / IN_PROGRESS).is_file():
            raise ExportError(
                f"{partial} exists and was not left by an unfinished export (it has no file {IN_PROGRESS}). "
                "Move it away or choose another DEST."
            )
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    (partial / IN_PROGRESS).touch()
    return partial


def finish_folder(partial: Path, dest: Path) -> None:
    """Turn the finished `DEST.partial` into DEST."""
    (partial / IN_PROGRESS).unlink()
    if dest.exists():
        dest.rmdir()
    partial.rename(dest)


# ---------------------------------------------------------------- the folder to read


def find_model(
    model: str, base: str | None = None, revision: str | None = None, download: tuple[str, ...] = DOWNLOAD
) -> tuple[Path, dict]:
    """Return the folder of MODEL, downloading it when it is a Hub id, and the record for `cookbook.json`.

    download: patterns of the files to fetch. The base name is `base`, else the Hub id (also for a folder inside the Hub
    cache), else the folder's own path. Raises ExportError when there is no such folder and no such model on the Hub.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if len(Path(model).parts) > 2 or model.startswith((".", "~", "/")):
            raise ExportError(f"{model} is no folder. Give an existing one, or a Hub id such as openai/gpt-oss-20b.")
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(
                    model, revision=revision, allow_patterns=list(download), ignore_patterns=list(DO_NOT_DOWNLOAD)
                )
            )
        except Exception as error:  # huggingface_hub, httpx and the file system each have their own errors
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ExportError(
                f"{model} is neither a folder here nor a model that could be downloaded from the Hub ({reason}). "
                "Check the name, the network, and `hf auth login` for a gated model; or give a local folder."
            ) from error
    elif revision is not None:
        raise ExportError(f"--revision {revision} was given, but {model} is a local folder. Leave --revision out.")
    folder = folder.resolve()
    cached_id, commit = hub_cache_id(folder)
    name = base or cached_id or str(folder)
    return folder, {"base_model_name_or_path": name, "base_model_revision": commit}


def hub_cache_id(folder: Path) -> tuple[str | None, str | None]:
    """Read (Hub id, commit) from a path like `.../models--org--name/snapshots/<commit>`, else (None, None)."""
    if len(folder.parts) > 3 and folder.parts[-2] == "snapshots" and folder.parts[-3].startswith("models--"):
        return folder.parts[-3].removeprefix("models--").replace("--", "/"), folder.name
    return None, None


def read_config(folder: Path) -> dict:
    """Read config.json of a model folder. Raises ExportError when there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise ExportError(f"{path} is missing: {folder} is not a model folder. Give the folder that holds config.json.")
    return json.loads(path.read_text(encoding="utf-8"))
