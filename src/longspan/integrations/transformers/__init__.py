"""Hugging Face causal language models, unmodified."""

from longspan.integrations.transformers.applied import Applied
from longspan.integrations.transformers.prepare import prepare

__all__ = ["Applied", "prepare"]
