"""The products that `accelerate(precision=...)` computes in float8."""

from collections.abc import Collection

PARTS = ("attention", "dense", "head", "soft_embedding", "prompt_attention", "experts")
_PRODUCTS = PARTS[:4]
_BY_BATCH = {"prompt_attention", "experts"}  # they run or do not run depending on the number of tokens

# The parts of precision="fast", by format of the experts.
FAST = {
    "bf16": ("prompt_attention",),  # these weights are the model's own and stay as they are
    "packed": (*_PRODUCTS, "prompt_attention"),
    "fp8": (*_PRODUCTS, "prompt_attention"),
    "int4": (*_PRODUCTS, "experts"),
    "nvfp4": _PRODUCTS,
}


def choose_parts(precision: str | Collection[str], weights: str, *, batch_invariant: bool = False) -> tuple[str, ...]:
    """Return the parts in float8: none for "exact", the row of `FAST` for "fast", or the parts that are named.

    Example: `choose_parts("fast", "bf16")` is `("prompt_attention",)`.
    """
    if precision == "exact":
        return ()
    if precision == "fast":
        return tuple(part for part in FAST[weights] if not (batch_invariant and part in _BY_BATCH))
    if isinstance(precision, str) or not set(precision) <= set(PARTS):
        names = ", ".join(PARTS)
        raise ValueError(f'accelerate precision must be "exact", "fast" or names of {names}, got {precision!r}.')
    if weights == "bf16" and (changed := set(precision) & set(_PRODUCTS)):
        raise refuse(min(changed), 'weights other than "bf16", which are the model\'s own')
    if batch_invariant and (varying := set(precision) & _BY_BATCH):
        raise refuse(min(varying), "batch_invariant=False, because it depends on the batch size")
    return tuple(precision)


def refuse(part: str, needs: str) -> ValueError:
    """Return the error for a part that cannot run."""
    return ValueError(f'accelerate precision "{part}" needs {needs}. Use "exact", or name parts without "{part}".')
