"""Runs a recipe's train.py and says how much of one step rank 0's GPU spent in collectives; for several_gpus.py.

    COLLECTIVES=profile.json COLLECTIVES_STEP=13 accelerate launch --config_file ... scripts/collectives.py train.py ...

The file holds, in milliseconds of that step: `step_ms`, `busy_ms` (some kernel runs), `collectives_ms` (NCCL's kernels),
and `exposed_ms` (NCCL's kernels while no other kernel runs). A kernel that waits for another rank counts as running.
"""

import json
import os
import time
from pathlib import Path

import fsdp_on_cpu
import torch
from transformers import Trainer, TrainerCallback


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of spans (start, end), as spans in order that do not touch."""
    union = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def length(spans: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in merged(spans))


def summary(kernels: list[tuple[str, float, float]], step: float) -> dict[str, float]:
    """Milliseconds from kernels (name, start, end; all in milliseconds) and the seconds of the step."""
    nccl = [(start, end) for name, start, end in kernels if "nccl" in name.lower()]
    others = [(start, end) for name, start, end in kernels if "nccl" not in name.lower()]
    busy = length(nccl + others)
    figures = {
        "step_ms": step * 1000,
        "busy_ms": busy,
        "collectives_ms": length(nccl),
        "exposed_ms": busy - length(others),
    }
    return {name: round(value, 2) for name, value in figures.items()}


class Profile(TrainerCallback):
    """Profiles the step COLLECTIVES_STEP on rank 0."""

    def __init__(self):
        self.profiler, self.begun = None, 0.0

    def wanted(self, state) -> bool:
        return state.is_world_process_zero and state.global_step + 1 == int(os.environ["COLLECTIVES_STEP"])

    def on_step_begin(self, args, state, control, **_):
        if self.wanted(state):
            activity = torch.profiler.ProfilerActivity
            self.wait()
            self.profiler = torch.profiler.profile(
                activities=[activity.CUDA if torch.cuda.is_available() else activity.CPU]
            )
            self.profiler.start()
            self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        if self.profiler is None:
            return
        self.wait()
        seconds = time.perf_counter() - self.begun
        self.profiler.stop()
        kernels = [
            (event.name(), event.start_ns() / 1e6, (event.start_ns() + event.duration_ns()) / 1e6)
            for event in self.profiler.profiler.kineto_results.events()
            if str(event.device_type()).endswith("CUDA")
        ]
        Path(os.environ["COLLECTIVES"]).write_text(json.dumps(summary(kernels, seconds)))
        self.profiler = None

    def wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


_init = Trainer.__init__


def _init_and_profile(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    self.add_callback(Profile())


if __name__ == "__main__":
    Trainer.__init__ = _init_and_profile
    fsdp_on_cpu.run_wrapped()
