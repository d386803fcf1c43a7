"""Tests of the client of a server, against sampling in this process."""

import contextlib
import http.server
import json
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import decoder, load, tiny
from experiments.rollouts import remote_sampler
from experiments.rollouts import sampler as sampler_lib
from experiments.rollouts import server as server_lib
from experiments.rollouts.sampling import Sampling

# The server pads these prompts to the same length: all share one program.
LENGTH, NEW = 16, 6
SAMPLING = Sampling(max_new_tokens=NEW, temperature=0.7)
PROMPTS = [[7, 3, 9], [5], [4, 4, 4, 3, 8]]


@contextlib.contextmanager
def running(server):
  """Runs a server in a thread."""
  thread = threading.Thread(target=server.serve_forever, args=(0.01,))
  with server:
    thread.start()
    try:
      yield server
    finally:
      server.shutdown()
      thread.join()


@pytest.fixture(scope="module")
def loaded():
  return tiny.make_tiny(0)


@pytest.fixture(scope="module")
def server(loaded):
  with running(make_server(loaded)) as server:
    yield server


def make_server(loaded):
  engine = server_lib.Engine(loaded, "tiny", load.from_path)
  return server_lib.Server(engine)


def make_local(loaded):
  return sampler_lib.LocalSampler(
      decoder.Decoder(loaded.config),
      loaded.params,
      loaded.tokenizer,
      max_prompt_tokens=LENGTH,
  )


def make_client(url, tokenizer, **options):
  options = {"max_prompt_tokens": LENGTH, "backoff": 0.01, **options}
  return remote_sampler.OpenAISampler(url, None, tokenizer, **options)


def sample_local(sampler, key, sampling, group_size=1):
  """Samples one prompt at a time, with the seeds that the client sends."""
  seeds = np.asarray(jax.random.bits(key, (len(PROMPTS),))) >> 1
  rollouts = [
      sampler.sample(
          [prompt], jax.random.key(seed), sampling, group_size=group_size
      )
      for prompt, seed in zip(PROMPTS, seeds, strict=True)
  ]
  return jax.tree.map(lambda *rows: jnp.concatenate(rows), *rollouts)


def test_samples_of_the_same_seed_are_those_of_this_process(server, loaded):
  """Their log-probs are also those of a forward pass without a cache."""
  client = make_client(server.url, loaded.tokenizer, concurrency=2)
  key = jax.random.key(3)
  theirs = client.sample(PROMPTS, key, SAMPLING)
  ours = sample_local(make_local(loaded), key, SAMPLING)
  chex.assert_trees_all_close(theirs, ours, atol=1e-6)
  chex.assert_trees_all_equal_shapes_and_dtypes(theirs, ours)
  logits = decoder.Decoder(loaded.config).apply(
      {"params": loaded.params}, theirs.tokens, theirs.valid
  )
  scores = jax.nn.log_softmax(logits[:, :-1] / 0.7)
  found = jnp.take_along_axis(scores, theirs.tokens[:, 1:, None], axis=-1)
  mask = theirs.completion_mask[:, 1:]
  np.testing.assert_allclose(
      jnp.where(mask, found[..., 0], 0), theirs.log_probs[:, 1:], atol=1e-5
  )
  assert mask.sum() > len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"top_k": 3, "top_p": 0.9, "min_new_tokens": 3},
        {"stop": ("7", "+")},
    ],
)
def test_every_option_reaches_the_server(server, loaded, options):
  client = make_client(server.url, loaded.tokenizer)
  sampling = Sampling(max_new_tokens=12, **options)
  key = jax.random.key(1)
  theirs = client.sample(PROMPTS, key, sampling, group_size=3)
  ours = sample_local(make_local(loaded), key, sampling, group_size=3)
  chex.assert_trees_all_close(theirs, ours, atol=1e-6)
  plain = Sampling(max_new_tokens=12)
  other = client.sample(PROMPTS, key, plain, group_size=3)
  assert (other.tokens != theirs.tokens).any()


def test_new_weights_reach_the_server(loaded, tmp_path):
  other = tiny.make_tiny(5)
  key = jax.random.key(0)
  with running(make_server(loaded)) as server:
    sync = remote_sampler.sync_by_directory(
        server.url, tmp_path / "hf", loaded.config, loaded.tokenizer
    )
    client = make_client(server.url, loaded.tokenizer, sync=sync)
    before = client.sample(PROMPTS, key, SAMPLING)
    client.update_weights(other.params, 7)
    after = client.sample(PROMPTS, key, SAMPLING)
    assert server.engine.version == 7
  local = make_local(loaded)
  local.update_weights(other.params, 7)
  expected = sample_local(local, key, SAMPLING)
  np.testing.assert_array_equal(after.tokens, expected.tokens)
  assert (before.tokens != after.tokens).any()
  # Without `sync` the server keeps its weights.
  with running(make_server(loaded)) as server:
    client = make_client(server.url, loaded.tokenizer)
    client.update_weights(other.params, 1)
    kept = client.sample(PROMPTS, key, SAMPLING)
  np.testing.assert_array_equal(kept.tokens, before.tokens)


def test_no_server(loaded):
  with pytest.raises(
      ConnectionError, match=r"not answer after 2 tries.*refuse"
  ):
    make_client("http://127.0.0.1:9", loaded.tokenizer, tries=2)


def test_a_model_that_is_not_served(server, loaded):
  with pytest.raises(ValueError, match="no model 'big', only 'tiny'"):
    remote_sampler.OpenAISampler(
        server.url, "big", loaded.tokenizer, max_prompt_tokens=LENGTH
    )


def test_a_refused_request_says_why_at_once(server, loaded):
  client = make_client(server.url, loaded.tokenizer, backoff=100.0)
  match = "HTTP 400: .*exceed the context of 64 tokens"
  with pytest.raises(ValueError, match=match):
    client.sample([[5]], jax.random.key(0), Sampling(max_new_tokens=64))
  with pytest.raises(ValueError, match="prompt 1 has 17 tokens"):
    client.sample(
        [[5], [5] * 17], jax.random.key(0), Sampling(max_new_tokens=2)
    )


def scripted(*answers):
  """A server that answers POST requests with these (status, JSON) pairs."""
  waiting = list(answers)

  class Handler(http.server.BaseHTTPRequestHandler):

    def do_GET(self):
      self.reply(200, {"data": [{"id": "tiny"}]})

    def do_POST(self):
      self.rfile.read(int(self.headers["Content-Length"]))
      self.reply(*waiting.pop(0))

    def reply(self, status, content):
      self.send_response(status)
      self.end_headers()
      self.wfile.write(json.dumps(content).encode())

    def log_message(self, format, *args):
      pass

  return running(http.server.HTTPServer(("127.0.0.1", 0), Handler))


def choice(**changes):
  log_probs = {"token_logprobs": [-1.0, -2.0], "tokens": ["8", "<eos>"]}
  fields = {
      "index": 0,
      "text": "8",
      "finish_reason": "stop",
      "logprobs": log_probs,
      "token_ids": [12, 1],
  }
  return {"choices": [fields | changes]}


def ask(tokenizer, *answers, group_size=1, **options):
  """Samples one prompt from a server with scripted answers."""
  with scripted(*answers) as server:
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    client = make_client(url, tokenizer, **options)
    sampling = Sampling(max_new_tokens=4)
    return client.sample(
        [[5]], jax.random.key(0), sampling, group_size=group_size
    )


def test_either_form_of_token_ids_is_read(loaded):
  by_name = {
      "token_logprobs": [-1, -2],
      "tokens": ["token_id:12", "token_id:1"],
  }
  for answer in (choice(), choice(token_ids=None, logprobs=by_name)):
    rollout = ask(loaded.tokenizer, (200, answer))
    mask = np.asarray(rollout.completion_mask[0])
    assert rollout.tokens[0][mask].tolist() == [12, 1]
    assert rollout.log_probs[0][mask].tolist() == [-1.0, -2.0]
    assert mask.tolist() == [False] * LENGTH + [True, True, False, False]
    assert rollout.valid[0].tolist() == [False] * 15 + [True] * 3 + [False] * 2
    assert rollout.finished.tolist() == [True]


def test_responses_are_put_in_order(loaded):
  (second,) = choice(index=1)["choices"]
  (first,) = choice(token_ids=[9, 1])["choices"]
  answer = (200, {"choices": [second, first]})
  rollout = ask(loaded.tokenizer, answer, group_size=2)
  assert rollout.tokens[:, LENGTH].tolist() == [9, 12]


def test_a_response_that_was_cut_and_one_without_tokens(loaded):
  nothing = {"token_logprobs": [], "tokens": []}
  empty = choice(token_ids=[], logprobs=nothing, finish_reason="length")
  rollout = ask(loaded.tokenizer, (200, empty))
  assert not rollout.completion_mask.any() and not rollout.finished.any()


def test_passing_failures_are_tried_again(loaded):
  busy = (503, {"error": {"message": "loading"}})
  rollout = ask(loaded.tokenizer, busy, busy, (200, choice()), tries=3)
  assert rollout.finished.tolist() == [True]
  with pytest.raises(ConnectionError, match=r"2 tries .HTTP 503: loading."):
    ask(loaded.tokenizer, busy, busy, tries=2)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (choice(logprobs=None), "no log-probs with a response"),
        (choice(token_ids=None), "sent text .'8'. but no token ids"),
        (choice(token_ids=[12]), "1 tokens and 2 log-probs"),
        (choice(token_ids=[12, 99]), "sent token 99, our tokenizer has 14"),
        (choice(finish_reason="abort"), "for reason 'abort'"),
        (choice(token_ids=[12, 13]), "by token 13, which is none of our end"),
        ({"choices": []}, "sent 0 responses, asked for 1"),
        ({"text": "hi"}, "answer has no choices"),
    ],
)
def test_answers_that_cannot_be_trained_on(loaded, answer, match):
  with pytest.raises(ValueError, match=match):
    ask(loaded.tokenizer, (200, answer))


def test_a_server_of_something_else(loaded):
  class Page(http.server.BaseHTTPRequestHandler):

    def do_GET(self):
      self.send_response(200)
      self.end_headers()
      self.wfile.write(b"<html>")

    def log_message(self, format, *args):
      pass

  with running(http.server.HTTPServer(("127.0.0.1", 0), Page)) as server:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    with pytest.raises(ValueError, match="it is no completion server"):
      make_client(url, loaded.tokenizer)
