"""What a run can be told: every field with its meaning, unit, default and an example."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from longspan.config.data import DataConfig
from longspan.config.faults import FaultsConfig
from longspan.config.logging import LoggingConfig
from longspan.config.memory import MemoryConfig
from longspan.config.model import AdapterConfig, ModelConfig
from longspan.config.section import Float, Int, Rate, Section, Size
from longspan.config.section import field as _field


class OptimizerConfig(Section):
    """AdamW."""

    kind: Literal["adamw", "adamw8bit", "adamw-bf16-sr", "adamw-host"] = _field(
        "'adamw': states in model.dtype beside the parameters. 'adamw8bit': 8-bit states (torchao). 'adamw-bf16-sr': "
        "bfloat16 parameters and states, rounded stochastically (torchao). 'adamw-host': float32 master parameters and "
        "states in host memory, 12 bytes per parameter.",
        "adamw",
        example="adamw-host",
    )
    lr: Float = _field("Peak learning rate.", 2e-5, example="2.0e-5", gt=0)
    weight_decay: Float = _field("Decay of matrices; vectors (norms, biases) do not decay.", 0.0, example=0.1, ge=0)
    betas: tuple[Rate, Rate] = _field(
        "Decay rates of the two moments, each from 0 to below 1.", (0.9, 0.95), example="[0.9, 0.95]"
    )
    max_grad_norm: Float | None = _field(
        "Gradients of a larger global norm are scaled down; null: never.", 1.0, example=1.0, gt=0
    )
    clip: Literal["exact", "previous"] = _field(
        "Which norm max_grad_norm is compared with: 'exact' the step's own; 'previous' that of the step before, the "
        "first step being left as it is. 'previous' is for step_in_backward, which cannot know its own in time.",
        "exact",
        example="previous",
    )
    step_in_backward: bool = _field(
        "Step each parameter as soon as backward has its gradient, and drop the gradient; for one process without "
        "gradient accumulation. A step that is not finite has then been applied when the run stops.",
        False,
        example=True,
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.step_in_backward and self.max_grad_norm is not None and self.clip == "exact":
            raise ValueError(
                f"step_in_backward cannot clip by the step's own norm (max_grad_norm {self.max_grad_norm:g}), which is "
                "known only after the last parameter has stepped: set clip: previous, or max_grad_norm: null"
            )
        if self.clip == "previous" and not (self.step_in_backward and self.max_grad_norm is not None):
            raise ValueError(
                "clip: previous needs step_in_backward: true and a max_grad_norm; leave it out, and gradients are "
                "clipped by the step's own norm"
            )
        return self


class ScheduleConfig(Section):
    """How the learning rate moves."""

    kind: Literal["constant", "cosine"] = _field("Shape after the warm-up.", "constant", example="cosine")
    warmup_steps: Int = _field("Linear rise to the peak.", 0, unit="steps", example=10, ge=0)
    final_ratio: Float = _field(
        "Learning rate at the end of 'cosine', as a share of the peak.", 0.0, example=0.1, ge=0, le=1
    )


class SaveConfig(Section):
    """What is kept."""

    final: bool = _field("Write the trained model and its tokenizer to output_dir/model.", True, example=True)
    every: Int | None = _field(
        "Write a checkpoint to output_dir/checkpoints every n-th step, to go on from with resume; null: only when the "
        "run is stopped by SIGTERM.",
        None,
        unit="steps",
        example=100,
        ge=1,
    )
    keep: Int = _field("Checkpoints that stay; older ones are removed.", 2, unit="checkpoints", example=2, ge=1)
    asynchronous: bool = _field(
        "Copy the state to host memory and write it while training goes on, for one more copy of it there; false: "
        "training waits. DeepSpeed's engines always wait.",
        True,
        example=False,
    )


class RunConfig(Section):
    """A training run."""

    model: ModelConfig
    data: DataConfig
    sequence_length: Size = _field("Longest row.", unit="tokens", example="128K", ge=2)
    sequence_parallel_size: Int = _field(
        "Processes that share each sequence; it must divide the number of processes.",
        1,
        unit="processes",
        example=4,
        ge=1,
    )
    ulysses_degree: Int | None = _field(
        "Processes that exchange heads; null: chosen. Times ring_degree it is sequence_parallel_size.",
        None,
        unit="processes",
        example=2,
        ge=1,
    )
    ring_degree: Int | None = _field(
        "Processes that pass keys and values on; null: chosen.", None, unit="processes", example=2, ge=1
    )
    kv_exchange: Literal["auto", "ring", "gather"] = _field(
        "With a ring_degree: 'ring' passes all keys and values on; 'gather' sends those that are needed elsewhere, and "
        "divides a packed row by its documents; 'auto' decides for each batch.",
        "auto",
        example="gather",
    )
    kernel: str = _field(
        "Attention kernel; `longspan doctor` lists what is usable here.", "auto", example="auto", min_length=1
    )
    engine: Literal["auto", "single", "ddp", "fsdp2", "zero-0", "zero-1", "zero-2", "zero-3"] = _field(
        "Who holds parameters and reduces gradients; 'auto': single for one process, fsdp2 for more; 'zero-0' to "
        "'zero-3': DeepSpeed's stages of ZeRO.",
        "auto",
        example="fsdp2",
    )
    compute_dtype: Literal["bfloat16"] | None = _field(
        "With fsdp2 and zero-1 to zero-3: run the model in this type, on parameters kept in model.dtype; gradients are "
        "reduced in float32.",
        None,
        example="bfloat16",
    )
    adapter: AdapterConfig = AdapterConfig()
    memory: MemoryConfig = MemoryConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    max_steps: Int = _field("Optimizer steps.", unit="steps", example=1000, ge=1)
    gradient_accumulation_steps: Int = _field(
        "Micro-batches per optimizer step and replica.", 1, unit="micro-batches", example=4, ge=1
    )
    micro_batch_size: Int = _field("Rows per micro-batch.", 1, unit="rows", example=1, ge=1)
    seed: Int = _field("Seed of weights, order and dropout.", 0, example=0, ge=0, lt=2**63)
    output_dir: str = _field(
        "Folder for all that the run leaves: metrics.jsonl, run.json, report.html, checkpoints, the model.",
        example="out/run",
        min_length=1,
    )
    overwrite: bool = _field("Replace what an earlier run left in output_dir.", False, example=False)
    resume: bool = _field(
        "Go on from the last whole checkpoint in output_dir; begin where there is none.", False, example=True
    )
    logging: LoggingConfig = LoggingConfig()
    save: SaveConfig = SaveConfig()
    faults: FaultsConfig = FaultsConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        sp, ulysses, ring = self.sequence_parallel_size, self.ulysses_degree, self.ring_degree
        if sp % ((ulysses or 1) * (ring or 1)) or (ulysses and ring and ulysses * ring != sp):
            raise ValueError(
                f"ulysses_degree {ulysses} x ring_degree {ring} does not make sequence_parallel_size {sp}: set one of "
                "them to a divisor and leave the other out"
            )
        if self.compute_dtype is not None and self.engine in ("single", "ddp"):
            raise ValueError(
                f"compute_dtype {self.compute_dtype} needs engine fsdp2 or zero-3, not {self.engine}: choose one, or "
                f"set model.dtype to {self.compute_dtype}"
            )
        if self.schedule.warmup_steps > self.max_steps:
            raise ValueError(f"schedule.warmup_steps {self.schedule.warmup_steps} exceeds max_steps {self.max_steps}")
        if self.model.quantization != "none" and self.adapter.kind == "none":
            raise ValueError(
                f"model.quantization {self.model.quantization} packs weights, which cannot be trained: set "
                "adapter.kind: lora, or quantization: none"
            )
        if self.model.quantization != "none" and self.compute_dtype is not None:
            raise ValueError(
                f"model.quantization {self.model.quantization} computes in model.dtype: leave compute_dtype out, and "
                f"set model.dtype to {self.compute_dtype} (and adapter.dtype to float32 for adapters in float32)"
            )
        if self.model.quantization == "int8" and self.model.dtype == "float64":
            raise ValueError("model.quantization int8 knows no float64: set model.dtype to float32 or bfloat16")
        self._check_optimizer()
        self._check_skipping()
        if self.resume and self.overwrite:
            raise ValueError("resume goes on from what overwrite replaces: set one of them")
        return self

    @property
    def trained_dtype(self) -> str:
        """Type of what is trained, or most of it."""
        return self.adapter.dtype or self.model.dtype

    def _check_optimizer(self) -> None:
        kind, dtype = self.optimizer.kind, self.trained_dtype
        name = "adapter.dtype" if self.adapter.dtype else "model.dtype"
        if kind == "adamw-bf16-sr" and dtype != "bfloat16":
            raise ValueError(
                f"optimizer.kind {kind} rounds to bfloat16 parameters, but {name} is {dtype}: set {name} to "
                "bfloat16, or choose another kind"
            )
        if kind == "adamw8bit" and dtype == "float64":
            raise ValueError(
                f"optimizer.kind {kind} computes in float32, but {name} is {dtype}: set {name} to float32 or "
                "bfloat16, or choose adamw"
            )
        if self.engine.startswith("zero-"):
            self._check_zero()
        if not self.optimizer.step_in_backward:
            return
        if self.gradient_accumulation_steps > 1:
            raise ValueError(
                f"optimizer.step_in_backward keeps no gradients, so gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} has nothing to add to: set it to 1 (a longer sequence_length or "
                "more micro_batch_size makes a larger step), or turn step_in_backward off"
            )
        if self.engine not in ("auto", "single") or self.compute_dtype is not None or self.sequence_parallel_size > 1:
            raise ValueError(
                "optimizer.step_in_backward is for engine single with one process, where no gradient is reduced after "
                "backward: set engine: single, sequence_parallel_size: 1 and no compute_dtype, or turn it off"
            )

    def _check_skipping(self) -> None:
        if self.faults.on_nonfinite == "stop":
            return
        if self.optimizer.step_in_backward:
            raise ValueError(
                "faults.on_nonfinite: skip cannot leave out a step that step_in_backward has taken by the time its "
                "norm is known: set it to stop, or turn optimizer.step_in_backward off"
            )
        if self.engine.startswith("zero-"):
            raise ValueError(
                f"faults.on_nonfinite: skip cannot leave out a step of engine {self.engine}, as DeepSpeed tells the "
                "norm once it has stepped: set it to stop, or engine to fsdp2"
            )

    def _check_zero(self) -> None:
        kind, dtype = self.optimizer.kind, self.model.dtype
        if kind != "adamw":
            raise ValueError(
                f"optimizer.kind {kind} does not serve engine {self.engine}, where DeepSpeed divides adamw: set it to "
                "adamw, or engine to fsdp2"
            )
        if self.engine == "zero-0" and self.compute_dtype is not None:
            raise ValueError(
                f"compute_dtype {self.compute_dtype} needs engine zero-1 to zero-3, as zero-0 does not give back the "
                "parameters in float32"
            )
        if self.adapter.dtype not in (None, dtype):
            raise ValueError(
                f"engine {self.engine} holds all parameters in one type, but adapter.dtype is {self.adapter.dtype} and "
                f"model.dtype {dtype}: leave adapter.dtype out, or set engine to fsdp2"
            )
        if dtype == "float64":
            raise ValueError(
                f"engine {self.engine} computes in float32 or bfloat16, but model.dtype is {dtype}: set it to float32, "
                "or engine to fsdp2"
            )
