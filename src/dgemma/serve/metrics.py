"""Prometheus metrics of the server."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dgemma.serve.engine import Engine

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters and histograms with a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()
        prefixes = engine.prefixes
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
            ("dgemma_prompt_tokens", "Tokens of all prompts", lambda: prefixes.num_tokens),
            ("dgemma_prompt_tokens_read", "Prompt tokens that the model read", lambda: prefixes.num_read),
            ("dgemma_prefixes", "Shared prefixes that are kept", lambda: prefixes.num_kept),
            ("dgemma_prefix_bytes", "Memory of the kept prefixes", lambda: prefixes.num_bytes),
            ("dgemma_prefixes_evicted", "Prefixes that left to make room", lambda: prefixes.num_evicted),
        ):
            Gauge(name, text, registry=registry).set_function(read)

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
