"""Prometheus metrics of the server."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dgemma.serve.engine import Engine

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters and histograms with a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("dgemma_requests", "Requests by path and status", ["path", "status"], registry=registry)
        self.seconds = Histogram("dgemma_request_seconds", "Duration of requests", buckets=_SECONDS, registry=registry)
        self.first_block = Histogram(
            "dgemma_first_block_seconds", "Time to the first block", buckets=_SECONDS, registry=registry
        )
        self.tokens = Counter("dgemma_tokens", "Tokens written", registry=registry)
        self.forwards = Counter("dgemma_forwards", "Forwards of all requests", registry=registry)
        self.abandoned = Counter("dgemma_abandoned", "Requests that failed or whose client left", registry=registry)
        for name, text, read in (
            ("dgemma_waiting", "Requests in the queue", lambda: engine.num_waiting),
            ("dgemma_running", "Requests that are being denoised", lambda: engine.num_running),
            ("dgemma_batch_steps", "Steps of all batches", lambda: engine.num_steps),
        ):
            Gauge(name, text, registry=registry).set_function(read)

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
