"""Clients that stream without a pause, each answer compared with an undisturbed one."""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from tests.support import lines, wait_until

TOPICS = ("rivers", "granite", "owls", "bread", "sails", "frost", "copper", "mills")
ANSWER_SECONDS = 240.0


@dataclass(frozen=True)
class Answer:
    """How one streamed request ended."""

    status: int
    text: str = ""
    finish: str | None = None
    error: str = ""
    """Of an error event, a refusal or a broken connection."""
    pause: float = 0.0
    """Longest time without anything new, in seconds."""


@dataclass
class Endpoint:
    """Where an object answers, as its clients see it."""

    url: str
    host: str
    model: str
    keys: Sequence[str] = ()
    """API keys; the first is sent."""

    @property
    def headers(self) -> dict[str, str]:
        held = {"Host": self.host}
        return held | {"Authorization": f"Bearer {self.keys[0]}"} if self.keys else held

    def get(self, path: str) -> httpx.Response | None:
        """An answer, whatever its status; None if there is none."""
        try:
            return httpx.get(f"{self.url}{path}", headers=self.headers, timeout=10)
        except httpx.HTTPError:
            return None

    def status(self, path: str = "/ready") -> int:
        """0 if nobody answers."""
        answer = self.get(path)
        return 0 if answer is None else answer.status_code

    def body(self, topic: str, tokens: int, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"Tell me of {topic}."}]
        sampling = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return {"model": self.model, "messages": messages, "stream": True, **sampling, **more}

    def stream(self, body: Mapping[str, Any], news: "Progress | None" = None) -> Answer:
        """One request; `news` is told of each piece of text, and may end it.

        The body goes in chunks. With its length known, a proxy in Go (Traefik) looks once more for
        bytes of it when all are sent, and an answer that begins before it has looked closes the
        body: it then ends the connection in the middle of the answer (golang/go#40747). The tiny
        model on a busy machine is that fast, once in some thousand requests. The end of chunks is
        sent after that look.
        """
        text, finish, pause = "", None, 0.0
        headers = self.headers | {"Content-Type": "application/json"}
        content = iter([json.dumps(body).encode()])
        try:
            with (
                httpx.Client(timeout=ANSWER_SECONDS) as client,
                client.stream(
                    "POST", f"{self.url}/v1/chat/completions", headers=headers, content=content
                ) as answer,
            ):
                if answer.status_code != 200:
                    return Answer(answer.status_code, error=answer.read().decode()[:500])
                last = time.monotonic()
                for event in _events(answer):
                    if event == b"[DONE]":
                        return Answer(200, text, finish, pause=pause)
                    chunk = json.loads(event)
                    if "error" in chunk:
                        return Answer(200, text, finish, chunk["error"]["message"], pause)
                    for choice in chunk["choices"]:
                        text += choice["delta"].get("content") or ""
                        finish = choice["finish_reason"] or finish
                    now = time.monotonic()
                    pause, last = max(pause, now - last), now
                    if news is not None and news.more(now):
                        return Answer(200, text, "left", pause=pause)
        except httpx.HTTPError as error:
            return Answer(0, text, finish, f"{type(error).__name__}: {error}", pause)
        return Answer(200, text, finish, "the stream ended without [DONE]", pause)


def _events(answer: httpx.Response) -> Iterator[bytes]:
    prefix = b"data: "
    return (line.removeprefix(prefix) for line in lines(answer) if line.startswith(prefix))


@dataclass
class Progress:
    """What one client has, as it comes."""

    leaving: threading.Event
    last: float = 0.0
    """When it brought something last, in seconds of the monotonic clock."""
    answers: list[Answer] = field(default_factory=list)

    @property
    def served(self) -> int:
        """Answers that were no refusals."""
        return sum(answer.status == 200 for answer in list(self.answers))

    def more(self, now: float) -> bool:
        self.last = now
        return self.leaving.is_set()


class Load:
    """`clients` that ask again as soon as they have their answer, until the context ends.

    What an undisturbed answer is, each asks once before.
    """

    def __init__(self, endpoint: Endpoint, clients: int = 3, tokens: int = 150) -> None:
        self.endpoint, self._tokens = endpoint, tokens
        self._topics = TOPICS[:clients]
        self._leaving = threading.Event()
        self.progress = [Progress(self._leaving) for _ in self._topics]
        self._expected: dict[str, str] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(topic, progress), daemon=True)
            for topic, progress in zip(self._topics, self.progress, strict=True)
        ]

    def _run(self, topic: str, progress: Progress) -> None:
        body = self.endpoint.body(topic, self._tokens)
        while not self._leaving.is_set():
            answer = self.endpoint.stream(body, progress)
            progress.answers.append(answer)
            if answer.status != 200:
                # As a client that is told Retry-After.
                self._leaving.wait(1)

    def __enter__(self) -> "Load":
        for topic in self._topics:
            answer = self.endpoint.stream(self.endpoint.body(topic, self._tokens))
            assert answer.finish == "length" and not answer.error, answer
            self._expected[topic] = answer.text
        for thread in self._threads:
            thread.start()
        self.flow()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leaving.set()
        for thread in self._threads:
            thread.join(ANSWER_SECONDS)

    def flow(self, seconds: float = 120) -> None:
        """Until every client has had something new."""
        begin = time.monotonic()
        wait_until(
            lambda: all(one.last > begin for one in self.progress),
            seconds,
            lambda: (
                f"streams stand still; last ends: {[one.answers[-1:] for one in self.progress]}"
            ),
        )

    def go_round(self, seconds: float = 240) -> None:
        """Until every client has finished a whole answer that it began after now."""
        counts = [one.served + 2 for one in self.progress]
        wait_until(
            lambda: all(one.served >= n for one, n in zip(self.progress, counts, strict=True)),
            seconds,
            lambda: f"answers: {[one.answers[-2:] for one in self.progress]}",
        )

    @property
    def answers(self) -> list[tuple[str, Answer]]:
        """Each answer so far with its topic."""
        pairs = zip(self._topics, self.progress, strict=True)
        return [(topic, answer) for topic, one in pairs for answer in list(one.answers)]

    def wrong(self) -> list[str]:
        """Streams that were begun and are not what they are undisturbed."""
        found = []
        for topic, answer in self.answers:
            text = self._expected[topic]
            good = answer.text == text if answer.finish != "left" else text.startswith(answer.text)
            if answer.status == 200 and (answer.error or not good):
                found.append(f"{topic}: {answer.error or 'another text'} at {len(answer.text)}")
            elif answer.status == 0:
                found.append(f"{topic}: {answer.error}")
        return found

    def refused(self) -> list[Answer]:
        """Requests that were answered with another status than 200."""
        return [answer for _, answer in self.answers if answer.status not in (0, 200)]
