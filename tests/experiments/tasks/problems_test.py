"""Tests of problems from files and of how answers are compared."""

import json
import pickle

import numpy as np
import pytest

from experiments import _optional, tasks
from experiments.tasks import answers


def _content(example):
  return example.prompt[-1]["content"]


def _write(path, rows):
  path.write_text("\n".join(rows) + "\n", encoding="utf-8")
  return f"jsonl:{path}"


def _row(prompt, answer, **more):
  return json.dumps({"prompt": prompt, "answer": answer, **more})


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
    assert example.task == task.name


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


def test_held_out_file_and_instruction_in_the_name(tmp_path):
  _write(tmp_path / "test.jsonl", [_row("b", 2), _row("b", 3), _row("d", 4)])
  name = _write(tmp_path / "a.jsonl", [_row("a", 1), _row("b", 2)])
  say = json.dumps("Use \\boxed{} & stop. ok?")
  name += f"?heldout={json.dumps(str(tmp_path / 'test.jsonl'))}&instruction="
  task = tasks.make_task(name + say, 0)
  assert task.name == name + say
  held = [x.columns["answer"] for x in task.heldout()]
  assert held == ["2", "3", "4"]
  # The training row of a held-out prompt is left out.
  assert {task.train(i).columns["answer"] for i in range(4)} == {"1"}
  assert _content(task.train(0)) == "a\n\nUse \\boxed{} & stop. ok?"
  with pytest.raises(ValueError, match="instruction must be a string, got 3"):
    tasks.make_task(name + "3", 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object with 'prompt', 'question' or 'problem' and"),
        ('{"prompt": "a"}', "must have 'answer' or 'solution', got .* prompt"),
        ('{"answer": 1}', "must have 'prompt', 'question' or 'problem'"),
        (_row("", 1), "'prompt' must be"),
        (_row([], 1), "'prompt' must be"),
        (_row([{"role": "user"}], 1), "'prompt' must be"),
        (_row("a", None), "'answer' must be a string or a number, got None"),
        (_row("a", True), "'answer' must be a string or a number, got True"),
        (_row("a", " "), "'answer' must not be empty"),
        (_row("a", "so it is\n#### "), "'answer' has no answer .* empty"),
        (_row("a", "\\boxed{}"), "'answer' has no answer .* empty"),
        (_row("a", "\\boxed{1"), "'answer' has no answer .* not closed"),
        (_row("a", "we add\nand add"), "'answer' .* several lines"),
    ],
)
def test_errors_name_the_line(tmp_path, line, message):
  name = _write(tmp_path / "a.jsonl", [_row("x", 1), "", line])
  with pytest.raises(ValueError, match=f"a.jsonl:3: {message}"):
    tasks.make_task(name, 0)


@pytest.mark.parametrize("answer", ["\\frac{1}{", "$x^2+$", "\\foo"])
def test_answer_that_math_verify_does_not_parse(tmp_path, answer):
  pytest.importorskip("math_verify")
  name = _write(tmp_path / "a.jsonl", [_row("x", 1), _row("y", answer)])
  with pytest.raises(ValueError, match=r"a\.jsonl:2: .* finds no formula"):
    tasks.make_task(name, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([_row("x", 1), _row("x", 2)], r"two different prompts.* got 1"),
        ([], r"two different prompts.* got 0"),
    ],
)
def test_needs_two_prompts(tmp_path, rows, message):
  with pytest.raises(ValueError, match=message):
    tasks.make_task(_write(tmp_path / "a.jsonl", rows), 0)


def test_held_out_file_with_all_prompts(tmp_path):
  name = _write(tmp_path / "a.jsonl", [_row("x", 1)])
  with pytest.raises(ValueError, match="to hold out, got 0 and 1"):
    tasks.make_task(name, 0, heldout=str(tmp_path / "a.jsonl"))


def test_files_of_another_kind(tmp_path):
  path = tmp_path / "a"
  path.write_bytes(b"\xff\xfe\x00")
  with pytest.raises(ValueError, match=r"/a: not UTF-8 text"):
    tasks.make_task(f"jsonl:{path}", 0)
  pytest.importorskip("pyarrow")
  with pytest.raises(ValueError, match=r"/a: not a Parquet file"):
    tasks.make_task(f"parquet:{path}", 0)


def test_jsonl_without_a_file(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
    tasks.make_task(f"jsonl:{tmp_path / 'none.jsonl'}", 0)


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_bad_heldout_size(tmp_path, size):
  name = _write(tmp_path / "a.jsonl", [_row("x", 1), _row("y", 2)])
  with pytest.raises(ValueError, match=f"heldout_size .* got {size}"):
    tasks.make_task(name, 0, heldout_size=size)


def test_unknown_verifier(tmp_path):
  name = _write(tmp_path / "a.jsonl", [_row("x", 1), _row("y", 2)])
  with pytest.raises(ValueError, match=r"verifier 'maths'.*'math'"):
    tasks.make_task(f'{name}?verifier="maths"', 0)
  with pytest.raises(ValueError, match=r"a\.jsonl:2: .*'b' is not a number"):
    rows = [_row("x", 1), _row("y", "b")]
    tasks.make_task(_write(tmp_path / "a.jsonl", rows), 0, verifier="number")


_GSM8K = "Half of 36 is 36/2 = <<36/2=18>>18.\n#### 1,018"
_MATH = "We get $x=\\frac{2}{4}$, so $\\boxed{\\frac{1}{2}}$."


def test_other_columns_are_kept(tmp_path):
  rows = [
      json.dumps({"question": f"q{i}", "solution": _GSM8K, "level": i})
      for i in range(2)
  ]
  example = tasks.make_task(_write(tmp_path / "a.jsonl", rows), 0).train(0)
  level = int(_content(example)[1:])
  right = {"answer": "1,018", "verifier": "number"}
  assert example.columns == {"level": level, **right}


@pytest.mark.parametrize(
    ("field", "text", "verifier"),
    [
        ("18", "18", "number"),
        (" 1,024 ", "1,024", "number"),
        ("#### $18", "18", "number"),
        ("$\\frac{1}{2}$", "\\frac{1}{2}", "math"),
        (_GSM8K, "1,018", "number"),
        (_MATH, "\\frac{1}{2}", "math"),
        ("\\boxed{1} or \\boxed{\\{2, \\frac{3}{4}\\}}", None, "math"),
        ("\\boxed{7}", "7", "math"),
        ("\\boxed{\\text{Evelyn}}", "Evelyn", "text"),
        ("\\boxed{x}", "x", "math"),
        ("5\\text{ cm}", "5\\text{ cm}", "math"),
        ("(3, 4)", "(3, 4)", "math"),
        ("3/4", "3/4", "math"),
        ("Paris", "Paris", "text"),
        ("B", "B", "text"),
        ("yes/no", "yes/no", "text"),
        ("3rd of May", "3rd of May", "text"),
        ("2024-05-01", "2024-05-01", "text"),
    ],
)
def test_kinds_of_answers(field, text, verifier):
  if verifier == "math":
    pytest.importorskip("math_verify")
  answer = answers.parse(field)
  assert answer.verifier == verifier
  assert answer.text == (text or "\\{2, \\frac{3}{4}\\}")


@pytest.mark.parametrize(
    ("field", "right", "wrong"),
    [
        (
            "18",
            [
                "18",
                "So 18.",
                "\\boxed{18}, of 36",
                "36 by 2\n#### 18",
                "$\\boxed{x = \\$18.00}$ each",
                "\\boxed{18 \\text{ eggs in 2 boxes}}",
                "\\boxed{3} no, \\boxed{18}",
            ],
            [
                "18 of 36",
                "\\boxed{36}, not 18",
                "\\boxed{2^{18}}",
                "\\boxed{\\frac{1}{18}}",
                "\\boxed{}",
                "#### 18 or 17",
            ],
        ),
        (
            _MATH,
            [
                "\\boxed{0.5}",
                "$\\frac{2}{4}$",
                "It is 1/2",
                "\\boxed{2/4} of 3",
            ],
            ["\\boxed{2}", "1/3", "", "no", "\\boxed{\\frac{1}{", "\\boxed{}"],
        ),
        (
            "x^2 - 1",
            ["\\boxed{(x-1)(x+1)}", "$-1 + x^2$"],
            ["\\boxed{x^2+1}", "\\boxed{y^2-1}"],
        ),
        (
            "\\boxed{\\text{Evelyn}}",
            ["evelyn", "It is \\boxed{Evelyn}", "\\boxed{\\text{Evelyn}}"],
            ["It is Evelyn", "\\boxed{Eve}"],
        ),
    ],
)
def test_same(field, right, wrong):
  pytest.importorskip("math_verify")
  answer = answers.parse(field)
  assert [x for x in right if not answers.same(x, answer)] == []
  assert [x for x in wrong if answers.same(x, answer)] == []


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("so\n#### 18", True),
        ("so $\\boxed{18}$.\n", True),
        ("\\[\n\\boxed{\\begin{matrix}1\\\\\n2\\end{matrix}}\n\\]", True),
        ("\\boxed{5} dollars", True),
        ("\\boxed{5}\nOr is it?", False),
        ("#### 5\nOr is it?", False),
        ("\\boxed{5", False),
        ("\\boxed{ }", False),
        ("####", False),
        ("18", False),
    ],
)
def test_ends_in_answer(text, ends):
  assert answers.ends_in_answer(text) == ends


def test_pickle_leaves_the_rows_behind(tmp_path):
  rows = [_row(f"p{i}", i) for i in range(1000)]
  task = tasks.make_task(_write(tmp_path / "a.jsonl", rows), 0)
  example = task.train(0)
  data = pickle.dumps(task)
  assert len(data) < 1000
  there = pickle.loads(data)
  right = example.columns["answer"]
  assert [there.reward(example, x) for x in (right, "no")] == [1.0, 0.0]


def test_parquet(tmp_path):
  pytest.importorskip("pyarrow")
  parquet = _optional.require("pyarrow.parquet", "tasks")
  pyarrow = _optional.require("pyarrow", "tasks")
  rows = [
      {"problem": "p", "solution": _GSM8K, "level": 1},
      {"problem": "q", "solution": _GSM8K, "level": None},
      {"problem": None, "solution": "#### 3", "level": None},
  ]
  path = tmp_path / "a.parquet"
  parquet.write_table(pyarrow.Table.from_pylist(rows[:2]), path)
  task = tasks.make_task(f"parquet:{path}", 0)
  held, train = task.heldout()[0], task.train(0)
  assert {_content(held), _content(train)} == {"p", "q"}
  np.testing.assert_array_equal(
      tasks.checked_rewards(task, [held, train], ["#### 1018", "1"]), [1, 0]
  )
  parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  with pytest.raises(
      ValueError, match=r"a\.parquet: row 3: must have 'prompt'"
  ):
    tasks.make_task(f"parquet:{path}", 0)
  parquet.write_table(pyarrow.table({"problem": ["a"], "id": [1]}), path)
  match = "a.parquet needs a column 'answer' or 'solution', got problem, id"
  with pytest.raises(ValueError, match=match):
    tasks.make_task(f"parquet:{path}", 0)


def test_functions_of_any_module(tmp_path, monkeypatch):
  (tmp_path / "made_rows.py").write_text(
      "def rows(seed, n=2):\n"
      "  return [{'prompt': str(i), 'answer': i} for i in range(n)]\n"
      "def no_seed():\n  return []\n"
      "def number(seed):\n  return 3\n"
      "def bad(seed):\n  return [{'prompt': 'a'}]\n"
  )
  (tmp_path / "broken_rows.py").write_text("import no_such_thing_at_all\n")
  monkeypatch.syspath_prepend(tmp_path)
  task = tasks.make_task("made_rows:rows?n=10&heldout_size=3", 0)
  assert len(task.heldout()) == 3
  assert {task.train(i).columns["answer"] for i in range(7)} == {
      _content(task.train(i)) for i in range(7)
  }
  for name, message in {
      "made_rows:row": "function of made_rows 'row'; did you mean 'rows'",
      "made_rows:rows?m=1": "option of made_rows:rows 'm'; known: .*n, verif",
      "made_rows:no_seed": "is called with seed: .* unexpected .*'seed'",
      "made_rows:number": "must return a list of rows or .*Task, got int",
      "made_rows:bad": "made_rows:bad: row 1: must have 'answer'",
      "broken_rows:rows": "'broken_rows' cannot be imported: .*no_such_thing",
  }.items():
    with pytest.raises(ValueError, match=message):
      tasks.make_task(name, 0)
