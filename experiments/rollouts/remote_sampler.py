"""Samples from an OpenAI-compatible completion server, such as vLLM.

The server must accept prompts as token ids and return token ids and log-probs.
`python -m experiments.serve` does, and so does vLLM (0.10.2 and later) if it is
started with

  vllm serve HF_DIR --logprobs-mode processed_logprobs

Without this flag, its log-probs ignore the temperature and truncation that it
samples with.
"""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import http.client
import json
import pathlib
import time
from typing import Any, NamedTuple
import urllib.error
import urllib.request

import chex
import jax
import jax.numpy as jnp
import numpy as np

from experiments.models import hf, lora
from experiments.models.config import DecoderConfig
from experiments.models.tokenizer import Tokenizer
from experiments.rollouts import generate as generate_lib
from experiments.rollouts.rollout import Rollout
from experiments.rollouts.sampling import Sampling

# HTTP codes of temporary failures: timeouts, too many requests, server errors.
_TEMPORARY = (408, 429, 500, 502, 503, 504)
_TOKEN_ID = "token_id:"


class _Response(NamedTuple):
  """One response of a server."""

  ids: list[int]
  log_probs: list[float]
  finished: bool


class OpenAISampler:
  """A `Sampler` that asks a completion server; see the module docstring.

  Each prompt is one request for all its responses, and several requests run at
  a time. The server keeps its weights unless `sync` gives it new ones; the
  log-probs of its responses then show how far it lags behind.
  """

  def __init__(
      self,
      url: str,
      model: str | None,
      tokenizer: Tokenizer,
      *,
      max_prompt_tokens: int,
      sync: Callable[[chex.ArrayTree, int], None] | None = None,
      concurrency: int = 32,
      timeout: float = 600.0,
      tries: int = 5,
      backoff: float = 0.5,
  ):
    """Connects to a server and checks that it serves the model.

    Args:
      url: The server's address, `http://host:port`.
      model: The model's name on the server; None takes the only one.
      tokenizer: The tokenizer of the model; the server's must have the same
        ids.
      max_prompt_tokens: Longest prompt allowed, in tokens.
      sync: Called by `update_weights` with the parameters and the number of
        updates; for example the result of `sync_by_directory`.
      concurrency: Number of requests that run at a time.
      timeout: Most seconds that one request may take.
      tries: How often a request is tried, at least once; only temporary
        failures are tried again.
      backoff: Seconds before the second try; doubled before each further one.

    Raises:
      ConnectionError: If no server answers.
      ValueError: If an argument is out of range or the server does not serve
        the model; lists the models that it serves.
    """
    if concurrency < 1 or tries < 1:
      raise ValueError(
          f"concurrency={concurrency} and tries={tries} must be at least 1"
      )
    self.max_prompt_tokens = max_prompt_tokens
    self._client = _Client(url, timeout, tries, backoff)
    self._tokenizer = tokenizer
    self._sync = sync
    self._concurrency = concurrency
    known = [m["id"] for m in self._client.call("/v1/models")["data"]]
    if model is None and len(known) == 1:
      model = known[0]
    self._model = model
    if model not in known:
      raise ValueError(
          f"the server at {url} has no model {model!r}, only"
          f" {', '.join(map(repr, known))}"
      )

  def sample(
      self,
      prompts: Sequence[Sequence[int]],
      key: jax.Array,
      sampling: Sampling,
      *,
      group_size: int = 1,
  ) -> Rollout:
    """See `Sampler.sample`. Log-probs are as the server reports them.

    Raises:
      ConnectionError: If the server does not answer after all tries.
      ValueError: If it refuses a request, or its answer lacks log-probs, token
        ids or responses.
    """
    tokens, valid = generate_lib.pad_prompts(
        prompts, self.max_prompt_tokens, self._tokenizer.pad_id
    )
    seeds = np.asarray(jax.random.bits(key, (len(prompts),))) >> 1

    def ask(prompt: Sequence[int], seed: int) -> list[_Response]:
      body = self._body(prompt, int(seed), sampling, group_size)
      answer = self._client.call("/v1/completions", body)
      return self._read(answer, sampling, group_size)

    with concurrent.futures.ThreadPoolExecutor(self._concurrency) as pool:
      groups = list(pool.map(ask, prompts, seeds))
    return _assemble(
        np.repeat(tokens, group_size, axis=0),
        np.repeat(valid, group_size, axis=0),
        [response for group in groups for response in group],
        sampling.max_new_tokens,
        self._tokenizer.pad_id,
    )

  def update_weights(self, params: chex.ArrayTree, version: int) -> None:
    """See `Sampler.update_weights`. Without `sync` it does nothing."""
    if self._sync is not None:
      self._sync(params, version)

  def _body(
      self,
      prompt: Sequence[int],
      seed: int,
      sampling: Sampling,
      group_size: int,
  ) -> dict[str, Any]:
    """A request; leaves out options that are at their default."""
    body = {
        "model": self._model,
        "prompt": [int(i) for i in prompt],
        "n": group_size,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": seed,
        "logprobs": 1,
        "stop_token_ids": list(self._tokenizer.eos_ids),
        # Two ways to ask for token ids; servers support one or the other.
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    optional = {
        "top_k": sampling.top_k,
        "min_tokens": sampling.min_new_tokens,
        "stop": list(sampling.stop),
    }
    return body | {name: value for name, value in optional.items() if value}

  def _read(
      self, answer: Mapping[str, Any], sampling: Sampling, group_size: int
  ) -> list[_Response]:
    """Checks the answer to a request and returns its responses in order."""
    if "choices" not in answer:
      raise ValueError(f"the server's answer has no choices: {answer!r:.200}")
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if len(choices) != group_size:
      raise ValueError(
          f"the server sent {len(choices)} responses, asked for {group_size}"
      )
    return [self._read_one(choice, sampling) for choice in choices]

  def _read_one(
      self, choice: Mapping[str, Any], sampling: Sampling
  ) -> _Response:
    """Checks and returns one response."""
    log_probs = _log_probs(choice)
    ids = _token_ids(choice)
    if len(ids) != len(log_probs) or len(ids) > sampling.max_new_tokens:
      raise ValueError(
          f"the server sent {len(ids)} tokens and {len(log_probs)} log-probs"
          f" of a response of at most {sampling.max_new_tokens}"
      )
    if ids and not 0 <= min(ids) <= max(ids) < self._tokenizer.vocab_size:
      raise ValueError(
          f"the server sent token {max(ids)}, our tokenizer has"
          f" {self._tokenizer.vocab_size} ids: it serves another model"
      )
    reason = choice["finish_reason"]
    if reason not in ("stop", "length"):
      raise ValueError(f"the server ended a response for reason {reason!r}")
    ended = ids and ids[-1] in self._tokenizer.eos_ids
    if reason == "stop" and not sampling.stop and not ended:
      raise ValueError(
          f"the server ended a response by token {ids[-1] if ids else None},"
          f" which is none of our end-of-turn tokens {self._tokenizer.eos_ids}:"
          " it has others, or leaves them out"
      )
    return _Response(ids, log_probs, reason == "stop")


def sync_by_directory(
    url: str,
    directory: str | pathlib.Path,
    config: DecoderConfig,
    tokenizer: Tokenizer,
) -> Callable[[chex.ArrayTree, int], None]:
  """Makes a `sync` that passes weights to `experiments.serve` in a directory.

  Args:
    url: The server's address.
    directory: A Hugging Face directory that the server can read; every call
      overwrites it.
    config: Configuration of the model.
    tokenizer: The tokenizer of the model.

  Returns:
    A function that writes the parameters, with adapters merged, and makes the
    server load them.
  """
  client = _Client(url, timeout=600.0, tries=5, backoff=0.5)

  def sync(params: chex.ArrayTree, version: int) -> None:
    hf.save(directory, config, lora.merge(params), tokenizer)
    path = str(pathlib.Path(directory).absolute())
    client.call("/load", {"path": path, "version": version})

  return sync


class _Client:
  """Sends JSON requests to a server and retries after temporary failures."""

  def __init__(self, url: str, timeout: float, tries: int, backoff: float):
    self._url = url.rstrip("/").removesuffix("/v1")
    self._timeout, self._tries, self._backoff = timeout, tries, backoff

  def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Returns the answer to a POST of `body`, or to a GET if it is None."""
    for attempt in range(self._tries):
      if attempt:
        time.sleep(self._backoff * 2 ** (attempt - 1))
      try:
        return self._once(path, body)
      except urllib.error.HTTPError as error:
        failure = f"HTTP {error.code}: {_message(error)}"
        if error.code not in _TEMPORARY:
          raise ValueError(
              f"{self._url}{path} refuses the request: {failure}"
          ) from error
      except (OSError, http.client.HTTPException) as error:
        failure = str(error) or type(error).__name__
    raise ConnectionError(
        f"{self._url}{path} does not answer after {self._tries} tries"
        f" ({failure}); start a server, for example"
        " python -m experiments.serve --model=DIR"
    )

  def _once(self, path: str, body: Mapping[str, Any] | None) -> Any:
    """Sends one request; refuses an answer that is not JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        self._url + path, data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=self._timeout) as answer:
      text = answer.read()
    try:
      return json.loads(text)
    except ValueError as error:
      raise ValueError(
          f"{self._url}{path} does not answer in JSON, but {text[:80]!r}: it is"
          " no completion server"
      ) from error


def _message(error: urllib.error.HTTPError) -> str:
  """The error message in the server's answer, or else the answer itself."""
  text = error.read().decode(errors="replace")
  try:
    content = json.loads(text)
    return content["error"]["message"]
  except (ValueError, LookupError, TypeError):
    return text[:500]


def _log_probs(choice: Mapping[str, Any]) -> list[float]:
  """Log-probs of a response's tokens."""
  log_probs = choice["logprobs"] if "logprobs" in choice else None
  values = log_probs["token_logprobs"] if log_probs else None
  if values is None or None in values:
    raise ValueError(
        "the server sent no log-probs with a response: it must answer"
        " logprobs=1 of /v1/completions"
    )
  return values


def _token_ids(choice: Mapping[str, Any]) -> list[int]:
  """Ids of a response's tokens, from either of two extensions of the API."""
  if "token_ids" in choice and choice["token_ids"] is not None:
    return choice["token_ids"]
  tokens = choice["logprobs"]["tokens"] or []
  if not all(token.startswith(_TOKEN_ID) for token in tokens):
    raise ValueError(
        f"the server sent text ({choice['text'][:40]!r}) but no token ids, and"
        " one text may be several lists of ids: it must know return_token_ids"
        " or return_tokens_as_token_ids, as vLLM does"
    )
  return [int(token.removeprefix(_TOKEN_ID)) for token in tokens]


def _assemble(
    tokens: np.ndarray,
    valid: np.ndarray,
    responses: Sequence[_Response],
    max_new_tokens: int,
    pad_id: int,
) -> Rollout:
  """Makes a rollout of prompts `[B, P]` and their B responses."""
  length = tokens.shape[1]
  after = ((0, 0), (0, max_new_tokens))
  tokens = np.pad(tokens, after, constant_values=pad_id)
  valid = np.pad(valid, after)
  mask = np.zeros(tokens.shape, bool)
  log_probs = np.zeros(tokens.shape, np.float32)
  for row, response in enumerate(responses):
    own = slice(length, length + len(response.ids))
    tokens[row, own] = response.ids
    log_probs[row, own] = response.log_probs
    valid[row, own] = mask[row, own] = True
  return Rollout(
      tokens=jnp.asarray(tokens),
      valid=jnp.asarray(valid),
      completion_mask=jnp.asarray(mask),
      log_probs=jnp.asarray(log_probs),
      finished=jnp.asarray([response.finished for response in responses]),
  )
