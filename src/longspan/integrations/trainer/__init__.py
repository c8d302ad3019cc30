"""Hugging Face Trainer, and what is built on it: TRL's SFTTrainer."""

from longspan.integrations.trainer.enable import EnabledTrainer, enable

__all__ = ["EnabledTrainer", "enable"]
