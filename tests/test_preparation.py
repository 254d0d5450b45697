"""Rows prepared once, ahead of time: the same rows as without it, refused where they would be others, whole or not there."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import launching
import prepare_data
import pytest
import tiny_model
from datasets.utils.logging import disable_progress_bar
from preparation import PreparationError, prepare

ROOT = Path(__file__).resolve().parents[1]
LLAMA = ROOT / "recipes" / "llama-3.2-1b"
QWEN = ROOT / "recipes" / "qwen3-8b-invoice"
disable_progress_bar()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: tiny_model.write_tiny_model(family, folder / family) for family in ("llama", "qwen3")}


@pytest.fixture(scope="module")
def words(models, tmp_path_factory):
    """train.py's arguments for the Llama recipe on 24 tiny rows."""
    rows = launching.tiny_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", LLAMA)
    return ["--model_name_or_path", str(models["llama"]), "--dataset_name", str(rows)]


@pytest.fixture(scope="module")
def prepared(words, tmp_path_factory):
    dest = tmp_path_factory.mktemp("prepared") / "rows"
    assert prepare_data.main([str(LLAMA), str(dest), *words]) == 0
    return dest


def rows_of(made):
    columns = ["input_ids", "labels"]
    sets = (made.trainer.train_dataset, made.trainer.eval_dataset)
    columns += ["seq_lengths"] if "seq_lengths" in sets[0].column_names else []
    return [rows.select_columns(columns).to_list() for rows in sets]


@pytest.mark.parametrize(
    ("folder", "family", "more"),
    [(LLAMA, "llama", ("--packing", "false")), (LLAMA, "llama", ("--max_length", "1024")), (QWEN, "qwen3", ())],
)
def test_prepared_rows_are_those_of_the_run_itself(folder, family, more, models, tmp_path):
    rows = launching.tiny_rows(tmp_path / "rows.jsonl", folder)
    words = ["--model_name_or_path", str(models[family]), "--dataset_name", str(rows), *more]
    assert prepare_data.main([str(folder), str(tmp_path / "prepared"), *words]) == 0
    rows.rename(tmp_path / "elsewhere.jsonl")  # the run needs the folder alone, wherever it lies
    shutil.move(tmp_path / "prepared", tmp_path / "copied")
    again = prepare(folder, [*words, "--dataset_name", str(tmp_path / "copied")])
    direct = prepare(folder, [*words, "--dataset_name", str(tmp_path / "elsewhere.jsonl")])
    assert rows_of(again) == rows_of(direct) and len(rows_of(again)[0]) > 1
    assert again.counts["training"] == direct.counts["training"]


def test_two_ranks_train_from_it_without_tokenizing(words, prepared, tmp_path):
    arguments = [
        *words,
        "--dataset_name",
        str(prepared),
        "--max_steps",
        "2",
        "--gradient_accumulation_steps",
        "1",
        "--save_strategy",
        "no",
        "--bf16",
        "false",
    ]
    cache = {"HF_HOME": str(tmp_path / "empty")}
    run = tmp_path / "run"
    done = launching.launch(LLAMA, "ddp", *arguments, "--output_dir", str(run), log=tmp_path / "log", environment=cache)
    assert done.rc == 0, done.output[-2000:]
    assert "Tokenizing" not in done.output and "Checking training rows" not in done.output
    assert "24 rows read, 24 kept" in done.output and len(launching.losses(run)) == 2
    assert (
        json.loads((run / "eval_rows.json").read_text())
        == json.loads((prepared / "prepared.json").read_text())["eval_rows"]
    )


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--max_length", "2048"), "max_length was 4096, now 2048"),
        (("--packing", "false"), "packing was true, now false"),
        (("--chat_template_kwargs", '{"date_string": "1 Jan 2025"}'), "chat_template_kwargs was"),
        (("--chat_template_path", "other.jinja"), "chat template was"),
        (("--assistant_only_loss", "false"), "assistant_only_loss was true, now false"),
        (("--unfit_rows", "cut"), 'unfit_rows was "drop", now "cut"'),
        (("--eval_fraction", "0.5"), "eval_fraction was 0.05, now 0.5"),
        (("--eval_strategy", "no"), "evaluation was True, now False"),
        (("--seed", "7"), "seed was 42, now 7"),
        (("--model_name_or_path", "other"), "tokenizer was"),
    ],
)
def test_a_run_that_would_prepare_other_rows_refuses_the_folder(
    more, named, words, models, prepared, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    template = (LLAMA / "llama3_2.jinja").read_text()
    (tmp_path / "other.jinja").write_text("{# edited #}" + template)
    shutil.copytree(models["llama"], tmp_path / "other")
    changed = (tmp_path / "other" / "tokenizer_config.json").read_text().replace("<|eot_id|>", "<|eom_id|>")
    (tmp_path / "other" / "tokenizer_config.json").write_text(changed)
    with pytest.raises(PreparationError) as refused:
        prepare(LLAMA, [*words, "--dataset_name", str(prepared), *more])
    text = str(refused.value)
    assert named in text and str(prepared) in text and "prepare_data.py" in text
    assert "; " not in text  # and nothing else is said to differ


def test_rows_that_changed_since_are_refused(models, tmp_path):
    rows = launching.tiny_rows(tmp_path / "rows.jsonl", LLAMA)
    words = ["--model_name_or_path", str(models["llama"]), "--dataset_name", str(rows)]
    assert prepare_data.main([str(LLAMA), str(tmp_path / "prepared"), *words]) == 0
    launching.tiny_rows(rows, LLAMA, count=30)
    with pytest.raises(PreparationError, match=r"the rows in .*rows.jsonl were changed"):
        prepare(LLAMA, [*words, "--dataset_name", str(tmp_path / "prepared")])
    assert prepare_data.main([str(LLAMA), str(tmp_path / "prepared"), *words]) == 1  # it overwrites nothing


def test_the_same_command_again_changes_nothing(words, prepared, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    assert prepare_data.main([str(LLAMA), str(prepared), *words]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    assert prepare_data.main([str(LLAMA), str(prepared), *words, "--max_length", "1000"]) == 1
    assert "max_length was 4096, now 1000" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    assert prepare_data.main([str(LLAMA), str(tmp_path / "mine"), *words]) == 1
    assert "holds no prepared rows" in capsys.readouterr().err


def test_two_at_once_give_one_whole_folder(words, prepared, tmp_path):
    dest = tmp_path / "both" / "rows"
    command = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), str(LLAMA), str(dest), *words]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=200)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sorted(path.name for path in dest.parent.iterdir()) == [".rows.lock", "rows"]
    loaded = prepare(LLAMA, [*words, "--dataset_name", str(dest)])
    assert rows_of(loaded) == rows_of(prepare(LLAMA, [*words, "--dataset_name", str(prepared)]))


def test_a_lost_race_without_locks_takes_the_winners_folder(words, prepared, tmp_path, monkeypatch):
    dest, rename = tmp_path / "rows", prepare_data.os.rename

    def late(source, target):
        shutil.copytree(prepared, target)  # another process was faster
        monkeypatch.setattr(prepare_data.os, "rename", rename)
        rename(source, target)

    monkeypatch.setattr(prepare_data.os, "rename", late)
    record = prepare_data.write(LLAMA, dest, words)
    assert record == json.loads((prepared / "prepared.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
