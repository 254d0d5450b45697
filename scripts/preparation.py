"""Run a recipe's own train.py up to its first step, without weights and without a GPU, and hand over its trainer.

inspect_data.py and prepare_data.py stand on this: the rows that come out are those that training would see, because the
recipe's reader and SFTTrainer made them. The model is a tiny random one, built from the config of the model that the
recipe names; only its config and tokenizer are read.
"""

import importlib
import os
import re
import runpy
import sys
import tempfile
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
import transformers
from bars import quiet_libraries
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, Trainer
from trl import SFTTrainer

LAUNCHER = re.compile("RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|ACCELERATE_|FSDP_|TORCHELASTIC_")
ON_CPU = (None, "eager", "sdpa")  # attention that the stand-in can run
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


class PreparationError(Exception):
    """Why a recipe's rows cannot be prepared, in one paragraph."""


class _Caught(BaseException):
    """Carries the trainer out of train.py, past any `except Exception`."""


@dataclass
class Prepared:
    """What train.py had in hand when it was about to train.

    trainer: an SFTTrainer with its datasets and collator; its model is the stand-in. model_name: the folder or Hub name
    that was asked for. attention: the implementation asked for, None for the model's default. rows: training and
    evaluation rows as the trainer was given them, before it rendered them. key: what the preparation depends on, and
    source: names and files of the rows; empty for a recipe without load_rows. counts: what became of the rows, by split.
    """

    trainer: SFTTrainer
    model_name: str = ""
    attention: str | None = None
    rows: tuple[Dataset | None, Dataset | None] = (None, None)
    key: dict[str, str] = field(default_factory=dict)
    source: dict = field(default_factory=dict)
    counts: dict = field(default_factory=dict)


def stand_in(config, attention: str | None = None) -> torch.nn.Module:
    """A random float32 model of `config`'s family with two thin layers and the whole vocabulary, in eval mode.

    Attention that needs a GPU becomes eager. Where the family does not allow these sizes the model has its own and
    lies on the meta device, without memory.
    """
    for name, size in SMALL.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(size, getattr(config, name)))
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    options = {"dtype": torch.float32, "attn_implementation": attention if attention in ON_CPU else "eager"}
    try:
        return AutoModelForCausalLM.from_config(config, **options).eval()
    except (ValueError, RuntimeError):
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, **options).eval()


def _choose_attention(speed: ModuleType | None, script_args, training_args, model_args, recipe_args) -> None:
    """Of keeper.open_run what decides the rows: with some attention, packing is switched off."""
    if speed is not None:
        config = AutoConfig.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
        config, asked = config.get_text_config(), model_args.attn_implementation
        model_args.attn_implementation = speed.choose_attention(config, training_args, asked)


def _note_source(inputs: ModuleType, load_rows, asked: dict, script_args, training_args, recipe_args, tokenizer, *rest):
    """The recipe's load_rows; before it, what the rows depend on is kept in `asked`."""
    template = inputs.template_of(training_args, tokenizer)
    asked["key"] = inputs.prepared.key(training_args, recipe_args, tokenizer, template)
    name, files = script_args.dataset_name, []
    if os.path.exists(name) and not inputs.prepared.is_prepared(name):
        files = inputs.local_files(name, script_args.dataset_train_split)
        if training_args.eval_strategy != "no" and recipe_args.eval_fraction == 0:
            files += inputs.local_files(name, script_args.dataset_test_split)
    digests = {str(path.absolute()): inputs.prepared.file_digest(path) for path in files}
    asked["source"] = {"dataset_name": name, "revision": recipe_args.dataset_revision, "files": digests}
    return load_rows(script_args, training_args, recipe_args, tokenizer, *rest)


def prepare(folder: str | Path, words: list[str], first: int | None = None) -> Prepared:
    """Run `folder`/train.py with the command-line `words` until it would train.

    first: read only so many rows of each split. Nothing is written but the cache of the datasets library. Raises
    PreparationError for what train.py itself would refuse.
    """
    folder = Path(folder).resolve()
    if not (folder / "train.py").is_file():
        raise PreparationError(f"{folder} holds no train.py, so it is no recipe folder.")
    quiet_libraries()
    asked = {}

    def load(cls, name, *_, **kwargs):
        asked.update(model_name=str(name), attention=kwargs.get("attn_implementation"))
        config = AutoConfig.from_pretrained(name, revision=kwargs.get("revision")).get_text_config()
        model = stand_in(config, asked["attention"])
        with suppress(OSError):  # a folder without one: the config's own ids stay
            model.generation_config = GenerationConfig.from_pretrained(name, revision=kwargs.get("revision"))
        return model

    def catch(trainer, *_, **__):
        raise _Caught(trainer)

    build = SFTTrainer.__init__

    def build_plain(self, *args, peft_config=None, quantization_config=None, **kwargs):
        asked["rows"] = kwargs.get("train_dataset"), kwargs.get("eval_dataset")
        build(self, *args, **kwargs)  # an adapter changes no row

    files = {path.stem for path in folder.glob("*.py")}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        stack.enter_context(patch.dict(os.environ))
        for name in [name for name in os.environ if LAUNCHER.match(name)]:
            del os.environ[name]
        own = ["--use_cpu", "true", "--report_to", "none", "--push_to_hub", "false", "--output_dir", scratch]
        stack.enter_context(patch.object(sys, "argv", [str(folder / "train.py"), *words, *own]))
        stack.enter_context(patch.object(sys, "path", [str(folder), *sys.path]))
        stack.enter_context(patch.dict(sys.modules))  # another recipe's modules may have the same names
        for name in files & sys.modules.keys():
            del sys.modules[name]
        modules = {
            name: importlib.import_module(name) for name in ("guard", "inputs", "keeper", "speed") if name in files
        }
        if "guard" in modules:  # the launch is not what is looked at; the arguments stay as strict as ever
            replace = {"check_launch": lambda parser, script, _: modules["inputs"].strict_arguments(parser, script)}
            stack.enter_context(patch.multiple(modules["guard"], **replace))
        if "keeper" in modules:
            replace = {"open_run": partial(_choose_attention, modules.get("speed")), "watch": lambda *_: None}
            stack.enter_context(patch.multiple(modules["keeper"], **replace))
        if inputs := modules.get("inputs"):
            if not hasattr(inputs, "FIRST"):
                raise PreparationError(
                    f"{folder}/inputs.py is of an older cookbook: run scripts/sync_guard.py {folder}."
                )
            stack.enter_context(patch.object(inputs, "FIRST", first))
            stack.enter_context(
                patch.object(inputs, "load_rows", partial(_note_source, inputs, inputs.load_rows, asked))
            )
        elif first is not None:
            raise PreparationError(f"{folder} has no inputs.py, so only all of its rows can be read.")
        for cls in (transformers.PreTrainedModel, AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
            stack.enter_context(patch.object(cls, "from_pretrained", classmethod(load)))
        stack.enter_context(patch.object(SFTTrainer, "__init__", build_plain))
        stack.enter_context(patch.object(Trainer, "train", catch))
        stack.enter_context(redirect_stdout(sys.stderr))
        try:
            runpy.run_path(str(folder / "train.py"), run_name="__main__")
        except _Caught as caught:
            trainer = caught.args[0]
        except (ValueError, OSError, ImportError, SystemExit) as error:
            raise PreparationError(" ".join(str(error).split())) from error
        else:
            raise PreparationError(f"{folder}/train.py ended without a training.")
        counts = dict(getattr(inputs, "COUNTS", {}))
    if not isinstance(trainer.train_dataset, Dataset):
        raise PreparationError("streamed rows have no length and no order to look at: give a dataset that is not one.")
    return Prepared(trainer, counts=counts, **asked)
