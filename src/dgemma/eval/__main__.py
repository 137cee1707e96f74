"""`python -m dgemma.eval`: the command of lm-evaluation-harness, with the model `dgemma` and the tasks in `tasks`."""

import sys
from pathlib import Path


def main() -> None:
    """Register the model, add the tasks, and run the harness's own command with the remaining arguments.

    Example: `python -m dgemma.eval --model_args pretrained=dgemma/text --tasks dgemma_cloze`.
    """
    try:
        import dgemma.eval.harness  # noqa: F401  registers the model
    except ImportError as error:
        sys.exit(str(error))
    from lm_eval.__main__ import cli_evaluate

    options = {argument.split("=")[0] for argument in sys.argv}
    if options & {"--tasks", "-t"}:
        if "--include_path" not in options:
            sys.argv += ["--include_path", str(Path(__file__).parent / "tasks")]
        if "validate" not in options and not options & {"--model", "-M", "--config", "-C"}:
            sys.argv += ["--model", "dgemma"]  # the harness's own default needs other packages
    cli_evaluate()


if __name__ == "__main__":
    main()
