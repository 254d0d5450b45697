"""Answers of a model: load it, make the prompts into tokens, decode greedily, freely or held to the schema.

score.py and predict.py both come here, so what is measured is what is used. The settings that a model publishes
(sampling, penalties) are set aside: this is greedy decoding and nothing else.
"""

import copy
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from invoice import kind


def load_model(
    model_id: str, dtype: torch.dtype, device: torch.device | str, revision: str | None = None
) -> tuple[Any, Any]:
    """(model, tokenizer) of a whole model or of a PEFT adapter (with its base model), in a folder or on the Hub.

    Raises ValueError naming `model_id` when either cannot be loaded or the tokenizer has no chat template.
    """
    base_id, base_revision, is_adapter = find_base(model_id, revision)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(base_id, revision=base_revision, dtype=dtype)
        if is_adapter:
            import peft

            model = peft.PeftModel.from_pretrained(model, model_id)
    except (OSError, ValueError) as error:
        what = f"its base model {base_id}" if is_adapter else "it"
        where = "" if Path(base_id).is_dir() else " is not a folder here, and from the Hub"
        raise ValueError(f"MODEL {model_id}: {what}{where} cannot be loaded: {one_line(error)}") from error
    return model.to(device).eval(), load_tokenizer(model_id, revision)


def find_base(model_id: str, revision: str | None = None) -> tuple[str, str | None, bool]:
    """(model, its revision, whether `model_id` is an adapter on that model)."""
    try:
        if not transformers.utils.find_adapter_config_file(model_id, revision=revision):
            return model_id, revision, False
    except OSError:  # neither a folder nor reachable: loading says why
        return model_id, revision, False
    import peft

    config = peft.PeftConfig.from_pretrained(model_id)
    return config.base_model_name_or_path, config.revision, True


def load_tokenizer(model_id: str, revision: str | None = None) -> Any:
    """The tokenizer of a model or of an adapter. Raises ValueError when there is none, or it has no chat template."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_id, revision=revision)
    except (OSError, ValueError):  # an adapter saved without its tokenizer
        base_id, base_revision, _ = find_base(model_id, revision)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(base_id, revision=base_revision)
        except (OSError, ValueError) as error:
            raise ValueError(f"MODEL {model_id}: its tokenizer cannot be loaded: {one_line(error)}") from error
    if not tokenizer.chat_template:
        raise ValueError(f"MODEL {model_id}: its tokenizer has no chat template. Score the model as it was trained.")
    return tokenizer


def encode_prompts(
    tokenizer: Any, prompts: Sequence[list[dict]], chat_template_kwargs: dict | None = None
) -> list[list[int]]:
    """Token ids of each prompt (a list of messages), up to where the answer starts."""
    kwargs = {"add_generation_prompt": True, "tokenize": True, "return_dict": True} | (chat_template_kwargs or {})
    return [list(tokenizer.apply_chat_template(prompt, **kwargs)["input_ids"]) for prompt in prompts]


def check_room(
    encoded: Sequence[list[int]], config: Any, max_new_tokens: int, names: Sequence[str] | None = None
) -> None:
    """Raise ValueError, with the name of the document, where prompt and answer do not fit the model's positions."""
    room = getattr(config, "max_position_embeddings", None)
    for index, ids in enumerate(encoded):
        if room and len(ids) + max_new_tokens > room:
            raise ValueError(
                f"document {names[index] if names else index}: {len(ids)} tokens of prompt and {max_new_tokens} of"
                f" answer are more than the model's {room} positions. Lower --max_new_tokens or leave the document out."
            )


def find_stop_ids(generation_config: Any, tokenizer: Any) -> list[int]:
    """The ids that end an answer: the tokenizer's end of turn, and what the model's generation_config names."""
    stop = generation_config.eos_token_id
    stop = stop if isinstance(stop, list) else [stop]
    found = [token for token in dict.fromkeys([tokenizer.eos_token_id, *stop]) if token is not None]
    if not found:
        raise ValueError("neither the tokenizer nor the model's generation_config names an end-of-turn token (eos)")
    return found


def read_answer(tokenizer: Any, new_ids: Sequence[int], stop_ids: Sequence[int]) -> tuple[str, bool]:
    """(text, whether the output limit stopped it). The stop id may also be the pad id, so the first one ends it."""
    end = next((place for place, token in enumerate(new_ids) if token in stop_ids), None)
    return tokenizer.decode(new_ids[:end], skip_special_tokens=True), end is None


# ---- with transformers -----------------------------------------------------------------------------------------------


def generate(model: Any, tokenizer: Any, prompts: Sequence[list[dict]], **options) -> list[tuple[str, bool]]:
    """Greedy answers to `prompts` (lists of messages) in their order; options as `generate_batches` has them."""
    answers: list[tuple[str, bool]] = [("", False)] * len(prompts)
    for index, text, limit_hit in generate_batches(model, tokenizer, prompts, **options):
        answers[index] = (text, limit_hit)
    return answers


def generate_batches(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[dict]],
    *,
    batch_size: int = 8,
    max_new_tokens: int = 512,
    chat_template_kwargs: dict | None = None,
    names: Sequence[str] | None = None,
    schema: dict | None = None,
    progress: bool = True,
) -> Iterator[tuple[int, str, bool]]:
    """Yield (number of the prompt, answer, whether the output limit stopped it), a batch at a time.

    Prompts are batched by length, longest first, and padded on the left so that every answer starts right after its
    prompt. With `schema`, only tokens that can still become JSON of that schema are allowed. Raises ValueError as
    `check_room` and `SchemaGrammar` do.
    """
    encoded = encode_prompts(tokenizer, prompts, chat_template_kwargs)
    check_room(encoded, model.config, max_new_tokens, names)
    stop_ids = find_stop_ids(model.generation_config, tokenizer)
    grammar = SchemaGrammar(schema, tokenizer, stop_ids) if schema else None
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    settings = transformers.GenerationConfig(
        do_sample=False, num_beams=1, max_new_tokens=max_new_tokens, eos_token_id=stop_ids, pad_token_id=pad_id
    )
    kept_settings, model.generation_config = model.generation_config, settings
    order = sorted(range(len(encoded)), key=lambda index: -len(encoded[index]))
    try:
        with (
            tqdm(total=len(order), desc="documents", disable=None if progress else True) as bar,
            torch.inference_mode(),
        ):
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                width = max(len(encoded[index]) for index in batch)
                padding = [width - len(encoded[index]) for index in batch]
                ids = [[pad_id] * pad + encoded[i] for i, pad in zip(batch, padding, strict=True)]
                mask = [[0] * pad + [1] * (width - pad) for pad in padding]
                output = model.generate(
                    input_ids=torch.tensor(ids, device=model.device),
                    attention_mask=torch.tensor(mask, device=model.device),
                    generation_config=settings,
                    logits_processor=transformers.LogitsProcessorList([SchemaMask(grammar)] if grammar else []),
                )
                for index, new_ids in zip(batch, output[:, width:].tolist(), strict=True):
                    yield index, *read_answer(tokenizer, new_ids, stop_ids)
                bar.update(len(batch))
    finally:
        model.generation_config = kept_settings


# ---- held to the schema ----------------------------------------------------------------------------------------------


class SchemaGrammar:
    """What llguidance allows next, for one schema and one tokenizer; every sequence gets a copy of its matcher.

    The JSON is the trained form: every key, in the schema's order, no spaces between tokens. Raises ValueError when
    llguidance is not installed or cannot hold to the schema.
    """

    def __init__(self, schema: dict, tokenizer: Any, stop_ids: Sequence[int]):
        try:
            import llguidance.hf
        except ImportError as error:
            raise ValueError(
                "--constrained needs the package llguidance, which is not installed: pip install llguidance. Without "
                "--constrained the model answers freely."
            ) from error
        self.library, self.tokenizer, self.stop_ids = llguidance, tokenizer, list(stop_ids)
        self.text = llguidance.LLMatcher.grammar_from_json_schema(
            all_keys_required(schema), overrides={"whitespace_flexible": False}
        )
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(self.text)
        if is_error or messages:
            raise ValueError(f"--constrained: llguidance cannot hold an answer to this schema: {'; '.join(messages)}")
        self.first = None

    def matchers(self, count: int, width: int) -> list[Any]:
        """`count` matchers at the start of an answer; `width` is the number of logits, which may be padded."""
        if self.first is None:
            vocabulary = self.library.hf.from_tokenizer(self.tokenizer, n_vocab=width, eos_token=self.stop_ids)
            self.first = self.library.LLMatcher(vocabulary, self.text)
        return [self.first.deep_copy() for _ in range(count)]


class SchemaMask(transformers.LogitsProcessor):
    """For one call of model.generate: sets the logits of the tokens that the grammar does not allow to minus infinity."""

    def __init__(self, grammar: SchemaGrammar):
        self.grammar, self.matchers = grammar, None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """input_ids (sequences, tokens so far), scores (sequences, vocabulary)."""
        if self.matchers is None:
            self.matchers = self.grammar.matchers(*scores.shape)
        else:
            for matcher, token in zip(self.matchers, input_ids[:, -1].tolist(), strict=True):
                if not matcher.is_stopped() and not matcher.consume_token(token):
                    raise RuntimeError(f"llguidance: {matcher.get_error()}")
        masks = torch.stack(
            [torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8) for matcher in self.matchers]
        )
        bits = (masks.to(scores.device)[:, :, None] >> torch.arange(8, device=scores.device)) & 1
        allowed = bits.flatten(1)[:, : scores.shape[1]].bool()
        return scores.masked_fill(~allowed, -torch.inf)


def all_keys_required(schema: dict) -> dict:
    """The schema with every key of every object required and no other one allowed, as targets are written."""
    schema = copy.copy(schema)
    if kind(schema) == "object":
        schema["properties"] = {key: all_keys_required(field) for key, field in schema["properties"].items()}
        schema |= {"required": list(schema["properties"]), "additionalProperties": False}
    elif kind(schema) == "array":
        schema["items"] = all_keys_required(schema["items"])
    return schema


# ---- with vLLM -------------------------------------------------------------------------------------------------------


def vllm_answers(
    model_id: str,
    prompts: Sequence[list[dict]],
    *,
    python: str,
    dtype: str,
    max_new_tokens: int = 512,
    chat_template_kwargs: dict | None = None,
    names: Sequence[str] | None = None,
    schema: dict | None = None,
    revision: str | None = None,
) -> list[tuple[str, bool]]:
    """Greedy answers to `prompts` by vLLM, which `python` (the interpreter of another environment) imports.

    The prompts are made here and handed over as token ids, so they are the same to the token. Raises ValueError when
    vLLM is not installed there or fails.
    """
    tokenizer, (base_id, base_revision, is_adapter) = (
        load_tokenizer(model_id, revision),
        find_base(model_id, revision),
    )
    encoded = encode_prompts(tokenizer, prompts, chat_template_kwargs)
    check_room(encoded, transformers.AutoConfig.from_pretrained(base_id, revision=base_revision), max_new_tokens, names)
    try:
        generation_config = transformers.GenerationConfig.from_pretrained(base_id, revision=base_revision)
    except OSError:
        generation_config = transformers.GenerationConfig()
    stop_ids = find_stop_ids(generation_config, tokenizer)
    request = {
        "model": base_id,
        "revision": base_revision,
        "adapter": model_id if is_adapter else None,
        "dtype": dtype,
        "prompts": encoded,
        "max_new_tokens": max_new_tokens,
        "stop_ids": stop_ids,
        "schema": all_keys_required(schema) if schema else None,
    }
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answers.json")
        asked.write_text(json.dumps(request), encoding="utf-8")
        program = Path(__file__).with_name("vllm_answers.py")
        code = subprocess.run([python, str(program), str(asked), str(answered)]).returncode
        if code or not answered.is_file():
            raise ValueError(f"--engine vllm: {python} {program.name} ended with exit code {code}; it says why above")
        return [read_answer(tokenizer, ids, stop_ids) for ids in json.loads(answered.read_text())]


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
