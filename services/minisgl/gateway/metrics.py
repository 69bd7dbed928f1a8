"""What `/metrics` shows: the gateway's own counts, and the figures that groups publish."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from minisgl.messages import STEP_BUCKETS, GroupLoad

OUTCOMES = ("stop", "length", "error", "cancelled")
"""How a client's request ends; cancelled: the client left."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 10)
_GAUGES = (
    ("requests_running", "Requests that are computed", "running"),
    ("requests_waiting", "Requests that wait for room in a group", "waiting"),
    ("kv_pages_total", "Pages of the KV cache, without the dummy page", "pages_total"),
    ("kv_pages_free", "Pages that hold nothing", "pages_free"),
    ("kv_pages_evictable", "Pages that only the prefix cache holds", "pages_evictable"),
)


class Metrics:
    """The metrics of one gateway, in a registry of its own.

    `loads`, `replays` and `bus_errors`, which gives (role, id, count), are asked at each scrape.
    """

    def __init__(
        self,
        loads: Callable[[], Sequence[GroupLoad]],
        replays: Callable[[], int],
        bus_errors: Callable[[], Sequence[tuple[str, str, int]]],
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self.prompt_tokens = Counter(
            "minisgl_prompt_tokens", "Tokens of prompts, once a prompt", registry=registry
        )
        self.generation_tokens = Counter(
            "minisgl_generation_tokens", "Tokens sent to clients", registry=registry
        )
        self.cached_tokens = Counter(
            "minisgl_cached_tokens", "Prompt tokens found in the prefix cache", registry=registry
        )
        self.requests = Counter(
            "minisgl_requests", "Requests of clients that ended", ["outcome"], registry=registry
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.first_token = Histogram(
            "minisgl_time_to_first_token_seconds",
            "From the request to the first token of any choice",
            buckets=_SECONDS,
            registry=registry,
        )
        self.token_gap = Histogram(
            "minisgl_inter_token_latency_seconds",
            "Mean time between the tokens of a choice, once a request",
            buckets=_GAPS,
            registry=registry,
        )
        self.duration = Histogram(
            "minisgl_request_duration_seconds",
            "From the request to its last token",
            buckets=_SECONDS,
            registry=registry,
        )
        registry.register(_Groups(loads, replays, bus_errors))

    def exposition(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(_WithoutBirths(self.registry))


class _WithoutBirths(CollectorRegistry):
    """A registry without the `_created` samples, which no query of a dashboard wants.

    The library's own switch is one for the whole process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """All metrics, each without the time of its birth."""
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class _Groups(Collector):
    def __init__(
        self,
        loads: Callable[[], Sequence[GroupLoad]],
        replays: Callable[[], int],
        bus_errors: Callable[[], Sequence[tuple[str, str, int]]],
    ) -> None:
        self._loads = loads
        self._replays = replays
        self._bus_errors = bus_errors

    def collect(self) -> Iterator[Metric]:
        # Before a group has formed the names are there with 0, as dashboards expect.
        loads = self._loads() or [GroupLoad(group="", incarnation=0, max_model_len=0)]
        for name, text, attribute in _GAUGES:
            gauge = GaugeMetricFamily(f"minisgl_{name}", text, labels=["group"])
            for load in loads:
                gauge.add_metric([load.group], getattr(load, attribute))
            yield gauge
        retractions = CounterMetricFamily(
            "minisgl_retractions", "Requests that gave their pages back", labels=["group"]
        )
        busy = CounterMetricFamily(
            "minisgl_device_busy_seconds",
            "Time in which the device of a group's rank 0 computed steps",
            labels=["group"],
        )
        errors = CounterMetricFamily(
            "minisgl_bus_errors",
            "Entries and messages of the bus that could not be read",
            labels=["role", "id"],
        )
        for role, id, count in self._bus_errors():
            errors.add_metric([role, id], count)
        steps = HistogramMetricFamily(
            "minisgl_step_seconds", "Steps of a group's scheduler", labels=["group"]
        )
        for load in loads:
            retractions.add_metric([load.group], load.retractions)
            busy.add_metric([load.group], load.busy_seconds)
            counts = load.step_buckets or [0] * len(STEP_BUCKETS)
            buckets = [
                (str(float(b)), float(n)) for b, n in zip(STEP_BUCKETS, counts, strict=False)
            ]
            buckets.append(("+Inf", float(load.steps)))
            steps.add_metric([load.group], buckets, load.step_seconds)
        yield from (retractions, busy, errors, steps)
        yield CounterMetricFamily(
            "minisgl_request_replays", "Attempts after the first", value=self._replays()
        )
