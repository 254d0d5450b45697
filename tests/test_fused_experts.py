"""gpt-oss with `experts_implementation: fused` is gpt-oss: the same outputs, gradients and losses, in fewer kernels."""

import filecmp
import shutil
from pathlib import Path

import check_launch
import launching
import pytest
import smoke
import torch
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import GptOssConfig
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "gpt-oss-20b"
EXPERTS, WIDTH, INSIDE, CHOICES = 6, 32, 48, 3


@pytest.fixture(scope="module")
def fused():
    """The recipe's fused_experts.py as a module."""
    return check_launch.load_module(RECIPE / "fused_experts.py")


def test_both_recipes_hold_the_same_file():
    name = "fused_experts.py"
    assert filecmp.cmp(RECIPE / name, RECIPE.with_name("gpt-oss-120b") / name, shallow=False)


def pass_through(forward, dtype, choices=CHOICES, reachable=EXPERTS, trained=True) -> list[torch.Tensor]:
    """Output and gradients (hidden states, router weights, parameters) of 50 tokens that `reachable` experts share."""
    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=WIDTH, intermediate_size=INSIDE, num_local_experts=EXPERTS)
    experts = GptOssExperts(config).to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.6)  # far enough for the gate to clamp some
        parameter.requires_grad_(trained)
    hidden = (2 * torch.randn(50, WIDTH)).to(dtype).requires_grad_()
    chosen = torch.randn(50, reachable).topk(choices)
    weight = chosen.values.softmax(1).to(dtype).requires_grad_()
    output = forward(experts, hidden, chosen.indices, weight)
    output.backward(torch.randn(50, WIDTH).to(dtype))
    given = [hidden, weight, *experts.parameters()]
    return [output.detach(), *(tensor.grad for tensor in given if tensor.requires_grad)]


def off(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    """Relative error of each tensor."""
    return [((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize(
    "case", [{}, {"reachable": 4}, {"choices": 1}, {"trained": False}], ids=["full", "idle experts", "one", "frozen"]
)
def test_outputs_and_gradients_are_those_of_transformers(fused, case):
    theirs, ours = (
        pass_through(forward, torch.float32, **case) for forward in (grouped_mm_experts_forward, fused.experts_forward)
    )
    assert max(off(ours, theirs)) < 1e-6
    assert len(ours) == (3 if case == {"trained": False} else 7)


def test_bf16_is_no_further_from_fp32_than_transformers(fused):
    exact = pass_through(grouped_mm_experts_forward, torch.float32)
    theirs, ours = (
        off(pass_through(forward, torch.bfloat16), exact)
        for forward in (grouped_mm_experts_forward, fused.experts_forward)
    )
    assert 0 < sum(ours) < sum(theirs)
    assert all(mine < 1.2 * other for mine, other in zip(ours, theirs, strict=True))


def inputs_of(name: str, tokens: int) -> tuple:
    """Arguments of one of the kernels, in bf16."""
    chosen = torch.randint(EXPERTS, (tokens, CHOICES))
    by_expert, order = chosen.flatten().sort()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    place, rows = place.view_as(chosen), tokens * CHOICES

    def some(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16)

    weight = some(tokens, CHOICES)
    pairs = [some(size, 2 * INSIDE).view(torch.int32) for size in (rows, EXPERTS)]
    gate = (*pairs, weight, by_expert, order, 1.702, 7.0)
    return {
        "gathered_sum": (some(rows, WIDTH), place),
        "gate": (*gate, torch.bfloat16),
        "gate_backward": (some(rows, INSIDE), *gate),
        "combine": (some(rows, WIDTH), some(EXPERTS, WIDTH), weight, chosen, place),
    }[name]


@pytest.mark.parametrize("name", ["gathered_sum", "gate", "gate_backward", "combine"])
def test_a_kernel_compiles_whole_and_once_for_all_lengths(fused, name):
    """As on a GPU, with the C++ code that torch makes for CPUs. The second length makes the compiled one general."""
    plain, counter = getattr(fused, name).__wrapped__, CompileCounterWithBackend("inductor")
    compiled = torch.compile(plain, fullgraph=True, backend=counter)
    for tokens in (50, 61, 33, 77):
        arguments = inputs_of(name, tokens)
        found, wanted = compiled(*arguments), plain(*arguments)
        if name == "gate_backward":  # pairs of bf16
            found, wanted = ([x[0].view(torch.bfloat16), x[1]] for x in (found, wanted))
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    assert counter.frame_count == 2


def test_experts_of_another_layout_are_refused(fused):
    config = GptOssConfig(hidden_size=WIDTH, intermediate_size=INSIDE, num_local_experts=EXPERTS)
    experts = GptOssExperts(config)
    experts.is_concatenated = True
    with pytest.raises(ValueError, match="for gpt-oss, and not for GptOssExperts"):
        fused.experts_forward(experts, torch.zeros(1, WIDTH), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))


def test_a_run_with_it_has_the_losses_of_a_run_without(benches, tmp_path):
    bench = benches("gpt-oss-20b")
    found = {}
    for name, more in {"plain": [], "fused": ["--model_init_kwargs", '{"experts_implementation": "fused"}']}.items():
        run, log = tmp_path / name, tmp_path / f"{name}.log"
        result = launching.launch(bench.folder, "ddp", *bench.arguments(run, 2), *more, log=log)
        assert result.rc == 0, result.output[-3000:]
        found[name] = launching.losses(run)
    assert found["fused"] == pytest.approx(found["plain"], rel=1e-5)
    plain, ours = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in found)
    assert any(not torch.equal(plain[key], ours[key]) for key in plain)  # sums in another order: it was there


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("recipe", "config", "strategy"),
    [
        *(("gpt-oss-20b", "config", strategy) for strategy in ("single", "ddp", "fsdp", "zero2", "zero3")),
        ("gpt-oss-20b", "expert_lora", "ddp"),
        ("gpt-oss-20b", "expert_lora", "fsdp"),
        ("gpt-oss-20b", "qlora", "ddp"),
        ("gpt-oss-120b", "expert_parallel", "fsdp"),
    ],
)
def test_it_trains_resumes_and_reloads(tmp_path, recipe, config, strategy):
    """A copy of the recipe in which the setting that its files show as a comment is on."""
    for name in ("accelerate_configs", "deepspeed_configs", f"recipes/{recipe}"):
        shutil.copytree(
            RECIPE.parents[1] / name, tmp_path / name, ignore=shutil.ignore_patterns("run", "run-*", "__pycache__")
        )
    file = tmp_path / "recipes" / recipe / f"{config}.yaml"
    lines = file.read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.startswith("model_init_kwargs:")]
    setting = [line for line in lines if line.startswith("# model_init_kwargs:")]
    file.write_text("\n".join([*lines, setting[0].removeprefix("# ")]), encoding="utf-8")
    bench = smoke.Bench(file.parent, tmp_path / "bench", config)
    assert bench.settings["model_init_kwargs"]["experts_implementation"] == "fused"
    assert (cell := bench.cell(strategy)).error is None, cell.error
