"""What rank 0 sends: each step's tokens to the detokenizers, refusals to the gateways, audits."""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from minisgl.bus import Bus, detok_queue, reply_queue
from minisgl.messages import (
    DetokenizeBatch,
    DetokenizeMsg,
    ErrorInfo,
    FinishReason,
    Message,
    Opening,
    Route,
    Source,
    UserMsg,
    UserReply,
    WorkerState,
    pack_ids,
)
from minisgl.scheduler.output import Emission
from minisgl.scheduler.request import PendingReq, Req
from minisgl.scheduler.scheduler import Scheduler

Index = npt.NDArray[np.int64]
Name = TypeVar("Name", bound=Hashable)


class NameColumn(Generic[Name]):
    """A name for each row of the tables, held as a number.

    Names that no row has any more are forgotten from time to time: gateways and detokenizers come
    and go for as long as a rank lives.
    """

    def __init__(self, rows: int) -> None:
        self.of_row = np.zeros(rows, np.int32)
        """[rows] index into `names`."""
        self.names: list[Name] = []
        self._numbers: dict[Name, int] = {}

    def set(self, row: int, name: Name) -> None:
        """Give a row this name."""
        if name not in self._numbers:
            if len(self.names) >= 2 * len(self.of_row):
                self._forget()
            self._numbers[name] = len(self.names)
            self.names.append(name)
        self.of_row[row] = self._numbers[name]

    def _forget(self) -> None:
        used, number = np.unique(self.of_row, return_inverse=True)
        self.of_row[:] = number
        self.names = [self.names[n] for n in used.tolist()]
        self._numbers = {name: n for n, name in enumerate(self.names)}


class ReplySink:
    """The output sink of rank 0. One entry a step and detokenizer, whatever runs."""

    def __init__(self, bus: Bus, group: str, incarnation: int, rows: int) -> None:
        self._bus = bus
        self._group = group
        self._incarnation = incarnation
        self._gateways: NameColumn[tuple[str, int]] = NameColumn(rows)
        self._detokenizers: NameColumn[str] = NameColumn(rows)
        self._audits = 0
        self.scheduler: Scheduler
        """Set once it is made: it is made with this sink."""

    def emit(self, emission: Emission) -> None:
        others: dict[str, list[DetokenizeMsg]] = defaultdict(list)
        for req in emission.fresh:
            self._open(req, others)
        plain = np.ones(len(emission.rows), np.bool_)
        for i in sorted({*emission.finished, *emission.logprobs}):
            plain[i] = False
            pending = self._pending(int(emission.rows[i]))
            logprobs = emission.logprobs.get(i)
            others[_route(pending).detokenizer].append(
                DetokenizeMsg(
                    uid=pending.uid,
                    attempt=pending.attempt,
                    route=_route(pending),
                    source=self._source(pending.run),
                    pos=int(emission.pos[i]),
                    ids=pack_ids([int(emission.tokens[i])]),
                    logprobs=None if logprobs is None else [logprobs],
                    finish=emission.finished.get(i),
                )
            )
        rows, pos, tokens = emission.rows[plain], emission.pos[plain], emission.tokens[plain]
        number = self._detokenizers.of_row[rows]
        for n in np.unique(number).tolist():
            mine = slice(None) if len(self._detokenizers.names) == 1 else number == n
            name = self._detokenizers.names[n]
            batch = self._columns(rows[mine], pos[mine], tokens[mine])
            batch.others = others.pop(name, [])
            self._send(name, batch)
        for name, messages in others.items():
            self._send(name, self._batch(others=messages))

    def complete(self, pending: PendingReq, reason: FinishReason) -> None:
        route, source = _route(pending), self._source(pending.run)
        common = {"uid": pending.uid, "attempt": pending.attempt, "route": route, "source": source}
        opening = DetokenizeMsg(
            **common,  # type: ignore[arg-type]
            pos=pending.received,
            opening=_opening(pending),
        )
        end = DetokenizeMsg(**common, pos=pending.received, finish=reason)  # type: ignore[arg-type]
        self._send(route.detokenizer, self._batch(others=[opening, end]))

    def refuse(self, pending: PendingReq, error: ErrorInfo) -> None:
        self._reply(pending, error=error)

    def aborted(self, pending: PendingReq) -> None:
        pass  # the gateway asked for it

    def refuse_for_now(self, message: UserMsg) -> None:
        """The group leaves and takes nothing new: the gateway is to ask again."""
        reply = UserReply(
            uid=message.uid,
            attempt=message.attempt,
            boot=message.route.boot,
            pos=len(message.output_ids) // 4,
            text_at=message.sent_chars,
            again="refused",
            why=f"group {self._group} is leaving",
        )
        self._bus.send(reply_queue(message.route.gateway), [reply])

    def hand_back(self) -> None:
        """The group leaves: everything it holds is to be computed elsewhere."""
        for pending in self.scheduler.held():
            route = _route(pending)
            reply = UserReply(
                uid=pending.uid,
                attempt=pending.attempt,
                boot=route.boot,
                source=self._source(pending.run),
                again="handback",
                why=f"group {self._group} is leaving",
            )
            self._bus.send(reply_queue(route.gateway), [reply])

    def audit(self, states: Iterable[WorkerState]) -> None:
        """Tell every gateway what is held for it, behind the replies that were sent before."""
        self._audits += 1
        states = list(states)
        gateways = [(s.id, s.boot) for s in states if s.role == "gateway"]
        detokenizers = {s.id for s in states if s.role == "detokenizer"}
        held: dict[str, list[PendingReq]] = defaultdict(list)
        for pending in self.scheduler.held():
            held[_route(pending).detokenizer].append(pending)
        for name in sorted(detokenizers | held.keys()):
            listed = dict.fromkeys(gateways)
            listed.update(dict.fromkeys((_route(p).gateway, _route(p).boot) for p in held[name]))
            number = {gateway: i for i, gateway in enumerate(listed)}
            mine = held[name]
            batch = self._batch(audit=True, number=self._audits, gateways=list(listed))
            batch.uid = b"".join(p.uid for p in mine)
            batch.attempt = _int32([p.attempt for p in mine])
            batch.run = np.array([p.run for p in mine], "<i8").tobytes()
            batch.pos = _int32([self.scheduler.output_pos(p) for p in mine])
            batch.gateway = _int32([number[_route(p).gateway, _route(p).boot] for p in mine])
            self._send(name, batch)

    def _open(self, req: Req, others: dict[str, list[DetokenizeMsg]]) -> None:
        """A request has its first token since it took this row."""
        pending, route = req.pending, _route(req.pending)
        self._gateways.set(req.row, (route.gateway, route.boot))
        self._detokenizers.set(req.row, route.detokenizer)
        if pending.opened:
            return
        pending.opened = True
        others[route.detokenizer].append(
            DetokenizeMsg(
                uid=pending.uid,
                attempt=pending.attempt,
                route=route,
                source=self._source(pending.run),
                pos=pending.received,
                opening=_opening(pending),
            )
        )

    def _columns(self, rows: Index, pos: npt.NDArray[np.int32], tokens: Index) -> DetokenizeBatch:
        table = self.scheduler.table
        used, gateway = np.unique(self._gateways.of_row[rows], return_inverse=True)
        return self._batch(
            gateways=[self._gateways.names[n] for n in used.tolist()],
            uid=table.uid[rows].tobytes(),
            attempt=table.attempt[rows].astype("<i4").tobytes(),
            run=table.run[rows].astype("<i8").tobytes(),
            pos=pos.astype("<i4").tobytes(),
            gateway=gateway.astype("<i4").tobytes(),
            ids=tokens.astype("<i4").tobytes(),
        )

    def _batch(self, **fields: object) -> DetokenizeBatch:
        return DetokenizeBatch(
            group=self._group,
            incarnation=self._incarnation,
            **fields,  # type: ignore[arg-type]
        )

    def _send(self, detokenizer: str, batch: DetokenizeBatch) -> None:
        batch.detokenizer = detokenizer
        self._bus.send(detok_queue(detokenizer), [batch])

    def _reply(self, pending: PendingReq, *, error: ErrorInfo) -> None:
        route = _route(pending)
        reply: Message = UserReply(
            uid=pending.uid,
            attempt=pending.attempt,
            boot=route.boot,
            source=self._source(pending.run),
            error=error,
        )
        self._bus.send(reply_queue(route.gateway), [reply])

    def _source(self, run: int) -> Source:
        return Source(group=self._group, incarnation=self._incarnation, run=run)

    def _pending(self, row: int) -> PendingReq:
        req = self.scheduler.table.reqs[row]
        if req is None:
            raise RuntimeError(f"a token for row {row}, which no request has")
        return req.pending


def _route(pending: PendingReq) -> Route:
    if pending.route is None:
        raise RuntimeError("an offline request on the bus")
    return pending.route


def _opening(pending: PendingReq) -> Opening:
    prompt, output = (
        pending.input_ids[: pending.prompt_len],
        pending.input_ids[pending.prompt_len : pending.prompt_len + pending.received],
    )
    return Opening(
        prompt_ids=pack_ids(prompt),
        output_ids=pack_ids(output),
        sent_chars=pending.sent_chars,
        stop=pending.sampling.stop,
        cached_tokens=pending.cached_tokens or 0,
    )


def _int32(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()
