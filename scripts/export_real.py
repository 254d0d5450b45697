"""Seconds and host memory of an export in real dimensions: a LoRA run on one GPU, merged into its base on the CPU.

    python scripts/export_real.py WORK                             # Qwen3-8B, 40 GB of disk; adds to docs/export.json
    python scripts/export_real.py WORK --recipe gpt-oss-20b --config config
    python scripts/export_real.py WORK --rehearse                  # the same with a tiny model on the CPU; keeps nothing

Random weights of the published architecture, 20 steps by the recipe's own launch line. Then `export.py RUN DEST --merge`
twice: with its proof, which loads the base, the trained model and the export in fp32, one after another, and without.
Peak memory is summed over the processes: of all pages (`peak_rss_gib`), and without those that are mapped from a file
(`peak_private_gib`).
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import gpu_check
import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "export.json"


def measured(command: list[str], log: Path) -> dict:
    """Run a command without a GPU. {"seconds", "peak_rss_gib", "peak_private_gib"}; raises RuntimeError."""
    started, resident, private = time.monotonic(), 0, 0
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    while process.poll() is None:
        found = []
        for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            try:
                found.append(one.memory_info())
            except psutil.NoSuchProcess:  # it ended meanwhile
                continue
        resident = max(resident, sum(info.rss for info in found))
        private = max(private, sum(info.rss - info.shared for info in found))
        time.sleep(0.25)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {log.read_text()[-2000:]}")
    return {
        "seconds": round(time.monotonic() - started, 1),
        "peak_rss_gib": round(resident / 2**30, 2),
        "peak_private_gib": round(private / 2**30, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for model, run and exports")
    parser.add_argument("--recipe", default="qwen3-8b-invoice")
    parser.add_argument("--config", default="lora", help="a configuration that trains an adapter")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    arguments = parser.parse_args()
    work, recipe, config = arguments.work.absolute(), arguments.recipe, arguments.config
    work.mkdir(parents=True, exist_ok=True)
    key = gpu_check.model_key(recipe, config, False)
    model, _ = gpu_check.make_model(key, work, arguments.rehearse, {})
    rows = gpu_check.write_rows(work, 60 if arguments.rehearse else 500)
    run = work / "run"
    shutil.rmtree(run, ignore_errors=True)
    # Far from the base in a few steps, so that there is something to lose by rounding.
    words = gpu_check.train_command("single", recipe, config, model, rows, run, arguments.rehearse)
    words += ["--max_steps", "20", "--learning_rate", "1e-2", "--lr_scheduler_type", "constant", "--warmup_steps", "0"]
    code, seconds = gpu_check.run(words, work / "run.log", 500)
    if code:
        sys.exit(f"error: the training ended with {code}: {(work / 'run.log').read_text()[-2000:]}")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    found = {
        "recipe": recipe,
        "config": config,
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"trained on {gpu}; exported on {os.cpu_count()} CPU cores ({platform.machine()})",
        "training_seconds": round(seconds, 1),
    }
    for name, more in (("merge", []), ("merge without proof", ["--no-proof"])):
        dest = work / "exported"
        shutil.rmtree(dest, ignore_errors=True)
        log = work / "export.log"
        found[name] = measured([sys.executable, "scripts/export.py", str(run), str(dest), "--merge", *more], log)
        told = [line for line in log.read_text().splitlines() if line.startswith((str(dest), "proven"))]
        found[name]["told"] = [line.replace(str(dest), "DEST") for line in told]
        print(f"{name}: {found[name]}", flush=True)
    found["bytes"] = sum(file.stat().st_size for file in dest.glob("*.safetensors"))
    if not arguments.rehearse:
        kept = json.loads(FILE.read_text(encoding="utf-8"))
        others = [one for one in kept.get("real_size", []) if (one["recipe"], one["config"]) != (recipe, config)]
        FILE.write_text(json.dumps(kept | {"real_size": [*others, found]}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
