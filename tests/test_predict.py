"""From PDFs and a CSV to predictions.csv by the README's own lines; resumed, and with the flags that a person needs."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_model
from test_readme import blocks

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "qwen3-8b-invoice"
sys.path.insert(0, str(RECIPE))

from invoice import load_schema  # noqa: E402
from value_flags import flag_values, stands_in  # noqa: E402

SAMPLE = load_schema(RECIPE / "schema_sample.json")
RECEIPT = load_schema(RECIPE / "schema_receipt.json")


def walkthrough() -> list[str]:
    """The lines of "From PDFs to a table" in the recipe's README."""
    section = (RECIPE / "README.md").read_text(encoding="utf-8").split("## From PDFs to a table")[1].split("\n## ")[0]
    return blocks(section)[0]


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """The folder in which the README's lines ran, as they stand, with fewer documents and steps and a tiny model."""
    work = tmp_path_factory.mktemp("walkthrough")
    for name in ("recipes", "scripts", "accelerate_configs", "deepspeed_configs"):
        (work / name).symlink_to(ROOT / name)
    tiny_model.main(["qwen3", str(work / "tiny")])
    smaller = {
        "sample_pdfs.py": {"--labelled 50": "--labelled 12", "--new 10": "--new 4"},
        "train.py": {"train.py": "train.py --use_cpu true --model_name_or_path tiny --max_steps 2 --eval_fraction 0.2"},
        "score.py": {"score.py": "score.py --max_new_tokens 16"},
        "predict.py": {"predict.py": "predict.py --max_new_tokens 16"},
    }
    python = str(Path(sys.executable).parent)
    variables = os.environ | {"PATH": f"{python}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    printed = {}
    for line in walkthrough():
        (program,) = [name for name in smaller if name in line]
        for old, new in smaller[program].items():
            assert old in line
            line = line.replace(old, new)
        result = subprocess.run(line, shell=True, cwd=work, env=variables, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, f"{line}\n{result.stdout[-1000:]}\n{result.stderr[-3000:]}"
        printed[program] = result.stdout
    return work, printed


def test_the_readme_goes_from_pdfs_to_a_table(walked):
    work, printed = walked
    gold = list(csv.DictReader((work / "my-receipts" / "new.csv").open(encoding="utf-8")))
    rows = list(csv.DictReader((work / "predictions.csv").open(encoding="utf-8")))
    assert [Path(row["document"]).name for row in rows] == [row["file"] for row in gold]
    assert list(rows[0]) == ["document", *SAMPLE["properties"], "flags"]
    # A random model never ends its answer: no value may look like a result.
    assert all(row["flags"] == "document: output limit hit, no whole JSON object" for row in rows)
    assert not any(row[key] for row in rows for key in SAMPLE["properties"])
    assert "4 documents; 4 flags in 4 of them" in printed["predict.py"]
    assert "12 documents and fields.csv became" in printed["train.py"]
    assert not list(work.glob("predictions*partial")) and not list(work.glob("predictions*writing"))


def test_base_and_tuned_are_scored_into_the_run_folder_on_the_rows_that_were_held_out(walked):
    work, printed = walked
    scores = json.loads((work / "my-run" / "scores.json").read_text(encoding="utf-8"))["held-out rows"]
    held_out = json.loads((work / "my-run" / "eval_rows.json").read_text())
    assert list(scores) == ["base", "tuned"]
    assert scores["base"]["model"] == "tiny" and scores["tuned"]["model"] == "my-run/final"
    for report in scores.values():
        assert report["documents"] == len(held_out) == 2 and report["limit_hits"] == report["unparseable"] == 2
        assert report["chat_template_kwargs"] == {"enable_thinking": False}  # the run's, given nowhere
        assert report["schema_file"].endswith("schema_sample.json")
    # Row numbers count the files by name from 1.
    names = sorted(path.name for path in (work / "my-receipts" / "labelled").glob("*.pdf"))
    assert {entry["document"] for entry in scores["base"]["worst"]} == {names[number - 1] for number in held_out}
    assert "base: tiny" in printed["score.py"] and "tuned: my-run/final" in printed["score.py"]


def predict_main(monkeypatch, work, *words):
    import predict

    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "argv", ["predict.py", "--max_new_tokens", "16", *map(str, words)])
    return predict.main()


def test_a_stopped_start_goes_on_and_other_settings_are_refused(walked, monkeypatch, capsys, tmp_path):
    import predict

    work, _ = walked
    whole = tmp_path / "whole.jsonl"
    assert predict_main(monkeypatch, work, "my-run", "my-receipts/new", "-o", whole, "--batch_size", 1) == 0
    rows = [json.loads(line) for line in whole.read_text(encoding="utf-8").splitlines()]
    assert [row["fields"] for row in rows] == [None] * 4 and all(row["reply"] for row in rows)

    answered, generate = [], predict.generate_batches

    def stops_after_two(model, tokenizer, prompts, **options):
        for count, answer in enumerate(generate(model, tokenizer, prompts, **options)):
            if count == 2 and not answered:
                raise KeyboardInterrupt
            yield answer
        answered.append(len(prompts))

    monkeypatch.setattr(predict, "generate_batches", stops_after_two)
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        predict_main(monkeypatch, work, "my-run", "my-receipts/new", "-o", out, "--batch_size", 1)
    journal = tmp_path / "out.jsonl.partial"
    assert not out.exists() and journal.exists()
    journal.write_text(journal.read_text(encoding="utf-8") + '{"document": "cut o', encoding="utf-8")
    assert predict_main(monkeypatch, work, "my-run", "my-receipts/new", "-o", out, "--constrained") == 1
    assert "constrained was False, now True" in capsys.readouterr().err
    answered.append("go on")
    assert predict_main(monkeypatch, work, "my-run", "my-receipts/new", "-o", out, "--batch_size", 1) == 0
    assert answered[-1] == 2  # two were left
    assert out.read_text(encoding="utf-8") == whole.read_text(encoding="utf-8") and not journal.exists()
    assert predict_main(monkeypatch, work, "my-run", "my-receipts/new", "-o", out) == 1
    assert "is there already" in capsys.readouterr().err


def test_mistakes_are_told_in_one_paragraph(walked, monkeypatch, capsys, tmp_path):
    work, _ = walked
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "a", "text": "RECEIPT"}\n{"id": "b", "txt": "RECEIPT"}\n')
    unfinished = tmp_path / "unfinished"
    shutil.copytree(work / "my-run", unfinished, ignore=shutil.ignore_patterns("checkpoint-*", "final"))
    record = json.loads((unfinished / "run.json").read_text())
    (unfinished / "run.json").write_text(json.dumps(record | {"outcome": "running"}))
    other = tmp_path / "schema_sample.json"
    other.write_text(json.dumps(RECEIPT))
    for words, reason in (
        (("my-run", rows), "row 2: the column 'text' holds no text"),
        (("my-run", tmp_path / "none.pdf"), "none.pdf: no such file or folder"),
        ((unfinished, "my-receipts/new"), "is not finished"),
        (("my-receipts", "my-receipts/new"), "my-receipts is no run folder"),
        (("my-run", "my-receipts/new", "--schema_file", other), "is not the schema that my-run was trained on"),
    ):
        assert predict_main(monkeypatch, work, *words, "-o", tmp_path / "out.csv") == 1
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1


# ---- flags -----------------------------------------------------------------------------------------------------------

TEXT = (
    "MR D.I.Y. (JOHOR)\nSDN BHD\nDATE 25/12/2018 8:13 PM\nItem 1900.00\nTOTAL: RM 9.00\nNET 1.234,50 €\nPaid 3 Jan 2019"
)


@pytest.mark.parametrize(
    ("value", "field", "stands"),
    [
        ("MR D.I.Y. (JOHOR) SDN BHD", {"type": "string"}, True),  # over a line break
        ("Mr DIY Johor Sdn. Bhd.", {"type": "string"}, True),  # other marks and case
        ("MR D.I.Y. (KUALA) SDN BHD", {"type": "string"}, False),
        ("D.I.Y. (JOHO", {"type": "string"}, False),  # a word is not cut
        ("9.00", {"type": "string"}, True),
        ("00.00", {"type": "string"}, False),  # inside 1900.00
        ("900", {"type": "string"}, False),  # 9.00 is not 900
        ("25/12/2018", {"type": "string"}, True),
        ("5/12/2018", {"type": "string"}, False),
        (9, {"type": "number"}, True),
        (-9.0, {"type": "number"}, True),  # the sign may be a word
        (900.0, {"type": "number"}, False),
        (1234.5, {"type": ["number", "null"]}, True),  # comma form
        (3, {"type": "integer"}, True),
        ("2018-12-25", {"type": "string", "format": "date"}, True),
        ("2019-01-03", {"type": "string", "format": "date"}, True),
        ("2018-12-26", {"type": "string", "format": "date"}, False),
        ("credit_note", {"type": "string", "enum": ["credit_note"]}, True),  # a conclusion, not a copy
        (["9.00"], {"type": "string"}, False),
    ],
)
def test_what_stands_in_the_text(value, field, stands):
    assert stands_in(value, field, TEXT) is stands


def test_each_value_carries_its_own_flags():
    reply = '{"doc_type":"bill","invoice_no":"X-1","date":"2018-12-25","seller":null,"total":"9.00","note":1}'
    value, flags = flag_values(reply, False, TEXT, SAMPLE)
    assert value["invoice_no"] == "X-1"
    assert flags.pop("invoice_no") == ["not in the text"]
    assert [reason.partition(":")[0] for reason in flags.pop("doc_type")] == ["breaks the schema"]
    assert [reason.partition(":")[0] for reason in flags.pop("total")] == ["breaks the schema"]  # text, not a number
    assert "note" in flags.pop("document")[0] and flags == {}


def test_the_output_limit_and_lost_answers_are_flagged():
    whole = '{"company":"MR D.I.Y. (JOHOR) SDN BHD","date":null,"address":null,"total":null}'
    assert flag_values(whole, False, TEXT, RECEIPT)[1] == {}
    assert flag_values(whole + " and", True, TEXT, RECEIPT)[1]["company"] == ["output limit hit"]
    assert flag_values(whole[:-20], True, TEXT, RECEIPT) == (
        None,
        {"document": ["output limit hit", "no whole JSON object"]},
    )
