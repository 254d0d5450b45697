"""Does the lint stay quiet on what other projects publish? Over a folder of accelerate and DeepSpeed files.

    python scripts/check_published.py FOLDER      # FOLDER/OWNER/NAME/PATH; updates docs/published_configs.json

docs/published_configs.json lists the files, by repository, path and commit (or release); none of them is kept here. For
each file the installed library is asked first: accelerate's own reading of the file, its launcher and its plugins, or
DeepSpeed's own config class. An error of the lint is true where the library stops, too, or where the key is none that
the library knows (it then ignores it in silence). Everything else would be a false error, and makes the exit code 1.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import check_files
from check_launch import ROOT, load_json, load_yaml

LIST = ROOT / "docs" / "published_configs.json"


def library_says(path: Path) -> str | None:
    """Why accelerate or DeepSpeed refuses a file, or None."""
    keys = (load_json if path.suffix == ".json" else load_yaml)(path)[0]
    with contextlib.redirect_stdout(io.StringIO()), patch.dict(os.environ), contextlib.chdir(path.parent):
        try:
            if "distributed_type" not in keys:
                return check_files.deepspeed_says(keys)
            _accelerate(path)
        except Exception as error:
            if "no available devices" in str(error):  # the last thing that FSDP1's plugin asks for, after all keys
                return None
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _accelerate(path: Path) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    args = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, _, _ = _validate_launch_command(args)
    if args.use_fsdp:
        os.environ.update(prepare_multi_gpu_env(args))
        FullyShardedDataParallelPlugin()


def judge(path: Path) -> dict:
    """What the library and the lint say of one file; `false_errors` are those that neither bears out."""
    said, found = library_says(path), check_files.lint_file(path)
    errors = [finding for finding in found if finding.severity == "error"]
    ignored = [f for f in errors if f.rule in ("unknown-nested-key", "unknown-key") and "silence" in f.why]
    false = [] if said else [finding for finding in errors if finding not in ignored]
    return {
        "library": said or "accepts",
        "errors": [f"{finding.key}: {finding.why}" for finding in errors],
        "warnings": [f"{finding.key}: {finding.why}" for finding in found if finding.severity == "warning"],
        "false_errors": [finding.key for finding in false],
    }


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]).resolve()
    kept = json.loads(LIST.read_text(encoding="utf-8"))
    for line in kept["files"]:
        path = folder / line["repository"] / line["path"]
        if path.is_file():
            line |= {key: json.loads(json.dumps(value).replace(f"{folder}/", "")) for key, value in judge(path).items()}
        else:
            print(f"not in {folder}: {line['repository']}/{line['path']}")
    listed = {f"{line['repository']}/{line['path']}" for line in kept["files"]}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and str(path.relative_to(folder)) not in listed:
            print(f"not in {LIST.name}: {path.relative_to(folder)}")
    valid = [line for line in kept["files"] if line["library"] == "accepts"]
    false = [line for line in kept["files"] if line["false_errors"]]
    LIST.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{len(kept['files'])} files, {len(valid)} of them accepted by the library, {len(false)} with a false error")
    for line in kept["files"]:
        for error in line["errors"]:
            print(f"{line['repository']}/{line['path']}: {error} [library: {line['library'][:80]}]")
    return int(bool(false))


if __name__ == "__main__":
    sys.exit(main())
