"""A small OpenAI-compatible completion server of a model.

  python -m experiments.serve --model=DIR [--port=8000]

  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \
    -d '{"model": "DIR", "prompt": "3 + 5 =", "max_tokens": 8}'

It answers one request at a time and is made for tests, and to look at a model;
vLLM and its like serve many requests faster. There is no authentication: POST
/load reads any path. Keep it on a network that you trust.
"""

from collections.abc import Mapping
import http.server
import json
import pathlib
import secrets
import sys
import threading
import time
from typing import Any

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments.models import decoder
from experiments.models.pretrained import Pretrained
from experiments.parallel import sharding
from experiments.rollouts import sampler as sampler_lib
from experiments.rollouts.sampling import Sampling
from experiments.runs import checkpoints, restore

# Fields that change what is asked for, and the value that asks for nothing.
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


class NotFound(Exception):
  """A path or a model that is not served."""


class Engine:
  """A model that answers completion requests; safe to call from threads."""

  def __init__(self, loaded: Pretrained, name: str):
    """Serves `loaded` as `name`."""
    self.name = name
    self.version = 0
    self._loaded = loaded
    self._lock = threading.Lock()

  def models(self) -> dict[str, Any]:
    """The answer to GET /v1/models."""
    config = self._loaded.config
    model = {
        "id": self.name,
        "object": "model",
        "owned_by": "logra-jax",
        "max_model_len": config.max_length,
    }
    return {"object": "list", "data": [model]}

  def load(self, body: Mapping[str, Any]) -> dict[str, Any]:
    """Takes other weights of the same architecture.

    Args:
      body: `path` as for `restore.load_any`; `version`, which is told back.

    Raises:
      ValueError: there is no such model at the path.
      FileNotFoundError: there is nothing.
    """
    if not isinstance(_field(body, "path", None), str):
      raise ValueError("path must be a directory or a file, as a string")
    dtype = self._loaded.config.param_dtype
    loaded = restore.load_any(body["path"], dtype)
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
    """The answer to POST /v1/completions.

    Args:
      body: the request. `prompt` is a text, a list of token ids, or a list of
        either; of `logprobs` only whether it is there counts.

    Raises:
      NotFound: the model has another name.
      ValueError: a field cannot be served; names it.
    """
    model = _field(body, "model", self.name)
    if model != self.name:
      raise NotFound(f"no model {model!r} is served here, only {self.name!r}")
    for name, nothing in _UNSUPPORTED.items():
      if _field(body, name, nothing) != nothing:
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

  def _prompts(self, body):
    """Token ids of each prompt."""
    prompt = _field(body, "prompt", None)
    single = isinstance(prompt, str) or (
        isinstance(prompt, list) and prompt and isinstance(prompt[0], int)
    )
    prompts = [prompt] if single else prompt
    if not isinstance(prompts, list) or not prompts:
      raise ValueError("prompt must be a text, token ids, or a list of either")
    return [self._encode(one) for one in prompts]

  def _encode(self, prompt):
    """Token ids of one prompt."""
    if isinstance(prompt, str):
      prompt = self._loaded.tokenizer.encode(prompt, add_special=True)
    limit = self._loaded.config.vocab_size
    if not isinstance(prompt, list) or not all(
        isinstance(i, int) and 0 <= i < limit for i in prompt
    ):
      raise ValueError(f"prompt must be a text or ids below {limit}")
    return prompt


def _sampling(body):
  """What a request asks of the sampler."""
  stop = _field(body, "stop", ())
  return Sampling(
      max_new_tokens=_field(body, "max_tokens", 16),
      min_new_tokens=_field(body, "min_tokens", 0),
      temperature=_field(body, "temperature", 1.0),
      # -1 is how some servers write that there is no limit.
      top_k=max(0, _field(body, "top_k", 0)),
      top_p=_field(body, "top_p", 1.0),
      stop=(stop,) if isinstance(stop, str) else tuple(stop),
  )


def _sample(loaded, prompts, key, sampling, n):
  """A rollout of all prompts, padded to few lengths: each is compiled."""
  longest = max(map(len, prompts))
  room = loaded.config.max_length - sampling.max_new_tokens
  if longest > room:
    raise ValueError(
        f"a prompt of {longest} tokens and max_tokens="
        f"{sampling.max_new_tokens} exceed the context of"
        f" {loaded.config.max_length} tokens"
    )
  sampler = sampler_lib.LocalSampler(
      decoder.Decoder(loaded.config),
      loaded.params,
      loaded.tokenizer,
      max_prompt_tokens=min(room, max(16, 1 << (longest - 1).bit_length())),
  )
  rollout = sampler.sample(prompts, key, sampling, group_size=n)
  return sharding.fetch(rollout)


def _choice(loaded, rollout, row, prompt, body, sampling):
  """One response as the API writes it."""
  mask = np.asarray(rollout.completion_mask[row])
  ids = rollout.tokens[row][mask].tolist()
  log_probs = rollout.log_probs[row][mask].tolist()
  text = loaded.tokenizer.decode(ids)
  # The text ends before a stop string, the ids and log-probs after it.
  found = [text.find(s) for s in sampling.stop if s in text]
  choice = {
      "index": row,
      "text": text[: min(found)] if found else text,
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


def _field(body, name, default):
  """A field of a request; one that is null is not there."""
  return default if name not in body or body[name] is None else body[name]


class _Handler(http.server.BaseHTTPRequestHandler):
  """JSON over HTTP."""

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

  def _answer(self, routes, args):
    """Runs what a path stands for."""
    if self.path not in routes:
      self._send(404, _error(f"no {self.path}; there is {', '.join(routes)}"))
      return
    try:
      self._send(200, routes[self.path](*args))
    except NotFound as error:
      self._send(404, _error(str(error)))
    except (ValueError, TypeError, OSError) as error:
      self._send(400, _error(str(error)))
    except Exception as error:  # The client is told; the server goes on.
      self._send(500, _error(f"{type(error).__name__}: {error}"))
      raise

  def _send(self, status, content):
    data = json.dumps(content).encode()
    self.send_response(status)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, format: str, *args: Any) -> None:
    """Leaves out the line for every request."""


def _error(message):
  """An error in the API's form."""
  return {"error": {"message": message, "type": "invalid_request_error"}}


class Server(http.server.ThreadingHTTPServer):
  """Serves an engine; `with` closes it, `serve_forever` runs it."""

  daemon_threads = True
  # Clients that come while a request is answered.
  request_queue_size = 128

  def __init__(self, engine: Engine, host: str = "127.0.0.1", port: int = 0):
    """Listens.

    Args:
      engine: what answers.
      host: address; only this machine's by default.
      port: 0 takes a free one; see `url`.
    """
    super().__init__((host, port), _Handler)
    self.engine = engine

  @property
  def url(self) -> str:
    """`http://host:port`."""
    return f"http://{self.server_address[0]!s}:{self.server_address[1]}"


def main(names: flags.FlagValues) -> None:
  try:
    loaded = restore.load_any(names.model)
    name = names.name or pathlib.Path(names.model).absolute().name
    server = Server(Engine(loaded, name), names.host, names.port)
  except (
      ValueError,
      OSError,
      ImportError,
      checkpoints.CheckpointError,
  ) as error:
    sys.exit(f"error: {error}")
  with server:
    print(f"{name} at {server.url}/v1/completions; Ctrl-C ends", flush=True)
    try:
      server.serve_forever()
    except KeyboardInterrupt:
      print()


if __name__ == "__main__":
  flags.DEFINE_string("model", None, "HF directory, GGUF file, or a run.")
  flags.DEFINE_string("name", None, "In requests; else the path's last part.")
  flags.DEFINE_string("host", "127.0.0.1", "Address to listen at.")
  flags.DEFINE_integer("port", 8000, "Port to listen at.")
  flags.mark_flag_as_required("model")
  app.run(lambda argv: main(flags.FLAGS))
