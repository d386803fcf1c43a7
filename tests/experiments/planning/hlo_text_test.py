"""The text of compiled programs, read into instructions."""

import jax
import jax.numpy as jnp
import pytest

from experiments.planning import hlo_text

TEXT = """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (t: (f32[3], bf16[8,64])) -> f32[3] {
  %t = (f32[3]{0}, bf16[8,64]{1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %r = f32[3]{0} all-reduce-start(%t#0), channel_id=1, to_apply=%add
}
"""


def test_instructions_of_a_program():
  program = hlo_text.parse(TEXT)
  assert program.entry == "main"
  assert list(program.computations) == ["add", "main"]
  main = program.computations["main"]
  assert main["t"].shapes == (
      hlo_text.Shape("f32", (3,)),
      hlo_text.Shape("bf16", (8, 64)),
  )
  reduced = main["r"]
  assert (reduced.op, reduced.operands, reduced.root) == (
      "all-reduce-start",
      ("t#0",),
      True,
  )
  assert reduced.calls("to_apply") == ["add"] and reduced.calls("calls") == []
  assert hlo_text.operand_shapes(main, reduced) == [hlo_text.Shape("f32", (3,))]


def test_a_program_that_jax_compiled():
  x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
  text = jax.jit(jnp.matmul).lower(x, x).compile().as_text()
  program = hlo_text.parse(text)
  (root,) = (i for i in program.computations[program.entry].values() if i.root)
  assert root.shapes == (hlo_text.Shape("f32", (4, 4)),)


@pytest.mark.parametrize(
    "dtype, dims, n_bytes",
    [
        ("f32", (3, 5), 60),
        ("bf16", (), 2),
        ("pred", (7,), 7),
        ("s4", (3,), 2),
        ("f8e4m3fn", (3,), 3),
        ("token", (), 0),
    ],
)
def test_bytes_of_a_shape(dtype, dims, n_bytes):
  assert hlo_text.Shape(dtype, dims).n_bytes == n_bytes


def test_an_unknown_dtype_is_refused():
  with pytest.raises(ValueError, match="unknown dtype 'float'"):
    hlo_text.bits("float")


def test_what_is_no_program_is_refused():
  with pytest.raises(ValueError, match="no ENTRY computation"):
    hlo_text.parse("HloModule nothing")
