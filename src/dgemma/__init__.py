"""dgemma: text diffusion, readable and fast. Start with `run/generate.py`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dgemma._public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import the public names on first use, so that the `dgemma` command checks its options before torch loads."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'dgemma' has no attribute {name!r}")
        public = importlib.import_module("dgemma._public")
        if name == "__all__":
            return list(public.LISTED)
        # Importing `_public` also adds packages such as `dgemma.sampling` to `globals()`.
        return globals()[name] if name in globals() else getattr(public, name)

    def __dir__() -> list[str]:
        return __getattr__("__all__")
