"""Publish a finished run on the Hugging Face Hub, with a model card that says what was measured.

    python scripts/push.py recipes/llama-3.2-1b/run OWNER/NAME --dry-run       # shows the card and the files, sends nothing
    python scripts/push.py recipes/llama-3.2-1b/run OWNER/NAME --private
    python scripts/push.py recipes/gpt-oss-20b/run OWNER/NAME --folder merged  # what scripts/export.py wrote of this run

What is sent is RUN/final, or --folder: weights, config, tokenizer, licence files of the base, and the card as README.md.
The folder itself is not changed, and training_args.bin stays here. The card's scores are those of RUN/scores.json: score
the run first. Refused: a run that is not done, files that are not whole, a secret or a path of this machine in a file, an
adapter whose base nobody else has, and --private for a repository that is public.

The licence is that of the base model: from its card here or on the Hub, else from --license; where none is found, the card
says so. Logging in: `hf auth login`, or HF_TOKEN. An interrupted push is finished by the same command.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

import model_card
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id
from model_card import CardError
from report_data import ReportError, Run, read_run
from safetensors import SafetensorError, safe_open

# What a model folder is made of. All else stays here: training_args.bin is a pickle with paths, optimizer states are not
# part of a result.
SENT = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
)
SENT += ("added_tokens.json", "merges.txt", "*.jinja", "LICEN[CS]E*", "*POLICY*", "NOTICE*")
LICENCES = ("LICEN[CS]E*", "*POLICY*", "NOTICE*")
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bAKIA[0-9A-Z]{16}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|(?<=://)[^@/\s\"]+:[^@/\s\"]+(?=@)"
)
VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt")  # of the base model, and large


def whole_files(folder: Path) -> list[Path]:
    """The files of `folder` that are sent. Raises CardError where weights are missing, cut off or still being written."""
    files = sorted({file for pattern in SENT for file in folder.glob(pattern) if file.is_file()})
    weights = [file for file in files if file.suffix == ".safetensors"]
    names = {file.name for file in files}
    if (folder / "EXPORT_IN_PROGRESS").exists():
        raise CardError(f"{folder} is an export that did not come to its end. Run scripts/export.py again.")
    if not weights:
        raise CardError(f"{folder} holds no weights (*.safetensors). Give the folder that training or export.py wrote.")
    for index in folder.glob("*.safetensors.index.json"):
        wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if missing := sorted(wanted - names):
            raise CardError(f"{index} names {', '.join(missing)}, which is not there. Export the run again.")
    for file in weights:
        try:
            with safe_open(file, "numpy") as content:
                empty = [name for name in content.keys() if 0 in content.get_slice(name).get_shape()]  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CardError(f"{file} is damaged or cut off ({error}). Export the run again.") from error
        if empty:
            raise CardError(f"{file}: the tensor {empty[0]} is empty. Export the run again from a whole checkpoint.")
    if "tokenizer_config.json" not in names:
        raise CardError(f"{folder} has no tokenizer (tokenizer_config.json), and nobody could use the model without.")
    return files


def private_words(name: str, text: str) -> str | None:
    """What in a file must not be published: a secret, or in JSON a path of this machine; as words, or None."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := SECRET.search(line):
            return f"{name}, line {number}: what begins with {found[0][:6]!r} looks like a secret"
    if name.endswith(".json"):
        for key, value in leaves(json.loads(text)):
            if isinstance(value, str) and re.match(r"(/|~/)[^/\s]+/\S", value):
                return f"{name}: {key} is {value!r}, a path of this machine"
    return None


def leaves(value, key: str = ""):
    """(key, value) of all that stands in a JSON value."""
    if isinstance(value, dict | list):
        for inner, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(child, f"{key}.{inner}" if key else str(inner))
    else:
        yield key, value


def made_by(run: Run, folder: Path) -> None:
    """Raises CardError for an exported folder whose card (export.py writes one) tells of another run or checkpoint."""
    card = folder / "README.md"
    told = (
        re.search(r"^\| Training loss \| (\S+) \|$", card.read_text("utf-8"), re.MULTILINE) if card.is_file() else None
    )
    losses = run.values("loss")
    if told and losses and float(told[1]) != losses[-1]:
        raise CardError(
            f"{folder} was exported from a model whose last training loss was {told[1]}, and that of {run.folder} was "
            f"{losses[-1]}. The card would not be true: give the run that it was exported from, at its end."
        )


def stage(folder: Path, files: list[Path], card: str, base: model_card.Source, place: Path) -> None:
    """Lay out in `place` what is sent: links to the files, the card, the base's licences, the base's published name.

    Raises CardError for what must not be published.
    """
    licences = [file for pattern in LICENCES for file in (base.folder.glob(pattern) if base.folder else ())]
    for file in [*licences, *files]:
        (place / file.name).unlink(missing_ok=True)  # the folder's own goes before the base's
        (place / file.name).symlink_to(file.resolve())
    (place / "README.md").write_text(card, encoding="utf-8")
    adapter = place / "adapter_config.json"
    if adapter.is_file():
        config = json.loads(adapter.read_text(encoding="utf-8"))
        if not base.on_hub:
            raise CardError(
                f"the adapter in {folder} was trained on {config['base_model_name_or_path']}, a folder that nobody else "
                "has. If it is a copy of a published model, name that with --base OWNER/NAME. Otherwise push the merged "
                "model: scripts/export.py RUN merged --merge, then --folder merged."
            )
        adapter.unlink()
        config |= {"base_model_name_or_path": base.name, "revision": base.revision}
        adapter.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    texts = [file for file in sorted(place.iterdir()) if file.suffix in (".json", ".md", ".jinja", ".txt")]
    for file in texts:
        if file.name not in VOCABULARY and (problem := private_words(file.name, file.read_text(encoding="utf-8"))):
            raise CardError(f"{folder}/{problem}. Nothing was sent. Take it out, and push again.")


def prepare(arguments: argparse.Namespace, place: Path) -> model_card.Source:
    """Check everything and lay it out in `place`; returns the base model. Raises CardError, or ReportError for no run."""
    validate_repo_id(arguments.repo_id)
    if "/" not in arguments.repo_id:
        raise CardError(
            f"{arguments.repo_id!r} names no owner. Give OWNER/NAME, the owner being you or an organization."
        )
    run = read_run(arguments.run)
    if run.outcome != "done":
        raise CardError(
            f"the outcome of {arguments.run} is `{run.outcome}`, and only a run that is `done` is published. Start the same "
            "command again to finish it."
        )
    folder = arguments.folder or arguments.run / "final"
    if not folder.is_dir():
        raise CardError(f"{folder} is no folder. Give the one that scripts/export.py wrote with --folder.")
    files = whole_files(folder)
    if arguments.folder:
        made_by(run, folder)
    base, dataset = model_card.find_base(run, arguments.base), model_card.find_dataset(run)
    model_card.look_up(base, "model")
    model_card.look_up(dataset, "dataset")
    if arguments.license:
        base.license, base.license_name, base.license_link = arguments.license, None, None
    stage(folder, files, str(model_card.model_card(run, folder, arguments.repo_id, base, dataset)), base, place)
    return base


def notes(base: model_card.Source, repo_id: str, run: Path) -> list[str]:
    """What a person should know before this is public."""
    told = []
    if not base.license_words:
        told.append(
            f"The licence of {base.name} was not found. Read it before you publish; --license ID puts it on the card."
        )
    elif base.license_words.startswith("llama") and not repo_id.rpartition("/")[2].lower().startswith("llama"):
        told.append("The Llama licences ask that the name of a derived model begins with `Llama`.")
    elif base.license_words != "apache-2.0" and base.license_words != "mit":
        told.append(f"{base.name} is under {base.license_words}. Read what it says about derived models.")
    if base.on_hub and not base.checked:
        told.append(
            f"The Hub could not be asked about {base.name}: its name, revision and licence are as the run has them."
        )
    if not (run / "scores.json").is_file():
        told.append("The run was not scored: the card has no comparison with the base.")
    return told


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir of a recipe's train.py")
    parser.add_argument("repo_id", metavar="OWNER/NAME", help="the model repository; made where it is not there")
    parser.add_argument("--folder", type=Path, help="send this export of the run; default: RUN/final")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--base", metavar="OWNER/NAME", help="published name of a base that was a local folder")
    parser.add_argument("--license", metavar="ID", help="licence of the base, where its card does not tell")
    parser.add_argument("--dry-run", action="store_true", help="show the card and the files; send nothing")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        try:
            base = prepare(arguments, place)
            if arguments.dry_run:
                print((place / "README.md").read_text(encoding="utf-8"))
            for file in sorted(place.iterdir()):
                print(f"{file.stat().st_size:>14,}  {file.name}")
            for note in notes(base, arguments.repo_id, arguments.run):
                print(f"note: {note}")
            if arguments.dry_run:
                print(f"nothing was sent to {arguments.repo_id}")
                return 0
            api = HfApi()
            api.create_repo(arguments.repo_id, private=True if arguments.private else None, exist_ok=True)
            if arguments.private and not api.model_info(arguments.repo_id).private:
                raise CardError(
                    f"{arguments.repo_id} exists and is public, and --private was given. Make it private in its settings "
                    "on the Hub, or choose another name."
                )
            done = api.upload_folder(
                repo_id=arguments.repo_id, folder_path=place, commit_message=f"Fine-tuned from {base.name}"
            )
        except (CardError, ReportError, HFValidationError, OSError, ValueError) as error:
            told = f"{type(error).__name__}: " if isinstance(error, HfHubHTTPError | OfflineModeIsEnabled) else ""
            print(f"push.py: {told}{' '.join(str(error).split())}", file=sys.stderr)
            return 1
    print(done.commit_url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
