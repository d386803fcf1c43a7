"""Operations and traffic of compiled programs, compared with counts by hand."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
from jax import lax
import jax.numpy as jnp
import pytest

from experiments.parallel import platforms
from experiments.planning import hlo_cost, targets

M, K, N, LAYERS = 16, 32, 24, 7


def text_of(fun, *shapes, dtype=jnp.float32):
  arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
  return jax.jit(fun).lower(*arguments).compile().as_text()


def chain(x, weights):
  return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def micro_batches(weights, batches):
  return lax.map(lambda x: chain(x, weights), batches)


def test_a_product():
  text = text_of(jnp.matmul, (M, K), (K, N))
  assert hlo_cost.cost(text) == hlo_cost.Cost(flops=2 * M * K * N)


def test_a_batched_product():
  text = text_of(
      lambda a, b: jnp.einsum("bmhk,bnhk->bhmn", a, b),
      (3, M, 5, K),
      (3, N, 5, K),
  )
  assert hlo_cost.cost(text).flops == 2 * 3 * 5 * M * K * N


def test_elementwise_work_is_not_counted():
  assert hlo_cost.cost(text_of(jnp.exp, (M, K))) == hlo_cost.Cost()


def test_loops_count_as_often_as_they_run():
  shapes = (LAYERS, K, K), (5, M, K)
  jitted = jax.jit(micro_batches)
  compiled = jitted.lower(
      *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
  ).compile()
  once = 2 * M * K * K
  assert hlo_cost.cost(compiled.as_text()).flops == 5 * LAYERS * once
  # XLA's own count is too small: it counts the body of each loop once.
  assert compiled.cost_analysis()["flops"] < 2 * once + 5 * LAYERS * M * K


def test_backward():
  loss = lambda w, x: jnp.sum(chain(x, w))
  text = text_of(jax.grad(loss), (LAYERS, K, K), (M, K))
  assert hlo_cost.cost(text).flops == 3 * LAYERS * 2 * M * K * K


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("start,stop,step", [(0, 9, 1), (3, 20, 4), (2, 2, 1)])
def test_a_counter_that_the_compiler_says_or_not(forget, start, stop, step):
  def fun(x, w):
    body = lambda s: (s[0] + step, jnp.tanh(s[1] @ w))
    return lax.while_loop(lambda s: s[0] < stop, body, (start, x))[1]

  text = text_of(fun, (M, K), (K, K))
  if forget:  # As on a TPU, whose compiler does not state the count.
    text = re.sub(r'"known_trip_count":\{"n":"\d+"\}', "", text)
  iterations = len(range(start, stop, step))
  assert hlo_cost.cost(text) == hlo_cost.Cost(flops=iterations * 2 * M * K * K)


def test_a_loop_that_the_data_end_counts_once_and_is_told():
  def fun(x, w):
    return lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x @ w, x)

  cost = hlo_cost.cost(text_of(fun, (M, K), (K, K)))
  assert cost == hlo_cost.Cost(flops=2 * M * K * K, unknown_loops=1)


def test_the_most_expensive_branch():
  def fun(i, x, w):
    once, twice = lambda x: x @ w, lambda x: x @ w @ w
    return lax.switch(i, [jnp.tanh, twice, once], x)

  arguments = (
      jax.ShapeDtypeStruct((), jnp.int32),
      jax.ShapeDtypeStruct((M, K), jnp.float32),
      jax.ShapeDtypeStruct((K, K), jnp.float32),
  )
  text = jax.jit(fun).lower(*arguments).compile().as_text()
  assert hlo_cost.cost(text).flops == 2 * 2 * M * K * K


def test_padding_of_a_convolution_is_not_counted():
  def fun(x, w):
    return lax.conv_general_dilated(x, w, (1,), "SAME")

  text = text_of(fun, (1, 6, 10), (4, 6, 3))
  # Ten positions see three inputs each; the first and the last see two.
  assert hlo_cost.cost(text).flops == 2 * 4 * 6 * (3 * 10 - 2)


def test_shapes_of_elements_without_an_instruction():
  text = """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (t: ((f32[3], bf16[8,64]), /*index=1*/f32[64,32])) -> f32[8,32] {
  %t = ((f32[3]{0}, bf16[8,64]{1,0:T(8,128)(2,1)}), \
/*index=1*/f32[64,32]{1,0:T(8,128)}) parameter(0)
  %sum = f32[64,32]{1,0} all-reduce(%t#1), replica_groups={}, to_apply=%add
  ROOT %dot = f32[8,32]{1,0} dot(%t#0#1, %sum), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}
"""
  assert hlo_cost.cost(text) == hlo_cost.Cost(
      flops=2 * 8 * 64 * 32, collective_bytes={"all-reduce": 64 * 32 * 4}
  )


def test_a_reduce_scatter_as_a_tpu_writes_it():
  text = """HloModule jit_f

%all-reduce-scatter.1.clone (input: bf16[8,64]) -> bf16[2,64] {
  %input = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[8,64]{1,0} all-reduce(%input), to_apply=%add
  %zero = u32[] constant(0)
  %i = u32[] partition-id()
  ROOT %own = bf16[2,64]{1,0} dynamic-slice(%all-reduce.1, %i, %zero)
}

ENTRY %main (a: bf16[8,64]) -> bf16[2,64] {
  %a = bf16[8,64]{1,0} parameter(0)
  ROOT %f = bf16[2,64] fusion(%a), calls=%all-reduce-scatter.1.clone
}
"""
  expected = hlo_cost.Cost(collective_bytes={"reduce-scatter": 8 * 64 * 2})
  assert hlo_cost.cost(text) == expected


def test_forms_of_other_targets():
  text = """HloModule jit_f

%product (p.0: f32[8,64], p.1: f32[64,32]) -> f32[8,32] {
  %p.0 = f32[8,64]{1,0} parameter(0)
  %p.1 = f32[64,32]{1,0} parameter(1)
  ROOT %dot = f32[8,32]{1,0} dot(f32[8,64]{1,0} %p.0, f32[64,32]{1,0} %p.1), \
lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[8,64], b: f32[64,32], s: bf16[16,128]) -> f32[8,32] {
  %a = f32[8,64]{1,0:T(8,128)} parameter(0)
  %b = f32[64,32]{1,0:T(8,128)S(1)} parameter(1)
  %s = bf16[16,128]{1,0:T(8,128)(2,1)} parameter(2)
  %gather = (bf16[16,128]{1,0:T(8,128)(2,1)}, bf16[64,128]{1,0:T(8,128)(2,1)}, \
u32[], u32[]) all-gather-start(%s), dimensions={0}
  %gathered = bf16[64,128]{1,0:T(8,128)(2,1)} all-gather-done(%gather)
  %sum = bf16[16,128]{1,0:T(8,128)(2,1)} all-reduce-start(%s), to_apply=%add
  %summed = bf16[16,128]{1,0:T(8,128)(2,1)} all-reduce-done(%sum)
  %blas = (f32[8,32]{1,0}, s8[4194304]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %out = f32[8,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%product
}
"""
  assert hlo_cost.cost(text) == hlo_cost.Cost(
      flops=2 * (2 * 8 * 64 * 32),  # A cuBLAS call, and a product in a fusion.
      collective_bytes={"all-gather": 64 * 128 * 2, "all-reduce": 16 * 128 * 2},
  )


def test_eight_devices():
  cases = pathlib.Path(__file__).with_name("hlo_cost_cases.py")
  env = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
  }
  process = subprocess.run(
      [sys.executable, "-m", "pytest", "-q", "--tb=short", str(cases)],
      env=env,
      capture_output=True,
      text=True,
      check=False,
  )
  assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize(
    "target,library",
    [
        ("v5e:2x2", "libtpu"),
        ("v5p:2x2x1", "libtpu"),
        ("h100:4", "jax_cuda13_plugin"),
    ],
)
def test_the_same_count_on_every_target(target, library):
  if not importlib.util.find_spec(library):
    pytest.skip(f"{library} is not installed (an extra)")
  target = targets.parse(target)
  devices = target.devices()
  mesh = jax.sharding.Mesh(devices, ("x",))
  batch, heads, tokens, width = 4, 8, 64, 128

  def loss(weights, x):
    def layer(x, w):
      y = jnp.tanh(x @ w).reshape(*x.shape[:2], heads, -1)
      scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", y, y))
      return jnp.einsum("bhst,bthd->bshd", scores, y).reshape(x.shape), None

    return jnp.sum(lax.scan(layer, x, weights)[0].astype(jnp.float32))

  place = lambda shape, *spec: jax.ShapeDtypeStruct(
      shape,
      jnp.bfloat16,
      sharding=jax.NamedSharding(mesh, jax.P(*spec)),
  )
  d = heads * width
  arguments = (
      place((LAYERS, d, d), None, "x"),
      place((batch * mesh.size, tokens, d), "x"),
  )
  traced = jax.jit(jax.grad(loss)).trace(*arguments)
  lowered = traced.lower(
      lowering_platforms=platforms.lowering_platforms(devices)
  )
  compiled = lowered.compile(compiler_options=target.compiler_options)
  cost = hlo_cost.cost(compiled.as_text())
  n = batch * tokens
  # In the backward pass, each operand of a product gets a gradient.
  assert cost.flops == 3 * LAYERS * (2 * n * d * d + 2 * (2 * n * tokens * d))
  assert cost.unknown_loops == 0
  assert cost.collective_bytes["all-gather"] >= LAYERS * d * d * 2
