"""Requests in OpenAI's form: their fields, limits and meaning. Unknown fields are refused."""

import re
import reprlib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictBool, StrictInt, Tag, model_validator
from pydantic_core import PydanticCustomError

from dgemma.serve.errors import ApiError, encodable, in_json

_ALTERNATIVES = ("body", "str", "constrained-str", "int", "ToolChoice", "TextPart", "ImagePart")
_PART_NAMES = {"text": "TextPart", "image_url": "ImagePart"}
_RULES = {  # of fields that pydantic describes badly
    "prompt": "be a text, a list of token ids, or a list of several of these",
    "logit_bias": "be empty",
}

Element = TypeVar("Element")
Many = Annotated[list[Element], Field(fail_fast=True)]  # a body can have a million mistakes, and one is reported
Seed = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, body: Any) -> Any:
        """Refuse the first unknown field. pydantic would report all of them, and a body can have 60,000."""
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in body if isinstance(body, dict) else ():
            if name not in known:
                raise PydanticCustomError("extra_forbidden", "This field is unknown", {"name": encodable(name)})
        return body


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ImageUrl(_Body):
    url: str
    detail: Literal["auto", "low", "high"] | None = None  # every picture fills the checkpoint's budget of tokens


class ImagePart(_Body):
    type: Literal["image_url"]
    image_url: ImageUrl


def _part_name(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return _PART_NAMES.get(kind) if isinstance(kind, str) else None


Part = Annotated[
    Annotated[TextPart, Tag("TextPart")] | Annotated[ImagePart, Tag("ImagePart")],
    Discriminator(
        _part_name, custom_error_type="part", custom_error_message="Input should be a part of type text or image_url"
    ),
]


class FunctionCall(_Body):
    name: str
    arguments: str


class CalledTool(_Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[Part] | None = None
    name: str | None = None
    refusal: None = None  # OpenAI's client writes this field and the next three into its messages
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning_content: str | None = None
    tool_calls: Many[CalledTool] | None = None
    tool_call_id: str | None = None

    @property
    def parts(self) -> list[TextPart | ImagePart]:
        if isinstance(self.content, list):
            return self.content
        return [TextPart(type="text", text=self.content or "")]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


class StreamOptions(_Body):
    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


class AnswerSchema(_Body):
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: AnswerSchema | None = None


class ToolFunction(_Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(_Body):
    name: str


class ToolChoice(_Body):
    type: Literal["function"]
    function: NamedFunction


class TextRequest(_Body):
    """The fields that chats and completions share. `steps`, `top_k` and `drafts` are extensions of dgemma."""

    model: str
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, strict=True)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    seed: Seed | None = None
    n: Annotated[StrictInt, Field(ge=1, le=128)] | None = None  # choices for each prompt
    stop: StopText | Annotated[Many[StopText], Field(max_length=16)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = None  # equal beginnings are found without it
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    # These are accepted only with the value that changes nothing.
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    steps: Annotated[StrictInt, Field(ge=1, le=1024)] | None = None  # the most forwards per canvas
    top_k: Annotated[StrictInt, Field(ge=1)] | None = None
    drafts: StrictBool = False  # a stream also has the canvas after every step

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        """The field that limits the answer, by its name in the request, and its value."""
        return "max_tokens", self.max_tokens


class ChatRequest(TextRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[Many[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Many[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    metadata: dict[str, str] | None = None
    store: StrictBool | None = None
    thinking: StrictBool = False  # ask the model to think first

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().most_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def num_top(self) -> int | None:
        """The alternatives of each token to report; None if no log-probabilities are wanted."""
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(TextRequest):
    """The body of /v1/completions."""

    prompt: str | Many[StrictInt] | Many[str] | Many[Many[StrictInt]]
    response_format: ResponseFormat | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None

    @property
    def num_top(self) -> int | None:
        """The alternatives of each token to report; None if no log-probabilities are wanted."""
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # type: ignore[return-value]


class Question(_Body):
    """A question of one of three types, about the state in the request; see `decisions`."""

    type: Literal["noul", "choice", "score"]
    instructions: str
    criteria: dict[str, Any] | list[Any] | None = None


class DecisionRequest(_Body):
    """The body of /v1/systemone."""

    model: str
    state: Any
    questions: Annotated[dict[str, Question], Field(min_length=1, max_length=64)]
    images: Many[str] = []  # data URLs; an extension of dgemma. The questions are also about them


class InfillRequest(_Body):
    """The body of /v1/infill: tokens with holes, which are spans from start to stop."""

    model: str | None = None
    tokens: Annotated[Many[StrictInt], Field(min_length=2)]
    holes: Annotated[Many[tuple[StrictInt, StrictInt]], Field(min_length=1)]
    seed: Seed = 0


def describe_mistake(errors: list[Any]) -> ApiError:
    """Turn the first mistake that pydantic found into an error of the API.

    If a value fits no alternative of a union, the error is about the alternative that fits most of it.
    """
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, "The body must be valid JSON.", code="invalid_json")
    for error in errors:
        if error["type"] == "extra_forbidden":
            error["loc"] = (*error["loc"], error["ctx"]["name"])
    field = _place(errors[0])
    of_field = [error for error in errors if _place(error)[: len(field)] == field]
    first = errors[0] if field and field[0] in _RULES else max(of_field, key=lambda error: len(error["loc"]))
    name = ".".join(_place(first)) or "body"
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{name} is not a field that this server knows.", param=name, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{name} is required.", param=name, code="missing_required_parameter")
    same = [error for error in of_field if _place(error) == _place(first) and len(error["loc"]) == len(first["loc"])]
    rule = _RULES.get(name) or ", or ".join(dict.fromkeys(map(_rule, same)))
    # Of a long or deep value, the message shows the beginning.
    message = f"{name} must {in_json(rule)}, got {in_json(reprlib.repr(first['input']))}."
    return ApiError(400, message, param=name, code="invalid_value")


def describe_refusal(message: str, body: ChatRequest | CompletionRequest) -> ApiError:
    """Turn a mistake that the library found into an error of the API, with the names that the request uses."""
    limit_name, _ = body.most_tokens
    prompt_name = "messages" if isinstance(body, ChatRequest) else "prompt"
    constraint_name, schema_name = "response_format", "response_format.json_schema.schema"
    if body.response_format is None:
        constraint_name, schema_name = "tool_choice", "tools.function.parameters"
    for theirs, ours in (
        ("generate must", f"{prompt_name} and {limit_name} must"),
        ("generate max_new_tokens", limit_name),
        ("max_new_tokens", limit_name),
        ("generate constraint", constraint_name),
        ("generate images", prompt_name),
        ("JsonSchema.schema", schema_name),
        ("ToolCalls.tools", "tools"),
        ("ByteTokenizer.chat role", "messages role"),
        ("ByteTokenizer.chat ", ""),
        ("Tokenizer.chat ", ""),
        ("Knobs.", ""),
    ):
        message = message.replace(theirs, ours)
    param = message.partition(" ")[0].partition(".")[0]
    code = "context_length_exceeded" if "max_position_embeddings" in message else "invalid_value"
    return ApiError(400, in_json(message), param=param if param in type(body).model_fields else None, code=code)


def _rule(error: Any) -> str:
    """Return the rule in a message of pydantic, which is "Input should be ..." or "List should have ..."."""
    rule = re.sub(r"^\w+ should | after validation.*", "", error["msg"][:200])
    rule = rule.replace("valid tuple", "hole [start, stop]")  # no other field has tuples
    return "be an object" if rule.startswith("be a valid dictionary") else rule


def _place(error: Any) -> list[str]:
    """Return the path of a mistake, without the names of a union's alternatives, such as "str" or "list[int]"."""
    return [str(part) for part in error["loc"] if part not in _ALTERNATIVES and "[" not in str(part)]
