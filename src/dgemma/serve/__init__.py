"""A local server with an OpenAI-compatible API: `dgemma serve`, or `create_app` for your own process."""
