"""Runs a recipe's train.py as it is and writes what each rank holds at a step: bytes of weights, gradients, optimizer.

    accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 scripts/memory_record.py \
        recipes/llama-3.2-1b/train.py --use_cpu true ... --output_dir RUN

RUN/memory-<rank>.json; for tests of memory.py. Gradients are counted as the optimizer's step begins, the rest as it ends.
Bytes are those of the tensors' storages, each storage once.
"""

import json
import os
import runpy
import sys
from pathlib import Path

from accelerate.optimizer import AcceleratedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Trainer

MODEL = []


def held(*tensors) -> int:
    """Bytes of the storages behind `tensors`, each once; of a part of a storage, the bytes of all parts together."""
    whole, parts = {}, {}
    for t in (t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, Tensor)):
        place = t.untyped_storage().data_ptr()
        whole[place] = t.untyped_storage().nbytes()
        parts[place] = parts.get(place, set()) | {(t.data_ptr(), t.nbytes)}
    return sum(min(size, sum(nbytes for _, nbytes in parts[place])) for place, size in whole.items())


def states(optimizer) -> list:
    return [value for state in optimizer.state.values() for value in state.values() if value.ndim]


def _plain(optimizer) -> tuple[list, list, list]:
    parameters = list(MODEL[0].parameters())
    return parameters, [p.grad for p in parameters], states(optimizer.optimizer)


def _zero12(optimizer) -> tuple[list, list, list]:
    parameters = list(MODEL[0].parameters())
    averaged = [t for group in optimizer.averaged_gradients.values() for t in group or []]
    masters = optimizer.single_partition_of_fp32_groups
    return parameters, [*averaged, *(p.grad for p in parameters)], [*masters, *states(optimizer.optimizer)]


def _zero3(optimizer) -> tuple[list, list, list]:
    parameters = list(MODEL[0].parameters())
    persistent = [p.data for p in parameters if p.ds_persist]
    weights = [*(p.ds_tensor for p in parameters), *persistent]
    masters = optimizer.fp32_partitioned_groups_flat
    return weights, [optimizer.grad_partitions_flat_buffer], [*masters, *states(optimizer.optimizer)]


def _recording(step, parts):
    def recorded(self, *args, **kwargs):
        gradients = held(*parts(self)[1])
        result = step(self, *args, **kwargs)
        weights, _, optimizer = parts(self)
        report = {"weights": held(*weights), "gradients": gradients, "optimizer": held(*optimizer)}
        Path(OUTPUT, f"memory-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(report))
        return result

    return recorded


def _remember(init):
    def remembering(self, *args, **kwargs):
        init(self, *args, **kwargs)
        MODEL[:] = [self.model]

    return remembering


if __name__ == "__main__":
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    OUTPUT = sys.argv[sys.argv.index("--output_dir") + 1]
    Trainer.__init__ = _remember(Trainer.__init__)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        DeepSpeedZeroOptimizer.step = _recording(DeepSpeedZeroOptimizer.step, _zero12)
        DeepSpeedZeroOptimizer_Stage3.step = _recording(DeepSpeedZeroOptimizer_Stage3.step, _zero3)
    else:
        AcceleratedOptimizer.step = _recording(AcceleratedOptimizer.step, _plain)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        import fsdp_on_cpu

        fsdp_on_cpu.AcceleratorState.__init__ = fsdp_on_cpu._init_and_promote
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
