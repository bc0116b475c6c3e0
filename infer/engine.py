"""The engine: a trunk and a drafter behind ``generate`` and ``stream``."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, overload

import torch

from medusa.checkpoint import MANIFEST
from medusa.compiled import StepSize
from medusa.decoding import Step, decode
from medusa.drafters.base import Drafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.trunk import Trunk

from .calls import Call, prepare
from .chat import Conversation, chat, stream_chat
from .drafters import has_drafts, make_drafter, split_name
from .inputs import Prompts, read_prompts
from .messages import Message
from .source import find, load_trunk
from .streams import Stream, Streamer, check_streamer, pieces, put_certain
from .tally import Completion
from .warmup import use_compiled, use_stored, warm_up

__all__ = ["Completion", "Engine", "Stream"]

MAX_ROWS = 32


class Engine:
    """Decodes with a trunk and a drafter. It holds no state of a request: calls from several threads don't meet.

    Args:
        trunk: the model whose text is produced, and its tokenizer.
        drafter: what guesses ahead; None guesses nothing.
        max_rows: rows decoded at once; those beyond it begin as others end.
        compile: have the trunk's steps over the drafter's trees compiled, for one row; None where :meth:`warmup`, in
            this process or another, left them on this machine's disk, for up to ``max_rows`` rows; False never.

    Raises:
        UserError: ``max_rows`` below 1, or a trunk that can't be compiled.
    """

    def __init__(
        self, trunk: Trunk, drafter: Drafter | None = None, *, max_rows: int = MAX_ROWS, compile: bool | None = None
    ) -> None:
        if not isinstance(max_rows, int) or isinstance(max_rows, bool) or max_rows < 1:
            raise UserError(f"max_rows={max_rows!r}: give a whole number from 1")
        self.trunk = trunk
        self.drafter: Drafter = drafter or NullDrafter()
        self.max_rows = max_rows
        if compile:
            use_compiled(trunk, self.drafter)
        elif compile is None:
            use_stored(trunk, self.drafter, max_rows)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        drafter: str = "auto",
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        check: bool = True,
        max_rows: int = MAX_ROWS,
        compile: bool | None = None,
        **trunk_options: Any,
    ) -> Engine:
        """Load a folder made by ``medusa train``, heads as the reference publishes them, or a hub repository of either.

        ``drafter``: "auto" for the folder's own heads and tree, "none" to decode without drafts. For those that need no
        heads a plain trunk's folder or hub id will do: "prompt-lookup", "lookahead", "draft:FOLDER" for a draft model,
        "cut:LAYERS" for the trunk's own first layers, "eagle:FOLDER" for an EAGLE layer, ours or as published. With the
        folder's heads also "sized" (the size of the tree goes by the rows of each batch and by what steps cost here,
        but in batches with a row that samples it is the folder's tree), "dynamic:NODES" and "mixed:NODES", with its
        EAGLE layer "eagle" and "eagle:NODES"; "auto" is that layer where there are no heads.

        ``dtype`` and ``device`` are the trunk's ("auto": its own, and a GPU where there is one);
        ``check`` verifies at load that it can be driven exactly with a token tree. ``compile`` has the trunk's steps
        over one row's trees compiled, each when it is first met, or by :meth:`warmup` before; left out, those are used
        that are on this machine's disk, for torch's threads as they are now. ``trunk_options`` go to
        :meth:`medusa.trunk.Trunk.load`: ``packed``, an adapter, and what ``from_pretrained`` takes.

        Raises:
            UserError: nothing there, an unknown drafter, a plain trunk with drafter "auto", or heads or a draft model
                that don't belong to the trunk.
        """
        split_name(drafter)
        folder = find(str(source), revision)
        if folder is not None and has_drafts(folder):
            trunk = load_trunk(folder, dtype=dtype, device=device, check=check, **trunk_options)
            return cls(trunk, make_drafter(drafter, trunk, folder), max_rows=max_rows, compile=compile)
        if drafter == "auto":
            raise UserError(
                f"{source} has no {MANIFEST}, so no heads: give a folder made by `medusa train`; a plain trunk decodes"
                " with `medusa generate --baseline`, in Python with drafter='none', or with a drafter that needs no"
                " heads, such as 'prompt-lookup'"
            )
        plain = Trunk.load(
            folder or source,
            dtype=dtype,
            device=device,
            revision=None if folder else revision,
            check=check,
            **trunk_options,
        )
        return cls(plain, make_drafter(drafter, plain, None), max_rows=max_rows, compile=compile)

    def warmup(self, rows: Sequence[int] = (1,)) -> dict[StepSize, float]:
        """Compile the steps of batches of so many ``rows`` now, each number for itself, with a progress bar.

        Returns the seconds that each size took: minutes the first time. What is made is kept on disk: on a processor
        the next process has it in milliseconds, for any weights of such a model. Set torch's threads before: what is
        compiled is compiled for their number.

        Raises:
            UserError: a number of rows below 1, a trunk that can't be compiled, or no C++ compiler.
        """
        return warm_up(self.trunk, self.drafter, rows)

    @overload
    def generate(self, prompt: str | list[int], **options: Any) -> Completion: ...

    @overload
    def generate(self, prompt: Any = None, **options: Any) -> Any: ...

    def generate(
        self,
        prompt: Any = None,
        *,
        each: Sequence[Mapping[str, Any]] | None = None,
        streamer: Streamer | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Continue a prompt or a batch of them; each row is what it would be alone.

        Args:
            prompt: a text, ids, a tensor of ids [T] or [B, T], or a list of texts, ids or tensors; or what a tokenizer
                returns, a mapping with ``input_ids`` and perhaps ``attention_mask``, whose pads are dropped on either
                side. These two may also be keywords, as ``generate`` of transformers takes them.
            each: every prompt's own options, over the shared ones.
            streamer: an object with ``put`` and ``end``, such as transformers' ``TextStreamer``; one prompt alone. It
                gets the prompt's ids, then each token as soon as it is certain.
            options: the fields of :class:`medusa.infer.options.Options`, named as in transformers, and perhaps a
                ``generation_config``. Those not given come from the trunk's ``generation_config``, then decoding is
                greedy; as in transformers, None is a value: it undoes what the config says. A row that samples without
                a ``seed`` draws one of its own, and its completion says which.

        Returns:
            The completion of one prompt, or a list in the prompts' order: of a list, of a mapping, of a tensor
            [B, T], or where ``num_return_sequences`` asks for several.

        Raises:
            UserError: an unknown or unsupported option, a value out of range, options that contradict each other, a
                prompt that is empty, too long, of mixed kinds, or with characters the tokenizer does not know.
        """
        prompts, call = self._prepare(prompt, options, each)
        if streamer is not None:
            check_streamer(streamer, len(call.tallies))
            streamer.put(torch.tensor([call.requests[0].ids]))
        told = 0
        for step, seconds in self._run(call):
            for row in step.tokens:
                call.tallies[row].add(row, step, seconds)
            if streamer is not None:
                told += put_certain(streamer, call.tallies[0], told)
        if streamer is not None:
            streamer.end()
        completions = [tally.completion() for tally in call.tallies]
        return completions[0] if prompts.single and len(completions) == 1 else completions

    def stream(self, prompt: Any = None, **options: Any) -> Stream:
        """Continue one prompt piece by piece; the pieces joined are the completion's text. Options as in ``generate``.

        Raises:
            UserError: as ``generate``, at the call and not at the first piece; also for several prompts, and for an
                engine without tokenizer.
        """
        if self.trunk.tokenizer is None and not isinstance(prompt, str):
            raise UserError("this engine's trunk has no tokenizer to make text with: use generate for token ids")
        _, call = self._prepare(prompt, options, options.pop("each", None))
        if len(call.tallies) != 1:
            raise UserError(f"stream takes one prompt and not {len(call.tallies)}: give a batch to generate")
        timed = self._run(call)
        first = next(timed)  # a prompt that can't be decoded is refused here
        return Stream(pieces(first, timed, call.tallies[0]), call.tallies[0])

    def chat(self, messages: Sequence[Message], **options: Any) -> Completion:
        """Answer messages, dicts with role and content, as the tokenizer's chat template puts them.

        ``options`` are those of ``generate``, and ``tools`` and ``chat_template_kwargs`` for the template. The EOS that
        ends the answer is not in its text.

        Raises:
            UserError: no chat template, messages that can't be answered or fill the context, or as ``generate``.
        """
        return chat(self, messages, **options)

    def stream_chat(self, messages: Sequence[Message], **options: Any) -> Stream:
        """:meth:`chat` piece by piece; errors come at the call and not at the first piece."""
        return stream_chat(self, messages, **options)

    def conversation(self, system: str | None = None, **options: Any) -> Conversation:
        """Turns that read only what is new, with the options of :meth:`chat`; see the class."""
        return Conversation(self, system, **options)

    def _prepare(
        self, prompt: Any, options: dict[str, Any], each: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Prompts, Call]:
        named = [name for name in ("inputs", "input_ids") if options.get(name) is not None]
        times = len(named) + (prompt is not None)
        if times > 1:
            raise UserError(f"a prompt is given {times} times: leave all but one out")
        extra = {name: options.pop(name, None) for name in ("inputs", "input_ids", "attention_mask", "token_type_ids")}
        if extra["token_type_ids"] is not None and not named:
            raise UserError("token_type_ids beside a prompt: a trunk reads ids alone, leave it out")
        if named:
            prompt = {"input_ids": extra[named[0]], "token_type_ids": extra["token_type_ids"]}
        tokenizer, vocabulary = self.trunk.tokenizer, self.trunk.vocab_size
        prompts = read_prompts(prompt, extra["attention_mask"], tokenizer, vocabulary)
        return prompts, prepare(self.trunk, self.drafter, prompts.rows, options, each)

    def _run(self, call: Call) -> Generator[tuple[Step, float], None, None]:
        """The steps, each with the seconds spent in decoding so far; what the consumer does in between is left out."""
        steps = decode(self.trunk, call.drafter, call.requests, call.rule, most=self.max_rows)
        spent = 0.0
        with closing(steps):
            while True:
                start = time.perf_counter()
                step = next(steps, None)
                if step is None:
                    return
                spent += time.perf_counter() - start
                yield step, spent
