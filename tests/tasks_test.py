"""Tests of prompts by index and of verifiable rewards."""

import decimal
import json
import re

import numpy as np
import pytest

from experiments import tasks


def _content(example):
  return example.prompt[-1]["content"]


def _write(path, rows):
  path.write_text("\n".join(rows) + "\n", encoding="utf-8")
  return f"jsonl:{path}"


def _row(prompt, answer):
  return json.dumps({"prompt": prompt, "answer": answer})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8", "8"),
        ("3 + 5 = 8.", "8"),
        ("**8**", "8"),
        ("The answer is 8\n", "8"),
        ("8.0", "8"),
        ("8.5", "8.5"),
        ("-8", "-8"),
        ("=-8", "-8"),
        ("3-8", "8"),
        ("1,024", "1024"),
        ("7,8", "8"),
        ("1 2 3 4 5 6 7 8 9", "9"),
        ("8 is wrong, it is 9", "9"),
    ],
)
def test_last_number(text, number):
  assert tasks.last_number(text) == decimal.Decimal(number)


@pytest.mark.parametrize("text", ["", "eight", "x8", "٨", "<|im_end|>"])
def test_no_number(text):
  assert tasks.last_number(text) is None


def test_addition_rewards_the_sum():
  task = tasks.make_task("addition", 0)
  for example in task.heldout():
    right = example.columns["answer"]
    wrong = str(int(right) + 1)
    # A response that lists all candidates makes one guess, the last.
    everything = " ".join(map(str, range(19))) + " 19"
    completions = [right, f"It is {right}.", wrong, "", everything]
    rewards = tasks.checked_rewards(task, [example] * 5, completions)
    np.testing.assert_array_equal(rewards, [1, 1, 0, 0, 0])
    assert rewards.dtype == np.float32


def test_addition_asks_what_it_scores():
  task = tasks.make_task("addition", 3)
  for index in range(50):
    example = task.train(index)
    left, right = _content(example).split("?")[0].split(" + ")
    total = int(left.split()[-1]) + int(right)
    assert example.columns == {"answer": str(total)}


def test_addition_split_is_disjoint_and_complete():
  task = tasks.make_task("addition", 0)
  held = {_content(x) for x in task.heldout()}
  train = {_content(task.train(i)) for i in range(100 - len(held))}
  # One pass shows every training pair once.
  assert len(train) + len(held) == 100
  assert not train & held
  later = {_content(task.train(i)) for i in range(1000)}
  assert later == train


def test_addition_holds_out_both_orders():
  held = {_content(x) for x in tasks.make_task("addition", 0).heldout()}
  assert 15 <= len(held) <= 25
  for content in held:
    head, tail = content.split(" + ")
    *words, a = head.split()
    b, rest = tail.split("?")
    assert f"{' '.join(words)} {b} + {a}?{rest}" in held


@pytest.mark.parametrize("name", ["addition", "reasoning_gym:chain_sum"])
def test_examples_are_a_function_of_seed_and_index(name):
  if name != "addition":
    pytest.importorskip("reasoning_gym")
  first, second = (tasks.make_task(name, 5) for _ in range(2))
  forward = [first.train(i) for i in range(30)]
  backward = [second.train(i) for i in reversed(range(30))]
  assert forward == backward[::-1]
  other = tasks.make_task(name, 6)
  assert [other.train(i) for i in range(30)] != forward
  assert other.heldout() == first.heldout()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("adition", "'addition'"),
        ("reasoning-gym:chain_sum", "unknown task"),
        ("poetry", "known: addition, jsonl, reasoning_gym"),
    ],
)
def test_unknown_task_names_the_nearest(name, near):
  with pytest.raises(ValueError, match=near):
    tasks.make_task(name, 0)


@pytest.mark.parametrize("digits", ["easy", "0", "4"])
def test_addition_of_so_many_digits(digits):
  with pytest.raises(ValueError, match=f"'addition:{digits}'.*1, 2 or 3"):
    tasks.make_task(f"addition:{digits}", 0)


def test_addition_of_two_digits():
  task = tasks.make_task("addition:2", 0)
  pairs = [
      tuple(map(int, re.findall("[0-9]+", _content(x)))) for x in task.heldout()
  ]
  assert len(set(pairs)) == len(pairs)
  assert {(b, a) for a, b in pairs} == set(pairs)
  assert 0.15 < len(pairs) / 100**2 < 0.25
  # The first of them, which may be all that is evaluated, are like the rest.
  assert abs(np.mean(pairs[:200]) - np.mean(pairs)) < 4
  first = {_content(task.train(i)) for i in range(8000)}
  assert not first & {_content(x) for x in task.heldout()}


@pytest.mark.parametrize("name", ["jsonl", "reasoning_gym:"])
def test_task_with_a_wrong_argument(name):
  with pytest.raises(ValueError, match=f"task must be '.*', got '{name}'"):
    tasks.make_task(name, 0)


def test_negative_index():
  with pytest.raises(ValueError, match="at least 0, got -1"):
    tasks.make_task("addition", 0).train(-1)


class _Scored(tasks.Addition):
  """Addition whose rewards a test chooses."""

  def __init__(self, rewards):
    super().__init__("1", 0)
    self.name = "scored"
    self._rewards = rewards

  def reward(self, prompts, completions, *, answer):
    del prompts, completions, answer
    return self._rewards


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_reward_that_is_not_finite(bad):
  task = _Scored([1.0, bad])
  examples = task.heldout()[:2]
  with pytest.raises(ValueError, match=f"'scored' .*{bad} at index 1.*'b'"):
    tasks.checked_rewards(task, examples, ["a", "b"])


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, 0.0, 1.0]])
def test_wrong_number_of_rewards(rewards):
  task = _Scored(rewards)
  with pytest.raises(
      ValueError, match=f"'scored' returned {len(rewards)} rewards for 2"
  ):
    tasks.checked_rewards(task, task.heldout()[:2], ["a", "b"])


def test_examples_and_completions_must_pair_up():
  task = tasks.make_task("addition", 0)
  with pytest.raises(ValueError, match="pair up, got 2 and 1"):
    tasks.checked_rewards(task, task.heldout()[:2], ["a"])
  assert tasks.checked_rewards(task, [], []).shape == (0,)


def test_jsonl(tmp_path):
  chat = [{"role": "user", "content": "Capital of France?"}]
  rows = [_row("1+1?", 2), _row(chat, "Paris"), "", _row("half?", 0.5)]
  task = tasks.make_task(_write(tmp_path / "a.jsonl", rows), 0)
  examples = [*task.heldout(), *(task.train(i) for i in range(2))]
  assert {_content(x) for x in examples} == {
      "1+1?",
      "Capital of France?",
      "half?",
  }
  for example in examples:
    answer = example.columns["answer"]
    completions = {
        "2": ["so it is 2.", "2.0", "3", "two"],
        "0.5": ["It is 0.5", "0.50", "5", "1/2"],
        "Paris": ["Paris", " paris\n", "London", "Paris or London"],
    }[answer]
    rewards = tasks.checked_rewards(task, [example] * 4, completions)
    np.testing.assert_array_equal(rewards, [1, 1, 0, 0])


def test_jsonl_splits_by_prompt(tmp_path):
  rows = [_row(f"p{i % 10}", i) for i in range(40)]
  name = _write(tmp_path / "a.jsonl", rows)
  task = tasks.make_task(name, 0, heldout_size=3)
  held = {_content(x) for x in task.heldout()}
  assert len(held) == 3 and len(task.heldout()) == 12
  train = [task.train(i) for i in range(28)]
  assert not held & {_content(x) for x in train}
  assert len({x.columns["answer"] for x in train}) == 28
  # A small file keeps at least half of its prompts for training.
  assert len(tasks.make_task(name, 0).heldout()) == 20


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object with 'prompt' and 'answer'"),
        ('{"prompt": "a"}', "must be an object with 'prompt' and 'answer'"),
        (_row("", 1), "'prompt' must be"),
        (_row([], 1), "'prompt' must be"),
        (_row([{"role": "user"}], 1), "'prompt' must be"),
        (_row("a", None), "'answer' must be a string or a number, got None"),
        (_row("a", True), "'answer' must be a string or a number, got True"),
        (_row("a", " "), "'answer' must not be empty"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path, line, message):
  name = _write(tmp_path / "a.jsonl", [_row("x", 1), "", line])
  with pytest.raises(ValueError, match=f"a.jsonl:3: {message}"):
    tasks.make_task(name, 0)


def test_jsonl_needs_two_prompts(tmp_path):
  name = _write(tmp_path / "a.jsonl", [_row("x", 1), _row("x", 2)])
  with pytest.raises(ValueError, match=r"two different prompts.* got 1"):
    tasks.make_task(name, 0)


def test_jsonl_without_a_file(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
    tasks.make_task(f"jsonl:{tmp_path / 'none.jsonl'}", 0)


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_bad_heldout_size(tmp_path, size):
  name = _write(tmp_path / "a.jsonl", [_row("x", 1), _row("y", 2)])
  with pytest.raises(ValueError, match=f"heldout_size .* got {size}"):
    tasks.make_task(name, 0, heldout_size=size)


@pytest.mark.parametrize("dataset", ["chain_sum", "leg_counting"])
def test_reasoning_gym_scores_its_own_answers(dataset):
  pytest.importorskip("reasoning_gym")
  task = tasks.make_task(f"reasoning_gym:{dataset}", 0, heldout_size=4)
  examples = [*task.heldout(), task.train(0), task.train(10**6)]
  answers = [x.columns["entry"]["answer"] for x in examples]
  tagged = [f"Hm. <answer>{x}</answer>" for x in answers]
  for completions in (answers, tagged):
    np.testing.assert_array_equal(
        tasks.checked_rewards(task, examples, completions), 1.0
    )
  lost = tasks.checked_rewards(task, examples, ["nothing"] * len(examples))
  assert np.max(lost) < 0.1


def test_reasoning_gym_never_trains_on_heldout_questions():
  pytest.importorskip("reasoning_gym")
  name = "reasoning_gym:chain_sum"
  # A hundred questions in all, so that draws meet held-out ones often.
  small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
  task = tasks.make_task(name, 0, heldout_size=50, **small)
  held = {x.columns["entry"]["question"] for x in task.heldout()}
  train = {task.train(i).columns["entry"]["question"] for i in range(300)}
  assert len(held) > 20 and len(train) > 20
  assert not held & train
  with pytest.raises(ValueError, match="lower heldout_size"):
    everything = tasks.make_task(name, 0, heldout_size=5000, **small)
    for index in range(10):
      everything.train(index)


def test_reasoning_gym_unknown_data_set():
  pytest.importorskip("reasoning_gym")
  with pytest.raises(ValueError, match="did you mean 'chain_sum'"):
    tasks.make_task("reasoning_gym:chain_sums", 0)
