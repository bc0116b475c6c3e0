"""What holds for every test: no network, one thread, and no use of what transformers has deprecated."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator

import pytest

# Read when torch, the hub client and wandb are first imported, hence set here and not in a fixture.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Two workers on two cores: a second OpenMP thread in each makes small models several times slower, not faster.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Take what is there, all that was ever imported, out of what is looked through for garbage.

    The Trainer collects it at the end of each run, and Python now and then: a large share of the time of small tests.
    """
    gc.collect()
    gc.freeze()


class _Deprecations(logging.Handler):
    """Keeps the log lines that announce a deprecation."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if "deprecat" in line.lower() or "will be removed" in line:
            self.lines.append(line)


@pytest.fixture(autouse=True)
def no_deprecations() -> Iterator[None]:
    """Fail a test during which transformers logged a deprecation: much of it is logged, not raised as a warning."""
    logger, handler = logging.getLogger("transformers"), _Deprecations()
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not handler.lines, "transformers says deprecated: " + " | ".join(handler.lines)
