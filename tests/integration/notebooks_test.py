"""Notebooks: they run top to bottom, and what is committed is what they say."""

import ast
import json
import re
import tomllib

from IPython.core.inputtransformer2 import TransformerManager
import nbclient
import nbformat
import pytest

from tests.helpers.paths import ROOT

FOLDER = ROOT / "notebooks"
NAMES = ("kl_budget", "quickstart", "results", "your_own_loop")
MODEL = ROOT / ".cache/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
IMAGES = {"image/png", "image/jpeg"}
MACHINE_PATH = re.compile(r"(?<![\w./])/(work|tmp|home|root|Users|content)\b")


def read(name):
  return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def run(name):
  """Outputs of all code cells, executed in a fresh kernel."""
  notebook = read(name)
  for cell in code_cells(notebook):
    cell.outputs = []
  client = nbclient.NotebookClient(
      notebook,
      timeout=1800,
      kernel_name="python3",
      # Where Jupyter starts it.
      resources={"metadata": {"path": str(FOLDER)}},
  )
  client.execute()
  return [out for cell in code_cells(notebook) for out in cell.outputs]


def printed(outputs):
  return "".join(o.text for o in outputs if o.output_type == "stream")


def pictures(outputs):
  return [o for o in outputs if IMAGES & o.get("data", {}).keys()]


@pytest.fixture
def small(monkeypatch, tmp_path_factory):
  """The small settings, and one cache of what XLA compiles for all of them."""
  cache = tmp_path_factory.getbasetemp() / "compiled"
  for variable, value in {
      "LOGRA_SMALL": "1",
      "PYTHONPATH": str(ROOT),
      "JAX_COMPILATION_CACHE_DIR": str(cache),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
  }.items():
    monkeypatch.setenv(variable, value)


def test_quickstart_runs(small):
  outputs = run("quickstart")
  assert len(pictures(outputs)) == 1
  assert "{0: " in printed(outputs)
  (answers,) = [o for o in outputs if "text/markdown" in o.get("data", {})]
  assert "| What is " in answers.data["text/markdown"]


def test_your_own_loop_runs_and_learns(small):
  outputs = run("your_own_loop")
  rewards = re.findall(r"reward ([\d.]+) -> ([\d.]+)", printed(outputs))
  assert len(rewards) == 2  # linen, NNX
  for first, last in rewards:
    assert float(first) < 0.2 and float(last) > 0.3
  assert len(pictures(outputs)) == 1


def test_kl_budget_runs_and_predicts_small_steps(small):
  outputs = run("kl_budget")
  ratios = re.findall(r"1e-0[456] +([\d.]+) +([\d.]+)", printed(outputs))
  assert len(ratios) == 3
  for ratio in map(float, sum(ratios, ())):
    assert 0.9 < ratio < 1.1
  medians = re.findall(r"(\w+): realised / predicted: ", printed(outputs))
  assert medians == ["AdamW", "LoGRA"]
  assert len(pictures(outputs)) == 2


def test_results_runs(small):
  outputs = run("results")
  tables = [o for o in outputs if "text/markdown" in o.get("data", {})]
  assert len(tables) >= 3 and len(pictures(outputs)) >= 4


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.exists(), reason="needs make quickstart's model")
def test_quickstart_trains_the_real_model(monkeypatch):
  monkeypatch.delenv("LOGRA_SMALL", raising=False)
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  accuracy = re.search(
      r"\{0: ([\d.]+), .*: ([\d.]+)\}", printed(run("quickstart"))
  )
  before, after = map(float, accuracy.groups())
  assert before < 0.7 and after > 0.9


def test_these_are_all():
  assert tuple(sorted(p.stem for p in FOLDER.glob("*.ipynb"))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_opens_with_what_why_and_cost(name):
  notebook = read(name)
  nbformat.validate(notebook)
  assert notebook.cells[0].cell_type == "markdown"
  opening = notebook.cells[0].source
  for words in ("# ", "**What it shows.**", "**Cost.**", "**Expected.**"):
    assert words in opening


@pytest.mark.parametrize("name", NAMES)
def test_first_code_cell_installs_in_colab_only(name):
  cell = code_cells(read(name))[0]
  assert cell.source == code_cells(read("quickstart"))[0].source
  assert not cell.outputs
  (extra,) = re.findall(
      r"pip install .*\[(\w+)\]", cell.source.split("else:")[1]
  )
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert extra in project["optional-dependencies"]


def defined(notebook):
  """Functions and classes that code cells define."""
  source = "\n".join(
      TransformerManager().transform_cell(cell.source)
      for cell in code_cells(notebook)
  )
  kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
  return [n for n in ast.walk(ast.parse(source)) if isinstance(n, kinds)]


def test_results_defines_no_functions():
  assert not defined(read("results"))
  assert defined(read("your_own_loop"))  # They would be found.


@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs_are_of_one_clean_run(name):
  cells = code_cells(read(name))
  counts = [cell.execution_count for cell in cells]
  assert counts == list(range(1, len(cells) + 1))
  outputs = [out for cell in cells for out in cell.outputs]
  assert outputs and pictures(outputs)
  assert not [o for o in outputs if o.output_type == "error"]
  assert not [o for o in outputs if o.get("name") == "stderr"]
  text = json.dumps(
      [
          {k: v for k, v in o.get("data", {}).items() if k not in IMAGES}
          | {"text": o.get("text", "")}
          for o in outputs
      ]
  )
  assert not MACHINE_PATH.search(text)
  assert (FOLDER / f"{name}.ipynb").stat().st_size < 500_000


def test_machine_paths_would_be_found():
  assert MACHINE_PATH.search(json.dumps("metrics: /tmp/tmp123/metrics.jsonl"))
  assert not MACHINE_PATH.search(json.dumps("realised / predicted, ../.cache"))
