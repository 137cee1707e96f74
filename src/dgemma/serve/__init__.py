"""A local server with the interface of OpenAI's: `dgemma serve`, or `create_app` for your own process."""
