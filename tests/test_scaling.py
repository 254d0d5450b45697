"""Communication on paper: bytes and seconds worked out by hand, and the tables that ship."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import communication  # noqa: E402
from communication import NETWORK, NVLINK, Work, collective, collectives, predict  # noqa: E402

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "ep")
# 4 layers, 1000 parameters of which 800 lie in experts and 100 are trained, 10 tokens, 2 micro-steps.
SMALL = Work(4, 1000, 100, tokens=10, compute=1.0, micro_steps=2, gradient=4, experts=800, routed=64, passes=3)
LARGE = dataclasses.replace(SMALL, parameters=8_000_000_000, trained=8_000_000_000, experts=4_000_000_000)


def received(strategy: str, gpus: int) -> dict[str, float]:
    return {kind: one["bytes"] for kind, one in predict(strategy, SMALL, gpus)["collectives"].items()}


def test_bytes_that_a_gpu_receives():
    assert collective("all_gather", 800, 8)["bytes"] == 700  # all but its own eighth
    assert collective("reduce_scatter", 800, 8)["bytes"] == 700
    assert collective("all_reduce", 800, 8)["bytes"] == 1400
    assert collective("all_gather", 800, 1) == {"kind": "all_gather", "bytes": 0.0, "seconds": 0.0}


def test_bytes_of_a_step_on_one_node():
    assert received("ddp", 8) == {"all_reduce": 2 * 4 * 100 * 7 / 8}  # fp32, once for both micro-steps
    assert received("zero1", 8) == {"all_reduce": 2 * 200 * 7 / 8, "all_gather": 200 * 7 / 8}
    assert received("zero2", 8) == {"all_reduce": 2 * 2 * 200 * 7 / 8, "all_gather": 200 * 7 / 8}
    gathers = 2 * 2 * 2000 * 7 / 8  # forward and backward of two micro-steps, bf16
    assert received("fsdp", 8) == {"all_gather": gathers, "reduce_scatter": 200 * 7 / 8}
    assert received("zero3", 8) == {"all_gather": gathers, "reduce_scatter": 2 * 200 * 7 / 8}


def test_replicas_exchange_only_their_shard_and_experts_stay():
    found = received("hsdp", 32)
    assert found["all_gather"] == received("fsdp", 8)["all_gather"]
    assert found["all_reduce"] == 2 * (200 / 8) * 3 / 4  # four nodes, an eighth of the gradients
    found = received("ep", 32)
    assert found["all_gather"] == 2 * 2 * 2 * (1000 - 800) * 7 / 8
    assert found["all_to_all"] == 2 * 64 * 10 * 3 * 7 / 8  # two micro-steps of three passes


def test_seconds_are_those_of_the_slower_link():
    size = 1e12  # latency is nothing beside it
    assert collective("all_gather", size, 8)["seconds"] == pytest.approx(size * 7 / 8 / NVLINK, rel=1e-3)
    across = size * 1 / 2 / 8 / NETWORK  # half of the bytes come from the other node, through 8 adapters
    within = size * 15 / 16 / NVLINK
    assert collective("all_gather", size, 16, 2)["seconds"] == pytest.approx(max(across, within), rel=1e-3)
    alone = collective("all_reduce", size, 2, 2)["seconds"]  # one GPU a node: nothing goes over NVLink
    assert alone == pytest.approx(2 * size / 2 / NETWORK, rel=1e-3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_efficiency_never_rises_with_nodes_and_falls_with_size(strategy):
    lows = [predict(strategy, LARGE, gpus)["efficiency"]["low"] for gpus in (8, 16, 32, 64, 128, 256, 512)]
    assert lows == sorted(lows, reverse=True) and lows[0] > lows[-1]
    smaller = dataclasses.replace(LARGE, parameters=10**9, trained=10**9, experts=5 * 10**8)
    assert predict(strategy, smaller, 64)["efficiency"]["low"] > predict(strategy, LARGE, 64)["efficiency"]["low"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_slower_links_lower_efficiency(strategy, monkeypatch):
    before = predict(strategy, LARGE, 64)
    monkeypatch.setattr(communication, "NVLINK", NVLINK / 10)
    monkeypatch.setattr(communication, "NETWORK", NETWORK / 10)
    slower = predict(strategy, LARGE, 64)
    monkeypatch.setattr(communication, "RING", (1e-3, 1e-3))
    monkeypatch.setattr(communication, "TREE", (1e-3, 1e-3))
    late = predict(strategy, LARGE, 64)
    assert before["efficiency"]["low"] > slower["efficiency"]["low"] > late["efficiency"]["low"]


def test_bounds_enclose_and_host_time_lowers_only_the_lower():
    for strategy in STRATEGIES:
        found, hosted = predict(strategy, LARGE, 64), predict(strategy, LARGE, 64, host=0.01)
        assert 0 < found["efficiency"]["low"] < found["efficiency"]["high"] <= 1
        assert hosted["efficiency"]["low"] < found["efficiency"]["low"]
        assert hosted["efficiency"]["high"] == found["efficiency"]["high"]
        seconds = sum(one["seconds"] for one in collectives(strategy, LARGE, 64))
        assert found["tokens_per_second"]["low"] == pytest.approx(20 / (2.0 + seconds))


def test_larger_micro_steps_gather_less_often():
    joined = dataclasses.replace(LARGE, micro_steps=1, tokens=20, compute=2.0)
    assert predict("fsdp", joined, 64)["efficiency"]["low"] > predict("fsdp", LARGE, 64)["efficiency"]["low"]


def test_an_unknown_strategy_is_named():
    with pytest.raises(ValueError, match="'fsdp1', expected ddp"):
        collectives("fsdp1", SMALL, 8)


@pytest.fixture(scope="module")
def reports():
    import scaling

    return scaling.report()


def test_shipped_tables_are_what_the_script_writes(reports, monkeypatch, tmp_path):
    import scaling

    shipped = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    monkeypatch.setattr(scaling, "report", lambda: reports)
    copy = tmp_path / "scaling.md"
    start, end = shipped.index(scaling.BEGIN) + len(scaling.BEGIN), shipped.index(scaling.END)
    copy.write_text(shipped[:start] + shipped[end:], encoding="utf-8")
    scaling.main([str(copy)])
    assert copy.read_text(encoding="utf-8") == shipped
    copy.write_text("no markers", encoding="utf-8")
    with pytest.raises(SystemExit, match="scaling tables"):
        scaling.main([str(copy)])


def test_every_recipe_is_there_with_its_own_launch_file_first(reports, monkeypatch, capsys):
    import scaling

    assert sorted(reports) == sorted(path.parent.name for path in (ROOT / "recipes").glob("*/config.yaml"))
    for recipe, (_, strategies, _, _) in reports.items():
        train = (ROOT / "recipes" / recipe / "train.py").read_text(encoding="utf-8")
        assert f"accelerate_configs/{strategies[0]}.yaml" in train.split("import ")[0]
    monkeypatch.setattr(scaling, "report", lambda: reports)
    scaling.main(["--json"])
    printed = json.loads(capsys.readouterr().out)
    assert {one["gpus"] for one in printed["gpt-oss-120b"]["predictions"]} == {8, 16, 32, 64, 128, 256, 512}


def test_counts_of_a_real_recipe(reports):
    """gpt-oss-120b by hand: bf16 gathers of the whole model, and 40 kB a token, layer and pass to and from experts."""
    work, _, _, predictions = reports["gpt-oss-120b"]
    found = {one["strategy"]: one["collectives"] for one in predictions if one["gpus"] == 8}
    adapter = 32 * 36 * (4 * 2880 + 2 * 4096 + 2 * 512)  # rank x layers x (in and out of q, k, v, o)
    assert work.trained == adapter
    assert found["fsdp"]["all_gather"]["bytes"] == pytest.approx(8 * 2 * (116_829_156_672 + adapter) * 7 / 8)
    assert found["ep"]["all_to_all"]["bytes"] == pytest.approx(8192 * 36 * 3 * 2 * 4 * 2880 * 2 * 7 / 8)


def test_buckets_of_zero3_are_those_of_the_measured_model(reports):
    """The Llama that was measured is the recipe's: same sizes, so its constants hold."""
    work = reports["llama-3.2-1b"][0]
    for field in ("layers", "parameters", "trained", "reduces"):
        assert getattr(work, field) == getattr(communication.LLAMA, field)
