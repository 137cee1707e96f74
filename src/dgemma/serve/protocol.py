"""Requests in OpenAI's form: their fields, limits and meaning. Unknown fields are refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from dgemma.serve.errors import ApiError

_ALTERNATIVES = ("body", "str", "constrained-str", "int", "ToolChoice")

Seed = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TextPart(_Body):
    type: Literal["text"]
    text: str


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
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None  # OpenAI's client writes this field and the next three into its messages
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(_Body):
    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


class AnswerSchema(_Body):
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Body):
    type: Literal["text", "json_schema"]
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
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # These are accepted only with the value that changes nothing.
    n: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    steps: Annotated[StrictInt, Field(ge=1, le=1024)] | None = None  # the most forwards per canvas
    top_k: Annotated[StrictInt, Field(ge=1)] | None = None
    drafts: StrictBool = False  # a stream also has the canvas after every step

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ChatRequest(TextRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    logprobs: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    store: StrictBool | None = None
    thinking: StrictBool = False  # ask the model to think first


class CompletionRequest(TextRequest):
    """The body of /v1/completions."""

    prompt: str | list[StrictInt]
    response_format: ResponseFormat | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None
    logprobs: None = None


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


class InfillRequest(_Body):
    """The body of /v1/infill: tokens with holes, which are spans from start to stop."""

    model: str | None = None
    tokens: Annotated[list[StrictInt], Field(min_length=2)]
    holes: Annotated[list[tuple[StrictInt, StrictInt]], Field(min_length=1)]
    seed: Seed = 0


def describe_mistake(errors: list[Any]) -> ApiError:
    """Turn the first mistake that pydantic found into an error of the API.

    If a value fits no alternative of a union, the error is about the alternative that fits most of it.
    """
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, "The body must be valid JSON.", code="invalid_json")
    field = _place(errors[0])
    of_field = [error for error in errors if _place(error)[: len(field)] == field]
    first = max(of_field, key=lambda error: len(error["loc"]))
    name = ".".join(_place(first)) or "body"
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{name} is not a field that this server knows.", param=name, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{name} is required.", param=name, code="missing_required_parameter")
    same = [error for error in of_field if _place(error) == _place(first) and len(error["loc"]) == len(first["loc"])]
    message = ", or ".join(error["msg"][:1].lower() + error["msg"][1:200] for error in same)
    return ApiError(400, f"{name}: {message}.", param=name, code="invalid_value")


def _place(error: Any) -> list[str]:
    """Return the path of a mistake, without the names of a union's alternatives, such as "str" or "list[int]"."""
    return [str(part) for part in error["loc"] if part not in _ALTERNATIVES and "[" not in str(part)]
