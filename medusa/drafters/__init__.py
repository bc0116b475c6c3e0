"""Drafters: ways of guessing the next tokens. All speak the protocol of :mod:`medusa.drafters.base`."""

from __future__ import annotations
