"""inspect_data.py shows what a recipe would train on: numbers that are right, and a failing check for each live trap.

Vocabularies are the published ones (scripts/real_tokenizer.py, from the package quicktok-v1), the recipes are as shipped or
copied with one edit.
"""

import json
import os
import random
import re
import shutil
import sys
import unicodedata
from pathlib import Path

import inspect_data
import launching
import numpy as np
import preparation
import pytest
import quicktok
import real_tokenizer
import tiny_model
from datasets.utils.logging import disable_progress_bar
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
DATA = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="the sample data are not beside the repository (../shared/data)"
)
disable_progress_bar()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Folders with the published vocabularies, by family."""
    folder = tmp_path_factory.mktemp("vocabularies")
    return {family: real_tokenizer.write(family, folder / family) for family in real_tokenizer.FILES}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: tiny_model.write_tiny_model(family, folder / family) for family in tiny_model.FAMILIES}


@pytest.fixture(scope="module")
def look(tiny, tmp_path_factory):
    """Inspect `recipe` (a name, or a copied folder) on `rows` (a list, or a path) with more arguments."""

    def run(recipe, rows, *words, models=tiny, **options):
        folder = RECIPES / recipe if isinstance(recipe, str) else recipe
        if isinstance(rows, list):
            path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            rows = path
        words = [
            "--model_name_or_path",
            str(models[launching.model_family(folder)]),
            "--dataset_name",
            str(rows),
            *words,
        ]
        return inspect_data.inspect(folder, words, **options)

    return run


def failed(report):
    return {check.name: check.detail for check in report.checks if check.ok is False}


def chat(question, answer, **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]}


def chats(count=30, **more):
    draw = random.Random(0)
    words = [" ".join(draw.choices(launching.WORDS, k=draw.randint(1, 40))) for _ in range(2 * count)]
    return [chat(f"{n}: {words[2 * n]}?", words[2 * n + 1], **more) for n in range(count)]


@pytest.mark.parametrize(
    ("family", "encoding"), [("llama", "llama3"), ("qwen3", "qwen3"), ("gpt-oss", "o200k_harmony")]
)
def test_the_vocabularies_give_the_published_ids(family, encoding, published):
    tokenizer, draw = AutoTokenizer.from_pretrained(published[family]), random.Random(0)
    texts = [
        "Total: RM 1,234.50\n\n  DATE 25/12/2018",
        "it's naïve, wasn't it? 東京 ภาษา हिन्दी 🎉\r\n\tx = [1]; Ünïcödé'S",
    ]
    letters = [chr(code) for code in range(32, 0x3000) if unicodedata.category(chr(code))[0] in "LNPZ"]
    texts += ["".join(draw.choices(letters, k=60)) for _ in range(300)]
    texts = [unicodedata.normalize("NFC", text) for text in texts]
    exact = quicktok.get_encoding(encoding)
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False) == [*map(int, exact.encode_ordinary(text))], text


@pytest.mark.parametrize("recipe", sorted(path.parent.name for path in RECIPES.glob("*/train.py")))
def test_recipes_pass_on_the_form_of_their_own_data(recipe, look, published, tiny, tmp_path):
    rows = launching.tiny_rows(tmp_path / "rows.jsonl", RECIPES / recipe)
    family = launching.model_family(RECIPES / recipe)
    report = look(recipe, rows, models=published if family in published else tiny)
    assert not failed(report) and report.train.documents + report.eval.documents == 24
    made = {check.name for check in report.checks if check.ok}
    assert made >= {
        "no row is lost in the trainer",
        "the stop token is labelled",
        "the pad token is not a stop token",
        "the label is the answer and its end of turn",
        "the prompt of inference is the start of the row",
        "reasoning is neither lost nor invented",
        "no date of the day",
    }
    thinking_off = "no think tags where thinking is off"
    assert (thinking_off in made) == recipe.startswith("qwen3")


@needs_data
@pytest.mark.parametrize(
    ("recipe", "data"),
    [
        ("llama-3.2-1b", "oasst-en"),
        ("llama-3.2-1b", "self-instruct-human"),
        ("gpt-oss-20b", "gsm8k"),
        ("gpt-oss-20b", "mgsm"),
    ],
)
def test_recipes_pass_on_chats_that_people_wrote(recipe, data, look, published):
    report = look(recipe, DATA / data, sample=60, models=published)
    assert not failed(report) and report.counts["training"]["read"] == 60


@needs_data
def test_receipts_pass_and_their_near_duplicates_are_counted(look, published):
    words = ["--schema_file", str(RECIPES / "qwen3-8b-invoice/schema_receipt.json"), "--text_column", "text"]
    words += ["--target_column", "entities", "--eval_fraction", "0", "--max_length", "4096"]
    report = look("qwen3-8b-invoice", DATA / "sroie", *words, models=published)
    assert not failed(report)
    listed = json.loads((DATA / "sroie" / "near_duplicates.json").read_text())["pairs_test_train"]
    found = report.duplicates
    # The published list compares whole receipts; here the words that all prompts share are left out.
    assert found.looked_at == 174 and found.equal == 0
    assert 8 <= found.near <= len({pair[0] for pair in listed})
    files = [(DATA / "sroie" / f"{name}.jsonl").read_text(encoding="utf-8") for name in ("test", "train")]
    ids = [[json.loads(line)["id"] for line in file.splitlines()] for file in files]
    assert {(ids[0][a], ids[1][b]) for a, b, _ in found.pairs} <= {(a, b) for a, b, _ in listed}


@needs_data
def test_reasoning_that_the_template_drops_is_found(look):
    detail = failed(look("llama-3.2-1b", DATA / "gsm8k", sample=30))
    assert [*detail] == ["reasoning is neither lost nor invented"]
    assert "of the last answer is not in the text" in detail.popitem()[1]


def test_the_numbers_are_those_of_the_rows(look, tiny):
    rows = chats(60)
    report = look("llama-3.2-1b", rows, "--eval_strategy", "no", "--packing", "false", show=3)
    tokenizer = AutoTokenizer.from_pretrained(tiny["llama"])
    texts = [
        tokenizer.apply_chat_template(row["messages"], date_string="26 Jul 2024", return_dict=False) for row in rows
    ]
    lengths = np.array(sorted(map(len, texts)))
    assert report.train.tokens == lengths.sum() and report.train.documents == report.train.rows == 60
    answers = [tokenizer(row["messages"][1]["content"], add_special_tokens=False)["input_ids"] for row in rows]
    assert report.train.labelled == sum(len(answer) + 1 for answer in answers)
    assert (np.repeat(np.arange(len(report.train.lengths)), report.train.lengths) == lengths).all()
    for share in (0.5, 0.9, 0.99):
        assert report.train.percentile(share) == np.percentile(lengths, 100 * share, method="inverted_cdf")
    assert [labelled for _, labelled in report.examples] == [
        [rows[n]["messages"][1]["content"] + "<|eot_id|>"] for n in (0, 29, 59)
    ]


def test_rows_that_are_dropped_or_cut_are_counted(look):
    rows = [*chats(20), chat("Long?", "word " * 400), chat("", "No question.")]
    whole = ("--packing", "false", "--max_length", "400")
    report = look("llama-3.2-1b", rows, *whole)
    counts = report.counts["training"]
    assert (counts["read"], counts["kept"], counts["malformed"], counts["long"], counts["cut"]) == (22, 20, 1, 1, 0)
    assert "row 22" in counts["reasons"][0] and "row 21" in counts["reasons"][1] and not failed(report)
    report = look("llama-3.2-1b", rows[:-1], *whole, "--unfit_rows", "cut", "--eval_strategy", "no")
    assert report.counts["training"]["cut"] == 1 and report.train.not_stopped == report.train.not_stopped_full == 1
    assert not failed(report)
    with pytest.raises(preparation.PreparationError, match=r"2 of 22 rows do not fit.*row 22.*--unfit_rows drop"):
        look("llama-3.2-1b", rows, *whole, "--unfit_rows", "error")


# ------------------------------------------------------------------------------------------------------ live traps

LABEL, PROMPT = "the label is the answer and its end of turn", "the prompt of inference is the start of the row"
THOUGHT, CLOCK = "reasoning is neither lost nor invented", "no date of the day"


@pytest.mark.parametrize(
    ("recipe", "rows", "words", "names", "said"),
    [
        ("llama-3.2-1b", chats(), ("--chat_template_kwargs", "{}"), {CLOCK}, "day"),
        ("llama-3.2-1b", chats(), ("--assistant_only_loss", "false"), {LABEL, PROMPT}, "more labelled than its answer"),
        ("llama-3.2-1b", chats(thinking="Hm."), (), {THOUGHT}, "the chat template reads: none"),
        (
            "llama-3.2-1b",
            [*chats(), chat("What is a start token?", "It is <|begin_of_text|> in Llama.")],
            ("--eval_strategy", "no"),
            {"one start token", LABEL},
            "elsewhere in 1",
        ),
    ],
)
def test_a_trap_fails_its_check_and_no_other(recipe, rows, words, names, said, look):
    found = failed(look(recipe, rows, "--packing", "false", *words))
    assert {*found} == names and said in " ".join(found.values())


def test_think_tags_in_an_answer_are_found(look, tmp_path):
    rows = launching.tiny_rows(tmp_path / "rows.jsonl", RECIPES / "qwen3-8b-invoice")
    assert {*failed(look("qwen3-8b-invoice", rows, "--chat_template_kwargs", "{}"))} == {THOUGHT}


ISOLATED = "packed documents are isolated"


@pytest.mark.parametrize(
    ("recipe", "file", "old", "new", "names"),
    [
        (
            "llama-3.2-1b",
            "train.py",
            '"<|finetune_right_pad_id|>"',
            '"<|eot_id|>"',
            {"the pad token is not a stop token"},
        ),
        (
            "qwen3-8b-invoice",
            "train.py",
            '{"end": tokenizer.eos_token_id}',
            '{"end": -1}',
            {LABEL, "the stop token is labelled"},
        ),
        ("gpt-oss-20b", "speed.py", "training_args.packing = False", "pass", {ISOLATED}),
    ],
)
def test_an_edited_copy_is_looked_at_as_it_is(recipe, file, old, new, names, look, tmp_path):
    shutil.copytree(RECIPES / recipe, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__", "run", "run-*"))
    edited = tmp_path / "mine" / file
    source = edited.read_text()
    assert source.count(old) == 1
    edited.write_text(source.replace(old, new))
    rows = launching.tiny_rows(tmp_path / "rows.jsonl", RECIPES / recipe)
    assert {*failed(look(tmp_path / "mine", rows))} == names


def test_packed_rows_are_full_isolated_and_checked_one_by_one(look):
    report = look("llama-3.2-1b", chats(60), "--packing", "true", "--max_length", "1024", "--eval_strategy", "no")
    checks = {check.name: check for check in report.checks}
    assert not failed(report) and checks[ISOLATED].ok and checks[LABEL].ok
    assert report.train.documents == 60 and report.train.rows < 30
    assert report.packing_fill == report.train.tokens / (report.train.rows * 1024) and report.packing_fill > 0.8
    wrapped = look("llama-3.2-1b", chats(), "--packing", "true", "--packing_strategy", "wrapped")
    assert "see each other" in failed(wrapped)[ISOLATED]


def test_groups_on_both_sides_are_found(look, tmp_path):
    rows = [row | {"vendor": f"shop {number % 4}"} for number, row in enumerate(chats(40))]
    apart = look("llama-3.2-1b", rows, "--group_by", "vendor", "--eval_fraction", "0.25")
    assert not failed(apart) and apart.train.documents == 30 and apart.eval.documents == 10
    assert [check.ok for check in apart.checks if "share no group" in check.name] == [True]
    for name, part in (("train", rows[:30]), ("test", rows[30:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    mixed = failed(look("llama-3.2-1b", tmp_path, "--group_by", "vendor", "--eval_fraction", "0"))
    assert "shop 0" in mixed["training and evaluation share no group"]


def test_equal_and_near_rows_are_counted(look, tmp_path, monkeypatch):
    rows = chats(40)
    near = json.loads(json.dumps(rows[3]))
    near["messages"][0]["content"] += " indeed"
    for name, part in (("train", rows), ("test", [rows[1], rows[2], near, chat("Nothing like it", "at all")])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    found = look("llama-3.2-1b", tmp_path, "--eval_fraction", "0").duplicates
    assert (found.evaluation_rows, found.equal) == (4, 2) and found.near == 3
    monkeypatch.setattr(inspect_data.inspect_duplicates, "MinHashLSH", None)  # the package is not installed
    monkeypatch.setattr(inspect_data.inspect_duplicates, "MinHash", None)
    report = look("llama-3.2-1b", tmp_path, "--eval_fraction", "0")
    assert report.duplicates.equal == 2 and report.duplicates.near is None
    assert "pip install datasketch" in "\n".join(inspect_data.lines(report, colour=False))


# ---------------------------------------------------------------------------------------------------- the program


def test_the_program_prints_writes_and_leaves_nothing(tiny, tmp_path, capsys):
    rows = launching.tiny_rows(tmp_path / "rows.jsonl", RECIPES / "llama-3.2-1b")
    before = {path: path.stat().st_mtime for path in RECIPES.rglob("*") if "__pycache__" not in path.parts}
    kept = list(sys.argv), list(sys.path), dict(os.environ), sys.modules.get("inputs")
    words = ["--model_name_or_path", str(tiny["llama"]), "--dataset_name", str(rows)]
    out = tmp_path / "report.json"
    assert inspect_data.main([str(RECIPES / "llama-3.2-1b"), *words, "--show", "1", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\[\[[^\]]*<\|eot_id\|>\]\]", text) and "24 rows read" in text and "FAIL" not in text
    written = json.loads(out.read_text())
    assert written["ok"] and written["train"]["documents"] + written["eval"]["documents"] == 24
    assert inspect_data.main([str(RECIPES / "llama-3.2-1b"), *words, "--chat_template_kwargs", "{}"]) == 1
    assert "FAIL no date of the day" in capsys.readouterr().out
    assert inspect_data.main([str(RECIPES / "llama-3.2-1b"), *words, "--learning_rat", "1"]) == 1
    assert "Did you mean --learning_rate?" in capsys.readouterr().err
    assert inspect_data.main([str(tmp_path)]) == 1 and "no recipe folder" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime for path in RECIPES.rglob("*") if "__pycache__" not in path.parts}
    variables = dict(os.environ)
    variables.pop("CUDA_VISIBLE_DEVICES", None), kept[2].pop("CUDA_VISIBLE_DEVICES", None)
    assert (list(sys.argv), list(sys.path), variables, sys.modules.get("inputs")) == kept
