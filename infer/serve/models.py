"""The bodies that a server takes, as OpenAI's API has them, and those it answers with.

Parameters of OpenAI's that change nothing here are taken at the value that asks for nothing.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema


def _refuse_true(value: bool) -> bool:
    if value:
        raise ValueError("not supported here, leave it out")
    return value


Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
No = Annotated[bool, AfterValidator(_refuse_true), WithJsonSchema({"type": "boolean", "const": False})]
STOPS = 16
CHOICES = 128


class Strict(BaseModel):
    """A body in which nothing is unknown, and a number is no string."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    include_obfuscation: No | None = None


class Asked(Strict):
    """What both kinds of request may ask. Below the line are extensions: the engine's own options."""

    model: str | None = Field(None, description="the name in /v1/models; may be left out")
    max_tokens: Count | None = Field(None, description="the most tokens to emit; left out, as the engine has it: 256")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None, description="0 is greedy; left out, the model's own generation_config says, else greedy"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES)] | None = Field(None, description="answers to each prompt")
    stop: Text | Annotated[list[Text], Field(max_length=STOPS)] | None = Field(
        None, description="texts that end the answer where they first come, and are no part of it"
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = Field(
        None,
        description="the same seed draws the same answer, whatever else is decoded; n answers have it and the next",
    )
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None = (
        Field(None, description="what is added to the scores of tokens, by id")
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: No | None = None
    service_tier: Literal["auto", "default"] | None = None
    # ------------------------------------------------------------------------------------------------------------------
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    baseline: bool | None = Field(None, description="decode without drafts: the same answer, one token per step")
    drafts: bool | None = Field(
        None, description="in a stream, tell which depth of the draft tree each part of the text was guessed at"
    )


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A turn of a chat. What else clients repeat of an answer is passed over."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class TextFormat(Strict):
    """The one format that needs no grammar."""

    type: Literal["text"]


class ChatRequest(Asked):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = Field(None, description="OpenAI's newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Asked):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(None, description="likeliest tokens to report")
    echo: No | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: Literal[""] | None = None


class ErrorFields(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """An answer that is an error."""

    error: ErrorFields


class Usage(BaseModel):
    """Tokens read, counted once for each prompt, and emitted, those that end answers included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Figures(BaseModel):
    """An extension: what an answer took. ``accepted[n]`` counts the steps at which n drafts were accepted."""

    steps: int
    tokens_per_step: float
    accepted: list[int]
    seconds: float
    seed: int | None
    stop: str | None
    lossless: bool


class Answer(BaseModel):
    """The message of a chat's answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class TopLogprob(BaseModel):
    """A token and its log-probability by the trunk's own law; ``bytes`` only where they are whole characters."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(TopLogprob):
    """A token of the answer, with the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat's answer."""

    content: list[TokenLogprobs]
    refusal: None


class TextLogprobs(BaseModel):
    """Log-probabilities of a completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: Answer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    medusa: Figures


class TextChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    medusa: Figures


class ChatReply(BaseModel):
    """What /v1/chat/completions answers."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextReply(BaseModel):
    """What /v1/completions answers."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ModelCard(BaseModel):
    """The model that is served. ``context``: tokens that a text may reach; ``chat``: whether it has a chat template."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context: int | None
    chat: bool
    drafter: str


class ModelList(BaseModel):
    """What /v1/models answers."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    """What /health answers: rows being decoded, and rows that wait."""

    status: Literal["ok", "failed"]
    rows: int
    waiting: int
