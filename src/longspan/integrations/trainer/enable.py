"""Make one Trainer sequence parallel."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from longspan.batch import count_targets
from longspan.errors import ConfigError
from longspan.integrations.trainer.checks import check, chosen_size
from longspan.integrations.trainer.model import FullBatch
from longspan.integrations.trainer.replicas import Replicas
from longspan.integrations.trainer.rows import EvaluationRows, Share, evaluation_rows, fingerprint, training_rows
from longspan.integrations.trainer.zero import check_zero, let_zero_hold
from longspan.integrations.transformers import Applied, prepare
from longspan.integrations.transformers.vocabulary import check_vocabulary
from longspan.mesh import Mesh
from longspan.once import tell
from longspan.overrides import Overrides
from longspan.plan.plan import Plan

_NAME = "_longspan_enabled"
_FIXED = {
    "grad_reduction": "accelerate's engines average gradients, and Trainer counts on it",
    "mesh": "the ranks of a sequence are neighbours, as on accelerate's cp axis",
}
_PREPARED = "_is_accelerate_prepared"
_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")


class EnabledTrainer:
    """What `enable` returns: reports, and undoes what was done to the trainer.

    To the trainer there are as many processes as data ranks; the ranks that share a sequence read the same rows and
    return the same. All that stands for it are attributes of this trainer, its accelerator and its model.
    """

    def __init__(self, trainer: Any, handle: Applied, token_fields: Sequence[str]) -> None:
        self.trainer, self.handle = trainer, handle
        self.replicas = Replicas(handle.mesh, trainer.args.device)
        self.settings: tuple[object, ...] = ()
        self.engine = ExitStack()  # undoes what was done for it
        self._overrides = Overrides()
        self._evaluating = self._taking = False
        self._rows: EvaluationRows | None = None
        self._samples = 0
        self._plain = {
            name: getattr(trainer, name)
            for name in ("_get_dataloader", "get_batch_samples", "compute_loss", "evaluation_loop", "log")
        }
        self._flos = trainer.floating_point_ops
        self._overrides.set(handle.model, forward=FullBatch(handle, token_fields))
        self._override_trainer()
        self._override_accelerator()

    @property
    def mesh(self) -> Mesh:
        """Axes of the prepared model."""
        return self.handle.mesh

    @property
    def plan(self) -> Plan:
        """How the model runs."""
        return self.handle.plan

    @contextmanager
    def bypass(self) -> Iterator[Any]:
        """Make the model the plain one for a while, as to generate."""
        with self.handle.bypass() as model:
            yield model

    def disable(self) -> None:
        """Give trainer, accelerator and model back as they were before `enable`; doing so again does nothing."""
        model = self.handle.model
        if isinstance(vars(model).get("_original_forward"), FullBatch):  # accelerate's note of what it wrapped
            del model._original_forward
        self.engine.close()
        self._overrides.restore()
        self.handle.remove()

    def _override_trainer(self) -> None:
        trainer, size = self.trainer, self.mesh.sequence.size
        self._overrides.set(
            trainer,
            **{_NAME: self},
            get_tp_size=lambda: size,
            get_cp_size=lambda: 1,
            get_sp_size=lambda: 1,
            gather_function=self._gather_for_metrics,
            floating_point_ops=lambda inputs: self._flos(inputs) / size,
            compute_loss=self._compute_loss,
            get_batch_samples=self._get_batch_samples,
            evaluation_loop=self._evaluation_loop,
            log=self._log,
            _get_dataloader=self._get_dataloader,
            _get_num_items_in_batch=self._count,
            _prepare_context_parallel_inputs=lambda model, inputs: (nullcontext, inputs),
            _eval_dataloaders={},
        )
        switched = [name for name in _CHECKPOINTING if getattr(trainer.args, name, False)]
        if switched:
            args = copy.copy(trainer.args)
            for name in switched:
                setattr(args, name, False)
            self._overrides.set(trainer, args=args)
            tell(f"longspan: {switched[0]} is switched off: longspan recomputes layers by itself, as its plan says")

    def _override_accelerator(self) -> None:
        self._overrides.set(
            self.trainer.accelerator,
            gather=self.replicas.gather,
            gather_for_metrics=self._gather_for_metrics,
            prepare_data_loader=self._prepare_data_loader,
            _prepare_cp=lambda *args: args,
            _cp_context=lambda **_: nullcontext(),
        )

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        plain = self._plain["_get_dataloader"]
        self._evaluating = not inspect.signature(plain).bind(*args, **kwargs).arguments.get("is_training", False)
        try:
            return plain(*args, **kwargs)
        finally:
            self._evaluating = False

    def _prepare_data_loader(self, loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None) -> Any:
        data = self.mesh.data
        if not self._evaluating:
            return training_rows(self.trainer.accelerator, loader, data.size, data.rank)
        share = Share(self.trainer.args.eval_batch_size, data.size, data.rank, filled=self.handle.logits)
        return evaluation_rows(self.trainer.accelerator, loader, share)

    def _get_batch_samples(self, iterator: Any, count: int, device: torch.device) -> tuple[list[Any], Any]:
        """Take the micro-batches of a step; where data ranks have different numbers left, all take the smallest.

        Targets are counted only then: ranks that have none left would otherwise skip a collective of the others.
        """
        self._taking = True
        try:
            batches, _ = self._plain["get_batch_samples"](iterator, count, device)
        finally:
            self._taking = False
        batches = batches[: self.replicas.smallest(len(batches))]
        return batches, self._count(batches, device)

    def _count(self, batches: list[Any], device: torch.device) -> Tensor | None:
        """Count the targets of micro-batches over all data ranks, each token once; None where Trainer counts none."""
        trainer = self.trainer
        labelled = bool(batches) and ("labels" in batches[0] or "shift_labels" in batches[0])
        if (
            self._taking
            or not labelled
            or not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)
        ):
            return None
        problem: Exception | None = None
        targets: int | Tensor = 0
        try:
            for batch in batches:
                targets += count_targets(batch)
                check_vocabulary(self.handle.parts, batch)
        except Exception as error:  # whatever it is, the other data ranks would wait
            problem = error
        return self.replicas.count(targets, fingerprint(batches), problem).to(device)

    def _compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """Compute the loss as the trainer does; in evaluation that of the rows of all data ranks."""
        kwargs |= {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
        if self.trainer.model.training:
            return self._plain["compute_loss"](model, inputs, **kwargs)
        weight: int | Tensor = 1
        if num_items_in_batch is None and "labels" in inputs:
            weight = count_targets(inputs)  # the loss will be a mean over the rows of a data rank
        found = self._plain["compute_loss"](model, inputs, **kwargs)
        loss = self.replicas.mean(found[0] if return_outputs else found, weight)
        return (loss, found[1]) if return_outputs else loss

    def _evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        plain = self._plain["evaluation_loop"]
        asked = inspect.signature(plain).bind(dataloader, description, *args, **kwargs).arguments
        loss_only = asked.get("prediction_loss_only")
        loss_only = self.trainer.args.prediction_loss_only if loss_only is None else loss_only
        if not loss_only and not self.handle.logits:
            raise ConfigError(
                "Predictions are logits of all tokens, which longspan does not make unasked: pass "
                "enable(..., logits=True), or set prediction_loss_only=True."
            )
        self._rows = dataloader if isinstance(dataloader, EvaluationRows) else None
        model = self.trainer.model
        marked = vars(model).get(_PREPARED)
        try:
            output = plain(dataloader, description, *args, **kwargs)
        finally:
            self._rows = None
            if marked is None and self.trainer.model_wrapped is model:
                vars(model).pop(_PREPARED, None)  # or accelerate would leave it without its engine when training starts
        self._samples = output.num_samples
        return output

    def _gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """Gather over the data ranks, without the rows that some of them read to have something to do."""
        if use_gather_object:
            found: Any = self.replicas.gather_objects(data)
            rows = self._real_rows()
            return found if rows is None else found[:rows]
        rows, scalar = self._real_rows(), isinstance(data, Tensor) and data.dim() == 0
        found = self.replicas.gather(data)
        if rows is None or scalar:
            return found
        return tree_map(lambda t: t[:rows], found)

    def _real_rows(self) -> int | None:
        """Return the rows of all data ranks in the batch at hand, None where nothing need be cut off."""
        if self._rows is not None:
            return self._rows.total
        state = self.trainer.accelerator.gradient_state
        return state.remainder if state.end_of_dataloader and state.remainder > 0 else None

    def _log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with evaluation steps counted as data ranks take them."""
        for name in logs:
            prefix = name.removesuffix("_steps_per_second")
            runtime = logs.get(f"{prefix}_runtime")
            if name != prefix and prefix != "train" and runtime:
                steps = math.ceil(self._samples / (self.trainer.args.eval_batch_size * self.replicas.size))
                logs[name] = round(steps / runtime, 3)
        self._plain["log"](logs, *args, **kwargs)


def enable(
    trainer: Any, sequence_parallel_size: int | None = None, *, token_fields: Sequence[str] = (), **options: Any
) -> EnabledTrainer:
    """Let a Trainer, or TRL's SFTTrainer, train and evaluate on sequences divided over ranks.

    Call it on every process after the trainer is made and before `train()`. Batch sizes are per data rank, of which
    there are world size / sequence_parallel_size.

    Args:
        trainer: a transformers Trainer on DDP, FSDP2 or a single process.
        sequence_parallel_size: ranks that share a sequence; None: the size of accelerate's `cp` axis.
        token_fields: names of further tensors [B, S, ...] in batches that the model takes.
        options: of `longspan.prepare`: ulysses_degree, ring_degree, kv_exchange, kernel, memory,
            sequence_parallel_in_eval, and logits, without which compute_metrics, compute_loss_func, label smoothing
            and predict() are refused.

    Raises:
        ConfigError: a setting of the trainer that would be wrong under sequence parallelism; says what works.
        TopologyError, ModelError, KernelError: as `longspan.prepare`.

    Cost: as `longspan.prepare`; a model that the trainer has left on the host is moved to its device.
    """
    size = chosen_size(trainer, sequence_parallel_size)
    settings = (size, tuple(token_fields), tuple(sorted(options.items(), key=lambda item: item[0])))
    earlier: EnabledTrainer | None = getattr(trainer, _NAME, None)
    if earlier is not None:
        if earlier.settings != settings:
            raise ConfigError("This trainer is enabled already, with other settings; call disable() first.")
        return earlier
    for name, why in _FIXED.items():
        if name in options:
            raise ConfigError(f"enable takes no {name}: {why}.")
    check(trainer, bool(options.get("logits", False)))
    if trainer.is_deepspeed_enabled:
        check_zero(trainer)
    device = trainer.args.device
    if next(trainer.model.parameters()).device.type != device.type:
        trainer._move_model_to_device(trainer.model, device)
    handle = prepare(trainer.model, size, **options)
    enabled = EnabledTrainer(trainer, handle, token_fields)
    if trainer.is_deepspeed_enabled:
        enabled.engine = let_zero_hold(trainer, handle)
    enabled.settings = settings
    return enabled
