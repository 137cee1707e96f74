"""Checks of fields against their annotations."""

from dataclasses import dataclass
from typing import Literal

import pytest

from dgemma.checks import check_choice


@dataclass
class Order:
    direction: Literal["up", "down"] = "up"
    speed: str = "fast"


@dataclass
class AnyOrder(Order):
    direction: str = "up"


def test_a_subclass_has_the_choices_of_its_base_class():
    check_choice(AnyOrder("down"), "direction")
    with pytest.raises(ValueError, match=r"AnyOrder.direction must be 'up' or 'down', got 'left'"):
        check_choice(AnyOrder("left"), "direction")


@pytest.mark.parametrize("field", ["speed", "colour"], ids=["another-annotation", "no-annotation"])
def test_a_field_without_listed_choices_is_named(field):
    with pytest.raises(TypeError, match=rf"Order.{field} must have a Literal annotation"):
        check_choice(Order(), field)
