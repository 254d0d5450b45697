"""One launch line, read as accelerate and the recipe read it; no process is started and nothing is trained.

The words before the script go through accelerate's own launch parser and its own merging of the launch file; the words
after it through the recipe's own `inputs.py` and TRL's parser with the dataclasses that train.py names. What cannot be
read becomes a finding, and the rest is read on, so that one call shows all mistakes.
"""

import argparse
import ast
import contextlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import yaml

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "zero3_offload")


@dataclass
class Gpu:
    """What a GPU offers: memory in bytes, dense bf16 TFLOP/s (fp16 where there is no bf16), compute capability."""

    bytes: int
    tflops: float
    capability: tuple[int, int]


def _gpu(mib: int, tflops: float, major: int, minor: int) -> Gpu:
    return Gpu(mib * 2**20, tflops, (major, minor))


# Memory as nvidia-smi prints it, in MiB; dense tensor-core rates of NVIDIA's data sheets, SXM where there are two.
GPUS = {
    "v100-16gb": _gpu(16384, 125, 7, 0),
    "v100-32gb": _gpu(32768, 125, 7, 0),
    "t4-16gb": _gpu(15360, 65, 7, 5),
    "a10-24gb": _gpu(23028, 125, 8, 6),
    "a10g-24gb": _gpu(23028, 70, 8, 6),
    "rtx3090-24gb": _gpu(24576, 71, 8, 6),
    "a6000-48gb": _gpu(49140, 155, 8, 6),
    "a100-40gb": _gpu(40960, 312, 8, 0),
    "a100-80gb": _gpu(81920, 312, 8, 0),
    "l4-24gb": _gpu(23034, 121, 8, 9),
    "rtx4090-24gb": _gpu(24564, 165, 8, 9),
    "l40s-48gb": _gpu(46068, 362, 8, 9),
    "h100-80gb": _gpu(81559, 989, 9, 0),
    "h100-94gb": _gpu(95830, 835, 9, 0),
    "gh200-96gb": _gpu(97871, 990, 9, 0),
    "h200-141gb": _gpu(143771, 989, 9, 0),
    "b200-180gb": _gpu(183359, 2250, 10, 0),
    "rtx5090-32gb": _gpu(32607, 209, 12, 0),
}


@dataclass
class Finding:
    """One thing to fix. rule: the stable name of the check. write: the line to write in place of what stands there."""

    rule: str
    severity: str  # "error" or "warning"
    file: str
    key: str
    why: str
    write: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.file}, {self.key}: {self.why} Write: {self.write}  [{self.rule}]"


@dataclass
class Launch:
    """A launch line that was read. `None` stands for what could not be read; its finding says why.

    accelerate: what accelerate's launcher would run with, after its merging. launch_keys, deepspeed, config_keys: the
    three files as they stand. strategies: the launch files that train.py names. model_config: a transformers config,
    and model_source where it comes from. gpu_bytes and host_ram: bytes of one GPU and of one machine.
    """

    words: list[str]
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    accelerate: argparse.Namespace | None = None
    launch_file: Path | None = None
    launch_keys: dict = field(default_factory=dict)
    deepspeed_file: Path | None = None
    deepspeed: dict | None = None
    strategy: str = "single"
    world: int = 1
    gpus_per_node: int = 1
    nodes: int = 1
    script: Path | None = None
    recipe: Path | None = None
    strategies: tuple[str, ...] = STRATEGIES
    config_file: Path | None = None
    config_keys: dict = field(default_factory=dict)
    flags: dict = field(default_factory=dict)
    script_args: object = None
    training_args: object = None
    model_args: object = None
    recipe_args: object = None
    model_config: object = None
    model_source: str = ""
    gpu: str | None = None
    gpu_bytes: int | None = None
    gpu_facts: Gpu | None = None
    host_ram: int | None = None
    elsewhere: bool = False  # --gpu was given: the line is for another machine
    cpu: bool = False  # --use_cpu true

    @property
    def is_deepspeed(self) -> bool:
        return self.strategy.startswith("zero")

    def add(self, rule: str, file: object, key: str, why: str, write: str, severity: str = "error") -> None:
        self.findings.append(Finding(rule, severity, str(file), key, why, write))

    def warn(self, rule: str, file: object, key: str, why: str, write: str) -> None:
        self.add(rule, file, key, why, write, "warning")

    def where(self, key: str) -> str:
        """The file to name for an argument of the recipe: the command line wins over the config file."""
        return "command line" if key in self.flags else str(self.config_file or "command line")

    def line(self, key: str, value: object) -> str:
        """How to write an argument of the recipe where it stands now."""
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        return f"--{key} {text}" if key in self.flags else f"{key}: {text}"

    def as_dict(self) -> dict:
        """What `--json` prints of the line itself."""
        keys = ("strategy", "world", "gpus_per_node", "nodes", "gpu", "model_source", "notes")
        facts = {key: getattr(self, key) for key in keys}
        return facts | {
            "launch_file": str(self.launch_file),
            "recipe": str(self.recipe),
            "config_file": str(self.config_file),
            "findings": [asdict(finding) for finding in self.findings],
        }
