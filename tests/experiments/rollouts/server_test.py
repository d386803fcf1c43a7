"""Tests of the completion server through its HTTP API."""

import json
import threading
import urllib.error
import urllib.request

import pytest

from experiments.models import load, tiny
from experiments.rollouts import server as server_lib


@pytest.fixture(scope="module")
def loaded():
  return tiny.make_tiny(0)


@pytest.fixture(scope="module")
def server(loaded):
  engine = server_lib.Engine(loaded, "tiny", load.from_path)
  with server_lib.Server(engine) as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def call(server, path, body=None):
  """Status, and JSON or error message; `body` is sent as JSON unless bytes."""
  if body is not None and not isinstance(body, bytes):
    body = json.dumps(body).encode()
  request = urllib.request.Request(server.url + path, body)
  try:
    with urllib.request.urlopen(request) as answer:
      return answer.status, json.load(answer)
  except urllib.error.HTTPError as error:
    return error.code, json.load(error)["error"]["message"]


def test_a_completion_has_the_fields_of_the_api(server, loaded):
  body = {
      "model": "tiny",
      "prompt": "3 + 5",
      "max_tokens": 6,
      "temperature": 0.7,
      "seed": 5,
      "logprobs": 1,
      "return_token_ids": True,
  }
  status, answer = call(server, "/v1/completions", body)
  assert status == 200
  assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
  (choice,) = answer["choices"]
  ids, log_probs = choice["token_ids"], choice["logprobs"]
  assert choice["prompt_token_ids"] == [7, 3, 9]  # 3, + and 5.
  assert 1 <= len(ids) <= 6
  assert len(ids) == len(log_probs["token_logprobs"])
  assert choice["text"] == loaded.tokenizer.decode(ids)
  assert "".join(log_probs["tokens"]).replace("<eos>", "") == choice["text"]
  assert choice["finish_reason"] == ("stop" if ids[-1] == 1 else "length")
  assert answer["usage"] == {
      "prompt_tokens": 3,
      "completion_tokens": len(ids),
      "total_tokens": 3 + len(ids),
  }
  # The same seed and token ids as a prompt give the same response.
  body |= {"prompt": [7, 3, 9], "return_tokens_as_token_ids": True}
  del body["return_token_ids"]
  (again,) = call(server, "/v1/completions", body)[1]["choices"]
  assert again["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
  assert "token_ids" not in again
  (bare,) = call(server, "/v1/completions", body | {"logprobs": None})[1][
      "choices"
  ]
  assert bare["logprobs"] is None and bare["text"] == choice["text"]


def test_what_is_served(server):
  status, answer = call(server, "/v1/models")
  assert status == 200
  assert [model["id"] for model in answer["data"]] == ["tiny"]
  assert call(server, "/health") == (200, {})


@pytest.mark.parametrize(
    ("changes", "status", "match"),
    [
        ({"model": "big"}, 404, "no model 'big' is served here, only 'tiny'"),
        ({"stream": True}, 400, "stream=True is not supported"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty=0.5 is not"),
        ({"prompt": None}, 400, "prompt must be a text, token ids, or a list"),
        ({"prompt": []}, 400, "prompt must be a text, token ids, or a list"),
        ({"prompt": [99]}, 400, "prompt must be a text or ids below 14"),
        ({"prompt": [[1], 2.5]}, 400, "prompt must be a text or ids below 14"),
        ({"prompt": ""}, 400, "prompt 0 has 0 tokens"),
        ({"n": 0}, 400, "n must be an int of at least 1, got 0"),
        ({"max_tokens": 0}, 400, "max_new_tokens must be an int of at least 1"),
        ({"max_tokens": 63}, 400, "exceed the context of 64 tokens"),
        ({"temperature": "hot"}, 400, "temperature must be a number"),
        ({"top_p": 0}, 400, "top_p must be above 0"),
        ({"stop": [""]}, 400, "stop must hold strings that are not empty"),
        ({"seed": "x"}, 400, "seed must be an int"),
    ],
)
def test_requests_that_cannot_be_served(server, changes, status, match):
  body = {"model": "tiny", "prompt": [7, 3], "max_tokens": 4} | changes
  found, message = call(server, "/v1/completions", body)
  assert (found, match in message) == (status, True), message


def test_malformed_requests(server):
  path = "/v1/completions"
  assert call(server, path, b"{")[0] == 400
  assert call(server, path, [1]) == (400, "the body must be a JSON object")
  assert call(server, "/v1/chat", {})[0] == 404
  assert "there is /v1/models" in call(server, "/")[1]


def test_weights_that_cannot_be_loaded(server, tmp_path):
  assert "path must be" in call(server, "/load", {})[1]
  path = str(tmp_path / "nothing")
  assert "no model at" in call(server, "/load", {"path": path})[1]
  assert server.engine.version == 0
