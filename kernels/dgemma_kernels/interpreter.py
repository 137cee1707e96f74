"""Triton's interpreter, in which kernels run without a GPU (`TRITON_INTERPRET=1`), with the NumPy of today."""

from typing import Any

from triton.runtime import interpreter


def accept_new_numpy() -> None:
    """Let loop bounds be arrays of shape (1,): Triton 3.6 turns them into numbers by `int`, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_index
