"""A server's figures in Prometheus' text format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medusa.decoding import Step

from .rows import Job, Row
from .scheduler import Observer

if TYPE_CHECKING:
    from .scheduler import Scheduler

# Seconds: steps of small models take milliseconds, those of large ones up to seconds; answers up to minutes.
STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
REQUEST_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


class Metrics(Observer):
    """Counts what a scheduler does. The figures lie in a registry of their own: two servers don't meet.

    ``drafts`` labels those of the batch with drafts ("on") and those of plain decoding ("off"). Accepted tokens per
    row and step are ``medusa_accepted_tokens_total / medusa_row_steps_total``; tokens per step are one more.
    """

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = registry = CollectorRegistry()
        self._steps = Counter("medusa_steps", "Forwards of the trunk over drafts.", ["drafts"], registry=registry)
        self._row_steps = Counter("medusa_row_steps", "The same, each counted per row.", ["drafts"], registry=registry)
        self._drafted = Counter("medusa_drafted_tokens", "Nodes drafted, fillers too.", ["drafts"], registry=registry)
        self._accepted = Counter("medusa_accepted_tokens", "Drafts accepted.", ["drafts"], registry=registry)
        self._positions = Counter(
            "medusa_accepted_at_position",
            "Steps of a row that accepted a draft at this depth of the tree; the first is 1.",
            ["position"],
            registry=registry,
        )
        self._tokens = Counter("medusa_tokens", "Tokens emitted.", ["drafts"], registry=registry)
        self._prompt_tokens = Counter("medusa_prompt_tokens", "Tokens of prompts read.", registry=registry)
        self._requests = Counter("medusa_requests", "Requests that ended, by how.", ["outcome"], registry=registry)
        self._step_seconds = Histogram(
            "medusa_step_seconds", "Duration of a forward.", ["kind"], buckets=STEP_BUCKETS, registry=registry
        )
        seconds = {
            "queue": "From a request's arrival to each row's prefill.",
            "first_token": "From a request's arrival to its first token.",
            "request": "From a request's arrival to its end.",
        }
        self._seconds = {
            name: Histogram(f"medusa_{name}_seconds", what, buckets=REQUEST_BUCKETS, registry=registry)
            for name, what in seconds.items()
        }
        self._serving = Gauge("medusa_rows", "Rows being decoded.", registry=registry)
        self._waiting = Gauge("medusa_waiting_rows", "Rows in the queue.", registry=registry)

    def watch(self, scheduler: Scheduler) -> None:
        """Report the rows of ``scheduler`` as they are when asked."""
        self._serving.set_function(lambda: scheduler.serving)
        self._waiting.set_function(lambda: scheduler.waiting)

    def text(self) -> bytes:
        """All figures, as Prometheus reads them."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self.registry))

    def joined(self, row: Row, waited: float) -> None:
        """A row left the queue."""
        self._seconds["queue"].observe(waited)
        self._prompt_tokens.inc(len(row.tally.request.ids))

    def stepped(self, plain: bool, step: Step, seconds: float) -> None:
        """A step or a prefill was made."""
        drafts = "off" if plain else "on"
        self._tokens.labels(drafts).inc(sum(map(len, step.tokens.values())))
        self._step_seconds.labels("step" if step.nodes else "prefill").observe(seconds)
        if not step.nodes:
            return
        self._steps.labels(drafts).inc()
        self._row_steps.labels(drafts).inc(len(step.tokens))
        self._drafted.labels(drafts).inc(len(step.tokens) * (step.nodes - 1))
        self._accepted.labels(drafts).inc(sum(step.accepted.values()))
        for count in step.accepted.values():
            for position in range(1, count + 1):
                self._positions.labels(str(position)).inc()

    def told(self, job: Job, seconds: float) -> None:
        """A request had its first token."""
        self._seconds["first_token"].observe(seconds)

    def over(self, job: Job, outcome: str, seconds: float) -> None:
        """A request ended."""
        self._requests.labels(outcome).inc()
        self._seconds["request"].observe(seconds)
