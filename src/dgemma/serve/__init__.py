"""A local server with an OpenAI-compatible API: `dgemma serve`, or `create_app` for your own process."""

from dgemma.printing import install_command

try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(f"dgemma.serve needs {error.name}. Install it with: {install_command('serve')}") from None
