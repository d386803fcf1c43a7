"""Tests of tasks by name: prompts by index, and verifiable rewards."""

import decimal
import re

import numpy as np
import pytest

from experiments import tasks


def _content(example):
  return example.prompt[-1]["content"]


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
    # A response that lists all candidates makes a single guess, the last one.
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
        ("poetry", "known: <module>:<function>, addition, jsonl, parquet, r"),
        ("no_such_module:rows", "unknown task"),
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
  # The first ones, which might be all that are evaluated, are like the rest.
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
  """Addition with rewards that a test chooses."""

  def __init__(self, rewards):
    super().__init__("1", 0)
    self._rewards = dict(zip("ab", rewards, strict=True))

  def reward(self, example, completion):
    del example
    return self._rewards[completion]


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), -float("inf"), None, "1", [1.0, 2.0]]
)
def test_reward_that_is_not_a_finite_number(bad):
  task = _Scored([1.0, bad])
  examples = task.heldout()[:2]
  match = f"'addition' .*{re.escape(repr(bad))} at index 1.*'b'.*finite"
  with pytest.raises(ValueError, match=match):
    tasks.checked_rewards(task, examples, ["a", "b"])


@pytest.mark.parametrize("good", [True, 1, np.float32(1), np.ones(())])
def test_reward_that_is_a_number(good):
  task = _Scored([0.5, good])
  rewards = tasks.checked_rewards(task, task.heldout()[:2], ["a", "b"])
  np.testing.assert_array_equal(rewards, [0.5, 1])


def test_examples_and_completions_must_pair_up():
  task = tasks.make_task("addition", 0)
  with pytest.raises(ValueError, match="pair up, got 2 and 1"):
    tasks.checked_rewards(task, task.heldout()[:2], ["a"])
  assert tasks.checked_rewards(task, [], []).shape == (0,)


def test_addition_is_well_formed():
  task = tasks.make_task("addition", 0)
  example = task.train(0)
  for text in ("8", " 8.\n", "-1"):
    assert task.well_formed(example, text), text
  for text in ("It is 8", "8 9", "", "eight"):
    assert not task.well_formed(example, text), text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "must be a name or a weighted sum, got ''"),
        ("0*addition + addition:2", "positive number, got '0'"),
        ("-1*addition + addition:2", "positive number, got '-1'"),
        ("nan*addition + addition:2", "positive number, got 'nan'"),
        ("addition*2", "positive number, got 'addition'"),
        ("addition + addition", "'addition' twice"),
        ("addition + addition:1", "'addition' twice"),
        ("addition +  + addition:2", "a term without a name"),
        ("0.5* + addition:2", "a term without a name"),
        ("addition + 0.0001*addition:2", "'addition:2' is .* a thousandth"),
        ("addition?size=2", "unknown option of addition 'size'; known: none"),
        ("jsonl:a?heldout_siz=2", "did you mean 'heldout_size'"),
        ("jsonl:a?verifier=math", 'not JSON; .*key="value"'),
        ("jsonl:a?x=1&x=2", "sets 'x' twice"),
    ],
)
def test_names_that_are_refused(name, message):
  with pytest.raises(ValueError, match=message):
    tasks.make_task(name, 0)


def test_mixture_has_exact_shares_and_walks_each_task_without_gaps():
  name = "3*addition + 0.01*addition:2"
  task = tasks.make_task(name, 7)
  parts = {n: tasks.make_task(n, 7) for n in ("addition", "addition:2")}
  examples = [task.train(i) for i in range(2000)]
  for part, share in zip(parts, (3, 0.01), strict=True):
    own = [x for x in examples if x.task == part]
    assert abs(len(own) / 2000 - share / 3.01) < 1e-3
    assert own == [parts[part].train(i) for i in range(len(own))]
  # An example depends on the index alone.
  assert examples[1500] == tasks.make_task(name, 7).train(1500)


def test_mixture_is_mixed_and_depends_on_the_seed():
  orders = []
  for seed in range(3):
    task = tasks.make_task("addition + addition:2", seed)
    order = [task.train(i).task == "addition" for i in range(1000)]
    assert sum(order) == 500
    # A permutation has about half as many changes as positions.
    assert 400 < np.sum(np.diff(order)) < 600
    orders.append(tuple(order))
  assert len(set(orders)) == 3


def test_mixture_holds_out_all_and_scores_by_task():
  task = tasks.make_task("addition + 0.5*addition:2", 0)
  held = task.heldout()
  own = [tasks.make_task(n, 0).heldout() for n in ("addition", "addition:2")]
  assert held == own[0] + own[1]
  right = [x.columns["answer"] for x in held]
  np.testing.assert_array_equal(tasks.checked_rewards(task, held, right), 1)
  with pytest.raises(ValueError, match="at least 0, got -1"):
    task.train(-1)
