"""The part of `score.py --engine vllm` that runs in vLLM's own environment: token ids in, token ids out.

    python vllm_answers.py REQUEST.json ANSWERS.json

generation.py writes REQUEST and reads ANSWERS. vLLM pins versions of torch and transformers of its own, so it is not
installed beside the cookbook's: `python -m venv vllm-env && vllm-env/bin/pip install vllm`, then
`score.py ... --engine vllm --vllm_python vllm-env/bin/python`.
"""

import importlib
import json
import sys
from pathlib import Path


def main() -> int | str:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        vllm, lora, sampling_params = map(
            importlib.import_module, ("vllm", "vllm.lora.request", "vllm.sampling_params")
        )
    except ImportError as error:
        return (
            f"vllm_answers.py: vLLM is not installed for {sys.executable} ({error}). Make an environment for it, "
            "`python -m venv vllm-env && vllm-env/bin/pip install vllm`, and give --vllm_python vllm-env/bin/python."
        )
    options, adapter = {}, None
    if request["adapter"]:
        rank = json.loads(Path(request["adapter"], "adapter_config.json").read_text(encoding="utf-8"))["r"]
        options = {"enable_lora": True, "max_lora_rank": max(8, rank)}
        adapter = lora.LoRARequest("adapter", 1, request["adapter"])
    if request["schema"]:
        options["structured_outputs_config"] = {"disable_any_whitespace": True}
    longest = max(map(len, request["prompts"])) + request["max_new_tokens"]
    model = vllm.LLM(
        model=request["model"],
        revision=request["revision"],
        dtype=request["dtype"],
        max_model_len=longest,
        generation_config="vllm",  # not the sampling settings that the model publishes
        **options,
    )
    sampling = vllm.SamplingParams(
        temperature=0,
        max_tokens=request["max_new_tokens"],
        stop_token_ids=request["stop_ids"],
        structured_outputs=sampling_params.StructuredOutputsParams(json=request["schema"])
        if request["schema"]
        else None,
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    outputs = model.generate(prompts, sampling, lora_request=adapter)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    # vLLM may leave the stop token out of an answer that ended by itself; its absence would read as the output limit.
    for ids, output in zip(answers, outputs, strict=True):
        if output.outputs[0].finish_reason == "stop" and not set(ids) & set(request["stop_ids"]):
            ids.append(request["stop_ids"][0])
    Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
