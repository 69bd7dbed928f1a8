"""Log lines of every process of the project, the operator's too: one a record, text or JSON."""

import json
import logging
import time

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")

_HTTP_LOGGER = "minisgl.gateway.http"
"""For the HTTP server's own records, whose library calls the logger of all `uvicorn.error`."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message", "asctime", "taskName", "color_message",  # the last one is uvicorn's
}  # fmt: skip


class LogFormatter(logging.Formatter):
    """One line a record: key=value or JSON; what `extra` adds (uid, group, rank) are fields too."""

    def __init__(self, form: str, name: str) -> None:
        super().__init__()
        self._json = form == "json"
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line; a traceback is escaped into it."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._name,
            "logger": _HTTP_LOGGER if record.name.startswith("uvicorn") else record.name,
            "msg": record.getMessage(),
        }
        fields |= {k: v for k, v in vars(record).items() if k not in _STANDARD}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if self._json:
            return json.dumps(fields, default=str)
        return " ".join(f"{key}={_plain(value)}" for key, value in fields.items())


def _plain(value: object) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    plain = text and text.isprintable() and not any(c in ' "=' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def set_up_logging(name: str, form: str = "text", level: str = "info") -> None:
    """Log to stderr from now on, as the process called `name`."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(form, name))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for noisy in ("httpx", "httpcore", "asyncio", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
