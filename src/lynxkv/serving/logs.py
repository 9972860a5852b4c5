"""Log lines that carry the request and the transfer they are about, as text or as JSON; never a prompt or an answer."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]

_bound: ContextVar[dict[str, str]] = ContextVar("lynxkv_log_ids")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
"""What every record has; anything else was given as ``extra`` and is a field of the line."""


@contextmanager
def about(**ids: str | None) -> Iterator[None]:
    """Name what the lines logged inside are about, e.g. ``about(request=…, transfer=…)``.

    Ids add up when nested, follow tasks and :func:`asyncio.to_thread`, and are left out where ``None``. Other threads
    see them when they run in a copy of this context.
    """
    token = _bound.set(ids_now() | {name: value for name, value in ids.items() if value is not None})
    try:
        yield
    finally:
        _bound.reset(token)


def ids_now() -> dict[str, str]:
    """The ids that a line logged now would carry."""
    return _bound.get({})


def configure(
    role: str, *, style: LogFormat = "text", level: int = logging.INFO, stream: TextIO | None = None
) -> logging.Handler:
    """Send every log line of this process to ``stream`` (standard error); replaces earlier handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json(role) if style == "json" else _Text(role))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):  # they bring handlers of their own
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    return handler


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {**ids_now(), **extra}


class _Text(logging.Formatter):
    """``2026-11-30T12:00:00.123Z INFO router lynxkv.serving: answered request=… status=200``."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback's lines where there is one."""
        fields = "".join(f" {name}={_short(value)}" for name, value in _fields(record).items())
        line = f"{_utc(record.created)} {record.levelname} {self._role} {record.name}: {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    """One JSON object a line: time, level, role, logger, message, then ids and fields."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _fields(record).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _utc(seconds: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}Z"


def _short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return json.dumps(text) if not text or any(letter in text for letter in ' "=\n') else text
