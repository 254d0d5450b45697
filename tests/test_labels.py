"""What each recipe trains on: the answers with their end of turn and nothing else, the same on every day of the year.

The rows go through train.py itself and SFTTrainer's own preparation; the trainer is caught before its first step.
"""

import json
import runpy
import sys
from datetime import datetime
from pathlib import Path

import datasets
import launching
import pytest
import tiny_model
import transformers.utils.chat_template_utils as templates
import trl
from jinja2 import TemplateError
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/train.py"))
FAMILY = {recipe: launching.model_family(ROOT / "recipes" / recipe) for recipe in RECIPES}
END = {"gpt-oss": "<|return|>", "llama": "<|eot_id|>", "llama-base": "<|eot_id|>", "olmo3": "<|endoftext|>"}
END |= {"qwen2": "<|im_end|>", "qwen3": "<|im_end|>", "qwen3_5": "<|im_end|>"}


class Caught(Exception):
    """Carries the trainer out of train.py."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: tiny_model.write_tiny_model(family, folder / family) for family in END}


def prepared(recipe, models, tmp_path, monkeypatch, run="run"):
    """The trainer of a recipe on tiny rows, ready for its first step, and the rows."""
    folder = ROOT / "recipes" / recipe
    rows = launching.tiny_rows(tmp_path / "rows.jsonl", folder)
    words = [
        "--use_cpu",
        "true",
        "--bf16",
        "false",
        "--dtype",
        "float32",
        "--eval_strategy",
        "no",
        "--max_length",
        "4096",
        "--packing",
        "false",
    ]
    words += [
        "--model_name_or_path",
        str(models[launching.model_family(folder, "config")]),
        "--dataset_name",
        str(rows),
    ]
    words += ["--output_dir", str(tmp_path / run)]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [str(folder / "train.py"), *words])
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    import keeper

    def catch(trainer):
        raise Caught(trainer)

    monkeypatch.setattr(keeper, "watch", catch)
    with pytest.raises(Caught) as caught:
        runpy.run_path(str(folder / "train.py"), run_name="__main__")
    return caught.value.args[0], [json.loads(line) for line in rows.read_text().splitlines()]


def labelled_parts(row):
    """Token ids of each labelled stretch of a prepared row."""
    parts, before = [], -100
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        if label != -100:
            assert label == token
            parts = [*parts, []] if before == -100 else parts
            parts[-1].append(token)
        before = label
    return parts


@pytest.mark.parametrize("recipe", RECIPES)
def test_labels_are_the_answers_with_their_end_of_turn(recipe, models, tmp_path, monkeypatch):
    trainer, rows = prepared(recipe, models, tmp_path, monkeypatch)
    settings = launching.read_config(ROOT / "recipes" / recipe, "config")
    tokenizer, family = trainer.processing_class, launching.model_family(ROOT / "recipes" / recipe, "config")
    assert len(trainer.train_dataset) == len(rows)
    for row, made in zip(rows, trainer.train_dataset, strict=True):
        parts = [tokenizer.decode(part) for part in labelled_parts(made)]
        if "schema_file" in settings:  # one answer: the target's JSON, keys in the schema's order
            schema = json.loads((ROOT / "recipes" / recipe / settings["schema_file"]).read_text())
            assert parts[0].endswith(END[family]) and len(parts) == 1
            answer = json.loads(parts[0].removesuffix(END[family]))
            assert [*answer] == [*schema["properties"]] and answer == json.loads(row["messages"][-1]["content"])
            continue
        answers = [message for message in row["messages"] if message["role"] == "assistant"]
        assert len(parts) == len(answers), parts
        for number, (part, message) in enumerate(zip(parts, answers, strict=True)):
            last = number == len(answers) - 1
            if family == "olmo3":
                assert part == message["content"] + (END[family] if last else "<|im_end|>")
            elif family == "gpt-oss":
                thought = (
                    ""
                    if not (last and "thinking" in message)
                    else (f"<|channel|>analysis<|message|>{message['thinking']}<|end|><|start|>assistant")
                )
                end = "<|return|>" if last else "<|end|>"
                assert part == f"{thought}<|channel|>final<|message|>{message['content']}{end}"
            else:
                assert part == message["content"] + END[family]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_prompt_of_inference_is_the_unlabelled_start_of_the_row(recipe, models, tmp_path, monkeypatch):
    trainer, rows = prepared(recipe, models, tmp_path, monkeypatch)
    settings = launching.read_config(ROOT / "recipes" / recipe, "config")
    # In use there is the stock template, with the date and the mode that the recipe pins; the recipe's where it pins
    # the date, and for a base model, which has none.
    stock = AutoTokenizer.from_pretrained(trainer.model.config._name_or_path)
    kwargs = dict(settings.get("chat_template_kwargs", {}))
    if stock.chat_template is None or "current_date" in kwargs:
        kwargs["chat_template"] = (ROOT / "recipes" / recipe / settings["chat_template_path"]).read_text()
    for row, made in zip(rows, trainer.train_dataset, strict=True):
        start = next(i for i, label in enumerate(made["labels"]) if label != -100)
        prompt = row["messages"][: [message["role"] for message in row["messages"]].index("assistant")]
        if "schema_file" in settings:
            import invoice

            schema = invoice.load_schema(ROOT / "recipes" / recipe / settings["schema_file"])
            prompt = invoice.prompt_messages(row["messages"][-2]["content"], schema)
        ids = stock.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **kwargs)
        assert ids == made["input_ids"][:start]


@pytest.fixture
def on(monkeypatch):
    """Sets the day that chat templates see."""
    datasets.disable_caching()  # prepared rows are cached by template and tokenizer, which do not change overnight

    def set_clock(year):
        clock = type("Clock", (datetime,), {"now": classmethod(lambda cls, tz=None: datetime(year, 1, 2))})
        monkeypatch.setattr(templates, "datetime", clock)

    yield set_clock
    datasets.enable_caching()


def test_stock_templates_print_the_clock(models, on):
    """The control of the next test: without the recipes' pins the day does enter."""
    for family in ("gpt-oss", "llama"):
        tokenizer, texts = AutoTokenizer.from_pretrained(models[family]), set()
        for year in (2026, 2031):
            on(year)
            texts.add(tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False))
        assert len(texts) == 2


def prints_the_clock(recipe: str) -> bool:
    """Whether a template of the recipe asks for the time: the model's own, or one in the folder."""
    texts = [tiny_model.stock_chat_template(FAMILY[recipe]) or ""]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "recipes" / recipe).glob("*.jinja")]
    return any("strftime_now" in text for text in texts)


@pytest.mark.parametrize("recipe", filter(prints_the_clock, RECIPES))
def test_the_clock_does_not_enter_the_rows(recipe, models, tmp_path, monkeypatch, on):
    made = []
    for year in (2026, 2031):
        on(year)
        trainer, _ = prepared(recipe, models, tmp_path, monkeypatch, f"run-{year}")
        made.append([*trainer.train_dataset["input_ids"]])
    assert made[0] == made[1]


TEMPLATES = sorted(path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").glob("*/*.jinja"))


@pytest.mark.parametrize("file", TEMPLATES, ids=str)
def test_training_templates_render_the_stock_text(file, models):
    family = launching.model_family(ROOT / "recipes" / file.parent)
    tokenizer = AutoTokenizer.from_pretrained(models[family])
    if tokenizer.chat_template is None:  # a base model: Llama 3's own
        tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "llama3.jinja").read_text()
    template = (ROOT / "recipes" / file).read_text(encoding="utf-8")
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "total"}}}
    ask, answer = {"role": "user", "content": "What? "}, {"role": "assistant", "content": " That. "}
    tool = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    for messages in (
        [ask, answer],
        [{"role": "system", "content": "Be short."}, ask, answer, ask, answer],
        [ask, answer | {"thinking": "Hm."}],
        *([] if family == "olmo3" else [[ask, *tool, answer]]),  # which refuses tools, see below
        [ask],
    ):
        for prompt in (False, True):
            texts = [
                tokenizer.apply_chat_template(messages, chat_template=one, tokenize=False, add_generation_prompt=prompt)
                for one in (None, template)
            ]
            assert texts[0] == texts[1]


def test_olmo_turns_are_those_of_the_published_model(models):
    """The text that transformers' own test of Olmo-3-7B-Instruct expects, and an answer; TRL ships no such template."""
    tokenizer = AutoTokenizer.from_pretrained(models["olmo3"])
    template = (ROOT / "recipes" / "olmo-3-7b" / "olmo3.jinja").read_text(encoding="utf-8")
    ask, answer = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}
    text = tokenizer.apply_chat_template([ask, answer, ask, answer], chat_template=template, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful function-calling AI assistant. You do not currently have access to any "
        "functions. <functions></functions><|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nI."
        "<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nI.<|endoftext|>"
    )
    with pytest.raises(TemplateError, match="tools"):
        tool = {"role": "tool", "content": "5"}
        tokenizer.apply_chat_template([ask, tool], chat_template=template, tokenize=False)


def test_local_files_are_the_splits_whatever_the_hub_calls_them(tmp_path, monkeypatch):
    """train_sft of the Hub's dataset is, with rows of one's own, the file, or the folder's train file."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "qwen3.8-27b"))
    import inputs

    for name in ("train.jsonl", "test-1.jsonl"):
        (tmp_path / name).touch()

    def found(name, split):
        return [path.name for path in inputs.local_files(str(tmp_path / name), split)]

    assert found("", "train_sft") == found("", "train") == found("train.jsonl", "train_sft") == ["train.jsonl"]
    assert found("", "test_sft") == found("", "test") == ["test-1.jsonl"]
    assert found("train.jsonl", "test_sft") == found("", "validation") == []
    (tmp_path / "train_sft.jsonl").touch()
    assert found("", "train_sft") == ["train_sft.jsonl"]
