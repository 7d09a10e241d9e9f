"""Numbers of a server in Prometheus's text format: requests, tokens, queue, and histograms of times."""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Iterator, Mapping

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of the histograms' buckets, in seconds."""


class Histogram:
    """Counts of times by bucket, with their sum."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(BUCKETS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Counts a time."""
        self.counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds


class Counters:
    """The numbers since the server started. All methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[str] = Counter()
        self._whole, self._first = Histogram(), Histogram()

    def request(self, route: str, status: int, seconds: float) -> None:
        """Counts a request that has ended; status 499 stands for a client that has left."""
        with self._lock:
            self._requests[route, status] += 1
            self._whole.add(seconds)

    def first_token(self, seconds: float) -> None:
        """Counts the time from a request to its first token."""
        with self._lock:
            self._first.add(seconds)

    def tokens(self, prompt: int, completion: int) -> None:
        """Counts tokens that were read and written."""
        with self._lock:
            self._tokens["prompt"] += prompt
            self._tokens["completion"] += completion

    def text(self, gauges: Mapping[str, int]) -> str:
        """All numbers, and those of this moment by name."""
        with self._lock:
            return "\n".join([*self._lines(), *_gauges(gauges)]) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "# TYPE jaxformer_requests_total counter"
        for (route, status), count in sorted(self._requests.items()):
            yield f'jaxformer_requests_total{{route="{route}",status="{status}"}} {count}'
        for name in ("prompt", "completion"):
            yield f"# TYPE jaxformer_{name}_tokens_total counter"
            yield f"jaxformer_{name}_tokens_total {self._tokens[name]}"
        for name, histogram in (("request", self._whole), ("first_token", self._first)):
            yield f"# TYPE jaxformer_{name}_seconds histogram"
            total = 0
            for bound, count in zip((*map(str, BUCKETS), "+Inf"), histogram.counts, strict=True):
                total += count
                yield f'jaxformer_{name}_seconds_bucket{{le="{bound}"}} {total}'
            yield f"jaxformer_{name}_seconds_sum {histogram.sum:.6f}"
            yield f"jaxformer_{name}_seconds_count {total}"


def _gauges(values: Mapping[str, int]) -> Iterator[str]:
    for name, value in values.items():
        yield f"# TYPE jaxformer_{name} gauge"
        yield f"jaxformer_{name} {value}"
