"""Brings the guard files of recipe folders up to date: the same files (FILES) lie in every recipe, copied ones too.

    python scripts/sync_guard.py ../my-recipe            # copy the guard files there
    python scripts/sync_guard.py --check recipes/*       # exit 1 and name what differs, change nothing

The files of recipes/llama-3.2-1b are the original.
"""

import argparse
import filecmp
import shutil
import sys
from pathlib import Path

FILES = ("ranks.py", "guard.py", "keeper.py", "speed.py", "watcher.py", "run_log.py", "inputs.py", "prepared.py")
ORIGINAL = Path(__file__).resolve().parent.parent / "recipes" / "llama-3.2-1b"


def outdated(folder: Path) -> list[str]:
    """The guard files of `folder` that are missing there or differ from the original."""
    return [name for name in FILES if not (folder / name).is_file() or not _same(folder / name, ORIGINAL / name)]


def _same(one: Path, other: Path) -> bool:
    return filecmp.cmp(one, other, shallow=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="recipe folders, each with a train.py")
    parser.add_argument("--check", action="store_true", help="only say what differs")
    arguments = parser.parse_args()
    differs = False
    for folder in arguments.folders:
        if not (folder / "train.py").is_file():
            sys.exit(
                f"error: {folder} holds no train.py, so it is no recipe folder. Name the folder that train.py is in."
            )
        for name in outdated(folder):
            differs = True
            print(f"{folder / name}: {'differs' if arguments.check else 'updated'}")
            if not arguments.check:
                shutil.copyfile(ORIGINAL / name, folder / name)
    return int(differs and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
