"""Publishing of a model on the Hugging Face hub: its folder, and a model card."""

import tempfile
from pathlib import Path

from dgemma.checkpoint.saving import check_tensors, save_pretrained
from dgemma.files import write_text
from dgemma.model.diffusion import DiffusionGemma

_CARD = """# {name}

A [DiffusionGemma](https://huggingface.co/google/diffusiongemma-26B-A4B-it) of {weights:,} weights ({active:,} active
per token). It writes text by diffusion: canvases of {canvas} tokens are denoised in parallel, under {noise} noise.

```python
import dgemma

model = dgemma.DiffusionGemma.from_pretrained("{repo}")
tokenizer = dgemma.Tokenizer.from_pretrained("{repo}")
prompt, mask = tokenizer.encode_batch(["Once upon a time"])
out = dgemma.generate(model, prompt, attention_mask=mask)
print(tokenizer.decode(out.tokens[0]))
```

transformers opens it too, as `DiffusionGemmaForBlockDiffusion`.

| setting | value |
|---|---|
{settings}
"""


def model_card(model: DiffusionGemma, repo_id: str) -> str:
    """Return a model card: metadata, the size, how to write text, and the defaults of `generate`."""
    from huggingface_hub import ModelCardData

    downloads = [] if model.source is None else [p for p in Path(model.source).parts if p.startswith("models--")]
    data = ModelCardData(
        library_name="dgemma",
        pipeline_tag="text-generation",
        tags=["text-diffusion"],
        base_model=[name.removeprefix("models--").replace("--", "/") for name in downloads] or None,
    )
    settings = {name: value for name, value in model.generation.to_hf().items() if value is not None}
    body = _CARD.format(
        name=repo_id.rpartition("/")[2],
        repo=repo_id,
        weights=model.num_parameters(),
        active=model.num_parameters(active=True),
        canvas=model.config.canvas_length,
        noise=(model.generation.noise or {"kind": "uniform"})["kind"],
        settings="\n".join(f"| `{name}` | `{value}` |" for name, value in settings.items()),
    )
    return f"---\n{data.to_yaml()}\n---\n\n{body}"


def push_to_hub(model: DiffusionGemma, repo_id: str, *, private: bool | None, token: str | None, message: str) -> str:
    """Upload the folder of `save_pretrained`, with a model card if the repository has none; return the address."""
    from huggingface_hub import HfApi

    check_tensors(model)  # now, because an error after the next request would leave an empty repository
    api = HfApi(token=token)
    address = api.create_repo(repo_id, private=private, exist_ok=True)
    repo_id = address.repo_id  # with its owner, whom `repo_id` may omit
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder)
        if not api.file_exists(repo_id, "README.md"):
            write_text(Path(folder, "README.md"), model_card(model, repo_id))
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)
    return str(address)
