"""Samples from an OpenAI-compatible completion server, such as vLLM's.

The server must take prompts as token ids and return token ids and log-probs.
vLLM (0.10.2 and later) does, when started with

  vllm serve HF_DIR --logprobs-mode processed_logprobs

without which its log-probs are not those of the temperature and truncation that
it samples with. `python -m experiments.serve` does as well.
"""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import http.client
import json
import pathlib
import time
from typing import Any
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models import hf, lora
from experiments.models.config import DecoderConfig
from experiments.models.tokenizer import Tokenizer
from experiments.rollouts import generate as generate_lib
from experiments.rollouts.rollout import Rollout
from experiments.rollouts.sampling import Sampling

PyTree = Any

# Failures of a server that may pass: too many requests, and its own.
_PASSING = (408, 429, 500, 502, 503, 504)
_TOKEN_ID = "token_id:"


class OpenAISampler:
  """A `Sampler` whose engine is a server; see the module's text.

  A prompt's responses are one request; several requests wait at a time. The
  server keeps its weights unless `sync` hands it new ones: how far it then lags
  behind shows in the log-probs of its responses.
  """

  def __init__(
      self,
      url: str,
      model: str | None,
      tokenizer: Tokenizer,
      *,
      max_prompt_tokens: int,
      sync: Callable[[PyTree, int], None] | None = None,
      concurrency: int = 32,
      timeout: float = 600.0,
      tries: int = 5,
      backoff: float = 0.5,
  ):
    """Asks the server for its models.

    Args:
      url: `http://host:port`.
      model: the name that the server gives the model; None takes the only one.
      tokenizer: the model's; the server's must have the same ids.
      max_prompt_tokens: longest prompt.
      sync: called with the parameters and the number of updates by
        `update_weights`, for example what `sync_by_directory` returns.
      concurrency: requests that wait at a time.
      timeout: seconds that one request may take.
      tries: of each request, at least 1; a passing failure is tried again.
      backoff: seconds before the second try, doubled before each further one.

    Raises:
      ConnectionError: no server answers.
      ValueError: an argument is out of range, or the server does not know the
        model; lists those that it knows.
    """
    if concurrency < 1 or tries < 1:
      raise ValueError(
          f"concurrency={concurrency} and tries={tries} must be at least 1"
      )
    self.max_prompt_tokens = max_prompt_tokens
    self._server = _Server(url, timeout, tries, backoff)
    self._tokenizer = tokenizer
    self._sync = sync
    self._concurrency = concurrency
    known = [m["id"] for m in self._server.call("/v1/models")["data"]]
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
    """See `Sampler`; log-probs are as the server reports them.

    Raises:
      ConnectionError: the server does not answer, after all tries.
      ValueError: it refuses the request, or its answer lacks log-probs, token
        ids or responses.
    """
    tokens, valid = generate_lib.pad_prompts(
        prompts, self.max_prompt_tokens, self._tokenizer.pad_id
    )
    seeds = np.asarray(jax.random.bits(key, (len(prompts),))) >> 1

    def ask(prompt, seed):
      body = self._body(prompt, int(seed), sampling, group_size)
      answer = self._server.call("/v1/completions", body)
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

  def update_weights(self, params: PyTree, version: int) -> None:
    """See `Sampler`; without `sync` the server keeps the weights it has."""
    if self._sync is not None:
      self._sync(params, version)

  def _body(self, prompt, seed, sampling, group_size):
    """A request; what is at its default stays out of it."""
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
        # Two ways to learn the ids; servers know the one or the other.
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    optional = {
        "top_k": sampling.top_k,
        "min_tokens": sampling.min_new_tokens,
        "stop": list(sampling.stop),
    }
    return body | {name: value for name, value in optional.items() if value}

  def _read(self, answer, sampling, group_size):
    """(ids, log-probs, finished) of each response of a request."""
    if "choices" not in answer:
      raise ValueError(f"the server's answer has no choices: {answer!r:.200}")
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if len(choices) != group_size:
      raise ValueError(
          f"the server sent {len(choices)} responses, asked for {group_size}"
      )
    return [self._read_one(choice, sampling) for choice in choices]

  def _read_one(self, choice, sampling):
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
          f" {self._tokenizer.vocab_size}: it serves another model"
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
    return ids, log_probs, reason == "stop"


def sync_by_directory(
    url: str,
    directory: str | pathlib.Path,
    config: DecoderConfig,
    tokenizer: Tokenizer,
) -> Callable[[PyTree, int], None]:
  """A `sync` for `experiments.serve` on a file system that both see.

  Args:
    url: of the server.
    directory: a Hugging Face directory that each call writes anew.
    config: of the model.
    tokenizer: of the model.

  Returns:
    A function that writes the parameters, adapters merged, and has the server
    load them.
  """
  server = _Server(url, timeout=600.0, tries=5, backoff=0.5)

  def sync(params, version):
    hf.save(directory, config, lora.merge(params), tokenizer)
    path = str(pathlib.Path(directory).absolute())
    server.call("/load", {"path": path, "version": version})

  return sync


class _Server:
  """JSON requests to one server, tried again after failures that may pass."""

  def __init__(self, url, timeout, tries, backoff):
    self._url = url.rstrip("/").removesuffix("/v1")
    self._timeout, self._tries, self._backoff = timeout, tries, backoff

  def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """The answer to a POST of `body`, or to a GET without one."""
    for attempt in range(self._tries):
      if attempt:
        time.sleep(self._backoff * 2 ** (attempt - 1))
      try:
        return self._once(path, body)
      except urllib.error.HTTPError as error:
        failure = f"HTTP {error.code}: {_message(error)}"
        if error.code not in _PASSING:
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

  def _once(self, path, body):
    """One request; refuses an answer that is not JSON."""
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


def _message(error):
  """What the server says about an error."""
  text = error.read().decode(errors="replace")
  try:
    content = json.loads(text)
    return content["error"]["message"]
  except (ValueError, LookupError, TypeError):
    return text[:500]


def _log_probs(choice):
  """Log-probs of a response's tokens."""
  found = choice["logprobs"] if "logprobs" in choice else None
  values = found["token_logprobs"] if found else None
  if values is None or None in values:
    raise ValueError(
        "the server sent no log-probs with a response: it must answer"
        " logprobs=1 of /v1/completions"
    )
  return values


def _token_ids(choice):
  """Ids of a response's tokens, by either of two extensions."""
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


def _assemble(tokens, valid, responses, max_new_tokens, pad_id):
  """A rollout of prompts `[B, P]` and their responses."""
  batch, length = tokens.shape
  shape = (batch, length + max_new_tokens)
  after = ((0, 0), (0, max_new_tokens))
  rollout = Rollout(
      tokens=np.pad(tokens, after, constant_values=pad_id),
      valid=np.pad(valid, after),
      completion_mask=np.zeros(shape, bool),
      log_probs=np.zeros(shape, np.float32),
      finished=np.array([finished for _, _, finished in responses]),
  )
  for row, (ids, log_probs, _) in enumerate(responses):
    own = slice(length, length + len(ids))
    rollout.tokens[row, own] = ids
    rollout.log_probs[row, own] = log_probs
    rollout.valid[row, own] = rollout.completion_mask[row, own] = True
  return jax.tree.map(jnp.asarray, rollout)
