"""On real engines a node that is lost is replaced, and the run comes to the same losses and the same weights."""

import json
import os
import shutil
import socket
from pathlib import Path

import engine_campaign
import launching
import local_slurm
import pytest
import smoke

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "llama-3.2-1b"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two real Slurm nodes on this machine."""
    try:
        made = local_slurm.Cluster(tmp_path_factory.mktemp("slurm") / "cluster")
    except FileNotFoundError as error:
        pytest.skip(f"Slurm is not installed ({error}); .ci/run installs it")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def unbroken(benches):
    """final/ of a run on two processes that nothing happens to, by strategy."""
    made = {}

    def final(strategy: str) -> Path:
        bench = benches(RECIPE)
        if strategy not in made:
            made[strategy] = bench.work / f"unbroken-{strategy}"
            # Fresh: a fork has the number of threads of its parent, and the last bit of a sum depends on it.
            result = bench.launch(strategy, made[strategy], 2, bench.work / f"unbroken-{strategy}.log", fresh=True)
            assert result.rc == 0, smoke.reason(result.output)
        return made[strategy] / "final"

    return final


def test_slurm_job_is_queued_again_after_a_node_is_lost_and_comes_to_the_same_losses(benches, cluster):
    bench = benches(RECIPE)
    cell = engine_campaign.run_cell("slurm", bench, "ddp", "down", cluster)
    assert cell.error is None, cell.error
    run = bench.work / "slurm-ddp-down"
    ends = [entry for entry in map(json.loads, (run / "starts.jsonl").open()) if "exit_code" in entry]
    assert [entry["exit_code"] for entry in ends][-1] == 0


def test_slurm_job_with_a_bad_key_is_not_queued_again(benches, cluster, tmp_path):
    bench = benches(RECIPE)
    cluster.variables |= engine_campaign.environment(bench)
    line = [*engine_campaign.launch_line(bench, "ddp", tmp_path / "run"), "--learning_rte", "1"]
    options = ["--parsable", "--nodes=2", "--gpus-per-node=0", "--time=10", f"--output={tmp_path}/log"]
    job = cluster.call("sbatch", *options, "scripts/engines/slurm.sbatch", *line).strip()
    cluster.wait(lambda: cluster.state(job).split()[0] in ("FAILED", "COMPLETED"), 400, "end of the job")
    assert cluster.state(job) == "FAILED 0"
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert "learning_rate" in log and "exit code 78" in log


def test_plain_launchers_that_share_no_output_folder_are_refused(benches, tmp_path):
    bench, machines = benches(RECIPE), []
    address = ("--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1")
    address += ("--main_process_port", str(local_slurm.free_ports(1)[0]))
    for rank in ("0", "1"):
        disk = tmp_path / f"machine-{rank}"
        disk.mkdir()
        options = {"launcher": (*address, "--machine_rank", rank), "cwd": disk, "log": tmp_path / f"{rank}.log"}
        options["environment"] = {"HF_HOME": str(bench.work / "cache"), "GUARD_REFUSAL_FILE": str(disk / "refusal")}
        machines.append(launching.start(bench.folder, "ddp", *bench.arguments(Path("run"), 2), **options))
    results = [machine.wait(120) for machine in machines]
    assert [result.rc for result in results] == [1, 1]
    told = f"output_dir {tmp_path}/machine-1/run on {socket.gethostname()} is not the folder that"
    assert told in results[0].output and "(rank 1 of 2)" in results[0].output
    assert all(told in (tmp_path / f"machine-{rank}" / "refusal").read_text(encoding="utf-8") for rank in (0, 1))


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ("ddp", "fsdp", "zero3"))
@pytest.mark.parametrize("event", ("term", "preempt", "down"))
def test_slurm_job_comes_to_the_same_weights(benches, cluster, unbroken, strategy, event):
    cell = engine_campaign.run_cell("slurm", benches(RECIPE), strategy, event, cluster, unbroken(strategy))
    assert cell.error is None, cell.error


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ("ddp", "fsdp", "zero3"))
def test_ray_job_comes_to_the_same_weights_after_a_worker_is_killed(benches, unbroken, strategy):
    bench = benches(RECIPE)
    cell = engine_campaign.run_cell("ray", bench, strategy, "down", unbroken=unbroken(strategy))
    assert cell.error is None, cell.error
    log = (bench.work / f"ray-{strategy}-down.log").read_text(encoding="utf-8")
    # What a node logs in the half second before it is killed is in metrics.jsonl, and not reported.
    for step in range(smoke.SAVE_EVERY + 1, smoke.STEPS + 1):
        assert f"step {step}: loss " in log, "each step is reported to Ray"


@pytest.mark.matrix
def test_hosts_end_in_time_when_the_network_is_cut_and_resume(benches, unbroken):
    if os.getuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    cell = engine_campaign.run_cell("hosts", benches(RECIPE), "ddp", "cut", unbroken=unbroken("ddp"))
    assert cell.error is None, cell.error


def test_table_in_the_docs_is_what_was_measured():
    kept = engine_campaign.read_table()
    assert engine_campaign.docs_table(kept) in (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert {cell["engine"] for cell in kept["cells"]} == {"slurm", "ray", "hosts"}
    assert not [cell for cell in kept["cells"] if cell["error"]]
