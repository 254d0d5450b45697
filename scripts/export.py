"""Turn what training leaves, or a published MXFP4 checkpoint, into one folder that other programs load.

A run or one of its checkpoints: FSDP shards, ZeRO shards, whole weights, or a LoRA adapter:

    python scripts/export.py run exported                        # final/ of a finished run, else its newest checkpoint
    python scripts/export.py run/checkpoint-200 exported --dtype bfloat16
    python scripts/export.py run exported --merge                # the adapter added to its base
    python scripts/export.py run exported --merge --mxfp4        # gpt-oss: experts in the published MXFP4 layout

The folder holds sharded safetensors (--shard-size), config, tokenizer, the base model's own chat template, generation
config, licences and a model card. By default each tensor keeps the dtype it was stored in, which for FSDP and ZeRO
checkpoints is fp32, also where training computed in bf16. An adapter merges into the base in the base's dtype; one that
was trained on a 4-bit base (QLoRA) merges into the base as published. Memory needed is about one shard, or the largest
tensor twice. Then the folder is loaded in a fresh process and must give the logits of the trained model and not those of
the base (export_proof.py), which takes memory for one whole model, in fp32 with --merge; --no-proof leaves that out.
--base names the model that was trained from, where it is no longer where run.json says.

MXFP4 to bf16, once, before training (each rank of a launch would otherwise dequantize the whole model for itself):

    python scripts/export.py openai/gpt-oss-20b models/gpt-oss-20b-bf16 --bf16 --revision COMMIT
    python scripts/export.py path/to/gpt-oss-20b models/gpt-oss-20b-bf16 --bf16 --base openai/gpt-oss-20b

SOURCE is then a Hub id or a local folder. The weights are written shard by shard, so the memory needed is about one shard
(5 GB, or one tensor where that is larger), not one model; the disk space needed is 42 GB for the 20B model and 234 GB
for the 120B model. The bits are those of `from_pretrained(MODEL, dtype=torch.bfloat16,
quantization_config=Mxfp4Config(dequantize=True))`. The folder holds a `cookbook.json`:

    {"base_model_name_or_path": "openai/gpt-oss-20b", "base_model_revision": "COMMIT" or null}

from which training takes the name of the base model, so that an adapter trained on this folder names the published
model, which everyone can download, and not a path of this machine. It stands in a file of its own because unknown
keys of config.json are copied into every model that is trained from it.

DEST is written as DEST.partial and renamed when it is complete.
"""

import argparse
import math
import re
import sys
import time
from pathlib import Path

import torch
from export_files import (
    BASE_RECORD,
    IN_PROGRESS,
    INDEX,
    SHARD_BYTES,
    ExportError,
    copy_companions,
    find_model,
    finish_folder,
    partial_folder,
    read_config,
    read_headers,
    read_tensor,
    write_json,
    write_shards,
)
from export_mxfp4 import dequantize_mxfp4, pair_table, plan_bf16

__all__ = ["INDEX", "IN_PROGRESS", "ExportError", "dequantize_mxfp4", "export_bf16", "main", "write_shards"]


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


def size_in_bytes(text: str) -> int:
    """Bytes of "5GB", "500MB" or a plain number; powers of ten. Raises argparse's error for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    size = int(float(found[1]) * 1000 ** " KMGT".index(found[2] or " ")) if found else 0
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected a number with KB, MB, GB or TB, such as 5GB")
    return size


def main(argv: list[str] | None = None) -> None:
    """Read the command line and run the export; ends with one paragraph and exit code 1 when it cannot be done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("source", metavar="SOURCE", help="a run, a checkpoint-N, a model or adapter folder")
    parser.add_argument("dest", metavar="DEST", help="the folder to write; must not exist or be empty")
    parser.add_argument(
        "--bf16", action="store_true", help="SOURCE is an MXFP4 model, folder or Hub id: write it as bf16"
    )
    parser.add_argument("--merge", action="store_true", help="add the adapter to its base")
    parser.add_argument("--mxfp4", action="store_true", help="gpt-oss: experts in the published MXFP4 layout")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as stored")
    parser.add_argument("--shard-size", type=size_in_bytes, default=SHARD_BYTES, help="largest file, default 5GB")
    parser.add_argument("--base", help="the model trained from; with --bf16 the published name of a local SOURCE")
    parser.add_argument("--revision", help="with --bf16: commit, tag or branch, for a SOURCE that is a Hub id")
    parser.add_argument("--no-proof", action="store_true", help="do not load and compare the result")
    args = parser.parse_args(argv)
    given = [f"--{name.replace('_', '-')}" for name in ("merge", "mxfp4", "dtype", "no_proof") if getattr(args, name)]
    try:
        if args.bf16 and given:
            raise ExportError(
                f"--bf16 turns a published model into bf16 and takes no {given[0]}. Leave one of them out."
            )
        if args.revision and not args.bf16:
            raise ExportError(
                "--revision goes with --bf16; a run's own base revision stands in run.json. Leave it out."
            )
        if args.bf16:
            done = export_bf16(args.source, args.dest, args.base, args.revision, shard_bytes=args.shard_size)
        else:
            from export_run import export_run

            done = export_run(
                args.source,
                args.dest,
                args.base,
                args.merge,
                args.mxfp4,
                args.dtype,
                args.shard_size,
                not args.no_proof,
            )
    except (ExportError, OSError) as error:
        sys.exit(f"export.py: {error}")
    print(
        f"{done['folder']}: {done['tensors']}{' bf16' if args.bf16 else ''} tensors, {done['bytes'] / 1e9:.2f} GB in "
        f"{done['shards']} shard(s), {done['seconds']:.1f} s"
    )
    if "error" in done:
        print(f"experts rounded to MXFP4: {done['error']:.2%} relative error (root mean square)")
    if proof := done.get("proof"):
        words = {
            "largest_difference": "largest difference of a logit {:.1e}",
            "moved": "training moved the logits by {:.1e} (root mean square)",
            "lost": "rounding the weights took {:.1%} of that away",
        }
        print("proven in a fresh process: " + "; ".join(words[key].format(value) for key, value in proof.items()))


if __name__ == "__main__":
    main()
