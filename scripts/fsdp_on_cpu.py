"""Runs a recipe's train.py with real FSDP2 on CPU processes, for tests: accelerate shards only on GPU-like backends.

    accelerate launch --config_file accelerate_configs/fsdp.yaml --num_processes 2 scripts/fsdp_on_cpu.py \
        recipes/gpt-oss-120b/train.py --use_cpu true ...

On a CPU an FSDP launch file is silently plain data parallel: `AcceleratorState.__init__` (accelerate 1.15) promotes to
FSDP only from MULTI_GPU and its like. This wrapper makes the same promotion from MULTI_CPU.

It also keeps bitsandbytes 0.50 from repacking 4-bit weights in an evaluation, which it does on CPUs with AVX512-BF16 alone:
shards gathered anew are not repacked but would be read as such, and training would go on with other weights.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

_init = AcceleratorState.__init__


def _init_and_promote(self, *args, fsdp_plugin=None, **kwargs):
    _init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def run_wrapped() -> None:
    """Run the program named by the first argument with the arguments after it, as if it had been started itself."""
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    AcceleratorState.__init__ = _init_and_promote
    if importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes.nn.modules

        bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
    run_wrapped()
