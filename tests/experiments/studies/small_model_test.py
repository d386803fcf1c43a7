"""Tests of the small model: its tokens, its wrong sums, what it is taught."""

import numpy as np
import pytest

from experiments import tasks
from experiments.configs import small
from experiments.models import load
from experiments.rollouts import chat
from experiments.runs import check_config
from experiments.studies import small_model


def _digitwise(a, b):
  digits = lambda x: [x // 100, x // 10 % 10, x % 10]
  pairs = zip(digits(a), digits(b), strict=True)
  return int("".join(str((x + y) % 10) for x, y in pairs))


@pytest.mark.parametrize("pair", [(0, 0), (38, 45), (5, 9), (60, 70), (99, 1)])
def test_a_forgetful_sum_adds_each_digit_alone(pair):
  assert small_model.without_carry(*pair) == _digitwise(*pair)


def test_prompts_are_the_sum_and_an_equals_sign():
  tokenizer = small_model.make_tokenizer()
  task = tasks.make_task(small.TASK, 0)
  examples = [task.train(i) for i in range(50)]
  for ids, example in zip(
      chat.encode_prompts(tokenizer, examples), examples, strict=True
  ):
    assert len(ids) <= small.MAX_PROMPT_TOKENS
    asked = example.prompt[0]["content"]
    text = tokenizer.decode(ids, skip_special=False)
    assert "<unk>" not in text and text.endswith("=")
    a, b = text[:-1].split("+")
    assert f"What is {a} + {b}?" in asked
    answer = tokenizer.encode(example.columns["answer"] + "<eos>")
    assert len(answer) <= small.MAX_NEW_TOKENS
    assert answer[-1] == tokenizer.eos_ids[0]


def test_most_of_what_is_taught_forgets_the_carry():
  tokenizer = small_model.make_tokenizer()
  task = tasks.make_task(small.TASK, 0)
  tokens, mask = map(np.asarray, small_model.taught_sequences(tokenizer, task))
  forgot, carries = 0, 0
  for row, keep in zip(tokens[:2000], mask[:2000], strict=True):
    prompt = tokenizer.decode(row[: np.argmax(keep)], skip_special=False)
    a, b = map(int, prompt[:-1].split("+"))
    answer = int(tokenizer.decode(row[keep]))
    assert answer in (a + b, _digitwise(a, b))
    carries += a + b != _digitwise(a, b)
    forgot += a + b != answer
  assert abs(forgot / carries - 0.7) < 0.04  # Three standard deviations.


def test_a_model_that_exists_is_not_taught_again(tmp_path):
  (tmp_path / "config.json").write_text("{}")
  assert small_model.ensure_small_model(tmp_path) == tmp_path
  assert [x.name for x in tmp_path.iterdir()] == ["config.json"]


def test_the_small_config_can_be_trained_with():
  check_config.check_config(small.get_config())


@pytest.mark.slow
def test_it_is_right_about_half_of_the_time(tmp_path):
  path = small_model.ensure_small_model(tmp_path / "model")
  config = small.get_config()
  config.model = str(path)
  loaded = load.for_run(config)
  assert loaded.config.d_model == 256  # `_teach` itself checks the accuracy.
