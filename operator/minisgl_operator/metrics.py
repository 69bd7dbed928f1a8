"""What the operator counts of itself, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """One set for each process; nothing is registered globally."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "minisgl_operator_reconcile_seconds",
            "From what woke an object's task to the end of its look, children written",
            registry=self.registry,
            buckets=(0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8),
        )
        self.failures = Counter(
            "minisgl_operator_reconcile_failures",
            "Looks that ended in an error and are tried again",
            registry=self.registry,
        )
        self.applied = Counter(
            "minisgl_operator_applied", "Children written, by kind", ["kind"],
            registry=self.registry,
        )  # fmt: skip
        self.objects = Gauge(
            "minisgl_operator_objects", "MiniSGLang objects watched", registry=self.registry
        )
        self.leader = Gauge(
            "minisgl_operator_leader", "1 while this replica is the one that acts",
            registry=self.registry,
        )  # fmt: skip

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
