"""Rules for how arrays are split, and checks of meshes and sizes."""

import dataclasses

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from experiments.models import tiny
from experiments.parallel import sharding


def abstract_mesh(**sizes):
  sizes = dict.fromkeys(sharding.AXES, 1) | sizes
  return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))


def one_device():
  sizes = dict.fromkeys(sharding.AXES, 1)
  return sharding.make_mesh(sizes, jax.devices()[:1])


def shape(*dims):
  return jax.ShapeDtypeStruct(dims, "float32")


def specs(tree, params, mesh):
  """The tree's partition specs by path."""
  placed = sharding.shardings(tree, params, mesh)
  leaves = jax.tree_util.tree_leaves_with_path(placed)
  return {sharding.path_of(path): leaf.spec for path, leaf in leaves}


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"fsdp": 3}, "fsdp=3.* = 3 devices, but there are 8.*must be"),
        ({"fsdp": 16}, "= 16 devices, but there are 8"),
        ({"data": 0}, "config.mesh.data=0 must be a positive int"),
        ({"tensor": -2}, "config.mesh.tensor=-2 must be a positive int"),
        ({"fsdp": 2.0}, "config.mesh.fsdp=2.0 must be a positive int"),
        ({"fsdp": True}, "config.mesh.fsdp=True must be a positive int"),
    ],
)
def test_a_mesh_that_cannot_be(sizes, message):
  devices = jax.devices()[:1] * 8
  with pytest.raises(ValueError, match=message):
    sharding.make_mesh({"data": 1, "fsdp": 1, "tensor": 1} | sizes, devices)


def test_a_mesh_has_all_axes_and_the_given_devices():
  mesh = one_device()
  assert tuple(mesh.shape) == sharding.AXES
  assert list(mesh.devices.reshape(-1)) == jax.devices()[:1]


@pytest.mark.parametrize("name, size", [("n_heads", 6), ("d_ff", 42)])
def test_a_model_that_the_tensor_axis_cannot_split(name, size):
  sizes = {"n_heads": 8, "d_ff": 44} | {name: size}
  model = dataclasses.replace(tiny.CONFIG, **sizes)
  message = f"tensor=4 cannot split .* {name}={size}; give a divisor"
  with pytest.raises(ValueError, match=message):
    sharding.check_model(model, abstract_mesh(tensor=4, fsdp=2))


def test_fewer_key_value_heads_than_devices_are_possible():
  sharding.check_model(tiny.CONFIG, abstract_mesh(tensor=4))


def test_a_batch_is_split_over_data_and_fsdp():
  mesh = abstract_mesh(data=2, fsdp=4, tensor=3)
  assert sharding.data_shards(mesh) == 8
  sharding.check_batch("size", 16, mesh)
  with pytest.raises(ValueError, match=r"size=12 responses .* = 8 devices; gi"):
    sharding.check_batch("size", 12, mesh)


@pytest.mark.parametrize(
    "names, dims, wanted",
    [
        (("batch", None), (16, 5), P(("data", "fsdp"), None)),
        # An axis that does not divide the size is left out.
        (("batch", None), (6, 5), P("data", None)),
        (("batch", None), (3, 5), P(None, None)),
        (("whole_in", "split_out"), (8, 8), P("fsdp", "tensor")),
        # Outputs take the mesh axis that the inputs could not.
        (("whole_in", "split_out"), (7, 8), P(None, ("tensor", "fsdp"))),
        (("split_in", "whole_out"), (16, 8), P(("tensor", "fsdp"), None)),
        (("vocab", None), (64, 8), P(("tensor", "fsdp"), None)),
        (("heads", "features"), (6, 6), P("tensor", None)),
    ],
)
def test_axes_are_split_by_their_names(names, dims, wanted):
  mesh = abstract_mesh(data=2, fsdp=4, tensor=2)
  assert sharding.spec(names, dims, mesh) == wanted


def test_axes_of_one_device_split_nothing():
  assert sharding.spec(("batch", None), (16, 5), abstract_mesh()) == P(
      None, None
  )


def test_parameters_lie_by_their_paths():
  params = {
      "embed": {"embedding": shape(64, 8)},
      "layers": {
          "q_proj": {"kernel": shape(2, 8, 16), "bias": shape(2, 16)},
          "down_proj": {"kernel": shape(2, 16, 8)},
          "norm": {"scale": shape(2, 8)},
      },
  }
  mesh = abstract_mesh(fsdp=2, tensor=2)
  assert specs(params, params, mesh) == {
      "embed/embedding": P(("tensor", "fsdp"), None),
      "layers/q_proj/kernel": P(None, "fsdp", "tensor"),
      "layers/q_proj/bias": P(None, None),
      "layers/down_proj/kernel": P(None, ("tensor", "fsdp"), None),
      "layers/norm/scale": P(None, None),
  }


def test_adapters_lie_like_their_kernel():
  kernel = {"kernel": shape(8, 16), "a": shape(8, 3), "b": shape(3, 16)}
  params = {"q_proj": {"kernel": kernel}}
  adapters = specs(params, params, abstract_mesh(fsdp=2, tensor=2))
  assert adapters == {
      "q_proj/kernel/kernel": P("fsdp", "tensor"),
      "q_proj/kernel/a": P("fsdp", None),
      # Its rank leaves fsdp free, so fsdp splits the outputs too.
      "q_proj/kernel/b": P(None, ("tensor", "fsdp")),
  }


@pytest.mark.parametrize(
    "name, dims, wanted",
    [
        ("q_proj", (2, 8, 16), P(None, "fsdp", "tensor")),  # A moment.
        ("q_proj", (2, 4, 16), P(None, "fsdp", "tensor")),  # A sketch.
        ("q_proj", (2, 16), P(None, "tensor")),  # RowAdam's scale.
        ("q_proj", (), P()),
        ("q_proj", (2, 8, 3), P(None, "fsdp", None)),  # GaLore's projection.
        ("down_proj", (2, 4, 8), P(None, ("fsdp", "tensor"), None)),
        ("down_proj", (2, 8), P(None, None)),
    ],
)
def test_state_lies_like_the_parameter_that_it_belongs_to(name, dims, wanted):
  params = {
      "layers": {
          "q_proj": {"kernel": shape(2, 8, 16)},
          "down_proj": {"kernel": shape(2, 16, 8)},
      }
  }
  state = {"mu": {"layers": {name: {"kernel": shape(*dims)}}}}
  (spec,) = specs(state, params, abstract_mesh(fsdp=2, tensor=2)).values()
  assert spec == wanted


def test_state_of_no_parameter_is_whole():
  params = {"q_proj": {"kernel": shape(8, 16)}}
  state = {"key": shape(8, 16)}
  assert specs(state, params, abstract_mesh(fsdp=2)) == {"key": P(None, None)}


def test_arrays_that_are_put_come_back():
  mesh = one_device()
  tree = {"a": np.arange(6.0).reshape(2, 3), "b": np.int32(3)}
  put = sharding.put(tree, sharding.replicated(mesh))
  assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(put))
  back = sharding.fetch(put)
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(back))
  jax.tree.map(np.testing.assert_array_equal, back, tree)


def test_arrays_are_put_by_a_tree_of_shardings():
  mesh = one_device()
  where = {"a": NamedSharding(mesh, P("fsdp")), "b": sharding.replicated(mesh)}
  tree = {"a": np.arange(4.0), "b": np.int32(3)}
  put = sharding.put(tree, where)
  assert jax.tree.map(lambda x: x.sharding, put) == where


def test_constraints_need_no_mesh():
  x = jax.numpy.ones((4, 2))
  assert sharding.constrain(x, "batch", None) is x
  grads = {"q_proj": {"kernel": x}}
  same = sharding.constrain_gradients(grads, grads)
  assert same["q_proj"]["kernel"] is x
