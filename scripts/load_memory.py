"""Measures the host memory that each of two ranks holds alone after loading gpt-oss, by storage format and strategy.

    python scripts/load_memory.py            # prints the table and writes docs/load_memory.json

A random gpt-oss of about 0.8 GB in bf16 is written as bf16 and as MXFP4, and loaded by the recipes' own launch lines on
two CPU processes: under DDP each rank needs all of it; under FSDP2 with `fsdp_cpu_ram_efficient_loading` rank 0 alone reads
it. The figures are private bytes (USS) less those of the same launch with a model of a few kilobytes.
"""

import json
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import launching
import tiny_model

ROOT = Path(__file__).resolve().parent.parent
RECIPES = {"ddp": "gpt-oss-20b", "fsdp": "gpt-oss-120b"}
BIG = {"hidden": 1024, "layers": 30}


def private_bytes(model: Path, strategy: str, work: Path) -> list[int]:
    """Private bytes of each rank, as run.json records them once the model is loaded and the trainer is built."""
    rows, run = work / "rows.jsonl", work / f"{model.name}-{strategy}"
    launching.tiny_rows(rows, ROOT / "recipes" / RECIPES[strategy])
    arguments = ["--model_name_or_path", model, "--dataset_name", rows, "--output_dir", run, "--max_steps", "1"]
    arguments += ["--save_strategy", "no", "--eval_strategy", "no", "--unfit_rows", "drop"]
    folder = ROOT / "recipes" / RECIPES[strategy]
    result = launching.launch(folder, strategy, *arguments, log=work / f"{run.name}.log", timeout=900)
    if result.rc:
        raise SystemExit(f"error: the launch of {folder.name} under {strategy} failed:\n{result.output[-3000:]}")
    return json.loads((run / "run.json").read_text())["host_private_bytes"]


def main() -> None:
    report = {"date": time.strftime("%Y-%m-%d"), "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}"}
    report["versions"] = {name: version(name) for name in ("torch", "transformers", "trl", "accelerate", "peft")}
    report["cells"] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        small = tiny_model.write_tiny_model("gpt-oss", work / "small", dtype="bfloat16")
        models = {
            "bf16": tiny_model.write_tiny_model("gpt-oss", work / "bf16", dtype="bfloat16", **BIG),
            "MXFP4": tiny_model.write_tiny_model("gpt-oss", work / "mxfp4", mxfp4=True, **BIG),
        }
        size = sum(file.stat().st_size for file in models["bf16"].glob("*.safetensors"))
        report["bf16_bytes"] = size
        print(f"bf16 weights: {size / 2**20:.0f} MiB. Private MiB of rank 0 and rank 1 at load:")
        for strategy in RECIPES:
            base = private_bytes(small, strategy, work)
            for stored, model in models.items():
                ranks = [much - little for much, little in zip(private_bytes(model, strategy, work), base, strict=True)]
                report["cells"].append({"strategy": strategy, "stored": stored, "private_bytes": ranks})
                print(f"{strategy:5} {stored:6} {' '.join(f'{rank / 2**20:7.0f}' for rank in ranks)}", flush=True)
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / "docs" / "load_memory.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
