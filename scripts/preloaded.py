"""Starts `accelerate launch` in a fork of a process that has imported the libraries already; for tests, on Linux.

Importing torch, transformers and TRL is most of what a launch with a tiny model costs, once in the launcher and once in
every rank. Here the launcher is a fork of multiprocessing's fork server, and each rank is a fork of its launcher. What
runs is the same: accelerate's command line, torchrun's agent, train.py as `__main__`, in processes of their own with
the environment, the arguments and the exit code of a fresh start. Not the same: variables that a library reads while it
is imported (HF_HOME is looked after), and Python's hash seed, which all forks share. So launching.py forks only where it
is told to, and smoke.py starts each strategy fresh the first time.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

# What train.py, its neighbours and the launcher import, and what tiny models and their trainer import when they are used.
PRELOADED = [
    "accelerate.commands.accelerate_cli",
    "torch.distributed.run",
    "torch.distributed.checkpoint",
    "datasets",
    "peft",
    "trl.trainer.sft_trainer",
    "trl.scripts.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.gpt_oss.modeling_gpt_oss",
]


class Forked(multiprocessing.get_context("forkserver").Process):
    """`python -m accelerate...` `words`, with the part of subprocess.Popen's interface that launching.py uses."""

    def __init__(self, words: list[str], cwd: Path, env: dict[str, str], log: Path):
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
        # A daemon: a test that fails midway leaves nothing to wait for.
        super().__init__(target=_launcher, args=(words, str(cwd), env, str(log), _clean_path()), daemon=True)
        self.start()

    returncode = property(lambda self: self.exitcode)
    wait = multiprocessing.Process.join

    def poll(self) -> int | None:
        return self.exitcode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self.pid, number)


@functools.cache
def _clean_path() -> list[str]:
    """sys.path of a fresh Python, less the folder of its program; tests have put more into this one's."""
    told = subprocess.check_output([sys.executable, "-c", "import sys; print(*sys.path[1:], sep='\\n')"], text=True)
    return told.splitlines()


class _Rank(subprocess.Popen):
    """A Python program started by the launcher: a fork of it. Any other program is started as always."""

    def __init__(self, args, env=None, **options):
        self.env, self.own_session = env, options.get("start_new_session")
        super().__init__(args, env=env, **options)

    def _execute_child(self, args, *more):
        if args[0] != sys.executable:
            return super()._execute_child(args, *more)
        sys.stdout.flush(), sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _program(list(args[2:] if args[1] == "-u" else args[1:]), self.env, self.own_session)
        self._child_created = True


def _launcher(words: list[str], cwd: str, env: dict[str, str], log: str, path: list[str]) -> None:
    """What the fork server's child does: `accelerate launch` with its ranks forked."""
    from accelerate.commands import accelerate_cli, launch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    global inherited
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    inherited = set(os.listdir("/proc/self/fd"))
    multiprocessing.current_process()._config["daemon"] = False  # which may have no children
    gc.freeze()  # what is imported is not looked through again in every fork
    sys.path[:] = [str(cwd), *path]
    _environment(env)
    os.chdir(cwd)
    launch.subprocess = type("subprocess", (), vars(subprocess) | {"Popen": _Rank})
    subprocess_handler.Popen = _Rank
    sys.argv = ["accelerate", *words]
    accelerate_cli.main()


def _environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    for name in ("huggingface_hub.constants", "datasets.config"):  # both read HF_HOME
        if name in sys.modules:
            importlib.reload(sys.modules[name])


def _program(words: list[str], env: dict[str, str], own_session: bool) -> None:
    """Become `python -u SCRIPT ARGUMENTS`; ends this process as Python ends."""
    code = 1
    try:
        if own_session:
            os.setsid()
        for number in set(os.listdir("/proc/self/fd")) - inherited:  # the launcher's sockets
            with contextlib.suppress(OSError):
                os.close(int(number))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # the agent has its own
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        atexit._clear()
        _environment(env)
        faulthandler.enable()
        sys.stdout.reconfigure(write_through=True)
        import numpy
        import torch

        random.seed(), numpy.random.seed()
        if "OMP_NUM_THREADS" in env:
            torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush(), sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
        os._exit(code)
