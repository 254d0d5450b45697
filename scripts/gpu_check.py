"""Trains every recipe for five steps on the visible GPUs, from its shipped config and launch file, with random weights.

    python scripts/gpu_check.py WORK                    # all cells; writes WORK/gpu_check.json
    python scripts/gpu_check.py WORK --only llama qwen  # cells whose name holds one of these words
    python scripts/gpu_check.py WORK --make-only        # only write the random models
    python scripts/gpu_check.py WORK --rehearse         # the same on two CPU processes with tiny models

The architectures are the published ones; what is too deep for one GPU of 141 GB is cut, and the report says to how many
layers. A recipe that CELLS does not name runs each of its configurations under its own launch file. Nothing is
downloaded. Each cell is one launch; a cell that fails is reported and the others go on.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import launching
import status_table
import tiny_model
import torch
from bars import track

ROOT = Path(__file__).resolve().parent.parent
WORDS = [
    "receipt",
    "total",
    "answer",
    "paper",
    "house",
    "date",
    "long",
    "road",
    "short",
    "user",
    "model",
    "learns",
    "trained",
    "saved",
]

# name, recipe, launch file, configuration, whether gpt-oss is written as bf16
CELLS = [
    ("llama-3.2-1b", "llama-3.2-1b", "zero2", "config", False),
    ("llama-3.2-1b", "llama-3.2-1b", "fsdp", "config", False),
    ("gpt-oss-20b, MXFP4 folder", "gpt-oss-20b", "ddp", "config", False),
    ("gpt-oss-20b, QLoRA, bf16 folder", "gpt-oss-20b", "single", "qlora", True),
    ("gpt-oss-20b, expert LoRA, bf16 folder", "gpt-oss-20b", "ddp", "expert_lora", True),
    ("gpt-oss-120b, bf16 folder", "gpt-oss-120b", "fsdp", "config", True),
    ("gpt-oss-120b, expert LoRA, bf16 folder", "gpt-oss-120b", "fsdp", "expert_lora", True),
    ("qwen3-8b-invoice", "qwen3-8b-invoice", "zero3", "config", False),
    ("qwen3-8b-invoice, LoRA", "qwen3-8b-invoice", "single", "lora", False),
    ("qwen3-8b-invoice", "qwen3-8b-invoice", "fsdp", "config", False),
]
# Layers of a model whose weights, gradients and optimizer one GPU cannot hold, by family and size.
DEPTHS = {"gpt-oss-120b": 4, "llama-base-8b": 24, "qwen3_5-27b": 8}


def cells() -> list[tuple]:
    """CELLS, and one for each configuration of every other recipe."""
    others = []
    for folder in sorted(path.parent for path in (ROOT / "recipes").glob("*/train.py")):
        if folder.name in {cell[1] for cell in CELLS}:
            continue
        for config in sorted((path.stem for path in folder.glob("*.yaml")), key=lambda name: (name != "config", name)):
            name = ", ".join(
                [folder.name, *(label for label, known in status_table.VARIANTS.items() if known == config)]
            )
            others.append((name, folder.name, launching.own_strategy(folder, config), config, False))
    return CELLS + others


def model_key(recipe: str, config: str, bf16: bool) -> str:
    """Family and size of the model that a recipe names, as in `llama-1b`."""
    model = launching.read_config(ROOT / "recipes" / recipe, config)["model_name_or_path"]
    return "-".join(tiny_model.PUBLISHED[model]) + "-bf16" * bf16


def run(command: list[str], log: Path, timeout: float, environment: dict | None = None) -> tuple[int, float]:
    """Run a command from the cookbook's root with its output in `log`; return exit code and seconds."""
    start = time.monotonic()
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | (environment or {})
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as output:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=timeout
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    return code, time.monotonic() - start


def make_model(key: str, work: Path, rehearse: bool, layers: dict) -> tuple[Path, dict]:
    """The folder of a random model, made on first use, and the seconds that making it took."""
    folder, seconds = work / "models" / key, {}
    if folder.is_dir():
        return folder, seconds
    folder.parent.mkdir(parents=True, exist_ok=True)
    script = [sys.executable, "scripts/tiny_model.py"]
    if key.endswith("-bf16"):
        source, seconds = make_model(key.removesuffix("-bf16"), work, rehearse, layers)
        command = [sys.executable, "scripts/export.py", str(source), str(folder), "--bf16"]
    else:
        family, _, size = key.rpartition("-")
        command = [*script, family, str(folder), *(["--mxfp4"] if family == "gpt-oss" else ["--dtype", "bfloat16"])]
        command += [] if rehearse else ["--size", size]
        command += ["--layers", str(layers[key])] if key in layers and not rehearse else []
    code, took = run(command, work / f"make-{key}.log", 500)
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with {code}; see {work / f'make-{key}.log'}")
    return folder, seconds | {key: round(took, 1)}


def write_rows(work: Path, long: int, count: int = 120) -> dict[str, Path]:
    """`count` rows for the chat recipes and for the invoice recipe, `long` words at most, of uneven length."""
    draw = random.Random(0)

    def words(n):
        return " ".join(draw.choices(WORDS, k=n))

    chat = work / "chat.jsonl"
    with open(chat, "w", encoding="utf-8") as file:
        for _ in range(count):
            n = draw.randint(long // 4, long)
            messages = [{"role": "user", "content": words(n // 3)}, {"role": "assistant", "content": words(n // 2)}]
            file.write(json.dumps({"messages": messages}) + "\n")
    receipts = work / "receipts.jsonl"
    with open(receipts, "w", encoding="utf-8") as file:
        for i in range(count):
            fields = {"company": words(3), "date": "2018-03-30", "address": words(8), "total": f"{i}.00"}
            file.write(json.dumps({"text": words(draw.randint(long // 4, long)), "entities": fields}) + "\n")
    return {"chat": chat, "receipts": receipts}


def train_command(
    strategy: str,
    recipe: str,
    config: str,
    model: Path,
    rows: dict,
    out: Path,
    rehearse: bool,
    processes: int | None = None,
) -> list[str]:
    """The launch line of a recipe's configuration, on rows of `write_rows`; saves nothing but the result.

    processes: by default what the launch file says, in a rehearsal two.
    """
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file"]
    command += [f"accelerate_configs/{strategy}.yaml", "--main_process_port", "0"]
    if processes or (rehearse and strategy != "single"):
        command += ["--num_processes", str(processes or 2)]
    command += ["scripts/fsdp_on_cpu.py"] if rehearse and strategy == "fsdp" else []
    command += [f"recipes/{recipe}/train.py", "--config", config, "--model_name_or_path", str(model)]
    command += ["--output_dir", str(out), "--save_strategy", "no", "--eval_strategy", "no"]
    command += ["--use_cpu", "true"] if rehearse else []
    if "invoice" in recipe:
        command += ["--dataset_name", str(rows["receipts"]), "--text_column", "text"]
        command += ["--target_column", "entities", "--schema_file", f"recipes/{recipe}/schema_receipt.json"]
    else:
        command += ["--dataset_name", str(rows["chat"]), "--dataset_train_split", "train"]
    return command


def read_cell(folder: Path) -> dict:
    """Step time in seconds (median without the first two), peak memory of rank 0 in GiB, first and last loss."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    pauses = [b["time"] - a["time"] for a, b in itertools.pairwise(steps)]
    record = json.loads((folder / "run.json").read_text())
    return {
        "steps": len(steps),
        "step_seconds": round(statistics.median(pauses[1:] or pauses), 3),
        "peak_memory_gib": max((line.get("peak_memory_gib", 0) for line in lines), default=0),
        "loss": [round(steps[0]["loss"], 4), round(steps[-1]["loss"], 4)],
        "host_private_gib": [round(size / 2**30, 2) for size in record["host_private_bytes"]],
        "startup_seconds": record["startup_seconds"],  # since the launch's process began; loading takes part of it
        "outcome": record["outcome"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for models, rows, runs and logs")
    parser.add_argument("--only", nargs="+", default=[""], help="cells whose name or model holds one of these words")
    parser.add_argument("--make-only", action="store_true", help="write the models and train nothing")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on two CPU processes")
    parser.add_argument(
        "--layers", nargs="+", default=[], metavar="MODEL=N", help="another depth, such as gpt-oss-20b=6; see DEPTHS"
    )
    parser.add_argument("--discard", action="store_true", help="delete a model after its last cell, and its result")
    parser.add_argument("--limit", type=float, default=560, help="seconds after which no further cell is started")
    arguments = parser.parse_args()
    work, started = arguments.work.absolute(), time.monotonic()
    work.mkdir(parents=True, exist_ok=True)
    rows = write_rows(work, 60 if arguments.rehearse else 500)
    layers = DEPTHS | {name: int(depth) for name, depth in (word.split("=") for word in arguments.layers)}
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report = {"gpus": gpus, "date": time.strftime("%Y-%m-%d"), "cells": []}
    names = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "datasets")
    report["versions"] = {name: importlib.metadata.version(name) for name in names}
    failed = 0
    chosen = [(number, *cell, model_key(cell[1], *cell[3:])) for number, cell in enumerate(cells())]
    chosen = [one for one in chosen if any(word in f"{one[1]} {one[6]} {one[3]}" for word in arguments.only)]
    for place, (number, name, recipe, strategy, config, _, key) in enumerate(track(chosen, "cells")):
        cell = {"name": name, "strategy": strategy, "depth": layers.get(key.removesuffix("-bf16"))}
        report["cells"].append(cell)
        out = work / "runs" / str(number)
        try:
            if time.monotonic() - started > arguments.limit:
                raise RuntimeError(f"not started: {arguments.limit:.0f} s were over")
            model, cell["made_seconds"] = make_model(key, work, arguments.rehearse, layers)
            if arguments.make_only:
                print(json.dumps(cell), flush=True)
                continue
            command = train_command(strategy, recipe, config, model, rows, out, arguments.rehearse)
            command += ["--max_steps", "5"]
            code, cell["seconds"] = run(command, work / f"cell-{number}.log", 420)
            if code:
                raise RuntimeError(f"exit code {code}")
            cell |= read_cell(out)
            shutil.rmtree(out / "final")  # the disk may hold only a few results of this size
        except Exception as error:
            failed += 1
            log = work / f"cell-{number}.log"
            text = log.read_text(errors="replace") if log.is_file() else ""
            first = text.find("error")
            cell |= {"error": str(error), "output": text[max(first - 200, 0) : first + 3000]}
        if arguments.discard and key not in {later[6] for later in chosen[place + 1 :]}:
            shutil.rmtree(work / "models" / key, ignore_errors=True)
            shutil.rmtree(work / "models" / key.removesuffix("-bf16"), ignore_errors=True)
        cell["seconds"] = round(cell.get("seconds", 0), 1)
        print(json.dumps({k: v for k, v in cell.items() if k != "output"}), flush=True)
        if "output" in cell:
            print(cell["output"], flush=True)
        (work / "gpu_check.json").write_text(json.dumps(report, indent=1))
    if arguments.make_only:
        return int(failed > 0)
    print(f"{len(report['cells']) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
