"""Whatever strikes a run, the same command continues it to the same weights; fault_campaign.py is the long form.

Two chains of start, fault, start, ..., each compared with its unbroken run to the last bit: FSDP2 with all weights, and
ZeRO-2 with LoRA on a small file system; both with packing, accumulation and evaluation.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import fault_campaign
import launching
import pytest
import result_tables
from fault_campaign import Chain, Fault, SmallDisk
from launching import LaunchError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes" / "llama-3.2-1b"))
import keeper  # noqa: E402

STEPS = 10  # saved every 2, evaluated every 3


def survive(chain: Chain, faults: list[Fault]) -> list[dict]:
    """Drive a chain through its faults to its end; returns the lines of the faults, each survived."""
    judged = [line for fault in faults for line in chain.hit(fault)]
    last, end = chain.finish()
    judged += last
    assert not end["problems"], end
    assert [line["problems"] for line in judged] == [[]] * len(faults), judged
    return judged


@pytest.fixture(autouse=True)
def fresh_launches(monkeypatch):
    """Processes that are struck are started as in life."""
    monkeypatch.setattr(launching, "FRESH", True)


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    return Chain("fsdp packed", "fsdp", fault_campaign.LLAMA, tmp_path_factory.mktemp("fsdp"), STEPS)


def test_fsdp_killed_within_a_save_and_in_an_evaluation_with_a_damaged_checkpoint(fsdp):
    cut, damaged = survive(fsdp, [Fault("files", "rank 1", 2), Fault("evaluation", "damage: truncated", 4)])
    assert (cut["resumed"], cut["whole"]) == (0, 2)  # the save of step 4 was cut off
    assert (damaged["resumed"], damaged["whole"]) == (2, 2)  # the whole checkpoint of step 4 was damaged
    log = (fsdp.work / "last.log").read_text()
    assert re.search(r"skipped \S+/checkpoint-4: \S+ is \d+ bytes, expected \d+ bytes", log)
    assert "checkpoint-4: it carries no completeness mark" in (fsdp.work / "01.log").read_text()


@pytest.mark.parametrize("kind", fault_campaign.DAMAGES)
def test_a_damaged_checkpoint_is_not_taken_for_whole(fsdp, tmp_path, kind):
    newest = fsdp.run / f"checkpoint-{STEPS}"
    assert newest.is_dir(), "the test before makes it"
    copy = shutil.copytree(newest, tmp_path / newest.name)
    assert keeper.is_complete(copy) is None
    name = fault_campaign.damage(copy, kind)
    reason = keeper.is_complete(copy) or keeper.is_damaged(copy)
    assert reason and (name in reason or name == keeper.MARK)


def test_zero2_lora_on_a_full_disk_and_with_a_dead_rank(tmp_path):
    try:
        disk = SmallDisk(tmp_path)
    except LaunchError:  # a machine that lets nobody mount: then a limit on the length of files stands for it
        disk = None
    try:
        chain = Chain("zero2 lora", "zero2", fault_campaign.LLAMA_LORA, tmp_path, STEPS, disk)
        full, dead = survive(chain, [Fault("files", "full disk", 2), Fault("mark", "raise", 2)])
    finally:
        if disk:
            disk.close()
    assert full["whole"] == 2  # the older checkpoint is intact
    if disk:
        assert full["outcome"] == "failed"
        assert re.search(r"error: the disk of output_dir \S+ is full.*checkpoint-2", (tmp_path / "00.log").read_text())
    assert (dead["resumed"], dead["whole"]) == (2, 4) and dead["seconds"] < fault_campaign.LIMIT


# ------------------------------------------------------------------------------------------------------- the campaign


def fault(**changes) -> dict:
    line = {"chain": "ddp lora", "strategy": "ddp", "recipe": "r", "config": "lora", "moment": "files"}
    return line | {"target": "rank 1", "whole": 4, "problems": [], "log": "00.log"} | changes


def test_the_table_counts_what_was_lost_and_leaves_out_chains_that_have_not_ended(tmp_path):
    lines = [
        fault(),
        fault(moment="step", target="damage: empty", problems=["the next start fails"]),
        {"chain": "ddp lora", "ended": True, "steps": 9, "problems": []},
        fault(chain="zero2 lora", strategy="zero2", target="launcher, SIGTERM"),
        {
            "chain": "zero2 lora",
            "ended": True,
            "steps": 9,
            "problems": ["other weights"],
        },  # none of its faults is survived
        fault(chain="fsdp lora", strategy="fsdp"),
    ]
    file = tmp_path / "faults.json"
    fault_campaign.write(lines, file)
    table = fault_campaign.markdown(json.loads(file.read_text())).splitlines()
    assert table[0] == "| struck | ddp | zero2 | tried | survived | lost |"
    assert table[2] == "| between two files of a save | 1/1 | 0/1 | 2 | 1 | 1 |"
    assert table[3] == "| the newest checkpoint damaged | 0/1 |  | 1 | 0 | 1 |"
    assert table[4] == "| all | 1/2 | 0/1 | 3 | 1 | 2 |"
    assert "2 kills: 0 of rank 0, 1 of rank 1, 0 of the launcher, 1 by SIGTERM" in table[-1]


def test_the_plan_has_each_moment_under_each_strategy_and_60_kills_or_more():
    plans = {name: fault_campaign.plan(name) for name in fault_campaign.SETTINGS}
    kills = [
        f for plan in plans.values() for faults in plan.values() for f in faults if f.target in fault_campaign.TARGETS
    ]
    assert len(kills) >= 60
    assert set(plans) == {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    for moment, _ in fault_campaign.BODY:
        assert sum(f.moment == moment for f in kills) == len(plans)
    for kind in fault_campaign.DAMAGES:
        assert any(f.target == f"damage: {kind}" for plan in plans.values() for faults in plan.values() for f in faults)


def test_of_the_measured_campaign_nothing_was_lost():
    told = result_tables.read("faults.json")
    kills = [line for line in told["faults"] if line["target"] in fault_campaign.TARGETS]
    assert len(kills) >= 60 and {line["strategy"] for line in kills} == set(fault_campaign.SETTINGS)
    assert [line for line in told["faults"] if not line["survived"]] == []
    assert fault_campaign.markdown(told) in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
