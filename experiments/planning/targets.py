"""Accelerators to compile for, which need not be attached.

XLA compiles for a described topology on any machine: for TPUs with `libtpu`
(the extra `tpu`), for H100 with JAX's CUDA plugin (the extra `cuda`). Nothing
can run on described devices, but the compiled programs tell what they need.

The libraries need workarounds, which are all in this module:

- `libtpu` asks the cloud's metadata server which machine it runs on, which
  hangs or fails elsewhere, and it locks out a second process. `Target.devices`
  sets environment variables against both, unless the user has set them.
- XLA times GPU kernels to choose among them, which needs the GPU: pass
  `Target.compiler_options` when compiling.
- JAX resolves the platform "gpu" by the GPUs at hand: pass
  `platforms.lowering_platforms` when lowering.
"""

import dataclasses
import importlib
import importlib.resources
import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from experiments import _optional
from experiments.reporting import units


@dataclasses.dataclass(frozen=True)
class _Tpu:
  """One TPU generation.

  Attributes:
    axes: Number of axes of its slices.
    gib: Memory of a device that a program can use, in GiB: the HBM of
      cloud.google.com/tpu/docs less what the runtime reserves, as the compiler
      states it ("exceeds available HBM (15.75G)").
    slices: Slices that can be rented, smallest first.
    options: Options of the topology.
  """

  axes: int
  gib: float
  slices: tuple[str, ...]
  options: dict[str, str] = dataclasses.field(default_factory=dict)


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_TPUS = {
    # JAX uses the two cores of a v4 chip as one device.
    "v4": _Tpu(3, 30.75, _CUBE, {"chip_config_name": "megacore"}),
    "v5e": _Tpu(2, 15.75, _FLAT),
    "v5p": _Tpu(3, 95.73, _CUBE),
    "v6e": _Tpu(2, 31.24, _FLAT),
}
_GPU_SLICES = ("1", "2", "4", "8", "16", "32", "64", "128")
_CPU_SLICES = ("1", "2", "4", "8")
_GPUS_PER_HOST = 8

FAMILIES: dict[str, tuple[str, ...]] = {
    "h100": _GPU_SLICES,
    **{name: tpu.slices for name, tpu in _TPUS.items()},
    "cpu": _CPU_SLICES,
}


@dataclasses.dataclass(frozen=True)
class Target:
  """Devices of one kind.

  Attributes:
    family: A key of `FAMILIES`.
    shape: Number of devices along each axis of the slice; h100 and cpu have one
      axis.
  """

  family: str
  shape: tuple[int, ...]

  @property
  def name(self) -> str:
    """The name that `parse` takes, such as `v5p:2x2x1`."""
    return f"{self.family}:{'x'.join(map(str, self.shape))}"

  @property
  def memory_bytes(self) -> int:
    """Memory of one device; for cpu, an equal share of the machine's."""
    if self.family == "h100":
      match = re.search(r"device_memory_size: (\d+)", _h100_description())
      assert match is not None
      return int(match[1])
    if self.family in _TPUS:
      return int(_TPUS[self.family].gib * units.GIB)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // self.shape[0]

  @property
  def compiler_options(self) -> dict[str, Any]:
    """Options for `jax.stages.Lowered.compile`."""
    # Without a GPU no kernel can be timed: take XLA's first choice.
    return {"xla_gpu_autotune_level": 0} if self.family == "h100" else {}

  def devices(self) -> list[jax.Device]:
    """Returns the devices, to make a mesh; only cpu devices run programs.

    Raises:
      ValueError: If there is no such topology, or this process started with
        fewer simulated cpu devices.
      ImportError: If the target's library is missing; names the extra.
    """
    if self.family == "cpu":
      return _cpu_devices(self)
    describe = _h100_topology if self.family == "h100" else _tpu_topology
    try:
      return list(describe(self).devices)
    except jax.errors.JaxRuntimeError as error:
      reason = str(error).splitlines()[0]
      raise ValueError(
          f"target={self.name!r} is not a topology that the compiler knows"
          f" ({reason}); {_examples(self.family)}"
      ) from error


def parse(name: str) -> Target:
  """Reads a target such as `h100:4`, `v5p:2x2x1` or `cpu:8`.

  Args:
    name: The family, and the number of devices or the shape of the slice.

  Raises:
    ValueError: If the family is unknown or cannot have this shape.
  """
  family, _, rest = name.lower().partition(":")
  if family not in FAMILIES:
    known = ", ".join(f"{f}:{shapes[2]}" for f, shapes in FAMILIES.items())
    raise ValueError(f"target={name!r} is unknown; use one like {known}")
  axes = _TPUS[family].axes if family in _TPUS else 1
  if not re.fullmatch(r"x".join([r"[1-9]\d{0,4}"] * axes), rest):
    wanted = f"a slice of {axes} axes" if axes > 1 else "a number of devices"
    raise ValueError(
        f"target={name!r} must name {wanted} after ':'; {_examples(family)}"
    )
  target = Target(family, tuple(map(int, rest.split("x"))))
  n = target.shape[0]
  if family == "h100" and n > _GPUS_PER_HOST and n % _GPUS_PER_HOST:
    raise ValueError(
        f"target={name!r} must have at most {_GPUS_PER_HOST} devices, or whole"
        f" hosts of {_GPUS_PER_HOST}; {_examples(family)}"
    )
  return target


def slices(family: str) -> list[Target]:
  """The usual slices of a family, smallest first."""
  return [parse(f"{family}:{shape}") for shape in FAMILIES[family]]


def _examples(family: str) -> str:
  """The usual targets of a family, for an error message."""
  return (
      f"usual ones are {', '.join(f'{family}:{s}' for s in FAMILIES[family])}"
  )


def _h100_description() -> str:
  """XLA's `GpuTargetConfigProto` of an H100 SXM 80GB, as text."""
  folder = importlib.resources.files("experiments.planning")
  return (folder / "h100_sxm.txtpb").read_text("utf-8")


def _h100_topology(target: Target) -> topologies.TopologyDescription:
  """Describes GPUs, up to eight per host."""
  versions = [
      version
      for version in (13, 12)
      if importlib.util.find_spec(f"jax_cuda{version}_plugin")
  ]
  if not versions:
    _optional.require("jax_cuda13_plugin", "cuda")
  # Skip the plugin's driver check: compiling needs no GPU.
  os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
  n = target.shape[0]
  hosts = -(-n // _GPUS_PER_HOST)

  def describe() -> topologies.TopologyDescription:
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=_h100_description(),
        topology=f"1x{hosts}x{n // hosts}",  # In one network partition.
    )

  try:
    return describe()
  except NotImplementedError:
    # JAX started without this plugin because it found no driver.
    plugin = importlib.import_module(f"jax_plugins.xla_cuda{versions[0]}")
    plugin.initialize()
    return describe()


def _tpu_topology(target: Target) -> topologies.TopologyDescription:
  """Describes TPUs, after telling `libtpu` that none are attached."""
  _optional.require("libtpu", "tpu")
  quiet = {
      # Let several processes compile at the same time.
      "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
      # Do not ask the metadata server, whose answers these are.
      "TPU_SKIP_MDS_QUERY": "1",
      "TPU_ACCELERATOR_TYPE": "v5p-8",
      "TPU_WORKER_HOSTNAMES": "localhost",
      "TPU_WORKER_ID": "0",
      # Write no log files.
      "TPU_LOG_DIR": "disabled",
  }
  for name, value in quiet.items():
    os.environ.setdefault(name, value)
  shape = target.name.partition(":")[2]
  return topologies.get_topology_desc(
      platform="tpu",
      topology_name=f"{target.family}:{shape}",
      **_TPUS[target.family].options,
  )


def _cpu_devices(target: Target) -> list[jax.Device]:
  """Simulated devices of this process, made now if JAX has not started."""
  n = target.shape[0]
  flag = "--xla_force_host_platform_device_count"
  if flag not in os.environ.get("XLA_FLAGS", ""):
    try:
      jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError:
      pass  # JAX has started: use the devices that it has.
  devices = jax.devices("cpu")
  if len(devices) < n:
    raise ValueError(
        f"target={target.name!r} needs {n} simulated devices and this process"
        f" has started with {len(devices)}: start it with XLA_FLAGS={flag}={n}"
    )
  return devices[:n]
