"""The launch files serve several machines through accelerate's flags: two launchers on this one train together."""

import launching
import local_slurm
import pytest
import smoke

STEPS = 3
QUICK = ("fsdp", "zero2")  # the two launchers of accelerate, torchrun's and DeepSpeed's; the others with --matrix


def strategies():
    for strategy in launching.STRATEGIES:
        if strategy != "single":
            yield pytest.param(strategy, marks=[] if strategy in QUICK else [pytest.mark.matrix])


@pytest.mark.parametrize("strategy", strategies())
def test_two_launchers_train_as_one_process(benches, tmp_path, strategy):
    bench = benches("llama-3.2-1b")
    port = local_slurm.free_ports(1)[0]
    run = tmp_path / "run"
    arguments = [*bench.arguments(run, 2), "--max_steps", str(STEPS), "--save_strategy", "no"]
    machines = []
    for rank in (0, 1):
        flags = {"num_machines": 2, "num_processes": 2, "machine_rank": rank}
        flags |= {"main_process_ip": "127.0.0.1", "main_process_port": port}
        launcher = tuple(word for name, value in flags.items() for word in (f"--{name}", str(value)))
        log, environment = tmp_path / f"machine-{rank}.log", {"HF_HOME": str(bench.work / "cache")}
        machines.append(
            launching.start(bench.folder, strategy, *arguments, log=log, launcher=launcher, environment=environment)
        )
    results = [machine.wait(300) for machine in machines]
    for result in results:
        assert result.rc == 0, smoke.reason(result.output)
    assert f"strategy {strategy} over 2 process(es)" in results[0].output
    assert launching.losses(run) == pytest.approx(bench.reference[:STEPS], rel=smoke.TOLERANCE["fp32"])
    assert (run / "final").is_dir()
