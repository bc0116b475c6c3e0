"""The engine as a model of lm-evaluation-harness (``lm_eval``), to see that scores stay what they are with drafts.

    import lm_eval
    from medusa.infer import Engine
    from medusa.infer.harness import harness_model

    lm_eval.simple_evaluate(model=harness_model(Engine.load("runs/tinyshakespeare")), tasks=["gsm8k"])

Answers are decoded by the engine, with its drafts; log-likelihoods are the trunk's own, to which no drafter adds
anything. Texts are cut into tokens as the harness does it for models of transformers.

Dimensions: T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa.encoding import encode
from medusa.errors import UserError

if TYPE_CHECKING:
    from .engine import Engine

NEW_TOKENS = 256  # where a task says nothing: the harness's own default


def harness_model(engine: Engine, *, add_bos: bool = False) -> Any:
    """``engine`` as an ``lm_eval.api.model.LM``; ``add_bos``: whether each text begins with the tokenizer's BOS.

    Raises:
        UserError: lm_eval is not installed, or the trunk has no tokenizer.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise UserError(f"lm-evaluation-harness is not there ({error}): pip install lm-eval") from error
    scorer = Scorer(engine, add_bos)

    class EngineLM(LM):
        """Hands the harness's requests over; each has its arguments in ``args``."""

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return [scorer.loglikelihood(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return [scorer.rolling(*request.args) for request in requests]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return scorer.generate([request.args for request in requests])

        @property
        def tokenizer_name(self) -> str:
            return str(scorer.tokenizer.name_or_path).replace("/", "__")

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return str(
                scorer.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

    return EngineLM()


class Scorer:
    """What the harness asks, without the harness.

    Args:
        engine: decodes, and has the trunk that scores.
        add_bos: whether each text begins with the tokenizer's BOS.

    Raises:
        UserError: the trunk has no tokenizer.
    """

    def __init__(self, engine: Engine, add_bos: bool = False) -> None:
        if engine.trunk.tokenizer is None:
            raise UserError("the engine's trunk has no tokenizer, and the harness asks in text: give it one")
        self.engine, self.trunk, self.tokenizer, self.add_bos = engine, engine.trunk, engine.trunk.tokenizer, add_bos

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Log-probability (nats) of ``continuation`` after ``context``, and whether greedy decoding would give it."""
        stripped = context.rstrip()
        if context and stripped != context:  # a space belongs to the word after it
            context, continuation = stripped, context[len(stripped) :] + continuation
        before = self._ids(context) if context else [self._prefix()]
        whole = self._ids(context + continuation) if context else [*before, *encode(self.tokenizer, continuation)]
        return self._score(whole[: len(before)], whole[len(before) :])

    def rolling(self, text: str) -> float:
        """Log-probability (nats) of a whole text, each token once, after as much of it as the context holds."""
        ids, total = encode(self.tokenizer, text), 0.0
        most = self._readable()
        for start in range(0, len(ids), most):
            part = ids[start : start + most]
            before = [self._prefix(), *ids[:start]][-(most + 1 - len(part)) :] if start else [self._prefix()]
            total += self._score(before, part)[0]
        return total

    def generate(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Continue contexts, each by its own options: ``until``, ``max_gen_toks``, and those of the engine."""
        if not asked:
            return []
        prompts, each = [], []
        for context, options in asked:
            own = dict(options)
            until, tokens = own.pop("until", None), own.pop("max_gen_toks", NEW_TOKENS)
            stops = [until] if isinstance(until, str) else [stop for stop in until or () if stop]
            if not own.get("do_sample"):
                own = {name: value for name, value in own.items() if name not in ("temperature", "top_p", "top_k")}
                own["do_sample"] = False
            each.append(own | {"max_new_tokens": tokens, "stop_strings": stops or None, "include_stop": False})
            prompts.append((self._ids(context) or [self._prefix()])[-self._room(tokens) :])
        return [completion.text for completion in self.engine.generate(prompts, each=each)]

    def _ids(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, add_special_tokens=self.add_bos)

    def _prefix(self) -> int:
        """What stands before a text that nothing precedes: the BOS, or the EOS of a text before."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise UserError("the tokenizer has neither BOS nor EOS to put before a text: give tasks that have a context")

    def _room(self, tokens: int) -> int:
        """How many tokens may precede so many; at least one does."""
        end = self._readable()
        if tokens >= end:
            raise UserError(f"max_gen_toks={tokens}: a text may reach {end} tokens with this trunk, ask for fewer")
        return end - tokens

    def _readable(self) -> int:
        """How many tokens a forward may read."""
        end = self.trunk.horizon(0)
        return 1 << 30 if end is None else end

    @torch.inference_mode()
    def _score(self, before: list[int], ids: list[int]) -> tuple[float, bool]:
        """Of ``ids`` after ``before``, of which the beginning is left out where both exceed the context."""
        if not ids:
            return 0.0, True
        text = [*before, *ids][-self._readable() - 1 :]  # the last one is not read, only looked for
        ids_1T = torch.tensor([text[:-1]], device=self.trunk.device)
        counted = min(len(ids), len(text) - 1)
        logits_TV = self.trunk.forward(ids_1T, keep=counted).logits[0].double()
        aim_T: Tensor = torch.tensor(text[-counted:], device=logits_TV.device)
        found_T = logits_TV.log_softmax(-1).gather(1, aim_T[:, None])[:, 0]
        return found_T.sum().item(), bool((logits_TV.argmax(-1) == aim_T).all())
