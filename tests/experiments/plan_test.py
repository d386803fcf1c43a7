"""The command `experiments.plan`."""

import dataclasses
import json
import subprocess
import sys
import typing

import pytest

from experiments import plan as plan_command
from experiments.benchmarks import gpu_check
from experiments.planning import request as request_lib
from experiments.planning.request import Request
from experiments.reporting.units import GIB


def run(*flags):
  command = [sys.executable, "-m", "experiments.plan", *flags]
  return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_mesh_in_words():
  assert plan_command.parse_mesh("fsdp:4,tensor:2") == {"fsdp": 4, "tensor": 2}
  with pytest.raises(ValueError, match="mesh='fsdp=4' must be like"):
    plan_command.parse_mesh("fsdp=4")


def test_the_command_ends_without_a_traceback():
  process = run("--model=qwen2.5-7", "--target=cpu:1")
  assert process.returncode == 1 and "Traceback" not in process.stderr
  assert process.stderr.startswith("error: model='qwen2.5-7' is neither")


def test_a_model_is_planned_into_a_file(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(gpu_check.SMALL_MODEL))
  out = tmp_path / "deep" / "out.json"
  process = run(
      f"--model={tmp_path}",
      "--target=cpu:1",
      "--rank=8",
      "--tokens=64",
      f"--out={out}",
  )
  assert process.returncode == 0, process.stderr
  read = json.loads(out.read_text())
  assert read["request"]["rank"] == 8 and read["tried"] == []
  assert "experiments.plan" in read["command"] and "--rank=8" in read["command"]
  assert f"{read['peak_bytes'] / GIB:.3f} GiB  per device" in process.stdout


@pytest.mark.slow
def test_a_config_is_planned_into_a_file(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(gpu_check.SMALL_MODEL))
  out = tmp_path / "out.json"
  process = run(
      "--config=experiments/configs/tiny.py",
      "--config.kl.enabled=False",
      f"--model={tmp_path}",
      "--target=cpu:1",
      f"--out={out}",
  )
  assert process.returncode == 0, process.stderr
  read = json.loads(out.read_text())
  assert read["fits"] and read["sampling_bytes"] > 0
  assert "\nfits" in process.stdout


@pytest.mark.parametrize(
    "flag",
    [
        "--rank=8",
        *(
            pytest.param(flag, marks=pytest.mark.slow)
            for flag in ("--mesh=fsdp:2", "--search=batch", "--dump=folder")
        ),
    ],
)
def test_a_config_fixes_the_sizes(flag):
  process = run(
      "--config=experiments/configs/tiny.py",
      *("--model=qwen2.5-7b", "--target=cpu:1", flag),
  )
  assert process.returncode == 1
  name = flag.partition("=")[0]
  assert process.stderr.startswith(f"error: {name} does not go with --config")


def test_a_search_dumps_nothing():
  process = run(
      *("--model=qwen2.5-7b", "--target=cpu:1", "--search=batch", "--dump=x")
  )
  assert process.returncode == 1
  assert process.stderr.startswith("error: --dump does not go with --search")


def test_flags_have_the_types_of_their_fields():
  shown = run("--help").stdout.split("\n  --")
  by_name = {text.partition(":")[0]: text for text in shown}
  types = typing.get_type_hints(Request)
  assert types.keys() <= by_name.keys()
  for name, annotation in types.items():
    is_int = annotation in (int, int | None)
    assert ("(an integer)" in by_name[name]) == is_int, name


def test_every_flag_of_a_request_has_a_help_text():
  for field in dataclasses.fields(Request):
    assert request_lib.help_of(field.name).endswith("."), field
