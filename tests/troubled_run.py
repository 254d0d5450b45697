"""Runs a recipe's train.py with one trouble built in, named by the variable TROUBLE; test_run_safety.py starts it.

nan: rank 1's loss is not a number at its third step. unlabelled: no token of the second step carries a label.
trackers: a tracker and an upload that fail whenever they are called, and a tracker that cannot be made.
"""

import os
import runpy
import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, integrations
from trl import SFTTrainer


def nan() -> None:
    compute_loss = SFTTrainer.compute_loss

    def poisoned(self, *args, **kwargs):
        loss = compute_loss(self, *args, **kwargs)
        poison = torch.nan if self.state.global_step == 2 and self.args.process_index == 1 else 1
        return (loss[0] * poison, *loss[1:]) if isinstance(loss, tuple) else loss * poison

    SFTTrainer.compute_loss = poisoned


def unlabelled() -> None:
    get_batch_samples = SFTTrainer.get_batch_samples

    def without_labels(self, *args, **kwargs):
        batches, items = get_batch_samples(self, *args, **kwargs)
        if self.state.global_step == 1:
            for batch in batches:
                batch["labels"].fill_(-100)
            items = items * 0
        return batches, items

    SFTTrainer.get_batch_samples = without_labels


def trackers() -> None:
    class Broken(TrainerCallback):
        def on_train_begin(self, *_, **__):
            raise ConnectionError("the tracker is down")

        on_log = on_save = on_train_end = on_train_begin

    def push(self, folder):
        raise ConnectionError("the hub is down")

    class Absent(TrainerCallback):
        def __init__(self):
            raise RuntimeError("the package is not installed")

    integrations.INTEGRATION_TO_CALLBACK |= {"broken": Broken, "absent": Absent}
    Trainer._push_from_checkpoint = push
    save = Trainer._save_checkpoint

    def save_and_push(self, *args, **kwargs):
        self.args.push_to_hub = True
        save(self, *args, **kwargs)
        self.args.push_to_hub = False

    Trainer._save_checkpoint = save_and_push


if __name__ == "__main__":
    {"nan": nan, "unlabelled": unlabelled, "trackers": trackers}[os.environ["TROUBLE"]]()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
