"""The sample generator: same seed same files, gold within the schema and copyable from the text, nothing shared."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "qwen3-8b-invoice"
PROGRAM = ROOT / "scripts" / "sample_receipts.py"
COMMITTED = ROOT / "tests" / "data" / "receipts"
COMMITTED_WITH_FAKER = "40.63.0"
sys.path.insert(0, str(RECIPE))

from field_values import amount_readings, date_readings, same_reading  # noqa: E402
from inputs import read_file  # noqa: E402
from invoice import check_target, load_schema, prompt_messages, target_text  # noqa: E402


def generate(out_dir, *arguments):
    command = [sys.executable, str(PROGRAM), str(out_dir), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def read(folder):
    return {split: [*read_file(folder / f"{split}.jsonl")] for split in ("train", "test")}


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("receipts")
    result = generate(folder, "--train", "600", "--test", "60", "--seed", "3")
    assert result.returncode == 0, result.stderr
    return read(folder), result.stdout


def test_program_is_150_lines_or_fewer():
    assert len(PROGRAM.read_text(encoding="utf-8").splitlines()) <= 150


def test_same_seed_same_bytes_and_the_committed_set_is_what_the_command_writes(tmp_path):
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert generate(tmp_path / name, "--train", "24", "--test", "8", "--seed", seed).returncode == 0
    for split in ("train", "test"):
        first, second, other = ((tmp_path / name / f"{split}.jsonl").read_bytes() for name in "abc")
        assert first == second != other
        if importlib.metadata.version("faker") == COMMITTED_WITH_FAKER:  # another version draws other names
            assert first == (COMMITTED / f"{split}.jsonl").read_bytes()


def test_committed_set_is_within_the_schema():
    schema = load_schema(RECIPE / "schema_sample.json")
    rows = read(COMMITTED)
    assert (len(rows["train"]), len(rows["test"])) == (24, 8)
    for row in rows["train"] + rows["test"]:
        assert check_target(row["entities"], schema) == []


def test_train_and_test_share_no_document_and_no_seller(sample):
    rows, _ = sample
    texts = {split: [row["text"] for row in rows[split]] for split in rows}
    assert len(set(texts["train"] + texts["test"])) == 660
    sellers = {split: {row["entities"]["seller"] for row in rows[split]} - {None} for split in rows}
    assert sellers["train"] and not sellers["train"] & sellers["test"]


def test_gold_is_within_the_schema_and_stands_in_the_text(sample):
    schema = load_schema(RECIPE / "schema_sample.json")
    for row in sample[0]["train"]:
        gold, text = row["entities"], row["text"]
        assert check_target(gold, schema) == [] and list(gold) == list(schema["properties"])
        assert gold["seller"] is None or gold["seller"] in text
        assert gold["invoice_no"] is None or gold["invoice_no"] in text
        parts = {part.strip() for line in text.split("\n") for part in [line, line.partition(": ")[2]]}
        days = {part.partition(": ")[2] for part in parts} | parts
        if gold["date"]:
            read_days = [date_readings(day) for day in days if date_readings(day)]
            assert read_days and all(same_reading(day, date_readings(gold["date"])) for day in read_days)
        else:
            assert not any(date_readings(day) for day in days)
        amounts = [amount_readings(part) for line in text.split("\n") for part in [line.partition(": ")[2]]]
        amounts = [float(value) for amount in amounts for value in amount.values()]
        assert amounts == ([gold["total"]] if gold["total"] is not None else [])


def test_variety_and_the_stated_rate_of_absent_fields(sample):
    rows, printed = sample
    assert "absent-field rate 0.1" in printed
    train = rows["train"]
    for field in ("invoice_no", "date", "seller", "total"):
        share = sum(row["entities"][field] is None for row in train) / len(train)
        assert 0.06 < share < 0.14, field  # 0.1 in 600 draws: four standard deviations are 0.05
    kinds = [row["entities"]["doc_type"] for row in train]
    assert all(0.12 < kinds.count(name) / len(kinds) < 0.5 for name in ("invoice", "receipt", "credit_note"))
    texts = "\n".join(row["text"] for row in train)
    assert all(mark in texts for mark in ("$", "£", "€", "Gutschrift", "Credit note", " | "))


def test_rows_are_short_enough_for_a_cpu(sample):
    """Sixty prompt tokens are the same in every row; text and answer together stay under 250 characters."""
    schema = load_schema(RECIPE / "schema_sample.json")
    assert len(prompt_messages("", schema)[0]["content"]) < 280
    assert max(len(row["text"]) + len(target_text(row["entities"], schema)) for row in sample[0]["train"]) < 250


def test_the_full_invoice_schema_works_too_and_an_unknown_field_is_named(tmp_path):
    result = generate(tmp_path / "full", "--train", "20", "--test", "4", "--schema", str(RECIPE / "schema.json"))
    assert result.returncode == 0, result.stderr
    for row in read(tmp_path / "full")["train"]:
        assert all(item["name"] in row["text"] for item in row["entities"]["items"])
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({"type": "object", "properties": {"iban": {"type": ["string", "null"]}}}))
    result = generate(tmp_path / "none", "--schema", str(bad))
    assert result.returncode != 0 and "iban" in result.stderr and not (tmp_path / "none").exists()
