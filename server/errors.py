"""Every failure as an OpenAI error object: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import EngineBusyError, EngineDeadError, EngineError, InvalidRequestError
from server.request_id import request_id_of

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
NO_RETRY = {"x-should-retry": "false"}
MAX_RETRY_AFTER = 30  # seconds; clients of the official SDK stop retrying above 120

_HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed", 413: "request_too_large", 415: "unsupported_media_type"}


@dataclass(eq=False)
class ApiError(Exception):
    """A failure that has an HTTP answer. ``param`` names the request field at fault, ``code`` is an OpenAI code."""

    status: int
    message: str
    type: str = INVALID_REQUEST
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.message)


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, INVALID_REQUEST, code, param)


def internal_error() -> ApiError:
    """The generic 500: it says nothing of the cause, and tells the SDKs not to run the same request again."""
    message = "The server had an error while processing your request."
    return ApiError(500, message, SERVER_ERROR, "internal_error", None, NO_RETRY)


def error_body(error: ApiError) -> dict[str, dict[str, str | None]]:
    """The JSON object of an error; all four keys are always present."""
    return {
        "error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code},
    }


def retry_after(seconds: float) -> dict[str, str]:
    """A Retry-After header of whole seconds within 1..30."""
    return {"Retry-After": str(min(MAX_RETRY_AFTER, max(1, math.ceil(seconds))))}


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about ``error``; anything unknown becomes the generic 500 and is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), INVALID_REQUEST, error.code or "invalid_value", error.param)
    if isinstance(error, EngineBusyError):
        headers = retry_after(error.retry_after)
        return ApiError(429, str(error), "rate_limit_exceeded", "engine_overloaded", None, headers)
    if isinstance(error, EngineDeadError):
        message = "The engine has stopped; this server cannot answer requests."
        return ApiError(503, message, SERVER_ERROR, "service_unavailable", None, retry_after(MAX_RETRY_AFTER))
    logger.error("request failed: %s", error, exc_info=error)
    return internal_error()


def rejection_reason(error: ApiError) -> str:
    """The ``reason`` label under which a refused request is counted."""
    by_status = {401: "auth", 404: "not_found", 413: "too_large", 429: "overloaded", 503: "overloaded"}
    return by_status.get(error.status, "invalid")


def error_response(error: ApiError, request: Request) -> Response:
    """The HTTP answer of ``error``."""
    headers = {**error.headers, "x-request-id": request_id_of(request)}
    return Response(orjson.dumps(error_body(error)), error.status, headers, "application/json")


def _from_http_exception(error: HTTPException, request: Request) -> ApiError:
    message = str(error.detail)
    if error.status_code == 404:
        message = f"Unknown request URL: {request.method} {request.url.path}."
    elif error.status_code == 405:
        message = f"Method {request.method} is not allowed for {request.url.path}."
    kind = SERVER_ERROR if error.status_code >= 500 else INVALID_REQUEST
    code = _HTTP_CODES.get(error.status_code)
    return ApiError(error.status_code, message, kind, code, None, error.headers or {})


def install_error_handlers(app: FastAPI) -> None:
    """Makes every failure of ``app``, its own 404 and 405 included, an OpenAI error object."""

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error), request)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(_from_http_exception(error, request), request)

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return error_response(invalid(str(first["msg"]), param), request)

    async def on_unexpected(request: Request, error: Exception) -> Response:
        # Starlette re-raises after this answer: the server's own log has the traceback, and the connection ends.
        response = error_response(internal_error(), request)
        response.headers["connection"] = "close"
        return response

    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(EngineError, on_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(Exception, on_unexpected)
