"""Checks of arguments and fields against their annotations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
import pytest
import torch
from torch import Tensor

import dgemma
from dgemma.checks import Checked, Count, Probability, above, typed

if TYPE_CHECKING:
    from nowhere import Absent


@dataclass
class Bounded(Checked):
    rounds: Count = 1
    share: Probability | None = 0.5
    scale: Annotated[float, above(0.0)] = 1.0


@typed
def count(num: int) -> int:
    return num


@typed
def scale(factor: float | Tensor | None = None, *, ids: Sequence[int] = ()) -> object:
    return factor


@pytest.mark.parametrize(
    "three", [3, np.int64(3), np.uint8(3), torch.tensor(3)], ids=["int", "int64", "uint8", "torch"]
)
def test_an_integer_of_any_library_becomes_an_int(three):
    assert type(count(three)) is int
    assert count(three) == 3


@pytest.mark.parametrize("value", [True, 3.0, "3", None, 2**64, torch.tensor([3])], ids=repr)
def test_other_values_are_no_integers(value):
    with pytest.raises(ValueError, match=r"^count num must be int, got "):
        count(value)


def test_a_float_may_be_any_number_but_no_text_and_no_flag():
    assert scale(1) == 1
    assert scale(np.float32(0.5)) == 0.5
    assert scale(torch.ones(2)) is not None
    for value in ("1", True, 2**64, torch.ones(2).to_sparse()):
        with pytest.raises(ValueError, match=r"^scale factor must be float or Tensor or None, got "):
            scale(value)


def test_common_mistakes_get_a_fix():
    model, prompt = dgemma.DiffusionGemma(dgemma.presets.tiny()), torch.tensor([[2]])
    for text, call in {
        r"got 'Once'\. Encode it: tokenizer": lambda: dgemma.generate(model, "Once"),
        r"got TokenBatch.* Pass its \.tokens": lambda: dgemma.generate(
            model, dgemma.ByteTokenizer().encode_batch(["Once"])
        ),
        r"got the class Threshold\. Write Threshold\(\)": lambda: dgemma.generate(
            model, prompt, sampler=dgemma.Threshold
        ),
        r"got 18446744073709551616\. An integer must fit into 64 bits: from -2\*\*63": lambda: dgemma.generate(
            model, prompt, seed=2**64
        ),
        r"be StopRule or 'checkpoint' or None, got": lambda: dgemma.generate(model, prompt, stop="end"),
        r"got 'a'\. Pass one, such as dgemma\.Regex\(": lambda: dgemma.generate(model, prompt, constraint="a"),
        r"got \(3, 5\)\. Write spans as \[\(start, stop\)": lambda: dgemma.infill(model, prompt, (3, 5)),
        r"got None\. Pass out\.trajectory of generate\(\.\.\., record=True\)": lambda: dgemma.view.to_html(None),
    }.items():
        with pytest.raises(ValueError, match=text):
            call()


def test_elements_are_checked_too():
    for ids in ([1, np.int64(2)], range(2), np.arange(2), torch.arange(2)):
        scale(ids=ids)
    for ids in (["a"], [1.5], [[1]], "12", 3):
        with pytest.raises(ValueError, match=r"^scale ids must be Sequence\[int\], got "):
            scale(ids=ids)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("rounds", 0, "be >= 1"),
        ("rounds", 1.5, "be int"),
        ("share", 1.5, "be a probability"),
        ("share", math.nan, "be a probability"),
        ("scale", 0.0, "be > 0.0"),
        ("scale", math.nan, "be > 0.0"),
    ],
)
def test_a_value_that_breaks_the_rule_of_its_field_is_refused(field, value, rule):
    assert Bounded(share=None).share is None
    with pytest.raises(ValueError, match=rf"^Bounded\.{field} must {rule}, got "):
        Bounded(**{field: value})


def test_arguments_have_rules_like_fields():
    @typed
    def repeat(times: Count | None = None) -> object:
        return times

    assert (repeat(), repeat(2)) == (None, 2)
    for value, rule in ((0, "be >= 1"), ("2", "be int or None")):
        with pytest.raises(ValueError, match=f"repeat times must {rule}, got "):
            repeat(value)


def test_annotations_for_type_checkers_only_accept_everything():
    @typed
    def accept(value: "Absent", num: int = 0) -> object:
        return value

    assert accept("anything") == "anything"


@pytest.mark.slow
def test_a_compiled_function_may_call_a_checked_one():
    compiled = torch.compile(lambda x: scale(x) + 1, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2, 2]
