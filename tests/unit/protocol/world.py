"""One run: clients, workers, a random order of their actions, and faults between them."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from minisgl.bus.base import TOK
from minisgl.detokenizer.stream import TextStream
from minisgl.detokenizer.worker import DetokenizerCore
from minisgl.gateway.request import News, Prompt, Request
from minisgl.messages import FinishReason, SamplingParams, WorkerState, pack_ids
from minisgl.scheduler import integrity
from minisgl.text import Tokenizer
from minisgl.tokenizer.worker import TokenizerCore

from ..scheduler.model_engine import EOS, VOCAB, expected, next_token
from ..small_tokenizers import SPECIALS, wrap
from .bus import SimBus
from .workers import ROWS, Gateway, Group, Pipe, Worker

SILENCE = 6.0
"""T, in virtual seconds."""
FAULTY_SECONDS = 6.0
"""Faults happen within so long after the start."""
STEP_SECONDS = 0.03
"""Most virtual time between two actions: a worker has its turn several times a second."""
QUIET_SECONDS = 0.8
"""The same while nobody has anything to do, and all have their turn."""
CROWDED_SECONDS = 2 * SILENCE + 2
"""So long a request waits that finds a crowd: nothing but audits says that it is not lost."""
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)
"""More than time allows."""
LIMIT_SECONDS = 400.0
"""By then all that was asked must be answered and forgotten."""


@cache
def tokenizer() -> Tokenizer:
    """Fifty tokens, many of them only part of a character."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    text = "".join(word for word, _ in spell("éü好😀 etaoinshrdlucmfwypvbgkq.,!?"))
    tokens = [*SPECIALS, *dict.fromkeys(text)]
    tokens += [a + b for a in "etao" for b in "ins"][: VOCAB - len(tokens)]
    assert len(tokens) == VOCAB
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return wrap(backend)


def text_of(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[str, int, bool]:
    """(The text of a whole output, how many of its ids it takes, whether a stop string ends it)."""
    stream = TextStream(tokenizer(), stop=stop)
    text, used = stream.push(ids)
    if not stream.stopped:
        text += stream.finish()
    return text, used, stream.stopped


@dataclass
class Client:
    """Somebody who asks once, checks every piece of the answer and may leave."""

    number: int
    prompt: list[int]
    as_text: str | None
    sampling: SamplingParams
    gateway: str
    salt_of: Callable[[int], int]
    """The model's salt in this incarnation of a group."""
    asks_at: float
    leaves_at: float
    request: Request | None = None
    owner: Gateway | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    error: str | None = None
    gone: bool = False
    """It left, or its gateway died: nobody waits for an answer any more."""

    def take(self, news: News) -> None:
        assert not self.gone, f"{self}: news for a client that has left"
        assert self.finish is None and self.error is None, f"{self}: news after the end"
        source = news.request.source
        for i, token in enumerate(news.ids):
            assert source is not None
            history = np.array([*self.prompt, *self.ids])
            want = next_token(history, self.salt_of(source.incarnation))
            assert token == want, f"{self}: {token} at {len(self.ids)} where {want} follows"
            self.ids.append(token)
            if self.sampling.logprobs is not None:
                assert news.logprobs is not None and len(news.logprobs) == len(news.ids)
                assert news.logprobs[i].logprob == -token
        self.text += news.text
        self.finish = news.finish
        self.error = None if news.error is None else news.error.message
        if self.finish is not None:
            self._check_end()

    def _check_end(self) -> None:
        sampling, ids = self.sampling, self.ids
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        early = [i for i in ids[:-1] if i in ends]
        assert not early, f"{self}: went on after {early}"
        by_id = bool(ids) and ids[-1] in ends
        visible = ids[:-1] if by_id else ids
        text, used, stopped = text_of(visible, sampling.stop)
        assert used == len(visible), f"{self}: {len(visible) - used} tokens after a stop string"
        if self.finish == "length":
            assert len(ids) == sampling.max_tokens and not by_id and not stopped, f"{self}"
        else:
            assert self.finish == "stop" and (by_id or stopped), f"{self}"
        assert self.text == text, f"{self}: {self.text!r} instead of {text!r}"

    def __str__(self) -> str:
        return f"client {self.number} {self.ids} {self.text!r}"


class World:
    """Everything of one run; the seed says all of it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 1000.0
        self.silence = SILENCE
        self.bus = SimBus(self.clock, SILENCE)
        self.log: list[str] = []
        """What went wrong, for whoever reads a failure."""
        self.faults = self.random.choice((0, 1, 2, 3, 5, 8))
        self.repeats = self.random.choice((0.0, 0.0, 0.1, 0.3))
        self._salted = self.random.random() < 0.5
        self._endless = self.random.random() < 0.3
        """Who leaves had asked for more than time allows: only an abort ends it."""
        self._crowded = not self.faults and self.random.random() < 0.1
        """The first clients take every row for longer than anything may be silent: others wait."""
        self._overlap = self.random.random() < 0.5
        self._boots = 0
        self._away_until = 0.0
        self._restarts: list[tuple[float, Callable[[], None]]] = []
        self.attempts = 0
        """Most attempts that any request took."""
        self.workers: dict[str, Worker] = {}
        self.late: list[Worker] = []
        """Processes whose place is taken, or will be, and that do not know it yet."""
        for name in self._names():
            self._start(name)
        self.clients = [self._client(i) for i in range(self.random.randint(1, 5))]
        if self._crowded:
            self._crowd()

    def _names(self) -> list[str]:
        groups = ["g0"] if self.random.random() < 0.7 else ["g0", "g1"]
        return ["gw0", "gw1", "tok0", "tok1", "det0", "det1", *groups]

    # --- what workers see -----------------------------------------------------------------------

    def clock(self) -> float:
        return self.now

    def confirmed(self) -> bool:
        return self.random.random() >= self.repeats

    def several(self) -> int:
        return self.random.choice((1, 1, 2, 8))

    def coin(self) -> bool:
        return self.random.random() < 0.5

    # --- who takes part -------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        self._boots += 1
        boot = self._boots
        if name.startswith("gw"):
            self.workers[name] = Gateway(self, name, boot, max_attempts=2 * self.faults + 1)
        elif name.startswith("tok"):
            core = TokenizerCore(tokenizer(), VOCAB, self._read_states, self.clock)
            self.workers[name] = Pipe(self, name, boot, core)
        elif name.startswith("det"):
            core_ = DetokenizerCore(tokenizer(), SILENCE, self.clock)
            self.workers[name] = Pipe(self, name, boot, core_)
        else:
            salt = self._salt(boot)
            self.workers[name] = Group(
                self,
                name,
                boot,
                salt=salt,
                overlap=self._overlap,
                length=4096 if self._endless or self._crowded else 32,
            )

    def _salt(self, incarnation: int) -> int:
        """Whether each incarnation is another model, so that mixing two of them shows."""
        return incarnation if self._salted else 0

    def _read_states(self) -> list[WorkerState]:
        return self.bus.read_states()

    def _client(self, number: int) -> Client:
        r = self.random
        text = None
        prompt = [r.randrange(3, VOCAB) for _ in range(r.randint(1, 12))]
        if r.random() < 0.3:
            text = "".join(r.choice("etaoins hrdlu") for _ in range(r.randint(1, 9)))
            prompt = tokenizer().encode(text)
        limit = r.randint(1, 12)
        stop: tuple[str, ...] = ()
        if r.random() < 0.4:
            alone, *_ = text_of(expected(prompt, SamplingParams(max_tokens=limit), 20))
            at = r.randrange(len(alone) + 1)
            stop = tuple(s for s in {alone[at : at + r.randint(1, 3)]} if s)
        sampling = SamplingParams(
            max_tokens=limit, stop=stop, ignore_eos=r.random() < 0.3,
            logprobs=0 if r.random() < 0.3 else None,
            stop_token_ids=(r.randrange(3, VOCAB),) if r.random() < 0.3 else (),
        )  # fmt: skip
        asks_at = self.now + 1 + r.random() * FAULTY_SECONDS * r.random()
        leaves_at = asks_at + 4 * r.random() if r.random() < 0.15 else float("inf")
        if self._endless and leaves_at < float("inf"):
            sampling = ENDLESS
        return Client(
            number, prompt, text, sampling, f"gw{r.randrange(2)}", self._salt, asks_at, leaves_at
        )

    def _crowd(self) -> None:
        """As many more clients as there are rows, who come first and stay."""
        groups = sum(isinstance(worker, Group) for worker in self.workers.values())
        for number in range(len(self.clients), len(self.clients) + ROWS * groups):
            client = self._client(number)
            client.sampling, client.asks_at = ENDLESS, self.now + 1
            client.leaves_at = self.now + 2 + CROWDED_SECONDS
            self.clients.insert(0, client)

    # --- the run --------------------------------------------------------------------------------

    def run(self) -> None:
        """Faults, then time enough to heal; everything is checked on the way and at the end."""
        times = [self.now + 1 + self.random.random() * FAULTY_SECONDS for _ in range(self.faults)]
        times.sort()
        end = self.now + LIMIT_SECONDS
        while times or self._restarts or self._unsettled():
            assert self.now < end, f"not healed: {self._unsettled()}"
            if times and self.now >= times[0]:
                times.pop(0)
                self._fault()
            self._one_action()
        self._check_end()

    def _one_action(self) -> None:
        self.bus.away = self.now < self._away_until
        for due in [r for r in self._restarts if r[0] <= self.now]:
            self._restarts.remove(due)
            due[1]()
        for client in self.clients:
            self._client_acts(client)
        everyone = [*self.workers.values(), *self.late]
        calm = not any(w.busy() for w in everyone if w.paused_until <= self.now)
        # In calm all have a turn, for time to pass quickly; else one, whoever it is.
        for worker in everyone if calm else [self.random.choice(everyone)]:
            if worker.paused_until <= self.now:
                worker.act()
            if not worker.alive:
                self._ended(worker)
        self.now += self.random.random() * (QUIET_SECONDS if calm else STEP_SECONDS)

    def _ended(self, worker: Worker) -> None:
        """It found that it was replaced, or has drained."""
        if worker in self.late:
            self.late.remove(worker)
        for name, other in list(self.workers.items()):
            if other is worker:
                self._forget_clients(worker)
                self._start(name)

    def _client_acts(self, client: Client) -> None:
        if client.gone:
            return
        if client.request is None:
            gateway = self.workers.get(client.gateway)
            if self.now >= client.asks_at and isinstance(gateway, Gateway):
                self._ask(client, gateway)
        elif self.now >= client.leaves_at and client.finish is None:
            self.log.append(f"client {client.number} leaves")
            client.gone = True
            assert client.owner is not None
            client.owner.requests.drop(client.request)

    def _ask(self, client: Client, gateway: Gateway) -> None:
        if self.bus.away or gateway.fleet.missing(self.now) is not None:
            return  # 503: it asks again
        ids = None if client.as_text is not None else pack_ids(client.prompt)
        client.owner = gateway
        client.request = Request(
            uid=(client.number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big") * 2, index=0,
            prompt=Prompt(text=client.as_text, ids=ids), sampling=client.sampling,
            sink=client.take, deadline=self.now + 10 * LIMIT_SECONDS,
        )  # fmt: skip
        gateway.requests.start(client.request, self.now)

    # --- faults ---------------------------------------------------------------------------------

    def _fault(self) -> None:
        kinds = [
            self._kill, self._kill, self._kill, self._pause, self._lose, self._flush, self._go_back,
            self._bring_back, self._outage, self._drain,
        ]  # fmt: skip
        self.random.choice(kinds)()

    def _note(self, what: str) -> None:
        self.log.append(f"{self.now:.2f} {what}")

    def _kill(self) -> None:
        """A worker ends at once and comes back; its last words, or more, may arrive late."""
        if not self.workers:
            return
        name = self.random.choice(list(self.workers))
        worker = self.workers.pop(name)
        back = self.now + self.random.choice((0.1, 1.0, SILENCE * 1.5)) * self.random.random()
        late = not isinstance(worker, Gateway) and self.random.random() < 0.4
        self._note(f"kill {name}" + (", which goes on a while" if late else ""))
        self._restarts.append((back, lambda: self._start(name)))
        if late:
            worker.paused_until = self.now + self.random.random() * SILENCE
            self.late.append(worker)
            self._restarts.append((worker.paused_until + 2, lambda: self._bury(worker)))
        self._forget_clients(worker)

    def _bury(self, worker: Worker) -> None:
        if worker in self.late:
            self.late.remove(worker)

    def _forget_clients(self, worker: Worker) -> None:
        for client in self.clients:
            if client.owner is worker:
                client.gone = True

    def _pause(self) -> None:
        if self.workers:
            name = self.random.choice(list(self.workers))
            seconds = 2 * SILENCE * self.random.random()
            self._note(f"pause {name} for {seconds:.1f} s")
            self.workers[name].paused_until = self.now + seconds

    def _lose(self) -> None:
        queues = [name for name, items in self.bus.queues.items() if items]
        if queues:
            queue, count = self.random.choice(queues), self.random.randint(1, 4)
            self._note(f"lose {count} of {queue}")
            self.random.choice((self.bus.lose_newest, self.bus.lose_oldest))(queue, count)

    def _flush(self) -> None:
        self._note("flush")
        self.bus.flush()

    def _go_back(self) -> None:
        seconds = 2 * self.random.random()
        self._note(f"go back by {seconds:.2f} s")
        self.bus.go_back(self.now - seconds)

    def _bring_back(self) -> None:
        since = self.now - SILENCE * self.random.random()
        self._note("bring back what was deleted")
        self.bus.bring_back(lambda item: item.deleted >= since)

    def _outage(self) -> None:
        seconds = 2 * SILENCE * self.random.random()
        self._note(f"bus away for {seconds:.1f} s")
        self._away_until = self.now + seconds

    def _drain(self) -> None:
        groups = [w for w in self.workers.values() if isinstance(w, Group)]
        if groups:
            group = self.random.choice(groups)
            self._note(f"drain {group.state.id}")
            group.draining = True

    # --- the end --------------------------------------------------------------------------------

    def _unsettled(self) -> str:
        """What is still to come; empty when all is answered and forgotten."""
        for client in self.clients:
            if not client.gone and client.finish is None and client.error is None:
                return f"{client} waits"
        if self.late:
            return "a process that was replaced goes on"
        for name, worker in self.workers.items():
            if isinstance(worker, Gateway) and (len(worker.requests) or worker.requests.waiting):
                return f"{name} has open requests"
            if isinstance(worker, Group) and not worker.scheduler.idle:
                return f"{name} computes"
            if isinstance(worker, Pipe) and worker.core.busy():
                return f"{name} holds state"
        if self.bus.queues[TOK]:
            return "a request waits for a tokenizer"
        return ""

    def _check_end(self) -> None:
        for client in self.clients:
            if client.error is not None:
                assert client.request is not None
                assert client.request.uid in self.bus.poisonous, f"{client}: {client.error}"
            if client.request is not None:
                self.attempts = max(self.attempts, client.request.attempt)
        for worker in self.workers.values():
            if isinstance(worker, Group):
                integrity.check(worker.scheduler)
                cache = worker.scheduler.cache
                assert cache.free_pages + cache.evictable_pages == cache.num_pages
