"""An MXFP4 checkpoint exported to bf16 is the model that transformers dequantizes, bit for bit, or is refused."""

import json
import shutil
import sys
import weakref
from collections import namedtuple
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import export
import tiny_model

SMALL_SHARD = 60_000


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    """A tiny MXFP4 folder of several shards with a licence, and what a hub folder has besides."""
    folder = tmp_path_factory.mktemp("source") / "gpt-oss"
    tiny_model.write_tiny_model("gpt-oss", folder, mxfp4=True, shard_bytes=SMALL_SHARD)
    (folder / "LICENSE").write_text("Apache-2.0")
    (folder / "README.md").write_text("model card of the base model")
    return folder


@pytest.fixture(scope="module")
def bf16(mxfp4, tmp_path_factory):
    dest = tmp_path_factory.mktemp("bf16") / "nested" / "model"
    export.export_bf16(str(mxfp4), dest, base="openai/gpt-oss-20b", shard_bytes=SMALL_SHARD)
    return dest


@pytest.fixture
def copy(mxfp4, tmp_path):
    """A copy of the MXFP4 folder that a test may damage."""
    return Path(shutil.copytree(mxfp4, tmp_path / "copy"))


def dequantized(folder):
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )


def refusal(*arguments):
    with pytest.raises(SystemExit) as stopped:
        export.main([*map(str, arguments), "--bf16"])
    assert "\n" not in stopped.value.code
    return stopped.value.code


def edit_shard(folder, name, change):
    """Replace tensor `name` by `change(tensor)` in the shard that holds it."""
    file = folder / json.loads((folder / export.INDEX).read_text())["weight_map"][name]
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})


def test_every_scale_and_byte_equals_transformers_to_the_bit():
    scales = torch.arange(256, dtype=torch.uint8).view(2, 128, 1).repeat(1, 1, 16)
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(2, 128, 1, 1)
    ours, theirs = export.dequantize_mxfp4(blocks, scales), convert_moe_packed_tensors(blocks, scales)
    assert ours.shape == (2, 512, 128) and ours.is_contiguous()
    finite = torch.isfinite(theirs)
    assert torch.equal(ours[finite].view(torch.int16), theirs[finite].view(torch.int16))
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_export_is_the_dequantized_model_to_the_bit(mxfp4, bf16):
    expected = dequantized(mxfp4)
    exported = AutoModelForCausalLM.from_pretrained(bf16)
    stored = {}
    for file in bf16.glob("*.safetensors"):
        stored |= load_file(file)
    assert stored.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert stored[name].dtype == torch.bfloat16, name
        assert torch.equal(stored[name].view(torch.int16), tensor.view(torch.int16)), name
    ids = torch.arange(40).unsqueeze(0) + 60
    with torch.no_grad():
        assert torch.equal(exported(input_ids=ids).logits, expected(input_ids=ids).logits)


def test_folder_is_an_ordinary_bf16_model(mxfp4, bf16):
    config = json.loads((bf16 / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    source = json.loads((mxfp4 / "config.json").read_text())
    source.pop("quantization_config")
    assert config == source
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"):
        assert (bf16 / name).read_bytes() == (mxfp4 / name).read_bytes()
    assert not (bf16 / "README.md").exists() and not (bf16 / export.IN_PROGRESS).exists()
    assert not bf16.with_name("model.partial").exists()
    assert (
        len({file.stat().st_mode for file in bf16.iterdir()}) == 1
    )  # a team can read the weights if it can the config
    assert AutoTokenizer.from_pretrained(bf16).eos_token == "<|return|>"


def test_base_model_keeps_its_published_name(mxfp4, bf16, tmp_path):
    def record(folder):
        return json.loads((folder / export.BASE_RECORD).read_text())["base_model_name_or_path"]

    assert record(bf16) == "openai/gpt-oss-20b"
    export.main([str(mxfp4), str(tmp_path / "local"), "--bf16"])
    assert record(tmp_path / "local") == str(mxfp4.resolve())


def test_hub_download_leaves_the_second_and_third_copy_out(mxfp4, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--openai--gpt-oss-20b" / "snapshots" / "abc123"
    asked = {}

    def download(model, **options):
        asked.update(options, model=model)
        return str(shutil.copytree(mxfp4, snapshot))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    export.main(["openai/gpt-oss-20b", str(tmp_path / "out"), "--bf16", "--revision", "v1"])
    assert (asked["model"], asked["revision"]) == ("openai/gpt-oss-20b", "v1")
    record = json.loads((tmp_path / "out" / export.BASE_RECORD).read_text())
    assert record == {"base_model_name_or_path": "openai/gpt-oss-20b", "base_model_revision": "abc123"}
    wanted = [path.name for path in mxfp4.iterdir() if path.name != "README.md"]
    unwanted = ["original/model.safetensors", "original/config.json", "metal/model.bin", "README.md"]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*wanted, *unwanted], **patterns)) == wanted


def test_weights_are_written_shard_by_shard(bf16):
    index = json.loads((bf16 / export.INDEX).read_text())
    files = sorted(bf16.glob("*.safetensors"))
    assert len(files) > 3 and {file.name for file in files} == set(index["weight_map"].values())
    total = 0
    for file in files:
        with safe_open(file, "pt") as handle:
            sizes = [handle.get_tensor(name).nbytes for name in handle.keys()]  # noqa: SIM118
        assert sum(sizes) <= SMALL_SHARD or len(sizes) == 1
        total += sum(sizes)
    assert total == index["metadata"]["total_size"]


def test_one_shard_is_in_memory_at_a_time(tmp_path):
    alive, most = set(), 0

    def make(name):
        nonlocal most
        tensor = torch.zeros(100)
        alive.add(name)
        weakref.finalize(tensor, alive.discard, name)
        most = max(most, len(alive))
        return tensor

    assert export.write_shards(tmp_path, {f"t{i}": 400 for i in range(10)}, make, shard_bytes=800) == 5
    assert most == 2


def test_a_model_that_is_not_mxfp4_is_refused(tmp_path):
    plain = tiny_model.write_tiny_model("gpt-oss", tmp_path / "plain")
    message = refusal(plain, tmp_path / "out")
    assert "not an MXFP4 checkpoint" in message and "null" in message and str(plain) in message
    # the section that a save after a dequantized load can leave behind, over weights that are bf16 already
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert "0 tensors ending in _blocks" in refusal(plain, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_damaged_sources_are_refused(copy, tmp_path):
    dest, key = tmp_path / "out", "model.layers.0.mlp.experts.down_proj_scales"
    pristine = {file.name: file.read_bytes() for file in copy.glob("model*")}

    def restore():
        for name, content in pristine.items():
            (copy / name).write_bytes(content)

    edit_shard(copy, "lm_head.weight", lambda tensor: tensor[:0])
    assert "lm_head.weight is empty" in refusal(copy, dest)
    restore()
    edit_shard(copy, key, lambda tensor: tensor[:, :-1].contiguous())
    assert "down_proj_blocks is U8" in refusal(copy, dest)
    restore()
    edit_shard(copy, "lm_head.weight", lambda tensor: tensor.to(torch.int8))
    assert "lm_head.weight is I8" in refusal(copy, dest)
    restore()
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.write_bytes(pristine[shard.name][:-10])
    assert "cut short" in refusal(copy, dest)
    shard.unlink()
    assert f"{shard} is missing" in refusal(copy, dest)
    restore()
    index = json.loads(pristine[export.INDEX])
    del index["weight_map"][key]
    (copy / export.INDEX).write_text(json.dumps(index))
    assert key in refusal(copy, dest)
    assert not list(tmp_path.glob("out*"))


def test_missing_places_are_refused(mxfp4, tmp_path):
    assert "is no folder" in refusal(tmp_path / "nowhere", tmp_path / "out")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json is missing" in refusal(empty, tmp_path / "out")
    assert "--revision v1" in refusal(mxfp4, tmp_path / "out", "--revision", "v1")


def test_too_small_a_disk_is_noticed_first(mxfp4, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10, 0, 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "GB free" in refusal(mxfp4, tmp_path / "out")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_only_own_unfinished_work_is_replaced(mxfp4, tmp_path, monkeypatch):
    dest, partial = tmp_path / "out", tmp_path / "out.partial"
    with monkeypatch.context() as patched:
        patched.setattr(export, "copy_companions", lambda *_: (_ for _ in ()).throw(OSError("disk went away")))
        assert "disk went away" in refusal(mxfp4, dest)
    assert not dest.exists() and (partial / export.IN_PROGRESS).exists()
    (partial / "model-00009-of-00009.safetensors").write_text("left over")
    export.main([str(mxfp4), str(dest), "--bf16"])
    assert not partial.exists() and not (dest / "model-00009-of-00009.safetensors").exists()
    before = {file.name: file.read_bytes() for file in dest.iterdir()}
    assert "not empty" in refusal(mxfp4, dest)
    assert before == {file.name: file.read_bytes() for file in dest.iterdir()}
    partial.mkdir()
    (partial / "mine.txt").write_text("keep")
    shutil.rmtree(dest)
    assert export.IN_PROGRESS in refusal(mxfp4, dest)
    assert (partial / "mine.txt").read_text() == "keep"
