"""Settings of a quantised checkpoint, read strictly: a value of another type or range is a ValueError."""

from collections.abc import Mapping
from typing import Any

from dgemma.checks import as_int, require, show


class Settings:
    """A dictionary of a config. `null` means the same as an absent key."""

    def __init__(self, values: Any, owner: str = "quantization_config") -> None:
        require(isinstance(values, Mapping), owner, "be a dictionary", values, "Download config.json again.")
        self.owner, self.values = owner, {name: value for name, value in values.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def choose(self, name: str, *allowed: Any, absent: Any = None) -> Any:
        """Return one of the allowed values. They must also agree in type: neither 4.0 nor True is an integer."""
        value = self.values.get(name, absent)
        if not any(type(value) is type(option) and value == option for option in allowed):
            raise self.refuse(name, f"be {' or '.join(map(repr, allowed))}", value)
        return value

    def size(self, name: str, *, also: int | None = None) -> int:
        """Return an integer of at least 1, or the value `also`."""
        value = as_int(self.values.get(name))
        if value is None or (value < 1 and value != also):
            raise self.refuse(name, "be a number of columns" + ("" if also is None else f", or {also} for whole rows"))
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of names, empty if it is absent."""
        found = self.values.get(name, ())
        if not isinstance(found, list | tuple) or not all(isinstance(item, str) for item in found):
            raise self.refuse(name, "be a list of names")
        return tuple(found)

    def section(self, name: str) -> "Settings":
        """Return a dictionary inside this one, empty if it is absent."""
        return Settings(self.values.get(name, {}), f"{self.owner}.{name}")

    def override(self, name: str, overrides: "Settings | None" = None) -> "Settings":
        """Return these settings with those under `name`, here or in another dictionary, in front."""
        own = (overrides or self).section(name)
        return Settings({**self.values, **own.values}, own.owner)

    def refuse(self, name: str, rule: str, value: Any = None) -> ValueError:
        """Return the error for a setting that dgemma cannot run."""
        found = show(self.values.get(name, value))
        return ValueError(f"{self.owner}.{name} must {rule}, got {found}. Load a checkpoint in another format.")
