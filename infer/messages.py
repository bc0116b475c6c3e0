"""From a chat's messages to token ids: what a message is, and the chat template that the tokenizer brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from medusa.data.records import ROLES
from medusa.encoding import encode
from medusa.errors import UserError, nearest, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]  # role and content, and perhaps what a template knows beside them, such as tool_calls

# Arguments of apply_chat_template that decide what comes out; the others, and the template's own, are the caller's.
OURS = (
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tools",
    "truncation",
)


class Template:
    """The chat template of a tokenizer, with what is handed to it beside the messages.

    Args:
        tokenizer: brings the template, and encodes what it writes.
        tools: functions or JSON schemas that the model may call, if the template speaks of tools.
        options: the template's own variables, such as ``enable_thinking``, or a ``chat_template`` in place of the
            tokenizer's.

    Raises:
        UserError: there is no template, or arguments of the wrong kind.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        options = {} if options is None else options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise UserError(f"chat_template_kwargs={options!r:.60}: give a dict of the template's variables")
        for name in options:
            if name in OURS:
                raise UserError(
                    f"chat_template_kwargs has {name!r}, which is no variable of the template: leave it out"
                )
        if tools is not None and (isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence)):
            raise UserError(f"tools={tools!r:.60}: give a list of functions or of JSON schemas")
        if tokenizer is None or not (tokenizer.chat_template or options.get("chat_template")):
            lacks = "trunk has no tokenizer" if tokenizer is None else "trunk's tokenizer has no chat template"
            raise UserError(
                f"the {lacks}, as of a base model: continue a text with `medusa generate` (in Python Engine.generate),"
                " or give a trunk that was trained to chat"
            )
        self.tokenizer = tokenizer
        self._given = {"tools": None if tools is None else list(tools), **options}

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids of checked messages and of what opens the answer. The template writes the BOS, if there is one.

        Raises:
            UserError: the template refuses the messages, or writes nothing.
        """
        try:
            ids = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **self._given
            )
        except Exception as error:  # a template is code that came with the model: it raises anything
            raise UserError(
                f"the chat template refuses these messages ({reason(error)}): give them as this model takes them"
            ) from error
        if not ids:
            raise UserError("the chat template writes nothing for these messages: give another chat_template")
        return list(ids)

    def check(self, messages: object) -> list[Message]:
        """The messages, if one can answer them.

        Raises:
            UserError: no list, none in it, one that is no message, or the last is not to be answered.
        """
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            raise UserError(f"messages {messages!r:.60}: give a list of dicts with role and content")
        if not messages:
            raise UserError("messages is an empty list: give at least one message, such as the user's")
        checked = [self.check_one(message, f"messages[{place}]") for place, message in enumerate(messages)]
        if checked[-1]["role"] not in ("user", "tool"):
            raise UserError(
                f"the last of {len(checked)} messages is from {checked[-1]['role']!r}: what is answered is from the"
                " user or a tool, end with such a message"
            )
        return checked

    def check_one(self, message: object, name: str) -> Message:
        """A message; errors call it ``name``."""
        if not isinstance(message, Mapping):
            raise UserError(f"{name} is {message!r:.60}: give a dict with role and content")
        role = message.get("role")
        if role not in ROLES:
            what = "has no role" if role is None else f"is from {role!r:.60}{nearest(str(role), ROLES)}"
            raise UserError(f"{name} {what}: the roles are {', '.join(ROLES)}")
        content = message.get("content")
        if content is None and role == "assistant" and message.get("tool_calls"):
            return dict(message)
        if not isinstance(content, str):
            near = next((key for key in message if nearest(str(key), ["content"])), None) if content is None else None
            what = "no content" if content is None else f"the content {content!r:.60}"
            raise UserError(f"{name} has {what}{f' but {near!r}' if near else ''}: give a text as its content")
        if not content and role == "user":
            raise UserError(f"{name} has an empty content: give what the user says")
        self._check_text(content, name)
        return dict(message)

    def _check_text(self, text: str, name: str) -> None:
        """Refuse characters that can't be encoded: the template's own call would drop them, or end in a fault."""
        try:
            text.encode()
            if self.tokenizer.unk_token_id is None:
                encode(self.tokenizer, text)
        except UnicodeEncodeError as error:
            raise UserError(f"{name} is no Unicode text at offset {error.start}: give it in UTF-8") from error
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
