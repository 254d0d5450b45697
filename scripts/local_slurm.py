"""A Slurm cluster of two nodes on this machine, for the engine campaign: munged, slurmctld and two slurmd, all real.

Needs Debian's `slurm-wlm` and `munge`. Every daemon is a child of this process and is stopped by `stop`.
"""

import contextlib
import getpass
import os
import random
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil

CONFIGURATION = """
ClusterName=cookbook
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={work}/munge.socket
CredType=cred/munge
StateSaveLocation={work}/state
SlurmdSpoolDir={work}/spool-%n
SlurmctldPidFile={work}/slurmctld.pid
SlurmdPidFile={work}/slurmd-%n.pid
SlurmctldLogFile={work}/slurmctld.log
SlurmdLogFile={work}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=15
KillWait=5
InactiveLimit=0
SchedulerParameters=sched_interval=1,bf_interval=1,requeue_delay=0
JobRequeue=1
MaxJobCount=100
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores} State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2
"""


class Cluster:
    """Two nodes, n1 and n2, with one slot for each core of this machine; partition `urgent` preempts `main`."""

    def __init__(self, work: Path):
        self.work, self.daemons = work, {}
        missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not find(name)]
        if missing:
            raise FileNotFoundError(f"{', '.join(missing)}: apt-get install slurm-wlm munge")
        (work / "state").mkdir(parents=True)
        for node in ("n1", "n2"):
            (work / f"spool-{node}").mkdir()
        text = CONFIGURATION.format(
            work=work, host=socket.gethostname(), user=getpass.getuser(), cores=os.cpu_count(), ports=free_ports(3)
        )
        (work / "slurm.conf").write_text(text)
        self.variables = {"SLURM_CONF": str(work / "slurm.conf")}
        key = work / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        flags = [f"--{flag}={work}/munge.{ending}" for flag, ending in files.items()]
        try:
            self.start("munged", "--foreground", "--force", f"--key-file={key}", *flags)
            self.wait((work / "munge.socket").exists, 60, "munge's socket", every=0.05)
            self.start("slurmctld", "-D")
            for node in ("n1", "n2"):
                self.start_node(node)
            idle = ["idle", "2"]
            self.wait(lambda: self.call("sinfo", "-h", "-o", "%T %D").split() == idle, 120, "two idle nodes")
        except BaseException:
            self.stop()
            raise

    def start(self, program: str, *flags: str, name: str | None = None) -> None:
        log = open(self.work / f"{name or program}.out", "a")  # noqa: SIM115 the daemon's, for as long as it lives
        variables = os.environ | self.variables
        self.daemons[name or program] = subprocess.Popen(
            [find(program), *flags], env=variables, stdout=log, stderr=log, start_new_session=True
        )

    def start_node(self, node: str) -> None:
        self.start("slurmd", "-D", "-N", node, name=node)

    def take_down(self, node: str) -> None:
        """As a node that loses power: its daemon, its steps and all that they started are killed at once."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()
        self.kill_steps(node)

    def kill_steps(self, node: str | None = None) -> None:
        """Kill what the steps of this cluster, on `node` or on both, have started; they are no children of slurmd."""
        for step in psutil.process_iter(["name"]):
            if step.info["name"] != "slurmstepd":
                continue
            family, variables = [], {}
            with contextlib.suppress(psutil.Error):
                family = step.children(recursive=True)
                for child in family:
                    variables |= child.environ()
            if variables.get("SLURM_CONF") != self.variables["SLURM_CONF"]:
                continue
            if node is None or variables.get("SLURMD_NODENAME") == node:
                for process in [step, *family]:
                    with contextlib.suppress(psutil.Error):
                        process.kill()

    def call(self, *words: str) -> str:
        done = subprocess.run(words, env=os.environ | self.variables, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def state(self, job: str) -> str:
        """COMPLETED, RUNNING, PENDING, FAILED ..., and how often it was restarted: `RUNNING 0`."""
        shown = dict(word.partition("=")[::2] for word in self.call("scontrol", "-o", "show", "job", job).split())
        return f"{shown['JobState']} {shown['Restarts']}"

    def wait(self, condition, seconds: float, what: str, every: float = 0.5) -> None:
        begun = time.monotonic()
        while True:
            try:
                if condition():
                    return
            except RuntimeError as error:  # a daemon that is still starting
                what = f"{what} ({error})"
            if time.monotonic() - begun > seconds:
                raise TimeoutError(f"no {what} after {seconds} s; logs: {self.work}")
            time.sleep(every)

    def stop(self) -> None:
        self.kill_steps()
        for daemon in reversed(list(self.daemons.values())):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()


def find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def free_ports(count: int) -> list[int]:
    """Ports in a row that nothing listens on, below those that connections get: free minutes later, too, most likely."""
    while True:
        first = random.SystemRandom().randrange(20000, 32000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(first, first + count))
