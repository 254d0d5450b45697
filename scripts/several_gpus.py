"""The recipes on every visible GPU, in one go: correct beside one GPU, how much faster, memory, time in collectives.

    python scripts/several_gpus.py WORK                           # all of it; WORK/several_gpus.json grows as it goes
    python scripts/several_gpus.py WORK --part correct --jobs 4   # tiny models, some cells at a time
    python scripts/several_gpus.py WORK --part speed --only qwen  # cells whose name holds one of these words
    python scripts/several_gpus.py WORK --rehearse                # the same on two CPU processes
    python scripts/several_gpus.py --keep WORK/several_gpus.json  # into docs/several_gpus.json

correct: what smoke.py proves on the CPU, under NCCL and with accelerate's own FSDP2. The last rank is killed in the middle,
the launch ends by itself, the same command continues from its sharded checkpoint, every loss is that of one process on one
GPU with the same global batch, and final/ (for LoRA the whole adapter) loads in a fresh process and gives its logits.
The checkpoint of full weights under FSDP2 is exported besides, with export.py's own proof. One visible GPU does, too.

speed: real widths, random weights, as deep as one GPU holds with all states, shipped config and launch file. Each cell
runs on all GPUs, and on one with as many more micro-batches, so that both see the same rows in each step. Dropout is off,
because its mask depends on the rank. The last step is profiled (collectives.py).
"""

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import gpu_check
import launching
import memory
import smoke
import status_table
import tiny_model
import torch

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "several_gpus.json"
STEPS, WARM_UP = 12, 3

# recipe, configuration, launch file
CORRECT = [
    ("llama-3.2-1b", "config", "fsdp"),
    ("llama-3.2-1b", "config", "zero3"),
    ("gpt-oss-120b", "config", "fsdp"),
    ("gpt-oss-20b", "config", "ddp"),
    ("qwen3-8b-invoice", "config", "zero3"),
    ("gpt-oss-120b", "expert_parallel", "fsdp"),
    ("llama-3.2-1b", "config", "zero2"),
    ("llama-3.2-1b", "config", "ddp"),
    ("qwen3-8b-invoice", "config", "fsdp"),
    ("llama-3.2-1b", "config", "zero1"),
    ("llama-3.2-3b", "qlora", "ddp"),
]
# recipe, configuration, launch file, layers (None: all)
SPEED = [
    ("llama-3.2-1b", "config", "zero2", None),
    ("llama-3.2-1b", "config", "ddp", None),
    ("gpt-oss-20b", "config", "ddp", 8),
    ("gpt-oss-120b", "config", "fsdp", 3),
    ("qwen3-8b-invoice", "config", "zero3", 10),
    ("qwen3-8b-invoice", "config", "fsdp", 10),
    ("llama-3.2-1b", "config", "zero1", None),
    ("llama-3.2-1b", "config", "zero3", None),
    ("llama-3.2-1b", "config", "fsdp", None),
    ("gpt-oss-120b", "expert_parallel", "fsdp", 3),
    ("qwen3-8b-invoice", "lora", "ddp", 10),
]
ALONE = {"expert_parallel": "config"}  # the configuration that one GPU runs, where it cannot run the cell's own


def named(cell: tuple) -> str:
    return " ".join(cell[:3])


# ----------------------------------------------------------------------------------------------------------- correct


def correct_cell(cell: tuple, bench: smoke.Bench) -> dict:
    """What smoke.Bench.cell found, and for full weights under FSDP2 what became of the export."""
    recipe, config, strategy = cell
    found = asdict(bench.cell(strategy))
    if (recipe, config, strategy) == ("llama-3.2-1b", "config", "fsdp") and not found["error"]:
        run = bench.work / strategy
        step = smoke.saved_steps(run)[-1]
        command = [sys.executable, "scripts/export.py", str(run / f"checkpoint-{step}"), str(bench.work / "exported")]
        code, _ = gpu_check.run(command, bench.work / "export.log", 300)
        found["exported"] = code == 0
        if code:
            found["error"] = f"export.py ended with {code}: {smoke.reason((bench.work / 'export.log').read_text())}"
    return found


def correct(work: Path, gpus: int, only: list[str], jobs: int, rehearse: bool):
    """Yield the cells of CORRECT as they are done, `jobs` of them at a time."""
    cells = [cell for cell in CORRECT if any(word in named(cell) for word in only)]
    cells = [cell for cell in cells if gpus > 1 or cell[1] not in ALONE]
    benches, used = {}, {}
    for recipe, config, strategy in cells:
        folder = ROOT / "recipes" / recipe
        adapter = launching.read_config(folder, config).get("use_peft")
        evaluates = bool(adapter) or strategy != "fsdp" or torch.__version__ >= (2, 13)  # see guard.strategy_problem
        key = f"{recipe}-{config}" if evaluates else f"{recipe}-{config}-no-evaluation"
        if key not in benches:
            options = {"gpus": 0 if rehearse else gpus, "evaluates": evaluates}
            benches[key] = smoke.Bench(folder, work / "correct" / key, config, **options)
        used[recipe, config, strategy] = benches[key]

    def alone(bench: smoke.Bench) -> None:  # a cell says what is wrong
        try:
            _ = bench.reference
        except launching.LaunchError:
            return

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(alone, benches.values()))
        yield from pool.map(lambda cell: correct_cell(cell, used[cell]), cells)


# ------------------------------------------------------------------------------------------------------------- speed


def on_one_gpu(cell: tuple) -> tuple:
    """The cell that one GPU runs beside this one."""
    return (cell[0], ALONE.get(cell[1], cell[1]), *cell[2:])


def train(cell: tuple, model: Path, rows: dict, out: Path, processes: int, times: int, gpu: str | None, rehearse: bool):
    """Run a cell on `processes` GPUs with `times` as many micro-batches as shipped; return what read_run does."""
    recipe, config, strategy, _ = cell
    words = gpu_check.train_command(strategy, recipe, config, model, rows, out, rehearse, processes)
    settings = launching.read_config(ROOT / "recipes" / recipe, config)
    at = next(i for i, word in enumerate(words) if word.endswith("train.py"))
    words.insert(at, "scripts/collectives.py")
    accumulation = settings.get("gradient_accumulation_steps", 1) * times
    words += ["--max_steps", str(STEPS + 1), "--logging_steps", "1", "--warmup_steps", "0"]
    words += ["--gradient_accumulation_steps", str(accumulation)]
    words += ["--lora_dropout", "0.0"] if settings.get("use_peft") else []
    environment = {"COLLECTIVES": str(out.with_suffix(".profile.json")), "COLLECTIVES_STEP": str(STEPS + 1)}
    environment |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {}
    code, seconds = gpu_check.run(words, out.with_suffix(".log"), 400, environment)
    if code:
        raise RuntimeError(f"exit code {code}: {smoke.reason(out.with_suffix('.log').read_text(errors='replace'))}")
    return read_run(out, processes) | {"seconds": round(seconds, 1)}


def read_run(out: Path, processes: int) -> dict:
    """Losses, and medians after the warm-up: seconds a step, tokens/s a GPU, MFU; peak GiB; the profile of rank 0."""
    lines = [line for line in launching.metrics(out) if "loss" in line][:STEPS]
    timed = [line for line in lines if line["step"] > WARM_UP and "step_seconds" in line]

    def middle(key):
        values = [line[key] for line in timed if key in line]
        return statistics.median(values) if values else None

    return {
        "losses": [line["loss"] for line in lines],
        "step_seconds": middle("step_seconds"),
        "tokens_per_second_per_gpu": round(middle("tokens_per_second") / processes, 1),
        "mfu": middle("mfu"),
        "peak_gib": max((line.get("peak_memory_gib", 0) for line in lines), default=0),
        "profile": json.loads(out.with_suffix(".profile.json").read_text()),
    }


def predicted_gib(cell: tuple, gpus: int) -> float:
    """What memory.py says of the cell: GiB of each GPU at its peak."""
    recipe, config, strategy, layers = cell
    published, settings = memory.of_recipe(recipe, config, gpus, gpus)
    if layers:
        name = launching.read_config(ROOT / "recipes" / recipe, config)["model_name_or_path"]
        published = memory.real_config(*tiny_model.PUBLISHED[name], layers)
    attention = "flash_attention_4" if settings.packing else settings.attention
    settings = replace(settings, strategy=strategy, attention=attention, lora_dropout=0.0)
    return round(memory.predict(published, settings).peak / 2**30, 2)


def model_of(cell: tuple, work: Path, rehearse: bool) -> Path:
    """The folder of the cell's random model; gpt-oss as bf16, which every strategy reads."""
    recipe, config, _, layers = cell
    key = gpu_check.model_key(recipe, config, recipe.startswith("gpt-oss"))
    depths = {key.removesuffix("-bf16"): layers} if layers else {}
    return gpu_check.make_model(key, work, rehearse, depths)[0]


def speed(work: Path, gpus: int, only: list[str], rehearse: bool, left):
    """Yield the cells of SPEED: first the runs on one GPU, as many at a time as there are GPUs, then those on all."""
    cells = [cell for cell in SPEED if any(word in named(cell) for word in only)]
    rows = gpu_check.write_rows(work, 60 if rehearse else 500, 1500)
    models, failed, alone = {}, {}, {}
    for cell in cells:
        try:
            models[cell] = model_of(cell, work, rehearse)
        except RuntimeError as error:
            failed[cell] = str(error)

    def reference(number: int, cell: tuple) -> dict:
        try:
            gpu = None if rehearse else str(number % gpus)
            return train(cell, models[cell], rows, work / "alone" / str(number), 1, gpus, gpu, rehearse)
        except Exception as error:
            return {"error": str(error)}

    models |= {on_one_gpu(cell): model for cell, model in models.items()}
    wanted = list(dict.fromkeys(on_one_gpu(cell) for cell in cells if cell in models))
    for first in range(0, len(wanted), gpus):
        part = wanted[first : first + gpus]
        with ThreadPoolExecutor(len(part)) as pool:
            alone |= dict(zip(part, pool.map(reference, range(first, first + len(part)), part), strict=True))
    for number, cell in enumerate(cells):
        line = {"recipe": cell[0], "config": cell[1], "strategy": cell[2], "layers": cell[3], "error": None}
        try:
            if cell in failed:
                raise RuntimeError(failed[cell])
            if left() < 0:
                raise RuntimeError("not started: the time was over")
            line["one_gpu"] = one = alone[on_one_gpu(cell)]
            line["error"] = one.get("error")
            line["all_gpus"] = train(cell, models[cell], rows, work / "all" / str(number), gpus, 1, None, rehearse)
            line["predicted_gib"] = predicted_gib(cell, gpus)
            if "error" not in one:
                pairs = list(zip(line["all_gpus"]["losses"], one["losses"], strict=True))
                line["loss_deviation"] = max(smoke.deviation(a, b) for a, b in pairs)
                rates = [run["tokens_per_second_per_gpu"] for run in (line["all_gpus"], one)]
                line["efficiency"] = round(rates[0] / rates[1], 3)
                if line["loss_deviation"] > smoke.TOLERANCE["shipped"]:
                    line["error"] = f"losses {line['loss_deviation']:.1e} (relative) away from those of one GPU"
        except Exception as error:
            line["error"] = str(error)
        yield line


# ------------------------------------------------------------------------------------------------------------ report


def table(report: dict) -> str:
    """The tables of docs/results.md: what was correct, and where it was measured the speed."""
    lines = [
        "| recipe | launch file | killed, continued from step | losses off by | final/ off by | |",
        "|---|---|---|---|---|---|",
    ]
    for cell in report["correct"]:
        label = status_table.labelled(cell["recipe"], cell["config"])
        if cell["error"]:
            lines.append(f"| {label} | {cell['strategy']} | | | | {cell['error']} |")
            continue
        exported = "exported, proven" if cell.get("exported") else ""
        lines.append(
            f"| {label} | {cell['strategy']} | {cell['stopped_at']} | {cell['loss_deviation']:.0e} | "
            f"{cell['logits_error']:.0e} | {exported} |"
        )
    lines.append("")
    if not report["speed"]:
        return "\n".join(lines)
    lines += [
        "| recipe | launch file | depth | tok/s a GPU | of one GPU's | MFU | collectives, of a step | not hidden | "
        "GiB, predicted | measured | losses off by |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in report["speed"]:
        label = status_table.labelled(cell["recipe"], cell["config"])
        depth = f"{cell['layers']} layers" if cell["layers"] else "whole"
        place = f"| {label} | {cell['strategy']} | {depth} |"
        if cell["error"]:
            lines.append(f"{place} {cell['error']} | | | | | | | |")
            continue
        run, profile = cell["all_gpus"], cell["all_gpus"]["profile"]
        parts = [profile[key] / profile["step_ms"] for key in ("collectives_ms", "exposed_ms")]
        lines.append(
            f"{place} {run['tokens_per_second_per_gpu']:,.0f} | {cell['efficiency']:.2f} | "
            f"{format(run['mfu'] or 0, '.1%')} | {parts[0]:.0%} | {parts[1]:.0%} | "
            f"{cell['predicted_gib']:.1f} | {run['peak_gib']:.1f} | {cell['loss_deviation']:.0e} |"
        )
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, nargs="?", help="folder for models, rows, runs and logs")
    parser.add_argument("--part", choices=["correct", "speed"], help="default: both")
    parser.add_argument("--only", nargs="+", default=[""], help="cells whose name holds one of these words")
    parser.add_argument("--jobs", type=int, default=1, help="cells of the part `correct` at a time")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, two CPU processes")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which no cell on all GPUs is started")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="put a report into docs/several_gpus.json, and run nothing"
    )
    arguments = parser.parse_args()
    if arguments.keep:
        KEPT.write_text(json.dumps(json.loads(arguments.keep.read_text()), indent=1) + "\n", encoding="utf-8")
        return 0
    if arguments.work is None:
        parser.error("a folder for the work is missing")
    work, begun = arguments.work.absolute(), time.monotonic()
    work.mkdir(parents=True, exist_ok=True)
    visible = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    if not visible and not arguments.rehearse:
        sys.exit("error: no GPU is visible. On a machine without one, --rehearse runs the same on two CPU processes.")
    gpus = 2 if arguments.rehearse else len(visible)
    names = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed")
    report = {
        "gpus": visible or ["CPU"] * 2,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "correct": [],
        "speed": [],
    }
    parts = {
        "correct": lambda: correct(work, gpus, arguments.only, arguments.jobs, arguments.rehearse),
        "speed": lambda: speed(
            work, gpus, arguments.only, arguments.rehearse, lambda: arguments.limit - (time.monotonic() - begun)
        ),
    }
    for part in [arguments.part] if arguments.part else list(parts):
        for line in parts[part]():
            report[part].append(line)
            (work / "several_gpus.json").write_text(json.dumps(report, indent=1))
            print(f"{time.monotonic() - begun:.0f} s: {json.dumps(line)}", flush=True)
    cells = report["correct"] + report["speed"]
    failed = sum(bool(cell["error"]) for cell in cells)
    print(f"{len(cells) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
