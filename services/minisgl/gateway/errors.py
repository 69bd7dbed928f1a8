"""Errors in the shape of the OpenAI API: `{"error": {message, type, param, code}}`."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from minisgl.messages import ErrorInfo

RETRY_AFTER_SECONDS = 2
"""Sent with 429 and 503: a queue moves, and a group forms again, in seconds."""

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An answer that is an error. `param` is the field at fault, `code` for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param = param
        self.code = code
        if status in (429, 503):
            self.headers = {"Retry-After": str(RETRY_AFTER_SECONDS), **dict(headers or {})}

    @classmethod
    def of(cls, error: ErrorInfo) -> "ApiError":
        """The same as a worker worded it; a status that is no error counts as 500."""
        status = error.status if 400 <= error.status <= 599 else 500
        return cls(status, error.message, param=error.param, code=error.code)

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        return {
            "error": {
                "message": self.detail,
                "type": _TYPES.get(self.status_code, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def encoded(self) -> bytes:
        """The JSON object as bytes; half a surrogate pair, which JSON allows, is shown as `?`."""
        try:
            return msgspec.json.encode(self.body())
        except UnicodeEncodeError:
            self.detail = self.detail.encode("utf-8", "replace").decode()
            if self.param is not None:
                self.param = self.param.encode("utf-8", "replace").decode()
            return msgspec.json.encode(self.body())

    def response(self) -> Response:
        """The whole HTTP answer."""
        return Response(
            self.encoded(), self.status_code, dict(self.headers or {}), "application/json"
        )


def bad_request(param: str | None, message: str) -> ApiError:
    """A 400 for a field."""
    return ApiError(400, message, param=param)


def model_not_found(asked: str, served: str) -> ApiError:
    """The 404 for a model that is not served here."""
    return ApiError(
        404,
        f"The model {shown(asked)} does not exist here; this server has {served!r}.",
        param="model",
        code="model_not_found",
    )


def shown(value: object, limit: int = 100) -> str:
    """What the client gave, short enough for an error message."""
    if isinstance(value, (list, dict)) and len(value) > limit:
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[: limit + 1] if isinstance(value, str) else value)
    return text if len(text) <= limit else text[:limit] + "..."
