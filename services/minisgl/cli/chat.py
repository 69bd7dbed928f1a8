"""`minisgl chat MODEL`: a conversation in the terminal, over the HTTP API.

Talks to `--base-url`, or to a service of its own, which is a `minisgl serve` on a free port that
ends with this process. Works with a terminal (line editing, pasting of several lines) and with a
pipe (one question a line).
"""

import argparse
import io
import json
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from minisgl.cli.flags import Parser, Run, add_flags, add_log_flags, from_args, log_arguments
from minisgl.cli.sampling import add_sampling_flags, given_sampling
from minisgl.cli.serve import MODEL_HELP
from minisgl.config import EngineConfig, StartError, UsageError
from minisgl.launch.background import background_service
from minisgl.launch.serve import ServeConfig, as_arguments
from minisgl.lifecycle import Lifecycle
from minisgl.logs import set_up_logging

if TYPE_CHECKING:
    import httpx

SERVED_HELP = "; with --base-url, a model of that server (default: the first that it lists)"
HELP = "/reset starts a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer."


def add_arguments(parser: Parser) -> Run:
    """Declare the arguments."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP + SERVED_HELP)
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help="talk to this server, such as http://127.0.0.1:1919 (default: start one for MODEL)",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="key for --base-url (default: $OPENAI_API_KEY, if set)"
    )
    parser.add_argument(
        "--system",
        metavar="TEXT",
        help="system message that opens the conversation (default: none)",
    )
    add_sampling_flags(parser)
    add_flags(parser, ServeConfig, "processes, without --base-url")
    add_flags(parser, EngineConfig, "engine, without --base-url")
    add_log_flags(parser, level="warning")
    return run


def run(args: argparse.Namespace, life: Lifecycle) -> int:
    """Talk until the input ends. From a pipe, 1 if the last answer could not be had."""
    set_up_logging("chat", args.log_format, args.log_level)
    if args.base_url is not None:
        if not args.base_url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url must start with http:// or https://: {args.base_url!r}")
        return _talk(args, args.base_url)
    if args.model is None:
        raise UsageError("give a MODEL to start, or the --base-url of a running server")
    service = [
        *as_arguments(from_args(ServeConfig, args)),
        *as_arguments(from_args(EngineConfig, args)),
        *log_arguments(args),
    ]
    with background_service(args.model, service) as url:
        return _talk(args, url)


class Conversation:
    """The messages so far, and the server that answers them."""

    def __init__(
        self, client: "httpx.Client", model: str, system: str | None, options: dict[str, Any]
    ) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._opening = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self._messages = list(self._opening)

    def ask(self, question: str, show: Callable[[str], None]) -> None:
        """Add a question and its answer, which goes to `show` piece by piece.

        An answer that is broken off by Ctrl-C stays as far as it came. Raises `StartError` with the
        server's words if there is none; the question is then forgotten.
        """
        import httpx

        self._messages.append({"role": "user", "content": question})
        answer = ""
        try:
            for piece in self._stream():
                answer += piece
                show(piece)
        except httpx.HTTPError as error:
            raise StartError(f"no answer from {self._client.base_url}: {error}") from None
        finally:
            if answer:
                self._messages.append({"role": "assistant", "content": answer})
            else:
                self._messages.pop()

    def _stream(self) -> Iterator[str]:
        body = {"model": self._model, "messages": self._messages, "stream": True, **self._options}
        with self._client.stream("POST", "chat/completions", json=body) as response:
            if response.status_code != 200:
                raise StartError(_error_text(response.read(), response.status_code))
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise StartError(str(event["error"].get("message", event["error"])))
                for choice in event.get("choices", ()):
                    yield choice.get("delta", {}).get("content") or ""


def _error_text(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with HTTP status {status}"


def _talk(args: argparse.Namespace, url: str) -> int:
    import httpx

    base = url.rstrip("/")
    base = base if base.endswith("/v1") else base + "/v1"
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key and args.base_url else {}
    # No time limit on an answer: on a CPU the first token of a long prompt may take minutes.
    timeout = httpx.Timeout(None, connect=10)
    with httpx.Client(base_url=base, headers=headers, timeout=timeout) as client:
        model = args.model or _first_model(client)
        talk = Conversation(client, model, args.system, given_sampling(args))
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if interactive:
            print(f"{model}. {HELP}")
            return _loop(talk, _terminal_questions(), reset="A new conversation.\n")
        return _loop(talk, _piped_questions())


def _first_model(client: "httpx.Client") -> str:
    import httpx

    try:
        response = client.get("models")
        if response.status_code != 200:
            raise StartError(_error_text(response.content, response.status_code))
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise StartError(f"no answer from {client.base_url}: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise StartError(f"{client.base_url} is not an OpenAI-compatible server") from None


def _loop(talk: Conversation, questions: Iterator[str], reset: str = "") -> int:
    code = 0
    for question in questions:
        if question == "/exit":
            break
        if question == "/reset":
            talk.reset()
            print(reset, end="", flush=True)
            continue
        code = 0
        try:
            talk.ask(question, _show)
        except KeyboardInterrupt:
            pass
        except StartError as error:
            print(f"error: {error}", file=sys.stderr)
            code = 1
        print(flush=True)
    return code


def _show(piece: str) -> None:
    # A model's output may hold escape sequences; a terminal must not obey them.
    plain = (c for c in piece if c in "\n\t" or unicodedata.category(c) != "Cc")
    sys.stdout.write("".join(plain))
    sys.stdout.flush()


def _piped_questions() -> Iterator[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    for line in sys.stdin:
        if question := line.strip():
            yield question


def _terminal_questions() -> Iterator[str]:
    """Lines that the user edits. Enter sends; a paste, or Alt-Enter, may bring line breaks."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(multiline=True, key_bindings=keys)
    while True:
        try:
            question = session.prompt("> ", prompt_continuation="  ").strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if question:
            yield question
