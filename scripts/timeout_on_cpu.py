"""Runs a recipe's train.py on CPU processes with a collective timeout, for the engine campaign.

    COLLECTIVE_TIMEOUT=15 accelerate launch ... scripts/timeout_on_cpu.py recipes/llama-3.2-1b/train.py --use_cpu true ...

On GPUs the recipe's `ddp_timeout` (seconds) is the timeout of every collective. With `use_cpu` transformers 5.24 does not
hand it on (`TrainingArguments._setup_devices`), and gloo waits half an hour for a machine that cannot be reached.
"""

import functools
import os
import runpy
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed

if __name__ == "__main__":
    seconds = timedelta(seconds=float(os.environ["COLLECTIVE_TIMEOUT"]))
    torch.distributed.init_process_group = functools.partial(torch.distributed.init_process_group, timeout=seconds)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
