"""A bus in memory, and a group behind it that answers as its script says."""

import asyncio
import copy
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import openai
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minisgl.bus.base import Bus, BusError, Entry
from minisgl.config import GatewayConfig
from minisgl.gateway import main
from minisgl.gateway.listen import bind_http
from minisgl.gateway.service import Service
from minisgl.messages import (
    AbortMsg,
    ErrorInfo,
    GroupLoad,
    Message,
    Source,
    TokenizeMsg,
    TokenLogprobs,
    UserReply,
    WorkerState,
    pack_ids,
    unpack_ids,
)
from minisgl.text import Tokenizer
from tests.support import wait_until

MODEL = "acme/river-1b"
MAX_MODEL_LEN = 400
EOS = 1
INCARNATION = 7
OUTPUT = "Grüße, 世界! The Rhône, the Nile 🙂 and the Amazon are rivers; each of them is long."


def make_tokenizer() -> Tokenizer:
    """One token a byte, after <unk> and </s>."""
    tokens = ["<unk>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = FastTokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(tokenizer_object=bytewise, unk_token="<unk>", eos_token="</s>")
    hf.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    return Tokenizer(hf)


TOKENIZER = make_tokenizer()


class FakeBus(Bus):
    """Hands what the gateway sends to `on_send`; the test delivers what comes back."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.states: list[WorkerState] = serving_states()
        self.own: WorkerState | None = None
        self.away = False
        self.closed = False
        self.on_send: Callable[[Message], None] = lambda message: None
        self._in: queue.Queue[list[Message]] = queue.Queue()
        self._beat = 0

    def deliver(self, *batch: Message) -> None:
        """One entry for the gateway."""
        self._in.put(list(batch))

    def subscribe(self, queue: str) -> None:
        assert queue == "reply:gw"

    def send(self, queue: str, batch: Sequence[Message]) -> None:
        self._answering()
        for message in batch:
            self.sent.append((queue, message))
            self.on_send(message)

    def receive(self, timeout: float) -> list[Entry]:
        try:
            return [Entry("reply:gw", self._in.get(timeout=min(timeout, 0.05)), b"")]
        except queue.Empty:
            return []

    def ack(self, entries: Sequence[Entry]) -> None:
        pass

    def publish_state(self, state: WorkerState) -> None:
        self._answering()
        self.own = state

    def read_states(self) -> list[WorkerState]:
        self._answering()
        self._beat += 1
        for state in self.states:
            state.beat = self._beat
        return [copy.copy(state) for state in self.states]

    def close(self) -> None:
        self.closed = True

    def _answering(self) -> None:
        if self.away:
            raise BusError("away")

    def of(self, kind: type) -> list[Any]:
        """What was sent of one kind."""
        return [message for _, message in list(self.sent) if isinstance(message, kind)]


def serving_states() -> list[WorkerState]:
    """A formed group, a tokenizer and a detokenizer."""
    load = GroupLoad(
        group="g0", incarnation=INCARNATION, max_model_len=MAX_MODEL_LEN,
        pages_total=64, pages_free=60, pages_evictable=4,
        steps=3, step_seconds=0.5, step_buckets=[0] * 10 + [3] * 4,
    )  # fmt: skip
    return [
        WorkerState(role="rank", id="g0/0", boot=21, beat=0, load=load),
        WorkerState(role="tokenizer", id="t0", boot=22, beat=0),
        WorkerState(role="detokenizer", id="d0", boot=23, beat=0),
    ]


class ScriptedGroup:
    """Tokenizer, rank 0 and detokenizer in one: answers every prompt with `output`.

    `pause_after` tokens it waits for `go_on`; it counts its runs as rank 0 does.
    """

    def __init__(self, bus: FakeBus, output: str = OUTPUT) -> None:
        self.bus = bus
        self.output = output
        self.cached_tokens = 0
        self.pause_after: int | None = None
        self.held_back: list[list[UserReply]] = []
        self.react: Callable[[TokenizeMsg], list[UserReply] | None] = lambda message: None
        """Answers instead of the group where it returns something."""
        self.runs = 0
        bus.on_send = self.handle

    def handle(self, message: Message) -> None:
        if not isinstance(message, TokenizeMsg):
            return
        self.runs += 1
        replies = self.react(message)
        if replies is None:
            replies = self.answer(message)
        now = len(replies) if self.pause_after is None else self.pause_after + 1
        for reply in replies[:now]:
            self.bus.deliver(reply)
        self.held_back.append(replies[now:])

    def go_on(self) -> None:
        """Deliver what was held back."""
        held, self.held_back = self.held_back, []
        for replies in held:
            for reply in replies:
                self.bus.deliver(reply)

    def source(self) -> Source:
        return Source(group="g0", incarnation=INCARNATION, run=self.runs)

    def reply(self, message: TokenizeMsg, **fields: Any) -> UserReply:
        fields.setdefault("source", self.source())
        return UserReply(
            uid=message.uid, attempt=message.attempt, boot=message.route.boot, **fields
        )

    def error(self, message: TokenizeMsg, status: int, text: str, **more: Any) -> list[UserReply]:
        error = ErrorInfo(status=status, message=text, **more)
        return [self.reply(message, source=None, error=error)]

    def prompt_of(self, message: TokenizeMsg) -> list[int]:
        if message.prompt_ids is not None:
            return unpack_ids(message.prompt_ids).tolist()
        if message.text is not None:
            return TOKENIZER.encode(message.text)
        return TOKENIZER.encode_chat(message.messages or [])

    def answer(self, message: TokenizeMsg) -> list[UserReply]:
        """The opening and one reply for each token, until the limit, the EOS or a stop string."""
        prompt = self.prompt_of(message)
        if len(prompt) >= MAX_MODEL_LEN:
            return self.error(
                message, 400, code="context_length_exceeded", param="messages",
                text=f"The prompt has {len(prompt)} tokens, the model takes {MAX_MODEL_LEN}.",
            )  # fmt: skip
        have = len(unpack_ids(message.output_ids))
        ids = [*TOKENIZER.encode(self.output), EOS]
        limit = min(message.sampling.max_tokens or 10**6, MAX_MODEL_LEN - len(prompt))
        ids = ids[:limit]
        replies = [
            self.reply(
                message, pos=have, text_at=message.sent_chars, prompt_ids=pack_ids(prompt),
                cached_tokens=self.cached_tokens,
            )
        ]  # fmt: skip
        sent = message.sent_chars
        for pos in range(have, len(ids)):
            text = b"".join(TOKENIZER.token_bytes(i) for i in ids[: pos + 1] if i != EOS).decode(
                errors="ignore"
            )
            stops = [text.index(s) for s in message.sampling.stop if s in text]
            last = pos == len(ids) - 1
            finish = "stop" if ids[pos] == EOS or stops else "length" if last else None
            text = text[: min(stops, default=None)]
            # Like the real one: what may be the start of a stop string waits.
            held = max((len(s) - 1 for s in message.sampling.stop), default=0) if not finish else 0
            shown = text[sent : max(sent, len(text) - held)]
            replies.append(
                self.reply(
                    message, pos=pos, ids=pack_ids(ids[pos : pos + 1]), text=shown, text_at=sent,
                    finish=finish, logprobs=self._logprobs(message, ids[pos]),
                )
            )  # fmt: skip
            sent += len(shown)
            if finish:
                break
        return replies

    def _logprobs(self, message: TokenizeMsg, token: int) -> list[TokenLogprobs] | None:
        n = message.sampling.logprobs
        if n is None:
            return None
        tops = [token, *(i for i in range(60, 90) if i != token)][:n]
        return [
            TokenLogprobs(
                logprob=-0.25, top_ids=tops, top_logprobs=[-0.25 - i for i in range(len(tops))]
            )
        ]


class Stage:
    """A gateway on a free port, in a thread, with a scripted group behind it."""

    loop_factory = staticmethod(main.loop_factory() or asyncio.new_event_loop)

    def __init__(self, *, listen_when_ready: bool = True, **config: Any) -> None:
        self._listen_when_ready = listen_when_ready
        self.bus = FakeBus()
        self.group = ScriptedGroup(self.bus)
        self.config = GatewayConfig(bus="ipc://none", id="gw", model=MODEL, **config)
        self.service = Service(self.config, self.bus, TOKENIZER, TOKENIZER.vocab_size)
        self._sock = bind_http("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self.code: int | None = None
        self.listens = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20
        )

    def start(self, *, wait: bool = True) -> "Stage":
        self._thread.start()
        if wait:
            assert self.listens.wait(20)
            wait_until(self.service.link.healthy, 20, lambda: "the bus was not looked at")
        return self

    def _run(self) -> None:
        async def serve() -> int:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            return await main.serve(
                self.service, self._sock, listen_when_ready=self._listen_when_ready,
                on_ready=self.listens.set, stop=self._stop,
            )  # fmt: skip

        with asyncio.Runner(loop_factory=self.loop_factory) as runner:
            self.code = runner.run(serve())

    def signal(self) -> None:
        """What SIGTERM does."""
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        self.http.close()
        self.client.close()
        if self._thread.is_alive():
            self.signal()
            self._thread.join(20)
        assert not self._thread.is_alive(), "the gateway does not end"

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more)

    def chat(self, **fields: Any) -> Any:
        fields = {"model": MODEL, "messages": [{"role": "user", "content": "Rivers?"}]} | fields
        return self.client.chat.completions.create(**fields)

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=20)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Rivers?"}]} | fields


def aborted(bus: FakeBus) -> list[tuple[int, int]]:
    """(attempt, run) of the aborts that were sent."""
    return [(message.attempt, message.run) for message in bus.of(AbortMsg)]
