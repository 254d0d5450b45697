"""How much memory a run needs."""

import dataclasses

from peft import LoraConfig


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides a run's memory beside the model's config. Names are TRL's where TRL has one.

    strategy: a launch file's name, or "python" for one process without a launcher. micro_batch: rows per GPU and micro
    step. length: tokens of a row; packed rows are one row of micro_batch x length. padded: rows differ in length.
    labelled: share of tokens that bear a label.
    """

    strategy: str = "single"
    world: int = 1
    local: int = 1
    micro_batch: int = 1
    length: int = 2048
    accumulation: int = 1
    packing: bool = False
    padded: bool = False
    labelled: float = 1.0
    dtype: str = "float32"
    bf16: bool = True
    optim: str = "adamw_torch_fused"
    attention: str = "sdpa"
    checkpointing: bool = False
    lora_r: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_parameters: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    load_in_4bit: bool = False
    load_in_8bit: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of input_ids in one micro step."""
        return (1, self.micro_batch * self.length) if self.packing else (self.micro_batch, self.length)

    @property
    def use_reentrant(self) -> bool:
        """TRL forces reentrant checkpointing on an adapter under ZeRO-3."""
        return bool(self.lora_r) and self.strategy.startswith("zero3")

    @property
    def lora(self) -> LoraConfig | None:
        """The adapter's configuration, as TRL's get_peft_config makes it."""
        if not self.lora_r:
            return None
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.lora_r,
            lora_alpha=2 * self.lora_r,
            lora_dropout=self.lora_dropout,
            target_modules=list(self.lora_targets) or None,
            target_parameters=list(self.lora_parameters) or None,
        )
