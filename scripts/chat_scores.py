"""Held-out loss, perplexity and answers of a run, base model and tuned one, into RUN/scores.json.

    python scripts/chat_scores.py recipes/llama-3.2-1b/run
    accelerate launch --num_processes 8 scripts/chat_scores.py recipes/gpt-oss-20b/run
    python scripts/chat_scores.py --prompts mine.jsonl --max_new_tokens 256 RUN --use_cpu true

RUN is the output_dir of any recipe's train.py. Start it in the folder that train.py was started in. The rows are those of
RUN/eval_rows.json, prepared by the recipe's own train.py up to its trainer, so template, mode, labels and lengths are
those of the training; only labelled tokens count. The loss is the mean over these tokens of all rows, each row by
itself: it depends on neither batch size nor number of processes. Its 95 % interval is a bootstrap over rows. Answers are
greedy, in the model's own template, to the prompts of scripts/chat_prompts.jsonl. Before training ends, the base model
alone is scored; it is not scored again.

One process, or DDP with the whole model on each GPU. The flags of this program stand before RUN; what follows RUN goes
to train.py, such as --dataset_num_proc 8.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import math
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from bars import track
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

PROMPTS = Path(__file__).with_name("chat_prompts.jsonl")
LABEL = "held-out loss"
RESAMPLES = 2000  # bootstrap samples of whole rows, for the 95 % intervals


class Prepared(Exception):
    """Carries the trainer out of train.py, before a step is taken."""


def prepare(record: dict, extra: list[str], scratch: str):
    """(trainer, model arguments, recipe arguments) of the run's train.py, stopped where the trainer is ready.

    record: run.json. extra: arguments on top of the run's. scratch: a folder in place of the run's. Raises ValueError
    when the recipe is not there.
    """
    script = Path(record["command"][0]).resolve()
    if not script.is_file():
        raise ValueError(
            f"{script}: the recipe of this run is not there. Start in the folder that train.py was started in."
        )
    sys.path.insert(0, str(script.parent))
    guard, keeper, train = (importlib.import_module(name) for name in ("guard", "keeper", "train"))
    strategy = guard.declared_strategy()
    if strategy not in ("single", "ddp"):
        raise ValueError(f"it was launched under {strategy}; use single.yaml, ddp.yaml or no launch file.")
    arguments = []

    def stop(trainer):
        raise Prepared(trainer)

    guard.check_launch = lambda *_: None
    keeper.open_run = lambda *every: arguments.extend(every)
    keeper.watch = stop
    words = [*record["command"][1:], "--output_dir", scratch, "--report_to", "none", "--push_to_hub", "false", *extra]
    if not is_prepared(words):  # rows stay apart: packed ones would share a forward pass
        words += ["--packing", "false", "--eval_packing", "false", "--padding_free", "false"]
    sys.argv = [str(script), *words]
    try:
        train.main()
    except Prepared as prepared:
        trainer = prepared.args[0]
        if trainer.eval_dataset is not None and "seq_lengths" in trainer.eval_dataset.column_names:
            raise ValueError(
                "its rows were prepared and packed by scripts/prepare_data.py. Name the rows that they were made of: "
                "chat_scores.py RUN --dataset_name ROWS"
            ) from None
        return trainer, arguments[2], arguments[3]
    raise ValueError(f"{script} built no trainer")


def is_prepared(words: list[str]) -> bool:
    """Whether the last --dataset_name is a folder of scripts/prepare_data.py, whose packing is decided."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--dataset_name", default="")
    return Path(parser.parse_known_args(words)[0].dataset_name, "prepared.json").is_file()


def held_out_loss(model, trainer, state: PartialState) -> dict:
    """{"loss", "perplexity", their intervals, "tokens", "rows"}: of the labelled tokens of all rows, in nats a token."""
    rows, found = trainer.eval_dataset, []
    mine = range(state.process_index, len(rows), state.num_processes)
    autocast = torch.autocast(state.device.type, torch.bfloat16, enabled=trainer.args.bf16)
    for index in track(mine, "held-out rows", shown=state.is_main_process):
        ids, labels = (torch.tensor(rows[index][key], device=state.device) for key in ("input_ids", "labels"))
        targets = labels[1:]  # the token at place i is predicted from the logits at i - 1
        places = (targets != -100).nonzero()[:, 0]
        with torch.inference_mode(), autocast:
            logits = model(input_ids=ids[None], logits_to_keep=places).logits[0]  # (labelled, vocabulary)
        losses = torch.nn.functional.cross_entropy(logits.float(), targets[places], reduction="none")
        found.append((index, losses.double().sum().item(), len(places)))
    sums, counts = np.array([row[1:] for row in sorted(gather_object(found))]).T
    loss = sums.sum() / counts.sum()
    drawn = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))  # whole rows, with replacement
    low, high = np.percentile(sums[drawn].sum(1) / counts[drawn].sum(1), [2.5, 97.5])
    return {
        "loss": float(loss),
        "loss_interval": [float(low), float(high)],
        "perplexity": math.exp(loss),
        "perplexity_interval": [math.exp(low), math.exp(high)],
        "tokens": int(counts.sum()),
        "rows": len(rows),
    }


def answers(model, tokenizer, prompts: list[dict], template_kwargs: dict, limit: int, bf16: bool, state) -> list[dict]:
    """Greedy answers [{"id", "prompt", "answer", "limit_hit"}], special tokens shown but for the one that ends a turn."""
    stop = model.generation_config.eos_token_id
    stop = list(dict.fromkeys([tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])]))
    stop = [token for token in stop if token is not None]
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=limit, eos_token_id=stop, pad_token_id=tokenizer.pad_token_id or stop[0]
    )
    found = []
    mine = range(state.process_index, len(prompts), state.num_processes)
    for number in track(mine, "answers", shown=state.is_main_process):
        prompt = prompts[number]
        messages = prompt.get("messages") or [{"role": "user", "content": prompt["prompt"]}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt", **template_kwargs
        ).to(state.device)
        with torch.inference_mode(), torch.autocast(state.device.type, torch.bfloat16, enabled=bf16):
            output = model.generate(**inputs, generation_config=settings, use_cache=True)
        new = output[0, inputs["input_ids"].shape[1] :].tolist()
        end = next((place for place, token in enumerate(new) if token in stop), None)
        row = {"id": prompt["id"], "prompt": messages[-1]["content"], "answer": tokenizer.decode(new[:end])}
        found.append((number, row | {"limit_hit": end is None}))
    return [row for _, row in sorted(gather_object(found), key=lambda pair: pair[0])]


@contextlib.contextmanager
def base_weights(model):
    """Within it, the model is without its adapter, where it has one."""
    with model.disable_adapter() if hasattr(model, "disable_adapter") else contextlib.nullcontext():
        yield


def tuned_model(trainer, model_args, final: Path):
    """The run's result: its adapter in the model that the trainer holds, or a model of its own."""
    if hasattr(trainer.model, "peft_config"):
        import peft

        loaded = peft.set_peft_model_state_dict(trainer.model, peft.load_peft_weights(str(final), device="cpu"))
        if loaded.unexpected_keys:
            raise ValueError(f"{final} holds weights that this model has no place for: {loaded.unexpected_keys[:3]}")
        return trainer.model
    # The base's memory, before the tuned model needs its own.
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = None
    attention = {"attn_implementation": model_args.attn_implementation}
    model = AutoModelForCausalLM.from_pretrained(final, dtype=model_args.dtype, **attention)
    return model.to(trainer.args.device)


def score(arguments: argparse.Namespace, extra: list[str]) -> dict:
    """Score the run; returns {"base": ..., "tuned": ...} on every rank, written by rank 0. Raises ValueError."""
    folder = arguments.run
    if not (folder / "run.json").is_file():
        raise ValueError(f"{folder} is no run folder: it has no run.json. Give the output_dir of train.py.")
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    listed = folder / "eval_rows.json"
    if not listed.is_file():
        raise ValueError(f"{folder} held out no rows (eval_rows.json). Train with an eval_strategy other than `no`.")
    if not torch.cuda.is_available():
        extra = [*extra, "--use_cpu", "true"]
    prompts = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as scratch:
        trainer, model_args, recipe_args = prepare(record, extra, scratch)
        state = PartialState()
        here = Path(scratch, "eval_rows.json")
        numbers = gather_object([here.read_text() if here.is_file() else ""])
        if json.loads(listed.read_text()) != json.loads(next(filter(None, numbers), "null")):
            raise ValueError(
                f"{listed} names other rows than the data gives now. Give the data that the run was trained on."
            )
    rows = trainer.eval_dataset
    digest = hashlib.sha256(json.dumps([[row["input_ids"], row["labels"]] for row in rows]).encode()).hexdigest()[:12]
    settings = {
        "model": model_args.model_name_or_path,
        "revision": model_args.model_revision,
        "rows_sha256": digest,
        "prompts_sha256": hashlib.sha256(arguments.prompts.read_bytes()).hexdigest()[:12],
        "max_new_tokens": arguments.max_new_tokens,
        "bf16": trainer.args.bf16,
        "chat_template_kwargs": recipe_args.chat_template_kwargs,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "peft")},
    }
    final = folder / "final"
    file = folder / "scores.json"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    result, earlier = {}, kept.get(LABEL, {}).get("base", {})

    def measure(model, source: str) -> dict:
        model.eval()
        tokenizer = AutoTokenizer.from_pretrained(source)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = trainer.processing_class.pad_token
        return {
            **settings,
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name() if state.device.type == "cuda" else state.device.type,
            **held_out_loss(model, trainer, state),
            "answers": answers(
                model,
                tokenizer,
                prompts,
                recipe_args.chat_template_kwargs,
                arguments.max_new_tokens,
                trainer.args.bf16,
                state,
            ),
        }

    if {key: earlier.get(key) for key in settings} == settings:
        result["base"] = earlier
    else:
        with base_weights(trainer.model):
            result["base"] = measure(trainer.model, model_args.model_name_or_path)
    if record["outcome"] == "done" and final.is_dir():
        result["tuned"] = measure(tuned_model(trainer, model_args, final), str(final)) | {"model": str(final)}
    if state.is_main_process:
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(kept | {LABEL: result}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, file)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir of a recipe's train.py")
    parser.add_argument("train_arguments", nargs=argparse.REMAINDER, help="arguments for train.py, on top of the run's")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON lines of `id` and `prompt` or `messages`")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="output limit in tokens (%(default)s)")
    arguments = parser.parse_args()
    try:
        result = score(arguments, arguments.train_arguments)
    except (ValueError, OSError) as error:
        print(f"chat_scores.py, rank {os.environ.get('RANK', '0')}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if PartialState().is_main_process:
        for label, scores in result.items():
            low, high = scores["loss_interval"]
            print(
                f"{label}: loss {scores['loss']:.4f} (95 %: {low:.4f} to {high:.4f}), perplexity "
                f"{scores['perplexity']:.3f} over {scores['tokens']} labelled tokens of {scores['rows']} held-out rows"
            )
        for number, row in enumerate(result["base"]["answers"]):
            print(f"\n{row['id']}: {row['prompt']}")
            for label, scores in result.items():
                print(f"  {label:6} {scores['answers'][number]['answer']!r}")
        print(f"\n{arguments.run / 'scores.json'}")
    PartialState().destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
