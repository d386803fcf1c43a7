"""Loops in the text of compiled programs, and how often they run."""

import pytest

from experiments.planning import hlo_cost, hlo_counters, hlo_text

# A loop of seven products. Each of `FORMS` is one way in which compilers write
# the initial state, the body's result and the condition.
STATE = "(s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}, s32[])"
LOOP = """HloModule jit_f

%step (c: s32[], by: s32[]) -> s32[] {
  %c = s32[] parameter(0)
  %by = s32[] parameter(1)
  ROOT %next = s32[] add(%c, %by)
}

%steps (c: s32[], x: f32[8,8], by: s32[]) -> (f32[8,8], s32[]) {
  %c = s32[] parameter(0)
  %x = f32[8,8] parameter(1)
  %by = s32[] parameter(2)
  %y = f32[8,8] tanh(%x)
  %next = s32[] add(%c, %by)
  ROOT %both = (f32[8,8], s32[]) tuple(%y, %next)
}

%less (c: s32[]) -> pred[] {
  %c = s32[] parameter(0)
  %limit = s32[] constant(7)
  ROOT %lt = pred[] compare(%c, %limit), direction=LT
}

%body (s: STATE) -> STATE {
  %s = STATE parameter(0)
  %c = s32[] get-tuple-element(%s), index=0
  %x = f32[8,8] get-tuple-element(%s), index=1
  %n = s32[] get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %y = f32[8,8] convolution(%x, %x), dim_labels=bf_io->bf
  BODY
  ROOT %out = STATE tuple(%next, %y, %n)
}

%condition (s: STATE) -> pred[] {
  %s = STATE parameter(0)
  %c = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=2
  %limit = s32[] constant(7)
  CONDITION
}

ENTRY %main (x: f32[8,8]) -> STATE {
  %x = f32[8,8] parameter(0)
  %zero = s32[] constant(0)
  %seven = s32[] constant(7)
  START
  ROOT %loop = STATE while(%start), condition=%condition, body=%body
}
"""
PLAIN = {
    "START": "%start = STATE tuple(%zero, %x, %seven)",
    "BODY": "%next = s32[] add(%c, %one)",
    "CONDITION": "ROOT %lt = pred[] compare(%c, %limit), direction=LT",
}
FORMS = {
    "plain": {},
    "an element without an instruction": {
        "BODY": "%next = s32[] add(%s#0, %one)",
        "CONDITION": "ROOT %lt = pred[] compare(%s#0, %limit), direction=LT",
    },
    "a limit in the state": {
        "CONDITION": "ROOT %lt = pred[] compare(%c, %s#2), direction=LT",
    },
    "a step in a fusion": {
        "BODY": "%next = s32[] fusion(%c, %one), kind=kLoop, calls=%step",
    },
    "a step in a fusion of several results": {
        "BODY": """%f = (f32[8,8], s32[]) fusion(%c, %x, %one), calls=%steps
  %next = s32[] copy(%f#1)"""
    },
    "a condition in a fusion": {
        "CONDITION": "ROOT %lt = pred[] fusion(%c), kind=kLoop, calls=%less",
    },
    "a step in a call": {
        "BODY": "%next = s32[] call(%c, %one), to_apply=%step",
    },
    "copies while others run": {
        "START": """%first = (s32[], s32[], u32[]{:S(2)}) copy-start(%zero)
  %copied = s32[]{:T(128)S(6)} copy-done(%first)
  %start = STATE tuple(%copied, %x, %seven)""",
        "BODY": """%copy = (s32[], s32[], u32[]) copy-start(%s#0)
  %c.1 = s32[] copy-done(%copy)
  %next = s32[] add(%c.1, %one)""",
    },
    "a step while others run": {
        "BODY": """%begun = ((s32[], s32[]), s32[], u32[]) \
async-start(%c, %one), calls=%step
  %going = ((s32[], s32[]), s32[], u32[]) async-update(%begun)
  %next = s32[] async-done(%going)""",
    },
    "an array of one": {
        "BODY": """%ones = s32[1]{0:T(128)} constant({1})
  %c.1 = s32[1] broadcast(%c), dimensions={}
  %sum = s32[1] add(%c.1, %ones)
  %next = s32[] bitcast(%sum)""",
    },
    "a state behind a barrier": {
        "START": """%behind = STATE tuple(%zero, %x, %seven)
  %start = STATE opt-barrier(%behind)""",
    },
    "a counter that goes down": {
        "START": "%start = STATE tuple(%seven, %x, %zero)",
        "BODY": "%next = s32[] subtract(%c, %one)",
        "CONDITION": "ROOT %ne = pred[] compare(%c, %n), direction=NE",
    },
    "a counter with an end": {
        "BODY": """%sum = s32[] add(%c, %one)
  %more = pred[] compare(%sum, %n), direction=LT
  %next = s32[] select(%more, %sum, %n)""",
    },
    "a counter that overflows": {
        "START": """%low = s32[] constant(2147483641)
  %start = STATE tuple(%low, %x, %seven)""",
        "CONDITION": """%nil = s32[] constant(0)
  ROOT %gt = pred[] compare(%c, %nil), direction=GT""",
    },
}


def loop_of(form):
  text = LOOP
  for key, value in (PLAIN | form).items():
    text = text.replace(f"  {key}\n", f"  {value}\n")
  return text.replace("STATE", STATE)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_counters(form):
  assert hlo_cost.cost(loop_of(FORMS[form])) == hlo_cost.Cost(
      flops=7 * 2 * 8**3
  )


@pytest.mark.parametrize(
    "form",
    [
        {"BODY": '%next = s32[] custom-call(%c), custom_call_target="f"'},
        {"BODY": "%next = s32[] add(%c, %unknown)"},
        {"BODY": "%next = s32[] copy(%c)"},  # Never ends.
    ],
)
def test_a_counter_that_cannot_be_told(form):
  text = loop_of(form).replace(
      "%one =", "%unknown = s32[] partition-id()\n  %one ="
  )
  assert hlo_cost.cost(text) == hlo_cost.Cost(flops=2 * 8**3, unknown_loops=1)


def test_a_limit_that_comes_from_around_a_loop():
  # Compilers hoist invariants: the outer state holds the inner loop's limit.
  inner = """%inner (s: STATE) -> STATE {
  %s = STATE parameter(0)
  %nil = s32[] constant(0)
  %start = STATE tuple(%nil, %s#1, %s#2)
  %loop = STATE while(%start), condition=%until, body=%body
  %one = s32[] constant(1)
  %next = s32[] add(%s#0, %one)
  ROOT %out = STATE tuple(%next, %loop#1, %s#2)
}

%until (s: STATE) -> pred[] {
  %s = STATE parameter(0)
  ROOT %lt = pred[] compare(%s#0, %s#2), direction=LT
}

"""
  text = loop_of({"START": "%start = STATE tuple(%zero, %x, %limit)"})
  text = text.replace(
      "%seven = s32[] constant(7)", "%limit = s32[] constant(5)"
  )
  before, after = text.split("ENTRY")
  after = after.replace("body=%body", "body=%inner")
  text = before + inner.replace("STATE", STATE) + "ENTRY" + after
  assert hlo_cost.cost(text) == hlo_cost.Cost(flops=7 * 5 * 2 * 8**3)


def test_the_length_of_a_loop_and_what_stays_in_its_state():
  computations = hlo_text.parse(loop_of({})).computations
  counted = hlo_counters.trip_count(
      computations, (3, None, 7), "condition", "body"
  )
  # The counter changes, the array is unknown, the limit stays.
  assert counted == (4, (None, None, 7))


def test_a_loop_from_an_unknown_start():
  computations = hlo_text.parse(loop_of({})).computations
  start = (None, None, 7)
  counted = hlo_counters.trip_count(computations, start, "condition", "body")
  assert counted == (None, None)
