"""The model card of a finished run: what run.json, metrics.jsonl and scores.json say, and nothing beside that.

scripts/push.py writes it. A path of this machine becomes the name of its file or folder; what is not known is said to be
unknown, and never guessed.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import jinja2
import report
import report_scores
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from report_data import Run, Scores

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
BASE_RECORD = "cookbook.json"  # where scripts/export.py --bf16 keeps the published name of what it converted
LLAMA = (  # what the Llama licences (3 and newer, section 1.b) ask of everyone who publishes a derived model
    "Built with Llama. {name} is licensed under the {name} Community License, Copyright © Meta Platforms, Inc. All "
    "Rights Reserved."
)


class CardError(ValueError):
    """Why no true card can be written, in one paragraph."""


@dataclass
class Source:
    """A model or dataset that a run was made from. name: its Hub id, or the name of a local folder or file."""

    name: str
    on_hub: bool
    revision: str | None = None
    folder: Path | None = None  # where its files lie on this machine
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    checked: bool = False  # whether the Hub was asked, and has it

    @property
    def license_words(self) -> str | None:
        return self.license_name or self.license

    def link(self, kind: str = "") -> str:
        """The name as Markdown, linked to its page where it has one. kind: "" for a model, "datasets/"."""
        if not self.on_hub:
            return f"`{self.name}` (not on the Hub)"
        return f"[{self.name}](https://huggingface.co/{kind}{self.name})"


def published_name(text: str) -> bool:
    """Whether `text` may be a Hub id: at most two parts, no path, nothing of that name here."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text) is not None and text[0] not in ".~" and not Path(text).exists()


def find_base(run: Run, named: str | None = None) -> Source:
    """The published model that a run started from: `named`, else what run.json or the folder's cookbook.json names."""
    recorded = run.arguments.get("model_name_or_path") or ""
    folder, revision = Path(recorded), None
    if folder.is_dir():
        record = folder / BASE_RECORD
        told = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
        cached = re.fullmatch(
            r".*/models--([^/]+)/snapshots/([^/]+)", str(folder.resolve())
        )  # a folder of the Hub's cache
        found = told.get("base_model_name_or_path") or (cached and cached[1].replace("--", "/"))
        revision = told.get("base_model_revision") or (cached and cached[2])
    else:
        folder, found, revision = None, recorded, run.arguments.get("model_revision")
    if named and named != found:
        found, revision = named, None
    if found and published_name(found):
        return Source(found, True, revision, folder)
    return Source(folder.resolve().name if folder else Path(recorded).name, False, None, folder)


def find_dataset(run: Run) -> Source:
    """The data of a run: a Hub id, or the name of a local file or folder."""
    name = (run.arguments.get("dataset_name") or "").partition(", sha256 ")
    if not name[1] and name[0] and published_name(name[0]):
        return Source(name[0], True, run.arguments.get("dataset_revision"))
    return Source(Path(name[0]).name, False)


def look_up(source: Source, kind: str) -> None:
    """Fill in the licence: from the card beside the files here, else from the Hub. kind: "model" or "dataset".

    The Hub is asked in any case whether it has this name and revision. Raises CardError where it has no such model; data
    that it has not is local. Without a network nothing is raised, and `checked` stays False.
    """
    cards = [source.folder / "README.md"] if source.folder else []
    if source.on_hub:
        cached = try_to_load_from_cache(source.name, "README.md", revision=source.revision, repo_type=kind)
        if isinstance(cached, str):
            cards.append(Path(cached))
            source.folder = source.folder or Path(cached).parent
    data = next((ModelCard.load(card, ignore_metadata_errors=True).data for card in cards if card.is_file()), None)
    if source.on_hub:
        try:
            info = HfApi().repo_info(source.name, revision=source.revision, repo_type=kind, timeout=20)
            source.checked, data = True, (data if data and data.get("license") else info.card_data)
        except GatedRepoError:
            source.checked = True  # it is there, and its licence was not accepted for this token
        except (RepositoryNotFoundError, RevisionNotFoundError):
            if kind == "dataset":  # a local folder that is not there any more, or private data
                source.on_hub = False
                return
            at = f" at revision {source.revision}" if source.revision else ""
            raise CardError(
                f"the run names {source.name}{at} as its base, and the Hub shows no such model to this token. Give the "
                "published model that the base is a copy of with --base OWNER/NAME."
            ) from None
        except Exception:  # httpx, the file system and the offline switch each have their own errors
            pass
    if data:
        source.license = data.get("license")
        source.license_name, source.license_link = data.get("license_name"), data.get("license_link")


# ---- what a folder holds ---------------------------------------------------------------------------------------------


def kind_of(folder: Path, run: Run) -> str:
    """adapter, merged or full; mxfp4 where the folder's experts are stored so. Raises CardError for another folder."""
    if (folder / "adapter_config.json").is_file():
        return "adapter"
    if not (folder / "config.json").is_file():
        raise CardError(f"{folder} holds no model: it has neither config.json nor adapter_config.json.")
    return "merged" if run.arguments.get("use_peft") else "full"


def is_mxfp4(folder: Path) -> bool:
    file = folder / "config.json"
    return file.is_file() and "mxfp4" in str(json.loads(file.read_text(encoding="utf-8")).get("quantization_config"))


# ---- parts of the card -----------------------------------------------------------------------------------------------


def trained_what(run: Run, kind: str) -> str:
    """Full, LoRA or QLoRA, with rank and place."""
    given = run.arguments
    if not given.get("use_peft"):
        return "all weights"
    places = [*(given.get("lora_target_modules") or []), *(given.get("lora_target_parameters") or [])]
    told = (
        f"LoRA of rank {given['lora_r']}, alpha {given['lora_alpha']}, on {', '.join(places) or 'the default layers'}"
    )
    told += "; the base was held in 4 bits" if given.get("load_in_4bit") else ""
    return told + ("; merged into the base" if kind == "merged" else "")


def public_command(run: Run) -> str:
    """The launch line of the run, an option a line, without paths of this machine and without output_dir."""
    lines = []
    for line in run.command.split(" \\\n"):
        words = shlex.split(line)
        if words[0].startswith("--"):
            words[:1] = words[0].split("=", 1)
        key, *values = words
        if key == "--output_dir":
            continue
        source = key in ("--dataset_name", "--model_name_or_path")
        for place, value in enumerate(values):
            if value.startswith(("/", "~", "../")) or (source and Path(value).exists()):
                values[place] = Path(value).name
        lines.append(("  " if lines else "") + shlex.join([key, *values]))
    return " \\\n".join(lines)


def score_tables(run: Run) -> list[dict]:
    """Tables of scores.json: title, and rows of label, base, tuned as text."""

    def cell(pair: tuple[str, str]) -> str:
        return f"{pair[0]} ({pair[1]})" if pair[1] else pair[0] or "–"

    tables = []
    for scores in run.scores:
        if not scores.tuned:
            continue
        rows = [row | {key: cell(row[key]) for key in ("base", "tuned")} for row in report_scores.score_rows(scores)]
        if not scores.is_loss:
            for name in scores.newest["fields"]:
                pair = [(each or {}).get("fields", {}).get(name, {}).get("f1") for each in (scores.base, scores.tuned)]
                base, tuned = ("–" if value is None else f"{value:.3f}" for value in pair)
                rows.append({"label": f"F1 of `{name}`", "base": base, "tuned": tuned})
        count = f"{scores.newest['rows']} rows" if scores.is_loss else f"{scores.newest['documents']} documents"
        where = "held out of the training data" if is_held_out(scores) else f"of `{Path(scores.rows).name}`"
        tables.append({"title": f"{count} {where}, {scores.newest.get('date', 'no date')}", "rows": rows})
    return tables


def score_notes(run: Run, folder: Path, kind: str) -> str:
    """What was scored, where that is not the very folder that is published."""
    told = "In brackets: 95 % interval."
    if kind == "merged":
        held = "a 4-bit base" if run.arguments.get("load_in_4bit") else "its base"
        told += f" Scored was the adapter on {held}, before it was merged"
        told += " and the experts were rounded to MXFP4." if is_mxfp4(folder) else "."
    elif is_mxfp4(folder):
        told += " Scored was the model before its experts were rounded to MXFP4."
    return told


def is_held_out(scores: Scores) -> bool:
    return scores.is_loss or scores.rows == "held-out rows"


def results(run: Run, dataset: Source) -> list[EvalResult]:
    """The tuned model's scores for the card's model-index."""
    found = []

    def add(file: str | None, kind: str, name: str, value: float | None) -> None:
        if value is None:  # nothing was there to be found
            return
        rows = {"dataset_type": file or dataset.name, "dataset_name": file or f"{dataset.name}, held-out rows"}
        rows |= {} if file else {"dataset_split": "held-out", "dataset_revision": dataset.revision}
        found.append(EvalResult("text-generation", metric_type=kind, metric_name=name, metric_value=value, **rows))

    for scores in run.scores:
        if not scores.tuned:
            continue
        file = None if is_held_out(scores) else Path(scores.rows).name
        if scores.is_loss:
            add(file, "loss", "Held-out loss", scores.tuned["loss"])
            add(file, "perplexity", "Perplexity", scores.tuned["perplexity"])
        else:
            add(file, "f1", "Field F1", scores.tuned["micro_f1"])
            add(file, "f1", "Field F1, exact characters", scores.tuned["micro_f1_exact"])
    if not any(scores.is_loss and scores.tuned for scores in run.scores) and run.values("eval_loss"):
        add(None, "loss", "Evaluation loss", run.values("eval_loss")[-1])
    return found


def training_rows(run: Run, kind: str, base: Source, dataset: Source) -> list[tuple[str, str]]:
    """(label, value) of how it was trained."""
    given, record = run.arguments, run.record
    rows = [
        ("Base model", base.link() + (f", revision `{base.revision}`" if base.revision else "")),
        ("Data", dataset.link("datasets/") + (f", revision `{dataset.revision}`" if dataset.revision else "")),
        *report.data_rows(run),
        ("Method", "supervised fine-tuning (TRL's SFTTrainer), " + trained_what(run, kind)),
        ("Steps", f"{run.steps}, global batch {run.global_batch}"),
        ("Learning rate", f"{given.get('learning_rate')}, {given.get('lr_scheduler_type')}"),
        ("Arithmetic", "bf16" if given.get("bf16") else "fp16" if given.get("fp16") else "fp32"),
        ("Strategy", report.strategy_in_words(given)),
        ("Hardware", run.hardware),
        ("Time", report.duration(run.seconds) if run.seconds else None),
        ("Finished", record.get("time")),
        ("Versions", ", ".join(f"{name} {value}" for name, value in record.get("versions", {}).items() if value)),
    ]
    return [(label, value) for label, value in rows if value]


def licence_words(base: Source, dataset: Source) -> str:
    """What is known of the licences of model and data."""
    if base.license_words:
        where = f" ([text]({base.license_link}))" if base.license_link else ""
        told = f"The base model is under `{base.license_words}`{where}, and so are these weights."
        if name := re.fullmatch(r"llama(\d(?:\.\d)?)", base.license_words):
            told += " " + LLAMA.format(name=f"Llama {name[1]}")
    elif base.on_hub:
        told = f"The licence of the base model was not found. Look at {base.link()} before you use these weights."
    else:
        told = "The licence of the base model is not known."
    if dataset.license_words:
        return f"{told} The data is under `{dataset.license_words}`."
    return f"{told} The licence of the data is " + (
        f"what the page of {dataset.link('datasets/')} says." if dataset.on_hub else "not known."
    )


def model_card(run: Run, folder: Path, repo_id: str, base: Source, dataset: Source) -> ModelCard:
    """The card of the model in `folder`, made by `run`, for the repository `repo_id`."""
    kind, given = kind_of(folder, run), run.arguments
    tags = ["trl", "sft", *(["lora"] if given.get("use_peft") else []), *(["mxfp4"] if is_mxfp4(folder) else [])]
    settings = given.get("chat_template_kwargs") or {}
    data = ModelCardData(
        base_model=base.name if base.on_hub else None,
        base_model_relation=("adapter" if kind == "adapter" else "finetune") if base.on_hub else None,
        library_name="peft" if kind == "adapter" else "transformers",
        license=base.license,
        license_name=base.license_name,
        license_link=base.license_link,
        datasets=[dataset.name] if dataset.on_hub else None,
        pipeline_tag="text-generation",
        tags=tags,
        model_name=repo_id.rpartition("/")[2],
        eval_results=results(run, dataset) or None,
    )
    what = {"full": "All weights", "adapter": "A LoRA adapter", "merged": "A LoRA adapter, merged into its base"}[kind]
    losses = run.curve("eval_loss")
    use = "The chat template is the base model's own."
    if settings:
        use += " Its settings are those of the training: another date, mode or effort is another prompt."
    if given.get("schema_file"):
        use += " It reads documents with the prompt of its training, which the recipe's predict.py builds."
    limits = (
        "Nothing but the scores above was measured: no safety, no bias, no other task and no other language. It was trained "
        "on the data above and on nothing else, and keeps the limits of its base."
    )
    text = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False).from_string(
        TEMPLATE.read_text("utf-8")
    )
    body = text.render(
        title=repo_id.rpartition("/")[2],
        summary=f"{what} from supervised fine-tuning of {base.link()} on {dataset.link('datasets/')}.",
        score_tables=score_tables(run),
        score_notes=score_notes(run, folder, kind),
        eval_loss=(
            f"Evaluation loss in training: {losses[-1][1]:.4f} nats a labelled token, at step {losses[-1][0]}."
            if losses
            else "There was no evaluation in training."
        ),
        repo_id=repo_id,
        template_settings=f", tokenizer_encode_kwargs={settings!r}" if settings else "",
        use=use,
        training=training_rows(run, kind, base, dataset),
        command=public_command(run),
        limits=limits,
        licence=licence_words(base, dataset),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")
