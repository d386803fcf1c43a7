"""An OpenAI-compatible completion server, for tests and small models.

`Engine` turns requests into responses, `Server` speaks HTTP. Requests are
answered one at a time; vLLM and similar servers are much faster under load.
There is no authentication, and POST /load reads any path that it is given:
serve only on a network that you trust.
"""

from collections.abc import Callable, Mapping, Sequence
import http.server
import json
import secrets
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from experiments.models import decoder
from experiments.models.pretrained import Pretrained
from experiments.parallel import sharding
from experiments.rollouts import sampler as sampler_lib
from experiments.rollouts.rollout import Rollout
from experiments.rollouts.sampling import Sampling

# Request fields that are not supported, and the value with which each of them
# has no effect.
_UNSUPPORTED = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "min_p": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "stream": False,
    "suffix": "",
}


class NotFoundError(Exception):
  """The requested path or model is not served."""


class Engine:
  """Answers completion requests with a model; thread-safe.

  Attributes:
    name: The model's name in requests.
    version: Version of the weights; 0 until `load` is called.
  """

  def __init__(
      self,
      loaded: Pretrained,
      name: str,
      load: Callable[[str, DTypeLike], Pretrained],
  ):
    """Creates an engine.

    Args:
      loaded: The model to serve.
      name: The model's name in requests.
      load: Loads a model from a path, in a given parameter dtype; called for
        new weights (see `Engine.load`).
    """
    self.name = name
    self.version = 0
    self._loaded = loaded
    self._load = load
    self._lock = threading.Lock()

  def models(self) -> dict[str, Any]:
    """Returns the answer to GET /v1/models."""
    config = self._loaded.config
    model = {
        "id": self.name,
        "object": "model",
        "owned_by": "logra-jax",
        "max_model_len": config.max_length,
    }
    return {"object": "list", "data": [model]}

  def load(self, body: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces the weights by others of the same architecture.

    Args:
      body: The request: `path`, which the engine's loader reads, and
        optionally `version`, a number for these weights (by default the last
        one plus 1).

    Returns:
      The model's name and the version of its weights.

    Raises:
      ValueError: If `path` holds no model, or one with other shapes.
      FileNotFoundError: If nothing is at `path`.
    """
    if not isinstance(_field(body, "path", None), str):
      raise ValueError("path must be a directory or a file, as a string")
    loaded = self._load(body["path"], self._loaded.config.param_dtype)
    shapes = lambda model: jax.tree.map(jnp.shape, model.params)
    if shapes(loaded) != shapes(self._loaded):
      raise ValueError(
          f"the model at {body['path']} has other shapes than {self.name}:"
          " start a server for it"
      )
    with self._lock:
      self._loaded = self._loaded._replace(params=loaded.params)
      self.version = _field(body, "version", self.version + 1)
    return {"model": self.name, "version": self.version}

  def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer to POST /v1/completions.

    Args:
      body: The request. `prompt` is a text, a list of token ids, or a list of
        either. Any `logprobs` other than null asks for the log-probs of the
        sampled tokens.

    Raises:
      NotFoundError: If the request names another model.
      ValueError: If a field cannot be served; names the field.
    """
    model = _field(body, "model", self.name)
    if model != self.name:
      raise NotFoundError(
          f"no model {model!r} is served here, only {self.name!r}"
      )
    for name, neutral in _UNSUPPORTED.items():
      if _field(body, name, neutral) != neutral:
        raise ValueError(f"{name}={body[name]!r} is not supported")
    sampling = _sampling(body)
    n = _field(body, "n", 1)
    if not isinstance(n, int) or n < 1:
      raise ValueError(f"n must be an int of at least 1, got {n!r}")
    seed = _field(body, "seed", secrets.randbits(31))
    if not isinstance(seed, int):
      raise ValueError(f"seed must be an int, got {seed!r}")
    key = jax.random.key(seed)
    with self._lock:
      loaded = self._loaded
      prompts = self._prompts(body)
      rollout = _sample(loaded, prompts, key, sampling, n)
    choices = [
        _choice(loaded, rollout, row, prompts[row // n], body, sampling)
        for row in range(len(prompts) * n)
    ]
    n_read = sum(map(len, prompts))
    n_written = int(rollout.completion_mask.sum())
    return {
        "id": f"cmpl-{secrets.token_hex(8)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": self.name,
        "choices": choices,
        "usage": {
            "prompt_tokens": n_read,
            "completion_tokens": n_written,
            "total_tokens": n_read + n_written,
        },
    }

  def _prompts(self, body: Mapping[str, Any]) -> list[list[int]]:
    """Token ids of each prompt."""
    prompt = _field(body, "prompt", None)
    single = isinstance(prompt, str) or (
        isinstance(prompt, list) and prompt and isinstance(prompt[0], int)
    )
    prompts = [prompt] if single else prompt
    if not isinstance(prompts, list) or not prompts:
      raise ValueError("prompt must be a text, token ids, or a list of either")
    return [self._encode(one) for one in prompts]

  def _encode(self, prompt: Any) -> list[int]:
    """Token ids of one prompt."""
    if isinstance(prompt, str):
      prompt = self._loaded.tokenizer.encode(prompt, add_special=True)
    limit = self._loaded.config.vocab_size
    if not isinstance(prompt, list) or not all(
        isinstance(i, int) and 0 <= i < limit for i in prompt
    ):
      raise ValueError(f"prompt must be a text or ids below {limit}")
    return prompt


def _sampling(body: Mapping[str, Any]) -> Sampling:
  """Sampling options of a request."""
  stop = _field(body, "stop", ())
  return Sampling(
      max_new_tokens=_field(body, "max_tokens", 16),
      min_new_tokens=_field(body, "min_tokens", 0),
      temperature=_field(body, "temperature", 1.0),
      # Some clients send -1 for "no limit".
      top_k=max(0, _field(body, "top_k", 0)),
      top_p=_field(body, "top_p", 1.0),
      stop=(stop,) if isinstance(stop, str) else tuple(stop),
  )


def _sample(
    loaded: Pretrained,
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    sampling: Sampling,
    n: int,
) -> Rollout:
  """Samples n responses to each prompt, as NumPy arrays."""
  longest = max(map(len, prompts))
  room = loaded.config.max_length - sampling.max_new_tokens
  if longest > room:
    raise ValueError(
        f"a prompt of {longest} tokens and max_tokens="
        f"{sampling.max_new_tokens} exceed the context of"
        f" {loaded.config.max_length} tokens: lower max_tokens or shorten it"
    )
  sampler = sampler_lib.LocalSampler(
      decoder.Decoder(loaded.config),
      loaded.params,
      loaded.tokenizer,
      # Every padded length compiles a program, so use powers of two.
      max_prompt_tokens=min(room, max(16, 1 << (longest - 1).bit_length())),
  )
  rollout = sampler.sample(prompts, key, sampling, group_size=n)
  return sharding.fetch(rollout)


def _choice(
    loaded: Pretrained,
    rollout: Rollout,
    row: int,
    prompt: list[int],
    body: Mapping[str, Any],
    sampling: Sampling,
) -> dict[str, Any]:
  """One response in the API's format."""
  mask = np.asarray(rollout.completion_mask[row])
  ids = rollout.tokens[row][mask].tolist()
  log_probs = rollout.log_probs[row][mask].tolist()
  text = loaded.tokenizer.decode(ids)
  # The text ends before a stop string, the ids and log-probs after it.
  ends = [text.find(s) for s in sampling.stop if s in text]
  choice = {
      "index": row,
      "text": text[: min(ends)] if ends else text,
      "finish_reason": "stop" if rollout.finished[row] else "length",
      "logprobs": None,
  }
  if _field(body, "logprobs", None) is not None:
    by_id = _field(body, "return_tokens_as_token_ids", False)
    decode = lambda i: loaded.tokenizer.decode([i], skip_special=False)
    choice["logprobs"] = {
        "tokens": [f"token_id:{i}" if by_id else decode(i) for i in ids],
        "token_logprobs": log_probs,
        "top_logprobs": None,
    }
  if _field(body, "return_token_ids", False):
    choice |= {"token_ids": ids, "prompt_token_ids": prompt}
  return choice


def _field(body: Mapping[str, Any], name: str, default: Any) -> Any:
  """A field of a request, or `default` if it is absent or null."""
  return default if name not in body or body[name] is None else body[name]


class _Handler(http.server.BaseHTTPRequestHandler):
  """Routes JSON requests to the engine."""

  protocol_version = "HTTP/1.1"
  server: "Server"

  def do_GET(self) -> None:
    routes = {"/v1/models": self.server.engine.models, "/health": dict}
    self._answer(routes, ())

  def do_POST(self) -> None:
    length = int(self.headers.get("Content-Length", 0))
    text = self.rfile.read(length)
    try:
      body = json.loads(text)
    except ValueError as error:
      self._send(400, _error(f"the body is not JSON: {error}"))
      return
    if not isinstance(body, dict):
      self._send(400, _error("the body must be a JSON object"))
      return
    engine = self.server.engine
    routes = {"/v1/completions": engine.complete, "/load": engine.load}
    self._answer(routes, (body,))

  def _answer(
      self, routes: Mapping[str, Callable[..., Any]], args: tuple[Any, ...]
  ) -> None:
    """Calls the route of this path and sends its result or its error."""
    if self.path not in routes:
      self._send(404, _error(f"no {self.path}; there is {', '.join(routes)}"))
      return
    try:
      self._send(200, routes[self.path](*args))
    except NotFoundError as error:
      self._send(404, _error(str(error)))
    except (ValueError, TypeError, OSError) as error:
      self._send(400, _error(str(error)))
    except Exception as error:  # Tell the client; the server keeps running.
      self._send(500, _error(f"{type(error).__name__}: {error}"))
      raise

  def _send(self, status: int, content: Any) -> None:
    data = json.dumps(content).encode()
    self.send_response(status)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, format: str, *args: Any) -> None:
    """Logs nothing: the base class prints a line for every request."""


def _error(message: str) -> dict[str, Any]:
  """An error in the API's format."""
  return {"error": {"message": message, "type": "invalid_request_error"}}


class Server(http.server.ThreadingHTTPServer):
  """An HTTP server of an engine.

  Use it as a context manager, which closes it, and call `serve_forever`.
  """

  daemon_threads = True
  # Connections that can wait while a request is being answered.
  request_queue_size = 128

  def __init__(self, engine: Engine, host: str = "127.0.0.1", port: int = 0):
    """Starts listening.

    Args:
      engine: Answers the requests.
      host: Address to listen on; by default, only this machine can connect.
      port: Port to listen on; 0 picks a free one, see `url`.
    """
    super().__init__((host, port), _Handler)
    self.engine = engine

  @property
  def url(self) -> str:
    """The server's address, `http://host:port`."""
    return f"http://{self.server_address[0]!s}:{self.server_address[1]}"
