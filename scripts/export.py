"""Turn a checkpoint into a folder that other programs load.

MXFP4 to bf16, once, before training (each rank of a launch would otherwise dequantize the whole model for itself):

    python scripts/export.py openai/gpt-oss-20b models/gpt-oss-20b-bf16 --bf16 --revision COMMIT
    python scripts/export.py path/to/gpt-oss-20b models/gpt-oss-20b-bf16 --bf16 --base openai/gpt-oss-20b

MODEL is a Hub id or a local folder. The weights are written shard by shard, so the memory needed is about one shard
(5 GB, or one tensor where that is larger), not one model; the disk space needed is 42 GB for the 20B model and 234 GB
for the 120B model. The bits are those of `from_pretrained(MODEL, dtype=torch.bfloat16,
quantization_config=Mxfp4Config(dequantize=True))`.

DEST is written as DEST.partial and renamed when it is complete. It holds a `cookbook.json`:

    {"base_model_name_or_path": "openai/gpt-oss-20b", "base_model_revision": "COMMIT" or null}

from which training takes the name of the base model, so that an adapter trained on this folder names the published
model, which everyone can download, and not a path of this machine. It stands in a file of its own because unknown
keys of config.json are copied into every model that is trained from it.
"""

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
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
    "USAGE_POLICY*",
    "NOTICE*",
)
DOWNLOAD = ("config.json", "model*.safetensors", INDEX, *COMPANIONS)
# `model*` and `tokenizer*` also match in sub-folders; gpt-oss keeps two more copies of its weights there.
DO_NOT_DOWNLOAD = ("original/*", "metal/*")
FLOAT_DTYPES = ("BF16", "F16", "F32")
# The sixteen values of FP4 (E2M1), in the order of their codes: the high bit is the sign (OCP MX v1.0, section 5.3.3).
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class ExportError(ValueError):
    """Something the user has to change; the message says what was found, what was expected and what to do."""


class Stored(NamedTuple):
    """Where one tensor of a checkpoint lies: its safetensors file, shape, and dtype as safetensors spells it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class Planned(NamedTuple):
    """One bf16 tensor to write: its shape, and the one stored name it comes from, or two (MXFP4 blocks, scales)."""

    shape: tuple[int, ...]
    sources: tuple[str, ...]


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
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(folder / file, {name: sizes[name] for name in names}, make)
        weight_map.update(dict.fromkeys(names, file))
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for file in set(weight_map.values()):  # safetensors makes files that their owner alone can read
        shutil.copymode(folder / INDEX, folder / file)
    return len(shards)


def write_shard(file: Path, sizes: dict[str, int], make: Callable[[str], torch.Tensor]) -> None:
    """Make and save the tensors of one shard; they are freed on return. Raises ExportError for a size not planned."""
    tensors = {name: make(name).contiguous() for name in sizes}
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


def find_model(model: str, base: str | None = None, revision: str | None = None) -> tuple[Path, dict]:
    """Return the folder of MODEL, downloading it when it is a Hub id, and the record for `cookbook.json`.

    The base name is `base`, else the Hub id (also for a folder inside the Hub cache), else the folder's own path.
    Raises ExportError when there is no such folder and no such model on the Hub.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if len(Path(model).parts) > 2 or model.startswith((".", "~", "/")):
            raise ExportError(f"{model} is no folder. Give an existing one, or a Hub id such as openai/gpt-oss-20b.")
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(
                    model, revision=revision, allow_patterns=list(DOWNLOAD), ignore_patterns=list(DO_NOT_DOWNLOAD)
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


# ---------------------------------------------------------------- MXFP4 to bf16


def pair_table() -> torch.Tensor:
    """Every (scale, byte) of MXFP4 as its two bf16 values, packed in one int32: shape (256 * 256,), row-major.

    It is filled by the operation that transformers' loader applies to whole tensors, so the ends of the exponent
    range come out the same, too.
    """
    exponents = torch.arange(256, dtype=torch.int32).unsqueeze(1) - 127
    values = torch.tensor(FP4_VALUES, dtype=torch.bfloat16).repeat(256, 1)
    torch.ldexp(values, exponents, out=values)
    byte = torch.arange(256)
    pairs = torch.stack([values[:, byte & 0x0F], values[:, byte >> 4]], dim=-1)  # the low half of a byte comes first
    return pairs.contiguous().view(torch.int32).flatten()


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
    """Dequantize the experts of one projection to bf16, in the layout of transformers' gpt-oss module.

    blocks: uint8 (experts, out, in / 32, 16), two FP4 values a byte. scales: uint8 (experts, out, in / 32), powers of
    two with bias 127. Returns bf16 (experts, in, out), contiguous. One expert is converted at a time, so little memory
    is needed beyond the result. Source: `convert_moe_packed_tensors` in transformers/integrations/mxfp4.py.
    """
    table = pair_table() if table is None else table
    experts, rows, groups, _ = blocks.shape
    result = torch.empty(experts, groups * 32, rows, dtype=torch.bfloat16)
    for expert in range(experts):
        codes = scales[expert].to(torch.int32).mul_(256).unsqueeze(-1) + blocks[expert]
        values = table.index_select(0, codes.flatten()).view(torch.bfloat16)
        result[expert] = values.view(rows, groups * 32).T
    return result


def plan_bf16(tensors: dict[str, Stored], folder: Path, config: dict) -> dict[str, Planned]:
    """Map every tensor of an MXFP4 checkpoint to the bf16 tensor to write, from headers alone.

    Raises ExportError when the checkpoint is not MXFP4, or is MXFP4 only in part.
    """
    method = (config.get("quantization_config") or {}).get("quant_method")
    blocks = sum(name.endswith("_blocks") for name in tensors)
    if method != "mxfp4" or not blocks:
        raise ExportError(
            f"{folder} is not an MXFP4 checkpoint: config.json has quantization_config.quant_method "
            f'{json.dumps(method)} and the weights have {blocks} tensors ending in _blocks; expected "mxfp4" and at '
            "least one, as in openai/gpt-oss-20b. A folder that is bf16 already needs no --bf16: train on it as it is "
            "(and delete quantization_config from its config.json if the section is left over from an earlier save)."
        )
    plan = {}
    for name, stored in tensors.items():
        if name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in tensors:
            continue
        if name.endswith("_blocks"):
            target = name.removesuffix("_blocks")
            scales = tensors.get(target + "_scales")
            if (
                scales is None
                or stored.dtype != "U8"
                or scales.dtype != "U8"
                or len(stored.shape) != 4
                or stored.shape[-1] != 16
                or stored.shape[:-1] != scales.shape
            ):
                found = "no scales" if scales is None else f"scales {scales.dtype} {list(scales.shape)}"
                raise ExportError(
                    f"{stored.file}: {name} is {stored.dtype} {list(stored.shape)} with {found}; expected U8 blocks "
                    "(experts, out, in / 32, 16) and U8 scales (experts, out, in / 32). Download the model again."
                )
            experts, rows, groups, _ = stored.shape
            plan[target] = Planned((experts, groups * 32, rows), (name, target + "_scales"))
        elif stored.dtype in FLOAT_DTYPES:
            plan[name] = Planned(stored.shape, (name,))
        else:
            raise ExportError(
                f"{stored.file}: {name} is {stored.dtype}; expected {', '.join(FLOAT_DTYPES)}, or U8 in a pair of "
                "_blocks and _scales. This layout is not the published MXFP4 one, and is not converted."
            )
    return plan


def export_bf16(model: str, dest: str | Path, base: str | None = None, revision: str | None = None, **options) -> dict:
    """Write the MXFP4 checkpoint MODEL as bf16 safetensors in DEST; see the top of this file.

    `options` go to `write_shards` (`shard_bytes`). Returns {"folder", "shards", "tensors", "bytes", "seconds"}.
    Raises ExportError; DEST is then not there, and an unfinished DEST.partial is replaced by the next export.
    """
    started = time.monotonic()
    dest = Path(dest).expanduser().resolve()
    folder, record = find_model(model, base, revision)
    config, tensors = read_config(folder), read_headers(folder)
    plan = plan_bf16(tensors, folder, config)
    table = pair_table()

    def make(name: str) -> torch.Tensor:
        parts = [read_tensor(tensors[source], source) for source in plan[name].sources]
        return dequantize_mxfp4(*parts, table) if len(parts) == 2 else parts[0].to(torch.bfloat16)

    partial = partial_folder(dest)
    sizes = {name: 2 * math.prod(planned.shape) for name, planned in plan.items()}
    shards = write_shards(partial, sizes, make, **options)
    copy_companions(folder, partial)
    config = {key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype")}
    write_json(partial / "config.json", config | {"dtype": "bfloat16"})
    write_json(partial / BASE_RECORD, record)
    finish_folder(partial, dest)
    return {
        "folder": dest,
        "shards": shards,
        "tensors": len(plan),
        "bytes": sum(sizes.values()),
        "seconds": time.monotonic() - started,
    }


def main(argv: list[str] | None = None) -> None:
    """Read the command line and run the export; ends with one paragraph and exit code 1 when it cannot be done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL", help="a Hub id or a local folder")
    parser.add_argument("dest", metavar="DEST", help="the folder to write; must not exist or be empty")
    parser.add_argument("--bf16", action="store_true", required=True, help="from MXFP4 to bf16")
    parser.add_argument("--base", help="name of the published model, for a MODEL that is a local folder")
    parser.add_argument("--revision", help="commit, tag or branch, for a MODEL that is a Hub id")
    args = parser.parse_args(argv)
    try:
        done = export_bf16(args.model, args.dest, args.base, args.revision)
    except (ExportError, OSError) as error:
        sys.exit(f"export.py: {error}")
    print(
        f"{done['folder']}: {done['tensors']} bf16 tensors, {done['bytes'] / 1e9:.2f} GB in {done['shards']} shard(s), "
        f"{done['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
