"""Settings of `hscache regenerate`, as a frozen dataclass; no torch."""

from dataclasses import dataclass
from pathlib import Path

from hscache.chat_api import parse_extra_body, server_url
from hscache.config import Device, Dtype
from hscache.errors import ConfigError

_OF_TARGET = ("batch_size", "dtype", "device")
_OF_ENDPOINT = ("model", "concurrency", "top_p", "extra_body", "attempts", "timeout_s")
"""Settings that only one kind of run uses."""


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """Let the target answer prompts itself: the text a drafter is trained on. It is loaded here
    (--target), or served elsewhere (--endpoint)."""

    prompts: tuple[str, ...]
    """Files, folders or patterns of rows with `messages`; a last assistant turn is answered
    anew."""
    output: Path
    """JSONL file the answered rows are appended to; rows already in it are skipped."""
    target: str | None = None
    """Hugging Face id or local folder of the model that answers."""
    endpoint: str | None = None
    """Instead of target: URL of a server with OpenAI's chat API (vLLM, SGLang), such as
    http://localhost:8000; `/v1` is added to a URL without a path. A key is taken from the
    environment variable HSCACHE_API_KEY."""
    max_new_tokens: int = 512
    """Longest answer, in tokens."""
    temperature: float = 0.7
    """0 is greedy; otherwise the softmax is sampled at this temperature."""
    seed: int = 0
    """Seed of the sampling; each row has random numbers of its own, made from this and its id."""
    batch_size: int = 16
    """With target: prompts answered at the same time."""
    dtype: Dtype = "bfloat16"
    """With target: dtype it runs in."""
    device: Device = "auto"
    """With target: auto takes the first GPU if there is one."""
    model: str | None = None
    """With endpoint: the model's name there; may be left out if it serves only one."""
    concurrency: int = 64
    """With endpoint: requests in flight at the same time."""
    top_p: float | None = None
    """With endpoint: sample from the smallest set of tokens of this probability; none leaves it to
    the server."""
    extra_body: str | None = None
    """With endpoint: JSON object of more request fields, such as
    {"top_k": 20, "chat_template_kwargs": {"enable_thinking": false}}."""
    attempts: int = 8
    """With endpoint: requests made for a row before it is given up; the waits between them double
    from 1 s to 30 s."""
    timeout_s: float = 600
    """With endpoint: longest wait for one answer, in seconds."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError("prompts is empty: name at least one file.")
        if (self.target is None) == (self.endpoint is None):
            found = "neither" if self.target is None else "both"
            raise ConfigError(
                f"found {found} of target and endpoint, expected one: --target FOLDER loads the "
                "model here, --endpoint URL asks a server that has it."
            )
        self._refuse_idle_settings()
        minima = {
            **dict.fromkeys(("batch_size", "max_new_tokens", "concurrency", "attempts"), 1),
            **dict.fromkeys(("temperature", "seed"), 0),
        }
        for name, minimum in minima.items():
            value = getattr(self, name)
            if not minimum <= value < float("inf"):
                raise ConfigError(f"{name} is {value}; expected at least {minimum}.")
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"timeout_s is {self.timeout_s}; expected more than 0.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; expected 0 < top_p <= 1.")
        if self.endpoint is not None:
            server_url(self.endpoint)
        parse_extra_body(self.extra_body)

    def _refuse_idle_settings(self) -> None:
        """Refuse settings of the other kind of run, which would do nothing."""
        idle, kind = (_OF_ENDPOINT, "endpoint") if self.endpoint is None else (_OF_TARGET, "target")
        for name in idle:
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                raise ConfigError(
                    f"{name} is {value}, which only a run with {kind} uses. Leave it out."
                )
