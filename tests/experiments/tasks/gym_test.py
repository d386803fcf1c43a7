"""Tests of the data sets of reasoning-gym as tasks."""

import copy
import json
import pickle

import numpy as np
import pytest

from experiments import _optional, tasks

pytest.importorskip("reasoning_gym")

# Solutions to entries of data sets that give no answer.
_SOLUTIONS = {
    "graph_color": lambda entry: json.dumps(
        entry["metadata"]["possible_answer"]
    ),
    "propositional_logic": lambda entry: entry["metadata"]["example_answer"],
    "rubiks_cube": lambda entry: entry["metadata"]["example_correct_answer"],
}
# Data sets that give no solution, with an answer to score.
_UNSOLVED = {"boxnet": "{}", "rush_hour": "F+1"}


def _entry(example):
  return example.columns["entry"]


def _check(dataset):
  """Examples are reproducible, and scored as by the data set itself."""
  name = f"reasoning_gym:{dataset}"
  task = tasks.make_task(name, 0, heldout_size=2)
  examples = [*task.heldout(), task.train(0)]
  other = tasks.make_task(name, 0, heldout_size=2)
  assert repr([*other.heldout(), other.train(0)]) == repr(examples)
  assert _entry(task.train(0))["question"] not in {
      _entry(x)["question"] for x in task.heldout()
  }
  factory = _optional.require("reasoning_gym.factory", "tasks")
  own = factory.create_dataset(dataset, seed=1, size=2)
  there = pickle.loads(pickle.dumps(task))
  for example in examples:
    before = copy.deepcopy(example)
    entry = _entry(example)
    if dataset in _UNSOLVED:
      answer = _UNSOLVED[dataset]
    else:
      solution = _SOLUTIONS.get(dataset, lambda entry: entry["answer"])
      answer = solution(entry)
    right = own.score_answer(answer, entry)
    if dataset not in _UNSOLVED and dataset != "propositional_logic":
      assert right == 1.0
    for scorer in (task, there):
      for text in (answer, f"Hm. <answer>{answer}</answer>"):
        assert scorer.reward(example, text) == right
    nothing = task.reward(example, "<answer>nothing</answer>")
    assert np.isfinite(nothing)
    # The scorer of game_of_life_halting only compares whether texts are empty.
    assert nothing < 1 or dataset == "game_of_life_halting"
    assert task.well_formed(example, f"Hm. <answer>{answer}</answer>\n")
    assert repr(example) == repr(before)


@pytest.mark.parametrize("dataset", ["chain_sum", "graph_color", "lcm"])
def test_scores_its_own_answers(dataset):
  _check(dataset)


@pytest.mark.slow
def test_every_data_set():
  factory = _optional.require("reasoning_gym.factory", "tasks")
  names = sorted(set(factory.DATASETS) - {"composite"})
  assert len(names) > 100
  failed = {}
  for dataset in names:
    try:
      _check(dataset)
    except Exception as error:
      failed[dataset] = error
  assert failed == {}


def test_never_trains_on_heldout_questions():
  name = "reasoning_gym:chain_sum"
  # There are only a hundred questions, so that draws often meet held-out ones.
  small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
  task = tasks.make_task(name, 0, heldout_size=50, **small)
  held = {_entry(x)["question"] for x in task.heldout()}
  train = {_entry(task.train(i))["question"] for i in range(300)}
  assert len(held) > 20 and len(train) > 20
  assert not held & train
  with pytest.raises(ValueError, match="lower heldout_size"):
    everything = tasks.make_task(name, 0, heldout_size=5000, **small)
    for index in range(10):
      everything.train(index)


def test_options_in_the_name():
  name = "reasoning_gym:gcd?min_numbers=3&max_numbers=3&max_value=9"
  task = tasks.make_task(name, 0, heldout_size=2)
  numbers = _entry(task.train(0))["metadata"]["numbers"]
  assert len(numbers) == 3 and max(numbers) <= 9
  assert task.name == task.train(0).task == name
  assert pickle.loads(pickle.dumps(task)).name == name


def test_what_is_put_below_a_question():
  def prompt(options):
    task = tasks.make_task(f"reasoning_gym:gcd?heldout_size=2{options}", 0)
    task = pickle.loads(pickle.dumps(task))
    (message,) = task.heldout()[0].prompt
    return message["content"].split("\n\n")

  question, usual = prompt("")
  assert "<answer>" in usual
  assert prompt('&instruction="Be brief."') == [question, "Be brief."]
  assert prompt('&instruction=""') == [question]


def test_a_verifier_in_place_of_the_scorer():
  name = 'reasoning_gym:products?max_digits=1&verifier="number"'
  task = tasks.make_task(name, 0, heldout_size=2)
  task = pickle.loads(pickle.dumps(task))
  example = task.train(3)
  right = int(_entry(example)["answer"])
  usual = tasks.make_task("reasoning_gym:products?max_digits=1", 0)
  sentence = f"It is {right}."
  assert 0 < usual.reward(example, sentence) < 1
  assert task.reward(example, sentence) == 1.0
  assert task.reward(example, f"<answer>{right}.0</answer> of 7") == 1.0
  assert task.reward(example, f"{right}, or {right + 1}") == 0.0
  assert task.reward(example, f"{right} #### {right + 1}") == 0.0
  assert task.reward(example, "") == 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chain_sums", "did you mean 'chain_sum'"),
        ("gcd?max_valu=3", "option of reasoning_gym:gcd .*'max_value'"),
        ("gcd?seed=3", "the seed is not an option"),
        ("gcd?size=3", "unknown option of reasoning_gym:gcd 'size'"),
        ("gcd?instruction=3", "instruction must be a string, got 3"),
        ('gcd?verifier="numbers"', "verifier 'numbers'; did you mean"),
        ('syllogism?verifier="number"', "cannot compare .*is not a number"),
        ("gcd?max_value=-3", "reasoning_gym:gcd refuses .*-3"),
        ('gcd?max_value="a"', "reasoning_gym:gcd refuses .*'a'"),
        ("composite", "is a mixture: write the sum"),
    ],
)
def test_names_that_are_refused(name, message):
  with pytest.raises(ValueError, match=message):
    tasks.make_task(f"reasoning_gym:{name}", 0)


def test_a_response_is_well_formed():
  task = tasks.make_task("reasoning_gym:gcd", 0, heldout_size=1)
  example = task.heldout()[0]
  for text in ("", "<answer> </answer>", "<answer>3</answer> I think", "3"):
    assert not task.well_formed(example, text), text
  twice = "<answer>3</answer><answer>4</answer>"
  assert not task.well_formed(example, twice)
