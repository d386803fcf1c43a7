"""Targets by name, and devices that are only described."""

import importlib.util
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from experiments.parallel import platforms
from experiments.planning import targets
from experiments.reporting.units import GIB

needs_libtpu = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"),
    reason="libtpu is not installed (the extra 'tpu')",
)
needs_cuda = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"),
    reason="JAX's CUDA plugin is not installed (the extra 'cuda')",
)


def test_names():
  assert targets.parse("H100:4") == targets.Target("h100", (4,))
  assert targets.parse("v5p:2x2x1").shape == (2, 2, 1)
  assert targets.parse("v5e:2x4").name == "v5e:2x4"
  assert [t.name for t in targets.slices("v6e")][:2] == ["v6e:1x1", "v6e:2x2"]


@pytest.mark.parametrize(
    "name,match",
    [
        ("a100:8", r"target='a100:8' is unknown; use one like h100:4, v4:"),
        ("h100", r"target='h100' must name a number of devices .*h100:1, h100"),
        ("h100:0", "must name a number"),
        ("h100:2x2", "must name a number"),
        ("h100:12", "at most 8 devices, or whole hosts of 8"),
        ("v5p:2x2", r"must name a slice of 3 axes .* v5p:2x2x1"),
        ("v5e:2x2x1", "a slice of 2 axes"),
        ("cpu:-1", "must name a number"),
    ],
)
def test_names_that_are_refused(name, match):
  with pytest.raises(ValueError, match=match):
    targets.parse(name)


def test_memory():
  published = {"h100:1": 80e9, "v4:2x2x1": 32 * GIB, "v5e:1x1": 16 * GIB}
  published |= {"v5p:2x2x1": 96 * GIB, "v6e:1x1": 32 * GIB}
  for name, n_bytes in published.items():
    usable = targets.parse(name).memory_bytes
    assert 0.94 * n_bytes < usable < 1.07 * n_bytes, name
  two, one = (targets.parse(f"cpu:{n}").memory_bytes for n in (2, 1))
  assert two == one // 2


def test_cpu_devices_are_those_of_the_process():
  n = jax.device_count("cpu")
  assert targets.parse(f"cpu:{n}").devices() == jax.devices("cpu")
  with pytest.raises(ValueError, match=rf"has started with {n}: .*XLA_FLAGS="):
    targets.parse(f"cpu:{n + 1}").devices()
  assert platforms.lowering_platforms(jax.devices("cpu")) == ("cpu",)


def test_a_missing_library_names_its_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "libtpu", None)
  with pytest.raises(ImportError, match=r"pip install 'logra-jax\[tpu\]'"):
    targets.parse("v5e:2x2").devices()
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  monkeypatch.setitem(sys.modules, "jax_cuda13_plugin", None)
  with pytest.raises(ImportError, match=r"pip install 'logra-jax\[cuda\]'"):
    targets.parse("h100:4").devices()


@needs_libtpu
@pytest.mark.parametrize(
    "name", ["v4:2x2x1", "v5e:2x4", "v5p:2x2x2", "v6e:1x1", "v6e:2x4"]
)
def test_tpu_devices(name):
  target = targets.parse(name)
  devices = target.devices()
  assert len(devices) == math.prod(target.shape)
  assert platforms.lowering_platforms(devices) == ("tpu",)


@needs_libtpu
def test_every_usual_slice_is_a_topology():
  for family in ("v4", "v5e", "v5p", "v6e"):
    for target in targets.slices(family):
      assert len(target.devices()) == math.prod(target.shape)


@needs_libtpu
def test_an_impossible_topology_is_refused_with_possible_ones():
  with pytest.raises(
      ValueError, match=r"'v5e:3x5' is not a topology .* v5e:2x4"
  ):
    targets.parse("v5e:3x5").devices()


@needs_libtpu
@pytest.mark.parametrize("family", ["v4", "v5e", "v5p", "v6e"])
def test_tpu_memory_is_what_the_compiler_has(family):
  target = targets.slices(family)[0]
  one = jax.sharding.SingleDeviceSharding(target.devices()[0])
  side = 2**18
  matrix = jax.ShapeDtypeStruct((side, side), jnp.bfloat16, sharding=one)
  lowered = (
      jax.jit(lambda x: x @ x).trace(matrix).lower(lowering_platforms=("tpu",))
  )
  with pytest.raises(jax.errors.JaxRuntimeError) as error:
    lowered.compile()
  gib = f"{target.memory_bytes / GIB:.2f}G"
  assert f"exceeds available HBM ({gib})" in str(error.value)


@needs_libtpu
def test_two_processes_compile_at_once():
  targets.parse("v5e:1x1").devices()  # Loads the library here.
  code = (
      "from experiments.planning import targets;"
      "print(len(targets.parse('v5e:2x2').devices()))"
  )
  process = subprocess.run(
      [sys.executable, "-c", code],
      capture_output=True,
      text=True,
      check=False,
  )
  assert process.stdout.strip() == "4", process.stderr


@needs_cuda
@pytest.mark.parametrize("n,hosts", [(1, 1), (8, 1), (16, 2)])
def test_h100_devices(n, hosts):
  devices = targets.parse(f"h100:{n}").devices()
  assert len(devices) == n
  assert len({d.process_index for d in devices}) == hosts
  assert platforms.lowering_platforms(devices) == ("cuda",)
