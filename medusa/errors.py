"""Errors that are the user's to mend: one line each, with the value, the rule and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A wrong input. The command line prints its message as one line and exits with code 2."""


def reason(error: BaseException) -> str:
    """The first line of what an error says, or its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def nearest(word: str, options: Iterable[str]) -> str:
    """Return ``" (did you mean X?)"`` for the option closest to ``word``, or an empty string."""
    close = difflib.get_close_matches(word, list(options), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
