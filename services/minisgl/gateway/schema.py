"""The bodies of requests: every field of the OpenAI API, honoured or refused by its name.

Types are strict (a number in quotes is no number). A field that this server does not have is
accepted with the values that ask for nothing, and refused with any other. What is not a field at
all is refused too, so that a misspelt one cannot be ignored in silence.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from minisgl.gateway.errors import bad_request, shown
from minisgl.messages import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)

MAX_CHOICES = 128
MAX_COMPLETION_LOGPROBS = 5
MAX_TOKENS_NAMED = 1024
"""In `logit_bias` and in `stop_token_ids`: each choice of a request carries its own copy."""
DEFAULT_COMPLETION_TOKENS = 16
INT32 = 2**31 - 1
INT64 = 2**63


def field_error(field: str, message: str) -> PydanticCustomError:
    """An error at a field of the model that is checked; `describe` names it."""
    return PydanticCustomError("field", "{message}", {"field": field, "message": message})


def describe(error: Mapping[str, Any]) -> tuple[str | None, str]:
    """The field at fault, as `messages[0].role`, and the sentence, of one error of pydantic."""
    context = error.get("ctx") or {}
    if error["type"] == "json_invalid":
        return None, f"The body is not valid JSON: {context.get('error', 'it ends too early')}."
    path = [part for part in error["loc"] if part != "body"]
    if error["type"] == "field":
        path.append(context["field"])
    param = ""
    for part in path:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    if not param:
        return None, "The body must be a JSON object (with Content-Type: application/json)."
    said = str(error["msg"])
    if error["type"] == "string_unicode":
        return param, f"{param} {HALF}"
    if error["type"] == "too_short":
        return param, f"{param} must hold at least one item: it is an empty list"
    if error["type"] == "missing":
        return param, f"{param} is required"
    if error["type"] == "extra_forbidden":
        return param, f"{param} is not a field that this server knows"
    if error["type"] == "field":
        return param, f"{param} {said}"
    if error["type"] == "value_error":
        return param, f"{param} {context['error']}"
    said = said.removeprefix("Input ")
    return param, f"{param} {said}, not {shown(error.get('input'))}"


HALF = (
    "holds half of a surrogate pair (\\ud800 to \\udfff), which is no character: send the whole "
    "pair, or leave it out"
)


def _refuse_halves(value: Any) -> None:
    """Raises `ValueError` for a string, or one in a list, that UTF-8 cannot carry."""
    for text in value if isinstance(value, list) else (value,):
        if isinstance(text, str) and not _is_text(text):
            raise ValueError(HALF)


def _check_stop(value: Any) -> list[str]:
    _refuse_halves(value)
    given = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(_is_text(s) and s for s in given):
        raise ValueError("must be a string or a list of strings, none of them empty")
    if len(given) > MAX_STOP_STRINGS:
        raise ValueError(f"must hold at most {MAX_STOP_STRINGS} strings, not {len(given)}")
    chars = sum(map(len, given))
    if chars > MAX_STOP_CHARS:
        raise ValueError(f"must hold at most {MAX_STOP_CHARS} characters together, not {chars}")
    return given


def _is_text(value: Any) -> bool:
    """Whether this is a string that UTF-8 can carry (no half of a surrogate pair)."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(type(i) is int and 0 <= i <= INT32 for i in value)
    )


def _check_prompt(value: Any) -> list[str] | list[list[int]]:
    """One prompt or several, as a list of them."""
    _refuse_halves(value)
    if _is_text(value) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value:
        for is_prompt in (_is_text, _is_ids):
            if all(is_prompt(p) for p in value):
                return value
    raise ValueError(
        "must be a string, a list of strings, a list of token ids, or a list of lists of token "
        "ids, none of these lists empty"
    )


def _check_content(value: Any) -> str:
    """The text of a message; text parts are joined by line ends."""
    _refuse_halves(value)
    if _is_text(value):
        return str(value)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for part in value:
        if isinstance(part, dict):
            _refuse_halves([*part, *part.values()])
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"parts must have type 'text'; this server takes no {shown(kind)}")
        if set(part) != {"type", "text"} or not _is_text(part["text"]):
            raise ValueError("a text part must have the fields type and text and no others")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    wrong = "must map ids of tokens to numbers between -100 and 100"
    if not isinstance(value, dict):
        raise ValueError(wrong)
    bias = {}
    _refuse_halves(list(value))
    for token, number in value.items():
        number_ok = type(number) in (int, float) and -100 <= number <= 100
        token_ok = isinstance(token, str) and token.isascii() and token.isdigit()
        if not number_ok or not token_ok or len(token) > 10 or int(token) > INT32:
            raise ValueError(f"{wrong}, not {shown(token)} to {shown(number)}")
        bias[int(token)] = float(number)
    return bias


def _check_text(value: str) -> str:
    if not _is_text(value):
        raise ValueError(HALF)
    return value


Text = Annotated[str, AfterValidator(_check_text)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
Count = Annotated[int, Field(ge=1, le=INT32)]
Stop = Annotated[
    list[str], PlainValidator(_check_stop, json_schema_input_type=str | list[str] | None)
]
Prompt = Annotated[
    list[str] | list[list[int]],
    PlainValidator(
        _check_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]
Content = Annotated[
    str, PlainValidator(_check_content, json_schema_input_type=str | list[dict[str, str]])
]
Bias = Annotated[
    dict[int, float] | None,
    PlainValidator(_check_bias, json_schema_input_type=dict[str, float] | None),
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    harmless: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that this server does not have, and the values besides null that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_harmless(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in data:
            if not _is_text(name):
                shown_name = name.encode("utf-8", "backslashreplace").decode()
                raise field_error(shown_name, HALF)
        for name, allowed in cls.harmless.items():
            value = data.get(name)
            if value is not None and not any(
                type(value) is type(h) and value == h for h in allowed
            ):
                also = "".join(f" or {h!r}" for h in allowed)
                raise field_error(name, f"is not supported here: leave it out (or null{also})")
        return {name: value for name, value in data.items() if name not in cls.harmless}


class StreamOptions(_Strict):
    """`usage` in a stream, when asked."""

    harmless = {"include_obfuscation": (False,)}

    include_usage: bool | None = None


class Message(_Strict):
    """One message of a conversation."""

    harmless = {
        "refusal": (), "audio": (), "tool_calls": ([],), "function_call": (), "annotations": ([],),
    }  # fmt: skip

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = None

    def plain(self) -> dict[str, str]:
        """For the chat template. Templates know the developer's role by its older name."""
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.content, **named}


class GenerationRequest(_Strict):
    """What chat and completions have in common."""

    model: Text
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: Stop = []
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Bias = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    # Extensions.
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=INT32)] | None = None

    @property
    def choices(self) -> int:
        """Choices of each prompt."""
        return int(self.n or 1)

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _more(self) -> dict[str, Any]:
        """`max_tokens` and `logprobs` of the sampling parameters."""
        raise NotImplementedError

    def sampling(self, seed: int) -> SamplingParams:
        """The parameters of a choice with this seed. Absent fields take their defaults."""
        fields = (
            "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "logit_bias", "ignore_eos", "priority",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        return SamplingParams(
            seed=(seed + INT64) % (2 * INT64) - INT64,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            **given,
            **self._more(),
        )

    def check(self, vocabulary: int) -> None:
        """What one field alone cannot tell. Raises `ApiError` with the field at fault."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options", "stream_options needs stream to be true")
        for name, ids in (
            ("logit_bias", self.logit_bias or {}),
            ("stop_token_ids", self.stop_token_ids or ()),
        ):
            if len(ids) > MAX_TOKENS_NAMED:
                raise bad_request(
                    name, f"{name} names {len(ids)} tokens; at most {MAX_TOKENS_NAMED} are allowed"
                )
            check_vocabulary(name, ids, vocabulary)


def check_vocabulary(name: str, ids: Collection[int], vocabulary: int) -> None:
    """Raises `ApiError` naming the field if one of its ids is no token."""
    worst = max(ids, default=0)
    if worst >= vocabulary:
        raise bad_request(
            name, f"{name} holds the token id {worst}; this model has 0 to {vocabulary - 1}"
        )


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    harmless = {
        "audio": (), "function_call": ("none",), "functions": ([],), "modalities": (["text"],),
        "moderation": (), "parallel_tool_calls": (), "prediction": (), "prompt_cache_key": (),
        "prompt_cache_options": (), "prompt_cache_retention": (), "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},), "safety_identifier": (),
        "service_tier": ("auto", "default"), "tool_choice": ("none",), "tools": ([],),
        "verbosity": ("medium",), "web_search_options": (),
    }  # fmt: skip

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def _more(self) -> dict[str, Any]:
        limit = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        return {
            "max_tokens": limit,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }

    def check(self, vocabulary: int) -> None:
        super().check(vocabulary)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs", "top_logprobs needs logprobs to be true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise bad_request(
                "max_tokens", "give max_completion_tokens or max_tokens (its older name), not both"
            )


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    harmless = {"suffix": ("",)}

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    def _more(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens or DEFAULT_COMPLETION_TOKENS,
            "logprobs": self.logprobs,
        }

    def check(self, vocabulary: int) -> None:
        super().check(vocabulary)
        if self.best_of is not None and self.best_of != self.choices:
            raise bad_request("best_of", "best_of is not supported: leave it out or equal to n")
        if self.echo and self.logprobs is not None:
            raise bad_request("echo", "echo with logprobs of the prompt is not supported")
        for prompt in self.prompt:
            if not isinstance(prompt, str):
                check_vocabulary("prompt", prompt, vocabulary)


class TokenizeRequest(_Strict):
    """The body of POST /tokenize: exactly one of prompt and messages."""

    model: Text
    prompt: Text | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "or messages must be given, and not both")
        if self.messages is not None and self.add_special_tokens:
            raise field_error("add_special_tokens", "is for prompt: the chat template adds its own")
        return self


class DetokenizeRequest(_Strict):
    """The body of POST /detokenize."""

    model: Text
    tokens: list[TokenId]
