"""Medusa decoding: speculative decoding of Hugging Face causal language models, exact to the token."""

from __future__ import annotations

__version__ = "0.1.0"
