"""Measures peak GPU memory of real architectures over many settings, for scripts/memory.py to be held against.

    python scripts/measure_memory.py --out docs/memory.jsonl                # on one GPU of 80 GB or more, some minutes
    python scripts/measure_memory.py --out FILE --only qwen3 --minutes 5    # settings whose name holds the word
    python scripts/measure_memory.py --out FILE --rehearse                  # tiny dimensions on the CPU, no memory
    python scripts/measure_memory.py --to-json FILE docs/memory.json        # the kept file, from the lines of a run

Each setting trains three steps on random rows with TRL's SFTTrainer, built as the recipes' train.py builds it, with
random weights of the published dimensions made on the GPU. A line of JSON is written as soon as a setting is done, and a
setting that is in the file is not measured again. One that fails is written down with its error. The most informative
settings come first. Then: `python scripts/memory.py --compare docs/memory.json`.

Settings share a process, to import the libraries once. What an earlier one still holds is measured (`before`) and, in the
kept file, subtracted from every size and named `held`; the least `before` of a run is cuBLAS's workspace, which stays in.
A line says on which GPU and with which versions it was measured.
"""

import argparse
import dataclasses
import gc
import importlib.metadata
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tiny_model
import torch
from memory import Settings
from transformers import AutoModelForCausalLM, TrainerCallback

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
FLASH = "flash_attention_4"
PLAIN = Settings(strategy="python", micro_batch=2, length=2048, dtype="float32", attention="sdpa")
FULL = {"dtype": "float32"}
LORA = {"dtype": "bfloat16", "lora_r": 16, "lora_targets": LINEAR, "lora_dropout": 0.05}
ATTENTION_LORA = {"dtype": "bfloat16", "lora_r": 8, "lora_targets": ATTENTION, "lora_dropout": 0.05}
EXPERT_LORA = ATTENTION_LORA | {"lora_dropout": 0.0, "lora_parameters": EXPERTS}
BF16_8BIT = {"dtype": "bfloat16", "optim": "adamw_8bit"}
CHECKPOINTED = {"checkpointing": True}


def packed(micro_batch: int, length: int, attention: str = FLASH) -> dict:
    return {"packing": True, "micro_batch": micro_batch, "length": length, "attention": attention}


def rows(micro_batch: int, length: int, attention: str = "sdpa") -> dict:
    return {"micro_batch": micro_batch, "length": length, "attention": attention}


# family, size, layers (None: all), what differs from PLAIN. The most informative first.
CAMPAIGN = [
    ("llama", "1b", None, FULL | rows(2, 2048)),
    ("qwen3", "8b", None, LORA | rows(2, 2048) | CHECKPOINTED),
    ("gpt-oss", "20b", None, ATTENTION_LORA | rows(1, 2048, "eager") | CHECKPOINTED),
    ("gpt-oss", "20b", None, EXPERT_LORA | rows(1, 2048, "eager") | CHECKPOINTED),
    ("gpt-oss", "120b", 4, ATTENTION_LORA | rows(1, 2048, "eager") | CHECKPOINTED),
    ("gpt-oss", "20b", None, ATTENTION_LORA | packed(2, 4096) | CHECKPOINTED),
    ("llama", "1b", None, FULL | packed(4, 2048)),
    ("qwen3", "8b", 12, FULL | rows(2, 4096) | CHECKPOINTED),
    ("qwen3", "8b", 12, FULL | {"optim": "adamw_8bit"} | rows(2, 2048)),
    ("gpt-oss", "120b", 4, EXPERT_LORA | rows(1, 2048, "eager") | CHECKPOINTED),
    ("llama", "1b", None, FULL | {"optim": "adamw_8bit"} | rows(2, 4096)),
    ("qwen3", "8b", None, LORA | packed(2, 4096)),
    ("gpt-oss", "20b", 6, BF16_8BIT | rows(1, 2048, "eager") | CHECKPOINTED),
    ("llama", "1b", None, FULL | rows(2, 2048, "eager")),
    ("gpt-oss", "20b", 8, ATTENTION_LORA | rows(1, 2048, "eager")),
    ("gpt-oss", "20b", 8, EXPERT_LORA | rows(1, 1024, "eager")),
    ("llama", "1b", None, FULL | rows(2, 4096) | {"padded": True, "labelled": 0.75}),
    ("gpt-oss", "120b", 4, ATTENTION_LORA | packed(4, 4096)),
    ("llama", "1b", None, FULL | rows(4, 1024) | CHECKPOINTED | {"accumulation": 2}),
    ("qwen3", "8b", 16, BF16_8BIT | packed(2, 4096) | CHECKPOINTED),
    ("gpt-oss", "20b", 8, ATTENTION_LORA | packed(2, 2048)),
    ("gpt-oss", "20b", None, ATTENTION_LORA | rows(1, 4096, "eager") | CHECKPOINTED),
    ("qwen3", "8b", None, LORA | rows(1, 4096, "eager") | CHECKPOINTED),
    ("llama", "1b", None, LORA | rows(4, 2048)),
    ("gpt-oss", "120b", 4, EXPERT_LORA | packed(1, 4096) | CHECKPOINTED),
    ("qwen3", "8b", 8, FULL | rows(1, 1024, "eager")),
    ("llama", "1b", None, LORA | packed(8, 4096) | CHECKPOINTED),
    ("gpt-oss", "120b", 2, BF16_8BIT | rows(1, 1024, "eager") | CHECKPOINTED),
    ("qwen3", "8b", 12, LORA | rows(4, 1024) | {"padded": True, "labelled": 0.75}),
    ("llama", "1b", None, FULL | packed(2, 4096) | CHECKPOINTED),
    ("gpt-oss", "20b", 4, EXPERT_LORA | packed(2, 4096)),
    ("llama", "1b", None, FULL | rows(1, 4096, "eager") | CHECKPOINTED),
    ("qwen3", "8b", 24, LORA | rows(2, 4096) | {"accumulation": 2}),
    ("gpt-oss", "120b", 2, ATTENTION_LORA | rows(2, 1024, "eager")),
    ("qwen3", "8b", 12, FULL | packed(4, 2048) | CHECKPOINTED),
    ("llama", "1b", None, FULL | rows(8, 1024)),
]


def campaign() -> dict[str, tuple]:
    """name -> (family, size, layers, Settings). The name says everything that differs."""
    named = {}
    for family, size, layers, changes in CAMPAIGN:
        settings = dataclasses.replace(PLAIN, **changes)
        method = "expert LoRA" if settings.lora_parameters else "LoRA" if settings.lora_r else "full"
        shape = f"{'packed ' if settings.packing else ''}{settings.micro_batch} x {settings.length}"
        extra = ["8-bit optimizer"] * ("8bit" in settings.optim) + ["checkpointing"] * settings.checkpointing
        extra += ["padded"] * settings.padded + [f"accumulation {settings.accumulation}"] * (settings.accumulation > 1)
        depth = f"{layers} layers" if layers else "whole"
        name = ", ".join([f"{family}-{size}", depth, f"{method} {settings.dtype}", shape, settings.attention, *extra])
        named[name] = (family, size, layers, settings)
    assert len(named) == len(CAMPAIGN), "two settings have the same name"
    return named


class Peaks(TrainerCallback):
    """Largest allocated and reserved bytes of each optimizer step."""

    def __init__(self):
        self.allocated, self.reserved = [], []

    def on_step_begin(self, *args, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, *args, **kwargs):
        self.allocated.append(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
        self.reserved.append(torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0)


def build_trainer(config, tokenizer, settings: Settings, device: str, folder: str, callback):
    """An SFTTrainer over random rows of exactly the settings' length (with `padded`, each second row is half as long)."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    draw, count = random.Random(0), 4 * settings.micro_batch * settings.accumulation
    lengths = [settings.length // (2 if settings.padded and i % 2 else 1) for i in range(count)]
    ids = [[draw.randrange(300) for _ in range(length)] for length in lengths]
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    config._attn_implementation = None
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, settings.dtype), attn_implementation=settings.attention
        )
    arguments = SFTConfig(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.accumulation,
        max_length=settings.length,
        packing=settings.packing,
        bf16=settings.bf16,
        optim=settings.optim,
        activation_checkpointing=settings.checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if settings.checkpointing else None,
        train_sampling_strategy="sequential",
        router_aux_loss_coef=0.0 if config.model_type == "gpt_oss" else None,
        learning_rate=1e-6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=device == "cpu",
    )
    return SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=settings.lora,
        callbacks=[callback],
    )


def measure(family: str, size: str, layers: int | None, settings: Settings, device: str, rehearse: bool) -> dict:
    """Bytes by phase: `load` (trainer built), `step` (largest of steps 2 and 3), `first_step`, `reserved`, `before`."""
    tokenizer = tiny_model.build_tokenizer(family)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if rehearse:
        config = tiny_model.build_config(family, tokenizer, layers=2)
        attention = settings.attention if settings.attention != FLASH else "eager"
        settings = dataclasses.replace(settings, length=settings.length // 64, attention=attention)
    else:
        config = tiny_model.build_real_config(family, size, tokenizer, layers)
    on_gpu, peaks = device == "cuda", Peaks()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(config, tokenizer, settings, device, folder, peaks)
        load = torch.cuda.memory_allocated() if on_gpu else 0
        trainer.train()
    result = {"before": before, "load": load, "first_step": peaks.allocated[0], "step": max(peaks.allocated[1:])}
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        result |= {"reserved": max(peaks.reserved), "context": total - free - torch.cuda.memory_reserved()}
    return result


def warm_up() -> None:
    """Let cuBLAS take its workspaces, in this thread and in that of the backward pass, before anything is counted."""
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize()


def run(out: Path, only: list[str], until: float, rehearse: bool) -> None:
    """Measure what is not yet in `out`, in this process, until the clock says `until`."""
    device = "cuda" if torch.cuda.is_available() and not rehearse else "cpu"
    if device == "cuda":
        warm_up()
    for name, (family, size, layers, settings) in campaign().items():
        if name in read(out) or not any(word in name for word in only) or time.time() > until:
            continue
        line = {"name": name, "family": family, "size": size, "layers": layers, "machine": machine()}
        line["settings"], start = dataclasses.asdict(settings), time.time()
        with open(out.with_suffix(".now"), "w", encoding="utf-8") as file:
            json.dump(line, file)
        try:
            line["measured"] = measure(family, size, layers, settings, device, rehearse)
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {str(error)[:600]}"
            error.__traceback__ = None
        line["seconds"] = round(time.time() - start, 1)
        write(out, line)
        if importlib.util.find_spec("bitsandbytes"):
            # transformers names the embedding to it for every 8-bit optimizer, and it would keep that on the GPU for good.
            import bitsandbytes

            bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def read(out: Path) -> dict[str, dict]:
    """name -> line of what was measured."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    return {line["name"]: line for line in map(json.loads, lines)}


def write(out: Path, line: dict) -> None:
    with open(out, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{line['name']}: {line.get('error') or line['measured']} ({line['seconds']} s)", flush=True)


def machine() -> dict:
    """The GPUs, the day and the versions that a line is measured with."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {}
    for name in ("torch", "transformers", "trl", "accelerate", "peft", "bitsandbytes", "flash-attn-4"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"gpus": gpus, "date": time.strftime("%Y-%m-%d"), "versions": versions}


def net(measured: dict, least: int) -> dict:
    """`measured` less what earlier settings of the process still held (`held`); least: the smallest `before` of the run."""
    held = measured["before"] - least
    sizes = {name: measured[name] - held for name in ("load", "first_step", "step", "reserved")}
    return {"before": least, "held": held, **sizes, "context": measured["context"]}


def to_json(lines: Path, kept: Path) -> None:
    """Write the kept file: the lines' machine, and every setting net of what earlier ones held. Exits on two machines."""
    every = list(read(lines).values())
    machines = {json.dumps(line.pop("machine")) for line in every if "machine" in line}
    if len(machines) != 1:
        sys.exit(
            f"error: {lines} holds lines of {len(machines)} machines, versions or days; one was expected. "
            "Measure into one file on one machine, and again from the start after an upgrade."
        )
    least = min(line["measured"]["before"] for line in every if "measured" in line)
    for line in every:
        if "measured" in line:
            line["measured"] = net(line["measured"], least)
    note = (
        "Bytes. `held` is what earlier settings of the same process still held; it is subtracted from the other sizes."
    )
    report = {**json.loads(machines.pop()), "note": note, "settings": every}
    kept.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of lines to write, and to continue")
    parser.add_argument("--only", nargs="+", default=[""], help="settings whose name holds one of these words")
    parser.add_argument("--minutes", type=float, default=9, help="no setting is started after this; default 9")
    parser.add_argument("--rehearse", action="store_true", help="tiny dimensions on the CPU; no memory is measured")
    parser.add_argument("--to-json", nargs=2, type=Path, metavar=("LINES", "FILE"), help="write the kept file")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="print the names of the settings")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(campaign()))
        return 0
    if arguments.to_json:
        to_json(*arguments.to_json)
        return 0
    if arguments.out is None:
        parser.error("--out FILE is needed")
    if arguments.until:
        run(arguments.out, arguments.only, arguments.until, arguments.rehearse)
        return 0
    # In a process of its own: a CUDA error ends the process, and the settings after it are still measured.
    until = time.time() + 60 * arguments.minutes
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    while time.time() < until:
        child = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--until", str(until)])
        if child.returncode == 0:
            break
        now = arguments.out.with_suffix(".now")
        if not now.is_file():
            return child.returncode
        write(
            arguments.out, json.loads(now.read_text()) | {"error": f"process ended: {child.returncode}", "seconds": 0}
        )
        now.unlink()
    done = read(arguments.out)
    failed = [name for name, line in done.items() if "error" in line]
    if not arguments.rehearse:
        to_json(arguments.out, arguments.out.with_suffix(".json"))
    print(f"{len(done) - len(failed)} measured, {len(failed)} failed, {len(campaign()) - len(done)} not started")
    return int(len(done) == len(failed))


if __name__ == "__main__":
    sys.exit(main())
