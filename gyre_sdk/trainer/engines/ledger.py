"""What the engine writes down about itself: counters for `/metrics`, and a log of every finished request."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gyre_sdk.trainer.engines.sequence import Sequence
from gyre_sdk.trainer.engines.wire import RequestLogLine, encode

__all__ = ["RequestLog", "Tally", "prometheus"]


@dataclass(slots=True)
class Tally:
    """Counters since the start; tokens."""

    prompt_tokens: int = 0
    """Prompt tokens of admitted requests, cached ones included."""
    cached_tokens: int = 0
    """Those of them that a cached prefix supplied."""
    generation_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, recomputation after a weight update included."""
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))
    """Requests by finish reason."""


class RequestLog:
    """Append one JSON line per finished request, flushed to the operating system before the client can see its end."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("ab")

    def write(self, sequence: Sequence, finish_reason: str) -> None:
        """Write a request that is over."""
        if self._file is None:
            return
        line = RequestLogLine(
            sequence.request_id, sequence.prompt_ids, sequence.sampled, sequence.logprobs, sequence.spans, finish_reason
        )
        self._file.write(encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def prometheus(tally: Tally, *, running: int, waiting: int, model: str) -> str:
    """Render the metrics under vLLM's names (`vllm/v1/metrics/loggers.py`), in Prometheus' text format."""
    quoted = model.replace("\\", "\\\\").replace('"', '\\"')
    labels = f'engine="0",model_name="{quoted}"'
    gauges = (
        ("vllm:num_requests_running", "Number of requests in model execution batches.", running),
        ("vllm:num_requests_waiting", "Number of requests waiting to be processed.", waiting),
    )
    counters = (
        ("vllm:prompt_tokens_total", "Number of prompt tokens of admitted requests.", tally.prompt_tokens),
        ("vllm:prompt_tokens_cached_total", "Those of them supplied by a cached prefix.", tally.cached_tokens),
        ("vllm:generation_tokens_total", "Number of generation tokens processed.", tally.generation_tokens),
        ("gyre:computed_tokens_total", "Number of tokens that went through the model.", tally.computed_tokens),
    )
    lines = []
    for kind, metrics in (("gauge", gauges), ("counter", counters)):
        for name, text, value in metrics:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name}{{{labels}}} {float(value)}"]
    name = "vllm:request_success_total"
    lines += [f"# HELP {name} Count of successfully processed requests.", f"# TYPE {name} counter"]
    lines += [
        f'{name}{{engine="0",finished_reason="{reason}",model_name="{quoted}"}} {float(count)}'
        for reason, count in tally.finished.items()
    ]
    return "\n".join(lines) + "\n"
