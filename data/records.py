"""What the rows of a source hold: a text, a prompt with its completion, messages, or token ids with an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from medusa.errors import UserError, nearest

if TYPE_CHECKING:
    import datasets

    from .corpus import DataConfig

Format = Literal["text", "completion", "messages", "ids"]
Message = dict[str, Any]

# The columns of each format, by the names that they have from here on. "ids" is what `medusa distill` writes.
COLUMNS: dict[Format, tuple[str, ...]] = {
    "text": ("text",),
    "completion": ("prompt", "completion"),
    "messages": ("messages",),
    "ids": ("prompt_ids", "answer_ids"),
}
OPTIONAL = {"ids": ("id", "finish")}
ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}  # ShareGPT's and others
OTHER_KEYS = {"from": "role", "value": "content"}


def fields_of(config: DataConfig) -> dict[Format, tuple[str, ...]]:
    """The columns of each format as the source calls them."""
    return {
        "text": (config.text_field,),
        "completion": (config.prompt_field, config.completion_field),
        "messages": (config.messages_field,),
        "ids": COLUMNS["ids"],
    }


def format_of(dataset: datasets.Dataset) -> Format:
    """The format of a data set that ``standardise`` made."""
    return next(kind for kind, columns in COLUMNS.items() if set(columns) <= set(dataset.column_names))


def standardise(dataset: datasets.Dataset, config: DataConfig) -> datasets.Dataset:
    """``dataset`` with the columns of its format alone, under their own names.

    Raises:
        UserError: it is empty, has none of the fields or those of two formats, or a text field holds something else.
    """
    if not len(dataset):
        raise UserError(f"source {config.source!r} is empty (split {config.split!r}): give one that holds text")
    kind = _detect(dataset.column_names, config)
    names = fields_of(config)[kind]
    if kind == "text":
        _check_texts(dataset, names[0], config)
    extra = [name for name in OPTIONAL.get(kind, ()) if name in dataset.column_names]
    dataset = dataset.select_columns([*names, *extra])
    renamed = {name: wanted for name, wanted in zip(names, COLUMNS[kind], strict=True) if name != wanted}
    dataset = dataset.rename_columns(renamed) if renamed else dataset
    return _in_order(dataset) if kind == "ids" and "id" in extra else dataset


def _in_order(dataset: datasets.Dataset) -> datasets.Dataset:
    """Answers stand in the order in which they ended, the long ones last: by their ids, no share is special."""
    names = dataset["id"]
    return dataset.select(sorted(range(len(dataset)), key=lambda row: str(names[row])))


def _detect(columns: Sequence[str], config: DataConfig) -> Format:
    """The format by its columns, or the one that the configuration names."""
    fields = fields_of(config)
    if config.format != "auto":
        _require(fields[config.format], columns, config)
        return config.format
    found = [kind for kind, names in fields.items() if set(names) <= set(columns)]
    named = [kind for kind in found if fields[kind] != COLUMNS[kind]]  # a field with a name of the user's
    if len(found) > 1 and len(named) != 1:
        raise UserError(f"{config.source!r} has the fields of {' and '.join(found)}: choose one by data.format")
    if not found:
        mine = [kind for kind, names in fields.items() if names != COLUMNS[kind]]
        _require(fields[mine[0] if mine else "text"], columns, config)
    return (named or found)[0]


def _require(names: Sequence[str], columns: Sequence[str], config: DataConfig) -> None:
    for name in names:
        if name not in columns:
            wanted = (
                "" if config.format != "auto" else "; text, messages, or prompt and completion are known by themselves"
            )
            raise UserError(
                f"{config.source!r} has no field {name!r}{nearest(name, columns)}, but {', '.join(columns)}: name"
                f" one with data.{_key_of(name, config)}{wanted}"
            )


def _key_of(name: str, config: DataConfig) -> str:
    """The key of the configuration that names this field."""
    keys = ("text_field", "prompt_field", "completion_field", "messages_field")
    return next((key for key in keys if getattr(config, key) == name), "format")


def _check_texts(dataset: datasets.Dataset, field: str, config: DataConfig) -> None:
    kind = getattr(dataset.features[field], "dtype", "list")
    if kind not in ("string", "large_string"):
        raise UserError(f"field {field!r} of {config.source!r} holds {kind}, not text: name another with text_field")
    column = dataset.select_columns(field).with_format("arrow")[:][field]
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise UserError(f"row {row} of {config.source!r} has no field {field!r}: fill it in, or drop the row")


def conversation(value: object, name: str) -> list[Message]:
    """Messages with role and content, checked; ShareGPT's from and value are taken too. ``name`` is for errors.

    Raises:
        UserError: no list of messages, an unknown role, or a content that is no text.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{name} is {value!r:.60}: give a list of messages with role and content")
    if not value:
        raise UserError(f"{name} is an empty list: give at least one message")
    return [_message(each, f"{name}[{place}]") for place, each in enumerate(value)]


def _message(value: object, name: str) -> Message:
    if not isinstance(value, Mapping):
        raise UserError(f"{name} is {value!r:.60}: give an object with role and content")
    # A key that another row has comes as None.
    message: Message = {OTHER_KEYS.get(key, str(key)): part for key, part in value.items() if part is not None}
    role = message.get("role")
    message["role"] = OTHER_ROLES.get(str(role), role)
    if message["role"] not in ROLES:
        what = "has no role" if role is None else f"is from {role!r:.60}{nearest(str(role), ROLES)}"
        raise UserError(f"{name} {what}: the roles are {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return message | {"content": ""}
    if not isinstance(content, str):
        what = "no content" if content is None else f"the content {content!r:.60}"
        raise UserError(f"{name} has {what}: give a text as its content")
    return message
