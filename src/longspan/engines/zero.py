"""DeepSpeed's ZeRO: stage 1 divides optimizer state over dp x sp, 2 gradients too, 3 parameters too, 0 nothing."""

from __future__ import annotations

import importlib
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longspan.engines.mpu import MPU
from longspan.engines.origin import Origin
from longspan.engines.protocol import GradReduction, Prepared, clip_by_global_norm, require_processes
from longspan.errors import ConfigError, ModelError, TrainingError
from longspan.plan.setup import Optimizer
from longspan.versions import refusal
from longspan.weights import under_zero3, whole_shape

_STAGES = (0, 1, 2, 3)
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Zero:
    """Let DeepSpeed hold parameters, gradients and optimizer state.

    Gradients are averaged over dp x sp at every stage. With bfloat16, or parameters in bfloat16, DeepSpeed computes on
    bfloat16 parameters and steps float32 ones, which it divides from stage 1 on; stage 0 adds gradients up in bfloat16.

    Args:
        stage: 0 to 3.
        compute_dtype: bfloat16, or None for the parameters' own type.
        reduce_dtype: of gradients on their way, float32 or bfloat16.
        options: more of DeepSpeed's `zero_optimization` section.

    Raises:
        ConfigError: a stage or a type that there is none of; DeepSpeed is missing or of another version.
    """

    grad_reduction: GradReduction = "mean"

    def __init__(
        self,
        stage: int,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if stage not in _STAGES:
            raise ConfigError(f"ZeRO has stages 0 to 3, not {stage}.")
        for name, dtype in (("compute_dtype", compute_dtype or torch.float32), ("reduce_dtype", reduce_dtype)):
            if dtype not in _NAMES:
                raise ConfigError(f"{name} {dtype} is not served by engine zero-{stage}; use float32 or bfloat16.")
        if stage == 0 and compute_dtype == torch.bfloat16:
            raise ConfigError(
                "Engine zero-0 cannot save the float32 parameters of a bfloat16 run; use zero-1 to zero-3."
            )
        check_version()
        self.name, self.stage = f"zero-{stage}", stage
        self._compute, self._reduce, self._options = compute_dtype, reduce_dtype, dict(options or {})
        self._max_norm: float | None = None
        self._undo = ExitStack()
        self.engine: Any = None  # DeepSpeed's, once there is an optimizer

    def wrap(self, model: nn.Module, prepared: Prepared, origin: Origin | None = None) -> nn.Module:
        """Return the module to call once `adopt` has been given its optimizer.

        Until then its parameters are whole, but for what stage 3 gets from `origin`: that is divided layer by layer.

        Raises:
            TopologyError: torch.distributed is not initialised, or the mesh leaves processes out.
            ConfigError: DeepSpeed would run on another kind of device.
            ModelError: parameters of several types, or of one that DeepSpeed does not compute in.
        """
        require_processes(self.name)
        self._deepspeed: Any = importlib.import_module("deepspeed")
        device_type = self._deepspeed.get_accelerator().device_name()
        if device_type != prepared.mesh.device_type:
            raise ConfigError(
                f"DeepSpeed runs on {device_type} here, the model is on {prepared.mesh.device_type}: move the model, "
                f"or set DS_ACCELERATOR={prepared.mesh.device_type} before DeepSpeed is imported."
            )
        self._model, self._mpu = model, MPU(prepared.mesh)
        self._in_bf16 = torch.bfloat16 in (_same_dtype(model), self._compute)
        prepared.held_by(self.name, Optimizer.under_zero(self.stage, 2 if self._in_bf16 else 4))
        if self.stage == 3:
            self._undo = let_stage3_gather(model, prepared.layers)
        if origin is not None:
            for unit in (*prepared.blocks, model):
                origin.bring(unit)
                if self.stage == 3:
                    self._divide(unit)
        self.module = Held(model)
        return self.module

    def adopt(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
        """Divide parameters and optimizer state; the optimizer is stepped by `step` alone from now on.

        Args:
            optimizer: of the parameters that `wrap` returned.
            max_norm: gradients of a larger global norm are scaled down; None: never.

        Raises:
            ConfigError: an optimizer that does not step each element by itself.
        """
        if type(optimizer) not in _ELEMENTWISE:
            raise ConfigError(
                f"Engine {self.name} cannot step {type(optimizer).__name__}: DeepSpeed steps flat slices of many "
                "parameters, which is the same only where each element steps by itself. Take torch.optim.AdamW (or "
                "Adam, or SGD), or engine fsdp2."
            )
        self._max_norm = max_norm
        engine, *_ = self._deepspeed.initialize(
            model=self._model, optimizer=optimizer, config=self.config(max_norm), mpu=self._mpu
        )
        self.engine = engine
        self.module.engine = engine

    def config(self, max_norm: float | None) -> dict[str, Any]:
        """Return DeepSpeed's configuration: nothing in it divides by micro-batches, as losses are divided already."""
        reduced = _NAMES[self._reduce]
        added_up_in = "bf16" if self.stage == 0 else "fp32"  # all that stage 0 can do
        precision: dict[str, Any] = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": added_up_in}}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": max_norm if max_norm is not None and not self._clips_here else 0.0,
            "communication_data_type": reduced,
            "seq_parallel_communication_data_type": reduced,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": self._bucket(), **self._options},
        } | (precision if self._in_bf16 else {})

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Let gradients be final in the last micro-batch's backward; stages 2 and 3 reduce in every one."""
        self._adopted().set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """Differentiate, and reduce."""
        self._adopted().backward(loss, scale_wrt_gas=False)

    def reduce(self) -> None:
        """Do nothing: backward has reduced."""

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Refuse: DeepSpeed clips while it steps.

        Raises:
            TrainingError: always.
        """
        raise TrainingError(f"Engine {self.name} clips while it steps: give max_norm to adopt, and call step.")

    def step(self) -> Tensor:
        """Clip, step and drop the gradients; return their norm before clipping, inf where DeepSpeed did not step."""
        norm: Any = None
        if self._clips_here:
            norm = clip_by_global_norm(self._model.parameters(), self._max_norm)
        self._adopted().step()
        if not self.applied:
            return torch.tensor(float("inf"))
        return torch.as_tensor(self.engine.get_global_grad_norm() if norm is None else norm).detach()

    @property
    def applied(self) -> bool:
        """Whether the last `step` was taken: DeepSpeed leaves out some whose gradients are not finite."""
        return self.engine is not None and self.engine.was_step_applied()

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a parameter as it is trained: whole, and in float32 where DeepSpeed steps that. Collective."""
        self._adopted()
        trained = tensor.requires_grad and self.stage > 0
        master = self._deepspeed.utils.safe_get_full_fp32_param(tensor) if trained else None
        if master is not None:
            return master.detach().view(tensor.ds_shape if under_zero3(tensor) else tensor.shape)  # type: ignore[attr-defined]
        if not under_zero3(tensor):
            return tensor.detach()
        with self._deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return a gradient whole, in float32, until `step`. Collective."""
        self._adopted()
        if not parameter.requires_grad:
            return None
        found = self._deepspeed.utils.safe_get_full_grad(parameter)
        return None if found is None else found.detach().clone()

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write parameters, optimizer state and `state` in DeepSpeed's own format. Collective."""
        self._adopted().save_checkpoint(str(folder), tag=_TAG, client_state=dict(state))

    def load(self, folder: Path) -> dict[str, Any]:
        """Read what `save` wrote, on as many processes and at the same stage, and return its `state`. Collective.

        Raises:
            TrainingError: there is none, it is another stage's or world size's, or holds what would run code.
        """
        try:
            engine = self._adopted()
            with reading_records(engine):
                path, state = engine.load_checkpoint(str(folder), tag=_TAG)
        except TrainingError:
            raise
        except Exception as error:
            raise TrainingError(f"DeepSpeed cannot read {folder} at stage {self.stage}: {error}") from error
        if path is None:
            raise TrainingError(f"{folder} holds no checkpoint that DeepSpeed wrote.")
        return state

    def close(self) -> None:
        """Let go of the model, and of optimizer state and buffers: DeepSpeed's own end leaves them in cycles with the
        parameters that nobody can collect, and stage 3 whatever layers it has gathered. At stages 0 to 2 the model can
        be called as it is from then on."""
        self._undo.close()
        engine, self.engine = self.engine, None
        if engine is None:
            return
        self.module.engine = None
        if self.stage == 3:
            with suppress(RuntimeError):  # a gather failed: its error is the one to tell
                engine.optimizer.parameter_offload.partition_all_parameters()
        engine.destroy()
        for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
            hook.remove()
        if engine.optimizer is not engine.basic_optimizer:  # which is the caller's
            vars(engine.optimizer).clear()
        vars(engine).clear()

    def _adopted(self) -> Any:
        """Return DeepSpeed's engine.

        Raises:
            TrainingError: there is none.
        """
        if self.engine is None:
            raise TrainingError(_NOT_ADOPTED)
        return self.engine

    def _divide(self, unit: nn.Module) -> None:
        """Have DeepSpeed divide the parameters of a part of the model now, in the type that it computes in."""
        if self._in_bf16:
            for parameter in unit.parameters():
                if not under_zero3(parameter):
                    parameter.data = parameter.data.to(torch.bfloat16)
        self._deepspeed.zero.Init(module=unit, config_dict_or_path=self.config(None), mpu=self._mpu)

    def _bucket(self) -> int:
        """Return how many elements are reduced at once: DeepSpeed holds memory for twice as many."""
        return min(_BUCKET, max(1, sum(whole_shape(p).numel() for p in self._model.parameters() if p.requires_grad)))

    @property
    def _clips_here(self) -> bool:
        """Whether gradients are whole and in `grad`: DeepSpeed does not tell their norm then."""
        return self.stage == 0 and not self._in_bf16


class Held(nn.Module):
    """The module to call: the model as it is, and DeepSpeed's engine around it once there is one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.__dict__["engine"] = None  # its submodules are the model's, once

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "engine":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        engine = self.__dict__["engine"]
        if engine is None:
            raise TrainingError(_NOT_ADOPTED)
        return engine(*args, **kwargs)


_ELEMENTWISE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)

_NOT_ADOPTED = (
    "DeepSpeed steps itself: call adopt(optimizer, max_norm) before the first forward, and close() after the last use."
)

_TAG = "step"

_BUCKET = 50_000_000
"""Elements; DeepSpeed's own choice of ten times as many takes gibibytes that long sequences need."""


_RECORDS = {
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
}
"""What DeepSpeed 0.19's files hold besides tensors and plain values."""


@contextmanager
def reading_records(engine: Any) -> Iterator[None]:
    """Let a DeepSpeed engine read its files, which are pickles, without running what they may contain.

    Raises:
        TrainingError: a file holds something else than tensors, plain values and DeepSpeed's own records.
    """

    def load(path: str, map_location: Any = None) -> Any:
        records = [getattr(importlib.import_module(module), name) for module, name in _RECORDS.items()]
        try:
            with torch.serialization.safe_globals(records):
                return torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            what = found[1] if found else "something"
            raise TrainingError(
                f"{path} holds {what}, which no checkpoint of ours does: it is not loaded. Remove the checkpoint to go "
                "on from the one before."
            ) from None

    engine.checkpoint_engine.load = load  # in place of the method, until this ends
    try:
        yield
    finally:
        del engine.checkpoint_engine.load


def check_version() -> None:
    """Refuse to work without DeepSpeed, or with one that is not known to be exact.

    Raises:
        ConfigError: it is missing, or not of a supported version; found and needed are named.
    """
    if reason := refusal("deepspeed"):
        raise ConfigError(f"The zero engines need {reason}: pip install 'longspan[deepspeed]', or use fsdp2.")


def _same_dtype(model: nn.Module) -> torch.dtype:
    """Return the type of all parameters.

    Raises:
        ModelError: they differ, or DeepSpeed does not compute in it.
    """
    kinds = {p.dtype for p in model.parameters()}
    if len(kinds) > 1 or not kinds <= _NAMES.keys():
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise ModelError(
            f"DeepSpeed computes in float32 or bfloat16 throughout, the model's parameters are {names}: convert the "
            "model, or use engine fsdp2."
        )
    return kinds.pop()


def let_stage3_gather(model: nn.Module, layers: Iterable[nn.Module]) -> ExitStack:
    """Have stage 3 gather each layer at once, and reduce its gradients once they are all there.

    Call it before DeepSpeed takes the model. A head with parts (of an adapter) is gathered as a layer is, once for all
    tiles. Stage 3 takes a layer's gradients for complete once those of its input are there, so a frozen embedding is
    made to return tensors that require gradients.

    Returns:
        What undoes it when it is closed, but for layers, whose marks go with what `prepare` did to them.
    """
    leaves: Any = importlib.import_module("deepspeed").utils
    undo = ExitStack()
    leaves.set_z3_leaf_modules(model, sorted({type(layer) for layer in layers}, key=repr))
    head = model.get_output_embeddings()  # type: ignore[operator]
    if any(True for _ in head.children()):
        leaves.set_z3_leaf_module(head, True)
        undo.callback(vars(head).pop, "_z3_leaf", None)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    trained = any(p.requires_grad for p in model.parameters())
    if trained and not any(p.requires_grad for p in embedding.parameters()):
        undo.callback(embedding.register_forward_hook(lambda module, args, out: out.requires_grad_()).remove)
    return undo
