"""Plans of runs, and the documented memory of the large models' configs."""

import importlib
import json

import jax
import pytest

from experiments.benchmarks import gpu_check
from experiments.configs import quickstart, tiny
from experiments.models import architectures
from experiments.parallel import sharding
from experiments.planning import report, run_plan
from experiments.runs import check_config
from experiments.tasks import grammar
from tests.helpers.paths import ROOT

FOLDER = ROOT / "docs/results/configs"
MODELS = {
    "qwen2_5_math_1_5b": "qwen2.5-1.5b",
    "qwen2_5_7b": "qwen2.5-7b",
    "qwen2_5_32b": "qwen2.5-32b",
}


def _module(name):
  return importlib.import_module(f"experiments.configs.{name}")


def _names(config, prefix=""):
  for name, value in config.items():
    if hasattr(value, "items"):
      yield from _names(value, f"{prefix}{name}.")
    else:
      yield prefix + name


def _abstract(config):
  sizes = tuple(config.mesh[axis] for axis in sharding.AXES)
  return jax.sharding.AbstractMesh(sizes, sharding.AXES)


@pytest.mark.parametrize("name", MODELS)
def test_configs_are_sound(name):
  config = _module(name).get_config()
  assert list(_names(config)) == list(_names(quickstart.get_config()))
  check_config.check_config(config)
  mesh = _abstract(config)
  architecture = architectures.architecture(MODELS[name])
  sharding.check_model(architecture, mesh)
  for size in (
      config.rollout.prompts,
      config.rollout.slots,
      config.loss.micro_rows,
      config.kl.probe_responses,
  ):
    sharding.check_batch("size", size, mesh)
  # Keys and values are split over all devices.
  assert architecture.n_kv_heads % mesh.shape["tensor"] == 0
  base, options = grammar.options(config.task.name)
  assert base.startswith("jsonl:")
  assert options["instruction"].endswith(r"\boxed{}.")
  assert config.evaluate.prompts <= options["heldout_size"]


@pytest.mark.parametrize("name", MODELS)
def test_docstring_and_page_have_the_figures_of_the_files(name):
  page = (FOLDER / "README.md").read_text("utf-8")
  docstring = _module(name).__doc__
  files = [json.loads(f.read_text("utf-8")) for f in FOLDER.glob(f"{name}-*")]
  assert ("Memory: not compiled yet." in docstring) == (not files)
  assert page.count(f"| {name} |") == len(files)
  for saved in files:
    line = report.run_plan_line(saved)
    assert saved["model"] == MODELS[name] and saved["fits"]
    assert f"{report.RUN_PLAN_HEAD}\n" in docstring
    assert line in docstring.splitlines(), line
    cells = " | ".join(f"{value:.2f}" for value in saved["gib"].values())
    assert f"| {name} | {saved['target']} | {cells} |" in page


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [
        ({"tensor": 2}, 2),
        ({"tensor": 4}, 1),  # Each device has both key-value heads.
        ({"data": 2, "fsdp": 4, "tensor": 2}, 16),
        ({"fsdp": 3}, 1),  # 3 does not divide 64 responses.
    ],
)
def test_what_a_cache_takes_of_a_device(mesh, devices):
  config = tiny.get_config().unlock()
  config.mesh.update(mesh)
  config.rollout.update(
      prompts=8, responses=16, slots=64, max_prompt_tokens=5, max_new_tokens=4
  )
  config.evaluate.prompts = 64
  architecture = architectures.architecture("qwen2.5-1.5b")
  token = 2 * 28 * 2 * 128 * 4  # Keys and values in float32.
  # 64 slots of 5 + 3 tokens, and the 32 slots that they move to, which are
  # larger than the cache of 4 prompts of 5 tokens.
  n_bytes = lambda evaluation: run_plan.cache_bytes(
      architecture, config, _abstract(config), evaluation=evaluation
  )
  assert n_bytes(False) == 96 * 8 * token // devices
  # Here the cache of 64 prompts is larger than half of the slots.
  assert n_bytes(True) == (64 * 8 + 64 * 5) * token // devices
  config.rollout.cache_dtype = "int8"
  scales = 2 * 28 * 2 * 4
  small = token // 4 + scales
  assert n_bytes(False) == 96 * 8 * small // devices
  assert n_bytes(True) == (64 * 8 + 64 * 5) * small // devices
  config.evaluate.prompts = 72  # At most one per slot is read at once.
  assert n_bytes(True) == (64 * 8 + 64 * 5) * small // devices


@pytest.mark.slow
def test_a_measured_config(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(gpu_check.SMALL_MODEL))
  config = tiny.get_config().unlock()
  config.kl.enabled = False  # Less to compile.
  plan = run_plan.plan_config(config, str(tmp_path), "cpu:1")
  n = architectures.n_params(architectures.architecture(tmp_path))
  assert plan["arguments"]["weights"] == 4 * n
  # Sampling needs little more than weights, optimizer state and cache.
  kept = sum(plan["arguments"][kind] for kind in ("weights", "optimizer"))
  kept += plan["rollout_cache_bytes"]
  assert 0 < plan["sampling_bytes"] - kept < 2**20
  assert plan["fits"] and plan["peak_bytes"] > plan["argument_bytes"]
  head, line = report.RUN_PLAN_HEAD, report.run_plan_line(plan)
  assert len(head) == len(line) and line.split()[0] == "cpu:1"


def test_what_no_run_could_start_with():
  config = tiny.get_config().unlock()
  config.mesh.fsdp = 2
  with pytest.raises(ValueError, match=r"config\.mesh.*2 devices"):
    run_plan.plan_config(config, "qwen2.5-7b", "cpu:1")
  config.mesh.fsdp, config.rollout.temperature = 1, 0.0
  with pytest.raises(ValueError, match="temperature"):
    run_plan.plan_config(config, "qwen2.5-7b", "cpu:1")
